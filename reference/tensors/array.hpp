// Array: a tensor that owns its elements; contiguous, last dimension fastest. It converts to a view
// of itself, so that a test can write `.x = x` for a TensorView.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <limits>

#include "reference/tensors/view.hpp"

namespace lockstep {

template <std::size_t Rank>
constexpr std::int64_t element_count(const Shape<Rank>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

/// Elements that contiguous strides step over: more than the array has if an extent is 0.
template <std::size_t Rank>
constexpr std::int64_t stepped_count(const Shape<Rank>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent > 0 ? extent : 1;
  return count;
}

template <class T, std::size_t Rank>
class Array {
 public:
  Array() = default;
  /// Elements are NaN if the type has NaN, so that an element that an operation does not write
  /// cannot pass for a result.
  explicit Array(const Shape<Rank>& shape)
      : Array(shape,
              std::numeric_limits<T>::has_quiet_NaN ? std::numeric_limits<T>::quiet_NaN() : T{}) {}
  Array(const Shape<Rank>& shape, T fill)
      : shape_(shape), values_(Values::Constant(stepped_count(shape), fill)) {}

  const Shape<Rank>& shape() const { return shape_; }
  std::int64_t extent(std::size_t i) const { return shape_[i]; }
  std::int64_t size() const { return element_count(shape_); }
  T* data() { return values_.data(); }
  const T* data() const { return values_.data(); }
  T* begin() { return data(); }
  T* end() { return data() + size(); }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size(); }

  TensorView<T, Rank> view() { return make_view(data(), shape_); }
  TensorView<const T, Rank> view() const { return make_view(data(), shape_); }
  // NOLINTNEXTLINE(google-explicit-constructor): an array may be passed for a view of its elements
  operator TensorView<T, Rank>() { return view(); }
  operator TensorView<const T, Rank>() const { return view(); }

  template <class... Index>
  T& operator()(Index... index) {
    return view()(index...);
  }
  template <class... Index>
  const T& operator()(Index... index) const {
    return view()(index...);
  }

 private:
  using Values = Eigen::Array<T, Eigen::Dynamic, 1>;
  Shape<Rank> shape_{};
  Values values_;  ///< never empty, so that views of an empty array have a valid pointer
};

/// The elements converted to another type.
template <class To, class From, std::size_t Rank>
Array<To, Rank> cast(const Array<From, Rank>& source) {
  Array<To, Rank> target(source.shape());
  for (std::int64_t i = 0; i < source.size(); ++i)
    target.data()[i] = static_cast<To>(source.data()[i]);
  return target;
}

}  // namespace lockstep
