// The cases of selective_state_ring_update, its definition, and the mistakes that people make with
// rings of pending inputs.
#include <fmt/format.h>

#include "kernels/judge/operations/mamba2.hpp"
#include "kernels/judge/operations/rings.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_selective_state_ring_update {
namespace {

using namespace mamba2;
using rings::Stand;

constexpr std::string_view kName = "selective_state_ring_update";

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  std::int64_t H, G, P, N;
  Batch batch{};
  std::int64_t L = 16;
  bool D = true, z = false, dt_bias = true, softplus = true;
  bool limits = false;  ///< dt_min and dt_max
  Layout layout = Layout::plain;
  bool timed = false;
  bool dt_per_channel = false, snapshots = false;  ///< never set: shared code reads them
};

/// ring_x, ring_B and ring_dt, with steps that leave something of the oldest entry.
void add_rings(Case& c, Draw& draw, const CaseSpec& w, std::int64_t slots, ElementType type) {
  c.tensors.push_back(
      draw("ring_x", type, {slots, w.H, w.L, w.P}, {"slot", "head", "entry", "channel"}));
  c.tensors.push_back(
      draw("ring_B", type, {slots, w.G, w.L, w.N}, {"slot", "group", "entry", "column"}));
  c.tensors.push_back(
      draw("ring_dt", ElementType::float32, {slots, w.H, w.L}, {"slot", "head", "entry"}));
  for (double& x : c.tensors.back().values) x = 1.0 / 64 + std::abs(x) / 4;
  if (w.layout == Layout::strided)
    for (std::size_t i = 1; i < 4; ++i) spread(c.tensors[i], 0, 64);
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  const Batch batch = rows_of(w, options);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  const std::vector<Stand> stands = rings::stands(batch.rows(), w.L);
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 179 + T * 5 + w.N)));
  Case c{.name = w.name, .heads_per_group = w.H / w.G, .timed = w.timed};
  add_state(c, draw, w, slots, options.states);
  add_rings(c, draw, w, slots, options.activations);
  add_inputs(c, draw, w, T, options.activations);
  for (double& x : c.tensors[5].values) x = w.softplus ? x - (w.limits ? 0 : 1) : x / 4;  // dt
  batch.describe(c);
  rings::add_stands(c, batch, stands);
  add_options(c, draw, w, T, options.activations);
  for (const std::size_t i : {4, 5, 7, 8}) poison_padding(c.tensors[i], c);
  poison_unread(c.tensors[0], c);
  for (std::size_t i = 1; i < 4; ++i) rings::poison_ring(c.tensors[i], c, stands);
  c.tensors.push_back(
      Draw::output("out", options.activations, {T, w.H, w.P}, {"token", "head", "channel"}));
  c.bytes = rings::bytes_of_rings(c, {"ring_x", "ring_B", "ring_dt"}, stands, batch);
  for (const std::string_view name : {"x", "dt", "B", "C", "out"})
    c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, H={} G={} P={} N={}, rings of {}", counted(batch.rows(), "row"), w.H,
                        w.G, w.P, w.N, w.L);
  return c;
}

std::vector<CaseSpec> decodes() {
  const std::vector<std::int64_t> ten(10, 1), four(4, 1);
  const CaseSpec usual{.name = "", .H = 4, .G = 2, .P = 64, .N = 128, .batch = {.lengths = ten}};
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
      with("decode-gated", [](CaseSpec& w) { w.z = true; }),
      with("decode-strided", [](CaseSpec& w) { w.layout = Layout::strided; }),
      with("decode-n-first", [](CaseSpec& w) { w.layout = Layout::n_first; }),
      with("one-row", [&](CaseSpec& w) { w.batch.lengths = {1}; }),
      with("ring-of-1", [&](CaseSpec& w) { w.batch.lengths = four, w.L = 1; }),
      with("ring-of-2", [&](CaseSpec& w) { w.L = 2; }),
      with("ring-of-5", [&](CaseSpec& w) { w.L = 5; }),
      with("decode-bare",
           [](CaseSpec& w) { w.G = 4, w.D = false, w.dt_bias = false, w.softplus = false; }),
      with("decode-limits", [](CaseSpec& w) { w.z = true, w.limits = true; }),
      {.name = "decode-odd-sizes", .H = 6, .G = 3, .P = 63, .N = 17, .batch = {.lengths = ten}},
      {.name = "decode-many-rows", .H = 2, .G = 1, .P = 8, .N = 16, .batch = one_token_rows(130)},
      {.name = "decode-high-slots",
       .H = 1,
       .G = 1,
       .P = 4,
       .N = 4,
       .batch = {.lengths = four, .padding_rows = {1}, .first_slot = 33000},
       .L = 4},
      with("decode-pad-slot-0",
           [](CaseSpec& w) {
             w.batch.padding_rows = {1, 8}, w.batch.pad_slot_id = 0;
           }),
  };
}

std::vector<CaseSpec> wide_rows() {
  return {{.name = "rows-65537",
           .H = 1,
           .G = 1,
           .P = 8,
           .N = 16,
           .batch = one_token_rows(kWideRows),
           .L = 2}};
}

