#include "reference/protocol/host_tier.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "reference/base/registry.hpp"

namespace lockstep {
namespace {

constexpr std::string_view kKvField = "host_kv", kStatesField = "host_states", kDiskField = "disk";

const Registration<ConfigOption> kOptions{
    {.name = kKvField, .otherwise = "0", .number = {{0, std::int64_t{1} << 30}}},
    {.name = kStatesField, .otherwise = "0", .number = {{0, std::int64_t{1} << 24}}},
    {.name = kDiskField, .otherwise = "0", .number = {{0, 1}}, .for_children = true}};
const Registration<HostTierField> kKvTier{{kKvField}};

}  // namespace

bool has_host_tier(const Config& config) {
  const std::vector<HostTierField> tiers = Registry<HostTierField>::all();
  return std::ranges::any_of(
      tiers, [&](const HostTierField& tier) { return config.number(tier.name) != 0; });
}

bool has_disk(const Config& config) {
  return config.number(kDiskField) != 0;
}

bool takes_host_tier(const ConfigFields& fields) {
  const std::vector<HostTierField> tiers = Registry<HostTierField>::all();
  return fields.contains(kStatesField) ||
         std::ranges::any_of(tiers,
                             [&](const HostTierField& tier) { return fields.contains(tier.name); });
}

bool names_disk(const Operation& operation) {
  return operation.from.exists() || (operation.tier.exists() && operation.tier.text() == "disk");
}

Result<bool> names_host(const Operation& operation) {
  if (operation.from.exists())
    return fail(fmt::format("{}: from= is for a config with a disk", to_string(operation.verb)));
  const std::string tier = operation.tier.exists() ? operation.tier.text() : "device";
  if (tier != "host" && tier != "device")
    return fail(
        fmt::format("{}: tier={} is neither device nor host", to_string(operation.verb), tier));
  return tier == "host";
}

std::string host_tier_fields(std::int64_t kv_tokens, std::int64_t states) {
  return fmt::format("{}={},{}={}", kKvField, kv_tokens, kStatesField, states);
}

}  // namespace lockstep
