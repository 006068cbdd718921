// Decode with keys and values as left operands, from registers, and rows as columns of products:
// over caches in e4m3 with one scale, for mla_decode, whose products take float16, and for
// mla_decode_e4m3; and over caches of 16 bits ("wide") for at most 16 rows a request, where 64 rows
// of products would be four times the work and energy. Tiles stay in shared memory as they are in
// the cache; whatever a product wants otherwise becomes so in registers.
// Equations: reference/attention/mla_attention.hpp.
//
// A request has q_len x H rows (one per query and head), in blocks of 64, and its keys come in
// tiles of 64 tokens: four slabs [64 tokens, 128 numbers] of 8 KiB, the latent, which is the values
// too, and k_pe [64 tokens, 64 numbers]. Of 16 bits it is nine slabs [64 tokens, 64 columns], three
// to a unit of the ring. A block of threads computes its rows over a run of tiles, its share
// (mla_schedule.cuh); an item is the part of the share that belongs to one request.
//
//   grid   parts x blocks of rows, one block per processor at most; neighbours read the same keys
//   block  4 warpgroups: 0 scores, 1 values' columns 0 to 255, 2 columns 256 to 511, 3 feeds
//
//   feeding  One warp loads tiles by tensor copies; from pages smaller than a tile (products in 16
//            bits) the lanes of two warps copy 16 bytes each. It loads an item's queries before
//            them, into two places of the ring (products in e4m3), or another warp to their place.
//   scores   In 16 bits: S^T = K Q^T, with K from registers, where numbers become float16 exactly.
//            A thread has two tokens of a quarter of the rows.
//            In e4m3: S = Q K^T, with Q from registers, where each row becomes e4m3, times a power
//            of two. A thread has a quarter of the tokens of two rows.
//            p = exp2(S - base) is rounded and goes to shared memory [rows, tokens]; for products
//            in e4m3 as the sum of two numbers. base is the largest score so far less kShift, or
//            less than that by at most kMostP - kShift, so outputs are rarely rescaled.
//   outputs  O^T = alpha O^T + V^T p^T, with V^T from registers: ldmatrix transposes pairs of
//            numbers, a byte permutation parts them (16 bits need none). Nothing is written back,
//            and the tile's place is free when it has been read. Over 16 bits outputs are divided
//            by the sum of the rounded p, as in mla_decode.cu.
//
// For products in e4m3 the tokens of a tile are in an order of their own in p^T and V^T, the one
// that needs no shuffles: of each 16 the lane l % 4 = i has tokens 2 i, 2 i + 1, 2 i + 8 and 2 i +
// 9, in one word. For products of numbers in float16 the columns of queries are: of each 16,
// products take the first two of each four and then the last two.
//
// Divided requests. If several parts share a request, each leaves a piece in device memory: O / l
// in float16 (over 16 bits times a power of two, one for each warp) and lse. When all pieces are
// there, the parts merge them, each some of the columns, in the order of the parts. Blocks wait for
// one another there, so all blocks of a launch must be resident: the grid has at most one block per
// processor.
#pragma once

#include "kernels/attention/mla_arguments.cuh"
#include "kernels/attention/mla_latents.cuh"
#include "kernels/attention/softmax_rows.cuh"

namespace lockstep::kernels::mla::narrow {

using namespace hopper;
constexpr int kFewRows = 16;                        ///< at most so many have products of 16
constexpr int kSlabs = 4;                           ///< slabs of a tile's latent
constexpr int kSlabColumns = 128;                   ///< numbers of a slab's row
constexpr int kPeColumns = 64;                      ///< numbers of k_pe
constexpr int kSlabBytes = kTokens * kSlabColumns;  ///< 8 KiB
constexpr int kPeBytes = kTokens * kPeColumns;      ///< 4 KiB
constexpr int kTileBytes = kSlabs * kSlabBytes + kPeBytes;
constexpr int kQueryPlaces = 2;            ///< places that an item's queries take
constexpr int kQueryRows = 32;             ///< rows of a copy of queries
constexpr int kSteps = kWidth / 32;        ///< products of a tile's scores
constexpr int kPs = 2;                     ///< tiles of p
constexpr int kSideTiles = 4;              ///< products' 64 columns in a side's 256
constexpr int kFullBarriers = kSlabs + 1;  ///< of a place
constexpr int kThreads = 4 * kWarpgroup;
constexpr int kMergers = 2 * kWarpgroup;  ///< threads of the outputs' warpgroups
constexpr int kDeferredTiles = 8;         ///< shorter items hand over p at once: see Block
constexpr int kGatherers = 2;  ///< warps whose lanes copy small pages, half of a tile's tokens each

/// Sizes of a block. N: rows that products have, kFewRows or kRows. M: the type of products, Fp16
/// or E4m3, or the type of 16 bits that the cache has. C: the type of the cache.
template <int N, class M, class C>
struct Layout {
  static constexpr bool kWide = std::is_same_v<M, C> && !std::is_same_v<C, E4m3>;
  static constexpr bool kHalves = kWide || std::is_same_v<M, Fp16>;
  static_assert(N == kFewRows || (N == kRows && !kWide));
  /// Places of the ring, of a tile or of a unit of three slabs of 16 bits.
  static constexpr int kTiles = kWide ? 8 : kHalves && N == kRows ? 3 : 5;
  static constexpr int kTileSlabs = kWide ? kWidth / kTileColumns : kSlabs;
  static constexpr int kUnitsOfTile = kWide ? 3 : 1;
  static constexpr int kPlaceSlabs = kTileSlabs / kUnitsOfTile;
  static constexpr int kPlaceBytes = kWide ? kPlaceSlabs * kSlabBytes : kTileBytes;
  static constexpr int kColumns = kWide ? kTileColumns : kSlabColumns;  ///< of a slab
  static constexpr int kTerms = kHalves ? 1 : 2;  ///< numbers whose sum is a p
  static constexpr int kTermBytes = kHalves ? N * kTileRowBytes : kRows * kTokens;
  static constexpr int kPBytes = kTerms * kTermBytes;
  static constexpr int kQuerySlabs = kHalves ? kWidth / kTileColumns : 0;
  static constexpr int kQuerySlabBytes = N * kTileRowBytes;
  static constexpr int kFeedRegisters = kWide ? 40 : 24;
  static constexpr int kScoreRegisters = kWide ? 168 : N == kFewRows ? 208 : 136;
  static constexpr int kOutputRegisters = kWide ? 152 : N == kFewRows ? 136 : 176;
  static constexpr int kSums = N == kFewRows ? 4 : 1;  ///< sums of a score in float16
  static constexpr float kShift = kHalves ? 0 : 5;  ///< p is 2^kShift for the largest score so far
  /// p is at most 2^kMostP; e4m3 ends at 448.
  static constexpr float kMostP = kHalves && !kWide ? 15 : 8;
  static constexpr int kSumsOfRow = kWide ? 2 : 1;      ///< of p, and of p as rounded
  static constexpr float kPieceUnit = kWide ? 1 : 128;  ///< of O / l; values of e4m3 end at 448

  // Shared memory, by offsets in bytes:
  //
  //   0          the ring: kTiles tiles
  //   kQueries   queries in float16: kQuerySlabs slabs [N rows, 64 columns]
  //   kP         kPs tiles of p [N rows, 64 tokens]
  //   kAlpha     float [kPs][64]: factors of the outputs so far, by row
  //   kFactors   float [kPs][64]: factors of the final outputs
  //   kGrown     int [kPs][4]: whether a warp of the scores has raised its base
  //   kMost      kHalves: float [4][64], the warps' largest scores of rows
  //   kSum       kHalves: float [64], base; float [kSumsOfRow][4][64], the warps' sums of rows
  //   kBarriers, kShare
  static constexpr int kQueries = kTiles * kPlaceBytes;
  static constexpr int kP = kQueries + kQuerySlabs * kQuerySlabBytes;
  static constexpr int kAlpha = kP + kPs * kPBytes;
  static constexpr int kFactors = kAlpha + kPs * kRows * 4;
  static constexpr int kGrown = kFactors + kPs * kRows * 4;
  static constexpr int kMost = kGrown + kPs * 16;
  static constexpr int kSum = kMost + (kHalves ? 4 * kRows * 4 : 0);
  static constexpr int kBarriers = kSum + (kHalves ? (1 + 4 * kSumsOfRow) * kRows * 4 : 0);
  static constexpr int kBarrierCount = kTiles * (kFullBarriers + 1) + 3 * kPs + 4;
  static constexpr int kShare = kBarriers + 8 * kBarrierCount;
  static constexpr int kSharedBytes = kShare + int{sizeof(Share)};
  static_assert(kSharedBytes <= 232448, "shared memory of a block");
};

constexpr int kPieceVectors = 2;  ///< vectors of a lane in 8 rows of a piece
constexpr int kCounted = 3;       ///< warpgroups that say that their part of a piece is there

/// Per lane (MlaDecode::lane), and per divided request and block of rows: parts of pieces that are
/// complete; readers that are done waiting. 0 between launches.
static __device__ int counters[kMlaDecodeLanes][kMostBlocks][2];

/// One product in e4m3, D [64, N] += A [64, 32] B [32, N]. A is in registers: lane l of warp w
/// holds rows r = 16 w + l / 4 and r + 8, four numbers from k = 4 (l % 4) on and four from k + 16
/// on: a[0] = A[r, k], a[1] = A[r + 8, k], a[2] = A[r, k + 16], a[3] = A[r + 8, k + 16]. B's rows
/// of N lie in shared memory with the summed dimension in a row. D is as hopper.cuh has it, but its
/// sums keep 13 bits behind the leading one of the largest summand.
template <int N>
__device__ inline void add_product(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                                   bool accumulate) {
  static_assert(N == 64 || N == 16);
  if constexpr (N == 64)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
/// One product in 16 bits, D [64, N] += A [64, 16] B [16, N], with A in registers (hopper.cuh).
#define LOCKSTEP_PRODUCT_16(TYPE)                                                           \
  asm volatile(                                                                             \
      "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                           \
      " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0; }"                     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
        "+f"(d[7])                                                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
template <int N, class M>
__device__ inline void add_half_product(float (&d)[N / 2], const std::uint32_t (&a)[4],
                                        std::uint64_t b, bool accumulate) {
  if constexpr (N != kFewRows)
    Product<M, N, false>::of(d, a, b, accumulate);
  else if constexpr (std::is_same_v<M, Bf16>)
    LOCKSTEP_PRODUCT_16("bf16");
  else
    LOCKSTEP_PRODUCT_16("f16");
}
#undef LOCKSTEP_PRODUCT_16
/// store_matrices() of the transposed matrices.
__device__ inline void store_transposed(std::uint32_t address, const std::uint32_t (&m)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
      : "memory");
}
__device__ inline std::uint32_t bits_of(__half2 x) {
  return *reinterpret_cast<const std::uint32_t*>(&x);
}
/// matrix() for rows of 64 bytes, which have the 64-byte swizzle: 16-byte piece `chunk` of row r is
/// at narrow_offset(r, chunk).
__device__ inline std::uint64_t narrow_matrix(std::uint32_t address) {
  constexpr std::uint64_t kEightRows = 8 * kPeColumns >> 4, kSwizzle64 = 2;
  return std::uint64_t{(address & 0x3ffff) >> 4} | std::uint64_t{1} << 16 | kEightRows << 32 |
         kSwizzle64 << 62;
}
__device__ inline std::uint32_t narrow_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kPeColumns + ((chunk ^ (row >> 1 & 3)) << 4));
}

