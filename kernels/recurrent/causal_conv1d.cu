// The short causal convolution of a prefill. Equations and layout of states:
// reference/recurrent/causal_conv1d.hpp.
//
// conv_tokens_kernel, for activations and states of the same 16-bit type with contiguous channels
// (as servers keep them):
//   grid   (ceil(D / channels of a block), ceil(T / tokens of a block))
//   block  kThreads threads; a thread has kVec neighbouring channels. It keeps their last W - 1
//          inputs in registers while it goes through its tokens, kBatch loads at a time
// A block computes a range of tokens of the packed batch, whichever rows they belong to. The first
// W - 1 tokens of a row need the row's state; the block in whose range the row begins computes them
// all. No other block reads or replaces that state.
//
// conv_channels_kernel, for everything else:
//   grid   (ceil(D / kThreads), rows)
//   block  kThreads threads; a thread computes one channel of one row
#include "kernels/recurrent/causal_conv1d.hpp"

#include "kernels/base/fast_math.cuh"
#include "kernels/recurrent/prefill_rows.cuh"
#include "kernels/recurrent/shapes.hpp"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "causal_conv1d";
constexpr int kThreads = 128;
constexpr int kVec = 8;         ///< channels of a thread: 16 bytes
constexpr int kBatch = 4;       ///< tokens whose loads are in flight while as many are computed
constexpr int kWidthMax = 4;    ///< W at most
constexpr int kColumnsMax = 4;  ///< columns C of a conv state, at most

template <class T, class S>
struct Parameters {
  TensorView<const T, 2> x;
  TensorView<S, 3> state;
  TensorView<T, 2> out;
  MixedView<2> weight;
  MixedView<1> bias;
  PrefillRows rows;
  int D, W, C;
  int tokens_of_block;
  bool silu;
  bool vectors_of_weights;  ///< weights and bias may be read 16 bytes at a time
};

template <class T>
__device__ inline float activated(float x) {
  return std::is_same_v<T, float> ? silu(x) : silu_fast(x);
}

// --- Vectors of channels -------------------------------------------------------------------------

/// A thread's kVec channels: their weights, and the convolution over ranges of tokens.
template <class T, int W, bool kSilu>
class Channels {
 public:
  using Vector = Pack<T, kVec>;

