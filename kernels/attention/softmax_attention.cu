// Softmax attention over a paged cache. Equations: reference/attention/softmax_attention.hpp.
//
// attention_kernel
//   grid   (T, HQ)
//   block  kWarps warps; warp w has keys w, w + kWarps, ...; lane l has dimensions l, l + 32, ...
//   1. each warp goes through its keys with a running maximum (the reference's merge, key by key)
//   2. the warps' partial results are merged in shared memory
// write_pages_kernel
//   grid   T
//   block  kThreads threads over the elements of all heads of a token
#include "kernels/attention/softmax_attention.hpp"

#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kDimensionsMost = 256, kEach = kDimensionsMost / 32;

template <class T>
struct Parameters {
  TensorView<const T, 3> q;
  TensorView<const T, 4> k_pages, v_pages;
  IndexTable block_table;
  IndexView seq_lens, query_start_loc;
  TensorView<T, 3> out;
  TensorView<float, 2> lse;
  float scale, empty_lse;
  bool causal, has_lse;
};

/// The row of token t, by bisection of query_start_loc; -1 if the token belongs to none.
template <class T>
__device__ inline std::int64_t row_of(const Parameters<T>& p, std::int64_t t) {
  std::int64_t low = 0, high = p.seq_lens.extent(0);  // starts[low] <= t < starts[high]
  if (t < p.query_start_loc(0) || t >= p.query_start_loc(high)) return -1;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (p.query_start_loc(middle) <= t ? low : high) = middle;
  }
  return low;
}

/// Number of leading keys of the row that token t sees.
template <class T>
__device__ inline std::int64_t visible_keys(const Parameters<T>& p, std::int64_t t,
                                            std::int64_t row) {
  if (row < 0) return 0;
  const std::int64_t capacity = p.block_table.extent(1) * p.k_pages.extent(1);
  const std::int64_t keys = max(std::int64_t{0}, std::int64_t{p.seq_lens(row)});
  const std::int64_t behind = p.query_start_loc(row + 1) - 1 - t;  // queries after this one
  return min(p.causal ? max(std::int64_t{0}, keys - behind) : keys, capacity);
}

/// The partial result over some keys j: sum = sum_j exp(s_j - largest), out = sum_j exp(s_j -
/// largest) v_j.
struct Partial {
  float largest = -INFINITY, sum = 0;
  float out[kEach] = {};  // dimensions lane, lane + 32, ...
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const __grid_constant__ Parameters<T> p) {
  __shared__ float largest_of[kWarps], sum_of[kWarps], out_of[kWarps][kDimensionsMost];
  const std::int64_t t = blockIdx.x, head = blockIdx.y;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto d = static_cast<int>(p.q.extent(2)), dv = static_cast<int>(p.out.extent(2));
  const std::int64_t page = p.k_pages.extent(1), pages = p.k_pages.extent(0);
  const std::int64_t key_head = head / (p.q.extent(1) / p.k_pages.extent(2));
  const std::int64_t row = row_of(p, t), keys = visible_keys(p, t, row);

  float q[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    q[i] = lane + 32 * i < d ? to_float(p.q(t, head, lane + 32 * i)) : 0.0f;
  Partial mine;
  for (std::int64_t j = warp; j < keys; j += kWarps) {
    const std::int64_t block = p.block_table(row, j / page);
    if (block < 0 || block >= pages) continue;
    const T* const k = &p.k_pages(block, j % page, key_head, 0);
    const T* const v = &p.v_pages(block, j % page, key_head, 0);
    float product = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (lane + 32 * i < d) product = fmaf(q[i], to_float(k[lane + 32 * i]), product);
    const float score = p.scale * over_warp(product, Plus{});
    const float largest = fmaxf(mine.largest, score);
    const float kept = expf(mine.largest - largest), weight = expf(score - largest);
    mine.largest = largest;
    mine.sum = fmaf(mine.sum, kept, weight);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (lane + 32 * i < dv)
        mine.out[i] = fmaf(mine.out[i], kept, weight * to_float(v[lane + 32 * i]));
  }

  if (lane == 0) {
    largest_of[warp] = mine.largest;
    sum_of[warp] = mine.sum;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) out_of[warp][lane + 32 * i] = mine.out[i];
  __syncthreads();
  float largest = -INFINITY, sum = 0, weights[kWarps];
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, largest_of[w]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    weights[w] = sum_of[w] == 0 ? 0.0f : expf(largest_of[w] - largest);  // sum 0: no key seen
    sum = fmaf(sum_of[w], weights[w], sum);
  }
  for (int c = static_cast<int>(threadIdx.x); c < dv; c += kThreads) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total = fmaf(out_of[w][c], weights[w], total);
    p.out(t, head, c) = from_float<T>(sum == 0 ? 0.0f : total / sum);
  }
  if (p.has_lse && threadIdx.x == 0) p.lse(head, t) = sum == 0 ? p.empty_lse : largest + logf(sum);
}

