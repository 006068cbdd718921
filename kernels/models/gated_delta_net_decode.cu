// A gated-delta-net layer's decode step in one launch. Equations:
// reference/recurrent/gated_delta_net_decode.hpp.
//
//   grid   (parts, H, N) in clusters of (parts, 1, 1); N: rows of the batch
//   block  (32, warps of a head, HV / H) threads; it has V / parts values of each value head of its
//          key head: rows of a state, which pass through the warps' registers tile by tile,
//          kRows x Layout::kRowsPerWarp at a time. A warp asks for kStages tiles ahead, by bulk
//          copies into shared memory of its own
//
// The blocks of a cluster have one row of the batch and one key head. Each
//   1. asks for its first tiles of states;
//   2. convolves the key head's q and k (all blocks the same) and its own v, rounded to bfloat16 in
//      shared memory, as a launch of its own would store them;
//   3. runs the delta rule over its values: GatedDelta of gated_delta_rule_update.cu, whose inputs
//      come from shared memory here;
//   4. norms and gates. A head's norm needs all its 128 outputs, so each block writes its own,
//      rounded to bfloat16, into the shared memory of every block of the cluster.
//
// Windows: verification.cuh, whose convolution runs here over one token of a row. The wait of the
// cluster's first barrier also shows that every block of the cluster has begun, so that its shared
// memory can be written; the second barrier orders these writes before the norm reads them. A block
// leaves after the second wait, when nobody writes into it any more. States are read and written by
// one warp.
#include "kernels/models/gated_delta_net_decode.hpp"

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

constexpr const char* kName = "gated_delta_net_decode";
constexpr int kExtent = 128;  ///< K and V
constexpr int kHeadsMax = 8;  ///< value heads of a key head
constexpr int kWarps = 4;     ///< of a block with up to 4 value heads
constexpr int kStages = 3;    ///< tiles of states that a warp asks for ahead
constexpr int kThreadsMax = 32 * kHeadsMax;
constexpr int kBlocksOfProcessor = 2;  ///< of kThreadsMax threads, which bounds the registers
constexpr int kRows = 2;               ///< of a tile, in one lane
static_assert(kShared == 2 * kExtent, "q and k of a key head");

template <class S>
struct NetParameters {
  RowSlots rows;
  StatePool<S> state;
  GatedDelta<Bf16>::Parameters rule;  ///< its tokens have a and b; q, k and v are convolved here
  LayerConvolution convolution;
  MixedView<1> norm_weight;
  HeadVectors<const Bf16> z;
  float eps;
  int key_channels;  ///< of all heads' k: v begins at twice as many
};

/// Shared memory of a block, in this order and each at a multiple of 16 bytes: each warp's stages
/// of states; the convolved q and k, [2, K]; old columns of the windows of q and k, [kKept, 2 K];
/// outputs of the rule, [heads, V], of all blocks of the cluster; the block's convolved v, [heads,
/// values]; the warps' barriers.
struct NetMemory {
  char* stages;
  Bf16 *keys, *windows, *out, *values;
  std::uint64_t* barriers;

  __device__ NetMemory(char* memory, int warps, int tile_bytes, int heads, int values_of_head)
      : stages(memory),
        keys(reinterpret_cast<Bf16*>(memory + warps * kStages * tile_bytes)),
        windows(keys + kShared),
        out(windows + kKept * kShared),
        values(out + heads * kExtent),
        barriers(reinterpret_cast<std::uint64_t*>(values + heads * values_of_head)) {}
  static int bytes(int warps, int tile_bytes, int heads, int values_of_head) {
    const int elements = (1 + kKept) * kShared + heads * (kExtent + values_of_head);
    return warps * kStages * (tile_bytes + 8) + elements * static_cast<int>(sizeof(Bf16));
  }
};

/// One block's work.
template <class S>
struct NetBlock {
  using Op = GatedDelta<Bf16>;
  using Layout = FastRows<S, kExtent>;
  using Raw = typename Op::template Raw<Layout, kRows>;
  static constexpr int kRowsOfWarp = kRows * Layout::kRowsPerWarp;
  static constexpr int kTileBytes = kRowsOfWarp * kExtent * static_cast<int>(sizeof(S));
  static constexpr int kOutputs = 4;  ///< of a lane, at most

  const NetParameters<S>& p;
  NetMemory shared;
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

