// TensorView: a view of memory that another object owns, by a pointer to the first element, extents
// and strides. References, kernels and the LibTorch bridge use the same type, so that a property
// can pass the same arguments to both sides.
//
//   here       LibTorch          unit
//   extent(i)  size(i)           elements
//   stride(i)  stride(i)         elements, not bytes; 0 repeats one element (an expanded input)
//   v(i, j)    v[i][j]           the element at pointer[i * stride(0) + j * stride(1)]
//
// The comment beside a view gives its shape in the order of its dimensions: [T, H, K].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda/std/mdspan>

#include "reference/base/require.hpp"

namespace lockstep {

/// T may be const, for inputs.
template <class T, std::size_t Rank>
using TensorView =
    cuda::std::mdspan<T, cuda::std::dextents<std::int64_t, Rank>, cuda::std::layout_stride>;

/// Extents or strides: elements per dimension, or elements between neighbours along it.
template <std::size_t Rank>
using Shape = std::array<std::int64_t, Rank>;

/// The strides of a shape whose last dimension is contiguous and that has no gaps.
template <std::size_t Rank>
constexpr Shape<Rank> contiguous_strides(const Shape<Rank>& extents) {
  Shape<Rank> strides{};
  std::int64_t step = 1;
  for (std::size_t i = Rank; i-- > 0;) {
    strides[i] = step;
    step *= extents[i] > 0 ? extents[i] : 1;
  }
  return strides;
}

/// A view of the elements at pointer + sum of index_i * strides_i. The pointer may be null if an
/// extent is 0.
template <class T, std::size_t Rank>
TensorView<T, Rank> make_view(T* pointer, const Shape<Rank>& extents, const Shape<Rank>& strides) {
  bool empty = false;
  for (std::size_t i = 0; i < Rank; ++i) {
    require(extents[i] >= 0, "an extent of a view is a count of elements");
    require(strides[i] >= 0, "a stride of a view does not go backwards");
    empty = empty || extents[i] == 0;
  }
  require(pointer != nullptr || empty, "a view of elements has a pointer to them");
  using View = TensorView<T, Rank>;
  cuda::std::array<std::int64_t, Rank> sizes{}, steps{};
  for (std::size_t i = 0; i < Rank; ++i) {
    sizes[i] = extents[i];
    steps[i] = strides[i];
  }
  return View(pointer, typename View::mapping_type(typename View::extents_type(sizes), steps));
}

template <class T, std::size_t Rank>
TensorView<T, Rank> make_view(T* pointer, const Shape<Rank>& extents) {
  return make_view(pointer, extents, contiguous_strides(extents));
}

}  // namespace lockstep
