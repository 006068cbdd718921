// The selective scan of a Mamba1 layer over prompts. Equations:
// reference/recurrent/mamba1_prefill.hpp.
//
// Every channel of every token takes 16 exponentials, and about 30 instructions of a warp for 8
// channels: these bound the time, not the bytes. So each is computed once: rows run token by token,
// channels side by side, while a scan by parts of a row would compute the exponentials of its first
// pass again.
//
//   grid   parts of 32 channels, fastest; rows
//   block  4 warps that scan and 4 that help. 4 lanes of a scanning warp share a channel, 4 numbers
//          of its state each.
//
// A row runs through tiles of kTile tokens, side by side: while tile k is scanned, the helpers copy
// the inputs of tile k + 2 into shared memory (`Inputs`), compute the time steps d and the inputs
// d x of tile k + 1 (`Steps`), and gate and write the outputs of tile k - 1. After 4 tokens,
// exchanges between the 4 lanes of a channel leave each with the output of one token, which takes
// the place of d.
//
// Launches do not overlap: a block that comes while others still run takes the first room there is,
// and the blocks of one row would not be spread evenly over the multiprocessors.
#include "kernels/models/mamba1_prefill.hpp"

#include <cuda_pipeline_primitives.h>

#include "kernels/base/fast_math.cuh"
#include "kernels/recurrent/prefill_rows.cuh"
#include "kernels/recurrent/shapes.hpp"
#include "kernels/recurrent/state_rows.cuh"

namespace lockstep::kernels {
namespace {

constexpr const char* kName = "mamba1_prefill";
constexpr int kColumns = kMamba1Columns;
constexpr int kPart = 4;                      ///< numbers of a channel's state that a lane holds
constexpr int kLanes = kColumns / kPart;      ///< that share a channel; also tokens of a group
constexpr int kThreads = 128;                 ///< that scan; as many help
constexpr int kChannels = kThreads / kLanes;  ///< of a block
constexpr int kTile = 32;                     ///< tokens
constexpr int kStride = kTile + 4;  ///< between channels of a tile: no two of a group in one bank
constexpr int kStages = 4;          ///< tiles of inputs in shared memory
constexpr int kBlocks = 3;          ///< of a multiprocessor
constexpr float kLog2OfE = 1.44269504088896341f;
/// Added to exponents of 2. The special-function unit's powers are more often too small than too
/// large, by up to a unit of the last place, which adds up over tokens. Its 2^kRaise is 1.
constexpr float kRaise = 2e-8f;

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
  PrefillRows rows;
  S* state = nullptr;
  std::int64_t slot_stride = 0;
  const float* A = nullptr;
  TokenRows<const T> x, dt, z, B, C;
  TokenRows<T> out;
  MixedView<1> skip, dt_bias;
  int D = 0, parts = 0;
  bool dt_softplus = false;
  bool packs = false;  ///< rows of x, dt and z are loaded 16 bytes at a time
};

/// A tile of a row as it comes from memory.
template <class T>
struct alignas(16) Inputs {
  T x[kTile][kChannels], dt[kTile][kChannels], z[kTile][kChannels];
  T B[kTile][kColumns], C[kTile][kColumns];
};

struct alignas(16) Steps {
  float d[kChannels][kStride];  ///< after the scan C . s
  float dx[kChannels][kStride];
  float B[kTile][kColumns], C[kTile][kColumns];
};

/// log(1 + e^x), within a few units of float's last place. The polynomial is log(1 + e) / e for e
/// from 0 to 1.
__device__ inline float softplus_fast(float x) {
  constexpr float kTerms[]{0.00510582561f, -0.0289919563f, 0.0773807392f,
                           -0.135905996f,  0.190713093f,   -0.248339459f,
                           0.333179355f,   -0.499994367f,  0.99999994f};
  const float e = exp2_fast(fabsf(x) * -kLog2OfE);
  float sum = kTerms[0];
#pragma unroll
  for (int i = 1; i < 9; ++i) sum = fmaf(sum, e, kTerms[i]);
  return fmaf(sum, e, fmaxf(x, 0.0f));
}

template <class T>
struct Shared {
  Inputs<T> inputs[kStages];
  Steps steps[2];
};

/// A thread's part in a row. Threads are numbered from 0 in both halves of a block.
template <class T, class S>
struct Scan {
  static constexpr bool kExact = sizeof(T) == 4;

