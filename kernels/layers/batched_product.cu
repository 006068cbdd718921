// Batched products with weights on tensor cores. Equations: reference/layers/batched_product.hpp.
//
// Weights are the left operand, so that few tokens waste no rows of a product: a warpgroup sums the
// products of 64 weight rows with all tokens of a tile. K is divided into splits by the weights'
// shape alone; each split is summed from its first step to its last, and the sums of splits are
// added in pairs, pairs in pairs and so on. So every tile, of whatever size, gives a row the same
// bits, and tiles may be chosen by the number of tokens.
//
//   product_kernel   grid (blocks of a cluster x tiles of tokens, tiles of weight rows, G). A tile
//                    has up to 192 weight rows and 32 or 128 tokens. The blocks of a cluster
//                    share its splits: one each, or several, one after another. Block: a
//                    warpgroup for 64 weight rows, and one warp that loads
//   stream_kernel    many tokens; grid (clusters of two blocks that fill the processors). A cluster
//                    takes pairs of tiles of 128 weight rows and the same 192 or 256 tokens, one
//                    after another; each block loads half of the tokens for both, and takes all
//                    splits of its tile. Block: two warpgroups, and warps of which one loads
//
// 1. The loading warp fills a ring of stages: a stage has 128 bytes of K of a tile's weight rows
//    and tokens. Before the previous launch has ended, settled weights are loaded, and the first
//    steps of others are prefetched into L2 by the warps that will multiply.
// 2. Each warpgroup sums its products. With e4m3, the sum over 128 numbers is multiplied by its
//    scales and added in float32, because tensor cores accumulate e4m3 products with fewer bits.
// 3. Sums are rounded into tiles of shared memory, which bulk copies store. In stream_kernel the
//    next tile's loads and the other warpgroup's products run meanwhile. The sums of a cluster's
//    blocks stay in float32: each block adds them for a share of the tokens.
#include "kernels/layers/batched_product.hpp"

#include <algorithm>

#include "kernels/base/hopper.cuh"
#include "kernels/base/plain.cuh"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "batched_product";
constexpr int kPartRows = 64;                      ///< weight rows of a warpgroup
constexpr int kFew = 32, kSome = 128;              ///< tokens of a tile of product_kernel
constexpr int kStepBytes = hopper::kTileRowBytes;  ///< bytes of K in a step: 128
constexpr int kEach = 8;                           ///< bf16 elements in 16 bytes
constexpr int kGroup = 128;  ///< numbers of e4m3, and weight rows, that share a scale
constexpr int kMostSplits = 8, kMostStages = 32;

constexpr int bytes_of_stage(int rows, int tokens) {
  return (rows + tokens) * kStepBytes;
}

/// Parameters of a launch, besides the tensor maps.
struct Task {
  int splits, steps;  ///< of K; a step is 128 bytes
  int M, N;
  int blocks = 1;      ///< of a cluster; each takes splits / blocks splits, one after another
  int stages = 0;      ///< of the ring
  int rows = 0;        ///< weight rows of a tile
  int box = 0;         ///< weight rows of a copy
  int tokens = 0;      ///< for which a stage has room
  int prefetched = 0;  ///< steps of a block, into L2
  bool shared_x, settled_weights;
  const unsigned char* weights;
  std::int64_t weight_strides[2];  ///< in bytes
  Bf16* out;
  std::int64_t out_strides[2];
  const float* x_scale{};
  const float* weight_scale{};
  std::int64_t x_scale_strides[3]{}, weight_scale_strides[3]{};

  /// The step at which a split begins; that of number `splits` is the end.
  __device__ int begin_of(int split) const { return steps * split / splits; }
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
struct NumberProduct<64> {
  __device__ static void of(float (&d)[32], std::uint64_t a, std::uint64_t b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1; }"
        : LOCKSTEP_D16(0), LOCKSTEP_D16(16)
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

/// hopper::Product in bf16, both operands K-major; also of 192 tokens.
template <int kTokens>
struct Bf16Product : hopper::Product<Bf16, kTokens, false> {};
template <>
struct Bf16Product<192> {
  __device__ static void of(float (&d)[96], std::uint64_t a, std::uint64_t b, bool accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,"
        "%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
        "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,"
        "%87,%88,%89,%90,%91,%92,%93,%94,%95}, %96, %97, p, "
        "1, 1, 0, 0; }"
        : LOCKSTEP_D16(0), LOCKSTEP_D16(16), LOCKSTEP_D16(32), LOCKSTEP_D16(48), LOCKSTEP_D16(64),
          LOCKSTEP_D16(80)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};
#undef LOCKSTEP_D16
#undef LOCKSTEP_D4

/// The ring: addresses of its stages and barriers, and how many weight rows and tokens a stage has
/// room for. A stage is full when its bytes have landed, and empty when every multiplying warp has
/// used it.
struct Ring {
  std::uint32_t tiles, barriers;
  int stages, rows, room;

