// Embedding vectors of tokens, and logits of tokens from vectors. Equations:
// reference/layers/embedding.hpp.
//
//   here     field              shape, all in device memory
//   tokens   input_ids          [T]       a number that is no row of the table is padding: gives 0
//   table    embed_tokens       [V, D], rows contiguous
//   x        hidden_states      [T, D]
//   head     lm_head            [V, D], often the table itself
//   logits   logits             [T, V] float32
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// T is the type of activations and weights. Also gathers rows for experts: `tokens` are
/// ExpertOrder's source, `table` the activations.
template <class T>
struct Embedding {
  IndexView tokens;
  TensorView<const T, 2> table;
  TensorView<T, 2> out;  // [T, D]
};

template <class T>
struct Logits {
  TensorView<const T, 2> x;
  TensorView<const T, 2> head;
  TensorView<float, 2> logits;
};

/// Both throw ArgumentError.
template <class T>
void embedding(const Embedding<T>& in, cudaStream_t stream);
template <class T>
void logits(const Logits<T>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
