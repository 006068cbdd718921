// How far a result may be from the truth: a yardstick, not a taste.
//
// The truth is the reference in double; the yardstick is the same recurrence in float, rounded
// where the kernel stores (storage.hpp). A kernel passes where
//
//   ||kernel - truth||_F <= factor * ||yardstick - truth||_F + sqrt(n) * unit
//   max|kernel - truth|  <= factor * max|yardstick - truth|  + unit
//
// with `unit` one unit in the last place, in the result's own format, of the largest entry of the
// truth. A bound by sums of absolute terms would say nothing of the delta rule: it grows
// exponentially with the sequence. Infinities and NaN must stand in the same places.
#pragma once

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "reference/tensors/array.hpp"
#include "reference/tensors/storage.hpp"

namespace lockstep {

/// What differs between a result and what it should be.
struct Difference {
  double norm = 0;           ///< Frobenius norm of actual - expected
  double expected_norm = 0;  ///< Frobenius norm of expected
  double largest = 0;        ///< largest |actual - expected|
  double expected_largest = 0;
  std::int64_t count = 0;  ///< elements
  std::int64_t misplaced =
      0;  ///< elements where one side only is NaN or infinite, or of the other sign
  std::string
      worst_index;  ///< "[3, 0, 17]" of the largest difference, or of the first misplaced one
  double worst_actual = 0;
  double worst_expected = 0;

  /// ||actual - expected|| / ||expected||; the plain norm where expected is 0; infinite where an
  /// infinity or NaN is misplaced.
  double relative() const {
    if (misplaced > 0) return std::numeric_limits<double>::infinity();
    return expected_norm > 0 ? norm / expected_norm : norm;
  }
  double worst_ulp(Format format) const {
    return std::abs(worst_actual - worst_expected) / unit_in_last_place(worst_expected, format);
  }
  std::string text(Format format) const {
    return "worst at " + worst_index + ": " + std::to_string(worst_actual) + " for " +
           std::to_string(worst_expected) + " (" + std::to_string(worst_ulp(format)) +
           " ulp); relative Frobenius error " + scientific(relative()) +
           (misplaced ? "; " + std::to_string(misplaced) + " infinities or NaN misplaced" : "");
  }
  static std::string scientific(double x) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.3e", x);
    return digits;
  }
};

namespace yardstick_detail {

inline bool same_special(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return true;
}

template <std::size_t Rank>
std::string text_of(const Shape<Rank>& index) {
  std::string text = "[";
  for (std::size_t i = 0; i < Rank; ++i) text += (i ? ", " : "") + std::to_string(index[i]);
  return text + "]";
}

}  // namespace yardstick_detail

/// The shapes agree.
template <AnyView A, AnyView E>
Difference difference(const A& actual, const E& expected) {
  using yardstick_detail::same_special;
  require(shape_of(actual) == shape_of(expected),
          "a result has the shape of what it is compared to");
  Difference found;
  double squares = 0, expected_squares = 0;
  for_each_element(actual, [&](const auto& index, const auto& element) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * expected.stride(i);
    const auto a = static_cast<double>(element);
    const auto e = static_cast<double>(expected.data_handle()[offset]);
    const bool special = !std::isfinite(a) || !std::isfinite(e);
    const bool misplaced = special && !same_special(a, e);
    const double distance = special ? 0 : std::abs(a - e);
    if (std::isfinite(e)) {
      expected_squares += e * e;
      found.expected_largest = std::max(found.expected_largest, std::abs(e));
    }
    squares += distance * distance;
    const bool worst =
        misplaced ? found.misplaced == 0 : found.misplaced == 0 && distance > found.largest;
    if (worst || found.count == 0) {
      found.worst_index = yardstick_detail::text_of(index);
      found.worst_actual = a;
      found.worst_expected = e;
    }
    found.largest = std::max(found.largest, distance);
    found.misplaced += misplaced;
    ++found.count;
  });
  found.norm = std::sqrt(squares);
  found.expected_norm = std::sqrt(expected_squares);
  return found;
}

template <class A, class E, std::size_t Rank>
Difference difference(const Array<A, Rank>& actual, const Array<E, Rank>& expected) {
  return difference(actual.view(), expected.view());
}

/// What a comparison by the yardstick says.
struct Verdict {
  bool pass = false;
  double error = 0;  ///< relative Frobenius error of the result
  double bound = 0;  ///< what it may be
  std::string text;  ///< the sentence of a failure
};

struct Yardstick {
  double factor = 4;
  Format format = Format::float32;  ///< of the result: its unit is the bound's floor
};

/// `yardstick`: the reference in float with the kernel's storage points; `truth`: in double.
template <class A, class Y, class E, std::size_t Rank>
Verdict judge(const Array<A, Rank>& actual, const Array<Y, Rank>& yardstick,
              const Array<E, Rank>& truth, const Yardstick& options = {}) {
  const Difference result = difference(actual, truth);
  const Difference allowed = difference(yardstick, truth);
  const double unit = unit_in_last_place(result.expected_largest, options.format);
  const double norm_bound =
      options.factor * allowed.norm + std::sqrt(static_cast<double>(result.count)) * unit;
  const double largest_bound = options.factor * allowed.largest + unit;
  const double scale = result.expected_norm > 0 ? result.expected_norm : 1;
  Verdict verdict{.error = result.norm / scale, .bound = norm_bound / scale};
  verdict.pass =
      result.misplaced == 0 && result.norm <= norm_bound && result.largest <= largest_bound;
  verdict.text = result.text(options.format) + ", at most " +
                 Difference::scientific(verdict.bound) + " allowed; largest difference " +
                 Difference::scientific(result.largest) + ", at most " +
                 Difference::scientific(largest_bound) + " allowed";
  return verdict;
}

}  // namespace lockstep
