// Mamba2 written again with LibTorch: all heads at once, no rows, no slots.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "properties/support/recurrences.hpp"
#include "properties/support/torch_bridge.hpp"
#include "reference/base/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

struct EagerResult {
  at::Tensor out;    // [T, H, P]
  at::Tensor state;  // [H, P, N]
};

/// In the dtype of the tensors; dt' is given.
EagerResult eager(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& A,
                  const at::Tensor& B, const at::Tensor& C, const at::Tensor& D,
                  const at::Tensor& z, at::Tensor state) {
  const std::int64_t T = x.size(0), H = x.size(1), per_group = H / B.size(1);
  std::vector<at::Tensor> outputs;
  for (std::int64_t t = 0; t < T; ++t) {
    const at::Tensor b = B[t].repeat_interleave(per_group, 0);  // [H, N]
    const at::Tensor c = C[t].repeat_interleave(per_group, 0);
    const at::Tensor decay = at::exp(A * dt[t]).view({H, 1, 1});
    state = state * decay + at::einsum("hp,hn->hpn", {x[t], dt[t].unsqueeze(1) * b});
    const at::Tensor y = at::einsum("hpn,hn->hp", {state, c}) + D.unsqueeze(1) * x[t];
    outputs.push_back(y * at::silu(z[t]));
  }
  return {at::stack(outputs), state};
}

template <class S>
EagerResult eager(const Mamba2Run<S>& run) {
  const auto in = run.inputs(0, 0);
  at::Tensor dt = at::softplus(tensor_of(run.dt) + tensor_of(run.dt_bias), 1, 20);
  if (in.dt_min) dt = at::clamp_min(dt, *in.dt_min);
  if (in.dt_max) dt = at::clamp_max(dt, *in.dt_max);
  return eager(tensor_of(run.x), dt, tensor_of(run.A), tensor_of(run.B), tensor_of(run.C),
               tensor_of(run.D), tensor_of(run.z), tensor_of(run.states())[0]);
}

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