/// Copies the keys or values of token blockIdx.x to its slot.
template <class T>
__global__ void __launch_bounds__(kThreads)
    write_pages_kernel(const __grid_constant__ PageWrite<T> in) {
  const std::int64_t t = blockIdx.x, slot = in.slots(t), page = in.pages.extent(1);
  if (slot < 0 || slot >= in.pages.extent(0) * page) return;
  const std::int64_t d = in.x.extent(2), count = in.x.extent(1) * d;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads)
    in.pages(slot / page, slot % page, i / d, i % d) = in.x(t, i / d, i % d);
}

}  // namespace

template <class T>
void softmax_attention(const SoftmaxAttention<T>& in, cudaStream_t stream) {
  const Checks checks("softmax_attention");
  const std::int64_t T_ = in.q.extent(0), HQ = in.q.extent(1), d = in.q.extent(2);
  const std::int64_t pages = in.k_pages.extent(0), page = in.k_pages.extent(1);
  const std::int64_t HKV = in.k_pages.extent(2), dv = in.v_pages.extent(3);
  const std::int64_t N = in.seq_lens.extent(0);
  checks.contiguous_rows(in.q, "q");
  checks.expect(1 <= d && d <= kDimensionsMost && HQ <= 65535, "q",
                "[T, HQ, d] with d from 1 to 256 and HQ of at most 65535", text_of(shape_of(in.q)));
  checks.expect(page >= 1, "k_pages", "[pages, page, HKV, d] with tokens in a page",
                text_of(shape_of(in.k_pages)));
  checks.expect(HKV >= 1 && HQ % HKV == 0, "k_pages",
                "[pages, page, HKV, d] with HKV a divisor of HQ = " + std::to_string(HQ),
                text_of(shape_of(in.k_pages)));
  checks.shape(in.k_pages, "k_pages", "[pages, page, HKV, d]", {pages, page, HKV, d});
  checks.contiguous_rows(in.k_pages, "k_pages");
  checks.shape(in.v_pages, "v_pages", "[pages, page, HKV, dv]", {pages, page, HKV, dv});
  checks.expect(1 <= dv && dv <= kDimensionsMost, "v_pages",
                "[pages, page, HKV, dv] with dv from 1 to 256", text_of(shape_of(in.v_pages)));
  checks.contiguous_rows(in.v_pages, "v_pages");
  checks.shape(in.block_table, "block_table", "[N, blocks]", {N, in.block_table.extent(1)});
  checks.shape(in.query_start_loc, "query_start_loc", "[N + 1]", {N + 1});
  checks.shape(in.out, "out", "[T, HQ, dv]", {T_, HQ, dv});
  checks.contiguous_rows(in.out, "out");
  Parameters<T> p{.q = in.q,
                  .k_pages = in.k_pages,
                  .v_pages = in.v_pages,
                  .block_table = in.block_table,
                  .seq_lens = in.seq_lens,
                  .query_start_loc = in.query_start_loc,
                  .out = in.out,
                  .lse = {},
                  .scale = in.scale,
                  .empty_lse = in.empty_lse,
                  .causal = in.causal,
                  .has_lse = in.lse.has_value()};
  if (in.lse) {
    checks.shape(*in.lse, "lse", "[HQ, T]", {HQ, T_});
    p.lse = *in.lse;
  }
  if (T_ == 0 || HQ == 0) return;
  const dim3 grid(static_cast<unsigned>(T_), static_cast<unsigned>(HQ));
  launch("softmax_attention", attention_kernel<T>, grid, dim3(kThreads), 0, stream, false, p);
}

template <class T>
void write_pages(const PageWrite<T>& in, cudaStream_t stream) {
  const Checks checks("write_pages");
  const std::int64_t T_ = in.x.extent(0);
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.slots, "slots", "[T]", {T_});
  checks.shape(in.pages, "pages", "[pages, page, heads, d]",
               {in.pages.extent(0), in.pages.extent(1), in.x.extent(1), in.x.extent(2)});
  checks.contiguous_rows(in.pages, "pages");
  if (T_ == 0 || in.x.extent(1) * in.x.extent(2) == 0) return;
  launch("write_pages", write_pages_kernel<T>, dim3(static_cast<unsigned>(T_)), dim3(kThreads), 0,
         stream, false, in);
}

#define LOCKSTEP_INSTANTIATE(T)                                              \
  template void softmax_attention(const SoftmaxAttention<T>&, cudaStream_t); \
  template void write_pages(const PageWrite<T>&, cudaStream_t);
LOCKSTEP_ACTIVATIONS(LOCKSTEP_INSTANTIATE)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
