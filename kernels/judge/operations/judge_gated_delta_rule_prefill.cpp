// The cases of gated_delta_rule_prefill, its definition, mistakes, and the stages of its chunk
// form. It is not timed: products bound its time, and the judge does not measure their rate.
#include <fmt/format.h>

#include "kernels/judge/operations/gated_delta.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep::judging::of_gated_delta_rule_prefill {
namespace {

using namespace gated_delta;

constexpr std::string_view kName = "gated_delta_rule_prefill";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name{};
  Shapes shapes;
  std::vector<std::int64_t> lengths{};
  std::vector<std::int64_t> padding_rows{};
  std::vector<std::int64_t> fresh_rows{};  ///< rows whose has_initial_state is false
  bool raw_gates = false;
  bool l2norm = true;
  std::int64_t behind = 0;
  std::int64_t boundary_every = 0;
  Layout layout = Layout::v_major;
  bool timed = false;
};

void add_boundaries(Case& c, const CaseSpec& w, ElementType type) {
  const auto [H, HV, K, V] = w.shapes;
  std::int64_t count = 0;
  for (const std::int64_t length : w.lengths) count += length / w.boundary_every;
  c.tensors.push_back(Draw::states("boundary_states", type, {count, HV, V, K},
                                   {"boundary", "value head", "value column", "key column"}));
  c.scalars.push_back({"boundary_every", w.boundary_every});
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  const auto [H, HV, K, V] = w.shapes;
  const Batch batch{.lengths = w.lengths,
                    .behind = w.behind,
                    .padding_rows = w.padding_rows,
                    .packed = true,
                    .seed = options.seed};
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 61 + T)));
  Case c{.name = w.name, .heads_per_group = HV / H};
  add_inputs(c, draw, w, T, slots, options);
  batch.describe(c);
  if (!w.fresh_rows.empty()) add_fresh_rows(c, batch.rows(), w.fresh_rows);
  for (std::size_t i = 0; i < 5; ++i) poison_padding(c.tensors[i], c);
  poison_unread(c.tensors[5], c);
  if (w.l2norm) c.scalars.push_back({"use_qk_l2norm", true});
  if (w.boundary_every > 0) add_boundaries(c, w, options.states);
  c.tensors.push_back(Draw::output("out", options.activations, {T, HV, V},
                                   {"token", "value head", "value column"}));
  c.about = fmt::format("{}, {}, H={} HV={} K={} V={}", counted(batch.rows(), "row"),
                        counted(T, "token"), H, HV, K, V);
  return c;
}

std::vector<CaseSpec> whole_rows() {
  return {
      {.name = "one-row", .shapes = {2, 4, 64, 64}, .lengths = {130}},
      {.name = "one-chunk", .shapes = {1, 2, 128, 64}, .lengths = {64}},
      {.name = "one-token", .shapes = {2, 4, 128, 64}, .lengths = {1}},
      {.name = "short-rows", .shapes = {1, 1, 64, 64}, .lengths = {1, 2, 3}},
      {.name = "odd-sizes", .shapes = {1, 3, 63, 65}, .lengths = {67, 9}},
  };
}

/// Cases of every layout of the state, with row lengths around a chunk, padding rows and fresh
/// rows.
std::vector<CaseSpec> every_layout() {
  std::vector<CaseSpec> all;
  for (const auto& [suffix, layout] : std::vector<std::pair<std::string, Layout>>{
           {"", Layout::v_major}, {"-k-major", Layout::k_major}, {"-strided", Layout::strided}}) {
    const CaseSpec plain{.shapes = {2, 4, 64, 64}, .layout = layout};
    CaseSpec ragged = plain, fresh = plain, raw = plain, boundaries = plain;
    ragged.name = "ragged-rows" + suffix;
    ragged.lengths = {65, 0, 1, 63, 1, 129, 1};
    ragged.padding_rows = {3, 6};
    ragged.behind = 3;
    fresh.name = "fresh-rows" + suffix;
    fresh.lengths = {70, 5, 64, 1, 1, 0};
    fresh.fresh_rows = {0, 2, 4, 5};
    raw.name = "raw-gates" + suffix;
    raw.lengths = {100, 30, 1};
    raw.raw_gates = true;
    boundaries.name = "boundaries" + suffix;
    boundaries.lengths = {130, 63, 64, 1};
    boundaries.boundary_every = 64;
    for (const CaseSpec& one : {ragged, fresh, raw, boundaries}) all.push_back(one);
  }
  return all;
}

