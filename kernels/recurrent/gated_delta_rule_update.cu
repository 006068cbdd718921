// Gated delta rule for decoding. Equations: reference/recurrent/gated_delta_rule.hpp. Mapping to
// the machine: kernels/recurrent/recurrence.cuh, where the state [R, C] is a value head's S [V, K],
// so that the products S k and S q are sums over the lanes of one row. This file is the operation
// Op of that mapping, and the launch wrappers.
#include "kernels/recurrent/gated_delta_rule_update.hpp"

#include "kernels/base/zero.cuh"
#include "kernels/recurrent/recurrence_launch.cuh"

namespace lockstep::kernels {
namespace {

/// A step's tokens as kernels take them.
template <class T>
struct Tokens {
  HeadVectors<const T> q, k, v;
  MixedView<2> g, beta;
  bool aligned = false;  ///< rows of q and k begin at multiples of 16 bytes
};

/// The Op of recurrence.cuh.
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

  /// Per-token scalars, shared by all rows of the state.
  struct Scalars {
    float k_scale, q_scale;  ///< 1 / |k|, and scale / |q|: k and q themselves stay unscaled
    float alpha, beta;
    float kq;  ///< k . q, with both scales
  };
  enum : int {
    kColumnVectors = 2,  ///< k, q
    kRowVectors = 1,     ///< v
    /// Chunks multiply k and q in tf32, which is exact for T of 16 bits but not for float32.
    kHasChunks = sizeof(T) == 2
  };

  template <class Layout, int kRows>
  struct Token {
    float k[Layout::kCount];  ///< the lane's elements of k, unscaled
    float q[Layout::kCount];  ///< likewise
    Scalars scalars;
    float v;  ///< v of the row that the lane owns
  };

  template <class Token, class Visit>
  __device__ static void visit_columns(Token& token, bool folded, Visit visit) {
    visit(0, token.k);
    if (!folded) visit(1, token.q);
  }
  /// Fills the token's row values; value(i, r) is row vector i at the lane's r-th row.
  template <class Layout, int kRows, class Value>
  __device__ static void take_rows(Token<Layout, kRows>& token, bool, Value value) {
    token.v = value(0, Layout::template own<kRows>());
  }
  template <bool kFolded>
  __device__ static const Tokens<T>& source(const Parameters& p) {
    return kFolded ? p.folded : p.tokens;
  }
  template <bool kFolded>
  __device__ static float row_value(const Parameters& p, int, int t, int hv, int row) {
    return to_float(source<kFolded>(p).v.at(t, hv)[row]);
  }

  template <class Layout, int kRows>
  struct Raw {
    typename Layout::template Raw<T> k, q;
    T v;
    unsigned g, beta, A_log, dt_bias;
  };

  template <bool kFolded, class Layout, int kRows>
  __device__ static void prefetch(const Parameters& p, int t, int hv,
                                  const LaneRows<Layout, kRows>& lane_rows) {
    const Tokens<T>& from = source<kFolded>(p);
    const int h = p.value_heads_per_key_head.of(hv);
    Layout::prefetch_row(from.k.at(t, h));
    if (!kFolded) Layout::prefetch_row(from.q.at(t, h));
    prefetch_to_l2(from.v.at(t, hv) + lane_rows.first);
    prefetch_to_l2(address_of(from.g, t, hv));
    prefetch_to_l2(address_of(from.beta, t, hv));
  }

  template <bool kFolded, class Layout, int kRows>
  __device__ static Raw<Layout, kRows> fetch(const Parameters& p, int t, int hv,
                                             const LaneRows<Layout, kRows>& lane_rows) {
    const Tokens<T>& from = source<kFolded>(p);
    Raw<Layout, kRows> raw;
    const int h = p.value_heads_per_key_head.of(hv);
    raw.k.fetch(from.k.at(t, h), lane_rows.C);
    if (!kFolded) raw.q.fetch(from.q.at(t, h), lane_rows.C);
    const int own = Layout::template own<kRows>();
    raw.v = lane_rows.has(own) ? from.v.at(t, hv)[lane_rows.row(own)] : from_float<T>(0.0f);
    raw.g = bits_at(from.g, t, hv);
    raw.beta = bits_at(from.beta, t, hv);
    raw.A_log = p.A_log ? bits_at(p.A_log, hv) : 0;
    raw.dt_bias = p.A_log ? bits_at(p.dt_bias, hv) : 0;
    return raw;
  }

  /// Factor that L2-normalises x; 1 when normalisation is off.
  template <class Layout>
  __device__ static float scale_of(const Parameters& p, const float (&x)[Layout::kCount]) {
    return p.use_qk_l2norm ? rsqrtf(Layout::sum(Layout::dot(x, x)) + 1e-6f) : 1.0f;
  }

