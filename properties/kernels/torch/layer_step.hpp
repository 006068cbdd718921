// Rows of a verification for tests of layers' steps, and the parts of one that are refused.
#pragma once

#include "properties/kernels/torch/torch_operator.hpp"
#include "properties/support/laws.hpp"
#include "properties/support/torch_bridge.hpp"

namespace lockstep::testing_support {

/// 1, 2 and no tokens of three rows, the first of them padding, and one behind: 4 tokens, 6 slots.
struct VerifiedRows {
  Array<std::int32_t, 1> starts = ints({0, 1, 3, 3}), accepted = ints({1, 2, 0});
  Array<std::int32_t, 2> table{Shape<2>{3, 2}, -1};

  VerifiedRows() { table(1, 0) = 5, table(1, 1) = 2, table(2, 0) = 1, table(2, 1) = 0; }
  StateSlots slots() const { return {.table = table.view(), .num_accepted = accepted.view()}; }
  /// A step's arguments for this verification instead, with these windows.
  Named of(Named step, const at::Tensor& windows) const {
    step["conv_state"] = windows;
    step["state_indices"] = tensor_of(table);
    step["query_start_loc"] = tensor_of(starts);
    step["num_accepted_tokens"] = tensor_of(accepted);
    return step;
  }
};

/// A verification has a table, counts and starts, and a slot and a column for each token; `narrow`
/// has a column too few.
inline void expect_a_part_is_refused(const char* operation, const Named& good,
                                     const at::Tensor& narrow) {
  expect_refusals(operation, good,
                  {{"query_start_loc", c10::IValue()},
                   {"query_start_loc", tensor_of(ints({0, 0, 3, 3}))},
                   {"query_start_loc", tensor_of(ints({0, 1, 3})), "state_indices"},
                   {"num_accepted_tokens", c10::IValue()},
                   {"num_accepted_tokens", tensor_of(ints({1, 3, 0}))},
                   {"state_indices", tensor_of(ints({-1, 5, 1}))},
                   {"conv_state", narrow}});
}

template <std::size_t Rank>
Array<float, Rank> draw(const Shape<Rank>& shape, std::uint64_t stream) {
  return on_grid<float>(shape, {.seed = 9, .stream = stream});
}

inline at::Tensor zeros(at::IntArrayRef shape) {
  return at::zeros(shape, at::kBFloat16);
}

/// A Step's decode has the bits of reference(inputs, windows, states, outputs), in activations and
/// states of either type.
template <class Step>
void expect_decodes(const char* operation, const auto& reference) {
  for (const at::ScalarType activations : {at::kFloat, at::kBFloat16})
    for (const at::ScalarType states : {at::kFloat, at::kBFloat16}) {
      Step step;
      const Named named = step.arguments(activations, states);
      const at::Tensor out = checked_call(operation, named).at(0).toTensor();
      Array<float, 3> expected(step.z.shape());
      auto in = step.inputs(activations, states);
      in.slots = {.indices = step.slots.view()};
      reference(in, step.window.view(), step.state.view(), expected.view());
      EXPECT_EQ(out.scalar_type(), activations);
      EXPECT_TRUE(same_bits(array_of<float, 3>(out), expected));
      EXPECT_TRUE(same_bits(array_of<float, 3>(named.at("conv_state").toTensor()), step.window));
      EXPECT_TRUE(same_bits(array_of<float, 4>(named.at("state").toTensor()), step.state));
    }
}

/// Its verification has those of reference(inputs, starts, windows, states, outputs).
template <class Step>
void expect_verifications(const char* operation, const auto& reference) {
  for (const at::ScalarType states : {at::kFloat, at::kBFloat16}) {
    Step step;
    const Named named = step.verification(at::kBFloat16, states);
    const at::Tensor out = checked_call(operation, named).at(0).toTensor();
    Array<float, 3> expected(step.z.shape());
    auto in = step.inputs(at::kBFloat16, states);
    in.slots = step.rows.slots();
    reference(in, step.rows.starts.view(), step.wide.view(), step.state.view(), expected.view());
    EXPECT_TRUE(same_bits(array_of<float, 3>(out), expected));
    EXPECT_TRUE(same_bits(array_of<float, 3>(named.at("conv_state").toTensor()), step.wide));
    EXPECT_TRUE(same_bits(array_of<float, 4>(named.at("state").toTensor()), step.state));
  }
}

}  // namespace lockstep::testing_support
