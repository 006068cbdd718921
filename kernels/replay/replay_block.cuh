// Replay-state decode on the device, shared by the two ring operations. The stored state is that of
// some tokens ago; a ring of up to 16 entries (key, value, decay) holds the tokens since then. A
// step reads both, computes the output, and either adds an entry to the ring or flushes the ring
// into the state. Equations: reference/recurrent/replay_state.hpp. "Key" and "query" are k and q of
// the gated delta rule, B and C of Mamba2; "value" is u, or x.
//
//   grid   (R / Tiling::kRows, heads, N)     R: rows of a state, N: rows of the batch
//   block  Tiling::kWarps warps; a warp owns 16 kTiles rows of one head's state [R, C]
//
// Bulk copies bring the state's rows and the live ring entries to shared memory (ReplayShared).
// Lane (g, t) = (lane / 4, lane % 4) of a warp reads 16-byte pieces 4 c + t, c = 0, 1, ..., of each
// row 8 r + g. After the reduction it owns the sums of row 8 t + g (with one tile: 8 (t % 2) + g).
//
// Rows in shared memory have no padding, since a bulk copy cannot insert any. If rows are multiples
// of 128 bytes, all begin at the same bank; odd rows then read their chunks of 64 bytes in the
// order 1, 0, 3, 2, ..., so that neighbouring rows use different banks.
//
// A flush adds a product of rank 16. It is exact to float32: the factor weight x value is split
// into three bf16 parts (24 bits), keys are bf16, and tensor cores multiply bf16 exactly.
#pragma once

#include <algorithm>

#include "kernels/base/hopper.cuh"
#include "kernels/base/slots.cuh"

namespace lockstep::kernels {

constexpr int kRingRows = 16;  ///< entries of the longest ring: the depth of one mma

constexpr int kProcessors = 132;    ///< multiprocessors of an H100 or H200
constexpr int kPrefetchedRows = 8;  ///< batches of up to so many rows prefetch into L2

/// A block's share: kWarps warps with kTiles tiles of 16 rows each, of states with kColumns
/// columns.
template <class S_, int kColumns_, int kWarps_, int kTiles_>
struct ReplayTiling {
  using S = S_;
  static constexpr int kColumns = kColumns_, kWarps = kWarps_, kTiles = kTiles_;
  static constexpr int kThreads = 32 * kWarps, kWarpRows = 16 * kTiles, kRows = kWarps * kWarpRows;
  static constexpr int kPiece = 16 / sizeof(S);  ///< elements in 16 bytes
  /// A chunk is 64 bytes of a row: a piece for each of the four lanes t.
  static constexpr int kChunk = 4 * kPiece, kChunks = kColumns / kChunk;
  /// Whether odd rows exchange their even and odd chunks, to avoid bank conflicts.
  static constexpr bool kAhead = kColumns * sizeof(S) % 128 == 0;
  static_assert(kColumns % 32 == 0 && (!kAhead || kChunks % 2 == 0));
};

/// A row of the batch: its slot, the live entries of its ring, and whether this token is the last
/// of a window, so that the step flushes.
struct ReplayStep {
  int slot;
  int live;
  bool flushes;
};

/// A list with one number per row of the batch.
struct RowNumbers {
  const std::int32_t* data;
  int stride;
  /// Reads past L1 (ld.cg): a value read before wait_for_earlier_launch() must not be found in L1
  /// after it.
  __device__ int at(int row) const { return __ldcg(data + std::int64_t{row} * stride); }
};

struct ReplayBatch {
  RowNumbers cursors;                   ///< [N]
  RowNumbers positions;                 ///< [N]: tokens of the request before this one
  RowNumbers indices;                   ///< [N], or no data: a row's slot has the row's number
  int pad_slot_id, slot_count, window;  ///< window: L, the length of the ring
  bool small;                           ///< prefetch into L2 before the wait
  int early_blocks;  ///< so many blocks load state and ring before wait_for_earlier_launch()

