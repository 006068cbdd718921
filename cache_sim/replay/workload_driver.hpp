// A workload with a driver of its own: the driver, and no scheduler, decides which operation comes
// next, so that its decisions can be compared with those of another program that ran the same loop.
// A driver registers under its workload's name at the foot of its file.
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

/// The apply step of a run: null where the run stops here.
using ApplyOperation = std::function<const Reply*(const Operation&)>;

/// What a driver plays its operations to.
struct DriveSession {
  ApplyOperation apply;
  std::function<std::string()> decided;  ///< the last operation's decision in detail
};

/// What the subjects decided.
struct DrivenOutcome {
  std::uint64_t decision_digest = 0;
  std::int64_t hit_tokens = 0;
  std::int64_t input_tokens = 0;
  std::vector<std::int64_t> prefixes;  ///< cached tokens by request, in order of admission
  std::vector<std::string> lines;      ///< a line per admission; empty: number and cached tokens
  bool complete = false;  ///< false where the run stopped early or an operation was refused
};

class DrivenWorkload {
 public:
  virtual ~DrivenWorkload() = default;
  /// The configuration that the workload is made for.
  virtual Config config() const = 0;
  /// Makes the requests; called once, before drive().
  virtual void generate() = 0;
  /// Plays them on one rank, without a step ahead of results.
  virtual DrivenOutcome drive(const DriveSession& session) = 0;
};

struct WorkloadDriver {
  std::string_view name;  ///< of the GeneratedWorkload
  /// `parameters` as after the name on the command line; `limit` requests at most, 0: all.
  Result<std::unique_ptr<DrivenWorkload>> (*open)(std::string_view parameters, std::int64_t limit);
};

}  // namespace lockstep::cache_sim
