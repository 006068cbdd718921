// Mamba2's state update for decoding. Equations: reference/recurrent/mamba2.hpp. Mapping to the
// machine: kernels/recurrent/recurrence.cuh, where the state [R, C] is a head's s [P, N], so that
// C . s is a sum over the lanes of one row. This file is the operation Op of that mapping, and the
// launch wrappers.
#include "kernels/recurrent/selective_state_update.hpp"

#include "kernels/base/zero.cuh"
#include "kernels/recurrent/recurrence_launch.cuh"

namespace lockstep::kernels {
namespace {

/// The Op of recurrence.cuh. kPerHead: A, dt and dt_bias are one number per head, as in Mamba2;
/// otherwise they may differ within a head, as in Mamba1. V is the type of B and C.
template <class T, bool kPerHead, class V = T>
struct SelectiveState {
  struct Parameters {
    HeadVectors<const T> x;
    HeadVectors<const V> B, C;
    MixedView<3> dt, A, z;
    MixedView<2> D, dt_bias;
    HeadVectors<T> out;
    TensorView<float, 2> stash_decay, stash_dt;
    TensorView<const float, 2> folded_decay, folded_dt;
    HeadVectors<const T> folded_x;
    HeadVectors<const V> folded_B;
    float dt_min, dt_max;  ///< -infinity and infinity where there is no limit
    bool dt_softplus;
    Divisor heads_per_group;
  };

  /// Per-token scalars, shared by all rows of the state; filled only with kPerHead.
  struct Scalars {
    float decay;  ///< exp(A d_t)
    float dt;     ///< d_t
  };
  enum : int {
    kLine = 128,         ///< bytes of a line of L2
    kColumnVectors = 2,  ///< B d_t, C
    kRowVectors = 3,     ///< x, D x, silu(z)
    kHasChunks = false
  };

  template <class Layout, int kRows>
  struct Token {
    float Bdt[Layout::kCount];  ///< B_t d_t with kPerHead; otherwise B_t, since d_t differs by row
    float C[Layout::kCount];
    float x[kRows];
    float Dx;    ///< D x_t of the row that the lane owns
    float gate;  ///< silu(z_t) of the row that the lane owns; 1 without z
    Scalars scalars;
    float dt[kPerHead ? 1 : kRows];                  ///< d_t, per row without kPerHead
    float A[kPerHead ? 1 : kRows * Layout::kCount];  ///< A, per element without kPerHead
  };

  template <class Token, class Visit>
  __device__ static void visit_columns(Token& token, bool folded, Visit visit) {
    visit(0, token.Bdt);
    if (!folded) visit(1, token.C);
  }
  /// Fills the token's row values; value(i, r) is row vector i at the lane's r-th row.
  template <class Layout, int kRows, class Value>
  __device__ static void take_rows(Token<Layout, kRows>& token, bool folded, Value value) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) token.x[r] = value(0, r);
    if (folded) return;
    token.Dx = value(1, Layout::template own<kRows>());
    token.gate = value(2, Layout::template own<kRows>());
  }
  template <bool kFolded>
  __device__ static float row_value(const Parameters& p, int which, int t, int h, int row) {
    const float x = to_float((kFolded ? p.folded_x : p.x).at(t, h)[row]);
    if (kFolded || which == 0) return x;
    if (which == 1) return p.D ? __fmul_rn(at(p.D, h, row), x) : 0.0f;
    return p.z ? silu(at(p.z, t, h, row)) : 1.0f;
  }

  __device__ static float time_step(const Parameters& p, unsigned dt_bits, unsigned bias_bits) {
    float dt = value_of(dt_bits, p.dt.format);
    if (p.dt_bias) dt += value_of(bias_bits, p.dt_bias.format);
    if (p.dt_softplus) dt = softplus(dt);
    if (dt < p.dt_min) dt = p.dt_min;  // fmaxf and fminf would turn NaN into a limit
    return dt > p.dt_max ? p.dt_max : dt;
  }

  /// Number of d_t that a lane with `rows` rows needs.
  static constexpr int steps(int rows) {
    return kPerHead ? 1 : rows;
  }

  template <class Layout, int kRows>
  struct Raw {
    typename Layout::template Raw<V> B, C;
    T x[kRows], own_x;
    unsigned dt[steps(kRows)], dt_bias[steps(kRows)], D, z, A;
    float decay, folded_dt;
  };