std::vector<CaseSpec> wide_rows() {
  return {{.name = "rows-65537",
           .shapes = {1, 1, 16, 8},
           .lengths = std::vector<std::int64_t>(kWideRows, 1)}};
}

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-l2norm", "without the L2 norm of q and k"},
    {"no-scale", "without the scale of q"},
    {"scale-twice", "with the scale of q applied twice"},
    {"no-beta", "without beta (1 in its place)"},
    {"raw-beta", "with beta as it came, without its sigmoid"},
    {"no-decay", "without the decay"},
    {"no-dt-bias", "without dt_bias in the decay"},
    {"group-modulo", "with value head h on key head h % H instead of h // (HV / H)"},
    {"from-zero", "with every row started from a zero state"},
    {"fresh-rows-resume", "with has_initial_state left out: fresh rows resume what lies there"},
    {"no-carry", "with every chunk of 64 tokens started from the row's initial state"},
    {"no-delta", "with v instead of v - S k (no delta rule)"},
};

template <class S>
struct PrefillHost : Host<S> {
  PrefillHost(const Case& c, std::string_view mistake)
      : Host<S>(c, mistake), resumes(maybe_array_of<bool, 1>(c, "has_initial_state")) {
    if (mistake == "fresh-rows-resume" && resumes) fill(resumes->view(), true);
    if (mistake == "from-zero")
      resumes = Array<bool, 1>(Shape<1>{this->rows.starts->extent(0) - 1}, false);
  }

  reference::GatedDeltaRuleInputs<S> inputs(const Case& c, bool rounded) const {
    StoragePoints storage = storage_of(c, "state", rounded);
    if (rounded)  // operands of tensor cores have the activations' type
      storage.operand = storage.chunk_state = storage.normalised_qk = format_of(c.tensor("q").type);
    auto in = Host<S>::inputs(storage);
    if (resumes) in.rows.has_initial_state = std::as_const(*resumes).view();
    return in;
  }

  std::optional<Array<bool, 1>> resumes;
};

constexpr std::int64_t kChunk = 64;

/// The definition with a mistake: all chunks start from the row's initial state, or tokens lack the
/// delta rule.
template <class S>
void run_wrong(const Case& c, PrefillHost<S>& host, const reference::GatedDeltaRuleInputs<S>& in,
               std::string_view mistake, Array<S, 3>& out) {
  const Shape<3> shape = reference::gated_delta_detail::state_shape(in);
  std::vector<Matrix<S>> initial(static_cast<std::size_t>(shape[0]));  // of the row, by head
  run_prefill<S>(in.rows, shape, 1, host.state.view(), {},
                 [&](const RowRange& tokens, std::int64_t h, Matrix<S>& s) {
                   const std::int64_t t = tokens.begin;
                   const CaseToken& token = c.tokens[static_cast<std::size_t>(t)];
                   if (mistake == "no-delta") return wrong_step(mistake, in, t, h, s, out.view());
                   Matrix<S>& of_head = initial[static_cast<std::size_t>(h)];
                   if (token.position == 0) of_head = s;
                   if (token.position % kChunk == 0) s = of_head;
                   reference::gated_delta_detail::step(in, t, h, s, out.view());
                 });
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded) {
  PrefillHost<S> host(c, mistake);
  const reference::GatedDeltaRuleInputs<S> in = host.inputs(c, rounded);
  Array<S, 3> out(host.v.shape(), S{0});
  std::optional<Array<S, 4>> boundary = maybe_array_of<S, 4>(c, "boundary_states");
  std::optional<BoundaryStates<S>> states;
  if (boundary) states = {boundary->view(), static_cast<std::int64_t>(*c.number("boundary_every"))};
  if (mistake == "no-carry" || mistake == "no-delta")
    run_wrong(c, host, in, mistake, out);
  else if (rounded)
    reference::gated_delta_rule_prefill<S>(in, kChunk, host.state.view(), out.view(), states);
  else
    reference::gated_delta_rule_scan<S>(in, host.state.view(), out.view(), states);
  Answer answer{{"out", as_values(out)}, {"state", as_values(host.state)}};
  if (boundary) answer["boundary_states"] = as_values(*boundary);
  return answer;
}

// --- The stages of the chunk form ----------------------------------------------------------------

/// The tokens of every chunk of every row.
std::vector<RowRange> chunks_of(const Case& c, std::int64_t chunk_size) {
  const HostRows rows(c);
  const auto T = static_cast<std::int64_t>(c.tokens.size());
  std::vector<RowRange> chunks;
  for (std::int64_t row = 0; row < row_count(rows.query_start_loc(), T); ++row) {
    const RowRange range = row_range(rows.query_start_loc(), row, T);
    for (std::int64_t t = range.begin; t < range.end; t += chunk_size)
      chunks.push_back({t, std::min(t + chunk_size, range.end)});
  }
  return chunks;
}

