#include "cache_sim/numbers/row_slots.hpp"

#include "cache_sim/numbers/compared.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

void require_layers(const ForwardRow& row, std::size_t state_layers, std::size_t kv_layers) {
  const auto fits = [](std::size_t told, std::size_t layers) {
    return told == 0 || told == layers;
  };
  require(fits(row.state_layers.size(), state_layers) && fits(row.kv_layers.size(), kv_layers),
          "a row has as many layers as the model");
}

void RowSlots::list(const ForwardRow& row) {
  const auto list_runs = [&](std::span<const KvRun> runs, std::vector<std::uint32_t>& slots) {
    slots.clear();
    for_slots(runs, 0, row.places(), [&](KvSlots some, std::uint32_t) {
      slots.insert(slots.end(), some.begin(), some.end());
    });
  };
  list_runs(row.kv, kv);
  list_runs(row.also, also);
}

bool RowSlots::are_in_pools(const ForwardRow& row, std::size_t state_slots,
                            std::size_t kv_slots) const {
  bool all = kv.size() == row.places();
  const auto check = [&](std::size_t count) {
    return [&all, count](std::uint32_t slot) { all = all && slot < count; };
  };
  for (const KvSlots slots : {KvSlots(kv), KvSlots(also)})
    for (const std::uint32_t slot : slots) for_layers(slot, row.kv_layers, check(kv_slots));
  if (row.state.exists()) for_layers(row.state.value, row.state_layers, check(state_slots));
  for (const StateTake& take : row.takes)
    for_layers(take.target.value, row.state_layers, check(state_slots));
  if (row.ring) check(state_slots)(row.ring->slot.value);
  return all;
}

Finding outside_of_pools(const ForwardRow& row) {
  return {FindingKind::out_of_range,
          row_text(row.begin, row.end, row.tokens) + " has a slot outside of its pool",
          "slots of the pools", "another number, or none"};
}

}  // namespace lockstep::cache_sim