  /// All heads of a group read the same B and C, and neighbouring heads the same line of dt. One
  /// block each asks for them: as many requests for one line of L2 as there are blocks take longer
  /// than the launch.
  template <bool kFolded, class Layout, int kRows>
  __device__ static void prefetch(const Parameters& p, int t, int h,
                                  const LaneRows<Layout, kRows>& lane_rows) {
    if constexpr (kFolded) return;
    if (blockIdx.x == 0) {  // of a head's blocks; B and C are one head's task in each group
      const int group = p.heads_per_group.of(h);
      const int column = static_cast<int>(threadIdx.x % 32) * kLine / static_cast<int>(sizeof(V));
      if (column < Layout::kExtent && (h == 0 || p.heads_per_group.of(h - 1) != group)) {
        prefetch_to_l2(p.B.at(t, group) + column);
        prefetch_to_l2(p.C.at(t, group) + column);
      }
      prefetch_to_l2(address_of(p.dt, t, h, 0));
    }
    prefetch_to_l2(p.x.at(t, h) + lane_rows.first);
    if (p.z) prefetch_to_l2(address_of(p.z, t, h, lane_rows.first));
  }

  template <bool kFolded, class Layout, int kRows>
  __device__ static Raw<Layout, kRows> fetch(const Parameters& p, int t, int h,
                                             const LaneRows<Layout, kRows>& lane_rows) {
    Raw<Layout, kRows> raw;
    const int group = p.heads_per_group.of(h);
    const T* const x = (kFolded ? p.folded_x : p.x).at(t, h);
    if constexpr (kFolded) {
      raw.decay = p.folded_decay(t, h);
      raw.folded_dt = p.folded_dt(t, h);
    } else {
#pragma unroll
      for (int r = 0; r < steps(kRows); ++r) {
        const int row = kPerHead ? 0 : min(lane_rows.row(r), lane_rows.R - 1);
        raw.dt[r] = bits_at(p.dt, t, h, row);
        raw.dt_bias[r] = p.dt_bias ? bits_at(p.dt_bias, h, row) : 0;
      }
      raw.A = kPerHead ? bits_at(p.A, h, 0, 0) : 0;
    }
    raw.B.fetch((kFolded ? p.folded_B : p.B).at(t, group), lane_rows.C);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      raw.x[r] = lane_rows.has(r) ? x[lane_rows.row(r)] : from_float<T>(0.0f);
    if constexpr (!kFolded) {
      raw.C.fetch(p.C.at(t, group), lane_rows.C);
      const int own = Layout::template own<kRows>();
      raw.own_x = lane_rows.has(own) ? x[lane_rows.row(own)] : from_float<T>(0.0f);
      raw.D = p.D && lane_rows.has(own) ? bits_at(p.D, h, lane_rows.row(own)) : 0;
      raw.z = p.z && lane_rows.has(own) ? bits_at(p.z, t, h, lane_rows.row(own)) : 0;
    }
    return raw;
  }

