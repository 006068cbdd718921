// torch.ops.lockstep.selective_state_update and selective_state_replay: schemas in
// kernels/torch/operators.md.
#include "reference/recurrent/mamba2.hpp"
#include "kernels/torch/operator.hpp"
#include "reference/recurrent/scaled_state.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/models/mamba1_decode.hpp"
#include "kernels/recurrent/selective_state_update.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

struct SelectiveStateUpdate : Arguments {
  static constexpr const char* kSchema = R"(
selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *,
    Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False,
    float? dt_min=None, float? dt_max=None, Tensor(c!)? state_scale=None,
    Tensor? state_indices=None, Tensor? state_out_indices=None, Tensor? query_start_loc=None,
    Tensor? num_accepted_tokens=None, Tensor(b!)? snapshots=None, int pad_slot_id=-1,
    Tensor? parents=None, bool read_only=False, Tensor(d!)? stash_decay=None,
    Tensor(e!)? stash_dt=None, int? rand_seed=None, int? scale_block=None) -> Tensor)";

  using Arguments::Arguments;
  const Tensor state = tensor(), x = tensor(), dt = tensor();
  const Tensor A = tensor(), B = tensor(), C = tensor();
  const MaybeTensor D = maybe_tensor(), z = maybe_tensor(), dt_bias = maybe_tensor();
  const bool dt_softplus = flag();
  const MaybeNumber dt_min = maybe_number(), dt_max = maybe_number();
  const MaybeTensor state_scale = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor(), state_out_indices = maybe_tensor();
  const MaybeTensor query_start_loc = maybe_tensor(), num_accepted_tokens = maybe_tensor();
  const MaybeTensor snapshots = maybe_tensor();
  const std::int64_t pad_slot_id = integer();
  const MaybeTensor parents = maybe_tensor();
  const bool read_only = flag();
  const MaybeTensor stash_decay = maybe_tensor(), stash_dt = maybe_tensor();
  const std::optional<std::int64_t> rand_seed = maybe_integer();
  const std::optional<std::int64_t> scale_block = maybe_integer();  ///< elements that share a scale

  StateSlots slots() const {
    return slots_of(state_indices, state_out_indices, num_accepted_tokens, pad_slot_id);
  }
  std::int64_t batch_rows() const { return rows_in(query_start_loc, x); }
  bool reads_only() const { return read_only || parents || snapshots; }

  Tensor meta() const { return like(x); }

  Tensor wide_dt() const { return repeated(dt, "dt", x.sizes(), 2); }
  Tensor wide_A() const { return repeated(A, "A", {x.size(1), x.size(2), B.size(2)}, 1); }
  MaybeTensor wide_D() const { return repeated(D, "D", {x.size(1), x.size(2)}, 1); }
  MaybeTensor wide_bias() const { return repeated(dt_bias, "dt_bias", {x.size(1), x.size(2)}, 1); }

  /// Checks the arguments for both devices, without reading values of indices.
  void check() const {
    expect_rank(x, "x", 3);
    expect_float(x, "x");
    const std::int64_t T = x.size(0), H = x.size(1), P = x.size(2);
    check_vectors(B, x);
    const std::int64_t G = B.size(1), N = B.size(2);
    expect_shape(C, "C", "[T, G, N]", {T, G, N});
    expect_type(C, B.scalar_type(), "C");
    expect_contiguous_rows(x, "x");
    expect_contiguous_rows(C, "C");
    expect_shape(z, "z", "[T, H, P]", {T, H, P});
    expect_states(state, "[slots, H, P, N]");
    expect_shape(state, "state", "[slots, H, P, N]", {state.size(0), H, P, N});
    expect_type(A, at::kFloat, "A");
    expect_float(wide_dt(), "dt");
    static_cast<void>(wide_A());
    for (const auto& [tensor, argument] :
         {std::pair{wide_D(), "D"}, {wide_bias(), "dt_bias"}, {z, "z"}})
      if (tensor) expect_float(*tensor, argument);
    check_recurrence_rows(query_start_loc, slots(), T);
    expect_type(snapshots, state.scalar_type(), "snapshots");
    expect_shape(snapshots, "snapshots", "[T, H, P, N]", {T, H, P, N});
    expect_type(parents, at::kInt, "parents");
    expect_shape(parents, "parents", "[T]", {T});
    check_stash();
    check_scales();
  }
  /// Expects B [T, G, N] in the type of x or float32.
  static void check_vectors(const Tensor& B, const Tensor& x) {
    expect_rank(B, "B", 3);
    const std::int64_t T = x.size(0), H = x.size(1), G = B.size(1), N = B.size(2);
    expect(G > 0 && H % G == 0, "B", "[T, G, N] with H a multiple of G", B.sizes());
    expect_shape(B, "B", "[T, G, N]", {T, G, N});
    expect(B.scalar_type() == x.scalar_type() || B.scalar_type() == at::kFloat, "B",
           "of the type of x, or float32", B.scalar_type());
    expect_contiguous_rows(B, "B");
  }
  void check_stash() const {
    const std::int64_t T = x.size(0), H = x.size(1);
    expect_together(stash_decay, stash_dt, "stash_decay and stash_dt");
    expect_type(stash_decay, at::kFloat, "stash_decay");
    expect_type(stash_dt, at::kFloat, "stash_dt");
    expect_shape(stash_decay, "stash_decay", "[T, H]", {T, H});
    expect_shape(stash_dt, "stash_dt", "[T, H]", {T, H});
    if (!stash_dt) return;
    const auto per_head = [](const MaybeTensor& tensor, std::int64_t first, const char* argument) {
      for (std::int64_t i = first; tensor && i < tensor->dim(); ++i)
        expect(tensor->stride(i) == 0 || tensor->size(i) <= 1, argument,
               "one number per head with a stash", tensor->sizes());
    };
    per_head(wide_A(), 1, "A");
    per_head(wide_dt(), 2, "dt");
    per_head(wide_bias(), 1, "dt_bias");
  }
  void check_scales() const {
    expect(!rand_seed || state_scale, "rand_seed", "absent without state_scale", "given");
    expect(!scale_block || state_scale, "scale_block", "absent without state_scale", "given");
    if (!state_scale) return expect_float(state, "state");
    const Format format = format_of(state);
    expect(format == Format::int8 || format == Format::e4m3, "state",
           "int8 or float8_e4m3fn with state_scale", state.scalar_type());
    expect_type(state_scale, at::kFloat, "state_scale");
    expect(!snapshots, "snapshots", "absent beside state_scale", "given");
    expect(block() >= 1, "scale_block", "at least 1", block());
    expect_shape(*state_scale, "state_scale", "[slots, H, P, ceil(N / scale_block)]",
                 {state.size(0), x.size(1), x.size(2), (B.size(2) + block() - 1) / block()});
  }
  /// Elements that share a scale; without scale_block a whole row.
  std::int64_t block() const { return scale_block.value_or(B.size(2)); }

  Tensor cpu() const {
    check();
    const HostTensor<3> hx(x, "x"), hdt(wide_dt(), "dt"), hA(wide_A(), "A"), hB(B, "B"), hC(C, "C"),
        hz(z, "z"), out = host_output<3>(x);
    const HostTensor<2> hD(wide_D(), "D"), hbias(wide_bias(), "dt_bias");
    const HostTensor<4> hstate{MaybeTensor(state)}, scales(state_scale),
        shots(read_only && !parents && !snapshots ? scratch_snapshots(state, x.size(0))
                                                  : snapshots);
    reference::Mamba2Inputs<float> in{
        .x = hx.in(),
        .dt = hdt.in(),
        .A = hA.in(),
        .B = hB.in(),
        .C = hC.in(),
        .D = hD.maybe(),
        .z = hz.maybe(),
        .dt_bias = hbias.maybe(),
        .dt_softplus = dt_softplus,
        .dt_min = as_float(dt_min),
        .dt_max = as_float(dt_max),
        .rows = {.tokens = x.size(0),
                 .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
                 .slots = slots(),
                 .storage = storage_of(x, state)}};
    check_host_slots(in.rows, state.size(0), reads_only());
    const auto update = [&](const TensorView<float, 4>& states) {
      reference::selective_state_update<float>(in, states, out.out(),
                                               indices_of(parents, "parents"), shots.maybe_out());
    };
    if (state_scale) {
      const Rows written = reads_only() ? Rows{} : in.rows;
      reference::ScaledStates<float> scaled{hstate.out(), scales.out(), block(), format_of(state)};
      if (rand_seed) scaled.stochastic = {.seed = static_cast<std::uint64_t>(*rand_seed)};
      in.rows.storage.state = Format::exact;
      reference::with_scaled_states(written, scaled, update);
    } else {
      update(hstate.out());
    }
    if (stash_dt) stash(in);
    if (!reads_only()) hstate.write_back();
    if (!reads_only()) scales.write_back();
    if (snapshots) shots.write_back();
    return out.as(x.scalar_type());
  }

  /// Writes exp(A d_t) and d_t of the rows that have a slot to the stash.
  void stash(const reference::Mamba2Inputs<float>& in) const {
    const reference::Mamba2Stash<float> all = reference::mamba2_stash(in);
    const auto decay = view_of<float, 2>(*stash_decay, "stash_decay");
    const auto step = view_of<float, 2>(*stash_dt, "stash_dt");
    for (std::int64_t row = 0; row < row_count(in.rows.query_start_loc, in.rows.tokens); ++row) {
      if (source_slot(in.rows.slots, row, state.size(0)) == kNoSlot) continue;
      const RowRange range = row_range(in.rows.query_start_loc, row, in.rows.tokens);
      for (std::int64_t t = range.begin; t < range.end; ++t) {
        mapped(at(decay, t)) = mapped(at(all.decay.view(), t));
        mapped(at(step, t)) = mapped(at(all.dt.view(), t));
      }
    }
  }

