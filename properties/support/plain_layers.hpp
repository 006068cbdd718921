// Shared by the tests of the plain layers: rows with gaps between them, and results as the
// yardstick stores them.
#pragma once

#include "properties/support/gpu.hpp"

namespace lockstep::testing_support {

/// Rows of D elements, some elements apart. The gaps are NaN, and stay so.
template <class T>
class GappedRows {
 public:
  static constexpr std::int64_t kGap = 3;  // rows begin at odd addresses

  GappedRows(std::int64_t rows, std::int64_t D) : D_(D), tensor_(Shape<2>{rows, D + kGap}) {}
  template <class Host>
  explicit GappedRows(const Array<Host, 2>& array) : GappedRows(array.extent(0), array.extent(1)) {
    set(array);
  }

  template <class Host>
  void set(const Array<Host, 2>& array) {
    std::vector<T> elements = tensor_.elements();
    for (std::int64_t t = 0; t < array.extent(0); ++t)
      for (std::int64_t d = 0; d < D_; ++d)
        elements[static_cast<std::size_t>(t * (D_ + kGap) + d)] =
            kernels::from_host<T>(static_cast<double>(array(t, d)));
    tensor_.set(elements);
  }
  TensorView<T, 2> view() { return make_view(tensor_.data(), shape(), strides()); }
  TensorView<const T, 2> inputs() const { return make_view(tensor_.data(), shape(), strides()); }
  Array<float, 2> host() const {
    const Array<float, 2> all = tensor_.host();
    return contiguous(make_view(all.data(), shape(), strides()));
  }
  /// Nothing was written between the rows or beside them.
  bool gaps_intact() const {
    const Array<float, 2> all = tensor_.host();
    bool intact = tensor_.guards_intact();
    for (std::int64_t t = 0; t < all.extent(0); ++t)
      for (std::int64_t d = D_; d < D_ + kGap; ++d) intact = intact && std::isnan(all(t, d));
    return intact;
  }
  const kernels::DeviceTensor<T, 2>& tensor() const { return tensor_; }

 private:
  Shape<2> shape() const { return {tensor_.shape()[0], D_}; }
  Shape<2> strides() const { return {D_ + kGap, 1}; }

  std::int64_t D_;
  kernels::DeviceTensor<T, 2> tensor_;
};

template <class T>
::testing::AssertionResult within_yardstick(const std::string& operation, const std::string& what,
                                            const GappedRows<T>& actual,
                                            const Array<float, 2>& yardstick,
                                            const Array<double, 2>& truth) {
  if (!actual.gaps_intact())
    return ::testing::AssertionFailure() << "elements beside the rows were written";
  return within_yardstick<T>(operation, what, actual.host(), yardstick, truth);
}

template <class T>
bool same_bits(const GappedRows<T>& a, const GappedRows<T>& b) {
  return same_bits(a.tensor(), b.tensor());
}

/// Elements as a kernel stores them in T.
template <class T, std::size_t Rank>
Array<float, Rank> stored(Array<float, Rank> array) {
  for (float& x : array) x = kernels::to_host(kernels::from_host<T>(x));
  return array;
}

}  // namespace lockstep::testing_support
