// A Mamba2 layer's verification in one launch. Equations:
// reference/recurrent/mamba2_mixer_verify.hpp.
//
//   grid   (parts, G, N) in clusters of (parts, 1, 1); N: rows of the batch
//   block  kWarps warps; it has some of the channels of one group of heads, which are rows of
//   states
//          [P, N] one after another: as many tiles as another block of its cluster, or one more or
//          less. They pass through the warps' registers tile by tile, kRows x kLaneRows at a time.
//          A warp asks for some tiles ahead, by bulk copies into shared memory of its own
//
// A verification writes a state after each token, so a tile of states stays in registers while the
// row's tokens run over it, and is read once. The blocks of a cluster have one row of the batch and
// one group. Each
//   1. asks for its first tiles of states;
//   2. convolves the group's B and C of all tokens (all blocks the same) and its own x, rounded to
//      bfloat16 in shared memory, as a launch of its own would store them;
//   3. updates its states, with the operations of selective_state_update.cu in the same order, and
//      leaves y, rounded to bfloat16, in the place of x;
//   4. gates and norms whole tokens: those whose number is the block's, modulo `parts`. The norm is
//      over all channels of the group, so each block writes its y of a token into the shared memory
//      of the token's block, where a warp sums the squares in the order of gated_rms_norm.
//
// Windows are written as verification.cuh says. States are read and written by one warp, which has
// a tile in registers before it writes any state of it: the state that is read lies in the slot of
// one of the states that are written. Gated channels lie where tiles of states were, all of which
// have come and been read then.
#include "kernels/models/mamba2_mixer_verify.hpp"

#include "kernels/base/hopper.cuh"
#include "kernels/base/plain.cuh"
#include "kernels/base/zero.cuh"
#include "kernels/models/verification.cuh"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "mamba2_mixer_verify";
constexpr int kColumns = 128;  ///< N
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlocksOfProcessor = 2;  ///< bounds the registers
constexpr int kNormThreads = 128;      ///< of gated_rms_norm
constexpr int kStagesMax = 4;          ///< tiles of states that a warp asks for ahead, at most
constexpr int kChannelsMax = 2048;     ///< of a group
constexpr int kPiecesMax = kChannelsMax / kVec / kThreads;  ///< of a group's channels, of a thread
constexpr int kLaneRows = 4;                    ///< rows that a warp's lanes hold side by side
constexpr int kSmallTile = 8, kLargeTile = 16;  ///< rows of a tile
static_assert(2 * kColumns == kShared);

template <class S>
struct VerifyParameters {
  RowSlots rows;
  S* state;
  std::int64_t slot_stride;  ///< of states
  LayerConvolution convolution;
  MixedView<2> dt;
  MixedView<1> A, D, dt_bias, norm_weight;
  const Bf16* z;
  Bf16* out;
  std::int64_t z_stride, out_stride;  ///< of tokens
  float eps;
  int stages;          ///< tiles of states that a warp asks for ahead
  int groups, heads;   ///< heads of a group
  int channels;        ///< of a group
  int inner, vectors;  ///< H P and G N: B begins at the first, C at their sum
  Divisor by_p;
  bool wide_rows;  ///< z and out have kVec neighbouring channels at multiples of 8 bytes
};

/// Shared memory of a block for rows of up to kTokens tokens, in this order and each at a multiple
/// of 16 bytes: each warp's stages of states, later the gated channels of the block's tokens,
/// float32; two numbers of each token's heads and one of each head; the convolved B and C, [tokens,
/// 2, N]; the block's convolved x, later y, [tokens, own channels]; with several blocks, y of the
/// block's tokens, [of a block, channels], and the columns that the windows of B and C keep,
/// [kKept, 2 N]; and the warps' barriers. All blocks of a cluster have the same places, by the most
/// channels that one of them has: they write into each other's y.
template <int kTokens>
struct VerifyMemory {
  char* stages;
  float *gated, *steps, *decays, *skips;
  Bf16 *vectors, *x, *y, *kept;
  std::uint64_t* barriers;

