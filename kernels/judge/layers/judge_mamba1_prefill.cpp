// The cases of mamba1_prefill, its definition and mistakes. It is not timed: exponentials bound its
// time, and the judge does not measure their rate.
#include <fmt/format.h>

#include "kernels/judge/layers/mamba1_host.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/recurrent/mamba1_prefill.hpp"

namespace lockstep::judging::of_mamba1_prefill {
namespace {

constexpr std::string_view kName = "mamba1_prefill";
constexpr std::int64_t kColumns = 16;  ///< N of every Mamba1 model, and of kernels

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  std::int64_t D = 0;  ///< channels
  Batch batch{};
  std::vector<std::int64_t> fresh_rows{};  ///< rows whose has_initial_state is false
  bool skip = true, z = true, dt_bias = true, softplus = true;
  bool timed = false;  ///< never set: shared code reads it
};

Case make(const CaseSpec& w, const CaseOptions& options) {
  Batch batch = w.batch;
  batch.seed = options.seed;
  batch.packed = true;
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  const ElementType type = options.activations;
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 67 + T * 5 + w.D)));
  Case c{.name = w.name};
  for (const char* const name : {"x", "dt"})
    c.tensors.push_back(draw(name, type, {T, w.D}, {"token", "channel"}));
  // Small time steps, about an eighth, as in trained models: over 64 tokens a state does not decay
  // to 0.
  for (double& d : c.tensors[1].values) d = w.softplus ? d - 2 : std::abs(d) / 8;
  c.tensors.push_back(draw("A", ElementType::float32, {w.D, kColumns}));
  for (double& a : c.tensors.back().values) a = -1.0 / 64 - std::abs(a) / 4;
  for (const char* const name : {"B", "C"})
    c.tensors.push_back(draw(name, type, {T, kColumns}, {"token", "column"}));
  c.tensors.push_back(
      draw("state", options.states, {slots, w.D, kColumns}, {"slot", "channel", "column"}));
  c.tensors.back().role = Role::state;
  if (w.z) c.tensors.push_back(draw("z", type, {T, w.D}, {"token", "channel"}));
  batch.describe(c);
  for (const std::string_view name : {"x", "dt", "B", "C", "z"})
    for (Tensor& tensor : c.tensors)
      if (tensor.name == name) poison_padding(tensor, c);
  if (!w.fresh_rows.empty()) add_fresh_rows(c, batch.rows(), w.fresh_rows);
  poison_unread(c.tensors[5], c);
  if (w.skip) c.tensors.push_back(draw("D", ElementType::float32, {w.D}));
  if (w.dt_bias) c.tensors.push_back(draw("dt_bias", ElementType::float32, {w.D}));
  if (w.softplus) c.scalars.push_back({"dt_softplus", true});
  c.tensors.push_back(Draw::output("out", type, {T, w.D}, {"token", "channel"}));
  c.about = fmt::format("{}, {}, D={} N={}", counted(batch.rows(), "row"), counted(T, "token"), w.D,
                        kColumns);
  return c;
}

std::vector<CaseSpec> prompts() {
  return {
      {.name = "one-row", .D = 64, .batch = {.lengths = {130}}},
      {.name = "one-chunk", .D = 32, .batch = {.lengths = {64}}},
      {.name = "one-token", .D = 65, .batch = {.lengths = {1}}},
      {.name = "short-rows", .D = 64, .batch = {.lengths = {1, 2, 3}}, .skip = false},
      {.name = "bare",
       .D = 63,
       .batch = {.lengths = {100, 30}},
       .skip = false,
       .z = false,
       .dt_bias = false,
       .softplus = false},
      {.name = "ragged-rows",
       .D = 64,
       .batch = {.lengths = {65, 0, 1, 63, 1, 129, 1}, .behind = 3, .padding_rows = {3, 6}}},
      {.name = "fresh-rows",
       .D = 40,
       .batch = {.lengths = {70, 5, 64, 1, 1}},
       .fresh_rows = {0, 2, 4}},
      {.name = "pad-slot-0",
       .D = 32,
       .batch = {.lengths = {33, 7, 40}, .padding_rows = {1}, .pad_slot_id = 0}},
      {.name = "high-slots", .D = 4, .batch = {.lengths = {5, 9}, .first_slot = 33000}},
  };
}

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-softplus", "without the softplus of dt"},
    {"always-softplus", "with a softplus of dt that was not asked for"},
    {"no-dt-bias", "without dt_bias"},
    {"no-D", "without D x"},
    {"no-z", "without the gate z"},
    {"no-decay", "without the decay"},
    {"log-A", "with -exp(A) for A (A taken for A_log)"},
    {"grow", "with A's sign turned around"},
    {"swapped-BC", "with B and C swapped"},
    {"row-slots", "with row i on slot i, without state_indices"},
    {"from-zero", "with every row started from a zero state"},
    {"fresh-rows-resume", "with has_initial_state left out: fresh rows resume what lies there"},
    {"no-carry", "with every chunk of 64 tokens started from the row's initial state"},
    {"no-tail", "with a last chunk of less than 64 tokens left out of the state"},
};

