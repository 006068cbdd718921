// The gate of the feed-forward unit. Equation: reference/layers/swiglu.hpp.
//
//   grid   (T, ceil(F / kThreads))
//   block  kThreads threads, one element per thread
#include "kernels/layers/swiglu.hpp"

#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ Swiglu<T> in) {
  const std::int64_t t = blockIdx.x, f = std::int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (f >= in.out.extent(1)) return;
  in.out(t, f) = from_float<T>(silu(to_float(in.gate(t, f))) * to_float(in.up(t, f)));
}

}  // namespace

template <class T>
void swiglu(const Swiglu<T>& in, cudaStream_t stream) {
  const Checks checks("swiglu");
  const Shape<2> shape = shape_of(in.gate);
  checks.contiguous_rows(in.gate, "gate");
  checks.shape(in.up, "up", "[T, F]", shape);
  checks.contiguous_rows(in.up, "up");
  checks.shape(in.out, "out", "[T, F]", shape);
  checks.contiguous_rows(in.out, "out");
  const std::int64_t blocks = (shape[1] + kThreads - 1) / kThreads;
  checks.expect(blocks <= 65535, "gate", "[T, F] with F of at most 16776960",
                std::to_string(shape[1]));
  if (shape[0] == 0 || shape[1] == 0) return;
  const dim3 grid(static_cast<unsigned>(shape[0]), static_cast<unsigned>(blocks));
  launch("swiglu", swiglu_kernel<T>, grid, dim3(kThreads), 0, stream, false, in);
}

#define LOCKSTEP_INSTANTIATE(T) template void swiglu(const Swiglu<T>&, cudaStream_t);
LOCKSTEP_ACTIVATIONS(LOCKSTEP_INSTANTIATE)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
