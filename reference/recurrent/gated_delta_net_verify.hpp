// A verification through a gated-delta-net layer between its projections: layer_verify.hpp, with
// the tokens of gated_delta_net_decode.hpp. x, z, a, b and out are [T, ...], the tokens of all
// rows; states are [slots, HV, V, K].
#pragma once

#include "reference/recurrent/gated_delta_net_decode.hpp"
#include "reference/recurrent/layer_verify.hpp"

namespace lockstep::reference {

/// Outputs of rows without a slot, and of tokens behind the last row, are 0.
template <class S>
void gated_delta_net_verify(const GatedDeltaNetDecode<S>& in, const IndexView& starts,
                            const TensorView<S, 3>& conv_state, const TensorView<S, 4>& state,
                            TensorView<S, 3> out) {
  fill(out, S{0});
  const auto decode = [&](std::int64_t t, const TensorView<S, 3>& window,
                          const TensorView<S, 4>& running) {
    GatedDeltaNetDecode<S> step = in;
    step.x = cut(in.x, t, t + 1);
    step.z = cut(in.z, t, t + 1);
    step.a = cut(in.a, t, t + 1);
    step.b = cut(in.b, t, t + 1);
    step.slots = {};
    step.storage.state = Format::exact;  // it is rounded where it is stored
    gated_delta_net_decode<S>(step, window, running, cut(out, t, t + 1));
  };
  verify_rows<S>(in.slots, starts, in.x.extent(0), in.conv_weight.extent(1), in.storage.state,
                 conv_state, state, decode);
}

}  // namespace lockstep::reference
