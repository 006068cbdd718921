// The short causal convolution of a prefill. Equations, names and the layout of states:
// reference/recurrent/causal_conv1d.hpp; rows and slots: reference/tensors/slots.hpp.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "kernels/recurrent/prefill_batch.hpp"

namespace lockstep::kernels {

/// T is the type of activations, S that of the conv state.
template <class T, class S>
struct CausalConv1d {
  TensorView<const T, 2> x;                      // [T, D]
  MixedView<2> weight;                           // [D, W], W from 2 to 4
  TensorView<T, 2> out;                          // [T, D]
  std::optional<TensorView<S, 3>> conv_state{};  // [slots, D, C], C = W - 1 or W
  MixedView<1> bias{};                           // [D]
  bool silu = false;
  PrefillBatch batch{};
  /// Tokens of a block; 0: the launch chooses. Only measurements set it.
  int tokens_of_block = 0;
};

/// Computes the outputs of all tokens. The state of a row's slot becomes the last C columns of the
/// old state (or zeros) followed by the row's tokens. Outputs of rows without a slot and of padding
/// tokens are 0. Throws ArgumentError.
template <class T, class S>
void causal_conv1d(const CausalConv1d<T, S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
