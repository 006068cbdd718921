// DeviceTensor: contiguous device memory of a test or a benchmark. Its elements are NaN until they
// are written, so a forgotten element shows; 4 KiB on either side are NaN too, so a store outside
// the tensor shows.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/base/check.hpp"
#include "reference/tensors/array.hpp"

namespace lockstep::kernels {

/// Conversions between element types and the host's numbers.
template <class T>
float to_host(T x) {
  if constexpr (std::is_same_v<T, Bf16>) return __bfloat162float(x);
  if constexpr (std::is_same_v<T, Fp16>) return __half2float(x);
  if constexpr (std::is_same_v<T, E4m3>) return static_cast<float>(x);
  if constexpr (std::is_arithmetic_v<T>) return static_cast<float>(x);
}
template <class T>
T from_host(double x) {
  if constexpr (std::is_same_v<T, Bf16>) return __float2bfloat16_rn(static_cast<float>(x));
  if constexpr (std::is_same_v<T, Fp16>) return __float2half_rn(static_cast<float>(x));
  if constexpr (std::is_same_v<T, E4m3>) return E4m3(static_cast<float>(x));
  if constexpr (std::is_arithmetic_v<T>) return static_cast<T>(x);
}

template <class T, std::size_t Rank>
class DeviceTensor {
 public:
  static constexpr std::size_t kGuardBytes = 4096;

  /// Fills the memory with bytes of 0xff, which are NaN in every floating-point type.
  explicit DeviceTensor(const Shape<Rank>& shape) : shape_(shape) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes() + 2 * kGuardBytes), "device memory");
    memory_.reset(static_cast<char*>(memory));
    check_cuda(cudaMemset(memory, 0xff, bytes() + 2 * kGuardBytes), "device memory");
  }
  /// Holds the array's elements, rounded to T.
  template <class Host>
  explicit DeviceTensor(const Array<Host, Rank>& array) : DeviceTensor(array.shape()) {
    std::vector<T> elements(static_cast<std::size_t>(array.size()));
    for (std::size_t i = 0; i < elements.size(); ++i)
      elements[i] = from_host<T>(static_cast<double>(array.data()[i]));
    set(elements);
  }

  void set(const std::vector<T>& elements) {
    check_cuda(cudaMemcpy(data(), elements.data(), bytes(), cudaMemcpyHostToDevice), "a copy");
  }
  std::vector<T> elements() const {
    std::vector<T> result(static_cast<std::size_t>(element_count(shape_)));
    check_cuda(cudaMemcpy(result.data(), data(), bytes(), cudaMemcpyDeviceToHost), "a copy");
    return result;
  }
  Array<float, Rank> host() const {
    Array<float, Rank> array(shape_);
    const std::vector<T> from = elements();
    for (std::size_t i = 0; i < from.size(); ++i) array.data()[i] = to_host(from[i]);
    return array;
  }

  const Shape<Rank>& shape() const { return shape_; }
  T* data() { return reinterpret_cast<T*>(memory_.get() + kGuardBytes); }
  const T* data() const { return reinterpret_cast<const T*>(memory_.get() + kGuardBytes); }
  std::size_t bytes() const { return static_cast<std::size_t>(element_count(shape_)) * sizeof(T); }
  TensorView<T, Rank> view() { return make_view(data(), shape_); }
  TensorView<const T, Rank> view() const { return make_view(data(), shape_); }

  /// Whether the bytes before and after the elements are still 0xff.
  bool guards_intact() const {
    const auto intact = [](const char* guard) {
      std::vector<char> bytes(kGuardBytes);
      check_cuda(cudaMemcpy(bytes.data(), guard, kGuardBytes, cudaMemcpyDeviceToHost), "a copy");
      return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == '\xff'; });
    };
    return intact(memory_.get()) && intact(memory_.get() + kGuardBytes + bytes());
  }

 private:
  struct Free {
    void operator()(char* memory) const { cudaFree(memory); }
  };
  Shape<Rank> shape_;
  std::unique_ptr<char, Free> memory_;
};

}  // namespace lockstep::kernels
