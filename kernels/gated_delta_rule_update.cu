// Gated delta rule for decoding. Equations: reference/gated_delta_rule.hpp; how it maps onto the
// machine: kernels/base/recurrence.cuh, with a value head's S [V, K] as the state: S k and S q are
// sums over the lanes of one row.
#include "kernels/gated_delta_rule_update.hpp"

#include "kernels/base/recurrence.cuh"

namespace lockstep::kernels {
namespace {

/// A step's tokens as kernels take them.
template <class T>
struct Tokens {
  HeadVectors<const T> q, k, v;
  MixedView<2> g, beta;
  bool aligned = false;  ///< q and k, rows of 16-byte pieces
};

template <class T>
struct GatedDelta {
  struct Parameters {
    Tokens<T> tokens, folded;
    HeadVectors<T> out;
    MixedView<1> A_log, dt_bias;
    float scale;
    bool use_qk_l2norm;
    Divisor value_heads_per_key_head;
  };

  template <class Layout, int kRows>
  struct Token {
    float k[Layout::kCount];  ///< as it came
    float q[Layout::kCount];
    float k_scale, q_scale;  ///< what k and q are still to be multiplied by
    float v[kRows];
    float alpha, beta;
    float kq;  ///< k . q, scaled
  };

  /// What makes x a direction, if that is asked for.
  template <class Layout>
  __device__ static float scale_of(const Parameters& p, const float (&x)[Layout::kCount]) {
    return p.use_qk_l2norm ? 1.0f / sqrtf(Layout::sum(Layout::dot(x, x)) + 1e-6f) : 1.0f;
  }

  template <class Layout, int kRows>
  struct Raw {
    typename Layout::template Raw<T> k, q;
    T v[kRows];
    unsigned g, beta, A_log, dt_bias;
  };

  template <class Layout, int kRows>
  __device__ static Raw<Layout, kRows> fetch_from(const Parameters& p, const Tokens<T>& from, int t,
                                                  int hv, const Place<Layout, kRows>& place,
                                                  bool with_q) {
    Raw<Layout, kRows> raw;
    const int h = p.value_heads_per_key_head.of(hv);
    raw.k.fetch(from.k.at(t, h), place.C);
    if (with_q) raw.q.fetch(from.q.at(t, h), place.C);
    const T* const v = from.v.at(t, hv);
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw.v[r] = place.has(r) ? v[place.row(r)] : from_float<T>(0.0f);
    raw.g = bits_at(from.g, t, hv);
    raw.beta = bits_at(from.beta, t, hv);
    raw.A_log = p.A_log ? bits_at(p.A_log, hv) : 0;
    raw.dt_bias = p.A_log ? bits_at(p.dt_bias, hv) : 0;
    return raw;
  }

  template <class Layout, int kRows>
  __device__ static Token<Layout, kRows> prepare_from(const Parameters& p, const Tokens<T>& from,
                                                      const Raw<Layout, kRows>& raw, bool with_q) {
    Token<Layout, kRows> token;
    raw.k.values(token.k);
    token.k_scale = scale_of<Layout>(p, token.k);
    if (with_q) {
      raw.q.values(token.q);
      token.q_scale = p.scale * scale_of<Layout>(p, token.q);
      token.kq = token.k_scale * token.q_scale * Layout::sum(Layout::dot(token.k, token.q));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) token.v[r] = to_float(raw.v[r]);
    float g = value_of(raw.g, from.g.format);
    token.beta = value_of(raw.beta, from.beta.format);
    if (p.A_log) {
      g = -expf(value_of(raw.A_log, p.A_log.format)) *
          softplus(g + value_of(raw.dt_bias, p.dt_bias.format));
      token.beta = sigmoid(token.beta);
    }
    token.alpha = expf(g);
    return token;
  }

  template <class Layout, int kRows>
  __device__ static Raw<Layout, kRows> fetch(const Parameters& p, int t, int hv,
                                             const Place<Layout, kRows>& place) {
    return fetch_from<Layout, kRows>(p, p.tokens, t, hv, place, true);
  }

  template <class Layout, int kRows>
  __device__ static Token<Layout, kRows> prepare(const Parameters& p, int, int,
                                                 const Place<Layout, kRows>&,
                                                 const Raw<Layout, kRows>& raw) {
    return prepare_from<Layout, kRows>(p, p.tokens, raw, true);
  }

