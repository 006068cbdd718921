// The cases of gated_delta_rule_ring_update, its definition, and the mistakes that people make with
// rings of pending updates.
#include <fmt/format.h>

#include "kernels/judge/operations/gated_delta.hpp"
#include "kernels/judge/operations/rings.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_gated_delta_rule_ring_update {
namespace {

using namespace gated_delta;
using rings::Stand;

constexpr std::string_view kName = "gated_delta_rule_ring_update";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  Shapes shapes;
  Batch batch{};
  std::int64_t L = 16;
  bool raw_gates = true;
  bool l2norm = true;
  std::optional<double> scale{};
  Layout layout = Layout::v_major;
  bool timed = false;
  bool snapshots = false;  ///< never set: shared code reads it
};

/// ring_k, ring_k_scale, ring_u and ring_g behind the state, with gates that leave something of the
/// oldest entry.
void add_rings(Case& c, Draw& draw, const CaseSpec& w, std::int64_t slots,
               const CaseOptions& options) {
  const auto [H, HV, K, V] = w.shapes;
  std::vector<Tensor> ring;
  ring.push_back(draw("ring_k", options.activations, {slots, H, w.L, K},
                      {"slot", "key head", "entry", "column"}));
  // Keys without a norm are short: sums do not cancel to less than float32 holds.
  for (Tensor* const keys : {&ring[0], &c.tensors[1]})
    for (double& x : keys->values) x *= w.l2norm ? 1 : 1.0 / 8;
  ring.push_back(
      draw("ring_k_scale", ElementType::float32, {slots, H, w.L}, {"slot", "key head", "entry"}));
  for (std::size_t entry = 0; entry < ring[1].values.size(); ++entry) {
    double square = 1e-6;
    for (std::size_t i = 0; i < static_cast<std::size_t>(K); ++i)
      square += std::pow(ring[0].values[entry * static_cast<std::size_t>(K) + i], 2);
    ring[1].values[entry] = w.l2norm ? static_cast<float>(1 / std::sqrt(square)) : 1;
  }
  ring.push_back(draw("ring_u", options.states, {slots, HV, w.L, V},
                      {"slot", "value head", "entry", "value column"}));
  ring.push_back(
      draw("ring_g", ElementType::float32, {slots, HV, w.L}, {"slot", "value head", "entry"}));
  for (double& x : ring[3].values) x = -1.0 / 64 - std::abs(x) / 4;
  if (w.layout == Layout::strided)
    for (Tensor& one : ring) spread(one, 0, 64);
  c.tensors.insert(c.tensors.begin() + 6, ring.begin(), ring.end());
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  const auto [H, HV, K, V] = w.shapes;
  const Batch batch = rows_of(w, options);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  const std::vector<Stand> stands = rings::stands(batch.rows(), w.L);
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 137 + T * 7 + K)));
  Case c{.name = w.name, .heads_per_group = HV / H, .timed = w.timed};
  add_inputs(c, draw, w, T, slots, options);
  add_rings(c, draw, w, slots, options);
  if (w.scale) c.scalars.push_back({"scale", *w.scale});
  batch.describe(c);
  rings::add_stands(c, batch, stands);
  if (w.l2norm) c.scalars.push_back({"use_qk_l2norm", true});
  for (std::size_t i = 0; i < 5; ++i) poison_padding(c.tensors[i], c);
  poison_unread(c.tensors[5], c);
  for (std::size_t i = 6; i < 10; ++i) rings::poison_ring(c.tensors[i], c, stands);
  c.tensors.push_back(Draw::output("out", options.activations, {T, HV, V},
                                   {"token", "value head", "value column"}));
  c.bytes = rings::bytes_of_rings(c, {"ring_k", "ring_k_scale", "ring_u", "ring_g"}, stands, batch);
  for (const std::string_view name : {"q", "k", "v", "g", "beta", "out"})
    c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, H={} HV={} K={} V={}, rings of {}", counted(batch.rows(), "row"), H,
                        HV, K, V, w.L);
  return c;
}

