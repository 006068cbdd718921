// The operators torch.ops.lockstep.*, with the schemas of reference/contract.md: CUDA tensors go to
// the kernels on the current stream, CPU tensors to the references in float with the rounding of
// the tensors' types, and torch.compile sees shapes (Meta). The only file of kernels/ that knows
// PyTorch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "reference/base/array.hpp"
#include "reference/causal_conv1d.hpp"
#include "reference/gated_delta_rule.hpp"
#include "reference/mamba2.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/base/shapes.hpp"
#include "kernels/causal_conv1d_update.hpp"
#include "kernels/gated_delta_rule_update.hpp"
#include "kernels/selective_state_update.hpp"
#include "kernels/state_copy.hpp"
#endif

namespace lockstep {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// --- Tensors as views
// -----------------------------------------------------------------------------

template <std::size_t Rank>
void expect_rank(const Tensor& tensor, const char* argument) {
  TORCH_CHECK(tensor.dim() == Rank, argument, " is expected to have ", Rank, " dimensions; got ",
              tensor.sizes());
}

template <class T, std::size_t Rank>
TensorView<T, Rank> view_of(const Tensor& tensor, const char* argument) {
  expect_rank<Rank>(tensor, argument);
  Shape<Rank> extents{}, strides{};
  for (std::size_t i = 0; i < Rank; ++i) {
    extents[i] = tensor.size(static_cast<std::int64_t>(i));
    strides[i] = tensor.stride(static_cast<std::int64_t>(i));
  }
  return make_view(static_cast<T*>(tensor.data_ptr()), extents, strides);
}

const std::int32_t* indices_of(const Tensor& tensor, const char* argument) {
  TORCH_CHECK(tensor.scalar_type() == at::kInt, argument, " is expected to be int32; got ",
              tensor.scalar_type());
  return static_cast<const std::int32_t*>(tensor.data_ptr());
}

std::optional<IndexView> index_view(const MaybeTensor& tensor, const char* argument) {
  if (!tensor) return {};
  indices_of(*tensor, argument);
  return view_of<const std::int32_t, 1>(*tensor, argument);
}

struct SlotArguments {
  const MaybeTensor& state_indices;
  const MaybeTensor& state_out_indices;
  const MaybeTensor& num_accepted_tokens;
  std::int64_t pad_slot_id;
};

StateSlots slots_of(const SlotArguments& in) {
  StateSlots slots{.pad_slot_id = static_cast<std::int32_t>(in.pad_slot_id)};
  if (in.state_indices && in.state_indices->dim() == 2) {
    indices_of(*in.state_indices, "state_indices");
    slots.table = view_of<const std::int32_t, 2>(*in.state_indices, "state_indices");
  } else {
    slots.indices = index_view(in.state_indices, "state_indices");
  }
  slots.out_indices = index_view(in.state_out_indices, "state_out_indices");
  slots.num_accepted = index_view(in.num_accepted_tokens, "num_accepted_tokens");
  return slots;
}

bool is_silu(c10::string_view activation) {
  TORCH_CHECK(activation == "none" || activation == "silu",
              "activation is expected to be \"none\" or \"silu\"; got \"", activation, "\"");
  return activation == "silu";
}

Format format_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16: return Format::bf16;
    case at::kHalf: return Format::fp16;
    default: return Format::float32;
  }
}

/// [H] or [H, P] as [H, P]; [T, H] or [T, H, P] as [T, H, P]; [H] or [H, P, N] as [H, P, N].
Tensor repeated(const Tensor& tensor, at::IntArrayRef shape) {
  Tensor wide = tensor;
  while (wide.dim() < static_cast<std::int64_t>(shape.size())) wide = wide.unsqueeze(-1);
  return wide.expand(shape);
}
MaybeTensor repeated(const MaybeTensor& tensor, at::IntArrayRef shape) {
  if (!tensor) return {};
  return repeated(*tensor, shape);
}

// --- The CPU: references in float
// -----------------------------------------------------------------

