// The row arguments of the prefill operators, and their checks.
#pragma once

#include "kernels/torch/arguments.hpp"

#ifdef LOCKSTEP_HAS_CUDA
#include "kernels/recurrent/prefill_batch.hpp"
#endif

namespace lockstep::torch_ops {

/// x is [T, ...] with packed rows, or (padded) [B, S, ...] with lengths.
struct PrefillArguments {
  bool padded;
  MaybeTensor query_start_loc, context_lengths, state_indices, has_initial_state;
  std::int64_t pad_slot_id;

  /// Rows of the batch, before its arguments are checked.
  std::int64_t count(const Tensor& x) const {
    return padded || query_start_loc ? rows_in(query_start_loc, x) : 1;
  }

  /// The tensor as [tokens, ...]: a padded [B, S, ...] becomes [B S, ...].
  Tensor packed(const Tensor& tensor) const { return padded ? tensor.flatten(0, 1) : tensor; }
  MaybeTensor packed(const MaybeTensor& tensor) const {
    return tensor ? MaybeTensor(packed(*tensor)) : MaybeTensor();
  }

  /// Checks the arguments for both devices. Packed, x has `rank` dimensions; padded, one more.
  void check(const Tensor& x, const char* argument, std::int64_t rank, bool has_state) const {
    expect_rank(x, argument, padded ? rank + 1 : rank);
    expect(!padded || !query_start_loc, "query_start_loc", "absent in a padded batch", "given");
    expect(padded || !context_lengths, "context_lengths", "absent in a packed batch", "given");
    expect(has_state || !state_indices, "state_indices", "absent without a state", "given");
    const auto starts = indices_of(query_start_loc, "query_start_loc");
    expect(!starts || starts->extent(0) >= 1, "query_start_loc", "[N + 1]", "no elements");
    const std::int64_t rows = count(x);
    expect_type(context_lengths, at::kInt, "context_lengths");
    expect_shape(context_lengths, "context_lengths", "[B]", {rows});
    expect_type(state_indices, at::kInt, "state_indices");
    expect_shape(state_indices, "state_indices", "[N]", {rows});
    expect_type(has_initial_state, at::kBool, "has_initial_state");
    expect_shape(has_initial_state, "has_initial_state", "[N]", {rows});
  }
  std::optional<TensorView<const bool, 1>> resumes() const {
    if (!has_initial_state) return {};
    return view_of<const bool, 1>(*has_initial_state, "has_initial_state");
  }
  StateSlots slots() const { return slots_of(state_indices, {}, {}, pad_slot_id); }

  /// Checks the values of indices, on the CPU; called after check().
  void check_host(const Tensor& x, const MaybeTensor& state) const {
    if (context_lengths) {
      const IndexView lengths = indices_of<1>(*context_lengths, "context_lengths");
      for (std::int64_t b = 0; b < lengths.extent(0); ++b)
        expect(0 <= lengths(b) && lengths(b) <= x.size(1), "context_lengths", "between 0 and S",
               lengths(b));
    }
    if (!state) return;
    const std::int32_t whole[2] = {0, static_cast<std::int32_t>(x.size(0))};
    Rows all{.tokens = x.size(0),
             .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
             .slots = slots()};
    if (!padded && !query_start_loc) all.query_start_loc = make_view(whole, Shape<1>{2});
    check_host_slots(all, state->size(0), false);
  }

  /// Checks that boundary_states has room for the state at every boundary; called after
  /// check_host().
  void check_boundaries(const MaybeTensor& boundary_states, std::int64_t every,
                        std::int64_t tokens) const {
    if (!boundary_states) return;
    const auto starts = indices_of(query_start_loc, "query_start_loc");
    std::int64_t count = starts ? 0 : tokens / every;
    for (std::int64_t row = 0; starts && row + 1 < starts->extent(0); ++row)
      count += row_range(starts, row, tokens).size() / every;
    expect(boundary_states->size(0) >= count, "boundary_states",
           "of a place for each boundary, " + std::to_string(count), boundary_states->size(0));
  }

#ifdef LOCKSTEP_HAS_CUDA
  kernels::PrefillBatch batch(const Tensor& x) const {
    return {.slots = slots(),
            .query_start_loc = indices_of(query_start_loc, "query_start_loc"),
            .padded_size = padded ? x.size(1) : 0,
            .context_lengths = indices_of(context_lengths, "context_lengths"),
            .has_initial_state = resumes()};
  }
#endif
};

/// Boundaries are counted from the first row of a launch, so they take a batch of one launch.
inline void check_boundary_rows(const MaybeTensor& boundary_states, std::int64_t rows) {
  expect(!boundary_states || rows <= kRowsOfLaunch, "the batch",
         "of at most " + std::to_string(kRowsOfLaunch) + " rows with boundary_states", rows);
}

}  // namespace lockstep::torch_ops
