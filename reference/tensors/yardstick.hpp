// The bound of a result's error, measured by the rounding errors of the same arithmetic in float.
//
// The truth d is the reference in double. The yardstick y is the same recurrence in float, rounded
// at the kernel's storage points (storage.hpp). A kernel's result k is judged row by row. A row is
// the last dimension, or as many of the last dimensions as have at least 32 elements together. With
//
//   cost_i    half the distance of neighbours at d_i in the result's format: the error of storing
//   excess_i  max(0, |y_i - d_i| - cost_i): the error of the yardstick's arithmetic beyond storing.
//             A row whose errors happen to cancel gets, relative to its size, at least the excess
//             within which 99 in 100 rows of the tensor stay (all but ten rows of a large tensor):
//             all errors of a state's row come from one number, so they can vanish together
//   floor     one unit in the last place of the row's largest entry in float32; an eighth of a unit
//             of a narrower format, because the arithmetic is float32 there too
//
// a kernel passes if, for every row and every element of it,
//
//   ||k - d||    <=  ||cost|| + factor ||excess|| + sqrt(n) floor
//   |k_i - d_i|  <=  2 cost_i + factor max(excess) + floor
//
// The bound is per row, because a bound for the whole tensor would leave small rows unchecked.
// Costs are per element, because in 16 bits one unit of the largest element can be a hundred times
// the allowed error of a small one. A bound by sums of absolute terms would be useless for the
// delta rule, since it grows exponentially with the sequence. Infinities and NaN must be in the
// same places.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "reference/tensors/array.hpp"
#include "reference/tensors/storage.hpp"

namespace lockstep {

/// The difference between a result and the expected values.
struct Difference {
  double norm = 0;           ///< Frobenius norm of actual - expected
  double expected_norm = 0;  ///< Frobenius norm of expected
  double largest = 0;        ///< largest |actual - expected|
  double expected_largest = 0;
  std::int64_t count = 0;  ///< elements compared
  std::int64_t misplaced =
      0;  ///< elements for which only one side is NaN or infinite, or infinities differ in sign
  std::string
      worst_index;  ///< index of the largest difference, or the first misplaced: "[3, 0, 17]"
  double worst_actual = 0;
  double worst_expected = 0;

  /// ||actual - expected|| / ||expected||; the plain norm if expected is 0; infinite if an infinity
  /// or NaN is misplaced.
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

/// The difference of two tensors of the same shape.
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

/// The result of a comparison by the yardstick. `error` and `bound` belong to the law and the row
/// that come closest to failing, and are relative to that row's truth: to its norm, or to its
/// largest entry.
struct Verdict {
  bool pass = false;
  double error = 0;
  double bound = 0;
  double share = 0;  ///< error / bound: fails above 1; infinite if infinities or NaN are misplaced
  std::string text;  ///< a sentence about the failure
};

struct Yardstick {
  double factor = 4;
  Format format = Format::float32;  ///< the result's format
};

namespace yardstick_detail {

constexpr std::int64_t kRowMin = 32;  ///< fewer elements would sample too few rounding errors

/// Elements of a row: the product of the last extents.
template <std::size_t Rank>
std::int64_t row_size(const Shape<Rank>& shape) {
  std::int64_t size = 1;
  for (std::size_t i = Rank; i > 0 && size < kRowMin; --i) size *= shape[i - 1];
  return size;
}

template <std::size_t Rank>
std::string index_text(const Shape<Rank>& shape, std::int64_t flat) {
  Shape<Rank> index{};
  for (std::size_t i = Rank; i > 0; --i) {
    index[i - 1] = flat % shape[i - 1];
    flat /= shape[i - 1];
  }
  return text_of(index);
}

/// The size of a row's truth, and the yardstick's excess error in it: by norm, and of the largest
/// element.
struct RowScale {
  double norm = 0, largest = 0;
  double excess_norm = 0, excess_largest = 0;
};

template <class Y, class E>
RowScale row_scale(const Y* yardstick, const E* truth, std::int64_t n, Format format) {
  RowScale row;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto d = static_cast<double>(truth[i]);
    if (!std::isfinite(d)) continue;
    row.largest = std::max(row.largest, std::abs(d));
    row.norm += d * d;
    const double off = std::abs(static_cast<double>(yardstick[i]) - d);
    const double cost = unit_in_last_place(d, format) / 2;
    const double excess = std::isfinite(off) ? std::max(0.0, off - cost) : 0;
    row.excess_largest = std::max(row.excess_largest, excess);
    row.excess_norm += excess * excess;
  }
  row.norm = std::sqrt(row.norm);
  row.excess_norm = std::sqrt(row.excess_norm);
  return row;
}

constexpr std::ptrdiff_t kOutliers = 10;

/// Raises each row's excess, relative to its size, to at least the excess that all but 1 in 100
/// rows stay within, and all but kOutliers of a large tensor. Of 200,000 rows the kernel's worst
/// may be one in which the yardstick's errors cancel, so its bound must come from the tail of all
/// rows.
inline void even_out(std::vector<RowScale>& rows) {
  const auto raise = [&](double RowScale::*excess, double RowScale::*size) {
    std::vector<double> shares;
    for (const RowScale& row : rows)
      if (row.*size > 0) shares.push_back(row.*excess / row.*size);
    if (shares.empty()) return;
    const auto rows_beside = static_cast<std::ptrdiff_t>(shares.size()) - 1;
    const auto at = std::max(rows_beside * 99 / 100, rows_beside - kOutliers);
    std::nth_element(shares.begin(), shares.begin() + at, shares.end());
    const double share = shares[static_cast<std::size_t>(at)];
    for (RowScale& row : rows) row.*excess = std::max(row.*excess, share * row.*size);
  };
  raise(&RowScale::excess_norm, &RowScale::norm);
  raise(&RowScale::excess_largest, &RowScale::largest);
}

/// The verdict on one row, by the law that comes closer to failing; error and bound are relative.
struct RowVerdict {
  double error = 0, bound = 0;
  std::int64_t worst = 0;       ///< the element whose error is largest relative to its bound
  std::int64_t misplaced = 0;   ///< infinities and NaN on one side only
  bool of_one_element = false;  ///< error and bound are those of the worst element, not of the row

