// A Mamba2 layer's decode step in one launch. Equations:
// reference/recurrent/mamba2_mixer_decode.hpp.
//
//   grid   (parts, G, T) in clusters of (parts, 1, 1); T: rows of the batch
//   block  kWarps warps; it has 1 / parts of the channels of one group of heads, which are rows of
//          states [P, N] one after another. They pass through the warps' registers tile by tile,
//          kRows x Layout::kRowsPerWarp at a time. A warp asks for some tiles ahead, by bulk copies
//          into shared memory of its own
//
// The blocks of a cluster have one row of the batch and one group. Each
//   1. asks for its first tiles of states;
//   2. convolves the group's B and C (all blocks the same) and its own x, rounded to bfloat16 in
//      shared memory, as a launch of its own would store them;
//   3. updates its states, with the operations of selective_state_update.cu in the same order, and
//      leaves y, rounded to bfloat16, where its gated value will be;
//   4. gates y by z and norms it. The norm is over all channels of the group, so each block writes
//      its gated channels into the shared memory of every block of the cluster, and all blocks sum
//      the squares in the order of gated_rms_norm.
//
// A cluster, and not a block for each row and group, since a batch of one row has 8 groups for 132
// multiprocessors; from some tens of groups on a cluster is one block and has no barrier of its
// own.
//
// Nobody overwrites a window that another block still reads. The channels of x are read and written
// by one thread. Those of B and C are read by all blocks of one cluster and by no other cluster.
// Each of the blocks' threads arrives at the cluster's first barrier when it has computed with what
// it read (a true dependency, and the arrival is a release), and these windows are written after
// the wait of that barrier (an acquire). The shifted columns come from the block's own shared
// memory. The same wait shows that every block of the cluster has begun, so that its shared memory
// can be written; the second barrier orders these writes before the norm reads them. A block leaves
// after the second wait, when nobody writes into it any more. In a cluster of one block the windows
// of B and C too are read and written by one thread each. States are read and written by one warp.
#include "kernels/models/mamba2_mixer_decode.hpp"

#include <cuda_pipeline_primitives.h>

#include "kernels/base/hopper.cuh"
#include "kernels/base/plain.cuh"
#include "kernels/models/verification.cuh"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "mamba2_mixer_decode";
constexpr int kWindow = kHistory;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlocksOfProcessor = 16 / kWarps;  ///< bounds the registers
constexpr int kNormThreads = 128;                ///< of gated_rms_norm
constexpr int kAtOnce = 2;          ///< pieces that a thread loads before it convolves the first
constexpr int kStaticBytes = 64;    ///< of shared memory that the kernel declares, at most
constexpr int kStagesMax = 4;       ///< tiles of states that a warp asks for ahead, at most
constexpr int kChannelsMax = 2048;  ///< of a group
constexpr int kRows = 2;            ///< of a tile, in one lane

/// kVec neighbouring numbers of bfloat16, in whole registers: the compiler keeps halves that are
/// loaded under a condition in local memory.
struct Quad {
  uint2 bits;

  __device__ static Quad of(const float (&x)[kVec]) {
    return {{hopper::pack<Bf16>(x[0], x[1]), hopper::pack<Bf16>(x[2], x[3])}};
  }
  __device__ float operator[](int i) const {
    const unsigned pair = i < 2 ? bits.x : bits.y;
    return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
  }
};
template <Cached kCached>
__device__ inline Quad load_channels(const Bf16* first) {
  const auto* const from = reinterpret_cast<const uint2*>(first);
  return {kCached == Cached::streaming ? __ldcs(from) : *from};
}
template <Cached kCached>
__device__ inline void store_channels(Bf16* first, const Quad& x) {
  auto* const to = reinterpret_cast<uint2*>(first);
  if constexpr (kCached == Cached::streaming)
    __stcs(to, x.bits);
  else
    *to = x.bits;
}
/// The same for numbers that lie `stride` apart, bit by bit.
__device__ inline Quad load_apart(const Bf16* first, std::int64_t stride) {
  const auto pair = [&](int i) {
    return __bfloat16_as_ushort(first[i * stride]) |
           static_cast<unsigned>(__bfloat16_as_ushort(first[(i + 1) * stride])) << 16;
  };
  return {{pair(0), pair(2)}};
}
__device__ inline void store_apart(Bf16* first, std::int64_t stride, const Quad& x) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const unsigned pair = i < 2 ? x.bits.x : x.bits.y;
    first[i * stride] =
        __ushort_as_bfloat16(static_cast<unsigned short>(i % 2 == 0 ? pair : pair >> 16));
  }
}

