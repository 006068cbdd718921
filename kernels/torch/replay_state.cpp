// torch.ops.lockstep.selective_state_ring_update, selective_state_ring_flush and those of the gated
// delta rule: schemas in kernels/torch/operators.md.
#include "kernels/torch/operator.hpp"
#include "reference/recurrent/replay_rings.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/replay/gated_delta_rule_ring.hpp"
#include "kernels/replay/selective_state_ring.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

#ifdef LOCKSTEP_HAS_CUDA
/// Calls body(TypeOf<S>) with the type of states; activations must be bfloat16.
template <class Body>
void with_ring_types(const Tensor& activations, const Tensor& state, Body body) {
  expect(activations.scalar_type() == at::kBFloat16, "the type of activations and rings",
         "bfloat16 on a GPU", activations.scalar_type());
  if (state.scalar_type() == at::kFloat) return body(TypeOf<float>());
  expect(state.scalar_type() == at::kBFloat16, "state", "float32 or bfloat16 on a GPU",
         state.scalar_type());
  return body(TypeOf<kernels::Bf16>());
}
#endif

/// Checks a step's rows: slots by a list, and a cursor and a position for each row.
void check_ring_rows(const StateSlots& slots, const Tensor& cursors, const Tensor& positions,
                     std::int64_t rows) {
  expect(!slots.table, "state_indices", "a list [N]", "a table");
  check_rows({}, slots, rows);
  for (const auto& [tensor, argument] : {std::pair{cursors, "cursors"}, {positions, "positions"}}) {
    expect_type(tensor, at::kInt, argument);
    expect_shape(tensor, argument, "[N]", {rows});
  }
}
/// Checks the values of slots, cursors and positions, on the CPU; the GPU skips bad rows.
void check_host_rings(const Rows& rows, std::int64_t slots, const Tensor& cursors,
                      const Tensor& positions, std::int64_t L) {
  check_host_slots(rows, slots, false);
  const IndexView cursor = indices_of<1>(cursors, "cursors");
  const IndexView position = indices_of<1>(positions, "positions");
  for (std::int64_t row = 0; row < rows.tokens; ++row) {
    if (source_slot(rows.slots, row, slots) == kNoSlot) continue;
    expect(position(row) >= 0, "positions", "at least 0", position(row));
    expect(cursor(row) >= 0 && cursor(row) <= position(row) % L, "cursors",
           "at least 0, and no more than the tokens since the last multiple of the ring's length",
           cursor(row));
  }
}
void check_length(const Tensor& ring, const char* argument, const char* letters) {
  expect_rank(ring, argument, 4);
  expect(1 <= ring.size(2) && ring.size(2) <= 16, argument,
         std::string(letters) + " with L of 1 to 16", ring.sizes());
}
void check_flush(const StateSlots& slots, const Tensor& counts, const Tensor& targets) {
  expect_rank(counts, "counts", 1);
  expect(!slots.table, "state_indices", "a list [N]", "a table");
  check_rows({}, slots, counts.size(0));
  expect_type(counts, at::kInt, "counts");
  expect_type(targets, at::kInt, "targets");
  expect_shape(targets, "targets", "[N]", {counts.size(0)});
}
void check_host_flush(StateSlots slots, const Tensor& counts, const Tensor& targets,
                      std::int64_t slot_count, std::int64_t L) {
  slots.out_indices = host_slots(targets, "targets", slot_count);
  check_host_slots({.tokens = counts.size(0), .slots = slots}, slot_count, false);
  const IndexView count = indices_of<1>(counts, "counts");
  for (std::int64_t row = 0; row < count.extent(0); ++row)
    expect(0 <= count(row) && count(row) <= L, "counts", "0 to the ring's length", count(row));
}

#ifdef LOCKSTEP_HAS_CUDA
/// The targets of a flush for its kernel, to which every number from 0 on is a slot.
Tensor targets_without_padding(const Tensor& targets, std::int64_t pad_slot_id) {
  return pad_slot_id < 0 ? targets : targets.masked_fill(targets.eq(pad_slot_id), -1);
}
#endif

