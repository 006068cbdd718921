// The gated delta rule written again with LibTorch: all heads at once, the ungrouped equation of
// the paper.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "properties/support/recurrences.hpp"
#include "properties/support/torch_bridge.hpp"
#include "reference/base/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

struct EagerResult {
  at::Tensor out;    // [T, HV, V]
  at::Tensor state;  // [HV, V, K]
};

/// S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
template <class S>
EagerResult eager(const GatedDeltaRun<S>& run) {
  const std::int64_t per_head = run.HV / run.H;
  const auto unit = [&](const Array<S, 3>& x) {
    const at::Tensor t = tensor_of(x);
    return (t / at::sqrt((t * t).sum(-1, true) + 1e-6)).repeat_interleave(per_head, 1);
  };
  const at::Tensor q = unit(run.q) / std::sqrt(static_cast<double>(run.K)), k = unit(run.k);
  const at::Tensor v = tensor_of(run.v), alpha = at::exp(tensor_of(run.g));
  const at::Tensor beta = tensor_of(run.beta).unsqueeze(-1).unsqueeze(-1);  // [T, HV, 1, 1]
  const at::Tensor I = at::eye(run.K, k.options());
  at::Tensor state = tensor_of(run.states())[0];
  std::vector<at::Tensor> outputs;
  for (std::int64_t t = 0; t < run.out_shape[0]; ++t) {
    const at::Tensor kk = at::einsum("hi,hj->hij", {k[t], k[t]});
    const at::Tensor vk = at::einsum("hi,hj->hij", {v[t], k[t]});
    state = alpha[t].view({run.HV, 1, 1}) * at::matmul(state, I - beta[t] * kk) + beta[t] * vk;
    outputs.push_back(at::einsum("hvk,hk->hv", {state, q[t]}));
  }
  return {at::stack(outputs), state};
}

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
