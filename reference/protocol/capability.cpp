#include "reference/protocol/capability.hpp"

#include <algorithm>
#include <iterator>

namespace lockstep {
namespace {

struct CapabilityRow {
  std::string_view name;
  std::string_view lack;
};

// Indexed by Capability.
constexpr CapabilityRow kRows[] = {
    {"request", "understands no requests"},
    {"tree", "understands request verbs only"},
    {"slots", "has no rows to capture, restore or compact"},
    {"sequences", "has no sequence verbs"},
    {"transfers", "takes no tokens that another server has computed"},
    {"content_keys", "takes neither adapters nor images"},
    {"draft_trees", "verifies no trees of drafts"},
    {"partial_finish", "ends no request inside an accepted run"},
    {"tiers", "has no second memory"},
    {"disaggregation", "is one server"},
};
static_assert(std::size(kRows) == kCapabilityCount);

}  // namespace

std::string_view to_string(Capability capability) {
  return kRows[static_cast<std::size_t>(capability)].name;
}

std::string_view lack_of(Capability capability) {
  return kRows[static_cast<std::size_t>(capability)].lack;
}

std::optional<Capabilities> capabilities_of_words(std::string_view field, std::string_view list) {
  Capabilities all;
  EnumSet<std::size_t> seen;
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    const auto* const word =
        std::ranges::find_if(kCapabilityWords, [&](const CapabilityWord& known) {
          return known.field == field && known.word == list.substr(0, comma);
        });
    const auto index = static_cast<std::size_t>(word - std::begin(kCapabilityWords));
    if (word == std::end(kCapabilityWords) || seen.contains(index)) return std::nullopt;
    seen.add(index);
    all |= word->means;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return all;
}

}  // namespace lockstep
