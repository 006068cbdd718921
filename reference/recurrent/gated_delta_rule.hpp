// Gated delta rule. Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with
// Delta Rule", eq. 10 (recurrence) and section 3.3 (chunks in WY form).
//
//   S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        o_t = S_t q_t
//
//   here      paper        FLA, vLLM     shape
//   g         log alpha_t  g             [T, HV], <= 0
//   beta      beta_t       beta          [T, HV]
//   q, k      q_t, k_t     q, k          [T, H, K]; value head hv uses head hv / (HV / H)
//   v         v_t          v             [T, HV, V]
//   state     S_t          ssm_state     [slots, HV, V, K], V-major; K-major: transposed()
//   out       o_t          o             [T, HV, V]
//
// q and k are L2-normalised if requested, then q is scaled. Chunk form, for tokens i, j of a chunk,
// with G_i = sum_{l <= i} g_l and E_ij = exp(G_i - G_j) for j <= i, else 0 (masked before the
// exponential):
//
//   A  = strictly lower part of (diag(beta) K K^T) o E      Tm = (I + A)^-1
//   U  = Tm diag(beta) V                                    W  = Tm diag(beta exp(G)) K
//   Vn = U - W S^T
//   O  = diag(exp G) Q S^T + ((Q K^T) o E) Vn               S' = exp(G_last) S + (E_last Vn)^T K
#pragma once

#include <Eigen/LU>
#include <cmath>

#include "reference/recurrent/recurrence.hpp"
#include "reference/tensors/array.hpp"
#include "reference/tensors/functions.hpp"