/// Four numbers rounded to e4m3 (nearest, ties to even; at most 448), the first in the lowest byte.
__device__ inline std::uint32_t e4m3_of(float a, float b, float c, float d) {
  std::uint32_t four;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}
/// Four numbers as sums of two in e4m3: the nearest one, and what is left, rounded.
struct TwoTerms {
  std::uint32_t nearest, rest;
  __device__ TwoTerms(float a, float b, float c, float d) : nearest(0), rest(0) {
    const std::uint32_t low = pack<Fp16>(a, b), high = pack<Fp16>(c, d);
    asm("{ .reg .b16 x, y; .reg .b32 u, v;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 x, %2; cvt.rn.satfinite.e4m3x2.f16x2 y, %3;\n"
        "mov.b32 %0, {x, y}; cvt.rn.f16x2.e4m3x2 u, x; cvt.rn.f16x2.e4m3x2 v, y;\n"
        "sub.f16x2 u, %2, u; sub.f16x2 v, %3, v;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 x, u; cvt.rn.satfinite.e4m3x2.f16x2 y, v;\n"
        "mov.b32 %1, {x, y}; }"
        : "=&r"(nearest), "=&r"(rest)
        : "r"(low), "r"(high));
  }
};
/// Bytes `numbers` of the eight bytes of low and high, by number from the lowest digit on.
__device__ inline std::uint32_t bytes_of(std::uint32_t low, std::uint32_t high,
                                         std::uint32_t numbers) {
  return __byte_perm(low, high, numbers);
}

/// A block of threads: see Layout.
template <int N, class M, class C>
class Block {
  using At = Layout<N, M, C>;
  using T = std::conditional_t<At::kWide, C, Bf16>;  ///< of queries and outputs
  static constexpr bool kHalves = At::kHalves, kWide = At::kWide;
  static constexpr int kTerms = At::kTerms;
  static constexpr int kTiles = At::kTiles;
  static constexpr float kShift = At::kShift, kMostP = At::kMostP;
  /// With many rows in float16 p of a long item is handed over only before the last products of the
  /// next tile's scores: those of the outputs then run while these scores become p.
  static constexpr bool kDefers = kHalves && N == kRows;

 public:
  __device__ Block(const Decode& parameters, const Maps& maps, unsigned char* shared)
      : p_(parameters),
        maps_(maps),
        shared_(shared),
        base_(shared_address(shared)),
        part_(static_cast<int>(blockIdx.x) / p_.row_blocks),
        row_block_(static_cast<int>(blockIdx.x) % p_.row_blocks),
        first_row_(row_block_ * kRows) {}

  /// The barriers, and the events that end their phases:
  ///   full(i, s)        slab s of place i is filled; s = kSlabs: its k_pe
  ///   empty(i)          the outputs have read the values of place i, after the scores have
  ///                     multiplied its keys; or the scores have read queries from it
  ///   p_full(i), p_empty(i)   a tile of p, with what belongs to it
  ///   factors_full(i)   kHalves: the factors beside p of an item's last tile
  ///   scores_done       the scores have finished all items, so that merging may use their memory
  ///   queries_full, queries_empty   kHalves: an item's queries
  ///   queries_halved    kHalves: those of the block's first item are in float16
  __device__ void init_barriers() const {
    for (int i = 0; i < kTiles; ++i) {
      for (int s = 0; s < kFullBarriers; ++s) barrier_init(full(i, s), gathers() ? 64 : 1);
      barrier_init(empty(i), gathers() ? kMergers : kMergers / 32);
    }
    // Each thread that reads or writes its own values beside p arrives on the barrier itself; no
    // lane arrives for its warp.
    for (int i = 0; i < kPs; ++i) {
      barrier_init(p_full(i), kWarpgroup);
      barrier_init(p_empty(i), 2 * kWarpgroup);
      barrier_init(factors_full(i), N);
    }
    barrier_init(scores_done(), kWarpgroup);
    barrier_init(queries_full(), 1);
    barrier_init(queries_empty(), 4);
    barrier_init(queries_halved(), kWarpgroup + kMergers);
    publish_barriers();
  }

  /// Prefetches into L2 the queries, page numbers and lengths that this block probably reads first.
  /// It runs before wait_for_earlier_launch(), and guesses that shares are equal counts of
  /// requests.
  __device__ void ask_ahead() const {
    const int b = static_cast<int>(std::int64_t{part_} * p_.lengths.count / p_.parts);
    const int thread = static_cast<int>(threadIdx.x);
    const auto* const q = static_cast<const unsigned char*>(p_.q) + b * p_.q_strides[0];
    const int rows = min(kRows, p_.rows - first_row_);
    constexpr int kLines = kWidth / kTileColumns;
#pragma unroll 1
    for (int i = thread; i < rows * kLines; i += kThreads)
      prefetch_to_l2(q + (first_row_ + i / kLines) * p_.q_strides[1] + i % kLines * kTileRowBytes);
    constexpr int kOfLine = 32;
    if (thread * kOfLine < p_.lengths.count)
      prefetch_to_l2(p_.lengths.data + thread * kOfLine * p_.lengths.stride);
    const int blocks = min(p_.lengths.longest / p_.page, 32 * kOfLine);
    const int entry = (thread - kWarpgroup) * kOfLine;
    if (0 <= entry && entry < blocks)
      prefetch_to_l2(p_.table + b * p_.table_strides[0] + entry * p_.table_strides[1]);
  }

  /// One warp: finds the block's share and leaves it in shared memory.
  __device__ void find_share() const {
    const Share share = Scheduler(p_.lengths, p_.parts, part_).share(p_.fewest);
    if (threadIdx.x % 32 == 0) *reinterpret_cast<Share*>(shared_ + At::kShare) = share;
  }

  // --- Feeding ---