  template <bool kFolded, class Layout, int kRows>
  __device__ static Token<Layout, kRows> prepare(const Parameters& p, int, int,
                                                 const LaneRows<Layout, kRows>&,
                                                 const Raw<Layout, kRows>& raw) {
    const Tokens<T>& from = source<kFolded>(p);
    Token<Layout, kRows> token;
    Scalars& x = token.scalars;
    raw.k.values(token.k);
    x.k_scale = scale_of<Layout>(p, token.k);
    x.q_scale = x.kq = 0.0f;
    if (!kFolded) {
      raw.q.values(token.q);
      x.q_scale = p.scale * scale_of<Layout>(p, token.q);
      x.kq = x.k_scale * x.q_scale * Layout::sum(Layout::dot(token.k, token.q));
    }
    token.v = to_float(raw.v);
    float g = value_of(raw.g, from.g.format);
    x.beta = value_of(raw.beta, from.beta.format);
    if (p.A_log) {
      g = -expf(value_of(raw.A_log, p.A_log.format)) *
          softplus(g + value_of(raw.dt_bias, p.dt_bias.format));
      x.beta = sigmoid(x.beta);
    }
    x.alpha = expf(g);
    return token;
  }

  __device__ static void keep(const Parameters&, int, int, const Scalars&) {}

  /// new_value() is u = beta (v - alpha S k) of a row, where Sk is the sum S k before k's scale;
  /// advanced() is an element of alpha S + u k^T. All launches advance states by these two, in
  /// explicitly rounded operations that the compiler cannot contract differently, so that a replay
  /// repeats a decode bit by bit.
  __device__ static float new_value(const Scalars& x, float v, float Sk) {
    return __fmul_rn(x.beta, __fsub_rn(v, __fmul_rn(x.alpha, __fmul_rn(x.k_scale, Sk))));
  }
  __device__ static float advanced(const Scalars& x, float u, float k, float s) {
    return fmaf(__fmul_rn(u, x.k_scale), k, __fmul_rn(x.alpha, s));
  }

  /// Advances the lane's part of the state, given S k of the row that the lane owns. Returns that
  /// row's u.
  template <class Layout, int kRows>
  __device__ static float advance_by(const Token<Layout, kRows>& token,
                                     float (&s)[kRows][Layout::kCount], float Sk) {
    const float u = new_value(token.scalars, token.v, Sk);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float u_r = Layout::template of_owner<kRows>(u, r);
#pragma unroll
      for (int i = 0; i < Layout::kCount; ++i)
        s[r][i] = advanced(token.scalars, u_r, token.k[i], s[r][i]);
    }
    return u;
  }

  /// The product of S with x, at the row that the lane owns.
  template <class Layout, int kRows>
  __device__ static float product(const float (&s)[kRows][Layout::kCount],
                                  const float (&x)[Layout::kCount]) {
    float dots[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) dots[r] = Layout::dot(s[r], x);
    return Layout::own_sum(dots);
  }

  template <class Layout, int kRows>
  __device__ static void advance(const Token<Layout, kRows>& token,
                                 float (&s)[kRows][Layout::kCount]) {
    advance_by(token, s, product<Layout>(s, token.k));
  }

  /// Advances s and returns o = S q at the row that the lane owns. With S' the state before,
  /// o = alpha S' q + u (k . q): the sums S' k and S' q can then run at the same time.
  template <class Layout, int kRows>
  __device__ static float step(const Token<Layout, kRows>& token,
                               float (&s)[kRows][Layout::kCount]) {
    const float Sk = product<Layout>(s, token.k), Sq = product<Layout>(s, token.q);
    const float u = advance_by(token, s, Sk);
    const Scalars& x = token.scalars;
    return fmaf(u, x.kq, x.alpha * x.q_scale * Sq);
  }

  // Chunks of the delta rule (Yang et al., 2024, arXiv 2412.06464, section 3.3):
  // u_t = beta_t (v_t - alpha_t S_{t-1} k_t) and o_t = S_t q_t, with
  // S_t = (alpha_1 ... alpha_t) S_0 + the sum over j <= t of (alpha_{j+1} ... alpha_t) u_j k_j^T.

  template <class Layout, class Staged>
  __device__ static void pair_products(const Staged& staged, int earlier, int later,
                                       float (&products)[2]) {
    float k[Layout::kCount], x[Layout::kCount];
    Layout::template load<Cached::yes>(k, staged.columns[earlier][0], Layout::kExtent);
    const Scalars& of = staged.scalars[later];
    const float scales[2] = {of.k_scale, of.q_scale};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Layout::template load<Cached::yes>(x, staged.columns[later][i], Layout::kExtent);
      products[i] = staged.scalars[earlier].k_scale * scales[i] * Layout::sum(Layout::dot(k, x));
    }
  }
  __device__ static float2 state_scales(const Scalars& x, float decay) {
    return {decay * x.k_scale, decay * x.q_scale};
  }
  __device__ static float chunk_value(const Scalars& x, float v, float seen) {
    return x.beta * (v - seen);
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
    using Rows96 = RowLayout<8, 4, 3, false>;  // Olmo-Hybrid; in 16 bits a piece has 8 bytes
    if (launch_fast<Op, S, Rows96>(kName, p, in, stream)) return;
  }
  launch_any<Op>(kName, p, in, stream);
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
  if (p.rows.rows == 0) return zero_outputs(checks.operation(), in.out, stream);
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
