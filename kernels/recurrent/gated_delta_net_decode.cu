// A gated-delta-net layer's decode step in one launch. Equations:
// reference/recurrent/gated_delta_net_decode.hpp.
//
//   grid   (parts, H, N) in clusters of (parts, 1, 1); N: rows of the batch
//   block  (32, tiles, HV / H) threads; it has V / parts values of each value head of its key head,
//          and a warp has kRows x Layout::kRowsPerWarp of them: rows of a state, in registers
//
// The blocks of a cluster have one row of the batch and one key head. Each computes
//   1. the convolution of the key head's q and k (all blocks the same) and of the block's own v,
//      rounded to bfloat16 in shared memory, as a launch of its own would store it;
//   2. the delta rule of its values: GatedDelta of gated_delta_rule_update.cu, whose inputs come
//      from shared memory here;
//   3. the gated norm. It needs all 128 outputs of a head, so each block writes its own, rounded to
//      bfloat16, into the shared memory of every block of the cluster.
//
// Nobody overwrites a window that another block still reads. The channels of v are read and written
// by one thread. Those of q and k are read by all blocks of one cluster and by no other cluster.
// Each of the blocks' threads arrives at the cluster's first barrier when it has computed with what
// it read (a true dependency, and the arrival is a release), and the windows are written after the
// wait of that barrier (an acquire). The shifted columns come from the block's own shared memory.
// The same wait shows that every block of the cluster has begun, so that its shared memory can be
// written; the second barrier orders these writes before the norm reads them. A block leaves after
// the second wait, when nobody writes into it any more.
#include "kernels/recurrent/gated_delta_net_decode.hpp"

#include "kernels/base/plain.cuh"
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
constexpr int kTaps = 4;
constexpr int kColumns = kTaps - 1;  ///< of a window
constexpr int kVec = 4;              ///< neighbouring channels that a thread convolves together
constexpr int kKeyPieces = 2 * kExtent / kVec;  ///< of kVec channels, in a key head's q and k
constexpr int kHeadsMax = 8;                    ///< value heads of a key head
constexpr int kWarpsMax = 16;

using Channels = Pack<Bf16, kVec>;

template <class S>
struct NetParameters {
  RowSlots rows;
  StatePool<S> state;
  GatedDelta<Bf16>::Parameters rule;  ///< its tokens have a and b; q, k and v are convolved here
  TensorView<const Bf16, 2> x;
  TensorView<Bf16, 3> conv_state;
  MixedView<2> weight;
  MixedView<1> bias, norm_weight;
  HeadVectors<const Bf16> z;
  float eps;
  int key_channels;   ///< of all heads' k: v begins at twice as many
  bool dense;         ///< a state's rows lie one after another
  bool wide_inputs;   ///< x and windows have kVec neighbouring channels at multiples of 8 bytes
  bool wide_weights;  ///< weights are bfloat16 [D, 4] without gaps, at multiples of 16 bytes
};

/// What the warps of a block hand each other.
struct NetShared {
  alignas(16) Bf16 keys[2][kExtent];                ///< q and k behind the convolution
  alignas(16) Bf16 values[kHeadsMax][kExtent];      ///< the block's v; V / parts of each head
  alignas(16) Bf16 windows[kColumns][2 * kExtent];  ///< new windows of q and k
  alignas(16) Bf16 out[kHeadsMax][kExtent];         ///< outputs of the rule, of all blocks
};

/// Arrives at the cluster's barrier: what the thread has read and written is ordered before what
/// others do after their wait. Every thread of the cluster calls both.
__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/// Writes to the place of `target` in the shared memory of block `rank` of the cluster.
__device__ inline void store_in_block(Bf16* target, int rank, Bf16 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.u16 [there], %2; }" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(target))),
      "r"(rank), "h"(__bfloat16_as_ushort(value))
      : "memory");
#endif
}

/// silu as the convolution's own launch computes it for results of 16 bits.
__device__ inline float activated_channel(float x) {
  return __fdividef(x, 1.0f + __expf(-x));
}

/// Convolves channels for the step of one row.
template <class S>
struct NetConvolution {
  const NetParameters<S>& p;
  int n;