  /// One warp, kHalves: loads the queries of all items, each when the scores are done with those
  /// before.
  __device__ void load_all_queries() const {
    std::uint32_t parity = 1;
    for_each_item([&](const Item& item) {
      if (item.count == 0) return;
      barrier_wait(queries_empty(), parity);
      parity ^= 1;
      if (threadIdx.x % 32 != 0) return;
      barrier_expect(queries_full(), At::kQuerySlabs * At::kQuerySlabBytes);
      for (int s = 0; s < At::kQuerySlabs; ++s)
        load_tile(query_slab(s), maps_.q, s * kTileColumns, item.request, first_row_,
                  queries_full());
    });
  }
  __device__ std::uint32_t query_slab(int s) const {
    return base_ + At::kQueries + s * At::kQuerySlabBytes;
  }
  /// One warp: loads tiles, and an item's queries before them where they go through the ring. All
  /// lanes run the loop and one issues the copies. If one lane ran it alone, the compiler would not
  /// know its arguments to be uniform.
  __device__ void feed() const {
    const bool leads = elected();
    const int tiles_of_page = p_.page / kTokens;
    Step ring(kTiles);
    for_each_item([&](const Item& item) {
      if (item.count == 0) return;
      int index = item.first / tiles_of_page, within = item.first - index * tiles_of_page;
      const int pages = (item.length + p_.page - 1) / p_.page;
      const std::int32_t* const table = p_.table + item.request * p_.table_strides[0];
      // Each lane holds one of 32 page numbers, and one of the next 32.
      const auto entry = [&](int window) {
        const int i = window + static_cast<int>(threadIdx.x % 32);
        return i < pages ? table[i * p_.table_strides[1]] : 0;
      };
      int here = entry(index / 32 * 32), next = entry(index / 32 * 32 + 32);
      if constexpr (!kHalves)
        for (int i = 0; i < kQueryPlaces; ++i, ring.next()) load_queries(ring, item, i, leads);
#pragma unroll 1
      for (int t = 0; t < item.count; ++t, ring.skip(At::kUnitsOfTile)) {
        const int page = uniform(__shfl_sync(0xffffffffu, here, index & 31));
        const int token = within * kTokens;
        // A tile's copies start together: device memory delivers faster if all columns of a token
        // are asked for at once.
        wait_for_room(ring);
        for_each_slab(ring, [&](int place, int s, int number) {
          expect_if(leads, full(place, s), kSlabBytes);
          load_tile_if(leads, slab(place, s), maps_.cache, number * At::kColumns, page, token,
                       full(place, s));
        });
        if constexpr (!kWide) {
          expect_if(leads, full(ring.place, kSlabs), kPeBytes);
          load_tile_if(leads, slab(ring.place, kSlabs), maps_.pe, 0, page, token,
                       full(ring.place, kSlabs));
        }
        if (++within < tiles_of_page) continue;
        within = 0;
        if ((++index & 31) == 0) here = next, next = entry(index + 32);
      }
    });
  }
  /// One of two warps that load tiles from pages smaller than a tile: it takes half of each tile's
  /// tokens, four at once, eight lanes of 16 bytes each.
  __device__ void gather(int half) const {
    const int lane = static_cast<int>(threadIdx.x % 32), first = lane / 8, chunk = lane % 8;
    Step ring(kTiles);
    for_each_item([&](const Item& item) {
      if (item.count == 0) return;
      Tokens tokens(p_, item.request, item.length);
      const auto ask = [&](int t) { tokens.ask((item.first + t) * kTokens + 32 * half); };
      ask(0);
#pragma unroll 1
      for (int t = 0; t < item.count; ++t, ring.skip(At::kUnitsOfTile)) {
        tokens.reach();
        if (t + 1 < item.count) ask(t + 1);
        wait_for_room(ring);
#pragma unroll 1
        for (int i = first; i < 32; i += 4) {
          const unsigned char* const from = tokens[i] + chunk * 16;
          const bool is = tokens.is_there(i);
          const int token = 32 * half + i;
          for_each_slab(ring, [&](int place, int s, int number) {
            start_copy(slab(place, s) + tile_offset(token, chunk), from + number * kTileRowBytes,
                       is);
          });
          if (!kWide && chunk < kPeColumns / 16)
            start_copy(slab(ring.place, kSlabs) + narrow_offset(token, chunk), from + kValues, is);
        }
        for_each_slab(ring, [&](int place, int s, int) { arrive_behind_copies(full(place, s)); });
        if (!kWide) arrive_behind_copies(full(ring.place, kSlabs));
      }
    });
  }
  /// Waits until the places of a tile are free.
  __device__ void wait_for_room(Step unit) const {
#pragma unroll
    for (int u = 0; u < At::kUnitsOfTile; ++u, unit.next())
      barrier_wait(empty(unit.place), unit.parity ^ 1);
  }
  /// Calls body(place, its slab, slab of the tile) for each slab of 128 bytes a row of a tile.
  template <class Body>
  __device__ static void for_each_slab(Step unit, Body body) {
#pragma unroll
    for (int number = 0; number < At::kTileSlabs; ++number) {
      body(unit.place, number % At::kPlaceSlabs, number);
      if (number % At::kPlaceSlabs == At::kPlaceSlabs - 1) unit.next();
    }
  }
  /// Loads the queries' columns 256 half ... 256 half + 255 into a place, in slabs of 64 columns of
  /// bf16, and of the last 64 columns the rows 32 half ... 32 half + 31 where k_pe would be.
  __device__ void load_queries(const Step& ring, const Item& item, int half, bool leads) const {
    barrier_wait(empty(ring.place), ring.parity ^ 1);
    const auto load = [&](int s, int after, int slab_number, int row) {
      load_tile_if(leads, slab(ring.place, s) + after, maps_.q, slab_number * kTileColumns,
                   item.request, first_row_ + row, full(ring.place, s));
    };
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      expect_if(leads, full(ring.place, s), kSlabBytes);
      load(s, 0, kSlabs * half + s, 0);
      load(s, kSlabBytes / 2, kSlabs * half + s, kQueryRows);
    }
    expect_if(leads, full(ring.place, kSlabs), kPeBytes);
    load(kSlabs, 0, kValues / kTileColumns, kQueryRows * half);
  }

  // --- Scores ---

  /// The scores' warpgroup.
  __device__ void run_scores(int warp) const {
    if constexpr (kHalves)
      score_halves(warp);
    else
      score_numbers(warp);
    barrier_arrive(scores_done());
  }

  // Products in e4m3: warp w has rows 16 w ... 16 w + 15.
  __device__ void score_numbers(int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = warp * 16 + lane / 4;
    // Causal: `later` last keys of the request belong to queries after the row's, which it does not
    // see; first_later is the largest such number of the block.
    int later[2], first_later = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      later[i] = p_.causal ? max(p_.q_len - 1 - (first_row_ + row + 8 * i) / p_.heads, 0) : 0;
    if (p_.causal) first_later = max(p_.q_len - 1 - first_row_ / p_.heads, 0);
    const float kv_scale = p_.kv_scale != nullptr ? *p_.kv_scale : 1.0f;
    const float signed_scale = p_.scale_log2 * kv_scale;
    const bool counts = warp * 16 < N;  // the other warps' rows do not exist
    const std::uint32_t p_row =
        narrow_offset(warp * 16 + lane % 8, lane / 8);  // for store_matrices()
    Step ring(kTiles), tile(kPs);
    for_each_item([&](const Item& item) {
      float sum[2] = {0, 0}, base[2] = {kNoScore, kNoScore};
      if (item.count > 0) {
        std::uint32_t q[kSteps][4];
        float scale[2];
        convert_queries(q, scale, ring, warp, lane);
#pragma unroll
        // 0 times -infinity would be NaN.
        for (float& s : scale) s = fmaxf(s * fabsf(signed_scale), 1e-30f);
        float S[32];
        start_scores(S, q, ring);
        const auto finish_tile = [&](int t, auto last) {
          constexpr bool ends = decltype(last)::value;
          wait_for_products<0>();
          pin(S);
          ring.next();
          const int first_token = (item.first + t) * kTokens;
          float alpha[2] = {1.0f, 1.0f};
          std::uint32_t p[kTerms][2][4];
          bool grown = false;
          if (counts) {
            if (signed_scale < 0) {
#pragma unroll
              for (float& s : S) s = -s;
            }
            // Only in the last tiles are keys that some of the rows must not see.
            if (first_token + kTokens > item.length - first_later)
              hide(S, item.length - first_token, later, lane);
            float added[2];
            grown = raise(base, alpha, S, scale);
            weigh(p, added, S, scale, base);
#pragma unroll
            for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], alpha[r], added[r]);
          }
          // The next tile's scores are computed while this tile's p is handed over and multiplied.
          if constexpr (!ends) start_scores(S, q, ring);
          barrier_wait(p_empty(tile.place), tile.parity ^ 1);
          if (counts) {
            const std::uint32_t to = base_ + At::kP + tile.place * At::kPBytes + p_row;
#pragma unroll
            for (int i = 0; i < kTerms; ++i)
#pragma unroll
              for (int r = 0; r < 2; ++r)
                store_matrices(to + i * At::kTermBytes + r * 8 * kPeColumns, p[i][r][0], p[i][r][1],
                               p[i][r][2], p[i][r][3]);
            if (lane % 4 == 0) {
              alphas(tile.place)[row] = alpha[0];
              alphas(tile.place)[row + 8] = alpha[1];
            }
            if (lane == 0) this->grown(tile.place)[warp] = grown;
            if constexpr (ends) {
              const float unit = item.split.count == 1 ? kv_scale : At::kPieceUnit;
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                sum[r] = quad_sum(sum[r]);
                // A row that sees no key gets factor 0; a NaN sum stays NaN.
                if (lane % 4 == 0)
                  factors(tile.place)[row + 8 * r] =
                      sum[r] > 0 || sum[r] != sum[r] ? unit / sum[r] : 0.0f;
              }
            }
          }
          publish_to_async();
          barrier_arrive(p_full(tile.place));
          tile.next();
        };
#pragma unroll 1
        for (int t = 0; t + 1 < item.count; ++t) finish_tile(t, std::false_type{});
        finish_tile(item.count - 1, std::true_type{});
      }
      finish_lse(item, sum, base, row, lane);
    });
  }

  /// Queries in e4m3, as the left operands of a tile's products, and what a row's scores must be
  /// multiplied by in turn.
  __device__ void convert_queries(std::uint32_t (&q)[kSteps][4], float (&scale)[2], Step& ring,
                                  int warp, int lane) const {
    const int row = warp * 16 + lane / 4;
    Step second = ring;
    second.next();
    // The first of two words, columns 32 step + 16 half + 4 (lane % 4) and three more, of row + 8
    // r.
    const auto word = [&](int step, int r, int half) {
      const int s = step / 2, chunk = step % 2 * 4 + half * 2 + lane % 4 / 2;
      const int place =
          s < kSlabs || (s == 2 * kSlabs && row < kQueryRows) ? ring.place : second.place;
      const int at = s == 2 * kSlabs ? row % kQueryRows : row;
      return load_shared2(slab(place, s == 2 * kSlabs ? kSlabs : s % kSlabs) +
                          tile_offset(at + 8 * r, chunk) + lane % 2 * 8);
    };
    std::uint32_t most[2] = {0, 0};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step % 2 == 0) {
        const int s = step / 2;
        if (s == 2 * kSlabs) barrier_wait(full(ring.place, kSlabs), ring.parity);
        const Step& at = s < kSlabs ? ring : second;
        barrier_wait(full(at.place, s == 2 * kSlabs ? kSlabs : s % kSlabs), at.parity);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 x = word(step, r, half);
          most[r] = __vmaxu2(most[r], __vmaxu2(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu));
        }
    }
    float up[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      std::uint32_t largest = max(most[r] & 0xffffu, most[r] >> 16);
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      // 448 is 1.75 2^8; bf16 has 7 bits behind the leading one, and 127 for the exponent 0.
      constexpr int kThreeQuarters = 96, kBias = 127;
      const int exponent = static_cast<int>(largest >> 7) - kBias;
      const int power = min(8 - exponent - ((largest & 0x7fu) > kThreeQuarters), 100);
      up[r] = __int_as_float((power + kBias) << 23);
      scale[r] = __int_as_float((kBias - power) << 23);
      if (exponent == kBias + 1) up[r] = scale[r] = __int_as_float(0x7fc00000);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 x = word(step, i % 2, i / 2);
        const float2 low = unpack<Bf16>(x.x), high = unpack<Bf16>(x.y);
        const float u = up[i % 2];
        q[step][i] = e4m3_of(low.x * u, low.y * u, high.x * u, high.y * u);
      }
    __syncwarp();
    for (int i = 0; i < kQueryPlaces; ++i, ring.next()) arrive_if(lane < 2, empty(ring.place));
  }

  /// Starts S = Q K^T over the tile of the ring's place.
  __device__ void start_scores(float (&S)[32], const std::uint32_t (&q)[kSteps][4],
                               const Step& ring) const {
    pin(S);
    start_products();
#pragma unroll
    for (int s = 0; s <= kSlabs; ++s) {
      barrier_wait(full(ring.place, s), ring.parity);
      const std::uint32_t at = slab(ring.place, s);
      const std::uint64_t K = s < kSlabs ? matrix(at) : narrow_matrix(at);
#pragma unroll
      for (int k = 0; k < (s < kSlabs ? 4 : 2); ++k)
        add_product<64>(S, q[4 * s + k], further(K, 32 * k), s + k > 0);
    }
    commit_products();
  }

  /// Sets scores of keys that rows do not see to -infinity: keys from column `there` on, and the
  /// `later` ones before.
  __device__ static void hide(float (&S)[32], int there, const int (&later)[2], int lane) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      if (column >= there - later[i % 4 / 2]) S[i] = -INFINITY;
    }
  }
  /// The largest of the thread's own scores in each of its two rows.
  __device__ static void most_of(float (&most)[2], const float (&S)[32]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(S[2 * r], S[2 * r + 1]);
#pragma unroll
      for (int n = 1; n < 8; ++n)
        most[r] = fmaxf(most[r], fmaxf(S[4 * n + 2 * r], S[4 * n + 2 * r + 1]));
    }
  }
  /// Raises `base` in rows where p would exceed 2^kMostP; alpha becomes the factor for their sums
  /// and outputs so far. Returns whether some row of the warp had to.
  __device__ static bool raise(float (&base)[2], float (&alpha)[2], const float (&S)[32],
                               const float (&scale)[2]) {
    float most[2];
    most_of(most, S);
    if (!__any_sync(0xffffffffu, fmaf(most[0], scale[0], -base[0]) > kMostP ||
                                     fmaf(most[1], scale[1], -base[1]) > kMostP))
      return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float found = quad_max(most[r]) * scale[r];
      if (found - base[r] <= kMostP) continue;
      alpha[r] = exp2_fast(base[r] - (found - kShift));
      base[r] = found - kShift;
    }
    return true;
  }
  /// p = exp2(scale S - base), as sums of two in e4m3: p[i][r][j] has term i of the row's tokens 16
  /// j + 2 (lane % 4), the next, and those 8 further. added[r] is the thread's sum of a row's p.
  __device__ static void weigh(std::uint32_t (&p)[kTerms][2][4], float (&added)[2],
                               const float (&S)[32], const float (&scale)[2],
                               const float (&base)[2]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] = exp2_fast(fmaf(S[8 * j + i / 2 * 4 + 2 * r + i % 2], scale[r], -base[r]));
        const TwoTerms terms(x[0], x[1], x[2], x[3]);
        p[0][r][j] = terms.nearest;
        p[1][r][j] = terms.rest;
        const float four = (x[0] + x[1]) + (x[2] + x[3]);
        added[r] = j == 0 ? four : added[r] + four;
      }
    }
  }

  /// Stores lse of an item's rows: to the output, or to the piece's numbers in powers of two.
  __device__ void finish_lse(const Item& item, const float (&sum)[2], const float (&base)[2],
                             int row, int lane) const {
    const bool divided = item.split.count > 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool seen = sum[r] > 0 || sum[r] != sum[r];
      const float log2_sum = seen ? base[r] + log2f(sum[r]) : -INFINITY;
      const int number = first_row_ + row + 8 * r;
      if (lane % 4 != 0) continue;
      if (divided)
        numbers_at(place_of(item.split, item.piece))[row + 8 * r] = log2_sum;
      else if (number < p_.rows)
        lse(item.request, number) = lse_of(log2_sum);
    }
    if (!divided) return;
    sync_threads_of(6, kWarpgroup);
    if (threadIdx.x == 0) count_up(counter_of(item.split));
  }

  // Products in float16: warp w has tokens 16 w ... 16 w + 15 of a tile, a lane two of them, and of
  // the rows 8 n + 2 (lane % 4) and the next.
  static constexpr int kOwnRows = N / 4;  ///< row number 2 n + i of a lane is row_of(2 n + i)
  /// Of a lane's own rows, the sum of p; kWide: and the sum of p as rounded, by which outputs are
  /// divided: where one key has most of the weight, its rounding then cancels.
  using Sums = float[At::kSumsOfRow][kOwnRows];
  __device__ static int row_of(int own, int lane) {
    return own / 2 * 8 + 2 * (lane % 4) + own % 2;
  }
  __device__ void score_halves(int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float kv_scale = p_.kv_scale != nullptr ? *p_.kv_scale : 1.0f;
    const float signed_scale = p_.scale_log2 * kv_scale;
    const float scale = fmaxf(fabsf(signed_scale), 1e-30f);  // not 0: 0 times -infinity is NaN
    const int first_later = p_.causal ? max(p_.q_len - 1 - first_row_ / p_.heads, 0) : 0;
    Step ring(kTiles), tile(kPs);
    const int first = uniform(share().first);
    std::uint32_t queries_parity = 0;
    for_each_item([&](const Item& item) {
      if (item.count == 0) return finish_rows(item, -1, 0.0f);
      barrier_wait(queries_full(), queries_parity);
      queries_parity ^= 1;
      if (threadIdx.x < N) bases()[threadIdx.x] = 0.0f;
      if constexpr (!kWide) {
        const bool all_halve = item.request == first;
        halve_queries(all_halve ? kWarpgroup + kMergers : kWarpgroup);
        if (all_halve) {
          barrier_arrive(queries_halved());
          barrier_wait(queries_halved(), 0);
        }
      }
      sync_threads_of(7, kWarpgroup);
      const bool defers = kDefers && item.count >= kDeferredTiles;
      Sums sums;
#pragma unroll
      for (auto& sum : sums)
#pragma unroll
        for (float& s : sum) s = 0.0f;
#pragma unroll 1
      for (int t = 0; t < item.count; ++t, ring.skip(At::kUnitsOfTile), tile.next()) {
        float S[N / 2];
        float2 base[N / 8];
        if constexpr (kWide)
          multiply_wide(S, base, ring, warp, lane);
        else
          multiply_halves(S, base, ring, warp, lane, [&] {
            if (defers && t > 0) barrier_arrive(p_full(kPs - 1 - tile.place));
          });
        const bool ends = t + 1 == item.count;
        if (ends) {
          __syncwarp();
          arrive_if(lane == 0, queries_empty());
        }
        const int there = item.length - (item.first + t) * kTokens;
        // Only in the last tiles are keys that some of the rows must not see.
        if (__builtin_expect(there < kTokens + first_later, 0))
          hide_tokens(S, there, signed_scale, warp, lane);
        const float towards = signed_scale < 0 ? -scale : scale;
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            S[4 * n + i] = fmaf(S[4 * n + i], towards, i % 2 == 0 ? -base[n].x : -base[n].y);
        }
        const bool grown = t == 0 || any_exceeds(S);
        barrier_wait(p_empty(tile.place), tile.parity ^ 1);
        if (__builtin_expect(grown, 0)) raise_rows(sums, S, tile.place, t == 0, warp, lane);
        if (lane == 0) this->grown(tile.place)[warp] = grown;
        weigh_rows(sums, S, base_ + At::kP + tile.place * At::kPBytes, warp, lane);
        publish_to_async();
        if (!defers || ends) barrier_arrive(p_full(tile.place));
        if (ends) {  // while the outputs multiply the last p
          share_sums(sums, warp, lane);
          finish_rows(item, tile.place, kv_scale);
        }
      }
    });
  }
  /// Converts the queries from bf16 to float16, in place, and puts each 16 columns into the order
  /// of products. The first `threads` threads of the block call it: those of the outputs, too, have
  /// nothing else to do before a block's first item.
  __device__ void halve_queries(int threads) const {
    const auto half = [](std::uint32_t pair) {
      const float2 x = unpack<Bf16>(pair);
      return pack<Fp16>(x.x, x.y);
    };
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < At::kQuerySlabs * N * 4; i += threads) {
      const int row = i % N, slab_number = i / N / 4;
      unsigned char* const slab = shared_ + At::kQueries + slab_number * At::kQuerySlabBytes;
      auto* const first = reinterpret_cast<uint4*>(slab + tile_offset(row, i / N % 4 * 2));
      auto* const second = reinterpret_cast<uint4*>(slab + tile_offset(row, i / N % 4 * 2 + 1));
      const uint4 a = *first, b = *second;
      *first = make_uint4(half(a.x), half(a.z), half(b.x), half(b.z));
      *second = make_uint4(half(a.y), half(a.w), half(b.y), half(b.w));
    }
    publish_to_async();
  }
  /// S^T = K Q^T over the tile of the ring's place: groups of 64 columns, the next of which is
  /// converted while one is multiplied, and the one after it loaded. Of 16 rows, four sums take
  /// products in turn, since a product that waits for the one before it takes three times as long.
  /// Calls before_last() when all groups but one have been issued.
  template <class Call>
  __device__ void multiply_halves(float (&S)[N / 2], float2 (&base)[N / 8], const Step& ring,
                                  int warp, int lane, Call before_last) const {
    constexpr int kGroups = kWidth / 64, kPairs = 2 * kGroups, kSums = At::kSums;
    constexpr int kHeld = 3;  ///< pairs of products whose operands are in registers
    std::uint32_t K[kHeld][2][4], numbers[2][2][4];
    float sums[kSums][N / 2];
    const int token = warp * 16 + lane % 16;
    const std::uint32_t tile = base_ + ring.place * kTileBytes;
    const std::uint32_t own = tile + tile_offset(token, lane / 16);
    const std::uint32_t own_pe = tile + kSlabs * kSlabBytes + narrow_offset(token, lane / 16);
    const std::uint64_t Q = matrix(uniform(static_cast<int>(query_slab(0))));
    const auto load = [&](int j) {
      if (j % 2 == 0) barrier_wait(full(ring.place, j / 2), ring.parity);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        load_matrices(numbers[j % 2][i], j + 1 == kGroups
                                             ? own_pe ^ i * 32
                                             : (own ^ (j % 2 * 64 + i * 32)) + j / 2 * kSlabBytes);
    };
    load(0);
#pragma unroll
    for (int i = 0; i < kSums; ++i) pin(sums[i]);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (n % 2 == 0 && n / 2 + 1 < kGroups) load(n / 2 + 1);
      if (n >= kHeld) wait_for_products<kHeld - 1>();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const FourNumbers four(numbers[n / 2 % 2][n % 2][i]);
        K[n % kHeld][i / 2][i % 2] = bits_of(four.low);
        K[n % kHeld][i / 2][i % 2 + 2] = bits_of(four.high);
      }
      pin(K[n % kHeld][0]), pin(K[n % kHeld][1]);
      if (n + 1 == kPairs) before_last();
      start_products();
