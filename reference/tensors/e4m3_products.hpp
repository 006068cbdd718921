// Sums of products of e4m3 numbers as Hopper's tensor cores add them, for yardsticks of kernels
// that multiply in e4m3.
#pragma once

#include <algorithm>
#include <cmath>

#include "reference/tensors/eigen.hpp"

namespace lockstep {

/// sum + a b over at most 32 numbers: every summand is cut 13 bits behind the leading bit of the
/// largest.
inline double added_in_e4m3(double sum, const Vector<double>& a, const Vector<double>& b) {
  double largest = std::abs(sum);
  for (std::int64_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a(i) * b(i)));
  if (largest == 0 || !std::isfinite(largest)) return sum + a.dot(b);
  const double unit = std::exp2(std::floor(std::log2(largest)) - 13);
  double units = std::trunc(sum / unit);
  for (std::int64_t i = 0; i < a.size(); ++i) units += std::trunc(a(i) * b(i) / unit);
  return units * unit;
}
inline double product_in_e4m3(const Vector<double>& a, const Vector<double>& b) {
  double sum = 0;
  for (std::int64_t i = 0; i < a.size(); i += 32) {
    const std::int64_t count = std::min<std::int64_t>(32, a.size() - i);
    sum = added_in_e4m3(sum, a.segment(i, count), b.segment(i, count));
  }
  return sum;
}

/// The power of two that brings the largest of x into (224, 448]; 1 for zeros.
inline double power_for_e4m3(const Vector<double>& x) {
  const double largest = x.cwiseAbs().maxCoeff();
  return largest > 0 ? std::exp2(std::floor(std::log2(448 / largest))) : 1;
}

}  // namespace lockstep