/// Numbers [n] of bfloat16 or float32; `packed` where kVec of them at a multiple of kVec can be
/// read at once.
struct Weights {
  MixedView<1> view;
  bool packed = false;

  Weights() = default;
  explicit Weights(const MixedView<1>& numbers)
      : view(numbers),
        packed(numbers && numbers.format == Format::bf16 && numbers.strides[0] == 1 &&
               reinterpret_cast<std::uintptr_t>(numbers.data) % sizeof(Quad) == 0) {}
  __device__ Quad load_packed(int first) const {
    return load_channels<Cached::yes>(static_cast<const Bf16*>(view.data) + first);
  }
  __device__ void load(float (&x)[kVec], int first) const {
    if (packed) return load_pack<Cached::yes>(x, static_cast<const Bf16*>(view.data) + first);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = view ? at(view, first + i) : 0.0f;
  }
};

template <class S>
struct MixerParameters {
  RowSlots rows;
  S* state;
  std::int64_t slot_stride;  ///< of states
  TensorView<const Bf16, 2> x;
  TensorView<Bf16, 3> conv_state;
  MixedView<2> conv_weight, dt;
  Weights conv_bias, norm_weight;
  MixedView<1> A, D, dt_bias;
  const Bf16* z;
  Bf16* out;
  std::int64_t z_stride, out_stride;  ///< of tokens
  float eps;
  int stages;          ///< tiles of states that a warp asks for ahead
  int groups, heads;   ///< heads of a group
  int channels;        ///< of a group
  int inner, vectors;  ///< H P and G N: B begins at the first, C at their sum
  Divisor by_p;
  /// x and windows have kVec neighbouring channels at multiples of 8 bytes; the convolution's
  /// weights are bfloat16 without gaps at multiples of 16 bytes, and its bias is packed or absent.
  bool wide;
  bool wide_rows;  ///< z and out have kVec neighbouring channels at multiples of 8 bytes
};

/// Shared memory of a block, in this order and each at a multiple of 16 bytes: each warp's stages
/// of states; gated channels of the group, float32; three numbers of each head; the convolved B and
/// C, [2, N]; the block's convolved x, and z; with several blocks, the new windows of B and C,
/// [3, 2 N]; and the warps' barriers. kVectors: 2 N, channels of a group's B and C.
template <int kVectors>
struct MixerMemory {
  char* stages;
  float *gated, *steps, *decays, *skips;
  Bf16 *vectors, *x, *gates, *windows;
  std::uint64_t* barriers;

  __device__ MixerMemory(char* memory, int stages_bytes, int channels, int heads, int own_channels)
      : stages(memory),
        gated(reinterpret_cast<float*>(memory + stages_bytes)),
        steps(gated + channels),
        decays(steps + rounded_up(heads)),
        skips(decays + rounded_up(heads)),
        vectors(reinterpret_cast<Bf16*>(skips + rounded_up(heads))),
        x(vectors + kVectors),
        gates(x + own_channels),
        windows(gates + own_channels),
        barriers(
            reinterpret_cast<std::uint64_t*>(windows + (gridDim.x > 1 ? kWindow * kVectors : 0))) {}
  __host__ __device__ static constexpr int rounded_up(int heads) { return (heads + 3) / 4 * 4; }
  static int bytes(int stages, int tile_bytes, int channels, int heads, int parts) {
    const int numbers = channels + 3 * rounded_up(heads);
    const int halves = kVectors + 2 * channels / parts + (parts > 1 ? kWindow * kVectors : 0);
    return kWarps * (stages * tile_bytes + 8 * kStagesMax) + 4 * numbers + 2 * halves;
  }
};

