// Batched products with weights on tensor cores. Equations: reference/layers/batched_product.hpp.
//
//   grid   (splits of K x tiles of tokens, tiles of kRows weight rows, G). The splits of a tile are
//          the blocks of a cluster; with many tokens, one block takes them one after another, with
//          the same bits
//   block  two warpgroups that multiply, 64 weight rows each, and one warp that loads
//
// Weights are the left operand, so that few tokens waste no rows of a product: a tile of the result
// is [kRows, kTokens], with kTokens = 32 for at most 32 tokens and 128 otherwise.
//
// 1. The loading warp fills a ring of stages: a stage has 128 bytes of K of kRows weight rows and
//    of kTokens tokens. Settled weights are loaded while the previous launch still runs.
// 2. Each warpgroup sums its products. With e4m3, the sum over 128 numbers is multiplied by its
//    scales and added in float32, because tensor cores accumulate e4m3 products with fewer bits.
// 3. Sums go to shared memory, over the ring. The blocks of a cluster add them in the order of K,
//    each for a share of the tokens, and store 16 bytes at a time.
#include "kernels/layers/batched_product.hpp"

#include <algorithm>

#include "kernels/base/hopper.cuh"
#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "batched_product";
constexpr int kRows = 128;                         ///< weight rows of a block
constexpr int kStepBytes = hopper::kTileRowBytes;  ///< bytes of K in a step: 128
constexpr int kPitch = kRows + 4;                  ///< floats between tokens' sums in shared memory
constexpr int kMultiplying = 2 * hopper::kWarpgroup;  ///< threads that multiply
constexpr int kThreads = kMultiplying + 32;
constexpr int kEach = 8;  ///< bf16 elements in 16 bytes
constexpr int kMostSplits = 8;
constexpr int kManyTokens = 1024;  ///< from this many tokens on, a block takes all splits

/// Stages of the ring. `alone`: a block takes all splits.
constexpr int stages_of(int tokens, bool alone) {
  if (alone) return 6;
  return tokens == 32 ? 5 : 3;  // about 100 KB, so that two blocks fit on a processor
}
constexpr int bytes_of_stage(int tokens) {
  return (kRows + tokens) * kStepBytes;
}

/// Blocks per processor that the registers must allow.
template <class T, int kTokens, bool kAlone>
constexpr int blocks_of_processor() {
  if (kTokens == 32) return 3;
  return std::is_same_v<T, Bf16> && !kAlone ? 2 : 1;
}

/// Parameters of a launch, besides the tensor maps.
struct Task {
  int splits, steps;  ///< of K; a step is 128 bytes
  int blocks;         ///< blocks of a cluster, with a split each; 1: one block takes all splits
  int M, N;
  bool shared_x, settled_weights;
  Bf16* out;
  std::int64_t out_strides[2];
  const float* x_scale{};
  const float* weight_scale{};
  std::int64_t x_scale_strides[3]{}, weight_scale_strides[3]{};
};

/// d [64, kTokens] += a [64, 32] b [32, kTokens] in e4m3, both operands K-major.
template <int kTokens>
struct NumberProduct;
#define LOCKSTEP_D4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define LOCKSTEP_D16(o) LOCKSTEP_D4(o), LOCKSTEP_D4(o + 4), LOCKSTEP_D4(o + 8), LOCKSTEP_D4(o + 12)
template <>
struct NumberProduct<32> {
  __device__ static void of(float (&d)[16], std::uint64_t a, std::uint64_t b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1; }"
        : LOCKSTEP_D16(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};
template <>
struct NumberProduct<128> {
  __device__ static void of(float (&d)[64], std::uint64_t a, std::uint64_t b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
        "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, p, 1, "
        "1; }"
        : LOCKSTEP_D16(0), LOCKSTEP_D16(16), LOCKSTEP_D16(32), LOCKSTEP_D16(48)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};
#undef LOCKSTEP_D16
#undef LOCKSTEP_D4

/// The ring: addresses of its stages and barriers. A stage is full when its bytes have landed, and
/// empty when every multiplying warp has used it.
template <int kTokens, bool kAlone>
struct Ring {
  static constexpr int kStages = stages_of(kTokens, kAlone);
  std::uint32_t tiles, barriers;

