// The rules on rows and slots of reference/tensors/slots.hpp, on the device. An argument that is an
// error there (a slot out of range, a range of tokens that is none) makes a kernel skip the row or
// the store: a kernel cannot report.
//
// A row is one request of the batch: a range of the packed tokens, and the slot of the state pool
// that holds its state.
#pragma once

#include <climits>

#include "kernels/base/check.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

struct TokenRange {
  int begin;
  int size;
};

constexpr int kNowhere = -1;  ///< a slot number: the row is padding, or its state is not stored

/// A row's tokens and slots, held by a warp.
struct RowPlan {
  TokenRange range;
  int source;  ///< slot of the state before the row's first token
  int last;    ///< without a table: slot for the state after the last token
  int entry;   ///< with a table: lane i holds the slot for the state after token i
};

/// `query_start_loc` and StateSlots as kernels take them. Pointers are into device memory.
struct RowSlots {
  const std::int32_t* starts = nullptr;       ///< [N + 1]; null: every token is a row
  const std::int32_t* indices = nullptr;      ///< [N], or the table [N, columns]
  const std::int32_t* out_indices = nullptr;  ///< likewise: target slots; null: states are updated
                                              ///< in place
  const std::int32_t* num_accepted = nullptr;
  int starts_stride = 0;
  int indices_stride = 0;
  int column_stride = 0;
  int out_indices_stride = 0;
  int out_column_stride = 0;
  int num_accepted_stride = 0;
  int columns = 0;      ///< of the table; 0: `indices` is a list
  int out_columns = 0;  ///< of the table of targets: `out_indices`, or `indices` without one
  int pad_slot_id = -1;
  int slot_count = 0;
  int rows = 0;
  int tokens = 0;

#ifdef __CUDACC__
  /// index * stride in 64 bits (one IMAD.WIDE): a column of a wide tensor can lie beyond 2^31
  /// elements.
  __device__ static std::int64_t wide(int index, int stride) {
    return std::int64_t{index} * stride;
  }
  /// The first token of a row; for row == rows, the end of the last row.
  __device__ int begin(int row) const {
    return starts ? starts[wide(row, starts_stride)] : row;
  }
  __device__ TokenRange range(int row) const {
    return checked_range(begin(row), begin(row + 1));
  }
  __device__ TokenRange checked_range(int begin, int end) const {
    const bool sound = 0 <= begin && begin <= end && end <= tokens;
    return {sound ? begin : 0, sound ? end - begin : 0};
  }
  /// The first of the padding tokens after the last row.
  __device__ int padding_begin() const {
    return starts ? max(0, starts[wide(rows, starts_stride)]) : tokens;
  }
  /// An entry of `indices` as a slot number; kNowhere where it is padding or out of range.
  __device__ int named(int entry) const {
    return entry < 0 || entry == pad_slot_id || entry >= slot_count ? kNowhere : entry;
  }
  /// Tokens of the row that the previous step accepted, at least 1.
  __device__ int accepted_before(int row) const {
    return num_accepted ? max(1, num_accepted[wide(row, num_accepted_stride)]) : 1;
  }
  /// Without indices a row has the slot of its own number, whatever pad_slot_id is.
  __device__ int own_slot(int row) const {
    return row < slot_count ? row : kNowhere;
  }
  /// Slot of the state before the row's first token, in a batch without a table.
  __device__ int source(int row) const {
    return indices ? named(indices[wide(row, indices_stride)]) : own_slot(row);
  }
  /// Slot for the state after the row's last token, in a batch without a table; `source` is the
  /// result of source().
  __device__ int target(int row, int source) const {
    return out_indices ? named(out_indices[wide(row, out_indices_stride)]) : source;
  }
  /// A guess at the slot that the row will read, for prefetches before wait_for_earlier_launch():
  /// the earlier launch may still change indices and counts. The reads bypass L1 (ld.cg), which
  /// would otherwise return the old values again after the wait.
  __device__ int likely_source(int row) const {
    if (!indices) return own_slot(row);
    const int accepted = num_accepted ? __ldcg(num_accepted + wide(row, num_accepted_stride)) : 1;
    const int column = columns == 0 ? 0 : min(max(accepted, 1), columns) - 1;
    return named(__ldcg(indices + wide(row, indices_stride) + wide(column, column_stride)));
  }
  /// The same guess for range().
  __device__ TokenRange likely_range(int row) const {
    if (!starts) return {row, 1};
    return checked_range(__ldcg(starts + wide(row, starts_stride)),
                         __ldcg(starts + wide(row + 1, starts_stride)));
  }
  /// The plan of a row of several tokens. All loads are issued before the first result is used.
  /// Every lane of a warp calls it.
  __device__ RowPlan plan(int row) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    RowPlan plan;
    int entry = kNowhere, out = kNowhere;
    if (columns == 0) {
      if (indices) entry = indices[wide(row, indices_stride)];
      if (out_indices) out = out_indices[wide(row, out_indices_stride)];
    } else {
      if (lane < columns) entry = indices[wide(row, indices_stride) + wide(lane, column_stride)];
      if (out_indices && lane < out_columns) out = target_entry(row, lane);
    }
    const int column = accepted_before(row) - 1;
    plan.range = range(row);
    plan.entry = plan.source = indices ? named(entry) : own_slot(row);
    if (columns > 0) {
      plan.source = column < 32 ? __shfl_sync(0xffffffffu, plan.entry, column)
                    : column < columns
                        ? named(indices[wide(row, indices_stride) + wide(column, column_stride)])
                        : kNowhere;
      if (out_indices) plan.entry = named(out);
    }
    plan.last = out_indices ? named(out) : plan.source;
    return plan;
  }
  /// Slot for the state after token `token` of the row. Every lane of a warp calls it.
  __device__ int target(const RowPlan& plan, int row, int token) const {
    if (columns == 0) return token == plan.range.size - 1 ? plan.last : kNowhere;
    if (token < 32) return __shfl_sync(0xffffffffu, plan.entry, token);
    return token < out_columns ? named(target_entry(row, token)) : kNowhere;
  }

 private:
  /// An entry of the table of targets.
  __device__ std::int32_t target_entry(int row, int token) const {
    return out_indices ? out_indices[wide(row, out_indices_stride) + wide(token, out_column_stride)]
                       : indices[wide(row, indices_stride) + wide(token, column_stride)];
  }