  __device__ VerifyMemory(char* memory, int stages_bytes, int channels, int heads, int parts,
                          int most_channels)
      : stages(memory),
        gated(reinterpret_cast<float*>(memory)),
        steps(reinterpret_cast<float*>(memory + first_bytes(stages_bytes, channels, parts))),
        decays(steps + kTokens * rounded_up(heads)),
        skips(decays + kTokens * rounded_up(heads)),
        vectors(reinterpret_cast<Bf16*>(skips + rounded_up(heads))),
        x(vectors + kTokens * kShared),
        y(parts > 1 ? x + kTokens * most_channels : x),
        kept(y + of_block(parts) * channels),
        barriers(reinterpret_cast<std::uint64_t*>(kept + (parts > 1 ? kKept * kShared : 0))) {}
  __host__ __device__ static constexpr int rounded_up(int heads) { return (heads + 3) / 4 * 4; }
  /// Tokens that a block norms, at most.
  __host__ __device__ static constexpr int of_block(int parts) {
    return (kTokens + parts - 1) / parts;
  }
  __host__ __device__ static constexpr int first_bytes(int stages_bytes, int channels, int parts) {
    const int gated = of_block(parts) * channels * static_cast<int>(sizeof(float));
    return stages_bytes > gated ? stages_bytes : gated;
  }
  static int bytes(int stages, int tile_bytes, int channels, int heads, int parts,
                   int most_channels) {
    const int numbers = (2 * kTokens + 1) * rounded_up(heads);
    int halves = kTokens * (kShared + most_channels);
    if (parts > 1) halves += of_block(parts) * channels + kKept * kShared;
    return first_bytes(kWarps * stages * tile_bytes, channels, parts) + 8 * kWarps * stages +
           4 * numbers + 2 * halves;
  }
};

/// Tiles of one of `parts` blocks, at most.
__host__ __device__ constexpr int most_tiles(int tiles, int parts) {
  return (tiles + parts - 1) / parts;
}

/// One block's work, for rows of up to kTokens tokens, with kRows rows of a tile in one lane.
template <class S, int kTokens, int kRows>
struct VerifyBlock {
  using Layout = FastRows<S, kColumns>;
  using Memory = VerifyMemory<kTokens>;
  static_assert(Layout::kRowsPerWarp == kLaneRows);
  static constexpr int kTileRows = kRows * kLaneRows;
  static constexpr int kTileBytes = kTileRows * kColumns * static_cast<int>(sizeof(S));

  const VerifyParameters<S>& p;
  Memory shared;
  int n, group, part, parts;
  int first, own_channels;  ///< of this block: its first channel in the group, and their number

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ int first_of_all() const { return group * p.channels + first; }
  __device__ S* states_of(int slot) const {
    return p.state + slot * p.slot_stride + std::int64_t{first_of_all()} * kColumns;
  }
  __device__ int pieces() const { return kSharedPieces + own_channels / kVec; }
  /// The first channel of piece i: those of B and C, then those of x.
  __device__ int channel(int i) const {
    if (i >= kSharedPieces) return first_of_all() + (i - kSharedPieces) * kVec;
    constexpr int kOfOne = kSharedPieces / 2;
    return p.inner + i / kOfOne * p.vectors + group * kColumns + i % kOfOne * kVec;
  }
  /// Tokens of the row that this block norms: `part`, `part` + `parts`, ...
  __device__ int tokens_of_block(const VerifiedRow& row) const {
    return (row.size - part + parts - 1) / parts;
  }
  __device__ int token_of_block(const VerifiedRow& row, int i) const {
    return row.begin + part + i * parts;
  }

