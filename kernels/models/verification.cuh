// Steps and verifications of whole layers share this: rows of up to 8 tokens, the windows of the
// layer's convolution, and launches in clusters. Rows, windows and slots:
// reference/recurrent/layer_verify.hpp.
//
// A cluster has one row and one group of heads, whose kShared channels (q and k of a key head; B
// and C of a group) all of its blocks convolve. Each other channel is of one block. Nobody
// overwrites a window that another block still reads: columns of a block's own channels, and of the
// shared ones where the cluster is one block, are read and written by one thread. In a larger
// cluster a thread keeps the old columns of shared channels in shared memory and arrives at the
// cluster's first barrier when it has computed with them (a true dependency, and the arrival is a
// release); behind the wait of that barrier (an acquire) each block writes its share of these
// windows.
#pragma once

#include "kernels/base/cluster.cuh"
#include "kernels/base/device.cuh"
#include "kernels/base/launch_note.hpp"
#include "kernels/base/slots.cuh"
#include "kernels/recurrent/state_rows.cuh"

namespace lockstep::kernels {

constexpr int kTaps = 4;
constexpr int kHistory = kTaps - 1;  ///< columns of a window before a token
constexpr int kKept = kTaps - 2;     ///< old columns that the next window keeps
constexpr int kTokensMax = 8;        ///< of a row
constexpr int kVec = 4;              ///< neighbouring channels that a thread convolves together
constexpr int kShared = 256;         ///< channels that all blocks of a cluster convolve
constexpr int kSharedPieces = kShared / kVec;  ///< of kVec channels
constexpr int kFewRows = 4;  ///< up to so many rows it pays to ask L2 for all that a row reads

using Channels = Pack<Bf16, kVec>;

/// A row's tokens, the slot of its window, and the first column of its history there.
struct VerifiedRow {
  RowPlan plan;
  int begin, size, home, first;

  /// Every lane of a warp calls it.
  __device__ static VerifiedRow of(const RowSlots& rows, int n) {
    const RowPlan plan = rows.plan(n);
    return {plan, plan.range.begin, plan.range.size, __shfl_sync(0xffffffffu, plan.entry, 0),
            rows.accepted_before(n) - 1};
  }
  /// Whether it has slots, and one for each of its tokens.
  __device__ bool has_slots(const RowSlots& rows) const {
    return plan.source != kNowhere && home != kNowhere && size <= rows.columns;
  }
};

/// The convolution of a layer's channels and its windows.
struct LayerConvolution {
  TensorView<const Bf16, 2> x;     // [T, D]
  TensorView<Bf16, 3> conv_state;  // [slots, D, C]
  MixedView<2> weight;             // [D, 4]
  MixedView<1> bias;               // [D]
  bool wide_inputs;   ///< x and windows have kVec neighbouring channels at multiples of 8 bytes
  bool wide_weights;  ///< weights, and a bias, are bfloat16 without gaps, at multiples of 16 bytes

  LayerConvolution() = default;
  LayerConvolution(const TensorView<const Bf16, 2>& x, const TensorView<Bf16, 3>& conv_state,
                   const MixedView<2>& weight, const MixedView<1>& bias)
      : x(x),
        conv_state(conv_state),
        weight(weight),
        bias(bias),
        wide_inputs(rows_aligned(x, sizeof(Channels)) && conv_state.stride(1) == 1 &&
                    rows_aligned(transposed(conv_state), sizeof(Channels))),
        wide_weights(wide(weight, weight.strides[1] == 1 && weight.strides[0] == kTaps) &&
                     (!bias || wide(bias, bias.strides[0] == 1))) {}

  template <class View>
  static bool wide(const View& view, bool dense) {
    return view.format == Format::bf16 && dense &&
           reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  }

  __device__ const Bf16* input(int t, int d) const { return x.data_handle() + t * x.stride(0) + d; }
  __device__ Bf16* window(int slot, int d, int column) const {
    return conv_state.data_handle() + slot * conv_state.stride(0) + d * conv_state.stride(1) +
           column * conv_state.stride(2);
  }

  /// Asks L2 for the channels d ... d + kVec - 1 of a row of up to `tokens` tokens.
  __device__ void prefetch(const TokenRange& range, int tokens, int home, int d) const {
    prefetch_to_l2(address_of(weight, d, 0));
    if (bias) prefetch_to_l2(address_of(bias, d));
    for (int t = 0; t < min(range.size, tokens); ++t) prefetch_to_l2(input(range.begin + t, d));
    for (int c = 0; c < kHistory + tokens - 1; ++c)
      if (c < conv_state.extent(2)) prefetch_to_l2(window(home, d, c));
  }

