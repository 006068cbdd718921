// Mamba2's prefill in one pass over the tokens. Equations: reference/recurrent/mamba2.hpp.
//
// ssd_chunks_kernel: chunked, on tensor cores (bf16 activations; N of 64, 128 or 256). An item of
// work is 64 rows p of one head's state s [P, N], for one row of the batch. Its chunks of 64 tokens
// run one after another. The running state stays in the registers of one warpgroup (of two, with
// N = 256); only a bf16 copy goes to shared memory, for the outputs' products.
//
//   grid   persistent: as many blocks as the GPU has processors, or the largest multiple of the
//          heads below that
//   block  5 warpgroups: 0 feeds, 1 (and 2, with N = 256) hold the state, the others compute
//          outputs
//
//   feeding   warp 0  loads B, C [64, N] and x [64, 64] of a chunk, by tensor copies, up to kStages
//                     chunks ahead
//             warps 1 and 2, in turns: compute d_t, the cumulative sums a_t of A d_t within the
//                     chunk, and the other ChunkScalars; warp 1 also prefetches the next item's
//                     state into L2
//             warp 3  loads z [64, 64] into the tile of the warpgroup that computes the outputs
//   state     S [64 p, N] float32 in registers. Per chunk: a bf16 copy to shared memory, then
//             S = exp(a_last) S + (w x)^T B  with  w_j = d_j exp(a_last - a_j)
//   outputs   each warpgroup takes every second or third chunk. It writes w x for the state, and
//             computes G = C B^T and C S^T, then
//             y = exp(a_i) C S^T + D x + (G exp(a_i - a_j) d_j, for j <= i) x
//
// The a_t are kept in units of log 2. The factor exp(a_i - a_j) d_j is one exp2: log2 |d_j| is part
// of its exponent, and the sign of d_j is applied afterwards.
//
// Segments, for too few heads to fill the GPU: a first launch (Task::states) runs the states alone,
// each block with some of their columns, and keeps the states before every segment in the
// workspace. In a second launch, as above, each segment is an item of its own. The states go
// through the same operations in the same order, so the bits are those of whole rows.
//
// ssd_scan_kernel: token by token, for everything else.
//   grid   (ceil(P / kScanRows), H, rows of the batch)
//   block  kScanRows / kRowsOfWarp warps; a warp has kRowsOfWarp rows of s, its lanes the columns
#include "kernels/recurrent/ssd_prefill.hpp"

#include "kernels/base/hopper.cuh"
#include "kernels/recurrent/prefill_rows.cuh"
#include "kernels/recurrent/shapes.hpp"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "ssd_prefill";
constexpr float kLog2e = 1.4426950408889634f;

/// Parameters of both kernels. Pointers are into device memory.
struct Common {
  PrefillRows rows;
  MixedView<2> dt, D;
  MixedView<1> A, dt_bias;
  float dt_min, dt_max;  ///< -infinity and infinity where there is no limit
  bool dt_softplus;
  int H, P, N;
  int heads_per_group;
  MixedView<4> state, boundary;  ///< the kernels write to both, although views are const
  int boundary_every;            ///< 0: no boundary states

  __device__ unsigned dt_bits(int t, int h) const { return bits_at(dt, t, h); }
  __device__ float time_step(unsigned bits, float bias) const {
    float d = value_of(bits, dt.format) + bias;
    if (dt_softplus) d = softplus(d);
    return fminf(fmaxf(d, dt_min), dt_max);
  }
  __device__ float bias(int h) const { return dt_bias ? at(dt_bias, h) : 0.0f; }
  /// Places of `boundary` from this one on. A state without a place is not stored.
  __device__ std::int64_t boundaries_from(int place) const {
    return boundary.extents[0] - static_cast<unsigned>(place);
  }
};

// --- Chunked -------------------------------------------------------------------------------------

using namespace hopper;

constexpr int kChunk = 64;                          ///< tokens
constexpr int kStateRows = 64;                      ///< rows of s of an item
constexpr int kTileBytes = kChunk * kTileRowBytes;  ///< 8 KiB

struct Chunked {
  Common all;
  void* out;
  std::int64_t out_token_stride, out_head_stride;
  int tiles_of_head;  ///< ceil(P / kStateRows)
  int slices;         ///< parts into which Task::states divides the columns; otherwise 1
  int items;
  int segment;          ///< tokens of a segment; 0: rows are whole
  int segments;         ///< upper bound of the segments of all rows
  MixedView<4> before;  ///< states before items: all.state, or `kept`
  MixedView<4> kept;    ///< [segments, H, P, N] float32: states before segments, by Task::states
};
/// Source of zeros for the rows of a tile after a row's last token.
__device__ uint4 zeros[kTileBytes / sizeof(uint4)];

struct Maps {
  CUtensorMap x, B, C, out, z;
};

/// Per-token scalars of a chunk, shared by all rows of the state.
struct ChunkScalars {
  float a[kChunk];  ///< sum of A d within the chunk, up to and with the token, in units of log 2
  float b[kChunk];  ///< a - log2 |d|; infinite for d = 0 and after the row's last token
  float w[kChunk];  ///< d exp(a_last - a)
  uint2 negative;   ///< bit j: d_j < 0
  float decay;      ///< exp(a_last)
  float unused;
};

/// The task of a launch: outputs, outputs gated by silu(z), or the states before segments (then N
/// is the number of columns that a block takes).
enum class Task { outputs, gated_outputs, states };

/// Sizes of a block, and its shared memory:
///
///   stages    kStages x [B (N / 64 tiles), C (N / 64 tiles; none for Task::states), x (1 tile)]
///   copies    2 x the state before a chunk in bf16 (N / 64 tiles); none for Task::states
///   outputs   a tile per output warpgroup: it holds w x, then z, then y of a chunk
///   scalars   kStages x ChunkScalars (784 bytes)
///   barriers  see init_barriers()
///
/// Tiles are 8 KiB. With N = 128: 160 + 32 + 24 KiB; with N = 256: 144 + 64 + 16 KiB.
template <int N, Task kTask>
struct Plan {
  static constexpr bool kStatesAlone = kTask == Task::states;
  static constexpr int kTiles = N / kTileColumns;  ///< tiles of B, of C, and of the state's copy
  static constexpr int kStateGroups = N > 128 ? N / 128 : 1;  ///< warpgroups that share the columns
  static constexpr int kStateColumns = N / kStateGroups;      ///< columns of a state warpgroup
  static constexpr int kOutputGroups = 4 - kStateGroups;      ///< warpgroups; for Task::states they
                                                              ///< only compute w x
  static constexpr int kStages = kStatesAlone ? 6 : N > 128 ? 2 : 4;
  static constexpr int kScalarWarps = kStatesAlone ? 3 : 2;  ///< feeding warps that compute scalars
  static constexpr int kThreads = (1 + kStateGroups + kOutputGroups) * kWarpgroup;
  static constexpr int kFeedRegisters = 32;
  static constexpr int kStateRegisters = 112;
  static constexpr int kOutputRegisters = 112;

  static constexpr int kC = kTiles * kTileBytes;         ///< offset of C in a stage; B begins it
  static constexpr int kX = kStatesAlone ? kC : 2 * kC;  ///< offset of x in a stage
  static constexpr int kStageBytes = kX + kTileBytes;
  static constexpr int kCopyBytes =
      kStatesAlone ? 0 : kTiles * kTileBytes;  ///< a copy of s in bf16

