// Decode of multi-head latent attention on tensor cores. Equations:
// reference/attention/mla_attention.hpp.
//
// A request has q_len x H rows (one per query and head), in blocks of 64, and its keys come in
// tiles of 64 tokens, 576 columns wide. A tile is nine slabs [64 tokens, 64 columns] of 8 KiB:
// slabs 0 to 7 are the latent, which is the values too, slab 8 is k_pe ("rope"). Two slabs make a
// unit of the ring. A block of threads computes 64 rows over a run of tiles, its share
// (mla_schedule.cuh); an item is the part of the share that belongs to one request.
//
//   grid   parts x blocks of rows, one block per processor at most; neighbours read the same keys
//   block  4 warpgroups: 0 scores, 1 outputs' columns 0 to 255, 2 columns 256 to 511, 3 feeds
//
//   feeding  Pages of whole tiles, cache of the queries' type: warp 12 loads, by tensor copies, the
//            queries' slabs 0 to 3 (for registers) and then the keys into the ring, unit by unit;
//            slab 8 has places of its own. Warp 13 loads the queries' slabs 4 to 8, which stay in
//            shared memory.
//            Smaller pages: a tile would take many tensor copies, so the lanes of warps 12 and 14
//            copy 16 bytes each (cp.async), and warp 15 makes the copies visible to products.
//            Tokens of 656 bytes: each of the four warps copies a quarter of each tile as it is in
//            memory, a tile ahead, and writes it to the ring as float16 (mla_latents.cuh). Caches
//            in e4m3 with one scale, and those of 16 bits for at most 16 rows, are read by another
//            kernel: mla_narrow.cuh.
//   scores   S = Q K^T, then p = exp2(S - m), rounded, to shared memory. m is the largest score so
//            far, or less by at most kSlack, so outputs are rarely rescaled. Outputs are divided by
//            the sum of the rounded p: where one key has most of the weight, its rounding then
//            cancels (error 1.88e-3; 2.15e-3 without). lse uses the sum of the unrounded p.
//   outputs  O = alpha O + p V, where V are the latent's slabs in the ring; a unit is free again
//            when its own products are done.
//
// Before the earlier launch has ended, all threads of a block prefetch into L2 the queries, page
// numbers and lengths that the block will probably read first.
//
// Divided requests. If several parts share a request, each leaves a piece in device memory: O / l
// in float16 with a factor for each row, and lse. When all pieces are there, the parts merge them,
// each some of the columns, in the order of the parts. Blocks wait for one another there, so all
// blocks of a launch must be resident: the grid has at most one block per processor.
//
// Code that runs once (the schedule, merging) keeps its loops rolled: unrolled, the kernel had 142
// KB of instructions, and short launches took 2 to 4 us longer, since a processor caches some 128
// KB.
#include "kernels/attention/mla_decode.hpp"

#include "kernels/attention/mla_arguments.cuh"
#include "kernels/attention/mla_latents.cuh"
#include "kernels/attention/mla_narrow.cuh"
#include "kernels/attention/softmax_rows.cuh"

namespace lockstep::kernels {
namespace {

using namespace hopper;
using namespace mla;

constexpr const char* kName = "mla_decode";
constexpr int kTokenBytes = 656;
constexpr int kSlabs = kWidth / kTileColumns;      ///< slabs of a tile, and of the queries: 9
constexpr int kHalf = kValues / kTileColumns / 2;  ///< slabs of one side, half the values: 4
constexpr int kSlabBytes = kRows * kTileRowBytes;  ///< 8 KiB
constexpr int kPair = 2;                           ///< slabs of a unit of the ring
constexpr int kUnitBytes = kPair * kSlabBytes;     ///< 16 KiB
constexpr int kTileUnits = 2 * kHalf / kPair;      ///< units of a tile: 4, besides the rope slab
constexpr int kLateUnit = kTileUnits / 2;  ///< a tile's rope slab is loaded before this unit
constexpr int kThreads = 4 * kWarpgroup;
constexpr int kMergers = 2 * kWarpgroup;  ///< threads of the outputs' warpgroups
constexpr int kOutputRegisters = 160;
constexpr int kDeferredTiles = 8;  ///< shorter items wait for bytes, not for products: see Block
constexpr float kSlack = 8;        ///< powers of two by which p may exceed 1
constexpr int kConverters = 4;     ///< warps that convert latents
constexpr int kPeTokens = kTokens / kConverters;  ///< tokens of a tile whose k_pe a converter takes
constexpr int kGatherers = 2;  ///< warps whose lanes copy latents, half of a tile's tokens each

/// Sizes of a block for queries of type T and a cache of type C; kManyRows: see Block.
template <class T, class C, bool kManyRows>
struct Layout {
  static constexpr bool kConverts = !std::is_same_v<T, C>;  ///< tokens of 656 bytes
  static constexpr int kFeedRegisters = kConverts ? 48 : 40;
  static constexpr int kScoreRegisters = kConverts ? 144 : 152;
  // Units of the ring, and places of rope slabs. With many rows, p waits for the next tile's scores
  // (see Block), so a ring of two and a half tiles is worth most. With few rows, three rope places
  // let rope slabs come as early as the others. A cache that is converted needs two whole tiles, so
  // that all of the next one is there in time, more than it needs a second tile of p.
  static constexpr int kUnits = kConverts ? 8 : kManyRows ? 10 : 9;
  static constexpr int kRopes = kConverts || kManyRows ? 1 : 3;
  static constexpr int kPs = kConverts ? 1 : 2;  ///< tiles of p
  /// Number of raw_full barriers: a converter's raw memory, or places that lanes copy to.
  static constexpr int kCopied = kConverts ? kConverters : kUnits + kRopes;

