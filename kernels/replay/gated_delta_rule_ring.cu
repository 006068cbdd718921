// The gated delta rule's decode with a ring of pending inputs. Equations:
// reference/recurrent/replay_state.hpp. Mapping to the machine: kernels/replay/replay_block.cuh.
//
// A block of update_kernel
//   1. loads the state's rows and the live ring to shared memory (bulk copies), and the token's k,
//      q, v and gates to registers; the order of the two depends on ReplayBatch::is_early()
//   2. multiplies the ring's keys, and the state's rows, with k and q
//   3. adds the ring's values with weights decay x (key . k) and decay x (key . q): this gives S k,
//      hence u, and the output S q
//   4. stores u, k and the gate as the ring's next entry; or, at the end of a window, flushes the
//      ring into the state
#include "kernels/replay/gated_delta_rule_ring.hpp"

#include "kernels/replay/replay_block.cuh"

namespace lockstep::kernels {
namespace {

/// The pools of states and rings.
template <class S>
struct RingPools {
  Pieces<S> state, u;
  Pieces<Bf16> k;
  Steps<float> k_scale, g;
  unsigned k_scale_entry, g_entry;  ///< strides between entries of a ring
  int rows;                         ///< V
  Divisor value_heads_per_key_head;
};

/// The step's inputs and outputs, one token per row.
struct RingTokens {
  Pieces<const Bf16> q, k;
  Steps<const Bf16> v;
  Steps<Bf16> out;
  HeadNumbers g, beta;
  MixedView<1> A_log, dt_bias;
  float scale;
  bool use_qk_l2norm;
};

/// Addresses of a block's part of a slot.
template <class Tiling>
struct RingPlace {
  using S = typename Tiling::S;
  S *state, *u;
  Bf16* k;
  float *k_scale, *g;

  __device__ RingPlace(const RingPools<S>& p, int slot, int head, int key_head, int first_row)
      : state(p.state.at(slot, head) + first_row * Tiling::kColumns),
        u(p.u.at(slot, head) + first_row),
        k(p.k.at(slot, key_head)),
        k_scale(p.k_scale.at(slot, key_head)),
        g(p.g.at(slot, head)) {}
};

template <class Tiling>
using Shared = ReplayShared<Tiling, typename Tiling::S>;

/// Issues the loads of the state and the `live` entries of the ring. One warp calls it. A block
/// that has all rows of a head loads the values in one copy; otherwise each entry is a copy of its
/// own.
template <class Tiling>
__device__ void bring_ring(Shared<Tiling>& shared, const RingPools<typename Tiling::S>& p,
                           const RingPlace<Tiling>& place, int live, int lane) {
  constexpr int kStateBytes = sizeof(shared.state), kKey = sizeof(shared.keys[0]),
                kValue = sizeof(shared.values[0]);
  if (lane == 0) {
    expect_bytes(shared.arrived, kStateBytes + live * (kKey + kValue));
    bring(shared.state, place.state, kStateBytes, shared.arrived);
    if (live > 0) bring(shared.keys, place.k, live * kKey, shared.arrived);
  }
  __syncwarp();
  if (p.rows == Tiling::kRows) {
    if (lane == 0 && live > 0) bring(shared.values, place.u, live * kValue, shared.arrived);
  } else if (lane < live) {
    bring(shared.values[lane], place.u + lane * p.rows, kValue, shared.arrived);
  }
}

/// A thread's part of the token's inputs, unconverted: a 16-byte piece of k or q, v of the row that
/// the thread owns, and the gates.
template <class Tiling>
struct RingToken {
  static constexpr int kPieces = Tiling::kColumns / 8;  ///< 16-byte pieces of k, and of q
  static_assert(2 * kPieces <= Tiling::kThreads);
  const Bf16 *piece, *v;
  const void *g, *beta;
  uint4 piece_bits;
  Bf16 v_bits;
  unsigned g_bits, beta_bits;

