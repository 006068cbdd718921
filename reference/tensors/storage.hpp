// The rounding of production kernels. A reference computes in its scalar type. A storage point is a
// place where a kernel writes a narrower type to memory or to a tensor core's operand. With named
// storage points the reference can run in the kernel's precision: see yardstick.hpp.
//
//   format      significand  smallest normal  largest   beyond the largest
//   float32     24 bits      2^-126           3.4e38    infinity
//   bf16         8           2^-126           3.4e38    infinity
//   fp16        11           2^-14            65504     infinity
//   e4m3         4           2^-6             448       448: conversions saturate
//   e4m3fnuz     4           2^-7             240       240
//   int8         integers                     127       127: with a scale, see scaled_state.hpp
//   int16        integers                     32767     32767
#pragma once

#include <cmath>
#include <limits>

#include "reference/tensors/eigen.hpp"

namespace lockstep {

/// Number formats. `exact` is the scalar type of the computation itself: no rounding.
enum class Format { exact, float32, bf16, fp16, e4m3, e4m3fnuz, int8, int16 };

struct FormatTraits {
  int significand_bits;  ///< with the hidden bit
  int exponent_min;      ///< exponent of the smallest normal number
  double largest;
  bool saturates;
};

constexpr FormatTraits traits_of(Format format) {
  switch (format) {
    case Format::exact: return {53, -1022, std::numeric_limits<double>::max(), false};
    case Format::float32: return {24, -126, 0x1.fffffep127, false};
    case Format::bf16: return {8, -126, 0x1.fep127, false};
    case Format::fp16: return {11, -14, 65504, false};
    case Format::e4m3: return {4, -6, 448, true};
    case Format::e4m3fnuz: return {4, -7, 240, true};
    // Integers: the distance of neighbours is 1 up to the largest.
    case Format::int8: return {8, 7, 127, true};
    case Format::int16: return {16, 15, 32767, true};
  }
  return {};
}

constexpr bool is_integer(Format format) {
  return format == Format::int8 || format == Format::int16;
}

/// The distance of neighbouring numbers of `format` at x (one unit in the last place).
inline double unit_in_last_place(double x, Format format) {
  const FormatTraits traits = traits_of(format);
  int exponent = traits.exponent_min;
  if (x != 0 && std::isfinite(x)) exponent = std::max(std::ilogb(x), exponent);
  return std::ldexp(1.0, exponent - (traits.significand_bits - 1));
}

/// The nearest number of `format`, ties to even. NaN stays NaN; -0 stays -0, but becomes 0 in
/// e4m3fnuz and integers, which have no -0.
template <class S>
S rounded(S x, Format format) {
  if (format == Format::exact || std::isnan(x)) return x;
  const FormatTraits traits = traits_of(format);
  const double beyond = traits.saturates ? traits.largest : std::numeric_limits<double>::infinity();
  if (std::isinf(x)) return static_cast<S>(std::copysign(beyond, x));
  const double unit = unit_in_last_place(static_cast<double>(x), format);
  const double nearest = std::nearbyint(static_cast<double>(x) / unit) * unit;
  if (std::abs(nearest) > traits.largest) return static_cast<S>(std::copysign(beyond, x));
  const bool signed_zero = format != Format::e4m3fnuz && !is_integer(format);
  if (nearest == 0 && !signed_zero) return S{0};
  return static_cast<S>(nearest);
}

/// Rounds x to one of its two neighbours in `format`: to the upper one if `draw`, in [0, 1), is
/// below x's fraction of the distance between them, so that the mean over draws is x. Beyond the
/// largest number it is rounded().
template <class S>
S rounded_stochastically(S x, Format format, double draw) {
  if (format == Format::exact || !std::isfinite(x)) return rounded(x, format);
  const double unit = unit_in_last_place(static_cast<double>(x), format);
  const double steps = static_cast<double>(x) / unit, below = std::floor(steps);
  const double number = (draw < steps - below ? below + 1 : below) * unit;
  return static_cast<S>(rounded(number, format));
}

/// Rounds every element of an Eigen expression. The result is a plain matrix of the same shape.
template <class Expression>
auto rounded_each(const Eigen::MatrixBase<Expression>& x, Format format) {
  using S = typename Expression::Scalar;
  typename Expression::PlainObject result = x;
  if (format != Format::exact) result = result.unaryExpr([&](S e) { return rounded(e, format); });
  return result;
}

/// The storage points of the recurrences and attentions. Points that are not set are exact.
struct StoragePoints {
  Format state = Format::exact;  ///< a state when it is stored to its slot or snapshot
  Format chunk_state =
      Format::exact;  ///< a state at a chunk's start, as the chunk's products use it
  Format normalised_qk = Format::exact;  ///< q and k after their L2 norm
  Format operand = Format::exact;        ///< operands between the products of a chunk kernel
  Format output = Format::exact;
  /// Rounds the state after every token, as single-token launches and replays do, instead of once
  /// at the end of the launch.
  bool state_each_token = false;
};

}  // namespace lockstep
