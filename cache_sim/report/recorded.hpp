// Decisions of the caches of servers on generated workloads, recorded where these servers ran
// (fixtures/workloads/recorded_decisions.json).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

struct RecordedDecisions {
  std::string policy;           ///< the policy that must decide the same
  std::string of;               ///< the server and its version
  std::string decision_digest;  ///< 16 hexadecimal digits
  std::int64_t hit_tokens = 0;
};

/// The records of a workload; none if the file does not exist or is about another workload. Errors
/// name the file and the field.
Result<std::vector<RecordedDecisions>> recorded_decisions(const std::string& path,
                                                          const std::string& workload);

}  // namespace lockstep::cache_sim