const CaseSpec kServed{.name = "serving", .H = 128, .G = 8, .P = 64, .N = 128, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

/// Those of rings, those of a token's inputs that are the same here, and two of the ring's entries.
std::vector<Mistake> mistakes() {
  std::vector<Mistake> all = rings::kMistakes;
  for (const std::string_view id :
       {"no-softplus", "always-softplus", "no-dt-bias", "bias-after", "no-limits", "no-dt-min",
        "no-dt-max", "no-D", "no-z", "log-A", "grow", "transposed", "row-slots"})
    for (const Mistake& one : kSharedMistakes)
      if (one.id == id) all.push_back(one);
  all.push_back({"raw-dt", "with dt in the ring as it came, before its bias and softplus"});
  all.push_back({"scaled-x", "with dt x in ring_x instead of x"});
  return all;
}

template <class S>
struct RingHost : HeadHost<S> {
  RingHost(const Case& c, std::string_view mistake)
      : HeadHost<S>(c, mistake),
        ring_x(array_of<S, 4>(c, "ring_x")),
        ring_B(array_of<S, 4>(c, "ring_B")),
        ring_dt(array_of<S, 3>(c, "ring_dt")) {}
  reference::Mamba2Ring<S> ring() {
    return {this->state.view(), ring_x.view(), ring_B.view(), ring_dt.view()};
  }
  Array<S, 4> ring_x, ring_B;
  Array<S, 3> ring_dt;
};

/// A row's step with a mistake of rings.
template <class S>
void wrong_row(RingHost<S>& host, const reference::Mamba2Inputs<S>& in,
               const std::vector<Stand>& stands, std::int64_t row, std::int64_t slot,
               std::string_view mistake, const TensorView<S, 3>& out) {
  const std::int64_t L = host.ring_x.extent(2), H = in.x.extent(1);
  const rings::Step step = rings::step_of(stands, static_cast<std::size_t>(row), L, mistake);
  Array<S, 1> A(Shape<1>{H});
  for (std::int64_t h = 0; h < H; ++h) A(h) = in.A(h, 0, 0);
  std::vector<reference::ReplayState<S>> before;  // groups share their entries
  for (std::int64_t h = 0; h < H; ++h)
    before.push_back(reference::replay_detail::read_ring<S>(
        host.ring(), std::as_const(A).view(), slot, h, step.live, in.rows.storage.state));
  for (std::int64_t h = 0; h < H; ++h) {
    const std::int64_t g = reference::mamba2_detail::group_of(in, h);
    const S d = reference::mamba2_detail::time_step(in, row, h, 0);
    const Vector<S> x = as_vector(at(in.x, row, h)), B = as_vector(at(in.B, row, g)),
                    C = as_vector(at(in.C, row, g));
    const rings::WrongRing<S> ring(before[static_cast<std::size_t>(h)], mistake);
    const Vector<S> y = ring.read(A(h) * d, C) + B.dot(C) * d * x;
    for (std::int64_t p = 0; p < y.size(); ++p)
      reference::mamba2_detail::write_output(in, row, h, p, y(p), out);
    if (step.writes_state)
      mapped(at(host.state.view(), slot, h)) = ring.written(B, d * x, A(h) * d);
    if (!step.writes_entry) continue;
    mapped(at(host.ring_x.view(), slot, h, step.entry)) = mistake == "scaled-x" ? d * x : x;
    mapped(at(host.ring_B.view(), slot, g, step.entry)) = B;
    host.ring_dt(slot, h, step.entry) = mistake == "raw-dt" ? in.dt(row, h, 0) : d;
  }
}

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded) {
  RingHost<S> host(c, mistake);
  change_slots(host.rows, mistake, host.x.extent(0));
  if (mistake == "transposed") host.state = as_if_turned(host.state);
  const reference::Mamba2Inputs<S> in = host.inputs(c, rounded);
  Array<S, 3> out(host.x.shape(), S{0});
  if (rings::is_mistake(mistake) || mistake == "raw-dt" || mistake == "scaled-x") {
    const std::vector<Stand> stands = rings::stands_of(c);
    for (std::int64_t row = 0; row < host.x.extent(0); ++row)
      if (const std::int64_t slot = source_slot(in.rows.slots, row, host.state.extent(0));
          slot != kNoSlot)
        wrong_row<S>(host, in, stands, row, slot, mistake, out.view());
  } else {
    const auto cursors = array_of<std::int32_t, 1>(c, "cursors");
    const auto positions = array_of<std::int32_t, 1>(c, "positions");
    reference::mamba2_ring_update<S>(in, host.ring(), cursors.view(), positions.view(), out.view());
  }
  if (mistake == "transposed") host.state = turned_back(host.state);
  return {{"out", as_values(out)},
          {"state", as_values(host.state)},
          {"ring_x", as_values(host.ring_x)},
          {"ring_B", as_values(host.ring_B)},
          {"ring_dt", as_values(host.ring_dt)}};
}

const JudgedKernel kOperation{
    .name = kName,
    .summary =
        "decode of Mamba2 with a state that is written once in L tokens: 16 cases, 36 known "
        "mistakes",
    .positional = {"state", "ring_x", "ring_B", "ring_dt", "x", "dt", "A", "B", "C", "cursors",
                   "positions"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(planned<CaseSpec>({decodes(), listed_and_in_order(kServed)}, make),
                            planned<CaseSpec>({wide_rows()}, make), "decode");
        },
    .row_elements = kServed.H * kServed.P * kServed.N,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = mistakes()};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_selective_state_ring_update
