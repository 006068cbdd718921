// torch.ops.lockstep.mamba1_decode and mamba1_prefill: schemas in kernels/torch/operators.md.
#include "kernels/torch/operator.hpp"
#include "kernels/torch/prefill_arguments.hpp"
#include "reference/recurrent/mamba1_decode.hpp"
#include "reference/recurrent/mamba1_prefill.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/models/mamba1_decode.hpp"
#include "kernels/models/mamba1_prefill.hpp"
#endif

namespace lockstep::torch_ops {
namespace {

/// Arguments that a step and a prefill of Mamba1 have alike: packed tokens, weights and states.
struct Mamba1Arguments {
  Tensor x, dt, A, B, C;  // [T, D], [T, D], [D, N], [T, N], [T, N]
  MaybeTensor D, z, dt_bias, state;

  void check() const {
    expect_rank(x, "x", 2);
    expect_rank(B, "B", 2);
    const std::int64_t T = x.size(0), channels = x.size(1);
    expect(1 <= channels && channels <= 1 << 20, "x", "[T, D] with D from 1 to 1048576", x.sizes());
    if (state) {
      expect_float(*state, "state");
      expect_rank(*state, "state", 3);
    }
    const std::int64_t N = state ? state->size(2) : B.size(1);
    if (state) expect_shape(*state, "state", "[slots, D, N]", {state->size(0), channels, N});
    expect(N >= 1, "B", "[T, N] with N at least 1", B.sizes());
    expect_shape(dt, "dt", "[T, D]", {T, channels});
    expect_shape(A, "A", "[D, N]", {channels, N});
    expect_type(A, at::kFloat, "A");
    expect_shape(B, "B", "[T, N]", {T, N});
    expect_shape(C, "C", "[T, N]", {T, N});
    expect_shape(z, "z", "[T, D]", {T, channels});
    expect_float(x, "x");
    expect_contiguous_rows(x, "x");
    for (const auto& [tensor, argument] :
         {std::pair{MaybeTensor(dt), "dt"}, {MaybeTensor(B), "B"}, {MaybeTensor(C), "C"}, {z, "z"}})
      check_rows_of_x(tensor, argument);
    for (const auto& [tensor, argument] : {std::pair{D, "D"}, {dt_bias, "dt_bias"}})
      check_weight(tensor, argument, "[D]", channels);
  }
  void check_rows_of_x(const MaybeTensor& tensor, const char* argument) const {
    expect_type(tensor, x.scalar_type(), argument);
    expect_contiguous_rows(tensor, argument);
  }
  static void check_weight(const MaybeTensor& tensor, const char* argument, const char* letters,
                           std::int64_t size) {
    expect_shape(tensor, argument, letters, {size});
    if (tensor) expect_float(*tensor, argument);
  }
};

struct Mamba1Decode : Arguments {
  static constexpr const char* kSchema = R"(
mamba1_decode(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, *,
    Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False,
    float? norm_eps=None, Tensor? dt_low=None, Tensor? b_weight=None, Tensor? c_weight=None,
    Tensor? state_indices=None, Tensor? state_out_indices=None, int pad_slot_id=-1) -> Tensor)";

  using Arguments::Arguments;
  const Tensor state = tensor(), x = tensor(), dt = tensor();
  const Tensor A = tensor(), B = tensor(), C = tensor();
  const MaybeTensor D = maybe_tensor(), z = maybe_tensor(), dt_bias = maybe_tensor();
  const bool dt_softplus = flag();
  const std::optional<float> norm_eps = as_float(maybe_number());
  const MaybeTensor dt_low = maybe_tensor();
  const MaybeTensor b_weight = maybe_tensor(), c_weight = maybe_tensor();
  const MaybeTensor state_indices = maybe_tensor(), state_out_indices = maybe_tensor();
  const std::int64_t pad_slot_id = integer();

  StateSlots slots() const { return slots_of(state_indices, state_out_indices, {}, pad_slot_id); }
  std::int64_t batch_rows() const { return rows_in({}, x); }

  Tensor meta() const { return like(x); }

  void check() const {
    const Mamba1Arguments all{x, dt, A, B, C, D, z, dt_bias, state};
    all.check();
    for (const auto& [tensor, argument] : {std::pair{b_weight, "b_weight"}, {c_weight, "c_weight"}})
      all.check_weight(tensor, argument, "[N]", B.size(1));
    expect(norm_eps.has_value() == dt_low.has_value(), "norm_eps and dt_low",
           "both given, or neither", "one of them");
    expect(norm_eps || !(b_weight || c_weight), "b_weight and c_weight", "absent without norm_eps",
           "given");
    if (dt_low) expect_rank(*dt_low, "dt_low", 2);
    if (dt_low)
      expect(dt_low->size(0) == x.size(0) && dt_low->size(1) >= 1, "dt_low",
             "[T, R], a row of x each", dt_low->sizes());
    all.check_rows_of_x(dt_low, "dt_low");
    expect(!slots().table && !slots().out_table, "state_indices and state_out_indices", "lists [T]",
           "a table");
    check_rows({}, slots(), x.size(0));
  }

