// The cases of causal_conv1d, its definition and mistakes: packed prompts.
#include <fmt/format.h>

#include "kernels/judge/operations/convolution.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_causal_conv1d {
namespace {

using namespace convolution;

constexpr std::string_view kName = "causal_conv1d";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name{};
  std::int64_t D = 128, W = 4, C = 3;
  std::vector<std::int64_t> lengths{};
  std::vector<std::int64_t> padding_rows{};
  std::vector<std::int64_t> fresh_rows{};  ///< rows whose has_initial_state is false
  std::int64_t behind = 0;
  bool bias = true, silu = true;
  Layout layout = Layout::channels_first;
  bool in_order = false;
  bool timed = false;
};

constexpr std::int64_t kServedTokens = 128, kServedChannels = 8192;  ///< sizes of a timed row

Case make(const CaseSpec& w, const CaseOptions& options) {
  Batch batch{.lengths = w.lengths,
              .behind = w.behind,
              .padding_rows = w.padding_rows,
              .packed = true,
              .in_order = w.in_order,
              .seed = options.seed};
  if (w.timed) batch.lengths.assign(static_cast<std::size_t>(options.batch), kServedTokens);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 193 + T * 3 + w.D)));
  Case c{.name = w.name, .timed = w.timed};
  add_inputs(c, draw, w, T, slots, options);
  std::rotate(c.tensors.begin() + 1, c.tensors.begin() + 2, c.tensors.end());  // state goes last
  batch.describe(c);
  if (!w.fresh_rows.empty()) add_fresh_rows(c, batch.rows(), w.fresh_rows);
  if (w.silu) c.scalars.push_back({"activation", std::string("silu")});
  c.tensors.push_back(Draw::output("out", options.activations, {T, w.D}, {"token", "channel"}));
  poison_padding(c.tensors[0], c);
  for (Tensor& one : c.tensors)
    if (one.role == Role::state) poison_unread(one, c);
  c.bytes = 2 * c.tensor("conv_state").bytes() / std::max<std::int64_t>(slots, 1) * batch.rows();
  for (const std::string_view name : {"x", "weight", "out"}) c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, {}, D={} W={} state {} wide", counted(batch.rows(), "row"),
                        counted(T, "token"), w.D, w.W, w.C);
  return c;
}

std::vector<CaseSpec> whole_rows() {
  return {
      {.name = "one-row", .lengths = {130}},
      {.name = "one-token", .lengths = {1}},
      {.name = "short-rows", .lengths = {1, 2, 3, 4}},
      {.name = "width-2", .D = 63, .W = 2, .C = 1, .lengths = {9, 70}},
      {.name = "width-3", .D = 64, .W = 3, .C = 2, .lengths = {100, 5, 1}},
      {.name = "wide-state", .C = 4, .lengths = {5, 1, 66, 3}},
      {.name = "bare", .D = 65, .lengths = {40, 3}, .bias = false, .silu = false},
      {.name = "one-channel", .D = 1, .lengths = {7, 20}},
  };
}

/// Cases of every layout of the state, with row lengths around a tile, padding rows and fresh rows.
std::vector<CaseSpec> every_layout() {
  std::vector<CaseSpec> all;
  for (const auto& [suffix, layout] :
       std::vector<std::pair<std::string, Layout>>{{"", Layout::channels_first},
                                                   {"-channels-last", Layout::columns_first},
                                                   {"-strided", Layout::strided}}) {
    all.push_back({.name = "ragged-rows" + suffix,
                   .lengths = {65, 0, 1, 63, 1, 129, 2},
                   .padding_rows = {3, 6},
                   .behind = 3,
                   .layout = layout});
    all.push_back({.name = "fresh-rows" + suffix,
                   .lengths = {70, 5, 64, 1, 1, 0},
                   .fresh_rows = {0, 2, 4, 5},
                   .layout = layout});
  }
  return all;
}

std::vector<CaseSpec> wide_rows() {
  return {{.name = "rows-65537", .D = 8, .lengths = std::vector<std::int64_t>(kWideRows, 1)}};
}

std::vector<CaseSpec> served() {
  const CaseSpec listed{
      .name = "serving", .D = kServedChannels, .layout = Layout::columns_first, .timed = true};
  CaseSpec in_order = listed;
  in_order.name += "-in-order";
  in_order.in_order = true;
  return {listed, in_order};
}

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes = with_shared({
    {"fresh-rows-resume", "with has_initial_state left out: fresh rows resume what lies there"},
    {"swapped-rows", "with the slots of neighbouring rows swapped"},
    {"row-before", "with a row's first tokens seeing the end of the row before it"},
    {"short-rows-from-zero", "with the state of a row shorter than it without the old columns"},
    {"first-tokens", "with a row's first tokens left in the state instead of its last"},
    {"tiles-alone", "with every tile of 64 tokens started from the row's old state"},
});

