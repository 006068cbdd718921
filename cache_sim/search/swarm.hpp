// Draws a swarm: what is common to all caches, and each family's part (cache_sim/draw/swarm.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/draw/swarm.hpp"
#include "reference/protocol/subject.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

/// Tokens of a document, or of a few letters where the swarm has them.
Tokens drawn_tokens(const Swarm& swarm, Draw& draw, std::int64_t size);

/// Often a prefix of one of `seen`, and something after it.
Tokens drawn_prompt(const Swarm& swarm, Draw& draw, const std::vector<Tokens>& seen);

Accepted accepted_by(const PolicyEntry& policy);
/// What both accept. Tree verbs mean another thing to a policy without states.
Accepted accepted_by_both(const Accepted& one, const Accepted& other);

/// What a swarm is for.
enum class SwarmLevel : std::uint8_t { either, operations, requests };

/// Draws a swarm within what is accepted. The `fixed` fields of `base`, and those that differ from
/// their defaults, stay as they are there.
Swarm draw_swarm(Draw& draw, const Accepted& accepted, const Config& base, ConfigFields fixed = {},
                 SwarmLevel level = SwarmLevel::either);

}  // namespace lockstep::cache_sim