#endif
};

/// `slots` of an operation over T tokens. The host checks shapes and sizes; the contents lie in
/// device memory and are checked by kernels.
inline RowSlots row_slots(const Checks& checks, const StateSlots& slots,
                          const std::optional<IndexView>& starts, std::int64_t tokens,
                          std::int64_t slot_count) {
  RowSlots rows;
  const auto number = [&](std::int64_t x, const char* argument) {
    checks.expect(0 <= x && x <= INT_MAX, argument, "of at most 2147483647 elements and strides",
                  std::to_string(x));
    return static_cast<int>(x);
  };
  rows.tokens = number(tokens, "the batch");
  rows.rows = number(row_count(starts, tokens), "the batch");
  rows.slot_count = number(slot_count, "state");
  rows.pad_slot_id = slots.pad_slot_id;
  if (starts) {
    checks.expect(starts->extent(0) >= 1, "query_start_loc", "[N + 1]", "no elements");
    rows.starts = starts->data_handle();
    rows.starts_stride = number(starts->stride(0), "query_start_loc");
  }
  const auto per_row = [&](const IndexView& view, const char* argument) {
    checks.shape(view, argument, "[N]", {rows.rows});
  };
  checks.expect(!(slots.indices && slots.table), "state_indices", "one list or one table", "both");
  if (slots.indices) {
    per_row(*slots.indices, "state_indices");
    rows.indices = slots.indices->data_handle();
    rows.indices_stride = number(slots.indices->stride(0), "state_indices");
  }
  if (slots.table) {
    checks.expect(slots.table->extent(0) == rows.rows && slots.table->extent(1) >= 1,
                  "state_indices", "[N, 1 + drafts] with N = " + std::to_string(rows.rows),
                  text_of(shape_of(*slots.table)));
    rows.indices = slots.table->data_handle();
    rows.indices_stride = number(slots.table->stride(0), "state_indices");
    rows.column_stride = number(slots.table->stride(1), "state_indices");
    rows.columns = rows.out_columns = number(slots.table->extent(1), "state_indices");
  }
  checks.expect(!(slots.table && slots.out_indices) && (slots.table || !slots.out_table),
                "state_out_indices",
                "a list beside a list of state_indices, a table beside a table",
                slots.out_table ? "a table" : "a list");
  if (slots.out_table) {
    checks.expect(slots.out_table->extent(0) == rows.rows, "state_out_indices",
                  "[N, 1 + drafts] with N = " + std::to_string(rows.rows),
                  text_of(shape_of(*slots.out_table)));
    rows.out_indices = slots.out_table->data_handle();
    rows.out_indices_stride = number(slots.out_table->stride(0), "state_out_indices");
    rows.out_column_stride = number(slots.out_table->stride(1), "state_out_indices");
    rows.out_columns = number(slots.out_table->extent(1), "state_out_indices");
  }
  if (slots.out_indices) {
    per_row(*slots.out_indices, "state_out_indices");
    rows.out_indices = slots.out_indices->data_handle();
    rows.out_indices_stride = number(slots.out_indices->stride(0), "state_out_indices");
  }
  if (slots.num_accepted) {
    per_row(*slots.num_accepted, "num_accepted_tokens");
    rows.num_accepted = slots.num_accepted->data_handle();
    rows.num_accepted_stride = number(slots.num_accepted->stride(0), "num_accepted_tokens");
  }
  return rows;
}

/// Each row is an index of the grid's y or z, which CUDA limits to 65535; operators run in parts.
inline void check_row_count(const Checks& checks, const RowSlots& rows) {
  checks.expect(rows.rows <= 65535, "the batch", "of at most 65535 rows",
                std::to_string(rows.rows));
}

}  // namespace lockstep::kernels
