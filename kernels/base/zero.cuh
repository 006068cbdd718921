// Zeroes the outputs of a batch without rows: all its tokens are padding, whose outputs are 0.
//
//   grid   ceil(elements / kZeroThreads)
//   block  kZeroThreads threads, one element per thread
#pragma once

#include "kernels/base/device.cuh"

namespace lockstep::kernels {

constexpr int kZeroThreads = 256;

template <class T>
__global__ void __launch_bounds__(kZeroThreads) zero_kernel(const TensorView<T, 3> out) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kZeroThreads + threadIdx.x;
  const std::int64_t inner = out.extent(1) * out.extent(2);
  if (at < out.extent(0) * inner)
    out(at / inner, at % inner / out.extent(2), at % out.extent(2)) = from_float<T>(0.0f);
}

/// Sets out [T, heads, extent] to 0.
template <class T>
void zero_outputs(const char* operation, const TensorView<T, 3>& out, cudaStream_t stream) {
  const std::int64_t count = out.extent(0) * out.extent(1) * out.extent(2);
  if (count == 0) return;
  launch(operation, zero_kernel<T>,
         dim3(static_cast<unsigned>((count + kZeroThreads - 1) / kZeroThreads)), dim3(kZeroThreads),
         0, stream, false, out);
}

}  // namespace lockstep::kernels
