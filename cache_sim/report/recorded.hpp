// Decisions of a server's own cache on a generated workload, recorded where that server ran
// (fixtures/workloads/recorded_decisions.json).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

struct RecordedDecisions {
  std::string policy;           ///< ours that has to decide the same
  std::string of;               ///< whose decisions they are, as `SGLang 0.5.23`
  std::string decision_digest;  ///< 16 hexadecimal digits
  std::int64_t hit_tokens = 0;
};

/// The records of a workload; none where the file is not there or is about another workload. Errors
/// name file and field.
Result<std::vector<RecordedDecisions>> recorded_decisions(const std::string& path,
                                                          const std::string& workload);

}  // namespace lockstep::cache_sim