  template <class Layout, int kRows>
  __device__ static Token<Layout, kRows> load_folded(const Parameters& p, int t, int hv,
                                                     const Place<Layout, kRows>& place) {
    return prepare_from<Layout, kRows>(
        p, p.folded, fetch_from<Layout, kRows>(p, p.folded, t, hv, place, false), false);
  }

  /// S = alpha S; u = beta (v - S k); S += u k^T, of which the sum of S k without its scale is
  /// given for the S before. The one place where a state advances, in operations that no compiler
  /// fuses otherwise: a replay repeats a decode bit by bit. Returns u.
  template <class Layout, class Token>
  __device__ static float advance_by(const Token& token, float (&s)[Layout::kCount], int r,
                                     float Sk) {
    const float seen = __fmul_rn(token.alpha, __fmul_rn(token.k_scale, Sk));
    const float u = __fmul_rn(token.beta, __fsub_rn(token.v[r], seen));
    const float scaled = __fmul_rn(u, token.k_scale);
#pragma unroll
    for (int i = 0; i < Layout::kCount; ++i)
      s[i] = fmaf(scaled, token.k[i], __fmul_rn(token.alpha, s[i]));
    return u;
  }

  template <class Layout, class Token>
  __device__ static void advance(const Token& token, float (&s)[Layout::kCount], int r) {
    advance_by<Layout>(token, s, r, Layout::sum(Layout::dot(s, token.k)));
  }

  /// o = S q = alpha S' q + u (k . q) for the S' before: neither sum waits for the other.
  template <class Layout, class Token>
  __device__ static float step(const Token& token, float (&s)[Layout::kCount], int r) {
    const float Sk = Layout::dot(s, token.k), Sq = Layout::dot(s, token.q);
    const float sum_k = Layout::sum(Sk), sum_q = Layout::sum(Sq);
    const float u = advance_by<Layout>(token, s, r, sum_k);
    return fmaf(u, token.kq, token.alpha * token.q_scale * sum_q);
  }