  double share() const {
    if (misplaced > 0) return std::numeric_limits<double>::infinity();
    return error > 0 ? error / bound : 0;
  }
};

template <class A, class E>
RowVerdict judge_row(const A* actual, const E* truth, std::int64_t n, const RowScale& scale,
                     const Yardstick& options) {
  RowVerdict row;
  const bool narrow = traits_of(options.format).significand_bits < 24;
  const double floor = unit_in_last_place(scale.largest, options.format) / (narrow ? 8 : 1);
  const double norm = scale.norm > 0 ? scale.norm : 1;
  const double largest = scale.largest > 0 ? scale.largest : 1;
  double errors = 0, costs = 0, worst = 0, element_error = 0, element_bound = 1;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto k = static_cast<double>(actual[i]), d = static_cast<double>(truth[i]);
    if (!std::isfinite(k) || !std::isfinite(d)) {
      if (same_special(k, d)) continue;
      if (row.misplaced++ == 0) row.worst = i;
      continue;
    }
    const double cost = unit_in_last_place(d, options.format) / 2;
    errors += (k - d) * (k - d);
    costs += cost * cost;
    const double allowed = 2 * cost + options.factor * scale.excess_largest + floor;
    if (row.misplaced > 0 || std::abs(k - d) <= worst * allowed) continue;
    worst = std::abs(k - d) / allowed;
    row.worst = i;
    element_error = std::abs(k - d) / largest;
    element_bound = allowed / largest;
  }
  row.error = std::sqrt(errors) / norm;
  row.bound = (std::sqrt(costs) + options.factor * scale.excess_norm +
               std::sqrt(static_cast<double>(n)) * floor) /
              norm;
  row.of_one_element = row.misplaced == 0 && worst > row.share();
  if (row.of_one_element) {
    row.error = element_error;
    row.bound = element_bound;
  }
  return row;
}

}  // namespace yardstick_detail

/// Judges `actual`. `yardstick` is the reference in float with the kernel's storage points, `truth`
/// the reference in double.
template <class A, class Y, class E, std::size_t Rank>
Verdict judge(const Array<A, Rank>& actual, const Array<Y, Rank>& yardstick,
              const Array<E, Rank>& truth, const Yardstick& options = {}) {
  using yardstick_detail::RowVerdict;
  require(actual.shape() == truth.shape() && yardstick.shape() == truth.shape(),
          "a result has the shape of what it is compared to");
  Verdict verdict{.pass = true};
  if (truth.size() == 0) return verdict;
  const std::int64_t size = yardstick_detail::row_size(truth.shape());
  std::vector<yardstick_detail::RowScale> scales;
  for (std::int64_t begin = 0; begin < truth.size(); begin += size)
    scales.push_back(yardstick_detail::row_scale(yardstick.data() + begin, truth.data() + begin,
                                                 size, options.format));
  yardstick_detail::even_out(scales);
  RowVerdict worst;
  std::int64_t first = 0, misplaced = 0, beyond = 0;
  for (std::int64_t begin = 0; begin < truth.size(); begin += size) {
    const RowVerdict row =
        yardstick_detail::judge_row(actual.data() + begin, truth.data() + begin, size,
                                    scales[static_cast<std::size_t>(begin / size)], options);
    misplaced += row.misplaced;
    beyond += row.share() > 1;
    if (begin > 0 && row.share() <= worst.share()) continue;
    worst = row;
    first = begin;
  }
  const std::int64_t at = first + worst.worst;
  const auto k = static_cast<double>(actual.data()[at]);
  const auto d = static_cast<double>(truth.data()[at]);
  verdict.pass = beyond == 0;
  verdict.share = worst.share();
  verdict.error = misplaced > 0 ? verdict.share : worst.error;
  verdict.bound = worst.bound;
  verdict.text = "worst at " + yardstick_detail::index_text(truth.shape(), at) + ": " +
                 std::to_string(k) + " for " + std::to_string(d) + " (" +
                 std::to_string(std::abs(k - d) / unit_in_last_place(d, options.format)) +
                 " ulp); ";
  if (misplaced > 0) {
    verdict.text += std::to_string(misplaced) + " infinities or NaN misplaced";
    return verdict;
  }
  verdict.text += (worst.of_one_element ? "relative to the largest of its row of "
                                        : "relative Frobenius error of its row of ") +
                  std::to_string(size) + " elements " + Difference::scientific(worst.error) +
                  ", at most " + Difference::scientific(worst.bound) + " allowed; " +
                  std::to_string(beyond) + " of " + std::to_string(truth.size() / size) +
                  " rows beyond their bounds";
  return verdict;
}

}  // namespace lockstep
