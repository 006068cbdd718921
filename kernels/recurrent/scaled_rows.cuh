// Rows of states stored as int8 or e4m3 numbers with a float32 scale per block of a row:
// value = number * scale. Equations: reference/recurrent/scaled_state.hpp.
#pragma once

#include "kernels/recurrent/state_rows.cuh"
#include "reference/base/philox.hpp"

namespace lockstep::kernels {

/// The scales, float32 [slots, heads, R, ceil(C / block)] with any strides, and the rounding mode.
struct StateScales {
  float* scales = nullptr;
  std::int64_t scale_slot_stride = 0, scale_head_stride = 0, scale_row_stride = 0;
  std::int64_t scale_stride = 0;
  int block = 1;            ///< elements of a row that share a scale
  int heads = 0;            ///< heads of the pool
  bool stochastic = false;  ///< rounds by random words of Philox(seed, stream); else to nearest
  std::uint64_t seed = 0, stream = 0;

  /// Four random words, for element index / 4 * 4 of the contiguous pool and the three after it.
  __device__ PhiloxBlock words_of(std::int64_t index) const {
    const auto counter = static_cast<std::uint64_t>(index / 4);
    return philox4x32_10(
        {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
         static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)},
        {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  }
  __device__ float* scales_of(int slot, int head, int row) const {
    return scales + slot * scale_slot_stride + head * scale_head_stride + row * scale_row_stride;
  }
};
struct NoScales {};
template <class S>
using ScalesOf = std::conditional_t<kIsScaled<S>, StateScales, NoScales>;

/// Whether each scale block is either the whole row, or made of the pieces (kVec elements) of a
/// power of two of neighbouring lanes, so that block_maxima() can reduce it by shuffles.
template <class Layout>
bool blocks_are_pieces(const StateScales& pool, int C) {
  const int block = pool.block;
  return block >= C || (block >= Layout::kVec && block <= Layout::kVec * Layout::kLanes &&
                        (block & (block - 1)) == 0);
}

/// Multiplies the lane's numbers by their scales.
template <class Layout>
__device__ void scale_up(float (&x)[Layout::kCount], const float* scales, const StateScales& pool,
                         int C) {
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
    const int column = Layout::column(c);
    if (column >= C) continue;
    const float scale = scales[column / pool.block * pool.scale_stride];
#pragma unroll
    for (int i = 0; i < Layout::kVec; ++i) x[c * Layout::kVec + i] *= scale;
  }
}

/// The larger number; NaN if either is NaN, so that the scale of a block with a NaN is NaN.
__device__ inline float larger_or_nan(float a, float b) {
  return a > b || isnan(a) ? a : b;
}

/// amax[c] becomes the largest magnitude in the scale block of the lane's piece c. Every lane of
/// the warp calls it.
template <class Layout>
__device__ void block_maxima(float (&amax)[Layout::kChunks], const float (&x)[Layout::kCount],
                             int block, int C) {
  const auto over_lanes = [](float m, int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2)
      m = larger_or_nan(m, __shfl_xor_sync(0xffffffffu, m, distance));
    return m;
  };
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
    amax[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < Layout::kVec; ++i)
      amax[c] = larger_or_nan(amax[c], fabsf(x[c * Layout::kVec + i]));
  }
  if (block >= C) {
    float all = 0.0f;
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) all = larger_or_nan(all, amax[c]);
    all = over_lanes(all, Layout::kLanes);
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) amax[c] = all;
  } else if constexpr (!Layout::kMasked) {
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) amax[c] = over_lanes(amax[c], block / Layout::kVec);
  } else {
    float own[Layout::kChunks];
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) own[c] = amax[c];
    for (int b = 0; b * block < C; ++b) {
      float m = 0.0f;
#pragma unroll
      for (int c = 0; c < Layout::kChunks; ++c)
        if (Layout::column(c) / block == b) m = larger_or_nan(m, own[c]);
      m = over_lanes(m, Layout::kLanes);
#pragma unroll
      for (int c = 0; c < Layout::kChunks; ++c)
        if (Layout::column(c) / block == b) amax[c] = m;
    }
  }
}

/// The largest number of the type; a block's scale is its largest magnitude / kLargest.
template <class S>
constexpr float kLargest = std::is_same_v<S, Int8> ? 127.0f : 448.0f;

template <class S>
__device__ inline S nearest_number(float x) {
  if constexpr (std::is_same_v<S, Int8>)
    return static_cast<Int8>(max(-127, min(127, __float2int_rn(x))));
  else
    return E4m3(x);  // ties to even, saturating
}

/// Rounds x stochastically to one of its two neighbours in S: to the upper one where word 2^-32 is
/// below x's fraction of the distance between them.
template <class S>
__device__ inline S drawn_number(float x, std::uint32_t word) {
  float unit = 1.0f;
  if constexpr (std::is_same_v<S, E4m3>) {
    const int exponent = static_cast<int>(__float_as_uint(x) >> 23 & 0xffu) - 127;
    unit = __int_as_float((max(exponent, -6) - 3 + 127) << 23);
  }
  // The unit (distance of neighbouring numbers) is a power of two, so the division is exact.
  const float steps = x / unit, below = floorf(steps);
  const bool up = static_cast<double>(word) < static_cast<double>(steps - below) * 0x1p32;
  return nearest_number<S>((up ? below + 1.0f : below) * unit);
}

/// Quantises and stores a row and its scales. `element` is the index that the row's first element
/// has in a contiguous pool; it selects the random words.
template <class Layout, class S>
__device__ void store_scaled(S* row, const float (&x)[Layout::kCount], float* scales,
                             const StateScales& pool, std::int64_t stride, int C,
                             std::int64_t element) {
  float amax[Layout::kChunks];
  block_maxima<Layout>(amax, x, pool.block, C);
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
    const int column = Layout::column(c);
    if (column >= C) continue;
    const float scale = amax[c] == 0.0f ? 1.0f : __fdiv_rn(amax[c], kLargest<S>);
    const float inverse = __frcp_rn(scale);
    if (column % pool.block == 0) scales[column / pool.block * pool.scale_stride] = scale;
    Pack<S, Layout::kVec> numbers;
    constexpr int kDrawn = Layout::kMasked ? 1 : 4;  // numbers that share one call of Philox
#pragma unroll
    for (int i = 0; i < Layout::kVec; i += kDrawn) {
      PhiloxBlock words{};
      const std::int64_t index = element + column + i;
      if (pool.stochastic) words = pool.words_of(index);
#pragma unroll
      for (int j = 0; j < kDrawn; ++j) {
        const float number = x[c * Layout::kVec + i + j] * inverse;
        const std::uint32_t word = words[Layout::kMasked ? static_cast<unsigned>(index % 4) : j];
        numbers.value[i + j] =
            pool.stochastic ? drawn_number<S>(number, word) : nearest_number<S>(number);
      }
    }
    if constexpr (Layout::kMasked)
      row[column * stride] = numbers.value[0];
    else
      *reinterpret_cast<Pack<S, Layout::kVec>*>(row + column) = numbers;
  }
}

}  // namespace lockstep::kernels