  /// Asks L2 for what the row reads. It runs before wait_for_earlier_launch(), so slots and counts
  /// may still change: a wrong guess costs a useless prefetch.
  __device__ void prefetch() const {
    if (p.rows.rows > kFewRows) return;
    const int slot = p.rows.likely_source(n);
    const int home =
        p.rows.named(__ldcg(p.rows.indices + RowSlots::wide(n, p.rows.indices_stride)));
    if (slot == kNowhere || home == kNowhere) return;
    if (thread() == 0)
      prefetch_to_l2(states_of(slot), static_cast<unsigned>(own_channels * kColumns * sizeof(S)));
    const TokenRange range = p.rows.likely_range(n);
    for (int i = thread(); i < pieces(); i += kThreads)
      p.convolution.prefetch(range, kTokens, home, channel(i));
    for (int i = thread(); i < p.heads; i += kThreads) {
      const int h = group * p.heads + i;
      for (int t = 0; t < min(range.size, kTokens); ++t)
        prefetch_to_l2(address_of(p.dt, range.begin + t, h));
      for (const MixedView<1>* const view : {&p.A, &p.D, &p.dt_bias})
        prefetch_to_l2(address_of(*view, h));
    }
  }
  /// Asks L2 for what the norms read.
  __device__ void prefetch_norm(const VerifiedRow& row) const {
    constexpr int kLine = 128 / static_cast<int>(sizeof(Bf16));
    for (int c = thread() * kLine; c < p.channels; c += kThreads * kLine) {
      for (int i = 0; i < tokens_of_block(row); ++i)
        prefetch_to_l2(p.z + token_of_block(row, i) * p.z_stride + group * p.channels + c);
      prefetch_to_l2(address_of(p.norm_weight, group * p.channels + c));
    }
  }

  // --- Convolution and heads ---

  /// The numbers of a token's head as they come from memory.
  struct Head {
    unsigned dt, bias, rate, skip;
  };
  __device__ Head fetch_head(const VerifiedRow& row, int i) const {
    const int h = group * p.heads + i % p.heads;
    return {bits_at(p.dt, row.begin + i / p.heads, h), bits_at(p.dt_bias, h), bits_at(p.A, h),
            bits_at(p.D, h)};
  }
  __device__ void finish_head(int i, const Head& head) const {
    const int h = i % p.heads, place = i / p.heads * Memory::rounded_up(p.heads) + h;
    const float step =
        softplus(value_of(head.dt, p.dt.format) + value_of(head.bias, p.dt_bias.format));
    shared.steps[place] = step;
    shared.decays[place] = expf(__fmul_rn(value_of(head.rate, p.A.format), step));
    if (i < p.heads) shared.skips[h] = value_of(head.skip, p.D.format);
  }
  /// The place of piece i of token t's convolved channels.
  __device__ Bf16* convolved(int i, int t) const {
    if (i < kSharedPieces) return shared.vectors + t * kShared + i * kVec;
    return shared.x + t * own_channels + (i - kSharedPieces) * kVec;
  }
  /// Convolves the block's channels into shared memory, and prepares the group's heads.
  __device__ void prepare(const VerifiedRow& row) const {
    constexpr bool kEarly = kTokens <= 4;  // else the convolution needs the registers
    const int heads = row.size * p.heads;
    Head head;
    if (kEarly && thread() < heads) head = fetch_head(row, thread());
    for (int i = thread(); i < pieces(); i += kThreads) {
      const bool keeps = parts > 1 && i < kSharedPieces;
      p.convolution.run<kTokens>(row, channel(i), keeps ? shared.kept + i * kVec : nullptr,
                                 [&](int t) { return convolved(i, t); });
    }
    for (int i = thread(); i < heads; i += kThreads)
      finish_head(i, kEarly && i == thread() ? head : fetch_head(row, i));
  }

  // --- States ---

  __device__ char* stage(int i) const {
    return shared.stages + (warp() * p.stages + i) * kTileBytes;
  }
  __device__ std::uint32_t barrier(int i) const {
    return hopper::shared_address(shared.barriers + warp() * p.stages + i);
  }
  /// Asks for tile i of the block, if there is one, into stage `to`. One lane of the warp calls it.
  __device__ void ask_for_tile(const S* states, int i, int to) const {
    if (i >= own_channels / kTileRows) return;
    hopper::barrier_expect(barrier(to), kTileBytes);
    hopper::load_bytes(hopper::shared_address(stage(to)), states + i * kTileRows * kColumns,
                       kTileBytes, barrier(to));
  }
  /// Makes the warp's barriers and asks for its first tiles. One lane of the warp calls it.
  __device__ void ask_for_first_tiles(const S* states) const {
    for (int i = 0; i < p.stages; ++i) hopper::barrier_init(barrier(i), 1);
    hopper::publish_barriers();
    for (int i = 0; i < p.stages; ++i) ask_for_tile(states, i * kWarps + warp(), i);
  }

