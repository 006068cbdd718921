// The gated delta rule by chunks of 64 tokens on Hopper. Equations and the names A, Tm, E, G, Vn:
// reference/recurrent/gated_delta_rule.hpp.
//
// Two kernels. prepare_kernel computes everything that needs no state, for all chunks and value
// heads at once, and writes it to a workspace as entries that later copy to shared memory
// unchanged:
//
//   T        Tm diag(beta) = (I + A)^-1 diag(beta)       [64, 64] bf16, swizzled
//   P        (Q K^T) o E                                  [64, 64] bf16, swizzled
//   scales   exp(G) / |k|, exp(G_last - G) / |k|, exp(G), scale / |q|: per token; exp(G_last)
//
// chain_kernel runs a chain: it takes 64 rows of a value head's state S [V, K] through the chunks
// of a sequence:
//
//   Y = V^T - exp(G) S K^T        Vn^T = Y T^T        S = exp(G_last) S + (E_last Vn)^T K
//   O^T = exp(G) S Q^T + Vn^T P^T
//
// All products are the transposes of the papers'. S [v, k] and Y, Vn^T [v, tokens] are then left
// operands, which wgmma takes from registers, so that the dependency from one chunk to the next
// never goes through memory. The outputs' products are issued after those that the next step waits
// for, and fill the gaps that the chain leaves on the tensor cores.
//
//   prepare_kernel  grid:  clusters of two blocks, persistent
//                   block: 4 warpgroups; each takes chunks of its own, a value head at a time
//   chain_kernel    grid:  clusters of two blocks, persistent; a block takes pieces of work in
//                          turns, longest sequences first
//                   block: warpgroup 0 loads (warp 0) and zeroes outputs that no chain writes (warp
//                          2); one or two more warpgroups hold 64 rows of a state each
//
// If the chains leave processors idle, both kernels run at the same time, and a counter per
// entry and reader tells the chains that the entry is complete; otherwise the second kernel waits
// for the first.
//
// Followers. In that mode, rows of many chunks have two chains, with the same bits. The first chain
// leaves out the outputs of the first chunks, which then take two thirds of the time. Its follower
// starts from a copy of the same state, on the processors that have finished preparing, and
// computes those outputs and the states at their boundaries. Chains never wait for their followers.
//
// Segments. Few heads leave most processors without a chain, so rows are cut into segments. Over a
// segment, each row of S changes by a map s -> s M + n: a chain without values that starts from the
// unit matrix gives M, a chain that starts from 0 gives n. A first launch runs both chains, without
// outputs, over stretches of two segments; join_kernel composes the maps and finds the state before
// each segment; then the chains of all segments run side by side. Sums run in another order than
// over whole rows, so the bits differ from theirs.
//
// The norms are never multiplied into q and k: 1 / |k_j| and 1 / |q_i| are folded into the scales
// per token. Decays are exp2 of differences of G, which is kept in units of log2.
//
// Two neighbouring processors of an H200 share 32 KiB of instruction cache (measured with loops of
// growing length; beyond it every 8 instructions wait for 75 cycles), so the code that neighbours
// run at a time has to stay below 2048 instructions. This is why the two kernels are not one, and
// why their blocks come in clusters of two, which the device places on neighbours.
//
// Only the last chunk of a sequence has fewer than 64 tokens. The rows beyond them are zeroed in
// its K and V; those in its Q only reach outputs that are not stored.
#pragma once

#include "kernels/base/hopper.cuh"
#include "kernels/base/slots.cuh"

namespace lockstep::kernels::delta_chunks {

using namespace hopper;

constexpr int kChunk = 64;       ///< tokens
constexpr int kK = 128;          ///< columns of a state
constexpr int kPart = 64;        ///< rows of a state that a chain holds
constexpr int kKnownRows = 512;  ///< sequences, at most, of which a block keeps order and entries
constexpr int kGroups = 4;       ///< warpgroups of a block of prepare_kernel
constexpr int kThreads = kGroups * kWarpgroup;
constexpr int kNeighbours = 2;                 ///< processors that share an instruction cache
constexpr int kTile = kChunk * kTileRowBytes;  ///< bytes of a tile of 64 tokens: 8 KiB
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kLateChunks = 4;  ///< chunks that a chain finishes while its follower's block starts
constexpr int kStretch = 2;     ///< segments that one chain without outputs runs through

/// The task of a launch of chains.
enum class Run {
  rows,       ///< whole rows
  followed,   ///< whole rows, by a chain and a follower each
  stretches,  ///< the maps (M, n) of stretches, without outputs
  segments    ///< segments of rows, from the states before them
};

/// An address recomputed into a uniform register. The compiler would otherwise keep descriptors in
/// ordinary registers, and move them to uniform ones before each product.
__device__ inline std::uint32_t uniform_address(std::uint32_t address) {
  return static_cast<std::uint32_t>(uniform(static_cast<int>(address)));
}
__device__ inline int lane_of_warp() {
  return static_cast<int>(threadIdx.x % 32);
}

/// A state pool whose element type is known only at run time: states are read and written once per
/// sequence, so the branches on the type cost little.
struct States {
  void* data = nullptr;
  Format format = Format::float32;
  bool pairs = false;  ///< columns 2 i and 2 i + 1 are contiguous and aligned as a pair
  bool fours = false;  ///< float32, with columns 4 i ... 4 i + 3 contiguous and aligned to 16 bytes
  std::int64_t slot_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;

#ifdef __CUDACC__
  __device__ std::int64_t offset(int slot, int head, int row, int column) const {
    return slot * slot_stride + head * head_stride + row * row_stride + column * column_stride;
  }
  __device__ float one(std::int64_t offset) const {
    return value_of(bits_at(data, format, offset), format);
  }
  __device__ float2 two(std::int64_t offset) const {
    if (!pairs) return {one(offset), one(offset + column_stride)};
    if (format == Format::float32)
      return *reinterpret_cast<const float2*>(static_cast<const float*>(data) + offset);
    const std::uint32_t both =
        *reinterpret_cast<const std::uint32_t*>(static_cast<const Bf16*>(data) + offset);
    return format == Format::bf16 ? unpack<Bf16>(both) : unpack<Fp16>(both);
  }
  __device__ void put(std::int64_t offset, float x) const {
    if (format == Format::float32) static_cast<float*>(data)[offset] = x;
    if (format == Format::bf16) static_cast<Bf16*>(data)[offset] = from_float<Bf16>(x);
    if (format == Format::fp16) static_cast<Fp16*>(data)[offset] = from_float<Fp16>(x);
  }
  __device__ void put(std::int64_t offset, float x, float y) const {
    if (!pairs) {
      put(offset, x);
      put(offset + column_stride, y);
    } else if (format == Format::float32) {
      *reinterpret_cast<float2*>(static_cast<float*>(data) + offset) = {x, y};
    } else {
      *reinterpret_cast<std::uint32_t*>(static_cast<Bf16*>(data) + offset) =
          format == Format::bf16 ? pack<Bf16>(x, y) : pack<Fp16>(x, y);
    }
  }
#endif
};

struct Parameters {
  RowSlots rows;  ///< without starts: one row of all tokens
  const bool* has_initial_state = nullptr;
  std::int64_t has_initial_state_stride = 0;
  States state, boundary;
  int boundary_every = 0;
  int boundary_count = 0;  ///< places of `boundary`
  MixedView<2> g, beta;
  MixedView<1> A_log, dt_bias;
  float scale = 1;
  bool use_qk_l2norm = false;
  Divisor value_heads_per_key_head;
  int heads = 0;  ///< HV
  int V = 0;
  Bf16* out = nullptr;
  std::int64_t out_token_stride = 0, out_head_stride = 0;
  char* entries = nullptr;  ///< in the workspace: Entry [entry_count, HV]
  int* counters = nullptr;  ///< [entries, HV, readers]: warps that completed the entry, up to 4; 0
                            ///< between calls. Null: the kernels run one after the other
  int readers = 0;          ///< chains that read an entry: V / kPart
  int entry_count = 0;      ///< entries of a value head; an upper bound of the chunks
  int lead = 0;             ///< 256ths of a row's chunks that its followers compute; 0: none
  States initial;           ///< [rows, HV, V, K] float32: states from which followers start
  int* copied = nullptr;    ///< [rows, HV, readers]: 1 when `initial` is written; 0 between calls
  int segment = 0;          ///< chunks of a segment; 0: rows are whole
  int segments = 0, stretches = 0;  ///< places for the segments and stretches of all rows
  States before;     ///< [segments, HV, V, K] float32: the state before each segment. Until
                     ///< join_kernel has run: n, the state if it was 0 before the stretch
  States transfers;  ///< [segments, HV, K, K] float32: M, from the stretch's begin to the segment

#ifdef __CUDACC__
  __device__ TokenRange range(int row) const {
    return rows.starts ? rows.range(row) : TokenRange{0, rows.tokens};
  }
  /// The slot of a row's state; kNowhere: the row is skipped. Without a pool, a number that is
  /// neither a slot nor kNowhere.
  __device__ int slot(int row) const {
    return state.data ? rows.source(row) : rows.slot_count;
  }
  __device__ bool resumes(int row) const {
    return state.data && (!has_initial_state || has_initial_state[row * has_initial_state_stride]);
  }
  /// Whether `boundary` has the place; a state without one is not stored.
  __device__ bool has_boundary(int place) const {
    return 0 <= place && place < boundary_count;
  }
  /// The number of leading chunks, of a row's `chunks`, whose outputs its followers compute.
  __device__ int led(int chunks) const {
    return lead > 0 ? max(chunks * lead / 256 - kLateChunks, 0) : 0;
  }
#endif
};

struct Maps {
  CUtensorMap q, k, v, out;
};

/// The result of prepare_kernel for a chunk and a value head.
struct Entry {
  struct Scales {
    /// Per token: y = exp(G) / |k|, w = exp(G_last - G) / |k|, decays = exp(G), norms = scale /
    /// |q|. decay = exp(G_last).
    float y[kChunk], w[kChunk], decays[kChunk], norms[kChunk], decay, unused[3];
  };
  char t[kTile], p[kTile];  ///< T and P: swizzled tiles of bf16
  Scales scales;
  char unused[112];
};
static_assert(sizeof(Entry) % 128 == 0);

// --- Pieces of work ------------------------------------------------------------------------------

/// A piece of work of a block: the chain or chains of kPart rows each, of one value head, over one
/// sequence or segment.
struct Piece {
  int row, head;
  int part;  ///< the state rows begin at part * kPart
  TokenRange tokens;
  int chunks;            ///< chunks to run; 0 also where the row has no slot
  int entry;             ///< entry of the first chunk
  bool follows;          ///< a follower: computes outputs of the first chunks, stores no last state
  int first_output;      ///< the first chunk with outputs
  int skipped = 0;       ///< chunks of the row before the piece
  int place = 0;         ///< place of the piece's first segment
  bool of_unit = false;  ///< starts from the unit matrix, without values: gives M
  bool ends_row = true;  ///< contains the row's last chunk
};

/// The entry of a row's first chunk; those of the row's other chunks follow. Each row may waste one
/// entry, so begin / kChunk + row never falls into the entries of an earlier row.
__device__ inline int first_entry(int row, int begin) {
  return begin / kChunk + row;
}
__device__ inline int chunks_of(const Parameters& p, int row, int size) {
  return p.slot(row) == kNowhere ? 0 : (size + kChunk - 1) / kChunk;
}

/// The place of a row's first segment (or stretch) of `chunks` chunks; those of its others follow.
__device__ inline int first_place(int row, int begin, int chunks) {
  return begin / (chunks * kChunk) + row;
}

/// The pieces of a launch, and their distribution over blocks.
struct Work {
  const Parameters& p;
  const std::uint16_t* order;  ///< rows, longest first; used if there are at most kKnownRows
  int pieces_per_head, parts_per_piece;
  Run run;

