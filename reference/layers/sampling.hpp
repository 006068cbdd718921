// Selects the next token: the likeliest one, or one drawn from the likeliest. Top-k: Fan, Lewis,
// Dauphin 2018, "Hierarchical Neural Story Generation", section 5.1; top-p: Holtzman et al. 2020,
// "The Curious Case of Neural Text Degeneration", section 3.1.
//
//   here          vLLM, SGLang       shape
//   logits        logits             [N, V] float32      NaN counts as -inf
//   temperature   temperature        [N]                 0 or less: the likeliest token
//   top_k         top_k              [N]                 0 or less: all tokens
//   top_p         top_p              [N]                 1 or more: all tokens
//   seed          seed               [N]                 seed of the request
//   position                         [N]                 position in the request of the drawn token
//
// The random bits of a draw depend on (seed, position) alone, and any implementation of these steps
// gives the same token on any machine: sums are of integers, and floats are only added, subtracted,
// multiplied, divided and compared, without fused operations.
//   1. A token's weight is the integer 2^40 exp((logit - largest) / temperature), with the
//      exponential of weight_of().
//   2. Tokens are sorted by falling logit, equal ones by number. The first top_k are kept; of
//      these, the shortest leading run whose weights sum to at least top_p of the weights of all
//      top_k.
//   3. A random integer below the sum of the kept weights is drawn. The drawn token is the first
//      one, in the order of token numbers, for which the kept weights up to and with it exceed that
//      integer.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "reference/base/philox.hpp"
#include "reference/tensors/array.hpp"

namespace lockstep::reference {

struct SamplingOptions {
  float temperature = 1;
  std::int32_t top_k = 0;
  float top_p = 1;
  std::uint64_t seed = 0;
  std::int32_t position = 0;
};

namespace sampling_detail {

inline float number(float logit) {
  return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
}

/// 2^40 exp(x) for x <= 0, rounded down; 0 for NaN (which -inf - -inf gives).
inline std::uint64_t weight_of(float x) {
  if (!(x > -29.0f)) return 0;                                    // 2^40 exp(-29) is below 1
  const double y = static_cast<double>(x) * 0x1.71547652b82fep0;  // log2(e)
  const double whole = std::floor(y), z = (y - whole) * 0x1.62e42fefa39efp-1;  // z in [0, ln 2)
  double power = 0;  // exp(z) - 1 by its series; the 14th term is below 2^-40
  for (int n = 14; n > 0; --n) power = (power + 1) * (z / n);
  return static_cast<std::uint64_t>((power + 1) * 0x1p40) >> -static_cast<int>(whole);
}

}  // namespace sampling_detail

/// The likeliest token; among equally likely ones the lowest number.
inline std::int32_t greedy_token(const TensorView<const float, 1>& logits) {
  std::int64_t best = 0;
  for (std::int64_t v = 1; v < logits.extent(0); ++v)
    if (sampling_detail::number(logits(v)) > sampling_detail::number(logits(best))) best = v;
  return static_cast<std::int32_t>(best);
}

/// The weights of step 1, by token. The likeliest token has 2^40, also if its logit is infinite.
inline std::vector<std::uint64_t> sampling_weights(const TensorView<const float, 1>& logits,
                                                   float temperature) {
  const float largest = sampling_detail::number(logits(greedy_token(logits)));
  std::vector<std::uint64_t> weights;
  for (std::int64_t v = 0; v < logits.extent(0); ++v) {
    const float logit = sampling_detail::number(logits(v));
    const float x = logit == largest ? 0.0f : (logit - largest) / temperature;
    weights.push_back(sampling_detail::weight_of(x));
  }
  return weights;
}

/// The tokens kept by step 2, in its order.
inline std::vector<std::size_t> kept_tokens(const TensorView<const float, 1>& logits,
                                            const std::vector<std::uint64_t>& weights,
                                            const SamplingOptions& options) {
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return sampling_detail::number(logits(static_cast<std::int64_t>(a))) >
           sampling_detail::number(logits(static_cast<std::int64_t>(b)));
  });
  if (options.top_k > 0 && static_cast<std::size_t>(options.top_k) < order.size())
    order.resize(static_cast<std::size_t>(options.top_k));
  if (!(options.top_p < 1)) return order;
  std::uint64_t total = 0, sum = 0;
  for (const std::size_t v : order) total += weights[v];
  const double wanted =
      std::ceil(static_cast<double>(total) * static_cast<double>(std::max(options.top_p, 0.0f)));
  std::size_t count = 0;
  do sum += weights[order[count++]];
  while (count < order.size() && sum < static_cast<std::uint64_t>(wanted));
  order.resize(count);
  return order;
}

/// The token for one row of logits. V is at least 1 and below 2^22, so that sums of weights fit
/// into 64 bits.
inline std::int32_t sampled_token(const TensorView<const float, 1>& logits,
                                  const SamplingOptions& options) {
  const std::int64_t V = logits.extent(0);
  require(0 < V && V < (1 << 22), "a vocabulary has 1 to 2^22 - 1 tokens");
  if (!(options.temperature > 0)) return greedy_token(logits);
  const std::vector<std::uint64_t> weights = sampling_weights(logits, options.temperature);
  std::vector<std::size_t> kept = kept_tokens(logits, weights, options);
  std::sort(kept.begin(), kept.end());
  std::uint64_t total = 0, sum = 0;
  for (const std::size_t v : kept) total += weights[v];
  const std::uint64_t draw =
      random_below(total, options.seed, 0, static_cast<std::uint64_t>(options.position));
  for (const std::size_t v : kept)
    if ((sum += weights[v]) > draw) return static_cast<std::int32_t>(v);
  violated("a draw falls on a token", __builtin_FILE(), __builtin_LINE());
}

}  // namespace lockstep::reference
