#include "cache_sim/numbers/wrong_numbers.hpp"

#include <fmt/format.h>

#include "cache_sim/numbers/row_slots.hpp"

namespace lockstep::cache_sim {

std::optional<Finding> wrong_state_label(const LabelState& labels, const ForwardRow& row) {
  std::optional<Finding> found;
  if (!row.state.exists()) return found;
  const Label right = label_of(row.tokens, row.begin);
  for_layers(row.state.value, row.state_layers, [&](std::uint32_t slot) {
    for (const StatePart part : kStateParts)
      if (!found && !(row.ring && part == StatePart::recurrent) &&
          labels.label(StateSlot{slot}, part) != right)
        found = Finding{FindingKind::wrong_state_prefix,
                        fmt::format("starts from state slot {}, whose {} part stands for {}", slot,
                                    to_string(part), labels.label(StateSlot{slot}, part).text()),
                        right.text(), labels.label(StateSlot{slot}, part).text()};
  });
  if (found || !row.ring) return found;
  if (const auto wrong =
          labels.wrong_ring(row.state, row.ring->slot, row.ring->live, row.tokens, row.begin))
    found = Finding{FindingKind::wrong_state_prefix,
                    fmt::format("reads {}, which stands for {}", wrong->what, wrong->actual),
                    wrong->expected, wrong->actual};
  return found;
}

Finding number_agrees(std::string_view read, const Finding& wrong_label, std::string_view of) {
  return {FindingKind::number_agrees,
          fmt::format("{} {}, and its numbers are those of {}", read, wrong_label.text, of),
          "other numbers", "the right ones"};
}

std::optional<Finding> wrong_kv_label(const LabelState& labels, const Tokens& text, KvSlots slots,
                                      std::span<const std::uint32_t> layers) {
  std::optional<Finding> found;
  for (std::uint32_t place = 0; place < slots.size(); ++place)
    for_layers(slots[place], layers, [&](std::uint32_t slot) {
      if (found) return;
      if (!labels.kv_in_use(slot))
        found = Finding{FindingKind::freed_slot_in_use,
                        fmt::format("reads KV slot {}, which is free", slot), "a slot in use",
                        "a free one"};
      else if (labels.kv_fingerprint(slot) != text.fingerprint(place + 1))
        found = Finding{
            FindingKind::wrong_state_prefix,
            fmt::format("reads KV slot {}, which does not hold that of token {}", slot, place),
            fmt::format("the KV of token {}", place), "that of another prefix"};
    });
  return found;
}

}  // namespace lockstep::cache_sim
