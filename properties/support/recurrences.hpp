// The two recurrences behind one face, so that a law of packed rows and state slots is written
// once.
#pragma once

#include "properties/support/laws.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"
#include "reference/recurrent/mamba2.hpp"

namespace lockstep::testing_support {

template <class S>
using States = TensorView<S, 4>;
template <class S>
using Output = TensorView<S, 3>;

/// Small sizes and test data that depend on a seed alone.
struct Drawn {
  /// 1 ... most
  std::int64_t pick(std::uint64_t stream, std::uint64_t most) const {
    return 1 + static_cast<std::int64_t>(random_below(most, seed, 100, stream));
  }
  template <class S, std::size_t Rank>
  Array<S, Rank> draw(const Shape<Rank>& shape, std::uint64_t stream) const {
    return on_grid<S>(shape, {.seed = seed, .stream = stream});
  }
  std::uint64_t seed;
};

/// A Mamba2 layer with an input of T tokens.
template <class S>
struct Mamba2Run : Drawn {
  Mamba2Run(std::int64_t T, std::int64_t slots, std::uint64_t seed)
      : Drawn{seed},
        H(2 * pick(1, 2)),
        G(pick(2, 2)),
        P(pick(3, 5)),
        N(pick(4, 5)),
        state_shape{slots, H, P, N},
        out_shape{T, H, P},
        x(draw<S, 3>({T, H, P}, 1)),
        dt(draw<S, 2>({T, H}, 2)),
        A(draw<S, 1>({H}, 3)),
        B(draw<S, 3>({T, G, N}, 4)),
        C(draw<S, 3>({T, G, N}, 5)),
        D(draw<S, 1>({H}, 6)),
        dt_bias(draw<S, 1>({H}, 7)),
        z(draw<S, 3>({T, H, P}, 8)) {
    for (S& a : A) a = -S{1} / 64 - std::abs(a);
  }

  Array<S, 4> states() const { return draw<S, 4>(state_shape, 9); }

  /// Inputs for tokens [begin, end).
  reference::Mamba2Inputs<S> inputs(std::int64_t begin, std::int64_t end) const {
    reference::Mamba2Inputs<S> in{.x = cut(x.view(), begin, end),
                                  .dt = cut(repeat(dt.view(), P), begin, end),
                                  .A = repeat(repeat(A.view(), P), N),
                                  .B = cut(B.view(), begin, end),
                                  .C = cut(C.view(), begin, end),
                                  .D = repeat(D.view(), P),
                                  .z = cut(z.view(), begin, end),
                                  .dt_bias = repeat(dt_bias.view(), P),
                                  .dt_softplus = true};
    if (pick(6, 2) == 2) in.dt_min = S{0.5};
    if (pick(7, 2) == 2) in.dt_max = S{1};
    return in;
  }
  static void update(const reference::Mamba2Inputs<S>& in, States<S> state, Output<S> out,
                     const std::optional<IndexView>& parents = {},
                     const std::optional<States<S>>& snapshots = {}) {
    reference::selective_state_update(in, state, out, parents, snapshots);
  }
  static void scan(const reference::Mamba2Inputs<S>& in, const std::optional<States<S>>& state,
                   Output<S> out, const std::optional<BoundaryStates<S>>& boundary = {}) {
    reference::selective_scan(in, state, out, boundary);
  }
  static void chunked(const reference::Mamba2Inputs<S>& in, std::int64_t size,
                      const std::optional<States<S>>& state, Output<S> out,
                      const std::optional<BoundaryStates<S>>& boundary = {}) {
    reference::ssd_prefill(in, size, state, out, boundary);
  }

  static void replay(const reference::Mamba2Inputs<S>& in, const IndexView& accepted,
                     States<S> state, const std::optional<IndexTable>& nodes = {}) {
    reference::mamba2_replay(reference::mamba2_stash(in), in.rows, accepted, state, nodes);
  }

  std::int64_t H, G, P, N;
  Shape<4> state_shape;
  Shape<3> out_shape;
  Array<S, 3> x;
  Array<S, 2> dt;
  Array<S, 1> A;
  Array<S, 3> B, C;
  Array<S, 1> D, dt_bias;
  Array<S, 3> z;
};

/// A gated delta rule with an input of T tokens. Keys are normalised, as in every model.
template <class S>
struct GatedDeltaRun : Drawn {
  GatedDeltaRun(std::int64_t T, std::int64_t slots, std::uint64_t seed)
      : Drawn{seed},
        H(pick(1, 2)),
        HV(H * pick(2, 3)),
        K(pick(3, 6)),
        V(pick(4, 6)),
        state_shape{slots, HV, V, K},
        out_shape{T, HV, V},
        q(draw<S, 3>({T, H, K}, 1)),
        k(draw<S, 3>({T, H, K}, 2)),
        v(draw<S, 3>({T, HV, V}, 3)),
        g(draw<S, 2>({T, HV}, 4)),
        beta(draw<S, 2>({T, HV}, 5)) {
    for (S& e : g) e = -std::abs(e);
    for (S& e : beta) e = std::abs(e);
  }

  Array<S, 4> states() const { return draw<S, 4>(state_shape, 9); }

  reference::GatedDeltaRuleInputs<S> inputs(std::int64_t begin, std::int64_t end) const {
    return {.q = cut(q.view(), begin, end),
            .k = cut(k.view(), begin, end),
            .v = cut(v.view(), begin, end),
            .g = cut(g.view(), begin, end),
            .beta = cut(beta.view(), begin, end),
            .use_qk_l2norm = true};
  }
  static void update(const reference::GatedDeltaRuleInputs<S>& in, States<S> state, Output<S> out,
                     const std::optional<IndexView>& parents = {},
                     const std::optional<States<S>>& snapshots = {}) {
    reference::gated_delta_rule_update(in, state, out, parents, snapshots);
  }
  static void scan(const reference::GatedDeltaRuleInputs<S>& in,
                   const std::optional<States<S>>& state, Output<S> out,
                   const std::optional<BoundaryStates<S>>& boundary = {}) {
    reference::gated_delta_rule_scan(in, state, out, boundary);
  }
  static void chunked(const reference::GatedDeltaRuleInputs<S>& in, std::int64_t size,
                      const std::optional<States<S>>& state, Output<S> out,
                      const std::optional<BoundaryStates<S>>& boundary = {}) {
    reference::gated_delta_rule_prefill(in, size, state, out, boundary);
  }

  static void replay(const reference::GatedDeltaRuleInputs<S>& in, const IndexView& accepted,
                     States<S> state, const std::optional<IndexTable>& nodes = {}) {
    reference::gated_delta_rule_replay(in, accepted, state, nodes);
  }

  std::int64_t H, HV, K, V;
  Shape<4> state_shape;
  Shape<3> out_shape;
  Array<S, 3> q, k, v;
  Array<S, 2> g, beta;
};

}  // namespace lockstep::testing_support
