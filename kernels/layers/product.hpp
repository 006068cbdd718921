// Products with weights: of all tokens with one matrix, and of each token with the matrix of its
// expert. Equations: reference/layers/product.hpp. A row of a result depends on that row of x
// alone, not on the shape, so a token's bits are the same in every batch, chunk and run;
// comparisons of outputs with and without a cache rely on it.
//
//   here               field                     shape, all in device memory
//   x                  hidden_states             [T, K], rows contiguous
//   weight             weight                    [N, K], of experts [E, N, K]
//   experts, weights   topk_ids, topk_weights    [T, k]
//   starts             expert offsets            [E + 1]      rows of an expert after sorting
//   source             sorted token ids          [T k]        the token of each sorted row
//   place                                        [T, k]       the sorted row of each choice
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// T is the type of activations and weights, Out that of the result.
template <class T, class Out>
struct Product {
  TensorView<const T, 2> x;       // [T, K]
  TensorView<const T, 2> weight;  // [N, K]
  TensorView<Out, 2> out;         // [T, N]
};

template <class T>
struct GroupedProduct {
  TensorView<const T, 2> x;       // [T, K], sorted by expert
  TensorView<const T, 3> weight;  // [E, N, K]
  IndexView starts;               // [E + 1]; rows after the last expert's get 0
  TensorView<T, 2> out;           // [T, N]
};

/// Choices sorted by expert; those of one expert in the order of tokens.
struct ExpertOrder {
  TensorView<const std::int32_t, 2> experts;  // [T, k]; a number that is no expert is left out
  TensorView<std::int32_t, 1> starts;         // [E + 1]
  TensorView<std::int32_t, 1> source;         // [T k]; -1 after the last expert's rows
  TensorView<std::int32_t, 2> place;          // [T, k]; -1: the choice is left out
};

template <class T>
struct CombineExperts {
  TensorView<const T, 2> x;                 // [rows, D], sorted by expert
  TensorView<const std::int32_t, 2> place;  // [T, k]
  TensorView<const float, 2> weights;       // [T, k]
  TensorView<T, 2> out;                     // [T, D] = sum_i weights[t, i] x[place[t, i]]
};

/// All of these throw ArgumentError.
template <class T, class Out>
void product(const Product<T, Out>& in, cudaStream_t stream);
template <class T>
void grouped_product(const GroupedProduct<T>& in, cudaStream_t stream);
void sort_by_expert(const ExpertOrder& in, cudaStream_t stream);
template <class T>
void combine_experts(const CombineExperts<T>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