  const Mamba1Parameters<T, S>& p;
  PrefillRow row;
  int first;  ///< channel of the block

  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kThreads; }
};

/// The helpers' part: of the tokens of a tile, a thread has kTokens of one channel.
template <class T, class S>
struct Helper : Scan<T, S> {
  using Base = Scan<T, S>;
  using Base::kExact, Base::p, Base::row, Base::first, Base::thread;
  static constexpr int kPack = 16 / sizeof(T);  ///< numbers of a copy
  static constexpr int kTokens = kTile * kChannels / kThreads;

  float bias = 0, skip = 0;

  __device__ explicit Helper(const Base& base) : Base(base) {
    const int number = first + channel();
    if (number < p.D && p.dt_bias) bias = at(p.dt_bias, number);
    if (number < p.D && p.skip) skip = at(p.skip, number);
  }
  __device__ static int channel() { return thread() % kChannels; }
  __device__ static int first_token() { return thread() / kChannels * kTokens; }

  /// Starts copies of a tile's rows, from `column` on, into shared memory; numbers of tokens behind
  /// the row, and of columns from `extent` on, become 0.
  template <int kWidth>
  __device__ void copy(T (&to)[kTile][kWidth], const TokenRows<const T>& from, int begin,
                       int column, int extent) const {
    constexpr int kPieces = kWidth / kPack, kCopies = kTile * kPieces;
#pragma unroll
    for (int done = 0; done < kCopies; done += kThreads) {
      const int i = done + thread(), t = i / kPieces, c = i % kPieces * kPack;
      if (kCopies % kThreads != 0 && i >= kCopies) break;
      const bool exists = begin + t < row.size && column + c < extent;
      const T* const source = from.at(row.begin + begin + t) + column + c;
      __pipeline_memcpy_async(&to[t][c], exists ? source : from.data, 16, exists ? 0 : 16);
    }
  }
  /// The same number by number, for rows at any address.
  __device__ void copy_numbers(T (&to)[kTile][kChannels], const TokenRows<const T>& from,
                               int begin) const {
#pragma unroll 1
    for (int i = thread(); i < kTile * kChannels; i += kThreads) {
      const int t = i / kChannels, c = i % kChannels;
      const bool exists = begin + t < row.size && first + c < p.D;
      to[t][c] = exists ? from.at(row.begin + begin + t)[first + c] : from_float<T>(0.0f);
    }
  }
  /// Starts the copies of the tile that begins with token `begin` of the row.
  __device__ void load(Inputs<T>& tile, int begin) const {
    copy(tile.B, p.B, begin, 0, kColumns);
    copy(tile.C, p.C, begin, 0, kColumns);
    if (p.packs) {
      copy(tile.x, p.x, begin, first, p.D);
      copy(tile.dt, p.dt, begin, first, p.D);
      if (p.z.data) copy(tile.z, p.z, begin, first, p.D);
    } else {
      copy_numbers(tile.x, p.x, begin);
      copy_numbers(tile.dt, p.dt, begin);
      if (p.z.data) copy_numbers(tile.z, p.z, begin);
    }
  }