  template <bool kFolded, class Layout, int kRows>
  __device__ static Token<Layout, kRows> prepare(const Parameters& p, int, int h,
                                                 const LaneRows<Layout, kRows>& lane_rows,
                                                 const Raw<Layout, kRows>& raw) {
    Token<Layout, kRows> token;
    raw.B.values(token.Bdt);
#pragma unroll
    for (int r = 0; r < kRows; ++r) token.x[r] = to_float(raw.x[r]);
    if constexpr (kFolded) {
      token.scalars = {raw.decay, raw.folded_dt};
    } else {
      raw.C.values(token.C);
      token.Dx = p.D ? __fmul_rn(value_of(raw.D, p.D.format), to_float(raw.own_x)) : 0.0f;
      token.gate = p.z ? silu(value_of(raw.z, p.z.format)) : 1.0f;
#pragma unroll
      for (int r = 0; r < steps(kRows); ++r) token.dt[r] = time_step(p, raw.dt[r], raw.dt_bias[r]);
      if constexpr (kPerHead)
        token.scalars = {expf(__fmul_rn(value_of(raw.A, Format::float32), token.dt[0])),
                         token.dt[0]};
    }
    if constexpr (kPerHead) {
#pragma unroll
      for (int i = 0; i < Layout::kCount; ++i)
        token.Bdt[i] = __fmul_rn(token.Bdt[i], token.scalars.dt);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int i = 0; i < Layout::kCount; ++i) {
          const int n = Layout::column(i / Layout::kVec) + i % Layout::kVec;
          token.A[r * Layout::kCount + i] =
              lane_rows.has(r) && n < lane_rows.C ? at(p.A, h, lane_rows.row(r), n) : 0.0f;
        }
    }
    return token;
  }

  /// Stashes what a replay needs. One lane per token and head calls it.
  __device__ static void keep(const Parameters& p, int t, int h, const Scalars& scalars) {
    if (!p.stash_dt.data_handle()) return;
    p.stash_decay(t, h) = scalars.decay;
    p.stash_dt(t, h) = scalars.dt;
  }

  /// s = s exp(A d) + (B d) x, in explicitly rounded operations that the compiler cannot contract
  /// differently, so that a replay repeats a decode bit by bit.
  template <class Layout, int kRows>
  __device__ static void advance(const Token<Layout, kRows>& token,
                                 float (&s)[kRows][Layout::kCount]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < Layout::kCount; ++i) {
        if constexpr (kPerHead) {
          s[r][i] = fmaf(token.Bdt[i], token.x[r], __fmul_rn(s[r][i], token.scalars.decay));
        } else {
          const float decay = expf(__fmul_rn(token.A[r * Layout::kCount + i], token.dt[r]));
          s[r][i] =
              fmaf(__fmul_rn(token.Bdt[i], token.dt[r]), token.x[r], __fmul_rn(s[r][i], decay));
        }
      }
  }

  /// Advances s and returns (C . s + D x) silu(z) at the row that the lane owns.
  template <class Layout, int kRows>
  __device__ static float step(const Token<Layout, kRows>& token,
                               float (&s)[kRows][Layout::kCount]) {
    advance(token, s);
    float dots[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) dots[r] = Layout::dot(s[r], token.C);
    return (Layout::own_sum(dots) + token.Dx) * token.gate;
  }

  __device__ static void write(const Parameters& p, int t, int h, int row, float y) {
    p.out.at(t, h)[row] = from_float<T>(y);
  }
};

constexpr const char* kStateLetters = "[slots, H, P, N]";
constexpr const char* kName = "selective_state_update";

/// Adds the scales of a state pool [slots, H, P, N] in int8 or e4m3.
template <class T, class S>
void add_scales(const Checks& checks, const SelectiveStateUpdate<T, S>& in, StatePool<S>& pool) {
  checks.expect(in.state_scale.has_value() == kIsScaled<S>, "state_scale",
                kIsScaled<S> ? "given for states in int8 and e4m3" : "absent",
                kIsScaled<S> ? "nothing" : "one");
  checks.expect(!in.rand_seed || kIsScaled<S>, "rand_seed", "absent without state_scale", "given");
  checks.expect(!in.scale_block || kIsScaled<S>, "scale_block", "absent without state_scale",
                "given");
  if constexpr (kIsScaled<S>) {
    checks.expect(!in.snapshots, "snapshots", "absent beside state_scale", "given");
    const TensorView<float, 4>& scales = *in.state_scale;
    const Shape<4> state = shape_of(in.state);
    const std::int64_t block = in.scale_block.value_or(state[3]);
    checks.expect(block >= 1, "scale_block", "at least 1", std::to_string(block));
    checks.shape(scales, "state_scale", "[slots, H, P, ceil(N / scale_block)]",
                 {state[0], state[1], state[2], (state[3] + block - 1) / block});
    pool.scales = scales.data_handle();
    pool.scale_slot_stride = scales.stride(0);
    pool.scale_head_stride = scales.stride(1);
    pool.scale_row_stride = scales.stride(2);
    pool.scale_stride = scales.stride(3);
    pool.block = static_cast<int>(std::min(block, state[3]));
    pool.heads = static_cast<int>(state[1]);
    pool.stochastic = in.rand_seed.has_value();
    pool.seed = in.rand_seed.value_or(0);
    pool.stream = in.rand_stream;
  }
}

/// Whether the view repeats one number along the dimensions from `first` on (stride 0).
template <std::size_t Rank>
bool is_repeated(const MixedView<Rank>& view, std::size_t first) {
  for (std::size_t i = first; view && i < Rank; ++i)
    if (view.strides[i] != 0 && view.extents[i] > 1) return false;
  return true;
}

/// Whether each row has one token, whose state goes to a slot.
template <class S>
bool is_step(const RecurrenceParameters<S>& p) {
  return !p.parents && !p.fold.accepted && !p.read_only && !p.rows.starts && p.rows.columns == 0;
}