  __device__ RingToken(const RingTokens& in, int row, int head, int key_head, int own_row)
      : v(in.v.at(row, head) + own_row), g(in.g.at(row, head)), beta(in.beta.at(row, head)) {
    const unsigned i = threadIdx.x % (2 * kPieces);
    const Bf16* const k = in.k.at(row, key_head);
    const Bf16* const q = in.q.at(row, key_head);
    piece = (i < kPieces ? k : q) + i % kPieces * 8;
  }
  __device__ bool has_piece() const { return threadIdx.x < 2 * kPieces; }
  __device__ void prefetch() const {
    if (has_piece() && threadIdx.x % 8 == 0) prefetch_to_l2(piece);
    if (threadIdx.x % 32 == 1) prefetch_to_l2(v);
    if (threadIdx.x == 2) prefetch_to_l2(g);
    if (threadIdx.x == 3) prefetch_to_l2(beta);
  }
  __device__ void fetch(const RingTokens& in) {
    g_bits = bits_at(g, in.g.format, 0);
    beta_bits = bits_at(beta, in.beta.format, 0);
    v_bits = *v;
    piece_bits = piece_at(piece);
  }
  /// Writes the thread's piece to shared memory: k as entry `entry` of the keys, q as the query.
  __device__ void keep_piece(Shared<Tiling>& shared, int entry) const {
    const unsigned i = threadIdx.x;
    if (has_piece())
      *reinterpret_cast<uint4*>((i < kPieces ? shared.keys[entry] : shared.query) +
                                i % kPieces * 8) = piece_bits;
  }
};

template <class Tiling, int kBlocks>
__global__ void __launch_bounds__(Tiling::kThreads, kBlocks)
    update_kernel(const __grid_constant__ RingPools<typename Tiling::S> pools,
                  const __grid_constant__ RingTokens in,
                  const __grid_constant__ ReplayBatch batch) {
  using S = typename Tiling::S;
  extern __shared__ __align__(128) char memory[];
  Shared<Tiling>& shared = *reinterpret_cast<Shared<Tiling>*>(memory);
  // NOLINTNEXTLINE(readability-identifier-naming): `at` is a function
  const ReplayLane at_;
  const int row = static_cast<int>(blockIdx.z), lane = at_.lane, j = lane % kRingRows;
  const int head = static_cast<int>(blockIdx.y);
  const int key_head = pools.value_heads_per_key_head.of(head);
  const int first_row = static_cast<int>(blockIdx.x) * Tiling::kRows;
  const int own = at_.warp * Tiling::kWarpRows + ReplayRows<Tiling>::own_row(at_);
  const bool early = batch.is_early();
  RingToken<Tiling> token(in, row, head, key_head, first_row + own);
  if (batch.small) token.prefetch();
  if (!early) {
    // The earlier launch may still write cursors and slots, so a step read here only tells what to
    // prefetch; it is read again below.
    if (batch.small && threadIdx.x == 0) {
      const ReplayStep likely = batch.step(row);
      if (likely.slot != kNowhere) {
        const RingPlace<Tiling> place(pools, likely.slot, head, key_head, first_row);
        prefetch_to_l2(place.state, sizeof(shared.state));
        if (likely.live > 0) prefetch_to_l2(place.k, likely.live * sizeof(shared.keys[0]));
        if (likely.live > 0) prefetch_to_l2(place.u, sizeof(shared.values[0]));
        prefetch_to_l2(place.g);
        prefetch_to_l2(place.k_scale);
      }
    }
    wait_for_earlier_launch();
    let_the_next_launch_start();
    token.fetch(in);
  }
  const ReplayStep step = batch.step(row);
  const int n = step.live;
  if (step.slot == kNowhere) {
    if (early) {
      wait_for_earlier_launch();
      let_the_next_launch_start();
    }
    in.out.at(row, head)[first_row + own] = from_float<Bf16>(0.0f);
    return;
  }
  const RingPlace<Tiling> place(pools, step.slot, head, key_head, first_row);
  if (at_.warp == 0) bring_ring(shared, pools, place, n, lane);
  float g = j < n ? __ldcg(place.g + j * pools.g_entry) : 0.0f;
  const float old_scale = j < n ? __ldcg(place.k_scale + j * pools.k_scale_entry) : 0.0f;
  const unsigned A_log = in.A_log ? bits_at(in.A_log, head) : 0;
  const unsigned dt_bias = in.A_log ? bits_at(in.dt_bias, head) : 0;
  if (early) {
    wait_for_earlier_launch();
    let_the_next_launch_start();
    token.fetch(in);
  }
  token.keep_piece(shared, n);
  const float v = to_float(token.v_bits);
  float new_g = value_of(token.g_bits, in.g.format),
        beta = value_of(token.beta_bits, in.beta.format);
  if (in.A_log) {
    new_g = -expf(value_of(A_log, in.A_log.format)) *
            softplus(new_g + value_of(dt_bias, in.dt_bias.format));
    beta = sigmoid(beta);
  }
  if (j == n) g = new_g;
  const float2 since = decays(g, j);
  const float decay = since.x;
  __syncthreads();  // k and q are in shared memory, and the barrier is initialised
  wait_until(shared.arrived);
  const Bf16* const vectors[2] = {shared.keys[n], shared.query};
  multiply_keys<Tiling>(shared, vectors, at_);
  S* const rows = shared.state + at_.warp * Tiling::kWarpRows * Tiling::kColumns;
  float sums[2];  // stored state's S k and S q at the lane's own row, without scales
  ReplayRows<Tiling>::template products<2>(rows, vectors, at_, sums);
  __syncthreads();  // all parts of the keys' products are in shared memory
  float k_scale = 1.0f, q_scale = in.scale;
  if (in.use_qk_l2norm) {
    k_scale = rsqrtf(key_product<Tiling>(shared, 0, n) + 1e-6f);
    q_scale *= rsqrtf(sum_of_squares<Tiling>(shared) + 1e-6f);
  }
  const float weight = j < n ? __fmul_rn(since.y, old_scale) : j == n ? k_scale : 0.0f;
  if (lane < kRingRows)
    shared.weights[at_.warp][j] = j <= n
                                      ? float2{weight * k_scale * key_product<Tiling>(shared, 0, j),
                                               weight * q_scale * key_product<Tiling>(shared, 1, j)}
                                      : float2{0.0f, 0.0f};
  __syncwarp();
  // S k and S q of the state with the ring's n entries: the stored state decayed, and the sum over
  // the entries i of weights[i] u_i.
  float seen = decay * k_scale * sums[0], o = decay * q_scale * sums[1];
#pragma unroll
  for (int first = 0; first < kRingRows; first += 4)
    if (first < n) {
#pragma unroll
      for (int i = first; i < first + 4; ++i) {
        const float2 w = shared.weights[at_.warp][i];
        const float u = i < n ? to_float(shared.values[i][own]) : 0.0f;
        seen = i < n ? fmaf(w.x, u, seen) : seen;
        o = i < n ? fmaf(w.y, u, o) : o;
      }
    }
  const float u = beta * (v - seen);
  o = fmaf(shared.weights[at_.warp][n].y, u, o);
  const bool owns = ReplayRows<Tiling>::owns(at_);
  if (owns) in.out.at(row, head)[first_row + own] = from_float<Bf16>(o);
  if (step.flushes) {
    // u is rounded as the ring would store it, so a flush now and a flush of the ring later give
    // the same bits.
    if (owns) shared.values[n][own] = from_float<S>(u);
    __syncwarp();
    ReplayRows<Tiling>::flush(rows, shared.values, shared.keys, decay, weight, n + 1, at_);
    constexpr int kElements = Tiling::kWarpRows * Tiling::kColumns;
    return keep_rows(place.state + at_.warp * kElements, rows, kElements * sizeof(S), lane);
  }
  if (owns) place.u[n * pools.rows + own] = from_float<S>(u);
  if (first_row > 0) return;
  if (threadIdx.x == 0) place.g[n * pools.g_entry] = new_g;
  // The block of a key head's first value head stores k. No block of this launch reads that entry.
  if (head > 0 && pools.value_heads_per_key_head.of(head - 1) == key_head) return;
  if (threadIdx.x == 0) place.k_scale[n * pools.k_scale_entry] = k_scale;
  for (unsigned i = threadIdx.x; i < Tiling::kColumns / 8; i += Tiling::kThreads)
    *reinterpret_cast<uint4*>(place.k + n * Tiling::kColumns + 8 * i) =
        piece_at(&shared.keys[n][8 * i]);
}

/// Flushes the first cursors[row] entries of each row's ring into the state, stored to slot
/// targets[row].
template <class Tiling, int kBlocks>
__global__ void __launch_bounds__(Tiling::kThreads, kBlocks)
    flush_kernel(const __grid_constant__ RingPools<typename Tiling::S> pools,
                 const __grid_constant__ ReplayBatch batch, const RowNumbers targets) {
  using S = typename Tiling::S;
  extern __shared__ __align__(128) char memory[];
  Shared<Tiling>& shared = *reinterpret_cast<Shared<Tiling>*>(memory);
  // NOLINTNEXTLINE(readability-identifier-naming): `at` is a function
  const ReplayLane at_;
  const int row = static_cast<int>(blockIdx.z), lane = at_.lane, j = lane % kRingRows;
  wait_for_earlier_launch();
  let_the_next_launch_start();
  const int slot = batch.slot(row), n = batch.cursors.at(row);
  const int target = targets.at(row), head = static_cast<int>(blockIdx.y);
  if (slot == kNowhere || target < 0 || target >= batch.slot_count || n < 0 || n > batch.window)
    return;
  const int key_head = pools.value_heads_per_key_head.of(head);
  const int first_row = static_cast<int>(blockIdx.x) * Tiling::kRows;
  const RingPlace<Tiling> place(pools, slot, head, key_head, first_row);
  S* const to = pools.state.at(target, head) + first_row * Tiling::kColumns;
  if (at_.warp == 0) bring_ring(shared, pools, place, n, lane);
  const float g = j < n ? place.g[j * pools.g_entry] : 0.0f;
  const float k_scale = j < n ? place.k_scale[j * pools.k_scale_entry] : 0.0f;
  const float2 since = decays(g, j);
  const float weight = __fmul_rn(since.y, k_scale);
  __syncthreads();
  wait_until(shared.arrived);
  constexpr int kElements = Tiling::kWarpRows * Tiling::kColumns;
  S* const rows = shared.state + at_.warp * kElements;
  if (n > 0) ReplayRows<Tiling>::flush(rows, shared.values, shared.keys, since.x, weight, n, at_);
  keep_rows(to + at_.warp * kElements, rows, kElements * sizeof(S), lane);
}

template <class S>
RingPools<S> checked_pools(const Checks& checks, const GatedDeltaRuleRing<S>& ring) {
  const Shape<4> state = shape_of(ring.state);
  const std::int64_t L = ring.k.extent(2), H = ring.k.extent(1);
  checks.expect(H > 0 && state[1] % H == 0, "ring_k", "[slots, H, L, K] with HV a multiple of H",
                "HV = " + std::to_string(state[1]) + " for H = " + std::to_string(H));
  checks.expect(1 <= L && L <= kRingRows, "ring_k", "[slots, H, L, K] with L of 1 to 16",
                text_of(shape_of(ring.k)));
  checks.expect(state[1] <= 65535, "state", "[slots, HV, V, K] with at most 65535 heads",
                text_of(state));
  checks.shape(ring.k, "ring_k", "[slots, H, L, K]", {state[0], H, L, state[3]});
  checks.shape(ring.k_scale, "ring_k_scale", "[slots, H, L]", {state[0], H, L});
  checks.shape(ring.u, "ring_u", "[slots, HV, L, V]", {state[0], state[1], L, state[2]});
  checks.shape(ring.g, "ring_g", "[slots, HV, L]", {state[0], state[1], L});
  return {pieces_of(checks, ring.state, "state"),
          pieces_of(checks, ring.u, "ring_u"),
          pieces_of(checks, ring.k, "ring_k"),
          steps_of<1>(checks, ring.k_scale, "ring_k_scale"),
          steps_of<1>(checks, ring.g, "ring_g"),
          step_of(checks, "ring_k_scale", ring.k_scale.stride(2), 1),
          step_of(checks, "ring_g", ring.g.stride(2), 1),
          static_cast<int>(state[2]),
          Divisor(state[1] / H)};
}

/// Calls body with the tiling for states [V, K] and `heads` heads of all rows; throws ArgumentError
/// where there is none. A block has 128 rows of 16-bit states, at every batch; of float32 states it
/// has 64, which few heads divide among more warps. (Measured on an H100 for batches of 1 to 256.)
template <class S, class Body>
void with_tiling(const Checks& checks, std::int64_t V, std::int64_t K, std::int64_t heads,
                 Body body) {
  if constexpr (sizeof(S) == 2) {
    if (K == 128 && V % 128 == 0) return body(ReplayTiling<S, 128, 4, 2>());
  } else {
    if (K == 128 && V % 64 == 0 && heads <= 64) return body(ReplayTiling<S, 128, 4, 1>());
  }
#define LOCKSTEP_CASE(COLUMNS) \
  if (K == COLUMNS && V % 64 == 0) return body(ReplayTiling<S, COLUMNS, 2, 2>());
  LOCKSTEP_CASE(128)
  LOCKSTEP_CASE(96)
  LOCKSTEP_CASE(64)
#undef LOCKSTEP_CASE
  if (K == 256 && V % 32 == 0) return body(ReplayTiling<S, 256, 2, 1>());
  checks.expect(false, "state",
                "[slots, HV, V, K] with V a multiple of 64 and K = 64, 96, 128 or 256",
                "V = " + std::to_string(V) + ", K = " + std::to_string(K));
}

}  // namespace

template <class S>
void gated_delta_rule_ring_update(const GatedDeltaRuleRingUpdate<S>& in, cudaStream_t stream) {
  constexpr const char* kName = "gated_delta_rule_ring_update";
  const Checks checks(kName);
  const RingPools<S> pools = checked_pools(checks, in.ring);
  const Shape<4> state = shape_of(in.ring.state);
  const std::int64_t T = in.k.extent(0), HV = state[1], V = state[2], K = state[3];
  const std::int64_t H = in.ring.k.extent(1);
  checks.shape(in.q, "q", "[N, H, K]", {T, H, K});
  checks.shape(in.k, "k", "[N, H, K]", {T, H, K});
  checks.shape(in.v, "v", "[N, HV, V]", {T, HV, V});
  checks.shape(in.out, "out", "[N, HV, V]", {T, HV, V});
  checks.shape(in.g, "g", "[N, HV]", {T, HV});
  checks.shape(in.beta, "beta", "[N, HV]", {T, HV});
  checks.expect(bool(in.A_log) == bool(in.dt_bias), "A_log and dt_bias", "both given, or neither",
                "one of them");
  if (in.A_log) {
    checks.shape(in.A_log, "A_log", "[HV]", {HV});
    checks.shape(in.dt_bias, "dt_bias", "[HV]", {HV});
  }
  checks.contiguous_rows(in.v, "v");
  checks.contiguous_rows(in.out, "out");
  ReplayBatch batch =
      replay_batch(checks, in.slots, T, state[0], in.cursors, in.positions, in.ring.k.extent(2));
  const RingTokens tokens{pieces_of(checks, in.q, "q"),
                          pieces_of(checks, in.k, "k"),
                          steps_of<1>(checks, in.v, "v"),
                          steps_of<1>(checks, in.out, "out"),
                          numbers_of(checks, in.g, "g"),
                          numbers_of(checks, in.beta, "beta"),
                          in.A_log,
                          in.dt_bias,
                          in.scale.value_or(1.0f / sqrtf(static_cast<float>(K))),
                          in.use_qk_l2norm};
  with_tiling<S>(checks, V, K, T * HV, [&](auto tiling) {
    using Tiling = decltype(tiling);
    if (T == 0 || HV == 0) return;
    constexpr int kBlocks = kBlocksThatFit<Tiling, Shared<Tiling>>;
    if (in.early_state) batch.early_blocks = kProcessors * kBlocks;
    launch_replay<Tiling, Shared<Tiling>>(kName, update_kernel<Tiling, kBlocks>, {T, HV, V}, stream,
                                          pools, tokens, batch);
  });
}

template <class S>
void gated_delta_rule_ring_flush(const GatedDeltaRuleRing<S>& ring, const IndexView& counts,
                                 const IndexView& targets, const StateSlots& slots,
                                 cudaStream_t stream) {
  constexpr const char* kName = "gated_delta_rule_ring_flush";
  const Checks checks(kName);
  const RingPools<S> pools = checked_pools(checks, ring);
  const Shape<4> state = shape_of(ring.state);
  const std::int64_t T = counts.extent(0);
  checks.shape(targets, "targets", "[N]", {T});
  const ReplayBatch batch =
      replay_batch(checks, slots, T, state[0], counts, counts, ring.k.extent(2));
  with_tiling<S>(checks, state[2], state[3], T * state[1], [&](auto tiling) {
    using Tiling = decltype(tiling);
    if (T == 0 || state[1] == 0) return;
    constexpr int kBlocks = kBlocksThatFit<Tiling, Shared<Tiling>>;
    launch_replay<Tiling, Shared<Tiling>>(
        kName, flush_kernel<Tiling, kBlocks>, {T, state[1], state[2]}, stream, pools, batch,
        RowNumbers{targets.data_handle(), static_cast<int>(targets.stride(0))});
  });
}

#define LOCKSTEP_INSTANTIATE(S)                                                                 \
  template void gated_delta_rule_ring_update(const GatedDeltaRuleRingUpdate<S>&, cudaStream_t); \
  template void gated_delta_rule_ring_flush(const GatedDeltaRuleRing<S>&, const IndexView&,     \
                                            const IndexView&, const StateSlots&, cudaStream_t);
LOCKSTEP_INSTANTIATE(float)
LOCKSTEP_INSTANTIATE(Bf16)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
