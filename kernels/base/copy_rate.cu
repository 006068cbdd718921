// The chip's copy rate, by the plainest kernel that reaches it.
#include "kernels/base/copy_rate.hpp"

#include <cstdint>

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256, kPieces = 4;  ///< of 16 bytes, per thread

__global__ void copy_kernel(uint4* to, const uint4* from) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads * kPieces + threadIdx.x;
  uint4 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) pieces[i] = __ldcs(from + at + i * kThreads);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) __stcs(to + at + i * kThreads, pieces[i]);
}

}  // namespace

void copy_on_device(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  copy_kernel<<<static_cast<unsigned>(bytes / (16 * kThreads * kPieces)), kThreads, 0, stream>>>(
      static_cast<uint4*>(to), static_cast<const uint4*>(from));
}

}  // namespace lockstep::kernels
