// A workload with a driver of its own. The driver, and no scheduler, decides the next operation, so
// that its decisions can be compared with those of another program with the same loop. A driver
// registers under the name of its workload at the end of its file.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "reference/base/registry.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// Applies an operation in the run, and returns the reply; null if the run stops.
using ApplyOperation = std::function<const Reply*(const Operation&)>;

/// The callbacks of a run that a driver uses.
struct DriveSession {
  ApplyOperation apply;
  std::function<std::string()> decided;  ///< the details of the last operation's decision
};

/// The decisions of the subjects.
struct DrivenOutcome {
  std::uint64_t decision_digest = 0;
  std::int64_t hit_tokens = 0;
  std::vector<std::int64_t> prefixes;  ///< cached tokens by request, in order of admission
  /// one line for each admission; empty: the request's number and cached tokens
  std::vector<std::string> lines;
  bool complete = false;  ///< false if the run stopped early or an operation was refused
};

class DrivenWorkload {
 public:
  virtual ~DrivenWorkload() = default;
  /// The configuration for which the workload is made.
  virtual Config config() const = 0;
  /// Generates the requests; called once, before drive().
  virtual void generate() = 0;
  /// Plays the requests on one rank, without overlap.
  virtual DrivenOutcome drive(const DriveSession& session) = 0;
};

struct WorkloadDriver {
  std::string_view name;  ///< the name of the GeneratedWorkload
  /// `parameters`: the text after the name on the command line; `limit`: at most this many
  /// requests, 0: all.
  Result<std::unique_ptr<DrivenWorkload>> (*open)(std::string_view parameters, std::int64_t limit);
};

}  // namespace lockstep::cache_sim
