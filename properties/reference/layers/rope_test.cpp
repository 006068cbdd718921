// Laws of rotary embeddings, and YaRN's numbers.
#include "reference/layers/rope.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

// Rotation keeps lengths, and a score depends on the distance of its positions alone.
RC_GTEST_PROP(Rope, scoresDependOnDistances, ()) {
  const auto pairs =
      *rc::gen::element(reference::RopePairs::interleaved, reference::RopePairs::half_split);
  const std::uint64_t seed = draw_seed();
  const auto rope = reference::plain_rope<double>(8, 10000);
  const auto score = [&](std::int64_t at_q, std::int64_t at_k) {
    auto qk = on_grid<double>(Shape<3>{2, 1, 8}, {.seed = seed});
    const double before = mapped(at(qk.view(), 0, 0)).norm();
    reference::apply_rope<double>(rope, ints({at_q, at_k}), pairs, qk.view());
    RC_ASSERT(std::abs(mapped(at(qk.view(), 0, 0)).norm() - before) < 1e-13);
    return mapped(at(qk.view(), 0, 0)).dot(mapped(at(qk.view(), 1, 0)));
  };
  const auto q = *rc::gen::inRange<std::int64_t>(0, 500),
             k = *rc::gen::inRange<std::int64_t>(0, 500);
  RC_ASSERT(std::abs(score(q, k) - score(q + 37, k + 37)) < 1e-11);
}

TEST(Rope, pairsNeighboursOrHalves) {
  const auto rope = reference::plain_rope<double>(4, 10000);
  Array<double, 3> x(Shape<3>{1, 1, 4}, 0.0);
  x(0, 0, 0) = 1;
  auto halves = x;
  const auto one = ints({1});
  reference::apply_rope<double>(rope, one, reference::RopePairs::interleaved, x.view());
  reference::apply_rope<double>(rope, one, reference::RopePairs::half_split, halves.view());
  EXPECT_DOUBLE_EQ(x(0, 0, 0), std::cos(1));
  EXPECT_DOUBLE_EQ(x(0, 0, 1), std::sin(1));
  EXPECT_DOUBLE_EQ(halves(0, 0, 2), std::sin(1));
  EXPECT_EQ(halves(0, 0, 1), 0);
}

// DeepSeek-V3's numbers: both corrections, and where the frequencies begin and end to be stretched
// (10 and 23). mobius PR 548, transformers #47435: one of the two was missing or doubled.
TEST(Rope, yarnCorrectsTwice) {
  const auto yarn = [](std::optional<double> mscale, std::optional<double> all_dim) {
    return reference::yarn_rope<double>(
        64, 10000, {.factor = 40, .mscale = mscale, .mscale_all_dim = all_dim});
  };
  const auto v3 = yarn(1.0, 1.0);
  EXPECT_EQ(v3.magnitude, 1);
  EXPECT_NEAR(v3.softmax_factor, 1.3689 * 1.3689, 1e-4);
  EXPECT_NEAR(yarn(0.707, 0.707).softmax_factor, 1.590, 1e-3);
  EXPECT_NEAR(yarn(1.0, 0.707).magnitude, 1.0857, 1e-4);
  EXPECT_NEAR(yarn(1.0, {}).magnitude, 1.3689, 1e-4);
  EXPECT_EQ(yarn(1.0, {}).softmax_factor, 1);
  const auto plain = reference::plain_rope<double>(64, 10000);
  EXPECT_EQ(v3.frequencies(10), plain.frequencies(10));
  EXPECT_LT(v3.frequencies(11), plain.frequencies(11));
  EXPECT_DOUBLE_EQ(v3.frequencies(23), plain.frequencies(23) / 40);
  EXPECT_GT(v3.frequencies(22), plain.frequencies(22) / 40);
}

// Frequencies fall from 1 by powers of the base, and every pair turns by its own, stretched by the
// magnitude.
TEST(Rope, turnsPairsByTheirFrequencies) {
  auto rope = reference::plain_rope<double>(6, 1000);
  for (std::int64_t i = 0; i < 3; ++i)
    EXPECT_DOUBLE_EQ(rope.frequencies(i), std::pow(1000.0, -static_cast<double>(i) / 3));
  EXPECT_EQ(rope.magnitude, 1);
  EXPECT_EQ(rope.softmax_factor, 1);
  rope.magnitude = 1.5;
  const auto before = on_grid<double>(Shape<3>{2, 2, 7}, {.seed = 1});
  for (const auto pairs : {reference::RopePairs::interleaved, reference::RopePairs::half_split}) {
    const bool neighbours = pairs == reference::RopePairs::interleaved;
    auto x = before;
    const auto positions = ints({2, 5});
    reference::apply_rope<double>(rope, positions, pairs, x.view());
    for (std::int64_t t = 0; t < 2; ++t)
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t i = 0; i < 3; ++i) {
          const double angle = static_cast<double>(positions(t)) * rope.frequencies(i);
          const std::int64_t a = neighbours ? 2 * i : i, b = neighbours ? 2 * i + 1 : i + 3;
          const double xa = before(t, h, a), xb = before(t, h, b);
          EXPECT_NEAR(x(t, h, a), 1.5 * (xa * std::cos(angle) - xb * std::sin(angle)), 1e-14);
          EXPECT_NEAR(x(t, h, b), 1.5 * (xb * std::cos(angle) + xa * std::sin(angle)), 1e-14);
        }
        EXPECT_EQ(x(t, h, 6), before(t, h, 6)) << "beyond the rotary dimensions";
      }
  }
  Array<double, 3> narrow(Shape<3>{2, 1, 5}, 0.0);
  const auto two = ints({0, 1}), one = ints({0});
  EXPECT_THROW(
      reference::apply_rope<double>(rope, two, reference::RopePairs::half_split, narrow.view()),
      ContractViolation);
  Array<double, 3> wide(Shape<3>{2, 1, 6}, 0.0);
  EXPECT_THROW(
      reference::apply_rope<double>(rope, one, reference::RopePairs::half_split, wide.view()),
      ContractViolation);
  EXPECT_THROW(reference::plain_rope<double>(5, 10.0), ContractViolation);
}

