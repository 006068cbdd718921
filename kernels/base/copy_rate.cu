// The simplest kernels that reach the chip's copy rate.
//
//   grid   bytes / (16 kThreads kPieces)
//   block  kThreads threads; each moves kPieces pieces of 16 bytes, kThreads pieces apart
#include "kernels/base/copy_rate.hpp"

#include <cstdint>

#include "kernels/base/device.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256, kPieces = 4;  ///< kPieces: pieces of 16 bytes per thread

__global__ void copy_kernel(uint4* to, const uint4* from) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads * kPieces + threadIdx.x;
  uint4 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) pieces[i] = __ldcs(from + at + i * kThreads);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) __stcs(to + at + i * kThreads, pieces[i]);
}

/// Reads each piece once and stores it kWrites times, `pieces` pieces apart. Launches overlap, as a
/// server's decode launches do.
template <int kWrites>
__global__ void fan_out_kernel(uint4* to, const uint4* from, std::int64_t pieces) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads * kPieces + threadIdx.x;
  wait_for_earlier_launch();
  let_the_next_launch_start();
  uint4 held[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) held[i] = __ldcs(from + at + i * kThreads);
#pragma unroll
  for (int w = 0; w < kWrites; ++w)
#pragma unroll
    for (int i = 0; i < kPieces; ++i) __stcs(to + w * pieces + at + i * kThreads, held[i]);
}

}  // namespace

void fan_out_on_device(void* to, const void* from, std::int64_t bytes, int writes,
                       cudaStream_t stream) {
  launch("fan_out", writes == 1 ? fan_out_kernel<1> : fan_out_kernel<4>,
         dim3(static_cast<unsigned>(bytes / (16 * kThreads * kPieces))), dim3(kThreads), 0, stream,
         true, static_cast<uint4*>(to), static_cast<const uint4*>(from), bytes / 16);
}

void copy_on_device(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  copy_kernel<<<static_cast<unsigned>(bytes / (16 * kThreads * kPieces)), kThreads, 0, stream>>>(
      static_cast<uint4*>(to), static_cast<const uint4*>(from));
}

}  // namespace lockstep::kernels
