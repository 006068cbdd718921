// Depthwise causal convolution for decoding: one token per row, or the tokens of a verification.
// Equations and names: reference/recurrent/causal_conv1d.hpp; slots: reference/tensors/slots.hpp.
//
//   here         causal-conv1d, vLLM    shape, all in device memory
//   x, out       x, out                 [T, D], packed
//   weight       weight                 [D, W], W = 2 ... 4
//   bias         bias                   [D]
//   conv_state   conv_state             [slots, D, C], any strides, oldest to newest
//   snapshots                           [T, D, C]
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// T is the type of activations, S that of states.
template <class T, class S>
struct CausalConv1dUpdate {
  TensorView<const T, 2> x;     // [T, D]
  TensorView<S, 3> conv_state;  // [slots, D, C]
  MixedView<2> weight;          // [D, W]
  TensorView<T, 2> out;         // [T, D]
  MixedView<1> bias{};          // [D]
  bool silu = false;
  /// The conv state of a row lies in its first slot, also where slots.table gives the row one slot
  /// per token.
  StateSlots slots{};
  std::optional<IndexView> query_start_loc{};  // [N + 1]
  /// With snapshots or parents, the state is only read.
  std::optional<TensorView<S, 3>> snapshots{};
  std::optional<IndexView> parents{};  // [T]
};

/// Decodes or verifies. Outputs of rows without a slot and of tokens after the last row are 0.
/// Throws ArgumentError.
template <class T, class S>
void causal_conv1d_update(const CausalConv1dUpdate<T, S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
