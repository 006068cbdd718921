// Laws of the choice of the next token.
#include "reference/layers/sampling.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>

#include "properties/support/laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::SamplingOptions;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Array<float, 1> row(const std::vector<float>& logits) {
  Array<float, 1> array(Shape<1>{static_cast<std::int64_t>(logits.size())});
  std::ranges::copy(logits, array.begin());
  return array;
}

Array<float, 1> draw_logits(std::int64_t V) {
  return on_grid<float>(Shape<1>{V}, {.seed = draw_seed(), .limit = 2});
}

TEST(Sampling, greedyTakesTheFirstOfTheLikeliest) {
  EXPECT_EQ(reference::greedy_token(row({1, 3, 2, 3})), 1);
  EXPECT_EQ(reference::greedy_token(row({kNan, -kInfinity, -5})), 2);
  EXPECT_EQ(reference::greedy_token(row({kNan, kNan})), 0);
  EXPECT_EQ(reference::greedy_token(row({-0.0f, 0.0f})), 0);
}

// The whole numbers are the exponential to 2^-40 of the likeliest token's.
TEST(Sampling, weightsAreTheSoftmax) {
  const auto logits = row({0, -1e-6f, -0.5f, -1, -10, -20, -27, -28.5f, -1000, kNan, -kInfinity});
  for (const float temperature : {0.5f, 1.0f, 3.0f}) {
    const auto weights = reference::sampling_weights(logits, temperature);
    for (std::size_t v = 0; v < 9; ++v) {
      const double x = logits(static_cast<std::int64_t>(v)) / temperature;
      EXPECT_NEAR(static_cast<double>(weights[v]), std::exp(x) * 0x1p40, 2) << x;
    }
    EXPECT_EQ(weights[0], std::uint64_t{1} << 40);
    EXPECT_EQ(weights[9], 0u);
    EXPECT_EQ(weights[10], 0u);
  }
}

// An infinite logit takes everything; without any number every token is as likely.
TEST(Sampling, infinitiesAreNoError) {
  const std::uint64_t one = std::uint64_t{1} << 40;
  EXPECT_EQ(reference::sampling_weights(row({1, kInfinity, 2}), 1),
            (std::vector<std::uint64_t>{0, one, 0}));
  EXPECT_EQ(reference::sampling_weights(row({-kInfinity, kNan}), 1),
            (std::vector<std::uint64_t>{one, one}));
}

// Top-k keeps k tokens, top-p the fewest that reach p, both from the front of one order.
RC_GTEST_PROP(Sampling, keptTokensAreTheLikeliest, ()) {
  const auto logits = draw_logits(*rc::gen::inRange<std::int64_t>(1, 40));
  const SamplingOptions options{.top_k = *rc::gen::inRange(-1, 45),
                                .top_p = static_cast<float>(*rc::gen::inRange(0, 130)) / 128};
  const auto weights = reference::sampling_weights(logits, 0.7f);
  const auto kept = reference::kept_tokens(logits, weights, options);
  const auto value = [&](std::size_t v) { return logits(static_cast<std::int64_t>(v)); };
  RC_ASSERT(!kept.empty());
  for (std::size_t i = 1; i < kept.size(); ++i)
    RC_ASSERT(value(kept[i - 1]) > value(kept[i]) ||
              (value(kept[i - 1]) == value(kept[i]) && kept[i - 1] < kept[i]));
  std::vector<bool> stays(weights.size());
  for (const std::size_t v : kept) stays[v] = true;
  for (std::size_t v = 0; v < weights.size(); ++v)
    RC_ASSERT(stays[v] || value(v) < value(kept.back()) ||
              (value(v) == value(kept.back()) && v > kept.back()));
  const auto among = reference::kept_tokens(logits, weights, {.top_k = options.top_k});
  if (options.top_k > 0)
    RC_ASSERT(among.size() == std::min<std::size_t>(options.top_k, weights.size()));
  if (options.top_k <= 0) RC_ASSERT(among.size() == weights.size());
  double total = 0, sum = 0;
  for (const std::size_t v : among) total += static_cast<double>(weights[v]);
  for (const std::size_t v : kept) sum += static_cast<double>(weights[v]);
  if (options.top_p >= 1) {
    RC_ASSERT(kept == among);
  } else {
    RC_ASSERT(sum >= options.top_p * total * (1 - 1e-12));
    sum -= static_cast<double>(weights[kept.back()]);
    RC_ASSERT(kept.size() == 1 || sum < options.top_p * total);
  }
}