  /// Runs token t over rows of states `s`, the lane's first of which is `first` among the block's,
  /// and leaves y in the place of x.
  __device__ void step(float (&s)[kRows][Layout::kCount], int t, int first, int head) const {
    const int own = first + Layout::template own<kRows>() * Layout::kRowsPerWarp;
    const int place = t * Memory::rounded_up(p.heads) + head;
    Bf16* const channels = shared.x + t * own_channels;
    typename Layout::template Raw<Bf16> raw;
    float C[Layout::kCount], b_dt[Layout::kCount], dots[kRows];
    raw.fetch(shared.vectors + t * kShared, kColumns);
    raw.values(b_dt);
    raw.fetch(shared.vectors + t * kShared + kColumns, kColumns);
    raw.values(C);
    const float dt = shared.steps[place], decay = shared.decays[place];
#pragma unroll
    for (int j = 0; j < Layout::kCount; ++j) b_dt[j] = __fmul_rn(b_dt[j], dt);
    const float own_x = to_float(channels[own]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float x = to_float(channels[first + r * Layout::kRowsPerWarp]);
#pragma unroll
      for (int j = 0; j < Layout::kCount; ++j)
        s[r][j] = fmaf(b_dt[j], x, __fmul_rn(s[r][j], decay));
      dots[r] = Layout::dot(s[r], C);
    }
    const float y = Layout::own_sum(dots) + __fmul_rn(shared.skips[head], own_x);
    __syncwarp();  // every lane has its x
    if (Layout::template speaks_for_owners<kRows>()) channels[own] = from_float<Bf16>(y);
  }

  /// Advances the warp's states tile by tile and stores them after each token.
  __device__ void update_states(const VerifiedRow& row) const {
    const S* const states = states_of(row.plan.source);
    int at_stage = 0, parity = 0;
    for (int i = warp(); i < own_channels / kTileRows; i += kWarps) {
      const int mine = i * kTileRows + Layout::row_in_warp();
      const int head = p.by_p.of(first + i * kTileRows);
      const S* const tile = reinterpret_cast<const S*>(stage(at_stage));
      hopper::barrier_wait(barrier(at_stage), static_cast<std::uint32_t>(parity));
      float s[kRows][Layout::kCount];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        Layout::template load<Cached::yes>(
            s[r], tile + (Layout::row_in_warp() + r * Layout::kRowsPerWarp) * kColumns, kColumns);
      __syncwarp();  // every lane has its part of the tile
      if (lane() == 0) ask_for_tile(states, i + p.stages * kWarps, at_stage);
#pragma unroll 1
      for (int t = 0; t < row.size; ++t) {
        step(s, t, mine, head);
        const int target = p.rows.target(row.plan, n, t);
        if (target == kNowhere) continue;
        S* const to = states_of(target) + mine * kColumns;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          Layout::template store<Cached::streaming>(to + r * Layout::kRowsPerWarp * kColumns, s[r],
                                                    kColumns);
      }
      if (++at_stage == p.stages) at_stage = 0, parity ^= 1;
    }
  }

  // --- Gate and norm ---

  /// Gives each token's y of this block to the token's block.
  __device__ void hand_out(int size) const {
    const int own_pieces = own_channels / kVec;
    for (int i = thread(); i < size * own_pieces; i += kThreads) {
      const int t = i / own_pieces, c = i % own_pieces * kVec;
      store_in_block(shared.y + t / parts * p.channels + first + c,
                     *reinterpret_cast<const uint2*>(shared.x + t * own_channels + c), t % parts);
    }
  }