/// Launches a step of so few rows that launches wait for each other, and of so many heads that two
/// launches do not fit on the device at once; returns whether it did. (H200, 128 heads of 64 x 128,
/// us.)
///   - Asking L2 for states before the wait would delay the earlier launch's there: 19.2 at 8 rows,
///     and 20.5 with it.
///   - A launch that leaves room has the next one's blocks on the processors that are done first,
///     some with four times the work of others. So at 3 rows the larger tiling, which leaves a
///     fourth of the device, takes 8.1 to 9.5, and the smaller one 8.2; at 4 rows, where the larger
///     one fills it, 10.0 and 11.0.
template <class Op, class S, class Layout>
bool launch_crowded(const RecurrenceParameters<S>& p, const typename Op::Parameters& inputs,
                    cudaStream_t stream) {
  using Large = WarpTiling<4, 1, 16>;
  using Small = WarpTiling<2, 1, 16>;
  constexpr int kFit = 132 * Large::kWarpsPerProcessor;  // Large's warps, of an H100 or H200
  constexpr int kRowsOfWarp = Large::kRows * Layout::kRowsPerWarp;
  const std::int64_t warps = std::int64_t{p.rows.rows} * p.heads * p.R / kRowsOfWarp;
  if (!is_step(p) || p.rows.rows > kSmallBatch || 2 * warps <= kFit) return false;
  if (!fits<Op, S, Layout, Large>(p)) return false;
  RecurrenceParameters<S> late = p;
  late.dense = false;  // only dense states are asked for before the wait
  const auto launch_tiling = [&]<class Tiling>(Tiling) {
    launch_recurrence<Op, LaunchKind::step, S, Layout, Tiling>(kName, late, inputs, stream);
  };
  if (10 * warps > 9 * kFit && warps <= kFit)
    launch_tiling(Large());
  else
    launch_tiling(Small());
  return true;
}

/// Launches for rows of N elements, of which a lane has 16 as with 128 in launch_fast(), or 8 where
/// 16 would leave less than 128 neighbouring bytes of a row to an instruction; in the tilings for
/// that: one token per row, or without kStepsAlone anything. Returns whether it did.
template <class Op, class S, int N, bool kStepsAlone>
bool launch_rows(const RecurrenceParameters<S>& p, const typename Op::Parameters& inputs,
                 cudaStream_t stream) {
  constexpr bool kNarrow = sizeof(S) == 2, kShort = !kNarrow && N == 64;
  constexpr int kVec = 16 / static_cast<int>(sizeof(S)), kLanes = std::max(N / 16, kNarrow ? 4 : 8);
  using Layout = RowLayout<kLanes, kVec, N / (kLanes * kVec), false>;
  const auto launched = [&]<LaunchKind kKind, class Tiling>(Launch<kKind>, Tiling) {
    if (!fits<Op, S, Layout, Tiling>(p)) return false;
    launch_recurrence<Op, kKind, S, Layout, Tiling>(kName, p, inputs, stream);
    return true;
  };
  using Few = WarpTiling<kShort ? 8 : 4, 1, 16, kShort ? Cached::streaming : Cached::yes>;
  using Some = WarpTiling<kNarrow || kShort ? 4 : 2, 1, 16>;
  using Many = WarpTiling<4, 1, 16, Cached::yes>;  // rows of a batch that fill L2
  const bool keeps = !p.parents && !p.fold.accepted && !p.read_only;
  if (is_step(p)) {
    constexpr Launch<LaunchKind::step> kStep;
    if (p.rows.rows <= kSmallBatch && launched(kStep, Few())) return true;
    if (p.rows.rows >= kLargeBatch && launched(kStep, Many())) return true;
    if (launched(kStep, Some())) return true;
  }
  if constexpr (kStepsAlone) return false;
  if (keeps && launched(Launch<LaunchKind::chain>(), Some())) return true;
  return launched(Launch<LaunchKind::any>(), WarpTiling<2, 1, 8>());
}

