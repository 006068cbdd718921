// The cases of causal_conv1d_update, its definition, and the mistakes that people make with it.
#include <fmt/format.h>

#include "kernels/judge/operations/convolution.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_causal_conv1d_update {
namespace {

using namespace convolution;

constexpr std::string_view kName = "causal_conv1d_update";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  std::int64_t D, W, C;
  Batch batch{};
  bool bias = true, silu = true;
  Layout layout = Layout::channels_first;
  bool snapshots = false;
  bool timed = false;
};

/// Writes NaN to the columns of a slot that are not its row's history: columns after it belong to
/// rejected drafts, and columns before it have left the window.
void poison_columns(Tensor& state, const Case& of, std::int64_t history) {
  const std::int64_t D = state.extents[1], C = state.extents[2];
  const bool speculative = of.find("num_accepted_tokens") != nullptr;
  for (std::size_t slot = 0; slot < of.slots.size(); ++slot) {
    const std::int64_t first = speculative ? of.slots[slot].token.accepted - 1 : C - history;
    for (std::int64_t i = 0; i < D * C; ++i)
      if (const std::int64_t column = i % C; column < first || column >= first + history)
        state.values[slot * static_cast<std::size_t>(D * C) + static_cast<std::size_t>(i)] =
            std::numeric_limits<double>::quiet_NaN();
  }
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  Batch batch = rows_of(w, options);
  batch.one_slot_per_row = true;
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 191 + T * 3 + w.D)));
  Case c{.name = w.name, .timed = w.timed};
  add_inputs(c, draw, w, T, slots, options);
  batch.describe(c);
  if (w.silu) c.scalars.push_back({"activation", std::string("silu")});
  if (w.snapshots)
    c.tensors.push_back(
        Draw::states("snapshots", options.states, {T, w.D, w.C}, {"token", "channel", "column"}));
  c.tensors.push_back(Draw::output("out", options.activations, {T, w.D}, {"token", "channel"}));
  poison_padding(c.tensors[0], c);
  poison_unread(c.tensors[1], c);
  poison_columns(c.tensors[1], c, w.W - 1);
  c.bytes = 2 * c.tensors[1].bytes() / std::max<std::int64_t>(slots, 1) * batch.rows();
  for (const std::string_view name : {"x", "weight", "out"}) c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, {}, D={} W={} state {} wide", counted(batch.rows(), "row"),
                        counted(T, "token"), w.D, w.W, w.C);
  return c;
}

/// Cases of every kind of row in every layout of the state. A speculative state has W - 1 + longest
/// row
/// - 1 columns.
std::vector<CaseSpec> every_layout() {
  const std::vector<std::pair<std::string, Layout>> layouts{
      {"", Layout::channels_first},
      {"-channels-last", Layout::columns_first},
      {"-strided", Layout::strided}};
  std::vector<CaseSpec> all;
  for (const auto& [suffix, layout] : layouts)
    for (const RowKind& kind : row_kinds("verify-accepted"))
      all.push_back({.name = kind.name + suffix,
                     .D = kind.name == "decode" ? 256 : 128,
                     .W = 4,
                     .C = kind.batch.columns > 0 ? 3 + kind.batch.columns - 1 : 3,
                     .batch = kind.batch,
                     .layout = layout,
                     .snapshots = kind.snapshots});
  return all;
}

std::vector<CaseSpec> other_decodes() {
  const std::vector<std::int64_t> nine(9, 1), four(4, 1);
  return {
      {.name = "decode-wide-state",
       .D = 256,
       .W = 4,
       .C = 4,
       .batch = {.lengths = nine, .padding_rows = {0}}},
      {.name = "decode-bare",
       .D = 65,
       .W = 4,
       .C = 3,
       .batch = {.lengths = four},
       .bias = false,
       .silu = false},
      {.name = "decode-width-2", .D = 63, .W = 2, .C = 1, .batch = {.lengths = four}},
      {.name = "decode-width-3", .D = 64, .W = 3, .C = 2, .batch = {.lengths = four}},
      {.name = "decode-ones", .D = 1, .W = 4, .C = 3, .batch = {.lengths = {1}}},
      {.name = "decode-many-rows", .D = 16, .W = 4, .C = 3, .batch = one_token_rows(130)},
      {.name = "decode-high-slots",
       .D = 8,
       .W = 4,
       .C = 3,
       .batch = {.lengths = {1, 1, 1}, .padding_rows = {1}, .first_slot = 33000}},
      {.name = "decode-pad-slot-0",
       .D = 128,
       .W = 4,
       .C = 3,
       .batch = {.lengths = nine, .padding_rows = {1, 8}, .pad_slot_id = 0}},
  };
}