  __device__ std::uint32_t weights(int stage) const {
    return tiles + static_cast<std::uint32_t>(stage * bytes_of_stage(rows, room));
  }
  __device__ std::uint32_t tokens(int stage) const {
    return weights(stage) + static_cast<std::uint32_t>(rows * kStepBytes);
  }
  __device__ std::uint32_t full(int stage) const {
    return barriers + static_cast<std::uint32_t>(stage * 8);
  }
  __device__ std::uint32_t empty(int stage) const { return full(stages + stage); }
  /// One thread of the block; `arrivals` end the use of a stage.
  __device__ void init(int arrivals) const {
    for (int stage = 0; stage < stages; ++stage) {
      hopper::barrier_init(full(stage), 1);
      hopper::barrier_init(empty(stage), arrivals);
    }
    hopper::publish_barriers();
  }
};

/// The first token of a tile. The last tile reaches back over tokens of the one before, whose rows
/// it stores again with the same bits, so that it does not reach beyond M.
__device__ inline int first_of(int tile, int tokens, int M) {
  return max(0, min(tile * tokens, M - tokens));
}

/// A stage of the ring, and the parity of its turn.
struct Place {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
};

/// One lane of the loading warp: loads steps begin ... end - 1 of K. Rows outside the matrices are
/// not asked for, because they take a copy longer than rows inside: what a stage holds there meets
/// only rows that are not stored.
__device__ inline void load_steps(const Ring& ring, const CUtensorMap& weights,
                                  const CUtensorMap& tokens, const Task& task, int begin, int end,
                                  int first_row, int first_token, int g) {
  const int stages = ring.stages, box = task.box;
  const int rows = min(task.rows, (task.N - first_row + box - 1) / box * box);
  const int bytes = bytes_of_stage(rows, min(task.tokens, task.M));
  const int x = task.shared_x ? 0 : g;
  const auto load_weights = [&](int i, int stage) {
    const std::uint32_t to = ring.weights(stage), full = ring.full(stage);
    hopper::barrier_expect(full, bytes);
    for (int row = 0; row < rows; row += box)
      hopper::load_tile(to + static_cast<std::uint32_t>(row * kStepBytes), weights,
                        (begin + i) * hopper::kTileColumns, g, first_row + row, full);
  };
  const int steps = end - begin, early = task.settled_weights ? min(steps, stages) : 0;
  for (int i = 0; i < early; ++i) load_weights(i, i);
  wait_for_earlier_launch();
  Place at;
  for (int i = 0; i < steps; ++i, at.advance(stages)) {
    if (i >= stages) hopper::barrier_wait(ring.empty(at.stage), at.parity ^ 1);
    if (i >= early) load_weights(i, at.stage);
    hopper::load_tile(ring.tokens(at.stage), tokens, (begin + i) * hopper::kTileColumns, x,
                      first_token, ring.full(at.stage));
  }
}

/// The threads that multiply prefetch the first steps of the block's weights into L2, before the
/// launch in front has ended. They do so because copies would queue behind the loading lane's
/// prefetches.
__device__ inline void prefetch_weights(const Task& task, int threads, int begin, int first_row,
                                        int g) {
  const unsigned char* const from = task.weights + g * task.weight_strides[0] +
                                    first_row * task.weight_strides[1] + begin * kStepBytes;
  const int lines = min(task.rows, task.N - first_row) * task.prefetched;
  for (int i = static_cast<int>(threadIdx.x); i < lines; i += threads) {
    const int row = i / task.prefetched, step = i - row * task.prefetched;
    prefetch_to_l2(from + row * task.weight_strides[1] + step * kStepBytes);
  }
}

/// The address of `barriers` or of tiles in `memory`, which the compiler keeps in a uniform
/// register instead of deriving it from the block's rank in each step.
__device__ inline std::uint32_t kept_address(const void* shared, std::uint32_t aligned) {
  const std::uint32_t address = (hopper::shared_address(shared) + aligned - 1) & ~(aligned - 1);
  return static_cast<std::uint32_t>(hopper::uniform(static_cast<int>(address)));
}

/// Whether this lane is the one of its warp, all of which calls, that issues copies. The compiler
/// knows that it is one, and issues a copy without a loop over lanes.
__device__ inline bool elected() {
  std::uint32_t is;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is));
  return is != 0;
}

/// Descriptors of 64 rows of weights and of the tokens.
struct Operands {
  std::uint64_t left, right;
};

/// Waits until a stage is full; returns the operands of a warpgroup. Where a stage has room for
/// fewer than they have, the rest are bytes of whatever follows.
__device__ inline Operands operands_of(const Ring& ring, Place at, int group) {
  hopper::barrier_wait(ring.full(at.stage), at.parity);
  return {hopper::matrix(ring.weights(at.stage) +
                         static_cast<std::uint32_t>(group * kPartRows * kStepBytes)),
          hopper::matrix(ring.tokens(at.stage))};
}

/// Sums `steps` steps of the ring in bf16, from `at` on. A stage is released one step late, so that
/// products of the next step are already under way.
template <int kTokens, class Release>
__device__ inline void multiply(float (&sums)[kTokens / 2], const Ring& ring, Place& at, int steps,
                                int group, Release release) {
  int used = 0;
  for (int i = 0; i < steps; ++i) {
    const auto [left, right] = operands_of(ring, at, group);
    hopper::start_products();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Bf16Product<kTokens>::of(sums, hopper::further(left, k * 32), hopper::further(right, k * 32),
                               i + k > 0);
    hopper::commit_products();
    hopper::wait_for_products<1>();
    if (i > 0) release(used);
    used = at.stage;
    at.advance(ring.stages);
  }
  hopper::wait_for_products<0>();
  hopper::pin(sums);
  if (steps > 0) release(used);
}

/// Adds sums of 2^n groups of splits to those of the group before, as often as `number`, that of
/// this group, has ones at its end; then keeps them in `kept`, unless it is the last of `count`.
template <int kTokens>
__device__ inline void add_groups(float (&sums)[kTokens / 2], float4* kept, int number, int count) {
  constexpr int kQuads = kTokens / 8;
  for (int bits = number; bits & 1; bits /= 2, kept += kQuads)
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const float4 sum = kept[j];
      sums[4 * j] = sum.x + sums[4 * j];
      sums[4 * j + 1] = sum.y + sums[4 * j + 1];
      sums[4 * j + 2] = sum.z + sums[4 * j + 2];
      sums[4 * j + 3] = sum.w + sums[4 * j + 3];
    }
  if (number + 1 == count) return;
#pragma unroll
  for (int j = 0; j < kQuads; ++j)
    kept[j] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
}

