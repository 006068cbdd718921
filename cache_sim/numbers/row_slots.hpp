// The slots that a row of a forward names, layer by layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reference/base/finding.hpp"
#include "reference/protocol/forward.hpp"

namespace lockstep::cache_sim {

/// Calls act(slot) for the slots that stand for `slot` in the layers.
template <class Act>
void for_layers(std::uint32_t slot, std::span<const std::uint32_t> layers, const Act& act) {
  if (layers.empty()) act(slot);
  for (const std::uint32_t distance : layers) act(slot + distance);
}

/// A row with slots of its own in each layer has as many layers as the model.
void require_layers(const ForwardRow& row, std::size_t state_layers, std::size_t kv_layers);

/// A row's KV slots, by place.
struct RowSlots {
  std::vector<std::uint32_t> kv, also;

  void list(const ForwardRow& row);
  /// Whether the row has a KV slot for each place, and all its slots are below these numbers.
  bool are_in_pools(const ForwardRow& row, std::size_t state_slots, std::size_t kv_slots) const;

  /// Calls state(slot) for the state slots that the row names, and kv_slot(slot) for the KV slots
  /// that it writes.
  template <class State, class Kv>
  void for_written(const ForwardRow& row, const State& state, const Kv& kv_slot) const {
    if (row.state.exists()) for_layers(row.state.value, row.state_layers, state);
    if (row.ring) state(row.ring->slot.value);
    for (const StateTake& take : row.takes) for_layers(take.target.value, row.state_layers, state);
    for (const std::uint32_t slot : KvSlots(kv).subspan(row.begin))
      for_layers(slot, row.kv_layers, kv_slot);
    for (const std::uint32_t slot : also) for_layers(slot, row.kv_layers, kv_slot);
  }
};

/// That the row names a slot outside of its pool.
Finding outside_of_pools(const ForwardRow& row);

}  // namespace lockstep::cache_sim
