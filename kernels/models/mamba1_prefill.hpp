// Prompts through the selective scan of a Mamba1 layer, between dt_proj and out_proj. Equations and
// names: reference/recurrent/mamba1_prefill.hpp; rows and slots: reference/tensors/slots.hpp.
//
//   here             mamba-ssm, vLLM          shape, all in device memory
//   x, z, out        u, z                     [T, D]
//   dt               delta                    [T, D], without dt_proj's bias
//   A                A                        [D, 16] float32
//   B, C             B, C                     [T, 16]
//   skip, dt_bias    D, delta_bias            [D]
//   state            ssm_states               [slots, D, 16]
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "kernels/models/mamba1_decode.hpp"
#include "kernels/recurrent/prefill_batch.hpp"

namespace lockstep::kernels {

/// T is the type of activations, S that of states.
template <class T, class S>
struct Mamba1Prefill {
  TensorView<const T, 2> x, dt;               // [T, D]
  TensorView<const float, 2> A;               // [D, 16], without gaps
  TensorView<const T, 2> B, C;                // [T, 16], rows at multiples of 16 bytes
  TensorView<T, 2> out;                       // [T, D]
  std::optional<TensorView<S, 3>> state{};    // [slots, D, 16], channels without gaps
  MixedView<1> skip{};                        // [D]
  std::optional<TensorView<const T, 2>> z{};  // [T, D]
  MixedView<1> dt_bias{};                     // [D]
  bool dt_softplus = false;
  PrefillBatch batch{};
};

/// Computes the outputs of all tokens. The state of a row's slot becomes the one after its last
/// token. Outputs of rows without a slot and of padding tokens are 0. The running state is float32
/// and is rounded once. A row's bits do not depend on the batch, and a prefill that is cut
/// anywhere, with a float32 state in between, gives the bits of the uncut one. Throws
/// ArgumentError.
template <class T, class S>
void mamba1_prefill(const Mamba1Prefill<T, S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