/// Sums splits first ... first + count - 1, each like a block of its own, and adds their sums in
/// pairs, the pairs in pairs and so on. `count` is a power of two. Sums wait in local memory, since
/// registers have room for one split's.
template <int kTokens, class Release>
__device__ inline void multiply_splits(float (&sums)[kTokens / 2], const Ring& ring, Place& at,
                                       const Task& task, int first, int count, int group,
                                       Release release) {
  float4 memory[3 * kTokens / 8];
  static_assert(kMostSplits == 8);
  float4* kept = memory;
  asm volatile("" : "+l"(kept)::"memory");  // keeps the array in memory
  for (int i = 0; i < count; ++i) {
    multiply<kTokens>(sums, ring, at, task.begin_of(first + i + 1) - task.begin_of(first + i),
                      group, release);
    add_groups<kTokens>(sums, kept, i, count);
  }
}

/// multiply_splits() of all splits, of which there are several, with registers for two splits'
/// sums.
template <int kTokens, class Release>
__device__ inline void multiply_pairs(float (&sums)[kTokens / 2], const Ring& ring, Place& at,
                                      const Task& task, int group, Release release) {
  float4 memory[2 * kTokens / 8];
  float4* kept = memory;
  asm volatile("" : "+l"(kept)::"memory");
  for (int i = 0; i < task.splits; i += 2) {
    float first[kTokens / 2];
    multiply<kTokens>(first, ring, at, task.begin_of(i + 1) - task.begin_of(i), group, release);
    multiply<kTokens>(sums, ring, at, task.begin_of(i + 2) - task.begin_of(i + 1), group, release);
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) sums[j] = first[j] + sums[j];
    add_groups<kTokens>(sums, kept, i / 2, task.splits / 2);
  }
}

