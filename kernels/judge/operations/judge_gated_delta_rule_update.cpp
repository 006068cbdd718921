// The cases of gated_delta_rule_update, its definition, and common mistakes of implementations.
#include <fmt/format.h>

#include "kernels/judge/operations/gated_delta.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_gated_delta_rule_update {
namespace {

using namespace gated_delta;

constexpr std::string_view kName = "gated_delta_rule_update";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  Shapes shapes;
  Batch batch{};
  bool raw_gates = true;
  bool l2norm = true;
  std::optional<double> scale{};
  Layout layout = Layout::v_major;
  bool snapshots = false;
  bool steep = false;  ///< large gates: exp(g) far from 1
  bool timed = false;
};

Case make(const CaseSpec& spec, const CaseOptions& options) {
  const auto [H, HV, K, V] = spec.shapes;
  const Batch batch = rows_of(spec, options);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  const std::uint64_t seed =
      mix64(options.seed ^ static_cast<std::uint64_t>(spec.name.size() * 131 + T * 7 + K));
  Draw draw(seed);
  Case c{.name = spec.name, .heads_per_group = HV / H, .timed = spec.timed};
  add_inputs(c, draw, spec, T, slots, options);
  if (spec.steep)
    for (const std::size_t i : {3, 4})
      for (double& x : c.tensors[i].values) x *= 128;
  if (spec.scale) c.scalars.push_back({"scale", *spec.scale});
  batch.describe(c);
  if (spec.l2norm) c.scalars.push_back({"use_qk_l2norm", true});
  if (spec.snapshots)
    c.tensors.push_back(Draw::states("snapshots", options.states, {T, HV, V, K},
                                     {"token", "value head", "value column", "key column"}));
  c.tensors.push_back(Draw::output("out", options.activations, {T, HV, V},
                                   {"token", "value head", "value column"}));
  for (std::size_t i = 0; i < 5; ++i) poison_padding(c.tensors[i], c);
  poison_unread(c.tensors[5], c);
  const Tensor& pool = c.tensors[5];
  c.bytes = 2 * pool.bytes() / std::max<std::int64_t>(slots, 1) * batch.rows();
  for (const std::string_view name : {"q", "k", "v", "g", "beta", "out"})
    c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, {}, H={} HV={} K={} V={}", counted(batch.rows(), "row"),
                        counted(T, "token"), H, HV, K, V);
  return c;
}

/// Cases of every kind of row in every layout of the state.
std::vector<CaseSpec> every_layout() {
  const std::vector<std::pair<std::string, Layout>> layouts{
      {"", Layout::v_major}, {"-k-major", Layout::k_major}, {"-strided", Layout::strided}};
  std::vector<CaseSpec> all;
  for (const auto& [suffix, layout] : layouts)
    for (const RowKind& kind : recurrence_row_kinds())
      all.push_back({.name = kind.name + suffix,
                     .shapes = {2, 4, 128, 64},
                     .batch = kind.batch,
                     .layout = layout,
                     .snapshots = kind.snapshots});
  return all;
}

std::vector<CaseSpec> other_decodes() {
  const std::vector<std::int64_t> nine(9, 1);
  return {
      {.name = "decode-no-padding", .shapes = {2, 4, 128, 128}, .batch = {.lengths = {1, 1, 1}}},
      {.name = "decode-ready-gates",
       .shapes = {2, 6, 64, 65},
       .batch = {.lengths = nine, .padding_rows = {0}},
       .raw_gates = false,
       .l2norm = false,
       .scale = 0.25},
      {.name = "decode-odd-sizes", .shapes = {1, 3, 63, 65}, .batch = {.lengths = {1, 1, 1}}},
      {.name = "decode-ones", .shapes = {3, 3, 1, 1}, .batch = {.lengths = {1}}},
      {.name = "decode-steep-gates",
       .shapes = {2, 4, 128, 64},
       .batch = {.lengths = nine},
       .steep = true},
      {.name = "decode-many-rows", .shapes = {1, 2, 16, 8}, .batch = one_token_rows(130)},
      {.name = "decode-high-slots",
       .shapes = {1, 1, 4, 4},
       .batch = {.lengths = {1, 1, 1}, .padding_rows = {1}, .first_slot = 33000}},
      {.name = "decode-pad-slot-0",
       .shapes = {2, 4, 128, 64},
       .batch = {.lengths = nine, .padding_rows = {1, 8}, .pad_slot_id = 0}},
  };
}

std::vector<CaseSpec> wide_rows() {
  return {{.name = "rows-65537", .shapes = {1, 1, 16, 8}, .batch = one_token_rows(kWideRows)}};
}

