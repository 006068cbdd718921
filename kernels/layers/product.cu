// Products with weights, in float32 on the ordinary cores. Equations: reference/layers/product.hpp.
//
// product_kernel, grouped_product_kernel: a block computes a tile [kTile, kTile] of the result.
//   grid   (ceil(N / kTile), row tiles); with experts, each expert may end with a partial row tile
//   block  kSide x kSide threads; a thread has kEach x kEach elements, kSide apart
// Each element is summed by one thread from k = 0 upwards, for any shape. cuBLAS would choose
// another order for another number of rows, and so other bits.
//
// count_kernel, place_kernel: a warp per expert counts, then places, the choices of the expert.
// sum_kernel: one block; turns the counts into starts.
// combine_kernel: a block per token; a thread has every kCombineThreads-th channel.
#include "kernels/layers/product.hpp"

#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kSide = 16, kEach = 4, kTile = kSide * kEach;
constexpr int kDepth = 32;  ///< elements of K that shared memory holds at once
constexpr int kThreads = kSide * kSide;
constexpr int kCombineThreads = 128;

/// Loads elements [first, first + kTile) x [k, k + kDepth) of a matrix; 0 beyond its rows and
/// columns.
template <class T>
__device__ inline void load_tile(float (&tile)[kTile][kDepth + 1], const T* matrix,
                                 std::int64_t stride, std::int64_t first, std::int64_t rows,
                                 std::int64_t k, std::int64_t K) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kThreads) {
    const int row = i / kDepth, column = i % kDepth;
    const bool inside = first + row < rows && k + column < K;
    tile[row][column] = inside ? to_float(matrix[(first + row) * stride + k + column]) : 0.0f;
  }
}

/// Computes a tile of out = x weight^T: rows first ... first + kTile - 1 below `rows`, columns by
/// blockIdx.x.
template <class T, class Out>
__device__ inline void multiply_tile(const TensorView<const T, 2>& x, std::int64_t first,
                                     std::int64_t rows, const T* weight, std::int64_t weight_stride,
                                     const TensorView<Out, 2>& out) {
  __shared__ float left[kTile][kDepth + 1], right[kTile][kDepth + 1];
  const std::int64_t N = out.extent(1), K = x.extent(1);
  const std::int64_t column = std::int64_t{blockIdx.x} * kTile;
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  float sums[kEach][kEach] = {};
  for (std::int64_t k = 0; k < K; k += kDepth) {
    load_tile(left, x.data_handle(), x.stride(0), first, rows, k, K);
    load_tile(right, weight, weight_stride, column, N, k, K);
    __syncthreads();
    const int depth = static_cast<int>(min(std::int64_t{kDepth}, K - k));
    for (int d = 0; d < depth; ++d)
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          sums[i][j] = fmaf(left[ty + i * kSide][d], right[tx + j * kSide][d], sums[i][j]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t t = first + ty + i * kSide, n = column + tx + j * kSide;
      if (t < rows && n < N) out(t, n) = from_float<Out>(sums[i][j]);
    }
}

template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const __grid_constant__ Product<T, Out> in) {
  multiply_tile(in.x, std::int64_t{blockIdx.y} * kTile, in.x.extent(0), in.weight.data_handle(),
                in.weight.stride(0), in.out);
}

