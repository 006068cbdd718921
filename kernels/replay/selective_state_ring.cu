// Mamba2's decode with a ring of pending inputs. Equations: reference/recurrent/replay_state.hpp.
// Mapping to the machine: kernels/replay/replay_block.cuh.
//
// A block of update_kernel
//   1. loads the state's rows, the live ring, and the token's B, C and x as its next entry, to
//      shared memory (bulk copies), and dt and z to registers; the order depends on
//      ReplayBatch::is_early()
//   2. multiplies the ring's B, and the state's rows, with C
//   3. adds the x of all entries, the token's included, with weights decay x dt x (B . C): this
//      gives the output
//   4. stores x, B and dt as the ring's next entry; or, at the end of a window, flushes the ring
//      into the state
#include "kernels/replay/selective_state_ring.hpp"

#include "kernels/replay/replay_block.cuh"

namespace lockstep::kernels {
namespace {

/// The pools of states and rings.
template <class S>
struct RingPools {
  Pieces<S> state;
  Pieces<Bf16> x, B;
  Steps<float> dt;
  unsigned dt_entry;  ///< stride between entries of a ring
  int rows;           ///< P
  Divisor heads_per_group;
};

/// The step's inputs and outputs, one token per row.
struct RingTokens {
  Pieces<const Bf16> x, B, C;
  Steps<Bf16> out;
  HeadNumbers dt;
  MixedView<1> A, D, dt_bias;
  MixedView<3> z;
  float dt_min, dt_max;  ///< -infinity and infinity where there is no limit
  bool dt_softplus;
};

/// Addresses of a block's part of a slot.
template <class Tiling>
struct RingPlace {
  using S = typename Tiling::S;
  S* state;
  Bf16 *x, *B;
  float* dt;

