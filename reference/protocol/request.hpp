// A request as a client sends it: what workloads bring, trace files spell and the scheduler serves.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep {

/// `request …`: what a client asks of the scheduler.
struct RequestSpec {
  Name id;
  Name session;
  Name salt;
  Tokens tokens;  ///< prompt and, behind it, every token that will be sampled
  std::uint32_t prompt_size = 0;
  bool stops = false;   ///< the output was given as tokens: it ends by itself, not by its length
  Nanoseconds at = -1;  ///< arrival; -1: when the scheduler comes to this line
  std::vector<std::int64_t> accept;  ///< per verification, the tokens kept
  std::vector<std::int64_t> drafts;  ///< per verification, the draft tokens
  std::int64_t priority = 0;
  std::int64_t rank = -1;  ///< where it goes; -1: where the routing sends it
  std::uint32_t output_size() const { return tokens.size() - prompt_size; }
};

}  // namespace lockstep
