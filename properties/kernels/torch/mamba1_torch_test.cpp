// The operators of a Mamba1 layer on the CPU: a step is its reference bit by bit, prompts are steps
// bit by bit; and what they refuse.
#include "properties/kernels/torch/layer_step.hpp"
#include "properties/support/laws.hpp"
#include "reference/recurrent/mamba1_decode.hpp"

namespace lockstep::of_mamba1 {
namespace {

using namespace testing_support;
using at::Tensor;

constexpr const char* kName = "mamba1_decode";
constexpr std::int64_t kRows = 4, kD = 7, kN = 5, kR = 3, kSlots = 6;

struct Step {
  Array<float, 3> state = draw<3>({kSlots, kD, kN}, 1);
  Array<float, 2> x = draw<2>({kRows, kD}, 2), dt = draw<2>({kRows, kD}, 3);
  Array<float, 2> A = draw<2>({kD, kN}, 4), B = draw<2>({kRows, kN}, 5);
  Array<float, 2> C = draw<2>({kRows, kN}, 6), z = draw<2>({kRows, kD}, 7);
  Array<float, 2> low = draw<2>({kRows, kR}, 8);
  Array<float, 1> skip = draw<1>({kD}, 9), bias = draw<1>({kD}, 10);
  Array<float, 1> b_weight = draw<1>({kN}, 11), c_weight = draw<1>({kN}, 12);
  Array<std::int32_t, 1> slots = ints({4, -1, 0, 5});

  Named arguments(at::ScalarType activations, at::ScalarType states) const {
    return {{"state", tensor_of(state).to(states)},
            {"x", tensor_of(x).to(activations)},
            {"dt", tensor_of(dt).to(activations)},
            {"A", tensor_of(A)},
            {"B", tensor_of(B).to(activations)},
            {"C", tensor_of(C).to(activations)},
            {"D", tensor_of(skip)},
            {"z", tensor_of(z).to(activations)},
            {"dt_bias", tensor_of(bias)},
            {"dt_softplus", true},
            {"norm_eps", 0.25},
            {"dt_low", tensor_of(low).to(activations)},
            {"b_weight", tensor_of(b_weight).to(activations)},
            {"c_weight", tensor_of(c_weight)},
            {"state_indices", tensor_of(slots)}};
  }
};

TEST(TorchMamba1, isTheReferenceBitByBit) {
  for (const at::ScalarType activations : {at::kFloat, at::kBFloat16})
    for (const at::ScalarType states : {at::kFloat, at::kBFloat16}) {
      Step step;
      const Named named = step.arguments(activations, states);
      const Tensor out = checked_call(kName, named).at(0).toTensor();
      Array<float, 2> expected(step.x.shape());
      reference::mamba1_decode<float>(
          {.x = step.x,
           .dt = step.dt,
           .A = step.A,
           .B = step.B,
           .C = step.C,
           .skip = step.skip.view(),
           .z = step.z.view(),
           .dt_bias = step.bias.view(),
           .dt_softplus = true,
           .norm_eps = 0.25F,
           .dt_low = step.low.view(),
           .b_weight = step.b_weight.view(),
           .c_weight = step.c_weight.view(),
           .slots = {.indices = step.slots.view()},
           .storage = {.state = format_of(states), .output = format_of(activations)}},
          step.state.view(), expected.view());
      EXPECT_EQ(out.scalar_type(), activations);
      EXPECT_TRUE(same_bits(array_of<float, 2>(out), expected));
      EXPECT_TRUE(same_bits(array_of<float, 3>(named.at("state").toTensor()), step.state));
    }
}

// Two prompts, of 3 tokens and of 1, are steps of their rows; the second one starts from nothing.
TEST(TorchMamba1, promptsAreStepsBitByBit) {
  Step data;
  data.slots = ints({4, 1});
  Named named = data.arguments(at::kBFloat16, at::kFloat);
  for (const char* const name : {"norm_eps", "dt_low", "b_weight", "c_weight"}) named.erase(name);
  Named steps = named;
  const Tensor state = named.at("state").toTensor(), expected = state.clone();
  expected[1].zero_();
  steps["state"] = expected;
  std::vector<Tensor> outs;
  for (std::int64_t t = 0; t < kRows; ++t) {
    Named step = steps;
    for (const char* const name : {"x", "dt", "B", "C", "z"})
      step[name] = named.at(name).toTensor().narrow(0, t, 1);
    step["state_indices"] = tensor_of(ints({t < 3 ? 4 : 1}));
    outs.push_back(checked_call(kName, step).at(0).toTensor());
  }
  named["query_start_loc"] = tensor_of(ints({0, 3, 4}));
  named["has_initial_state"] = at::tensor({1, 0}).to(at::kBool);
  const Tensor out = checked_call("mamba1_prefill", named).at(0).toTensor();
  EXPECT_TRUE(at::equal(out, at::cat(outs)));
  EXPECT_TRUE(at::equal(state, expected));
}

TEST(TorchMamba1, refusesByName) {
  expect_refusals(kName, Step().arguments(at::kBFloat16, at::kFloat),
                  {{"x", zeros({kRows, kD + 1}), "state"},
                   {"dt", zeros({kRows, kD}).to(at::kFloat)},
                   {"A", zeros({kD, kN})},
                   {"B", zeros({kRows, kN + 1})},
                   {"C", zeros({kRows + 1, kN})},
                   {"z", zeros({kRows})},
                   {"dt_bias", zeros({kN})},
                   {"dt_low", zeros({kRows - 1, kR})},
                   {"dt_low", c10::IValue()},
                   {"norm_eps", c10::IValue()},
                   {"c_weight", zeros({kD})},
                   {"state", at::zeros({kSlots, kD})},
                   {"state_indices", at::zeros({kRows, 2}, at::kInt)}});
}

}  // namespace
}  // namespace lockstep::of_mamba1