#pragma unroll
      for (int i = 2 * (n % 2); i < 2 * (n % 2) + 2; ++i)
        add_half_product<N, M>(sums[i % kSums], K[n % kHeld][i % 2],
                               further(Q, n / 2 * At::kQuerySlabBytes + i * 32),
                               n / 2 + i / kSums > 0);
      commit_products();
    }
    finish_scores(S, base, sums, lane);
  }
  /// The same over a tile of 16 bits, whose keys are left operands as they are: four sums, one for
  /// each 16 columns of a slab. Two slabs are multiplied while the next one is loaded.
  __device__ void multiply_wide(float (&S)[N / 2], float2 (&base)[N / 8], const Step& ring,
                                int warp, int lane) const {
    constexpr int kHeld = 3;  ///< slabs in registers
    std::uint32_t K[kHeld][4][4];
    float sums[At::kSums][N / 2];
    const std::uint32_t own = tile_offset(warp * 16 + lane % 16, lane / 16);
    const std::uint64_t Q = matrix(uniform(static_cast<int>(query_slab(0))));
    Step unit = ring;
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(sums[i]);
#pragma unroll
    for (int s = 0; s < At::kTileSlabs; ++s) {
      const int of_place = s % At::kPlaceSlabs;
      barrier_wait(full(unit.place, of_place), unit.parity);
      if (s >= kHeld) wait_for_products<kHeld - 1>();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        load_matrices(K[s % kHeld][k], slab(unit.place, of_place) + (own ^ k * 32));
      if (of_place == At::kPlaceSlabs - 1) unit.next();
#pragma unroll
      for (int k = 0; k < 4; ++k) pin(K[s % kHeld][k]);
      start_products();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        add_half_product<N, M>(sums[k], K[s % kHeld][k],
                               further(Q, s * At::kQuerySlabBytes + k * 32), s > 0);
      commit_products();
    }
    finish_scores(S, base, sums, lane);
  }
  /// Adds the sums of a tile's scores when their products have ended, and reads the rows' bases
  /// before.
  __device__ void finish_scores(float (&S)[N / 2], float2 (&base)[N / 8],
                                float (&sums)[At::kSums][N / 2], int lane) const {
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
      base[n] = *reinterpret_cast<const float2*>(bases() + row_of(2 * n, lane));
    wait_for_products<0>();
#pragma unroll
    for (auto& sum : sums) pin(sum);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      S[i] = sums[0][i];
      if constexpr (At::kSums == 4) S[i] = (S[i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    }
  }
  /// Sets scores of keys that rows do not see so that they become -infinity: keys from token
  /// `there` on, and for rows of earlier queries those before it too.
  __device__ void hide_tokens(float (&S)[N / 2], int there, float signed_scale, int warp,
                              int lane) const {
    const float hidden = signed_scale < 0 ? INFINITY : -INFINITY;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      const int number = first_row_ + row_of(own, lane);
      const int later = p_.causal ? max(p_.q_len - 1 - number / p_.heads, 0) : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (warp * 16 + lane / 4 + 8 * i >= there - later)
          S[own / 2 * 4 + 2 * i + own % 2] = hidden;
    }
  }
  /// Whether some p of the tile would exceed 2^kMostP. The whole warpgroup calls it.
  __device__ static bool any_exceeds(const float (&S)[N / 2]) {
    float mosts[4] = {S[0], S[1], S[2], S[3]};
#pragma unroll
    for (int i = 4; i < N / 2; ++i) mosts[i % 4] = fmaxf(mosts[i % 4], S[i]);
    const float most = fmaxf(fmaxf(mosts[0], mosts[1]), fmaxf(mosts[2], mosts[3]));
    std::uint32_t any;
    asm volatile(
        "{ .reg .pred p; setp.gt.f32 p, %1, %2; bar.red.or.pred p, %3, %4, p;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(any)
        : "f"(most), "f"(kMostP), "n"(7), "n"(kWarpgroup)
        : "memory");
    return any != 0;
  }
  /// Of the item, by row.
  __device__ float* bases() const {
    return reinterpret_cast<float*>(shared_ + At::kSum);
  }
  /// The warps' sums of rows [4][64].
  __device__ float* warp_sums(int which) const {
    return bases() + (1 + 4 * which) * kRows;
  }
  /// Reduces a thread's own rows over the eight lanes that have them. Each step halves the rows
  /// that a lane keeps; the lane ends with kKept of them, from the number returned on. A step is a
  /// template argument: as a loop around loops it was not unrolled, and rows lay in local memory.
  static constexpr int kKept = std::max(kOwnRows / 8, 1);
  template <int kStep = 0, class Reduce>
  __device__ static int reduce_rows(float (&of)[kOwnRows], int lane, Reduce reduce) {
    constexpr int kDistance = 16 >> kStep, kHalf = kOwnRows >> (kStep + 1);
    const bool upper = (lane & kDistance) != 0 && kHalf > 0;
#pragma unroll
    for (int i = 0; i < std::max(kHalf, 1); ++i) {
      float low = of[i], high = of[i + kHalf];
      asm("" : "+f"(low), "+f"(high));  // a choice between addresses would put them into memory
      const float mine = upper ? high : low, other = upper ? low : high;
      of[i] = reduce(mine, __shfl_xor_sync(0xffffffffu, other, kDistance));
    }
    int further = 0;
    if constexpr (kStep < 2) further = reduce_rows<kStep + 1>(of, lane, reduce);
    return (upper ? kHalf : 0) + further;
  }
  /// Raises the base of rows where p would exceed 2^kMostP, in an item's first tile of all rows,
  /// and leaves the factors for sums and outputs so far beside p.
  __device__ void raise_rows(Sums& sums, float (&S)[N / 2], int place, bool first, int warp,
                             int lane) const {
    float* const mosts = reinterpret_cast<float*>(shared_ + At::kMost);
    float most_of[kOwnRows];
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      const int i = own / 2 * 4 + own % 2;
      most_of[own] = fmaxf(S[i], S[i + 2]);
    }
    const int kept = reduce_rows(most_of, lane, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
    for (int i = 0; i < kKept; ++i) mosts[warp * kRows + row_of(kept + i, lane)] = most_of[i];
    sync_threads_of(7, kWarpgroup);
    const int row = static_cast<int>(threadIdx.x);
    if (row < N) {
      const float most = fmaxf(fmaxf(mosts[row], mosts[kRows + row]),
                               fmaxf(mosts[2 * kRows + row], mosts[3 * kRows + row]));
      const bool raises = (first || most > kMostP) && most > -INFINITY;
      const float up = raises ? most - kShift : 0.0f;
      alphas(place)[row] = first ? 1.0f : exp2_fast(-up);
      bases()[row] += up;
      mosts[row] = up;
    }
    sync_threads_of(7, kWarpgroup);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 up = *reinterpret_cast<const float2*>(mosts + row_of(2 * n, lane));
      const float2 alpha = *reinterpret_cast<const float2*>(alphas(place) + row_of(2 * n, lane));
#pragma unroll
      for (int i = 0; i < 4; ++i) S[4 * n + i] -= i % 2 == 0 ? up.x : up.y;
#pragma unroll
      for (auto& sum : sums) sum[2 * n] *= alpha.x, sum[2 * n + 1] *= alpha.y;
    }
  }
  /// p = exp2(S), to shared memory as [rows, tokens], and added to the thread's sums.
  __device__ static void weigh_rows(Sums& sums, const float (&S)[N / 2], std::uint32_t to, int warp,
                                    int lane) {
    const std::uint32_t own = to + tile_offset(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
      std::uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const s = S + 4 * (n + i / 2) + i % 2 * 2;
        const float x = exp2_fast(s[0]), y = exp2_fast(s[1]);
        p[i] = pack<M>(x, y);
        sums[0][2 * (n + i / 2)] += x;
        sums[0][2 * (n + i / 2) + 1] += y;
        if constexpr (kWide) {
          const float2 rounded = unpack<M>(p[i]);
          sums[1][2 * (n + i / 2)] += rounded.x;
          sums[1][2 * (n + i / 2) + 1] += rounded.y;
        }
      }
      store_transposed(own + n * 8 * kTileRowBytes, p);
    }
  }
  /// Leaves the warps' sums of rows in shared memory.
  __device__ void share_sums(Sums& sums, int warp, int lane) const {
#pragma unroll
    for (int which = 0; which < At::kSumsOfRow; ++which) {
      const int kept = reduce_rows(sums[which], lane, [](float x, float y) { return x + y; });
#pragma unroll
      for (int i = 0; i < kKept; ++i)
        warp_sums(which)[warp * kRows + row_of(kept + i, lane)] = sums[which][i];
    }
    sync_threads_of(7, kWarpgroup);
  }
  /// Stores lse of an item's rows, one per thread: to the output, or to the piece's numbers in
  /// powers of two; and the factors of its outputs beside the p at `place`. place < 0: the item has
  /// no keys.
  __device__ void finish_rows(const Item& item, int place, float kv_scale) const {
    const bool divided = item.split.count > 1;
    const int row = static_cast<int>(threadIdx.x), number = first_row_ + row;
    if (row < N) {
      const auto sum_of = [&](int which) {
        const float* const sums = warp_sums(which) + row;
        return (sums[0] + sums[kRows]) + (sums[2 * kRows] + sums[3 * kRows]);
      };
      const float whole = place < 0 ? 0.0f : sum_of(0);
      // A row that sees no key gets factor 0; a NaN sum stays NaN.
      const bool seen = whole > 0 || whole != whole;
      const float log2_sum = seen ? bases()[row] + log2f(whole) : -INFINITY;
      if (place >= 0) {
        factors(place)[row] =
            seen ? (divided ? At::kPieceUnit : kv_scale) / (kWide ? sum_of(1) : whole) : 0.0f;
        barrier_arrive(factors_full(place));
      }
      if (divided)
        numbers_at(place_of(item.split, item.piece))[row] = log2_sum;
      else if (number < p_.rows)
        lse(item.request, number) = lse_of(log2_sum);
    }
    if (!divided) return;
    sync_threads_of(6, kWarpgroup);
    if (threadIdx.x == 0) count_up(counter_of(item.split));
  }

  // --- Outputs ---

  /// A thread's outputs, in four products of 64 columns. Of product m, O[m][4 n + i] is row 8 n + 2
  /// (lane % 4) + i % 2, column 64 m + 16 warp + 2 (lane / 4) + i / 2 of the side; kWide: column 64
  /// m + 16 warp + lane / 4 + 8 (i / 2).
  using Outputs = float[kSideTiles][N / 2];

  /// The outputs' warpgroup of a side (columns 256 side ... 256 side + 255).
  __device__ void run_outputs(int side, int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first = uniform(share().first);
    Step ring(kTiles), tile(kPs);
    std::uint32_t ended = 0;  // bit i: the parity of factors_full(i)
    // Lane l reads the 16 bytes of token l (or l + 32) that the warp has in a product of an even
    // number; those of an odd one are 64 bytes away, within the swizzle.
    const std::uint32_t own = 2 * side * kSlabBytes + tile_offset(lane, warp);
    for_each_item([&](const Item& item) {
      Outputs O;
      if (item.count == 0) {
#pragma unroll
        for (int i = 0; i < kSideTiles * N / 2; ++i) O[i / (N / 2)][i % (N / 2)] = 0.0f;
      } else if constexpr (!kHalves) {
        ring.skip(kQueryPlaces);
      } else if (!kWide && item.request == first) {
        barrier_wait(queries_full(), 0);
        halve_queries(kWarpgroup + kMergers);
        barrier_arrive(queries_halved());
      }
      int place = 0;
#pragma unroll 1
      for (int t = 0; t < item.count; ++t) {
        const int seen = item.length - (item.first + t) * kTokens;
        if constexpr (kWide)
          add_wide_tile(O, ring, tile, side, seen, t, warp, lane);
        else if constexpr (kHalves)
          add_tile_of_halves(O, ring, tile, own, side, seen, t, lane);
        else
          add_tile(O, ring, tile, own, side, seen, t, lane);
        place = tile.place;
        if (t + 1 < item.count) barrier_arrive(p_empty(tile.place));
        tile.next();
        ring.skip(At::kUnitsOfTile);
      }
      if (kHalves && item.count > 0) {
        barrier_wait(factors_full(place), ended >> place & 1);
        ended ^= 1u << place;
      }
      if (item.split.count > 1)
        store_piece(O, place, item, side, warp, lane);
      else if constexpr (kWide)
        store_wide(O, place, item, side, warp, lane);
      else
        store_outputs(O, place, item, side, warp, lane);
      if (item.count > 0) barrier_arrive(p_empty(place));
    });
  }
  /// O^T += V^T p^T over a tile, by products in e4m3.
  __device__ void add_tile(Outputs& O, const Step& ring, const Step& tile, std::uint32_t own,
                           int side, int seen, int t, int lane) const {
    std::uint32_t V[2][2][4];
    const std::uint32_t from = base_ + ring.place * kTileBytes + own;
    barrier_wait(full(ring.place, 2 * side), ring.parity);
    load_values(V[0], from, seen, lane);
    load_values(V[1], from ^ 64, seen, lane);
    barrier_wait(p_full(tile.place), tile.parity);
    if (t > 0) rescale(O, tile.place, lane);
    const std::uint64_t P = narrow_matrix(base_ + At::kP + tile.place * At::kPBytes);
    const auto multiply = [&](int m) {
      pin(O[m]);
      pin(V[m % 2][0]), pin(V[m % 2][1]);
      start_products();
#pragma unroll
      for (int i = 0; i < 2 * kTerms; ++i)  // the smaller terms first
        add_product<N>(O[m], V[m % 2][i % 2], further(P, (1 - i / 2) * At::kTermBytes + i % 2 * 32),
                       t + i > 0);
      commit_products();
    };
    multiply(0);
    multiply(1);
    barrier_wait(full(ring.place, 2 * side + 1), ring.parity);
    wait_for_products<1>();
    pin(O[0]);
    load_values(V[0], from + kSlabBytes, seen, lane);
    multiply(2);
    wait_for_products<1>();
    pin(O[1]);
    load_values(V[1], (from + kSlabBytes) ^ 64, seen, lane);
    __syncwarp();
    arrive_if(lane == 0, empty(ring.place));
    multiply(3);
    wait_for_products<0>();
    pin(O[2]), pin(O[3]);
  }
  /// The same by products in float16, of 32 tokens at a time: group i has tokens 32 (i % 2) and on,
  /// and the columns of product i / 2. A group is read while the one before it waits for products.
  __device__ void add_tile_of_halves(Outputs& O, const Step& ring, const Step& tile,
                                     std::uint32_t own, int side, int seen, int t, int lane) const {
    constexpr int kGroups = 2 * kSideTiles;
    std::uint32_t V[2][2][4], pairs[4];
    const std::uint32_t from = base_ + ring.place * kTileBytes + own;
    const auto read = [&](int i) {
      if (i % kSideTiles == 0)
        barrier_wait(full(ring.place, 2 * side + i / kSideTiles), ring.parity);
      load_transposed(pairs,
                      (from ^ i / 2 % 2 * 64) + i / 4 * kSlabBytes + i % 2 * 32 * kSlabColumns);
      if (i + 1 == kGroups) {
        __syncwarp();
        arrive_if(lane == 0 || gathers(), empty(ring.place));
      }
    };
    const std::uint64_t P = matrix(base_ + At::kP + tile.place * At::kPBytes);
    const auto multiply = [&](int i) {
      if (i % 2 == 0) pin(O[i / 2]);
      pin(V[i % 2][0]), pin(V[i % 2][1]);
      start_products();
#pragma unroll
      for (int k = 0; k < 2; ++k)
        add_half_product<N, M>(O[i / 2], V[i % 2][k], further(P, 64 * (i % 2) + 32 * k),
                               t + i % 2 + k > 0);
      commit_products();
    };
    read(0);
    halve(V[0], pairs, seen, lane);
    read(1);
    halve(V[1], pairs, seen - 32, lane);
    read(2);
    barrier_wait(p_full(tile.place), tile.parity);
    if (t > 0) rescale(O, tile.place, lane);
    multiply(0);
    multiply(1);
#pragma unroll
    for (int i = 2; i < kGroups; ++i) {
      wait_for_products<1>();
      halve(V[i % 2], pairs, seen - i % 2 * 32, lane);
      multiply(i);
      if (i + 1 < kGroups) read(i + 1);
    }
    wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < kSideTiles; ++m) pin(O[m]);
  }
  /// The same over a tile of 16 bits: all of the side's values are in registers when p comes, and
  /// their places free again. Not before: copies that start unit by unit, or while more than two
  /// tiles are on their way, take 0.5 to 2 % longer.
  __device__ void add_wide_tile(Outputs& O, const Step& ring, const Step& tile, int side, int seen,
                                int t, int warp, int lane) const {
    std::uint32_t V[kSideTiles][4][4];
    const std::uint32_t own = tile_offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < kSideTiles; ++m) {
      const int s = kSideTiles * side + m;
      Step unit = ring;
      unit.skip(s / At::kPlaceSlabs);
      barrier_wait(full(unit.place, s % At::kPlaceSlabs), unit.parity);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        load_transposed(V[m][k],
                        slab(unit.place, s % At::kPlaceSlabs) + own + k * 16 * kTileRowBytes);
    }
    if (seen < kTokens) {  // their p is 0, and 0 times what lies there (perhaps NaN) must be 0
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = 16 * k + i / 2 * 8 + 2 * (lane % 4);
          const std::uint32_t mask =
              (token < seen ? 0xffffu : 0u) | (token + 1 < seen ? 0xffff0000u : 0u);
#pragma unroll
          for (int m = 0; m < kSideTiles; ++m) V[m][k][i] &= mask;
        }
    }
    barrier_wait(p_full(tile.place), tile.parity);
    __syncwarp();
    Step unit = ring;