  /// Fills `order` in shared memory; `lengths` is scratch. Every thread of the block calls it.
  __device__ static void sort(const Parameters& p, std::uint16_t* order, int* lengths) {
    const int rows = p.rows.rows;
    if (rows > kKnownRows) return;
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    for (int row = first; row < rows; row += step) lengths[row] = p.range(row).size;
    __syncthreads();
    for (int row = first; row < rows; row += step) {
      const int own = lengths[row];
      int before = 0;
      for (int other = 0; other < rows; ++other)
        before += lengths[other] > own || (lengths[other] == own && other < row);
      order[before] = static_cast<std::uint16_t>(row);
    }
    __syncthreads();
  }

  /// Pieces of a head that start from the unit matrix, which has K rows.
  __device__ int units_per_head() const { return kK / (kPart * parts_per_piece); }
  __device__ int pieces() const {
    const int per_row = p.heads * pieces_per_head;
    if (run == Run::segments) return p.segments * per_row;
    if (run == Run::stretches)  // stretch 0 starts from a row's state: its M is not needed
      return p.stretches * per_row + (p.stretches - 1) * p.heads * units_per_head();
    return p.rows.rows * per_row * (run == Run::followed ? 2 : 1);
  }
  __device__ Piece piece(int number) const {
    if (run == Run::stretches || run == Run::segments) return segment(number);
    Piece x;
    const int per_row = p.heads * pieces_per_head;
    x.follows = run == Run::followed && number >= p.rows.rows * per_row;
    if (x.follows) number -= p.rows.rows * per_row;
    const int place = number / per_row, rest = number - place * per_row;
    x.row = uniform(p.rows.rows <= kKnownRows ? order[place] : place);
    x.head = rest / pieces_per_head;
    x.part = (rest - x.head * pieces_per_head) * parts_per_piece;
    const TokenRange tokens = p.range(x.row);
    x.tokens = {uniform(tokens.begin), uniform(tokens.size)};
    x.chunks = uniform(chunks_of(p, x.row, x.tokens.size));
    x.entry = first_entry(x.row, x.tokens.begin);
    x.first_output = run == Run::followed ? p.led(x.chunks) : 0;
    if (x.follows) x.chunks = x.first_output, x.first_output = 0;
    return x;
  }
  /// The piece of a segment, or of a stretch, which ends where the row's last segment begins at the
  /// latest: only states before segments are needed. A place that no segment takes has 0 chunks.
  __device__ Piece segment(int number) const {
    Piece x;
    const int states = p.stretches * p.heads * pieces_per_head;
    x.of_unit = run == Run::stretches && number >= states;
    if (x.of_unit) number -= states;
    const int per_head = x.of_unit ? units_per_head() : pieces_per_head;
    const int chunks = p.segment * (run == Run::stretches ? kStretch : 1);
    const int place = number / (p.heads * per_head) + x.of_unit;
    const int rest = number % (p.heads * per_head);
    x.head = rest / per_head;
    x.part = (rest - x.head * per_head) * parts_per_piece;
    x.row = 0;  // bisection: the last row whose first place is not after this place
    for (int above = p.rows.rows; above - x.row > 1;) {
      const int middle = (x.row + above) / 2;
      (first_place(middle, p.range(middle).begin, chunks) <= place ? x.row : above) = middle;
    }
    x.row = uniform(x.row);
    const TokenRange tokens = p.range(x.row);
    const int all = chunks_of(p, x.row, tokens.size);
    const int index = place - first_place(x.row, tokens.begin, chunks);
    x.skipped = uniform(index * chunks);
    const int left = all - x.skipped;
    x.chunks = run == Run::segments ? min(max(left, 0), chunks)
               : x.of_unit && x.skipped == 0
                   ? 0
                   : min(max(left - 1, 0) / p.segment * p.segment, chunks);
    x.chunks = uniform(x.chunks);
    x.tokens = {uniform(tokens.begin) + x.skipped * kChunk,
                uniform(min(tokens.size - x.skipped * kChunk, chunks * kChunk))};
    x.entry = first_entry(x.row, tokens.begin) + x.skipped;
    x.place = first_place(x.row, tokens.begin, p.segment) + x.skipped / p.segment;
    x.ends_row = run == Run::segments && (x.skipped == 0 || left > 0) && left <= chunks;
    x.follows = false;
    x.first_output = 0;
    return x;
  }

  /// Calls visit(piece) for the pieces of this block. Rounds of pieces go forwards and backwards
  /// over the blocks in turns, so that a block with a long sequence in one round has a shorter one
  /// in the next. Whole warps call it.
  template <class Visit>
  __device__ void for_each_piece(Visit visit) const {
    const int blocks = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
    const int count = pieces();
    for (int round = 0; round * blocks < count; ++round) {
      const int number = round * blocks + (round % 2 ? blocks - 1 - own : own);
      if (number < count) visit(piece(number));
    }
  }
  /// Calls visit(piece, chunk, n) for all chunks of this block; n counts them over all pieces.
  template <class Visit>
  __device__ void for_each_chunk(Visit visit) const {
    int n = 0;
    for_each_piece([&](const Piece& piece) {
      for (int chunk = 0; chunk < piece.chunks; ++chunk, ++n) visit(piece, chunk, n);
    });
  }
};

/// The n-th use of a ring of kSlots stages.
struct Use {
  int slot;
  std::uint32_t parity;  ///< parity of the barrier phase that ends when this use is filled
};
template <int kSlots>
__device__ inline Use use_of(int n) {
  const auto uses = static_cast<unsigned>(n);
  return {static_cast<int>(uses % kSlots), uses / kSlots & 1};
}

__device__ inline int size_of_chunk(int tokens, int chunk) {
  return min(kChunk, tokens - chunk * kChunk);
}

/// Source of zeros for zero_rows().
__device__ const uint4 kZeros[kTile / 16] = {};

/// Zeroes the rows of `count` tiles after their first `size` rows. Waits on barrier `loaded` for
/// the tiles' loads, then copies zeros over the rows; `full` completes when the zeros have landed.
__device__ inline void zero_rows(std::uint32_t tiles, int count, int size, std::uint32_t loaded,
                                 std::uint32_t parity, std::uint32_t full) {
  barrier_wait(loaded, parity);
  const int bytes = (kChunk - size) * kTileRowBytes;
  barrier_expect(full, count * bytes);
  for (int i = 0; i < count; ++i)
    load_bytes(tiles + i * kTile + size * kTileRowBytes, kZeros, bytes, full);
}

// --- prepare_kernel: all that needs no state -----------------------------------------------------

constexpr int kBlockStride = 16;  ///< floats of a row of a 16 x 16 block

/// Shared memory of a warpgroup: 45 KiB, so 180 KiB of a block of four.
struct PrepareMemory {
  char k[2 * kTile];   ///< K [64, 128], 16 KiB; T overwrites its first 8 KiB
  char q[2 * kTile];   ///< Q [64, 128], 16 KiB; P overwrites its first 8 KiB
  char blocks[kTile];  ///< float16 tile of 4 x 4 blocks of 16 x 16: A's below the diagonal, Tm's on
                       ///< it
  float diagonals[4][16 * kBlockStride];  ///< A's blocks on the diagonal, one per warp: 4 KiB
  /// Of the chunk's tokens: G in units of log2, beta, log2(1 / |k|).
  float G[kChunk], beta[kChunk], log_norms[kChunk];
  /// full: K and Q are complete. tail: K and Q of a last chunk are loaded, but K not yet zeroed.
  alignas(8) std::uint64_t full, tail;
  char unused[1024 - 3 * 4 * kChunk - 16];
};
static_assert(sizeof(PrepareMemory) % 1024 == 0);
constexpr int kPrepareBytes = kGroups * int{sizeof(PrepareMemory)} + kKnownRows * 4 + 4 + 1024;

/// softplus(x) / ln 2, within a few units in the last place. Small e^x take a series, since 1 + e^x
/// would lose their bits.
__device__ inline float softplus_in_log2(float x) {
  const float e = exp2_fast(kLog2e * x);
  float y = __log2f(1.0f + e);
  if (e < 0.01f) y = kLog2e * e * fmaf(e, fmaf(e, 1.0f / 3, -0.5f), 1.0f);  // e^4 / 4 is left out
  return x <= 20.0f ? y : kLog2e * x;
}

/// A warpgroup's work in prepare_kernel; warp w computes rows (tokens) 16 w ... 16 w + 15 of a
/// chunk. Entries of A and Tm are kept in float16, whose range suffices where keys are nearly
/// normalised.
struct Preparation {
  const Parameters& p;
  const Maps& maps;
  PrepareMemory& m;
  const int* firsts;  ///< first entry of each row, if there are at most kKnownRows
  int group, warp, lane;