  __device__ Channels load(const Bf16* first, std::int64_t stride) const {
    if (p.wide_inputs) return load_raw<Cached::streaming, kVec>(first);
    Channels pack;
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.value[i] = first[i * stride];
    return pack;
  }
  __device__ void store(Bf16* first, const Channels& pack) const {
    if (p.wide_inputs) return store_raw<Cached::streaming>(first, pack);
#pragma unroll
    for (int i = 0; i < kVec; ++i) first[i * p.conv_state.stride(1)] = pack.value[i];
  }
  __device__ Bf16* window(int slot, int d, int column) const {
    return p.conv_state.data_handle() + slot * p.conv_state.stride(0) + d * p.conv_state.stride(1) +
           column * p.conv_state.stride(2);
  }
  __device__ void load_weights(int d, float (&w)[kVec][kTaps]) const {
    if (p.wide_weights) {
      const Bf16* const first = static_cast<const Bf16*>(p.weight.data) + d * kTaps;
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        float pair[2 * kTaps];
        load_pack<Cached::yes>(pair, first + i * kTaps);
#pragma unroll
        for (int k = 0; k < 2 * kTaps; ++k) w[i + k / kTaps][k % kTaps] = pair[k];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
#pragma unroll
        for (int k = 0; k < kTaps; ++k) w[i][k] = at(p.weight, d + i, k);
    }
  }

  /// The channels d ... d + kVec - 1: `column` becomes the new window, oldest to newest.
  __device__ Channels run(int slot, int d, Channels (&column)[kColumns]) const {
    const Channels x = load(p.x.data_handle() + n * p.x.stride(0) + d, 1);
    Channels old[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) old[c] = load(window(slot, d, c), p.conv_state.stride(1));
    float w[kVec][kTaps];
    load_weights(d, w);
    Channels y;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      float sum = p.bias ? at(p.bias, d + i) : 0.0f;
#pragma unroll
      for (int k = 0; k < kTaps; ++k)
        sum = fmaf(w[i][k], to_float(k < kColumns ? old[k].value[i] : x.value[i]), sum);
      y.value[i] = from_float<Bf16>(activated_channel(sum));
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) column[c] = c + 1 < kColumns ? old[c + 1] : x;
    return y;
  }
};

/// One block's work.
template <class S, int kRows>
struct NetBlock {
  using Op = GatedDelta<Bf16>;
  using Layout = FastRows<S, kExtent>;
  static constexpr int kRowsOfWarp = kRows * Layout::kRowsPerWarp;
  static constexpr Cached kCached = Cached::streaming;

  const NetParameters<S>& p;
  NetShared& shared;
  int n, key_head, part, parts;
  int heads;           ///< value heads of the key head
  int values;          ///< of each head in this block
  int head, head_row;  ///< the warp's value head in the block, and its first value there
  int thread, threads;

  __device__ int value_head(int i) const { return key_head * heads + i; }
  __device__ int first_value() const { return part * values; }
  __device__ LaneRows<Layout, kRows> lane_rows() const {
    return {first_value() + head_row + Layout::row_in_warp(), kExtent, kExtent};
  }

  /// Piece i of the block's channels: those of q and k, then those of v.
  __device__ int channel(int i) const {
    if (i < kKeyPieces) {
      const int of_k = i / (kKeyPieces / 2);
      return of_k * p.key_channels + key_head * kExtent + i % (kKeyPieces / 2) * kVec;
    }
    const int v = (i - kKeyPieces) * kVec;
    return 2 * p.key_channels + value_head(v / values) * kExtent + first_value() + v % values;
  }

