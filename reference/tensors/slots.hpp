// The rows of a packed batch, and the slots of a state pool from which each row reads its state and
// to which it writes it. The rules on slots (kernels/torch/operators.md, 1 to 12), for the
// references of the convolution and the recurrences.
//
//   here          vLLM                                  shape
//   starts        query_start_loc, cu_seqlens           [N + 1]; absent: every token is a row
//   indices       cache_indices, ssm_state_indices      [N]
//   table         ssm_state_indices of a verification   [N, 1 + drafts]
//   out_indices   dst_state_batch_indices               [N]
//   out_table     dst_state_batch_indices               [N, 1 + drafts], with a table
//   num_accepted  num_accepted_tokens                   [N], needs a table
#pragma once

#include <algorithm>
#include <optional>
#include <set>

#include "reference/tensors/eigen.hpp"

namespace lockstep {

using IndexView = TensorView<const std::int32_t, 1>;
using IndexTable = TensorView<const std::int32_t, 2>;

/// Tokens [begin, end) of a packed batch.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;
  std::int64_t size() const { return end - begin; }
};

inline std::int64_t row_count(const std::optional<IndexView>& starts, std::int64_t tokens) {
  return starts ? starts->extent(0) - 1 : tokens;
}

/// The tokens of row `row`. Requires starts that grow from 0 to at most `tokens`; tokens after the
/// last row are padding.
inline RowRange row_range(const std::optional<IndexView>& starts, std::int64_t row,
                          std::int64_t tokens) {
  if (!starts) return {row, row + 1};
  require((*starts)(0) == 0, "query_start_loc begins with 0");
  const RowRange range{(*starts)(row), (*starts)(row + 1)};
  require(0 <= range.begin && range.begin <= range.end && range.end <= tokens,
          "query_start_loc never falls and stays within the tokens");
  return range;
}

constexpr std::int64_t kNoSlot = -1;

/// The slots of a batch. Without indices and without a table, row i uses slot i.
struct StateSlots {
  std::optional<IndexView> indices{};
  std::optional<IndexTable> table{};
  std::optional<IndexView> out_indices{};
  std::optional<IndexView> num_accepted{};
  std::int32_t pad_slot_id = -1;
  /// Target slots beside a table: the state after token i goes to the slot in column i. `table`
  /// then only names the slots that are read.
  std::optional<IndexTable> out_table{};
};

namespace slots_detail {

inline std::int64_t named(const StateSlots& slots, std::int32_t entry, std::int64_t slot_count) {
  if (entry < 0 || entry == slots.pad_slot_id) return kNoSlot;
  require(entry < slot_count, "a state index is below the number of slots");
  return entry;
}

}  // namespace slots_detail

/// Accepted tokens of the row's previous step, at least 1; the row's state is in column accepted -
/// 1.
inline std::int64_t accepted_before(const StateSlots& slots, std::int64_t row) {
  if (!slots.num_accepted) return 1;
  return std::max<std::int64_t>(1, (*slots.num_accepted)(row));
}

/// The slot that the row reads; kNoSlot for a padding row, whose output is 0 and which writes
/// nothing else.
inline std::int64_t source_slot(const StateSlots& slots, std::int64_t row,
                                std::int64_t slot_count) {
  if (slots.table) {
    const std::int64_t column = accepted_before(slots, row) - 1;
    require(column < slots.table->extent(1),
            "no more tokens were accepted than the table has columns");
    return slots_detail::named(slots, (*slots.table)(row, column), slot_count);
  }
  require(!slots.num_accepted, "num_accepted_tokens needs a table of state indices");
  if (slots.indices) return slots_detail::named(slots, (*slots.indices)(row), slot_count);
  require(row < slot_count, "without state indices, every row has a slot of its own number");
  return row;
}

/// The slot for the state after token `token` of the row's `size` tokens; kNoSlot: it is not
/// stored.
inline std::int64_t target_slot(const StateSlots& slots, std::int64_t row, std::int64_t token,
                                std::int64_t size, std::int64_t slot_count) {
  if (slots.table) {
    const IndexTable& columns = slots.out_table ? *slots.out_table : *slots.table;
    if (token >= columns.extent(1)) return kNoSlot;
    return slots_detail::named(slots, columns(row, token), slot_count);
  }
  if (token != size - 1) return kNoSlot;
  if (slots.out_indices) return slots_detail::named(slots, (*slots.out_indices)(row), slot_count);
  return source_slot(slots, row, slot_count);
}

/// Requires that rows can run in any order: no two rows write the same slot, and no row reads a
/// slot that another row writes.
inline void check_slots(const StateSlots& slots, const std::optional<IndexView>& starts,
                        std::int64_t tokens, std::int64_t slot_count) {
  require(!(slots.table && slots.indices), "state indices are one list or one table");
  require(!(slots.table && slots.out_indices) && (slots.table || !slots.out_table),
          "state_out_indices are a list beside a list of state indices, a table beside a table");
  const std::int64_t rows = row_count(starts, tokens);
  std::set<std::int64_t> written;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (source_slot(slots, row, slot_count) == kNoSlot) continue;
    const std::int64_t size = row_range(starts, row, tokens).size();
    for (std::int64_t token = 0; token < size; ++token) {
      const std::int64_t target = target_slot(slots, row, token, size, slot_count);
      require(target == kNoSlot || written.insert(target).second, "a slot is written once");
    }
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t source = source_slot(slots, row, slot_count);
    if (source == kNoSlot || !written.count(source)) continue;
    const std::int64_t size = row_range(starts, row, tokens).size();
    bool own = false;
    for (std::int64_t token = 0; token < size; ++token)
      own = own || target_slot(slots, row, token, size, slot_count) == source;
    require(own, "no row reads a slot that another row writes");
  }
}

}  // namespace lockstep