/// Launches for A, dt and dt_bias per head. Only B and C of the activations' type (V = T) can use
/// the kernels with 16-byte accesses, which serve every N that models have.
template <class T, class S, class V>
void launch_per_head(const RecurrenceParameters<S>& p,
                     const typename SelectiveState<T, true, V>::Parameters& in, bool aligned,
                     cudaStream_t stream) {
  using Op = SelectiveState<T, true, V>;
  if constexpr (std::is_same_v<T, V>) {
    if (aligned) {
      if constexpr (sizeof(S) == 4)
        if (launch_crowded<Op, S, FastRows<S, 128>>(p, in, stream)) return;
      if (launch_fast<Op, S, FastRows<S, 128>>(kName, p, in, stream)) return;
      if constexpr (!kIsScaled<S>) {
        if (launch_rows<Op, S, 64, true>(p, in, stream)) return;
        if (launch_rows<Op, S, 256, false>(p, in, stream)) return;
      } else {
        if (launch_fast<Op, S, FastRows<S, 256>>(kName, p, in, stream)) return;
      }
      if (launch_fast<Op, S, FastRows<S, 64>>(kName, p, in, stream)) return;
    }
  }
  launch_any<Op>(kName, p, in, stream);
}

template <class T, class S, bool kPerHead, class V>
typename SelectiveState<T, kPerHead, V>::Parameters inputs_of(
    const SelectiveStateUpdate<T, S>& in) {
  typename SelectiveState<T, kPerHead, V>::Parameters p{};
  p.x = HeadVectors<const T>(in.x);
  p.B = HeadVectors<const V>(typed<V>(in.B));
  p.C = HeadVectors<const V>(typed<V>(in.C));
  p.dt = in.dt;
  p.A = in.A;
  p.z = in.z;
  p.D = in.D;
  p.dt_bias = in.dt_bias;
  p.out = HeadVectors<T>(in.out);
  p.dt_min = in.dt_min.value_or(-INFINITY);
  p.dt_max = in.dt_max.value_or(INFINITY);
  p.dt_softplus = in.dt_softplus;
  p.heads_per_group = Divisor(in.x.extent(1) / in.B.extents[1]);
  if (in.stash_dt) {
    p.stash_decay = *in.stash_decay;
    p.stash_dt = *in.stash_dt;
  }
  return p;
}

/// Launches for B and C of type V.
template <class T, class S, class V>
void launch_update(const RecurrenceParameters<S>& p, const SelectiveStateUpdate<T, S>& in,
                   bool per_head, cudaStream_t stream) {
  if (per_head)
    launch_per_head<T, S, V>(p, inputs_of<T, S, true, V>(in),
                             rows_aligned(typed<V>(in.B), 16) && rows_aligned(typed<V>(in.C), 16),
                             stream);
  else
    launch_any<SelectiveState<T, false, V>>(kName, p, inputs_of<T, S, false, V>(in), stream);
}

/// Calls body(V()) with V the type of B and C: T or float32.
template <class T, class Body>
void with_vectors(const Checks& checks, const MixedView<3>& B, Body body) {
  if (B.format == format_of<T>()) return body(T());
  checks.expect(B.format == Format::float32, "B",
                std::string(name_of(format_of<T>())) + ", as x, or float32", name_of(B.format));
  body(0.0f);
}

template <class T, class S>
void check(const Checks& checks, const SelectiveStateUpdate<T, S>& in, bool per_head) {
  const Shape<3> tokens = shape_of(in.x);
  const std::int64_t T_ = tokens[0], H = tokens[1], P = tokens[2];
  const std::int64_t G = in.B.extents[1], N = in.B.extents[2];
  checks.expect(G > 0 && H % G == 0, "B", "[T, G, N] with H a multiple of G",
                "H = " + std::to_string(H) + ", G = " + std::to_string(G));
  checks.shape(in.state, "state", kStateLetters, {in.state.extent(0), H, P, N});
  checks.shape(in.B, "B", "[T, G, N]", {T_, G, N});
  checks.shape(in.C, "C", "[T, G, N]", {T_, G, N});
  checks.expect(in.C.format == in.B.format, "C", name_of(in.B.format) + std::string(", as B"),
                name_of(in.C.format));
  checks.shape(in.out, "out", "[T, H, P]", tokens);
  checks.shape(in.dt, "dt", "[T, H, P]", tokens);
  checks.shape(in.A, "A", "[H, P, N]", {H, P, N});
  checks.expect(in.A.format == Format::float32, "A", "float32", name_of(in.A.format));
  if (in.D) checks.shape(in.D, "D", "[H, P]", {H, P});
  if (in.z) checks.shape(in.z, "z", "[T, H, P]", tokens);
  if (in.dt_bias) checks.shape(in.dt_bias, "dt_bias", "[H, P]", {H, P});
  checks.contiguous_rows(in.x, "x");
  checks.contiguous_rows(in.B, "B");
  checks.contiguous_rows(in.C, "C");
  checks.contiguous_rows(in.out, "out");
  checks.expect(in.stash_dt.has_value() == in.stash_decay.has_value(), "stash_decay and stash_dt",
                "both given, or neither", "one of them");
  if (!in.stash_dt) return;
  checks.expect(per_head, "A, dt and dt_bias", "one number per head with a stash", "more");
  checks.shape(*in.stash_dt, "stash_dt", "[T, H]", {T_, H});
  checks.shape(*in.stash_decay, "stash_decay", "[T, H]", {T_, H});
}

}  // namespace