/// The first row of expert e, cut to 0 ... rows so that bad starts lead to no row outside.
__device__ inline std::int64_t start_of(const IndexView& starts, std::int64_t e,
                                        std::int64_t rows) {
  return max(std::int64_t{0}, min(std::int64_t{starts(e)}, rows));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    grouped_product_kernel(const __grid_constant__ GroupedProduct<T> in) {
  const std::int64_t T_ = in.x.extent(0), E = in.weight.extent(0);
  // Finds the expert e and its tile. Tiles are counted expert by expert; rows after the last
  // expert's count as one more expert, whose outputs are 0.
  std::int64_t tile = blockIdx.y, begin = 0, end = 0, e = 0;
  for (; e <= E; ++e) {
    begin = start_of(in.starts, e, T_);
    end = e < E ? max(begin, start_of(in.starts, e + 1, T_)) : T_;
    const std::int64_t tiles = (end - begin + kTile - 1) / kTile;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (e > E) return;
  const std::int64_t first = begin + tile * kTile;
  if (e < E)
    return multiply_tile(in.x, first, end, in.weight.data_handle() + e * in.weight.stride(0),
                         in.weight.stride(1), in.out);
  const std::int64_t column = std::int64_t{blockIdx.x} * kTile;
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kTile; i += kThreads) {
    const std::int64_t t = first + i / kTile, n = column + i % kTile;
    if (t < end && n < in.out.extent(1)) in.out(t, n) = from_float<T>(0.0f);
  }
}

// --- Sorting and combining -----------------------------------------------------------------------

/// Calls body(choice, rank) for all choices of expert e, in order, spread over the warp's lanes;
/// `rank` counts them. Returns their number.
template <class Body>
__device__ inline int over_choices(const TensorView<const std::int32_t, 2>& experts, int e,
                                   Body body) {
  const std::int64_t k = experts.extent(1), count = experts.extent(0) * k;
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  for (std::int64_t first = 0; first < count; first += 32) {
    const std::int64_t choice = first + lane;
    const bool mine = choice < count && experts(choice / k, choice % k) == e;
    const unsigned all = __ballot_sync(kWholeWarp, mine);
    if (mine) body(choice, before + __popc(all & ((1u << lane) - 1)));
    before += __popc(all);
  }
  return before;
}

/// starts[e + 1] becomes the number of choices of e; places of choices that name no expert become
/// -1.
__global__ void __launch_bounds__(32) count_kernel(const __grid_constant__ ExpertOrder in) {
  const auto e = static_cast<int>(blockIdx.x);
  const auto E = static_cast<int>(in.starts.extent(0)) - 1;
  const int count = over_choices(in.experts, e, [](std::int64_t, int) {});
  if (threadIdx.x == 0) in.starts(e + 1) = count;
  if (e > 0) return;
  if (threadIdx.x == 0) in.starts(0) = 0;
  const std::int64_t k = in.experts.extent(1), choices = in.experts.extent(0) * k;
  for (std::int64_t choice = threadIdx.x; choice < choices; choice += 32) {
    const std::int32_t chosen = in.experts(choice / k, choice % k);
    if (chosen < 0 || chosen >= E) in.place(choice / k, choice % k) = -1;
  }
}

/// Turns the counts in starts into prefix sums; rows after the last expert's get source -1.
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ ExpertOrder in) {
  __shared__ std::int32_t sums[kThreads];
  std::int32_t before = 0;
  for (std::int64_t first = 1; first < in.starts.extent(0); first += kThreads) {
    const std::int64_t e = first + threadIdx.x;
    sums[threadIdx.x] = e < in.starts.extent(0) ? in.starts(e) : 0;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < kThreads; ++i) sums[i] = before += sums[i];
    __syncthreads();
    if (e < in.starts.extent(0)) in.starts(e) = sums[threadIdx.x];
    before = sums[kThreads - 1];
    __syncthreads();
  }
  for (std::int64_t row = before + std::int64_t{threadIdx.x}; row < in.source.extent(0);
       row += kThreads)
    in.source(row) = -1;
}

/// Writes source and place of the choices of expert blockIdx.x.
__global__ void __launch_bounds__(32) place_kernel(const __grid_constant__ ExpertOrder in) {
  const auto e = static_cast<int>(blockIdx.x);
  const std::int64_t k = in.experts.extent(1);
  const std::int32_t first = in.starts(e);
  over_choices(in.experts, e, [&](std::int64_t choice, int rank) {
    in.source(first + rank) = static_cast<std::int32_t>(choice / k);
    in.place(choice / k, choice % k) = first + rank;
  });
}

template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ CombineExperts<T> in) {
  const std::int64_t t = blockIdx.x;
  for (std::int64_t d = threadIdx.x; d < in.out.extent(1); d += kCombineThreads) {
    float sum = 0;
    for (std::int64_t i = 0; i < in.place.extent(1); ++i) {
      const std::int64_t row = in.place(t, i);
      if (row >= 0 && row < in.x.extent(0))
        sum = fmaf(in.weights(t, i), to_float(in.x(row, d)), sum);
    }
    in.out(t, d) = from_float<T>(sum);
  }
}

// --- Launches ------------------------------------------------------------------------------------

/// The grid of a product with `row_tiles` tiles of rows.
dim3 tiles_of(const Checks& checks, std::int64_t row_tiles, std::int64_t N) {
  checks.expect(row_tiles <= 65535, "x", "of at most 65535 tiles of 64 rows",
                std::to_string(row_tiles));
  return dim3(static_cast<unsigned>((N + kTile - 1) / kTile), static_cast<unsigned>(row_tiles));
}

}  // namespace