  /// Asks L2 for what the row reads. It runs before wait_for_earlier_launch(), so the slot may
  /// still change: a wrong guess costs a useless prefetch.
  __device__ void prefetch() const {
    const int slot = p.rows.likely_source(n);
    if (slot == kNowhere) return;
    if (p.dense && threadIdx.x == 0 && threadIdx.y == 0)
      prefetch_to_l2(p.state.data + slot * p.state.slot_stride +
                         value_head(head) * p.state.head_stride +
                         first_value() * p.state.row_stride,
                     static_cast<unsigned>(values * kExtent * sizeof(S)));
    if (p.rows.rows > kSmallBatch) return;
    const NetConvolution<S> convolution{p, n};
    for (int i = thread; i < kKeyPieces + heads * values / kVec; i += threads) {
      const int d = channel(i);
      prefetch_to_l2(p.x.data_handle() + n * p.x.stride(0) + d);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) prefetch_to_l2(convolution.window(slot, d, c));
    }
  }

  /// Convolves the block's channels into shared memory, and writes the windows of v.
  __device__ void convolve(int slot) const {
    const NetConvolution<S> convolution{p, n};
    for (int i = thread; i < kKeyPieces + heads * values / kVec; i += threads) {
      const int d = channel(i);
      Channels column[kColumns];
      const Channels y = convolution.run(slot, d, column);
      const int place = i * kVec;
      if (i < kKeyPieces) {
        store_raw<Cached::yes>(&shared.keys[0][0] + place, y);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          store_raw<Cached::yes>(&shared.windows[c][place], column[c]);
      } else {
        const int v = place - 2 * kExtent;
        store_raw<Cached::yes>(&shared.values[v / values][v % values], y);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          convolution.store(convolution.window(slot, d, c), column[c]);
      }
    }
  }

  /// Writes this block's share of the windows of q and k.
  __device__ void write_key_windows(int slot) const {
    const NetConvolution<S> convolution{p, n};
    const int share = kKeyPieces / parts;
    for (int i = thread; i < share * kColumns; i += threads) {
      const int c = i / share, piece = part * share + i % share;
      convolution.store(convolution.window(slot, channel(piece), c),
                        load_raw<Cached::yes, kVec>(&shared.windows[c][piece * kVec]));
    }
  }

  /// The gated norm of the warp's head at its values, with the order of additions of
  /// gated_rms_norm: 128 threads, a channel each.
  __device__ void write_normed(Bf16 gate, float weight) const {
    const int lane = static_cast<int>(threadIdx.x);
    const Bf16* const o = shared.out[head];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kExtent / 32; ++i) {
      const float value = to_float(o[32 * i + lane]);
      const float part_of_sum = over_warp(value * value, Plus{});
      squares = i == 0 ? part_of_sum : squares + part_of_sum;
    }
    const float root = sqrtf(squares / static_cast<float>(kExtent) + p.eps);
    if (lane >= kRowsOfWarp) return;
    const int row = first_value() + head_row + lane;
    float value = to_float(o[row]) / root * weight;
    value *= silu(to_float(gate));
    p.rule.out.at(n, value_head(head))[row] = from_float<Bf16>(value);
  }

  __device__ void run() const {
    const int lane = static_cast<int>(threadIdx.x), hv = value_head(head);
    const int row = first_value() + head_row + lane % kRowsOfWarp;  // that the lane norms
    const int slot = p.rows.source(n);
    if (slot == kNowhere) {  // the same in all blocks of the cluster
      if (lane < kRowsOfWarp) p.rule.out.at(n, hv)[row] = from_float<Bf16>(0.0f);
      return;
    }
    typename Op::template Raw<Layout, kRows> raw;
    raw.g = bits_at(p.rule.tokens.g, n, hv);
    raw.beta = bits_at(p.rule.tokens.beta, n, hv);
    raw.A_log = bits_at(p.rule.A_log, hv);
    raw.dt_bias = bits_at(p.rule.dt_bias, hv);
    const Bf16 gate = p.z.at(n, hv)[row];
    const float weight = at(p.norm_weight, row);
    StateRows<Layout, kRows> state;
    state.template load<kCached>(lane_rows(), p.state, slot, hv);
    convolve(slot);
    arrive_at_cluster();
    __syncthreads();  // q, k and v are in shared memory

    raw.k.fetch(shared.keys[1], kExtent);
    raw.q.fetch(shared.keys[0], kExtent);
    const int own =
        head_row + Layout::row_in_warp() + Layout::template own<kRows>() * Layout::kRowsPerWarp;
    raw.v = shared.values[head][own];
    const auto token = Op::template prepare<false, Layout, kRows>(p.rule, n, hv, lane_rows(), raw);
    const Bf16 o = from_float<Bf16>(Op::step(token, state.s));
    wait_for_cluster();
    // The lanes that own the same row divide the blocks that get its output.
    constexpr int kOwners = Layout::kLanes / kRows;
    for (int rank = Layout::part() % kOwners; rank < parts; rank += kOwners)
      store_in_block(&shared.out[head][first_value() + own], rank, o);
    arrive_at_cluster();
    write_key_windows(slot);
    state.template store<kCached>(lane_rows(), p.state, slot, hv);
    wait_for_cluster();
    write_normed(gate, weight);
  }
};

template <class S, int kRows>
__global__ void __launch_bounds__(32 * kWarpsMax, 1)
    net_kernel(const __grid_constant__ NetParameters<S> p) {
  using Block = NetBlock<S, kRows>;
  __shared__ NetShared shared;
  const auto parts = static_cast<int>(gridDim.x);
  const Block block{.p = p,
                    .shared = shared,
                    .n = static_cast<int>(blockIdx.z),
                    .key_head = static_cast<int>(blockIdx.y),
                    .part = static_cast<int>(blockIdx.x),
                    .parts = parts,
                    .heads = static_cast<int>(blockDim.z),
                    .values = static_cast<int>(blockDim.y) * Block::kRowsOfWarp,
                    .head = static_cast<int>(threadIdx.z),
                    .head_row = static_cast<int>(threadIdx.y) * Block::kRowsOfWarp,
                    .thread = static_cast<int>(
                        (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x),
                    .threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z)};
  block.prefetch();
  wait_for_earlier_launch();
  let_the_next_launch_start();
  block.run();
}

// --- The host's side ---------------------------------------------------------------------------

/// Rows of a state that a lane holds a part of: those of recurrence_launch.cuh for large batches.
template <class S>
constexpr int kRowsOfLane = sizeof(S) <= 2 ? 4 : 2;