  /// The gates z of the block's tokens at piece k of the group's channels.
  struct Gates {
    Channels z[kTokens];
  };
  __device__ Gates load_gates(const VerifiedRow& row, int tokens, int k) const {
    Gates gates{};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i >= tokens) break;
      const Bf16* const first =
          p.z + token_of_block(row, i) * p.z_stride + group * p.channels + k * kVec;
      if (p.wide_rows) {
        gates.z[i] = load_raw<Cached::streaming, kVec>(first);
      } else {
#pragma unroll
        for (int j = 0; j < kVec; ++j) gates.z[i].value[j] = first[j];
      }
    }
    return gates;
  }
  /// The norm's weights at piece k of the group's channels, as they come from memory.
  struct Weights {
    unsigned bits[kVec];
  };
  __device__ Weights load_weights(int k) const {
    Weights weights;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      weights.bits[j] = bits_at(p.norm_weight, group * p.channels + k * kVec + j);
    return weights;
  }
  __device__ void write(Bf16* first, const float (&y)[kVec]) const {
    if (p.wide_rows) return store_pack<Cached::yes>(first, y);
#pragma unroll
    for (int j = 0; j < kVec; ++j) first[j] = from_float<Bf16>(y[j]);
  }
  /// The root of the mean square of a token's gated channels, with the order of additions of
  /// gated_rms_norm: kNormThreads threads, of which each lane stands for one in each warp.
  __device__ float root_mean_square(const float* gated) const {
    constexpr int kSums = kNormThreads / 32;
    float squares[kSums] = {};
    for (int d = lane(); d < p.channels; d += kNormThreads)
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        if (d + 32 * i < p.channels)
          squares[i] = fmaf(gated[d + 32 * i], gated[d + 32 * i], squares[i]);
    float all = 0;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float sum = over_warp(squares[i], Plus{});
      all = i == 0 ? sum : all + sum;
    }
    return sqrtf(all / static_cast<float>(p.channels) + p.eps);
  }

  /// Calls visit(i, k) for the pieces k of the group's channels that are the thread's, its i-th.
  template <class Visit>
  __device__ void each_piece(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kPiecesMax; ++i)
      if (const int k = thread() + i * kThreads; k < p.channels / kVec) visit(i, k);
  }

  /// Gates and norms the block's tokens, with the gates and weights of the thread's pieces.
  __device__ void write_outputs(const VerifiedRow& row, int tokens,
                                const Gates (&gates)[kPiecesMax],
                                const Weights (&weights)[kPiecesMax]) const {
    __shared__ float roots[kTokens];
    each_piece([&](int piece, int k) {
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (i >= tokens) break;
        float y[kVec];
        load_pack<Cached::yes>(y, shared.y + i * p.channels + k * kVec);
#pragma unroll
        for (int j = 0; j < kVec; ++j) y[j] = y[j] * silu(to_float(gates[piece].z[i].value[j]));
        store_pack<Cached::yes>(shared.gated + i * p.channels + k * kVec, y);
      }
    });
    __syncthreads();
    for (int i = warp(); i < tokens; i += kWarps) {
      const float root = root_mean_square(shared.gated + i * p.channels);
      if (lane() == 0) roots[i] = root;
    }
    __syncthreads();
    each_piece([&](int piece, int k) {
      for (int i = 0; i < tokens; ++i) {
        float y[kVec];
        load_pack<Cached::yes>(y, shared.gated + i * p.channels + k * kVec);
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          y[j] = y[j] / roots[i] * value_of(weights[piece].bits[j], p.norm_weight.format);
        write(p.out + token_of_block(row, i) * p.out_stride + group * p.channels + k * kVec, y);
      }
    });
  }

  __device__ void write_zeros(int begin, int end) const {
    const float zeros[kVec]{};
    for (int t = begin; t < end; ++t)
      for (int k = thread(); k < own_channels / kVec; k += kThreads)
        write(p.out + t * p.out_stride + first_of_all() + k * kVec, zeros);
  }

  __device__ void run() const {
    const VerifiedRow row = VerifiedRow::of(p.rows, n);
    if (n == p.rows.rows - 1) write_zeros(p.rows.padding_begin(), p.rows.tokens);
    // The same in all blocks of the cluster.
    if (!row.has_slots(p.rows)) return write_zeros(row.begin, row.begin + row.size);
    if (row.size == 0) return;
    if (lane() == 0) ask_for_first_tiles(states_of(row.plan.source));
    prefetch_norm(row);
    prepare(row);
    if (parts > 1) arrive_at_cluster();
    __syncthreads();  // x, B, C, the heads' numbers and the barriers are there for all
    update_states(row);
    __syncthreads();  // y is in shared memory
    const int tokens = tokens_of_block(row);
    Gates gates[kPiecesMax]{};
    Weights weights[kPiecesMax]{};
    each_piece([&](int i, int k) {
      gates[i] = load_gates(row, tokens, k);
      weights[i] = load_weights(k);
    });
    if (parts > 1) {
      wait_for_cluster();
      hand_out(row.size);
      arrive_at_cluster();
      const int writers = parts == 3 ? 2 : parts;  // of windows: a power of 2
      if (part < writers)
        p.convolution.write_shared_windows(row, part, writers, thread(), kThreads, shared.kept,
                                           [&](int i) { return channel(i); });
      wait_for_cluster();
    }
    write_outputs(row, tokens, gates, weights);
  }
};

