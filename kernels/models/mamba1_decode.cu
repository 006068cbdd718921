// The selective scan of a Mamba1 layer for decoding. Equations:
// reference/recurrent/mamba1_decode.hpp.
//
// A channel's state is 16 numbers, 64 or 32 bytes: 4 lanes share a channel of float32 numbers, 2
// lanes one of 16 bits, so that an access of a warp moves 512 bytes side by side. A lane holds a
// part of kHeld channels, and owns one of them: it computes that channel's time step and gate, and
// gives the other lanes what they need by shuffles.
//
// mamba1_rows_kernel, for few rows and for float32 states: a warp has one row
//   grid   (ceil(D / channels of a block), rows)
//   block  1 or 4 warps, which share nothing
// mamba1_groups_kernel, for many rows with states of 16 bits: A [D, 16] has twice a state's bytes
// and is the same for every row; a warp reads its part of it once and runs through the rows of its
// group, while the states of the next rows come into shared memory. A lane copies what it reads
// itself, so that no lane waits for another.
//   grid   (ceil(D / 32), groups of rows)
//   block  a warp
#include "kernels/models/mamba1_decode.hpp"

#include <cuda_pipeline_primitives.h>

#include "kernels/base/fast_math.cuh"
#include "kernels/base/launch_note.hpp"
#include "kernels/base/slots.cuh"
#include "kernels/recurrent/shapes.hpp"
#include "kernels/recurrent/state_rows.cuh"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "mamba1_decode";
constexpr int kColumns = kMamba1Columns;
constexpr int kWarpsPerProcessor = 20;  ///< of mamba1_groups_kernel
constexpr float kLog2OfE = 1.44269504088896341f;

template <class S>
constexpr int kPiece = 16 / static_cast<int>(sizeof(S));  ///< numbers of an access of 16 bytes
template <class S>
using Channels = RowLayout<kColumns / kPiece<S>, kPiece<S>, 1, false>;

/// Rows [T, n] whose numbers are contiguous.
template <class T>
struct TokenRows {
  T* data = nullptr;
  std::int64_t stride = 0;

  TokenRows() = default;
  explicit TokenRows(const TensorView<T, 2>& view)
      : data(view.data_handle()), stride(view.stride(0)) {}
  __device__ T* at(int t) const { return data + t * stride; }
};

template <class T, class S>
struct Mamba1Parameters {
  RowSlots rows;
  S* state = nullptr;
  std::int64_t slot_stride = 0;
  const float* A = nullptr;
  TokenRows<const T> x, dt, z, B, C, dt_low;
  TokenRows<T> out;
  MixedView<1> skip, dt_bias, b_weight, c_weight;
  float eps = 0;
  int D = 0, low_rank = 0;
  bool dt_softplus = false;
  bool low_packs = false;  ///< rows of dt_low are read 16 bytes at a time
};

/// A warp's lanes over kHeld x Layout::kRowsPerWarp channels.
template <class T, class S, bool kNormed, int kHeld>
struct Mamba1Warp {
  using Layout = Channels<S>;
  static constexpr int kCount = Layout::kCount;  ///< numbers of a part
  static constexpr int kChannels = kHeld * Layout::kRowsPerWarp;
  /// Whether outputs or states are float32: then the decay is as exact as float32 allows.
  static constexpr bool kExact = sizeof(T) == 4 || sizeof(S) == 4;
  using Part = Pack<S, kCount>;

  static constexpr int kLowPack = 16 / sizeof(T);  ///< numbers of dt_low that a lane reads at once
  using NormWeights = float[2][kColumns];          ///< of B and C, in shared memory

  const Mamba1Parameters<T, S>& p;
  NormWeights& norm_weights;
  int first;  ///< channel of the warp

