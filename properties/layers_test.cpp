// Norms, rotary embeddings, feed-forward units and routers.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"
#include "reference/base/yardstick.hpp"
#include "reference/moe_router.hpp"
#include "reference/rms_norm.hpp"
#include "reference/rope.hpp"
#include "reference/swiglu.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::GateOrder;

// A norm forgets the scale of its input, up to eps.
RC_GTEST_PROP(RmsNorm, forgetsTheScale, ()) {
  const std::int64_t D = 1 + draw_length(64);
  const auto x = on_grid<double>(Shape<1>{D}, {.seed = draw_seed()});
  const Vector<double> ones = Vector<double>::Ones(D), v = as_vector(x.view());
  RC_PRE(v.norm() > 0.1);
  const Vector<double> y = reference::rms_normed<double>(v, ones, 0.0);
  RC_ASSERT(std::abs(y.squaredNorm() - static_cast<double>(D)) < 1e-10 * static_cast<double>(D));
  RC_ASSERT((reference::rms_normed<double>(3 * v, ones, 0.0) - y).norm() < 1e-12 * y.norm());
}

// The fused form is an addition and a norm; the residual keeps the sum.
RC_GTEST_PROP(RmsNorm, withResidualIsAnAdditionAndANorm, ()) {
  const std::int64_t T = draw_length(5), D = 1 + draw_length(16);
  const std::uint64_t seed = draw_seed();
  const auto x = on_grid<double>(Shape<2>{T, D}, {.seed = seed, .stream = 1});
  const auto weight = on_grid<double>(Shape<1>{D}, {.seed = seed, .stream = 2});
  auto residual = on_grid<double>(Shape<2>{T, D}, {.seed = seed, .stream = 3});
  Array<double, 2> summed = residual, out(x.shape()), expected(x.shape());
  for (std::int64_t i = 0; i < summed.size(); ++i) summed.data()[i] += x.data()[i];
  reference::rms_norm_with_residual<double>(x, residual.view(), weight, 1e-6, out);
  reference::rms_norm<double>(summed, weight, 1e-6, expected);
  RC_ASSERT(same_bits(out, expected) && same_bits(residual, summed));
}

// Mamba2 gates, then norms each group; the gated delta net norms, then gates.
TEST(GatedRmsNorm, gatesBeforeOrAfterTheNorm) {
  Array<double, 2> x(Shape<2>{1, 4}), gate(Shape<2>{1, 4}), out(Shape<2>{1, 4});
  const Array<double, 1> weight(Shape<1>{4}, 2.0);
  for (std::int64_t i = 0; i < 4; ++i) x(0, i) = static_cast<double>(i + 1), gate(0, i) = 0.5;
  gate(0, 3) = -1;
  const double a = reference::silu(0.5), b = reference::silu(-1.0);
  reference::gated_rms_norm<double>(x, gate, weight, 0, GateOrder::before_norm, 2, out);
  EXPECT_NEAR(out(0, 0), 2 * 1 / std::sqrt((1 + 4) / 2.0), 1e-15) << "a common gate cancels";
  EXPECT_NEAR(out(0, 3), 2 * 4 * b / std::sqrt((9 * a * a + 16 * b * b) / 2), 1e-15);
  reference::gated_rms_norm<double>(x, gate, weight, 0, GateOrder::after_norm, 1, out);
  EXPECT_NEAR(out(0, 3), 2 * 4 / std::sqrt(30 / 4.0) * b, 1e-15);
  reference::gated_rms_norm<double>(x, gate, weight, 0, GateOrder::after_norm, 1, out,
                                    reference::Gate::sigmoid);
  EXPECT_NEAR(out(0, 0), 2 * 1 / std::sqrt(30 / 4.0) * reference::sigmoid(0.5), 1e-15);
}

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

TEST(Swiglu, gatesWhatItRaises) {
  Array<double, 2> x(Shape<2>{1, 2}), gate(Shape<2>{1, 2}), up(Shape<2>{1, 2}),
      down(Shape<2>{2, 1});
  x(0, 0) = 1, x(0, 1) = 2;
  gate(0, 0) = 0.5, gate(0, 1) = 0.25;
  up(0, 0) = 3, up(0, 1) = -1;
  down(0, 0) = 1, down(1, 0) = -2;
  Array<double, 2> out(Shape<2>{1, 2});
  reference::swiglu<double>(x, gate, up, down, out);
  EXPECT_DOUBLE_EQ(out(0, 0), reference::silu(1.0));
  EXPECT_DOUBLE_EQ(out(0, 1), -2 * reference::silu(1.0));
}

// The chosen are the best, by falling score, and their weights sum to the scale.
RC_GTEST_PROP(Router, choosesTheBest, ()) {
  const auto logits = on_grid<double>(Shape<2>{4, 16}, {.seed = draw_seed(), .limit = 2});
  const auto score =
      *rc::gen::element(reference::RouterScore::softmax, reference::RouterScore::sigmoid);
  const std::int64_t k = *rc::gen::inRange<std::int64_t>(1, 9);
  const auto routing =
      reference::route<double>(logits, {.experts_per_token = k, .score = score, .scale = 2.5});
  for (std::int64_t t = 0; t < 4; ++t) {
    double sum = 0;
    std::vector<bool> chosen(16);
    for (std::int64_t i = 0; i < k; ++i) {
      sum += routing.weights(t, i);
      chosen[static_cast<std::size_t>(routing.experts(t, i))] = true;
      RC_ASSERT(i == 0 || routing.weights(t, i) <= routing.weights(t, i - 1));
    }
    RC_ASSERT(std::abs(sum - 2.5) < 1e-12);
    RC_ASSERT(std::count(chosen.begin(), chosen.end(), true) == k);
    const double last = logits(t, routing.experts(t, k - 1));
    for (std::int64_t e = 0; e < 16; ++e)
      RC_ASSERT(chosen[static_cast<std::size_t>(e)] || logits(t, e) <= last);
  }
}

// DeepSeek-V3: the bias chooses and does not weigh; groups are judged by their two best.
TEST(Router, biasChoosesAndGroupsAreKept) {
  Array<double, 2> logits(Shape<2>{1, 6}, -9.0);
  Array<double, 1> bias(Shape<1>{6}, 0.0);
  logits(0, 0) = 3;                    // group 0: one strong expert
  logits(0, 2) = 2, logits(0, 3) = 2;  // group 1: two good ones
  bias(4) = 0.1;
  reference::RouterOptions<double> options{.experts_per_token = 2,
                                           .score = reference::RouterScore::sigmoid,
                                           .bias = bias.view(),
                                           .groups = 3,
                                           .groups_kept = 1,
                                           .normalise = false};
  const auto grouped = reference::route<double>(logits, options);
  EXPECT_EQ(grouped.experts(0, 0), 2);
  EXPECT_EQ(grouped.experts(0, 1), 3) << "ties go to the lower number first";
  EXPECT_DOUBLE_EQ(grouped.weights(0, 0), reference::sigmoid(2.0));
  options.groups = 1, options.experts_per_token = 4;
  const auto biased = reference::route<double>(logits, options);
  EXPECT_EQ(biased.experts(0, 3), 4);
  EXPECT_DOUBLE_EQ(biased.weights(0, 3), reference::sigmoid(-9.0));
}

}  // namespace
}  // namespace lockstep
