// The paged cache of latents. Equations: reference/attention/mla_rope_decode.hpp.
//
//   write_kernel    grid T; a block takes one token. A thread has two neighbouring columns of the
//                   latent, then groups of four rotation pairs of the queries
//   starts_kernel   one block: sums the requests' tokens, so that gather_kernel can bisect
//   gather_kernel   grid L; a block takes one token of the result, and finds its request by
//                   bisection
//   join_kernel     a thread takes 8 columns of a head
#include "kernels/attention/latent_cache.hpp"

#include <algorithm>

#include "kernels/base/hopper.cuh"
#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kLatent = 512, kPe = 64, kWidth = kLatent + kPe, kPairs = kPe / 2;
constexpr int kThreads = kLatent / 2;
constexpr int kTile = 128;  ///< columns that share a scale in tokens of 656 bytes
constexpr int kTokenBytes = 656, kScaleOffset = 512, kPeOffset = 528;
constexpr float kLargest = 448.0f;  ///< the largest number of e4m3
constexpr int kEach = 8;            ///< bf16 elements in 16 bytes

template <class C>
constexpr int kColumns = std::is_same_v<C, std::uint8_t> ? kTokenBytes : kWidth;

// --- Writing -------------------------------------------------------------------------------------

/// LatentWrite with its optional views unpacked to pointers and strides.
template <class C>
struct Write {
  LatentWrite<C> in;
  const float* kv_scale;
  Bf16* latents{};
  std::int64_t latents_stride{};
  const Bf16* q_pe{};
  Bf16* rotated{};
  std::int64_t q_strides[2]{}, rotated_strides[2]{};
  int heads{};
};

/// The scale of values whose largest magnitude is `amax`, as tile_scale() of the reference: amax /
/// 448, or the next power of two above it.
__device__ inline float scale_of_tile(float amax, bool power_of_two) {
  if (!power_of_two) return amax > 0 ? amax / kLargest : 1.0f;
  const std::uint32_t bits = __float_as_uint(fmaxf(amax / kLargest, 1e-4f));
  return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);  // rounds up to a power of two
}

/// The pair (x, y) rotated by an angle.
struct Turned {
  float a, b;
  __device__ Turned(float x, float y, float cosine, float sine)
      : a(x * cosine - y * sine), b(y * cosine + x * sine) {}
};

/// Writes columns 2 i and 2 i + 1 of the latent, with i = threadIdx.x, to a token.
__device__ inline void put_latent(Bf16* token, float low, float high, float) {
  reinterpret_cast<std::uint32_t*>(token)[threadIdx.x] = hopper::pack<Bf16>(low, high);
}
template <class Number>  // E4m3, or std::uint8_t for tokens of 656 bytes
__device__ inline void put_latent(Number* token, float low, float high, float scale) {
  const E4m3 numbers[2] = {E4m3(low / scale), E4m3(high / scale)};
  reinterpret_cast<std::uint16_t*>(token)[threadIdx.x] =
      *reinterpret_cast<const std::uint16_t*>(numbers);
}

/// Writes column i of k_pe to a token.
__device__ inline void put_pe(Bf16* token, int i, float x, float) {
  token[kLatent + i] = from_float<Bf16>(x);
}
__device__ inline void put_pe(E4m3* token, int i, float x, float scale) {
  token[kLatent + i] = E4m3(x / scale);
}
__device__ inline void put_pe(std::uint8_t* token, int i, float x, float) {
  reinterpret_cast<Bf16*>(token + kPeOffset)[i] = from_float<Bf16>(x);
}

/// The largest magnitude of the 128 columns that two neighbouring warps hold. Every thread of the
/// block calls it.
__device__ inline float largest_of_tile(float low, float high) {
  __shared__ float parts[kThreads / 32];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const float largest = over_warp(fmaxf(fabsf(low), fabsf(high)), Larger{});
  if (threadIdx.x % 32 == 0) parts[warp] = largest;
  __syncthreads();
  return fmaxf(parts[warp & ~1], parts[warp | 1]);
}

