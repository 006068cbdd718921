// One token per row through a gated-delta-net layer between its projections, in one launch:
// convolution and SiLU, norm of q and k, gates, delta rule, gated norm. Equations and names:
// reference/recurrent/gated_delta_net_decode.hpp; slots: reference/tensors/slots.hpp.
//
//   here          Qwen3-Next, vLLM      shape, all in device memory
//   x             mixed_qkv             [B, 2 H K + HV V], channels [q | k | v]
//   z             z                     [B, HV, V]
//   a, b          a, b                  [B, HV]
//   conv_state    conv_state            [slots, 2 H K + HV V, 3], oldest to newest, any strides
//   conv_weight   conv1d.weight         [2 H K + HV V, 4]
//   conv_bias                           [2 H K + HV V]
//   state         ssm_state             [slots, HV, V, K]
//   norm_weight   norm.weight           [V], shared by all value heads
//   out           core_attn_out         [B, HV, V]
//
// The layer is that of Qwen3-Next: K = V = 128, q and k L2-normalised, q scaled by K^-0.5, gates
// from A_log and dt_bias, the norm gated by SiLU. B is the number of rows.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// S is the type of recurrent states: float or Bf16. A row's window and state lie in one slot.
template <class S>
struct GatedDeltaNetDecode {
  TensorView<const Bf16, 2> x;     // [B, D], D = 2 H K + HV V
  TensorView<const Bf16, 3> z;     // [B, HV, V]
  MixedView<2> a, b;               // [B, HV]
  TensorView<Bf16, 3> conv_state;  // [slots, D, 3]
  TensorView<S, 4> state;          // [slots, HV, V, K], heads without gaps
  MixedView<2> conv_weight;        // [D, 4]
  MixedView<1> A_log, dt_bias;     // [HV]
  MixedView<1> norm_weight;        // [V]
  TensorView<Bf16, 3> out;         // [B, HV, V]
  MixedView<1> conv_bias{};        // [D]
  StateSlots slots{};              ///< a list, updated in place; without one, row n has slot n
  float eps = 1e-6f;               ///< of the gated norm
  /// Thread blocks among which the values of a key head are divided: 1, 2, 4 or 8; 0: chosen by the
  /// batch. The result's bits do not depend on it.
  int parts = 0;
};

/// Windows, states and outputs have the bits of causal_conv1d_update, gated_delta_rule_update and
/// gated_rms_norm one after another. Outputs of rows without a slot are 0. Throws ArgumentError,
/// also on a device without thread block clusters (compute capability below 9.0).
template <class S>
void gated_delta_net_decode(const GatedDeltaNetDecode<S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
