// The gate of the feed-forward unit, out = silu(gate) up, between the unit's products
// (kernels/layers/product.hpp). Equation: reference/layers/swiglu.hpp.
//
//   here            field                     shape, all in device memory
//   gate, up, out   gate_up_proj's halves     [T, F], rows contiguous
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"

namespace lockstep::kernels {

/// T is the type of activations.
template <class T>
struct Swiglu {
  TensorView<const T, 2> gate, up;
  TensorView<T, 2> out;  ///< may be gate or up
};

/// Computes out. Throws ArgumentError.
template <class T>
void swiglu(const Swiglu<T>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