const CaseSpec kServed{
    .name = "serving", .shapes = {16, 32, 128, 128}, .raw_gates = false, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-l2norm", "without the L2 norm of q and k"},
    {"always-l2norm", "with an L2 norm of q and k that was not asked for"},
    {"no-l2norm-q", "without the L2 norm of q (k has it)"},
    {"no-l2norm-k", "without the L2 norm of k (q has it)"},
    {"no-scale", "without the scale of q"},
    {"scale-twice", "with the scale of q applied twice"},
    {"default-scale", "with the scale K^-0.5 where another one was given"},
    {"no-beta", "without beta (1 in its place)"},
    {"beta-twice", "with beta applied twice"},
    {"raw-beta", "with beta as it came, without its sigmoid"},
    {"no-decay", "without the decay"},
    {"decay-after", "with the decay applied after the update instead of before it"},
    {"read-undecayed", "with S k read from the state before its decay"},
    {"no-dt-bias", "without dt_bias in the decay"},
    {"no-softplus", "without the softplus in the decay"},
    {"no-exp-a-log", "with A_log taken for A, without its exp"},
    {"grow", "with the decay's sign turned around (exp(-g))"},
    {"no-delta", "with v instead of v - S k (no delta rule)"},
    {"out-before", "with the output read before the state's update"},
    {"group-modulo", "with value head h on key head h % H instead of h // (HV / H)"},
    {"first-key-head", "with every value head on key head 0"},
    {"transposed", "with the state transposed ([K, V] for [V, K])"},
    {"row-slots", "with row i on slot i, without state_indices"},
    {"first-column", "with the first column of the table read, without num_accepted_tokens"},
    {"next-column", "with num_accepted_tokens taken for the column instead of the count"},
    {"from-zero", "with every row started from a zero state"},
    {"no-running-state", "with every token of a row started from the row's old state"},
};

bool is_step_mistake(std::string_view mistake) {
  return mistake == "decay-after" || mistake == "read-undecayed" || mistake == "no-delta" ||
         mistake == "out-before";
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded) {
  Host<S> host(c, mistake);
  change_slots(host.rows, mistake, host.q.extent(0));
  const auto in = host.inputs(storage_of(c, "state", rounded));
  if (mistake == "transposed") host.state = as_if_turned(host.state);
  if (mistake == "from-zero") start_from_zero(host.state);
  Array<S, 3> out(host.v.shape(), S{0});
  std::optional<Array<S, 4>> snapshots = maybe_array_of<S, 4>(c, "snapshots");
  const std::optional<TensorView<S, 4>> shots = maybe_view(snapshots);
  const std::optional<IndexView> parents = host.rows.parents();
  if (!is_step_mistake(mistake) && mistake != "no-running-state") {
    reference::gated_delta_rule_update<S>(in, host.state.view(), out.view(), parents, shots);
  } else {
    const Array<S, 4> old = host.state;
    run_update(
        in.rows, host.state.view(), parents, shots,
        [&](std::int64_t t, std::int64_t h, Matrix<S>& s) {
          if (mistake == "no-running-state") {
            const CaseToken& token = c.tokens[static_cast<std::size_t>(t)];
            s = as_matrix(at(old.view(), source_slot(in.rows.slots, token.row, old.extent(0)), h));
            reference::gated_delta_detail::step(in, t, h, s, out.view());
          } else {
            wrong_step(mistake, in, t, h, s, out.view());
          }
        });
  }
  if (mistake == "transposed") host.state = turned_back(host.state);
  Answer answer{{"out", as_values(out)}, {"state", as_values(host.state)}};
  if (snapshots) answer["snapshots"] = as_values(*snapshots);
  return answer;
}

// --- The wrong stage -----------------------------------------------------------------------------

double relative(const Matrix<double>& a, const Matrix<double>& b) {
  const double scale = b.norm();
  return (a - b).norm() / (scale > 0 ? scale : 1);
}

/// The stages of one token of one value head, from the state before it to its output.
struct TokenStages {
  Matrix<double> before, decayed, after;  // [V, K]
  Vector<double> k, q, read, difference, update, out;
};

TokenStages stages_of(const Host<double>& host, std::int64_t t, std::int64_t h,
                      const Matrix<double>& before) {
  const auto in = host.inputs({});
  using reference::gated_delta_detail::direction;
  TokenStages s{.before = before};
  s.k = direction(in, in.k, t, h);
  s.q = direction(in, in.q, t, h) * reference::gated_delta_detail::scale_of(in);
  s.decayed = before * std::exp(host.gates.g(t, h));
  s.read = s.decayed * s.k;
  s.difference = as_vector(at(in.v, t, h)) - s.read;
  s.update = host.gates.beta(t, h) * s.difference;
  s.after = s.decayed + s.update * s.k.transpose();
  s.out = s.after * s.q;
  return s;
}

/// The number c for which x = c y within the tolerance; nothing if there is none.
std::optional<double> multiple(const Vector<double>& x, const Vector<double>& y, double tolerance) {
  if (y.squaredNorm() == 0) return std::nullopt;
  const double c = x.dot(y) / y.squaredNorm();
  return (x - c * y).norm() <= tolerance * x.norm() ? std::optional(c) : std::nullopt;
}

