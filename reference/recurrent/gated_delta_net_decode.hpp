// One token per row through a gated-delta-net layer between its projections (the layer:
// reference/recurrent/gated_delta_net.hpp).
//
//   [q | k | v] = silu(conv(x))      o = delta rule of l2(q), l2(k), v, g, beta
//   g = -exp(A_log) softplus(a + dt_bias)      beta = sigmoid(b)
//   out[hv] = rms_norm(o[hv]) norm_weight silu(z[hv])
//
//   here          Qwen3-Next, vLLM      shape
//   x             mixed_qkv             [B, 2 H K + HV V], channels [q | k | v]
//   z             z                     [B, HV, V]
//   a, b          a, b                  [B, HV]
//   conv_weight   conv1d.weight         [2 H K + HV V, W]
//   norm_weight   norm.weight           [V], shared by all value heads
//   conv_state    conv_state            [slots, 2 H K + HV V, C], oldest to newest
//   state         ssm_state             [slots, HV, V, K]
//   out           core_attn_out         [B, HV, V]
#pragma once

#include "reference/layers/rms_norm.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"

namespace lockstep::reference {

template <class S>
struct GatedDeltaNetDecode {
  TensorView<const S, 2> x;                           // [B, D]
  TensorView<const S, 3> z;                           // [B, HV, V]
  TensorView<const S, 2> a, b;                        // [B, HV]
  TensorView<const S, 2> conv_weight;                 // [D, W]
  TensorView<const S, 1> A_log, dt_bias;              // [HV]
  TensorView<const S, 1> norm_weight;                 // [V]
  std::optional<TensorView<const S, 1>> conv_bias{};  // [D]
  StateSlots slots{};  ///< of windows and states: a row has both in one slot
  S eps = S(1e-6);     ///< of the gated norm
  /// `output` is the format of what separate launches hand on: the convolution's result, the delta
  /// rule's, and the norm's. `state` is that of recurrent states, `window` that of windows.
  StoragePoints storage{};
  Format window = Format::exact;
};

/// Outputs of rows without a slot are 0.
template <class S>
void gated_delta_net_decode(const GatedDeltaNetDecode<S>& in, const TensorView<S, 3>& conv_state,
                            const TensorView<S, 4>& state, TensorView<S, 3> out) {
  const std::int64_t B = in.x.extent(0), D = in.x.extent(1);
  const std::int64_t HV = state.extent(1), V = state.extent(2), K = state.extent(3);
  const std::int64_t H = (D - HV * V) / (2 * K), keys = H * K;
  require(H > 0 && D == 2 * keys + HV * V, "x has the channels of q, k and v");
  require(shape_of(in.z) == (Shape<3>{B, HV, V}) && shape_of(out) == shape_of(in.z),
          "z and out are [B, HV, V]");
  Array<S, 2> mixed(Shape<2>{B, D});
  causal_conv1d_update<S>({.x = in.x,
                           .weight = in.conv_weight,
                           .bias = in.conv_bias,
                           .slots = in.slots,
                           .activation = Activation::silu,
                           .storage = {.state = in.window, .output = in.storage.output}},
                          conv_state, mixed);
  const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
    return make_view<const S>(mixed.data() + first, Shape<3>{B, count, width},
                              Shape<3>{D, width, 1});
  };
  const GatedDeltaGates<S> gates = gated_delta_gates<S>(in.a, in.b, in.A_log, in.dt_bias);
  Array<S, 3> o(shape_of(out));
  gated_delta_rule_update<S>({.q = heads(0, H, K),
                              .k = heads(keys, H, K),
                              .v = heads(2 * keys, HV, V),
                              .g = gates.g,
                              .beta = gates.beta,
                              .use_qk_l2norm = true,
                              .rows = {.slots = in.slots, .storage = in.storage}},
                             state, o);
  for (std::int64_t n = 0; n < B; ++n) {
    const bool padding = source_slot(in.slots, n, state.extent(0)) == kNoSlot;
    Array<S, 2> normed(Shape<2>{HV, V});
    gated_rms_norm<S>(at(TensorView<const S, 3>(o.view()), n), at(in.z, n), in.norm_weight, in.eps,
                      GateOrder::after_norm, 1, normed);
    for (std::int64_t hv = 0; hv < HV; ++hv)
      for (std::int64_t v = 0; v < V; ++v)
        out(n, hv, v) = padding ? S{0} : rounded(normed(hv, v), in.storage.output);
  }
}

}  // namespace lockstep::reference