  /// Whether the block belongs to the first wave, which may be resident before the earlier launch
  /// has ended. Such a block loads its state first and the token's inputs after the wait. Later
  /// blocks start when the earlier launch has ended anyway, and load the token's inputs first.
  __device__ bool is_early() const {
    return static_cast<int>((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) <
           early_blocks;
  }

  __device__ int slot(int row) const {
    const int slot = indices.data ? indices.at(row) : row;
    return slot < 0 || slot >= slot_count || (indices.data && slot == pad_slot_id) ? kNowhere
                                                                                   : slot;
  }
  /// The row's step. A cursor that no sequence of steps leads to makes the row one without a slot,
  /// so that no entry beyond the ring is read or written.
  __device__ ReplayStep step(int row) const {
    const int live = cursors.at(row), position = positions.at(row), slot = this->slot(row);
    const int last = window - 1;
    const int place = window & last ? position % window : position & last;
    const bool sound = position >= 0 && 0 <= live && live <= place;
    return {sound ? slot : kNowhere, sound ? live : 0, place == last};
  }
};

/// Addresses of matrices or vectors [slots or rows, heads, ...]. Strides are in units of kUnit
/// elements and have 32 bits, so that an address takes two multiplications: a block computes many
/// addresses before its first load.
template <class T, int kUnit = 1>
struct Steps {
  T* data = nullptr;
  unsigned outer = 0, head = 0;
  __device__ T* at(int i, int h) const {
    return data + (std::uint64_t{static_cast<unsigned>(i)} * outer +
                   std::uint64_t{static_cast<unsigned>(h)} * head) *
                      kUnit;
  }
};
/// Steps with strides in 16-byte pieces.
template <class T>
using Pieces = Steps<T, 16 / sizeof(T)>;

/// Numbers [rows, heads] whose type is known only at run time.
struct HeadNumbers {
  const void* data = nullptr;
  Format format = Format::float32;
  unsigned outer = 0, head = 0;
  __device__ const void* at(int i, int h) const {
    const std::uint64_t offset = std::uint64_t{static_cast<unsigned>(i)} * outer +
                                 std::uint64_t{static_cast<unsigned>(h)} * head;
    return static_cast<const char*>(data) + (offset << (format == Format::float32 ? 2 : 1));
  }
};

/// Shared memory of a block. With 64 rows of 128 columns in float32: 32 KiB of state, 4 KiB of
/// keys, 4 KiB of values. Entry n of keys (and of values) is the token's own, behind the n live
/// entries.
template <class Tiling, class U>
struct ReplayShared {
  alignas(128) typename Tiling::S state[Tiling::kRows * Tiling::kColumns];
  alignas(16) Bf16 keys[kRingRows][Tiling::kColumns];
  alignas(16) U values[kRingRows][Tiling::kRows];
  alignas(16) Bf16 query[Tiling::kColumns];
  /// Partial products of keys with one or two vectors, and partial squares of the second vector,
  /// per 32 columns: sums then have the same order for any number of warps.
  float products[Tiling::kColumns / 32][2][kRingRows];
  float squares[Tiling::kColumns / 32];
  float2 weights[Tiling::kWarps][kRingRows];  ///< per warp: factors of the ring's values
  alignas(8) std::uint64_t arrived;           ///< mbarrier that counts the bytes of the bulk copies
};

/// The thread's place in its warp and block; (g, t) as in mma fragments.
struct ReplayLane {
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int g = lane / 4, t = lane % 4;
};

__device__ inline uint4 piece_at(const void* address) {
  return *static_cast<const uint4*>(address);
}
/// Adds the products of 8 elements per lane: rows g and g + 8 of the warp, times a column vector.
/// Two mma, each with two pairs of elements of a lane.
__device__ inline void add_pieces(float (&sums)[4], const uint4& row, const uint4& row8,
                                  const uint4& column) {
  hopper::add_warp_product<Bf16>(sums, {row.x, row8.x, row.y, row8.y}, column.x, column.y);
  hopper::add_warp_product<Bf16>(sums, {row.z, row8.z, row.w, row8.w}, column.z, column.w);
}

/// Products with, and flushes into, a warp's 16 kTiles rows in shared memory.
template <class Tiling>
struct ReplayRows {
  using S = typename Tiling::S;
  static constexpr int kTiles = Tiling::kTiles;