std::string wrong_state(const TokenStages& s, const Matrix<double>& state, double beta,
                        const Vector<double>& v, double tolerance) {
  if (relative(state, s.before) < tolerance)
    return "the state after it is the one before it: no update was stored";
  if (relative(state, s.decayed) < tolerance)
    return "the state after it is the decayed one: the token's own update is missing";
  const double kk = s.k.squaredNorm();
  const Matrix<double> added = state - s.decayed;
  const Vector<double> u = kk > 0 ? Vector<double>(added * s.k / kk) : Vector<double>(s.update);
  if ((added - u * s.k.transpose()).norm() > tolerance * state.norm()) {
    // The state is not the decayed one plus a column times k^T. If it is that with another decay,
    // the parts of both states orthogonal to k are proportional; `across` projects on them.
    const Matrix<double> across =
        Matrix<double>::Identity(s.k.size(), s.k.size()) - s.k * s.k.transpose() / kk;
    const Matrix<double> seen = state * across, had = s.before * across;
    const double c = had.squaredNorm() > 0 ? seen.cwiseProduct(had).sum() / had.squaredNorm() : 0;
    const double expected = s.decayed.cwiseProduct(s.before).sum() / s.before.squaredNorm();
    if ((seen - c * had).norm() <= tolerance * seen.norm())
      return fmt::format("first wrong stage: the decay of the state, {:.6g} for {:.6g}", c,
                         expected);
    return "first wrong stage: k, or the state that is read: what was added to the decayed state "
           "is not a column times k";
  }
  if (const auto c = multiple(u, s.difference, tolerance))
    return fmt::format(
        "the decay, S k and v - S k are right; first wrong stage: beta times it, with {:.6g} for "
        "{:.6g}",
        *c, beta);
  if (const auto c = multiple(u, v, tolerance))
    return fmt::format(
        "the decay is right; first wrong stage: v - S k, of which S k is missing "
        "(what was added is {:.6g} v k^T)",
        *c);
  return "the decay is right, and a column times k was added; first wrong stage: S k, what is "
         "read, "
         "or v - S k";
}

/// Describes the first wrong stage, at the first token and head whose state is wrong, or whose
/// output is wrong although its state is right.
std::string stages(const Case& c, const Answer& candidate, const Answer& truth) {
  const Extents& extents = c.tensor("state").extents;
  if (c.find("snapshots") != nullptr || extents[2] < 2 || extents[3] < 2) return "";
  const Host<double> host(c, "");
  const auto shape = host.state.shape();
  const std::int64_t V = shape[2], K = shape[3], HV = shape[1];
  const double tolerance = c.tensor("state").type == ElementType::float32 ? 1e-3 : 3e-2;
  const std::vector<double>&got = candidate.at("state"), &want = truth.at("state");
  const auto matrix = [&](const std::vector<double>& values, std::int64_t slot, std::int64_t h) {
    return Matrix<double>(
        Eigen::Map<const Matrix<double>>(values.data() + (slot * HV + h) * V * K, V, K));
  };
  const std::vector<double>& old = c.tensor("state").values;
  const StateSlots slots = host.rows.slots();
  for (std::size_t t = 0; t < c.tokens.size(); ++t) {
    const CaseToken& token = c.tokens[t];
    if (token.padding) continue;
    const auto n = static_cast<std::int64_t>(t);
    const std::int64_t target =
        target_slot(slots, token.row, token.position, token.row_size, shape[0]);
    const bool from_old = token.position == 0;
    const std::int64_t source =
        from_old ? source_slot(slots, token.row, shape[0])
                 : target_slot(slots, token.row, token.position - 1, token.row_size, shape[0]);
    if (target == kNoSlot || source == kNoSlot || (!from_old && !slots.table)) continue;
    for (std::int64_t h = 0; h < HV; ++h) {
      const Matrix<double> state = matrix(got, target, h), right = matrix(want, target, h);
      const Vector<double> out =
          Eigen::Map<const Vector<double>>(candidate.at("out").data() + (n * HV + h) * V, V);
      if (!state.allFinite() || !out.allFinite()) continue;
      const TokenStages s =
          stages_of(host, n, h, from_old ? matrix(old, source, h) : matrix(want, source, h));
      const std::string where = fmt::format("token {} (row {}, its token {}), value head {}: ", t,
                                            token.row, token.position, h);
      if (relative(state, right) > tolerance)
        return where + wrong_state(s, state, host.gates.beta(n, h),
                                   as_vector(at(host.v.view(), n, h)), tolerance);
      const double out_scale = std::max(s.out.norm(), 1e-30);
      if ((out - s.out).norm() > 20 * tolerance * out_scale) {
        std::string said = where + "the state is right; first wrong stage: the read-out S q";
        if (const auto factor = multiple(out, s.out, 20 * tolerance))
          said += fmt::format(" (the output is {:.6g} of what it should be)", *factor);
        return said;
      }
    }
  }
  return "";
}

const JudgedKernel kOperation{
    .name = kName,
    .summary =
        "decode and verification of the gated delta rule: 34 cases, 27 known mistakes, stages",
    .positional = {"q", "k", "v", "g", "beta", "state"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(
              planned<CaseSpec>({every_layout(), other_decodes(), listed_and_in_order(kServed)},
                                make),
              planned<CaseSpec>({wide_rows()}, make), "decode");
        },
    .row_elements = kServed.shapes.HV * kServed.shapes.V * kServed.shapes.K,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes,
    .stages = stages};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_gated_delta_rule_update