  /// A row's small inputs as they come from memory.
  struct Row {
    int slot, target;
    typename Layout::template Raw<T> B, C;
    T x, dt, z;
    Pack<T, kLowPack> low;  ///< of the first 32 kLowPack numbers of dt_low, with p.low_packs
  };
  /// Values that all rows share.
  struct Weights {
    float rates[kHeld][kCount];  ///< A of the lane's parts, times log2(e) unless kExact
    float bias, skip;            ///< of the channel that the lane owns
  };

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int held(int i) const {
    return first + i * Layout::kRowsPerWarp + Layout::row_in_warp();
  }
  __device__ int own() const { return held(Layout::template own<kHeld>()); }
  __device__ bool has(int channel) const { return channel < p.D; }
  __device__ S* part_of(int slot, int i) const {
    return p.state + slot * p.slot_stride + std::int64_t{held(i)} * kColumns +
           Layout::part() * kCount;
  }
  __device__ int slot_of(int n) const { return n < p.rows.rows ? p.rows.source(n) : kNowhere; }

  /// Asks L2 for what row n reads. The slot is a guess, which is returned: the launch before may
  /// still change it.
  __device__ int prefetch(int n) const {
    const int slot = p.rows.likely_source(n);
    const auto channels = static_cast<unsigned>(min(kChannels, p.D - first));
    if (lane() == 0) prefetch_to_l2(p.A + first * kColumns, channels * kColumns * sizeof(float));
    if (lane() == 1) prefetch_to_l2(p.x.at(n) + first);
    if (lane() == 2) prefetch_to_l2(p.dt.at(n) + first);
    if (lane() == 3 && p.z.data) prefetch_to_l2(p.z.at(n) + first);
    if (lane() == 4 && slot != kNowhere)
      prefetch_to_l2(p.state + slot * p.slot_stride + std::int64_t{first} * kColumns,
                     channels * kColumns * sizeof(S));
    return slot;
  }

  __device__ void load(Part (&parts)[kHeld], int slot) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (slot != kNowhere && has(held(i)))
        parts[i] = load_raw<Cached::streaming, kCount>(part_of(slot, i));
  }

  __device__ Row fetch(int n, int slot) const {
    Row row;
    row.slot = slot;
    row.target = p.rows.target(n, slot);
    row.B.fetch(p.B.at(n), kColumns);
    row.C.fetch(p.C.at(n), kColumns);
    const int channel = min(own(), p.D - 1);
    row.x = p.x.at(n)[channel];
    row.dt = p.dt.at(n)[channel];
    if (p.z.data) row.z = p.z.at(n)[channel];
    if (kNormed && p.low_packs && lane() * kLowPack < p.low_rank)
      row.low = load_raw<Cached::yes, kLowPack>(p.dt_low.at(n) + lane() * kLowPack);
    return row;
  }

  __device__ Weights weights() const {
    Weights w;
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      Layout::template load<Cached::yes>(
          w.rates[i], p.A + std::int64_t{min(held(i), p.D - 1)} * kColumns, kColumns);
    const int channel = min(own(), p.D - 1);
    w.bias = p.dt_bias ? at(p.dt_bias, channel) : 0.0f;
    w.skip = p.skip ? at(p.skip, channel) : 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int j = 0; j < kCount; ++j) w.rates[i][j] *= kExact ? 1.0f : kLog2OfE;
    if constexpr (kNormed) {
      const MixedView<1>& of_lane = lane() < kColumns ? p.b_weight : p.c_weight;
      norm_weights[lane() / kColumns][lane() % kColumns] =
          of_lane ? at(of_lane, lane() % kColumns) : 1.0f;
      __syncwarp();
    }
    return w;
  }

  /// B or C, RMS-normalised and weighted.
  __device__ void norm(float (&v)[kCount], const float (&weight)[kColumns]) const {
    const float mean = Layout::sum(Layout::dot(v, v)) / kColumns;
    const float factor = rsqrtf(mean + p.eps);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= factor * weight[Layout::column(0) + i];
  }
  /// The reciprocal of the root mean square of row n of dt_low.
  __device__ float dt_factor(int n, const Row& row) const {
    const T* const low = p.dt_low.at(n);
    float sum = 0;
    const auto add = [&](const Pack<T, kLowPack>& pack) {
#pragma unroll
      for (int j = 0; j < kLowPack; ++j)
        sum = fmaf(to_float(pack.value[j]), to_float(pack.value[j]), sum);
    };
    if (p.low_packs) {
      int i = lane() * kLowPack;
      if (i < p.low_rank) add(row.low);
      for (i += 32 * kLowPack; i < p.low_rank; i += 32 * kLowPack)
        add(load_raw<Cached::yes, kLowPack>(low + i));
    } else {
      for (int i = lane(); i < p.low_rank; i += 32)
        sum = fmaf(to_float(low[i]), to_float(low[i]), sum);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return rsqrtf(sum / static_cast<float>(p.low_rank) + p.eps);
  }

  __device__ static float decay(float rate, float step) {
    return kExact ? expf(__fmul_rn(rate, step)) : exp2_fast(rate * step);
  }
  __device__ void write(int n, float y) const {
    if (has(own()) && Layout::template speaks_for_owners<kHeld>())
      p.out.at(n)[own()] = from_float<T>(y);
  }

  /// Advances the row's states, of which before(i) is the lane's part i, and writes its outputs.
  template <class Before>
  __device__ void step(int n, const Row& row, const Weights& w, Before before) const {
    if (row.slot == kNowhere) return write(n, 0.0f);
    float B[kCount], C[kCount], dots[kHeld];
    row.B.values(B);
    row.C.values(C);
    float d = to_float(row.dt);
    if constexpr (kNormed) {
      norm(B, norm_weights[0]);
      norm(C, norm_weights[1]);
      d *= dt_factor(n, row);
    }
    d += w.bias;
    if (p.dt_softplus) d = softplus(d);
    const float x = to_float(row.x);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const float step = Layout::template of_owner<kHeld>(d, i);
      const float input = Layout::template of_owner<kHeld>(x, i);
      const Part old = before(i);
      Part next;
      float s[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        s[j] = fmaf(__fmul_rn(B[j], step), input,
                    __fmul_rn(to_float(old.value[j]), decay(w.rates[i][j], step)));
        next.value[j] = from_float<S>(s[j]);
      }
      dots[i] = Layout::dot(s, C);
      if (row.target != kNowhere && has(held(i)))
        store_raw<Cached::streaming>(part_of(row.target, i), next);
    }
    const float y = fmaf(w.skip, x, Layout::own_sum(dots));
    write(n, p.z.data ? y * silu(to_float(row.z)) : y);
  }
};

