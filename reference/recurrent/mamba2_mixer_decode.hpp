// One token per row through a Mamba2 layer between its projections (the layer:
// reference/recurrent/mamba_mixer.hpp).
//
//   [x | B | C] = silu(conv(channels))      y = update of x, dt, A, B, C, D, dt_bias with softplus
//   out = rms_norm(y silu(z)) norm_weight, a norm for each group's H / G heads
//
//   here          Nemotron-H, vLLM      shape
//   x             hidden_states_B_C     [T, H P + 2 G N], channels [x | B | C]
//   z             gate                  [T, H, P]
//   dt            dt                    [T, H]
//   conv_weight   conv1d.weight         [H P + 2 G N, W]
//   A, D, dt_bias A, D, dt_bias         [H]; A = -exp(A_log)
//   norm_weight   norm.weight           [H P]
//   conv_state    conv_state            [slots, H P + 2 G N, C], oldest to newest
//   state         ssm_state             [slots, H, P, N]
//   out           hidden_states         [T, H, P]
#pragma once

#include "reference/layers/rms_norm.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/mamba2.hpp"

namespace lockstep::reference {

template <class S>
struct Mamba2MixerDecode {
  TensorView<const S, 2> x;                           // [T, H P + 2 G N]
  TensorView<const S, 3> z;                           // [T, H, P]
  TensorView<const S, 2> dt;                          // [T, H]
  TensorView<const S, 2> conv_weight;                 // [H P + 2 G N, W]
  TensorView<const S, 1> A, D, dt_bias;               // [H]
  TensorView<const S, 1> norm_weight;                 // [H P]
  std::optional<TensorView<const S, 1>> conv_bias{};  // [H P + 2 G N]
  StateSlots slots{};  ///< of windows and states: a row has both in one slot
  S eps = S(1e-5);     ///< of the norm
  /// `output` is the format of what separate launches hand on: the convolution's result, the
  /// update's, and the norm's. `state` is that of states, `window` that of windows.
  StoragePoints storage{};
  Format window = Format::exact;
};

/// Advances windows and states, and returns y [T, H, P]. Gates and norms follow.
template <class S>
Array<S, 3> mixer_update(const Mamba2MixerDecode<S>& in, const TensorView<S, 3>& conv_state,
                         const TensorView<S, 4>& state) {
  const std::int64_t T = in.x.extent(0), channels = in.x.extent(1);
  const std::int64_t H = state.extent(1), P = state.extent(2), N = state.extent(3);
  const std::int64_t inner = H * P, G = (channels - inner) / (2 * N);
  require(G > 0 && channels == inner + 2 * G * N, "x has the channels of x, B and C");
  Array<S, 2> mixed(Shape<2>{T, channels});
  causal_conv1d_update<S>({.x = in.x,
                           .weight = in.conv_weight,
                           .bias = in.conv_bias,
                           .slots = in.slots,
                           .activation = Activation::silu,
                           .storage = {.state = in.window, .output = in.storage.output}},
                          conv_state, mixed);
  const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
    return make_view<const S>(mixed.data() + first, Shape<3>{T, count, width},
                              Shape<3>{channels, width, 1});
  };
  Array<S, 3> y(Shape<3>{T, H, P});
  selective_state_update<S>({.x = heads(0, H, P),
                             .dt = repeat(in.dt, P),
                             .A = repeat(repeat(in.A, P), N),
                             .B = heads(inner, G, N),
                             .C = heads(inner + G * N, G, N),
                             .D = repeat(in.D, P),
                             .dt_bias = repeat(in.dt_bias, P),
                             .dt_softplus = true,
                             .rows = {.slots = in.slots, .storage = in.storage}},
                            state, y);
  return y;
}

/// Gates y [T, H, P] and norms each of `groups` groups of channels. Outputs of rows without one of
/// `slot_count` slots are 0.
template <class S>
void mixer_norm(const Mamba2MixerDecode<S>& in, const Array<S, 3>& y, std::int64_t slot_count,
                GateOrder order, Gate gate, std::int64_t groups, TensorView<S, 3> out) {
  const std::int64_t H = y.extent(1), P = y.extent(2), inner = H * P;
  require(shape_of(in.z) == y.shape() && shape_of(out) == y.shape(), "z and out are [T, H, P]");
  for (std::int64_t n = 0; n < y.extent(0); ++n) {
    const bool padding = source_slot(in.slots, n, slot_count) == kNoSlot;
    Array<S, 2> z(Shape<2>{1, inner}), normed(Shape<2>{1, inner});
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t p = 0; p < P; ++p) z(0, h * P + p) = in.z(n, h, p);
    gated_rms_norm<S>(make_view<const S>(y.data() + n * inner, Shape<2>{1, inner}), z,
                      in.norm_weight, in.eps, order, groups, normed, gate);
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t p = 0; p < P; ++p)
        out(n, h, p) = padding ? S{0} : rounded(normed(0, h * P + p), in.storage.output);
  }
}

/// Outputs of rows without a slot are 0.
template <class S>
void mamba2_mixer_decode(const Mamba2MixerDecode<S>& in, const TensorView<S, 3>& conv_state,
                         const TensorView<S, 4>& state, TensorView<S, 3> out) {
  const std::int64_t inner = state.extent(1) * state.extent(2);
  const std::int64_t groups = (in.x.extent(1) - inner) / (2 * state.extent(3));
  mixer_norm<S>(in, mixer_update<S>(in, conv_state, state), state.extent(0), GateOrder::before_norm,
                Gate::silu, groups, out);
}

}  // namespace lockstep::reference