#pragma unroll
    for (int u = 0; u < At::kUnitsOfTile; ++u, unit.next())
      arrive_if(lane == 0 || gathers(), empty(unit.place));
    if (t > 0) rescale(O, tile.place, lane);
    const std::uint64_t P = matrix(base_ + At::kP + tile.place * At::kPBytes);
#pragma unroll
    for (int m = 0; m < kSideTiles; ++m) {
      pin(O[m]);
#pragma unroll
      for (int k = 0; k < 4; ++k) pin(V[m][k]);
    }
    start_products();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int m = 0; m < kSideTiles; ++m)
        add_half_product<N, M>(O[m], V[m][k], further(P, 32 * k), t + k > 0);
    commit_products();
    wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < kSideTiles; ++m) pin(O[m]);
  }
  /// V^T of 16 columns and 32 tokens as float16, the left operands of two products, from pairs of
  /// numbers.
  __device__ static void halve(std::uint32_t (&V)[2][4], std::uint32_t (&pairs)[4], int seen,
                               int lane) {
    if (seen < 32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * i + 2 * (lane % 4);
        pairs[i] &= (token < seen ? 0xffffu : 0u) | (token + 1 < seen ? 0xffff0000u : 0u);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const FourNumbers two(bytes_of(pairs[i], pairs[i], 0x3120));
      V[i / 2][i % 2 * 2] = bits_of(two.low);
      V[i / 2][i % 2 * 2 + 1] = bits_of(two.high);
    }
  }
  /// V^T of 16 columns: the left operands of two products, over tokens 0 to 31 and 32 to 63. Tokens
  /// from `seen` on become 0: their p is 0, and 0 times what lies there (perhaps NaN) must be 0.
  __device__ static void load_values(std::uint32_t (&V)[2][4], std::uint32_t from, int seen,
                                     int lane) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      std::uint32_t pairs[4];
      load_transposed(pairs, from + k * 32 * kSlabColumns);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        V[k][i] = bytes_of(pairs[i / 2 * 2], pairs[i / 2 * 2 + 1], i % 2 == 0 ? 0x6420 : 0x7531);
    }
    if (seen >= kTokens) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int token = i / 2 * 16 + 2 * (lane % 4);
      const std::uint32_t mask = (token < seen ? 0xffu : 0u) | (token + 1 < seen ? 0xff00u : 0u) |
                                 (token + 8 < seen ? 0xff0000u : 0u) |
                                 (token + 9 < seen ? 0xff000000u : 0u);
      V[i / 4][i / 2 % 2 * 2 + i % 2] &= mask;
    }
  }
  __device__ void rescale(Outputs& O, int place, int lane) const {
    const int4 changed = *reinterpret_cast<const int4*>(grown(place));
    if ((changed.x | (N > 16 ? changed.y | changed.z | changed.w : 0)) == 0) return;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 alpha = *reinterpret_cast<const float2*>(alphas(place) + 8 * n + 2 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kSideTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) O[m][4 * n + i] *= i % 2 == 0 ? alpha.x : alpha.y;
    }
  }

  __device__ void store_outputs(const Outputs& O, int place, const Item& item, int side, int warp,
                                int lane) const {
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 8 * n + 2 * (lane % 4) + r, number = first_row_ + row;
        if (number >= p_.rows) continue;
        const float factor = item.count > 0 ? factors(place)[row] : 0.0f;
        T* const out = out_of(item.request, number) + column_of(side, 0, warp, lane);
#pragma unroll
        for (int m = 0; m < kSideTiles; ++m)
          *reinterpret_cast<std::uint32_t*>(out + 64 * m) =
              pack<Bf16>(O[m][4 * n + r] * factor, O[m][4 * n + 2 + r] * factor);
      }
  }
  /// The same of products over a tile of 16 bits: each 8 columns of 8 rows are transposed, so that
  /// a lane has two neighbouring columns of row lane / 4.
  __device__ void store_wide(const Outputs& O, int place, const Item& item, int side, int warp,
                             int lane) const {
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 factor = factors_of(place, item, n, lane);
      const int number = first_row_ + 8 * n + lane / 4;
      T* const out = number < p_.rows ? out_of(item.request, number) : nullptr;
#pragma unroll
      for (int m = 0; m < kSideTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const o = O[m] + 4 * n + 2 * half;
          const std::uint32_t pair = turned(o[0] * factor.x, o[1] * factor.y);
          if (out != nullptr)
            *reinterpret_cast<std::uint32_t*>(out + wide_column_of(side, m, warp, half, lane)) =
                pair;
        }
    }
  }
  /// Of an 8 x 8 matrix, lane's column lane / 4 in rows 2 (lane % 4) and the next; returned are row
  /// lane / 4, columns 2 (lane % 4) and the next, in T. Every lane takes part, before any branch.
  __device__ static std::uint32_t turned(float a, float b) {
    std::uint32_t pair = transposed_in_warp(pack<T>(a, b));
    asm volatile("" : "+r"(pair));
    return pair;
  }
  /// Factors of the rows 8 n + 2 (lane % 4) and the next.
  __device__ float2 factors_of(int place, const Item& item, int n, int lane) const {
    return item.count > 0
               ? *reinterpret_cast<const float2*>(factors(place) + 8 * n + 2 * (lane % 4))
               : make_float2(0.0f, 0.0f);
  }
  /// The first of a thread's two neighbouring columns in product m of a side.
  __device__ static int column_of(int side, int m, int warp, int lane) {
    return side * 256 + m * 64 + warp * 16 + lane / 4 * 2;
  }
  __device__ static int wide_column_of(int side, int m, int warp, int half, int lane) {
    return side * 256 + m * 64 + warp * 16 + half * 8 + lane % 4 * 2;
  }
  __device__ T* out_of(int request, int number) const {
    const int query = number / p_.heads, head = number - query * p_.heads;
    return static_cast<T*>(p_.out) + request * p_.out_strides[0] + query * p_.out_strides[1] +
           head * p_.out_strides[2];
  }

  // --- Divided requests ---

  /// Groups of 8 rows that are not all beyond the request's rows.
  __device__ int row_groups() const {
    return min(N / 8, (p_.rows - first_row_ + 7) / 8);
  }
  /// Number of a piece's place in the workspace. A part has two places per block of rows: one for a
  /// later piece (of the part's first request), one for a first piece (of its last request).
  __device__ int place_of(const Split& split, int piece) const {
    return ((split.first_part + piece) * p_.row_blocks + row_block_) * 2 + (piece == 0);
  }
  /// A piece's outputs as vectors of eight float16: [group of 8 rows][side][warp][kPieceVectors]
  /// [lane].
  __device__ uint4* piece_at(int place) const {
    return reinterpret_cast<uint4*>(p_.pieces + std::int64_t{place} * kPieceBytes);
  }
  /// lse of a piece's rows, in powers of two; kWide: from kFewRows on units of O / l [side][warp].
  __device__ float* numbers_at(int place) const {
    return p_.piece_numbers + std::int64_t{place} * kRows;
  }
  __device__ int* counter_of(const Split& split) const {
    return counters[p_.lane][split.first_part * p_.row_blocks + row_block_];
  }
  static constexpr int kGroupVectors = 2 * 4 * kPieceVectors * 32;  ///< vectors of 8 rows

  /// Stores the outputs of a piece.
  __device__ void store_piece(const Outputs& O, int place, const Item& item, int side, int warp,
                              int lane) const {
    const int at = place_of(item.split, item.piece);
    uint4* const to = piece_at(at) + (side * 4 + warp) * kPieceVectors * 32 + lane;
    float unit = 1.0f;
    if constexpr (kWide) {
      unit = unit_of(O, place, item, lane);
      if (lane == 0) numbers_at(at)[kFewRows + side * 4 + warp] = 1.0f / unit;
    }
    const int groups = row_groups();
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      if (n >= groups) break;
      float2 factor = factors_of(place, item, n, lane);
      factor.x *= unit, factor.y *= unit;
      const auto pair = [&](int m, int r) {
        const float f = r == 0 ? factor.x : factor.y;
        const float* const o = O[m] + 4 * n;
        if constexpr (kWide) return pack<Fp16>(o[2 * r] * factor.x, o[2 * r + 1] * factor.y);
        return pack<Fp16>(o[r] * f, o[2 + r] * f);
      };
#pragma unroll
      for (int j = 0; j < kPieceVectors; ++j)
        to[n * kGroupVectors + j * 32] =
            make_uint4(pair(2 * j, 0), pair(2 * j, 1), pair(2 * j + 1, 0), pair(2 * j + 1, 1));
    }
    sync_threads_of(1 + side, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) count_up(counter_of(item.split));
  }

  /// The power of two that brings the largest finite O / l of the warp to between 2^14 and 2^15.
  __device__ float unit_of(const Outputs& O, int place, const Item& item, int lane) const {
    std::uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 factor = factors_of(place, item, n, lane);
#pragma unroll
      for (int m = 0; m < kSideTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = fabsf(O[m][4 * n + i] * (i % 2 == 0 ? factor.x : factor.y));
          if (x < INFINITY) most = max(most, __float_as_uint(x));
        }
    }
    constexpr int kBias = 127, kMantissa = 23, kMostExponent = 2 * kBias - 1;
    const int exponent = static_cast<int>(__reduce_max_sync(0xffffffffu, most) >> kMantissa);
    const int of_unit = min(2 * kBias + 14 - exponent, kMostExponent);
    return __uint_as_float(static_cast<std::uint32_t>(of_unit) << kMantissa);
  }

  /// The scores' first warp: waits until the pieces of all parts are there, and lets the mergers
  /// read them. The last reader resets the counters.
  __device__ void await_pieces() const {
    for_each_divided([&](int, const Split& split, int barrier) {
      const int mine = vectors_of_part(split), readers = (vectors() + mine - 1) / mine;
      if (part_ - split.first_part >= readers) return;
      int* const counter = counter_of(split);
      if (threadIdx.x == 0)
        while (count_of(counter) < kCounted * split.count) {
        }
      arrive_at(barrier, kMergers + 32);
      if (threadIdx.x == 0 && atomicAdd(counter + 1, 1) == readers - 1)
        counter[0] = counter[1] = 0;  // this reader is the last
    });
  }
  /// The outputs' warpgroups: merge this part's share of the divided requests.
  __device__ void merge() const {
    for_each_divided([&](int request, const Split& split, int barrier) {
      const int mine = vectors_of_part(split);
      if ((part_ - split.first_part) * mine >= vectors()) return;
      sync_threads_of(barrier, kMergers + 32);
      barrier_wait(scores_done(), 0);  // merging overwrites memory that the scores have read
      merge(request, split, mine);
    });
  }

 private:
  __device__ bool gathers() const {
    return kHalves && p_.page < kTokens;
  }
  /// Calls body(item) for the block's items. An item of a request without keys has count 0.
  template <class Body>
  __device__ void for_each_item(Body body) const {
    const Share& s = share();
    const int first = uniform(s.first), last = uniform(s.last);
    int length = first <= last ? p_.lengths.of(first) : 0;
#pragma unroll 1
    for (int b = first; b <= last; ++b) {
      Item item;
      item.request = b;
      item.length = uniform(length);
      if (b < last) length = p_.lengths.of(b + 1);  // loaded before this item's work
      const int tiles = (item.length + kTokens - 1) / kTokens;
      item.first = b == first ? uniform(s.first_tile) : 0;
      item.count = max(0, min(tiles, b == last ? uniform(s.end_tile) : tiles) - item.first);
      item.split = b == first ? s.of_first : b == last ? s.of_last : Split{};
      item.piece = part_ - item.split.first_part;
      body(item);
    }
  }
  /// Calls body(request, split, barrier) for the divided requests of this block's share: at most
  /// its first and its last request. Each has a hardware barrier of its own.
  template <class Body>
  __device__ void for_each_divided(Body body) const {
    const Share& s = share();
    if (s.last < s.first) return;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const Split split = i == 0 ? s.of_first : s.of_last;
      if (split.count > 1 && (i == 0 || s.last > s.first))
        body(i == 0 ? s.first : s.last, split, 4 + i);
    }
  }
  /// Vectors of a piece, and the number of them that a part merges (the last parts may have none).
  __device__ int vectors() const {
    return row_groups() * kGroupVectors;
  }
  __device__ int vectors_of_part(const Split& split) const {
    return (vectors() + split.count * 32 - 1) / (split.count * 32) * 32;
  }

  // Merging reuses the shared memory of the ring:
  //   kWeights  float [kMostPieces][64]: by piece and row, lse and then weight
  //   kSums     float [8][kMergers]: sums of sets of threads
  //   kRowsOut  Bf16* [64]: addresses of the rows' outputs
  //   kCopies   uint4 [kSlots][kMergers]: vectors on their way
  static constexpr int kWeights = 0;
  static constexpr int kSums = kWeights + kMostPieces * kRows * 4;
  static constexpr int kRowsOut = kSums + 8 * kMergers * 4;
  static constexpr int kCopies = kRowsOut + kRows * 8;
  static constexpr int kSlots = 16;
  static_assert(kCopies + kSlots * kMergers * 16 <= At::kP);

  /// Merges this part's `mine` vectors of all pieces. If a part has fewer vectors than threads,
  /// several sets of threads take some of the pieces each, and set 0 adds their sums. Each thread
  /// copies the vectors that it adds to shared memory itself, kSlots at once: the loops stay rolled
  /// and many loads are in flight.
  __device__ void merge(int request, const Split& split, int mine) const {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup, lane = thread % 32;
    const int count = split.count;
    const int begin = (part_ - split.first_part) * mine, end = min(vectors(), begin + mine);
    const int sets = mine >= kMergers ? 1 : kMergers / mine;
    const int of_set = sets == 1 ? kMergers : mine;  // threads of a set
    const int set = thread / of_set, first = begin + thread % of_set;
    const std::uint32_t copies = base_ + kCopies + thread * 16;
    int piece = set, vector = set < sets ? first : end;
    const auto copy_some = [&] {
#pragma unroll 1
      for (int i = 0; i < kSlots && vector < end; ++i) {
        start_copy(copies + i * kMergers * 16, piece_at(place_of(split, piece)) + vector, true);
        if ((piece += sets) >= count) piece = set, vector += of_set;
      }
    };
    copy_numbers(split);
    group_copies();
    copy_some();
    wait_for_groups();
    weigh_pieces(request, split);  // while vectors are on their way
    wait_for_copies();

    float sum[8] = {};
    int added = set, at = set < sets ? first : end;
    const float* const weights = reinterpret_cast<const float*>(shared_ + kWeights);
    while (at < end) {
#pragma unroll 1
      for (int i = 0; i < kSlots && at < end; ++i) {
        const uint4 got =
            *reinterpret_cast<const uint4*>(shared_ + kCopies + (i * kMergers + thread) * 16);
        const float* const of_piece = weights + added * kRows;
        float2 weight =
            *reinterpret_cast<const float2*>(of_piece + at / kGroupVectors * 8 + 2 * (lane % 4));
        if constexpr (kWide) {
          const float unit = of_piece[kFewRows + at % kGroupVectors / (kPieceVectors * 32)];
          weight.x *= unit, weight.y *= unit;
        }
        add_vector(sum, weight, got);
        if ((added += sets) < count) continue;
        added = set;
        if (sets == 1) {
          store_merged(at, sum);
#pragma unroll
          for (float& s : sum) s = 0.0f;
        }
        at += of_set;
      }
      if (at >= end) break;
      copy_some();
      wait_for_copies();
    }
    if (sets == 1) return;
    float* const sums = reinterpret_cast<float*>(shared_ + kSums);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j * kMergers + thread] = sum[j];
    sync_threads_of(3, kMergers);
    // Set 0 adds the other sets' sums, in the order of sets.
    if (set > 0 || first >= end) return;
