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

/// Starts to copy 16 bytes of device memory (or zeros, unless `is`) to shared memory (cp.async).
/// For memory ordering the copy counts as an ordinary store of this thread, not as an async-proxy
/// one.
__device__ inline void start_copy(std::uint32_t to, const void* from, bool is) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is ? 16 : 0)
               : "memory");
}
__device__ inline void start_copy4(std::uint32_t to, const void* from, bool is) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is ? 4 : 0)
               : "memory");
}
/// Arrives at an mbarrier when all copies that this thread has started are complete.
__device__ inline void arrive_behind_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Makes a group of the copies that this thread has started since its last group.
__device__ inline void group_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits for this thread's groups of copies, but not for copies that are in no group yet.
__device__ inline void wait_for_groups() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}
/// Waits for all copies that this thread has started; only this thread is sure to see them.
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ inline uint2 load_shared2(std::uint32_t from) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
  return x;
}

/// barrier_expect() and load_tile() of one lane (`does`) of a warp. All lanes call them with the
/// same arguments: by predication instead of a branch, the arguments stay in uniform registers. The
/// loads mark their lines evict_first in L2, since a step reads each key once.
__device__ inline void expect_if(bool does, std::uint32_t barrier, int bytes) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0;\n"
      "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1; }" ::"r"(barrier),
      "r"(bytes), "r"(static_cast<int>(does))
      : "memory");
}
__device__ inline void load_tile_if(bool does, std::uint32_t to, const CUtensorMap& map,
                                    int element, int head, int token, std::uint32_t barrier) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      ".reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "@p "
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], once; }" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(element), "r"(head), "r"(token), "r"(static_cast<int>(does))
      : "memory");
}

/// Addresses of the latents of 32 consecutive tokens; each lane holds one. Tokens after the
/// request's end, and those whose block table entry names no page, have none: they are copied as
/// zeros. ask() starts the loads of page numbers; reach() waits for them.
template <class Decode>
class Tokens {
 public:
  __device__ Tokens(const Decode& p, int request, int length)
      : p_(p), table_(p.table + request * p.table_strides[0]), length_(length) {}
  /// Loads the number of the page that holds token `first` + lane.
  __device__ void ask(int first) {
    token_ = first + static_cast<int>(threadIdx.x % 32);
    entry_ = token_ < length_ ? table_[(token_ >> p_.log2_page) * p_.table_strides[1]] : -1;
  }
  __device__ void reach() {
    const bool is = 0 <= entry_ && entry_ < p_.pages;
    there_ = __ballot_sync(0xffffffffu, is);
    own_ = is ? entry_ * p_.cache_strides[0] + (token_ & (p_.page - 1)) * p_.cache_strides[1] : 0;
  }
  /// The address of the i-th of the 32 tokens. The whole warp calls it.
  __device__ const unsigned char* operator[](int i) const {
    return p_.cache + __shfl_sync(0xffffffffu, own_, i);
  }
  __device__ bool is_there(int i) const { return (there_ >> i & 1) != 0; }
  /// Copies 4 bytes of the lane's own token, at `offset`.
  __device__ void copy_own(std::uint32_t to, int offset) const {
    start_copy4(to, p_.cache + own_ + offset, is_there(static_cast<int>(threadIdx.x % 32)));
  }

 private:
  const Decode& p_;
  const std::int32_t* table_;
  int length_, token_ = 0, entry_ = 0;
  unsigned there_ = 0;
  std::int64_t own_ = 0;
};

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