/// multiply() in e4m3, with scales. Step i has the 128 numbers from (first + i) * 128 on, which
/// share a scale.
template <int kRows, int kTokens>
__device__ inline void multiply_numbers(float (&sums)[kTokens / 2], const Ring& ring,
                                        const Task& task, int first, int steps, int group,
                                        int first_row, int first_token, int g) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __shared__ float scales[kRows / kPartRows][2][kTokens];  ///< [warpgroup][step % 2][token]
  // Thread j multiplies the weights' scale by token j's, and loads both a step early.
  const int mine = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const float* of_weights =
      task.weight_scale + g * task.weight_scale_strides[0] +
      min(first_row + group * kPartRows, task.N - 1) / kGroup * task.weight_scale_strides[1] +
      first * task.weight_scale_strides[2];
  const float* of_token = task.x_scale + (task.shared_x ? 0 : g) * task.x_scale_strides[0] +
                          min(first_token + mine, task.M - 1) * task.x_scale_strides[1] +
                          first * task.x_scale_strides[2];
  float weights_next = 0, token_next = 0;
  const auto load_next = [&] {
    weights_next = *of_weights;
    token_next = *of_token;
    of_weights += task.weight_scale_strides[2];
    of_token += task.x_scale_strides[2];
  };
  if (mine < kTokens) load_next();
  // Small blocks have registers for the products of half of 128 tokens, so that three fit.
  constexpr int kAtOnce = kRows == 64 && kTokens == kSome ? 64 : kTokens;
  float parts[kAtOnce / 2] = {};
  Place at;
  for (int i = 0; i < steps; ++i) {
    const auto [left, right] = operands_of(ring, at, group);
#pragma unroll
    for (int token = 0; token < kTokens; token += kAtOnce) {
      hopper::start_products();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        NumberProduct<kAtOnce>::of(parts, hopper::further(left, k * 32),
                                   hopper::further(right, token * kStepBytes + k * 32), k > 0);
      hopper::commit_products();
      if (token == 0) {
        // Steps alternate between two arrays: one barrier a step keeps reads from later writes.
        if (mine < kTokens) {
          scales[group][i % 2][mine] = weights_next * token_next;
          if (i + 1 < steps) load_next();
        }
        hopper::sync_threads_of(2 + group, hopper::kWarpgroup);
      }
      hopper::wait_for_products<0>();
      hopper::pin(parts);
      if (token + kAtOnce == kTokens && lane == 0) hopper::barrier_arrive(ring.empty(at.stage));
#pragma unroll
      for (int j = 0; j < kAtOnce / 8; ++j) {
        const float* const scale = &scales[group][i % 2][token + 8 * j + 2 * (lane % 4)];
        const float low = scale[0], high = scale[1];
        float* const sum = sums + token / 2 + 4 * j;
        sum[0] = fmaf(parts[4 * j], low, sum[0]);
        sum[1] = fmaf(parts[4 * j + 1], high, sum[1]);
        sum[2] = fmaf(parts[4 * j + 2], low, sum[2]);
        sum[3] = fmaf(parts[4 * j + 3], high, sum[3]);
      }
    }
    at.advance(ring.stages);
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

/// hopper::store_matrices() of transposed matrices: the address of lane i is that of column i % 8
/// of matrix i / 8.
__device__ inline void store_transposed(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                        std::uint32_t c, std::uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

/// A warpgroup rounds its sums of tokens first ... first + kTokens - 1 into a tile [kTokens, 64
/// weight rows] at `tile`.
template <int kTokens, int kCount>
__device__ inline void round_into(std::uint32_t tile, const float (&sums)[kCount], int first) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const std::uint32_t to =
      tile + hopper::tile_offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
  for (int token = 0; token < kTokens; token += 16) {
    const float* const s = sums + (first + token) / 2;
    store_transposed(to + static_cast<std::uint32_t>(token * hopper::kTileRowBytes),
                     hopper::pack<Bf16>(s[0], s[1]), hopper::pack<Bf16>(s[2], s[3]),
                     hopper::pack<Bf16>(s[4], s[5]), hopper::pack<Bf16>(s[6], s[7]));
  }
}

/// Waits for all threads of the cluster, each of which has used what it read, and for no writes.
__device__ inline void leave_cluster() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

/// Adds the sums of all blocks of the cluster for this block's share of the tokens, and stores them
/// to `out`. The threads that multiplied call it.
template <int kRows, int kTokens>
__device__ inline void add_and_store(const Task& task, std::uint32_t sums, int rank, int first_row,
                                     int first_token, int g) {
  constexpr int kPieces = kRows / 4, kPitch = kRows + 4, kThreads = kRows * 2;
  constexpr int kAtOnce = kTokens == kFew ? 1 : 2;  ///< pieces of which a thread issues all loads
  const int share = kTokens / task.blocks;
  for (int first = static_cast<int>(threadIdx.x); first < share * kPieces;
       first += kAtOnce * kThreads) {
    float4 parts[kAtOnce][kMostSplits];
    const auto piece = [&](int j, int& token, int& row) {
      const int i = first + j * kThreads;
      token = rank * share + i / kPieces;
      row = i % kPieces * 4;
      return i < share * kPieces && first_token + token < task.M &&
             row < min(task.rows, task.N - first_row);
    };
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      int token, row;
      if (!piece(j, token, row)) continue;
      const std::uint32_t place = sums + static_cast<std::uint32_t>((token * kPitch + row) * 4);
#pragma unroll
      for (int other = 0; other < kMostSplits; ++other)
        if (other < task.blocks) parts[j][other] = load_from(place, other);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      int token, row;
      if (!piece(j, token, row)) continue;
#pragma unroll
      for (int step = 1; step < kMostSplits; step *= 2)  // in pairs, as multiply_splits() does
        if (step < task.blocks)
#pragma unroll
          for (int other = 0; other < kMostSplits; other += 2 * step) {
            parts[j][other].x += parts[j][other + step].x;
            parts[j][other].y += parts[j][other + step].y;
            parts[j][other].z += parts[j][other + step].z;
            parts[j][other].w += parts[j][other + step].w;
          }
      const float4 sum = parts[j][0];
      *reinterpret_cast<uint2*>(task.out + g * task.out_strides[0] +
                                (first_token + token) * task.out_strides[1] + first_row + row) =
          make_uint2(hopper::pack<Bf16>(sum.x, sum.y), hopper::pack<Bf16>(sum.z, sum.w));
    }
  }
}

/// Blocks per processor that the registers must allow.
template <class T, int kRows, int kTokens>
constexpr int blocks_of_processor() {
  constexpr int kParts = kRows / kPartRows;
  if (kTokens == kFew) return kParts == 1 ? 5 : kParts == 2 ? 4 : 2;
  if (std::is_same_v<T, Bf16>) return kParts == 1 ? 4 : kParts == 2 ? 2 : 1;
  return kParts == 1 ? 3 : 1;
}