/// A float copy of a tensor that can be written back.
template <std::size_t Rank>
struct HostTensor {
  explicit HostTensor(const Tensor& tensor) : values(tensor.to(at::kFloat).contiguous()) {}
  explicit HostTensor(const MaybeTensor& tensor)
      : values(tensor ? tensor->to(at::kFloat).contiguous() : Tensor()) {}
  explicit operator bool() const { return values.defined(); }
  TensorView<const float, Rank> in() const {
    return view_of<const float, Rank>(values, "an input");
  }
  TensorView<float, Rank> out() { return view_of<float, Rank>(values, "an output"); }
  std::optional<TensorView<const float, Rank>> maybe() const {
    return values.defined() ? std::optional(in()) : std::nullopt;
  }
  std::optional<TensorView<float, Rank>> maybe_out() {
    return values.defined() ? std::optional(out()) : std::nullopt;
  }
  Tensor values;
};

StoragePoints storage_of(const Tensor& out, const Tensor& state) {
  return {.state = format_of(state), .output = format_of(out)};
}

// --- The GPU
// --------------------------------------------------------------------------------------

#ifdef LOCKSTEP_HAS_CUDA
void expect_float(const Tensor& tensor, const char* argument) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, argument,
              " is expected to be float32, bfloat16 or float16; got ", type);
}

template <std::size_t Rank>
kernels::MixedView<Rank> mixed(const Tensor& tensor, const char* argument) {
  expect_float(tensor, argument);
  kernels::MixedView<Rank> view(view_of<const float, Rank>(tensor, argument));
  view.format = format_of(tensor);
  return view;
}
template <std::size_t Rank>
kernels::MixedView<Rank> mixed(const MaybeTensor& tensor, const char* argument) {
  return tensor ? mixed<Rank>(*tensor, argument) : kernels::MixedView<Rank>();
}

template <class T>
struct TypeOf {
  using type = T;
};

/// body(TypeOf<T>, TypeOf<S>) for the types of activations and states.
template <class Body>
void with_types(const Tensor& x, const Tensor& state, Body body) {
  using kernels::Bf16;
  using kernels::Fp16;
  expect_float(x, "x, q, k and v");
  expect_float(state, "state");
  const Format a = format_of(x), s = format_of(state);
#define LOCKSTEP_CASE(T, S)                                         \
  if (a == kernels::format_of<T>() && s == kernels::format_of<S>()) \
    return body(TypeOf<T>(), TypeOf<S>());
  LOCKSTEP_SERVING_TYPES(LOCKSTEP_CASE)
#ifdef LOCKSTEP_ALL_SHAPES
  LOCKSTEP_OTHER_TYPES(LOCKSTEP_CASE)
#endif
#undef LOCKSTEP_CASE
  TORCH_CHECK(false,
              "the types of activations and state are expected to be bfloat16 beside float32 or "
              "bfloat16 in a build without LOCKSTEP_ALL_SHAPES; got ",
              x.scalar_type(), " and ", state.scalar_type());
}

void expect_type(const Tensor& tensor, const Tensor& as, const char* argument) {
  TORCH_CHECK(tensor.scalar_type() == as.scalar_type(), argument, " is expected to be ",
              as.scalar_type(), "; got ", tensor.scalar_type());
}

cudaStream_t stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}
#endif

// --- causal_conv1d_update
// -------------------------------------------------------------------------

Tensor conv_update_cpu(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                       const MaybeTensor& bias, const MaybeTensor& state_indices,
                       const MaybeTensor& num_accepted_tokens, const MaybeTensor& query_start_loc,
                       const MaybeTensor& parents, const MaybeTensor& snapshots,
                       c10::string_view activation, std::int64_t pad_slot_id) {
  const HostTensor<2> hx(x), hw(weight);
  const HostTensor<1> hb(bias);
  HostTensor<3> state(conv_state), shots(snapshots);
  HostTensor<2> out(at::empty_like(hx.values));
  const reference::CausalConv1dInputs<float> in{
      .x = hx.in(),
      .weight = hw.in(),
      .bias = hb.maybe(),
      .query_start_loc = index_view(query_start_loc, "query_start_loc"),
      .slots = slots_of({state_indices, {}, num_accepted_tokens, pad_slot_id}),
      .activation = is_silu(activation) ? reference::Activation::silu : reference::Activation::none,
      .storage = storage_of(x, conv_state)};
  reference::causal_conv1d_update<float>(in, state.out(), out.out(), index_view(parents, "parents"),
                                         shots.maybe_out());
  conv_state.copy_(state.values);
  if (snapshots) snapshots->copy_(shots.values);
  return out.values.to(x.scalar_type());
}