/// Writes four numbers to the place `place` of this block's shared memory in block `rank` of the
/// cluster.
__device__ inline void store_in_block(const float* place, const float (&v)[kVec], int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(place))),
      "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
#endif
}

/// Convolves channels for the step of one row. kWide: x, windows, weights and bias are read kVec
/// channels at a time.
template <class S, bool kWide>
struct MixerConvolution {
  const MixerParameters<S>& p;
  int n, slot;

  /// Inputs of kVec neighbouring channels, with their loads under way; the weights are there where
  /// kWide.
  struct Raw {
    Quad x, old[kWindow], bias;
    Quad weight[kVec];  ///< of a channel each: it has as many taps
  };
  static_assert(kTaps == kVec);

  __device__ static Quad load(const Bf16* first, std::int64_t stride) {
    if constexpr (kWide)
      return load_channels<Cached::streaming>(first);
    else
      return load_apart(first, stride);
  }
  __device__ Bf16* window(int d, int column) const {
    return p.conv_state.data_handle() + slot * p.conv_state.stride(0) + d * p.conv_state.stride(1) +
           column * p.conv_state.stride(2);
  }
  __device__ void store_window(int d, int column, const Quad& pack) const {
    Bf16* const first = window(d, column);
    if constexpr (kWide)
      store_channels<Cached::streaming>(first, pack);
    else
      store_apart(first, p.conv_state.stride(1), pack);
  }

  __device__ Raw fetch(int d) const {
    Raw raw;
    raw.x = load(p.x.data_handle() + n * p.x.stride(0) + d, 1);
#pragma unroll
    for (int c = 0; c < kWindow; ++c) raw.old[c] = load(window(d, c), p.conv_state.stride(1));
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const auto two = *reinterpret_cast<const uint4*>(
            static_cast<const Bf16*>(p.conv_weight.data) + (d + i) * kTaps);
        raw.weight[i].bits = {two.x, two.y};
        raw.weight[i + 1].bits = {two.z, two.w};
      }
      if (p.conv_bias.view) raw.bias = p.conv_bias.load_packed(d);
    }
    return raw;
  }
  __device__ float bias(int d, int i, const Raw& raw) const {
    if (!p.conv_bias.view) return 0.0f;
    return kWide ? raw.bias[i] : at(p.conv_bias.view, d + i);
  }
  __device__ float weight(int d, int i, int k, const Raw& raw) const {
    return kWide ? raw.weight[i][k] : at(p.conv_weight, d + i, k);
  }
  __device__ Quad run(int d, const Raw& raw) const {
    float y[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      float sum = bias(d, i, raw);
#pragma unroll
      for (int k = 0; k < kTaps; ++k)
        sum = fmaf(weight(d, i, k, raw), k < kWindow ? raw.old[k][i] : raw.x[i], sum);
      y[i] = LayerConvolution::activated(sum);
    }
    return Quad::of(y);
  }
  /// Column c of the new window, oldest to newest.
  __device__ static const Quad& column(const Raw& raw, int c) {
    return c + 1 < kWindow ? raw.old[c + 1] : raw.x;
  }
};

/// One block's work. kColumns: N. A row's lanes are those of launch_rows() in
/// selective_state_update.cu.
template <class S, int kColumns>
struct MixerBlock {
  static constexpr int kVectors = 2 * kColumns;          ///< channels of a group's B and C
  static constexpr int kVectorPieces = kVectors / kVec;  ///< of kVec channels
  static constexpr int kPack = 16 / static_cast<int>(sizeof(S));
  static constexpr int kLanes = std::max(kColumns / 16, sizeof(S) == 4 ? 8 : 4);
  using Layout = RowLayout<kLanes, kPack, kColumns / (kLanes * kPack), false>;
  using Memory = MixerMemory<kVectors>;
  template <bool kWide>
  using Convolution = MixerConvolution<S, kWide>;
  static constexpr int kTileRows = kRows * Layout::kRowsPerWarp;
  static constexpr int kTileBytes = kTileRows * kColumns * static_cast<int>(sizeof(S));