  // Offsets in shared memory.
  static constexpr int kCopies = kStages * kStageBytes;
  static constexpr int kOutputs = kCopies + 2 * kCopyBytes;
  static constexpr int kScalars = kOutputs + kOutputGroups * kTileBytes;
  static constexpr int kBarriers = kScalars + kStages * int{sizeof(ChunkScalars)};
  static constexpr int kBarrierCount = 3 * kStages + 3 + 3 * kOutputGroups;
  static constexpr int kBytes = kBarriers + 8 * kBarrierCount;
  static_assert(kBytes <= 232448, "shared memory of a block");
  /// A wait by parity is right only if the waiting warps know that the stage's previous phase has
  /// ended. Output and scalar warps take every kOutputGroups-th or kScalarWarps-th chunk; under
  /// these conditions their own previous chunk tells them.
  static_assert(kStages > kOutputGroups || kStages % kOutputGroups == 0, "parities are one apart");
  static_assert(kStages % kScalarWarps == 0, "likewise");
};

template <int N, Task kTask>
class Block {
  using L = Plan<N, kTask>;
  using T = Bf16;

 public:
  __device__ Block(const Chunked& parameters, const Maps& maps, unsigned char* shared)
      : p_(parameters), maps_(maps), shared_(shared), base_(shared_address(shared)) {}

