// A verification through a Mamba2 layer between its projections: layer_verify.hpp, with the tokens
// of mamba2_mixer_decode.hpp. x, z, dt and out are [T, ...], the tokens of all rows; states are
// [slots, H, P, N].
#pragma once

#include "reference/recurrent/layer_verify.hpp"
#include "reference/recurrent/mamba2_mixer_decode.hpp"

namespace lockstep::reference {

/// Outputs of rows without a slot, and of tokens behind the last row, are 0.
template <class S>
void mamba2_mixer_verify(const Mamba2MixerDecode<S>& in, const IndexView& starts,
                         const TensorView<S, 3>& conv_state, const TensorView<S, 4>& state,
                         TensorView<S, 3> out) {
  fill(out, S{0});
  const auto decode = [&](std::int64_t t, const TensorView<S, 3>& window,
                          const TensorView<S, 4>& running) {
    Mamba2MixerDecode<S> step = in;
    step.x = cut(in.x, t, t + 1);
    step.z = cut(in.z, t, t + 1);
    step.dt = cut(in.dt, t, t + 1);
    step.slots = {};
    step.storage.state = Format::exact;  // it is rounded where it is stored
    mamba2_mixer_decode<S>(step, window, running, cut(out, t, t + 1));
  };
  verify_rows<S>(in.slots, starts, in.x.extent(0), in.conv_weight.extent(1), in.storage.state,
                 conv_state, state, decode);
}

}  // namespace lockstep::reference