  __device__ Channels(const Parameters<T, T>& parameters, int first) : p_(parameters), d_(first) {
    read_weights();
    if (p_.bias && p_.vectors_of_weights) {
      load_pack<Cached::yes>(bias_, static_cast<const T*>(p_.bias.data) + d_);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) bias_[j] = p_.bias ? at(p_.bias, d_ + j) : 0.0f;
    }
  }

  /// Computes tokens [from, to); `history` are the W - 1 inputs before them, oldest first.
  __device__ void run(int from, int to, const Vector (&history)[W - 1]) const {
    float window[W - 1][kVec];
#pragma unroll
    for (int k = 0; k < W - 1; ++k)
#pragma unroll
      for (int j = 0; j < kVec; ++j) window[k][j] = to_float(history[k].value[j]);
    int t = from;
    if (t + kBatch <= to) {
      Vector inputs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) inputs[i] = input(t + i);
      for (; t + kBatch <= to; t += kBatch) {
        Vector next[kBatch];
        const int behind = t + 2 * kBatch <= to ? t + kBatch : t;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) next[i] = input(behind + i);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) advance(t + i, inputs[i], window);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) inputs[i] = next[i];
      }
    }
    for (; t < to; ++t) advance(t, input(t), window);
  }

  /// Computes tokens [from, to) of a row that began at least W - 1 tokens earlier: the history is
  /// in x.
  __device__ void run_on(int from, int to) const {
    Vector history[W - 1];
#pragma unroll
    for (int k = 0; k < W - 1; ++k) history[k] = input(from - (W - 1) + k);
    run(from, to, history);
  }

  /// Computes a row from its first token up to `to`, and replaces its state.
  __device__ void begin(const PrefillRow& row, int to) const {
    Vector old[kColumnsMax], history[W - 1];
#pragma unroll
    for (int c = 0; c < kColumnsMax; ++c) {
      old[c] = Vector{};
      if (c < p_.C && row.source != kNowhere)
        old[c] = load_raw<Cached::streaming, kVec>(column(row.source, c));
    }
#pragma unroll
    for (int k = 0; k < W - 1; ++k) history[k] = p_.C == W ? old[k + 1] : old[k];
    // The new state is stored before the outputs are computed, so that its loads of x and those of
    // run() are in flight together.
    if (row.target != kNowhere) {
#pragma unroll
      for (int c = 0; c < kColumnsMax; ++c) {
        if (c >= p_.C) break;
        const int token = row.size + c - p_.C;
        Vector next = old[0];
        if (token >= 0) {
          next = input(row.begin + token);
        } else {
#pragma unroll
          for (int i = 1; i < kColumnsMax; ++i)
            if (row.size + c == i) next = old[i];
        }
        store_raw<Cached::streaming>(column(row.target, c), next);
      }
    }
    run(row.begin, to, history);
  }

  /// Sets the outputs of tokens [from, to) to 0.
  __device__ void clear(int from, int to) const {
    const Vector zeros{};
    for (int t = from; t < to; ++t) store_raw<Cached::streaming>(output(t), zeros);
  }

 private:
  __device__ Vector input(int t) const {
    return load_raw<Cached::streaming, kVec>(p_.x.data_handle() + t * p_.x.stride(0) + d_);
  }
  __device__ T* output(int t) const {
    return p_.out.data_handle() + t * p_.out.stride(0) + d_;
  }
  /// Column c of the state in `slot`, at the thread's first channel.
  __device__ T* column(int slot, int c) const {
    return p_.state.data_handle() + slot * p_.state.stride(0) + c * p_.state.stride(2) + d_;
  }
  __device__ void advance(int t, const Vector& x, float (&window)[W - 1][kVec]) const {
    float y[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float newest = to_float(x.value[j]);
      float sum = bias_[j];
#pragma unroll
      for (int k = 0; k < W - 1; ++k) sum = fmaf(weight_[k][j], window[k][j], sum);
      sum = fmaf(weight_[W - 1][j], newest, sum);
      y[j] = kSilu ? activated<T>(sum) : sum;
#pragma unroll
      for (int k = 0; k + 1 < W - 1; ++k) window[k][j] = window[k + 1][j];
      window[W - 2][j] = newest;
    }
    store_pack<Cached::streaming>(output(t), y);
  }

  __device__ void read_weights() {
    if (!p_.vectors_of_weights) {
#pragma unroll
      for (int j = 0; j < kVec; ++j)
#pragma unroll
        for (int k = 0; k < W; ++k) weight_[k][j] = at(p_.weight, d_ + j, k);
      return;
    }
    // Weights lie either tap by tap ([W, D] in memory) or channel by channel ([D, W]).
    const bool by_tap = p_.weight.strides[0] == 1;
    const T* const from = static_cast<const T*>(p_.weight.data) + (by_tap ? d_ : d_ * W);
    float read[W][kVec];
#pragma unroll
    for (int k = 0; k < W; ++k)
      load_pack<Cached::yes>(read[k], from + k * (by_tap ? p_.weight.strides[1] : kVec));
#pragma unroll
    for (int j = 0; j < kVec; ++j)
#pragma unroll
      for (int k = 0; k < W; ++k)
        weight_[k][j] = by_tap ? read[k][j] : read[(j * W + k) / kVec][(j * W + k) % kVec];
  }

  const Parameters<T, T>& p_;
  int d_;
  float weight_[W][kVec], bias_[kVec];
};

/// Prefetches the block's first tokens into L2 before the block knows its rows; each thread names
/// one line of 128 bytes.
template <class T>
__device__ void prefetch_tokens(const Parameters<T, T>& p, int first) {
  constexpr int kLine = 128 / sizeof(T), kLines = kThreads * kVec / kLine;
  const int thread = static_cast<int>(threadIdx.x), t = first + thread / kLines;
  const int d = static_cast<int>(blockIdx.x) * kThreads * kVec + thread % kLines * kLine;
  if (t < p.rows.slots.tokens && d < p.D) prefetch_to_l2(p.x.data_handle() + t * p.x.stride(0) + d);
}