  /// The barriers, and the events that end their phases:
  ///   loaded(s)       tiles and scalars of stage s are complete
  ///   copied(s)       the state before the stage's chunk is in its bf16 copy
  ///   used(s)         all products that read stage s are done: the state's and the outputs'
  ///   copy_used(i)    the outputs' products have read copy i of the state
  ///   weighed(g)      w x is in the tile of output warpgroup g
  ///   taken(g)        the state's products have read w x there
  ///   gate_loaded(g)  z is in that tile
  ///   tail            tiles of a row's last chunk are loaded, but not yet zeroed after the last
  ///                   token
  /// Ordinary loads from a stage have barriers of their own: see arrive_as_reader().
  __device__ void init_barriers() const {
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(loaded(s), 1 + 32);  // warp 0's expected copies; the lanes of a scalar warp
      barrier_init(copied(s), 4 * L::kStateGroups);
      barrier_init(used(s), 4 * L::kStateGroups + 4);
    }
    for (int i = 0; i < 2; ++i) barrier_init(copy_used(i), 4);
    for (int g = 0; g < L::kOutputGroups; ++g) {
      barrier_init(weighed(g), 4);
      barrier_init(taken(g), 4 * L::kStateGroups);
      barrier_init(gate_loaded(g), 1);
    }
    barrier_init(tail(), 1);
    publish_barriers();
  }

  // --- Feeding ---

  /// Warp 0: loads the tiles of all chunks. In a row's last chunk it zeroes B and x after the last
  /// token: their factors are 0 there, and 0 times what lies behind the row (perhaps NaN) must be
  /// 0.
  __device__ void load_tiles() const {
    const bool leads = threadIdx.x % 32 == 0;
    Step step;
    bool again = false;  // the ring has gone round: the stages have been in use before
    std::uint32_t tail_parity = 0;
    for_each_item([&](const Item& item) {
      for (int c = 0; c < item.chunks; ++c, step.next()) {
        again = again || step.parity != 0;
        if (again) sync_threads_of(read_barrier(step.stage, kTiles), kReadThreads);
        if (!leads) continue;
        barrier_wait(used(step.stage), step.parity ^ 1);
        const std::uint32_t to = stage(step.stage);
        const int t = item.row.begin + c * kChunk, size = item.row.size - c * kChunk;
        const std::uint32_t full = size < kChunk ? tail() : loaded(step.stage);
        barrier_expect(full, L::kStageBytes);
        for (int i = 0; i < L::kTiles; ++i) {
          const int column = item.column + i * kTileColumns;
          if (!L::kStatesAlone)
            load_tile(to + L::kC + i * kTileBytes, maps_.C, column, item.group, t, full);
          load_tile(to + i * kTileBytes, maps_.B, column, item.group, t, full);
        }
        load_tile(to + L::kX, maps_.x, item.p, item.head, t, full);
        if (size >= kChunk) continue;
        barrier_wait(full, tail_parity);
        tail_parity ^= 1;
        const int behind = (kChunk - size) * kTileRowBytes, first = size * kTileRowBytes;
        barrier_expect(loaded(step.stage), (L::kTiles + 1) * behind);
        for (int i = 0; i <= L::kTiles; ++i)
          load_bytes(to + (i < L::kTiles ? i * kTileBytes : L::kX) + first, zeros, behind,
                     loaded(step.stage));
      }
    });
  }

  /// Warp 3: loads z of each chunk into the tile of its output warpgroup, as soon as the state has
  /// taken w x from there.
  __device__ void load_gates() const {
    const bool leads = threadIdx.x % 32 == 0;
    int group = 0;
    std::uint32_t parity = 0;
    for_each_item([&](const Item& item) {
      for (int c = 0; c < item.chunks && leads; ++c) {
        barrier_wait(taken(group), parity);
        barrier_expect(gate_loaded(group), kTileBytes);
        load_tile(output(group), maps_.z, item.p, item.head, item.row.begin + c * kChunk,
                  gate_loaded(group));
        if (++group == L::kOutputGroups) group = 0, parity ^= 1;
      }
    });
  }

  /// A scalar warp: computes the ChunkScalars of every kScalarWarps-th chunk; lane l has tokens 2 l
  /// and 2 l + 1. Loads of dt take longer than a chunk, so they are issued two turns ahead.
  __device__ void compute_scalars(int own) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    Step step;
    int turn = 0;
    bool again = false;  // the ring has gone round: the stages have been in use before
    for_each_item([&](const Item& item) {
      if (own == 0) prefetch_state(item.index + static_cast<int>(gridDim.x), lane);
      if (item.chunks == 0) return;
      const float A = at(p_.all.A, item.head) * kLog2e, bias = p_.all.bias(item.head);
      const auto fetch = [&](unsigned(&bits)[2], int c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int t = c * kChunk + 2 * lane + i;
          bits[i] = t < item.row.size ? p_.all.dt_bits(item.row.begin + t, item.head) : 0;
        }
      };
      unsigned bits[2], next_bits[2];
      // Turns go on from item to item; `first` is this warp's first chunk of the item.
      const int first = (own - turn + L::kScalarWarps) % L::kScalarWarps;
      fetch(bits, first);
      fetch(next_bits, first + L::kScalarWarps);
      for (int c = 0; c < item.chunks; ++c, step.next()) {
        again = again || step.parity != 0;
        const bool mine = turn == own;
        if (++turn == L::kScalarWarps) turn = 0;
        if (!mine) continue;
        float d[2], a[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          d[i] = c * kChunk + 2 * lane + i < item.row.size ? p_.all.time_step(bits[i], bias) : 0.0f;
          bits[i] = next_bits[i];
        }
        fetch(next_bits, c + 2 * L::kScalarWarps);
        a[0] = A * d[0];
        a[1] = a[0] + A * d[1];
        // An inclusive scan over the lanes; then each lane adds the sum of all lanes before it.
        float sum = a[1];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const float before = __shfl_up_sync(0xffffffffu, sum, distance);
          if (lane >= distance) sum += before;
        }
        const float before = __shfl_up_sync(0xffffffffu, sum, 1);
        if (lane > 0) a[0] += before, a[1] += before;
        const float last = __shfl_sync(0xffffffffu, a[1], 31);
        const unsigned even = __ballot_sync(0xffffffffu, d[0] < 0.0f);
        const unsigned odd = __ballot_sync(0xffffffffu, d[1] < 0.0f);

        // All readers of the stage's previous scalars have read them.
        if (again) sync_threads_of(read_barrier(step.stage, kScalars), kReadThreads);
        ChunkScalars& to = scalars(step.stage);
        const auto put = [&](float(&array)[kChunk], float first, float second) {
          *reinterpret_cast<float2*>(array + 2 * lane) = make_float2(first, second);
        };
        put(to.a, a[0], a[1]);
        // exp(a_i - a_j) |d_j| = exp2(a_i - b_j); `negative` has the signs.
        put(to.b, a[0] - log2f(fabsf(d[0])), a[1] - log2f(fabsf(d[1])));
        put(to.w, d[0] * exp2_fast(last - a[0]), d[1] * exp2_fast(last - a[1]));
        if (lane == 0) to.decay = exp2_fast(last);
        if (lane == 1) to.negative = {interleaved(even, odd), interleaved(even >> 16, odd >> 16)};
        barrier_arrive(loaded(step.stage));
      }
    });
  }

  // --- The state ---

  /// A state warpgroup, number `own`: advances the states of all items chunk by chunk.
  __device__ void run_state(int own, int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int tile = own * (L::kStateColumns / kTileColumns);  // the tile of its first columns
    Step step;
    int group = 0;
    std::uint32_t group_parity = 0;
    State S;
    for_each_item([&](const Item& item) {
      const Part part{item.p + warp * 16 + lane / 4,
                      item.column + tile * kTileColumns + 2 * (lane % 4)};
      load_state(S, item, part);
      const int every = L::kStatesAlone ? p_.segment : p_.all.boundary_every;
      // The state after i * every tokens of the row is stored under number first + i: of the
      // boundary states (i >= 1), or of the states before segments (i >= 0).
      int first = 0;
      int end = item.row.size;  // the last token of the item whose state is stored so
      if constexpr (L::kStatesAlone) {
        first = segments_before(item.row_number);
        if (item.row.source != kNowhere && first < p_.segments)
          store_state(S, p_.kept, first, item, part);
      } else if (every) {
        first = p_.all.rows.boundaries_before(item.row_number, every) - 1;
        const std::int64_t last = p_.all.boundaries_from(first + 1) * every - item.offset;
        if (last < end) end = static_cast<int>(max(last, std::int64_t{0}));
      }
      const auto decay_of = [&](const Step& at) {
        barrier_wait(loaded(at.stage), at.parity);
        const float decay = scalars(at.stage).decay;
        arrive_as_reader(at.stage);
        return decay;
      };
      float decay = item.chunks > 0 ? decay_of(step) : 0.0f;
      for (int c = 0; c < item.chunks; ++c) {
        if constexpr (!L::kStatesAlone) {
          // The chunk's outputs read the state before the chunk.
          copy_state(S, step, tile, warp, lane);
          publish_to_async();
          arrive_of_warp(copied(step.stage), lane);
        }
#pragma unroll
        for (float& s : S) s *= decay;
        const std::uint64_t B = matrix(stage(step.stage) + tile * kTileBytes, kTileBytes);
        const std::uint64_t wx = matrix(output(group), kTileBytes);
        // The output warpgroup that has this chunk leaves w x in its tile.
        barrier_wait(weighed(group), group_parity);
        pin(S);
        start_products();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Product<T, L::kStateColumns, true, true>::of(S, further(wx, 16 * k * kTileRowBytes),
                                                       further(B, 16 * k * kTileRowBytes), true);
        commit_products();
        Step next = step;
        next.next();
        // The next chunk's decay is loaded while the products run.
        if (c + 1 < item.chunks) decay = decay_of(next);
        wait_for_products<0>();
        pin(S);
        arrive_of_warp(used(step.stage), lane);
        step = next;
        arrive_of_warp(taken(group), lane);
        if (++group == L::kOutputGroups) group = 0, group_parity ^= 1;
        const int tokens = (c + 1) * kChunk, from_start = item.offset + tokens;
        if (every && from_start % every == 0 && tokens <= end) {
          const int slot = first + from_start / every;
          if (!L::kStatesAlone || slot < p_.segments)
            store_state(S, L::kStatesAlone ? p_.kept : p_.all.boundary, slot, item, part);
        }
      }
      if (!L::kStatesAlone && item.row.target != kNowhere)
        store_state(S, p_.all.state, item.row.target, item, part);
    });
  }

  // --- States alone: w x for them ---

  /// A warpgroup `group` of Task::states: computes w x of every kOutputGroups-th chunk.
  __device__ void run_weights(int group, int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int rows = warp * 16 * kTileRowBytes;
    Step step;
    int turn = 0;
    std::uint32_t own_parity = 1;
    for_each_item([&](const Item& item) {
      for (int c = 0; c < item.chunks; ++c, step.next()) {
        const bool mine = turn == group;
        if (++turn == L::kOutputGroups) turn = 0;
        if (!mine) continue;
        // This order matters: once the state has taken the group's previous chunk, the stage's
        // previous phase has ended, and the wait for `loaded` by parity is right.
        barrier_wait(taken(group), own_parity);
        own_parity ^= 1;
        barrier_wait(loaded(step.stage), step.parity);
        weigh(output(group) + rows, stage(step.stage) + L::kX + rows,
              scalars(step.stage).w + 16 * warp, lane);
        arrive_as_reader(step.stage);
        publish_to_async();
        arrive_of_warp(weighed(group), lane);
        arrive_of_warp(used(step.stage), lane);
      }
    });
  }

  // --- Outputs ---

  /// An output warpgroup: computes the outputs of every kOutputGroups-th chunk. Warp w has tokens
  /// 16 w ... 16 w + 15 of the chunk.
  __device__ void run_outputs(int group, int warp) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = warp * 16 + lane / 4, column = 2 * (lane % 4);
    const std::uint32_t tile = output(group) + warp * 16 * kTileRowBytes;
    Step step;
    int turn = 0;
    std::uint32_t own_parity = 0;
    const bool by_channel = p_.all.D && p_.all.D.strides[1] != 0;
    bool stored = false;  // a tensor copy may still read this warp's part of the tile
    for_each_item([&](const Item& item) {
      clear_outputs(item, group);
      const float skip = p_.all.D ? at(p_.all.D, item.head, 0) : 0.0f;
      for (int c = 0; c < item.chunks; ++c, step.next()) {
        const bool mine = turn == group;
        if (++turn == L::kOutputGroups) turn = 0;
        if (!mine) continue;
        const int size = min(kChunk, item.row.size - c * kChunk);
        const std::uint32_t from = stage(step.stage);
        const ChunkScalars& at_stage = scalars(step.stage);
        // The tensor copy of this warp's last outputs has to read the tile before w x goes there.
        if (stored && lane == 0) wait_for_reads<0>();
        __syncwarp();
        barrier_wait(loaded(step.stage), step.parity);

        const std::uint64_t B = matrix(from), C = matrix(from + L::kC);
        const std::uint64_t before = matrix(copy(step.copy));
        const std::uint64_t x = matrix(from + L::kX, kTileBytes);
        const std::uint32_t x_rows = from + L::kX + warp * 16 * kTileRowBytes;
        float G[32], O[32];
        // G = C B^T; w x is computed while it runs.
        pin(G);
        start_products();
#pragma unroll
        for (int k = 0; k < N / 16; ++k)
          Product<T, 64, false>::of(G, along(C, k), along(B, k), k > 0);
        commit_products();
        weigh(tile, x_rows, at_stage.w + 16 * warp, lane);
        publish_to_async();
        arrive_of_warp(weighed(group), lane);
        barrier_wait(copied(step.stage), step.parity);
        // O = C S^T, with the state before the chunk; the scores are computed while it runs.
        pin(O);
        start_products();
#pragma unroll
        for (int k = 0; k < N / 16; ++k)
          Product<T, 64, false>::of(O, along(C, k), along(before, k), k > 0);
        commit_products();

        const float a[2] = {at_stage.a[row], at_stage.a[row + 8]};
        float2 b[8];
#pragma unroll
        for (int n = 0; n < 8; ++n)
          b[n] = *reinterpret_cast<const float2*>(at_stage.b + 8 * n + column);
        const uint2 negative = at_stage.negative;
        wait_for_products<1>();
        pin(G);
        std::uint32_t scores[16];
        weigh_scores(scores, G, a, b, warp, lane);
        if ((negative.x | negative.y) != 0) apply_signs(scores, negative, column);
        // add_skip() makes O = exp(a) O + D x.
        const float e[2] = {exp2_fast(a[0]), exp2_fast(a[1])};
        std::uint32_t values[4][4];
        load_rows(values, x_rows, lane);
        wait_for_products<0>();
        pin(O);
        arrive_of_warp(copy_used(step.copy), lane);
        if (!by_channel)
          add_skip(O, e, values, lane, [&](int) { return make_float2(skip, skip); });
        else
          add_skip(O, e, values, lane, [&](int p) {
            const auto of = [&](int i) { return i < p_.all.P ? at(p_.all.D, item.head, i) : 0.0f; };
            return make_float2(of(item.p + p), of(item.p + p + 1));
          });
        arrive_as_reader(step.stage);
        pin(O);
        pin(scores);
        start_products();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Product<T, 64, true>::of(O, scores + 4 * k, further(x, 16 * k * kTileRowBytes), true);
        commit_products();
        // The state's products have read w x, so the tile may take outputs; with a gate, warp 3 has
        // waited for that, and the tile now holds z.
        barrier_wait(kTask == Task::gated_outputs ? gate_loaded(group) : taken(group), own_parity);
        own_parity ^= 1;
        wait_for_products<0>();
        pin(O);
        pin(scores);
        arrive_of_warp(used(step.stage), lane);
        if (kTask == Task::gated_outputs) gate(O, tile, lane);
        put_outputs(O, tile, lane);
        const int t = item.row.begin + c * kChunk + warp * 16;
        if (size >= warp * 16 + 16) {
          publish_to_async();
          __syncwarp();
          if (lane == 0) store_tile(maps_.out, tile, item.p, item.head, t), commit_stores();
        } else {
          __syncwarp();
          store_rows(tile, item, t, size - warp * 16, lane);
          publish_to_async();  // the next copy into the tile comes after these ordinary reads
          __syncwarp();
        }
        stored = true;
      }
    });
    if (lane == 0) wait_for_stores();
  }

 private:
  /// Arrives once for the whole warp, after all its lanes have come here.
  __device__ static void arrive_of_warp(std::uint32_t barrier, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }
  /// Hardware barriers that say that all ordinary loads from a stage are done: those of the state
  /// warpgroups and of the stage's output warpgroup arrive at them. Two feeding warps wait before
  /// they refill the stage, one for tiles and one for scalars, each at a barrier of its own, since
  /// all that wait at one bar.sync must execute the same instruction. The reads by products are
  /// counted by used() instead.
  enum Filling { kTiles, kScalars };
  static constexpr int kReadThreads = (L::kStateGroups + 1) * kWarpgroup + 32;
  __device__ static int read_barrier(int s, Filling filling) {
    return 1 + 2 * s + filling;
  }
  __device__ static void arrive_as_reader(int s) {
    arrive_at(read_barrier(s, kTiles), kReadThreads);
    arrive_at(read_barrier(s, kScalars), kReadThreads);
  }

  /// A role's position in the ring of stages. Every role advances it for every chunk, also for
  /// those that it leaves to others.
  struct Step {
    int stage = 0, copy = 0;
    std::uint32_t parity = 0;
    __device__ void next() {
      copy ^= 1;
      if (++stage == L::kStages) stage = 0, parity ^= 1;
    }
  };

  struct Item {
    PrefillRow row;  ///< the row of the batch, or the segment's part of it
    int index, row_number, head, group, chunks;
    int p;       ///< the item's first row of the state
    int column;  ///< the item's first column of the state
    int offset;  ///< tokens of the row before the item
  };

  /// Number of segments of a row, at least 1.
  __device__ int segments_of(int row) const {
    return max(1, (p_.all.rows.length(row) + p_.segment - 1) / p_.segment);
  }
  /// Number of segments of all rows before `row`. Every lane of a warp calls it.
  __device__ int segments_before(int row) const {
    int count = 0;
    for (int r = static_cast<int>(threadIdx.x % 32); r < row; r += 32) count += segments_of(r);
    return PrefillRows::sum_over_warp(count);
  }

  struct Place {
    PrefillRow row;
    int row_number = kNowhere;  ///< kNowhere: there is no such item
    int offset = 0;
  };
  /// Finds row, or segment, number `number`. Every lane of a warp calls it.
  __device__ Place place_of(int number) const {
    if (L::kStatesAlone || p_.segment == 0) return {p_.all.rows.row(number), number, 0};
    const int lane = static_cast<int>(threadIdx.x % 32), rows = p_.all.rows.count();
    for (int first = 0, before = 0; first < rows; first += 32) {
      const int own = first + lane < rows ? segments_of(first + lane) : 0;
      int upto = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, upto, distance);
        if (lane >= distance) upto += other;
      }
      const unsigned reaching = __ballot_sync(0xffffffffu, before + upto > number);
      if (reaching == 0) {
        before += __shfl_sync(0xffffffffu, upto, 31);
        continue;
      }
      const int found = __ffs(static_cast<int>(reaching)) - 1;
      const int count = __shfl_sync(0xffffffffu, own, found);
      const int segment = number - before - __shfl_sync(0xffffffffu, upto, found) + count;
      return segment_of(first + found, segment, segment == count - 1, number);
    }
    return {};
  }
  /// The place of segment `segment` of a row. Its state is number `number` of `kept`; only the
  /// row's `last` segment stores the row's state and zeroes its padding.
  __device__ Place segment_of(int row_number, int segment, bool last, int number) const {
    PrefillRow row = p_.all.rows.row(row_number);
    const int offset = min(segment * p_.segment, row.size);
    row.begin += offset;
    row.size = min(row.size - offset, p_.segment);
    if (row.size > 0 && (segment > 0 || row.source != kNowhere)) row.source = number;
    if (row.size == 0) row.source = kNowhere;
    if (!last) row.target = kNowhere, row.end = row.begin + row.size;
    return {row, row_number, offset};
  }

  /// Calls body(item) for the block's items. Every warp of the block goes through the same items.
  template <class Body>
  __device__ void for_each_item(Body body) const {
    const int of_row = p_.all.H * p_.tiles_of_head * p_.slices;
    const int step = static_cast<int>(gridDim.x);
    int index = static_cast<int>(blockIdx.x);
    Place place;
    if (index < p_.items) place = place_of(index / of_row);
    while (index < p_.items && place.row_number != kNowhere) {
      Item item;
      item.index = index;
      item.row_number = place.row_number;
      const int part = index % of_row, tile = part / p_.slices;
      item.head = tile / p_.tiles_of_head;
      item.p = (tile - item.head * p_.tiles_of_head) * kStateRows;
      item.column = L::kStatesAlone ? (part - tile * p_.slices) * N : 0;
      item.group = item.head / p_.all.heads_per_group;
      item.row = place.row;
      item.row.size = uniform(item.row.size);
      item.offset = place.offset;
      item.chunks = L::kStatesAlone ? max(item.row.size - 1, 0) / p_.segment * (p_.segment / kChunk)
                                    : (item.row.size + kChunk - 1) / kChunk;
      // The next item's row is looked up before this item's work, which hides the latency.
      index += step;
      if (index < p_.items) place = place_of(index / of_row);
      body(item);
    }
  }

  // Addresses in shared memory; see Plan and init_barriers().
  __device__ std::uint32_t barrier(int number) const {
    return base_ + L::kBarriers + 8 * number;
  }
  __device__ std::uint32_t loaded(int s) const {
    return barrier(s);
  }
  __device__ std::uint32_t used(int s) const {
    return barrier(L::kStages + s);
  }
  __device__ std::uint32_t copied(int s) const {
    return barrier(2 * L::kStages + s);
  }
  __device__ std::uint32_t copy_used(int i) const {
    return barrier(3 * L::kStages + i);
  }
  __device__ std::uint32_t tail() const {
    return barrier(3 * L::kStages + 2);
  }
  __device__ std::uint32_t weighed(int g) const {
    return barrier(3 * L::kStages + 3 + g);
  }
  __device__ std::uint32_t taken(int g) const {
    return weighed(L::kOutputGroups + g);
  }
  __device__ std::uint32_t gate_loaded(int g) const {
    return weighed(2 * L::kOutputGroups + g);
  }
  __device__ std::uint32_t stage(int s) const {
    return base_ + s * L::kStageBytes;
  }
  __device__ std::uint32_t copy(int i) const {
    return base_ + L::kCopies + i * L::kCopyBytes;
  }
  __device__ std::uint32_t output(int g) const {
    return base_ + L::kOutputs + g * kTileBytes;
  }
  __device__ ChunkScalars& scalars(int s) const {
    return reinterpret_cast<ChunkScalars*>(shared_ + L::kScalars)[s];
  }
  /// The descriptor of columns 16 k ... 16 k + 15 of a K-major matrix (rows are tokens or p).
  __device__ static std::uint64_t along(std::uint64_t matrix, int k) {
    return further(matrix, k / 4 * kTileBytes + k % 4 * 32);
  }
  /// Interleaves the lower 16 bits of `even` and `odd`: bit 2 i is even's bit i, bit 2 i + 1 odd's.
  __device__ static unsigned interleaved(unsigned even, unsigned odd) {
    const auto spread = [](unsigned x) {
      x &= 0xffffu;
      x = (x | x << 8) & 0x00ff00ffu;
      x = (x | x << 4) & 0x0f0f0f0fu;
      x = (x | x << 2) & 0x33333333u;
      return (x | x << 1) & 0x55555555u;
    };
    return spread(even) | spread(odd) << 1;
  }

  // A thread holds the elements of the state that a product gives it: hopper.cuh describes them.

  using State = float[L::kStateColumns / 2];
  struct Part {
    int row, column;  ///< the thread's first row and column of the state
  };

  /// Calls visit(pair in the pool, its index in S) for the thread's pairs of neighbouring columns
  /// in its two rows. All pairs of a row share one address and constant offsets.
  template <class Pair, class Visit>
  __device__ void for_each_pair(const MixedView<4>& pool, int slot, const Item& item,
                                const Part& part, Visit visit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = part.row + 8 * half;
      if (row >= p_.all.P) continue;
      auto* const first = static_cast<Pair*>(
          const_cast<void*>(address_of(pool, slot, item.head, row, part.column)));
#pragma unroll
      for (int n = 0; n < L::kStateColumns / 8; ++n) visit(first[4 * n], 4 * n + 2 * half);
    }
  }

  __device__ void load_state(State& S, const Item& item, const Part& part) const {
#pragma unroll
    for (float& s : S) s = 0.0f;
    if (item.row.source == kNowhere) return;
    const MixedView<4>& pool = p_.before;
    if (pool.format == Format::float32)
      for_each_pair<const float2>(
          pool, item.row.source, item, part,
          [&](const float2& pair, int i) { S[i] = pair.x, S[i + 1] = pair.y; });
    else
      for_each_pair<const unsigned>(
          pool, item.row.source, item, part, [&](const unsigned& pair, int i) {
            const bool bf16 = pool.format == Format::bf16;
            const float2 both = bf16 ? unpack<Bf16>(pair) : unpack<Fp16>(pair);
            S[i] = both.x, S[i + 1] = both.y;
          });
  }

  __device__ void store_state(const State& S, const MixedView<4>& pool, int slot, const Item& item,
                              const Part& part) const {
    if (pool.format == Format::float32)
      for_each_pair<float2>(pool, slot, item, part,
                            [&](float2& pair, int i) { pair = make_float2(S[i], S[i + 1]); });
    else
      for_each_pair<unsigned>(pool, slot, item, part, [&](unsigned& pair, int i) {
        pair =
            pool.format == Format::bf16 ? pack<Bf16>(S[i], S[i + 1]) : pack<Fp16>(S[i], S[i + 1]);
      });
  }

  /// Prefetches into L2 the state of this block's item `index`.
  __device__ void prefetch_state(int index, int lane) const {
    if (index >= p_.items || !p_.all.state || p_.segment) return;
    const int of_row = p_.all.H * p_.tiles_of_head;
    const PrefillRow row = p_.all.rows.row(index / of_row);
    if (row.source == kNowhere) return;
    const int head = index % of_row / p_.tiles_of_head, p = index % p_.tiles_of_head * kStateRows;
    const unsigned bytes = N * (p_.all.state.format == Format::float32 ? 4 : 2);
    for (int r = p + lane; r < min(p + kStateRows, p_.all.P); r += 32)
      prefetch_to_l2(address_of(p_.all.state, row.source, head, r, 0), bytes);
  }

  /// Writes the bf16 copy of the state before a chunk, when the outputs have used the copy's last
  /// contents.
  __device__ void copy_state(const State& S, const Step& step, int tile, int warp, int lane) const {
    barrier_wait(copy_used(step.copy), copy_parity(step) ^ 1);
    const std::uint32_t to = copy(step.copy) + tile * kTileBytes;
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < L::kStateColumns / 16; ++k)
      store_matrices(to + k / 4 * kTileBytes + tile_offset(row, 2 * (k % 4) + lane / 16),
                     pack<T>(S[8 * k], S[8 * k + 1]), pack<T>(S[8 * k + 2], S[8 * k + 3]),
                     pack<T>(S[8 * k + 4], S[8 * k + 5]), pack<T>(S[8 * k + 6], S[8 * k + 7]));
  }
  /// Parity of a copy's phase: the two copies alternate, so it changes with every second chunk.
  __device__ static std::uint32_t copy_parity(const Step& step) {
    static_assert(L::kStages == 2 || L::kStages == 4);
    return L::kStages == 2 ? step.parity : step.stage / 2 & 1;
  }

  /// Loads the warp's 16 rows of a tile in the layout of a product's left operand. All loads are
  /// issued before the first value is used.
  __device__ static void load_rows(std::uint32_t (&values)[4][4], std::uint32_t tile, int lane) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      load_matrices(values[k], tile + tile_offset(lane % 16, 2 * k + lane / 16));
  }

  /// Writes w x of the warp's 16 tokens to `to`; `x` is the address of their rows in the tile of x.
  __device__ static void weigh(std::uint32_t to, std::uint32_t x, const float* w, int lane) {
    const float weight[2] = {w[lane / 4], w[lane / 4 + 8]};
    std::uint32_t values[4][4];
    load_rows(values, x, lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 value = unpack<T>(values[k][i]);
        values[k][i] = pack<T>(value.x * weight[i % 2], value.y * weight[i % 2]);
      }
      store_matrices(to + tile_offset(lane % 16, 2 * k + lane / 16), values[k][0], values[k][1],
                     values[k][2], values[k][3]);
    }
  }

  /// scores = G_ij exp(a_i - a_j) |d_j| for j <= i, else 0, as the left operand of a product. For a
  /// warp's 16 rows, column blocks of 16 left of the diagonal are full, the one on the diagonal is
  /// a triangle, and those right of it are 0.
  __device__ static void weigh_scores(std::uint32_t (&scores)[16], const float (&G)[32],
                                      const float (&a)[2], const float2 (&b)[8], int warp,
                                      int lane) {
    const int column = 2 * (lane % 4);
    const bool first = column <= lane / 4, second = column + 1 <= lane / 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t* const to = scores + 4 * k;
      if (k > warp) {
        to[0] = to[1] = to[2] = to[3] = 0;
        continue;
      }
      const float2 near = b[2 * k], far = b[2 * k + 1];
      const float* const g = G + 8 * k;
      const bool diagonal = k == warp;
      const float x = g[0] * exp2_fast(a[0] - near.x), y = g[1] * exp2_fast(a[0] - near.y);
      to[0] = pack<T>(!diagonal || first ? x : 0.0f, !diagonal || second ? y : 0.0f);
      to[1] = pack<T>(g[2] * exp2_fast(a[1] - near.x), g[3] * exp2_fast(a[1] - near.y));
      to[2] =
          diagonal ? 0 : pack<T>(g[4] * exp2_fast(a[0] - far.x), g[5] * exp2_fast(a[0] - far.y));
      const float u = g[6] * exp2_fast(a[1] - far.x), v = g[7] * exp2_fast(a[1] - far.y);
      to[3] = pack<T>(!diagonal || first ? u : 0.0f, !diagonal || second ? v : 0.0f);
    }
  }

  /// Changes the sign of the columns j with d_j < 0, as the exponent has only |d_j|.
  __device__ static void apply_signs(std::uint32_t (&scores)[16], const uint2& negative,
                                     int column) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const unsigned bits = (n < 4 ? negative.x : negative.y) >> (8 * (n % 4) + column);
      const std::uint32_t turn = (bits & 1) << 15 | (bits & 2) << 30;
      scores[2 * n] ^= turn, scores[2 * n + 1] ^= turn;
    }
  }

  /// O = e_i O + D x_i, with the rows x that load_rows() gave; D(p) returns D of channels p and p
  /// + 1.
  template <class SkipOf>
  __device__ static void add_skip(float (&O)[32], const float (&e)[2],
                                  const std::uint32_t (&x)[4][4], int lane, SkipOf D) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // row i % 2 of the thread's two, columns 8 (i / 2) further
        const float2 value = unpack<T>(x[k][i]);
        const float2 factor = D(16 * k + 8 * (i / 2) + 2 * (lane % 4));
        float* const o = O + 8 * k + 2 * i;
        o[0] = fmaf(o[0], e[i % 2], factor.x * value.x);
        o[1] = fmaf(o[1], e[i % 2], factor.y * value.y);
      }
  }

  /// Multiplies O by silu(z), where z is in the warp's part of the tile.
  __device__ static void gate(float (&O)[32], std::uint32_t tile, int lane) {
    std::uint32_t values[4][4];
    load_rows(values, tile, lane);
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 z = unpack<T>(values[k][i]);
        O[8 * k + 2 * i] *= silu_fast(z.x);
        O[8 * k + 2 * i + 1] *= silu_fast(z.y);
      }
  }

  /// Writes O in bf16 to the warp's part of the tile.
  __device__ static void put_outputs(const float (&O)[32], std::uint32_t tile, int lane) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_matrices(tile + tile_offset(lane % 16, 2 * k + lane / 16),
                     pack<T>(O[8 * k], O[8 * k + 1]), pack<T>(O[8 * k + 2], O[8 * k + 3]),
                     pack<T>(O[8 * k + 4], O[8 * k + 5]), pack<T>(O[8 * k + 6], O[8 * k + 7]));
  }

  __device__ T* out(int t, int head) const {
    return static_cast<T*>(p_.out) + t * p_.out_token_stride + head * p_.out_head_stride;
  }
  /// Stores the first `rows` rows of the warp's part of the tile: the row of the batch ends within
  /// it, and a tensor copy would write beyond.
  __device__ void store_rows(std::uint32_t tile, const Item& item, int t, int rows,
                             int lane) const {
    for (int i = lane; i < rows * 8; i += 32) {
      const int row = i / 8, p = item.p + i % 8 * 8;
      if (p >= p_.all.P) continue;
      const unsigned char* const from = shared_ + (tile - base_) + tile_offset(row, i % 8);
      *reinterpret_cast<uint4*>(out(t + row, item.head) + p) =
          *reinterpret_cast<const uint4*>(from);
    }
  }
  /// Zeroes the outputs of padding tokens after the row.
  __device__ void clear_outputs(const Item& item, int group) const {
    const int first = item.row.begin + item.row.size, count = (item.row.end - first) * 8;
    for (int i = group * kWarpgroup + static_cast<int>(threadIdx.x % kWarpgroup); i < count;
         i += L::kOutputGroups * kWarpgroup) {
      const int p = item.p + i % 8 * 8;
      if (p < p_.all.P)
        *reinterpret_cast<uint4*>(out(first + i / 8, item.head) + p) = make_uint4(0, 0, 0, 0);
    }
  }

  const Chunked& p_;
  const Maps& maps_;
  unsigned char* shared_;
  std::uint32_t base_;
};

