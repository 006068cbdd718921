// The config fields of a host tier, a second memory beside the device's, which any family of caches
// may honour: `host_kv`, its KV tokens, and `host_states`, its states; and `disk`, behind a host. A
// family may register others.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep {

/// A config field whose number, unless it is 0, gives a policy a host tier.
struct HostTierField {
  std::string_view name;
};

bool has_host_tier(const Config& config);
bool has_disk(const Config& config);

/// Whether one of these fields is about a host tier.
bool takes_host_tier(const ConfigFields& fields);

/// Whether the operation is about a disk behind the host, by `tier=` or `from=`.
bool names_disk(const Operation& operation);

/// Whether the operation's `tier=` names the host; without one it means the device. The error is a
/// sentence.
Result<bool> names_host(const Operation& operation);

/// The fields that make a host tier of this size: `host_kv=…,host_states=…`.
std::string host_tier_fields(std::int64_t kv_tokens, std::int64_t states);

}  // namespace lockstep
