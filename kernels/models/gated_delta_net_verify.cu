// A gated-delta-net layer's verification in one launch. Equations:
// reference/recurrent/gated_delta_net_verify.hpp.
//
//   grid   (parts, H, N) in clusters of (parts, 1, 1); N: rows of the batch
//   block  (32, warps of a head, HV / H) threads; it has V / parts values of each value head of its
//          key head: rows of a state, which pass through the warps' registers tile by tile,
//          kRows x Layout::kRowsPerWarp at a time. A warp asks for kStages tiles ahead, by bulk
//          copies into shared memory of its own
//
// A verification writes a state after each token, so a tile of states stays in registers while the
// row's tokens run over it, and is read once. The blocks of a cluster have one row of the batch and
// one key head. Each
//   1. asks for its first tiles of states;
//   2. convolves the key head's q and k of all tokens (all blocks the same) and its own v, rounded
//      to bfloat16 in shared memory, as a launch of its own would store them;
//   3. makes each token's norms and gates, a token in each group of lanes that shares a row;
//   4. runs the delta rule over its values: GatedDelta of gated_delta_rule_update.cu, whose inputs
//      come from shared memory here;
//   5. norms and gates. A head's norm needs all its 128 outputs, so each block writes its own,
//      rounded to bfloat16, into the shared memory of every block of the cluster.
//
// Windows are written as verification.cuh says. States are read and written by one warp, which has
// a tile in registers before it writes any state of it: the state that is read lies in the slot of
// one of the states that are written.
#include "kernels/models/gated_delta_net_verify.hpp"

#include "kernels/base/hopper.cuh"
#include "kernels/base/plain.cuh"
#include "kernels/models/verification.cuh"
#include "kernels/recurrent/shapes.hpp"

// The file of the update is included for its Op, so that both launches have one arithmetic. Its
// list of types is empty here: the update is instantiated in its own object file.
#pragma push_macro("LOCKSTEP_SERVING_TYPES")
#pragma push_macro("LOCKSTEP_OTHER_TYPES")
#undef LOCKSTEP_SERVING_TYPES
#undef LOCKSTEP_OTHER_TYPES
#define LOCKSTEP_SERVING_TYPES(X)
#define LOCKSTEP_OTHER_TYPES(X)
#include "kernels/recurrent/gated_delta_rule_update.cu"
#pragma pop_macro("LOCKSTEP_OTHER_TYPES")
#pragma pop_macro("LOCKSTEP_SERVING_TYPES")

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "gated_delta_net_verify";
constexpr int kExtent = 128;  ///< K and V
constexpr int kHeadsMax = 8;  ///< value heads of a key head
constexpr int kWarps = 8;     ///< of a block, or a few less
constexpr int kStages = 2;    ///< tiles of states that a warp asks for ahead
constexpr int kThreadsMax = 32 * kHeadsMax;
constexpr int kBlocksOfProcessor = 2;  ///< of kThreadsMax threads, which bounds the registers
constexpr int kRows = 2;               ///< of a tile, in one lane
static_assert(2 * kExtent == kShared);

using Op = GatedDelta<Bf16>;

template <class S>
struct VerifyParameters {
  RowSlots rows;
  StatePool<S> state;
  Op::Parameters rule;  ///< its tokens have a and b; q, k and v are convolved here
  LayerConvolution convolution;
  MixedView<1> norm_weight;
  HeadVectors<const Bf16> z;
  float eps;
  int key_channels;  ///< of all heads' k: v begins at twice as many
};

/// Shared memory of a block for rows of up to `tokens` tokens, in this order and all but the last
/// at multiples of 16 bytes: each warp's stages of states; the convolved q and k, [tokens, 2, K];
/// the columns that the windows of q and k keep, [kKept, 2 K]; outputs of the rule, [tokens, heads,
/// V], of all blocks of the cluster; the block's convolved v, [tokens, heads, values]; the warps'
/// barriers; each warp's norms and gates of the tokens.
struct VerifyMemory {
  char* stages;
  Bf16 *keys, *kept, *out, *values;
  std::uint64_t* barriers;
  Op::Scalars* scalars;

