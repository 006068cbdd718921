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
  const std::vector<std::pair<std::string, c10::IValue>> bad{
      {"query_start_loc", c10::IValue()},
      {"query_start_loc", tensor_of(ints({0, 0, 3, 3}))},
      {"query_start_loc", tensor_of(ints({0, 1, 3}))},
      {"num_accepted_tokens", c10::IValue()},
      {"num_accepted_tokens", tensor_of(ints({1, 3, 0}))},
      {"state_indices", tensor_of(ints({-1, 5, 1}))},
      {"conv_state", narrow}};
  for (const auto& [argument, value] : bad) {
    Named named = good;
    named[argument] = value;
    const std::string complaint = complaint_of(operation, named);
    EXPECT_NE(complaint.find(argument == "query_start_loc" && !value.isNone() ? "row" : argument),
              std::string::npos)
        << argument << ": " << complaint;
  }
}

}  // namespace lockstep::testing_support