template <class S, int kTokens, int kRows>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    verify_kernel(const __grid_constant__ VerifyParameters<S> p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char memory[];
  using Block = VerifyBlock<S, kTokens, kRows>;
  const auto parts = static_cast<int>(gridDim.x), part = static_cast<int>(blockIdx.x);
  const int tiles = p.channels / Block::kTileRows, first = part * tiles / parts;
  const int own_tiles = (part + 1) * tiles / parts - first;
  const Block block{
      .p = p,
      .shared = typename Block::Memory(memory, kWarps * p.stages * Block::kTileBytes, p.channels,
                                       p.heads, parts, most_tiles(tiles, parts) * Block::kTileRows),
      .n = static_cast<int>(blockIdx.z),
      .group = static_cast<int>(blockIdx.y),
      .part = part,
      .parts = parts,
      .first = first * Block::kTileRows,
      .own_channels = own_tiles * Block::kTileRows};
  block.prefetch();
  wait_for_earlier_launch();
  let_the_next_launch_start();
  block.run();
#endif
}

// --- The host's side ---------------------------------------------------------------------------

/// The division of a batch's groups among blocks.
struct Division {
  int parts;   ///< blocks of a group
  int blocks;  ///< of a multiprocessor, at most
};

/// As measured on an H200 with groups of 16 heads of 64 channels. Few groups want many blocks for
/// the multiprocessors, many want few copies of the work on B and C. Where there are fewer blocks
/// than multiprocessors, each has one of its own; large clusters find too little room then. Of 16
/// multiprocessors that can share a cluster, clusters of three use 15.
Division chosen_division(std::int64_t groups_of_all_rows, int processors) {
  if (groups_of_all_rows <= 4) return {16, kBlocksOfProcessor};
  if (groups_of_all_rows <= 8) return {8, kBlocksOfProcessor};
  if (groups_of_all_rows <= 16) return {4, kBlocksOfProcessor};
  if (groups_of_all_rows <= 24) return {4, 1};
  if (16 * groups_of_all_rows <= 5 * processors) return {3, 1};
  if (2 * groups_of_all_rows <= processors) return {2, 1};
  return {groups_of_all_rows <= 256 ? 2 : 1, kBlocksOfProcessor};
}

/// Whether so many blocks can have a group's channels: three of them in uneven parts.
bool divides(int parts, int channels) {
  const int tiles = channels / kSmallTile;
  return parts == 3 ? tiles >= 3 : tiles % parts == 0;
}