  __device__ std::uint32_t weights(int stage) const {
    return tiles + static_cast<std::uint32_t>(stage * bytes_of_stage(kTokens));
  }
  __device__ std::uint32_t tokens(int stage) const { return weights(stage) + kRows * kStepBytes; }
  __device__ std::uint32_t full(int stage) const {
    return barriers + static_cast<std::uint32_t>(stage * 8);
  }
  __device__ std::uint32_t empty(int stage) const { return full(kStages + stage); }
};

/// One lane of the loading warp: loads steps begin ... end - 1 of K.
template <int kTokens, bool kAlone>
__device__ inline void load_steps(const Ring<kTokens, kAlone>& ring, const CUtensorMap& weights,
                                  const CUtensorMap& tokens, const Task& task, int begin, int end,
                                  int first_row, int first_token, int g) {
  constexpr int kStages = Ring<kTokens, kAlone>::kStages;
  const auto load_weights = [&](int i) {
    const int stage = i % kStages;
    hopper::barrier_expect(ring.full(stage), bytes_of_stage(kTokens));
    hopper::load_tile(ring.weights(stage), weights, (begin + i) * hopper::kTileColumns, g,
                      first_row, ring.full(stage));
  };
  const int steps = end - begin, early = task.settled_weights ? min(steps, kStages) : 0;
  for (int i = 0; i < early; ++i) load_weights(i);
  wait_for_earlier_launch();
  for (int i = 0; i < steps; ++i) {
    const int stage = i % kStages;
    if (i >= kStages) hopper::barrier_wait(ring.empty(stage), (i / kStages - 1) & 1);
    if (i >= early) load_weights(i);
    hopper::load_tile(ring.tokens(stage), tokens, (begin + i) * hopper::kTileColumns,
                      task.shared_x ? 0 : g, first_token, ring.full(stage));
  }
}

/// Descriptors of 64 rows of weights and of the tokens.
struct Operands {
  std::uint64_t left, right;
};

/// Waits until step i of the ring is full; returns the operands of a warpgroup.
template <int kTokens, bool kAlone>
__device__ inline Operands operands_of(const Ring<kTokens, kAlone>& ring, int i, int group) {
  constexpr int kStages = Ring<kTokens, kAlone>::kStages;
  const int stage = i % kStages;
  hopper::barrier_wait(ring.full(stage), (i / kStages) & 1);
  return {hopper::matrix(ring.weights(stage) + static_cast<std::uint32_t>(group * 64 * kStepBytes)),
          hopper::matrix(ring.tokens(stage))};
}

/// Adds steps first ... first + steps - 1 of the ring to a warpgroup's sums, in bf16. A stage is
/// released one step late, so that products of the next step are already under way.
template <int kTokens, bool kAlone>
__device__ inline void multiply(float (&sums)[kTokens / 2], const Ring<kTokens, kAlone>& ring,
                                int first, int steps, int group) {
  constexpr int kStages = Ring<kTokens, kAlone>::kStages;
  const bool lane = threadIdx.x % 32 == 0;
  for (int i = first; i < first + steps; ++i) {
    const auto [left, right] = operands_of(ring, i, group);
    hopper::start_products();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      hopper::Product<Bf16, kTokens, false>::of(sums, hopper::further(left, k * 32),
                                                hopper::further(right, k * 32), i - first + k > 0);
    hopper::commit_products();
    hopper::wait_for_products<1>();
    if (i > first && lane) hopper::barrier_arrive(ring.empty((i - 1) % kStages));
  }
  hopper::wait_for_products<0>();
  hopper::pin(sums);
  if (steps > 0 && lane) hopper::barrier_arrive(ring.empty((first + steps - 1) % kStages));
}

/// Sums all splits of K one after another, each by itself as a block of a cluster would: the bits
/// are the same.
template <int kTokens>
__device__ inline void multiply_splits(float (&sums)[kTokens / 2], const Ring<kTokens, true>& ring,
                                       const Task& task, int group) {
  multiply(sums, ring, 0, task.steps / task.splits, group);
  for (int split = 1; split < task.splits; ++split) {
    const int begin = task.steps * split / task.splits;
    const int end = task.steps * (split + 1) / task.splits;
    float parts[kTokens / 2] = {};
    multiply(parts, ring, begin, end - begin, group);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sums[i] += parts[i];
  }
}

/// multiply() in e4m3, with scales. Step i has the 128 numbers from (first + i) * 128 on, which
/// share a scale.
template <int kTokens>
__device__ inline void multiply_numbers(float (&sums)[kTokens / 2],
                                        const Ring<kTokens, false>& ring, const Task& task,
                                        int first, int steps, int group, int first_token, int g) {
  constexpr int kStages = Ring<kTokens, false>::kStages;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __shared__ float scales[2][2][kTokens];  ///< [warpgroup][step % 2][token]
  float parts[kTokens / 2] = {};
  for (int i = 0; i < steps; ++i) {
    const auto [left, right] = operands_of(ring, i, group);
    hopper::start_products();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      NumberProduct<kTokens>::of(parts, hopper::further(left, k * 32),
                                 hopper::further(right, k * 32), k > 0);
    hopper::commit_products();
    // While the products run, thread j multiplies the weights' scale by token j's. Steps alternate
    // between two arrays, so one barrier a step separates a step's reads from later writes.
    const int mine = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
    if (mine < kTokens) {
      const int token = min(first_token + mine, task.M - 1);
      scales[group][i % 2][mine] =
          task.weight_scale[g * task.weight_scale_strides[0] +
                            blockIdx.y * task.weight_scale_strides[1] +
                            (first + i) * task.weight_scale_strides[2]] *
          task.x_scale[(task.shared_x ? 0 : g) * task.x_scale_strides[0] +
                       token * task.x_scale_strides[1] + (first + i) * task.x_scale_strides[2]];
    }
    hopper::sync_threads_of(2 + group, hopper::kWarpgroup);
    hopper::wait_for_products<0>();
    hopper::pin(parts);
    if (lane == 0) hopper::barrier_arrive(ring.empty(i % kStages));
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      const float low = scales[group][i % 2][8 * j + 2 * (lane % 4)];
      const float high = scales[group][i % 2][8 * j + 2 * (lane % 4) + 1];
      sums[4 * j] = fmaf(parts[4 * j], low, sums[4 * j]);
      sums[4 * j + 1] = fmaf(parts[4 * j + 1], high, sums[4 * j + 1]);
      sums[4 * j + 2] = fmaf(parts[4 * j + 2], low, sums[4 * j + 2]);
      sums[4 * j + 3] = fmaf(parts[4 * j + 3], high, sums[4 * j + 3]);
    }
  }
}

/// Loads four floats from the same shared address in block `rank` of the cluster.
__device__ inline float4 load_from(std::uint32_t address, int rank) {
  float4 x;
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(address), "r"(rank)
      : "memory");
  return x;
}