  /// The row of the warp whose sums the lane owns. With one tile two lanes own the same row.
  __device__ static int own_row(const ReplayLane& at) { return 8 * (at.t % (2 * kTiles)) + at.g; }
  /// True in the one lane that stores the row's results.
  __device__ static bool owns(const ReplayLane& at) { return at.t < 2 * kTiles; }

  /// own[v] = the lane's own row times vectors[v]. Every lane of the warp calls it.
  template <int kCount>
  __device__ static void products(const S* rows, const Bf16* const (&vectors)[kCount],
                                  const ReplayLane& at, float (&own)[kCount]) {
    if constexpr (sizeof(S) == 2)
      exact_products(rows, vectors, at, own);
    else
      float_products(rows, vectors, at, own);
  }

  /// state = decay state + sum over live entries of weight value key^T, in place in shared memory.
  /// Lane j passes the weight of entry j.
  template <class U>
  __device__ static void flush(S* rows, const U (*values)[Tiling::kRows],
                               const Bf16 (*keys)[Tiling::kColumns], float decay, float weight,
                               int live, const ReplayLane& at) {
    // weight x value as left operands [16 rows, 16 entries], in three bf16 parts.
    std::uint32_t parts[kTiles][3][4];
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int entry = 2 * at.t + (i & 2) * 4;
      const int row = at.warp * Tiling::kWarpRows + i / 4 * 16 + (i & 1) * 8 + at.g;
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        x[e] = __shfl_sync(0xffffffffu, weight, entry + e) *
               (entry + e < live ? to_float(values[entry + e][row]) : 0.0f);
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const std::uint32_t both = hopper::pack<Bf16>(x[0], x[1]);
        const float2 held = hopper::unpack<Bf16>(both);
        parts[i / 4][part][i % 4] = both;
        x[0] -= held.x;
        x[1] -= held.y;
      }
    }
    constexpr int kPiece = Tiling::kPiece, kPairs = kPiece / 4;
#pragma unroll
    for (int c = 0; c < Tiling::kChunks; ++c) {
      S* const mine = rows + at.g * Tiling::kColumns + c * Tiling::kChunk + at.t * kPiece;
      float x[2 * kTiles][kPiece];
#pragma unroll
      for (int r = 0; r < 2 * kTiles; ++r)
        load_pack<Cached::yes>(x[r], mine + r * 8 * Tiling::kColumns);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        // The lane loads a pair of neighbouring columns of its four entries. The even columns of
        // all lanes make one right operand and the odd columns another; the sums that mma leaves in
        // a lane then belong to the columns of the lane's own piece.
        const int column = c * Tiling::kChunk + 2 * (kPairs * at.g + i);
        std::uint32_t pair[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int entry = 2 * at.t + e % 2 + e / 2 * 8;
          pair[e] =
              entry < live ? *reinterpret_cast<const std::uint32_t*>(&keys[entry][column]) : 0;
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const unsigned select = odd ? 0x7632 : 0x5410;
          const std::uint32_t b0 = __byte_perm(pair[0], pair[1], select);
          const std::uint32_t b1 = __byte_perm(pair[2], pair[3], select);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            float sums[4] = {0, 0, 0, 0};
#pragma unroll
            for (int part = 2; part >= 0; --part)
              hopper::add_warp_product<Bf16>(sums, parts[tile][part], b0, b1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float(&row)[kPiece] = x[2 * tile + half];
              float& low = row[2 * i + odd];
              float& high = row[kPiece / 2 + 2 * i + odd];
              low = fmaf(decay, low, sums[2 * half]);
              high = fmaf(decay, high, sums[2 * half + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2 * kTiles; ++r)
        store_pack<Cached::yes>(mine + r * 8 * Tiling::kColumns, x[r]);
    }
  }

 private:
  /// The chunk that a row reads in iteration c.
  __device__ static int chunk_of(int c, int row) {
    return Tiling::kAhead ? c ^ (row & 1) : c;
  }

  /// products() of float32 states, by fma. The four lanes of a row then reduce the sums of 2 kTiles
  /// rows at once, so that each ends with the sum of its own row.
  template <int kCount>
  __device__ static void float_products(const S* rows, const Bf16* const (&vectors)[kCount],
                                        const ReplayLane& at, float (&own)[kCount]) {
    float sums[2 * kTiles][kCount] = {};
#pragma unroll
    for (int c = 0; c < Tiling::kChunks; ++c) {
      const int column = chunk_of(c, at.g) * Tiling::kChunk + at.t * 4;
      float x[kCount][4];
#pragma unroll
      for (int v = 0; v < kCount; ++v) load_pack<Cached::yes>(x[v], vectors[v] + column);
#pragma unroll
      for (int r = 0; r < 2 * kTiles; ++r) {
        float s[4];
        load_pack<Cached::yes>(s, rows + (8 * r + at.g) * Tiling::kColumns + column);
#pragma unroll
        for (int v = 0; v < kCount; ++v)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[r][v] = fmaf(s[i], x[v][i], sums[r][v]);
      }
    }
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      float pair[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if constexpr (kTiles == 2)
          pair[r] = exchanged(sums[r][v], sums[r + 2][v], at.t & 2, 2);
        else
          pair[r] = sums[r][v] + __shfl_xor_sync(0xffffffffu, sums[r][v], 2);
      own[v] = exchanged(pair[0], pair[1], at.t & 1, 1);
    }
  }
  /// One step of that reduction between two lanes: each keeps one of two sums, and adds the other
  /// lane's part of it.
  __device__ static float exchanged(float low, float high, bool keeps_high, int distance) {
    return (keeps_high ? high : low) +
           __shfl_xor_sync(0xffffffffu, keeps_high ? low : high, distance);
  }

  /// products() of bf16 states: tensor cores multiply exactly and add in float32. Of the product's
  /// eight columns, even ones belong to the first vector and odd ones to the last. Columns 0 and 1
  /// read chunk c, as even rows do, and columns 2 and 3 the chunk that odd rows read: an even row's
  /// sums end up in columns 0 and 1, an odd row's in columns 2 and 3.
  template <int kCount>
  __device__ static void exact_products(const S* rows, const Bf16* const (&vectors)[kCount],
                                        const ReplayLane& at, float (&own)[kCount]) {
    float sums[kTiles][4] = {};
    const Bf16* const vector = at.g & 1 ? vectors[kCount - 1] : vectors[0];
#pragma unroll
    for (int c = 0; c < Tiling::kChunks; ++c) {
      const uint4 column = piece_at(vector + chunk_of(c, at.g >> 1) * 32 + at.t * 8);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const S* const from =
            rows + (16 * tile + at.g) * Tiling::kColumns + chunk_of(c, at.g) * 32 + at.t * 8;
        add_pieces(sums[tile], piece_at(from), piece_at(from + 8 * Tiling::kColumns), column);
      }
    }
    const int source = 4 * at.g + (Tiling::kAhead ? at.g & 1 : 0);
#pragma unroll
    for (int v = 0; v < kCount; ++v)
#pragma unroll
      for (int r = 0; r < 2 * kTiles; ++r) {
        const float sum = __shfl_sync(0xffffffffu, sums[r / 2][r % 2 * 2 + v], source);
        if (at.t % (2 * kTiles) == r) own[v] = sum;
      }
  }
};

/// Multiplies all keys of the ring with one or two vectors, and with two, sums the squares of the
/// second. Each warp takes parts of 32 columns: shared.products[part][vector][entry] and
/// shared.squares[part].
template <class Tiling, class Shared, int kCount>
__device__ inline void multiply_keys(Shared& shared, const Bf16* const (&vectors)[kCount],
                                     const ReplayLane& at) {
  const Bf16* const vector = at.g > 0 ? vectors[kCount - 1] : vectors[0];
  for (int part = at.warp; part < Tiling::kColumns / 32; part += Tiling::kWarps) {
    float sums[4] = {};
    const int column = part * 32 + at.t * 8;
    const uint4 piece = piece_at(vector + column);
    add_pieces(sums, piece_at(&shared.keys[at.g][column]), piece_at(&shared.keys[at.g + 8][column]),
               piece);
    if (at.t == 0) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        shared.products[part][v][at.g] = sums[v];
        shared.products[part][v][at.g + 8] = sums[2 + v];
      }
    }
    if constexpr (kCount == 2) {
      float squares = 0.0f;
      for (const unsigned both : {piece.x, piece.y, piece.z, piece.w}) {
        const float2 x = hopper::unpack<Bf16>(both);
        squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
      }
      squares += __shfl_xor_sync(0xffffffffu, squares, 1);
      squares += __shfl_xor_sync(0xffffffffu, squares, 2);
      if (at.lane == 4) shared.squares[part] = squares;
    }
  }
}
/// The key of `entry` times vector number `vector`, from the parts of multiply_keys().
template <class Tiling, class Shared>
__device__ inline float key_product(const Shared& shared, int vector, int entry) {
  float sum = 0.0f;
#pragma unroll
  for (int part = 0; part < Tiling::kColumns / 32; ++part)
    sum += shared.products[part][vector][entry];
  return sum;
}
/// The sum of squares of the second vector, from the parts of multiply_keys().
template <class Tiling, class Shared>
__device__ inline float sum_of_squares(const Shared& shared) {
  float sum = 0.0f;
#pragma unroll
  for (int part = 0; part < Tiling::kColumns / 32; ++part) sum += shared.squares[part];
  return sum;
}