template <class T, int kRows, int kTokens>
__global__ void __launch_bounds__(kRows * 2 + 32, blocks_of_processor<T, kRows, kTokens>())
    product_kernel(const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ CUtensorMap tokens,
                   const __grid_constant__ CUtensorMap out, const __grid_constant__ Task task) {
  constexpr int kMultiplying = kRows * 2, kGroups = kRows / kPartRows;
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) std::uint64_t barriers[2 * kMostStages];
  const std::uint32_t tiles = kept_address(memory, 1024);
  const Ring ring{tiles, kept_address(barriers, 8), task.stages, task.rows, task.tokens};
  if (threadIdx.x == kMultiplying) {
    hopper::prefetch_map(weights);
    hopper::prefetch_map(tokens);
    ring.init(kMultiplying / 32);
  }
  __syncthreads();
  let_the_next_launch_start();

  const int rank = static_cast<int>(blockIdx.x) % task.blocks;
  const int tile = static_cast<int>(blockIdx.x) / task.blocks;
  const int first_token = first_of(tile, kTokens, task.M);
  const int first_row = static_cast<int>(blockIdx.y) * task.rows;
  const int g = static_cast<int>(blockIdx.z);
  const int splits = task.splits / task.blocks;
  const int begin = task.begin_of(rank * splits), end = task.begin_of((rank + 1) * splits);
  const int group = hopper::uniform(static_cast<int>(threadIdx.x) / hopper::kWarpgroup);
  const bool adds = task.blocks > 1 || task.rows % kPartRows != 0;
  if (group == kGroups) {
    if (elected()) load_steps(ring, weights, tokens, task, begin, end, first_row, first_token, g);
    __syncwarp();
    if (!adds) return;
    hopper::sync_cluster();
    leave_cluster();
    return;
  }
  prefetch_weights(task, kMultiplying, begin, first_row, g);
  wait_for_earlier_launch();
  float sums[kTokens / 2] = {};
  if constexpr (std::is_same_v<T, Bf16>) {
    Place at;
    hopper::pin(sums);
    const auto release = [&](int stage) {
      if (threadIdx.x % 32 == 0) hopper::barrier_arrive(ring.empty(stage));
    };
    if (splits == 1)
      multiply<kTokens>(sums, ring, at, end - begin, group, release);
    else if constexpr (kTokens != kFew)
      multiply_splits<kTokens>(sums, ring, at, task, rank * splits, splits, group, release);
  } else {
    multiply_numbers<kRows, kTokens>(sums, ring, task, begin, end - begin, group, first_row,
                                     first_token, g);
  }
  // All products have read the ring, which is now overwritten.
  hopper::sync_threads_of(1, kMultiplying);
  if (!adds) {
    const std::uint32_t part =
        tiles + static_cast<std::uint32_t>(group * kTokens * hopper::kTileRowBytes);
    round_into<kTokens>(part, sums, 0);
    hopper::publish_to_async();
    hopper::sync_threads_of(2 + group, hopper::kWarpgroup);
    if (threadIdx.x % hopper::kWarpgroup == 0) {
      hopper::store_tile(out, part, first_row + group * kPartRows, g, first_token);
      hopper::commit_stores();
      hopper::wait_for_reads<0>();
    }
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  // A float [kTokens][kRows + 4]: the sums by token and weight row of the tile.
  auto* const to = reinterpret_cast<float*>(memory + (tiles - hopper::shared_address(memory)));
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = 8 * j + 2 * (lane % 4) + e % 2;
      to[token * (kRows + 4) + warp * 16 + lane / 4 + e / 2 * 8] = sums[4 * j + e];
    }
  hopper::sync_cluster();
  add_and_store<kRows, kTokens>(task, tiles, rank, first_row, first_token, g);
  __syncwarp();
  leave_cluster();  // a block's shared memory must outlive its readers
}

// --- Many tokens ---------------------------------------------------------------------------------

constexpr int kPairRows = 128;  ///< weight rows of a block, of which a cluster has two
constexpr int kStreamStages = 4;
constexpr int kStored = 64;  ///< tokens that are stored at a time
constexpr int kStoredBytes = kStored * hopper::kTileRowBytes;
constexpr int kBand = 8;  ///< tiles of tokens that share weights in L2

/// Of tiles with kMany tokens: 256, or 192, with registers for the sums of a pair of splits, which
/// loading warps give.
template <int kMany>
struct Stream {
  static constexpr bool kPairs = kMany < 256;
  static constexpr int kThreads = 2 * hopper::kWarpgroup + (kPairs ? hopper::kWarpgroup : 32);
  static constexpr int kBytes =
      kStreamStages * bytes_of_stage(kPairRows, kMany) + 2 * 2 * kStoredBytes + 1024;
};

/// Tiles in the order in which clusters take them.
struct Tiles {
  int pairs;    ///< of tiles of weight rows
  int columns;  ///< tiles of tokens
  int all = 0;  ///< pairs of all G
};
struct Tile {
  int first_row, first_token, g;
};
template <int kMany>
__device__ inline Tile tile_of(const Tiles& tiles, int number, int rank, int M) {
  const int of_one = tiles.pairs * tiles.columns, g = number / of_one, i = number - g * of_one;
  const int band = i / (kBand * tiles.pairs), within = i - band * kBand * tiles.pairs;
  const int columns = min(kBand, tiles.columns - band * kBand);
  const int pair = within / columns, column = band * kBand + within - pair * columns;
  return {(2 * pair + rank) * kPairRows, first_of(column, kMany, M), g};
}