  __device__ void sync() const { sync_threads_of(1 + group, kWarpgroup); }
  __device__ std::uint32_t blocks() const { return shared_address(m.blocks); }
  __device__ float* diagonal() const { return m.diagonals[warp]; }
  __device__ int first(int row) const {
    return p.rows.rows <= kKnownRows ? firsts[row] : first_entry(row, p.range(row).begin);
  }

  /// A chunk of a value head: `size` tokens from `token` on.
  struct Task {
    int number, entry = 0, head = 0, token = 0, size = 0;
  };
  /// The warpgroup's first task from `number` on whose entry belongs to a chunk; its number is
  /// negative if there is none.
  __device__ Task find(int number) const {
    const int count = p.entry_count * p.heads;
    for (; number < count; number += kGroups * static_cast<int>(gridDim.x)) {
      Task task{number};
      task.entry = number / p.heads;
      task.head = number - task.entry * p.heads;
      int row = 0;  // bisection: the last row whose first entry is not after this entry
      for (int above = p.rows.rows; above - row > 1;) {
        const int middle = (row + above) / 2;
        (first(middle) <= task.entry ? row : above) = middle;
      }
      row = uniform(row);
      const TokenRange tokens = p.range(row);
      const int chunk = task.entry - first_entry(row, tokens.begin);
      if (chunk < 0 || chunk >= chunks_of(p, row, tokens.size)) continue;
      task.token = tokens.begin + chunk * kChunk;
      task.size = size_of_chunk(tokens.size, chunk);
      return task;
    }
    return {-1};
  }

  /// The gates of a chunk, unconverted, with their loads still under way. Lane i has tokens 2 i and
  /// 2 i + 1.
  struct RawGates {
    unsigned g[2], beta[2], A_log, dt_bias;
  };
  __device__ RawGates fetch(const Task& task) const {
    RawGates raw{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = task.token + min(2 * lane + i, task.size - 1);
      raw.g[i] = bits_at(p.g, token, task.head);
      raw.beta[i] = bits_at(p.beta, token, task.head);
    }
    if (p.A_log) {
      raw.A_log = bits_at(p.A_log, task.head);
      raw.dt_bias = bits_at(p.dt_bias, task.head);
    }
    return raw;
  }

  /// Prepares the warpgroup's tasks. Loads of the next task's gates (by warp 1) and an L2 prefetch
  /// of its K and Q (by warp 2) run behind the current task.
  __device__ void run() {
    std::uint32_t uses = 0, tails = 0;  // completed phases of `full` and `tail`
    RawGates raw{};
    Task next = find(static_cast<int>(blockIdx.x) + group * static_cast<int>(gridDim.x));
    if (next.number >= 0 && warp == 1) raw = fetch(next);
    while (next.number >= 0) {
      const Task task = next;
      start(task, tails & 1);
      next = find(task.number + kGroups * static_cast<int>(gridDim.x));
      prepare(task, next, raw, uses++ & 1);
      tails += task.size < kChunk;
    }
  }

  /// Issues the loads of K and Q.
  __device__ void start(const Task& task, std::uint32_t tail_parity) const {
    if (lane == 0) wait_for_reads<0>();  // the last task's T and P have been read from there
    sync();
    if (warp == 0 && lane == 0) {
      const std::uint32_t k = shared_address(m.k), q = k + 2 * kTile;
      const std::uint32_t full = shared_address(&m.full);
      const std::uint32_t loaded = task.size == kChunk ? full : shared_address(&m.tail);
      const int h = p.value_heads_per_key_head.of(task.head);
      barrier_expect(loaded, 4 * kTile);
      for (int half = 0; half < 2; ++half) {
        load_tile(k + half * kTile, maps.k, half * kTileColumns, h, task.token, loaded);
        load_tile(q + half * kTile, maps.q, half * kTileColumns, h, task.token, loaded);
      }
      if (task.size < kChunk) zero_rows(k, 2, task.size, loaded, tail_parity, full);
    }
    __syncwarp();
  }

  /// Computes the entry of `task`: K K^T and Q K^T on the tensor cores, A and P from them, Tm from
  /// A; then stores T, P and the scales.
  __device__ void prepare(const Task& task, const Task& next, RawGates& raw,
                          std::uint32_t parity) const {
    const std::uint32_t k = uniform_address(shared_address(m.k)), q = k + 2 * kTile;
    const int entry = task.entry, head = task.head;
    if (next.number >= 0 && warp == 2 && lane == 0) {
      const int h = p.value_heads_per_key_head.of(next.head);
      for (int half = 0; half < 2; ++half) {
        prefetch_tile(maps.k, half * kTileColumns, h, next.token);
        prefetch_tile(maps.q, half * kTileColumns, h, next.token);
      }
    }
    __syncwarp();
    if (warp == 1) {
      compute_gates(raw, task.size);
      if (next.number >= 0) raw = fetch(next);
    }
    Entry& to = reinterpret_cast<Entry*>(p.entries)[std::int64_t{entry} * p.heads + head];
    {
      float kk[32], qk[32];
      barrier_wait(shared_address(&m.full), parity);
      pin(kk), pin(qk);
      start_products();
      all_products(kk, k, k);
      all_products(qk, q, k);
      commit_products();
      const float2 query_norms = norms_of_queries(q);
      wait_for_products<0>();
      pin(kk), pin(qk);
      note_norms(kk);
      sync();  // all warps have used K and Q, which T and P overwrite; G and the norms are there
      scale(kk, qk, q);
      if (lane % 4 == lane / 8) {
        const int i = 16 * warp + lane / 4;
        to.scales.norms[i] = query_norms.x;
        to.scales.norms[i + 8] = query_norms.y;
      }
    }
    const float last = m.G[kChunk - 1];
    const int own = 32 * (warp % 2) + lane;
    if (warp < 2) {
      const float norm = m.log_norms[own];
      to.scales.y[own] = exp2_fast(m.G[own] + norm);
      to.scales.w[own] = exp2_fast(last - m.G[own] + norm);
    } else {
      to.scales.decays[own] = exp2_fast(m.G[own]);
      if (warp == 2 && lane == 0) to.scales.decay = exp2_fast(last);
    }
    float y[2][4];
    invert_diagonal(y);
    sync();  // all blocks of A and all diagonal blocks of Tm are in shared memory
    invert(y, k);
    publish_to_async();
    __syncwarp();
    if (lane == 0) {
      store_bytes(to.t + warp * 2048, k + warp * 2048, 2048);
      store_bytes(to.p + warp * 2048, q + warp * 2048, 2048);
      commit_stores();
    }
    if (p.counters) {
      if (lane == 0) wait_for_stores();
      __syncwarp();  // all lanes' stores come before the counts
      if (lane < p.readers)
        count_up(p.counters + (std::int64_t{entry} * p.heads + head) * p.readers + lane);
    }
  }

  /// Writes G (in units of log2, cumulative within the chunk) and beta to shared memory; tokens
  /// after the chunk's end have decay and beta 0. One warp calls it.
  __device__ void compute_gates(const RawGates& raw, int size) const {
    const float A = -expf(value_of(raw.A_log, p.A_log.format));
    const float bias = value_of(raw.dt_bias, p.dt_bias.format);
    float decay[2], strength[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      decay[i] = value_of(raw.g[i], p.g.format);
      strength[i] = value_of(raw.beta[i], p.beta.format);
      if (p.A_log) {
        decay[i] = A * softplus_in_log2(decay[i] + bias);
        strength[i] = __fdividef(1.0f, 1.0f + exp2_fast(-kLog2e * strength[i]));
      } else {
        decay[i] *= kLog2e;
      }
      if (2 * lane + i >= size) decay[i] = strength[i] = 0.0f;
    }
    float sum = decay[0] + decay[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float earlier = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += earlier;
    }
    reinterpret_cast<float2*>(m.G)[lane] = {sum - decay[1], sum};
    reinterpret_cast<float2*>(m.beta)[lane] = {strength[0], strength[1]};
  }