/// Rotates q_pe of all heads of token t; a thread takes four pairs at a time.
template <class C>
__device__ inline void turn_queries(const Write<C>& w, std::int64_t t, const float* cosines,
                                    const float* sines) {
  const bool together = w.in.interleaved;
  for (int i = static_cast<int>(threadIdx.x); i < w.heads * kEach; i += kThreads) {
    const int head = i / kEach, first = i % kEach * 4;  // first: number of the first pair
    const Bf16* const from = w.q_pe + t * w.q_strides[0] + head * w.q_strides[1];
    Bf16* const to = w.rotated + t * w.rotated_strides[0] + head * w.rotated_strides[1];
    const int left = together ? 2 * first : first, right = together ? left + 4 : left + kPairs;
    const uint2 l = *reinterpret_cast<const uint2*>(from + left);
    const uint2 r = *reinterpret_cast<const uint2*>(from + right);
    const float2 x[4] = {hopper::unpack<Bf16>(l.x), hopper::unpack<Bf16>(l.y),
                         hopper::unpack<Bf16>(r.x), hopper::unpack<Bf16>(r.y)};
    float a[4], b[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float xa = together ? x[j].x : j % 2 ? x[j / 2].y : x[j / 2].x;
      const float xb = together ? x[j].y : j % 2 ? x[2 + j / 2].y : x[2 + j / 2].x;
      const Turned turned(xa, xb, cosines[first + j], sines[first + j]);
      a[j] = turned.a;
      b[j] = turned.b;
    }
    const auto two = hopper::pack<Bf16>;
    *reinterpret_cast<uint2*>(to + left) = together ? make_uint2(two(a[0], b[0]), two(a[1], b[1]))
                                                    : make_uint2(two(a[0], a[1]), two(a[2], a[3]));
    *reinterpret_cast<uint2*>(to + right) = together ? make_uint2(two(a[2], b[2]), two(a[3], b[3]))
                                                     : make_uint2(two(b[0], b[1]), two(b[2], b[3]));
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ Write<C> w) {
  wait_for_earlier_launch();
  let_the_next_launch_start();
  const LatentWrite<C>& in = w.in;
  const std::int64_t t = blockIdx.x;
  const int i = static_cast<int>(threadIdx.x);
  __shared__ float cosines[kPairs], sines[kPairs];
  if (i < kPairs) {
    sincosf(static_cast<float>(in.positions(t)) * in.frequencies(i), &sines[i], &cosines[i]);
    sines[i] *= in.magnitude;
    cosines[i] *= in.magnitude;
  }
  float low = to_float(in.latent(t, 2 * i)), high = to_float(in.latent(t, 2 * i + 1));
  if (in.norm) {
    const float squares = over_block<kThreads>(low * low + high * high, Plus{});
    const float root = sqrtf(squares / kLatent + in.eps);
    low = low / root * at(in.norm, 2 * i);
    high = high / root * at(in.norm, 2 * i + 1);
  }
  __syncthreads();  // sines and cosines are in shared memory
  float scale = w.kv_scale ? *w.kv_scale : 1.0f;
  if constexpr (std::is_same_v<C, std::uint8_t>)
    scale = scale_of_tile(largest_of_tile(low, high), in.power_of_two_scales);

  const std::int64_t slot = in.slots(t), page = in.cache.extent(1);
  C* const token = 0 <= slot && slot < in.cache.extent(0) * page
                       ? &in.cache(slot / page, slot % page, 0)
                       : nullptr;
  Bf16* const plain = w.latents ? w.latents + t * w.latents_stride : nullptr;
  if (token) put_latent(token, low, high, scale);
  if (plain) put_latent(plain, low, high, scale);
  if constexpr (std::is_same_v<C, std::uint8_t>)
    if (token && i % (kTile / 2) == 0)
      reinterpret_cast<float*>(token + kScaleOffset)[i / (kTile / 2)] = scale;
  if (i < kPairs) {
    const int a = in.interleaved ? 2 * i : i, b = in.interleaved ? a + 1 : a + kPairs;
    const Turned turned(to_float(in.k_pe(t, a)), to_float(in.k_pe(t, b)), cosines[i], sines[i]);
    if (token) put_pe(token, a, turned.a, scale);
    if (token) put_pe(token, b, turned.b, scale);
    if (plain) put_pe(plain, a, turned.a, scale);
    if (plain) put_pe(plain, b, turned.b, scale);
  }
  if (w.heads > 0) turn_queries(w, t, cosines, sines);
}

// --- Gathering -----------------------------------------------------------------------------------

/// Number of request b's tokens that are gathered.
template <class C>
__device__ inline int tokens_of(const LatentGather<C>& in, std::int64_t b) {
  std::int64_t tokens = in.seq_lens(b);
  if (in.prefix) tokens -= in.query_start_loc(b + 1) - in.query_start_loc(b);
  return static_cast<int>(max(std::int64_t{0}, min(tokens - in.begin, in.size)));
}

/// One block: starts[b + 1] = tokens gathered of requests 0 ... b, by a prefix sum in shared
/// memory.
template <class C>
__global__ void __launch_bounds__(kThreads)
    starts_kernel(const __grid_constant__ LatentGather<C> in) {
  const auto B = static_cast<int>(in.seq_lens.extent(0));
  __shared__ int before[kThreads];
  int sum = 0;
  for (int first = 0; first < B; first += kThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    before[threadIdx.x] = b < B ? tokens_of(in, b) : 0;
    __syncthreads();
    for (int distance = 1; distance < kThreads; distance *= 2) {
      const int left =
          static_cast<int>(threadIdx.x) >= distance ? before[threadIdx.x - distance] : 0;
      __syncthreads();
      before[threadIdx.x] += left;
      __syncthreads();
    }
    if (b < B) in.starts(b + 1) = sum + before[threadIdx.x];
    sum += before[kThreads - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) in.starts(0) = 0;
}

/// The value of column i of a token.
__device__ inline float value_at(const Bf16* token, int i, float) {
  return to_float(token[i]);
}
__device__ inline float value_at(const E4m3* token, int i, float scale) {
  return static_cast<float>(token[i]) * scale;
}
__device__ inline float value_at(const std::uint8_t* token, int i, float) {
  if (i >= kLatent) return to_float(reinterpret_cast<const Bf16*>(token + kPeOffset)[i - kLatent]);
  return static_cast<float>(reinterpret_cast<const E4m3*>(token)[i]) *
         reinterpret_cast<const float*>(token + kScaleOffset)[i / kTile];
}

template <class C>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ LatentGather<C> in, const float* kv_scale) {
  const auto row = static_cast<int>(blockIdx.x), B = static_cast<int>(in.seq_lens.extent(0));
  int b = 0,
      behind = B;  // bisection: b becomes the last request that begins at the row or before it
  while (behind - b > 1) {
    const int middle = (b + behind) / 2;
    (in.starts(middle) <= row ? b : behind) = middle;
  }
  const C* token = nullptr;
  if (B > 0 && row < in.starts(B)) {
    const std::int64_t place = row - in.starts(b) + in.begin, page = in.cache.extent(1);
    const std::int64_t block = place / page;
    const int number = block < in.block_table.extent(1) ? in.block_table(b, block) : -1;
    if (0 <= number && number < in.cache.extent(0)) token = &in.cache(number, place % page, 0);
  }
  const float scale = kv_scale ? *kv_scale : 1.0f;
  for (int i = static_cast<int>(threadIdx.x); i < kWidth; i += kThreads)
    in.latents(row, i) = from_float<Bf16>(token ? value_at(token, i, scale) : 0.0f);
}

// --- Joining -------------------------------------------------------------------------------------

/// Vectors [T, heads, columns] in bf16, read 16 bytes at a time.
struct Heads {
  const Bf16* data;
  std::int64_t strides[2];
  int columns;

  __device__ uint4 at(std::int64_t t, std::int64_t h, int first) const {
    return *reinterpret_cast<const uint4*>(data + t * strides[0] + h * strides[1] + first);
  }
};

__global__ void __launch_bounds__(kThreads)
    join_kernel(Heads a, Heads b, Bf16* out, std::int64_t out_row, std::int64_t out_head, int heads,
                int vectors_of_head, std::int64_t vectors) {
  const std::int64_t number = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (number >= vectors) return;
  const std::int64_t head = number / vectors_of_head, t = head / heads, h = head - t * heads;
  const int first = static_cast<int>(number - head * vectors_of_head) * kEach;
  uint4 x = make_uint4(0, 0, 0, 0);
  if (first < a.columns)
    x = a.at(t, h, first);
  else if (first < a.columns + b.columns)
    x = b.at(t, h, first - a.columns);
  *reinterpret_cast<uint4*>(out + t * out_row + h * out_head + first) = x;
}

// --- Checks --------------------------------------------------------------------------------------

/// Expects rows that are contiguous and begin at multiples of 16 bytes.
template <AnyView V>
void check_rows(const Checks& checks, const V& view, const char* argument) {
  constexpr std::int64_t kSize = sizeof(ElementOf<V>);
  constexpr std::size_t last = V::rank() - 1;
  bool whole = view.extent(last) <= 1 || view.stride(last) == 1;
  whole = whole && reinterpret_cast<std::uintptr_t>(view.data_handle()) % 16 == 0;
  for (std::size_t i = 0; i < last; ++i)
    whole = whole && (view.extent(i) <= 1 || view.stride(i) * kSize % 16 == 0);
  checks.expect(whole, argument, "contiguous in its last dimension, with strides of whole 16 bytes",
                "other strides");
}

template <class C, class View>
void check_cache(const Checks& checks, const View& cache,
                 const std::optional<TensorView<const float, 1>>& kv_scale) {
  checks.shape(cache, "cache", "[pages, page, width]",
               {cache.extent(0), cache.extent(1), kColumns<C>});
  checks.expect(cache.extent(1) > 0, "cache", "[pages, page, width] with a token in each page",
                text_of(shape_of(cache)));
  check_rows(checks, cache, "cache");
  constexpr bool kNumbers = std::is_same_v<C, E4m3>;
  checks.expect(!kv_scale || kNumbers, "kv_scale", "absent without a cache of numbers in e4m3",
                "one");
  if (kv_scale) checks.shape(*kv_scale, "kv_scale", "[1]", {1});
}

}  // namespace