// --- Mamba2 -------------------------------------------------------------------------------------

/// A pool of states and its rings.
struct SelectiveRing {
  Tensor state, x, B, dt;

  void check(at::ScalarType type) const {
    expect_states(state, "[slots, H, P, N]");
    expect_float(state, "state");
    check_length(x, "ring_x", "[slots, H, L, P]");
    expect_rank(B, "ring_B", 4);
    const std::int64_t slots = state.size(0), H = state.size(1), L = x.size(2), G = B.size(1);
    expect(G > 0 && H % G == 0, "ring_B", "[slots, G, L, N] with H a multiple of G", B.sizes());
    expect_shape(x, "ring_x", "[slots, H, L, P]", {slots, H, L, state.size(2)});
    expect_shape(B, "ring_B", "[slots, G, L, N]", {slots, G, L, state.size(3)});
    expect_shape(dt, "ring_dt", "[slots, H, L]", {slots, H, L});
    expect_type(x, type, "ring_x");
    expect_type(B, type, "ring_B");
    expect_type(dt, at::kFloat, "ring_dt");
  }
#ifdef LOCKSTEP_HAS_CUDA
  template <class S>
  kernels::SelectiveStateRing<S> views() const {
    return {view_of<S, 4>(state, "state"), view_of<kernels::Bf16, 4>(x, "ring_x"),
            view_of<kernels::Bf16, 4>(B, "ring_B"), view_of<float, 3>(dt, "ring_dt")};
  }
#endif
};

/// The same in float, as the reference takes it.
struct HostSelectiveRing {
  explicit HostSelectiveRing(const SelectiveRing& ring)
      : state{MaybeTensor(ring.state)},
        x(ring.x, "ring_x"),
        B(ring.B, "ring_B"),
        dt(ring.dt, "ring_dt") {}
  reference::Mamba2Ring<float> views() const { return {state.out(), x.out(), B.out(), dt.out()}; }
  const HostTensor<4> state, x, B;
  const HostTensor<3> dt;
};

