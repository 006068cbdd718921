// What kernels of attention on tensor cores share: rows of scores and outputs as products of a
// warpgroup leave them, and places in rings of barriers.
#pragma once

#include "kernels/base/hopper.cuh"

namespace lockstep::kernels::hopper {

constexpr float kNoScore = -1e30f;  ///< below every score, and no infinity: differences are numbers
constexpr float kLn2 = 0.6931471805599453f;

/// The place of a unit of a ring, or of one of two tiles.
struct Step {
  int place = 0;
  std::uint32_t parity = 0;
  int places;
  __device__ explicit Step(int count) : places(count) {}
  __device__ void next() { skip(1); }
  /// At most `places`.
  __device__ void skip(int count) {
    place += count;
    if (place >= places) place -= places, parity ^= 1;
  }
};

/// Of a warp's lanes one, always the same.
__device__ inline bool elected() {
  std::uint32_t is;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is));
  return is != 0;
}

/// Over the four threads that share a row.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// Without a branch: between products there may be none that a thread takes alone.
__device__ inline void arrive_if(bool does, std::uint32_t barrier) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier),
      "r"(static_cast<int>(does))
      : "memory");
}

/// Of word i of lane j of four, lane i becomes the owner, as its word j.
__device__ inline void transpose_in_quad(std::uint32_t (&word)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? word[i] : word[i + 1], 1);
    (odd ? word[i] : word[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, high ? word[i] : word[i + 2], 2);
    (high ? word[i] : word[i + 2]) = got;
  }
}

/// A row's outputs as 16 bits, `kColumns` of them from `to` on, which is at a multiple of 16 bytes.
/// `O`: the thread's outputs of the row's first columns, d[0] and d[1] of a product, or d[2] and
/// d[3] for the row 8 below.
template <class T, int kColumns>
__device__ inline void store_row(T* to, const float* O, float factor, bool is, int lane) {
#pragma unroll
  for (int i = 0; i < kColumns / 32; ++i) {
    std::uint32_t word[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* const o = O + 16 * i + 4 * n;
      word[n] = pack<T>(o[0] * factor, o[1] * factor);
    }
    transpose_in_quad(word, lane);
    if (is)
      *reinterpret_cast<uint4*>(to + 32 * i + 8 * (lane % 4)) =
          make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace lockstep::kernels::hopper
