// Mamba2, the selective state-space recurrence. Dao, Gu 2024, "Transformers are SSMs: Generalized
// Models and Efficient Algorithms Through Structured State Space Duality", eq. 2 (recurrence) and
// listing 1 (chunks).
//
//   d_t = clamp(softplus(dt_t + dt_bias))
//   s_t = exp(A d_t) s_{t-1} + d_t B_t x_t
//   y_t = C_t . s_t + D x_t, times silu(z_t) if given
//
//   here     paper    mamba-ssm, vLLM      shape
//   x, z     X        x, z                 [T, H, P], packed rows; head h uses group h / (H / G)
//   dt       Delta    dt                   [T, H, P], or [T, H] expanded with stride 0
//   A        A        A                    [H, P, N], or [H] expanded; A < 0, float32 or better
//   B, C     B, C     B, C                 [T, G, N]
//   D        D        D                    [H, P], or [H] expanded
//   dt_bias           dt_bias              [H, P], or [H] expanded
//   state    h        state, ssm_states    [slots, H, P, N]
//
// repeat() of reference/tensors/eigen.hpp expands views.
#pragma once

#include <cmath>
#include <type_traits>

#include "reference/recurrent/recurrence.hpp"
#include "reference/tensors/array.hpp"
#include "reference/tensors/functions.hpp"