template <int kMany>
__global__ void __launch_bounds__(Stream<kMany>::kThreads, 1)
    stream_kernel(const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap tokens,
                  const __grid_constant__ CUtensorMap out, const __grid_constant__ Task task,
                  const __grid_constant__ Tiles tiles) {
  using Of = Stream<kMany>;
  extern __shared__ unsigned char memory[];
  __shared__ alignas(8) std::uint64_t barriers[2 * kStreamStages];
  const std::uint32_t base = kept_address(memory, 1024);
  const Ring ring{base, kept_address(barriers, 8), kStreamStages, kPairRows, kMany};
  if (threadIdx.x == 0) {
    hopper::prefetch_map(weights);
    hopper::prefetch_map(tokens);
    hopper::prefetch_map(out);
    ring.init(2 * 2 * hopper::kWarpgroup / 32);  // the warps of both blocks
  }
  hopper::sync_cluster();
  let_the_next_launch_start();
  wait_for_earlier_launch();

  const int rank = static_cast<int>(blockIdx.x) % 2, clusters = static_cast<int>(gridDim.x) / 2;
  const int group = hopper::uniform(static_cast<int>(threadIdx.x) / hopper::kWarpgroup);
  Place at;
  if (group == 2) {
    if constexpr (Of::kPairs) hopper::give_registers<24>();
    if (threadIdx.x / 32 == 2 * hopper::kWarpgroup / 32 && elected()) {
      bool first = true;  // round of the ring
      for (int number = static_cast<int>(blockIdx.x) / 2; number < tiles.all; number += clusters) {
        const Tile tile = tile_of<kMany>(tiles, number, rank, task.M);
        for (int i = 0; i < task.steps; ++i) {
          if (!first) hopper::barrier_wait(ring.empty(at.stage), at.parity ^ 1);
          const std::uint32_t full = ring.full(at.stage);
          hopper::barrier_expect(full, bytes_of_stage(kPairRows, kMany));
          hopper::load_tile(ring.weights(at.stage), weights, i * hopper::kTileColumns, tile.g,
                            tile.first_row, full);
          hopper::load_tile_in_both(
              ring.tokens(at.stage) + static_cast<std::uint32_t>(rank * kMany / 2 * kStepBytes),
              tokens, i * hopper::kTileColumns, task.shared_x ? 0 : tile.g,
              tile.first_token + rank * kMany / 2, full);
          at.advance(kStreamStages);
          if (at.stage == 0) first = false;
        }
      }
    }
    __syncwarp();
  } else {
    if constexpr (Of::kPairs) hopper::take_registers<240>();
    int turn = 0;
    const std::uint32_t buffers = base + kStreamStages * bytes_of_stage(kPairRows, kMany) +
                                  static_cast<std::uint32_t>(group * 2 * kStoredBytes);
    const bool storing = threadIdx.x % hopper::kWarpgroup == 0;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto release = [&](int stage) {
      if (lane < 2) hopper::remote_arrive(ring.empty(stage), lane);
    };
    for (int number = static_cast<int>(blockIdx.x) / 2; number < tiles.all; number += clusters) {
      const Tile tile = tile_of<kMany>(tiles, number, rank, task.M);
      float sums[kMany / 2];
      if (task.splits == 1)
        multiply<kMany>(sums, ring, at, task.steps, group, release);
      else if constexpr (Of::kPairs)
        multiply_pairs<kMany>(sums, ring, at, task, group, release);
      else
        multiply_splits<kMany>(sums, ring, at, task, 0, task.splits, group, release);
#pragma unroll
      for (int first = 0; first < kMany; first += kStored) {
        const std::uint32_t buffer = buffers + static_cast<std::uint32_t>(turn * kStoredBytes);
        turn ^= 1;
        if (storing) hopper::wait_for_reads<1>();
        hopper::sync_threads_of(2 + group, hopper::kWarpgroup);
        round_into<kStored>(buffer, sums, first);
        hopper::publish_to_async();
        hopper::sync_threads_of(2 + group, hopper::kWarpgroup);
        if (storing) {
          hopper::store_tile(out, buffer, tile.first_row + group * kPartRows, tile.g,
                             tile.first_token + first);
          hopper::commit_stores();
        }
      }
    }
    if (storing) hopper::wait_for_reads<0>();
    __syncwarp();
  }
  hopper::sync_cluster();  // a block's barriers must outlive the other's arrivals
}

/// The number of splits of K: doubled until there are 128 parts of weight rows, so that all
/// processors load weights, while each split has at least 8 steps. Clusters of four leave
/// processors out, so eight splits follow four. It depends on the weights' shape alone, and so do
/// the bits.
int splits_of(std::int64_t N, std::int64_t steps, int most) {
  const std::int64_t parts = (N + kPartRows - 1) / kPartRows;
  int splits = 1;
  while (2 * splits <= most && (parts * splits < 128 || splits == 4) && steps / (2 * splits) >= 8)
    splits *= 2;
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

/// The number of processors of the current device.
int processors() {
  static const int count = [] {
    int device = 0, found = 0;
    check_cuda(cudaGetDevice(&device), kName);
    check_cuda(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), kName);
    return found;
  }();
  return count;
}