template <class S>
int warps_of(int parts, int heads) {
  return kExtent / parts / (kRowsOfLane<S> * FastRows<S, kExtent>::kRowsPerWarp) * heads;
}

/// The blocks of a key head: few rows want as many blocks as there are multiprocessors, many rows
/// want few copies of the work on q and k.
template <class S>
int chosen_parts(std::int64_t rows, std::int64_t key_heads, int heads) {
  int parts = 8;
  while (parts > 4 && rows * key_heads * parts >= 512) parts /= 2;
  while (warps_of<S>(parts, heads) > kWarpsMax) parts *= 2;
  return parts;
}

template <class S>
void launch_net(const NetParameters<S>& p, int parts, int key_heads, int heads,
                cudaStream_t stream) {
  constexpr int kRows = kRowsOfLane<S>;
  const int warps = warps_of<S>(parts, heads);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(parts), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(parts), static_cast<unsigned>(key_heads),
                        static_cast<unsigned>(p.rows.rows));
  config.blockDim = dim3(32, static_cast<unsigned>(warps / heads), static_cast<unsigned>(heads));
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  last_launch = {"net", kRows, warps};
  check_cuda(cudaLaunchKernelEx(&config, net_kernel<S, kRows>, p), kName);
}

void expect_clusters(const Checks& checks) {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), kName);
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), kName);
  checks.expect(major >= 9, "the device", "of compute capability 9.0 or newer",
                std::to_string(major) + ".x");
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
  checks.shape(in.conv_state, "conv_state", "[slots, D, 3]", {slots, D, kColumns});
  checks.shape(in.conv_weight, "conv_weight", "[D, 4]", {D, kTaps});
  if (in.conv_bias) checks.shape(in.conv_bias, "conv_bias", "[D]", {D});
  checks.shape(in.A_log, "A_log", "[HV]", {HV});
  checks.shape(in.dt_bias, "dt_bias", "[HV]", {HV});
  checks.shape(in.norm_weight, "norm_weight", "[V]", {kExtent});
  checks.shape(in.out, "out", "[B, HV, V]", {B, HV, kExtent});
  checks.contiguous_rows(in.out, "out");
  checks.expect(rows_aligned(in.state, 16), "state", "of contiguous rows at multiples of 16 bytes",
                "other strides");
  checks.expect(!in.slots.table && !in.slots.out_indices && !in.slots.num_accepted, "state_indices",
                "[B], without other slots to write to", "more");
  const auto heads = static_cast<int>(HV / H);
  const bool known = in.parts == 1 || in.parts == 2 || in.parts == 4 || in.parts == 8;
  checks.expect(in.parts == 0 || (known && warps_of<S>(in.parts, heads) <= kWarpsMax), "parts",
                "0, or 1, 2, 4 or 8 with at most 16 warps in a block", std::to_string(in.parts));
  NetParameters<S> p{};
  p.rows = row_slots(checks, in.slots, {}, B, slots);
  check_row_count(checks, p.rows);
  if (B == 0) return;
  expect_clusters(checks);
  p.state = StatePool<S>(in.state);
  p.dense = in.state.stride(2) == kExtent;
  p.rule.tokens.g = in.a;
  p.rule.tokens.beta = in.b;
  p.rule.out = HeadVectors<Bf16>(in.out);
  p.rule.A_log = in.A_log;
  p.rule.dt_bias = in.dt_bias;
  p.rule.scale = 1.0f / sqrtf(static_cast<float>(kExtent));
  p.rule.use_qk_l2norm = true;
  p.rule.value_heads_per_key_head = Divisor(heads);
  p.x = in.x;
  p.conv_state = in.conv_state;
  p.weight = in.conv_weight;
  p.bias = in.conv_bias;
  p.norm_weight = in.norm_weight;
  p.z = HeadVectors<const Bf16>(in.z);
  p.eps = in.eps;
  p.key_channels = static_cast<int>(H) * kExtent;
  constexpr std::size_t kPiece = sizeof(Channels);
  p.wide_inputs = rows_aligned(in.x, kPiece) && in.conv_state.stride(1) == 1 &&
                  rows_aligned(transposed(in.conv_state), kPiece);
  p.wide_weights = in.conv_weight.format == Format::bf16 && in.conv_weight.strides[1] == 1 &&
                   in.conv_weight.strides[0] == kTaps &&
                   reinterpret_cast<std::uintptr_t>(in.conv_weight.data) % 16 == 0;
  const int parts = in.parts > 0 ? in.parts : chosen_parts<S>(B, H, heads);
  launch_net(p, parts, static_cast<int>(H), heads, stream);
}

template void gated_delta_net_decode(const GatedDeltaNetDecode<float>&, cudaStream_t);
template void gated_delta_net_decode(const GatedDeltaNetDecode<Bf16>&, cudaStream_t);

}  // namespace lockstep::kernels