/// Adds the sums of all blocks of the cluster for this block's share of the tokens, and stores them
/// to `out`. The threads that multiplied call it.
template <int kTokens>
__device__ inline void store(const Task& task, std::uint32_t sums, int rank, int first_row,
                             int first_token, int g) {
  constexpr int kPieces = kRows / kEach;
  const int share = kTokens / task.blocks;
  for (int i = static_cast<int>(threadIdx.x); i < share * kPieces; i += kMultiplying) {
    const int token = rank * share + i / kPieces, row = i % kPieces * kEach;
    const int m = first_token + token, n = first_row + row;
    if (m >= task.M || n >= task.N) continue;
    const std::uint32_t place = sums + static_cast<std::uint32_t>((token * kPitch + row) * 4);
    uint2 packed[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 parts[kMostSplits];  // all loads are issued before the first sum
#pragma unroll
      for (int other = 0; other < kMostSplits; ++other)
        if (other < task.blocks) parts[other] = load_from(place + 16 * half, other);
      float4 sum = parts[0];
#pragma unroll
      for (int other = 1; other < kMostSplits; ++other)
        if (other < task.blocks) {
          sum.x += parts[other].x;
          sum.y += parts[other].y;
          sum.z += parts[other].z;
          sum.w += parts[other].w;
        }
      packed[half] = make_uint2(hopper::pack<Bf16>(sum.x, sum.y), hopper::pack<Bf16>(sum.z, sum.w));
    }
    *reinterpret_cast<uint4*>(task.out + g * task.out_strides[0] + m * task.out_strides[1] + n) =
        make_uint4(packed[0].x, packed[0].y, packed[1].x, packed[1].y);
  }
}

