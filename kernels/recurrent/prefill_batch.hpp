// The rows of a prefill as its caller names them.
#pragma once

#include <optional>

#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// The part of a prefill's arguments that says which rows there are.
struct PrefillBatch {
  StateSlots slots{};
  std::optional<IndexView> query_start_loc{};  // [N + 1]; absent: all tokens are one row,
  std::int64_t padded_size = 0;                ///< or rows of so many tokens,
  std::optional<IndexView> context_lengths{};  // [N]: of which the first count
  std::optional<TensorView<const bool, 1>> has_initial_state{};  // [N]
};

}  // namespace lockstep::kernels
