// A whole gated-delta-net layer. Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", figure 1
// (right), as implemented for Qwen3-Next.
//
//   in_proj_qkvz, in_proj_ba -> [q | k | v] -> conv, SiLU -> norm of q, k -> delta rule
//                            -> norm, gate -> out_proj
//
//   here          Qwen3-Next                shape (r = HV / H value heads per key head)
//   qkvz          in_proj_qkvz.weight       [H (2 K + 2 r V), hidden]
//                                           per key head [q K | k K | v r V | z r V]
//   ba            in_proj_ba.weight         [2 HV, hidden], per key head [b r | a r]
//   conv_weight   conv1d.weight             [2 H K + HV V, W], channels [q | k | v]
//   norm_weight   norm.weight               [V], shared by all value heads
//   out_proj      out_proj.weight           [hidden, HV V]
#pragma once

#include "reference/layers/rms_norm.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"
#include "reference/recurrent/mamba_mixer.hpp"

namespace lockstep::reference {

template <class S>
struct GatedDeltaNet {
  std::int64_t H, HV, K, V;
  TensorView<const S, 2> qkvz;
  TensorView<const S, 2> ba;
  TensorView<const S, 2> conv_weight;
  TensorView<const S, 1> A_log;    // [HV]
  TensorView<const S, 1> dt_bias;  // [HV]
  TensorView<const S, 1> norm_weight;
  TensorView<const S, 2> out_proj;
  S eps = S(1e-6);
};

/// The projections, reordered from one part per key head to one tensor for all heads.
template <class S>
struct GatedDeltaProjections {
  Array<S, 2> qkv;   // [T, 2 H K + HV V] = [q | k | v]
  Array<S, 2> z;     // [T, HV V]
  Array<S, 2> a, b;  // [T, HV]
};

template <class S>
GatedDeltaProjections<S> gated_delta_projections(const TensorView<const S, 2>& hidden,
                                                 const GatedDeltaNet<S>& w) {
  const std::int64_t T = hidden.extent(0), r = w.HV / w.H, values = r * w.V;
  const std::int64_t keys = w.H * w.K;
  const Array<S, 2> qkvz = projected(hidden, w.qkvz), ba = projected(hidden, w.ba);
  require(qkvz.extent(1) == w.H * (2 * w.K + 2 * values),
          "in_proj_qkvz has q, k, v and z per key head");
  GatedDeltaProjections<S> p{Array<S, 2>(Shape<2>{T, 2 * keys + w.HV * w.V}),
                             Array<S, 2>(Shape<2>{T, w.HV * w.V}), Array<S, 2>(Shape<2>{T, w.HV}),
                             Array<S, 2>(Shape<2>{T, w.HV})};
  for (std::int64_t t = 0; t < T; ++t) {
    auto qkv = mapped(at(p.qkv.view(), t)), z = mapped(at(p.z.view(), t));
    auto a = mapped(at(p.a.view(), t)), b = mapped(at(p.b.view(), t));
    for (std::int64_t h = 0; h < w.H; ++h) {
      const auto head =
          mapped(at(qkvz.view(), t)).segment(h * (2 * w.K + 2 * values), 2 * w.K + 2 * values);
      const auto gates = mapped(at(ba.view(), t)).segment(h * 2 * r, 2 * r);
      qkv.segment(h * w.K, w.K) = head.head(w.K);
      qkv.segment(keys + h * w.K, w.K) = head.segment(w.K, w.K);
      qkv.segment(2 * keys + h * values, values) = head.segment(2 * w.K, values);
      z.segment(h * values, values) = head.tail(values);
      b.segment(h * r, r) = gates.head(r);
      a.segment(h * r, r) = gates.tail(r);
    }
  }
  return p;
}

template <class S>
void gated_delta_net(const TensorView<const S, 2>& hidden, const GatedDeltaNet<S>& w,
                     const Rows& rows, const LayerRun& run, const TensorView<S, 3>& conv_state,
                     const TensorView<S, 4>& state, TensorView<S, 2> out,
                     const OptionalSnapshots<S>& snapshots = {}) {
  require(!snapshots || run.update, "only an update leaves states after each token");
  const std::int64_t T = hidden.extent(0), keys = w.H * w.K;
  const GatedDeltaProjections<S> p = gated_delta_projections(hidden, w);
  const Array<S, 2> qkv = convolved<S>(p.qkv, w.conv_weight, {}, rows, run, conv_state, snapshots);
  const GatedDeltaGates<S> gates = gated_delta_gates<S>(p.a, p.b, w.A_log, w.dt_bias);
  const GatedDeltaRuleInputs<S> rule{.q = heads_of(qkv, 0, w.H, w.K),
                                     .k = heads_of(qkv, keys, w.H, w.K),
                                     .v = heads_of(qkv, 2 * keys, w.HV, w.V),
                                     .g = gates.g,
                                     .beta = gates.beta,
                                     .use_qk_l2norm = true,
                                     .rows = rows};
  Array<S, 3> o(Shape<3>{T, w.HV, w.V});
  if (snapshots)
    gated_delta_rule_update<S>(rule, state, o, snapshots->parents, snapshots->state);
  else if (run.update)
    gated_delta_rule_update<S>(rule, state, o);
  else if (run.scan)
    gated_delta_rule_scan<S>(rule, state, o);
  else
    gated_delta_rule_prefill<S>(rule, run.chunk_size, state, o);

  Array<S, 2> normed(Shape<2>{T * w.HV, w.V});
  gated_rms_norm<S>(make_view<const S>(o.data(), Shape<2>{T * w.HV, w.V}),
                    make_view<const S>(p.z.data(), Shape<2>{T * w.HV, w.V}), w.norm_weight, w.eps,
                    GateOrder::after_norm, 1, normed);
  const Array<S, 2> merged_heads =
      projected<S>(make_view<const S>(normed.data(), Shape<2>{T, w.HV * w.V}), w.out_proj);
  mapped(out) = mapped(merged_heads.view());
}

}  // namespace lockstep::reference
