// The options of Marconi's policies, read once.
#pragma once

#include <cstdint>
#include <string>

#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

struct MarconiOptions {
  std::int64_t token_bytes;  ///< of a token's KV; 0: the paper's model
  std::int64_t state_bytes;  ///< of a state; 0: the paper's model
  std::string alpha;         ///< weight of FLOPs against recency, per mille, or `tuned`
  std::int64_t bootstrap;    ///< alpha is tuned on so many times the requests before pressure
  std::int64_t flops_token;  ///< FLOPs of a token in a prefill, whatever stands before it
  std::int64_t flops_pair;   ///< FLOPs of a token for each token that it attends to

  static MarconiOptions of(const Config& config);
};

}  // namespace lockstep::cache_sim