  /// scale / |q| of the warp's rows l / 4 and l / 4 + 8, in the lanes l with l % 4 = l / 8. The
  /// squares are the diagonal of Q Q^T. For a 16 x 16 block on that diagonal the left and the right
  /// operand of mma are the same registers, so each block takes one load.
  __device__ float2 norms_of_queries(std::uint32_t q) const {
    if (!p.use_qk_l2norm) return {p.scale, p.scale};
    float z[2][4] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      std::uint32_t x[4];
      load_matrices(x, q + k / 4 * kTile + own_row(k % 4 * 2));
      add_warp_product<Bf16>(z[0], x, x[0], x[2]);
      add_warp_product<Bf16>(z[1], x, x[1], x[3]);
    }
    const bool odd = lane / 4 % 2;
    return {p.scale * rsqrtf((odd ? z[0][1] : z[0][0]) + 1e-6f),
            p.scale * rsqrtf((odd ? z[1][3] : z[1][2]) + 1e-6f)};
  }

  /// Offset in a tile of the 16 x 16 block that consists of the warp's rows and the 16-byte pieces
  /// `chunk` and `chunk` + 1, in the form that store_matrices() and load_matrices() take: each lane
  /// names a row of an 8 x 8 matrix.
  __device__ std::uint32_t own_row(int chunk) const {
    return warp * 2048 + tile_offset(lane % 16, chunk + lane / 16);
  }

  /// d [64, 64] = X Y^T for tiles of 64 rows and 128 columns.
  __device__ static void all_products(float (&d)[32], std::uint32_t x, std::uint32_t y) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const std::uint32_t offset = k / 4 * kTile + k % 4 * 32;
      Product<Bf16, 64, false>::of(d, matrix(x + offset, 16, 1024), matrix(y + offset, 16, 1024),
                                   k > 0);
    }
  }

  /// Writes log2(1 / |k|) of the warp's tokens to shared memory, from the diagonal of K K^T; 0
  /// without normalisation.
  __device__ void note_norms(const float (&kk)[32]) const {
    float square[2] = {};
    const bool odd = lane / 4 % 2;
#pragma unroll
    for (int w = 0; w < 4; ++w)
      if (w == warp)
#pragma unroll
        for (int below = 0; below < 2; ++below) {
          const float* const d = kk + 4 * (2 * w + below) + 2 * below;
          square[below] = odd ? d[1] : d[0];
        }
    if (lane % 4 != lane / 8) return;
#pragma unroll
    for (int below = 0; below < 2; ++below)
      m.log_norms[16 * warp + 8 * below + lane / 4] =
          p.use_qk_l2norm ? -0.5f * log2f(square[below] + 1e-6f) : 0.0f;
  }

  /// From K K^T and Q K^T computes A (to `blocks` and `diagonals`) and P (to the tile `to`). Both
  /// take the same factor exp(G_i - G_j) / |k_j|; A_ij takes beta_i / |k_i| besides, P's 1 / |q_i|
  /// follows in the chain.
  __device__ void scale(const float (&kk)[32], const float (&qk)[32], std::uint32_t to) const {
    const int row = lane / 4, two = 2 * (lane % 4);
    float sum[2], strength[2];
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int i = 16 * warp + row + 8 * below;
      sum[below] = m.G[i];
      strength[below] = m.beta[i] * exp2_fast(m.log_norms[i]);
    }
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      std::uint32_t scores[4] = {}, words[4] = {};
      if (block <= warp) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = 8 * half + two;  // column in the block
          float2 from = *reinterpret_cast<const float2*>(m.G + 16 * block + column);
          const float2 norm = *reinterpret_cast<const float2*>(m.log_norms + 16 * block + column);
          from.x -= norm.x, from.y -= norm.y;
#pragma unroll
          for (int below = 0; below < 2; ++below) {
            const int d = 8 * block + 4 * half + 2 * below;
            float e0 = exp2_fast(sum[below] - from.x), e1 = exp2_fast(sum[below] - from.y);
            if (block == warp) {
              const int i = row + 8 * below;
              if (column > i) e0 = 0.0f;
              if (column + 1 > i) e1 = 0.0f;
            }
            scores[2 * half + below] = pack<Bf16>(qk[d] * e0, qk[d + 1] * e1);
            const float a0 = kk[d] * e0 * strength[below], a1 = kk[d + 1] * e1 * strength[below];
            words[2 * half + below] = pack<Fp16>(a0, a1);
            if (block == warp)
              *reinterpret_cast<float2*>(diagonal() + (row + 8 * below) * kBlockStride + column) = {
                  a0, a1};
          }
        }
        if (block < warp)
          store_matrices(blocks() + own_row(2 * block), words[0], words[1], words[2], words[3]);
      }
      store_matrices(to + own_row(2 * block), scores[0], scores[1], scores[2], scores[3]);
    }
  }

  /// Inverts the warp's 16 x 16 block of I + A on the diagonal; y gets the inverse, in the layout
  /// of a product's result. The two 8 x 8 blocks on its diagonal are inverted by forward
  /// substitution, one lane per column; the block below them is -lower (left upper), on the tensor
  /// cores. The diagonal of A itself is never read.
  __device__ void invert_diagonal(float (&y)[2][4]) const {
    float* const a = diagonal();
    const int column = lane % 8, begin = lane & 8;
    float x[8];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 row =
            *reinterpret_cast<const float4*>(a + (begin + i) * kBlockStride + begin + j);
        x[i] = fmaf(-row.x, x[j], x[i]);
        if (j + 1 < i) x[i] = fmaf(-row.y, x[j + 1], x[i]);
        if (j + 2 < i) x[i] = fmaf(-row.z, x[j + 2], x[i]);
        if (j + 3 < i) x[i] = fmaf(-row.w, x[j + 3], x[i]);
      }
    }
    __syncwarp();
    if (lane < 16)
#pragma unroll
      for (int i = 0; i < 8; ++i) a[(begin + i) * kBlockStride + begin + column] = x[i];
    __syncwarp();
    const float* const own_row = a + lane / 4 * kBlockStride + 2 * (lane % 4);
    const float2 upper = *reinterpret_cast<const float2*>(own_row);
    const float2 left = *reinterpret_cast<const float2*>(own_row + 8 * kBlockStride);
    const float2 lower = *reinterpret_cast<const float2*>(own_row + 8 * kBlockStride + 8);
    // w = -lower (left upper): z = -left upper, then w = lower z.
    const std::uint32_t first[4] = {pack<Fp16>(-left.x, -left.y), 0, 0, 0};
    const std::uint32_t second[4] = {pack<Fp16>(lower.x, lower.y), 0, 0, 0};
    float z[4] = {}, w[4] = {};
    add_warp_product<Fp16>(z, first, transposed_in_warp(pack<Fp16>(upper.x, upper.y)), 0);
    add_warp_product<Fp16>(w, second, transposed_in_warp(pack<Fp16>(z[0], z[1])), 0);
    y[0][0] = upper.x, y[0][1] = upper.y, y[0][2] = w[0], y[0][3] = w[1];
    y[1][0] = 0.0f, y[1][1] = 0.0f, y[1][2] = lower.x, y[1][3] = lower.y;
    std::uint32_t words[4];
    to_operand(words, y);
    store_matrices(blocks() + this->own_row(2 * warp), words[0], words[1], words[2], words[3]);
  }
  __device__ static void to_operand(std::uint32_t (&words)[4], const float (&x)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[2 * half] = pack<Fp16>(x[half][0], x[half][1]);
      words[2 * half + 1] = pack<Fp16>(x[half][2], x[half][3]);
    }
  }
  /// z += x B, where B is block (i, j) of the tile blocks().
  __device__ void add_block_product(float (&z)[2][4], const std::uint32_t (&x)[4], int i,
                                    int j) const {
    std::uint32_t rows[4];
    load_transposed(rows, blocks() + i * 2048 + tile_offset(lane % 16, 2 * j + lane / 16));
    add_warp_product<Fp16>(z[0], x, rows[0], rows[1]);
    add_warp_product<Fp16>(z[1], x, rows[2], rows[3]);
  }

  /// Writes the warp's rows of Tm diag(beta) to the tile `to`. Let I be the warp's row of 16 x 16
  /// blocks. Tm (I + A) = 1 gives Tm_Ij = -(sum over j < k <= I of Tm_Ik A_kj) Tm_jj, block by
  /// block from the diagonal to the left; blocks right of the diagonal are 0.
  __device__ void invert(float (&y)[2][4], std::uint32_t to) const {
    std::uint32_t x[4][4];  // Tm_II, Tm_I,I-1, ...
    to_operand(x[0], y);
    store_block(to, y, warp);
#pragma unroll
    for (int left = 1; left < 4; ++left) {
      const int j = warp - left;
      if (j < 0) continue;
      float sum[2][4] = {};
#pragma unroll
      for (int k = 0; k < left; ++k) add_block_product(sum, x[k], warp - k, j);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[half][i] = -sum[half][i], y[half][i] = 0.0f;
      std::uint32_t words[4];
      to_operand(words, sum);
      add_block_product(y, words, j, j);
      to_operand(x[left], y);
      store_block(to, y, j);
    }
    for (int j = warp + 1; j < 4; ++j) store_matrices(to + own_row(2 * j), 0, 0, 0, 0);
  }

  /// Stores y diag(beta) as block j of the warp's row of blocks.
  __device__ void store_block(std::uint32_t to, const float (&y)[2][4], int j) const {
    std::uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 scale =
          *reinterpret_cast<const float2*>(m.beta + 16 * j + 8 * half + 2 * (lane % 4));
      words[2 * half] = pack<Bf16>(y[half][0] * scale.x, y[half][1] * scale.y);
      words[2 * half + 1] = pack<Bf16>(y[half][2] * scale.x, y[half][3] * scale.y);
    }
    store_matrices(to + own_row(2 * j), words[0], words[1], words[2], words[3]);
  }
};