  // Shared memory, by offsets in bytes:
  //
  //   0          the ring: kUnits units
  //   kQueries   slabs 4 to 8 of the queries
  //   kRope      kRopes rope slabs
  //   kP         kPs tiles of p [64 rows, 64 tokens]
  //   kRawUnits  kConverts: for each converter, 64 tokens x 128 numbers of e4m3 as they are in
  //              memory; at kRawScales their scales, at kRawPe k_pe of its 16 tokens
  //   kAlpha     float [kPs][64]: factors of the outputs so far, by row
  //   kTotals    float2 [kPs][64]: factor of the final outputs; lse in powers of two
  //   kBarriers, kShare
  static constexpr int kRawScales = kTokens * kRawColumns;
  static constexpr int kRawPe = kRawScales + kTokens * 4;
  static constexpr int kRawBytes = kConverts ? kRawPe + kPeTokens * kTileRowBytes : 0;
  static constexpr int kQueries = kUnits * kUnitBytes;
  static constexpr int kRope = kQueries + (kSlabs - kHalf) * kSlabBytes;
  static constexpr int kP = kRope + kRopes * kSlabBytes;
  static constexpr int kRawUnits = kP + kPs * kSlabBytes;
  static constexpr int kAlpha = kRawUnits + (kConverts ? kConverters * kRawBytes : 0);
  static constexpr int kTotals = kAlpha + kPs * kRows * 4;
  static constexpr int kBarriers = kTotals + kPs * kRows * 8;
  static constexpr int kBarrierCount = kUnits * (kPair + 1) + 2 * kRopes + 2 + 2 * 2 + 1 + kCopied;
  static constexpr int kShare = kBarriers + 8 * kBarrierCount;
  static constexpr int kBytes = kShare + int{sizeof(Share)};
  static_assert(kBytes <= 232448, "shared memory of a block");
};

constexpr int kCleared = 6;  ///< hardware barrier of the scores; 1 to 5: the outputs and mergers

// A part's piece of a divided request, in device memory.
constexpr int kPieceNumbers = 3 * kRows;  ///< lse in powers of two; factors of both sides

/// Per lane (MlaDecode::lane), and per divided request and block of rows: pieces that are complete,
/// counted by side; readers that are done waiting. 0 between launches.
__device__ int counters[kMlaDecodeLanes][kMostBlocks][2];

/// Arrives once for the whole warp, after all its lanes have come here.
__device__ inline void arrive_of_warp(std::uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

__device__ inline std::uint32_t load_shared(std::uint32_t from) {
  std::uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
__device__ inline uint4 load_shared4(std::uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
__device__ inline void store_shared(std::uint32_t to, std::uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ inline void store_shared4(std::uint32_t to, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
/// Makes the compiler keep x in a register. It would otherwise read the base of shared memory and
/// the thread's number from special registers again and again, at some 30 cycles each.
template <class I>
__device__ inline I kept(I x) {
  asm volatile("" : "+r"(x));
  return x;
}
/// A block of threads.
///
/// kManyRows: several blocks read the same keys, so products take longer than loads. In long items
/// p is then handed to the outputs only before the last slab of the next tile's scores (it is
/// deferred). The outputs multiply it while those scores become the next p; handed over at once,
/// its products would compete with those of the scores, and the tensor cores would idle afterwards.
/// Handed over after the last slab, they would idle until its products are issued.
///
/// kGathers: pages are smaller than a tile.
template <class T, class C, bool kManyRows, bool kGathers>
class Block {
  using At = Layout<T, C, kManyRows>;
  static constexpr bool kConverts = At::kConverts;
  using M = std::conditional_t<kConverts, Fp16, T>;  ///< type of latents and p in products
  static_assert(!kConverts || std::is_same_v<T, Bf16>, "k_pe is bf16 in tokens of 656 bytes");
  static_assert(!(kConverts && kGathers), "raw units have copies of their own");
  static constexpr int kUnits = At::kUnits, kRopes = At::kRopes;
  static constexpr bool kStores = kConverts || kGathers;  ///< units are filled by ordinary stores
  /// Arrivals that say that a unit is filled: the lane that issued its tensor copies, or all lanes
  /// of the warp that publishes stores.
  static constexpr int kFillers = kStores ? 32 : 1;
  /// Arrivals that say that a unit has been used: one lane of each of four warps; or every lane, if
  /// ordinary stores follow, which only an arrival of the reading thread itself orders.
  static constexpr int kUsers = kStores ? kWarpgroup : 4;

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
  ///   full(u, s)        slab s of unit u is filled (one barrier per unit with kStores)
  ///   empty(u)          products with unit u are done: those of the one outputs' warpgroup whose
  ///                     columns it holds, after the scores'; or the scores have read queries from
  ///                     it
  ///   rope_full(i), rope_empty(i)      the same for rope slabs, which only the scores read
  ///   queries_full, queries_empty      slabs 4 to 8 of the queries
  ///   p_full(i), p_empty(i)            a tile of p, with alphas and totals
  ///   scores_done       the scores have finished all items, so that merging may use their memory
  ///   raw_full(i)       lanes have copied a place of the ring (kGathers), or a converter's raw
  ///                     memory is loaded (kConverts)
  __device__ void init_barriers() const {
    for (int u = 0; u < kUnits; ++u) {
      for (int s = 0; s < kPair; ++s) barrier_init(barrier(u * kPair + s), kFillers);
      barrier_init(empty(u), kUsers);
    }
    for (int i = 0; i < kRopes; ++i) {
      barrier_init(rope_full(i), kConverts ? kWarpgroup : kFillers);
      barrier_init(rope_empty(i), 4);
    }
    barrier_init(queries_full(), 1);
    barrier_init(queries_empty(), 4);
    // Each thread that reads or writes its own values beside p arrives on the barrier itself; no
    // lane arrives for its warp.
    for (int i = 0; i < 2; ++i) {
      barrier_init(p_full(i), kRows / 2);
      barrier_init(p_empty(i), 2 * kWarpgroup);
    }
    barrier_init(scores_done(), kWarpgroup);
    for (int i = 0; kStores && i < At::kCopied; ++i) {
      // Gathering, and converting small pages: all lanes copy. Converting whole tiles: one lane
      // issues tensor copies, and all lanes copy scales.
      barrier_init(raw_full(i), kGathers ? 32 * kGatherers : p_.page % kTokens == 0 ? 33 : 32);
    }
    publish_barriers();
  }

  /// Prefetches into L2 the queries, page numbers and lengths that this block probably reads first.
  /// It runs before wait_for_earlier_launch(), and guesses that shares are equal counts of
  /// requests.
  __device__ void ask_ahead() const {
    const int b = static_cast<int>(std::int64_t{part_} * p_.lengths.count / p_.parts);
    const auto ask = [](const void* address) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
    };
    const int thread = static_cast<int>(threadIdx.x);
    const auto* const q = static_cast<const unsigned char*>(p_.q) + b * p_.q_strides[0];
    const int rows = min(kRows, p_.rows - first_row_);
#pragma unroll 1
    for (int i = thread; i < rows * kSlabs; i += kThreads)
      ask(q + (first_row_ + i / kSlabs) * p_.q_strides[1] + i % kSlabs * kTileRowBytes);
    constexpr int kOfLine = 32;
    if (thread * kOfLine < p_.lengths.count)
      ask(p_.lengths.data + thread * kOfLine * p_.lengths.stride);
    const int blocks = min(p_.lengths.longest / p_.page, 32 * kOfLine);
    const int entry = (thread - kWarpgroup) * kOfLine;
    if (0 <= entry && entry < blocks)
      ask(p_.table + b * p_.table_strides[0] + entry * p_.table_strides[1]);
  }

  /// One warp: finds the block's share and leaves it in shared memory.
  __device__ void find_share() const {
    const Share share = Scheduler(p_.lengths, p_.parts, part_).share(p_.fewest);
    if (threadIdx.x % 32 == 0) *reinterpret_cast<Share*>(shared_ + At::kShare) = share;
  }

  // --- Feeding ---

  /// One warp: loads slabs 4 to 8 of the queries of all items; they stay in shared memory.
  __device__ void load_queries() const {
    std::uint32_t parity = 1;
    for_each_item([&](const Item& item) {
      if (item.count == 0) return;
      if (threadIdx.x % 32 == 0) load_queries(item, parity);
      parity ^= 1;
    });
  }
  __device__ void load_queries(const Item& item, std::uint32_t parity) const {
    barrier_wait(queries_empty(), parity);
    barrier_expect(queries_full(), (kSlabs - kHalf) * kSlabBytes);
    for (int s = kHalf; s < kSlabs; ++s)
      load_tile(base_ + At::kQueries + (s - kHalf) * kSlabBytes, maps_.q, s * kTileColumns,
                item.request, first_row_, queries_full());
  }

  /// Loads slabs 0 to 3 of an item's queries into units of the ring, from which the scores load
  /// them into registers.
  __device__ void load_first_queries(Step& ring, const Item& item, bool leads) const {
    for (int slab = 0; slab < kHalf; slab += kPair, ring.next()) {
      barrier_wait(empty(ring.place), ring.parity ^ 1);
#pragma unroll
      for (int s = 0; s < kPair; ++s) {
        expect_if(leads, full(ring.place, s), kSlabBytes);
        load_tile_if(leads, unit(ring.place) + s * kSlabBytes, maps_.q, (slab + s) * kTileColumns,
                     item.request, first_row_, full(ring.place, s));
      }
    }
  }

  /// Loads one such unit where the lanes of a warp fill units (kStores): one lane issues the
  /// copies, the others only arrive.
  __device__ void load_query_unit(int place, int slab, const Item& item, bool leads) const {
    if (!leads) return barrier_arrive(full(place, 0));
    barrier_expect(full(place, 0), kUnitBytes);
    for (int s = 0; s < kPair; ++s)
      load_tile(unit(place) + s * kSlabBytes, maps_.q, (slab + s) * kTileColumns, item.request,
                first_row_, full(place, 0));
  }

  /// The page numbers of a request, loaded 32 to 64 ahead: each lane of a warp holds one of the
  /// current 32 and one of the next.
  class PageNumbers {
   public:
    __device__ PageNumbers(const Decode& p, const Item& item, int first)
        : p_(p),
          table_(p.table + item.request * p.table_strides[0]),
          pages_((item.length + p.page - 1) / p.page),
          window_(first / 32 * 32),
          here_(entry(window_)),
          next_(entry(window_ + 32)) {}
    __device__ int count() const { return pages_; }
    /// Moves on to `page`, at most 32 after the last one. All lanes of the warp pass the same page.
    __device__ void reach(int page) {
      if (page < window_ + 32) return;
      window_ += 32;
      here_ = next_;
      next_ = entry(window_ + 32);
    }
    /// The number of a page among the 32 reached; each lane may ask for another page.
    __device__ int operator[](int page) const {
      return __shfl_sync(0xffffffffu, here_, (page - window_) & 31);
    }

   private:
    __device__ int entry(int window) const {
      const int i = window + static_cast<int>(threadIdx.x % 32);
      return i < pages_ ? table_[i * p_.table_strides[1]] : 0;
    }
    const Decode& p_;
    const std::int32_t* table_;
    int pages_, window_, here_, next_;
  };

  /// One warp: loads all tiles, from pages of whole tiles. All lanes run the loop and one issues
  /// the copies. If one lane ran it alone, the compiler would not know its arguments to be uniform;
  /// that takes three times the instructions, and feeding would take longer than computing.
  ///
  /// With few rows, loads take longer than products. Then a tile's copies start together, once all
  /// its units are free: device memory delivers faster if all columns of a token are asked for at
  /// once.
  __device__ void load_whole_tiles() const {
    const bool leads = elected();
    const int tiles_of_page = p_.page / kTokens;
    Step ring(kUnits), rope(kRopes);
    for_each_item([&](const Item& item) {
      if (item.count == 0) return;
      int index = item.first / tiles_of_page, within = item.first - index * tiles_of_page;
      PageNumbers numbers(p_, item, index);
      load_first_queries(ring, item, leads);
#pragma unroll 1
      for (int t = 0; t < item.count; ++t) {
        const int page = uniform(numbers[index]);
        const int token = within * kTokens;
        const auto load = [&](std::uint32_t to, int slab, std::uint32_t barrier) {
          load_tile_if(leads, to, maps_.cache, slab * kTileColumns, page, token, barrier);
        };
        if constexpr (!kManyRows) {
          Step unit_of_tile = ring;
#pragma unroll
          for (int u = 0; u < kTileUnits; ++u, unit_of_tile.next())
            barrier_wait(empty(unit_of_tile.place), unit_of_tile.parity ^ 1);
        }
#pragma unroll
        for (int u = 0; u < kTileUnits; ++u, ring.next()) {
          if (u == kLateUnit) {
            barrier_wait(rope_empty(rope.place), rope.parity ^ 1);
            expect_if(leads, rope_full(rope.place), kSlabBytes);
            load(rope_at(rope.place), 2 * kHalf, rope_full(rope.place));
            rope.next();
          }
          if constexpr (kManyRows) barrier_wait(empty(ring.place), ring.parity ^ 1);
#pragma unroll
          for (int s = 0; s < kPair; ++s) {
            expect_if(leads, full(ring.place, s), kSlabBytes);
            load(unit(ring.place) + s * kSlabBytes, slab_of(u) + s, full(ring.place, s));
          }
        }
        if (++within < tiles_of_page) continue;
        within = 0;
        numbers.reach(++index);
      }
    });
  }

  /// One of two warps that load tiles from pages smaller than a tile: it takes half of each tile's
  /// tokens. Eight lanes copy a token's 128 bytes of a slab. publish_copies() makes them visible.
  __device__ void gather(int half) const {
    const int lane = static_cast<int>(threadIdx.x % 32), first = lane / 8;
    const std::uint32_t to_row = (32 * half + first) * kTileRowBytes;
    const std::uint32_t to[2] = {to_row + ((lane % 8 ^ first) << 4),
                                 to_row + ((lane % 8 ^ first ^ 4) << 4)};
    constexpr int kLaneRows = 8;  // a lane copies of every fourth token of the half
    Step ring(kUnits), rope(kRopes);
    for_each_item([&](const Item& item) {
      if (item.count == 0) return;
      for (int slab = 0; slab < kHalf; slab += kPair, ring.next()) {
        barrier_wait(empty(ring.place), ring.parity ^ 1);
        __syncwarp();
        // Both warps arrive for 16 lanes. A warp that did not would not hold back the unit's next
        // phases; it could fall two phases of `empty` behind, and wait for ever.
        if (lane / 16 == half) load_query_unit(ring.place, slab, item, lane == 0);
      }
      Tokens tokens(p_, item.request, item.length);
      const auto ask = [&](int t) { tokens.ask(t * kTokens + 32 * half); };
      const int last = item.first + item.count;
      ask(item.first);
#pragma unroll 1
      for (int t = item.first; t < last; ++t) {
        tokens.reach();
        const unsigned char* rows[kLaneRows];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) rows[i] = tokens[4 * i + first] + lane % 8 * 16;
        if (t + 1 < last) ask(t + 1);
        const auto start = [&](std::uint32_t tile, int slab) {
#pragma unroll
          for (int i = 0; i < kLaneRows; ++i)
            start_copy(tile + to[i % 2] + i * 4 * kTileRowBytes, rows[i] + slab * kTileRowBytes,
                       tokens.is_there(4 * i + first));
        };
#pragma unroll
        for (int u = 0; u < kTileUnits; ++u, ring.next()) {
          if (u == kLateUnit) {
            barrier_wait(rope_empty(rope.place), rope.parity ^ 1);
            start(rope_at(rope.place), 2 * kHalf);
            arrive_behind_copies(raw_full(kUnits + rope.place));
            rope.next();
          }
          barrier_wait(empty(ring.place), ring.parity ^ 1);
          for (int s = 0; s < kPair; ++s) start(unit(ring.place) + s * kSlabBytes, slab_of(u) + s);
          arrive_behind_copies(raw_full(ring.place));
        }
      }
    });
  }
  /// One warp: waits for the lanes' copies to each place, makes them visible to products (they
  /// count as ordinary stores), and arrives on the place's `full` barrier.
  __device__ void publish_copies() const {
    Step ring(kUnits), rope(kRopes);
    // Bit per place: parity of raw_full. Queries' units use no raw_full, so `ring` cannot tell it.
    std::uint32_t parities = 0;
    for_each_item([&](const Item& item) {
      if (item.count > 0) ring.skip(kHalf / kPair);
      for (int t = 0; t < item.count; ++t)
        for (int u = 0; u < kTileUnits; ++u, ring.next()) {
          if (u == kLateUnit) {
            barrier_wait(raw_full(kUnits + rope.place), rope.parity);
            publish_to_async();
            barrier_arrive(rope_full(rope.place));
            rope.next();
          }
          barrier_wait(raw_full(ring.place), parities >> ring.place & 1);
          parities ^= 1u << ring.place;
          publish_to_async();
          barrier_arrive(full(ring.place, 0));
        }
    });
  }

  // --- Feeding with latents in e4m3 ---

  /// One of four warps that convert a cache in e4m3. A warp fills every fourth place of the ring,
  /// so one unit of each tile. These are always the same places: waits by parity require that a
  /// warp has seen the previous phase of the place. The unit's numbers are copied as they are in
  /// memory, a tile ahead, to raw memory of the warp's own. Of rope slabs each warp converts a
  /// quarter of the tokens.
  __device__ void convert(int warp) const {
    if (p_.page % kTokens == 0)
      convert<RawTiles>(warp);
    else
      convert<RawTokens>(warp);
  }
  template <class Raw>
  __device__ void convert(int warp) const {
    static_assert(!kConverts || kUnits % kConverters == 0, "a place has one warp");
    const int lane = kept(static_cast<int>(threadIdx.x % 32));
    const std::uint32_t base = kept(base_);
    const auto at = [&](std::uint32_t address) { return address - base_ + base; };
    Step ring(kUnits), rope(kRopes);
    std::uint32_t queries_parity = 1, raw_parity = 0;
    for_each_item([&](const Item& item) {
      if (item.count == 0) return;
      // The warp's unit of a tile depends on the places that the queries' units take before it.
      const int unit_number = (warp - ring.place - kHalf / kPair) & (kConverters - 1);
      Raw raw(*this, base, item, warp, unit_number, lane);
      raw.load_unit();
      raw.load_pe();
      if (warp == 0 && lane == 0) load_queries(item, queries_parity);
      queries_parity ^= 1;
      for (int slab = 0; slab < kHalf; slab += kPair, ring.next()) {
        if (ring.place % kConverters != warp) continue;
        barrier_wait(at(empty(ring.place)), ring.parity ^ 1);
        load_query_unit(ring.place, slab, item, lane == 0);
      }
      ring.skip(unit_number);
#pragma unroll 1
      for (int t = 0; t < item.count; ++t) {
        const bool ends = t + 1 == item.count;
        barrier_wait(at(raw_full(warp)), raw_parity);
        raw_parity ^= 1;
        const bool in_halves = prepare_scales(lane, base + raw_at(warp) + At::kRawScales);
        barrier_wait(at(empty(ring.place)), ring.parity ^ 1);
        convert_unit(lane, base + raw_at(warp), at(unit(ring.place)), in_halves);
        if (ends) clear_unit(lane, at(unit(ring.place)), item.length - (item.first + t) * kTokens);
        publish_to_async();
        barrier_arrive(at(full(ring.place, 0)));
        __syncwarp();  // all lanes have read the raw unit, which is overwritten now
        if (!ends) raw.load_unit();
        barrier_wait(at(rope_empty(rope.place)), rope.parity ^ 1);
        copy_pe(lane, base + raw_at(warp) + At::kRawPe,
                at(rope_at(rope.place)) + warp * kPeTokens * kTileRowBytes);
        publish_to_async();
        barrier_arrive(at(rope_full(rope.place)));
        __syncwarp();
        if (!ends) raw.load_pe();
        rope.next();
        ring.skip(ends ? kTileUnits - unit_number : kTileUnits);
      }
    });
  }

  /// A converter's loads into its raw memory. load_unit() loads the warp's unit of the next tile,
  /// load_pe(), called after it, the warp's quarter of that tile's k_pe. This one is for pages of
  /// whole tiles, by tensor copies.
  class RawTiles {
   public:
    __device__ RawTiles(const Block& block, std::uint32_t, const Item& item, int warp,
                        int unit_number, int)
        : block_(block),
          table_(block.p_.table + item.request * block.p_.table_strides[0]),
          pages_((item.length + block.p_.page - 1) / block.p_.page),
          warp_(warp),
          group_(slab_of(unit_number) / kPair),
          leads_(elected()) {
      const int tiles_of_page = block_.p_.page / kTokens;
      index_ = item.first / tiles_of_page;
      within_ = item.first - index_ * tiles_of_page;
      ask_for_pages();
    }
    __device__ void load_unit() {
      page_ = uniform(__shfl_sync(0xffffffffu, window_, index_ & 31));
      token_ = uniform(within_ * kTokens);
      const std::uint32_t filled = block_.raw_full(warp_);
      expect_if(leads_, filled, kTokens * kRawColumns + kPeTokens * kTileRowBytes);
      load_tile_if(leads_, block_.base_ + raw_at(warp_), block_.maps_.cache, group_ * kRawColumns,
                   page_, token_, filled);
      const bool is = 0 <= page_ && page_ < block_.p_.pages;
      const int lane = static_cast<int>(threadIdx.x % 32);
      const unsigned char* const first = block_.p_.cache + page_ * block_.p_.cache_strides[0] +
                                         (token_ + lane) * block_.p_.cache_strides[1] +
                                         kScaleOffset + group_ * 4;
      const std::uint32_t to = block_.base_ + raw_at(warp_) + At::kRawScales + lane * 4;
      start_copy4(to, first, is);
      start_copy4(to + 32 * 4, first + 32 * block_.p_.cache_strides[1], is);
      arrive_behind_copies(filled);
      if (++within_ < block_.p_.page / kTokens) return;
      within_ = 0;
      if ((++index_ & 31) == 0) ask_for_pages();
    }
    __device__ void load_pe() const {
      load_tile_if(leads_, block_.base_ + raw_at(warp_) + At::kRawPe, block_.maps_.pe, 0, page_,
                   token_ + warp_ * kPeTokens, block_.raw_full(warp_));
    }

   private:
    /// Loads the next 32 page numbers, one per lane.
    __device__ void ask_for_pages() {
      const int i = index_ / 32 * 32 + static_cast<int>(threadIdx.x % 32);
      window_ = i < pages_ ? table_[i * block_.p_.table_strides[1]] : 0;
    }
    const Block& block_;
    const std::int32_t* table_;
    int pages_, warp_, group_;
    bool leads_;
    int index_, within_, window_, page_ = 0, token_ = 0;
  };

  /// The same loads from pages smaller than a tile, by copies of 16 bytes per lane.
  class RawTokens {
   public:
    __device__ RawTokens(const Block& block, std::uint32_t base, const Item& item, int warp,
                         int unit_number, int lane)
        : block_(block),
          base_(base),
          halves_{{block.p_, item.request, item.length}, {block.p_, item.request, item.length}},
          next_(item.first),
          warp_(warp),
          group_(slab_of(unit_number) / kPair),
          lane_(lane) {
      ask();
    }
    __device__ void load_unit() {
      halves_[0].reach(), halves_[1].reach();
      ++next_;
      ask();  // tokens after the request's end have no page
      const std::uint32_t to = base_ + raw_at(warp_);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy<kRawColumns, 32>(to + i * 32 * kRawColumns, halves_[i], 0, group_ * kRawColumns);
      for (int i = 0; i < 2; ++i)
        halves_[i].copy_own(to + At::kRawScales + (32 * i + lane_) * 4, kScaleOffset + group_ * 4);
    }
    __device__ void load_pe() const {
      copy_quarter(base_ + raw_at(warp_) + At::kRawPe);
      arrive_behind_copies(at(block_.raw_full(warp_)));
    }

   private:
    __device__ void ask() {
      halves_[0].ask(next_ * kTokens);
      halves_[1].ask(next_ * kTokens + 32);
    }
    /// Copies kBytes bytes from `column` on of each of kCount tokens, from number `first` of
    /// `tokens` on, one after the other to `to`.
    template <int kBytes, int kCount>
    __device__ void copy(std::uint32_t to, const Tokens<Decode>& tokens, int first,
                         int column) const {
      constexpr int kChunks = kBytes / 16, kAtOnce = 32 / kChunks;
      const int row = lane_ / kChunks, byte = lane_ % kChunks * 16;
#pragma unroll
      for (int i = 0; i < kCount; i += kAtOnce)
        start_copy(to + i * kBytes + lane_ * 16, tokens[first + i + row] + column + byte,
                   tokens.is_there(first + i + row));
    }
    __device__ void copy_quarter(std::uint32_t to) const {
      const int first = warp_ % 2 * kPeTokens;
      if (warp_ < 2)  // an index would put both halves into memory
        copy<kTileRowBytes, kPeTokens>(to, halves_[0], first, kPeOffset);
      else
        copy<kTileRowBytes, kPeTokens>(to, halves_[1], first, kPeOffset);
    }
    __device__ std::uint32_t at(std::uint32_t address) const {
      return address - block_.base_ + base_;
    }
    const Block& block_;
    std::uint32_t base_;
    Tokens<Decode> halves_[2];
    int next_, warp_, group_, lane_;
  };

  /// If float16 holds the scales of all 64 tokens of a unit, replaces them by HalfScale's bits and
  /// returns true; otherwise leaves them as float32. A lane has two of them.
  __device__ static bool prepare_scales(int lane, std::uint32_t scales) {
    const std::uint32_t own = scales + lane * 4, other = own + 32 * 4;
    const float a = __uint_as_float(load_shared(own)), b = __uint_as_float(load_shared(other));
    if (!__all_sync(0xffffffffu, HalfScale::holds(a) && HalfScale::holds(b))) return false;
    store_shared(own, HalfScale::bits(a));
    store_shared(other, HalfScale::bits(b));
    __syncwarp();
    return true;
  }

  /// Converts 128 numbers of each of 64 tokens to two slabs of float16. A lane takes 8 numbers of
  /// every other token. Its loads run one round ahead: shared memory, which products keep busy, is
  /// almost all it waits for, and the compiler would not move the loads before the stores.
  __device__ static void convert_unit(int lane, std::uint32_t raw, std::uint32_t to,
                                      bool in_halves) {
    const int first = lane / 16, chunk = lane % 16;
    const std::uint32_t from = raw + lane * 8;
    const std::uint32_t scales = raw + At::kRawScales + first * 4;
    constexpr int kAtOnce = 4;  // pairs of tokens per round; the swizzle repeats after 8 tokens
    std::uint32_t at = to + chunk / 8 * kSlabBytes + tile_offset(first, chunk % 8);
    uint2 numbers[kAtOnce];
    std::uint32_t scale[kAtOnce];
    const auto load = [&](int i, int after) {
      numbers[i] = load_shared2(from + after * kRawColumns + i * 2 * kRawColumns);
      scale[i] = load_shared(scales + after * 4 + i * 8);
    };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load(i, 0);
#pragma unroll 1
    for (int token = 2 * kAtOnce; token <= kTokens; token += 2 * kAtOnce) {
      const int after = token % kTokens;  // the last round loads the first tokens again, unused
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        uint4 wide;
        const auto scaled = [&](auto by) {
          wide = widened(numbers[i], [&](__half2 x) { return by.times(x); });
        };
        in_halves ? scaled(HalfScale(scale[i])) : scaled(FloatScale(scale[i]));
        load(i, after);
        store_shared4((at ^ i % 4 * 32) + i * 2 * kTileRowBytes, wide);
      }
      at += 2 * kAtOnce * kTileRowBytes;
    }
  }
  /// Zeroes the unit's values from token `seen` on; see clear_values(). Each lane zeroes places
  /// that it has just written itself, so no barrier is needed.
  __device__ static void clear_unit(int lane, std::uint32_t to, int seen) {
    const int first = lane / 16, chunk = lane % 16;
#pragma unroll 1
    for (int token = first; token < kTokens; token += 2)
      if (token >= seen)
        store_shared4(to + chunk / 8 * kSlabBytes + tile_offset(token, chunk % 8),
                      make_uint4(0, 0, 0, 0));
  }
  /// Writes the warp's quarter of the rope slab.
  __device__ static void copy_pe(int lane, std::uint32_t raw, std::uint32_t to) {
    constexpr int kSteps = kPeTokens / 4;
    const std::uint32_t at = to + tile_offset(lane / 8, lane % 8);
    uint4 numbers[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) numbers[i] = load_shared4(raw + (lane + i * 32) * 16);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      store_shared4((at ^ i % 2 * 64) + i * 4 * kTileRowBytes, numbers[i]);
  }

  /// Converts the query slabs in shared memory from T to M, the type of the products. Called by the
  /// scores warpgroup.
  __device__ void convert_queries() const {
    constexpr int kSlabsOfM = kSlabs - kHalf - 1;  // that of k_pe stays
    uint4* const slabs = reinterpret_cast<uint4*>(shared_ + At::kQueries);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kSlabsOfM * kSlabBytes / 16; i += kWarpgroup) {
      uint4 x = slabs[i];
      x.x = as_multiplied(x.x), x.y = as_multiplied(x.y);
      x.z = as_multiplied(x.z), x.w = as_multiplied(x.w);
      slabs[i] = x;
    }
    publish_to_async();
    sync_threads_of(kCleared, kWarpgroup);
  }
  /// A pair of T as a pair of M.
  __device__ static std::uint32_t as_multiplied(std::uint32_t pair) {
    const float2 x = unpack<T>(pair);
    return pack<M>(x.x, x.y);
  }

  /// slab_of(unit) is the first slab of a tile's unit. kBySide: units alternate between the sides
  /// (slabs 0, 4, 2, 6), the order in which the outputs finish them; that serves many rows and
  /// small rings. Otherwise units come in the order of memory (0, 2, 4, 6), which loads fastest.
  /// kSideStep: units from side 0's first unit to side 1's; kSecondStep: from a side's first to its
  /// second.
  static constexpr bool kBySide = kManyRows || kConverts;
  static constexpr int kSideStep = kBySide ? 1 : 2, kSecondStep = kBySide ? 2 : 1;
  __device__ static constexpr int slab_of(int unit) {
    return kBySide ? unit % 2 * kHalf + unit / 2 * kPair : unit * kPair;
  }

  // --- Scores ---

  /// The scores' warpgroup; warp w has rows 16 w ... 16 w + 15.
  __device__ void run_scores(int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = warp * 16 + lane / 4;
    // Causal: `later` last keys of the request belong to queries after the row's, which it does not
    // see; first_later is the largest such number of the block.
    int later[2], first_later = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      later[i] = p_.causal ? max(p_.q_len - 1 - (first_row_ + row + 8 * i) / p_.heads, 0) : 0;
    if (p_.causal) first_later = max(p_.q_len - 1 - first_row_ / p_.heads, 0);
    const float scale = fmaxf(fabsf(p_.scale_log2), 1e-30f);  // not 0: 0 times -infinity is NaN
    Step ring(kUnits), rope(kRopes), tile(At::kPs);
    std::uint32_t queries_parity = 0;
    for_each_item([&](const Item& item) {
      if (item.count == 0) return;
      std::uint32_t q[kHalf][4][4];
#pragma unroll
      for (int s = 0; s < kHalf; ++s) {
        barrier_wait(full(ring.place, s % kPair), ring.parity);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          load_matrices(q[s][k], unit(ring.place) + s % kPair * kSlabBytes +
                                     warp * 16 * kTileRowBytes +
                                     tile_offset(lane % 16, 2 * k + lane / 16));
        if (s % kPair != kPair - 1) continue;
        if constexpr (kStores)
          barrier_arrive(empty(ring.place));
        else
          arrive_of_warp(empty(ring.place), lane);
        ring.next();
      }
      if constexpr (kConverts) {
#pragma unroll
        for (int i = 0; i < kHalf * 4 * 4; ++i) {
          std::uint32_t& pair = q[i / 16][i / 4 % 4][i % 4];
          pair = as_multiplied(pair);
        }
        barrier_wait(queries_full(), queries_parity);
        convert_queries();
      }

      // Deferring takes a ring of more than two tiles.
      const bool defers = kManyRows && !kConverts && item.count >= kDeferredTiles;
      float S[32], largest[2] = {kNoScore, kNoScore}, sum[2] = {0, 0}, rounded[4] = {};
      for (int t = 0; t < item.count; ++t) {
        start_products();
#pragma unroll
        for (int i = 0; i < kSlabs; ++i) {
          // Slabs are multiplied in the order in which they arrive: k_pe after the first four, or
          // last if it is converted.
          constexpr int kRopeTurn = kConverts ? kSlabs - 1 : kHalf;
          const int n = i < kRopeTurn ? i : i - 1;  // number of the slab in the order of loading
          const bool is_rope = i == kRopeTurn;
          const int s = is_rope ? 2 * kHalf : slab_of(n / kPair) + n % kPair;
          if (is_rope)
            barrier_wait(rope_full(rope.place), rope.parity);
          else
            barrier_wait(full(ring.place, s % kPair), ring.parity);
          if (i == kPair && t == 0) barrier_wait(queries_full(), queries_parity);
          if (i == kSlabs - 1 && defers && t > 0) hand_over(At::kPs - 1 - tile.place, lane);
          const std::uint64_t K =
              matrix(is_rope ? rope_at(rope.place) : unit(ring.place) + s % kPair * kSlabBytes);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const std::uint64_t Q = matrix(base_ + At::kQueries + (s - kHalf) * kSlabBytes);
            if (s < kHalf)
              Product<M, 64, false>::of(S, q[s][k], further(K, 32 * k), i + k > 0);
            else if (is_rope)
              Product<T, 64, false>::of(S, further(Q, 32 * k), further(K, 32 * k), true);
            else
              Product<M, 64, false>::of(S, further(Q, 32 * k), further(K, 32 * k), true);
          }
          if (!is_rope && s % kPair == kPair - 1) ring.next();
        }
        commit_products();
        wait_for_products<0>();
        pin(S);
        arrive_of_warp(rope_empty(rope.place), lane);
        rope.next();
        const bool ends = t + 1 == item.count;
        if (ends) arrive_of_warp(queries_empty(), lane);

        const int first_token = (item.first + t) * kTokens;
        // p uses |scale|; the sign of a negative scale goes into S.
        if (p_.scale_log2 < 0) {
#pragma unroll
          for (float& s : S) s = -s;
        }
        // Only in the last tiles are keys that some of the rows must not see.
        if (first_token + kTokens > item.length - first_later)
          hide(S, item.length - first_token, later, lane);
        // Most tiles do not raise `largest`, so p is computed before the tile's maximum is known,
        // and again if it was needed.
        float alpha[2] = {1.0f, 1.0f}, added[2];
        std::uint32_t p[16];
        if (t > 0) weigh(p, added, S, scale, largest);
        if (t == 0 || grows(S, scale, largest)) {
          raise(largest, alpha, S, scale);
          weigh(p, added, S, scale, largest);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], alpha[r], added[r]);
        barrier_wait(p_empty(tile.place), tile.parity ^ 1);
        const std::uint32_t to =
            base_ + At::kP + tile.place * kSlabBytes + warp * 16 * kTileRowBytes;
#pragma unroll
        for (int k = 0; k < 4; ++k)
          store_matrices(to + tile_offset(lane % 16, 2 * k + lane / 16), p[4 * k], p[4 * k + 1],
                         p[4 * k + 2], p[4 * k + 3]);
        if (lane % 4 == 0) {
          alphas(tile.place)[row] = alpha[0];
          alphas(tile.place)[row + 8] = alpha[1];
        }
        if (ends) {
          add_rounded(rounded, alpha, p);
          if (!kStores && first_token + kTokens > item.length)
            clear_values(ring, item.length - first_token);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float whole = quad_sum(sum[i]);
            // A row that sees no key gets factor 0 and lse -infinity; a NaN sum stays NaN.
            if (lane % 4 == 0)
              totals(tile.place)[row + 8 * i] =
                  whole > 0 || whole != whole
                      ? make_float2(1.0f / rounded[2 * i], largest[i] + log2f(whole))
                      : make_float2(0.0f, -INFINITY);
          }
        }
        publish_to_async();
        __syncwarp();
        if (!defers || ends) hand_over(tile.place, lane);
        if (!ends) add_rounded(rounded, alpha, p);
        tile.next();
      }
      queries_parity ^= 1;
    });
    barrier_arrive(scores_done());
  }