namespace lockstep::reference {

template <class S>
struct GatedDeltaRuleInputs {
  TensorView<const S, 3> q;     // [T, H, K]
  TensorView<const S, 3> k;     // [T, H, K]
  TensorView<const S, 3> v;     // [T, HV, V]
  TensorView<const S, 2> g;     // [T, HV]
  TensorView<const S, 2> beta;  // [T, HV]
  std::optional<S> scale{};     ///< factor of q; K^-0.5 by default
  bool use_qk_l2norm = false;
  Rows rows{};  ///< rows.tokens is set by the operation
};

/// g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), from a and b [T, HV] and A_log and
/// dt_bias [HV].
template <class S>
struct GatedDeltaGates {
  Array<S, 2> g;     // [T, HV]
  Array<S, 2> beta;  // [T, HV]
};

template <class S>
GatedDeltaGates<S> gated_delta_gates(const TensorView<const S, 2>& a,
                                     const TensorView<const S, 2>& b,
                                     const TensorView<const S, 1>& A_log,
                                     const TensorView<const S, 1>& dt_bias) {
  GatedDeltaGates<S> gates{Array<S, 2>(shape_of(a)), Array<S, 2>(shape_of(b))};
  for (std::int64_t t = 0; t < a.extent(0); ++t)
    for (std::int64_t hv = 0; hv < a.extent(1); ++hv) {
      gates.g(t, hv) = -std::exp(A_log(hv)) * softplus(a(t, hv) + dt_bias(hv));
      gates.beta(t, hv) = sigmoid(b(t, hv));
    }
  return gates;
}

/// x / sqrt(sum(x^2) + 1e-6). A zero vector stays zero.
template <class S>
Vector<S> l2_normalised(const Vector<S>& x) {
  return x / std::sqrt(x.squaredNorm() + S{1e-6});
}

namespace gated_delta_detail {

template <class S>
void check(const GatedDeltaRuleInputs<S>& in, const TensorView<S, 3>& out) {
  const std::int64_t T = in.q.extent(0), H = in.q.extent(1), HV = in.v.extent(1);
  require(shape_of(in.k) == shape_of(in.q), "k has the shape of q, [T, H, K]");
  require(in.v.extent(0) == T && shape_of(out) == shape_of(in.v), "v and out are [T, HV, V]");
  require(H > 0 && HV % H == 0, "value heads are a multiple of key heads");
  require(shape_of(in.g) == (Shape<2>{T, HV}), "g is [T, HV]");
  require(shape_of(in.beta) == (Shape<2>{T, HV}), "beta is [T, HV]");
}

/// q or k of a token, normalised if requested, before the scale.
template <class S>
Vector<S> direction(const GatedDeltaRuleInputs<S>& in, const TensorView<const S, 3>& qk,
                    std::int64_t t, std::int64_t hv) {
  const std::int64_t h = hv / (in.v.extent(1) / qk.extent(1));
  Vector<S> x = as_vector(at(qk, t, h));
  if (!in.use_qk_l2norm) return x;
  return rounded_each(l2_normalised(x), in.rows.storage.normalised_qk);
}

template <class S>
S scale_of(const GatedDeltaRuleInputs<S>& in) {
  return in.scale ? *in.scale : S{1} / std::sqrt(static_cast<S>(in.q.extent(2)));
}

/// S_t of one value head from S_{t-1} [V, K].
template <class S>
void advance(const GatedDeltaRuleInputs<S>& in, std::int64_t t, std::int64_t hv, Matrix<S>& state) {
  const Vector<S> k = direction(in, in.k, t, hv);
  const Vector<S> v = as_vector(at(in.v, t, hv));
  state *= std::exp(in.g(t, hv));                        // alpha_t S_{t-1}
  const Vector<S> u = in.beta(t, hv) * (v - state * k);  // the value that the token adds
  state.noalias() += u * k.transpose();                  // + beta_t (v_t - S k_t) k_t^T
}

/// One token of one value head: S_t in `state`, o_t in `out`.
template <class S>
void step(const GatedDeltaRuleInputs<S>& in, std::int64_t t, std::int64_t hv, Matrix<S>& state,
          const TensorView<S, 3>& out) {
  advance(in, t, hv, state);
  const Vector<S> q = direction(in, in.q, t, hv) * scale_of(in);
  mapped(at(out, t, hv)) = rounded_each((state * q).eval(), in.rows.storage.output);  // o_t
}

template <class S>
Rows rows_of(const GatedDeltaRuleInputs<S>& in) {
  Rows rows = in.rows;
  rows.tokens = in.q.extent(0);
  return rows;
}

template <class S>
Shape<3> state_shape(const GatedDeltaRuleInputs<S>& in) {
  return {in.v.extent(1), in.v.extent(2), in.q.extent(2)};
}

}  // namespace gated_delta_detail

/// Decode and verification: see run_update() for slots, tables, trees and snapshots.
template <class S>
void gated_delta_rule_update(const GatedDeltaRuleInputs<S>& in, const TensorView<S, 4>& state,
                             TensorView<S, 3> out, const std::optional<IndexView>& parents = {},
                             const std::optional<TensorView<S, 4>>& snapshots = {}) {
  gated_delta_detail::check(in, out);
  fill(out, S{0});
  run_update(gated_delta_detail::rows_of(in), state, parents, snapshots,
             [&](std::int64_t t, std::int64_t hv, Matrix<S>& s) {
               gated_delta_detail::step(in, t, hv, s, out);
             });
}

/// Commits accepted tokens of a verification: see run_replay(). It ignores q.
template <class S>
void gated_delta_rule_replay(const GatedDeltaRuleInputs<S>& in, const IndexView& accepted,
                             const TensorView<S, 4>& state,
                             const std::optional<IndexTable>& nodes = {}) {
  run_replay(gated_delta_detail::rows_of(in), accepted, nodes, state,
             [&](std::int64_t t, std::int64_t hv, Matrix<S>& s) {
               gated_delta_detail::advance(in, t, hv, s);
             });
}

/// Prefill token by token.
template <class S>
void gated_delta_rule_scan(const GatedDeltaRuleInputs<S>& in,
                           const std::optional<TensorView<S, 4>>& state, TensorView<S, 3> out,
                           const std::optional<BoundaryStates<S>>& boundary = {}) {
  gated_delta_detail::check(in, out);
  fill(out, S{0});
  run_prefill<S>(gated_delta_detail::rows_of(in), gated_delta_detail::state_shape(in), 1, state,
                 boundary, [&](const RowRange& tokens, std::int64_t hv, Matrix<S>& s) {
                   gated_delta_detail::step(in, tokens.begin, hv, s, out);
                 });
}

/// The inputs of a chunk: L tokens of one value head. Q is scaled.
template <class S>
struct GatedDeltaChunk {
  Matrix<S> Q, K;     // [L, K]
  Matrix<S> V;        // [L, V]
  Vector<S> g, beta;  // [L]
};

/// The stages of a chunk, in the order in which chunk kernels compute them.
template <class S>
struct GatedDeltaChunkStages {
  Matrix<S> E;      ///< decay from token j to token i [L, L]
  Matrix<S> A;      ///< effect of token j's update on what token i reads [L, L], strictly lower
  Matrix<S> Tm;     ///< (I + A)^-1 [L, L]
  Matrix<S> U;      // [L, V]
  Matrix<S> W;      // [L, K]
  Matrix<S> Vn;     ///< new values [L, V]
  Matrix<S> O;      ///< outputs [L, V]
  Matrix<S> state;  ///< after the chunk [V, K]
};

/// Computes the stages of a chunk of at least one token; `state` [V, K] is the state before it.
template <class S>
GatedDeltaChunkStages<S> gated_delta_chunk(const GatedDeltaChunk<S>& c, const Matrix<S>& state,
                                           const StoragePoints& storage = {}) {
  const auto stored = [&](const Matrix<S>& x) { return rounded_each(x, storage.operand); };
  const std::int64_t L = c.g.size();
  const Matrix<S> I = Matrix<S>::Identity(L, L);
  const Vector<S> since_start = decays_from_start(c.g);  // exp(G)
  const Matrix<S> before = rounded_each(state, storage.chunk_state);
  GatedDeltaChunkStages<S> s;
  s.E = segment_decays(c.g);
  s.A = (c.beta.asDiagonal() * (c.K * c.K.transpose())).cwiseProduct(s.E);
  s.A = s.A.template triangularView<Eigen::StrictlyLower>().toDenseMatrix().eval();
  s.Tm = stored((I + s.A).template triangularView<Eigen::UnitLower>().solve(I));
  s.U = stored(s.Tm * stored(c.beta.asDiagonal() * c.V));
  s.W = stored(s.Tm * stored(c.beta.cwiseProduct(since_start).asDiagonal() * c.K));
  const Matrix<S> Vn = s.U - s.W * before.transpose();
  s.Vn = stored(Vn);
  s.O = since_start.asDiagonal() * (c.Q * before.transpose());
  s.O += stored((c.Q * c.K.transpose()).cwiseProduct(s.E)) * s.Vn;
  s.state = since_start(L - 1) * state +
            stored(s.E.row(L - 1).transpose().asDiagonal() * Vn).transpose() * c.K;
  return s;
}

/// The chunk of tokens [begin, end) of value head hv.
template <class S>
GatedDeltaChunk<S> gated_delta_chunk_of(const GatedDeltaRuleInputs<S>& in, const RowRange& tokens,
                                        std::int64_t hv) {
  using gated_delta_detail::direction;
  const std::int64_t L = tokens.size(), K = in.q.extent(2), V = in.v.extent(2);
  GatedDeltaChunk<S> c{Matrix<S>(L, K), Matrix<S>(L, K), Matrix<S>(L, V), Vector<S>(L),
                       Vector<S>(L)};
  for (std::int64_t i = 0; i < L; ++i) {
    const std::int64_t t = tokens.begin + i;
    c.Q.row(i) = direction(in, in.q, t, hv).transpose() * gated_delta_detail::scale_of(in);
    c.K.row(i) = direction(in, in.k, t, hv).transpose();
    c.V.row(i) = mapped(at(in.v, t, hv)).transpose();
    c.g(i) = in.g(t, hv);
    c.beta(i) = in.beta(t, hv);
  }
  return c;
}

/// Prefill by chunks: equal to gated_delta_rule_scan() for every chunk size.
template <class S>
void gated_delta_rule_prefill(const GatedDeltaRuleInputs<S>& in, std::int64_t chunk_size,
                              const std::optional<TensorView<S, 4>>& state, TensorView<S, 3> out,
                              const std::optional<BoundaryStates<S>>& boundary = {}) {
  gated_delta_detail::check(in, out);
  require(!in.rows.storage.state_each_token, "chunks have no state after every token");
  fill(out, S{0});
  run_prefill<S>(gated_delta_detail::rows_of(in), gated_delta_detail::state_shape(in), chunk_size,
                 state, boundary, [&](const RowRange& tokens, std::int64_t hv, Matrix<S>& s) {
                   const GatedDeltaChunkStages<S> stages =
                       gated_delta_chunk(gated_delta_chunk_of(in, tokens, hv), s, in.rows.storage);
                   for (std::int64_t i = 0; i < tokens.size(); ++i)
                     mapped(at(out, tokens.begin + i, hv)) =
                         rounded_each(stages.O.row(i).transpose().eval(), in.rows.storage.output);
                   s = stages.state;
                 });
}

}  // namespace lockstep::reference
