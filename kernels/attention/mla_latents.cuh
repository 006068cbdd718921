// Latents in e4m3, for kernels that multiply them as float16. float16 holds every number of e4m3,
// and 11 bits of its product with a scale, where bfloat16 would round to 8 bits.
//
//   cache type     bytes of a token   contents
//   E4m3           576                [latent; k_pe] as numbers; value = number * kv_scale (one
//                                     scale for the whole tensor)
//   std::uint8_t   656                512 numbers of the latent, a float32 scale for each 128 of
//                                     them, k_pe as 64 bf16: reference/attention/latent_token.hpp
#pragma once

#include "kernels/base/hopper.cuh"

namespace lockstep::kernels::mla {

constexpr int kRawColumns =
    128;  ///< numbers that share a scale: a unit of the ring as it is in memory
constexpr int kScaleOffset = 512;  ///< offset of the scales in a token of 656 bytes
constexpr int kPeOffset = 528;     ///< offset of k_pe in a token of 656 bytes

/// Describes x [T, heads, extent] for boxes of `columns` elements and `tokens` rows of one head.
/// Bytes are loaded unswizzled, elements of 16 bits swizzled as by tile_map(). A load fills the
/// part of a box beyond the tensor with 0. For elements of 16 bits, L2 promotion is 128 bytes, the
/// row of a box; 256 bytes would also fetch a neighbour that belongs to another token where a token
/// is 1,152 bytes (worth 1 to 3 % for 16 heads).
template <class E>
CUtensorMap latent_map(const char* operation, const TensorView<E, 3>& x, int columns, int tokens) {
  static const auto encode = [&] {
    cudaDriverEntryPointQueryResult found{};
    void* function = nullptr;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               operation);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  using Element = std::remove_const_t<E>;
  constexpr bool kBytes = sizeof(E) == 1;
  const auto stride = [&](std::size_t i) {
    return x.extent(i) <= 1 ? cuuint64_t{16} : static_cast<cuuint64_t>(x.stride(i)) * sizeof(E);
  };
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(x.extent(2)),
                                 static_cast<cuuint64_t>(x.extent(1)),
                                 static_cast<cuuint64_t>(x.extent(0))};
  const cuuint64_t strides[2] = {stride(1), stride(0)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(columns), 1, static_cast<cuuint32_t>(tokens)};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map,
             kBytes                          ? CU_TENSOR_MAP_DATA_TYPE_UINT8
             : std::is_same_v<Element, Bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             3, const_cast<Element*>(x.data_handle()), extents, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             kBytes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
             kBytes ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw CudaError(std::string(operation) + ": no tensor map for " + text_of(shape_of(x)) +
                    ", driver error " + std::to_string(static_cast<int>(status)));
  return map;
}

/// Four numbers of e4m3, the first in the lowest byte, as float16.
struct FourNumbers {
  __half2 low, high;
  __device__ explicit FourNumbers(std::uint32_t four) {
    std::uint32_t l, h;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(l), "=r"(h)
        : "r"(four));
    low = *reinterpret_cast<const __half2*>(&l);
    high = *reinterpret_cast<const __half2*>(&h);
  }
};

/// A float32 scale that float16 holds exactly (such as powers of two from 2^-24 to 2^15). Its
/// product with a number of e4m3 is rounded once, by the multiplication in float16.
struct HalfScale {
  __half scale;
  __device__ explicit HalfScale(std::uint32_t bits)
      : scale(__ushort_as_half(static_cast<unsigned short>(bits))) {}
  __device__ static bool holds(float scale) {
    return __half2float(__float2half_rn(scale)) == scale;
  }
  __device__ static std::uint32_t bits(float scale) {
    return __half_as_ushort(__float2half_rn(scale));
  }
  __device__ __half2 times(__half2 x) const { return __hmul2(x, __half2half2(scale)); }
};

/// Any other scale. The product is computed in float32 and rounded once to float16. Rounding the
/// scale itself would give 128 numbers the same relative error, and a score of 400 an error of up
/// to 0.13.
struct FloatScale {
  std::uint32_t bits;
  __device__ explicit FloatScale(std::uint32_t scale) : bits(scale) {}
  __device__ __half2 times(__half2 x) const {
    const float2 wide = __half22float2(x);
    return __floats2half2_rn(wide.x * __uint_as_float(bits), wide.y * __uint_as_float(bits));
  }
};

/// Converts 8 numbers of e4m3 to float16 and applies scaled() to each pair.
template <class Scaled>
__device__ inline uint4 widened(const uint2& numbers, Scaled scaled) {
  const auto bits = [&](__half2 x) {
    const __half2 y = scaled(x);
    return *reinterpret_cast<const std::uint32_t*>(&y);
  };
  const FourNumbers a(numbers.x), b(numbers.y);
  return make_uint4(bits(a.low), bits(a.high), bits(b.low), bits(b.high));
}

}  // namespace lockstep::kernels::mla
