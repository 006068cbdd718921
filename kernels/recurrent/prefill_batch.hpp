// The rows of a prefill, as arguments of the launch wrappers.
#pragma once

#include <optional>

#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// The part of a prefill's arguments that says which rows there are.
struct PrefillBatch {
  StateSlots slots{};
  std::optional<IndexView> query_start_loc{};  ///< [N + 1]: rows are packed
  std::int64_t padded_size = 0;                ///< > 0: a padded batch, with so many tokens per row
  std::optional<IndexView> context_lengths{};  ///< [N]: valid tokens of each padded row
  /// [N]; false: the row's state begins as 0. Without query_start_loc and padded_size all tokens
  /// are one row.
  std::optional<TensorView<const bool, 1>> has_initial_state{};
};

}  // namespace lockstep::kernels