template <class... Parameters, class... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, int blocks, int threads, int bytes,
                     cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), kName);
}

/// The most blocks that run at once with one on each processor. Clusters of more than two blocks
/// leave some processors out.
int most_at_once(int blocks) {
  return blocks <= 2 ? processors() : processors() * 7 / 8;
}

template <class T, int kRows, int kTokens>
void launch_product(const BatchedProduct<T>& in, Task task, cudaStream_t stream) {
  constexpr int kShared = 222 * 1024;
  auto* const kernel = product_kernel<T, kRows, kTokens>;
  static const cudaError_t set =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  check_cuda(set, kName);
  const std::int64_t rows = (task.N + task.rows - 1) / task.rows;
  const std::int64_t columns = (task.M + kTokens - 1) / kTokens;
  const std::int64_t weight_blocks = in.weight.extent(0) * rows * task.blocks;
  const std::int64_t all = weight_blocks * columns, most = most_at_once(task.blocks);
  // The rings of the blocks that run at once take all shared memory: weights come at the rate of
  // the bytes that are under way. The last stage's operands reach as far as whole ones.
  const auto resident = static_cast<int>(std::clamp<std::int64_t>(
      (all + most - 1) / most, 1, blocks_of_processor<T, kRows, kTokens>()));
  task.box = task.N % task.rows == 0 ? task.rows : kPartRows;
  task.tokens = std::min(kTokens, (task.M + 7) / 8 * 8);
  const int stage = bytes_of_stage(task.rows, task.tokens);
  const int beyond = bytes_of_stage(kRows, kTokens) - stage + 1024;
  const int steps = (task.steps + task.blocks - 1) / task.blocks;
  task.stages =
      std::min({steps, kMostStages, std::max(2, (kShared / resident - 1024 - beyond) / stage)});
  // Launches lose by more than a step, and those of many tokens, which last longer, by more than
  // two.
  if (!task.settled_weights) task.prefetched = kTokens == kSome && steps > 2 ? 2 : 1;
  const bool adds = task.blocks > 1 || task.rows % kPartRows != 0;
  const int result = kTokens * (adds ? (kRows + 4) * 4 : kRows * 2);
  launch_clusters(kernel,
                  dim3(static_cast<unsigned>(task.blocks * columns), static_cast<unsigned>(rows),
                       static_cast<unsigned>(in.weight.extent(0))),
                  task.blocks, kRows * 2 + 32, std::max(task.stages * stage, result) + beyond,
                  stream, map_of(in.weight, task.box), map_of(in.x, std::min(task.M, kTokens)),
                  map_of(TensorView<const Bf16, 3>(in.out), kTokens), task);
}

/// Rounds in which the clusters of stream_kernel take all pairs of tiles with `many` tokens.
std::int64_t rounds_of(std::int64_t G, const Task& task, int many) {
  const std::int64_t pairs = (task.N + 2 * kPairRows - 1) / (2 * kPairRows);
  const std::int64_t tiles = G * pairs * ((task.M + many - 1) / many);
  const std::int64_t clusters = processors() / 2;
  return (tiles + clusters - 1) / clusters;
}

/// Tokens of a tile of stream_kernel: those that take less time, as measured. A step with 192
/// tokens takes 0.76 of one with 256. Sums that wait in local memory take 8.5 such steps a split;
/// with 192 tokens three quarters of that a pair of splits.
int many_tokens(std::int64_t G, const Task& task) {
  const auto rounds = [&](int many) { return static_cast<double>(rounds_of(G, task, many)); };
  const double waits = 8.5 * (task.splits - 1);
  const double pair_waits = 6.4 * std::max(0, task.splits / 2 - 1);
  return rounds(256) * (task.steps + waits) <= rounds(192) * (0.76 * task.steps + pair_waits) ? 256
                                                                                              : 192;
}

/// Whether the clusters of stream_kernel, which take whole pairs of tiles, use enough of their
/// time.
bool fills_processors(std::int64_t G, const Task& task, int many) {
  const double all =
      // NOLINTNEXTLINE(bugprone-integer-division): clusters are whole
      static_cast<double>(rounds_of(G, task, many)) * (processors() / 2) * 2 * kPairRows * many;
  return task.M >= many && static_cast<double>(G * task.N) * task.M > 0.65 * all;
}

template <int kMany>
void launch_stream(const BatchedProduct<Bf16>& in, const Task& task, cudaStream_t stream) {
  using Of = Stream<kMany>;
  static const cudaError_t set = cudaFuncSetAttribute(
      stream_kernel<kMany>, cudaFuncAttributeMaxDynamicSharedMemorySize, Of::kBytes);
  check_cuda(set, kName);
  Tiles tiles{.pairs = (task.N + 2 * kPairRows - 1) / (2 * kPairRows),
              .columns = (task.M + kMany - 1) / kMany};
  tiles.all = tiles.pairs * tiles.columns * static_cast<int>(in.weight.extent(0));
  const auto clusters = static_cast<unsigned>(std::min(processors() / 2, tiles.all));
  launch_clusters(stream_kernel<kMany>, dim3(2 * clusters), 2, Of::kThreads, Of::kBytes, stream,
                  map_of(in.weight, kPairRows), map_of(in.x, kMany / 2),
                  map_of(TensorView<const Bf16, 3>(in.out), kStored), task, tiles);
}