  __device__ VerifyMemory(char* memory, int tokens, int warps, int tile_bytes, int heads,
                          int values_of_head)
      : stages(memory),
        keys(reinterpret_cast<Bf16*>(memory + warps * kStages * tile_bytes)),
        kept(keys + tokens * 2 * kExtent),
        out(kept + kKept * 2 * kExtent),
        values(out + tokens * heads * kExtent),
        barriers(reinterpret_cast<std::uint64_t*>(values + tokens * heads * values_of_head)),
        scalars(reinterpret_cast<Op::Scalars*>(barriers + warps * kStages)) {}
  static int bytes(int tokens, int warps, int tile_bytes, int heads, int values_of_head) {
    const int of_token = (2 + heads) * kExtent + heads * values_of_head;
    const int elements = kKept * 2 * kExtent + tokens * of_token;
    return warps * (kStages * (tile_bytes + 8) + tokens * static_cast<int>(sizeof(Op::Scalars))) +
           elements * static_cast<int>(sizeof(Bf16));
  }
};

/// One block's work, for rows of up to kTokens tokens.
template <class S, int kTokens>
struct VerifyBlock {
  using Layout = FastRows<S, kExtent>;
  using Raw = typename Op::template Raw<Layout, kRows>;
  using Token = typename Op::template Token<Layout, kRows>;
  static constexpr int kRowsOfWarp = kRows * Layout::kRowsPerWarp;
  static constexpr int kTileBytes = kRowsOfWarp * kExtent * static_cast<int>(sizeof(S));
  static constexpr int kOutputs = kExtent / 32;  ///< of a lane, at most
  /// Tokens whose norms and gates a group of lanes makes.
  static constexpr int kTokensOfGroup = kTokens / Layout::kRowsPerWarp;

  const VerifyParameters<S>& p;
  VerifyMemory shared;
  int n, key_head, part, parts;
  int heads;              ///< value heads of the key head
  int values_log2;        ///< of the values of each head in this block
  int head, warp, warps;  ///< the warp's value head, and its number among the head's warps
  int thread, threads;

  __device__ int values() const { return 1 << values_log2; }
  __device__ int value_head(int i) const { return key_head * heads + i; }
  __device__ int first_value() const { return part << values_log2; }
  /// The block's states of value head i of the key head.
  __device__ S* states_of(int slot, int i) const {
    return p.state.data + slot * p.state.slot_stride + value_head(i) * p.state.head_stride +
           first_value() * kExtent;
  }
  /// The first row of the warp's tile number i, among the block's rows of the head.
  __device__ int row_of_tile(int i) const { return (i * warps + warp) * kRowsOfWarp; }
  __device__ int pieces() const { return kSharedPieces + (heads << values_log2) / kVec; }

  /// Piece i of the block's channels: those of q and k, then those of v.
  __device__ int channel(int i) const {
    if (i < kSharedPieces) {
      const int of_k = i / (kSharedPieces / 2);
      return of_k * p.key_channels + key_head * kExtent + i % (kSharedPieces / 2) * kVec;
    }
    const int v = (i - kSharedPieces) * kVec;
    return 2 * p.key_channels + value_head(v >> values_log2) * kExtent + first_value() +
           (v & (values() - 1));
  }
  /// Asks L2 for what the row reads. It runs before wait_for_earlier_launch(), so slots and counts
  /// may still change: a wrong guess costs a useless prefetch.
  __device__ void prefetch() const {
    if (p.rows.rows > kFewRows) return;
    const int slot = p.rows.likely_source(n);
    const int home =
        p.rows.named(__ldcg(p.rows.indices + RowSlots::wide(n, p.rows.indices_stride)));
    if (slot == kNowhere || home == kNowhere) return;
    if (thread < heads)
      prefetch_to_l2(states_of(slot, thread), static_cast<unsigned>(kExtent * sizeof(S))
                                                  << values_log2);
    const TokenRange range = p.rows.likely_range(n);
    for (int i = thread; i < pieces(); i += threads)
      p.convolution.prefetch(range, kTokens, home, channel(i));
  }

  /// A stage of the warp and its barrier, whose phase ends when a tile has come.
  __device__ char* stage(int i) const {
    return shared.stages + ((head * warps + warp) * kStages + i) * kTileBytes;
  }
  __device__ std::uint32_t barrier(int i) const {
    return hopper::shared_address(shared.barriers + (head * warps + warp) * kStages + i);
  }
  /// Asks for the warp's tile number i, if there is one. One lane of the warp calls it.
  __device__ void ask_for_tile(const S* states, int i, int at) const {
    if (row_of_tile(i) >= values()) return;
    hopper::barrier_expect(barrier(at), kTileBytes);
    hopper::load_bytes(hopper::shared_address(stage(at)), states + row_of_tile(i) * kExtent,
                       kTileBytes, barrier(at));
  }
  /// Makes the warp's barriers and asks for its first tiles. One lane of the warp calls it.
  __device__ void ask_for_first_tiles(const S* states) const {
    for (int i = 0; i < kStages; ++i) hopper::barrier_init(barrier(i), 1);
    hopper::publish_barriers();
    for (int i = 0; i < kStages; ++i) ask_for_tile(states, i, i);
  }