struct SelectiveStateRingUpdate : Arguments {
  static constexpr const char* kSchema = R"(
selective_state_ring_update(Tensor(a!) state, Tensor(b!) ring_x, Tensor(c!) ring_B,
    Tensor(d!) ring_dt, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor cursors,
    Tensor positions, *, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None,
    bool dt_softplus=False, float? dt_min=None, float? dt_max=None, Tensor? state_indices=None,
    int pad_slot_id=-1, bool early_state=False) -> Tensor)";

  using Arguments::Arguments;
  const Tensor state = tensor(), ring_x = tensor(), ring_b = tensor(), ring_dt = tensor();
  const Tensor x = tensor(), dt = tensor(), A = tensor(), B = tensor(), C = tensor();
  const Tensor cursors = tensor(), positions = tensor();
  const MaybeTensor D = maybe_tensor(), z = maybe_tensor(), dt_bias = maybe_tensor();
  const bool dt_softplus = flag();
  const MaybeNumber dt_min = maybe_number(), dt_max = maybe_number();
  const MaybeTensor state_indices = maybe_tensor();
  const std::int64_t pad_slot_id = integer();
  const bool early_state = flag();

  SelectiveRing ring() const { return {state, ring_x, ring_b, ring_dt}; }
  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }
  std::int64_t batch_rows() const { return rows_in({}, x); }

  Tensor meta() const { return like(x); }

  void check() const {
    expect_rank(x, "x", 3);
    expect_float(x, "x");
    ring().check(x.scalar_type());
    const std::int64_t T = x.size(0), H = state.size(1), G = ring_b.size(1), N = state.size(3);
    expect_shape(x, "x", "[N, H, P]", {T, H, state.size(2)});
    for (const auto& [tensor, argument] : {std::pair{B, "B"}, {C, "C"}}) {
      expect_shape(tensor, argument, "[N, G, N]", {T, G, N});
      expect_type(tensor, x.scalar_type(), argument);
      expect_contiguous_rows(tensor, argument);
    }
    expect_contiguous_rows(x, "x");
    expect_shape(dt, "dt", "[N, H]", {T, H});
    expect_shape(A, "A", "[H]", {H});
    expect_type(A, at::kFloat, "A");
    expect_shape(D, "D", "[H]", {H});
    expect_shape(dt_bias, "dt_bias", "[H]", {H});
    expect_shape(z, "z", "[N, H, P]", {T, H, state.size(2)});
    for (const auto& [tensor, argument] :
         {std::pair{MaybeTensor(dt), "dt"}, {D, "D"}, {dt_bias, "dt_bias"}, {z, "z"}})
      if (tensor) expect_float(*tensor, argument);
    check_ring_rows(slots(), cursors, positions, T);
  }

  Tensor cpu() const {
    check();
    const at::IntArrayRef whole = x.sizes();
    const std::int64_t H = x.size(1), P = x.size(2), N = B.size(2);
    const HostTensor<3> hx(x, "x"), hdt(repeated(dt, "dt", whole, 2), "dt"),
        ha(repeated(A, "A", {H, P, N}, 1), "A"), hb(B, "B"), hc(C, "C"), hz(z, "z"),
        out = host_output<3>(x);
    const HostTensor<2> hd(repeated(D, "D", {H, P}, 1), "D"),
        hbias(repeated(dt_bias, "dt_bias", {H, P}, 1), "dt_bias");
    const HostSelectiveRing pools(ring());
    const reference::Mamba2Inputs<float> in{
        .x = hx.in(),
        .dt = hdt.in(),
        .A = ha.in(),
        .B = hb.in(),
        .C = hc.in(),
        .D = hd.maybe(),
        .z = hz.maybe(),
        .dt_bias = hbias.maybe(),
        .dt_softplus = dt_softplus,
        .dt_min = as_float(dt_min),
        .dt_max = as_float(dt_max),
        .rows = {.tokens = x.size(0), .slots = slots(), .storage = storage_of(x, state)}};
    check_host_rings(in.rows, state.size(0), cursors, positions, ring_x.size(2));
    reference::mamba2_ring_update<float>(in, pools.views(), indices_of<1>(cursors, "cursors"),
                                         indices_of<1>(positions, "positions"), out.out());
    for (const auto* tensor : {&pools.state, &pools.x, &pools.B}) tensor->write_back();
    pools.dt.write_back();
    return out.as(x.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(x);
    with_ring_types(x, state, [&]<class S>(TypeOf<S>) {
      kernels::selective_state_ring_update<S>({.ring = ring().views<S>(),
                                               .x = view_of<const kernels::Bf16, 3>(x, "x"),
                                               .dt = mixed<2>(dt, "dt"),
                                               .A = mixed<1>(A, "A"),
                                               .B = view_of<const kernels::Bf16, 3>(B, "B"),
                                               .C = view_of<const kernels::Bf16, 3>(C, "C"),
                                               .out = view_of<kernels::Bf16, 3>(out, "out"),
                                               .cursors = indices_of<1>(cursors, "cursors"),
                                               .positions = indices_of<1>(positions, "positions"),
                                               .D = mixed<1>(D, "D"),
                                               .z = mixed<3>(z, "z"),
                                               .dt_bias = mixed<1>(dt_bias, "dt_bias"),
                                               .dt_softplus = dt_softplus,
                                               .dt_min = as_float(dt_min),
                                               .dt_max = as_float(dt_max),
                                               .slots = slots(),
                                               .early_state = early_state},
                                              stream());
    });
    return out;
  }
#endif
};

