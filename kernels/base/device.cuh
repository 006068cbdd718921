// Device code that every kernel uses: 16-byte accesses, conversions, and programmatic dependent
// launch (a kernel starts while the one before it still runs).
#pragma once

#include <bit>

#include "kernels/base/check.hpp"

namespace lockstep::kernels {

template <class T>
__device__ inline float to_float(T x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, Bf16>) return __bfloat162float(x);
  if constexpr (std::is_same_v<T, Fp16>) return __half2float(x);
  if constexpr (kIsScaled<T>) return static_cast<float>(x);
}

/// The nearest number of type T, ties to even.
template <class T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, Bf16>) return __float2bfloat16_rn(x);
  if constexpr (std::is_same_v<T, Fp16>) return __float2half_rn(x);
}

template <class T>
__device__ inline float rounded_to(float x) {
  return to_float(from_float<T>(x));
}

/// N elements that one instruction moves: at most 16 bytes, aligned to their size.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  static_assert(N * sizeof(T) <= 16, "an access moves at most 16 bytes");
  T value[N];
};

/// Cache policy of an access. `streaming` (ld.cs, st.cs) marks the line to be evicted first,
/// because a launch uses each state once.
enum class Cached { yes, streaming };

/// The integer type of kBytes bytes (16, 8, 4 or 2) that one load or store instruction moves.
template <int kBytes>
using Word = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;

template <Cached kCached, int N, class T>
__device__ inline Pack<T, N> load_raw(const T* source) {
  const auto* const from = reinterpret_cast<const Word<N * sizeof(T)>*>(source);
  return std::bit_cast<Pack<T, N>>(kCached == Cached::streaming ? __ldcs(from) : *from);
}
template <Cached kCached, class T, int N>
__device__ inline void store_raw(T* target, const Pack<T, N>& pack) {
  auto* const to = reinterpret_cast<Word<N * sizeof(T)>*>(target);
  const auto word = std::bit_cast<Word<N * sizeof(T)>>(pack);
  if constexpr (kCached == Cached::streaming)
    __stcs(to, word);
  else
    *to = word;
}

/// load_raw() and store_raw() with a conversion from and to float.
template <Cached kCached, class T, int N>
__device__ inline void load_pack(float (&x)[N], const T* source) {
  const Pack<T, N> pack = load_raw<kCached, N>(source);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = to_float(pack.value[i]);
}
template <Cached kCached, class T, int N>
__device__ inline void store_pack(T* target, const float (&x)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.value[i] = from_float<T>(x[i]);
  store_raw<kCached>(target, pack);
}

/// An element whose type is only known at run time is read in two steps: bits_at() issues the load,
/// value_of() converts. A kernel that issues several loads before it converts the first result
/// waits for memory once.
__device__ inline unsigned bits_at(const void* data, Format format, std::int64_t offset) {
  return format == Format::float32 ? static_cast<const unsigned*>(data)[offset]
                                   : static_cast<const unsigned short*>(data)[offset];
}
__device__ inline float value_of(unsigned bits, Format format) {
  if (format == Format::float32) return __uint_as_float(bits);
  return format == Format::bf16 ? __uint_as_float(bits << 16)
                                : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
template <std::size_t Rank, class... Index>
__device__ std::int64_t offset_in(const MixedView<Rank>& v, Index... index) {
  std::int64_t offset = 0;
  int d = 0;
  ((offset += index * v.strides[d++]), ...);
  return offset;
}
template <std::size_t Rank, class... Index>
__device__ const void* address_of(const MixedView<Rank>& v, Index... index) {
  return static_cast<const char*>(v.data) +
         offset_in(v, index...) * (v.format == Format::float32 ? 4 : 2);
}
template <std::size_t Rank, class... Index>
__device__ unsigned bits_at(const MixedView<Rank>& v, Index... index) {
  return bits_at(v.data, v.format, offset_in(v, index...));
}
template <std::size_t Rank, class... Index>
__device__ float at(const MixedView<Rank>& v, Index... index) {
  return value_of(bits_at(v, index...), v.format);
}

/// Per-token vectors [T, heads, extent] whose last dimension is contiguous.
template <class T>
struct HeadVectors {
  T* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;

  HeadVectors() = default;
  explicit HeadVectors(const TensorView<T, 3>& view)
      : data(view.data_handle()), token_stride(view.stride(0)), head_stride(view.stride(1)) {}
  __device__ T* at(int t, int head) const { return data + t * token_stride + head * head_stride; }
};

/// x / divisor for x and divisor below 65536, as a multiplication by ceil(2^32 / divisor): the
/// device has no instruction for integer division.
struct Divisor {
  std::uint64_t reciprocal = 0;

  Divisor() = default;
  explicit Divisor(std::int64_t divisor)
      : reciprocal(((std::uint64_t{1} << 32) + static_cast<std::uint64_t>(divisor) - 1) /
                   static_cast<std::uint64_t>(divisor)) {}
  __device__ int of(int x) const {
    return static_cast<int>(static_cast<unsigned>(x) * reciprocal >> 32);
  }
};

/// The functions of reference/tensors/functions.hpp.
__device__ inline float softplus(float x) {
  return x <= 20.0f ? log1pf(expf(x)) : x;
}
__device__ inline float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}
__device__ inline float silu(float x) {
  return x / (1.0f + expf(-x));
}

/// Starts a kernel. `overlaps` allows programmatic dependent launch: the kernel's blocks may become
/// resident while the launch before it still runs, so the kernel must call
/// wait_for_earlier_launch() before it reads anything that the earlier launch writes.
template <class... Parameters, class... Arguments>
void launch(const char* operation, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            std::size_t shared_bytes, cudaStream_t stream, bool overlaps,
            const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), operation);
}

/// Waits until the launch before this one has ended and its writes are visible. Every thread calls
/// it.
__device__ inline void wait_for_earlier_launch() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// Lets blocks of the next launch become resident. The next launch's wait_for_earlier_launch()
/// still waits for the end of this one.
__device__ inline void let_the_next_launch_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Prefetches into L2 the line at `address`, or `bytes` bytes from there on (address and size are
/// multiples of 16). All writes of the device go through L2, so a line that is prefetched before
/// wait_for_earlier_launch() cannot become stale.
__device__ inline void prefetch_to_l2(const void* address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}
__device__ inline void prefetch_to_l2(const void* address, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

}  // namespace lockstep::kernels