/// The stages by name: U, new_values, O [T, HV, V]; W [T, HV, K]; chunk_states [chunks, HV, V, K],
/// the states after each chunk of each row. Padding tokens are 0.
template <class S>
std::map<std::string, Array<S, 4>> chunk_stages(const Case& c, std::int64_t chunk_size,
                                                bool rounded) {
  const PrefillHost<S> host(c, "");
  const reference::GatedDeltaRuleInputs<S> in = host.inputs(c, rounded);
  const auto [T, HV, V] = host.v.shape();
  const std::int64_t K = host.q.extent(2);
  const std::vector<RowRange> chunks = chunks_of(c, chunk_size);
  std::map<std::string, Array<S, 4>> all;
  for (const std::string name : {"U", "new_values", "O"})
    all[name] = Array<S, 4>({T, HV, 1, V}, S{0});
  all["W"] = Array<S, 4>({T, HV, 1, K}, S{0});
  all["chunk_states"] = Array<S, 4>({static_cast<std::int64_t>(chunks.size()), HV, V, K}, S{0});
  for (std::int64_t h = 0; h < HV; ++h) {
    Matrix<S> running;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const RowRange& chunk = chunks[i];
      const CaseToken& token = c.tokens[static_cast<std::size_t>(chunk.begin)];
      if (token.padding) continue;
      if (token.position == 0) {
        const bool resumes = !host.resumes || (*host.resumes)(token.row);
        running = Matrix<S>::Zero(V, K);
        if (resumes)
          running = as_matrix(at(host.state.view(),
                                 source_slot(in.rows.slots, token.row, host.state.extent(0)), h));
      }
      const auto stages = reference::gated_delta_chunk(
          reference::gated_delta_chunk_of(in, chunk, h), running, in.rows.storage);
      for (std::int64_t t = 0; t < chunk.size(); ++t) {
        const auto put = [&](const char* name, const auto& row) {
          mapped(at(all[name].view(), chunk.begin + t, h, 0)) = row.transpose();
        };
        put("U", stages.U.row(t)), put("W", stages.W.row(t));
        put("new_values", stages.Vn.row(t)), put("O", stages.O.row(t));
      }
      running = stages.state;
      mapped(at(all["chunk_states"].view(), static_cast<std::int64_t>(i), h)) = running;
    }
  }
  return all;
}

template <class S>
Array<S, 4> part_of(const Array<S, 4>& all, const RowRange& range) {
  Shape<4> shape = all.shape();
  const std::int64_t size = all.size() / std::max<std::int64_t>(1, shape[0]);
  shape[0] = range.size();
  Array<S, 4> part(shape);
  std::copy_n(all.data() + range.begin * size, part.size(), part.data());
  return part;
}

std::string compare_stages(const Case& c, const NamedStages& given) {
  const auto size = given.find("chunk_size");
  const std::int64_t chunk_size = size == given.end() || size->second.values.empty()
                                      ? kChunk
                                      : static_cast<std::int64_t>(size->second.values[0]);
  if (chunk_size < 1) return "chunk_size is below 1";
  const auto truth = chunk_stages<double>(c, chunk_size, false);
  const auto yardstick = chunk_stages<float>(c, chunk_size, true);
  std::map<std::string, Array<double, 4>> found;
  for (const auto& [name, right] : truth) {
    const auto stage = given.find(name);
    if (stage == given.end()) continue;
    if (static_cast<std::int64_t>(stage->second.values.size()) != right.size())
      return fmt::format("stage {} has {} for {}", name,
                         counted(stage->second.values.size(), "element"), right.size());
    found[name] = Array<double, 4>(right.shape());
    std::copy(stage->second.values.begin(), stage->second.values.end(), found[name].data());
  }
  // Chunk by chunk, and within a chunk stage by stage: the first wrong stage is then the cause.
  const std::vector<RowRange> chunks = chunks_of(c, chunk_size);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (c.tokens[static_cast<std::size_t>(chunks[i].begin)].padding) continue;
    std::string seen;
    for (const std::string name : {"U", "W", "new_values", "chunk_states", "O"}) {
      if (!found.contains(name)) continue;
      const auto n = static_cast<std::int64_t>(i);
      const RowRange part = name == "chunk_states" ? RowRange{n, n + 1} : chunks[i];
      const Verdict verdict =
          judge(part_of(found.at(name), part), part_of(yardstick.at(name), part),
                part_of(truth.at(name), part), {.format = format_of(c.tensor("q").type)});
      if (!verdict.pass)
        return fmt::format("chunk of tokens {} to {}: {}first wrong stage: {}; {}", chunks[i].begin,
                           chunks[i].end - 1, seen, name, verdict.text);
      seen += name + " is right; ";
    }
  }
  return found.empty() ? "" : "every stage that was given is right";
}

const JudgedKernel kOperation{
    .name = kName,
    .summary = "prefill of the gated delta rule, with the stages of its chunk form: 17 cases",
    .positional = {"q", "k", "v", "g", "beta", "state"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(planned<CaseSpec>({whole_rows(), every_layout()}, make),
                            planned<CaseSpec>({wide_rows()}, make), "ragged-rows");
        },
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes,
    .named_stages = compare_stages};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_gated_delta_rule_prefill