// The borders of YaRN's blend, for any rotations, and its corners: a context that is not stretched,
// and a ramp of no width.
TEST(Rope, yarnBlendsBetweenItsRotations) {
  const reference::YarnOptions<double> defaults{.factor = 2};
  EXPECT_EQ(defaults.original_positions, 4096);
  EXPECT_EQ(defaults.beta_fast, 32);
  EXPECT_EQ(defaults.beta_slow, 1);
  EXPECT_EQ(defaults.attention_factor, 1);
  EXPECT_EQ(reference::get_mscale(1.0, 5.0), 1);
  EXPECT_EQ(reference::get_mscale(0.5, 5.0), 1);
  EXPECT_DOUBLE_EQ(reference::get_mscale(1.5, 2.0), 0.1 * 2 * std::log(1.5) + 1);
  const auto expected = [](std::int64_t i, double low, double high, double factor) {
    const double plain = std::pow(10000.0, -static_cast<double>(i) / 32);
    const double ramp = std::min(std::max((static_cast<double>(i) - low) / (high - low), 0.0), 1.0);
    return plain / factor * ramp + plain * (1 - ramp);
  };
  const auto v3 = reference::yarn_rope<double>(64, 10000, {.factor = 40});
  const auto fast = reference::yarn_rope<double>(
      64, 10000, {.factor = 40, .original_positions = 1 << 17, .beta_fast = 31, .beta_slow = 3});
  const auto edge = [](double positions, double rotations) {
    return 64 * std::log(positions / (rotations * 2 * std::numbers::pi)) / (2 * std::log(10000.0));
  };
  for (std::int64_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(v3.frequencies(i), expected(i, 10, 23, 40), 1e-15);
    EXPECT_NEAR(fast.frequencies(i),
                expected(i, std::floor(edge(1 << 17, 31)), std::ceil(edge(1 << 17, 3)), 40), 1e-15);
  }
  // All rotations happen beyond the last dimension: low = 0 and high = width - 1 by the clamps.
  const auto clamped = reference::yarn_rope<double>(
      4, 10, {.factor = 8, .original_positions = 1e6, .beta_fast = 1e9, .beta_slow = 1e-9});
  for (std::int64_t i = 0; i < 2; ++i) {
    const double plain = std::pow(10.0, -static_cast<double>(i) / 2);
    const double ramp = static_cast<double>(i) / 3;
    EXPECT_NEAR(clamped.frequencies(i), plain / 8 * ramp + plain * (1 - ramp), 1e-15);
  }
  const auto step = reference::yarn_rope<double>(  // floor and ceil meet at dimension 1
      4, 10,
      {.factor = 8,
       .original_positions = 2 * std::numbers::pi * std::sqrt(10.0),
       .beta_fast = 1,
       .beta_slow = 1});
  EXPECT_DOUBLE_EQ(step.frequencies(0), 1);
  EXPECT_DOUBLE_EQ(step.frequencies(1), std::pow(10.0, -0.5));
  const auto unset = reference::yarn_rope<double>(4, 10, {.factor = 8, .mscale_all_dim = 0.5});
  EXPECT_DOUBLE_EQ(unset.magnitude, (0.1 * std::log(8.0) + 1) / (0.05 * std::log(8.0) + 1));
  const auto both = reference::yarn_rope<double>(
      4, 10, {.factor = 8, .mscale = 2.0, .mscale_all_dim = 0.5, .attention_factor = 1.25});
  EXPECT_DOUBLE_EQ(both.magnitude, (0.2 * std::log(8.0) + 1) / (0.05 * std::log(8.0) + 1) * 1.25);
  EXPECT_DOUBLE_EQ(both.softmax_factor, std::pow(0.05 * std::log(8.0) + 1, 2));
}

}  // namespace
}  // namespace lockstep