  const MixerParameters<S>& p;
  Memory shared;
  int n, group, part, parts;
  int own_channels;  ///< of this block

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  /// The block's first channel, in the group and among all.
  __device__ int first() const { return part * own_channels; }
  __device__ int first_of_all() const { return group * p.channels + first(); }
  __device__ S* states_of(int slot) const {
    return p.state + slot * p.slot_stride + std::int64_t{first_of_all()} * kColumns;
  }
  __device__ int pieces() const { return kVectorPieces + own_channels / kVec; }
  /// The first channel of piece i: those of B and C, then those of x.
  __device__ int channel(int i) const {
    if (i >= kVectorPieces) return first_of_all() + (i - kVectorPieces) * kVec;
    constexpr int kOfOne = kVectorPieces / 2;
    return p.inner + i / kOfOne * p.vectors + group * kColumns + i % kOfOne * kVec;
  }
  /// Calls visit(i, k) for the pieces k of the block's channels that are the thread's, its i-th.
  template <class Visit>
  __device__ void each_piece(Visit visit) const {
    for (int i = 0, k = thread(); k < own_channels / kVec; ++i, k += kThreads) visit(i, k);
  }

  /// Asks L2 for what the row reads. It runs before wait_for_earlier_launch(), so the slot may
  /// still change: a wrong guess costs a useless prefetch.
  __device__ void prefetch() const {
    if (p.rows.rows > kFewRows) return;
    const int slot = p.rows.likely_source(n);
    if (slot == kNowhere) return;
    if (thread() == 0)
      prefetch_to_l2(states_of(slot), static_cast<unsigned>(own_channels * kColumns * sizeof(S)));
    const Convolution<true> convolution{p, n, slot};
    for (int i = thread(); i < pieces(); i += kThreads) {
      const int d = channel(i);
      prefetch_to_l2(p.x.data_handle() + n * p.x.stride(0) + d);
#pragma unroll
      for (int c = 0; c < kWindow; ++c) prefetch_to_l2(convolution.window(d, c));
      prefetch_to_l2(address_of(p.conv_weight, d, 0));
      if (p.conv_bias.view) prefetch_to_l2(address_of(p.conv_bias.view, d));
    }
    each_piece([&](int, int k) {
      const int d = first_of_all() + k * kVec;
      prefetch_to_l2(p.z + n * p.z_stride + d);
      prefetch_to_l2(address_of(p.norm_weight.view, d));
    });
    for (int i = thread(); i < p.heads; i += kThreads) {
      const int h = group * p.heads + i;
      prefetch_to_l2(address_of(p.dt, n, h));
      for (const MixedView<1>* const view : {&p.A, &p.D, &p.dt_bias})
        prefetch_to_l2(address_of(*view, h));
    }
  }

  // --- Convolution and heads ---

  /// The numbers of a head as they come from memory.
  struct Head {
    float dt = 0, bias = 0, rate = 0, skip = 0;
  };
  __device__ Head fetch_head(int i) const {
    const int h = group * p.heads + i;
    return {at(p.dt, n, h), at(p.dt_bias, h), at(p.A, h), at(p.D, h)};
  }
  __device__ void finish_head(int i, const Head& head) const {
    const float step = softplus(head.dt + head.bias);
    shared.steps[i] = step;
    shared.decays[i] = expf(__fmul_rn(head.rate, step));
    shared.skips[i] = head.skip;
  }

