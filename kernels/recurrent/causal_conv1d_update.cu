// Depthwise causal convolution for decoding. Equations: reference/recurrent/causal_conv1d.hpp.
//
// conv_step_kernel, for one token per row and contiguous channels (as servers keep them):
//   grid   (ceil(D / channels of a block), N)
//   block  kThreads threads; a thread has kVec neighbouring channels of x, of each column of the
//          state and of the output
// conv_rows_kernel, for all else (several tokens, accepted counts, snapshots, trees, any strides):
//   grid   (ceil(D / kThreads), N)
//   block  kThreads threads; a thread computes one channel of one row
#include "kernels/recurrent/causal_conv1d_update.hpp"

#include "kernels/base/device.cuh"
#include "kernels/base/launch_note.hpp"
#include "kernels/base/slots.cuh"
#include "kernels/base/zero.cuh"
#include "kernels/recurrent/shapes.hpp"
#include "kernels/recurrent/state_rows.cuh"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 128;
constexpr int kWidthMax = 4;

template <class T, class S>
struct Parameters {
  TensorView<const T, 2> x;
  TensorView<S, 3> state;
  TensorView<S, 3> snapshots;
  TensorView<T, 2> out;
  MixedView<2> weight;
  MixedView<1> bias;
  RowSlots rows;
  const std::int32_t* parents;
  std::int64_t parents_stride;
  int D, W, C;
  bool silu;
  bool read_only;
  bool store_snapshots;
};

/// silu for a result in T. For 16-bit T the fast exponential and division are precise enough.
template <class T>
__device__ inline float activated(float x) {
  if constexpr (std::is_same_v<T, float>) return silu(x);
  return __fdividef(x, 1.0f + __expf(-x));
}

// --- One token per row ---------------------------------------------------------------------------

/// From this many rows on, a launch is so long that the next launch may start at its beginning;
/// shorter ones let it start when the loads of the states have been issued.
constexpr int kManyRows = 512;

/// A thread's share of a row: kVec neighbouring channels. kByTap: weights lie tap by tap in memory
/// (all channels of a tap side by side); otherwise channel by channel.
template <class T, int W, int C, int kVec, bool kByTap>
struct ConvStep {
  static constexpr int kChannels = kThreads * kVec;  ///< channels of a block
  const Parameters<T, T>& p;
  int n;  ///< the row
  int d;  ///< the thread's first channel

  /// Prefetches the block's part of the state and of x into L2: thread c < C asks for column c of
  /// the state in the likely slot, thread C for x.
  __device__ void prefetch() const {
    const int c = static_cast<int>(threadIdx.x);
    if (c > C) return;
    const int begin = static_cast<int>(blockIdx.x) * kChannels;
    const auto bytes = static_cast<unsigned>(min(kChannels, p.D - begin) * sizeof(T));
    if (c == C) return prefetch_to_l2(p.x.data_handle() + n * p.x.stride(0) + begin, bytes);
    const int slot = p.rows.likely_source(n);
    if (slot == kNowhere) return;
    prefetch_to_l2(p.state.data_handle() + slot * p.state.stride(0) + c * p.state.stride(2) + begin,
                   bytes);
  }

  template <bool kMany>
  __device__ void run() const {
    // The loads of x, weights and bias do not depend on the slot, so they go first.
    using Channels = Pack<T, kVec>;
    float w[W][kVec], bias[kVec] = {};
    const Channels x = load_raw<Cached::streaming, kVec>(p.x.data_handle() + n * p.x.stride(0) + d);
    const T* const weights = static_cast<const T*>(p.weight.data) + (kByTap ? d : d * W);
    const std::int64_t piece = kByTap ? p.weight.strides[1] : kVec;
#pragma unroll
    for (int i = 0; i < W; ++i) load_pack<Cached::yes>(w[i], weights + i * piece);
    if (p.bias) load_pack<Cached::yes>(bias, static_cast<const T*>(p.bias.data) + d);
    const int source = p.rows.source(n), target = p.rows.target(n, source);

    float y[kVec] = {};
    if (source != kNowhere) {
      const std::int64_t column = p.state.stride(2);
      const T* const state = p.state.data_handle() + source * p.state.stride(0) + d;
      Channels old[C];
#pragma unroll
      for (int c = 0; c < C; ++c) old[c] = load_raw<Cached::streaming, kVec>(state + c * column);
      if constexpr (!kMany) let_the_next_launch_start();
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        float sum = bias[j];
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const int i = j * W + k;
          const float weight = kByTap ? w[k][j] : w[i / kVec][i % kVec];
          const Channels& input = k < W - 1 ? old[C - (W - 1) + k] : x;
          sum = fmaf(weight, to_float(input.value[j]), sum);
        }
        y[j] = p.silu ? activated<T>(sum) : sum;
      }
      if (target != kNowhere) {
        T* const next = p.state.data_handle() + target * p.state.stride(0) + d;
#pragma unroll
        for (int c = 0; c < C; ++c)
          store_raw<Cached::streaming>(next + c * column, c + 1 < C ? old[c + 1] : x);
      }
    }
    store_pack<Cached::streaming>(p.out.data_handle() + n * p.out.stride(0) + d, y);
  }
};

