// Eight-bit floats as bytes, and tensors scaled into them. Micikevicius et al. 2022, "FP8 Formats
// for Deep Learning", table 1 (e4m3: no infinity, 0x7F and 0xFF are NaN).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "reference/tensors/array.hpp"
#include "reference/tensors/storage.hpp"

namespace lockstep {

inline double decode_e4m3(std::uint8_t byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  if (exponent == 15 && fraction == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return byte & 0x80 ? -magnitude : magnitude;
}

/// x in e4m3, rounded to nearest even, saturating.
inline std::uint8_t encode_e4m3(double x) {
  if (std::isnan(x)) return 0x7F;
  const double nearest = std::abs(rounded(x, Format::e4m3));
  const int sign = std::signbit(x) ? 0x80 : 0;
  if (nearest < 0x1p-6) return static_cast<std::uint8_t>(sign | static_cast<int>(nearest * 512));
  const int exponent = std::ilogb(nearest);
  const int fraction = static_cast<int>(std::ldexp(nearest, 3 - exponent)) & 7;
  return static_cast<std::uint8_t>(sign | (exponent + 7) << 3 | fraction);
}

/// A scaled tensor: values * scale approximates the source.
template <class S, std::size_t Rank>
struct ScaledToFp8 {
  Array<S, Rank> values;  ///< numbers of the format
  S scale;
};

/// One scale for the tensor (SGLang's input_to_float8). A tensor of zeros gives zeros.
template <class S, std::size_t Rank>
ScaledToFp8<S, Rank> scaled_to_fp8(const Array<S, Rank>& x, Format format = Format::e4m3) {
  const S largest = static_cast<S>(traits_of(format).largest);
  S amax = S(1e-12);
  for (const S e : x) amax = std::max(amax, std::abs(e));
  ScaledToFp8<S, Rank> result{x, amax / largest};
  for (S& e : result.values) e = rounded(e * (largest / amax), format);
  return result;
}

/// The values of weights [n, k] with a scale for every tile of `block` x `block`; the last tiles
/// may be partial.
template <class S>
Matrix<S> dequantised_blocks(const TensorView<const S, 2>& weights,
                             const TensorView<const S, 2>& scales, std::int64_t block = 128) {
  Matrix<S> result = as_matrix(weights);
  for (std::int64_t i = 0; i < result.rows(); ++i)
    for (std::int64_t j = 0; j < result.cols(); ++j) result(i, j) *= scales(i / block, j / block);
  return result;
}

/// a b^T of two scaled tensors [m, k] and [n, k] (SGLang's bmm_fp8).
template <class S>
Matrix<S> scaled_product(const ScaledToFp8<S, 2>& a, const ScaledToFp8<S, 2>& b) {
  return as_matrix(a.values.view()) * as_matrix(b.values.view()).transpose() * (a.scale * b.scale);
}

}  // namespace lockstep