  __device__ RingPlace(const RingPools<S>& p, int slot, int head, int group, int first_row)
      : state(p.state.at(slot, head) + first_row * Tiling::kColumns),
        x(p.x.at(slot, head) + first_row),
        B(p.B.at(slot, group)),
        dt(p.dt.at(slot, head)) {}
};

template <class Tiling>
using Shared = ReplayShared<Tiling, Bf16>;

/// Issues the loads of the state and the `live` entries of the ring; the barrier expects `more`
/// bytes besides, whose loads follow later. One warp calls it. A block that has all rows of a head
/// loads the values in one copy; otherwise each entry is a copy of its own.
template <class Tiling>
__device__ void bring_ring(Shared<Tiling>& shared, const RingPools<typename Tiling::S>& p,
                           const RingPlace<Tiling>& place, int live, int more, int lane) {
  constexpr int kStateBytes = sizeof(shared.state), kKey = sizeof(shared.keys[0]),
                kValue = sizeof(shared.values[0]);
  if (lane == 0) {
    expect_bytes(shared.arrived, kStateBytes + live * (kKey + kValue) + more);
    bring(shared.state, place.state, kStateBytes, shared.arrived);
    if (live > 0) bring(shared.keys, place.B, live * kKey, shared.arrived);
  }
  __syncwarp();
  if (p.rows == Tiling::kRows) {
    if (lane == 0 && live > 0) bring(shared.values, place.x, live * kValue, shared.arrived);
  } else if (lane < live) {
    bring(shared.values[lane], place.x + lane * p.rows, kValue, shared.arrived);
  }
}

/// Parameters of a head, unconverted: all loads are issued before the first value is used.
struct HeadBits {
  unsigned A, D, dt_bias;
};
__device__ HeadBits bits_of_head(const RingTokens& in, int head) {
  return {bits_at(in.A, head), in.D ? bits_at(in.D, head) : 0,
          in.dt_bias ? bits_at(in.dt_bias, head) : 0};
}

__device__ float time_step(const RingTokens& in, unsigned bits, const HeadBits& of_head) {
  float dt = value_of(bits, in.dt.format);
  if (in.dt_bias) dt += value_of(of_head.dt_bias, in.dt_bias.format);
  if (in.dt_softplus) dt = softplus(dt);
  if (dt < in.dt_min) dt = in.dt_min;  // fmaxf and fminf would turn NaN into a limit
  return dt > in.dt_max ? in.dt_max : dt;
}

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
  const int head = static_cast<int>(blockIdx.y), group = pools.heads_per_group.of(head);
  const int first_row = static_cast<int>(blockIdx.x) * Tiling::kRows;
  const int own = at_.warp * Tiling::kWarpRows + ReplayRows<Tiling>::own_row(at_);
  const bool early = batch.is_early();
  const Bf16* const B = in.B.at(row, group);
  const Bf16* const C = in.C.at(row, group);
  const Bf16* const x = in.x.at(row, head) + first_row;
  const void* const dt_at = in.dt.at(row, head);
  if (batch.small) {
    constexpr int kLine = 64;  // elements
    if (lane < Tiling::kColumns / kLine) prefetch_to_l2(B + lane * kLine);
    if (lane < Tiling::kColumns / kLine) prefetch_to_l2(C + lane * kLine);
    if (lane == 8) prefetch_to_l2(x);
    if (lane == 9) prefetch_to_l2(dt_at);
    if (lane == 10 && in.z) prefetch_to_l2(address_of(in.z, row, head, first_row));
  }
  unsigned dt_bits, z = 0;
  const auto fetch = [&] {
    dt_bits = bits_at(dt_at, in.dt.format, 0);
    if (in.z) z = bits_at(in.z, row, head, first_row + own);
  };
  if (!early) {
    // The earlier launch may still write cursors and slots, so a step read here only tells what to
    // prefetch; it is read again below.
    if (batch.small && threadIdx.x == 0) {
      const ReplayStep likely = batch.step(row);
      if (likely.slot != kNowhere) {
        const RingPlace<Tiling> place(pools, likely.slot, head, group, first_row);
        prefetch_to_l2(place.state, sizeof(shared.state));
        if (likely.live > 0) prefetch_to_l2(place.B, likely.live * sizeof(shared.keys[0]));
        if (likely.live > 0) prefetch_to_l2(place.x, sizeof(shared.values[0]));
        prefetch_to_l2(place.dt);
        prefetch_to_l2(address_of(in.A, head));
      }
    }
    wait_for_earlier_launch();
    let_the_next_launch_start();
    fetch();
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
  const RingPlace<Tiling> place(pools, step.slot, head, group, first_row);
  constexpr int kToken = 2 * sizeof(shared.keys[0]) + sizeof(shared.values[0]);
  if (at_.warp == 0) bring_ring(shared, pools, place, n, kToken, lane);
  float dt = j < n ? __ldcg(place.dt + j * pools.dt_entry) : 0.0f;
  const HeadBits of_head = bits_of_head(in, head);
  if (early) {
    wait_for_earlier_launch();
    let_the_next_launch_start();
    fetch();
  }
  if (threadIdx.x == 0) {
    bring(shared.keys[n], B, sizeof(shared.keys[0]), shared.arrived);
    bring(shared.query, C, sizeof(shared.query), shared.arrived);
    bring(shared.values[n], x, sizeof(shared.values[0]), shared.arrived);
  }
  const float new_dt = time_step(in, dt_bits, of_head);
  const float D = in.D ? value_of(of_head.D, in.D.format) : 0.0f;
  const float gate = in.z ? silu(value_of(z, in.z.format)) : 1.0f;
  if (j == n) dt = new_dt;
  const float2 since = decays(__fmul_rn(__uint_as_float(of_head.A), dt), j);
  const float decay = since.x, weight = __fmul_rn(since.y, dt);
  __syncthreads();  // the barrier is initialised
  wait_until(shared.arrived);
  multiply_keys<Tiling>(shared, {shared.query}, at_);
  S* const rows = shared.state + at_.warp * Tiling::kWarpRows * Tiling::kColumns;
  float y[1];
  ReplayRows<Tiling>::template products<1>(rows, {shared.query}, at_, y);
  __syncthreads();
  if (lane < kRingRows)
    shared.weights[at_.warp][j].x =
        j <= n ? fmaf(weight, key_product<Tiling>(shared, 0, j), j == n ? D : 0.0f) : 0.0f;
  __syncwarp();
  // y = S C of the state with the ring's n entries and the new token as entry n: the stored state
  // decayed, and the sum over the entries i <= n of weights[i] x_i. Weight n includes D.
  y[0] *= decay;
#pragma unroll
  for (int first = 0; first < kRingRows; first += 4)
    if (first <= n) {
#pragma unroll
      for (int i = first; i < first + 4; ++i)
        y[0] = fmaf(shared.weights[at_.warp][i].x, i <= n ? to_float(shared.values[i][own]) : 0.0f,
                    y[0]);
    }
  if (ReplayRows<Tiling>::owns(at_))
    in.out.at(row, head)[first_row + own] = from_float<Bf16>(y[0] * gate);
  if (step.flushes) {
    ReplayRows<Tiling>::flush(rows, shared.values, shared.keys, decay, weight, n + 1, at_);
    constexpr int kElements = Tiling::kWarpRows * Tiling::kColumns;
    return keep_rows(place.state + at_.warp * kElements, rows, kElements * sizeof(S), lane);
  }
  if (ReplayRows<Tiling>::owns(at_)) place.x[n * pools.rows + own] = shared.values[n][own];
  if (first_row > 0) return;
  if (threadIdx.x == 0) place.dt[n * pools.dt_entry] = new_dt;
  // The block of a group's first head stores B. No block of this launch reads that entry.
  if (head > 0 && pools.heads_per_group.of(head - 1) == group) return;
  for (unsigned i = threadIdx.x; i < Tiling::kColumns / 8; i += Tiling::kThreads)
    *reinterpret_cast<uint4*>(place.B + n * Tiling::kColumns + 8 * i) =
        piece_at(&shared.keys[n][8 * i]);
}

/// Flushes the first cursors[row] entries of each row's ring into the state, stored to slot
/// targets[row].
template <class Tiling, int kBlocks>
__global__ void __launch_bounds__(Tiling::kThreads, kBlocks)
    flush_kernel(const __grid_constant__ RingPools<typename Tiling::S> pools,
                 const __grid_constant__ MixedView<1> A, const __grid_constant__ ReplayBatch batch,
                 const RowNumbers targets) {
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
  const int group = pools.heads_per_group.of(head);
  const int first_row = static_cast<int>(blockIdx.x) * Tiling::kRows;
  const RingPlace<Tiling> place(pools, slot, head, group, first_row);
  S* const to = pools.state.at(target, head) + first_row * Tiling::kColumns;
  if (at_.warp == 0) bring_ring(shared, pools, place, n, 0, lane);
  const float dt = j < n ? place.dt[j * pools.dt_entry] : 0.0f;
  const float2 since = decays(__fmul_rn(at(A, head), dt), j);
  const float weight = __fmul_rn(since.y, dt);
  __syncthreads();
  wait_until(shared.arrived);
  constexpr int kElements = Tiling::kWarpRows * Tiling::kColumns;
  S* const rows = shared.state + at_.warp * kElements;
  if (n > 0) ReplayRows<Tiling>::flush(rows, shared.values, shared.keys, since.x, weight, n, at_);
  keep_rows(to + at_.warp * kElements, rows, kElements * sizeof(S), lane);
}

template <class S>
RingPools<S> checked_pools(const Checks& checks, const SelectiveStateRing<S>& ring) {
  const Shape<4> state = shape_of(ring.state);
  const std::int64_t L = ring.x.extent(2), G = ring.B.extent(1);
  checks.expect(G > 0 && state[1] % G == 0, "ring_B", "[slots, G, L, N] with H a multiple of G",
                "H = " + std::to_string(state[1]) + ", G = " + std::to_string(G));
  checks.expect(1 <= L && L <= kRingRows, "ring_x", "[slots, H, L, P] with L of 1 to 16",
                text_of(shape_of(ring.x)));
  checks.expect(state[1] <= 65535, "state", "[slots, H, P, N] with at most 65535 heads",
                text_of(state));
  checks.shape(ring.x, "ring_x", "[slots, H, L, P]", {state[0], state[1], L, state[2]});
  checks.shape(ring.B, "ring_B", "[slots, G, L, N]", {state[0], G, L, state[3]});
  checks.shape(ring.dt, "ring_dt", "[slots, H, L]", {state[0], state[1], L});
  return {pieces_of(checks, ring.state, "state"),
          pieces_of(checks, ring.x, "ring_x"),
          pieces_of(checks, ring.B, "ring_B"),
          steps_of<1>(checks, ring.dt, "ring_dt"),
          step_of(checks, "ring_dt", ring.dt.stride(2), 1),
          static_cast<int>(state[2]),
          Divisor(state[1] / G)};
}

/// Calls body with the tiling for states [P, N]; throws ArgumentError where there is none. A block
/// takes 64 rows if they divide P, else 80 or 32.
template <class S, class Body>
void with_tiling(const Checks& checks, std::int64_t P, std::int64_t N, Body body) {
#define LOCKSTEP_CASE(COLUMNS, ROWS, WARPS, TILES) \
  if (N == COLUMNS && P % ROWS == 0) return body(ReplayTiling<S, COLUMNS, WARPS, TILES>());
  LOCKSTEP_CASE(128, 64, 2, 2)
  LOCKSTEP_CASE(128, 80, 5, 1)
  LOCKSTEP_CASE(128, 32, 2, 1)
  LOCKSTEP_CASE(64, 64, 2, 2)
  LOCKSTEP_CASE(64, 80, 5, 1)
  LOCKSTEP_CASE(64, 32, 2, 1)
  LOCKSTEP_CASE(256, 64, 4, 1)
  LOCKSTEP_CASE(256, 80, 5, 1)
  LOCKSTEP_CASE(256, 32, 2, 1)
#undef LOCKSTEP_CASE
  checks.expect(false, "state",
                "[slots, H, P, N] with P a multiple of 32 or 80 and N = 64, 128 or 256",
                "P = " + std::to_string(P) + ", N = " + std::to_string(N));
}

}  // namespace

template <class S>
void selective_state_ring_update(const SelectiveStateRingUpdate<S>& in, cudaStream_t stream) {
  constexpr const char* kName = "selective_state_ring_update";
  const Checks checks(kName);
  const RingPools<S> pools = checked_pools(checks, in.ring);
  const Shape<4> state = shape_of(in.ring.state);
  const std::int64_t T = in.x.extent(0), H = state[1], P = state[2], N = state[3];
  const std::int64_t G = in.ring.B.extent(1);
  checks.shape(in.x, "x", "[N, H, P]", {T, H, P});
  checks.shape(in.B, "B", "[N, G, N]", {T, G, N});
  checks.shape(in.C, "C", "[N, G, N]", {T, G, N});
  checks.shape(in.out, "out", "[N, H, P]", {T, H, P});
  checks.shape(in.dt, "dt", "[N, H]", {T, H});
  checks.shape(in.A, "A", "[H]", {H});
  if (in.D) checks.shape(in.D, "D", "[H]", {H});
  if (in.dt_bias) checks.shape(in.dt_bias, "dt_bias", "[H]", {H});
  if (in.z) checks.shape(in.z, "z", "[N, H, P]", {T, H, P});
  checks.contiguous_rows(in.out, "out");
  ReplayBatch batch =
      replay_batch(checks, in.slots, T, state[0], in.cursors, in.positions, in.ring.x.extent(2));
  const float infinity = std::numeric_limits<float>::infinity();
  const RingTokens tokens{pieces_of(checks, in.x, "x"),
                          pieces_of(checks, in.B, "B"),
                          pieces_of(checks, in.C, "C"),
                          steps_of<1>(checks, in.out, "out"),
                          numbers_of(checks, in.dt, "dt"),
                          in.A,
                          in.D,
                          in.dt_bias,
                          in.z,
                          in.dt_min.value_or(-infinity),
                          in.dt_max.value_or(infinity),
                          in.dt_softplus};
  with_tiling<S>(checks, P, N, [&](auto tiling) {
    using Tiling = decltype(tiling);
    if (T == 0 || H == 0) return;
    constexpr int kBlocks = kBlocksThatFit<Tiling, Shared<Tiling>>;
    if (in.early_state) batch.early_blocks = kProcessors * kBlocks;
    launch_replay<Tiling, Shared<Tiling>>(kName, update_kernel<Tiling, kBlocks>, {T, H, P}, stream,
                                          pools, tokens, batch);
  });
}

template <class S>
void selective_state_ring_flush(const SelectiveStateRing<S>& ring, const MixedView<1>& A,
                                const IndexView& counts, const IndexView& targets,
                                const StateSlots& slots, cudaStream_t stream) {
  constexpr const char* kName = "selective_state_ring_flush";
  const Checks checks(kName);
  const RingPools<S> pools = checked_pools(checks, ring);
  const Shape<4> state = shape_of(ring.state);
  checks.shape(A, "A", "[H]", {state[1]});
  const std::int64_t T = counts.extent(0);
  checks.shape(targets, "targets", "[N]", {T});
  const ReplayBatch batch =
      replay_batch(checks, slots, T, state[0], counts, counts, ring.x.extent(2));
  with_tiling<S>(checks, state[2], state[3], [&](auto tiling) {
    using Tiling = decltype(tiling);
    if (T == 0 || state[1] == 0) return;
    constexpr int kBlocks = kBlocksThatFit<Tiling, Shared<Tiling>>;
    launch_replay<Tiling, Shared<Tiling>>(
        kName, flush_kernel<Tiling, kBlocks>, {T, state[1], state[2]}, stream, pools, A, batch,
        RowNumbers{targets.data_handle(), static_cast<int>(targets.stride(0))});
  });
}

#define LOCKSTEP_INSTANTIATE(S)                                                                   \
  template void selective_state_ring_update(const SelectiveStateRingUpdate<S>&, cudaStream_t);    \
  template void selective_state_ring_flush(const SelectiveStateRing<S>&, const MixedView<1>&,     \
                                           const IndexView&, const IndexView&, const StateSlots&, \
                                           cudaStream_t);
LOCKSTEP_INSTANTIATE(float)
LOCKSTEP_INSTANTIATE(Bf16)
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