#ifdef LOCKSTEP_HAS_CUDA
Tensor conv_update_cuda(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                        const MaybeTensor& bias, const MaybeTensor& state_indices,
                        const MaybeTensor& num_accepted_tokens, const MaybeTensor& query_start_loc,
                        const MaybeTensor& parents, const MaybeTensor& snapshots,
                        c10::string_view activation, std::int64_t pad_slot_id) {
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor out = at::empty(x.sizes(), x.options());
  const bool silu = is_silu(activation);
  with_types(x, conv_state, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    kernels::CausalConv1dUpdate<T, S> in{
        .x = view_of<const T, 2>(x, "x"),
        .conv_state = view_of<S, 3>(conv_state, "conv_state"),
        .weight = mixed<2>(weight, "weight"),
        .out = view_of<T, 2>(out, "out"),
        .bias = mixed<1>(bias, "bias"),
        .silu = silu,
        .slots = slots_of({state_indices, {}, num_accepted_tokens, pad_slot_id}),
        .query_start_loc = index_view(query_start_loc, "query_start_loc"),
        .parents = index_view(parents, "parents")};
    if (snapshots) {
      expect_type(*snapshots, conv_state, "snapshots");
      in.snapshots = view_of<S, 3>(*snapshots, "snapshots");
    }
    kernels::causal_conv1d_update(in, stream());
  });
  return out;
}
#endif

Tensor like_first(const Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

Tensor conv_update_meta(const Tensor& x, const Tensor&, const Tensor&, const MaybeTensor&,
                        const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                        const MaybeTensor&, const MaybeTensor&, c10::string_view, std::int64_t) {
  return like_first(x);
}

// --- selective_state_update
// -----------------------------------------------------------------------

Tensor ssu_cpu(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A,
               const Tensor& B, const Tensor& C, const MaybeTensor& D, const MaybeTensor& z,
               const MaybeTensor& dt_bias, bool dt_softplus, std::optional<double> dt_min,
               std::optional<double> dt_max, const MaybeTensor& state_scale,
               const MaybeTensor& state_indices, const MaybeTensor& state_out_indices,
               const MaybeTensor& query_start_loc, const MaybeTensor& num_accepted_tokens,
               const MaybeTensor& snapshots, std::int64_t pad_slot_id, const MaybeTensor& parents) {
  TORCH_CHECK(!state_scale,
              "state_scale is expected to be absent: states are float32, bfloat16 or "
              "float16");
  TORCH_CHECK(A.scalar_type() == at::kFloat, "A is expected to be float32; got ", A.scalar_type());
  const std::int64_t H = x.size(1), P = x.size(2), N = B.size(2);
  const HostTensor<3> hx(x), hdt(repeated(dt, x.sizes())), hA(repeated(A, {H, P, N})), hB(B), hC(C),
      hz(z);
  const HostTensor<2> hD(repeated(D, {H, P})), hbias(repeated(dt_bias, {H, P}));
  HostTensor<4> hstate(state), shots(snapshots);
  HostTensor<3> out(at::empty_like(hx.values));
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
      .rows = {
          .query_start_loc = index_view(query_start_loc, "query_start_loc"),
          .slots = slots_of({state_indices, state_out_indices, num_accepted_tokens, pad_slot_id}),
          .storage = storage_of(x, state)}};
  if (dt_min) in.dt_min = static_cast<float>(*dt_min);
  if (dt_max) in.dt_max = static_cast<float>(*dt_max);
  reference::selective_state_update<float>(in, hstate.out(), out.out(),
                                           index_view(parents, "parents"), shots.maybe_out());
  state.copy_(hstate.values);
  if (snapshots) snapshots->copy_(shots.values);
  return out.values.to(x.scalar_type());
}