  /// The place of piece i of token t's convolved channels.
  __device__ Bf16* convolved(int i, int t) const {
    if (i < kSharedPieces) return shared.keys + t * 2 * kExtent + i * kVec;
    return shared.values + t * (heads << values_log2) + (i - kSharedPieces) * kVec;
  }

  /// Convolves the block's channels into shared memory.
  __device__ void convolve(const VerifiedRow& row) const {
    for (int i = thread; i < pieces(); i += threads) {
      const bool keeps = parts > 1 && i < kSharedPieces;
      p.convolution.run<kTokens>(row, channel(i), keeps ? shared.kept + i * kVec : nullptr,
                                 [&](int t) { return convolved(i, t); });
    }
  }

  /// The raw gates of the lane's tokens.
  struct Gates {
    unsigned a[kTokensOfGroup], b[kTokensOfGroup], A_log, dt_bias;
  };
  /// The lane's token number i, of which some lie behind the row's last.
  __device__ int token_of_lane(int i) const {
    return i * Layout::kRowsPerWarp + Layout::row_in_warp();
  }
  __device__ Gates ask_for_gates(const VerifiedRow& row) const {
    Gates gates;
#pragma unroll
    for (int i = 0; i < kTokensOfGroup; ++i) {
      const int t = row.begin + min(token_of_lane(i), row.size - 1);
      gates.a[i] = bits_at(p.rule.tokens.g, t, value_head(head));
      gates.b[i] = bits_at(p.rule.tokens.beta, t, value_head(head));
    }
    gates.A_log = bits_at(p.rule.A_log, value_head(head));
    gates.dt_bias = bits_at(p.rule.dt_bias, value_head(head));
    return gates;
  }
  __device__ Op::Scalars* scalars() const {
    return shared.scalars + (head * warps + warp) * kTokens;
  }

  /// Makes the norms and gates of the row's tokens, in shared memory of the warp.
  __device__ void prepare_tokens(const VerifiedRow& row, const Gates& gates) const {
    const LaneRows<Layout, kRows> lane_rows{0, kExtent, kExtent};
#pragma unroll
    for (int i = 0; i < kTokensOfGroup; ++i) {
      if (i * Layout::kRowsPerWarp >= row.size) break;
      const int t = min(token_of_lane(i), row.size - 1);
      Raw raw;
      raw.q.fetch(shared.keys + t * 2 * kExtent, kExtent);
      raw.k.fetch(shared.keys + (t * 2 + 1) * kExtent, kExtent);
      raw.v = shared.values[0];  // each tile has its own
      raw.g = gates.a[i];
      raw.beta = gates.b[i];
      raw.A_log = gates.A_log;
      raw.dt_bias = gates.dt_bias;
      const Token token =
          Op::template prepare<false, Layout, kRows>(p.rule, t, head, lane_rows, raw);
      if (Layout::part() == 0 && t == token_of_lane(i)) scalars()[t] = token.scalars;
    }
    __syncwarp();
  }

  /// The row's token t at the lane's row `own` of the head's values in this block.
  __device__ Token token_at(int t, int own) const {
    Raw raw;
    raw.q.fetch(shared.keys + t * 2 * kExtent, kExtent);
    raw.k.fetch(shared.keys + (t * 2 + 1) * kExtent, kExtent);
    Token token;
    raw.k.values(token.k);
    raw.q.values(token.q);
    token.scalars = scalars()[t];
    token.v = to_float(shared.values[((t * heads + head) << values_log2) + own]);
    return token;
  }