template <class T, int kTokens, bool kAlone>
__global__ void __launch_bounds__(kThreads, blocks_of_processor<T, kTokens, kAlone>())
    product_kernel(const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ CUtensorMap tokens, const __grid_constant__ Task task) {
  constexpr int kStages = Ring<kTokens, kAlone>::kStages;
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) std::uint64_t barriers[2 * kStages];
  const std::uint32_t tiles = (hopper::shared_address(memory) + 1023) & ~1023u;
  const Ring<kTokens, kAlone> ring{tiles, hopper::shared_address(barriers)};
  if (threadIdx.x == 0) {
    hopper::prefetch_map(weights);
    hopper::prefetch_map(tokens);
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(ring.full(stage), 1);
      hopper::barrier_init(ring.empty(stage), kMultiplying / 32);
    }
    hopper::publish_barriers();
  }
  __syncthreads();
  let_the_next_launch_start();

  const int rank = static_cast<int>(blockIdx.x) % task.blocks;
  const int first_token = static_cast<int>(blockIdx.x) / task.blocks * kTokens;
  const int first_row = static_cast<int>(blockIdx.y) * kRows, g = static_cast<int>(blockIdx.z);
  const int begin = task.steps * rank / task.blocks, end = task.steps * (rank + 1) / task.blocks;
  const int group = hopper::uniform(static_cast<int>(threadIdx.x) / hopper::kWarpgroup);
  if (group == 2) {
    if (threadIdx.x == kMultiplying)
      load_steps(ring, weights, tokens, task, begin, end, first_row, first_token, g);
    __syncwarp();
    wait_for_earlier_launch();
  } else {
    wait_for_earlier_launch();
    float sums[kTokens / 2] = {};
    if constexpr (kAlone)
      multiply_splits<kTokens>(sums, ring, task, group);
    else if constexpr (std::is_same_v<T, Bf16>)
      multiply(sums, ring, 0, end - begin, group);
    else
      multiply_numbers(sums, ring, task, begin, end - begin, group, first_token, g);
    hopper::sync_threads_of(1,
                            kMultiplying);  // all products have read the ring, which sums overwrite
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    // A float [kTokens][kPitch]: the sums by token and weight row of the tile.
    auto* const to = reinterpret_cast<float*>(memory + (tiles - hopper::shared_address(memory)));
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = 8 * j + 2 * (lane % 4) + e % 2;
        to[token * kPitch + warp * 16 + lane / 4 + e / 2 * 8] = sums[4 * j + e];
      }
  }
  if (group < 2) hopper::sync_threads_of(1, kMultiplying);
  if (task.blocks > 1) hopper::sync_cluster();
  if (group < 2) store<kTokens>(task, tiles, rank, first_row, first_token, g);
  __syncwarp();
  if (task.blocks > 1) hopper::sync_cluster();  // a block's shared memory must outlive its readers
}

