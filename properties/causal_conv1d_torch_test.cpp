// The convolution against LibTorch's conv1d.
#include <gtest/gtest.h>

#include "properties/support/eager.hpp"
#include "reference/base/grid.hpp"
#include "reference/base/yardstick.hpp"
#include "reference/causal_conv1d.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::Activation;

class CausalConv1dAgainstTorch
    : public testing::TestWithParam<std::tuple<std::int64_t, std::int64_t>> {};

TEST_P(CausalConv1dAgainstTorch, outputsAndStatesAgree) {
  const auto [T, W] = GetParam();
  const std::int64_t D = 24;
  const auto x = on_grid<double>(Shape<2>{T, D}, {.stream = 1});
  const auto weight = on_grid<double>(Shape<2>{D, W}, {.stream = 2});
  const auto bias = on_grid<double>(Shape<1>{D}, {.stream = 3});
  auto state = on_grid<double>(Shape<3>{1, D, W - 1}, {.stream = 4});
  const auto [expected, expected_state] =
      eager_conv1d(tensor_of(x), tensor_of(weight), tensor_of(bias), tensor_of(state)[0]);
  Array<double, 2> out(Shape<2>{T, D});
  reference::causal_conv1d<double>(
      {.x = x, .weight = weight, .bias = bias.view(), .activation = Activation::silu}, state.view(),
      out);
  EXPECT_LT(difference(out, array_of<double, 2>(expected)).relative(), 1e-14);
  EXPECT_EQ(difference(at(state.view(), 0), array_of<double, 2>(expected_state).view()).largest, 0);
}

INSTANTIATE_TEST_SUITE_P(Sizes, CausalConv1dAgainstTorch,
                         testing::Combine(testing::Values(1, 2, 3, 4, 63, 64, 65),
                                          testing::Values(2, 3, 4)));

}  // namespace
}  // namespace lockstep
