// The cases of ssd_prefill, its definition and mistakes. It is not timed: products bound its time,
// and the judge does not measure their rate.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/judge/operations/mamba2.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_ssd_prefill {
namespace {

using namespace mamba2;

constexpr std::string_view kName = "ssd_prefill";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name{};
  std::int64_t H, G, P, N;
  std::vector<std::int64_t> lengths{};
  std::vector<std::int64_t> padding_rows{};
  std::vector<std::int64_t> fresh_rows{};  ///< rows whose has_initial_state is false
  bool D = true, z = false, dt_bias = true, softplus = true;
  bool limits = false;  ///< dt_min and dt_max are given
  std::int64_t behind = 0;
  std::int64_t boundary_every = 0;
  Layout layout = Layout::plain;
  bool timed = false;
  bool dt_per_channel = false;  ///< never set: shared code reads it
};

void add_boundaries(Case& c, const CaseSpec& w, ElementType type) {
  std::int64_t count = 0;
  for (const std::int64_t length : w.lengths) count += length / w.boundary_every;
  c.tensors.push_back(Draw::states("boundary_states", type, {count, w.H, w.P, w.N},
                                   {"boundary", "head", "channel", "column"}));
  c.scalars.push_back({"boundary_every", w.boundary_every});
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  const Batch batch{.lengths = w.lengths,
                    .behind = w.behind,
                    .padding_rows = w.padding_rows,
                    .packed = true,
                    .seed = options.seed};
  const std::int64_t T = batch.tokens();
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 59 + T)));
  Case c{.name = w.name, .heads_per_group = w.H / w.G};
  add_inputs(c, draw, w, T, options.activations);
  // Small time steps, about an eighth, as in trained models: over 64 tokens a state does not decay
  // to 0.
  for (double& x : c.tensors[1].values) x = w.softplus ? x - 2 : x / 8;
  add_state(c, draw, w, batch.slot_count(), options.states);
  batch.describe(c);
  add_options(c, draw, w, T, options.activations);
  if (!w.fresh_rows.empty()) add_fresh_rows(c, batch.rows(), w.fresh_rows);
  for (const std::size_t i : {0, 1, 3, 4}) poison_padding(c.tensors[i], c);
  poison_unread(c.tensors[5], c);
  if (w.boundary_every > 0) add_boundaries(c, w, options.states);
  c.tensors.push_back(
      Draw::output("out", options.activations, {T, w.H, w.P}, {"token", "head", "channel"}));
  c.about = fmt::format("{}, {}, H={} G={} P={} N={}", counted(batch.rows(), "row"),
                        counted(T, "token"), w.H, w.G, w.P, w.N);
  return c;
}

std::vector<CaseSpec> whole_rows() {
  return {
      {.name = "one-row", .H = 4, .G = 2, .P = 64, .N = 128, .lengths = {130}},
      {.name = "one-chunk", .H = 2, .G = 1, .P = 64, .N = 128, .lengths = {64}, .z = true},
      {.name = "one-token", .H = 4, .G = 2, .P = 64, .N = 128, .lengths = {1}},
      {.name = "short-rows", .H = 2, .G = 2, .P = 64, .N = 64, .lengths = {1, 2, 3}, .D = false},
      {.name = "wide-heads", .H = 2, .G = 1, .P = 128, .N = 128, .lengths = {200, 7}},
      {.name = "odd-sizes", .H = 6, .G = 3, .P = 63, .N = 17, .lengths = {67, 9}, .z = true},
      {.name = "bare",
       .H = 2,
       .G = 1,
       .P = 80,
       .N = 128,
       .lengths = {100, 30},
       .D = false,
       .dt_bias = false,
       .softplus = false},
      {.name = "limits", .H = 2, .G = 1, .P = 64, .N = 128, .lengths = {90, 70}, .limits = true},
  };
}