template <class T, int W, int C, int kVec, bool kMany, bool kByTap>
__global__ void __launch_bounds__(kThreads)
    conv_step_kernel(const __grid_constant__ Parameters<T, T> p) {
  const int d = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kVec;
  const ConvStep<T, W, C, kVec, kByTap> step{p, static_cast<int>(blockIdx.y), d};
  step.prefetch();
  wait_for_earlier_launch();
  if constexpr (kMany) let_the_next_launch_start();
  if (d < p.D) step.template run<kMany>();
}

// --- Everything else -----------------------------------------------------------------------------

/// One channel of a row, with its weights.
template <class T, class S>
struct Channel {
  const Parameters<T, S>& p;
  int d;
  float weight[kWidthMax];
  float bias;

  __device__ explicit Channel(const Parameters<T, S>& parameters, int channel)
      : p(parameters), d(channel), bias(p.bias ? at(p.bias, d) : 0.0f) {
    for (int k = 0; k < kWidthMax; ++k) weight[k] = k < p.W ? at(p.weight, d, k) : 0.0f;
  }

  __device__ void write(int t, float sum) const {
    p.out(t, d) = from_float<T>(p.silu ? activated<T>(sum) : sum);
  }
  __device__ float token(int t) const { return to_float(p.x(t, d)); }

  /// Computes the outputs of the row's tokens in order; `history` holds the W - 1 inputs before
  /// them.
  __device__ void run_chain(const TokenRange& range, const float (&history)[kWidthMax]) const {
    float window[kWidthMax];
    for (int k = 0; k < kWidthMax; ++k) window[k] = history[k];
    for (int i = 0; i < range.size; ++i) {
      const float x = token(range.begin + i);
      float sum = bias;
      for (int k = 0; k < kWidthMax; ++k)
        if (k < p.W) sum = fmaf(weight[k], k == p.W - 1 ? x : window[k], sum);
      for (int k = 0; k + 1 < kWidthMax; ++k) window[k] = k == p.W - 2 ? x : window[k + 1];
      write(range.begin + i, sum);
    }
  }

  /// The input `back` steps before tree node `node`: along the node's path to the root, then back
  /// through the columns of the state. node = -1 is the state itself.
  __device__ float behind(int slot, const TokenRange& range, int node, int back) const {
    while (back > 0 && node >= 0) {
      node = parent(range, node);
      --back;
    }
    if (node >= 0) return token(range.begin + node);
    return to_float(p.state(slot, d, p.C - 1 - back));
  }
  __device__ int parent(const TokenRange& range, int node) const {
    return p.parents ? p.parents[(range.begin + node) * p.parents_stride] : node - 1;
  }
  /// Whether every parent on the node's path has a smaller number and the root's parent is -1.
  __device__ bool is_valid(const TokenRange& range, int node) const {
    for (; node > 0; node = parent(range, node)) {
      const int up = parent(range, node);
      if (up < 0 || up >= node) return false;
    }
    return parent(range, 0) == -1;
  }

  /// Computes outputs and snapshots of a verification; the state is only read. Invalid nodes give
  /// output 0, and the state itself as their snapshot.
  __device__ void verify(int slot, const TokenRange& range) const {
    for (int i = 0; i < range.size; ++i) {
      const int t = range.begin + i;
      const bool valid = is_valid(range, i);
      float sum = bias;
      for (int k = 0; k < p.W && valid; ++k)
        sum = fmaf(weight[k], behind(slot, range, i, p.W - 1 - k), sum);
      if (valid)
        write(t, sum);
      else
        p.out(t, d) = from_float<T>(0.0f);
      if (!p.store_snapshots) continue;
      for (int c = 0; c < p.C; ++c)
        p.snapshots(t, d, c) = from_float<S>(behind(slot, range, valid ? i : -1, p.C - 1 - c));
    }
  }
};