namespace lockstep::reference {

template <class S>
struct Mamba2Inputs {
  static_assert(std::is_same_v<S, float> || std::is_same_v<S, double>,
                "exp(A dt) needs A in float32 or better");
  TensorView<const S, 3> x;                         // [T, H, P]
  TensorView<const S, 3> dt;                        // [T, H, P]
  TensorView<const S, 3> A;                         // [H, P, N]
  TensorView<const S, 3> B;                         // [T, G, N]
  TensorView<const S, 3> C;                         // [T, G, N]
  std::optional<TensorView<const S, 2>> D{};        // [H, P]
  std::optional<TensorView<const S, 3>> z{};        // [T, H, P]
  std::optional<TensorView<const S, 2>> dt_bias{};  // [H, P]
  bool dt_softplus = false;
  std::optional<S> dt_min{};
  std::optional<S> dt_max{};
  /// The operands of chunks that are rounded. False: (C_i . B_j) E_ij and d_j x_j. True, as in
  /// kernels that multiply x itself: (C_i . B_j) E_ij d_j and, for the state, exp(a_last - a_j) d_j
  /// x_j.
  bool steps_in_scores = false;
  Rows rows{};  ///< rows.tokens is set by the operation
};

namespace mamba2_detail {

template <class S>
void check(const Mamba2Inputs<S>& in) {
  const std::int64_t T = in.x.extent(0), H = in.x.extent(1), P = in.x.extent(2);
  const std::int64_t G = in.B.extent(1), N = in.B.extent(2);
  const Shape<3> tokens{T, H, P};
  const Shape<2> heads{H, P};
  require(shape_of(in.dt) == tokens, "dt is [T, H, P]: repeat() a dt of [T, H]");
  require(shape_of(in.A) == (Shape<3>{H, P, N}), "A is [H, P, N]: repeat() an A of [H]");
  require(shape_of(in.C) == shape_of(in.B) && in.B.extent(0) == T, "B and C are [T, G, N]");
  require(G > 0 && H % G == 0, "heads are a multiple of groups");
  require(!in.D || shape_of(*in.D) == heads, "D is [H, P]: repeat() a D of [H]");
  require(!in.dt_bias || shape_of(*in.dt_bias) == heads, "dt_bias is [H, P]");
  require(!in.z || shape_of(*in.z) == tokens, "z has the shape of x");
}

template <class S>
std::int64_t group_of(const Mamba2Inputs<S>& in, std::int64_t h) {
  return h / (in.x.extent(1) / in.B.extent(1));
}

/// d_t of one channel.
template <class S>
S time_step(const Mamba2Inputs<S>& in, std::int64_t t, std::int64_t h, std::int64_t p) {
  S dt = in.dt(t, h, p);
  if (in.dt_bias) dt += (*in.dt_bias)(h, p);
  if (in.dt_softplus) dt = softplus(dt);
  if (in.dt_min) dt = std::max(dt, *in.dt_min);
  if (in.dt_max) dt = std::min(dt, *in.dt_max);
  return dt;
}

/// Whether the view has one number per head (stride 0 along the other dimensions), as chunks and
/// stashes require.
template <class S>
bool one_per_head(const TensorView<const S, 3>& view, std::size_t first_dimension) {
  for (std::size_t i = first_dimension; i < 3; ++i)
    if (view.stride(i) != 0 && view.extent(i) > 1) return false;
  return true;
}

template <class S>
void require_scalar_heads(const Mamba2Inputs<S>& in) {
  const bool bias = !in.dt_bias || in.dt_bias->stride(1) == 0 || in.dt_bias->extent(1) <= 1;
  require(one_per_head(in.A, 1) && one_per_head(in.dt, 2) && bias,
          "chunks and stashes need one A, dt and dt_bias per head");
}

template <class S>
void write_output(const Mamba2Inputs<S>& in, std::int64_t t, std::int64_t h, std::int64_t p, S y,
                  const TensorView<S, 3>& out) {
  if (in.D) y += (*in.D)(h, p) * in.x(t, h, p);
  if (in.z) y *= silu((*in.z)(t, h, p));
  out(t, h, p) = rounded(y, in.rows.storage.output);
}

/// Advances one row of a head's state, s_t from s_{t-1}. A replay repeats exactly these operations.
template <class S>
void advance_row(Eigen::Ref<Eigen::Matrix<S, 1, Eigen::Dynamic>> s, S decay, S dt, S x,
                 const Vector<S>& B) {
  s = s * decay + (B * dt).transpose() * x;
}

/// One token of one head: s_t in `state`, y_t in `out`.
template <class S>
void step(const Mamba2Inputs<S>& in, std::int64_t t, std::int64_t h, Matrix<S>& state,
          const TensorView<S, 3>& out) {
  const std::int64_t g = group_of(in, h);
  const Vector<S> B = as_vector(at(in.B, t, g)), C = as_vector(at(in.C, t, g));
  const bool scalar = one_per_head(in.A, 1);
  for (std::int64_t p = 0; p < state.rows(); ++p) {
    const S dt = time_step(in, t, h, p);
    if (scalar) {
      advance_row<S>(state.row(p), std::exp(in.A(h, 0, 0) * dt), dt, in.x(t, h, p), B);
    } else {  // Mamba1: A differs within a head
      const Vector<S> decay = (as_vector(at(in.A, h, p)) * dt).array().exp();
      state.row(p) =
          state.row(p).cwiseProduct(decay.transpose()) + (B * dt).transpose() * in.x(t, h, p);
    }
    write_output(in, t, h, p, state.row(p).dot(C), out);
  }
}

template <class S>
Rows rows_of(const Mamba2Inputs<S>& in) {
  Rows rows = in.rows;
  rows.tokens = in.x.extent(0);
  return rows;
}

template <class S>
Shape<3> state_shape(const Mamba2Inputs<S>& in) {
  return {in.x.extent(1), in.x.extent(2), in.B.extent(2)};
}

}  // namespace mamba2_detail

/// Decode and verification: see run_update() for slots, tables, trees and snapshots.
template <class S>
void selective_state_update(const Mamba2Inputs<S>& in, const TensorView<S, 4>& state,
                            TensorView<S, 3> out, const std::optional<IndexView>& parents = {},
                            const std::optional<TensorView<S, 4>>& snapshots = {}) {
  mamba2_detail::check(in);
  require(shape_of(out) == shape_of(in.x), "out has the shape of x");
  fill(out, S{0});
  run_update(
      mamba2_detail::rows_of(in), state, parents, snapshots,
      [&](std::int64_t t, std::int64_t h, Matrix<S>& s) { mamba2_detail::step(in, t, h, s, out); });
}

/// The states after the update; the given states stay as they are.
template <class S>
Array<S, 4> next_states(const Mamba2Inputs<S>& in, const Array<S, 4>& states,
                        TensorView<S, 3> out) {
  Array<S, 4> next = states;
  selective_state_update(in, next.view(), out);
  return next;
}

/// Prefill token by token.
template <class S>
void selective_scan(const Mamba2Inputs<S>& in, const std::optional<TensorView<S, 4>>& state,
                    TensorView<S, 3> out, const std::optional<BoundaryStates<S>>& boundary = {}) {
  mamba2_detail::check(in);
  fill(out, S{0});
  run_prefill<S>(mamba2_detail::rows_of(in), mamba2_detail::state_shape(in), 1, state, boundary,
                 [&](const RowRange& tokens, std::int64_t h, Matrix<S>& s) {
                   mamba2_detail::step(in, tokens.begin, h, s, out);
                 });
}

namespace mamba2_detail {

/// Computes one chunk: the tokens' outputs, from each other and from the state before; then the
/// state after the chunk.
template <class S>
void chunk(const Mamba2Inputs<S>& in, const RowRange& tokens, std::int64_t h, Matrix<S>& state,
           const TensorView<S, 3>& out) {
  const std::int64_t L = tokens.size(), P = state.rows(), g = group_of(in, h);
  const StoragePoints& storage = in.rows.storage;
  Matrix<S> X(L, P), B(L, state.cols()), C(L, state.cols());
  Vector<S> d(L);
  for (std::int64_t i = 0; i < L; ++i) {
    const std::int64_t t = tokens.begin + i;
    d(i) = time_step(in, t, h, 0);
    X.row(i) = mapped(at(in.x, t, h)).transpose();
    B.row(i) = mapped(at(in.B, t, g)).transpose();
    C.row(i) = mapped(at(in.C, t, g)).transpose();
  }
  const Vector<S> log_decay = in.A(h, 0, 0) * d;
  const Matrix<S> E = segment_decays(log_decay);
  const Vector<S> since_start = decays_from_start(log_decay);
  const Vector<S> to_end = E.row(L - 1).transpose();  // exp(a_last - a_j)
  const auto rounded_operand = [&](const Matrix<S>& m) { return rounded_each(m, storage.operand); };
  const Vector<S> in_inputs = in.steps_in_scores ? Vector<S>::Ones(L).eval() : d;
  const Vector<S> in_scores = in.steps_in_scores ? d : Vector<S>::Ones(L).eval();
  const Matrix<S> inputs = rounded_operand(in_inputs.asDiagonal() * X);  // d_j x_j
  const Matrix<S> scores =                                               // (C_i . B_j) E_ij
      rounded_operand((C * B.transpose()).cwiseProduct(E) * in_scores.asDiagonal());
  const Matrix<S> before = rounded_each(state, storage.chunk_state);

  Matrix<S> Y = scores * inputs;                             // from the chunk's tokens
  Y += since_start.asDiagonal() * (C * before.transpose());  // from the state before it
  state = since_start(L - 1) * state;                        // S' = exp(a_last) S
  if (in.steps_in_scores)                                    // + sum_j exp(a_last - a_j) ...
    state += rounded_operand(to_end.cwiseProduct(d).asDiagonal() * X).transpose() * B;
  else
    state += inputs.transpose() * (to_end.asDiagonal() * B);
  for (std::int64_t i = 0; i < L; ++i)
    for (std::int64_t p = 0; p < P; ++p) write_output(in, tokens.begin + i, h, p, Y(i, p), out);
}

}  // namespace mamba2_detail

/// Prefill by chunks: equal to selective_scan() for every chunk size.
template <class S>
void ssd_prefill(const Mamba2Inputs<S>& in, std::int64_t chunk_size,
                 const std::optional<TensorView<S, 4>>& state, TensorView<S, 3> out,
                 const std::optional<BoundaryStates<S>>& boundary = {}) {
  mamba2_detail::check(in);
  mamba2_detail::require_scalar_heads(in);
  require(!in.rows.storage.state_each_token, "chunks have no state after every token");
  fill(out, S{0});
  run_prefill<S>(mamba2_detail::rows_of(in), mamba2_detail::state_shape(in), chunk_size, state,
                 boundary, [&](const RowRange& tokens, std::int64_t h, Matrix<S>& s) {
                   mamba2_detail::chunk(in, tokens, h, s, out);
                 });
}

/// Whether TensorRT-Edge-LLM computes a prefill in chunks of 128; otherwise it scans.
inline bool prefers_chunks(std::int64_t S, std::int64_t P, std::int64_t N) {
  const auto fits = [](std::int64_t extent) { return extent == 64 || extent == 128; };
  return S >= 128 && fits(P) && fits(N);
}

/// A padded batch: row b has context_lengths[b] tokens; tokens after them are ignored.
template <class S>
struct PaddedMamba2Inputs {
  Mamba2Inputs<S> common;                      ///< A, D, dt_bias, options, slots
  TensorView<const S, 4> x;                    // [batch, S, H, P]
  TensorView<const S, 4> dt;                   // [batch, S, H, P]
  TensorView<const S, 4> B;                    // [batch, S, G, N]
  TensorView<const S, 4> C;                    // [batch, S, G, N]
  std::optional<TensorView<const S, 4>> z{};   // [batch, S, H, P]
  std::optional<IndexView> context_lengths{};  // [batch]
};

/// prefill(inputs, state, out) is selective_scan or ssd_prefill with a chunk size.
template <class S, class Prefill>
void mamba2_padded(const PaddedMamba2Inputs<S>& in, const std::optional<TensorView<S, 4>>& state,
                   TensorView<S, 4> out, Prefill prefill) {
  const std::int64_t batch = in.x.extent(0), longest = in.x.extent(1);
  const Rows& rows = in.common.rows;
  require(!rows.query_start_loc, "a padded batch has lengths, not starts");
  if (state) check_slots(rows.slots, {}, batch, state->extent(0));
  fill(out, S{0});
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t L = in.context_lengths ? (*in.context_lengths)(b) : longest;
    require(0 <= L && L <= longest, "a context length is between 0 and S");
    const auto row = [&](const TensorView<const S, 4>& all) { return cut(at(all, b), 0, L); };
    const auto slot =
        static_cast<std::int32_t>(state ? source_slot(rows.slots, b, state->extent(0)) : 0);
    const bool resumes = !rows.has_initial_state || (*rows.has_initial_state)(b);
    Mamba2Inputs<S> one = in.common;
    one.x = row(in.x), one.dt = row(in.dt), one.B = row(in.B), one.C = row(in.C);
    if (in.z) one.z = row(*in.z);
    one.rows.slots = {.indices = make_view(&slot, Shape<1>{1})};
    one.rows.has_initial_state = make_view(&resumes, Shape<1>{1});
    prefill(one, state, cut(at(out, b), 0, L));
  }
}

