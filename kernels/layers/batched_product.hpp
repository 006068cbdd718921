// Batched products with weights on tensor cores: projections (a batch of one), and the per-head
// products that absorb and un-absorb in latent attention. Equations:
// reference/layers/batched_product.hpp.
//
// Bits of a row follow from that row, the weights and their shape [N, K]: neither from the other
// rows nor from how many rows or matrices there are. So a decode gives a token what a prompt gave
// it, and a rank that has a slice of the heads gives the bits of the whole.
//
//   here           SGLang                 shape, all in device memory
//   x              q_nope, attn_output    [1 or G, M, K]     1: the same rows for every g
//   weight         w_kc, w_vc             [G, N, K]
//   x_scale        x_scale                [G, M, ceil(K / 128)]               an extent of 1 is
//   weight_scale   weight_scale_inv       [G, ceil(N / 128), ceil(K / 128)]   repeated
//   out                                   [G, M, N]
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"

namespace lockstep::kernels {

/// T is the type of x and weight: Bf16, or E4m3 with both scales. Every stride but that of the last
/// dimension, which is 1, and every base is whole 16 bytes; G may have any stride.
template <class T>
struct BatchedProduct {
  TensorView<const T, 3> x;       // [1 or G, M, K]
  TensorView<const T, 3> weight;  // [G, N, K], N a multiple of 8
  TensorView<Bf16, 3> out;        // [G, M, N]
  std::optional<TensorView<const float, 3>> x_scale{}, weight_scale{};
  /// K is divided between so many blocks at most, whose sums are added in order. Bits depend on it.
  int splits = 8;
  /// Weights were written before the launch in front of this one began: they are loaded while it
  /// still runs.
  bool settled_weights = false;
};

/// Throws ArgumentError.
template <class T>
void batched_product(const BatchedProduct<T>& in, cudaStream_t stream);

/// Values as numbers of e4m3 and their scales: one for the tensor, or one for each 128 of a row.
struct ScaleToE4m3 {
  TensorView<const Bf16, 3> x;  // [G, M, K], K a multiple of 8
  TensorView<E4m3, 3> numbers;  // [G, M, K]
  TensorView<float, 3> scale;   // [1, 1, 1] or [G, M, ceil(K / 128)]
};

/// The largest of a group becomes 448; NaN counts as nothing there, and stays NaN. One scale for
/// the tensor depends on every row, padding too: let that be zeros. Throws ArgumentError.
void scale_to_e4m3(const ScaleToE4m3& in, cudaStream_t stream);

}  // namespace lockstep::kernels