struct SelectiveStateRingFlush : Arguments {
  static constexpr const char* kSchema = R"(
selective_state_ring_flush(Tensor(a!) state, Tensor ring_x, Tensor ring_B, Tensor ring_dt,
    Tensor A, Tensor counts, Tensor targets, *, Tensor? state_indices=None,
    int pad_slot_id=-1) -> ())";

  using Arguments::Arguments;
  const Tensor state = tensor(), ring_x = tensor(), ring_b = tensor(), ring_dt = tensor();
  const Tensor A = tensor(), counts = tensor(), targets = tensor();
  const MaybeTensor state_indices = maybe_tensor();
  const std::int64_t pad_slot_id = integer();

  SelectiveRing ring() const { return {state, ring_x, ring_b, ring_dt}; }
  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }
  std::int64_t batch_rows() const { return rows_in({}, counts); }

  void meta() const {}

  void check() const {
    expect_float(ring_x, "ring_x");
    ring().check(ring_x.scalar_type());
    expect_shape(A, "A", "[H]", {state.size(1)});
    expect_type(A, at::kFloat, "A");
    check_flush(slots(), counts, targets);
  }

  void cpu() const {
    check();
    check_host_flush(slots(), counts, targets, state.size(0), ring_x.size(2));
    const HostSelectiveRing pools(ring());
    const HostTensor<1> ha(A, "A");
    reference::mamba2_ring_flush<float>(pools.views(), ha.in(), indices_of<1>(counts, "counts"),
                                        indices_of<1>(targets, "targets"), slots(),
                                        torch_ops::format_of(state));
    pools.state.write_back();
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    check();
    const Tensor to = targets_without_padding(targets, pad_slot_id);
    with_ring_types(ring_x, state, [&]<class S>(TypeOf<S>) {
      kernels::selective_state_ring_flush<S>(ring().views<S>(), mixed<1>(A, "A"),
                                             indices_of<1>(counts, "counts"),
                                             indices_of<1>(to, "targets"), slots(), stream());
    });
  }
#endif
};

// --- The gated delta rule -----------------------------------------------------------------------

struct DeltaRing {
  Tensor state, k, k_scale, u, g;

  void check(at::ScalarType type) const {
    expect_states(state, "[slots, HV, V, K]");
    expect_float(state, "state");
    check_length(k, "ring_k", "[slots, H, L, K]");
    const std::int64_t slots = state.size(0), HV = state.size(1), H = k.size(1), L = k.size(2);
    expect(H > 0 && HV % H == 0, "ring_k", "[slots, H, L, K] with HV a multiple of H", k.sizes());
    expect_shape(k, "ring_k", "[slots, H, L, K]", {slots, H, L, state.size(3)});
    expect_shape(k_scale, "ring_k_scale", "[slots, H, L]", {slots, H, L});
    expect_shape(u, "ring_u", "[slots, HV, L, V]", {slots, HV, L, state.size(2)});
    expect_shape(g, "ring_g", "[slots, HV, L]", {slots, HV, L});
    expect_type(k, type, "ring_k");
    expect_type(u, state.scalar_type(), "ring_u");
    expect_type(k_scale, at::kFloat, "ring_k_scale");
    expect_type(g, at::kFloat, "ring_g");
  }
#ifdef LOCKSTEP_HAS_CUDA
  template <class S>
  kernels::GatedDeltaRuleRing<S> views() const {
    return {view_of<S, 4>(state, "state"), view_of<kernels::Bf16, 4>(k, "ring_k"),
            view_of<float, 3>(k_scale, "ring_k_scale"), view_of<S, 4>(u, "ring_u"),
            view_of<float, 3>(g, "ring_g")};
  }
#endif
};