std::vector<CaseSpec> wide_rows() {
  return {{.name = "rows-65537", .D = 8, .W = 4, .C = 3, .batch = one_token_rows(kWideRows)}};
}

const CaseSpec kServed{
    .name = "serving", .D = 8192, .W = 4, .C = 3, .layout = Layout::columns_first, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes = with_shared({
    {"accepted-off-by-one", "with the history one column further (acc for acc - 1)"},
    {"accepted-ignored", "with the history at column 0, without num_accepted_tokens"},
    {"no-running-state", "with every token of a row started from the row's old state"},
});

template <class S>
struct UpdateHost : Host<S> {
  explicit UpdateHost(const Case& c)
      : Host<S>(c), snapshots(maybe_array_of<S, 3>(c, "snapshots")) {}
  void run(const reference::CausalConv1dInputs<S>& in, Array<S, 2>& out) {
    reference::causal_conv1d_update<S>(in, this->state.view(), out.view(), this->rows.parents(),
                                       maybe_view(snapshots));
  }
  std::optional<Array<S, 3>> snapshots;
};

template <class S>
void change_accepted(UpdateHost<S>& host, std::string_view mistake) {
  if (!host.rows.accepted) return;
  // The largest accepted count: the history begins at column count - 1, and needs W - 1 of C
  // columns.
  const auto last = static_cast<std::int32_t>(host.state.extent(2) - host.weight.extent(1) + 2);
  for (std::int32_t& n : *host.rows.accepted) {
    if (mistake == "accepted-off-by-one") n = std::min(std::max(n, 1) + 1, last);
    if (mistake == "accepted-ignored") n = 1;
  }
}

/// The mistake "no-running-state": each token starts from the row's old state.
template <class S>
void without_running_state(const Case& c, UpdateHost<S>& host, const Array<S, 3>& before,
                           Array<S, 2>& out) {
  require(!host.rows.accepted && !host.snapshots, "a mistake of plain rows");
  const std::int64_t T = host.x.extent(0);
  const std::int32_t first = 0;
  Array<S, 3> one({1, before.extent(1), before.extent(2)}, S{0});
  for (std::int64_t t = 0; t < T; ++t) {
    const CaseToken& token = c.tokens[static_cast<std::size_t>(t)];
    if (token.padding) continue;
    auto in = host.inputs(c, false);
    const std::int64_t slot = source_slot(in.slots, token.row, before.extent(0));
    mapped(at(one.view(), 0)) = mapped(at(before.view(), slot));
    in.x = cut(in.x, t, t + 1);
    in.query_start_loc.reset();
    in.slots = {.indices = make_view(&first, Shape<1>{1})};
    reference::causal_conv1d_update<S>(in, one.view(), cut(out.view(), t, t + 1));
    mapped(at(host.state.view(), slot)) = mapped(at(one.view(), 0));
  }
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded) {
  UpdateHost<S> host(c);
  change(host, mistake);
  change_accepted(host, mistake);
  const Array<S, 3> before = host.state;
  Array<S, 2> out(host.x.shape(), S{0}), plain(host.x.shape(), S{0});
  if (needs_linear_outputs(mistake)) {
    UpdateHost<S> linear = host;
    linear.silu = false;
    linear.run(linear.inputs(c, false), plain);
  }
  if (mistake == "no-running-state")
    without_running_state(c, host, before, out);
  else
    host.run(host.inputs(c, rounded), out);
  spoil(c, host, before, plain, mistake, out);
  Answer answer{{"out", as_values(out)}, {"conv_state", as_values(host.state)}};
  if (host.snapshots) answer["snapshots"] = as_values(*host.snapshots);
  return answer;
}

const JudgedKernel kOperation{
    .name = kName,
    .summary = "decode and verification of the short convolution: 31 cases, 15 known mistakes",
    .positional = {"x", "conv_state", "weight", "bias"},
    .default_types = "bfloat16/bfloat16",
    .plans =
        [] {
          return with_large(
              planned<CaseSpec>({every_layout(), other_decodes(), listed_and_in_order(kServed)},
                                make),
              planned<CaseSpec>({wide_rows()}, make), "decode");
        },
    .row_elements = kServed.D * kServed.C,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_causal_conv1d_update