/// The tile of product_kernel and the blocks of its cluster: the measured best of each kind of
/// shape.
struct TileShape {
  int rows, tokens, blocks;
};
TileShape tile_for(std::int64_t G, const Task& task, bool scaled) {
  const auto tiles = [&](int rows, int tokens) {
    return G * ((task.N + rows - 1) / rows) * ((task.M + tokens - 1) / tokens);
  };
  // Little work takes the time of one block, and small blocks are quick; but with 9 to 64 tokens,
  // larger ones that fill the processors are quicker.
  const std::int64_t all = processors(), small = tiles(64, kFew) * task.splits;
  const std::int64_t larger = tiles(128, kFew) * task.splits;
  const bool fill = task.splits == 1 && 8 < task.M && task.M <= 2 * kFew && larger <= all &&
                    larger > all * 9 / 10 && small * task.steps > 12 * all;
  if (small <= (task.splits <= 2 ? 5 * all : most_at_once(task.splits)) &&
      small * task.steps <= 24 * all * task.splits && !fill)
    return {64, kFew, task.splits};
  const int tokens = task.M <= kFew ? kFew : kSome;
  if (tokens == kFew && task.splits > 2) return {64, kFew, task.splits};
  // Otherwise as many blocks as run at once, one on each processor, and the largest of these.
  TileShape best{};
  std::int64_t most = 0;
  for (int rows = 48; rows <= 192; rows += 8) {
    // Warpgroups multiply 64 rows each. The last may have fewer, where tiles divide N.
    const bool whole = rows % kPartRows == 0;
    const bool wasteful = (task.N + rows - 1) / rows * rows > task.N / 8 * 9 && rows > 64;
    const bool parted = task.N % rows == 0 && rows % kPartRows >= 48 && !scaled;
    if ((whole ? wasteful : !parted) || (scaled && rows * tokens > 128 * 128)) continue;
    const int fewest = scaled || tokens == kFew ? task.splits : 1;
    for (int blocks = task.splits; blocks >= fewest; blocks /= 2) {
      const std::int64_t found = tiles(rows, tokens) * blocks;
      if (found > most_at_once(blocks) || found < most) continue;
      best = {rows, tokens, blocks};
      most = found;
    }
  }
  if (most > 0) return best;
  const bool many_small = task.steps <= 4 || (scaled && tiles(64, tokens) * task.splits <= 4 * all);
  return {tokens == kSome && many_small ? 64 : 128, tokens, task.splits};
}

}  // namespace

template <class T>
void batched_product(const BatchedProduct<T>& in, cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t G = in.weight.extent(0), N = in.weight.extent(1), K = in.weight.extent(2);
  const std::int64_t M = in.x.extent(1);
  constexpr bool kScaled = std::is_same_v<T, E4m3>;
  checks.expect(0 < G && G <= 65535 && 0 < N && N % kEach == 0 && N <= (1 << 21) && 0 < K &&
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
  Task task{.splits = splits_of(N, steps, in.splits),
            .steps = steps,
            .M = static_cast<int>(M),
            .N = static_cast<int>(N),
            .shared_x = in.x.extent(0) == 1,
            .settled_weights = in.settled_weights,
            .weights = reinterpret_cast<const unsigned char*>(in.weight.data_handle()),
            .weight_strides = {in.weight.stride(0) * static_cast<std::int64_t>(sizeof(T)),
                               in.weight.stride(1) * static_cast<std::int64_t>(sizeof(T))},
            .out = in.out.data_handle(),
            .out_strides = {in.out.stride(0), in.out.stride(1)}};
  const auto tell = [](const auto& scale, const float*& data, std::int64_t(&strides)[3]) {
    if (!scale) return;
    data = scale->data_handle();
    for (std::size_t i = 0; i < 3; ++i) strides[i] = scale->extent(i) == 1 ? 0 : scale->stride(i);
  };
  tell(in.x_scale, task.x_scale, task.x_scale_strides);
  tell(in.weight_scale, task.weight_scale, task.weight_scale_strides);
  if constexpr (!kScaled)
    if (const int many = many_tokens(G, task); fills_processors(G, task, many))
      return many == 256 ? launch_stream<256>(in, task, stream)
                         : launch_stream<192>(in, task, stream);
  const auto [rows, tokens, blocks] = tile_for(G, task, kScaled);
  task.rows = rows;
  task.blocks = blocks;
  if (tokens == kFew) {
    if (rows <= 64) return launch_product<T, 64, kFew>(in, task, stream);
    if (rows <= 128) return launch_product<T, 128, kFew>(in, task, stream);
    return launch_product<T, 192, kFew>(in, task, stream);
  }
  if (rows <= 64) return launch_product<T, 64, kSome>(in, task, stream);
  if constexpr (!kScaled)
    if (rows > 128) return launch_product<T, 192, kSome>(in, task, stream);
  launch_product<T, 128, kSome>(in, task, stream);
}

// --- Numbers of e4m3 -----------------------------------------------------------------------------

namespace {

constexpr int kScaleThreads = 128;
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
