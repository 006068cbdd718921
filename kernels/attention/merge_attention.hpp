// Merges two partial results of attention, over different keys, into one. Equations:
// reference/attention/softmax_attention.hpp.
//
//   here           FlashAttention, vLLM     shape, all in device memory
//   out_a, out_b   prefix_output, …         [T, H, dv]
//   lse_a, lse_b   prefix_lse, …            [H, T]        natural logarithm
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"

namespace lockstep::kernels {

/// T is the type of the outputs. `out` and `lse` must not overlap the parts.
template <class T>
struct MergeAttention {
  TensorView<const T, 3> out_a;      // [T, H, dv], dv a multiple of 8
  TensorView<const float, 2> lse_a;  // [H, T]
  TensorView<const T, 3> out_b;      // [T, H, dv]
  TensorView<const float, 2> lse_b;  // [H, T]
  TensorView<T, 3> out;              // [T, H, dv]
  TensorView<float, 2> lse;          // [H, T]
};

/// A part whose lse is -infinity (or +infinity, as FlashMLA marks it) is empty: it contributes
/// nothing, even if its output is NaN. Two empty parts give output 0 and lse -infinity. Throws
/// ArgumentError.
template <class T>
void merge_attention(const MergeAttention<T>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