/// Cases of every layout of the state, with row lengths around a chunk, padding rows and fresh
/// rows.
std::vector<CaseSpec> every_layout() {
  std::vector<CaseSpec> all;
  for (const auto& [suffix, layout] : std::vector<std::pair<std::string, Layout>>{
           {"", Layout::plain}, {"-n-first", Layout::n_first}, {"-strided", Layout::strided}}) {
    const CaseSpec plain{.H = 4, .G = 2, .P = 64, .N = 128, .layout = layout};
    CaseSpec ragged = plain, fresh = plain, boundaries = plain;
    ragged.name = "ragged-rows" + suffix;
    ragged.lengths = {65, 0, 1, 63, 1, 129, 1};
    ragged.padding_rows = {3, 6};
    ragged.behind = 3;
    fresh.name = "fresh-rows" + suffix;
    fresh.lengths = {70, 5, 64, 1, 1, 0};
    fresh.fresh_rows = {0, 2, 4, 5};
    fresh.z = true;
    boundaries.name = "boundaries" + suffix;
    boundaries.lengths = {130, 63, 64, 1};
    boundaries.boundary_every = 64;
    for (const CaseSpec& one : {ragged, fresh, boundaries}) all.push_back(one);
  }
  return all;
}

std::vector<CaseSpec> wide_rows() {
  return {{.name = "rows-65537",
           .H = 1,
           .G = 1,
           .P = 8,
           .N = 16,
           .lengths = std::vector<std::int64_t>(kWideRows, 1)}};
}

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes = with_shared({
    {"fresh-rows-resume", "with has_initial_state left out: fresh rows resume what lies there"},
    {"swapped-rows", "with the slots of neighbouring rows swapped"},
    {"no-carry", "with every chunk of 64 tokens started from the row's initial state"},
    {"undecayed-before", "with the state before a chunk of 64 tokens read without its decay"},
    {"sum-goes-on", "with sums of A dt that are not restarted at chunks of 64 tokens"},
    {"no-tail", "with a last chunk of less than 64 tokens left out of the state"},
});

constexpr std::int64_t kChunk = 64;

/// The definition's inputs for chunks, which take one number per head (stride 0 along the other
/// dimensions).
template <class S>
struct PrefillHost : HeadHost<S> {
  PrefillHost(const Case& c, std::string_view mistake)
      : HeadHost<S>(c, mistake), resumes(maybe_array_of<bool, 1>(c, "has_initial_state")) {
    if (mistake == "fresh-rows-resume" && resumes) fill(resumes->view(), true);
    if (mistake == "from-zero")
      resumes = Array<bool, 1>(Shape<1>{this->rows.starts->extent(0) - 1}, false);
    if (auto& slots = this->rows.indices; mistake == "swapped-rows" && slots)
      for (std::int64_t i = 0; i + 1 < slots->extent(0); i += 2)
        std::swap((*slots)(i), (*slots)(i + 1));
  }

  reference::Mamba2Inputs<S> inputs(const Case& c, bool rounded) const {
    reference::Mamba2Inputs<S> in = HeadHost<S>::inputs(c, rounded);
    in.steps_in_scores = true;
    if (rounded)  // operands of tensor cores have the activations' type
      in.rows.storage.operand = in.rows.storage.chunk_state = format_of(c.tensor("x").type);
    if (resumes) in.rows.has_initial_state = std::as_const(*resumes).view();
    return in;
  }

  std::optional<Array<bool, 1>> resumes;
};

/// States of a row's head at its start and at the start of the chunk, and the sums of A d since
/// then.
template <class S>
struct Past {
  Matrix<S> initial, chunk_start;
  S row_sum = 0, chunk_sum = 0;
};

/// One token with a mistake of chunks.
template <class S>
void wrong_token(std::string_view mistake, const reference::Mamba2Inputs<S>& in,
                 const CaseToken& token, std::int64_t t, std::int64_t h, Past<S>& past,
                 Matrix<S>& s, const TensorView<S, 3>& out) {
  const bool starts = token.position % kChunk == 0;
  if (token.position == 0) past = {s, s, S{0}, S{0}};
  if (starts) {
    if (mistake == "no-carry") s = past.initial;
    past.chunk_start = s;
    past.chunk_sum = 0;
  }
  const S step = in.A(h, 0, 0) * reference::mamba2_detail::time_step(in, t, h, 0);
  past.row_sum += step, past.chunk_sum += step;
  const Matrix<S> old = s;
  reference::mamba2_detail::step(in, t, h, s, out);
  const bool short_chunk = token.position / kChunk == token.row_size / kChunk;
  if (mistake == "no-tail" && short_chunk) {
    if (token.position + 1 == token.row_size) s = past.chunk_start;
    return;
  }
  if (mistake != "undecayed-before" && mistake != "sum-goes-on") return;
  // The state is the decayed state of the chunk's start plus the chunk's own tokens: a wrong decay
  // changes the first part alone.
  const S right = std::exp(past.chunk_sum);
  const S wrong = mistake == "undecayed-before" ? S{1} : std::exp(past.row_sum);
  const Matrix<S> seen = s + (wrong - right) * past.chunk_start;
  const Vector<S> C = as_vector(at(in.C, t, reference::mamba2_detail::group_of(in, h)));
  for (std::int64_t p = 0; p < s.rows(); ++p)
    reference::mamba2_detail::write_output<S>(in, t, h, p, seen.row(p).dot(C), out);
  const bool ends = token.position % kChunk == kChunk - 1 || token.position + 1 == token.row_size;
  if (mistake == "sum-goes-on" && ends) s = seen;
}

