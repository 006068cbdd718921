// Eigen maps of views, and parts of views.
//
//   here                    LibTorch
//   at(v, i), at(v, i, j)   v[i], v[i][j]      a view with fewer dimensions
//   cut(v, begin, end)      v[begin:end]       along the first dimension
//   repeat(v, n)            v[..., None].expand(..., n): one more dimension, of stride 0
//   as_vector(v)            a copy in aligned memory, so that sums do not depend on addresses
//   as_matrix(v)            likewise
#pragma once

#include <Eigen/Core>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "reference/tensors/view.hpp"

namespace lockstep {

template <class S>
using Vector = Eigen::Matrix<S, Eigen::Dynamic, 1>;
template <class S>
using Matrix = Eigen::Matrix<S, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// A view of any rank. The concept is needed because compilers cannot deduce the rank of a
/// TensorView.
template <class V>
concept AnyView = requires {
  typename V::element_type;
  V::rank();
};
template <AnyView V>
using ElementOf = typename V::element_type;

template <AnyView V>
Shape<V::rank()> shape_of(const V& view) {
  Shape<V::rank()> shape{};
  for (std::size_t i = 0; i < V::rank(); ++i) shape[i] = view.extent(i);
  return shape;
}

template <AnyView V>
Shape<V::rank()> strides_of(const V& view) {
  Shape<V::rank()> strides{};
  for (std::size_t i = 0; i < V::rank(); ++i) strides[i] = view.stride(i);
  return strides;
}

/// view[index]; requires an index inside the view.
template <AnyView V>
TensorView<ElementOf<V>, V::rank() - 1> at(const V& view, std::int64_t index) {
  require(0 <= index && index < view.extent(0), "an index is inside its view");
  Shape<V::rank() - 1> extents{}, strides{};
  for (std::size_t i = 1; i < V::rank(); ++i) {
    extents[i - 1] = view.extent(i);
    strides[i - 1] = view.stride(i);
  }
  ElementOf<V>* const first =
      index == 0 ? view.data_handle() : view.data_handle() + index * view.stride(0);
  return make_view(first, extents, strides);
}

template <AnyView V, class... Rest>
auto at(const V& view, std::int64_t index, Rest... rest) {
  return at(at(view, index), rest...);
}

/// view[begin:end]
template <AnyView V>
V cut(const V& view, std::int64_t begin, std::int64_t end) {
  require(0 <= begin && begin <= end && end <= view.extent(0), "a cut is inside its view");
  Shape<V::rank()> extents = shape_of(view);
  extents[0] = end - begin;
  ElementOf<V>* const first =
      begin == 0 ? view.data_handle() : view.data_handle() + begin * view.stride(0);
  return make_view(first, extents, strides_of(view));
}

/// The view with one more dimension at the end, of stride 0, along which elements repeat.
template <AnyView V>
TensorView<ElementOf<V>, V::rank() + 1> repeat(const V& view, std::int64_t times) {
  Shape<V::rank() + 1> extents{}, strides{};
  for (std::size_t i = 0; i < V::rank(); ++i) {
    extents[i] = view.extent(i);
    strides[i] = view.stride(i);
  }
  extents[V::rank()] = times;
  return make_view(view.data_handle(), extents, strides);
}

/// The view with its last two dimensions swapped: a K-major state seen as a V-major one.
template <AnyView V>
V transposed(const V& view) {
  Shape<V::rank()> extents = shape_of(view), strides = strides_of(view);
  std::swap(extents[V::rank() - 2], extents[V::rank() - 1]);
  std::swap(strides[V::rank() - 2], strides[V::rank() - 1]);
  return make_view(view.data_handle(), extents, strides);
}

template <class T>
auto mapped(const TensorView<T, 1>& view) {
  using Plain = Vector<std::remove_const_t<T>>;
  using Seen = std::conditional_t<std::is_const_v<T>, const Plain, Plain>;
  using Step = Eigen::InnerStride<Eigen::Dynamic>;
  return Eigen::Map<Seen, Eigen::Unaligned, Step>(view.data_handle(), view.extent(0),
                                                  Step(view.stride(0)));
}

template <class T>
auto mapped(const TensorView<T, 2>& view) {
  using Plain = Matrix<std::remove_const_t<T>>;
  using Seen = std::conditional_t<std::is_const_v<T>, const Plain, Plain>;
  using Steps = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  return Eigen::Map<Seen, Eigen::Unaligned, Steps>(
      view.data_handle(), view.extent(0), view.extent(1), Steps(view.stride(0), view.stride(1)));
}

template <class T>
Vector<std::remove_const_t<T>> as_vector(const TensorView<T, 1>& view) {
  return mapped(view);
}

template <class T>
Matrix<std::remove_const_t<T>> as_matrix(const TensorView<T, 2>& view) {
  return mapped(view);
}

/// Calls body(index, element) for every element, last dimension fastest.
template <AnyView V, class Body>
void for_each_element(const V& view, Body&& body) {
  Shape<V::rank()> index{};
  if (view.empty()) return;
  while (true) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < V::rank(); ++i) offset += index[i] * view.stride(i);
    body(index, view.data_handle()[offset]);
    std::size_t i = V::rank();
    while (i > 0 && ++index[i - 1] == view.extent(i - 1)) index[--i] = 0;
    if (i == 0) return;
  }
}

template <AnyView V>
void fill(const V& view, ElementOf<V> value) {
  for_each_element(view, [&](const auto&, ElementOf<V>& element) { element = value; });
}

}  // namespace lockstep