/// The sum of x over lanes `place` ... 15 of the calling group of 16 lanes. A suffix sum makes the
/// log decay of a recent entry a sum of few numbers; a prefix sum would make it a difference of
/// large ones.
__device__ inline float sum_from(float x, int place) {
#pragma unroll
  for (int distance = 1; distance < kRingRows; distance *= 2) {
    const float after = __shfl_down_sync(0xffffffffu, x, distance, kRingRows);
    if (place + distance < kRingRows) x += after;
  }
  return x;
}
/// The decay since the stored state (x) and since the lane's entry (y); `log` is the log decay of
/// the lane's entry.
__device__ inline float2 decays(float log, int place) {
  const float from_here = sum_from(log, place);
  const float behind = __shfl_down_sync(0xffffffffu, from_here, 1, kRingRows);
  return {expf(__shfl_sync(0xffffffffu, from_here, 0, kRingRows)),
          expf(place + 1 < kRingRows ? behind : 0.0f)};
}

/// Initialises the barrier for `bytes` bytes of bulk copies. One thread calls it, before it issues
/// them.
__device__ inline void expect_bytes(std::uint64_t& arrived, int bytes) {
  const std::uint32_t barrier = hopper::shared_address(&arrived);
  hopper::barrier_init(barrier, 1);
  hopper::publish_barriers();
  hopper::barrier_expect(barrier, bytes);
}
/// Copies bytes of device memory to shared memory; they count at the barrier.
__device__ inline void bring(void* to, const void* from, int bytes, std::uint64_t& arrived) {
  hopper::load_bytes(hopper::shared_address(to), from, bytes, hopper::shared_address(&arrived));
}
/// Waits for all bytes of expect_bytes(). Every thread of the block calls it, after a
/// __syncthreads() that follows expect_bytes().
__device__ inline void wait_until(std::uint64_t& arrived) {
  hopper::barrier_wait(hopper::shared_address(&arrived), 0);
}
/// Writes a warp's rows from shared memory to device memory. Every lane of the warp calls it.
template <class S>
__device__ inline void keep_rows(S* to, const S* rows, int bytes, int lane) {
  hopper::publish_to_async();
  __syncwarp();
  if (lane != 0) return;
  hopper::store_bytes(to, hopper::shared_address(rows), bytes);
  hopper::commit_stores();
  hopper::wait_for_reads<0>();
}