struct HostDeltaRing {
  explicit HostDeltaRing(const DeltaRing& ring)
      : state{MaybeTensor(ring.state)},
        k(ring.k, "ring_k"),
        u(ring.u, "ring_u"),
        k_scale(ring.k_scale, "ring_k_scale"),
        g(ring.g, "ring_g") {}
  reference::GatedDeltaRing<float> views() const {
    return {state.out(), k.out(), k_scale.out(), u.out(), g.out()};
  }
  const HostTensor<4> state, k, u;
  const HostTensor<3> k_scale, g;
};

struct GatedDeltaRuleRingUpdate : Arguments {
  static constexpr const char* kSchema = R"(
gated_delta_rule_ring_update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state,
    Tensor(b!) ring_k, Tensor(c!) ring_k_scale, Tensor(d!) ring_u, Tensor(e!) ring_g,
    Tensor cursors, Tensor positions, *, float? scale=None, Tensor? A_log=None,
    Tensor? dt_bias=None, Tensor? state_indices=None, bool use_qk_l2norm=False,
    int pad_slot_id=-1, bool early_state=False) -> Tensor)";

  using Arguments::Arguments;
  const Tensor q = tensor(), k = tensor(), v = tensor(), g = tensor(), beta = tensor();
  const Tensor state = tensor(), ring_k = tensor(), ring_k_scale = tensor();
  const Tensor ring_u = tensor(), ring_g = tensor(), cursors = tensor(), positions = tensor();
  const MaybeNumber scale = maybe_number();
  const MaybeTensor A_log = maybe_tensor(), dt_bias = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor();
  const bool use_qk_l2norm = flag();
  const std::int64_t pad_slot_id = integer();
  const bool early_state = flag();

  DeltaRing ring() const { return {state, ring_k, ring_k_scale, ring_u, ring_g}; }
  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }
  std::int64_t batch_rows() const { return rows_in({}, v); }

  Tensor meta() const { return like(v); }

  void check() const {
    expect_rank(v, "v", 3);
    expect_float(v, "v");
    ring().check(v.scalar_type());
    const std::int64_t T = v.size(0), H = ring_k.size(1), HV = state.size(1), K = state.size(3);
    expect_shape(v, "v", "[N, HV, V]", {T, HV, state.size(2)});
    for (const auto& [tensor, argument] : {std::pair{q, "q"}, {k, "k"}}) {
      expect_shape(tensor, argument, "[N, H, K]", {T, H, K});
      expect_type(tensor, v.scalar_type(), argument);
      expect_contiguous_rows(tensor, argument);
    }
    expect_contiguous_rows(v, "v");
    expect_shape(g, "g", "[N, HV]", {T, HV});
    expect_shape(beta, "beta", "[N, HV]", {T, HV});
    expect_float(g, "g");
    expect_float(beta, "beta");
    expect_together(A_log, dt_bias, "A_log and dt_bias");
    expect_shape(A_log, "A_log", "[HV]", {HV});
    expect_shape(dt_bias, "dt_bias", "[HV]", {HV});
    for (const auto& [tensor, argument] : {std::pair{A_log, "A_log"}, {dt_bias, "dt_bias"}})
      if (tensor) expect_float(*tensor, argument);
    check_ring_rows(slots(), cursors, positions, T);
  }

  Tensor cpu() const {
    check();
    const HostTensor<3> hq(q, "q"), hk(k, "k"), hv(v, "v"), out = host_output<3>(v);
    const HostTensor<2> hg(g, "g"), hbeta(beta, "beta");
    const HostTensor<1> ha(A_log, "A_log"), hbias(dt_bias, "dt_bias");
    reference::GatedDeltaGates<float> gates;
    if (A_log) gates = reference::gated_delta_gates(hg.in(), hbeta.in(), ha.in(), hbias.in());
    const HostDeltaRing pools(ring());
    const reference::GatedDeltaRuleInputs<float> in{
        .q = hq.in(),
        .k = hk.in(),
        .v = hv.in(),
        .g = A_log ? std::as_const(gates.g).view() : hg.in(),
        .beta = A_log ? std::as_const(gates.beta).view() : hbeta.in(),
        .scale = as_float(scale),
        .use_qk_l2norm = use_qk_l2norm,
        .rows = {.tokens = v.size(0), .slots = slots(), .storage = storage_of(v, state)}};
    check_host_rings(in.rows, state.size(0), cursors, positions, ring_k.size(2));
    reference::gated_delta_ring_update<float>(in, pools.views(), indices_of<1>(cursors, "cursors"),
                                              indices_of<1>(positions, "positions"), out.out());
    for (const auto* tensor : {&pools.state, &pools.k, &pools.u}) tensor->write_back();
    for (const auto* tensor : {&pools.k_scale, &pools.g}) tensor->write_back();
    return out.as(v.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(v);
    with_ring_types(v, state, [&]<class S>(TypeOf<S>) {
      kernels::gated_delta_rule_ring_update<S>({.ring = ring().views<S>(),
                                                .q = view_of<const kernels::Bf16, 3>(q, "q"),
                                                .k = view_of<const kernels::Bf16, 3>(k, "k"),
                                                .v = view_of<const kernels::Bf16, 3>(v, "v"),
                                                .g = mixed<2>(g, "g"),
                                                .beta = mixed<2>(beta, "beta"),
                                                .out = view_of<kernels::Bf16, 3>(out, "out"),
                                                .cursors = indices_of<1>(cursors, "cursors"),
                                                .positions = indices_of<1>(positions, "positions"),
                                                .A_log = mixed<1>(A_log, "A_log"),
                                                .dt_bias = mixed<1>(dt_bias, "dt_bias"),
                                                .scale = as_float(scale),
                                                .use_qk_l2norm = use_qk_l2norm,
                                                .slots = slots(),
                                                .early_state = early_state},
                                               stream());
    });
    return out;
  }
#endif
};