/// The number of splits of K: doubled until there are 128 blocks, so that all processors load
/// weights, while each split has at least 4 steps. It depends on the weights' shape alone, and so
/// do the bits.
int splits_of(std::int64_t tiles, std::int64_t steps, int most) {
  int splits = 1;
  while (2 * splits <= most && tiles * splits < 128 && steps / (2 * splits) >= 4) splits *= 2;
  return splits;
}

/// The map of x [G, rows, K] for tiles of `rows` rows. Two numbers of e4m3 count as one element of
/// 16 bits.
template <class T>
CUtensorMap map_of(const TensorView<const T, 3>& x, int rows) {
  constexpr std::int64_t kPair = 2 / sizeof(T);
  return hopper::tile_map<const Bf16>(
      kName,
      make_view(reinterpret_cast<const Bf16*>(x.data_handle()),
                Shape<3>{x.extent(1), x.extent(0), x.extent(2) / kPair},
                Shape<3>{x.stride(1) / kPair, x.stride(0) / kPair, 1}),
      rows);
}

template <class T>
void check_operand(const Checks& checks, const TensorView<const T, 3>& x, const char* argument) {
  const auto whole = [&](std::size_t i) {
    return x.extent(i) <= 1 || (x.stride(i) > 0 && x.stride(i) * sizeof(T) % 16 == 0);
  };
  checks.expect(x.stride(2) == 1 && whole(0) && whole(1) &&
                    reinterpret_cast<std::uintptr_t>(x.data_handle()) % 16 == 0,
                argument, "contiguous in its last dimension, with strides of whole 16 bytes",
                "other strides");
}

void check_scale(const Checks& checks, const std::optional<TensorView<const float, 3>>& scale,
                 bool wanted, const char* argument, const Shape<3>& whole) {
  checks.expect(scale.has_value() == wanted, argument,
                wanted ? "given with numbers in e4m3" : "absent without numbers in e4m3",
                scale ? "one" : "none");
  if (!scale) return;
  for (std::size_t i = 0; i < 3; ++i)
    checks.expect(scale->extent(i) == 1 || scale->extent(i) == whole[i], argument,
                  text_of(whole) + ", or 1 in place of an extent", text_of(shape_of(*scale)));
}

template <class T, int kTokens, bool kAlone>
void launch_product(const BatchedProduct<T>& in, Task task, cudaStream_t stream) {
  constexpr int kRing = stages_of(kTokens, kAlone) * bytes_of_stage(kTokens);
  constexpr int kSums = kTokens * kPitch * static_cast<int>(sizeof(float));
  static_assert(kSums <= kRing);
  auto* const kernel = product_kernel<T, kTokens, kAlone>;
  static const cudaError_t set =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRing + 1024);
  check_cuda(set, kName);
  task.blocks = kAlone ? 1 : task.splits;
  // A short K does not use all stages; less shared memory lets more blocks fit on a processor.
  const int used = (task.steps + task.blocks - 1) / task.blocks * bytes_of_stage(kTokens);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(task.blocks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const int tiles = (task.M + kTokens - 1) / kTokens;
  config.gridDim = dim3(static_cast<unsigned>(task.blocks * tiles),
                        static_cast<unsigned>((task.N + kRows - 1) / kRows),
                        static_cast<unsigned>(in.weight.extent(0)));
  config.blockDim = dim3(kThreads);
  // NOLINTNEXTLINE(bugprone-misplaced-widening-cast): at most 227 KiB
  config.dynamicSmemBytes = static_cast<std::size_t>(std::min(kRing, std::max(used, kSums)) + 1024);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check_cuda(
      cudaLaunchKernelEx(&config, kernel, map_of(in.weight, kRows), map_of(in.x, kTokens), task),
      kName);
}

}  // namespace