// --- The host's side ---------------------------------------------------------------------------

/// Expects vectors [rows, heads, columns] or matrices [slots, heads, rows, columns] that bulk
/// copies can move.
template <AnyView V>
void check_bulk(const Checks& checks, const V& view, const char* argument) {
  constexpr std::size_t kLast = V::rank() - 1;
  constexpr std::int64_t kUnit = 16 / sizeof(ElementOf<V>);
  bool dense = (view.extent(kLast) <= 1 || view.stride(kLast) == 1) &&
               reinterpret_cast<std::uintptr_t>(view.data_handle()) % 16 == 0;
  for (std::size_t i = 0; i < 2; ++i)
    dense = dense && (view.extent(i) <= 1 || view.stride(i) % kUnit == 0);
  if constexpr (kLast == 3)
    dense = dense && view.extent(3) % kUnit == 0 &&
            (view.extent(2) <= 1 || view.stride(2) == view.extent(3));
  checks.expect(dense, argument,
                kLast == 3
                    ? "contiguous in its last two dimensions, with rows, heads and slots at "
                      "multiples of 16 bytes"
                    : "contiguous in its last dimension, with heads and rows at multiples of "
                      "16 bytes",
                "strides " + text_of(strides_of(view)));
}

/// A stride in units of `unit` elements.
inline unsigned step_of(const Checks& checks, const char* argument, std::int64_t stride,
                        std::int64_t unit) {
  checks.expect(0 <= stride && stride / unit <= 0xffffffff, argument,
                "of strides below 2^32 pieces", std::to_string(stride));
  return static_cast<unsigned>(stride / unit);
}
/// Steps over the first two dimensions of a view.
template <int kUnit, AnyView V>
Steps<ElementOf<V>, kUnit> steps_of(const Checks& checks, const V& view, const char* argument) {
  return {view.data_handle(), step_of(checks, argument, view.stride(0), kUnit),
          step_of(checks, argument, view.stride(1), kUnit)};
}
/// The same in 16-byte pieces, for a view that check_bulk() accepts.
template <AnyView V>
Pieces<ElementOf<V>> pieces_of(const Checks& checks, const V& view, const char* argument) {
  check_bulk(checks, view, argument);
  return steps_of<16 / sizeof(ElementOf<V>)>(checks, view, argument);
}
inline HeadNumbers numbers_of(const Checks& checks, const MixedView<2>& view,
                              const char* argument) {
  return {view.data, view.format, step_of(checks, argument, view.strides[0], 1),
          step_of(checks, argument, view.strides[1], 1)};
}