__global__ void __cluster_dims__(kNeighbours, 1, 1) __launch_bounds__(kThreads, 1)
    prepare_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Parameters p) {
  extern __shared__ char raw[];
  char* const memory = raw + ((shared_address(raw) + 1023) / 1024 * 1024 - shared_address(raw));
  const int group = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32 % 4), lane = lane_of_warp();
  auto* const memories = reinterpret_cast<PrepareMemory*>(memory);
  int* const firsts = reinterpret_cast<int*>(memories + kGroups);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(shared_address(&memories[i].full), 1);
      barrier_init(shared_address(&memories[i].tail), 1);
    }
    publish_barriers();
  }
  wait_for_earlier_launch();
  let_the_next_launch_start();
  if (p.rows.rows <= kKnownRows && static_cast<int>(threadIdx.x) < p.rows.rows)
    firsts[threadIdx.x] =
        first_entry(static_cast<int>(threadIdx.x), p.range(static_cast<int>(threadIdx.x)).begin);
  __syncthreads();
  Preparation{p, maps, memories[group], firsts, group, warp, lane}.run();
  if (lane == 0) wait_for_stores();
}

// --- chain_kernel --------------------------------------------------------------------------------

constexpr int kStages = 3;
constexpr int kStateRow = 4 * kK + 32;  ///< bytes between rows of a state: no bank twice in a store

/// Shared memory of a block that holds kParts times 64 rows of a state. A stage is 48 + 8 kParts
/// KiB: the ring takes 168 or 192 KiB of the block's 227.
template <int kParts>
struct ChainMemory {
  /// A chunk's K [64, 128], V [64, 64 kParts], T [64, 64], Q [64, 128], P [64, 64]: bf16 tiles.
  struct Stage {
    char k[2 * kTile], v[kParts * kTile], t[kTile], q[2 * kTile], p[kTile];
  } stages[kStages];
  char out[kParts][kTile];                           ///< outputs of a chunk, on their way to memory
  char state[kParts == 1 ? kPart * kStateRow : 16];  ///< a boundary's state, on its way to memory
  Entry::Scales scales[kStages];
  /// full: the stage is loaded. empty: the chains have used it. tail: the tiles of a last chunk are
  /// loaded, but the rows after its tokens not yet zeroed (then `full` follows).
  std::uint64_t full[kStages], empty[kStages], tail[kStages];
  std::uint16_t order[kKnownRows];
};
template <int kParts>
constexpr int kChainBytes = int{sizeof(ChainMemory<kParts>)} + 1024;
static_assert(kChainBytes<2> <= 232448, "a block has 227 KiB");

/// A block's parameters and memory. kShared: the two blocks of a cluster run the two 64-row parts
/// of the same value head. Each loads one half of the tiles that both need, by multicast to both.
template <int kParts, bool kShared, Run kRun>
struct Block {
  static_assert(kParts == 1 || !kShared);
  static constexpr bool kFollowed = kRun == Run::followed;
  using Memory = ChainMemory<kParts>;
  const Parameters& p;
  const Maps& maps;
  Work work;
  Memory& m;
  std::uint32_t base;  ///< the memory's address in shared memory

  __device__ static std::uint32_t barrier(const std::uint64_t& x) { return shared_address(&x); }
  /// Loads a matrix of 128 columns (K or Q). With kShared each block loads one of its two tiles for
  /// both blocks.
  __device__ static void load_matrix(std::uint32_t to, const CUtensorMap& map, int head, int token,
                                     std::uint32_t full) {
    if constexpr (kShared) {
      const int half = rank_in_cluster();
      load_tile_in_both(to + half * kTile, map, half * kTileColumns, head, token, full);
    } else {
      load_tile(to, map, 0, head, token, full);
      load_tile(to + kTile, map, kTileColumns, head, token, full);
    }
  }
  /// Loads a tile of an entry (T or P). With kShared each block loads one half of it for both
  /// blocks.
  __device__ static void load_prepared(std::uint32_t to, const char* from, std::uint32_t full) {
    if constexpr (kShared) {
      const int half = rank_in_cluster() * (kTile / 2);
      load_bytes_in_both(to + half, from + half, kTile / 2, full);
    } else {
      load_bytes(to, from, kTile, full);
    }
  }
  /// Arrives on the stage's `empty` barrier: the calling warpgroup, all of whose lanes call this,
  /// has used the stage. With kShared the neighbour's loads fill this block's stage too, so one
  /// lane of each warp arrives on the neighbour's barrier as well.
  __device__ void release(int stage) const {
    const std::uint32_t empty = barrier(m.empty[stage]);
    barrier_arrive(empty);
    if (kShared && lane_of_warp() == 0) remote_arrive(empty, rank_in_cluster() ^ 1);
  }
  static constexpr int kReleases =
      kParts * kWarpgroup + (kShared ? 4 : 0);  ///< arrivals of `empty`
  __device__ int* copied(const Piece& piece) const {
    return p.copied + (std::int64_t{piece.row} * p.heads + piece.head) * p.readers + piece.part;
  }
  /// The number of the row's first boundary state. A whole warp calls it.
  __device__ int first_boundary(int row) const {
    int count = 0;
    for (int other = lane_of_warp(); other < row; other += 32)
      count += p.range(other).size / p.boundary_every;
    return __reduce_add_sync(0xffffffffu, count);
  }
  __device__ std::int64_t entry_number(const Piece& piece, int chunk) const {
    return std::int64_t{piece.entry + chunk} * p.heads + piece.head;
  }
  /// Waits until the entry of a chunk is complete (four warps have counted it), and resets its
  /// counter. Returns the number of chunks from this one on, at most 32, whose entries are
  /// complete: a separate wait for each would take longer than a chunk. A whole warp calls it.
  __device__ int wait_for_entries(const Piece& piece, int chunk) const {
    const int own = chunk + lane_of_warp();
    const bool exists = own < piece.chunks;
    int* const counter = p.counters +
                         entry_number(piece, exists ? own : chunk) * work.pieces_per_head +
                         piece.part / kParts;
    unsigned missing;
    do {
      missing = __ballot_sync(0xffffffffu, !exists || count_of(counter) != 4);
    } while (missing & 1);
    const int count = missing ? __ffs(static_cast<int>(missing)) - 1 : 32;
    if (lane_of_warp() < count) *counter = 0;
    __syncwarp();
    publish_to_async_everywhere();  // bulk copies after this see the stores of prepare_kernel
    return count;
  }
};

/// The loading warp: fills the ring of stages for all chunks of the block. Lane 0 issues the
/// copies.
template <int kParts, bool kShared, Run kRun>
__device__ void load(const Block<kParts, kShared, kRun>& b) {
  using Stage = typename ChainMemory<kParts>::Stage;
  constexpr bool kFollowed = kRun == Run::followed;
  constexpr int kBytes = int{sizeof(Stage)} + int{sizeof(Entry::Scales)};
  std::uint32_t tails = 0;  // bit per stage: parity of the next phase of its `tail`
  int there = 0;            // chunks, counted over all pieces, whose entries are complete
  b.work.for_each_chunk([&](const Piece& piece, int chunk, int n) {
    // A follower starts late and waits for the whole of prepare_kernel; other chains wait for the
    // counters of single entries.
    if (kFollowed && piece.follows)
      wait_for_earlier_launch();
    else if (b.p.counters && n >= there)
      there = n + b.wait_for_entries(piece, chunk);
    if (lane_of_warp() != 0) return;
    const Use use = use_of<kStages>(n);
    Stage& stage = b.m.stages[use.slot];
    const int size = size_of_chunk(piece.tokens.size, chunk);
    const std::uint32_t full = b.barrier(b.m.full[use.slot]), k = shared_address(stage.k);
    const std::uint32_t loaded = size == kChunk ? full : b.barrier(b.m.tail[use.slot]);
    const int h = b.p.value_heads_per_key_head.of(piece.head);
    const int token = piece.tokens.begin + chunk * kChunk;
    const bool outputs = kRun != Run::stretches && (!kFollowed || chunk >= piece.first_output);
    const bool values = kRun != Run::stretches || !piece.of_unit;
    const Entry& entry = reinterpret_cast<const Entry*>(b.p.entries)[b.entry_number(piece, chunk)];
    barrier_wait(b.barrier(b.m.empty[use.slot]), use.parity ^ 1);
    barrier_expect(loaded, kBytes - (outputs ? 0 : 3 * kTile) - (values ? 0 : kParts * kTile));
    b.load_matrix(k, b.maps.k, h, token, loaded);
    b.load_prepared(shared_address(stage.t), entry.t, loaded);
    for (int i = 0; i < kParts && values; ++i)
      load_tile(shared_address(stage.v) + i * kTile, b.maps.v, (piece.part + i) * kPart, piece.head,
                token, loaded);
    load_bytes(shared_address(&b.m.scales[use.slot]), &entry.scales, sizeof(Entry::Scales), loaded);
    if (outputs) {
      b.load_matrix(shared_address(stage.q), b.maps.q, h, token, loaded);
      b.load_prepared(shared_address(stage.p), entry.p, loaded);
    }
    if (size < kChunk) zero_rows(k, 2 + kParts, size, loaded, tails >> use.slot & 1, full);
    if (size < kChunk) tails ^= 1u << use.slot;
  });
}