template <class T, int W, bool kSilu>
__global__ void __launch_bounds__(kThreads, 4)
    conv_tokens_kernel(const __grid_constant__ Parameters<T, T> p) {
  const int first = static_cast<int>(blockIdx.y) * p.tokens_of_block;
  prefetch_tokens(p, first);
  wait_for_earlier_launch();
  let_the_next_launch_start();
  const int last = min(first + p.tokens_of_block, p.rows.slots.tokens);
  const bool ends = blockIdx.y + 1 == gridDim.y;
  int row = p.rows.beginning_before(first);
  const int d = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kVec;
  if (d >= p.D) return;
  const Channels<T, W, kSilu> channels(p, d);
  if (row > 0) {
    const PrefillRow before = p.rows.row(row - 1);
    const int from = max(first, before.begin + W - 1), to = min(before.begin + before.size, last);
    if (from < to) channels.run_on(from, to);
    channels.clear(max(first, before.begin + before.size), min(before.end, last));
  }
  for (; row < p.rows.count(); ++row) {
    const PrefillRow own = p.rows.row(row);
    if (own.begin >= last && !ends) break;
    channels.begin(own, min(own.begin + own.size, max(last, own.begin + W - 1)));
    channels.clear(max(first, own.begin + own.size), min(own.end, last));
  }
}

// --- Everything else -----------------------------------------------------------------------------

template <class T, class S>
__global__ void __launch_bounds__(kThreads)
    conv_channels_kernel(const __grid_constant__ Parameters<T, S> p) {
  const int d = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  wait_for_earlier_launch();
  if (d >= p.D) return;
  const PrefillRow row = p.rows.row(static_cast<int>(blockIdx.y));
  const auto token = [&](int i) { return to_float(p.x(row.begin + i, d)); };
  S old[kColumnsMax];
  for (int c = 0; c < kColumnsMax; ++c)
    old[c] = c < p.C && row.source != kNowhere ? p.state(row.source, d, c) : from_float<S>(0.0f);
  float window[kWidthMax] = {}, weight[kWidthMax];
  for (int k = 0; k < kWidthMax; ++k) {
    weight[k] = k < p.W ? at(p.weight, d, k) : 0.0f;
    for (int c = 0; c < kColumnsMax; ++c)
      if (k < p.W - 1 && c == p.C - (p.W - 1) + k) window[k] = to_float(old[c]);
  }
  const float bias = p.bias ? at(p.bias, d) : 0.0f;
  for (int i = 0; i < row.size; ++i) {
    const float x = token(i);
    float sum = bias;
    for (int k = 0; k < kWidthMax; ++k)
      if (k < p.W) sum = fmaf(weight[k], k == p.W - 1 ? x : window[k], sum);
    for (int k = 0; k + 1 < kWidthMax; ++k) window[k] = k == p.W - 2 ? x : window[k + 1];
    p.out(row.begin + i, d) = from_float<T>(p.silu ? activated<T>(sum) : sum);
  }
  for (int t = row.begin + row.size; t < row.end; ++t) p.out(t, d) = from_float<T>(0.0f);
  if (row.target == kNowhere) return;
  for (int c = 0; c < p.C; ++c) {
    const int i = row.size + c - p.C;
    S next = old[0];
    for (int other = 1; other < kColumnsMax; ++other)
      if (row.size + c == other) next = old[other];
    p.state(row.target, d, c) = i >= 0 ? from_float<S>(token(i)) : next;
  }
}

// --- Launches ------------------------------------------------------------------------------------

template <class T, int W>
void launch_tokens(const Parameters<T, T>& p, cudaStream_t stream) {
  const auto blocks = [](std::int64_t count, std::int64_t of_block) {
    return static_cast<unsigned>((count + of_block - 1) / of_block);
  };
  const dim3 grid(blocks(p.D, kThreads * kVec),
                  std::max(1u, blocks(p.rows.slots.tokens, p.tokens_of_block)));
  const auto kernel = p.silu ? conv_tokens_kernel<T, W, true> : conv_tokens_kernel<T, W, false>;
  launch(kName, kernel, grid, dim3(kThreads), 0, stream, true, p);
}

/// Whether conv_tokens_kernel can run: channels contiguous and everything at multiples of 16 bytes.
template <class T, class S>
bool takes_vectors(const Parameters<T, S>& p) {
  const auto whole = [](std::int64_t stride) { return stride % kVec == 0; };
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
  };
  const bool states =
      !p.rows.has_states || (p.state.stride(1) == 1 && whole(p.state.stride(0)) &&
                             whole(p.state.stride(2)) && aligned(p.state.data_handle()));
  return p.D % kVec == 0 && p.x.stride(1) == 1 && whole(p.x.stride(0)) &&
         aligned(p.x.data_handle()) && p.out.stride(1) == 1 && whole(p.out.stride(0)) &&
         aligned(p.out.data_handle()) && states;
}