std::vector<CaseSpec> decodes() {
  const std::vector<std::int64_t> ten(10, 1), four(4, 1);
  const CaseSpec usual{.name = "", .shapes = {2, 4, 128, 64}, .batch = {.lengths = ten}};
  const auto with = [&](const std::string& name, auto change) {
    CaseSpec one = usual;
    one.name = name;
    change(one);
    return one;
  };
  return {
      with("decode",
           [](CaseSpec& w) {
             w.batch.padding_rows = {3, 6};
           }),
      with("decode-square",
           [](CaseSpec& w) {
             w.shapes = {2, 4, 128, 128};
           }),
      with("decode-strided", [](CaseSpec& w) { w.layout = Layout::strided; }),
      with("decode-k-major", [](CaseSpec& w) { w.layout = Layout::k_major; }),
      with("decode-ready-gates",
           [](CaseSpec& w) { w.raw_gates = false, w.l2norm = false, w.scale = 0.25; }),
      with("one-row", [](CaseSpec& w) { w.batch.lengths = {1}; }),
      with("ring-of-1", [&](CaseSpec& w) { w.batch.lengths = four, w.L = 1; }),
      with("ring-of-2", [](CaseSpec& w) { w.L = 2; }),
      with("ring-of-5", [](CaseSpec& w) { w.L = 5; }),
      {.name = "decode-odd-sizes", .shapes = {1, 3, 63, 65}, .batch = {.lengths = ten}},
      {.name = "decode-many-rows", .shapes = {1, 2, 16, 8}, .batch = one_token_rows(130)},
      {.name = "decode-high-slots",
       .shapes = {1, 1, 4, 4},
       .batch = {.lengths = four, .padding_rows = {1}, .first_slot = 33000},
       .L = 4},
      with("decode-pad-slot-0",
           [](CaseSpec& w) {
             w.batch.padding_rows = {1, 8}, w.batch.pad_slot_id = 0;
           }),
  };
}

std::vector<CaseSpec> wide_rows() {
  return {
      {.name = "rows-65537", .shapes = {1, 1, 16, 8}, .batch = one_token_rows(kWideRows), .L = 2}};
}