bool is_chunk_mistake(std::string_view mistake) {
  for (const std::string_view one : {"no-carry", "undecayed-before", "sum-goes-on", "no-tail"})
    if (mistake == one) return true;
  return false;
}

template <class S>
void run_wrong(const Case& c, const reference::Mamba2Inputs<S>& in, std::string_view mistake,
               const TensorView<S, 4>& state, const std::optional<BoundaryStates<S>>& boundary,
               const TensorView<S, 3>& out) {
  std::vector<Past<S>> pasts(static_cast<std::size_t>(in.x.extent(1)));
  Rows rows = in.rows;
  rows.tokens = in.x.extent(0);
  run_prefill<S>(rows, reference::mamba2_detail::state_shape(in), 1, state, boundary,
                 [&](const RowRange& tokens, std::int64_t h, Matrix<S>& s) {
                   const std::int64_t t = tokens.begin;
                   if (!is_chunk_mistake(mistake)) return wrong_step(mistake, in, t, h, s, out);
                   wrong_token(mistake, in, c.tokens[static_cast<std::size_t>(t)], t, h,
                               pasts[static_cast<std::size_t>(h)], s, out);
                 });
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded, bool by_chunks) {
  PrefillHost<S> host(c, mistake);
  change_slots(host.rows, mistake, host.x.extent(0));
  if (mistake == "transposed") host.state = as_if_turned(host.state);
  const reference::Mamba2Inputs<S> in = host.inputs(c, rounded);
  Array<S, 3> out(host.x.shape(), S{0});
  std::optional<Array<S, 4>> boundary = maybe_array_of<S, 4>(c, "boundary_states");
  std::optional<BoundaryStates<S>> states;
  if (boundary) states = {boundary->view(), static_cast<std::int64_t>(*c.number("boundary_every"))};
  if (is_step_mistake(mistake) || is_chunk_mistake(mistake))
    run_wrong<S>(c, in, mistake, host.state.view(), states, out.view());
  else if (by_chunks)
    reference::ssd_prefill<S>(in, kChunk, host.state.view(), out.view(), states);
  else
    reference::selective_scan<S>(in, host.state.view(), out.view(), states);
  if (mistake == "transposed") host.state = turned_back(host.state);
  Answer answer{{"out", as_values(out)}, {"state", as_values(host.state)}};
  if (boundary) answer["boundary_states"] = as_values(*boundary);
  return answer;
}

Answer truth_of(const Case& c, std::string_view mistake) {
  return compute<double>(c, mistake, false, false);
}

/// Chunks, as tensor cores compute them. A kernel of float32 activations may go token by token,
/// which adds more often: each element is then that of the form which is farther from the truth.
Answer yardstick_of(const Case& c, std::string_view mistake) {
  Answer worse = compute<float>(c, mistake, true, true);
  if (format_of(c.tensor("x").type) != Format::float32) return worse;
  const Answer truth = truth_of(c, mistake), tokens = compute<float>(c, mistake, true, false);
  for (auto& element : worse) {
    const auto &other = tokens.at(element.first), &exact = truth.at(element.first);
    auto& values = element.second;
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = std::ranges::max(values[i], other[i], {},
                                   [&](double value) { return std::abs(value - exact[i]); });
  }
  return worse;
}

const JudgedKernel kOperation{.name = kName,
                              .summary = "prefill of Mamba2: 17 cases, 30 known mistakes",
                              .positional = {"x", "dt", "A", "B", "C", "state"},
                              .default_types = "bfloat16/float32",
                              .plans =
                                  [] {
                                    return with_large(
                                        planned<CaseSpec>({whole_rows(), every_layout()}, make),
                                        planned<CaseSpec>({wide_rows()}, make), "ragged-rows");
                                  },
                              .truth = truth_of,
                              .yardstick = yardstick_of,
                              .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_ssd_prefill