  /// Computes the time steps of tile k, if there is one. Those behind the row are 0, which leaves
  /// the state as it is.
  __device__ void prepare(Shared<T>& shared, int k) const {
    if (k * kTile >= row.size) return;
    Steps& steps = shared.steps[k % 2];
    const Inputs<T>& tile = shared.inputs[k % kStages];
    if (p.dt_softplus)
      prepare<true>(steps, tile, row.size - k * kTile);
    else
      prepare<false>(steps, tile, row.size - k * kTile);
  }
  template <bool kSoftplus>
  __device__ void prepare(Steps& steps, const Inputs<T>& tile, int count) const {
    const int c = channel();
#pragma unroll
    for (int i = 0; i < kTokens; i += 4) {
      float d[4], dx[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = first_token() + i + j;
        d[j] = to_float(tile.dt[t][c]) + bias;
        if constexpr (kSoftplus) d[j] = kExact ? softplus(d[j]) : softplus_fast(d[j]);
        d[j] = t < count ? d[j] : 0.0f;
        dx[j] = d[j] * to_float(tile.x[t][c]);
      }
      store_pack<Cached::yes>(&steps.d[c][first_token() + i], d);
      store_pack<Cached::yes>(&steps.dx[c][first_token() + i], dx);
    }
    const auto widen = [&](float(&to)[kTile][kColumns], const T(&from)[kTile][kColumns]) {
      float four[4];
      load_pack<Cached::yes>(four, &from[0][0] + 4 * thread());
      store_pack<Cached::yes>(&to[0][0] + 4 * thread(), four);
    };
    static_assert(kTile * kColumns == 4 * kThreads);
    widen(steps.B, tile.B);
    widen(steps.C, tile.C);
  }

  /// Adds the skip, gates and writes the outputs of tile k, if there is one.
  __device__ void finish(const Shared<T>& shared, int k) const {
    if (k < 0 || first + channel() >= p.D) return;
    const Steps& steps = shared.steps[k % 2];
    const Inputs<T>& tile = shared.inputs[k % kStages];
    if (p.z.data)
      finish<true>(steps, tile, k * kTile);
    else
      finish<false>(steps, tile, k * kTile);
  }
  template <bool kGated>
  __device__ void finish(const Steps& steps, const Inputs<T>& tile, int begin) const {
    const int c = channel();
    T* to = p.out.at(row.begin + begin + first_token()) + first + c;
#pragma unroll
    for (int i = 0; i < kTokens; i += 4) {
      float y[4];
      load_pack<Cached::yes>(y, &steps.d[c][first_token() + i]);
#pragma unroll
      for (int j = 0; j < 4; ++j, to += p.out.stride) {
        const int t = first_token() + i + j;
        y[j] = fmaf(skip, to_float(tile.x[t][c]), y[j]);
        if constexpr (kGated) {
          const float z = to_float(tile.z[t][c]);
          y[j] *= kExact ? silu(z) : silu_fast(z);
        }
        if (begin + t < row.size) *to = from_float<T>(y[j]);
      }
    }
  }
};

/// The scanning warps' part: a lane has a part of one channel's state.
template <class T, class S>
struct Scanner : Scan<T, S> {
  using Base = Scan<T, S>;
  using Base::kExact, Base::p, Base::row, Base::first, Base::thread;

  float s[kPart] = {}, rate[kPart] = {};  ///< the state; A, times log2(e) unless kExact

  __device__ Scanner(const Base& base, bool scans) : Base(base) {
    if (!scans || number() >= p.D) return;
    if (row.source != kNowhere) load_pack<Cached::streaming>(s, state_of(row.source));
    load_pack<Cached::yes>(rate, p.A + std::int64_t{number()} * kColumns + part() * kPart);
#pragma unroll
    for (int j = 0; j < kPart; ++j) rate[j] *= kExact ? 1.0f : kLog2OfE;
  }
  __device__ static int part() {
    return thread() % kLanes;
  }
  __device__ static int channel() {
    return thread() / kLanes;
  }  ///< of the block
  __device__ int number() const {
    return first + channel();
  }  ///< of the channel
  __device__ S* state_of(int slot) const {
    return p.state + slot * p.slot_stride + std::int64_t{number()} * kColumns + part() * kPart;
  }
  __device__ void store() const {
    if (row.target != kNowhere && number() < p.D)
      store_pack<Cached::streaming>(state_of(row.target), s);
  }