template <class T, class S, bool kNormed, int kHeld, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    mamba1_rows_kernel(const __grid_constant__ Mamba1Parameters<T, S> p) {
  using Warp = Mamba1Warp<T, S, kNormed, kHeld>;
  __shared__ typename Warp::NormWeights norm_weights[kWarps];
  const auto in_block = static_cast<int>(threadIdx.x / 32), n = static_cast<int>(blockIdx.y);
  const int index = static_cast<int>(blockIdx.x) * kWarps + in_block;
  const Warp warp{p, norm_weights[in_block], index * Warp::kChannels};
  const bool works = warp.first < p.D;
  const int guess = works ? warp.prefetch(n) : kNowhere;
  wait_for_earlier_launch();
  let_the_next_launch_start();
  if (!works) return;
  typename Warp::Part parts[kHeld];
  warp.load(parts, guess);
  const int slot = p.rows.source(n);
  const typename Warp::Row row = warp.fetch(n, slot);
  const typename Warp::Weights weights = warp.weights();
  if (slot != guess) warp.load(parts, slot);
  warp.step(n, row, weights, [&](int i) { return parts[i]; });
}

/// The states that are on their way to a warp: a lane's parts of its channels, for each of the next
/// rows.
template <class S>
struct Stages {
  static constexpr int kCount = 4;
  Pack<S, kPiece<S>> part[kCount][Channels<S>::kLanes][32];

  /// Starts the copies of the states in `slot`. Every call counts as one, also without a slot.
  template <class Warp>
  __device__ void start(const Warp& warp, int at, int slot) {
#pragma unroll
    for (int i = 0; i < Channels<S>::kLanes; ++i)
      if (slot != kNowhere && warp.has(warp.held(i)))
        __pipeline_memcpy_async(&part[at][i][threadIdx.x], warp.part_of(slot, i), 16);
    __pipeline_commit();
  }
};