  __device__ Channels load(const Bf16* first, std::int64_t stride) const {
    if (wide_inputs) return load_raw<Cached::streaming, kVec>(first);
    Channels pack;
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.value[i] = first[i * stride];
    return pack;
  }
  __device__ void store_column(int slot, int d, int column, const Channels& pack) const {
    Bf16* const first = window(slot, d, column);
    if (wide_inputs) return store_raw<Cached::streaming>(first, pack);
#pragma unroll
    for (int i = 0; i < kVec; ++i) first[i * conv_state.stride(1)] = pack.value[i];
  }
  /// The taps of the channels d ... d + kVec - 1, and their biases.
  __device__ void load_weights(int d, float (&w)[kVec][kTaps], float (&shift)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) shift[i] = 0;
    if (wide_weights) {
      const Bf16* const first = static_cast<const Bf16*>(weight.data) + d * kTaps;
      if (bias) load_pack<Cached::yes>(shift, static_cast<const Bf16*>(bias.data) + d);
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        float pair[2 * kTaps];
        load_pack<Cached::yes>(pair, first + i * kTaps);
#pragma unroll
        for (int k = 0; k < 2 * kTaps; ++k) w[i + k / kTaps][k % kTaps] = pair[k];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (bias) shift[i] = at(bias, d + i);
#pragma unroll
        for (int k = 0; k < kTaps; ++k) w[i][k] = at(weight, d + i, k);
      }
    }
  }

  /// silu as the convolution's own launch computes it for results of 16 bits.
  __device__ static float activated(float x) {
    return __fdividef(x, 1.0f + __expf(-x));
  }

  /// Convolves the channels d ... d + kVec - 1 of a row of up to kTokens tokens into place(t).
  /// Writes their new window, or with `kept` [kKept, kShared] its old columns there.
  template <int kTokens, class Place>
  __device__ void run(const VerifiedRow& row, int d, Bf16* kept, Place place) const {
    Channels now[kTokens], old[kHistory];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) now[t] = load(input(row.begin + min(t, row.size - 1), d), 1);
#pragma unroll
    for (int c = 0; c < kHistory; ++c)
      old[c] = load(window(row.home, d, row.first + c), conv_state.stride(1));
    float w[kVec][kTaps], shift[kVec], before[kHistory][kVec];
    load_weights(d, w, shift);
#pragma unroll
    for (int j = 0; j < kVec; ++j)
#pragma unroll
      for (int c = 0; c < kHistory; ++c) before[c][j] = to_float(old[c].value[j]);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= row.size) break;
      float y[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float input = to_float(now[t].value[j]);
        float sum = shift[j];
#pragma unroll
        for (int k = 0; k < kTaps; ++k)
          sum = fmaf(w[j][k], k < kHistory ? before[k][j] : input, sum);
        y[j] = activated(sum);
#pragma unroll
        for (int c = 0; c < kHistory; ++c)
          before[c][j] = c + 1 < kHistory ? before[c + 1][j] : input;
      }
      store_pack<Cached::yes>(place(t), y);
    }
#pragma unroll
    for (int c = 0; c < kKept; ++c) {
      if (kept)
        store_raw<Cached::yes>(kept + c * kShared, old[c + 1]);
      else
        store_column(row.home, d, c, old[c + 1]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      if (!kept && t < row.size) store_column(row.home, d, kKept + t, now[t]);
  }

  /// Writes the windows of part `part` of the shared channels, whose old columns lie in `kept`.
  /// channel(i) is the first channel of shared piece i.
  template <class Channel>
  __device__ void write_shared_windows(const VerifiedRow& row, int part, int parts, int thread,
                                       int threads, const Bf16* kept, Channel channel) const {
    const int share = kSharedPieces / parts;  // a power of 2
    for (int i = thread; i < share * (kKept + row.size); i += threads) {
      const int column = i / share, piece = part * share + i % share, d = channel(piece);
      const Channels pack =
          column < kKept ? load_raw<Cached::yes, kVec>(kept + column * kShared + piece * kVec)
                         : load(input(row.begin + column - kKept, d), 1);
      store_column(row.home, d, column, pack);
    }
  }
};

// --- The host's side ---------------------------------------------------------------------------

inline const char* name_of_parts(int parts) {
  switch (parts) {
    case 1: return "whole";
    case 2: return "halves";
    case 4: return "quarters";
    case 8: return "eighths";
    default: return "sixteenths";
  }
}

inline int attribute_of_device(const char* name, cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), name);
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), name);
  return value;
}

inline void expect_clusters(const Checks& checks, const char* name) {
  const int major = attribute_of_device(name, cudaDevAttrComputeCapabilityMajor);
  checks.expect(major >= 9, "the device", "of compute capability 9.0 or newer",
                std::to_string(major) + ".x");
}

/// Launches in clusters of grid.x blocks, behind the launch ahead as soon as it lets others start.
template <class Parameters>
void launch_in_clusters(const char* name, void (*kernel)(Parameters), const Parameters& p,
                        dim3 grid, dim3 block, int bytes, cudaStream_t stream) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             name);
  if (grid.x > 8)  // the most that every device with clusters has
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               name);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {grid.x, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check_cuda(cudaLaunchKernelEx(&config, kernel, p), name);
}

}  // namespace lockstep::kernels