#pragma unroll 1
    for (int other = 1; other < sets; ++other)
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += sums[j * kMergers + other * mine + thread];
    store_merged(first, sum);
  }
  /// Adds a piece's vector, times the weights of its two rows.
  __device__ static void add_vector(float (&sum)[8], float2 weight, const uint4& got) {
    const std::uint32_t pairs[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<Fp16>(pairs[i]);
      add(sum[2 * i], kWide || i % 2 == 0 ? weight.x : weight.y, x.x);
      add(sum[2 * i + 1], !kWide && i % 2 == 0 ? weight.x : weight.y, x.y);
    }
  }
  /// sum += weight x value. The weight of a piece that has seen no key is 0, and its values are 0
  /// too.
  __device__ static void add(float& sum, float weight, float value) {
    sum = fmaf(weight, value, sum);
  }

  /// Copies lse of all pieces to shared memory, and their units.
  __device__ void copy_numbers(const Split& split) const {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    const int quads = kWide ? (kFewRows + 8) / 4 : 2 * row_groups();  // 16-byte chunks of a piece
    const int at_once = kMergers / quads, row = thread % quads * 4;
    if (thread >= at_once * quads) return;
#pragma unroll 1
    for (int piece = thread / quads; piece < split.count; piece += at_once)
      start_copy(base_ + kWeights + (piece * kRows + row) * 4,
                 numbers_at(place_of(split, piece)) + row, true);
  }

  /// Replaces the pieces' lse by weights: the piece's share of the row's softmax sum, times the
  /// scale of outputs; finds the addresses of the rows' outputs; and stores lse.
  __device__ void weigh_pieces(int request, const Split& split) const {
    sync_threads_of(3, kMergers);  // all threads' copies of numbers are complete
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    const int count = split.count;
    float* const weights = reinterpret_cast<float*>(shared_ + kWeights);
    constexpr int kReaders = N == 16 ? 16 : 4;  // threads of a row
    const int row = thread / kReaders, reader = thread % kReaders;
    const bool is = row < 8 * row_groups();
    float most = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int i = reader; i < count && is; i += kReaders)
      most = fmaxf(most, weights[i * kRows + row]);