template <class C>
void write_latents(const LatentWrite<C>& in, cudaStream_t stream) {
  const Checks checks("write_latents");
  const std::int64_t T = in.latent.extent(0);
  checks.shape(in.latent, "latent", "[T, 512]", {T, kLatent});
  checks.contiguous_rows(in.latent, "latent");
  checks.shape(in.k_pe, "k_pe", "[T, 64]", {T, kPe});
  if (in.norm) checks.shape(in.norm, "norm", "[512]", {kLatent});
  checks.shape(in.positions, "positions", "[T]", {T});
  checks.shape(in.frequencies, "frequencies", "[32]", {kPairs});
  checks.shape(in.slots, "slots", "[T]", {T});
  check_cache<C>(checks, in.cache, in.kv_scale);
  Write<C> w{.in = in, .kv_scale = in.kv_scale ? in.kv_scale->data_handle() : nullptr};
  if (in.latents) {
    checks.shape(*in.latents, "latents", "[T, 576]", {T, kWidth});
    check_rows(checks, *in.latents, "latents");
    w.latents = in.latents->data_handle();
    w.latents_stride = in.latents->stride(0);
  }
  checks.expect(in.q_pe.has_value() == in.rotated_q.has_value(), "rotated_q",
                "given with q_pe, or neither", in.q_pe ? "q_pe alone" : "rotated_q alone");
  if (in.q_pe) {
    const std::int64_t H = in.q_pe->extent(1);
    checks.expect(H <= (1 << 20), "q_pe", "[T, H, 64] of at most 2^20 heads", std::to_string(H));
    checks.shape(*in.q_pe, "q_pe", "[T, H, 64]", {T, H, kPe});
    checks.shape(*in.rotated_q, "rotated_q", "[T, H, 64]", {T, H, kPe});
    check_rows(checks, *in.q_pe, "q_pe");
    check_rows(checks, *in.rotated_q, "rotated_q");
    w.heads = static_cast<int>(H);
    w.q_pe = in.q_pe->data_handle();
    w.rotated = in.rotated_q->data_handle();
    for (std::size_t i = 0; i < 2; ++i) {
      w.q_strides[i] = in.q_pe->stride(i);
      w.rotated_strides[i] = in.rotated_q->stride(i);
    }
  }
  if (T == 0) return;
  launch("write_latents", write_kernel<C>, dim3(static_cast<unsigned>(T)), dim3(kThreads), 0,
         stream, true, w);
}