/// Stores the transposes of the matrices that store_matrices() would store.
__device__ inline void store_transposed(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                        std::uint32_t c, std::uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

/// The chain of 64 rows of a state, and their outputs; one warpgroup. Registers hold results of
/// products as hopper.cuh describes: a row is a row v of S, a column is k for S and a token for y
/// and o. Warp w has rows 16 w ... 16 w + 15.
template <int kParts, bool kShared, Run kRun>
struct Chain {
  static constexpr bool kFollowed = kRun == Run::followed;
  static constexpr bool kStretches = kRun == Run::stretches;
  static constexpr int kRowsOfWarp = 16;
  const Block<kParts, kShared, kRun>& b;
  int part, warp, lane;          ///< part: among the block's kParts
  float s[2][32];                ///< S: columns 0 ... 63 and 64 ... 127
  float y[32];                   ///< S K^T, then Vn^T, of the chunk that has begun
  std::uint32_t v[4][4];         ///< V^T, then Y, of that chunk: bf16 operand
  float o[32];                   ///< outputs [v, tokens] of a chunk
  std::uint32_t rounded[2][16];  ///< S in bf16, an operand
  std::uint32_t decayed[4][4];   ///< (E_last Vn)^T in bf16, an operand of products under way
  int waiting = kNowhere;        ///< slot of the boundary state that waits in shared memory

  /// Calls f(offset, first element, second element) for the lane's pairs of neighbouring columns of
  /// a state. kPairs: the two are neighbours in memory too.
  template <bool kPairs, class F>
  __device__ void for_each_pair(const States& states, int slot, const Piece& piece, F f) {
    const int row = (piece.part + part) * kPart + warp * 16 + lane / 4, two = 2 * (lane % 4);
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const std::int64_t begin = states.offset(slot, piece.head, row + 8 * below, two);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        float* const x = s[n / 8] + 4 * (n % 8) + 2 * below;
        f(begin + 8 * n * (kPairs ? 1 : states.column_stride), x[0], x[1]);
      }
    }
  }
  __device__ void load(const Piece& piece) {
    const bool follows = kFollowed && piece.follows;
    const bool goes_on = starts_from_kept(piece);
    const States& states = follows ? b.p.initial : goes_on ? b.p.before : b.p.state;
    const int slot = follows ? piece.row : goes_on ? piece.place : b.p.slot(piece.row);
    if (follows) {
      // The chain that this one follows copies its first state and then counts up. The counter is
      // set back to 0 for the next launch.
      int* const copied = b.copied(piece);
      while (count_of(copied) == 0) {
      }
      sync_threads_of(1 + part, kWarpgroup);
      if (warp == 0 && lane == 0) *copied = 0;
    }
    const auto get = [&](float2 both, float& x, float& y) { x = both.x, y = both.y; };
    if (states.pairs && states.format == Format::float32) {
      const float* const from = static_cast<const float*>(states.data);
      for_each_pair<true>(states, slot, piece, [&](std::int64_t at, float& x, float& y) {
        get(*reinterpret_cast<const float2*>(from + at), x, y);
      });
    } else {
      for_each_pair<false>(states, slot, piece,
                           [&](std::int64_t at, float& x, float& y) { get(states.two(at), x, y); });
    }
  }
  __device__ void load_unit(const Piece& piece) {
    const int row = (piece.part + part) * kPart + warp * 16 + lane / 4, two = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 64; ++i)
      s[i / 32][i % 32] = row + 8 * (i / 2 % 2) == 8 * (i / 4) + two + i % 2 ? 1.0f : 0.0f;
  }
  /// Copies the state for the follower of this chain, and tells it.
  __device__ void copy(const Piece& piece) {
    store(b.p.initial, piece.row, piece);
    sync_threads_of(1 + part, kWarpgroup);
    if (warp == 0 && lane == 0) count_up(b.copied(piece));
  }
  __device__ void store(const States& states, int slot, const Piece& piece) {
    if (states.pairs && states.format == Format::float32) {
      float* const to = static_cast<float*>(states.data);
      for_each_pair<true>(states, slot, piece, [&](std::int64_t at, float& x, float& y) {
        *reinterpret_cast<float2*>(to + at) = {x, y};
      });
    } else {
      for_each_pair<false>(states, slot, piece,
                           [&](std::int64_t at, float& x, float& y) { states.put(at, x, y); });
    }
  }
  /// Whether a segment starts from `before` instead of the pool. All but a row's only segment do:
  /// the row's last segment may already have replaced the state in the pool.
  __device__ static bool starts_from_kept(const Piece& piece) {
    return kRun == Run::segments && (piece.skipped > 0 || !piece.ends_row);
  }
  /// The pool for states after chunks within the piece: boundary states, or maps of a stretch.
  __device__ const States& kept(const Piece& piece) const {
    return !kStretches ? b.p.boundary : piece.of_unit ? b.p.transfers : b.p.before;
  }
  /// Stores the state at a boundary. With kParts = 1 it goes to shared memory, and copy_boundary()
  /// sends it from there by bulk copies: stores by the lanes themselves would stall the chain.
  __device__ void store_boundary(int slot, const Piece& piece) {
    if (kParts > 1 || !kept(piece).fours) return store(kept(piece), slot, piece);
    if (lane >= kRowsOfWarp)
      wait_for_reads<0>();  // the last boundary's copies have read their rows
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const float* const x = s[n / 8] + 4 * (n % 8) + 2 * below;
        *reinterpret_cast<float2*>(own_rows() + (lane / 4 + 8 * below) * kStateRow + 32 * n +
                                   8 * (lane % 4)) = {x[0], x[1]};
      }
    waiting = slot;
  }
  /// Issues the bulk copies of a state that waits in shared memory; each warp sends its own 16
  /// rows, one per lane from lane 16 on.
  __device__ void copy_boundary(const Piece& piece) {
    if (kParts > 1 || waiting == kNowhere) return;
    publish_to_async();
    __syncwarp();
    if (lane >= kRowsOfWarp) {
      const States& states = kept(piece);
      const int row = lane - kRowsOfWarp;
      const int first = (piece.part + part) * kPart + warp * kRowsOfWarp;
      store_bytes(
          static_cast<float*>(states.data) + states.offset(waiting, piece.head, first + row, 0),
          shared_address(own_rows()) + row * kStateRow, 4 * kK);
      commit_stores();
    }
    __syncwarp();
    waiting = kNowhere;
  }
  __device__ char* own_rows() const {
    return b.m.state + warp * kRowsOfWarp * kStateRow;
  }

  /// Runs the block's pieces. For each chunk, begin() issues the products with the state before it
  /// and finish() those that update the state; begin() of the next chunk overlaps the last products
  /// of finish(). Chunks whose outputs are left out come first.
  __device__ void run() {
    int n = 0;  // chunks so far, over all pieces: the use of the ring
    b.work.for_each_piece([&](const Piece& piece) {
      const int slot = b.p.slot(piece.row);
      if (slot == kNowhere) return;
      const bool resumes = b.p.resumes(piece.row);
      const bool goes_on = starts_from_kept(piece);
      if (kStretches && piece.of_unit) {
        load_unit(piece);
      } else if (goes_on ? piece.chunks > 0
                         : resumes && piece.chunks > 0 && (!kStretches || piece.skipped == 0)) {
        load(piece);
        if (kFollowed && !piece.follows && piece.first_output > 0) copy(piece);
      } else {
        for (auto& half : s)
#pragma unroll
          for (float& x : half) x = 0.0f;
      }
      if (kStretches && piece.skipped == 0 && piece.chunks > 0)
        store(b.p.before, piece.place, piece);
      const bool leaves_states = !kStretches && (kRun != Run::segments || piece.ends_row) &&
                                 (!kFollowed || !piece.follows);
      // `boundary`: number of the next boundary state; `left`: chunks until it, of `every`.
      int boundary = 0, left = 0, every = 0;
      if (kStretches) {
        boundary = piece.place + 1;
        left = every = b.p.segment;
      } else if (b.p.boundary.data) {
        every = b.p.boundary_every / kChunk;
        boundary = b.first_boundary(piece.row) + piece.skipped / every;
        left = every - piece.skipped % every;
      }
      // The number under which the state after `chunk` is stored, or kNowhere.
      const auto reaches = [&](int chunk) {
        if (every == 0 || --left > 0 || (chunk + 1) * kChunk > piece.tokens.size) return kNowhere;
        left = every;
        const int number = boundary++;
        return kStretches || b.p.has_boundary(number) ? number : kNowhere;
      };
      if (piece.chunks > 0) begin<false>(piece, 0, n, kNowhere);
      int chunk = 0;
      if (kStretches)
        for (; chunk < piece.chunks; ++chunk, ++n) {
          finish<false>(piece, n);
          const int store_to = reaches(chunk);
          if (chunk + 1 < piece.chunks) {
            begin<false>(piece, chunk + 1, n + 1, store_to);
          } else {
            wait_for_products<0>();
            pin(s[0]), pin(s[1]);
            b.release(use_of<kStages>(n).slot);
            store_boundary(store_to, piece);
            copy_boundary(piece);
          }
        }
      if (kFollowed)
        for (; chunk < piece.first_output; ++chunk, ++n) {
          finish<false>(piece, n);
          reaches(chunk);  // only counts: the follower stores the boundary
          begin<false>(piece, chunk + 1, n + 1, kNowhere);
        }
      for (; !kStretches && chunk < piece.chunks; ++chunk, ++n) {
        finish<true>(piece, n);
        const int store_to = reaches(chunk);
        if (chunk + 1 < piece.chunks) {
          begin<true>(piece, chunk + 1, n + 1, store_to);
        } else {
          wait_for_products<0>();
          pin(s[0]), pin(s[1]), pin(o);
          finish_outputs(n);
          store_outputs(piece, chunk);
          b.release(use_of<kStages>(n).slot);
          if (store_to != kNowhere) store_boundary(store_to, piece);
          copy_boundary(piece);
        }
      }
      if (b.p.state.data && leaves_states && (piece.chunks > 0 || !resumes))
        store(b.p.state, slot, piece);
    });
    wait_for_stores();
  }

  __device__ std::uint32_t stage(const Use& use) const {
    return b.base + use.slot * int{sizeof(typename ChainMemory<kParts>::Stage)};
  }

  /// Begins a chunk while the last products of the previous chunk may still run: computes y = S
  /// K^T, loads v = V^T, and multiplies S by exp(G_last). The two halves of S (columns 0 ... 63 and
  /// 64 ... 127) are separate groups of products, so that the first half is rounded and used while
  /// the second is still being updated. Ends the previous chunk: stores its outputs
  /// (kOutputsBefore) and releases its stage. `boundary`: number under which the state before this
  /// chunk is stored.
  template <bool kOutputsBefore>
  __device__ void begin(const Piece& piece, int chunk, int n, int boundary) {
    const Use use = use_of<kStages>(n);
    const std::uint32_t k = stage(use);
    const Entry::Scales& scales = b.m.scales[use.slot];
    barrier_wait(b.barrier(b.m.full[use.slot]), use.parity);
    wait_for_products<1>();  // s[0] and o are complete; the update of s[1] may still run
    pin(s[0]);
    if (kOutputsBefore) pin(o);
#pragma unroll
    for (int i = 0; i < 16; ++i) rounded[0][i] = pack<Bf16>(s[0][2 * i], s[0][2 * i + 1]);
    pin(y), pin(rounded[0]);
    start_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      Product<Bf16, 64, false>::of(y, rounded[0] + 4 * i, matrix(k + i * 32, 16, 1024), i > 0);
    commit_products();
    if (kOutputsBefore) finish_outputs(n - 1);
    wait_for_products<1>();  // s[1] is complete; the first half of y may still run
    pin(s[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(decayed[i]);
#pragma unroll
    for (int i = 0; i < 16; ++i) rounded[1][i] = pack<Bf16>(s[1][2 * i], s[1][2 * i + 1]);
    pin(rounded[1]);
    start_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      Product<Bf16, 64, false>::of(y, rounded[1] + 4 * i, matrix(k + kTile + i * 32, 16, 1024),
                                   true);
    commit_products();
    if (kOutputsBefore) store_outputs(piece, chunk - 1);
    if (chunk > 0) b.release(use_of<kStages>(n - 1).slot);
    if (boundary != kNowhere) store_boundary(boundary, piece);
    if (kStretches && piece.of_unit) {
#pragma unroll
      for (auto& four : v) four[0] = four[1] = four[2] = four[3] = 0;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        load_transposed(
            v[i], k + (2 + part) * kTile +
                      tile_offset(16 * i + lane % 8 + (lane / 16) * 8, warp * 2 + lane / 8 % 2));
    }
    const float decay = scales.decay;
#pragma unroll
    for (auto& half : s)
#pragma unroll
      for (float& x : half) x *= decay;
    wait_for_products<0>();
    pin(y);
  }

  /// Finishes a chunk after begin(): Y, Vn, then the updates of S and O, whose products it does not
  /// wait for.
  template <bool kOutputs>
  __device__ void finish(const Piece& piece, int n) {
    const Use use = use_of<kStages>(n);
    const std::uint32_t k = stage(use), t = k + (2 + kParts) * kTile, q = t + kTile;
    const Entry::Scales& scales = b.m.scales[use.slot];
    // The tensor cores compute S Q^T, while the lanes compute Y = V^T - exp(G) / |k| (S K^T).
    float of_state[32];
    if (kOutputs) {
      pin(of_state), pin(rounded[0]), pin(rounded[1]);
      start_products();
#pragma unroll
      for (int i = 0; i < 8; ++i)
        Product<Bf16, 64, false>::of(of_state, rounded[i / 4] + 4 * (i % 4),
                                     matrix(q + i / 4 * kTile + i % 4 * 32, 16, 1024), i > 0);
      commit_products();
    }
    float2 factors[8];
    load_factors(factors, scales.y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 x = unpack<Bf16>(v[i][m]), f = factors[2 * i + m / 2];
        v[i][m] =
            pack<Bf16>(fmaf(-f.x, y[8 * i + 2 * m], x.x), fmaf(-f.y, y[8 * i + 2 * m + 1], x.y));
      }
      pin(v[i]);
    }
    // The tensor cores compute Vn^T = Y T^T into y, while the lanes compute O = exp(G) (S Q^T).
    start_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      Product<Bf16, 64, false>::of(y, v[i], matrix(t + i * 32, 16, 1024), i > 0);
    commit_products();
    copy_boundary(piece);
    if (kOutputs) {
      load_factors(factors, scales.decays);
      wait_for_products<1>();
      pin(of_state), pin(rounded[0]), pin(rounded[1]);
      scale(o, of_state, factors);
    }
    load_factors(factors, scales.w);
    wait_for_products<0>();
    pin(y);
    if (kOutputs) pin(o);
    // O += Vn^T P^T and S += (E_last Vn)^T K; begin() has multiplied S by exp(G_last). The first
    // group is s[0] and O, the second s[1].
    std::uint32_t news[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float x0 = y[8 * i + 2 * m], x1 = y[8 * i + 2 * m + 1];
        const float2 f = factors[2 * i + m / 2];
        if (kOutputs) news[i][m] = pack<Bf16>(x0, x1);
        decayed[i][m] = pack<Bf16>(x0 * f.x, x1 * f.y);
      }
      if (kOutputs) pin(news[i]);
      pin(decayed[i]);
    }
    pin(s[0]), pin(s[1]);
    start_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Product<Bf16, 64, true>::of(s[0], decayed[i], matrix(k + i * 2048, kTile, 1024), true);
      if (kOutputs)
        Product<Bf16, 64, false>::of(o, news[i], matrix(q + 2 * kTile + i * 32, 16, 1024), true);
    }
    commit_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      Product<Bf16, 64, true>::of(s[1], decayed[i], matrix(k + kTile + i * 2048, kTile, 1024),
                                  true);
    commit_products();
  }

  /// Loads the factors of the lane's columns (tokens) of an accumulator.
  __device__ void load_factors(float2 (&factors)[8], const float* from) const {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      factors[i] = *reinterpret_cast<const float2*>(from + 8 * i + 2 * (lane % 4));
  }
  __device__ static void scale(float (&to)[32], const float (&x)[32], const float2 (&factors)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        to[4 * i + 2 * below] = x[4 * i + 2 * below] * factors[i].x;
        to[4 * i + 2 * below + 1] = x[4 * i + 2 * below + 1] * factors[i].y;
      }
  }

  /// Multiplies the outputs of the n-th chunk by scale / |q| and writes them, as [tokens, v] in
  /// bf16, to shared memory.
  __device__ void finish_outputs(int n) {
    float2 factors[8];
    float y[32];
    load_factors(factors, b.m.scales[use_of<kStages>(n).slot].norms);
    scale(y, o, factors);
    if (warp == 0 && lane == 0) wait_for_reads<0>();
    sync_threads_of(1 + part, kWarpgroup);  // the last chunk's outputs have left the tile
    const std::uint32_t tile = shared_address(b.m.out[part]);
#pragma unroll
    for (int i = 0; i < 8; i += 2)
      store_transposed(
          tile + tile_offset(8 * i + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2),
          pack<Bf16>(y[4 * i], y[4 * i + 1]), pack<Bf16>(y[4 * i + 2], y[4 * i + 3]),
          pack<Bf16>(y[4 * i + 4], y[4 * i + 5]), pack<Bf16>(y[4 * i + 6], y[4 * i + 7]));
  }
  /// Sends the outputs of a chunk from shared memory to `out`: a whole chunk by a tensor copy, a
  /// shorter one by ordinary stores of its tokens alone.
  __device__ void store_outputs(const Piece& piece, int chunk) const {
    publish_to_async();
    sync_threads_of(1 + part, kWarpgroup);
    const int size = size_of_chunk(piece.tokens.size, chunk);
    const int token = piece.tokens.begin + chunk * kChunk;
    const int column = (piece.part + part) * kPart;
    if (size == kChunk) {
      if (warp == 0 && lane == 0) {
        store_tile(b.maps.out, shared_address(b.m.out[part]), column, piece.head, token);
        commit_stores();
      }
      __syncwarp();
      return;
    }
    for (int i = warp * 32 + lane; i < size * 8; i += kWarpgroup)
      *reinterpret_cast<uint4*>(b.p.out + (token + i / 8) * b.p.out_token_stride +
                                piece.head * b.p.out_head_stride + column + i % 8 * 8) =
          *reinterpret_cast<const uint4*>(b.m.out[part] + tile_offset(i / 8, i % 8));
  }
};