#ifdef LOCKSTEP_HAS_CUDA
  /// Whether the call is a step of Mamba1 in the types and strides that mamba1_decode takes: one
  /// head whose A differs within it, and a token of each row.
  bool is_mamba1_step(const Tensor& dt, const Tensor& A) const {
    const auto dense = [](const Tensor& v, std::int64_t row) {
      return v.stride(-1) == 1 && v.stride(-2) == row &&
             reinterpret_cast<std::uintptr_t>(v.data_ptr()) % 16 == 0;
    };
    const auto aligned = [&](const Tensor& v) {
      return dense(v, v.stride(-2)) && v.stride(0) * v.element_size() % 16 == 0;
    };
    const bool plain = !query_start_loc && !num_accepted_tokens && !reads_only() && !stash_dt &&
                       !state_scale && !dt_min && !dt_max && !slots().table && !slots().out_table;
    const auto type = x.scalar_type();
    return plain && x.size(1) == 1 && B.size(2) == kernels::kMamba1Columns &&
           dense(A, kernels::kMamba1Columns) && dense(state, kernels::kMamba1Columns) &&
           state.stride(0) * state.element_size() % 16 == 0 && dt.scalar_type() == type &&
           dt.stride(2) == 1 && B.scalar_type() == type && aligned(B) && aligned(C) &&
           (!z || (z->scalar_type() == type && z->stride(2) == 1));
  }
  template <class T, class S>
  void mamba1_step(const Tensor& dt, const Tensor& A, const MaybeTensor& D,
                   const MaybeTensor& dt_bias, const Tensor& out) const {
    const auto rows = [](const Tensor& v, const char* argument) {
      return view_of<const T, 2>(v.select(1, 0), argument);
    };
    const auto head = [](const MaybeTensor& v) { return v ? MaybeTensor(v->select(0, 0)) : v; };
    kernels::Mamba1Decode<T, S> in{.x = rows(x, "x"),
                                   .dt = rows(dt, "dt"),
                                   .A = view_of<const float, 2>(A.select(0, 0), "A"),
                                   .B = rows(B, "B"),
                                   .C = rows(C, "C"),
                                   .state = view_of<S, 3>(state.select(1, 0), "state"),
                                   .out = view_of<T, 2>(out.select(1, 0), "out"),
                                   .skip = mixed<1>(head(D), "D"),
                                   .dt_bias = mixed<1>(head(dt_bias), "dt_bias"),
                                   .dt_softplus = dt_softplus,
                                   .slots = slots()};
    if (z) in.z = rows(*z, "z");
    kernels::mamba1_decode<T, S>(in, stream());
  }

  Tensor cuda() const {
    check();
    const Tensor dt = wide_dt(), A = wide_A(), out = result_like(x);
    const MaybeTensor D = wide_D(), dt_bias = wide_bias();
    const auto update = [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      if constexpr (!kernels::kIsScaled<S>)
        if (is_mamba1_step(dt, A)) return mamba1_step<T, S>(dt, A, D, dt_bias, out);
      kernels::selective_state_update<T, S>(
          {.x = view_of<const T, 3>(x, "x"),
           .dt = mixed<3>(dt, "dt"),
           .A = mixed<3>(A, "A"),
           .B = mixed<3>(B, "B"),
           .C = mixed<3>(C, "C"),
           .state = view_of<S, 4>(state, "state"),
           .out = view_of<T, 3>(out, "out"),
           .D = mixed<2>(D, "D"),
           .z = mixed<3>(z, "z"),
           .dt_bias = mixed<2>(dt_bias, "dt_bias"),
           .dt_softplus = dt_softplus,
           .dt_min = as_float(dt_min),
           .dt_max = as_float(dt_max),
           .slots = slots(),
           .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
           .state_scale = maybe_view<float, 4>(state_scale, at::kFloat, "state_scale"),
           .scale_block = scale_block,
           .rand_seed = rand_seed,
           .snapshots = maybe_view<S, 4>(snapshots, state.scalar_type(), "snapshots"),
           .parents = indices_of(parents, "parents"),
           .read_only = read_only,
           .stash_decay = maybe_view<float, 2>(stash_decay, at::kFloat, "stash_decay"),
           .stash_dt = maybe_view<float, 2>(stash_dt, at::kFloat, "stash_dt")},
          stream());
    };
    if (state_scale)
      with_scaled_types(x, state, update);
    else
      with_types(x, state, update);
    if (ran_in_general_kernel()) {
      TORCH_WARN_ONCE(
          "selective_state_update ran in its general kernel, which can take ten times as long as ",
          "the others. They take N of 64, 128 or 256, P a multiple of 8, one A, dt and dt_bias a ",
          "head, B and C of the type of x, and rows at multiples of 16 bytes; got a state of ",
          state.sizes());
    }
    return out;
  }