template <class T, class S>
__global__ void __launch_bounds__(kThreads)
    conv_rows_kernel(const __grid_constant__ Parameters<T, S> p) {
  const int d = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int n = static_cast<int>(blockIdx.y);
  wait_for_earlier_launch();
  if (d >= p.D) return;
  if (n == p.rows.rows - 1)
    for (int t = p.rows.padding_begin(); t < p.rows.tokens; ++t) p.out(t, d) = from_float<T>(0.0f);
  const TokenRange range = p.rows.range(n);
  // With accepted counts, the state of the previous step holds its whole history of tokens: the
  // history before this step's tokens begins at column accepted - 1 (`first`), and `kept` columns
  // are written.
  const bool speculative = p.rows.num_accepted != nullptr;
  const int first = speculative ? p.rows.accepted_before(n) - 1 : p.C - (p.W - 1);
  const int kept = speculative ? p.W - 2 + range.size : p.C;
  const int slot = p.rows.source(n);
  if (slot == kNowhere || first + p.W - 1 > p.C || kept > p.C) {
    for (int i = 0; i < range.size; ++i) p.out(range.begin + i, d) = from_float<T>(0.0f);
    return;
  }
  const Channel<T, S> channel(p, d);
  if (p.read_only) return channel.verify(slot, range);
  float history[kWidthMax];
  for (int k = 0; k < kWidthMax; ++k)
    history[k] = k < p.W - 1 ? to_float(p.state(slot, d, first + k)) : 0.0f;
  channel.run_chain(range, history);
  const int target = p.rows.target(n, slot);
  if (target == kNowhere || range.size == 0) return;
  // The new column j is element j + skip of the first `columns` old columns followed by the tokens.
  const int columns = speculative ? first + p.W - 1 : p.C;
  const int skip = speculative ? first + 1 : range.size;
  for (int j = 0; j < kept; ++j)
    p.state(target, d, j) = j + skip < columns
                                ? p.state(slot, d, j + skip)
                                : from_float<S>(channel.token(range.begin + j + skip - columns));
}

// --- Launches ------------------------------------------------------------------------------------

template <class T, int W, int C, int kVec, bool kMany>
void launch_vectors(const Parameters<T, T>& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.D / kVec + kThreads - 1) / kThreads);
  const auto kernel = p.weight.strides[0] == 1 ? conv_step_kernel<T, W, C, kVec, kMany, true>
                                               : conv_step_kernel<T, W, C, kVec, kMany, false>;
  last_launch = {kMany ? "step of many rows" : "step", kVec, kThreads / 32};
  launch("causal_conv1d_update", kernel, dim3(blocks, static_cast<unsigned>(p.rows.rows)),
         dim3(kThreads), 0, stream, true, p);
}

template <class T, int W, int C>
void launch_step(const Parameters<T, T>& p, cudaStream_t stream) {
  if (p.rows.rows < 64)  // few rows: more threads with less each (2.4 us for 2.9 at 16 rows)
    launch_vectors<T, W, C, 2, false>(p, stream);
  else if (p.rows.rows < kManyRows)
    launch_vectors<T, W, C, 4, false>(p, stream);
  else
    launch_vectors<T, W, C, 4, true>(p, stream);
}

/// Whether conv_step_kernel can run: one token per row, contiguous channels at multiples of 16
/// bytes.
template <class T, class S>
bool is_step(const Parameters<T, S>& p) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
  };
  const auto multiple = [](std::int64_t stride) { return stride % 8 == 0; };
  const bool plain = !p.rows.starts && !p.rows.num_accepted && !p.read_only;
  return sizeof(T) == 2 && p.weight.format == format_of<T>() && plain && p.D % 8 == 0 &&
         ((p.weight.strides[1] == 1 && p.weight.strides[0] == p.W) ||
          (p.weight.strides[0] == 1 && multiple(p.weight.strides[1]))) &&
         aligned(p.weight.data) &&
         (!p.bias ||
          (p.bias.format == format_of<T>() && p.bias.strides[0] == 1 && aligned(p.bias.data))) &&
         rows_aligned(p.x, 16) && rows_aligned(p.out, 16) && p.state.stride(1) == 1 &&
         multiple(p.state.stride(0)) && multiple(p.state.stride(2)) &&
         aligned(p.state.data_handle());
}