template <class T, class S, bool kNormed>
__global__ void __launch_bounds__(32, kWarpsPerProcessor)
    mamba1_groups_kernel(const __grid_constant__ Mamba1Parameters<T, S> p) {
  using Warp = Mamba1Warp<T, S, kNormed, Channels<S>::kLanes>;
  constexpr int kStages = Stages<S>::kCount;
  __shared__ Stages<S> stages;
  __shared__ typename Warp::NormWeights norm_weights;
  const Warp warp{p, norm_weights, static_cast<int>(blockIdx.x) * Warp::kChannels};
  const auto begin = static_cast<int>(blockIdx.y), by = static_cast<int>(gridDim.y);
  warp.prefetch(begin);
  wait_for_earlier_launch();
  let_the_next_launch_start();
  int slots[kStages];  // slots[i] is that of row n + i by
#pragma unroll
  for (int i = 0; i < kStages; ++i) slots[i] = warp.slot_of(begin + i * by);
#pragma unroll
  for (int i = 0; i < kStages; ++i) stages.start(warp, i, slots[i]);
  typename Warp::Row row = warp.fetch(begin, slots[0]);
  const typename Warp::Weights weights = warp.weights();
  for (int n = begin, at = 0; n < p.rows.rows; n += by, at = at + 1 == kStages ? 0 : at + 1) {
    const int coming = warp.slot_of(n + kStages * by);
    typename Warp::Row next;
    if (n + by < p.rows.rows) next = warp.fetch(n + by, slots[1]);
    __pipeline_wait_prior(kStages - 1);
    warp.step(n, row, weights, [&](int i) { return stages.part[at][i][threadIdx.x]; });
    stages.start(warp, at, coming);
    row = next;
#pragma unroll
    for (int i = 1; i + 1 < kStages; ++i) slots[i] = slots[i + 1];
    slots[kStages - 1] = coming;
  }
}

/// Multiprocessors of the device.
int processors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), kName);
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), kName);
  return count;
}

/// Channels of all rows from which on a launch waits for bytes, not for its longest warp.
template <class S>
constexpr std::int64_t kManyChannels = (sizeof(S) == 4 ? 12 : 8) * 8192;

/// Launches the kernel that is fastest for so many channels, as measured on an H200 and an H100:
/// groups of rows pay where A has more bytes than a state.
template <class T, class S, bool kNormed>
void launch_mamba1(const Mamba1Parameters<T, S>& p, cudaStream_t stream) {
  const int rows = p.rows.rows;
  constexpr int kAll = Channels<S>::kLanes;  // channels of which a lane can hold parts
  const auto launch_rows = [&]<int kHeld, int kWarps>() {
    constexpr int kChannels = kWarps * Mamba1Warp<T, S, kNormed, kHeld>::kChannels;
    last_launch = {"rows", kHeld, kWarps};
    launch(
        kName, mamba1_rows_kernel<T, S, kNormed, kHeld, kWarps>,
        dim3(static_cast<unsigned>((p.D + kChannels - 1) / kChannels), static_cast<unsigned>(rows)),
        dim3(32 * kWarps), 0, stream, true, p);
  };
  if (std::int64_t{rows} * p.D < kManyChannels<S>)
    return launch_rows.template operator()<kAll / 2, 4>();
  if constexpr (sizeof(S) == 4) {
    launch_rows.template operator()<kAll, 1>();
  } else {
    constexpr int kChannels = Mamba1Warp<T, S, kNormed, kAll>::kChannels;
    const int parts = (p.D + kChannels - 1) / kChannels;
    const int at_once = std::max(1, processors() * kWarpsPerProcessor / parts);
    const int rows_of_group = (rows + at_once - 1) / at_once;
    const int groups = (rows + rows_of_group - 1) / rows_of_group;
    last_launch = {"groups", kAll, 1};
    launch(kName, mamba1_groups_kernel<T, S, kNormed>,
           dim3(static_cast<unsigned>(parts), static_cast<unsigned>(groups)), dim3(32), 0, stream,
           true, p);
  }
}