template <class T, class Out>
void product(const Product<T, Out>& in, cudaStream_t stream) {
  const Checks checks("product");
  const std::int64_t T_ = in.x.extent(0), K = in.x.extent(1), N = in.weight.extent(0);
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.weight, "weight", "[N, K]", {N, K});
  checks.contiguous_rows(in.weight, "weight");
  checks.shape(in.out, "out", "[T, N]", {T_, N});
  checks.contiguous_rows(in.out, "out");
  const dim3 grid = tiles_of(checks, (T_ + kTile - 1) / kTile, N);
  if (T_ == 0 || N == 0) return;
  launch("product", product_kernel<T, Out>, grid, dim3(kThreads), 0, stream, false, in);
}

template <class T>
void grouped_product(const GroupedProduct<T>& in, cudaStream_t stream) {
  const Checks checks("grouped_product");
  const std::int64_t T_ = in.x.extent(0), K = in.x.extent(1);
  const std::int64_t E = in.weight.extent(0), N = in.weight.extent(1);
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.weight, "weight", "[E, N, K]", {E, N, K});
  checks.contiguous_rows(in.weight, "weight");
  checks.shape(in.starts, "starts", "[E + 1]", {E + 1});
  checks.shape(in.out, "out", "[T, N]", {T_, N});
  checks.contiguous_rows(in.out, "out");
  // An upper bound: each expert, and the rows after them, may end with a partial tile.
  const std::int64_t most = T_ / kTile + std::min(E + 1, T_);
  const dim3 grid = tiles_of(checks, most, N);
  if (T_ == 0 || N == 0) return;
  launch("grouped_product", grouped_product_kernel<T>, grid, dim3(kThreads), 0, stream, false, in);
}

void sort_by_expert(const ExpertOrder& in, cudaStream_t stream) {
  const Checks checks("sort_by_expert");
  const std::int64_t T_ = in.experts.extent(0), k = in.experts.extent(1);
  const std::int64_t E = in.starts.extent(0) - 1;
  checks.expect(1 <= E && E <= INT32_MAX, "starts", "[E + 1] with E of at least 1",
                text_of(shape_of(in.starts)));
  checks.expect(T_ * k <= INT32_MAX, "experts", "of fewer than 2^31 choices",
                text_of(shape_of(in.experts)));
  checks.shape(in.source, "source", "[T k]", {T_ * k});
  checks.shape(in.place, "place", "[T, k]", {T_, k});
  const dim3 experts(static_cast<unsigned>(E));
  launch("sort_by_expert", count_kernel, experts, dim3(32), 0, stream, false, in);
  launch("sort_by_expert", sum_kernel, dim3(1), dim3(kThreads), 0, stream, false, in);
  launch("sort_by_expert", place_kernel, experts, dim3(32), 0, stream, false, in);
}

template <class T>
void combine_experts(const CombineExperts<T>& in, cudaStream_t stream) {
  const Checks checks("combine_experts");
  const std::int64_t T_ = in.place.extent(0), k = in.place.extent(1), D = in.x.extent(1);
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.weights, "weights", "[T, k]", {T_, k});
  checks.shape(in.out, "out", "[T, D]", {T_, D});
  checks.contiguous_rows(in.out, "out");
  if (T_ == 0 || D == 0) return;
  launch("combine_experts", combine_kernel<T>, dim3(static_cast<unsigned>(T_)),
         dim3(kCombineThreads), 0, stream, false, in);
}

#define LOCKSTEP_INSTANTIATE(T)                                          \
  template void product(const Product<T, T>&, cudaStream_t);             \
  template void grouped_product(const GroupedProduct<T>&, cudaStream_t); \
  template void combine_experts(const CombineExperts<T>&, cudaStream_t);
LOCKSTEP_ACTIVATIONS(LOCKSTEP_INSTANTIATE)
#undef LOCKSTEP_INSTANTIATE
// Logits are float32.
template void product(const Product<Bf16, float>&, cudaStream_t);
#ifdef LOCKSTEP_ALL_SHAPES
template void product(const Product<Fp16, float>&, cudaStream_t);
#endif

}  // namespace lockstep::kernels
