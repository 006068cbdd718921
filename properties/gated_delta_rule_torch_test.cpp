// The gated delta rule against its eager form: the ungrouped equation of the paper.
#include <gtest/gtest.h>

#include "properties/support/eager.hpp"
#include "reference/base/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

class GatedDeltaRuleAgainstTorch : public testing::TestWithParam<std::int64_t> {};

TEST_P(GatedDeltaRuleAgainstTorch, outputsAndStatesAgree) {
  const std::int64_t T = GetParam();
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const GatedDeltaRun<double> run(T, 1, seed);
    const EagerResult expected = eager(run);
    auto state = run.states();
    Array<double, 3> out(run.out_shape);
    GatedDeltaRun<double>::scan(run.inputs(0, T), state.view(), out.view());
    EXPECT_LT(difference(out, array_of<double, 3>(expected.out)).relative(), 1e-12);
    EXPECT_LT(
        difference(at(state.view(), 0), array_of<double, 3>(expected.state).view()).relative(),
        1e-12);
  }
}

// LibTorch in float is a kernel like any other: it stays within the yardstick.
TEST_P(GatedDeltaRuleAgainstTorch, floatsStayWithinTheYardstick) {
  const std::int64_t T = GetParam();
  const GatedDeltaRun<float> run(T, 1, 5);
  const GatedDeltaRun<double> exact(T, 1, 5);
  Array<float, 3> yardstick(run.out_shape);
  Array<double, 3> truth(run.out_shape);
  auto state = run.states();
  auto exact_state = exact.states();
  GatedDeltaRun<float>::scan(run.inputs(0, T), state.view(), yardstick.view());
  GatedDeltaRun<double>::scan(exact.inputs(0, T), exact_state.view(), truth.view());
  const Verdict verdict = judge(array_of<float, 3>(eager(run).out), yardstick, truth);
  EXPECT_TRUE(verdict.pass) << verdict.text;
}

INSTANTIATE_TEST_SUITE_P(Lengths, GatedDeltaRuleAgainstTorch,
                         testing::Values(1, 2, 63, 64, 65, 512));

}  // namespace
}  // namespace lockstep