struct GatedDeltaRuleRingFlush : Arguments {
  static constexpr const char* kSchema = R"(
gated_delta_rule_ring_flush(Tensor(a!) state, Tensor ring_k, Tensor ring_k_scale, Tensor ring_u,
    Tensor ring_g, Tensor counts, Tensor targets, *, Tensor? state_indices=None,
    int pad_slot_id=-1) -> ())";

  using Arguments::Arguments;
  const Tensor state = tensor(), ring_k = tensor(), ring_k_scale = tensor();
  const Tensor ring_u = tensor(), ring_g = tensor(), counts = tensor(), targets = tensor();
  const MaybeTensor state_indices = maybe_tensor();
  const std::int64_t pad_slot_id = integer();

  DeltaRing ring() const { return {state, ring_k, ring_k_scale, ring_u, ring_g}; }
  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }
  std::int64_t batch_rows() const { return rows_in({}, counts); }

  void meta() const {}

  void check() const {
    expect_float(ring_k, "ring_k");
    ring().check(ring_k.scalar_type());
    check_flush(slots(), counts, targets);
  }

  void cpu() const {
    check();
    check_host_flush(slots(), counts, targets, state.size(0), ring_k.size(2));
    const HostDeltaRing pools(ring());
    reference::gated_delta_ring_flush<float>(pools.views(), indices_of<1>(counts, "counts"),
                                             indices_of<1>(targets, "targets"), slots(),
                                             torch_ops::format_of(state));
    pools.state.write_back();
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    check();
    const Tensor to = targets_without_padding(targets, pad_slot_id);
    with_ring_types(ring_k, state, [&]<class S>(TypeOf<S>) {
      kernels::gated_delta_rule_ring_flush<S>(ring().views<S>(), indices_of<1>(counts, "counts"),
                                              indices_of<1>(to, "targets"), slots(), stream());
    });
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<SelectiveStateRingUpdate>(m);
  add_operator<SelectiveStateRingFlush>(m);
  add_operator<GatedDeltaRuleRingUpdate>(m);
  add_operator<GatedDeltaRuleRingFlush>(m);
}

}  // namespace lockstep::torch_ops