  /// Hands a tile of p that the warp has published to the outputs. The lanes that wrote alphas and
  /// totals arrive themselves.
  __device__ void hand_over(int place, int lane) const {
    arrive_if(lane % 4 == 0, p_full(place));
  }

  /// sum = alpha sum + p 1, the sum of the rounded p, by a product with ones (all columns of the
  /// result are alike).
  __device__ static void add_rounded(float (&sum)[4], const float (&alpha)[2],
                                     const std::uint32_t (&p)[16]) {
    const std::uint32_t ones = pack<M>(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] *= alpha[i / 2];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      add_warp_product<M>(sum, {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]}, ones, ones);
  }

  /// Zeroes the values after a request's last key, in the tile that ends before place `behind` of
  /// the ring: p is 0 there, and 0 times what lies there (perhaps NaN) must be 0. The scores'
  /// threads do it: they alone touch these places by ordinary loads and stores (they read queries
  /// there before and afterwards), so barriers among them suffice.
  __device__ void clear_values(const Step& behind, int seen) const {
    sync_threads_of(kCleared, kWarpgroup);  // products of all warps have read the tile
    Step at = behind;
    at.skip(kUnits - kTileUnits);
    for (int u = 0; u < kTileUnits; ++u, at.next())
      for (int s = 0; s < kPair; ++s)
        for (int i = seen * kTileRowBytes / 16 + static_cast<int>(threadIdx.x); i < kSlabBytes / 16;
             i += kWarpgroup)
          reinterpret_cast<uint4*>(shared_ + at.place * kUnitBytes + s * kSlabBytes)[i] =
              make_uint4(0, 0, 0, 0);
    sync_threads_of(kCleared, kWarpgroup);
  }

  // --- Outputs ---

  /// The outputs' warpgroup of a side (columns 256 side ... 256 side + 255); warp w has rows 16 w
  /// ... 16 w + 15.
  __device__ void run_outputs(int side, int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = warp * 16 + lane / 4;
    Step ring(kUnits), tile(At::kPs);
    for_each_item([&](const Item& item) {
      Outputs O;
      float2 total[2] = {make_float2(0.0f, -INFINITY), make_float2(0.0f, -INFINITY)};
      if (item.count == 0) {
        for_each_output(O, [](float& o, int) { o = 0.0f; });
      } else {
        ring.skip(kHalf / kPair + side * kSideStep);  // behind the queries' units
      }
      for (int t = 0; t < item.count; ++t) {
        Step second = ring;
        second.skip(kSecondStep);
        // The keys come first: the scores have used them, and from p to its products no other wait
        // delays the tensor cores.
#pragma unroll
        for (int s = 0; s < kPair; ++s) {
          barrier_wait(full(ring.place, s), ring.parity);
          barrier_wait(full(second.place, s), second.parity);
        }
        barrier_wait(p_full(tile.place), tile.parity);
        if (t > 0) {
          const float a = alphas(tile.place)[row], b = alphas(tile.place)[row + 8];
          // Most tiles leave all factors at 1.
          if (__any_sync(0xffffffffu, a != 1.0f || b != 1.0f))
            for_each_output(O, [&](float& o, int i) { o *= i % 4 < 2 ? a : b; });
        }
        if (t + 1 == item.count) {
          total[0] = totals(tile.place)[row];
          total[1] = totals(tile.place)[row + 8];
        }
        // Two units of the tile hold this side's 256 columns of V: O[i] += p [64, 64] V [64, 128].
        const std::uint64_t P = matrix(base_ + At::kP + tile.place * kSlabBytes);
        pin(O[0]), pin(O[1]);
        start_products();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint64_t V = matrix(unit(i == 0 ? ring.place : second.place), kSlabBytes);
#pragma unroll
          for (int k = 0; k < 4; ++k)
            Product<M, 128, true>::of(O[i], further(P, 32 * k), further(V, 16 * k * kTileRowBytes),
                                      t + k > 0);
          commit_products();
        }
        wait_for_products<1>();
        pin(O[0]);
        // The first unit is free while the products with the second still run.
        arrive_if(kStores || lane == 0, empty(ring.place));
        wait_for_products<0>();
        pin(O[1]);
        arrive_if(kStores || lane == 0, empty(second.place));
        barrier_arrive(p_empty(tile.place));
        tile.next();
        ring.skip(t + 1 < item.count ? kTileUnits : kTileUnits - side * kSideStep);
      }
      if (item.split.count == 1)
        store_outputs(O, total, item, side, row, lane);
      else
        store_piece(O, total, item, side, warp, lane);
    });
  }

  // --- Divided requests: merging ---

  /// The scores' first warp: waits until the pieces of all parts are there, and lets the mergers
  /// read them. The last reader resets the counters.
  __device__ void await_pieces() const {
    for_each_divided([&](int, const Split& split, int barrier) {
      const int mine = vectors_of_part(split), readers = (vectors() + mine - 1) / mine;
      if (part_ - split.first_part >= readers) return;
      int* const counter = counter_of(split);
      if (threadIdx.x == 0)
        while (count_of(counter) < 2 * split.count) {
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
  /// Calls body(item) for the block's items. An item of a request without keys has count 0.
  template <class Body>
  __device__ void for_each_item(Body body) const {
    const Share& s = share();
    const int first = uniform(s.first), last = uniform(s.last);
    int length = first <= last ? p_.lengths.of(first) : 0;
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
  /// Whether p would exceed 2^kSlack in some row of the warp.
  __device__ static bool grows(const float (&S)[32], float scale, const float (&largest)[2]) {
    float most[2];
    most_of(most, S);
    return __any_sync(0xffffffffu, fmaf(most[0], scale, -largest[0]) > kSlack ||
                                       fmaf(most[1], scale, -largest[1]) > kSlack);
  }
  /// Raises `largest` in rows whose scores exceed it by more than kSlack; alpha becomes the factor
  /// for their sums and outputs so far.
  __device__ static void raise(float (&largest)[2], float (&alpha)[2], const float (&S)[32],
                               float scale) {
    float most[2];
    most_of(most, S);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float found = quad_max(most[r]) * scale;
      if (found - largest[r] <= kSlack) continue;
      alpha[r] = exp2_fast(largest[r] - found);
      largest[r] = found;
    }
  }
  /// p = exp2(scale S - largest), as the left operand of a product; added[r] is the thread's sum of
  /// a row's p before rounding.
  __device__ static void weigh(std::uint32_t (&p)[16], float (&added)[2], const float (&S)[32],
                               float scale, const float (&largest)[2]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float* const s = S + 2 * i;
      const float x = exp2_fast(fmaf(s[0], scale, -largest[i % 2]));
      const float y = exp2_fast(fmaf(s[1], scale, -largest[i % 2]));
      p[i] = pack<M>(x, y);
      added[i % 2] = i < 2 ? x + y : added[i % 2] + (x + y);
    }
  }

  /// A thread's outputs: rows row and row + 8, columns 8 n + 2 (lane % 4) and the next of its side,
  /// in two products of 128 columns. One product of 256 columns would need more registers than each
  /// of 512 threads starts with.
  using Outputs = float[2][64];
  template <class Visit>
  __device__ static void for_each_output(Outputs& O, Visit visit) {
#pragma unroll
    for (int i = 0; i < 128; ++i) visit(O[i / 64][i % 64], i);
  }

  __device__ void store_outputs(const Outputs& O, const float2 (&total)[2], const Item& item,
                                int side, int row, int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int number = first_row_ + row + 8 * r;
      const bool is = number < p_.rows;
      const int query = number / p_.heads, head = number - query * p_.heads;
      T* const out = static_cast<T*>(p_.out) + item.request * p_.out_strides[0] +
                     query * p_.out_strides[1] + head * p_.out_strides[2] + side * 256;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_row<T, 128>(out + 128 * half, O[half] + 2 * r, total[r].x, is, lane);
      if (is && side == 0 && lane % 4 == 0) lse(item.request, number) = lse_of(total[r].y);
    }
  }

  // --- Divided requests ---

  /// Warps of a warpgroup whose 16 rows are not all beyond the request's rows.
  __device__ int row_warps() const {
    return min(4, (p_.rows - first_row_ + 15) / 16);
  }
  /// Number of a piece's place in the workspace. A part has two places per block of rows: one for a
  /// later piece (of the part's first request), one for a first piece (of its last request).
  __device__ int place_of(const Split& split, int piece) const {
    return ((split.first_part + piece) * p_.row_blocks + row_block_) * 2 + (piece == 0);
  }
  /// A piece's outputs as vectors of eight float16: [side][warps with rows][16][lane].
  __device__ uint4* piece_at(int place) const {
    return reinterpret_cast<uint4*>(p_.pieces + std::int64_t{place} * kPieceBytes);
  }
  __device__ float* numbers_at(int place) const {
    return p_.piece_numbers + std::int64_t{place} * kPieceNumbers;
  }
  __device__ int* counter_of(const Split& split) const {
    return counters[p_.lane][split.first_part * p_.row_blocks + row_block_];
  }

  /// Stores the outputs of a piece in float16, each row scaled by a power of two so that its
  /// largest element is near 2^10; the factor and lse go to the piece's numbers.
  __device__ void store_piece(const Outputs& O, const float2 (&total)[2], const Item& item,
                              int side, int warp, int lane) const {
    const int place = place_of(item.split, item.piece), warps = row_warps();
    if (warp < warps) {
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < 32; ++n)
          most = fmaxf(most, fmaxf(fabsf(O[n / 16][n % 16 * 4 + 2 * r]),
                                   fabsf(O[n / 16][n % 16 * 4 + 2 * r + 1])));
        most = quad_max(most) * total[r].x;
        // A power of two: the only rounding is that to float16.
        const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
        const bool usual = exponent > -100 && exponent < 100;
        const float unit = usual ? exp2f(static_cast<float>(exponent - 10)) : 1.0f;
        factor[r] = total[r].x / unit;
        if (lane % 4 == 0) {
          float* const numbers = numbers_at(place) + warp * 16 + lane / 4 + 8 * r;
          numbers[kRows * (1 + side)] = unit;
          if (side == 0) numbers[0] = total[r].y;
        }
      }
      uint4* const to = piece_at(place) + (side * warps + warp) * 16 * 32 + lane;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float* const o = O[i / 8] + 8 * (i % 8);
        to[i * 32] = make_uint4(pack<Fp16>(o[0] * factor[0], o[1] * factor[0]),
                                pack<Fp16>(o[2] * factor[1], o[3] * factor[1]),
                                pack<Fp16>(o[4] * factor[0], o[5] * factor[0]),
                                pack<Fp16>(o[6] * factor[1], o[7] * factor[1]));
      }
    }
    sync_threads_of(1 + side, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) count_up(counter_of(item.split));
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
    return 2 * 16 * row_warps() * 32;
  }
  __device__ int vectors_of_part(const Split& split) const {
    return (vectors() + split.count * 32 - 1) / (split.count * 32) * 32;
  }

  // Merging reuses the shared memory of keys and queries:
  //   kWeights  float [3][kMostPieces][64]: by piece and row, lse and then weight; factors by side
  //   kSums     float [8][kMergers]: sums of sets of threads
  //   kRowsOut  T* [64]: addresses of the rows' outputs
  //   kCopies   uint4 [kSlots][kMergers]: vectors on their way
  static constexpr int kWeights = 0;
  static constexpr int kSums = kWeights + 3 * kMostPieces * kRows * 4;
  static constexpr int kRowsOut = kSums + 8 * kMergers * 4;
  static constexpr int kCopies = kRowsOut + kRows * 8;
  static constexpr int kSlots = 16;
  static_assert(kCopies + kSlots * kMergers * 16 <= At::kAlpha);

  /// Merges this part's `mine` vectors of all pieces. If a part has fewer vectors than threads,
  /// several sets of threads take some of the pieces each, and set 0 adds their sums. Each thread
  /// copies the vectors that it adds to shared memory itself, kSlots at once: the loops stay rolled
  /// and many loads are in flight.
  __device__ void merge(int request, const Split& split, int mine) const {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup, lane = thread % 32;
    const int warps = row_warps(), count = split.count;
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
        const int group = at / (16 * 32), side = group >= warps, warp = group - side * warps;
        const float* const weight =
            weights + ((1 + side) * kMostPieces + added) * kRows + warp * 16 + lane / 4;
        const float a = weight[0], b = weight[8];
        // Of the warp's 16 rows got.x and got.z are of row lane / 4, got.y and got.w of the row 8
        // below it.
        const float2 x = unpack<Fp16>(got.x), y = unpack<Fp16>(got.y);
        const float2 z = unpack<Fp16>(got.z), w = unpack<Fp16>(got.w);
        add(sum[0], a, x.x), add(sum[1], a, x.y), add(sum[2], b, y.x), add(sum[3], b, y.y);
        add(sum[4], a, z.x), add(sum[5], a, z.y), add(sum[6], b, w.x), add(sum[7], b, w.y);
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

  /// Copies the numbers (lse, factors) of all pieces to shared memory.
  __device__ void copy_numbers(const Split& split) const {
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    const int quads = 4 * row_warps(), chunks = 3 * quads;  // 16-byte chunks of a piece
    const int at_once = kMergers / chunks, number = thread % chunks / quads;
    const int row = thread % chunks % quads * 4;
    if (thread >= at_once * chunks) return;
#pragma unroll 1
    for (int piece = thread / chunks; piece < split.count; piece += at_once)
      start_copy(base_ + kWeights + ((number * kMostPieces + piece) * kRows + row) * 4,
                 numbers_at(place_of(split, piece)) + number * kRows + row, true);
  }

  /// Replaces the pieces' factors by weight x factor, where weight is the piece's share of the
  /// row's softmax sum; finds the addresses of the rows' outputs; and stores lse.
  __device__ void weigh_pieces(int request, const Split& split) const {
    sync_threads_of(3, kMergers);  // all threads' copies of numbers are complete
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
    const int warps = row_warps(), count = split.count;
    float* const weights = reinterpret_cast<float*>(shared_ + kWeights);
    const int readers = warps == 1 ? 16 : warps == 2 ? 8 : 4;  // threads of a row
    const int row = thread / readers, reader = thread % readers;
    const bool is = row < 16 * warps;
    float most = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int i = reader; i < count && is; i += readers)
      most = fmaxf(most, weights[i * kRows + row]);
#pragma unroll 1
    for (int distance = 1; distance < readers; distance *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
    if (most == -INFINITY) most = 0.0f;  // no piece has seen a key: all weights are 0
#pragma unroll 1
    for (int i = reader; i < count && is; i += readers) {
      const float own = exp2f(weights[i * kRows + row] - most);
      weights[i * kRows + row] = own;
      sum += own;
    }
#pragma unroll 1
    for (int distance = 1; distance < readers; distance *= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (is) {
      const float share = sum > 0 || sum != sum ? 1.0f / sum : 0.0f;
#pragma unroll 1
      for (int i = reader; i < count; i += readers) {
        const float weight = weights[i * kRows + row] * share;
        weights[(kMostPieces + i) * kRows + row] *= weight;
        weights[(2 * kMostPieces + i) * kRows + row] *= weight;
      }
      const int number = first_row_ + row;
      if (reader == 0) {
        const bool is_row = number < p_.rows;
        const int query = number / p_.heads, head = number - query * p_.heads;
        reinterpret_cast<T**>(shared_ + kRowsOut)[row] =
            is_row ? static_cast<T*>(p_.out) + request * p_.out_strides[0] +
                         query * p_.out_strides[1] + head * p_.out_strides[2]
                   : nullptr;
        if (is_row && part_ == split.first_part)
          lse(request, number) = lse_of(sum > 0 || sum != sum ? most + log2f(sum) : -INFINITY);
      }
    }
    sync_threads_of(3, kMergers);
  }

  /// Stores the eight outputs of a merged vector: two rows, four columns each.
  __device__ void store_merged(int vector, const float (&sum)[8]) const {
    const int lane = static_cast<int>(threadIdx.x % 32), warps = row_warps();
    const int group = vector / (16 * 32), side = group >= warps, warp = group - side * warps;
    const int column = side * 256 + vector / 32 % 16 * 16 + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const row = reinterpret_cast<T* const*>(shared_ + kRowsOut)[warp * 16 + lane / 4 + 8 * r];
      if (row == nullptr) continue;
      *reinterpret_cast<std::uint32_t*>(row + column) = pack<T>(sum[2 * r], sum[2 * r + 1]);
      *reinterpret_cast<std::uint32_t*>(row + column + 8) = pack<T>(sum[4 + 2 * r], sum[5 + 2 * r]);
    }
  }
  /// sum += weight x value. The weight of a piece that has seen no key is 0, and its values are 0
  /// too.
  __device__ static void add(float& sum, float weight, float value) {
    sum = fmaf(weight, value, sum);
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
  __device__ float2* totals(int place) const {
    return reinterpret_cast<float2*>(shared_ + At::kTotals) + place * kRows;
  }
  __device__ std::uint32_t unit(int place) const {
    return base_ + place * kUnitBytes;
  }
  __device__ std::uint32_t barrier(int number) const {
    return base_ + At::kBarriers + 8 * number;
  }
  __device__ std::uint32_t full(int place, int slab) const {
    return barrier(place * kPair +
                   (kStores ? 0 : slab));  // stores fill both slabs of a unit at once
  }
  __device__ std::uint32_t empty(int place) const {
    return barrier(kUnits * kPair + place);
  }
  __device__ std::uint32_t rope_at(int place) const {
    return base_ + At::kRope + place * kSlabBytes;
  }
  static constexpr int kRopeBarriers = kUnits * (kPair + 1);
  __device__ std::uint32_t rope_full(int place) const {
    return barrier(kRopeBarriers + place);
  }
  __device__ std::uint32_t rope_empty(int place) const {
    return barrier(kRopeBarriers + kRopes + place);
  }
  static constexpr int kQueryBarriers = kRopeBarriers + 2 * kRopes;
  __device__ std::uint32_t queries_full() const {
    return barrier(kQueryBarriers);
  }
  __device__ std::uint32_t queries_empty() const {
    return barrier(kQueryBarriers + 1);
  }
  __device__ std::uint32_t p_full(int place) const {
    return barrier(kQueryBarriers + 2 + place);
  }
  __device__ std::uint32_t p_empty(int place) const {
    return barrier(kQueryBarriers + 4 + place);
  }

  __device__ std::uint32_t scores_done() const {
    return barrier(kQueryBarriers + 6);
  }

  /// Offset of a converter's raw memory from the beginning of shared memory.
  __device__ static int raw_at(int warp) {
    return At::kRawUnits + warp * At::kRawBytes;
  }
  /// kGathers: places of the ring, then those of rope slabs. kConverts: a converter's raw memory.
  __device__ std::uint32_t raw_full(int place) const {
    return barrier(kQueryBarriers + 7 + place);
  }

  const Decode& p_;
  const Maps& maps_;
  unsigned char* shared_;
  std::uint32_t base_;
  int part_, row_block_, first_row_;
};

template <class T, class C, bool kManyRows, bool kGathers>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_kernel(const __grid_constant__ Decode p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using At = Layout<T, C, kManyRows>;
  const Block<T, C, kManyRows, kGathers> block(p, maps, shared);
  const int warp = uniform(static_cast<int>(threadIdx.x / 32));
  const int group = warp / 4;
  if (threadIdx.x == 0) {
    prefetch_map(maps.q);
    prefetch_map(maps.cache);
    if (At::kConverts) prefetch_map(maps.pe);
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
    take_registers<kOutputRegisters>();
    block.run_outputs(group - 1, warp % 4);
    block.merge();
  } else {
    give_registers<At::kFeedRegisters>();
    if constexpr (At::kConverts) {
      block.convert(warp - 12);
    } else if constexpr (kGathers) {
      if (warp == 13)
        block.load_queries();
      else if (warp == 15)
        block.publish_copies();
      else
        block.gather((warp - 12) / 2);
    } else {
      if (warp == 12) block.load_whole_tiles();
      if (warp == 13) block.load_queries();
    }
  }
}

// --- The wrapper ---------------------------------------------------------------------------------

/// The cache as elements of 16 bits, [page, pages, columns], so that can_be_mapped() can check it;
/// odd strides become -1, which it refuses.
template <class C>
TensorView<const Bf16, 3> sixteenths(const TensorView<const C, 3>& cache) {
  constexpr auto kBytes = std::int64_t{sizeof(C)};
  const auto pairs = [](std::int64_t bytes) { return bytes % 2 == 0 ? bytes / 2 : -1; };
  return make_view(
      reinterpret_cast<const Bf16*>(cache.data_handle()),
      Shape<3>{cache.extent(1), cache.extent(0), cache.extent(2) * kBytes / 2},
      Shape<3>{pairs(cache.stride(1) * kBytes), pairs(cache.stride(0) * kBytes), cache.stride(2)});
}

template <class T, class C>
void check(const Checks& checks, const MlaDecode<T, C>& in) {
  constexpr bool kBytes = std::is_same_v<C, std::uint8_t>;
  check_arguments(checks, in, kBytes ? "[pages, page, 656]" : "[pages, page, 576]",
                  kBytes ? kTokenBytes : kWidth);
  const std::int64_t page = in.cache.extent(1);
  checks.expect(page >= 1 && (kTokens % page == 0 || page % kTokens == 0), "cache",
                "[pages, page, width] with pages of a divisor or a multiple of 64 tokens",
                text_of(shape_of(in.cache)));
  checks.expect(!in.kv_scale || std::is_same_v<C, E4m3>, "kv_scale",
                "absent without a cache of numbers in e4m3", "given");
  checks.expect(
      in.cache.extent(0) == 0 || can_be_mapped(sixteenths(in.cache)), "cache",
      "contiguous in its last dimension, with strides of whole 16 bytes",
      "strides " + text_of(Shape<3>{in.cache.stride(0), in.cache.stride(1), in.cache.stride(2)}));
}

template <class T, class C>
void start_decode(const MlaDecode<T, C>& in, cudaStream_t stream) {
  const std::int64_t pages = in.cache.extent(0), page = in.cache.extent(1);
  const Grid grid(kName, in);
  Decode p = parameters(in, grid);
  p.fewest = root_of_piece(p.rows) / 5;  // from times: a tile takes 1.3 us
  Maps maps{};
  maps.q = tile_map(kName, rows_of(in), kRows);
  if (pages > 0) {
    // `count` columns of the cache from `first` on, counted in elements of `data`.
    const auto columns = [&](auto* data, std::int64_t first, std::int64_t count) {
      // NOLINTNEXTLINE(bugprone-sizeof-expression): both are sizes of elements
      constexpr auto kRatio = std::int64_t{sizeof(*data) / sizeof(C)};
      return make_view(data + first, Shape<3>{page, pages, count},
                       Shape<3>{in.cache.stride(1) / kRatio, in.cache.stride(0) / kRatio, 1});
    };
    const int box = std::min(p.page, kTokens);
    if constexpr (std::is_same_v<T, C>) {
      maps.cache = latent_map(kName, columns(in.cache.data_handle(), 0, kWidth), kTileColumns, box);
    } else {
      const auto* const bytes = reinterpret_cast<const std::uint8_t*>(in.cache.data_handle());
      maps.cache = latent_map(kName, columns(bytes, 0, kValues), kRawColumns, box);
      maps.pe = latent_map(kName, columns(bytes, kPeOffset, kTileRowBytes), kTileRowBytes,
                           std::min(box, kPeTokens));
    }
  }
  const auto start = [&](auto many, auto small) {
    constexpr bool kManyRows = decltype(many)::value, kGathers = decltype(small)::value;
    constexpr int kSharedBytes = Layout<T, C, kManyRows>::kBytes;
    static const auto kernel = [] {
      const auto found = mla_decode_kernel<T, C, kManyRows, kGathers>;
      check_cuda(
          cudaFuncSetAttribute(found, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          kName);
      return found;
    }();
    launch(kName, kernel, dim3(static_cast<unsigned>(grid.parts * grid.row_blocks)), dim3(kThreads),
           kSharedBytes, stream, true, p, maps);
  };
  const auto start_for = [&](auto small) {
    if (grid.row_blocks > 1)
      start(std::true_type{}, small);
    else
      start(std::false_type{}, small);
  };
  if constexpr (std::is_same_v<T, C>)
    if (p.page < kTokens) return start_for(std::true_type{});
  start_for(std::false_type{});
}

}  // namespace

template <class T, class C>
std::int64_t mla_decode_workspace(const MlaDecode<T, C>& in) {
  return Grid(kName, in).workspace(kPieceNumbers);
}

template <class T, class C>
void mla_decode(const MlaDecode<T, C>& in, cudaStream_t stream) {
  const Checks checks(kName);
  if (in.q.extent(0) == 0) return;
  check(checks, in);
  check_workspace(checks, in, mla_decode_workspace(in));
  if constexpr (std::is_same_v<C, E4m3>) return narrow::decode<Fp16>(kName, in, stream);
  if constexpr (std::is_same_v<C, T>)
    if (in.q.extent(1) * in.q.extent(2) <= narrow::kFewRows)
      return narrow::decode<T>(kName, in, stream);
  if constexpr (!std::is_same_v<C, E4m3>) start_decode(in, stream);
}

#define LOCKSTEP_INSTANTIATE(T, C)                                    \
  template std::int64_t mla_decode_workspace(const MlaDecode<T, C>&); \
  template void mla_decode(const MlaDecode<T, C>&, cudaStream_t);
LOCKSTEP_INSTANTIATE(Bf16, Bf16)
LOCKSTEP_INSTANTIATE(Bf16, E4m3)
LOCKSTEP_INSTANTIATE(Bf16, std::uint8_t)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_INSTANTIATE(Fp16, Fp16)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