#ifdef LOCKSTEP_HAS_CUDA
Tensor ssu_cuda(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A,
                const Tensor& B, const Tensor& C, const MaybeTensor& D, const MaybeTensor& z,
                const MaybeTensor& dt_bias, bool dt_softplus, std::optional<double> dt_min,
                std::optional<double> dt_max, const MaybeTensor& state_scale,
                const MaybeTensor& state_indices, const MaybeTensor& state_out_indices,
                const MaybeTensor& query_start_loc, const MaybeTensor& num_accepted_tokens,
                const MaybeTensor& snapshots, std::int64_t pad_slot_id,
                const MaybeTensor& parents) {
  TORCH_CHECK(!state_scale,
              "state_scale is expected to be absent: states are float32, bfloat16 or "
              "float16");
  const c10::cuda::CUDAGuard guard(x.device());
  expect_rank<3>(x, "x");
  expect_rank<3>(B, "B");
  expect_type(B, x, "B");
  expect_type(C, x, "C");
  const std::int64_t H = x.size(1), P = x.size(2), N = B.size(2);
  const Tensor wide_dt = repeated(dt, x.sizes()), wide_A = repeated(A, {H, P, N});
  const MaybeTensor wide_D = repeated(D, {H, P}), wide_bias = repeated(dt_bias, {H, P});
  Tensor out = at::empty(x.sizes(), x.options());
  with_types(x, state, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    kernels::SelectiveStateUpdate<T, S> in{
        .x = view_of<const T, 3>(x, "x"),
        .dt = mixed<3>(wide_dt, "dt"),
        .A = mixed<3>(wide_A, "A"),
        .B = view_of<const T, 3>(B, "B"),
        .C = view_of<const T, 3>(C, "C"),
        .state = view_of<S, 4>(state, "state"),
        .out = view_of<T, 3>(out, "out"),
        .D = mixed<2>(wide_D, "D"),
        .z = mixed<3>(z, "z"),
        .dt_bias = mixed<2>(wide_bias, "dt_bias"),
        .dt_softplus = dt_softplus,
        .slots = slots_of({state_indices, state_out_indices, num_accepted_tokens, pad_slot_id}),
        .query_start_loc = index_view(query_start_loc, "query_start_loc"),
        .parents = index_view(parents, "parents")};
    if (dt_min) in.dt_min = static_cast<float>(*dt_min);
    if (dt_max) in.dt_max = static_cast<float>(*dt_max);
    if (snapshots) {
      expect_type(*snapshots, state, "snapshots");
      in.snapshots = view_of<S, 4>(*snapshots, "snapshots");
    }
    kernels::selective_state_update(in, stream());
  });
  return out;
}
#endif

Tensor ssu_meta(const Tensor&, const Tensor& x, const Tensor&, const Tensor&, const Tensor&,
                const Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, bool,
                std::optional<double>, std::optional<double>, const MaybeTensor&,
                const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                const MaybeTensor&, std::int64_t, const MaybeTensor&) {
  return like_first(x);
}

// --- gated_delta_rule_update
// ----------------------------------------------------------------------

Tensor gdn_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
               const Tensor& beta, const Tensor& state, std::optional<double> scale,
               const MaybeTensor& A_log, const MaybeTensor& dt_bias,
               const MaybeTensor& query_start_loc, const MaybeTensor& state_indices,
               const MaybeTensor& state_out_indices, const MaybeTensor& num_accepted_tokens,
               bool use_qk_l2norm, std::int64_t pad_slot_id, const MaybeTensor& parents,
               const MaybeTensor& snapshots) {
  TORCH_CHECK(A_log.has_value() == dt_bias.has_value(),
              "A_log and dt_bias are expected to be both given, or neither");
  const HostTensor<3> hq(q), hk(k), hv(v);
  const HostTensor<2> hg(g), hbeta(beta);
  const HostTensor<1> hA(A_log), hbias(dt_bias);
  HostTensor<4> hstate(state), shots(snapshots);
  HostTensor<3> out(at::empty_like(hv.values));
  reference::GatedDeltaGates<float> gates;
  reference::GatedDeltaRuleInputs<float> in{
      .q = hq.in(),
      .k = hk.in(),
      .v = hv.in(),
      .g = hg.in(),
      .beta = hbeta.in(),
      .use_qk_l2norm = use_qk_l2norm,
      .rows = {
          .query_start_loc = index_view(query_start_loc, "query_start_loc"),
          .slots = slots_of({state_indices, state_out_indices, num_accepted_tokens, pad_slot_id}),
          .storage = storage_of(v, state)}};
  if (scale) in.scale = static_cast<float>(*scale);
  if (A_log) {
    gates = reference::gated_delta_gates<float>(hg.in(), hbeta.in(), hA.in(), hbias.in());
    in.g = gates.g;
    in.beta = gates.beta;
  }
  reference::gated_delta_rule_update<float>(in, hstate.out(), out.out(),
                                            index_view(parents, "parents"), shots.maybe_out());
  state.copy_(hstate.values);
  if (snapshots) snapshots->copy_(shots.values);
  return out.values.to(v.scalar_type());
}