  /// Convolves the block's channels and prepares the group's heads. Loads come before stores, so
  /// that they wait for memory together.
  template <bool kWide>
  __device__ void prepare(int slot) const {
    constexpr int kPieces = kWide ? kAtOnce : 1;
    const Convolution<kWide> convolution{p, n, slot};
    Head head;
    if (thread() < p.heads) head = fetch_head(thread());
    for (int begin = thread(); begin < pieces(); begin += kPieces * kThreads) {
      typename Convolution<kWide>::Raw raw[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (begin + i * kThreads < pieces())
          raw[i] = convolution.fetch(channel(begin + i * kThreads));
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (begin + i * kThreads < pieces())
          finish_piece(convolution, begin + i * kThreads, raw[i]);
    }
    if (thread() < p.heads) finish_head(thread(), head);
  }
  /// Convolves piece i into shared memory, and writes its new window where nobody else reads it.
  template <bool kWide>
  __device__ void finish_piece(const Convolution<kWide>& convolution, int i,
                               const typename Convolution<kWide>::Raw& raw) const {
    const int d = channel(i);
    const bool is_vector = i < kVectorPieces;
    Bf16* const to = is_vector ? shared.vectors + i * kVec : shared.x + (i - kVectorPieces) * kVec;
    store_channels<Cached::yes>(to, convolution.run(d, raw));
#pragma unroll
    for (int c = 0; c < kWindow; ++c) {
      if (is_vector && parts > 1)
        store_channels<Cached::yes>(shared.windows + c * kVectors + i * kVec,
                                    convolution.column(raw, c));
      else
        convolution.store_window(d, c, convolution.column(raw, c));
    }
  }
  /// Writes this block's share of the windows of B and C.
  template <bool kWide>
  __device__ void write_vector_windows(int slot) const {
    const Convolution<kWide> convolution{p, n, slot};
    const int share = kVectorPieces / parts;
    for (int j = thread(); j < kWindow * share; j += kThreads) {
      const int c = j / share, i = part * share + j % share;
      convolution.store_window(
          channel(i), c, load_channels<Cached::yes>(shared.windows + c * kVectors + i * kVec));
    }
  }

  // --- States ---

  __device__ char* stage(int i) const {
    return shared.stages + (warp() * p.stages + i) * kTileBytes;
  }
  __device__ std::uint32_t barrier(int i) const {
    return hopper::shared_address(shared.barriers + warp() * kStagesMax + i);
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
    // As many as there may be, so that none is made under a condition.
    for (int i = 0; i < kStagesMax; ++i) hopper::barrier_init(barrier(i), 1);
    hopper::publish_barriers();
    for (int i = 0; i < p.stages; ++i) ask_for_tile(states, i * kWarps + warp(), i);
  }

  /// Updates the warp's states tile by tile, and leaves y where its gated value will be.
  __device__ void update_states(S* states) const {
    typename Layout::template Raw<Bf16> raw;
    float C[Layout::kCount], b_dt[Layout::kCount];
    raw.fetch(shared.vectors + kColumns, kColumns);
    raw.values(C);
    raw.fetch(shared.vectors, kColumns);
    int head = -1;
    float decay = 0, skip = 0;
    int at_stage = 0, parity = 0;
    for (int i = warp(); i < own_channels / kTileRows; i += kWarps) {
      if (const int of_tile = p.by_p.of(first() + i * kTileRows); of_tile != head) {
        head = of_tile;
        decay = shared.decays[head];
        skip = shared.skips[head];
        raw.values(b_dt);
        const float step = shared.steps[head];
#pragma unroll
        for (int j = 0; j < Layout::kCount; ++j) b_dt[j] = __fmul_rn(b_dt[j], step);
      }
      const int row = i * kTileRows + Layout::row_in_warp();
      const int own = row + Layout::template own<kRows>() * Layout::kRowsPerWarp;
      hopper::barrier_wait(barrier(at_stage), static_cast<std::uint32_t>(parity));
      const S* const tile = reinterpret_cast<const S*>(stage(at_stage));
      float s[kRows][Layout::kCount], dots[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        Layout::template load<Cached::yes>(
            s[r], tile + (Layout::row_in_warp() + r * Layout::kRowsPerWarp) * kColumns, kColumns);
      __syncwarp();  // every lane has its part of the tile
      if (lane() == 0) ask_for_tile(states, i + p.stages * kWarps, at_stage);
      const float own_x = to_float(shared.x[own]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float x = to_float(shared.x[row + r * Layout::kRowsPerWarp]);
#pragma unroll
        for (int j = 0; j < Layout::kCount; ++j)
          s[r][j] = fmaf(b_dt[j], x, __fmul_rn(s[r][j], decay));
        dots[r] = Layout::dot(s[r], C);
        Layout::template store<Cached::streaming>(
            states + (row + r * Layout::kRowsPerWarp) * kColumns, s[r], kColumns);
      }
      const float y = Layout::own_sum(dots) + __fmul_rn(skip, own_x);
      if (Layout::template speaks_for_owners<kRows>())
        shared.gated[first() + own] = rounded_to<Bf16>(y);
      if (++at_stage == p.stages) at_stage = 0, parity ^= 1;
    }
  }

  // --- Gate and norm ---

  /// Starts copies of z into shared memory.
  __device__ void start_gates() const {
    each_piece([&](int, int k) {
      const Bf16* const from = p.z + n * p.z_stride + first_of_all() + k * kVec;
      Bf16* const to = shared.gates + k * kVec;
      if (p.wide_rows)
        __pipeline_memcpy_async(to, from, sizeof(Quad));
      else
        for (int i = 0; i < kVec; ++i) to[i] = from[i];
    });
    __pipeline_commit();
  }
  __device__ void write(int k, const float (&y)[kVec]) const {
    Bf16* const first = p.out + n * p.out_stride + first_of_all() + k * kVec;
    if (p.wide_rows) return store_pack<Cached::yes>(first, y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) first[i] = from_float<Bf16>(y[i]);
  }
  /// Gives the block's gated channels to all blocks of the cluster. A thread reads the z that it
  /// has copied.
  __device__ void gate() const {
    __pipeline_wait_prior(0);
    each_piece([&](int, int k) {
      const Quad z = load_channels<Cached::yes>(shared.gates + k * kVec);
      float* const place = shared.gated + first() + k * kVec;
      float y[kVec];
      load_pack<Cached::yes>(y, place);
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] = y[j] * silu(z[j]);
      for (int rank = 0; rank < parts; ++rank)
        if (rank != part) store_in_block(place, y, rank);
      store_pack<Cached::yes>(place, y);
    });
  }
  /// The root of the mean square of the group's gated channels, with the order of additions of
  /// gated_rms_norm: over kNormThreads threads.
  __device__ float root_mean_square() const {
    constexpr int kSums = kNormThreads / 32;
    __shared__ float sums[kSums];
    if (warp() < kSums) {
      float squares = 0;
      for (int d = thread(); d < p.channels; d += kNormThreads)
        squares = fmaf(shared.gated[d], shared.gated[d], squares);
      squares = over_warp(squares, Plus{});
      if (lane() == 0) sums[warp()] = squares;
    }
    __syncthreads();
    float all = sums[0];
#pragma unroll
    for (int i = 1; i < kSums; ++i) all += sums[i];
    return sqrtf(all / static_cast<float>(p.channels) + p.eps);
  }

  __device__ void run() const {
    const int slot = p.rows.source(n);
    if (slot == kNowhere) {  // the same in all blocks of the cluster
      const float zeros[kVec]{};
      return each_piece([&](int, int k) { write(k, zeros); });
    }
    S* const states = states_of(slot);
    if (lane() == 0) ask_for_first_tiles(states);
    start_gates();
    if (p.wide)
      prepare<true>(slot);
    else
      prepare<false>(slot);
    if (parts > 1) arrive_at_cluster();
    __syncthreads();  // x, B, C, the heads' numbers and the barriers are there for all
    update_states(states);
    __syncthreads();  // y is in shared memory
    if (parts > 1) wait_for_cluster();
    gate();
    float weight[kVec];  // of the thread's first piece, which is the only one in most blocks
    if (thread() < own_channels / kVec)
      p.norm_weight.load(weight, first_of_all() + thread() * kVec);
    if (parts > 1) {
      arrive_at_cluster();
      if (p.wide)
        write_vector_windows<true>(slot);
      else
        write_vector_windows<false>(slot);
      wait_for_cluster();
    } else {
      __syncthreads();
    }
    const float root = root_mean_square();
    each_piece([&](int i, int k) {
      float y[kVec];
      if (i > 0) p.norm_weight.load(weight, first_of_all() + k * kVec);
      load_pack<Cached::yes>(y, shared.gated + first() + k * kVec);
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] = y[j] / root * weight[j];
      write(k, y);
    });
  }
};

