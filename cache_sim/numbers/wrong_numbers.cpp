#include "cache_sim/numbers/wrong_numbers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {

double distance(std::span<const double> actual, std::span<const double> expected) {
  double far = 0, largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(actual[i])) return std::numeric_limits<double>::infinity();
    far = std::max(far, std::abs(actual[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return largest > 0 ? far / largest : far;
}

std::ptrdiff_t likeliest_of(std::span<const double> logits) {
  return std::ranges::max_element(logits) - logits.begin();
}

std::string magnitude(double x) {
  if (std::isinf(x)) return "NaN";
  return x > 0 ? fmt::format("1e{:+03d}", static_cast<int>(std::floor(std::log10(x)))) : "0";
}

std::string moved_logits(std::uint32_t tokens, double far, bool same) {
  std::string moved =
      fmt::format("logits after {} are {} off", counted(tokens, "token"), magnitude(far));
  if (std::isinf(far)) return moved;
  return moved + (same ? ", the likeliest token is the same" : ", another token is the likeliest");
}

std::optional<Finding> wrong_state_label(const LabelState& labels, const ForwardRow& row) {
  std::optional<Finding> found;
  if (!row.state.exists()) return found;
  const Label right = label_of(row.tokens, row.begin);
  for_layers(row.state.value, row.state_layers, [&](std::uint32_t slot) {
    for (const StatePart part : kStateParts)
      if (!found && labels.label(StateSlot{slot}, part) != right)
        found = Finding{FindingKind::wrong_state_prefix,
                        fmt::format("starts from state slot {}, whose {} part stands for {}", slot,
                                    to_string(part), labels.label(StateSlot{slot}, part).text()),
                        right.text(), labels.label(StateSlot{slot}, part).text()};
  });
  return found;
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