constexpr std::int64_t kChunk = 64;

template <class S>
struct Host : Mamba1Host<S> {
  using Base = Mamba1Host<S>;
  using Base::rows;

  Host(const Case& c, std::string_view mistake)
      : Base(c, mistake), resumes(maybe_array_of<bool, 1>(c, "has_initial_state")) {
    if (mistake == "fresh-rows-resume" && resumes) fill(resumes->view(), true);
    if (mistake == "from-zero")
      resumes = Array<bool, 1>(Shape<1>{rows.starts->extent(0) - 1}, false);
  }

  reference::Mamba1Prefill<S> inputs() const {
    auto in = Base::template inputs_of<reference::Mamba1Prefill<S>>();
    in.rows = {.query_start_loc = rows.query_start_loc(), .slots = rows.slots()};
    if (resumes) in.rows.has_initial_state = resumes->view();
    return in;
  }

  std::optional<Array<bool, 1>> resumes;
};

/// The definition token by token, with a mistake of chunks.
template <class S>
void run_wrong(const Case& c, const reference::Mamba2Inputs<S>& in, bool carries,
               const TensorView<S, 4>& state, const TensorView<S, 3>& out) {
  Matrix<S> initial, chunk_start;
  Rows rows = in.rows;
  rows.tokens = in.x.extent(0);
  run_prefill<S>(rows, reference::mamba2_detail::state_shape(in), 1, state, {},
                 [&](const RowRange& tokens, std::int64_t h, Matrix<S>& s) {
                   const CaseToken& token = c.tokens[static_cast<std::size_t>(tokens.begin)];
                   const std::int64_t at = token.position, size = token.row_size;
                   if (at == 0) initial = s;
                   if (at % kChunk == 0 && !carries) s = initial;
                   if (at % kChunk == 0) chunk_start = s;
                   reference::mamba2_detail::step(in, tokens.begin, h, s, out);
                   if (carries && at + 1 == size && size % kChunk != 0) s = chunk_start;
                 });
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded_stores) {
  Host<S> host(c, mistake);
  Array<S, 2> out(host.x.shape(), S{0});
  reference::Mamba1Prefill<S> in = host.inputs();
  in.rows.storage = storage_of(c, "state", rounded_stores);
  if (mistake == "no-carry" || mistake == "no-tail") {
    const Shape<3> s = host.state.shape(), y{out.extent(0), 1, out.extent(1)};
    run_wrong<S>(c, reference::one_headed(in), mistake == "no-tail",
                 make_view(host.state.data(), Shape<4>{s[0], 1, s[1], s[2]}),
                 make_view(out.data(), y));
  } else {
    reference::mamba1_prefill<S>(in, host.state.view(), out.view());
  }
  return {{"out", as_values(out)}, {"state", as_values(host.state)}};
}

const JudgedKernel kOperation{
    .name = kName,
    .summary = "prompts through a Mamba1 layer's selective scan: 9 cases, 14 known mistakes",
    .positional = {"x", "dt", "A", "B", "C", "state"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(
              planned<CaseSpec>({prompts()}, make),
              planned<CaseSpec>(
                  {{{.name = "rows-65537", .D = 8, .batch = one_token_rows(kWideRows)}}}, make),
              "ragged-rows");
        },
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_mamba1_prefill