  /// Advances the warp's states tile by tile, stores them after each token and writes outputs of
  /// the rule.
  __device__ void run_rule(const VerifiedRow& row) const {
    const S* const states = states_of(row.plan.source, head);
    Bf16* const o = shared.out + head * kExtent + first_value();
    const int mine = Layout::row_in_warp();
    int at = 0, parity = 0;
    for (int i = 0; row_of_tile(i) < values(); ++i) {
      const S* const tile = reinterpret_cast<const S*>(stage(at));
      const int first = row_of_tile(i) + mine;
      const int own = first + Layout::template own<kRows>() * Layout::kRowsPerWarp;
      hopper::barrier_wait(barrier(at), static_cast<std::uint32_t>(parity));
      float s[kRows][Layout::kCount];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        Layout::template load<Cached::yes>(s[r], tile + (mine + r * Layout::kRowsPerWarp) * kExtent,
                                           kExtent);
      __syncwarp();  // every lane has its part of the tile
      if (threadIdx.x == 0) ask_for_tile(states, i + kStages, at);
#pragma unroll 1  // unrolled, or with states that stay in L2, it is no faster
      for (int t = 0; t < row.size; ++t) {
        const float out = Op::step(token_at(t, own), s);
        const int target = p.rows.target(row.plan, n, t);
        S* const to = states_of(target, head) + first * kExtent;
        if (target != kNowhere)
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            Layout::template store<Cached::streaming>(to + r * Layout::kRowsPerWarp * kExtent, s[r],
                                                      kExtent);
        if (Layout::template speaks_for_owners<kRows>())
          o[t * heads * kExtent + own] = from_float<Bf16>(out);
      }
      if (++at == kStages) at = 0, parity ^= 1;
    }
  }

  /// Gives the block's outputs to the other blocks of the cluster.
  __device__ void hand_out(int size) const {
    for (int i = 2 * thread; i < size * heads << values_log2; i += 2 * threads) {
      const Bf16* const pair =
          shared.out + (i >> values_log2) * kExtent + first_value() + (i & (values() - 1));
      for (int rank = 0; rank < parts; ++rank)
        if (rank != part) copy_to_block(pair, rank);
    }
  }

  /// The root of the mean square of a head's outputs, with the order of additions of
  /// gated_rms_norm: 128 threads, a channel each.
  __device__ float root_mean_square(const Bf16* o) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kExtent / 32; ++i) {
      const float value = to_float(o[32 * i + threadIdx.x]);
      const float sum = over_warp(value * value, Plus{});
      squares = i == 0 ? sum : squares + sum;
    }
    return sqrtf(squares / static_cast<float>(kExtent) + p.eps);
  }

  /// Calls visit(i, value) for the lane's outputs of a token: its number i, and the value among V.
  template <class Visit>
  __device__ void each_output(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int value = i * 32 + static_cast<int>(threadIdx.x);
      if (value < values()) visit(i, first_value() + value);
    }
  }

  /// Norms and gates the block's outputs of the warp's head; the head's warps take tokens in turns.
  __device__ void write_outputs(const VerifiedRow& row) const {
    float weight[kOutputs];
    each_output([&](int i, int value) { weight[i] = at(p.norm_weight, value); });
    for (int t = warp; t < row.size; t += warps) {
      const Bf16* const z = p.z.at(row.begin + t, value_head(head));
      const Bf16* const o = shared.out + (t * heads + head) * kExtent;
      Bf16* const out = p.rule.out.at(row.begin + t, value_head(head));
      Bf16 gate[kOutputs];
      each_output([&](int i, int value) { gate[i] = z[value]; });
      const float root = root_mean_square(o);
      each_output([&](int i, int value) {
        float normed = to_float(o[value]) / root * weight[i];
        normed *= silu(to_float(gate[i]));
        out[value] = from_float<Bf16>(normed);
      });
    }
  }

  __device__ void write_zeros(int begin, int end) const {
    for (int t = begin + warp; t < end; t += warps) {
      Bf16* const out = p.rule.out.at(t, value_head(head));
      each_output([&](int, int value) { out[value] = from_float<Bf16>(0.0f); });
    }
  }

  /// Asks L2 for the gates of the outputs, which are read last.
  __device__ void prefetch_gates(const VerifiedRow& row) const {
    constexpr int kLine = 128 / static_cast<int>(sizeof(Bf16));
    for (int t = warp; t < row.size; t += warps) {
      const int value = static_cast<int>(threadIdx.x) * kLine;
      if (value < values())
        prefetch_to_l2(p.z.at(row.begin + t, value_head(head)) + first_value() + value);
    }
  }

  __device__ void run() const {
    const VerifiedRow row = VerifiedRow::of(p.rows, n);
    if (n == p.rows.rows - 1) write_zeros(p.rows.padding_begin(), p.rows.tokens);
    // The same in all blocks of the cluster.
    if (!row.has_slots(p.rows)) return write_zeros(row.begin, row.begin + row.size);
    if (row.size == 0) return;
    if (threadIdx.x == 0) ask_for_first_tiles(states_of(row.plan.source, head));
    const Gates gates = ask_for_gates(row);
    prefetch_gates(row);
    convolve(row);
    if (parts > 1) arrive_at_cluster();
    __syncthreads();  // q, k, v and the barriers are there for all
    prepare_tokens(row, gates);
    run_rule(row);
    __syncthreads();  // the block's outputs are in shared memory
    if (parts > 1) {
      wait_for_cluster();
      hand_out(row.size);
      arrive_at_cluster();
      p.convolution.write_shared_windows(row, part, parts, thread, threads, shared.kept,
                                         [&](int i) { return channel(i); });
      wait_for_cluster();
    }
    write_outputs(row);
  }
};

