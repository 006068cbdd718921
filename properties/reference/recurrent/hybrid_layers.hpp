// The two recurrent layers at a small size, with weights and states drawn from one seed.
#pragma once

#include "reference/recurrent/gated_delta_net.hpp"
#include "reference/recurrent/mamba_mixer.hpp"
#include "reference/tensors/grid.hpp"

namespace lockstep::testing_support {

/// The weights of a layer, drawn from one seed, and its states for one request.
struct Weights {
  explicit Weights(std::uint64_t seed) : seed(seed) {}
  template <std::size_t Rank>
  Array<double, Rank> draw(const Shape<Rank>& shape) {
    return on_grid<double>(shape, {.seed = seed, .stream = next++});
  }
  std::uint64_t seed, next = 0;
};

/// Hidden states are 6 wide, the convolution is 4 wide.
struct MixerLayer : Weights {
  static constexpr std::int64_t H = 6, P = 2, N = 5, G = 3;
  explicit MixerLayer(std::uint64_t seed) : Weights(seed) {}
  Array<double, 2> in_proj = draw<2>({12 + 42 + 6, 6}), conv = draw<2>({42, 4});
  Array<double, 1> bias = draw<1>({42}), A_log = draw<1>({6}), D = draw<1>({6});
  Array<double, 1> dt_bias = draw<1>({6}), norm = draw<1>({12});
  Array<double, 2> out_proj = draw<2>({6, 12});
  Array<double, 3> conv_state = draw<3>({1, 42, 4});
  Array<double, 4> state = draw<4>({1, 6, 2, 5});

  void run(const TensorView<const double, 2>& hidden, const reference::LayerRun& how,
           TensorView<double, 2> out) {
    reference::mamba_mixer<double>(
        hidden, {H, P, N, G, in_proj, conv, bias.view(), A_log, D, dt_bias, norm, out_proj}, {},
        how, conv_state, state, out);
  }
};

struct DeltaNetLayer : Weights {
  static constexpr std::int64_t H = 2, HV = 6, K = 3, V = 5;
  explicit DeltaNetLayer(std::uint64_t seed) : Weights(seed) {}
  Array<double, 2> qkvz = draw<2>({72, 6}), ba = draw<2>({12, 6}), conv = draw<2>({42, 4});
  Array<double, 1> A_log = draw<1>({6}), dt_bias = draw<1>({6}), norm = draw<1>({5});
  Array<double, 2> out_proj = draw<2>({6, 30});
  Array<double, 3> conv_state = draw<3>({1, 42, 3});
  Array<double, 4> state = draw<4>({1, 6, 5, 3});

  void run(const TensorView<const double, 2>& hidden, const reference::LayerRun& how,
           TensorView<double, 2> out) {
    reference::gated_delta_net<double>(
        hidden, {H, HV, K, V, qkvz, ba, conv, A_log, dt_bias, norm, out_proj}, {}, how, conv_state,
        state, out);
  }
};

}  // namespace lockstep::testing_support
