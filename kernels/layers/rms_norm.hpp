// Root-mean-square norms: plain, after an addition to the residual stream, and gated. Equations:
// reference/layers/rms_norm.hpp.
//
//   here            field               shape, all in device memory
//   x, gate, out    hidden_states, z    [T, D], rows contiguous
//   residual        residual            [T, D]
//   weight          weight              [D]
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"

namespace lockstep::kernels {

/// T is the type of activations.
template <class T>
struct RmsNorm {
  TensorView<const T, 2> x;
  MixedView<1> weight;
  float eps = 0;
  TensorView<T, 2> out;  ///< may be x
  /// If given, x is added to the residual, the sum is rounded to T and stored there, and the norm
  /// is taken of the sum.
  std::optional<TensorView<T, 2>> residual{};
};

template <class T>
struct GatedRmsNorm {
  TensorView<const T, 2> x, gate;
  MixedView<1> weight;
  float eps = 0;
  TensorView<T, 2> out;           ///< may be x or gate
  bool gate_before_norm = false;  ///< Mamba2's order; else that of the gated delta net
  std::int64_t groups = 1;        ///< each D / groups channels have a norm of their own
  bool sigmoid = false;           ///< gates by sigmoid instead of silu
};

/// Both throw ArgumentError.
template <class T>
void rms_norm(const RmsNorm<T>& in, cudaStream_t stream);
template <class T>
void gated_rms_norm(const GatedRmsNorm<T>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