template <int N, Task kTask>
__global__ void __launch_bounds__(Plan<N, kTask>::kThreads, 1)
    ssd_chunks_kernel(const __grid_constant__ Chunked p, const __grid_constant__ Maps maps) {
  using L = Plan<N, kTask>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Block<N, kTask> block(p, maps, shared);
  const int warp = uniform(static_cast<int>(threadIdx.x / 32));
  const int group = warp / 4;
  if (threadIdx.x == 0) block.init_barriers();
  __syncthreads();
  wait_for_earlier_launch();
  let_the_next_launch_start();
  if (group == 0) {
    give_registers<L::kFeedRegisters>();
    if (warp == 0) {
      block.load_tiles();
    } else if (warp <= L::kScalarWarps) {
      block.compute_scalars(warp - 1);
    } else if (kTask == Task::gated_outputs) {
      block.load_gates();
    }
  } else if (group <= L::kStateGroups) {
    take_registers<L::kStateRegisters>();
    block.run_state(group - 1, warp % 4);
  } else {
    take_registers<L::kOutputRegisters>();
    if constexpr (L::kStatesAlone)
      block.run_weights(group - 1 - L::kStateGroups, warp % 4);
    else
      block.run_outputs(group - 1 - L::kStateGroups, warp % 4);
  }
}