template <class C>
void gather_latents(const LatentGather<C>& in, cudaStream_t stream) {
  constexpr const char* kGather = "gather_latents";
  const Checks checks(kGather);
  const std::int64_t B = in.seq_lens.extent(0);
  check_cache<C>(checks, in.cache, in.kv_scale);
  checks.shape(in.block_table, "block_table", "[B, blocks]", {B, in.block_table.extent(1)});
  checks.shape(in.query_start_loc, "query_start_loc", "[B + 1]", {B + 1});
  checks.expect(in.begin >= 0 && in.size >= 0, "begin, size", "at least 0",
                std::to_string(in.begin) + ", " + std::to_string(in.size));
  checks.shape(in.latents, "latents", "[L, 576]", {in.latents.extent(0), kWidth});
  check_rows(checks, in.latents, "latents");
  checks.shape(in.starts, "starts", "[B + 1]", {B + 1});
  launch(kGather, starts_kernel<C>, dim3(1), dim3(kThreads), 0, stream, false, in);
  if (in.latents.extent(0) == 0) return;
  launch(kGather, gather_kernel<C>, dim3(static_cast<unsigned>(in.latents.extent(0))),
         dim3(kThreads), 0, stream, false, in,
         in.kv_scale ? in.kv_scale->data_handle() : static_cast<const float*>(nullptr));
}