template <class S, int kTokens, int kRows>
void launch_tiles(VerifyParameters<S>& p, const Division& division, cudaStream_t stream) {
  using Block = VerifyBlock<S, kTokens, kRows>;
  const int parts = division.parts, tiles = most_tiles(p.channels / Block::kTileRows, parts);
  // A block takes a KiB more than it asks for, and the kernel declares a few bytes. What it takes
  // beyond its needs keeps others away.
  const int memory = attribute_of_device(kName, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int most = memory / division.blocks - 1024 - kTokens * static_cast<int>(sizeof(float));
  const int least = division.blocks < kBlocksOfProcessor ? memory / (division.blocks + 1) : 0;
  const auto bytes_with = [&](int stages) {
    return Block::Memory::bytes(stages, Block::kTileBytes, p.channels, p.heads, parts,
                                tiles * Block::kTileRows);
  };
  p.stages = std::min(kStagesMax, (tiles + kWarps - 1) / kWarps);
  while (p.stages > 1 && bytes_with(p.stages) > most) --p.stages;
  last_launch = {parts == 3 ? "thirds" : name_of_parts(parts), kTokens, kRows};
  launch_in_clusters(kName, verify_kernel<S, kTokens, kRows>, p,
                     dim3(static_cast<unsigned>(parts), static_cast<unsigned>(p.groups),
                          static_cast<unsigned>(p.rows.rows)),
                     dim3(kThreads), std::max(bytes_with(p.stages), least), stream);
}

/// Tiles of 16 rows take fewer instructions a row, of 8 rows less shared memory: large ones where
/// each warp has one, and states are bfloat16 or a multiprocessor has one block.
template <class S, int kTokens>
void launch_verify(VerifyParameters<S>& p, int asked_parts, cudaStream_t stream) {
  const int processors = attribute_of_device(kName, cudaDevAttrMultiProcessorCount);
  const std::int64_t items = std::int64_t{p.rows.rows} * p.groups;
  Division division = chosen_division(items, processors);
  if (asked_parts > 0) division.parts = asked_parts;
  while (!divides(division.parts, p.channels)) division.parts /= 2;
  const int even_parts = division.parts == 3 ? 1 : division.parts;
  const bool large = p.channels / even_parts % kLargeTile == 0 &&
                     p.channels / division.parts >= kWarps * kLargeTile &&
                     (sizeof(S) == 2 || items * division.parts <= processors);
  if (large)
    launch_tiles<S, kTokens, kLargeTile / kLaneRows>(p, division, stream);
  else
    launch_tiles<S, kTokens, kSmallTile / kLaneRows>(p, division, stream);
}

/// Checks the shapes; returns the number of groups.
template <class S>
std::int64_t check_shapes(const Checks& checks, const Mamba2MixerDecode<S>& in,
                          std::int64_t columns) {
  const Shape<4> states = shape_of(in.state);
  const auto [slots, H, P, N] = states;
  const std::int64_t T = in.x.extent(0), channels = in.x.extent(1), rest = channels - H * P;
  const std::int64_t G = rest / kShared, C = in.conv_state.extent(2);
  checks.expect(N == kColumns && P % 16 == 0 && 16 <= P && P <= 128 && H > 0, "state",
                "[slots, H, P, 128] with P a multiple of 16 up to 128", text_of(states));
  checks.expect(
      G > 0 && rest == kShared * G && H % G == 0, "x", "[T, H P + 2 G 128] with H a multiple of G",
      text_of(shape_of(in.x)) + " for H = " + std::to_string(H) + ", P = " + std::to_string(P));
  checks.expect(H / G * P <= kChannelsMax && H * P <= 65536, "state",
                "of at most 2048 channels for a group and 65536 for all", text_of(states));
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.z, "z", "[T, H, P]", {T, H, P});
  checks.shape(in.dt, "dt", "[T, H]", {T, H});
  checks.shape(in.conv_state, "conv_state", "[slots, H P + 2 G N, C]", {slots, channels, C});
  checks.expect(C >= kKept + columns, "conv_state",
                "[slots, H P + 2 G N, C] with C of at least 2 + the columns of state_indices",
                "C = " + std::to_string(C) + " for " + std::to_string(columns) + " columns");
  checks.shape(in.conv_weight, "conv_weight", "[H P + 2 G N, 4]", {channels, kTaps});
  if (in.conv_bias) checks.shape(in.conv_bias, "conv_bias", "[H P + 2 G N]", {channels});
  checks.shape(in.A, "A", "[H]", {H});
  checks.shape(in.D, "D", "[H]", {H});
  checks.shape(in.dt_bias, "dt_bias", "[H]", {H});
  checks.shape(in.norm_weight, "norm_weight", "[H P]", {H * P});
  checks.shape(in.out, "out", "[T, H, P]", {T, H, P});
  for (const auto& [strides, argument] :
       {std::pair{in.z.mapping().strides(), "z"}, {in.out.mapping().strides(), "out"}})
    checks.expect(strides[2] == 1 && (H == 1 || strides[1] == P), argument,
                  "of heads that lie without gaps", "other strides");
  checks.expect(rows_aligned(in.state, 16) && in.state.stride(2) == N &&
                    (H == 1 || in.state.stride(1) == P * N),
                "state", "of heads that lie without gaps at multiples of 16 bytes",
                "other strides");
  return G;
}