template <int N, Task kTask>
void launch_chunks(const Chunked& p, const Maps& maps, int grid, cudaStream_t stream) {
  using L = Plan<N, kTask>;
  const auto kernel = ssd_chunks_kernel<N, kTask>;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
  check_cuda(allowed, kName);
  launch(kName, kernel, dim3(static_cast<unsigned>(grid)), dim3(L::kThreads), L::kBytes, stream,
         true, p, maps);
}

// --- Sequential ----------------------------------------------------------------------------------

constexpr int kScanRows = 16;
constexpr int kRowsOfWarp = 4;
constexpr int kScanThreads = kScanRows / kRowsOfWarp * 32;
constexpr int kScanColumns = 256;  ///< N at most

template <class T>
struct Scan {
  Common all;
  TensorView<const T, 3> x, B, C, z;
  TensorView<T, 3> out;
  bool gated;
};

/// Token by token. A lane has kCount columns: lane, lane + 32, ...
template <class T, int kCount>
__global__ void __launch_bounds__(kScanThreads) ssd_scan_kernel(const __grid_constant__ Scan<T> p) {
  const int lane = static_cast<int>(threadIdx.x % 32), h = static_cast<int>(blockIdx.y);
  const int first =
      static_cast<int>(blockIdx.x) * kScanRows + static_cast<int>(threadIdx.x / 32) * kRowsOfWarp;
  const int N = p.all.N, P = p.all.P, group = h / p.all.heads_per_group;
  const auto column = [&](int i) { return lane + 32 * i; };
  wait_for_earlier_launch();
  const int number = static_cast<int>(blockIdx.z);
  const PrefillRow row = p.all.rows.row(number);
  const int own = first + lane;  // lane r < kRowsOfWarp writes the output of the warp's row r
  const bool writes = lane < kRowsOfWarp && own < P;
  for (int t = row.begin + row.size; t < row.end && writes; ++t)
    p.out(t, h, own) = from_float<T>(0.0f);

  float s[kRowsOfWarp][kCount];
  const auto for_each_element = [&](auto visit) {
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (first + r < P && column(i) < N) visit(s[r][i], first + r, column(i));
  };
  const auto store = [&](const MixedView<4>& pool, int slot) {
    for_each_element([&](float value, int r, int n) {
      void* const to = const_cast<void*>(address_of(pool, slot, h, r, n));
      if (pool.format == Format::float32)
        *static_cast<float*>(to) = value;
      else if (pool.format == Format::bf16)
        *static_cast<Bf16*>(to) = from_float<Bf16>(value);
      else
        *static_cast<Fp16*>(to) = from_float<Fp16>(value);
    });
  };
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r)
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[r][i] = 0.0f;
  if (row.source != kNowhere)
    for_each_element(
        [&](float& value, int r, int n) { value = at(p.all.state, row.source, h, r, n); });
  const int every = p.all.boundary_every;
  const int boundary = every ? p.all.rows.boundaries_before(number, every) : 0;
  const float A = at(p.all.A, h), bias = p.all.bias(h);

  for (int i = 0; i < row.size; ++i) {
    const int t = row.begin + i;
    const float d = p.all.time_step(p.all.dt_bits(t, h), bias), decay = expf(__fmul_rn(A, d));
    float dots[kRowsOfWarp] = {};
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const bool has = column(c) < N;
      const float Bd = has ? __fmul_rn(to_float(p.B(t, group, column(c))), d) : 0.0f;
      const float C = has ? to_float(p.C(t, group, column(c))) : 0.0f;
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const float x = first + r < P ? to_float(p.x(t, h, first + r)) : 0.0f;
        s[r][c] = fmaf(Bd, x, __fmul_rn(s[r][c], decay));
        dots[r] = fmaf(s[r][c], C, dots[r]);
      }
    }
    float y = 0.0f;
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        dots[r] += __shfl_xor_sync(0xffffffffu, dots[r], distance);
      if (lane == r) y = dots[r];
    }
    if (writes) {
      if (p.all.D) y += __fmul_rn(at(p.all.D, h, own), to_float(p.x(t, h, own)));
      if (p.gated) y *= silu(to_float(p.z(t, h, own)));
      p.out(t, h, own) = from_float<T>(y);
    }
    if (every && (i + 1) % every == 0) {
      const int place = boundary + (i + 1) / every - 1;
      if (p.all.boundaries_from(place) > 0) store(p.all.boundary, place);
    }
  }
  if (row.target != kNowhere) store(p.all.state, row.target);
}

