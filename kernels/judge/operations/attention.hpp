// Shared by the judged operations of attention: a query over keys with a kernel's rounding, and
// mistakes of merging.
#pragma once

#include <optional>

#include "kernels/judge/operation.hpp"
#include "reference/attention/softmax_attention.hpp"

namespace lockstep::judging::attention {

/// Attention of one query, with probabilities and outputs rounded as a kernel stores them.
template <class S>
reference::Attended<S> attend_as_stored(const Vector<S>& q, const Matrix<S>& K, const Matrix<S>& V,
                                        S scale, Format format) {
  const Vector<S> scores = scale * (K * q);
  const S largest = scores.maxCoeff();
  const Vector<S> weights = (scores.array() - largest).exp();
  const S sum = weights.sum();
  const Vector<S> out = V.transpose() * rounded_each(weights, format) / sum;
  return {rounded_each(out, format), largest + std::log(sum)};
}

/// Attention of one query over at least one key; or the same with one of the mistakes
/// "mean-of-pieces", "piece-too-many", "lse-of-2". `stored` is the format of a kernel's stores;
/// without it nothing is rounded.
template <class S>
reference::Attended<S> attended(const Vector<S>& q, const Matrix<S>& K, const Matrix<S>& V, S scale,
                                std::optional<Format> stored, std::string_view mistake) {
  reference::Attended<S> one =
      stored ? attend_as_stored<S>(q, K, V, scale, *stored) : reference::attend<S>(q, K, V, scale);
  if (mistake == "mean-of-pieces" && K.rows() > 1) {
    const std::int64_t half = K.rows() / 2;
    const auto part = [&](const auto& keys, const auto& values) {
      return reference::attend<S>(q, keys, values, scale).out;
    };
    one.out = (part(K.topRows(half), V.topRows(half)) +
               part(K.bottomRows(K.rows() - half), V.bottomRows(K.rows() - half))) /
              2;
  }
  if (mistake == "piece-too-many") {
    const S more = std::max(one.lse, S{0}) + std::log1p(std::exp(-std::abs(one.lse)));
    one.out *= std::exp(one.lse - more);
    one.lse = more;
  }
  if (mistake == "lse-of-2") one.lse /= std::log(S{2});
  return one;
}

}  // namespace lockstep::judging::attention
