// The element types of device memory, and MixedView, a view whose element type is known only at run
// time. Small inputs (gates, biases, weights per head) are mixed views, so that a kernel is not
// compiled once for each combination of their types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <string>
#include <type_traits>

#include "reference/tensors/storage.hpp"
#include "reference/tensors/view.hpp"

namespace lockstep::kernels {

using Bf16 = __nv_bfloat16;
using Fp16 = __half;
using Int8 = std::int8_t;
using E4m3 = __nv_fp8_e4m3;

/// Whether elements of S are quantised: value = number * scale. See
/// reference/recurrent/scaled_state.hpp.
template <class S>
constexpr bool kIsScaled = std::is_same_v<S, Int8> || std::is_same_v<S, E4m3>;

template <class T>
constexpr Format format_of() {
  if constexpr (std::is_same_v<T, float>) return Format::float32;
  if constexpr (std::is_same_v<T, Bf16>) return Format::bf16;
  if constexpr (std::is_same_v<T, Fp16>) return Format::fp16;
  if constexpr (std::is_same_v<T, Int8>) return Format::int8;
  if constexpr (std::is_same_v<T, E4m3>) return Format::e4m3;
}

inline const char* name_of(Format format) {
  switch (format) {
    case Format::float32: return "float32";
    case Format::bf16: return "bfloat16";
    case Format::fp16: return "float16";
    case Format::int8: return "int8";
    case Format::e4m3: return "float8_e4m3fn";
    default: return "another type";
  }
}

/// A view of float32, bfloat16 or float16 elements. Without data it stands for an absent argument.
template <std::size_t Rank>
struct MixedView {
  const void* data = nullptr;
  Format format = Format::float32;
  std::int64_t extents[Rank] = {};
  std::int64_t strides[Rank] = {};

  MixedView() = default;
  template <class T>
  MixedView(const TensorView<const T, Rank>& view)  // NOLINT(google-explicit-constructor)
      : data(view.data_handle()), format(format_of<T>()) {
    for (std::size_t i = 0; i < Rank; ++i) {
      extents[i] = view.extent(i);
      strides[i] = view.stride(i);
    }
  }
  template <class T>
  requires(!std::is_const_v<T>)
      MixedView(const TensorView<T, Rank>& view)  // NOLINT(google-explicit-constructor)
      : MixedView(TensorView<const T, Rank>(view)) {}

  __host__ __device__ explicit operator bool() const { return data != nullptr; }
};

/// The view with its element type T, which must be the type of the view's format.
template <class T, std::size_t Rank>
TensorView<const T, Rank> typed(const MixedView<Rank>& view) {
  Shape<Rank> extents{}, strides{};
  for (std::size_t i = 0; i < Rank; ++i) {
    extents[i] = view.extents[i];
    strides[i] = view.strides[i];
  }
  return make_view(static_cast<const T*>(view.data), extents, strides);
}

}  // namespace lockstep::kernels