#ifdef LOCKSTEP_HAS_CUDA
Tensor gdn_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const Tensor& beta, const Tensor& state, std::optional<double> scale,
                const MaybeTensor& A_log, const MaybeTensor& dt_bias,
                const MaybeTensor& query_start_loc, const MaybeTensor& state_indices,
                const MaybeTensor& state_out_indices, const MaybeTensor& num_accepted_tokens,
                bool use_qk_l2norm, std::int64_t pad_slot_id, const MaybeTensor& parents,
                const MaybeTensor& snapshots) {
  const c10::cuda::CUDAGuard guard(q.device());
  expect_type(k, q, "k");
  expect_type(v, q, "v");
  Tensor out = at::empty(v.sizes(), v.options());
  with_types(q, state, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    kernels::GatedDeltaRuleUpdate<T, S> in{
        .tokens = {.q = view_of<const T, 3>(q, "q"),
                   .k = view_of<const T, 3>(k, "k"),
                   .v = view_of<const T, 3>(v, "v"),
                   .g = mixed<2>(g, "g"),
                   .beta = mixed<2>(beta, "beta"),
                   .query_start_loc = index_view(query_start_loc, "query_start_loc")},
        .state = view_of<S, 4>(state, "state"),
        .out = view_of<T, 3>(out, "out"),
        .slots = slots_of({state_indices, state_out_indices, num_accepted_tokens, pad_slot_id}),
        .A_log = mixed<1>(A_log, "A_log"),
        .dt_bias = mixed<1>(dt_bias, "dt_bias"),
        .use_qk_l2norm = use_qk_l2norm,
        .parents = index_view(parents, "parents")};
    if (scale) in.scale = static_cast<float>(*scale);
    if (snapshots) {
      expect_type(*snapshots, state, "snapshots");
      in.snapshots = view_of<S, 4>(*snapshots, "snapshots");
    }
    kernels::gated_delta_rule_update(in, stream());
  });
  return out;
}
#endif

Tensor gdn_meta(const Tensor&, const Tensor&, const Tensor& v, const Tensor&, const Tensor&,
                const Tensor&, std::optional<double>, const MaybeTensor&, const MaybeTensor&,
                const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                bool, std::int64_t, const MaybeTensor&, const MaybeTensor&) {
  return like_first(v);
}

// --- state_copy, state_scatter_accepted
// -----------------------------------------------------------

void state_copy_cpu(const Tensor& state, const Tensor& source, const Tensor& target) {
  indices_of(source, "source");
  indices_of(target, "target");
  TORCH_CHECK(source.sizes() == target.sizes() && source.dim() == 1,
              "source and target are expected to be [moves]; got ", source.sizes(), " and ",
              target.sizes());
  const Tensor s = source.to(at::kLong), t = target.to(at::kLong);
  const Tensor named = s.ge(0)
                           .logical_and(s.lt(state.size(1)))
                           .logical_and(t.ge(0))
                           .logical_and(t.lt(state.size(1)));
  const Tensor from = s.masked_select(named), to = t.masked_select(named);
  state.index_copy_(1, to, state.index_select(1, from));
}

void scatter_cpu(const Tensor& state, const Tensor& intermediate, const Tensor& slots,
                 const Tensor& num_accepted_tokens) {
  const std::int32_t* const slot = indices_of(slots, "slots");
  const std::int32_t* const accepted = indices_of(num_accepted_tokens, "num_accepted_tokens");
  for (std::int64_t b = 0; b < intermediate.size(0); ++b) {
    const std::int32_t n = accepted[b * num_accepted_tokens.stride(0)];
    const std::int32_t to = slot[b * slots.stride(0)];
    if (n <= 0 || to < 0) continue;
    TORCH_CHECK(n <= intermediate.size(1),
                "num_accepted_tokens is expected to be at most T = ", intermediate.size(1),
                "; got ", n);
    TORCH_CHECK(to < state.size(0), "slots is expected to be below ", state.size(0), "; got ", to);
    state.select(0, to).copy_(intermediate.select(0, b).select(0, n - 1));
  }
}