  /// Asks L2 for what the row reads. It runs before wait_for_earlier_launch(), so the slot may
  /// still change: a wrong guess costs a useless prefetch.
  __device__ void prefetch() const {
    if (p.rows.rows > kFewRows) return;
    const int slot = p.rows.likely_source(n);
    if (slot == kNowhere) return;
    if (thread < heads)
      prefetch_to_l2(states_of(slot, thread), static_cast<unsigned>(kExtent * sizeof(S))
                                                  << values_log2);
    for (int i = thread; i < pieces(); i += threads)
      p.convolution.prefetch({n, 1}, 1, slot, channel(i));
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

  /// The row's one token, for the convolution.
  __device__ VerifiedRow row_of(int slot) const {
    return {.plan = {}, .begin = n, .size = 1, .home = slot, .first = 0};
  }
  /// Convolves the block's channels into shared memory, and writes the windows of its own.
  __device__ void convolve(int slot) const {
    for (int i = thread; i < pieces(); i += threads) {
      const bool is_key = i < kSharedPieces;
      Bf16* const place = is_key ? shared.keys + i * kVec : shared.values + i * kVec - kShared;
      Bf16* const kept = is_key && parts > 1 ? shared.windows + i * kVec : nullptr;
      p.convolution.template run<1>(row_of(slot), channel(i), kept, [&](int) { return place; });
    }
  }

  /// Advances the warp's states tile by tile, stores them and writes outputs of the rule.
  __device__ void run_rule(S* states, Raw& raw) const {
    raw.k.fetch(shared.keys + kExtent, kExtent);
    raw.q.fetch(shared.keys, kExtent);
    raw.v = shared.values[0];  // each tile has its own
    const LaneRows<Layout, kRows> lane_rows{0, kExtent, kExtent};
    auto token =
        Op::template prepare<false, Layout, kRows>(p.rule, n, value_head(head), lane_rows, raw);
    const Bf16* const v = shared.values + (head << values_log2);
    Bf16* const o = shared.out + head * kExtent + first_value();
    const int mine = Layout::row_in_warp();
    int at = 0, parity = 0;
    for (int i = 0; row_of_tile(i) < values(); ++i) {
      const S* const tile = reinterpret_cast<const S*>(stage(at));
      const int first = row_of_tile(i) + mine;
      const int own = first + Layout::template own<kRows>() * Layout::kRowsPerWarp;
      token.v = to_float(v[own]);
      hopper::barrier_wait(barrier(at), static_cast<std::uint32_t>(parity));
      float s[kRows][Layout::kCount];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        Layout::template load<Cached::yes>(s[r], tile + (mine + r * Layout::kRowsPerWarp) * kExtent,
                                           kExtent);
      __syncwarp();  // every lane has its part of the tile
      if (threadIdx.x == 0) ask_for_tile(states, i + kStages, at);
      const float out = Op::step(token, s);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        Layout::template store<Cached::streaming>(
            states + (first + r * Layout::kRowsPerWarp) * kExtent, s[r], kExtent);
      if (Layout::template speaks_for_owners<kRows>()) o[own] = from_float<Bf16>(out);
      if (++at == kStages) at = 0, parity ^= 1;
    }
  }

  /// Gives the block's outputs to the other blocks of the cluster.
  __device__ void hand_out() const {
    for (int i = 2 * thread; i < heads << values_log2; i += 2 * threads) {
      const Bf16* const pair =
          shared.out + (i >> values_log2) * kExtent + first_value() + (i & (values() - 1));
      for (int rank = 0; rank < parts; ++rank)
        if (rank != part) copy_to_block(pair, rank);
    }
  }

  /// The root of the mean square of the warp's head, with the order of additions of gated_rms_norm:
  /// 128 threads, a channel each.
  __device__ float root_mean_square() const {
    const Bf16* const o = shared.out + head * kExtent + threadIdx.x;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kExtent / 32; ++i) {
      const float value = to_float(o[32 * i]);
      const float sum = over_warp(value * value, Plus{});
      squares = i == 0 ? sum : squares + sum;
    }
    return sqrtf(squares / static_cast<float>(kExtent) + p.eps);
  }

  /// Calls visit(i, value) for the lane's outputs: its number i, and the value among the V.
  template <class Visit>
  __device__ void each_output(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int value = (i * warps + warp) * 32 + static_cast<int>(threadIdx.x);
      if (value < values()) visit(i, first_value() + value);
    }
  }

  __device__ void run() const {
    const int hv = value_head(head), slot = p.rows.source(n);
    Bf16* const out = p.rule.out.at(n, hv);
    if (slot == kNowhere) {  // the same in all blocks of the cluster
      each_output([&](int, int value) { out[value] = from_float<Bf16>(0.0f); });
      return;
    }
    S* const states = states_of(slot, head);
    if (threadIdx.x == 0) ask_for_first_tiles(states);
    Raw raw;
    raw.g = bits_at(p.rule.tokens.g, n, hv);
    raw.beta = bits_at(p.rule.tokens.beta, n, hv);
    raw.A_log = bits_at(p.rule.A_log, hv);
    raw.dt_bias = bits_at(p.rule.dt_bias, hv);
    Bf16 gate[kOutputs];
    float weight[kOutputs];
    each_output([&](int i, int value) {
      gate[i] = p.z.at(n, hv)[value];
      weight[i] = at(p.norm_weight, value);
    });
    convolve(slot);
    if (parts > 1) arrive_at_cluster();
    __syncthreads();  // q, k, v and the barriers are there for all
    run_rule(states, raw);
    __syncthreads();  // the block's outputs are in shared memory
    if (parts > 1) {
      wait_for_cluster();
      hand_out();
      arrive_at_cluster();
      p.convolution.write_shared_windows(row_of(slot), part, parts, thread, threads, shared.windows,
                                         [&](int i) { return channel(i); });
      wait_for_cluster();
    }
    const float root = root_mean_square();
    each_output([&](int i, int value) {
      float normed = to_float(shared.out[head * kExtent + value]) / root * weight[i];
      normed *= silu(to_float(gate[i]));
      out[value] = from_float<Bf16>(normed);
    });
  }
};