template <class S, int kTokens>
__global__ void __launch_bounds__(kThreadsMax, kBlocksOfProcessor)
    verify_kernel(const __grid_constant__ VerifyParameters<S> p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char memory[];
  using Block = VerifyBlock<S, kTokens>;
  const auto parts = static_cast<int>(gridDim.x), heads = static_cast<int>(blockDim.z);
  const auto warps = static_cast<int>(blockDim.y);
  const int values_log2 = 31 - __clz(kExtent / parts);
  const Block block{
      .p = p,
      .shared =
          VerifyMemory(memory, kTokens, warps * heads, Block::kTileBytes, heads, 1 << values_log2),
      .n = static_cast<int>(blockIdx.z),
      .key_head = static_cast<int>(blockIdx.y),
      .part = static_cast<int>(blockIdx.x),
      .parts = parts,
      .heads = heads,
      .values_log2 = values_log2,
      .head = static_cast<int>(threadIdx.z),
      .warp = static_cast<int>(threadIdx.y),
      .warps = warps,
      .thread = static_cast<int>((threadIdx.z * blockDim.y + threadIdx.y) * 32 + threadIdx.x),
      .threads = 32 * warps * heads};
  block.prefetch();
  wait_for_earlier_launch();
  let_the_next_launch_start();
  block.run();
#endif
}

// --- The host's side ---------------------------------------------------------------------------

/// The blocks of a key head, as measured on an H200 with two value heads: few key heads want many
/// blocks for the multiprocessors, many want few copies of the work on q and k. With eight blocks a
/// warp of two value heads' has less than a tile.
int chosen_parts(std::int64_t key_heads_of_all_rows) {
  return key_heads_of_all_rows <= 32 ? 4 : key_heads_of_all_rows <= 128 ? 2 : 1;
}

template <class S, int kTokens>
void launch_verify(const VerifyParameters<S>& p, int parts, int key_heads, int heads,
                   cudaStream_t stream) {
  constexpr auto* kKernel = verify_kernel<S, kTokens>;
  const int warps = std::max(1, kWarps / heads);  // of a head
  const int bytes = VerifyMemory::bytes(kTokens, warps * heads, VerifyBlock<S, kTokens>::kTileBytes,
                                        heads, kExtent / parts);
  last_launch = {name_of_parts(parts), kTokens, warps * heads};
  launch_in_clusters(kName, kKernel, p,
                     dim3(static_cast<unsigned>(parts), static_cast<unsigned>(key_heads),
                          static_cast<unsigned>(p.rows.rows)),
                     dim3(32, static_cast<unsigned>(warps), static_cast<unsigned>(heads)), bytes,
                     stream);
}

/// Checks the shapes of a verification of T tokens, HV value heads and D channels.
template <class S>
void check_shapes(const Checks& checks, const GatedDeltaNetDecode<S>& in, std::int64_t T,
                  std::int64_t HV, std::int64_t D, std::int64_t columns) {
  const std::int64_t slots = in.state.extent(0);
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.z, "z", "[T, HV, V]", {T, HV, kExtent});
  checks.contiguous_rows(in.z, "z");
  checks.shape(in.a, "a", "[T, HV]", {T, HV});
  checks.shape(in.b, "b", "[T, HV]", {T, HV});
  const std::int64_t C = in.conv_state.extent(2);
  checks.shape(in.conv_state, "conv_state", "[slots, D, C]", {slots, D, C});
  checks.expect(C >= kKept + columns, "conv_state",
                "[slots, D, C] with C of at least 2 + the columns of state_indices",
                "C = " + std::to_string(C) + " for " + std::to_string(columns) + " columns");
  checks.shape(in.conv_weight, "conv_weight", "[D, 4]", {D, kTaps});
  if (in.conv_bias) checks.shape(in.conv_bias, "conv_bias", "[D]", {D});
  checks.shape(in.A_log, "A_log", "[HV]", {HV});
  checks.shape(in.dt_bias, "dt_bias", "[HV]", {HV});
  checks.shape(in.norm_weight, "norm_weight", "[V]", {kExtent});
  checks.shape(in.out, "out", "[T, HV, V]", {T, HV, kExtent});
  checks.contiguous_rows(in.out, "out");
  checks.expect(rows_aligned(in.state, 16) && in.state.stride(2) == kExtent, "state",
                "of heads that lie without gaps at multiples of 16 bytes", "other strides");
}

