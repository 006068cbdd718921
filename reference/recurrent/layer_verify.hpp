// A verification through a layer between its projections: the tokens of each row are decoded one
// after another, from the state and the window that the accepted tokens of the row's previous
// verification left.
//
//   here            vLLM                     shape
//   starts          query_start_loc          [N + 1]
//   slots.table     spec_state_indices       [N, 1 + drafts]
//   slots.num_accepted  num_accepted_tokens  [N]
//   conv_state      conv_state               [slots, D, C]; row n's lies in the slot table[n, 0]
//   state           ssm_state                [slots, H, R, K]; row n's in table[n, accepted - 1]
//
// The state after token i goes to table[n, i]. The window of a verification is its whole history:
// after i tokens were accepted, the next token's inputs are the columns i - 1 ... i + W - 3 and the
// token itself.
#pragma once

#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/tensors/array.hpp"

namespace lockstep::reference {

/// Calls decode(t, window [1, D, W - 1], state [1, H, R, K]) for each token t of T that belongs to
/// a row with slots; it advances both. States are rounded to `stored` where they are stored.
template <class S, class Decode>
void verify_rows(const StateSlots& slots, const IndexView& starts, std::int64_t T, std::int64_t W,
                 Format stored, const TensorView<S, 3>& conv_state, const TensorView<S, 4>& state,
                 Decode decode) {
  const std::int64_t slot_count = state.extent(0), C = conv_state.extent(2);
  require(slots.table && slots.num_accepted, "a verification has a table and counts");
  check_slots(slots, starts, T, slot_count);
  const StateSlots homes = conv_detail::first_slots(slots);
  for (std::int64_t row = 0; row < row_count(starts, T); ++row) {
    const RowRange range = row_range(starts, row, T);
    const std::int64_t source = source_slot(slots, row, slot_count);
    const std::int64_t home = source_slot(homes, row, slot_count);
    if (source == kNoSlot || home == kNoSlot) continue;
    const std::int64_t first = accepted_before(slots, row) - 1;
    require(range.size() <= slots.table->extent(1), "each token of a row has its slot");
    require(first + W - 1 <= C && W - 2 + range.size() <= C, "a window has its history's columns");
    Array<S, 3> window(Shape<3>{1, conv_state.extent(1), W - 1});
    Array<S, 4> running(Shape<4>{1, state.extent(1), state.extent(2), state.extent(3)});
    mapped(at(window.view(), 0)) = mapped(at(conv_state, home)).middleCols(first, W - 1);
    for_each_element(running.view(),
                     [&](const auto& i, S& element) { element = state(source, i[1], i[2], i[3]); });
    for (std::int64_t i = 0; i < range.size(); ++i) {
      decode(range.begin + i, window.view(), running.view());
      mapped(at(conv_state, home)).middleCols(i, W - 1) = mapped(at(window.view(), 0));
      const std::int64_t target = target_slot(slots, row, i, range.size(), slot_count);
      if (target == kNoSlot) continue;
      for_each_element(running.view(), [&](const auto& j, const S& element) {
        state(target, j[1], j[2], j[3]) = rounded(element, stored);
      });
    }
  }
}

}  // namespace lockstep::reference