template <class S>
VerifyParameters<S> parameters_of(const Mamba2MixerDecode<S>& in, std::int64_t G) {
  const std::int64_t H = in.state.extent(1), P = in.state.extent(2);
  VerifyParameters<S> p{};
  p.state = in.state.data_handle();
  p.slot_stride = in.state.stride(0);
  p.convolution = LayerConvolution(in.x, in.conv_state, in.conv_weight, in.conv_bias);
  p.dt = in.dt;
  p.A = in.A;
  p.D = in.D;
  p.dt_bias = in.dt_bias;
  p.norm_weight = in.norm_weight;
  p.z = in.z.data_handle();
  p.out = in.out.data_handle();
  p.z_stride = in.z.stride(0);
  p.out_stride = in.out.stride(0);
  p.eps = in.eps;
  p.groups = static_cast<int>(G);
  p.heads = static_cast<int>(H / G);
  p.channels = static_cast<int>(H / G * P);
  p.inner = static_cast<int>(H * P);
  p.vectors = static_cast<int>(G) * kColumns;
  p.by_p = Divisor(P);
  p.wide_rows = rows_aligned(in.z, sizeof(Channels)) && rows_aligned(in.out, sizeof(Channels));
  return p;
}

}  // namespace

template <class S>
void mamba2_mixer_verify(const Mamba2MixerDecode<S>& in, const IndexView& starts,
                         cudaStream_t stream) {
  const Checks checks(kName);
  checks.expect(in.slots.table && in.slots.num_accepted && !in.slots.out_table,
                "state_indices and num_accepted_tokens", "a table and its counts", "others");
  const std::int64_t columns = in.slots.table->extent(1);
  checks.expect(columns <= kTokensMax, "state_indices", "[N, 1 + drafts] of at most 8 columns",
                std::to_string(columns));
  VerifyParameters<S> p = parameters_of(in, check_shapes(checks, in, columns));
  const bool known =
      in.parts == 0 || in.parts == 3 ||
      (0 < in.parts && in.parts <= 16 && std::has_single_bit(static_cast<unsigned>(in.parts)));
  checks.expect(known, "parts", "0, 1, 2, 3, 4, 8 or 16", std::to_string(in.parts));
  checks.expect(in.parts == 0 || divides(in.parts, p.channels), "parts",
                "a divisor of the " + std::to_string(p.channels / kSmallTile) + " x " +
                    std::to_string(kSmallTile) + " channels of a group, or 3",
                std::to_string(in.parts));
  p.rows = row_slots(checks, in.slots, starts, in.x.extent(0), in.state.extent(0));
  check_row_count(checks, p.rows);
  if (p.rows.rows == 0) return zero_outputs(kName, in.out, stream);
  expect_clusters(checks, kName);
  if (columns <= kTokensMax / 2)
    launch_verify<S, kTokensMax / 2>(p, in.parts, stream);
  else
    launch_verify<S, kTokensMax>(p, in.parts, stream);
}

template void mamba2_mixer_verify(const Mamba2MixerDecode<float>&, const IndexView&, cudaStream_t);
template void mamba2_mixer_verify(const Mamba2MixerDecode<Bf16>&, const IndexView&, cudaStream_t);

}  // namespace lockstep::kernels
