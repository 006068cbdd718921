// Replay-state decode of one head: the stored state is that of some tokens ago, and a ring holds
// the updates since then. The state is read at every token and written once per L tokens. Mamba2
// (Dao, Gu 2024, eq. 2) and the gated delta rule (Yang, Kautz, Hatamizadeh 2024, eq. 10) differ
// only in their updates u_t k_t^T.
//
//   S_m     = exp(G_m) S + sum_{j <= m} exp(G_m - G_j) u_j k_j^T      G_j = sum_{i <= j} g_i
//   read(x) = exp(G_n + g_t) S x + sum_{j <= n} exp(G_n - G_j + g_t) (k_j . x) u_j
//
//   gated delta rule    u_t = beta_t (v_t - read(k_t))      o_t = read(q_t) + (k_t . q_t) u_t
//   Mamba2              u_t = d_t x_t, k_t = B_t, g_t = A d_t
//                       y_t = read(C_t) + (B_t . C_t) u_t
//
//   here     gated delta rule  Mamba2 (vLLM's replayssm)  shape
//   state    S                 S, ssm_state               [V, K]
//   k        k_j               B_j                        [R, K]
//   u        u_j               d_j x_j                    [R, V]
//   g        g_j               A d_j                      [R]
//   cursor   n                 write_pos                  live entries; those behind are not read
//
// A flush happens when the request's own position is a multiple of L, independently of the rest of
// the batch and of verifications, so that a request's states are always rounded at the same tokens.
// With drafts the ring needs R >= L - 1 + drafts entries.
#pragma once

#include <cmath>

#include "reference/recurrent/recurrence.hpp"

namespace lockstep::reference {

template <class S>
struct ReplayState {
  Matrix<S> state;  // [V, K]
  Matrix<S> k;      // [R, K]
  Matrix<S> u;      // [R, V]
  Vector<S> g;      // [R]
  std::int64_t cursor = 0;
  Format format = Format::exact;  ///< format to which a flush rounds the state
};

/// A replay state of `state` and an empty ring of R entries.
template <class S>
ReplayState<S> replay_state(const Matrix<S>& state, std::int64_t R, Format format = Format::exact) {
  require(R > 0, "a ring has at least one row");
  return {state,
          Matrix<S>::Zero(R, state.cols()),
          Matrix<S>::Zero(R, state.rows()),
          Vector<S>::Zero(R),
          0,
          format};
}

/// S_m, the state after the first m entries; r stays as it is.
template <class S>
Matrix<S> materialised(const ReplayState<S>& r, std::int64_t m) {
  require(0 <= m && m <= r.cursor, "a state is materialised after live entries");
  const S whole = r.g.head(m).sum();
  Matrix<S> state = std::exp(whole) * r.state;
  for (std::int64_t j = 0; j < m; ++j)
    state.noalias() +=
        std::exp(r.g.segment(j + 1, m - j - 1).sum()) * r.u.row(j).transpose() * r.k.row(j);
  return rounded_each(state, r.format);
}

/// Adds the first m entries to the state, and moves the other live entries to the front of the
/// ring.
template <class S>
void flush(ReplayState<S>& r, std::int64_t m) {
  r.state = materialised(r, m);
  const std::int64_t rest = r.cursor - m;
  r.k.topRows(rest) = r.k.middleRows(m, rest).eval();
  r.u.topRows(rest) = r.u.middleRows(m, rest).eval();
  r.g.head(rest) = r.g.segment(m, rest).eval();
  r.cursor = rest;
}

/// read(x) of the head comment: the state after `live` entries, decayed by another g_t, times x.
template <class S>
Vector<S> replay_read(const ReplayState<S>& r, std::int64_t live, S g_t, const Vector<S>& x) {
  Vector<S> y = std::exp(r.g.head(live).sum() + g_t) * (r.state * x);
  for (std::int64_t j = 0; j < live; ++j) {
    const S decay = std::exp(r.g.segment(j + 1, live - j - 1).sum() + g_t);
    y += decay * r.k.row(j).dot(x) * r.u.row(j).transpose();
  }
  return y;
}

/// A token's inputs for the gated delta rule: k normalised if requested, q scaled.
template <class S>
struct GatedDeltaToken {
  Vector<S> q, k;  // [K]
  Vector<S> v;     // [V]
  S g, beta;
};

/// A token's inputs for Mamba2: d after bias, softplus and clamp.
template <class S>
struct Mamba2Token {
  Vector<S> x;     // [V]
  Vector<S> B, C;  // [K]
  S A, d;
};

namespace replay_detail {

/// The ring entry of draft i.
template <class S>
std::int64_t row_of(const ReplayState<S>& r, std::int64_t i) {
  require(r.cursor + i < r.k.rows(), "a ring has a row for every live entry and draft");
  return r.cursor + i;
}

template <class S>
void write(ReplayState<S>& r, std::int64_t row, const Vector<S>& k, const Vector<S>& u, S g) {
  r.k.row(row) = k.transpose();
  r.u.row(row) = u.transpose();
  r.g(row) = g;
}

}  // namespace replay_detail

/// Writes the entry of draft i (0: the next token) behind the live ones, without moving the cursor;
/// returns o_t.
template <class S>
Vector<S> replay_draft(ReplayState<S>& r, std::int64_t i, const GatedDeltaToken<S>& t) {
  const std::int64_t live = replay_detail::row_of(r, i);
  const Vector<S> u = t.beta * (t.v - replay_read(r, live, t.g, t.k));
  Vector<S> o = replay_read(r, live, t.g, t.q) + t.k.dot(t.q) * u;
  replay_detail::write(r, live, t.k, u, t.g);
  return o;
}

/// The same for Mamba2; the caller adds D x and applies the gate.
template <class S>
Vector<S> replay_draft(ReplayState<S>& r, std::int64_t i, const Mamba2Token<S>& t) {
  const std::int64_t live = replay_detail::row_of(r, i);
  const Vector<S> u = t.d * t.x;
  Vector<S> y = replay_read(r, live, t.A * t.d, t.C) + t.B.dot(t.C) * u;
  replay_detail::write(r, live, t.B, u, t.A * t.d);
  return y;
}

/// Accepts `accepted` drafts after `position` tokens, and flushes at each multiple of L that they
/// pass.
template <class S>
void replay_accept(ReplayState<S>& r, std::int64_t position, std::int64_t accepted,
                   std::int64_t L) {
  require(L > 0 && accepted >= 0,
          "a length is positive, a number of accepted drafts no less than 0");
  require(r.cursor + accepted <= r.k.rows(), "accepted drafts are in the ring");
  r.cursor += accepted;
  const std::int64_t end = position + accepted;
  for (std::int64_t flushed = (position / L + 1) * L; flushed <= end; flushed += L)
    flush(r, r.cursor - (end - flushed));
}

/// Decodes one token, after `position` others.
template <class S, class Token>
Vector<S> replay_step(ReplayState<S>& r, std::int64_t position, std::int64_t L, const Token& t) {
  Vector<S> out = replay_draft(r, 0, t);
  replay_accept(r, position, 1, L);
  return out;
}

}  // namespace lockstep::reference