/// Whether weights and bias are in T, side by side along the channels or along the taps.
template <class T>
bool has_vectors_of_weights(const MixedView<2>& weight, const MixedView<1>& bias) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
  };
  const bool together = weight.strides[1] == 1 && weight.strides[0] == weight.extents[1];
  const bool by_tap = weight.strides[0] == 1 && weight.strides[1] % kVec == 0;
  return weight.format == format_of<T>() && (together || by_tap) && aligned(weight.data) &&
         (!bias || (bias.format == format_of<T>() && bias.strides[0] == 1 && aligned(bias.data)));
}

/// Tokens of a block. Each block reads W - 1 tokens of history again, so long ranges are cheaper;
/// the range is halved while the grid has fewer than kManyBlocks blocks.
template <class T, class S>
int tokens_of_block(const Parameters<T, S>& p) {
  constexpr std::int64_t kManyBlocks = 1000;
  const std::int64_t columns = (p.D + kThreads * kVec - 1) / (kThreads * kVec);
  int tokens = 128;
  while (tokens > 16 && columns * p.rows.slots.tokens < kManyBlocks * tokens) tokens /= 2;
  return tokens;
}

template <class T, class S>
void launch_any(Parameters<T, S> p, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, S> && sizeof(T) == 2) {
    if (takes_vectors(p)) {
      p.vectors_of_weights = has_vectors_of_weights<T>(p.weight, p.bias);
      if (p.tokens_of_block == 0) p.tokens_of_block = tokens_of_block(p);
#define LOCKSTEP_CASE(W_) \
  if (p.W == W_) return launch_tokens<T, W_>(p, stream);
      LOCKSTEP_CASE(4)
#ifdef LOCKSTEP_ALL_SHAPES
      LOCKSTEP_CASE(3)
      LOCKSTEP_CASE(2)
#endif
#undef LOCKSTEP_CASE
    }
  }
  const dim3 grid(static_cast<unsigned>((p.D + kThreads - 1) / kThreads),
                  static_cast<unsigned>(p.rows.count()));
  launch(kName, conv_channels_kernel<T, S>, grid, dim3(kThreads), 0, stream, true, p);
}

}  // namespace

template <class T, class S>
void causal_conv1d(const CausalConv1d<T, S>& in, cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t T_ = in.x.extent(0), D = in.x.extent(1), W = in.weight.extents[1];
  checks.expect(2 <= W && W <= kWidthMax, "weight", "[D, W] with W from 2 to 4",
                "W = " + std::to_string(W));
  checks.shape(in.weight, "weight", "[D, W]", {D, W});
  if (in.bias) checks.shape(in.bias, "bias", "[D]", {D});
  checks.shape(in.out, "out", "[T, D]", {T_, D});
  std::int64_t C = W - 1;
  if (in.conv_state) {
    C = in.conv_state->extent(2);
    checks.shape(*in.conv_state, "conv_state", "[slots, D, C]", {in.conv_state->extent(0), D, C});
    checks.expect(C == W - 1 || C == W, "conv_state", "[slots, D, C] with C = W - 1 or W",
                  "C = " + std::to_string(C) + " for W = " + std::to_string(W));
  }
  Parameters<T, S> p{};
  p.rows = prefill_rows(checks, in.batch, T_,
                        in.conv_state ? std::optional(in.conv_state->extent(0)) : std::nullopt);
  checks.expect(p.rows.count() <= 65535, "the batch", "of at most 65535 rows",
                std::to_string(p.rows.count()));
  checks.expect(T_ <= 65535 * 16, "x", "of at most 1048560 tokens", std::to_string(T_));
  p.x = in.x;
  p.out = in.out;
  if (in.conv_state) p.state = *in.conv_state;
  p.weight = in.weight;
  p.bias = in.bias;
  p.silu = in.silu;
  p.D = static_cast<int>(D);
  p.W = static_cast<int>(W);
  p.C = static_cast<int>(C);
  p.tokens_of_block = in.tokens_of_block;
  if (D == 0 || p.rows.count() == 0) return;
  launch_any(p, stream);
}

#define LOCKSTEP_INSTANTIATE(T, S) \
  template void causal_conv1d(const CausalConv1d<T, S>&, cudaStream_t);
LOCKSTEP_SERVING_TYPES(LOCKSTEP_INSTANTIATE)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_OTHER_TYPES(LOCKSTEP_INSTANTIATE)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