template <class T>
void batched_product(const BatchedProduct<T>& in, cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t G = in.weight.extent(0), N = in.weight.extent(1), K = in.weight.extent(2);
  const std::int64_t M = in.x.extent(1);
  constexpr bool kScaled = std::is_same_v<T, E4m3>;
  checks.expect(0 < G && G <= 65535 && 0 < N && N % kEach == 0 && N <= (1 << 22) && 0 < K &&
                    K <= (1 << 22) && K * sizeof(T) % 16 == 0,
                "weight", "[G, N, K] with N a multiple of 8, rows of whole 16 bytes, G below 65536",
                text_of(shape_of(in.weight)));
  checks.shape(in.x, "x", "[1 or G, M, K]", {in.x.extent(0) == 1 ? 1 : G, M, K});
  checks.expect(M <= (1 << 24), "x", "of at most 2^24 rows", std::to_string(M));
  checks.shape(in.out, "out", "[G, M, N]", {G, M, N});
  check_operand(checks, in.x, "x");
  check_operand(checks, in.weight, "weight");
  check_operand(checks, TensorView<const Bf16, 3>(in.out), "out");
  const std::int64_t groups = (K + 127) / 128;
  check_scale(checks, in.x_scale, kScaled, "x_scale", {in.x.extent(0), M, groups});
  check_scale(checks, in.weight_scale, kScaled, "weight_scale", {G, (N + 127) / 128, groups});
  checks.expect(in.splits == 1 || in.splits == 2 || in.splits == 4 || in.splits == 8, "splits",
                "1, 2, 4 or 8", std::to_string(in.splits));
  if (M == 0) return;
  const auto steps = static_cast<int>((K * sizeof(T) + kStepBytes - 1) / kStepBytes);
  Task task{.splits = splits_of((N + kRows - 1) / kRows, steps, in.splits),
            .steps = steps,
            .blocks = 1,
            .M = static_cast<int>(M),
            .N = static_cast<int>(N),
            .shared_x = in.x.extent(0) == 1,
            .settled_weights = in.settled_weights,
            .out = in.out.data_handle(),
            .out_strides = {in.out.stride(0), in.out.stride(1)}};
  const auto tell = [](const auto& scale, const float*& data, std::int64_t(&strides)[3]) {
    if (!scale) return;
    data = scale->data_handle();
    for (std::size_t i = 0; i < 3; ++i) strides[i] = scale->extent(i) == 1 ? 0 : scale->stride(i);
  };
  tell(in.x_scale, task.x_scale, task.x_scale_strides);
  tell(in.weight_scale, task.weight_scale, task.weight_scale_strides);
  if (M <= 32) return launch_product<T, 32, false>(in, task, stream);
  if constexpr (!kScaled)
    if (M >= kManyTokens && task.splits > 1) return launch_product<T, 128, true>(in, task, stream);
  launch_product<T, 128, false>(in, task, stream);
}

// --- Numbers of e4m3 -----------------------------------------------------------------------------

namespace {

constexpr int kScaleThreads = 128, kGroup = 128;
constexpr float kLargest = 448.0f, kLeast = 1e-12f / kLargest;

/// Loads eight elements of a row, from `first` on.
__device__ inline void load_eight(float (&x)[kEach], const Bf16* row, int first) {
  const uint4 bits = *reinterpret_cast<const uint4*>(row + first);
  const std::uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = hopper::unpack<Bf16>(pairs[i]);
    x[2 * i] = two.x;
    x[2 * i + 1] = two.y;
  }
}
__device__ inline float largest_of(const float (&x)[kEach]) {
  float largest = 0;
#pragma unroll
  for (const float e : x) largest = fmaxf(largest, fabsf(e));
  return largest;
}
__device__ inline void store_eight(E4m3* row, int first, const float (&x)[kEach], float scale) {
  alignas(8) E4m3 numbers[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) numbers[i] = E4m3(x[i] / scale);
  *reinterpret_cast<uint2*>(row + first) = *reinterpret_cast<const uint2*>(numbers);
}