  /// Sums over the lanes of a channel: the lane with part i gets the sum of v[i].
  __device__ static float sum_to_owner(const float (&v)[kLanes]) {
    const bool odd = part() & 1, high = part() & 2;
    const float low = (odd ? v[1] : v[0]) + __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
    const float up = (odd ? v[3] : v[2]) + __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    return (high ? up : low) + __shfl_xor_sync(~0u, high ? low : up, 2);
  }
  /// Advances the lane's part of the state by a token. Returns its part of C . s.
  __device__ float advance(float d, float dx, const float (&B)[kPart], const float (&C)[kPart]) {
    float dot = 0;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const float decay =
          kExact ? expf(__fmul_rn(rate[j], d)) : exp2_fast(fmaf(rate[j], d, kRaise));
      s[j] = fmaf(s[j], decay, __fmul_rn(dx, B[j]));
      dot = j == 0 ? __fmul_rn(s[j], C[j]) : fmaf(s[j], C[j], dot);
    }
    return dot;
  }
  /// Runs the tokens of a tile. Outputs are stored behind its last load, so that loads may overtake
  /// what is computed.
  __device__ void run(Steps& steps) {
    float y[kTile / kLanes];
#pragma unroll
    for (int t = 0; t < kTile; t += kLanes) {
      float d[kLanes], dx[kLanes], dots[kLanes];
      load_pack<Cached::yes>(d, &steps.d[channel()][t]);
      load_pack<Cached::yes>(dx, &steps.dx[channel()][t]);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        float B[kPart], C[kPart];
        load_pack<Cached::yes>(B, &steps.B[t + i][part() * kPart]);
        load_pack<Cached::yes>(C, &steps.C[t + i][part() * kPart]);
        dots[i] = advance(d[i], dx[i], B, C);
      }
      y[t / kLanes] = sum_to_owner(dots);
    }
    __syncwarp();  // all lanes of the channel have read d
#pragma unroll
    for (int t = 0; t < kTile; t += kLanes) steps.d[channel()][t + part()] = y[t / kLanes];
  }
};

template <class T, class S>
__global__ void __launch_bounds__(2 * kThreads, kBlocks)
    mamba1_prefill_kernel(const __grid_constant__ Mamba1Parameters<T, S> p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Shared<T>*>(bytes);
  const int n = static_cast<int>(blockIdx.x) / p.parts;
  const Scan<T, S> part{p, p.rows.row(n), static_cast<int>(blockIdx.x) % p.parts * kChannels};
  const PrefillRow& row = part.row;
  const int tiles = (row.size + kTile - 1) / kTile;
  const bool scans = threadIdx.x < kThreads;  // every thread meets every barrier in this function
  Scanner<T, S> scanner(part, scans);
  const Helper<T, S> helper(part);
  const auto load = [&](int k) {
    if (k < tiles) helper.load(shared.inputs[k % kStages], k * kTile);
    __pipeline_commit();
  };
  if (!scans) {
    load(0);
    load(1);
    __pipeline_wait_prior(0);
  }
  __syncthreads();
  if (!scans) helper.prepare(shared, 0);
  for (int k = 0; k <= tiles; ++k) {
    __syncthreads();
    if (scans) {
      if (k < tiles) scanner.run(shared.steps[k % 2]);
    } else {
      load(k + 2);
      helper.finish(shared, k - 1);
      helper.prepare(shared, k + 1);
      __pipeline_wait_prior(0);
    }
  }
  if (scans) scanner.store();
  for (int t = row.begin + row.size; t < row.end; ++t)
    for (int c = static_cast<int>(threadIdx.x); c < kChannels && part.first + c < p.D;
         c += 2 * kThreads)
      p.out.at(t)[part.first + c] = from_float<T>(0.0f);
}

