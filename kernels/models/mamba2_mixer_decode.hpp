// One token per row through a Mamba2 layer between its projections, in one launch: convolution and
// SiLU, time step, state update, gated norm of groups. Equations and names:
// reference/recurrent/mamba2_mixer_decode.hpp; slots: reference/tensors/slots.hpp.
//
//   here          Nemotron-H, vLLM      shape, all in device memory
//   x             hidden_states_B_C     [T, H P + 2 G N], channels [x | B | C]
//   z             gate                  [T, H, P]
//   dt            dt                    [T, H]
//   conv_state    conv_state            [slots, H P + 2 G N, 3], oldest to newest, any strides
//   conv_weight   conv1d.weight         [H P + 2 G N, 4]
//   conv_bias     conv1d.bias           [H P + 2 G N]
//   state         ssm_state             [slots, H, P, N]
//   A, D, dt_bias A, D, dt_bias         [H]; A = -exp(A_log)
//   norm_weight   norm.weight           [H P]
//   out           hidden_states         [T, H, P]
//
// N = 128, P is a multiple of 16 up to 128, and a group has at most 2,048 channels, H / G P. T is
// also the number of rows, of a token each.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// S is the type of states: float or Bf16. A row's window and state lie in one slot.
template <class S>
struct Mamba2MixerDecode {
  TensorView<const Bf16, 2> x;     // [T, H P + 2 G N]
  TensorView<const Bf16, 3> z;     // [T, H, P], a token's heads without gaps
  MixedView<2> dt;                 // [T, H]
  TensorView<Bf16, 3> conv_state;  // [slots, H P + 2 G N, 3]
  TensorView<S, 4> state;          // [slots, H, P, N], heads without gaps
  MixedView<2> conv_weight;        // [H P + 2 G N, 4]
  MixedView<1> A, D, dt_bias;      // [H]
  MixedView<1> norm_weight;        // [H P]
  TensorView<Bf16, 3> out;         // [T, H, P], a token's heads without gaps
  MixedView<1> conv_bias{};        // [H P + 2 G N]
  StateSlots slots{};              ///< a list, updated in place; without one, row n has slot n
  float eps = 1e-5f;               ///< of the norm
  /// Thread blocks among which the channels of a group are divided: 1, 2, 4, 8 or 16; 0: chosen by
  /// the batch. The result's bits do not depend on it.
  int parts = 0;
};

/// Windows, states and outputs have the bits of causal_conv1d_update, selective_state_update and
/// gated_rms_norm one after another. Outputs of rows without a slot are 0. Throws ArgumentError,
/// also on a device without thread block clusters (compute capability below 9.0).
template <class S>
void mamba2_mixer_decode(const Mamba2MixerDecode<S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