template <class T>
void launch_scan(const Scan<T>& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.all.P + kScanRows - 1) / kScanRows),
                  static_cast<unsigned>(p.all.H), static_cast<unsigned>(p.all.rows.count()));
  const auto kernel = p.all.N <= 64    ? ssd_scan_kernel<T, 2>
                      : p.all.N <= 128 ? ssd_scan_kernel<T, 4>
                                       : ssd_scan_kernel<T, kScanColumns / 32>;
  launch(kName, kernel, grid, dim3(kScanThreads), 0, stream, true, p);
}

// --- The wrapper ---------------------------------------------------------------------------------

template <class V>
bool pairs_aligned(const V& pool) {
  return reinterpret_cast<std::uintptr_t>(pool.data_handle()) % 16 == 0 &&
         (pool.extent(3) <= 1 || pool.stride(3) == 1) && pool.stride(0) % 8 == 0 &&
         pool.stride(1) % 8 == 0 && pool.stride(2) % 8 == 0;
}

constexpr bool has_chunks(std::int64_t N) {
#define LOCKSTEP_CASE(N_) \
  if (N == N_) return true;
  LOCKSTEP_STATE_ROWS(LOCKSTEP_CASE)
#undef LOCKSTEP_CASE
  return false;
}

/// The requirement of the chunked kernel that the arguments do not meet, or null.
template <class T, class S>
const char* no_chunks(const SsdPrefill<T, S>& in) {
  if (!std::is_same_v<T, Bf16>) return "activations in bfloat16";
  if (!has_chunks(in.B.extent(2)))
    return "N = 128, or 64 or 256 in a build with LOCKSTEP_ALL_SHAPES";
  if (in.x.extent(2) % 8 != 0) return "P a multiple of 8";
  if (!can_be_mapped(in.x) || !can_be_mapped(in.B) || !can_be_mapped(in.C) ||
      !can_be_mapped(in.out) || (in.z && !can_be_mapped(*in.z)))
    return "x, B, C, z and out contiguous in their last dimension, with bases and strides of whole "
           "16 bytes";
  if ((in.state && !pairs_aligned(*in.state)) ||
      (in.boundary_states && !pairs_aligned(*in.boundary_states)))
    return "states contiguous in N, with strides of multiples of 8";
  if (in.boundary_states && in.boundary_every % kChunk != 0)
    return "boundaries at multiples of 64 tokens";
  return nullptr;
}

