// Between our arrays and LibTorch's tensors. Only _torch_test.cpp files include this.
#pragma once

#include <ATen/ATen.h>

#include "reference/tensors/array.hpp"
#include "reference/tensors/eigen.hpp"

namespace lockstep::testing_support {

template <class T>
constexpr at::ScalarType torch_type() {
  if constexpr (std::is_same_v<T, double>) return at::kDouble;
  if constexpr (std::is_same_v<T, float>) return at::kFloat;
  if constexpr (std::is_same_v<T, std::int32_t>) return at::kInt;
  if constexpr (std::is_same_v<T, bool>) return at::kBool;
}

/// A tensor over the same memory, with the same strides.
template <AnyView V>
at::Tensor tensor_over(const V& view) {
  const auto sizes = shape_of(view), strides = strides_of(view);
  using Element = std::remove_const_t<ElementOf<V>>;
  return at::from_blob(const_cast<Element*>(view.data_handle()), sizes, strides,
                       at::TensorOptions(torch_type<Element>()));
}

/// A tensor of its own with the array's elements.
template <class T, std::size_t Rank>
at::Tensor tensor_of(const Array<T, Rank>& array) {
  return tensor_over(array.view()).clone();
}

/// The tensor's elements, converted to T.
template <class T, std::size_t Rank>
Array<T, Rank> array_of(const at::Tensor& tensor) {
  require(tensor.dim() == static_cast<std::int64_t>(Rank), "the tensor has the array's rank");
  Shape<Rank> shape{};
  for (std::size_t i = 0; i < Rank; ++i) shape[i] = tensor.size(static_cast<std::int64_t>(i));
  Array<T, Rank> array(shape);
  tensor_over(array.view()).copy_(tensor);
  return array;
}

}  // namespace lockstep::testing_support
