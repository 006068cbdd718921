// Mamba2 against its eager form.
#include <gtest/gtest.h>

#include "properties/support/eager.hpp"
#include "reference/base/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

class Mamba2AgainstTorch : public testing::TestWithParam<std::int64_t> {};

TEST_P(Mamba2AgainstTorch, outputsAndStatesAgree) {
  const std::int64_t T = GetParam();
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const Mamba2Run<double> run(T, 1, seed);
    const EagerResult expected = eager(run);
    auto state = run.states();
    Array<double, 3> out(run.out_shape);
    Mamba2Run<double>::scan(run.inputs(0, T), state.view(), out.view());
    EXPECT_LT(difference(out, array_of<double, 3>(expected.out)).relative(), 1e-12);
    EXPECT_LT(
        difference(at(state.view(), 0), array_of<double, 3>(expected.state).view()).relative(),
        1e-12);
  }
}

// LibTorch in float is a kernel like any other: it stays within the yardstick.
TEST_P(Mamba2AgainstTorch, floatsStayWithinTheYardstick) {
  const std::int64_t T = GetParam();
  const Mamba2Run<float> run(T, 1, 5);
  const Mamba2Run<double> exact(T, 1, 5);
  Array<float, 3> yardstick(run.out_shape);
  Array<double, 3> truth(run.out_shape);
  auto state = run.states();
  auto exact_state = exact.states();
  Mamba2Run<float>::scan(run.inputs(0, T), state.view(), yardstick.view());
  Mamba2Run<double>::scan(exact.inputs(0, T), exact_state.view(), truth.view());
  const Verdict verdict = judge(array_of<float, 3>(eager(run).out), yardstick, truth);
  EXPECT_TRUE(verdict.pass) << verdict.text;
}

INSTANTIATE_TEST_SUITE_P(Lengths, Mamba2AgainstTorch, testing::Values(1, 2, 63, 64, 65, 512));

}  // namespace
}  // namespace lockstep
