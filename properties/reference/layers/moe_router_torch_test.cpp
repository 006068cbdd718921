// The router against LibTorch's softmax, sigmoid and topk.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "properties/support/torch_bridge.hpp"
#include "reference/layers/moe_router.hpp"
#include "reference/tensors/grid.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::RouterScore;

/// DeepSeek's routing in tensors: scores [T, E], a biased choice, groups by their two best.
std::pair<at::Tensor, at::Tensor> eager(const at::Tensor& logits, const at::Tensor& bias,
                                        const reference::RouterOptions<double>& options) {
  const at::Tensor scores =
      options.score == RouterScore::softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
  at::Tensor choice = scores + bias;
  if (options.groups > 1) {
    const std::int64_t T = logits.size(0), size = logits.size(1) / options.groups;
    const at::Tensor grouped = choice.view({T, options.groups, size});
    const at::Tensor sums = std::get<0>(grouped.topk(std::min<std::int64_t>(2, size), -1)).sum(-1);
    const at::Tensor kept = std::get<1>(sums.topk(options.groups_kept, -1));
    const at::Tensor mask = at::zeros_like(sums).scatter(1, kept, 1).to(at::kBool).unsqueeze(-1);
    choice = grouped.masked_fill(~mask, -INFINITY).view({T, -1});
  }
  const at::Tensor experts = std::get<1>(choice.topk(options.experts_per_token, -1));
  at::Tensor weights = scores.gather(1, experts);
  if (options.normalise) weights = weights / weights.sum(-1, true);
  return {experts, weights * options.scale};
}

class RouterAgainstTorch
    : public testing::TestWithParam<std::tuple<RouterScore, std::int64_t, bool>> {};

TEST_P(RouterAgainstTorch, expertsAndWeightsAgree) {
  const auto [score, groups, normalise] = GetParam();
  const std::int64_t T = 33, E = 64, k = 6;
  // No two experts of a token have the same logit: LibTorch's topk leaves ties open.
  auto logits = on_grid<double>(Shape<2>{T, E}, {.seed = 7, .limit = 2});
  for (std::int64_t i = 0; i < logits.size(); ++i)
    logits.data()[i] += static_cast<double>(i % E) / 8192;
  const auto bias = on_grid<double>(Shape<1>{E}, {.seed = 8, .limit = 0.25});
  const reference::RouterOptions<double> options{.experts_per_token = k,
                                                 .score = score,
                                                 .bias = bias.view(),
                                                 .groups = groups,
                                                 .groups_kept = (groups + 1) / 2,
                                                 .normalise = normalise,
                                                 .scale = 2.5};
  const auto routing = reference::route<double>(logits, options);
  const auto [experts, weights] = eager(tensor_of(logits), tensor_of(bias), options);
  EXPECT_EQ(difference(routing.experts, array_of<std::int32_t, 2>(experts)).largest, 0);
  EXPECT_LT(difference(routing.weights, array_of<double, 2>(weights)).relative(), 1e-14);
}

INSTANTIATE_TEST_SUITE_P(Rules, RouterAgainstTorch,
                         testing::Combine(testing::Values(RouterScore::softmax,
                                                          RouterScore::sigmoid),
                                          testing::Values(1, 2, 4, 8, 32), testing::Bool()));

}  // namespace
}  // namespace lockstep