template <class T, class S>
void launch_any(const Parameters<T, S>& p, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, S> && sizeof(T) == 2) {
    if (is_step(p)) {
#define LOCKSTEP_CASE(W_, C_) \
  if (p.W == W_ && p.C == C_) return launch_step<T, W_, C_>(p, stream);
      LOCKSTEP_CASE(4, 3)
#ifdef LOCKSTEP_ALL_SHAPES
      LOCKSTEP_CASE(4, 4)
      LOCKSTEP_CASE(3, 2)
      LOCKSTEP_CASE(3, 3)
      LOCKSTEP_CASE(2, 1)
      LOCKSTEP_CASE(2, 2)
#endif
#undef LOCKSTEP_CASE
    }
  }
  const dim3 grid(static_cast<unsigned>((p.D + kThreads - 1) / kThreads),
                  static_cast<unsigned>(p.rows.rows));
  last_launch = {"rows", 1, kThreads / 32};
  launch("causal_conv1d_update", conv_rows_kernel<T, S>, grid, dim3(kThreads), 0, stream, false, p);
}

/// The slots of conv states: where slots.table gives a row one slot per token, its conv state lies
/// in the first.
StateSlots first_slots(const StateSlots& slots) {
  StateSlots first = slots;
  if (slots.table) {
    first.indices = make_view(slots.table->data_handle(), Shape<1>{slots.table->extent(0)},
                              Shape<1>{slots.table->stride(0)});
    first.table.reset();
  }
  return first;
}

}  // namespace

template <class T, class S>
void causal_conv1d_update(const CausalConv1dUpdate<T, S>& in, cudaStream_t stream) {
  const Checks checks("causal_conv1d_update");
  const std::int64_t T_ = in.x.extent(0), D = in.x.extent(1);
  const std::int64_t W = in.weight.extents[1], C = in.conv_state.extent(2);
  checks.expect(2 <= W && W <= kWidthMax, "weight", "[D, W] with W from 2 to 4",
                "W = " + std::to_string(W));
  checks.shape(in.weight, "weight", "[D, W]", {D, W});
  if (in.bias) checks.shape(in.bias, "bias", "[D]", {D});
  checks.shape(in.out, "out", "[T, D]", {T_, D});
  checks.shape(in.conv_state, "conv_state", "[slots, D, C]", {in.conv_state.extent(0), D, C});
  const bool speculative = in.slots.num_accepted.has_value();
  const bool read_only = in.snapshots || in.parents;
  checks.expect(C >= W - 1, "conv_state", "[slots, D, C] with C of at least W - 1",
                "C = " + std::to_string(C) + " for W = " + std::to_string(W));
  checks.expect(!speculative || !read_only, "num_accepted_tokens",
                "absent with snapshots or parents", "given");
  Parameters<T, S> p{};
  p.rows =
      row_slots(checks, first_slots(in.slots), in.query_start_loc, T_, in.conv_state.extent(0));
  check_row_count(checks, p.rows);
  p.x = in.x;
  p.state = in.conv_state;
  p.out = in.out;
  p.weight = in.weight;
  p.bias = in.bias;
  p.silu = in.silu;
  p.read_only = read_only;
  p.D = static_cast<int>(D);
  p.W = static_cast<int>(W);
  p.C = static_cast<int>(C);
  if (in.snapshots) {
    checks.shape(*in.snapshots, "snapshots", "[T, D, C]", {T_, D, C});
    p.snapshots = *in.snapshots;
    p.store_snapshots = true;
  }
  if (in.parents) {
    checks.shape(*in.parents, "parents", "[T]", {T_});
    p.parents = in.parents->data_handle();
    p.parents_stride = in.parents->stride(0);
  }
  if (p.rows.rows == 0)
    return zero_outputs(checks.operation(),
                        make_view(in.out.data_handle(), Shape<3>{T_, D, 1},
                                  Shape<3>{in.out.stride(0), in.out.stride(1), 1}),
                        stream);
  if (D == 0) return;
  launch_any(p, stream);
}

#define LOCKSTEP_INSTANTIATE(T, S) \
  template void causal_conv1d_update(const CausalConv1dUpdate<T, S>&, cudaStream_t);
LOCKSTEP_SERVING_TYPES(LOCKSTEP_INSTANTIATE)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_OTHER_TYPES(LOCKSTEP_INSTANTIATE)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