#pragma unroll 1
    for (int distance = 1; distance < kReaders; distance *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
    if (most == -INFINITY) most = 0.0f;  // no piece has seen a key: all weights are 0
#pragma unroll 1
    for (int i = reader; i < count && is; i += kReaders) {
      const float own = exp2f(weights[i * kRows + row] - most);
      weights[i * kRows + row] = own;
      sum += own;
    }
#pragma unroll 1
    for (int distance = 1; distance < kReaders; distance *= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (is) {
      const bool seen = sum > 0 || sum != sum;
      const float kv_scale = p_.kv_scale != nullptr ? *p_.kv_scale : 1.0f;
      const float share = seen ? kv_scale / At::kPieceUnit / sum : 0.0f;
#pragma unroll 1
      for (int i = reader; i < count; i += kReaders) weights[i * kRows + row] *= share;
      const int number = first_row_ + row;
      if (reader == 0) {
        reinterpret_cast<T**>(shared_ + kRowsOut)[row] =
            number < p_.rows ? out_of(request, number) : nullptr;
        if (number < p_.rows && part_ == split.first_part)
          lse(request, number) = lse_of(seen ? most + log2f(sum) : -INFINITY);
      }
    }
    sync_threads_of(3, kMergers);
  }
  /// Stores the sums of vector number `at` of a piece.
  __device__ void store_merged(int at, const float (&sum)[8]) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int within = at % kGroupVectors, side = within / (kGroupVectors / 2);
    const int vector = within / 32 % kPieceVectors, warp = within / 32 / kPieceVectors % 4;
    T* const* const rows = reinterpret_cast<T**>(shared_ + kRowsOut) + at / kGroupVectors * 8;
    const auto store = [&](int row, int column, std::uint32_t pair) {
      if (T* const out = rows[row]) *reinterpret_cast<std::uint32_t*>(out + column) = pair;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = 2 * vector;
      if constexpr (kWide) {
        const auto row_pair = [&](int j) { return turned(sum[j + 2 * i], sum[j + 2 * i + 1]); };
        const std::uint32_t first = row_pair(0), second = row_pair(4);
        store(lane / 4, wide_column_of(side, m, warp, i, lane), first);
        store(lane / 4, wide_column_of(side, m + 1, warp, i, lane), second);
      } else {
        const int row = 2 * (lane % 4) + i, column = column_of(side, m, warp, lane);
        store(row, column, pack<T>(sum[2 * i], sum[2 * i + 1]));
        store(row, column + 64, pack<T>(sum[4 + 2 * i], sum[5 + 2 * i]));
      }
    }
  }

  __device__ float& lse(int request, int number) const {
    const int query = number / p_.heads, head = number - query * p_.heads;
    return p_
        .lse[request * p_.lse_strides[0] + head * p_.lse_strides[1] + query * p_.lse_strides[2]];
  }
  /// lse as a natural logarithm. A row that sees no key has +infinity, as in FlashMLA.
  __device__ static float lse_of(float log2_sum) {
    return log2_sum == -INFINITY ? INFINITY : log2_sum * kLn2;
  }

  __device__ const Share& share() const {
    return *reinterpret_cast<const Share*>(shared_ + At::kShare);
  }
  __device__ float* alphas(int place) const {
    return reinterpret_cast<float*>(shared_ + At::kAlpha) + place * kRows;
  }
  __device__ float* factors(int place) const {
    return reinterpret_cast<float*>(shared_ + At::kFactors) + place * kRows;
  }
  __device__ int* grown(int place) const {
    return reinterpret_cast<int*>(shared_ + At::kGrown) + place * 4;
  }
  /// Slab s of a place; s = kSlabs: its k_pe.
  __device__ std::uint32_t slab(int place, int s) const {
    return base_ + place * At::kPlaceBytes + s * kSlabBytes;
  }
  __device__ std::uint32_t barrier(int number) const {
    return base_ + At::kBarriers + 8 * number;
  }
  __device__ std::uint32_t full(int place, int s) const {
    return barrier(place * kFullBarriers + s);
  }
  __device__ std::uint32_t empty(int place) const {
    return barrier(kTiles * kFullBarriers + place);
  }
  static constexpr int kPBarriers = kTiles * (kFullBarriers + 1);
  __device__ std::uint32_t p_full(int place) const {
    return barrier(kPBarriers + place);
  }
  __device__ std::uint32_t p_empty(int place) const {
    return barrier(kPBarriers + kPs + place);
  }
  __device__ std::uint32_t factors_full(int place) const {
    return barrier(kPBarriers + 2 * kPs + place);
  }
  __device__ std::uint32_t scores_done() const {
    return barrier(kPBarriers + 3 * kPs);
  }
  __device__ std::uint32_t queries_full() const {
    return barrier(kPBarriers + 3 * kPs + 1);
  }
  __device__ std::uint32_t queries_empty() const {
    return barrier(kPBarriers + 3 * kPs + 2);
  }
  __device__ std::uint32_t queries_halved() const {
    return barrier(kPBarriers + 3 * kPs + 3);
  }

  const Decode& p_;
  const Maps& maps_;
  unsigned char* shared_;
  std::uint32_t base_;
  int part_, row_block_, first_row_;
};

