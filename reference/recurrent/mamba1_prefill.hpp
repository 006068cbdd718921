// Prompts through the selective scan of a Mamba1 layer, token by token. Gu, Dao 2023, "Mamba:
// Linear-Time Sequence Modeling with Selective State Spaces", eq. 2a and algorithm 2: the step of
// reference/recurrent/mamba1_decode.hpp without its norms, over the tokens of each row.
//
//   here            mamba-ssm, vLLM       shape
//   x, z            u, z                  [T, D], packed rows
//   dt              delta                 [T, D], before dt_proj's bias is added
//   A               A                     [D, N]; A < 0
//   B, C            B, C                  [T, N]
//   skip, dt_bias   D, delta_bias         [D]
//   state           ssm_states            [slots, D, N]
#pragma once

#include "reference/recurrent/mamba2.hpp"

namespace lockstep::reference {

template <class S>
struct Mamba1Prefill {
  TensorView<const S, 2> x, dt;                     // [T, D]
  TensorView<const S, 2> A;                         // [D, N]
  TensorView<const S, 2> B, C;                      // [T, N]
  std::optional<TensorView<const S, 1>> skip{};     // [D]
  std::optional<TensorView<const S, 2>> z{};        // [T, D]
  std::optional<TensorView<const S, 1>> dt_bias{};  // [D]
  bool dt_softplus = false;
  Rows rows{};  ///< rows.tokens is set by the operation
};

/// The same as inputs of the definition for heads: one head of D channels.
template <class S>
Mamba2Inputs<S> one_headed(const Mamba1Prefill<S>& in) {
  const auto tokens = [](const TensorView<const S, 2>& view) {
    return make_view(view.data_handle(), Shape<3>{view.extent(0), 1, view.extent(1)},
                     Shape<3>{view.stride(0), 0, view.stride(1)});
  };
  const auto channels = [](const TensorView<const S, 1>& view) {
    return make_view(view.data_handle(), Shape<2>{1, view.extent(0)}, Shape<2>{0, view.stride(0)});
  };
  Mamba2Inputs<S> all{
      .x = tokens(in.x),
      .dt = tokens(in.dt),
      .A = make_view(in.A.data_handle(), Shape<3>{1, in.A.extent(0), in.A.extent(1)},
                     Shape<3>{0, in.A.stride(0), in.A.stride(1)}),
      .B = tokens(in.B),
      .C = tokens(in.C),
      .dt_softplus = in.dt_softplus,
      .rows = in.rows};
  if (in.skip) all.D = channels(*in.skip);
  if (in.z) all.z = tokens(*in.z);
  if (in.dt_bias) all.dt_bias = channels(*in.dt_bias);
  return all;
}

/// Advances the states in their slots. Outputs of rows without a slot and of padding are 0.
template <class S>
void mamba1_prefill(const Mamba1Prefill<S>& in, const std::optional<TensorView<S, 3>>& state,
                    const TensorView<S, 2>& out) {
  std::optional<TensorView<S, 4>> states;
  if (state)
    states = make_view(state->data_handle(),
                       Shape<4>{state->extent(0), 1, state->extent(1), state->extent(2)},
                       Shape<4>{state->stride(0), 0, state->stride(1), state->stride(2)});
  selective_scan<S>(one_headed(in), states,
                    make_view(out.data_handle(), Shape<3>{out.extent(0), 1, out.extent(1)},
                              Shape<3>{out.stride(0), 0, out.stride(1)}));
}

}  // namespace lockstep::reference