/// Zeroes the outputs of tokens that no chain computes: those of rows without a slot, and those
/// after the last row. One warp of each block calls it.
__device__ inline void zero_unused_outputs(const Parameters& p) {
  const int words = p.V / 8;
  const auto zero = [&](TokenRange tokens) {
    for (int i = static_cast<int>(blockIdx.x); i < tokens.size; i += static_cast<int>(gridDim.x))
      for (int word = lane_of_warp(); word < p.heads * words; word += 32) {
        const int head = word / words;
        *reinterpret_cast<uint4*>(p.out + (tokens.begin + i) * p.out_token_stride +
                                  head * p.out_head_stride + (word - head * words) * 8) = {};
      }
  };
  for (int row = 0; p.state.data && row < p.rows.rows; ++row)
    if (p.slot(row) == kNowhere) zero(p.range(row));
  if (!p.rows.starts) return;
  const int end = min(p.rows.padding_begin(), p.rows.tokens);
  zero({end, p.rows.tokens - end});
}

template <int kParts, bool kShared, Run kRun>
__global__ void __cluster_dims__(kNeighbours, 1, 1) __launch_bounds__((1 + kParts) * kWarpgroup, 1)
    chain_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Parameters p) {
  extern __shared__ char raw[];
  using Block = Block<kParts, kShared, kRun>;
  const std::uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  auto& m = *reinterpret_cast<typename Block::Memory*>(raw + (base - shared_address(raw)));
  const int role = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32 % 4), lane = lane_of_warp();
  const Block b{p, maps, {p, m.order, p.V / (kParts * kPart), kParts, kRun}, m, base};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(b.barrier(m.full[i]), 1), barrier_init(b.barrier(m.tail[i]), 1),
          barrier_init(b.barrier(m.empty[i]), Block::kReleases);
    publish_barriers();
  }
  // With counters, the chains run beside prepare_kernel, which has itself waited for earlier
  // launches.
  if (!p.counters) wait_for_earlier_launch();
  if (kRun == Run::stretches) let_the_next_launch_start();
  if (kRun == Run::rows || kRun == Run::followed)
    Work::sort(p, m.order, reinterpret_cast<int*>(m.stages));
  if (kShared)
    sync_cluster();  // the neighbour's barriers are initialised before copies complete on them
  else
    __syncthreads();
  if (role == 0) {
    if (kParts > 1) give_registers<24>();
    if (warp == 0) load(b);
    if (warp == 2 && kRun != Run::stretches) zero_unused_outputs(p);
  } else {
    if (kParts > 1) take_registers<240>();
    Chain<kParts, kShared, kRun>{b, role - 1, warp, lane}.run();
  }
  __syncwarp();
  if (kShared) sync_cluster();  // the neighbour may still copy to or arrive in this shared memory
  // A later launch that waits for this one must find prepare_kernel ended too.
  if (p.counters) wait_for_earlier_launch();
}

