// Sixteen rows of a recurrent state in the registers of one warp, in the layout of mma fragments.
// Each lane holds parts of two rows, lane / 4 and lane / 4 + 8; four lanes share a row. Lane
// j = lane % 4 holds the columns that lanes j and j + 4 hold in a RowLayout of 8 lanes per row
// (state_rows.cuh), so that a sum over a row adds its terms in the same order as there and gives
// the same bits.
#pragma once

#include "kernels/recurrent/state_rows.cuh"

namespace lockstep::kernels {

/// d += a b for a [16, 8], b [8, 8] and d [16, 8], in the fragments of mma.m16n8k8 (PTX ISA,
/// "Matrix Fragments for mma.m16n8k8"). The factors are tf32: the instruction ignores the lower 13
/// bits of each float.
__device__ inline void multiply_add(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#endif
}

template <class Layout>
struct QuadRows {
  static_assert(Layout::kLanes == 8 && !Layout::kMasked);
  static constexpr int kCount = Layout::kCount;
  float s[2][2][kCount];  ///< [row][half: columns of RowLayout's lane j or j + 4][element]

  /// The number, among the warp's 16 rows, of the row in s[r].
  __device__ static int row(int r) { return static_cast<int>(threadIdx.x % 32 / 4) + 8 * r; }
  /// The lane of RowLayout whose columns s[r][half] holds.
  __device__ static int part(int half) { return static_cast<int>(threadIdx.x % 4) + 4 * half; }

  template <Cached kCached, class S>
  __device__ void load(const S* first_row, std::int64_t stride) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        Layout::template load_part<kCached>(s[r][half], first_row + row(r) * stride, part(half));
  }
  template <Cached kCached, class S>
  __device__ void store(S* first_row, std::int64_t stride) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        Layout::template store_part<kCached>(first_row + row(r) * stride, s[r][half], part(half));
  }
  template <class S>
  __device__ void round() {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[r][half][i] = rounded_to<S>(s[r][half][i]);
  }

  /// Advances the state by one token. `column` is the token's vector along a row (k). Per row,
  /// u = given(r, row r . column) is the value that the token adds; per element, the new element is
  /// add(u, column's element, state's element).
  template <class Given, class Add>
  __device__ void advance(const float* column, Given given, Add add) {
    float k[2][kCount];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      Layout::template load_part<Cached::yes>(k[half], column, part(half));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float product = Layout::dot(s[r][0], k[0]) + Layout::dot(s[r][1], k[1]);
      product += __shfl_xor_sync(0xffffffffu, product, 2);
      product += __shfl_xor_sync(0xffffffffu, product, 1);
      const float u = given(r, product);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[r][half][i] = add(u, k[half][i], s[r][half][i]);
    }
  }

  /// Multiplies the rows by eight column vectors on the tensor cores. Each lane passes the address
  /// of vector number lane / 4, whose elements must be exact in tf32; product[r][i] becomes row(r)
  /// times vector 2 (lane % 4) + i. kWide: the state has more bits than tf32, so each element is
  /// split into an upper and a lower tf32 that are multiplied apart (2^-22 of a product is lost).
  template <bool kWide>
  __device__ void multiply(const float* column, float (&product)[2][2]) const {
    float sums[2][4] = {};  // one accumulator per half: two independent chains of mma
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[kCount];
      Layout::template load_part<Cached::yes>(x, column, part(half));
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const float a[4] = {s[0][half][i], s[1][half][i], s[0][half][i + 1], s[1][half][i + 1]};
        const float b[2] = {x[i], x[i + 1]};
        float upper[4], lower[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          upper[j] = kWide ? __uint_as_float(__float_as_uint(a[j]) & 0xffffe000u) : a[j];
          lower[j] = a[j] - upper[j];
        }
        multiply_add(sums[half], upper, b);
        if constexpr (kWide) multiply_add(sums[half], lower, b);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) product[i / 2][i % 2] = sums[0][i] + sums[1][i];
  }
};

}  // namespace lockstep::kernels