template <class S>
VerifyParameters<S> parameters_of(const GatedDeltaNetDecode<S>& in, int key_heads, int heads) {
  VerifyParameters<S> p{};
  p.state = StatePool<S>(in.state);
  p.rule.tokens.g = in.a;
  p.rule.tokens.beta = in.b;
  p.rule.out = HeadVectors<Bf16>(in.out);
  p.rule.A_log = in.A_log;
  p.rule.dt_bias = in.dt_bias;
  p.rule.scale = 1.0f / sqrtf(static_cast<float>(kExtent));
  p.rule.use_qk_l2norm = true;
  p.rule.value_heads_per_key_head = Divisor(heads);
  p.convolution = LayerConvolution(in.x, in.conv_state, in.conv_weight, in.conv_bias);
  p.norm_weight = in.norm_weight;
  p.z = HeadVectors<const Bf16>(in.z);
  p.eps = in.eps;
  p.key_channels = key_heads * kExtent;
  return p;
}

}  // namespace

template <class S>
void gated_delta_net_verify(const GatedDeltaNetDecode<S>& in, const IndexView& starts,
                            cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t T = in.x.extent(0), D = in.x.extent(1), HV = in.state.extent(1);
  const std::int64_t rest = D - HV * kExtent, H = rest / (2 * kExtent);
  checks.expect(in.state.extent(2) == kExtent && in.state.extent(3) == kExtent, "state",
                "[slots, HV, 128, 128]", text_of(shape_of(in.state)));
  checks.expect(H > 0 && rest == 2 * kExtent * H && HV % H == 0 && HV / H <= kHeadsMax, "x",
                "[T, 2 H 128 + HV 128] with HV / H from 1 to 8",
                text_of(shape_of(in.x)) + " for HV = " + std::to_string(HV));
  checks.expect(H <= 65535, "x", "of at most 65535 key heads", std::to_string(H));
  checks.expect(in.slots.table && in.slots.num_accepted && !in.slots.out_table,
                "state_indices and num_accepted_tokens", "a table and its counts", "others");
  const std::int64_t columns = in.slots.table->extent(1);
  checks.expect(columns <= kTokensMax, "state_indices", "[N, 1 + drafts] of at most 8 columns",
                std::to_string(columns));
  check_shapes(checks, in, T, HV, D, columns);
  const bool known = in.parts == 1 || in.parts == 2 || in.parts == 4 || in.parts == 8;
  checks.expect(in.parts == 0 || known, "parts", "0, 1, 2, 4 or 8", std::to_string(in.parts));
  const auto key_heads = static_cast<int>(H), heads = static_cast<int>(HV / H);
  VerifyParameters<S> p = parameters_of(in, key_heads, heads);
  p.rows = row_slots(checks, in.slots, starts, T, in.state.extent(0));
  check_row_count(checks, p.rows);
  if (p.rows.rows == 0) return zero_outputs(kName, in.out, stream);
  expect_clusters(checks, kName);
  const int parts = in.parts > 0 ? in.parts : chosen_parts(p.rows.rows * H);
  if (columns <= kTokensMax / 2)
    launch_verify<S, kTokensMax / 2>(p, parts, key_heads, heads, stream);
  else
    launch_verify<S, kTokensMax>(p, parts, key_heads, heads, stream);
}

template void gated_delta_net_verify(const GatedDeltaNetDecode<float>&, const IndexView&,
                                     cudaStream_t);
template void gated_delta_net_verify(const GatedDeltaNetDecode<Bf16>&, const IndexView&,
                                     cudaStream_t);

}  // namespace lockstep::kernels