void join_heads(const JoinHeads& in, cudaStream_t stream) {
  constexpr const char* kJoin = "join_heads";
  const Checks checks(kJoin);
  const std::int64_t T = in.out.extent(0), H = in.out.extent(1), d = in.out.extent(2);
  const std::int64_t da = in.a.extent(2), db = in.b ? in.b->extent(2) : 0;
  checks.shape(in.a, "a", "[T, H, da]", {T, H, da});
  check_rows(checks, in.a, "a");
  if (in.b) {
    checks.shape(*in.b, "b", "[T, 1 or H, db]", {T, in.b->extent(1) == 1 ? 1 : H, db});
    check_rows(checks, *in.b, "b");
  }
  check_rows(checks, in.out, "out");
  checks.expect(da % kEach == 0 && db % kEach == 0 && d % kEach == 0 && da + db <= d &&
                    d <= (1 << 20) && H <= (1 << 20),
                "out", "[T, H, d] with room for a and b, all of multiples of 8 columns",
                text_of(shape_of(in.out)));
  const std::int64_t vectors = T * H * (d / kEach), blocks = (vectors + kThreads - 1) / kThreads;
  checks.expect(blocks < (std::int64_t{1} << 31), "out", "of fewer than 2^42 elements",
                text_of(shape_of(in.out)));
  if (vectors == 0) return;
  const auto heads = [](const TensorView<const Bf16, 3>& x) {
    return Heads{x.data_handle(),
                 {x.stride(0), x.extent(1) == 1 ? 0 : x.stride(1)},
                 static_cast<int>(x.extent(2))};
  };
  launch(kJoin, join_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, false,
         heads(in.a), in.b ? heads(*in.b) : Heads{}, in.out.data_handle(), in.out.stride(0),
         in.out.stride(1), static_cast<int>(H), static_cast<int>(d / kEach), vectors);
}

#define LOCKSTEP_INSTANTIATE(C)                                     \
  template void write_latents(const LatentWrite<C>&, cudaStream_t); \
  template void gather_latents(const LatentGather<C>&, cudaStream_t);
LOCKSTEP_INSTANTIATE(Bf16)
LOCKSTEP_INSTANTIATE(E4m3)
LOCKSTEP_INSTANTIATE(std::uint8_t)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