#ifdef LOCKSTEP_HAS_CUDA
/// A tensor [layers, slots, ...] as rows of bytes.
kernels::StatePoolBytes pool_of(const Tensor& tensor, const char* argument) {
  TORCH_CHECK(tensor.dim() >= 3, argument, " is expected to have at least 3 dimensions; got ",
              tensor.sizes());
  const Tensor row = tensor.select(0, 0).select(0, 0);
  TORCH_CHECK(row.is_contiguous(), argument, " is expected to have contiguous states; got strides ",
              tensor.strides());
  const std::int64_t size = tensor.element_size();
  return {tensor.data_ptr(),  tensor.size(0),          tensor.size(1),
          row.numel() * size, tensor.stride(0) * size, tensor.stride(1) * size};
}

void state_copy_cuda(const Tensor& state, const Tensor& source, const Tensor& target) {
  const c10::cuda::CUDAGuard guard(state.device());
  kernels::state_copy(pool_of(state, "state"), *index_view(source, "source"),
                      *index_view(target, "target"), stream());
}

void scatter_cuda(const Tensor& state, const Tensor& intermediate, const Tensor& slots,
                  const Tensor& num_accepted_tokens) {
  const c10::cuda::CUDAGuard guard(state.device());
  expect_type(intermediate, state, "intermediate");
  kernels::state_scatter_accepted(
      pool_of(state.unsqueeze(0), "state"), pool_of(intermediate, "intermediate"),
      *index_view(slots, "slots"), *index_view(num_accepted_tokens, "num_accepted_tokens"),
      stream());
}
#endif

}  // namespace

TORCH_LIBRARY(lockstep, m) {
  m.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, *, "
      "Tensor? "
      "state_indices=None, Tensor? num_accepted_tokens=None, Tensor? query_start_loc=None, Tensor? "
      "parents=None, Tensor(b!)? snapshots=None, str activation=\"none\", int pad_slot_id=-1) -> "
      "Tensor");
  m.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
      "*, "
      "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float? "
      "dt_min=None, float? dt_max=None, Tensor? state_scale=None, Tensor? state_indices=None, "
      "Tensor? "
      "state_out_indices=None, Tensor? query_start_loc=None, Tensor? num_accepted_tokens=None, "
      "Tensor(b!)? snapshots=None, int pad_slot_id=-1, Tensor? parents=None) -> Tensor");
  m.def(
      "gated_delta_rule_update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) "
      "state, "
      "*, float? scale=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? "
      "query_start_loc=None, "
      "Tensor? state_indices=None, Tensor? state_out_indices=None, Tensor? "
      "num_accepted_tokens=None, "
      "bool use_qk_l2norm=False, int pad_slot_id=-1, Tensor? parents=None, Tensor(b!)? "
      "snapshots=None) -> Tensor");
  m.def("state_copy(Tensor(a!) state, Tensor source, Tensor target) -> ()");
  m.def(
      "state_scatter_accepted(Tensor(a!) state, Tensor intermediate, Tensor slots, Tensor "
      "num_accepted_tokens) -> ()");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("causal_conv1d_update", conv_update_cpu);
  m.impl("selective_state_update", ssu_cpu);
  m.impl("gated_delta_rule_update", gdn_cpu);
  m.impl("state_copy", state_copy_cpu);
  m.impl("state_scatter_accepted", scatter_cpu);
}

TORCH_LIBRARY_IMPL(lockstep, Meta, m) {
  m.impl("causal_conv1d_update", conv_update_meta);
  m.impl("selective_state_update", ssu_meta);
  m.impl("gated_delta_rule_update", gdn_meta);
  m.impl("state_copy", [](const Tensor&, const Tensor&, const Tensor&) {});
  m.impl("state_scatter_accepted",
         [](const Tensor&, const Tensor&, const Tensor&, const Tensor&) {});
}

#ifdef LOCKSTEP_HAS_CUDA
TORCH_LIBRARY_IMPL(lockstep, CUDA, m) {
  m.impl("causal_conv1d_update", conv_update_cuda);
  m.impl("selective_state_update", ssu_cuda);
  m.impl("gated_delta_rule_update", gdn_cuda);
  m.impl("state_copy", state_copy_cuda);
  m.impl("state_scatter_accepted", scatter_cuda);
}
#endif

}  // namespace lockstep