  Tensor cpu() const {
    check();
    const HostTensor<2> hx(x, "x"), hdt(dt, "dt"), hA(A, "A"), hB(B, "B"), hC(C, "C"), hz(z, "z");
    const HostTensor<2> low(dt_low, "dt_low"), out = host_output<2>(x);
    const HostTensor<1> skip(D, "D"), bias(dt_bias, "dt_bias");
    const HostTensor<1> of_B(b_weight, "b_weight"), of_C(c_weight, "c_weight");
    const HostTensor<3> states(state, "state");
    check_host_slots({.tokens = x.size(0), .slots = slots()}, state.size(0), false);
    reference::mamba1_decode<float>({.x = hx.in(),
                                     .dt = hdt.in(),
                                     .A = hA.in(),
                                     .B = hB.in(),
                                     .C = hC.in(),
                                     .skip = skip.maybe(),
                                     .z = hz.maybe(),
                                     .dt_bias = bias.maybe(),
                                     .dt_softplus = dt_softplus,
                                     .norm_eps = norm_eps,
                                     .dt_low = low.maybe(),
                                     .b_weight = of_B.maybe(),
                                     .c_weight = of_C.maybe(),
                                     .slots = slots(),
                                     .storage = storage_of(x, state)},
                                    states.out(), out.out());
    states.write_back();
    return out.as(x.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = result_like(x);
    with_types(x, state, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      kernels::mamba1_decode<T, S>(
          {.x = view_of<const T, 2>(x, "x"),
           .dt = view_of<const T, 2>(dt, "dt"),
           .A = view_of<const float, 2>(A, "A"),
           .B = view_of<const T, 2>(B, "B"),
           .C = view_of<const T, 2>(C, "C"),
           .state = view_of<S, 3>(state, "state"),
           .out = view_of<T, 2>(out, "out"),
           .skip = mixed<1>(D, "D"),
           .z = maybe_view<const T, 2>(z, x.scalar_type(), "z"),
           .dt_bias = mixed<1>(dt_bias, "dt_bias"),
           .dt_softplus = dt_softplus,
           .slots = slots(),
           .norm_eps = norm_eps,
           .dt_low = maybe_view<const T, 2>(dt_low, x.scalar_type(), "dt_low"),
           .b_weight = mixed<1>(b_weight, "b_weight"),
           .c_weight = mixed<1>(c_weight, "c_weight")},
          stream());
    });
    return out;
  }
#endif
};

struct Mamba1Prefill : Arguments {
  static constexpr const char* kSchema = R"(
mamba1_prefill(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!)? state, *,
    Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False,
    Tensor? query_start_loc=None, Tensor? state_indices=None, Tensor? has_initial_state=None,
    int pad_slot_id=-1) -> Tensor)";

  using Arguments::Arguments;
  const Tensor x = tensor(), dt = tensor(), A = tensor(), B = tensor(), C = tensor();
  const MaybeTensor state = maybe_tensor();
  const MaybeTensor D = maybe_tensor(), z = maybe_tensor(), dt_bias = maybe_tensor();
  const bool dt_softplus = flag();
  const MaybeTensor query_start_loc = maybe_tensor(), state_indices = maybe_tensor();
  const MaybeTensor has_initial_state = maybe_tensor();
  const std::int64_t pad_slot_id = integer();

  PrefillArguments rows() const {
    return {false, query_start_loc, {}, state_indices, has_initial_state, pad_slot_id};
  }
  /// The state; without one an empty float32 tensor, which gives its type.
  Tensor state_or_float() const {
    return state ? *state : at::empty({0}, x.options().dtype(at::kFloat));
  }

  Tensor meta() const { return like(x); }

  void check() const {
    rows().check(x, "x", 2, state.has_value());
    Mamba1Arguments{x, dt, A, B, C, D, z, dt_bias, state}.check();
  }

  Tensor cpu() const {
    check();
    rows().check_host(x, state);
    const HostTensor<2> hx(x, "x"), hdt(dt, "dt"), hA(A, "A"), hB(B, "B"), hC(C, "C"), hz(z, "z");
    const HostTensor<2> out = host_output<2>(x);
    const HostTensor<1> skip(D, "D"), bias(dt_bias, "dt_bias");
    const HostTensor<3> states(state, "state");
    reference::mamba1_prefill<float>(
        {.x = hx.in(),
         .dt = hdt.in(),
         .A = hA.in(),
         .B = hB.in(),
         .C = hC.in(),
         .skip = skip.maybe(),
         .z = hz.maybe(),
         .dt_bias = bias.maybe(),
         .dt_softplus = dt_softplus,
         .rows = {.query_start_loc = indices_of(query_start_loc, "query_start_loc"),
                  .slots = rows().slots(),
                  .has_initial_state = rows().resumes(),
                  .storage = storage_of(x, state_or_float())}},
        states.maybe_out(), out.out());
    states.write_back();
    return out.as(x.scalar_type());
  }

#ifdef LOCKSTEP_HAS_CUDA
  Tensor cuda() const {
    check();
    const Tensor out = like(x), types = state_or_float();
    with_types(x, types, [&]<class T, class S>(TypeOf<T>, TypeOf<S>) {
      kernels::mamba1_prefill<T, S>({.x = view_of<const T, 2>(x, "x"),
                                     .dt = view_of<const T, 2>(dt, "dt"),
                                     .A = view_of<const float, 2>(A, "A"),
                                     .B = view_of<const T, 2>(B, "B"),
                                     .C = view_of<const T, 2>(C, "C"),
                                     .out = view_of<T, 2>(out, "out"),
                                     .state = maybe_view<S, 3>(state, types.scalar_type(), "state"),
                                     .skip = mixed<1>(D, "D"),
                                     .z = maybe_view<const T, 2>(z, x.scalar_type(), "z"),
                                     .dt_bias = mixed<1>(dt_bias, "dt_bias"),
                                     .dt_softplus = dt_softplus,
                                     .batch = rows().batch(x)},
                                    stream());
    });
    return out;
  }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  add_operator<Mamba1Decode>(m);
  add_operator<Mamba1Prefill>(m);
}

}  // namespace lockstep::torch_ops