template <class S>
__global__ void __launch_bounds__(kThreadsMax, kBlocksOfProcessor)
    net_kernel(const __grid_constant__ NetParameters<S> p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char memory[];
  using Block = NetBlock<S>;
  const auto parts = static_cast<int>(gridDim.x), heads = static_cast<int>(blockDim.z);
  const auto warps = static_cast<int>(blockDim.y);
  const int values_log2 = 31 - __clz(kExtent / parts);
  const Block block{
      .p = p,
      .shared = NetMemory(memory, warps * heads, Block::kTileBytes, heads, 1 << values_log2),
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
/// blocks for the multiprocessors, many want few copies of the work on q and k.
int chosen_parts(std::int64_t key_heads_of_all_rows) {
  if (key_heads_of_all_rows <= 8) return 8;
  if (key_heads_of_all_rows <= 32) return 4;
  return key_heads_of_all_rows <= 128 ? 2 : 1;
}

template <class S>
void launch_net(const NetParameters<S>& p, int parts, int key_heads, int heads,
                cudaStream_t stream) {
  const int warps = std::max(1, kWarps / heads);  // of a head
  last_launch = {name_of_parts(parts), kRows, warps * heads};
  launch_in_clusters(
      kName, net_kernel<S>, p,
      dim3(static_cast<unsigned>(parts), static_cast<unsigned>(key_heads),
           static_cast<unsigned>(p.rows.rows)),
      dim3(32, static_cast<unsigned>(warps), static_cast<unsigned>(heads)),
      NetMemory::bytes(warps * heads, NetBlock<S>::kTileBytes, heads, kExtent / parts), stream);
}

}  // namespace

template <class S>
void gated_delta_net_decode(const GatedDeltaNetDecode<S>& in, cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t B = in.x.extent(0), D = in.x.extent(1), HV = in.state.extent(1);
  const std::int64_t slots = in.state.extent(0), rest = D - HV * kExtent;
  const std::int64_t H = rest / (2 * kExtent);
  checks.expect(in.state.extent(2) == kExtent && in.state.extent(3) == kExtent, "state",
                "[slots, HV, 128, 128]", text_of(shape_of(in.state)));
  checks.expect(H > 0 && rest == 2 * kExtent * H && HV % H == 0 && HV / H <= kHeadsMax, "x",
                "[B, 2 H 128 + HV 128] with HV / H from 1 to 8",
                text_of(shape_of(in.x)) + " for HV = " + std::to_string(HV));
  checks.expect(H <= 65535, "x", "of at most 65535 key heads", std::to_string(H));
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.z, "z", "[B, HV, V]", {B, HV, kExtent});
  checks.contiguous_rows(in.z, "z");
  checks.shape(in.a, "a", "[B, HV]", {B, HV});
  checks.shape(in.b, "b", "[B, HV]", {B, HV});
  checks.shape(in.conv_state, "conv_state", "[slots, D, 3]", {slots, D, kHistory});
  checks.shape(in.conv_weight, "conv_weight", "[D, 4]", {D, kTaps});
  if (in.conv_bias) checks.shape(in.conv_bias, "conv_bias", "[D]", {D});
  checks.shape(in.A_log, "A_log", "[HV]", {HV});
  checks.shape(in.dt_bias, "dt_bias", "[HV]", {HV});
  checks.shape(in.norm_weight, "norm_weight", "[V]", {kExtent});
  checks.shape(in.out, "out", "[B, HV, V]", {B, HV, kExtent});
  checks.contiguous_rows(in.out, "out");
  checks.expect(rows_aligned(in.state, 16) && in.state.stride(2) == kExtent, "state",
                "of heads that lie without gaps at multiples of 16 bytes", "other strides");
  checks.expect(!in.slots.table && !in.slots.out_indices && !in.slots.num_accepted, "state_indices",
                "[B], without other slots to write to", "more");
  const auto heads = static_cast<int>(HV / H);
  const bool known = in.parts == 1 || in.parts == 2 || in.parts == 4 || in.parts == 8;
  checks.expect(in.parts == 0 || known, "parts", "0, 1, 2, 4 or 8", std::to_string(in.parts));
  NetParameters<S> p{};
  p.rows = row_slots(checks, in.slots, {}, B, slots);
  check_row_count(checks, p.rows);
  if (B == 0) return;
  expect_clusters(checks, kName);
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
  p.key_channels = static_cast<int>(H) * kExtent;
  const int parts = in.parts > 0 ? in.parts : chosen_parts(B * H);
  launch_net(p, parts, static_cast<int>(H), heads, stream);
}

template void gated_delta_net_decode(const GatedDeltaNetDecode<float>&, cudaStream_t);
template void gated_delta_net_decode(const GatedDeltaNetDecode<Bf16>&, cudaStream_t);

}  // namespace lockstep::kernels