// --- Segments ------------------------------------------------------------------------------------

// join_kernel goes through the stretches of a row, from the second on (the first one started from
// the row's state). From the state S before a stretch and the stretch's maps it computes the states
// before the stretch's second segment (q = 1) and before the next stretch (q = 2):
//
//   S_q = S M_q + N_q      M_q [K, K] and N_q [V, K]: maps from the begin of the stretch
//
//   grid    rows x HV x V / kJoinedRows
//   block   16 warps: 8 for each q, with 16 of the 128 columns each; 16 rows of S in shared memory
//
// Factors are split into two bf16 terms each, so products keep 16 bits; chains round their states
// to 8 bits.

constexpr int kJoinedRows = 16;      ///< rows of a state in a block
constexpr int kJoinWarps = kK / 16;  ///< warps per state S_q
constexpr int kJoinThreads = kStretch * kJoinWarps * 32;
constexpr int kJoinStride = kK + 8;  ///< floats of a row in shared memory

/// Two floats as the sums of two bf16 numbers each: `high` and `low` hold a pair.
struct Terms {
  std::uint32_t high, low;
};
__device__ inline Terms in_terms(float x, float y) {
  const std::uint32_t high = pack<Bf16>(x, y);
  const float2 rounded = unpack<Bf16>(high);
  return {high, pack<Bf16>(x - rounded.x, y - rounded.y)};
}

/// A warp's 16 rows and 16 columns of a state. Lane l holds rows r = l / 4 and r + 8, columns
/// c = 4 (l % 4) ... c + 3, in an order that lets it move four neighbours at once:
///
///   d[i][0] = (r, c + i)        d[i][1] = (r, c + i + 2)
///   d[i][2] = (r + 8, c + i)    d[i][3] = (r + 8, c + i + 2)
struct JoinedTile {
  float d[2][4];
  /// Elements of M. m[8 k] ... m[8 k + 7]: rows 16 k + 2 (l % 4), the next, and the two 8 below
  /// them, each with the warp's columns 2 (l / 4) and the next.
  float m[64];

  __device__ void load(const float* states, const float* transfers) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two =
            *reinterpret_cast<const float2*>(transfers + (16 * k + i / 2 * 8 + i % 2) * kK);
        m[8 * k + 2 * i] = two.x, m[8 * k + 2 * i + 1] = two.y;
      }
    load_states(states);
    pin(m);  // all loads are issued before the first value is used
  }
  __device__ void load_states(const float* upper) {
    const float4 a = *reinterpret_cast<const float4*>(upper);
    const float4 b = *reinterpret_cast<const float4*>(upper + 8 * kK);
    d[0][0] = a.x, d[1][0] = a.y, d[0][1] = a.z, d[1][1] = a.w;
    d[0][2] = b.x, d[1][2] = b.y, d[0][3] = b.z, d[1][3] = b.w;
  }
  __device__ void store(float* upper, int stride) const {
    *reinterpret_cast<float4*>(upper) = {d[0][0], d[1][0], d[0][1], d[1][1]};
    *reinterpret_cast<float4*>(upper + 8 * stride) = {d[0][2], d[1][2], d[0][3], d[1][3]};
  }
  /// d += S M, where `s` is the lane's row r of S in shared memory. The products of a low term are
  /// added apart, in `small`.
  __device__ void add_product(const float* s, int lane) {
    float small[2][4] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      std::uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(s + i % 2 * 8 * kJoinStride + 16 * k +
                                                          i / 2 * 8 + 2 * (lane % 4));
        const Terms terms = in_terms(x.x, x.y);
        high[i] = terms.high, low[i] = terms.low;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const of = m + 8 * k + i;
        const Terms near = in_terms(of[0], of[2]), far = in_terms(of[4], of[6]);
        add_warp_product<Bf16>(d[i], high, near.high, far.high);
        add_warp_product<Bf16>(small[i], high, near.low, far.low);
        add_warp_product<Bf16>(small[i], low, near.high, far.high);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i / 4][i % 4] += small[i / 4][i % 4];
  }
};

__global__ void __launch_bounds__(kJoinThreads) join_kernel(const __grid_constant__ Parameters p) {
  __shared__ float s[2][kJoinedRows * kJoinStride];  // S before this stretch, and before the next
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = lane_of_warp();
  const int per_head = p.V / kJoinedRows, number = static_cast<int>(blockIdx.x);
  const int row = number / (p.heads * per_head), rest = number % (p.heads * per_head);
  const int head = rest / per_head, first = (rest - head * per_head) * kJoinedRows;
  wait_for_earlier_launch();
  let_the_next_launch_start();
  const TokenRange tokens = p.range(row);
  const int chunks = chunks_of(p, row, tokens.size);
  const int segments = (chunks + p.segment - 1) / p.segment;
  if (segments <= kStretch + 1) return;
  const int place = first_place(row, tokens.begin, p.segment);
  const int own_row = lane / 4, column = 16 * (warp % kJoinWarps);
  const int own_column = column + 4 * (lane % 4);
  const auto state = [&](int segment) {
    return static_cast<float*>(p.before.data) +
           p.before.offset(place + segment, head, first + own_row, own_column);
  };
  const auto transfer = [&](int segment) {
    return static_cast<const float*>(p.transfers.data) +
           p.transfers.offset(place + segment, head, 2 * (lane % 4), column + 2 * (lane / 4));
  };
  const int own = 1 + warp / kJoinWarps;  // q: the warp computes the state before the stretch's
                                          // segment number q
  const bool last = own == kStretch;      // that state is the one before the next stretch
  float* const from = s[0] + own_row * kJoinStride;
  JoinedTile tile;
  if (last) {
    tile.load_states(state(kStretch));
    tile.store(from + own_column, kJoinStride);
  }
  int turn = 0;  // offset of the copy of S in use: 0, or the distance of the two copies
  for (int segment = kStretch; segment + 1 < segments; segment += kStretch) {
    const bool exists = segment + own < segments;
    if (exists) tile.load(state(segment + own), transfer(segment + own));
    __syncthreads();
    if (exists) {
      tile.add_product(from + turn, lane);
      tile.store(state(segment + own), kK);
    }
    turn = kJoinedRows * kJoinStride - turn;
    if (exists && last) tile.store(from + turn + own_column, kJoinStride);
  }
}

}  // namespace lockstep::kernels::delta_chunks