template <class S, int kColumns>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    mixer_kernel(const __grid_constant__ MixerParameters<S> p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char memory[];
  using Block = MixerBlock<S, kColumns>;
  const auto parts = static_cast<int>(gridDim.x);
  const int own_channels = p.channels / parts;
  const Block block{.p = p,
                    .shared = typename Block::Memory(memory, kWarps * p.stages * Block::kTileBytes,
                                                     p.channels, p.heads, own_channels),
                    .n = static_cast<int>(blockIdx.z),
                    .group = static_cast<int>(blockIdx.y),
                    .part = static_cast<int>(blockIdx.x),
                    .parts = parts,
                    .own_channels = own_channels};
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

/// As measured on an H200 with groups of 16 heads of 64 channels. Few groups want many blocks, many
/// want few copies of the work on B and C. Where there are fewer blocks than multiprocessors, each
/// has one of its own; large clusters find too little room then.
Division chosen_division(std::int64_t items, int processors) {
  if (items <= 4) return {16, 2};
  if (items <= 8) return {8, 2};
  if (items <= 16) return {4, 2};
  if (items <= 24) return {4, 1};
  if (2 * items <= processors) return {2, 1};
  return {1, items <= processors ? 1 : kBlocksOfProcessor};
}

template <class S, int kColumns>
void launch_mixer(MixerParameters<S>& p, int asked_parts, cudaStream_t stream) {
  using Block = MixerBlock<S, kColumns>;
  const int processors = attribute_of_device(kName, cudaDevAttrMultiProcessorCount);
  Division division = chosen_division(std::int64_t{p.rows.rows} * p.groups, processors);
  if (asked_parts > 0) division.parts = asked_parts;
  while (p.channels % (division.parts * Block::kTileRows) != 0) division.parts /= 2;
  const int parts = division.parts, tiles = p.channels / parts / Block::kTileRows;
  // A block takes a KiB more than it asks for. What it takes beyond its needs keeps others away.
  const int memory = attribute_of_device(kName, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int most = memory / kBlocksOfProcessor - 1024;
  const int least = division.blocks < kBlocksOfProcessor ? memory / (division.blocks + 1) : 0;
  const auto bytes_with = [&](int stages) {
    return Block::Memory::bytes(stages, Block::kTileBytes, p.channels, p.heads, parts);
  };
  p.stages = std::min(kStagesMax, (tiles + kWarps - 1) / kWarps);
  while (p.stages > 1 && bytes_with(p.stages) + kStaticBytes > most) --p.stages;
  last_launch = {name_of_parts(parts), kRows, kWarps};
  launch_in_clusters(kName, mixer_kernel<S, kColumns>, p,
                     dim3(static_cast<unsigned>(parts), static_cast<unsigned>(p.groups),
                          static_cast<unsigned>(p.rows.rows)),
                     dim3(kThreads), std::max(bytes_with(p.stages), least), stream);
}

/// Calls body(N) for a state of rows that a kernel takes.
template <class Body>
void with_columns(std::int64_t N, Body body) {
  if (N == 64) return body(std::integral_constant<int, 64>());
  if (N == 128) return body(std::integral_constant<int, 128>());
  return body(std::integral_constant<int, 256>());
}

/// Checks the shapes; returns the number of groups.
template <class S>
std::int64_t check(const Checks& checks, const Mamba2MixerDecode<S>& in) {
  const Shape<4> states = shape_of(in.state);
  const auto [slots, H, P, N] = states;
  const std::int64_t T = in.x.extent(0), channels = in.x.extent(1), rest = channels - H * P;
  checks.expect((N == 64 || N == 128 || N == 256) && P % 16 == 0 && 16 <= P && P <= 128 && H > 0,
                "state", "[slots, H, P, N] with N of 64, 128 or 256, P a multiple of 16 up to 128",
                text_of(states));
  const std::int64_t G = rest / (2 * N);
  checks.expect(G > 0 && rest == 2 * N * G && H % G == 0, "x",
                "[T, H P + 2 G N] with H a multiple of G",
                text_of(shape_of(in.x)) + " for a state " + text_of(states));
  checks.expect(H / G * P <= kChannelsMax && H * P <= 65536, "state",
                "of at most 2048 channels for a group and 65536 for all", text_of(states));
  checks.contiguous_rows(in.x, "x");
  checks.shape(in.z, "z", "[T, H, P]", {T, H, P});
  checks.shape(in.dt, "dt", "[T, H]", {T, H});
  checks.shape(in.conv_state, "conv_state", "[slots, H P + 2 G N, 3]", {slots, channels, kWindow});
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
  checks.expect(!in.slots.table && !in.slots.out_indices && !in.slots.num_accepted, "state_indices",
                "[T], without other slots to write to", "more");
  return G;
}

template <class S>
MixerParameters<S> parameters_of(const Mamba2MixerDecode<S>& in, std::int64_t G) {
  const std::int64_t H = in.state.extent(1), P = in.state.extent(2);
  MixerParameters<S> p{};
  p.state = in.state.data_handle();
  p.slot_stride = in.state.stride(0);
  p.x = in.x;
  p.conv_state = in.conv_state;
  p.conv_weight = in.conv_weight;
  p.dt = in.dt;
  p.conv_bias = Weights(in.conv_bias);
  p.norm_weight = Weights(in.norm_weight);
  p.A = in.A;
  p.D = in.D;
  p.dt_bias = in.dt_bias;
  p.z = in.z.data_handle();
  p.out = in.out.data_handle();
  p.z_stride = in.z.stride(0);
  p.out_stride = in.out.stride(0);
  p.eps = in.eps;
  p.groups = static_cast<int>(G);
  p.heads = static_cast<int>(H / G);
  p.channels = static_cast<int>(H / G * P);
  p.inner = static_cast<int>(H * P);
  p.vectors = static_cast<int>(G * in.state.extent(3));
  p.by_p = Divisor(P);
  constexpr std::size_t kPiece = sizeof(Quad);
  const bool wide_weights = in.conv_weight.format == Format::bf16 &&
                            in.conv_weight.strides[1] == 1 && in.conv_weight.strides[0] == kTaps &&
                            reinterpret_cast<std::uintptr_t>(in.conv_weight.data) % 16 == 0;
  p.wide = rows_aligned(in.x, kPiece) && in.conv_state.stride(1) == 1 &&
           rows_aligned(transposed(in.conv_state), kPiece) && wide_weights &&
           (!in.conv_bias || p.conv_bias.packed);
  p.wide_rows = rows_aligned(in.z, kPiece) && rows_aligned(in.out, kPiece);
  return p;
}

}  // namespace

template <class S>
void mamba2_mixer_decode(const Mamba2MixerDecode<S>& in, cudaStream_t stream) {
  const Checks checks(kName);
  const std::int64_t G = check(checks, in), T = in.x.extent(0);
  MixerParameters<S> p = parameters_of(in, G);
  const bool known =
      0 <= in.parts && in.parts <= 16 && std::has_single_bit(static_cast<unsigned>(in.parts));
  checks.expect(in.parts == 0 || known, "parts", "0, 1, 2, 4, 8 or 16", std::to_string(in.parts));
  p.rows = row_slots(checks, in.slots, {}, T, in.state.extent(0));
  check_row_count(checks, p.rows);
  with_columns(in.state.extent(3), [&](auto columns) {
    constexpr int kTileRows = MixerBlock<S, columns()>::kTileRows;
    checks.expect(in.parts == 0 || p.channels % (in.parts * kTileRows) == 0, "parts",
                  "a divisor of the " + std::to_string(p.channels / kTileRows) + " x " +
                      std::to_string(kTileRows) + " channels of a group",
                  std::to_string(in.parts));
    if (T == 0) return;
    expect_clusters(checks, kName);
    launch_mixer<S, columns()>(p, in.parts, stream);
  });
}

template void mamba2_mixer_decode(const Mamba2MixerDecode<float>&, cudaStream_t);
template void mamba2_mixer_decode(const Mamba2MixerDecode<Bf16>&, cudaStream_t);

}  // namespace lockstep::kernels
