// Batched products with weights on tensor cores: projections (a batch of one), and the per-head
// products that absorb and un-absorb in latent attention. Equations:
// reference/layers/batched_product.hpp.
//
// The bits of a result row depend on that row, the weights and their shape [N, K]; not on other
// rows, or on the number of rows or matrices. A decode therefore gives a token the same bits as a
// prompt does, and a tensor-parallel rank with a slice of the heads gives the bits of the whole.
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

/// T is the type of x and weight: Bf16, or E4m3 with both scales. The last dimension is contiguous;
/// addresses and the other strides are multiples of 16 bytes.
template <class T>
struct BatchedProduct {
  TensorView<const T, 3> x;       // [1 or G, M, K]
  TensorView<const T, 3> weight;  // [G, N, K], N a multiple of 8
  TensorView<Bf16, 3> out;        // [G, M, N]
  std::optional<TensorView<const float, 3>> x_scale{}, weight_scale{};
  /// K is divided into at most so many splits, whose sums are added in pairs. The bits depend on
  /// it.
  int splits = 8;
  /// The weights were written before the previous launch began, so this launch may load them while
  /// that one still runs.
  bool settled_weights = false;
};

/// out[g] = x[g] weight[g]^T. Throws ArgumentError.
template <class T>
void batched_product(const BatchedProduct<T>& in, cudaStream_t stream);

/// Quantises values to e4m3: value = number * scale, with one scale for the tensor, or one for each
/// 128 elements of a row.
struct ScaleToE4m3 {
  TensorView<const Bf16, 3> x;  // [G, M, K], K a multiple of 8
  TensorView<E4m3, 3> numbers;  // [G, M, K]
  TensorView<float, 3> scale;   // [1, 1, 1] or [G, M, ceil(K / 128)]
};

/// The largest magnitude of a group becomes 448; NaN is ignored there, and stays NaN. A scale for
/// the whole tensor depends on every row, so padding rows should be zeros. Throws ArgumentError.
void scale_to_e4m3(const ScaleToE4m3& in, cudaStream_t stream);

}  // namespace lockstep::kernels