// A draw is a pure function, lands among the kept, and depends on seed and position.
RC_GTEST_PROP(Sampling, drawsLandAmongTheKept, ()) {
  const auto logits = draw_logits(*rc::gen::inRange<std::int64_t>(1, 40));
  const SamplingOptions options{.temperature = 0.9f,
                                .top_k = *rc::gen::inRange(0, 10),
                                .top_p = static_cast<float>(*rc::gen::inRange(0, 130)) / 128,
                                .seed = draw_seed(),
                                .position = *rc::gen::inRange(0, 1000)};
  const auto weights = reference::sampling_weights(logits, options.temperature);
  const auto kept = reference::kept_tokens(logits, weights, options);
  const auto token = static_cast<std::size_t>(reference::sampled_token(logits, options));
  RC_ASSERT(std::ranges::find(kept, token) != kept.end());
  RC_ASSERT(static_cast<std::int32_t>(token) == reference::sampled_token(logits, options));
}

// Tokens come as often as the softmax says: within four standard errors of 20,000 draws.
TEST(Sampling, drawsFollowTheSoftmax) {
  constexpr int kDraws = 20000;
  const auto logits = row({0, -1, 1, kNan, -2, 0.5f});
  double total = 0;
  std::vector<double> chances;
  for (std::int64_t v = 0; v < logits.extent(0); ++v)
    total += chances.emplace_back(std::isnan(logits(v)) ? 0 : std::exp(logits(v) / 0.8));
  for (const bool by_seed : {false, true}) {
    std::vector<int> counts(chances.size());
    for (int i = 0; i < kDraws; ++i) {
      const SamplingOptions options{.temperature = 0.8f,
                                    .seed = by_seed ? static_cast<std::uint64_t>(i) : 7,
                                    .position = by_seed ? 3 : i};
      ++counts[static_cast<std::size_t>(reference::sampled_token(logits, options))];
    }
    for (std::size_t v = 0; v < chances.size(); ++v) {
      const double p = chances[v] / total;
      EXPECT_NEAR(counts[v], p * kDraws, 4 * std::sqrt(p * (1 - p) * kDraws)) << "token " << v;
    }
  }
}

// With nothing asked for, every token stays, those of weight 0 too; p = 1/2 of two equal ones is
// one.
TEST(Sampling, optionsThatAreNotGivenChangeNothing) {
  const SamplingOptions plain;
  EXPECT_EQ(plain.temperature, 1);
  EXPECT_EQ(plain.top_k, 0);
  EXPECT_EQ(plain.top_p, 1);
  EXPECT_EQ(plain.seed, 0u);
  EXPECT_EQ(plain.position, 0);
  const auto kept = [](const std::vector<float>& logits, const SamplingOptions& options) {
    return reference::kept_tokens(row(logits), reference::sampling_weights(row(logits), 1),
                                  options);
  };
  EXPECT_EQ(kept({0, -1000}, plain).size(), 2u);
  EXPECT_EQ(kept({3, 3}, {.top_p = 0.5f}).size(), 1u);
  EXPECT_EQ(reference::sampled_token(row({3}), plain), 0);
}

// The draw falls on weights in the order of token numbers.
TEST(Sampling, drawsWalkTheTokensInOrder) {
  const auto logits = row({0, 1, -1, 0.5f});
  const auto weights = reference::sampling_weights(logits, 1);
  const std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  for (std::int32_t position = 0; position < 200; ++position) {
    std::uint64_t draw = random_below(total, 5, 0, static_cast<std::uint64_t>(position));
    std::int32_t token = 0;
    while (draw >= weights[static_cast<std::size_t>(token)])
      draw -= weights[static_cast<std::size_t>(token++)];
    EXPECT_EQ(reference::sampled_token(logits, {.seed = 5, .position = position}), token);
  }
}

TEST(Sampling, withoutTemperatureIsGreedy) {
  const auto logits = row({1, 5, 5, 2});
  for (const float temperature : {0.0f, -1.0f, kNan})
    EXPECT_EQ(reference::sampled_token(logits, {.temperature = temperature, .seed = 9}), 1);
  EXPECT_EQ(reference::sampled_token(logits, {.temperature = 1, .top_k = 1, .seed = 9}), 1);
  EXPECT_EQ(reference::sampled_token(logits, {.temperature = 1, .top_p = 0, .seed = 9}), 1);
}

}  // namespace
}  // namespace lockstep
