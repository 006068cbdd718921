// Products with weights: of all tokens with one matrix, and of each token with the matrix of its
// expert. Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated
// Mixture-of-Experts Layer", eq. 1: out_t = sum_i weights_ti expert_ti(x_t).
//
//   here               field                     shape
//   x                  hidden_states             [T, K]
//   weight             weight                    [N, K], of experts [E, N, K]
//   experts, weights   topk_ids, topk_weights    [T, k]       a negative expert: left out
//   starts             expert offsets            [E + 1]      rows of an expert after sorting
//   source             sorted token ids          [T k]        the token of each sorted row, or -1
//   place                                        [T, k]       the sorted row of each choice, or -1
#pragma once

#include "reference/tensors/array.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::reference {

/// out = x weight^T
template <class S>
void product(const TensorView<const S, 2>& x, const TensorView<const S, 2>& weight,
             TensorView<S, 2> out) {
  require(x.extent(1) == weight.extent(1), "a product sums over a common extent");
  const Matrix<S> W = as_matrix(weight);
  for (std::int64_t t = 0; t < x.extent(0); ++t) mapped(at(out, t)) = W * as_vector(at(x, t));
}

/// out[t] = x[t] weight[e]^T for starts[e] <= t < starts[e + 1]; rows after the last expert's are
/// 0.
template <class S>
void grouped_product(const TensorView<const S, 2>& x, const TensorView<const S, 3>& weight,
                     const IndexView& starts, TensorView<S, 2> out) {
  const std::int64_t T = x.extent(0), E = weight.extent(0);
  require(starts.extent(0) == E + 1, "every expert has a first row");
  for (std::int64_t e = 0; e < E; ++e) {
    const RowRange rows = row_range(starts, e, T);
    product<S>(cut(x, rows.begin, rows.end), at(weight, e), cut(out, rows.begin, rows.end));
  }
  fill(cut(out, starts(E), T), S{0});
}

struct ExpertOrder {
  Array<std::int32_t, 1> starts;
  Array<std::int32_t, 1> source;
  Array<std::int32_t, 2> place;
};

/// Choices sorted by expert; those of one expert in the order of tokens.
inline ExpertOrder sorted_by_expert(const IndexTable& experts, std::int64_t E) {
  const std::int64_t T = experts.extent(0), k = experts.extent(1);
  ExpertOrder order{Array<std::int32_t, 1>(Shape<1>{E + 1}, 0),
                    Array<std::int32_t, 1>(Shape<1>{T * k}, -1),
                    Array<std::int32_t, 2>(Shape<2>{T, k}, -1)};
  std::int32_t row = 0;
  for (std::int64_t e = 0; e < E; ++e) {
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t i = 0; i < k; ++i) {
        require(experts(t, i) < E, "a choice is below the number of experts");
        if (experts(t, i) != e) continue;
        order.source(row) = static_cast<std::int32_t>(t);
        order.place(t, i) = row++;
      }
    order.starts(e + 1) = row;
  }
  return order;
}

/// out_t = sum_i weights_ti x[place_ti]
template <class S>
void combine_experts(const TensorView<const S, 2>& x, const IndexTable& place,
                     const TensorView<const S, 2>& weights, TensorView<S, 2> out) {
  for (std::int64_t t = 0; t < out.extent(0); ++t) {
    Vector<S> sum = Vector<S>::Zero(out.extent(1));
    for (std::int64_t i = 0; i < place.extent(1); ++i)
      if (place(t, i) >= 0) sum += weights(t, i) * as_vector(at(x, place(t, i)));
    mapped(at(out, t)) = sum;
  }
}

}  // namespace lockstep::reference