/// Raises the tensor's scale to that of row (m, g) = blockIdx, if that is larger.
__global__ void __launch_bounds__(kScaleThreads)
    largest_kernel(const __grid_constant__ ScaleToE4m3 in) {
  const Bf16* const row = &in.x(blockIdx.y, blockIdx.x, 0);
  float largest = 0, x[kEach];
  for (int k = static_cast<int>(threadIdx.x) * kEach; k < in.x.extent(2);
       k += kScaleThreads * kEach) {
    load_eight(x, row, k);
    largest = fmaxf(largest, largest_of(x));
  }
  largest = over_block<kScaleThreads>(largest, Larger{});
  if (threadIdx.x ==
      0)  // positive floats have the order of their bits, so an integer maximum serves
    atomicMax(reinterpret_cast<int*>(in.scale.data_handle()),
              __float_as_int(fmaxf(largest / kLargest, kLeast)));
}

/// Quantises row (m, g) = blockIdx. kByGroups: 16 lanes share a group of 128 and its scale.
template <bool kByGroups>
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(const __grid_constant__ ScaleToE4m3 in) {
  const Bf16* const row = &in.x(blockIdx.y, blockIdx.x, 0);
  E4m3* const numbers = &in.numbers(blockIdx.y, blockIdx.x, 0);
  const auto K = static_cast<int>(in.x.extent(2));
  for (int first = 0; first < K; first += kScaleThreads * kEach) {
    const int k = first + static_cast<int>(threadIdx.x) * kEach;
    float x[kEach] = {}, scale = 0;
    if (k < K) load_eight(x, row, k);
    if constexpr (kByGroups) {
      float largest = largest_of(x);
#pragma unroll
      for (int distance = 8; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, distance));
      scale = fmaxf(largest / kLargest, kLeast);
      if (k < K && k % kGroup == 0) in.scale(blockIdx.y, blockIdx.x, k / kGroup) = scale;
    } else {
      scale = *in.scale.data_handle();
    }
    if (k < K) store_eight(numbers, k, x, scale);
  }
}

}  // namespace

void scale_to_e4m3(const ScaleToE4m3& in, cudaStream_t stream) {
  constexpr const char* kScaling = "scale_to_e4m3";
  const Checks checks(kScaling);
  const std::int64_t G = in.x.extent(0), M = in.x.extent(1), K = in.x.extent(2);
  checks.expect(G <= 65535 && K % kEach == 0 && K <= (1 << 24), "x",
                "[G, M, K] with K a multiple of 8, G below 65536", text_of(shape_of(in.x)));
  checks.shape(in.numbers, "numbers", "[G, M, K]", {G, M, K});
  check_operand(checks, in.x, "x");
  const bool by_groups = shape_of(in.scale) != Shape<3>{1, 1, 1} || K <= kGroup && G * M == 1;
  if (by_groups)
    checks.shape(in.scale, "scale", "[1, 1, 1] or [G, M, ceil(K / 128)]",
                 {G, M, (K + kGroup - 1) / kGroup});
  checks.expect(in.numbers.stride(2) == 1 && in.numbers.stride(0) % kEach == 0 &&
                    in.numbers.stride(1) % kEach == 0 &&
                    reinterpret_cast<std::uintptr_t>(in.numbers.data_handle()) % 8 == 0,
                "numbers", "contiguous in its last dimension, with strides of whole 8 bytes",
                "other strides");
  if (G * M * K == 0) return;
  const dim3 grid(static_cast<unsigned>(M), static_cast<unsigned>(G));
  if (by_groups) {
    launch(kScaling, scale_kernel<true>, grid, dim3(kScaleThreads), 0, stream, false, in);
    return;
  }
  check_cuda(cudaMemsetAsync(in.scale.data_handle(), 0, sizeof(float), stream), kScaling);
  launch(kScaling, largest_kernel, grid, dim3(kScaleThreads), 0, stream, false, in);
  launch(kScaling, scale_kernel<false>, grid, dim3(kScaleThreads), 0, stream, false, in);
}

template void batched_product(const BatchedProduct<Bf16>&, cudaStream_t);
template void batched_product(const BatchedProduct<E4m3>&, cudaStream_t);

}  // namespace lockstep::kernels
