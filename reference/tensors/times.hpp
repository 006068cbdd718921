// The product of a weight with a vector, without a copy of the weight.
#pragma once

#include "reference/tensors/eigen.hpp"

namespace lockstep {

/// weight x. Rows without gaps are multiplied where they lie, others are copied first; the bits are
/// the same, since Eigen's product of a matrix and a vector does not look at addresses.
template <class S>
Vector<S> times(const TensorView<const S, 2>& weight, const Vector<S>& x) {
  using Steps = Eigen::OuterStride<Eigen::Dynamic>;
  using Lying = Eigen::Map<const Matrix<S>, Eigen::Unaligned, Steps>;
  if (weight.stride(1) != 1) return as_matrix(weight) * x;
  return Lying(weight.data_handle(), weight.extent(0), weight.extent(1), Steps(weight.stride(0))) *
         x;
}

}  // namespace lockstep
