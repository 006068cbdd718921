// One token per row through the selective scan of a Mamba1 layer, between dt_proj and out_proj, in
// one launch: norms of dt, B and C, time step, state, skip and gate. Equations and names:
// reference/recurrent/mamba1_decode.hpp; slots: reference/tensors/slots.hpp.
//
//   here             Jamba, vLLM              shape, all in device memory
//   x, z, out        hidden_states, gate      [T, D]
//   dt               discrete_time_step       [T, D], without dt_proj's bias
//   A                A                        [D, 16] float32
//   B, C             B, C                     [T, 16]
//   skip, dt_bias    D, dt_proj.bias          [D]
//   dt_low           time_step                [T, R]
//   state            ssm_state                [slots, D, 16]
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

constexpr int kMamba1Columns = 16;  ///< N, the numbers of a channel's state

/// T is the type of activations, S that of states. T is also the number of rows, of a token each.
template <class T, class S>
struct Mamba1Decode {
  TensorView<const T, 2> x, dt;               // [T, D]
  TensorView<const float, 2> A;               // [D, 16], without gaps
  TensorView<const T, 2> B, C;                // [T, 16], rows at multiples of 16 bytes
  TensorView<S, 3> state;                     // [slots, D, 16], channels without gaps
  TensorView<T, 2> out;                       // [T, D]
  MixedView<1> skip{};                        // [D]
  std::optional<TensorView<const T, 2>> z{};  // [T, D]
  MixedView<1> dt_bias{};                     // [D]
  bool dt_softplus = false;
  StateSlots slots{};                              ///< lists; without them row n has slot n
  std::optional<float> norm_eps{};                 ///< turns the norms on; needs dt_low
  std::optional<TensorView<const T, 2>> dt_low{};  // [T, R]
  MixedView<1> b_weight{}, c_weight{};             // [16], of the norms; without them ones
};

/// Outputs of rows without a slot are 0. The state is float32 within the launch and rounded once.
/// A row's bits do not depend on the batch. Throws ArgumentError.
template <class T, class S>
void mamba1_decode(const Mamba1Decode<T, S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