#endif
};

struct SelectiveStateReplay : Arguments {
  static constexpr const char* kSchema = R"(
selective_state_replay(Tensor(a!) state, Tensor stash_decay, Tensor stash_dt, Tensor x, Tensor B,
    Tensor num_accepted_tokens, *, Tensor? state_indices=None, Tensor? query_start_loc=None,
    Tensor? nodes=None, int pad_slot_id=-1) -> ())";

  using Arguments::Arguments;
  const Tensor state = tensor(), stash_decay = tensor(), stash_dt = tensor();
  const Tensor x = tensor(), B = tensor(), num_accepted_tokens = tensor();
  const MaybeTensor state_indices = maybe_tensor(), query_start_loc = maybe_tensor();
  const MaybeTensor nodes = maybe_tensor();
  const std::int64_t pad_slot_id = integer();

  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }
  std::int64_t batch_rows() const { return rows_in(query_start_loc, x); }

  void meta() const {}

  void check() const {
    expect_rank(x, "x", 3);
    expect_float(x, "x");
    expect_contiguous_rows(x, "x");
    const std::int64_t T = x.size(0), H = x.size(1), P = x.size(2);
    SelectiveStateUpdate::check_vectors(B, x);
    expect_states(state, "[slots, H, P, N]");
    expect_float(state, "state");
    expect_shape(state, "state", "[slots, H, P, N]", {state.size(0), H, P, B.size(2)});
    expect_type(stash_decay, at::kFloat, "stash_decay");
    expect_type(stash_dt, at::kFloat, "stash_dt");
    expect_shape(stash_decay, "stash_decay", "[T, H]", {T, H});
    expect_shape(stash_dt, "stash_dt", "[T, H]", {T, H});
    check_replay(query_start_loc, slots(), T, num_accepted_tokens, nodes);
  }

  void cpu() const {
    check();
    const HostTensor<4> hstate(state, "state");
    const Rows rows{.tokens = x.size(0),
                    .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
                    .slots = slots(),
                    .storage = storage_of(x, state)};
    check_host_slots(rows, state.size(0), false);
    const auto array = [](auto array, const Tensor& from, const char* argument) {
      const HostTensor<decltype(array.view())::rank()> host(from, argument);
      for_each_element(host.in(),
                       [next = array.begin()](const auto&, float x) mutable { *next++ = x; });
      return array;
    };
    const std::int64_t T = x.size(0), H = x.size(1);
    reference::mamba2_replay<float>({array(Array<float, 2>({T, H}), stash_decay, "stash_decay"),
                                     array(Array<float, 2>({T, H}), stash_dt, "stash_dt"),
                                     array(Array<float, 3>({T, H, x.size(2)}), x, "x"),
                                     array(Array<float, 3>({T, B.size(1), B.size(2)}), B, "B")},
                                    rows, indices_of<1>(num_accepted_tokens, "num_accepted_tokens"),
                                    hstate.out(), indices_of<2>(nodes, "nodes"));
    hstate.write_back();
  }

#ifdef LOCKSTEP_HAS_CUDA
  void cuda() const {
    check();
    with_types(x, state, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      kernels::selective_state_replay<T, S>(
          {.decay = view_of<const float, 2>(stash_decay, "stash_decay"),
           .dt = view_of<const float, 2>(stash_dt, "stash_dt"),
           .x = view_of<const T, 3>(x, "x"),
           .B = mixed<3>(B, "B"),
           .query_start_loc = indices_of(query_start_loc, "query_start_loc")},
          view_of<S, 4>(state, "state"), slots(),
          indices_of<1>(num_accepted_tokens, "num_accepted_tokens"), indices_of<2>(nodes, "nodes"),
          stream());
    });
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<SelectiveStateUpdate>(m);
  add_operator<SelectiveStateReplay>(m);
}

}  // namespace lockstep::torch_ops
