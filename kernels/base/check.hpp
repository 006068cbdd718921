// Checks of a launch wrapper's arguments, and the errors that it throws.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/eigen.hpp"

namespace lockstep::kernels {

/// The operation cannot take an argument. The text names the operation, the argument, the expected
/// value and the given one.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// CUDA reported an error.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw CudaError(std::string(what) + ": " + cudaGetErrorString(status));
}

template <std::size_t Rank>
std::string text_of(const Shape<Rank>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < Rank; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

/// Checks of one operation's arguments. A check that fails throws ArgumentError.
class Checks {
 public:
  explicit Checks(const char* operation) : operation_(operation) {}
  const char* operation() const { return operation_; }

  void expect(bool holds, const char* argument, const std::string& expected,
              const std::string& got) const {
    if (!holds)
      throw ArgumentError(std::string(operation_) + ": " + argument + " is expected to be " +
                          expected + "; got " + got);
  }

  template <AnyView V>
  void shape(const V& view, const char* argument, const char* letters,
             const Shape<V::rank()>& expected) const {
    expect(shape_of(view) == expected, argument, std::string(letters) + " = " + text_of(expected),
           text_of(shape_of(view)));
  }

  template <std::size_t Rank>
  void shape(const MixedView<Rank>& view, const char* argument, const char* letters,
             const Shape<Rank>& expected) const {
    Shape<Rank> got{};
    for (std::size_t i = 0; i < Rank; ++i) got[i] = view.extents[i];
    expect(got == expected, argument, std::string(letters) + " = " + text_of(expected),
           text_of(got));
  }

  /// Expects a contiguous last dimension.
  template <AnyView V>
  void contiguous_rows(const V& view, const char* argument) const {
    constexpr std::size_t last = V::rank() - 1;
    expect(view.extent(last) <= 1 || view.stride(last) == 1, argument,
           "contiguous in its last dimension", "a stride of " + std::to_string(view.stride(last)));
  }
  template <std::size_t Rank>
  void contiguous_rows(const MixedView<Rank>& view, const char* argument) const {
    constexpr std::size_t last = Rank - 1;
    expect(view.extents[last] <= 1 || view.strides[last] == 1, argument,
           "contiguous in its last dimension", "a stride of " + std::to_string(view.strides[last]));
  }

 private:
  const char* operation_;
};

}  // namespace lockstep::kernels
