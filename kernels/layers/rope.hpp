// Rotary position embedding, in place. Equations, and the frequencies and magnitude of plain and of
// stretched (YaRN) contexts: reference/layers/rope.hpp.
//
//   here          SGLang, transformers    shape, all in device memory
//   x             q_pe, k_pe              [T, heads, d], contiguous in d
//   positions     positions               [T]
//   frequencies   inv_freq                [R / 2], radians per token; R <= d dimensions are rotated
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// T is the type of activations.
template <class T>
struct Rope {
  TensorView<T, 3> x;
  IndexView positions;
  TensorView<const float, 1> frequencies;
  float magnitude = 1;       ///< factor of cos and sin
  bool interleaved = false;  ///< pairs are (2i, 2i + 1); else (i, i + R / 2)
};

/// Rotates x. Throws ArgumentError.
template <class T>
void rope(const Rope<T>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