/// The data of a verification from which a commit can repeat the accepted tokens
/// (TensorRT-Edge-LLM, replay format 2), packed like the tokens.
template <class S>
struct Mamba2Stash {
  Array<S, 2> decay;  ///< exp(A d_t) [T, H]
  Array<S, 2> dt;     ///< d_t [T, H]
  Array<S, 3> x;      // [T, H, P]
  Array<S, 3> B;      // [T, G, N]
};

template <class S>
Mamba2Stash<S> mamba2_stash(const Mamba2Inputs<S>& in) {
  mamba2_detail::check(in);
  mamba2_detail::require_scalar_heads(in);
  const std::int64_t T = in.x.extent(0), H = in.x.extent(1);
  Mamba2Stash<S> stash{Array<S, 2>(Shape<2>{T, H}), Array<S, 2>(Shape<2>{T, H}),
                       Array<S, 3>(shape_of(in.x)), Array<S, 3>(shape_of(in.B))};
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t h = 0; h < H; ++h) {
      stash.dt(t, h) = mamba2_detail::time_step(in, t, h, 0);
      stash.decay(t, h) = std::exp(in.A(h, 0, 0) * stash.dt(t, h));
    }
  for (std::int64_t t = 0; t < T; ++t) {
    mapped(at(stash.x.view(), t)) = mapped(at(in.x, t));
    mapped(at(stash.B.view(), t)) = mapped(at(in.B, t));
  }
  return stash;
}

/// Commits accepted tokens: see run_replay().
template <class S>
void mamba2_replay(const Mamba2Stash<S>& stash, Rows rows, const IndexView& accepted,
                   const TensorView<S, 4>& state, const std::optional<IndexTable>& nodes = {}) {
  const std::int64_t heads_per_group = stash.x.extent(1) / stash.B.extent(1);
  rows.tokens = stash.x.extent(0);
  run_replay(rows, accepted, nodes, state, [&](std::int64_t t, std::int64_t h, Matrix<S>& s) {
    const Vector<S> B = as_vector(at(stash.B.view(), t, h / heads_per_group));
    for (std::int64_t p = 0; p < s.rows(); ++p)
      mamba2_detail::advance_row<S>(s.row(p), stash.decay(t, h), stash.dt(t, h), stash.x(t, h, p),
                                    B);
  });
}

}  // namespace lockstep::reference
