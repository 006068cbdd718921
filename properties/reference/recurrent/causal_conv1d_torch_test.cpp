// The convolution against LibTorch's conv1d.
#include <gtest/gtest.h>

#include "properties/reference/recurrent/eager.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/tensors/grid.hpp"
#include "reference/tensors/yardstick.hpp"

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

// LibTorch is a kernel like any other: within the yardstick, which rounds its outputs to the same
// format. Its sums are float for both formats: in bf16, eager operations round before SiLU as well,
// which no fused kernel does.
TEST_P(CausalConv1dAgainstTorch, floatAndBf16StayWithinTheYardstick) {
  const auto [T, W] = GetParam();
  const std::int64_t D = 24;
  const auto run = [&, T = T, W = W]<class S>(S, Format output, auto&& use) {
    const auto x = on_grid<S>(Shape<2>{T, D}, {.stream = 1});
    const auto weight = on_grid<S>(Shape<2>{D, W}, {.stream = 2});
    const auto bias = on_grid<S>(Shape<1>{D}, {.stream = 3});
    auto state = on_grid<S>(Shape<3>{1, D, W - 1}, {.stream = 4});
    use(x, weight, bias, state);
    Array<S, 2> out(x.shape());
    reference::causal_conv1d<S>({.x = x,
                                 .weight = weight,
                                 .bias = bias.view(),
                                 .activation = Activation::silu,
                                 .storage = {.output = output}},
                                state.view(), out);
    return out;
  };
  const auto nothing = [](const auto&...) {};
  const auto truth = run(double{}, Format::exact, nothing);
  for (const auto& [dtype, format] :
       {std::pair{at::kFloat, Format::float32}, std::pair{at::kBFloat16, Format::bf16}}) {
    at::Tensor found;
    const auto yardstick = run(
        float{}, format,
        [&, dtype = dtype](const auto& x, const auto& weight, const auto& bias, const auto& state) {
          const auto rounded = [&](const at::Tensor& input) {
            return input.to(dtype).to(at::kFloat);
          };
          found = eager_conv1d(rounded(tensor_of(x)), rounded(tensor_of(weight)),
                               rounded(tensor_of(bias)), rounded(tensor_of(state)[0]))
                      .out.to(dtype);
        });
    const Verdict verdict =
        judge(array_of<float, 2>(found.to(at::kFloat)), yardstick, truth, {.format = format});
    EXPECT_TRUE(verdict.pass) << verdict.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, CausalConv1dAgainstTorch,
                         testing::Combine(testing::Values(1, 2, 3, 4, 63, 64, 65),
                                          testing::Values(2, 3, 4)));

}  // namespace
}  // namespace lockstep
