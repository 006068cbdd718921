// Replaying one file: a trace or a workload, against the subjects that were asked for. The replay
// command, the report and the tests all go through here.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache_sim/check/session.hpp"
#include "cache_sim/replay/workload_driver.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

struct ReplayRequest {
  std::string file;  ///< a trace, a workload's file, or a generated workload with its parameters
  std::vector<std::string>
      subjects;  ///< empty: the file's policy, or the defect's, beside its oracle
  std::string fidelity = "label";
  CheckLevel check = CheckLevel::all;
  std::string defect;
  std::string config;  ///< K=V,… over the file's own
  std::chrono::milliseconds timeout{10'000};
  bool keep_events = false;
  std::int64_t limit = 0;  ///< requests of a workload that are played; 0: all
  std::string model;       ///< whose costs a step takes; empty: the config's step_time
  std::function<void(const Operation&, const Reply&)> watch{};  ///< see RunOptions
  std::shared_ptr<Children> children{};  ///< see RunOptions; null: children of this replay alone
};

struct ReplayOutcome {
  std::optional<Trace> trace;
  std::optional<DrivenOutcome> decisions;  ///< of a workload with a driver of its own
  std::unique_ptr<ReplaySession> run;
  double load_s = 0;
  double wall_s = 0;  ///< the replay alone

  /// What the first finding decides.
  ExitStatus status() const;
};

/// Errors are bad input or a missing environment; what a run finds is in its findings.
Result<ReplayOutcome> replay(const ReplayRequest& request);

/// The run that a request asks for, over this config: subjects by default, plain oracles named, the
/// defect found. Errors name what does not exist.
Result<RunOptions> run_options(const ReplayRequest& request, Config config);

/// The words of a `# run:` line after `lockstep`, with %s replaced by the file.
std::vector<std::string> directive_words(const RunDirective& directive, const std::string& file);

}  // namespace lockstep::cache_sim