template <class T, class S>
void check(const Checks& checks, const Mamba1Prefill<T, S>& in) {
  const Shape<2> tokens = shape_of(in.x);
  const std::int64_t T_ = tokens[0], D = tokens[1];
  checks.expect(1 <= D && D <= 1 << 20, "x", "[T, D] with D from 1 to 1048576", text_of(tokens));
  checks.shape(in.dt, "dt", "[T, D]", tokens);
  checks.shape(in.A, "A", "[D, 16]", {D, kColumns});
  checks.shape(in.B, "B", "[T, 16]", {T_, kColumns});
  checks.shape(in.C, "C", "[T, 16]", {T_, kColumns});
  checks.shape(in.out, "out", "[T, D]", tokens);
  if (in.skip) checks.shape(in.skip, "skip", "[D]", {D});
  if (in.z) checks.shape(*in.z, "z", "[T, D]", tokens);
  if (in.dt_bias) checks.shape(in.dt_bias, "dt_bias", "[D]", {D});
  checks.contiguous_rows(in.x, "x");
  checks.contiguous_rows(in.dt, "dt");
  checks.contiguous_rows(in.out, "out");
  if (in.z) checks.contiguous_rows(*in.z, "z");
  checks.expect(rows_aligned(in.A, 16) && (D == 1 || in.A.stride(0) == kColumns), "A",
                "without gaps, at a multiple of 16 bytes", "other strides");
  checks.expect(rows_aligned(in.B, 16) && rows_aligned(in.C, 16), "B and C",
                "of contiguous rows at multiples of 16 bytes", "other strides");
  checks.expect(in.batch.padded_size == 0, "the batch", "of packed rows", "padded ones");
  if (!in.state) return;
  checks.shape(*in.state, "state", "[slots, D, 16]", {in.state->extent(0), D, kColumns});
  checks.expect(rows_aligned(*in.state, 16) && (D == 1 || in.state->stride(1) == kColumns), "state",
                "of channels without gaps at multiples of 16 bytes", "other strides");
}

}  // namespace

template <class T, class S>
void mamba1_prefill(const Mamba1Prefill<T, S>& in, cudaStream_t stream) {
  const Checks checks(kName);
  check(checks, in);
  Mamba1Parameters<T, S> p;
  std::optional<std::int64_t> slots;
  if (in.state) slots = in.state->extent(0);
  p.rows = prefill_rows(checks, in.batch, in.x.extent(0), slots);
  p.D = static_cast<int>(in.x.extent(1));
  p.parts = (p.D + kChannels - 1) / kChannels;
  const std::int64_t blocks = std::int64_t{p.rows.count()} * p.parts;
  checks.expect(blocks <= INT_MAX, "the batch", "of fewer rows and channels",
                std::to_string(blocks) + " blocks");
  if (blocks == 0) return;
  if (in.state) p.state = in.state->data_handle(), p.slot_stride = in.state->stride(0);
  p.A = in.A.data_handle();
  p.x = TokenRows<const T>(in.x);
  p.dt = TokenRows<const T>(in.dt);
  if (in.z) p.z = TokenRows<const T>(*in.z);
  p.B = TokenRows<const T>(in.B);
  p.C = TokenRows<const T>(in.C);
  p.out = TokenRows<T>(in.out);
  p.skip = in.skip;
  p.dt_bias = in.dt_bias;
  p.dt_softplus = in.dt_softplus;
  p.packs = p.D * sizeof(T) % 16 == 0 && rows_aligned(in.x, 16) && rows_aligned(in.dt, 16) &&
            (!in.z || rows_aligned(*in.z, 16));
  constexpr auto kernel = mamba1_prefill_kernel<T, S>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<T>)),
      kName);
  launch(kName, kernel, dim3(static_cast<unsigned>(blocks)), dim3(2 * kThreads), sizeof(Shared<T>),
         stream, false, p);
}

#define LOCKSTEP_INSTANTIATE(T, S) \
  template void mamba1_prefill(const Mamba1Prefill<T, S>&, cudaStream_t);
LOCKSTEP_SERVING_TYPES(LOCKSTEP_INSTANTIATE)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_OTHER_TYPES(LOCKSTEP_INSTANTIATE)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
