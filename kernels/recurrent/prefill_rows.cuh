// The rows of a prefill, on the device: packed sequences, a padded batch with lengths, or all
// tokens as one row; and the slots of each row's state. Rules: reference/tensors/slots.hpp and
// kernels/torch/operators.md. A kernel cannot report an argument that is an error there; it skips
// the row or the store.
#pragma once

#include "kernels/base/device.cuh"
#include "kernels/base/slots.cuh"
#include "kernels/recurrent/prefill_batch.hpp"

namespace lockstep::kernels {

struct PrefillRow {
  int begin;   ///< the first token
  int size;    ///< tokens that count; 0 where the row has no slot
  int end;     ///< tokens from begin + size up to here are padding, whose outputs are 0
  int source;  ///< slot of the state before the row; kNowhere: the state is zero
  int target;  ///< slot for the state after the row; kNowhere: the state is not stored
};

struct PrefillRows {
  RowSlots slots{};                         ///< with slots.rows and slots.tokens of the batch
  const std::int32_t* lengths = nullptr;    ///< [N], beside padded_size
  const bool* has_initial_state = nullptr;  ///< [N]
  std::int64_t has_initial_stride = 0;
  int lengths_stride = 0;
  int padded_size = 0;  ///< tokens of each row of a padded batch; 0: it is packed
  bool has_states = false;

  /// Rows to run. A batch without rows but with tokens runs one empty row, which zeroes their
  /// outputs.
  __host__ __device__ int count() const { return slots.rows > 0 ? slots.rows : slots.tokens > 0; }

#ifdef __CUDACC__
  /// Number of the row's tokens, whether or not it has a slot.
  __device__ int length(int row) const {
    if (slots.starts) return slots.range(row).size;
    if (padded_size == 0) return slots.tokens;
    return lengths ? min(max(lengths[RowSlots::wide(row, lengths_stride)], 0), padded_size)
                   : padded_size;
  }
  __device__ PrefillRow row(int row) const {
    PrefillRow found{};
    if (slots.rows > 0) {
      found.begin = slots.starts ? slots.range(row).begin : row * padded_size;
      found.size = length(row);
    }
    found.end = padded_size > 0         ? found.begin + padded_size
                : row + 1 >= slots.rows ? slots.tokens
                                        : found.begin + found.size;
    found.source = found.target = kNowhere;
    if (!has_states || slots.rows == 0) return found;
    found.source = slots.source(row);
    const bool resumes =
        !has_initial_state || has_initial_state[RowSlots::wide(row, has_initial_stride)];
    if (found.source == kNowhere)
      found.size = 0;
    else if (found.size > 0 || !resumes)  // an empty row that resumes leaves its state alone
      found.target = found.size == 0 ? found.source : slots.target(row, found.source);
    if (!resumes) found.source = kNowhere;
    return found;
  }
  /// Number of rows that begin before token t. Every lane of a warp calls it.
  __device__ int beginning_before(int t) const {
    if (!slots.starts) return t == 0 ? 0 : padded_size == 0 ? 1 : (t - 1) / padded_size + 1;
    int count = 0;
    for (int r = static_cast<int>(threadIdx.x % 32); r < slots.rows; r += 32)
      count += slots.begin(r) < t;
    return sum_over_warp(count);
  }
  /// Number of boundary states (one per `every` tokens of a row) of all rows before `row`. Every
  /// lane of a warp calls it.
  __device__ int boundaries_before(int row, int every) const {
    int count = 0;
    for (int r = static_cast<int>(threadIdx.x % 32); r < row; r += 32) count += length(r) / every;
    return sum_over_warp(count);
  }
  __device__ static int sum_over_warp(int count) {
    return __reduce_add_sync(0xffffffffu, count);
  }
#endif
};

/// The rows of a batch of `tokens` tokens; the host checks shapes and sizes. Without `slot_count`
/// the operation has no states.
inline PrefillRows prefill_rows(const Checks& checks, const PrefillBatch& batch,
                                std::int64_t tokens, std::optional<std::int64_t> slot_count) {
  checks.expect(!batch.slots.table && !batch.slots.num_accepted, "state_indices",
                "one slot per row, without accepted counts", "a table or counts");
  checks.expect(!batch.query_start_loc || batch.padded_size == 0, "query_start_loc",
                "absent in a padded batch", "given");
  checks.expect(!batch.context_lengths || batch.padded_size > 0, "context_lengths",
                "absent in a packed batch", "given");
  std::int64_t count = 1;
  if (batch.padded_size > 0) {
    checks.expect(
        tokens % batch.padded_size == 0, "x", "[B, S, ...]",
        std::to_string(tokens) + " tokens in rows of " + std::to_string(batch.padded_size));
    count = tokens / batch.padded_size;
  }
  PrefillRows rows;
  rows.slots = row_slots(checks, batch.slots, batch.query_start_loc,
                         batch.query_start_loc ? tokens : count, slot_count.value_or(0));
  checks.expect(tokens <= INT_MAX - 65536, "x", "of fewer than 2147418111 tokens",
                std::to_string(tokens));
  rows.slots.tokens = static_cast<int>(tokens);
  rows.padded_size = static_cast<int>(batch.padded_size);
  rows.has_states = slot_count.has_value();
  if (batch.context_lengths) {
    checks.shape(*batch.context_lengths, "context_lengths", "[B]", {rows.slots.rows});
    rows.lengths = batch.context_lengths->data_handle();
    rows.lengths_stride = static_cast<int>(batch.context_lengths->stride(0));
  }
  if (batch.has_initial_state) {
    checks.shape(*batch.has_initial_state, "has_initial_state", "[N]", {rows.slots.rows});
    rows.has_initial_state = batch.has_initial_state->data_handle();
    rows.has_initial_stride = batch.has_initial_state->stride(0);
  }
  return rows;
}

}  // namespace lockstep::kernels