inline ReplayBatch replay_batch(const Checks& checks, const StateSlots& slots, std::int64_t rows,
                                std::int64_t slot_count, const IndexView& cursors,
                                const IndexView& positions, std::int64_t window) {
  checks.expect(!slots.table && !slots.out_table && !slots.out_indices && !slots.num_accepted,
                "state_indices", "a list [N], and nothing beside it", "more");
  checks.shape(cursors, "cursors", "[N]", {rows});
  checks.shape(positions, "positions", "[N]", {rows});
  const RowSlots row = row_slots(checks, slots, {}, rows, slot_count);
  check_row_count(checks, row);
  return {{cursors.data_handle(), static_cast<int>(cursors.stride(0))},
          {positions.data_handle(), static_cast<int>(positions.stride(0))},
          {row.indices, row.indices_stride},
          row.pad_slot_id,
          row.slot_count,
          static_cast<int>(window),
          rows <= kPrefetchedRows,
          0};
}

/// Blocks that fit on a multiprocessor: by shared memory (227 KiB, of which each block takes 1 KiB
/// besides its own), and at most 1024 threads.
template <class Tiling, class Shared>
constexpr int kBlocksThatFit = std::min(227 * 1024 / (static_cast<int>(sizeof(Shared)) + 1024),
                                        1024 / Tiling::kThreads);

/// Launches one block for each part of a head's rows, each head, and each row of the batch; `sizes`
/// is [N, heads, rows of a state].
template <class Tiling, class Shared, class... Parameters, class... Arguments>
void launch_replay(const char* operation, void (*kernel)(Parameters...), const Shape<3>& sizes,
                   cudaStream_t stream, const Arguments&... arguments) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(sizeof(Shared))),
             operation);
  const dim3 grid(static_cast<unsigned>(sizes[2] / Tiling::kRows), static_cast<unsigned>(sizes[1]),
                  static_cast<unsigned>(sizes[0]));
  launch(operation, kernel, grid, dim3(Tiling::kThreads), sizeof(Shared), stream, true,
         arguments...);
}

}  // namespace lockstep::kernels
