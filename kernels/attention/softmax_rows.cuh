// Shared by the attention kernels on tensor cores: reductions and stores of rows in the layout in
// which a warpgroup's products leave them (hopper.cuh), and positions in rings of barriers.
#pragma once

#include "kernels/base/hopper.cuh"

namespace lockstep::kernels::hopper {

constexpr float kNoScore = -1e30f;  ///< below every score, yet finite: differences are never NaN
constexpr float kLn2 = 0.6931471805599453f;

/// A position in a ring of `places`, and the parity of the place's barrier phase.
struct Step {
  int place = 0;
  std::uint32_t parity = 0;
  int places;
  __device__ explicit Step(int count) : places(count) {}
  __device__ void next() { skip(1); }
  /// Moves on by `count`, at most `places`.
  __device__ void skip(int count) {
    place += count;
    if (place >= places) place -= places, parity ^= 1;
  }
};

/// True in one lane of the warp, always the same.
__device__ inline bool elected() {
  std::uint32_t is;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is));
  return is != 0;
}

/// Maximum and sum over the four threads that share a row.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// Arrives if `does`, by predication: between the start of products and their wait there may be no
/// branch that threads of a warp take differently.
__device__ inline void arrive_if(bool does, std::uint32_t barrier) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier),
      "r"(static_cast<int>(does))
      : "memory");
}

/// Transposes words between four neighbouring lanes: word i of lane j becomes word j of lane i.
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

/// Stores kColumns outputs of a row in T, times `factor`, to `to` (a multiple of 16 bytes); stores
/// nothing unless `is`. `O` points to the thread's first outputs of the row in a product's result:
/// d[0] for its upper row, d[2] for the row 8 below. The four lanes of the row exchange words, so
/// that each stores 16 bytes at a time.
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
