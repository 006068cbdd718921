// The config fields of a host tier, a second memory beside the device's, which any family of caches
// may honour: `host_kv`, its KV tokens, and `host_states`, its states.
#pragma once

#include "reference/protocol/config.hpp"

namespace lockstep {

bool has_host_tier(const Config& config);

}  // namespace lockstep