  __device__ static void write(const Parameters& p, int t, int hv, int row, float o) {
    p.out.at(t, hv)[row] = from_float<T>(o);
  }
};

template <class T, class S>
void launch_update(const RecurrenceParameters<S>& p, const typename GatedDelta<T>::Parameters& in,
                   cudaStream_t stream) {
  using Op = GatedDelta<T>;
  constexpr const char* kName = "gated_delta_rule_update";
  if (p.rows.rows == 0 || p.heads == 0) return;
  if ((!p.runs_tokens || in.tokens.aligned) && (!p.fold.accepted || in.folded.aligned)) {
#define LOCKSTEP_CASE(K) \
  if (launch_fast<Op, S, FastRows<S, K>>(kName, p, in, stream)) return;
    LOCKSTEP_STATE_ROWS(LOCKSTEP_CASE)
#undef LOCKSTEP_CASE
  }
  launch_recurrence<Op, S, AnyRows, Deal<2, 4, 8>>(kName, p, in, stream);
}

template <class T>
Tokens<T> checked_tokens(const Checks& checks, const GatedDeltaTokens<T>& x, const Shape<4>& state,
                         bool with_q) {
  const std::int64_t T_ = x.k.extent(0), H = x.k.extent(1), HV = state[1];
  checks.expect(H > 0 && HV % H == 0, "state", "[slots, HV, V, K] with HV a multiple of H",
                "HV = " + std::to_string(HV) + " for H = " + std::to_string(H));
  checks.shape(x.k, "k", "[T, H, K]", {T_, H, state[3]});
  checks.contiguous_rows(x.k, "k");
  if (with_q) {
    checks.shape(x.q, "q", "[T, H, K]", {T_, H, state[3]});
    checks.contiguous_rows(x.q, "q");
  }
  checks.shape(x.v, "v", "[T, HV, V]", {T_, HV, state[2]});
  checks.contiguous_rows(x.v, "v");
  checks.shape(x.g, "g", "[T, HV]", {T_, HV});
  checks.shape(x.beta, "beta", "[T, HV]", {T_, HV});
  Tokens<T> tokens{{}, HeadVectors<const T>(x.k), HeadVectors<const T>(x.v), x.g, x.beta};
  if (with_q) tokens.q = HeadVectors<const T>(x.q);
  tokens.aligned = rows_aligned(x.k, 16) && (!with_q || rows_aligned(x.q, 16));
  return tokens;
}

template <class T, class S>
typename GatedDelta<T>::Parameters inputs_of(const Checks& checks,
                                             const GatedDeltaRuleUpdate<T, S>& in, bool with_q) {
  const Shape<4> state = shape_of(in.state);
  typename GatedDelta<T>::Parameters p{};
  p.tokens = checked_tokens(checks, in.tokens, state, with_q);
  checks.expect(bool(in.A_log) == bool(in.dt_bias), "A_log and dt_bias", "both given, or neither",
                "one of them");
  if (in.A_log) {
    checks.shape(in.A_log, "A_log", "[HV]", {state[1]});
    checks.shape(in.dt_bias, "dt_bias", "[HV]", {state[1]});
  }
  p.A_log = in.A_log;
  p.dt_bias = in.dt_bias;
  p.scale = in.scale.value_or(1.0f / sqrtf(static_cast<float>(state[3])));
  p.use_qk_l2norm = in.use_qk_l2norm;
  p.value_heads_per_key_head = Divisor(state[1] / in.tokens.k.extent(1));
  return p;
}

constexpr const char* kStateLetters = "[slots, HV, V, K]";

}  // namespace

template <class T, class S>
void gated_delta_rule_update(const GatedDeltaRuleUpdate<T, S>& in, cudaStream_t stream) {
  const Checks checks("gated_delta_rule_update");
  typename GatedDelta<T>::Parameters inputs = inputs_of(checks, in, true);
  const std::int64_t T_ = in.tokens.k.extent(0);
  RecurrenceParameters<S> p = recurrence_parameters(checks, kStateLetters, in.state, in.slots,
                                                    in.tokens.query_start_loc, T_);
  checks.shape(in.out, "out", "[T, HV, V]", shape_of(in.tokens.v));
  checks.contiguous_rows(in.out, "out");
  inputs.out = HeadVectors<T>(in.out);
  p.read_only = in.read_only;
  add_snapshots(checks, in.snapshots, p);
  add_parents(checks, in.parents, p);
  if (in.fold) {
    checks.expect(in.fold_accepted.has_value(), "fold_accepted", "given with a fold", "nothing");
    inputs.folded = checked_tokens(checks, *in.fold, shape_of(in.state), false);
    add_fold(
        checks,
        row_slots(checks, {}, in.fold->query_start_loc, in.fold->k.extent(0), in.state.extent(0)),
        *in.fold_accepted, {}, p);
    p.read_only = true;
  }
  launch_update<T, S>(p, inputs, stream);
}

template <class T, class S>
void gated_delta_rule_replay(const GatedDeltaRuleUpdate<T, S>& in, const IndexView& accepted,
                             const std::optional<IndexTable>& nodes, cudaStream_t stream) {
  const Checks checks("gated_delta_rule_replay");
  typename GatedDelta<T>::Parameters inputs = inputs_of(checks, in, false);
  inputs.folded = inputs.tokens;
  RecurrenceParameters<S> p = recurrence_parameters(
      checks, kStateLetters, in.state, in.slots, in.tokens.query_start_loc, in.tokens.k.extent(0));
  add_fold(checks, p.rows, accepted, nodes, p);
  p.runs_tokens = false;
  launch_update<T, S>(p, inputs, stream);
}

#define LOCKSTEP_INSTANTIATE(T, S)                                                           \
  template void gated_delta_rule_update(const GatedDeltaRuleUpdate<T, S>&, cudaStream_t);    \
  template void gated_delta_rule_replay(const GatedDeltaRuleUpdate<T, S>&, const IndexView&, \
                                        const std::optional<IndexTable>&, cudaStream_t);
LOCKSTEP_SERVING_TYPES(LOCKSTEP_INSTANTIATE)
#ifdef LOCKSTEP_ALL_SHAPES
LOCKSTEP_OTHER_TYPES(LOCKSTEP_INSTANTIATE)
#endif
#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::kernels
