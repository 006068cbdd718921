// Draws a swarm: its common part, and the part of each family (cache_sim/draw/swarm.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/draw/swarm.hpp"
#include "reference/protocol/subject.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

/// `size` tokens of a document, or of few different tokens if the swarm says so.
Tokens drawn_tokens(const Swarm& swarm, Draw& draw, std::int64_t size);

/// A prompt that often begins with a prefix of one of `seen`.
Tokens drawn_prompt(const Swarm& swarm, Draw& draw, const std::vector<Tokens>& seen);

Accepted accepted_by(const PolicyEntry& policy);
/// The intersection of the two. Tree verbs have another meaning for a policy without states.
Accepted accepted_by_both(const Accepted& one, const Accepted& other);

/// The kind of trace that a swarm is drawn for.
enum class SwarmLevel : std::uint8_t { either, operations, requests };

/// Draws a swarm within what the subjects accept. The `fixed` fields of `base`, and its fields that
/// differ from their defaults, keep their values.
Swarm draw_swarm(Draw& draw, const Accepted& accepted, const Config& base, ConfigFields fixed = {},
                 SwarmLevel level = SwarmLevel::either);

}  // namespace lockstep::cache_sim