template <class T, class S>
void check(const Checks& checks, const Mamba1Decode<T, S>& in) {
  const Shape<2> tokens = shape_of(in.x);
  const std::int64_t rows = tokens[0], D = tokens[1];
  checks.expect(1 <= D && D <= 1 << 20, "x", "[T, D] with D from 1 to 1048576", text_of(tokens));
  checks.shape(in.dt, "dt", "[T, D]", tokens);
  checks.shape(in.A, "A", "[D, 16]", {D, kColumns});
  checks.shape(in.B, "B", "[T, 16]", {rows, kColumns});
  checks.shape(in.C, "C", "[T, 16]", {rows, kColumns});
  checks.shape(in.state, "state", "[slots, D, 16]", {in.state.extent(0), D, kColumns});
  checks.shape(in.out, "out", "[T, D]", tokens);
  if (in.skip) checks.shape(in.skip, "skip", "[D]", {D});
  if (in.z) checks.shape(*in.z, "z", "[T, D]", tokens);
  if (in.dt_bias) checks.shape(in.dt_bias, "dt_bias", "[D]", {D});
  if (in.b_weight) checks.shape(in.b_weight, "b_weight", "[16]", {kColumns});
  if (in.c_weight) checks.shape(in.c_weight, "c_weight", "[16]", {kColumns});
  checks.expect(in.norm_eps.has_value() == in.dt_low.has_value(), "norm_eps and dt_low",
                "both given, or neither", "one of them");
  checks.expect(in.norm_eps || !(in.b_weight || in.c_weight), "b_weight and c_weight",
                "absent without norm_eps", "given");
  if (in.dt_low) {
    checks.expect(in.dt_low->extent(0) == rows && in.dt_low->extent(1) >= 1, "dt_low",
                  "[T, R] with T = " + std::to_string(rows), text_of(shape_of(*in.dt_low)));
    checks.contiguous_rows(*in.dt_low, "dt_low");
  }
  checks.contiguous_rows(in.x, "x");
  checks.contiguous_rows(in.dt, "dt");
  checks.contiguous_rows(in.out, "out");
  if (in.z) checks.contiguous_rows(*in.z, "z");
  checks.expect(rows_aligned(in.A, 16) && (D == 1 || in.A.stride(0) == kColumns), "A",
                "without gaps, at a multiple of 16 bytes", "other strides");
  checks.expect(rows_aligned(in.B, 16) && rows_aligned(in.C, 16), "B and C",
                "of contiguous rows at multiples of 16 bytes", "other strides");
  checks.expect(rows_aligned(in.state, 16) && (D == 1 || in.state.stride(1) == kColumns), "state",
                "of channels without gaps at multiples of 16 bytes", "other strides");
  checks.expect(!in.slots.table && !in.slots.num_accepted, "state_indices", "[T], one slot per row",
                "a table");
}

}  // namespace

template <class T, class S>
void mamba1_decode(const Mamba1Decode<T, S>& in, cudaStream_t stream) {
  const Checks checks(kName);
  check(checks, in);
  Mamba1Parameters<T, S> p;
  p.rows = row_slots(checks, in.slots, {}, in.x.extent(0), in.state.extent(0));
  check_row_count(checks, p.rows);
  if (p.rows.rows == 0) return;
  p.state = in.state.data_handle();
  p.slot_stride = in.state.stride(0);
  p.A = in.A.data_handle();
  p.x = TokenRows<const T>(in.x);
  p.dt = TokenRows<const T>(in.dt);
  if (in.z) p.z = TokenRows<const T>(*in.z);
  p.B = TokenRows<const T>(in.B);
  p.C = TokenRows<const T>(in.C);
  p.out = TokenRows<T>(in.out);
  p.skip = in.skip;
  p.dt_bias = in.dt_bias;
  p.b_weight = in.b_weight;
  p.c_weight = in.c_weight;
  p.D = static_cast<int>(in.x.extent(1));
  p.dt_softplus = in.dt_softplus;
  if (in.norm_eps) {
    p.eps = *in.norm_eps;
    p.dt_low = TokenRows<const T>(*in.dt_low);
    p.low_rank = static_cast<int>(in.dt_low->extent(1));
    p.low_packs = rows_aligned(*in.dt_low, 16) && p.low_rank * sizeof(T) % 16 == 0;
    return launch_mamba1<T, S, true>(p, stream);
  }
  launch_mamba1<T, S, false>(p, stream);
}

#define LOCKSTEP_INSTANTIATE(T, S) \
  template void mamba1_decode(const Mamba1Decode<T, S>&, cudaStream_t);
LOCKSTEP_SERVING_TYPES(LOCKSTEP_INSTANTIATE)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_OTHER_TYPES(LOCKSTEP_INSTANTIATE)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