int processors() {
  static const int count = [] {
    int device = 0, found = 0;
    check_cuda(cudaGetDevice(&device), kName);
    check_cuda(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), kName);
    return found;
  }();
  return count;
}

/// Blocks of a persistent launch. If a multiple of the heads fills at least 85% of the processors,
/// that many: item i goes to block i % blocks, so each block keeps to one head and all blocks get
/// rows of all lengths.
int blocks_for(std::int64_t items, std::int64_t heads) {
  const std::int64_t most = processors();
  std::int64_t blocks = most;
  if (heads <= most && most / heads * heads * 100 >= most * 85) blocks = most / heads * heads;
  return static_cast<int>(std::min(items, blocks));
}

/// Sizes of a batch for the choice of segments. `heads` counts tiles of 64 state rows of all heads.
struct Extent {
  std::int64_t rows, tokens, heads;
  int N;
};

/// Chunks of a row of average length.
std::int64_t chunks_of_row(const Extent& e) {
  return std::max<std::int64_t>(1, (e.tokens + e.rows * kChunk - 1) / (e.rows * kChunk));
}

/// Columns that a block of Task::states takes: 64 while the GPU has processors for so many blocks,
/// else up to 128.
int slice_of(const Extent& e) {
  return e.N > 64 && e.rows * e.heads * (e.N / 64) <= processors() ? 64 : std::min(e.N, 128);
}

/// The tokens of a segment with the shortest expected time for a batch whose rows are all of
/// average length; 0, for whole rows, if they are faster and not `always`. Times are those of an
/// H200 in hundreds of nanoseconds: a chunk takes 10 with outputs, 6 for its state alone; one more
/// launch takes 80.
std::int64_t segment_tokens(const Extent& e, bool always) {
  const std::int64_t chunks = chunks_of_row(e), of_all = e.rows * e.heads, most = processors();
  const auto rounds = [&](std::int64_t items) { return (items + most - 1) / most; };
  std::int64_t best = 0, shortest = always ? INT64_MAX : rounds(of_all) * chunks * 10;
  for (std::int64_t count = 2; count <= most; ++count) {
    const std::int64_t size = (chunks + count - 1) / count, full = (chunks + size - 1) / size;
    const std::int64_t alone = rounds(of_all * (e.N / slice_of(e))) * (full - 1) * size * 6;
    const std::int64_t time = rounds(of_all * full) * size * 10 + alone + 80;
    if (time >= shortest) continue;
    shortest = time;
    best = size * kChunk;
  }
  return best;
}

std::int64_t segments_at_most(const Extent& e, std::int64_t segment) {
  return e.rows + e.tokens / segment;
}

std::int64_t kept_bytes(const Extent& e, std::int64_t P, std::int64_t H, std::int64_t segment) {
  return segments_at_most(e, segment) * H * P * e.N * std::int64_t{sizeof(float)};
}

template <class T, class S>
Extent extent_of(const SsdPrefill<T, S>& in) {
  const std::int64_t T_ = in.x.extent(0);
  const std::int64_t rows = in.batch.query_start_loc   ? in.batch.query_start_loc->extent(0) - 1
                            : in.batch.padded_size > 0 ? T_ / in.batch.padded_size
                                                       : 1;
  const std::int64_t tiles = (in.x.extent(2) + kStateRows - 1) / kStateRows;
  return {rows, T_, in.x.extent(1) * tiles, static_cast<int>(in.B.extent(2))};
}

