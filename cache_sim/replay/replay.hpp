// Replays one file, a trace or a workload, with the requested subjects. The replay command, the
// report and the tests use it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache_sim/check/session.hpp"
#include "cache_sim/model/step_cost.hpp"
#include "cache_sim/replay/workload_driver.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

struct ReplayRequest {
  /// a trace, the file of a workload, or a generated workload with its parameters
  std::string file;
  std::vector<std::string>
      subjects;          ///< empty: the policy of the file or of the defect, beside its oracle
  std::string fidelity;  ///< empty: that of the config
  CheckLevel check = CheckLevel::all;
  std::string run_line;  ///< FILE:LINE of the `# run:` line that asks for this; empty: none does
  std::string defect;
  std::string config;  ///< K=V,… which override the file's own
  std::chrono::milliseconds timeout{10'000};
  bool keep_events = false;
  std::int64_t limit = 0;  ///< the largest number of requests of a workload; 0: all
  std::string model;       ///< the model whose costs a step has; empty: step_time of the config
  std::function<std::unique_ptr<StepCost>()> cost{};  ///< makes the costs of a step instead
  std::function<void(const Operation&, const Reply&)> watch{};  ///< see RunOptions
  std::function<void(const RequestOutcome&)> ended{};           ///< see RunOptions
  /// see RunOptions; null: the replay has children of its own
  std::shared_ptr<Children> children{};
};

struct ReplayOutcome {
  std::optional<Trace> trace;
  std::optional<DrivenOutcome> decisions;  ///< of a workload with a driver of its own
  std::unique_ptr<ReplaySession> run;
  double load_s = 0;
  double wall_s = 0;  ///< of the replay alone

  /// The exit status by the first finding.
  ExitStatus status() const;
};

/// Replays the file. Errors are bad input or a missing environment; findings are part of the
/// outcome.
Result<ReplayOutcome> replay(const ReplayRequest& request);

/// The run options of a request, with this config: default subjects are filled in, plain oracles
/// named, the defect looked up. Errors name a policy or defect that does not exist.
Result<RunOptions> run_options(const ReplayRequest& request, Config config);

/// The words of a `# run:` line after `lockstep`, with %s replaced by the file.
std::vector<std::string> directive_words(const RunDirective& directive, const std::string& file);

/// Parses the words after `lockstep replay`; the program passes its own parser.
using ReadRunLine =
    std::function<Result<std::vector<ReplayRequest>>(const std::vector<std::string>& words)>;

/// The requests of a `# run:` line of this file. Errors name the file and the line.
Result<std::vector<ReplayRequest>> requests_of(const RunDirective& directive,
                                               const std::string& file, const ReadRunLine& read);

}  // namespace lockstep::cache_sim
