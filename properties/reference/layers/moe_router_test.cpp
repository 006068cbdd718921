// Which experts a token goes to.
#include "reference/layers/moe_router.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

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
      if (i > 0) RC_ASSERT(routing.weights(t, i) <= routing.weights(t, i - 1));
    }
    RC_ASSERT(std::abs(sum - 2.5) < 1e-12);
    RC_ASSERT(std::ranges::count(chosen, true) == k);
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

// Weights are the scores of the chosen, normalised or not, whatever is added to the logits.
TEST(Router, weighsByTheScores) {
  Array<double, 2> logits(Shape<2>{2, 4}, 0.0);
  for (std::int64_t e = 0; e < 4; ++e)
    logits(0, e) = std::log(static_cast<double>(e + 1)), logits(1, e) = 1000 - logits(0, e);
  const auto raw = reference::route<double>(logits, {.experts_per_token = 2, .normalise = false});
  EXPECT_EQ(raw.experts(0, 0), 3);
  EXPECT_NEAR(raw.weights(0, 0), 0.4, 1e-15);
  EXPECT_NEAR(raw.weights(0, 1), 0.3, 1e-15);
  EXPECT_EQ(raw.experts(1, 0), 0);
  EXPECT_NEAR(raw.weights(1, 0), 12 / 25.0, 1e-13) << "no overflow";
  const auto normed = reference::route<double>(logits, {.experts_per_token = 2, .scale = 7});
  EXPECT_NEAR(normed.weights(0, 0), 4, 1e-14);
  EXPECT_NEAR(normed.weights(0, 1), 3, 1e-14);
}

// Groups of three: judged by their two best alone, and a group's experts are its own.
TEST(Router, groupsAreJudgedByTheirTwoBest) {
  Array<double, 2> logits(Shape<2>{1, 9}, -5.0);
  logits(0, 0) = logits(0, 1) = logits(0, 2) = 1;  // three good ones
  logits(0, 3) = 1.5, logits(0, 4) = 1.2;          // two better ones
  logits(0, 8) = 9;                                // one alone
  const auto routed = [&](std::int64_t kept, std::int64_t k) {
    return reference::route<double>(logits, {.experts_per_token = k,
                                             .score = reference::RouterScore::sigmoid,
                                             .groups = 3,
                                             .groups_kept = kept});
  };
  const auto one = routed(1, 2);
  EXPECT_EQ(one.experts(0, 0), 3);
  EXPECT_EQ(one.experts(0, 1), 4);
  const auto two = routed(2, 4);
  EXPECT_EQ(two.experts(0, 2), 0)
      << "the second group is the first one, not the strongest expert's";
  EXPECT_THROW(routed(1, 4), ContractViolation) << "a group has three experts";
  EXPECT_THROW(routed(4, 2), ContractViolation);
  const auto single =
      reference::route<double>(logits, {.experts_per_token = 1, .groups = 9, .groups_kept = 1});
  EXPECT_EQ(single.experts(0, 0), 8) << "groups of one expert";
}

}  // namespace
}  // namespace lockstep