template <int N, class M, class C>
__global__ void __launch_bounds__(kThreads, 1)
    narrow_kernel(const __grid_constant__ Decode p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using At = Layout<N, M, C>;
  const Block<N, M, C> block(p, maps, shared);
  const int warp = uniform(static_cast<int>(threadIdx.x / 32));
  const int group = warp / 4;
  if (threadIdx.x == 0) {
    prefetch_map(maps.q), prefetch_map(maps.cache);
    if (!At::kWide) prefetch_map(maps.pe);
    block.init_barriers();
  }
  block.ask_ahead();
  wait_for_earlier_launch();
  let_the_next_launch_start();
  if (warp == 12) block.find_share();
  __syncthreads();
  if (group == 0) {
    take_registers<At::kScoreRegisters>();
    block.run_scores(warp);
    if (warp == 0) block.await_pieces();
  } else if (group < 3) {
    take_registers<At::kOutputRegisters>();
    block.run_outputs(group - 1, warp % 4);
    block.merge();
  } else {
    give_registers<At::kFeedRegisters>();
    if (At::kHalves && warp == 13) block.load_all_queries();
    if (At::kHalves && p.page < kTokens) {
      if (warp % 2 == 0) block.gather((warp - 12) / 2);
    } else if (warp == 12) {
      block.feed();
    }
  }
}

// --- The host ------------------------------------------------------------------------------------

inline std::int64_t workspace(const char* name, const MlaDecode<Bf16, E4m3>& in) {
  return Grid(name, in).workspace(kRows);
}

/// Describes kColumns bytes of each token from column `first` on, for tiles of 64 tokens, with
/// rows as wide and swizzled as wide.
template <int kColumns>
CUtensorMap bytes_map(const char* name, const TensorView<const E4m3, 3>& cache, std::int64_t first,
                      std::int64_t columns) {
  static const auto encode = [&] {
    cudaDriverEntryPointQueryResult found{};
    void* function = nullptr;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               name);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const auto stride = [&](std::size_t i) {
    return cache.extent(i) <= 1 ? cuuint64_t{16} : static_cast<cuuint64_t>(cache.stride(i));
  };
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(columns),
                                 static_cast<cuuint64_t>(cache.extent(0)),
                                 static_cast<cuuint64_t>(cache.extent(1))};
  const cuuint64_t strides[2] = {stride(0), stride(1)};
  const cuuint32_t box[3] = {kColumns, 1, kTokens}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const auto* const data = reinterpret_cast<const std::uint8_t*>(cache.data_handle()) + first;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<std::uint8_t*>(data), extents,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             kColumns == kSlabColumns ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw CudaError(std::string(name) + ": no tensor map for " + text_of(shape_of(cache)) +
                    ", driver error " + std::to_string(static_cast<int>(status)));
  return map;
}

template <int N, class M, class T, class C>
void start(const char* name, const Decode& p, Maps& maps, const MlaDecode<T, C>& in,
           cudaStream_t stream) {
  constexpr int kSharedBytes = Layout<N, M, C>::kSharedBytes;
  static const auto kernel = [&] {
    const auto found = narrow_kernel<N, M, C>;
    check_cuda(
        cudaFuncSetAttribute(found, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        name);
    return found;
  }();
  maps.q = tile_map(name, rows_of(in), Layout<N, M, C>::kHalves ? N : kQueryRows);
  launch(name, kernel, dim3(static_cast<unsigned>(p.parts * p.row_blocks)), dim3(kThreads),
         kSharedBytes, stream, true, p, maps);
}

/// Starts the decode, with arguments that have been checked, by products of type M. A cache of 16
/// bits has M, pages of whole tiles, and at most kFewRows rows a request.
template <class M, class T, class C>
void decode(const char* name, const MlaDecode<T, C>& in, cudaStream_t stream) {
  const std::int64_t pages = in.cache.extent(0), page = in.cache.extent(1);
  constexpr bool kWide = Layout<kFewRows, M, C>::kWide;
  Decode p = parameters(in, Grid(name, in));
  // From times: a tile takes 0.7 us, of 16 bits 1.3 us.
  p.fewest = root_of_piece(p.rows) / (kWide ? 5 : 4);
  Maps maps{};
  if constexpr (kWide) {
    if (pages > 0 && page >= kTokens)
      maps.cache = latent_map(name,
                              make_view(in.cache.data_handle(), Shape<3>{page, pages, kWidth},
                                        Shape<3>{in.cache.stride(1), in.cache.stride(0), 1}),
                              kTileColumns, kTokens);
  } else if (pages > 0 && page >= kTokens) {
    maps.cache = bytes_map<kSlabColumns>(name, in.cache, 0, kValues);
    maps.pe = bytes_map<kPeColumns>(name, in.cache, kValues, kPeColumns);
  }
  if constexpr (!kWide)
    if (p.rows > kFewRows) return start<kRows, M>(name, p, maps, in, stream);
  start<kFewRows, M>(name, p, maps, in, stream);
}

}  // namespace lockstep::kernels::mla::narrow