template <class S>
struct PromptHost : Host<S> {
  PromptHost(const Case& c, std::string_view mistake)
      : Host<S>(c), resumes(maybe_array_of<bool, 1>(c, "has_initial_state")) {
    if (mistake == "fresh-rows-resume") resumes.reset();
    if (auto& slots = this->rows.indices; mistake == "swapped-rows" && slots)
      for (std::int64_t i = 0; i + 1 < slots->extent(0); i += 2)
        std::swap((*slots)(i), (*slots)(i + 1));
  }
  reference::CausalConv1dInputs<S> inputs(const Case& c, bool rounded) const {
    reference::CausalConv1dInputs<S> in = Host<S>::inputs(c, rounded);
    if (resumes) in.has_initial_state = std::as_const(*resumes).view();
    return in;
  }
  std::optional<Array<bool, 1>> resumes;
};

bool is_row_mistake(std::string_view mistake) {
  for (const std::string_view one :
       {"row-before", "short-rows-from-zero", "first-tokens", "tiles-alone"})
    if (mistake == one) return true;
  return false;
}

/// The definition row by row, with a mistake in the handling of rows.
template <class S>
void run_wrong(const reference::CausalConv1dInputs<S>& in, std::string_view mistake,
               const TensorView<S, 3>& state, const TensorView<S, 2>& out) {
  using namespace reference::conv_detail;
  constexpr std::int64_t kTile = 64;
  const std::int64_t T = in.x.extent(0), D = in.x.extent(1), W = in.weight.extent(1);
  const std::int64_t C = state.extent(2);
  for (std::int64_t row = 0; row < row_count(in.query_start_loc, T); ++row) {
    const RowRange range = row_range(in.query_start_loc, row, T);
    const std::int64_t slot = source_slot(in.slots, row, state.extent(0));
    if (slot == kNoSlot) continue;
    Columns<S> old = Columns<S>::Zero(D, C);
    if (!in.has_initial_state || (*in.has_initial_state)(row)) old = mapped(at(state, slot));
    Columns<S> history = old.rightCols(W - 1);
    if (mistake == "row-before" && range.begin >= W - 1)
      history = mapped(cut(in.x, range.begin - (W - 1), range.begin)).transpose();
    const std::int64_t tile = mistake == "tiles-alone" ? kTile : range.size();
    for (std::int64_t begin = range.begin; begin < range.end; begin += tile) {
      const RowRange part{begin, std::min(begin + tile, range.end)};
      write_row(in, with_tokens<S>(history, cut(in.x, part.begin, part.end)), part, out);
    }
    const Columns<S> all = with_tokens<S>(old, cut(in.x, range.begin, range.end));
    Columns<S> last = all.rightCols(C);
    const std::int64_t kept = std::max<std::int64_t>(C - range.size(), 0);
    if (mistake == "short-rows-from-zero" && range.size() > 0) last.leftCols(kept).setZero();
    if (mistake == "first-tokens" && kept == 0) last = all.middleCols(C, C);
    mapped(at(state, slot)) = rounded_each(last, in.storage.state);
  }
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded) {
  PromptHost<S> host(c, mistake);
  change(host, mistake);
  const Array<S, 3> before = host.state;
  Array<S, 2> out(host.x.shape(), S{0}), plain(host.x.shape(), S{0});
  if (needs_linear_outputs(mistake)) {
    PromptHost<S> linear = host;
    linear.silu = false;
    reference::causal_conv1d<S>(linear.inputs(c, false), linear.state.view(), plain.view());
  }
  if (is_row_mistake(mistake))
    run_wrong<S>(host.inputs(c, false), mistake, host.state.view(), out.view());
  else
    reference::causal_conv1d<S>(host.inputs(c, rounded), host.state.view(), out.view());
  spoil(c, host, before, plain, mistake, out);
  return {{"out", as_values(out)}, {"conv_state", as_values(host.state)}};
}

const JudgedKernel kOperation{
    .name = kName,
    .summary = "prefill of the short convolution: 16 cases, 18 known mistakes",
    .positional = {"x", "weight", "bias", "conv_state"},
    .default_types = "bfloat16/bfloat16",
    .plans =
        [] {
          return with_large(planned<CaseSpec>({whole_rows(), every_layout(), served()}, make),
                            planned<CaseSpec>({wide_rows()}, make), "ragged-rows");
        },
    .row_elements = kServedChannels * (2 * kServedTokens + 3),
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_causal_conv1d