const CaseSpec kServed{
    .name = "serving", .shapes = {16, 32, 128, 128}, .raw_gates = false, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

std::vector<Mistake> mistakes() {
  std::vector<Mistake> all = rings::kMistakes;
  const std::vector<Mistake> own{
      {"no-k-scale", "with keys of the ring as they came, without ring_k_scale"},
      {"scaled-k", "with the scaled key in ring_k instead of k as it came"},
      {"no-delta", "with v instead of v - S k (no delta rule)"},
      {"delta-of-state", "with S k of the state alone, without the ring's entries"},
      {"no-l2norm", "without the L2 norm of q and k"},
      {"always-l2norm", "with an L2 norm of q and k that was not asked for"},
      {"no-scale", "without the scale of q"},
      {"scale-twice", "with the scale of q applied twice"},
      {"default-scale", "with the scale K^-0.5 where another one was given"},
      {"no-beta", "without beta (1 in its place)"},
      {"beta-twice", "with beta applied twice"},
      {"raw-beta", "with beta as it came, without its sigmoid"},
      {"no-dt-bias", "without dt_bias in the decay"},
      {"no-softplus", "without the softplus in the decay"},
      {"no-exp-a-log", "with A_log taken for A, without its exp"},
      {"grow", "with the new token's decay turned around (exp(-g))"},
      {"transposed", "with the state transposed ([K, V] for [V, K])"},
      {"row-slots", "with row i on slot i, without state_indices"},
  };
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

bool is_ring_mistake(std::string_view mistake) {
  return rings::is_mistake(mistake) || mistake == "no-k-scale" || mistake == "scaled-k" ||
         mistake == "no-delta" || mistake == "delta-of-state";
}

template <class S>
struct RingHost : Host<S> {
  RingHost(const Case& c, std::string_view mistake)
      : Host<S>(c, mistake),
        ring_k(array_of<S, 4>(c, "ring_k")),
        ring_u(array_of<S, 4>(c, "ring_u")),
        ring_scale(array_of<S, 3>(c, "ring_k_scale")),
        ring_g(array_of<S, 3>(c, "ring_g")) {}
  reference::GatedDeltaRing<S> ring() {
    return {this->state.view(), ring_k.view(), ring_scale.view(), ring_u.view(), ring_g.view()};
  }
  Array<S, 4> ring_k, ring_u;
  Array<S, 3> ring_scale, ring_g;
};

/// A row's step with a mistake of rings.
template <class S>
void wrong_row(RingHost<S>& host, const reference::GatedDeltaRuleInputs<S>& in,
               const std::vector<Stand>& stands, std::int64_t row, std::int64_t slot,
               std::string_view mistake, const TensorView<S, 3>& out) {
  const std::int64_t L = host.ring_u.extent(2), H = in.k.extent(1), HV = in.v.extent(1);
  const Format format = in.rows.storage.state;
  const rings::Step step = rings::step_of(stands, static_cast<std::size_t>(row), L, mistake);
  if (mistake == "no-k-scale") {
    // Of live entries; the new one's is written all the same.
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t j = 0; j < step.live; ++j) host.ring_scale(slot, h, j) = 1;
  }
  std::vector<reference::ReplayState<S>> before;  // value heads share their keys
  for (std::int64_t hv = 0; hv < HV; ++hv)
    before.push_back(
        reference::replay_detail::read_ring<S>(host.ring(), slot, hv, step.live, format));
  for (std::int64_t hv = 0; hv < HV; ++hv) {
    const std::int64_t h = hv / (HV / H);
    const Vector<S> raw = as_vector(at(in.k, row, h)), v = as_vector(at(in.v, row, hv));
    const S k_scale = in.use_qk_l2norm ? S{1} / std::sqrt(raw.squaredNorm() + S{1e-6}) : S{1};
    const Vector<S> k = raw * k_scale,
                    q = reference::gated_delta_detail::direction(in, in.q, row, hv) *
                        reference::gated_delta_detail::scale_of(in);
    const reference::ReplayState<S>& own = before[static_cast<std::size_t>(hv)];
    const rings::WrongRing<S> ring(own, mistake);
    const S g = in.g(row, hv);
    Vector<S> seen = ring.read(g, k);
    if (mistake == "no-delta") seen.setZero();
    if (mistake == "delta-of-state")
      seen = std::exp(own.g.head(own.cursor).sum() + g) * (own.state * k);
    const Vector<S> u = in.beta(row, hv) * (v - seen);
    const Vector<S> o = ring.read(g, q) + k.dot(q) * u;
    mapped(at(out, row, hv)) = rounded_each(o, in.rows.storage.output);
    const Vector<S> kept = rounded_each(u, format);
    if (step.writes_state) mapped(at(host.state.view(), slot, hv)) = ring.written(k, kept, g);
    if (!step.writes_entry) continue;
    mapped(at(host.ring_k.view(), slot, h, step.entry)) = mistake == "scaled-k" ? k : raw;
    host.ring_scale(slot, h, step.entry) = k_scale;
    mapped(at(host.ring_u.view(), slot, hv, step.entry)) = kept;
    host.ring_g(slot, hv, step.entry) = g;
  }
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded) {
  RingHost<S> host(c, mistake);
  change_slots(host.rows, mistake, host.q.extent(0));
  if (mistake == "transposed") host.state = as_if_turned(host.state);
  const auto in = host.inputs(storage_of(c, "state", rounded));
  const Array<S, 3> scales = host.ring_scale;
  Array<S, 3> out(host.v.shape(), S{0});
  if (is_ring_mistake(mistake)) {
    const std::vector<Stand> stands = rings::stands_of(c);
    for (std::int64_t row = 0; row < host.q.extent(0); ++row)
      if (const std::int64_t slot = source_slot(in.rows.slots, row, host.state.extent(0));
          slot != kNoSlot)
        wrong_row<S>(host, in, stands, row, slot, mistake, out.view());
    if (mistake == "no-k-scale")  // the live entries' own stay in the ring
      for (std::int64_t i = 0; i < scales.size(); ++i)
        if (!std::isnan(scales.data()[i])) host.ring_scale.data()[i] = scales.data()[i];
  } else {
    const auto cursors = array_of<std::int32_t, 1>(c, "cursors");
    const auto positions = array_of<std::int32_t, 1>(c, "positions");
    reference::gated_delta_ring_update<S>(in, host.ring(), cursors.view(), positions.view(),
                                          out.view());
  }
  if (mistake == "transposed") host.state = turned_back(host.state);
  return {{"out", as_values(out)},
          {"state", as_values(host.state)},
          {"ring_k", as_values(host.ring_k)},
          {"ring_k_scale", as_values(host.ring_scale)},
          {"ring_u", as_values(host.ring_u)},
          {"ring_g", as_values(host.ring_g)}};
}

const JudgedKernel kOperation{
    .name = kName,
    .summary =
        "decode of the gated delta rule with a state that is written once in L tokens: 15 "
        "cases, 39 known mistakes",
    .positional = {"q", "k", "v", "g", "beta", "state", "ring_k", "ring_k_scale", "ring_u",
                   "ring_g", "cursors", "positions"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(planned<CaseSpec>({decodes(), listed_and_in_order(kServed)}, make),
                            planned<CaseSpec>({wide_rows()}, make), "decode");
        },
    .row_elements = kServed.shapes.HV * kServed.shapes.V * kServed.shapes.K,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = mistakes()};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_gated_delta_rule_ring_update