template <class T, class S>
void selective_state_update(const SelectiveStateUpdate<T, S>& in, cudaStream_t stream) {
  const Checks checks(kName);
  const bool per_head = is_repeated(in.A, 1) && is_repeated(in.dt, 2) && is_repeated(in.dt_bias, 1);
  check(checks, in, per_head);
  RecurrenceParameters<S> p = recurrence_parameters(checks, kStateLetters, in.state, in.slots,
                                                    in.query_start_loc, in.x.extent(0));
  p.read_only = in.read_only;
  add_scales(checks, in, p.state);
  add_snapshots(checks, in.snapshots, p);
  add_parents(checks, in.parents, p);
  if (p.rows.rows == 0) return zero_outputs(kName, in.out, stream);
  if (in.state.extent(1) == 0) return;
  with_vectors<T>(checks, in.B,
                  [&](auto v) { launch_update<T, S, decltype(v)>(p, in, per_head, stream); });
}

template <class T, class S>
void selective_state_replay(const SelectiveStateStash<T>& stash, const TensorView<S, 4>& state,
                            const StateSlots& slots, const IndexView& accepted,
                            const std::optional<IndexTable>& nodes, cudaStream_t stream) {
  const Checks checks("selective_state_replay");
  const std::int64_t T_ = stash.x.extent(0), H = stash.x.extent(1), G = stash.B.extents[1];
  checks.expect(G > 0 && H % G == 0, "B", "[T, G, N] with H a multiple of G",
                "H = " + std::to_string(H) + ", G = " + std::to_string(G));
  checks.shape(stash.B, "B", "[T, G, N]", {T_, G, state.extent(3)});
  checks.shape(stash.x, "x", "[T, H, P]", {T_, state.extent(1), state.extent(2)});
  checks.shape(stash.decay, "decay", "[T, H]", {T_, H});
  checks.shape(stash.dt, "dt", "[T, H]", {T_, H});
  checks.contiguous_rows(stash.B, "B");
  checks.contiguous_rows(stash.x, "x");
  RecurrenceParameters<S> p =
      recurrence_parameters(checks, kStateLetters, state, slots, stash.query_start_loc, T_);
  add_fold(checks, p.rows, accepted, nodes, p);
  p.runs_tokens = false;
  if (p.rows.rows == 0 || state.empty()) return;
  with_vectors<T>(checks, stash.B, [&](auto v) {
    using V = decltype(v);
    typename SelectiveState<T, true, V>::Parameters inputs{};
    inputs.folded_decay = stash.decay;
    inputs.folded_dt = stash.dt;
    inputs.folded_x = HeadVectors<const T>(stash.x);
    inputs.folded_B = HeadVectors<const V>(typed<V>(stash.B));
    inputs.heads_per_group = Divisor(H / G);
    launch_per_head<T, S, V>(p, inputs, rows_aligned(typed<V>(stash.B), 16), stream);
  });
}

#define LOCKSTEP_INSTANTIATE(T, S)                                                             \
  template void selective_state_update(const SelectiveStateUpdate<T, S>&, cudaStream_t);       \
  template void selective_state_replay(const SelectiveStateStash<T>&, const TensorView<S, 4>&, \
                                       const StateSlots&, const IndexView&,                    \
                                       const std::optional<IndexTable>&, cudaStream_t);
LOCKSTEP_SERVING_TYPES(LOCKSTEP_INSTANTIATE)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_OTHER_TYPES(LOCKSTEP_INSTANTIATE)
#endif
#undef LOCKSTEP_INSTANTIATE

#ifdef LOCKSTEP_ALL_SHAPES
#define LOCKSTEP_INSTANTIATE(T, S) \
  template void selective_state_update(const SelectiveStateUpdate<T, S>&, cudaStream_t);
LOCKSTEP_SCALED_TYPES(LOCKSTEP_INSTANTIATE)
#undef LOCKSTEP_INSTANTIATE
#endif

}  // namespace lockstep::kernels