/// The tokens of a segment for the call, or 0 if rows stay whole or the chunked kernel does not
/// run.
template <class T, class S>
std::int64_t segment_for(const SsdPrefill<T, S>& in) {
  const Extent e = extent_of(in);
  if (in.kernel == PrefillKernel::sequential || in.kernel == PrefillKernel::chunked ||
      no_chunks(in) || e.rows < 1 || e.tokens == 0 || e.heads == 0)
    return 0;
  return segment_tokens(e, in.kernel == PrefillKernel::segments);
}

template <class T, class S>
void launch_chunked(const SsdPrefill<T, S>& in, const Common& all, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const Checks checks(kName);
    const auto whole_number = [&](std::int64_t items) {
      checks.expect(items < INT_MAX, "x", "of fewer than 2147483647 heads of all rows",
                    std::to_string(items));
      return static_cast<int>(items);
    };
    Chunked p{};
    p.all = all;
    p.out = in.out.data_handle();
    p.out_token_stride = in.out.stride(0);
    p.out_head_stride = in.out.stride(1);
    p.tiles_of_head = (all.P + kStateRows - 1) / kStateRows;
    p.slices = 1;
    p.before = all.state;
    Maps maps{};
    maps.x = tile_map(kName, in.x, kChunk);
    maps.B = tile_map(kName, in.B, kChunk);
    maps.C = tile_map(kName, in.C, kChunk);
    maps.out = tile_map(kName, in.out, 16);  // each warp stores its own 16 tokens
    if (in.z) maps.z = tile_map(kName, *in.z, kChunk);
    const std::int64_t heads = std::int64_t{all.H} * p.tiles_of_head;
    std::int64_t rows = all.rows.count();
    const Extent e = extent_of(in);
    const std::int64_t segment = segment_for(in);
    const std::int64_t bytes = segment > 0 ? kept_bytes(e, all.P, all.H, segment) : 0;
    const std::int64_t given = in.workspace ? in.workspace->extent(0) : 0;
    const bool sound =
        given >= bytes &&
        (!in.workspace || reinterpret_cast<std::uintptr_t>(in.workspace->data_handle()) % 16 == 0);
    checks.expect(sound || in.kernel != PrefillKernel::segments, "workspace",
                  "of " + std::to_string(bytes) + " bytes at a multiple of 16",
                  std::to_string(given) + " bytes");
    if (segment > 0 && sound) {
      rows = segments_at_most(e, segment);
      p.segment = static_cast<int>(segment);
      p.segments = whole_number(rows);
      p.kept = make_view(reinterpret_cast<const float*>(in.workspace->data_handle()),
                         Shape<4>{rows, all.H, all.P, all.N});
      const int slice = slice_of(e);
      p.slices = all.N / slice;
      p.items = whole_number(heads * p.slices * all.rows.count());
      const int grid = std::min(p.items, processors());
      slice == 64 ? launch_chunks<64, Task::states>(p, maps, grid, stream)
                  : launch_chunks<128, Task::states>(p, maps, grid, stream);
      p.slices = 1;
      p.before = p.kept;
    }
    p.items = whole_number(heads * rows);
    const int grid = blocks_for(p.items, heads);
#define LOCKSTEP_CASE(N_)                                                       \
  if (all.N == N_)                                                              \
    return in.z ? launch_chunks<N_, Task::gated_outputs>(p, maps, grid, stream) \
                : launch_chunks<N_, Task::outputs>(p, maps, grid, stream);
    LOCKSTEP_STATE_ROWS(LOCKSTEP_CASE)
#undef LOCKSTEP_CASE
  }
}

}  // namespace

template <class T, class S>
std::int64_t prefill_workspace(const SsdPrefill<T, S>& in) {
  const std::int64_t segment = segment_for(in);
  return segment > 0 ? kept_bytes(extent_of(in), in.x.extent(2), in.x.extent(1), segment) : 0;
}

template <class T, class S>
void ssd_prefill(const SsdPrefill<T, S>& in, cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t T_ = in.x.extent(0), H = in.x.extent(1), P = in.x.extent(2);
  const std::int64_t G = in.B.extent(1), N = in.B.extent(2);
  const std::int64_t slots = in.state ? in.state->extent(0) : 0;
  checks.expect(G > 0 && H % G == 0, "B", "[T, G, N] with H a multiple of G",
                text_of(shape_of(in.B)));
  checks.shape(in.B, "B", "[T, G, N]", {T_, G, N});
  checks.shape(in.C, "C", "[T, G, N]", {T_, G, N});
  checks.expect(N <= kScanColumns, "B", "[T, G, N] with N of at most 256", text_of(shape_of(in.B)));
  checks.expect(H <= 65535 && P <= 65535, "x", "[T, H, P] with H and P of at most 65535",
                text_of(shape_of(in.x)));
  checks.shape(in.dt, "dt", "[T, H]", {T_, H});
  checks.shape(in.A, "A", "[H]", {H});
  checks.expect(in.A.format == Format::float32, "A", "float32", name_of(in.A.format));
  checks.shape(in.out, "out", "[T, H, P]", {T_, H, P});
  if (in.D) checks.shape(in.D, "D", "[H, P]", {H, P});
  if (in.z) checks.shape(*in.z, "z", "[T, H, P]", {T_, H, P});
  if (in.dt_bias) checks.shape(in.dt_bias, "dt_bias", "[H]", {H});
  if (in.state) checks.shape(*in.state, "state", "[slots, H, P, N]", {slots, H, P, N});
  checks.expect(in.boundary_states.has_value() == (in.boundary_every > 0), "boundary_every",
                "at least 1 with boundary_states, and 0 without",
                std::to_string(in.boundary_every));
  if (in.boundary_states)
    checks.shape(*in.boundary_states, "boundary_states", "[boundaries, H, P, N]",
                 {in.boundary_states->extent(0), H, P, N});

  Common all{};
  all.rows = prefill_rows(checks, in.batch, T_,
                          in.state ? std::optional(slots) : std::optional<std::int64_t>());
  checks.expect(all.rows.count() <= 65535, "the batch", "of at most 65535 rows",
                std::to_string(all.rows.count()));
  all.dt = in.dt;
  all.A = in.A;
  all.D = in.D;
  all.dt_bias = in.dt_bias;
  all.dt_min = in.dt_min.value_or(-INFINITY);
  all.dt_max = in.dt_max.value_or(INFINITY);
  all.dt_softplus = in.dt_softplus;
  all.H = static_cast<int>(H);
  all.P = static_cast<int>(P);
  all.N = static_cast<int>(N);
  all.heads_per_group = static_cast<int>(H / G);
  if (in.state) all.state = *in.state;
  if (in.boundary_states) all.boundary = *in.boundary_states;
  all.boundary_every = static_cast<int>(std::min<std::int64_t>(in.boundary_every, INT_MAX));

  const char* const missing = no_chunks(in);
  const bool chunks_alone =
      in.kernel == PrefillKernel::chunked || in.kernel == PrefillKernel::segments;
  checks.expect(!chunks_alone || !missing, "kernel",
                std::string("for chunks, ") + (missing ? missing : ""), "other inputs");
  if (H == 0 || P == 0 || N == 0 || all.rows.count() == 0) return;
  if (!missing && in.kernel != PrefillKernel::sequential) return launch_chunked(in, all, stream);
  Scan<T> p{};
  p.all = all;
  p.x = in.x;
  p.B = in.B;
  p.C = in.C;
  p.out = in.out;
  if (in.z) p.z = *in.z;
  p.gated = in.z.has_value();
  launch_scan(p, stream);
}

#define LOCKSTEP_INSTANTIATE(T, S)                                  \
  template std::int64_t prefill_workspace(const SsdPrefill<T, S>&); \
  template void ssd_prefill(const SsdPrefill<T, S>&, cudaStream_t);
LOCKSTEP_SERVING_TYPES(LOCKSTEP_INSTANTIATE)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_OTHER_TYPES(LOCKSTEP_INSTANTIATE)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
