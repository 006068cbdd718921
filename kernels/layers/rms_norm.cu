// Root-mean-square norms. Equations: reference/layers/rms_norm.hpp.
//
//   grid   (T, groups); groups = 1 without a gate
//   block  kThreads threads over the channels of a group: they sum the squares, then scale
#include "kernels/layers/rms_norm.hpp"

#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const __grid_constant__ RmsNorm<T> in, T* residual, std::int64_t residual_stride) {
  const std::int64_t t = blockIdx.x;
  const auto D = static_cast<int>(in.x.extent(1));
  const T* x = in.x.data_handle() + t * in.x.stride(0);
  T* const out = in.out.data_handle() + t * in.out.stride(0);
  T* const sum = residual ? residual + t * residual_stride : nullptr;
  float squares = 0;
  for (int d = static_cast<int>(threadIdx.x); d < D; d += kThreads) {
    float value = to_float(x[d]);
    if (sum) {
      sum[d] = from_float<T>(value + to_float(sum[d]));
      value = to_float(sum[d]);
    }
    squares = fmaf(value, value, squares);
  }
  const float mean = over_block<kThreads>(squares, Plus{}) / static_cast<float>(D);
  const float root = sqrtf(mean + in.eps);
  if (sum) x = sum;  // no barrier: each thread reads back only its own stores
  for (int d = static_cast<int>(threadIdx.x); d < D; d += kThreads)
    out[d] = from_float<T>(to_float(x[d]) / root * at(in.weight, d));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gated_norm_kernel(const __grid_constant__ GatedRmsNorm<T> in) {
  const std::int64_t t = blockIdx.x;
  const auto size = static_cast<int>(in.x.extent(1) / in.groups);
  const int first = static_cast<int>(blockIdx.y) * size;
  const T* const x = in.x.data_handle() + t * in.x.stride(0) + first;
  const T* const gate = in.gate.data_handle() + t * in.gate.stride(0) + first;
  T* const out = in.out.data_handle() + t * in.out.stride(0) + first;
  const auto factor = [&](int d) {
    const float z = to_float(gate[d]);
    return in.sigmoid ? sigmoid(z) : silu(z);
  };
  const auto normed = [&](int d) {  // the input of the norm
    return in.gate_before_norm ? to_float(x[d]) * factor(d) : to_float(x[d]);
  };
  float squares = 0;
  for (int d = static_cast<int>(threadIdx.x); d < size; d += kThreads) {
    const float value = normed(d);
    squares = fmaf(value, value, squares);
  }
  const float mean = over_block<kThreads>(squares, Plus{}) / static_cast<float>(size);
  const float root = sqrtf(mean + in.eps);
  for (int d = static_cast<int>(threadIdx.x); d < size; d += kThreads) {
    float value = normed(d) / root * at(in.weight, first + d);
    if (!in.gate_before_norm) value *= factor(d);
    out[d] = from_float<T>(value);
  }
}

/// Checks x, weight and out of a norm.
template <class In>
void check_norm(const Checks& checks, const In& in) {
  const Shape<2> shape = shape_of(in.x);
  checks.expect(0 < shape[1] && shape[1] <= INT32_MAX, "x", "[T, D] with D of at least 1",
                text_of(shape));
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.weight, "weight", "[D]", {shape[1]});
  checks.shape(in.out, "out", "[T, D]", shape);
  checks.contiguous_rows(in.out, "out");
}

}  // namespace

template <class T>
void rms_norm(const RmsNorm<T>& in, cudaStream_t stream) {
  const Checks checks("rms_norm");
  check_norm(checks, in);
  if (in.residual) {
    checks.shape(*in.residual, "residual", "[T, D]", shape_of(in.x));
    checks.contiguous_rows(*in.residual, "residual");
  }
  if (in.x.extent(0) == 0) return;
  launch("rms_norm", norm_kernel<T>, dim3(static_cast<unsigned>(in.x.extent(0))), dim3(kThreads), 0,
         stream, false, in, in.residual ? in.residual->data_handle() : nullptr,
         in.residual ? in.residual->stride(0) : 0);
}

template <class T>
void gated_rms_norm(const GatedRmsNorm<T>& in, cudaStream_t stream) {
  const Checks checks("gated_rms_norm");
  check_norm(checks, in);
  checks.shape(in.gate, "gate", "[T, D]", shape_of(in.x));
  checks.contiguous_rows(in.gate, "gate");
  checks.expect(1 <= in.groups && in.groups <= 65535 && in.x.extent(1) % in.groups == 0, "groups",
                "from 1 to 65535 and a divisor of D = " + std::to_string(in.x.extent(1)),
                std::to_string(in.groups));
  if (in.x.extent(0) == 0) return;
  const dim3 grid(static_cast<unsigned>(in.x.extent(0)), static_cast<unsigned>(in.groups));
  launch("gated_rms_norm", gated_norm_kernel<T>, grid, dim3(kThreads), 0, stream, false, in);
}

#define LOCKSTEP_INSTANTIATE(T)                            \
  template void rms_norm(const RmsNorm<T>&, cudaStream_t); \
  template void gated_rms_norm(const GatedRmsNorm<T>&, cudaStream_t);
LOCKSTEP_ACTIVATIONS(LOCKSTEP_INSTANTIATE)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
