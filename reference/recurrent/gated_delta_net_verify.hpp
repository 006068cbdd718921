// A verification through a gated-delta-net layer between its projections: the tokens of each row
// are decoded one after another (gated_delta_net_decode.hpp), from the state and the window that
// the accepted tokens of the row's previous verification left.
//
//   here            Qwen3-Next, vLLM         shape
//   x, z, a, b, out  as there                [T, ...], the tokens of all rows
//   starts          query_start_loc          [N + 1]
//   slots.table     spec_state_indices       [N, 1 + drafts]
//   slots.num_accepted  num_accepted_tokens  [N]
//   conv_state      conv_state               [slots, D, C]; row n's lies in the slot table[n, 0]
//   state           ssm_state                [slots, HV, V, K]; row n's in table[n, accepted - 1]
//
// The state after token i goes to table[n, i]. The window of a verification is its whole history:
// after i tokens were accepted, the next token's inputs are the columns i - 1 ... i + W - 3 and the
// token itself.
#pragma once

#include "reference/recurrent/gated_delta_net_decode.hpp"

namespace lockstep::reference {

/// Outputs of rows without a slot, and of tokens behind the last row, are 0.
template <class S>
void gated_delta_net_verify(const GatedDeltaNetDecode<S>& in, const IndexView& starts,
                            const TensorView<S, 3>& conv_state, const TensorView<S, 4>& state,
                            TensorView<S, 3> out) {
  const std::int64_t T = in.x.extent(0), D = in.x.extent(1), W = in.conv_weight.extent(1);
  const std::int64_t HV = state.extent(1), V = state.extent(2), K = state.extent(3);
  const std::int64_t slot_count = state.extent(0), C = conv_state.extent(2);
  require(in.slots.table && in.slots.num_accepted, "a verification has a table and counts");
  check_slots(in.slots, starts, T, slot_count);
  const StateSlots homes = conv_detail::first_slots(in.slots);
  fill(out, S{0});
  for (std::int64_t row = 0; row < row_count(starts, T); ++row) {
    const RowRange range = row_range(starts, row, T);
    const std::int64_t source = source_slot(in.slots, row, slot_count);
    const std::int64_t home = source_slot(homes, row, slot_count);
    if (source == kNoSlot || home == kNoSlot) continue;
    const std::int64_t first = accepted_before(in.slots, row) - 1;
    require(range.size() <= in.slots.table->extent(1), "each token of a row has its slot");
    require(first + W - 1 <= C && W - 2 + range.size() <= C, "a window has its history's columns");
    Array<S, 3> window(Shape<3>{1, D, W - 1});
    Array<S, 4> running(Shape<4>{1, HV, V, K});
    mapped(at(window.view(), 0)) = mapped(at(conv_state, home)).middleCols(first, W - 1);
    for_each_element(running.view(),
                     [&](const auto& i, S& element) { element = state(source, i[1], i[2], i[3]); });
    for (std::int64_t i = 0; i < range.size(); ++i) {
      const std::int64_t t = range.begin + i;
      GatedDeltaNetDecode<S> step = in;
      step.x = cut(in.x, t, t + 1), step.z = cut(in.z, t, t + 1);
      step.a = cut(in.a, t, t + 1), step.b = cut(in.b, t, t + 1);
      step.slots = {};
      step.storage.state = Format::exact;  // it is rounded where it is stored
      gated_delta_net_decode<S>(step, window.view(), running.view(), cut(out, t, t + 1));
      mapped(at(conv_state, home)).middleCols(i, W - 1) = mapped(at(window.view(), 0));
      const std::int64_t target = target_slot(in.slots, row, i, range.size(), slot_count);
      if (target == kNoSlot) continue;
      for_each_element(running.view(), [&](const auto& j, const S& element) {
        state(target, j[1], j[2], j[3]) = rounded(element, in.storage.state);
      });
    }
  }
}

}  // namespace lockstep::reference
