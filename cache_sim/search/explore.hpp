// The search: random traces, each from a random configuration, and, as in coverage-guided fuzzing,
// recombinations of traces that reached new marks. A finding is shrunk and becomes a trace file.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cache_sim/check/session.hpp"
#include "cache_sim/search/shrink.hpp"

namespace lockstep::cache_sim {

struct Discovery {
  std::int64_t trace_number = 0;  ///< counted from 1: tests to detect
  std::vector<std::string> subjects;
  Trace trace;  ///< shrunk, with its comment lines; empty in the outcome where `found` was told
  std::size_t lines = 0;  ///< of the trace
  LocatedFinding finding;
  std::size_t lines_before = 0;
  std::int64_t shrink_executions = 0;
  double shrink_s = 0;
};

struct ExploreOptions {
  /// Subjects, defect, checks and the config fields that stay as they are (those in `fixed`, and
  /// those that differ from their defaults); of the others, those are drawn that all subjects
  /// accept. Without subjects, each trace draws a policy that has an oracle.
  RunOptions run;
  std::uint64_t seed = 1;
  std::int64_t traces = 1000;         ///< at most
  std::chrono::milliseconds time{0};  ///< at most; 0: no limit
  std::int64_t findings = 1;          ///< stops after that many
  bool shrinks = true;
  std::chrono::milliseconds shrink_time{0};  ///< of each finding, at most; 0: no limit
  /// Called after each trace, and after each execution while a finding is shrunk.
  struct Progress {
    std::int64_t traces = 0;
    std::size_t findings = 0;
    bool shrinking = false;
  };
  std::function<void(const Progress&)> progress{};
  std::function<bool()> stops{};  ///< asked before each trace and execution; true: no more of them
  std::function<void(const Discovery&)> found{};  ///< called with each discovery as it is made
};

struct ExploreOutcome {
  std::int64_t traces = 0;
  std::int64_t operations = 0;  ///< of all traces
  std::int64_t from_corpus = 0;
  std::size_t corpus = 0;
  std::uint64_t digest = 0;  ///< over all runs' digests
  std::vector<Discovery> discoveries;
  std::vector<std::string> marks_missed;  ///< that no trace reached
  double wall_s = 0;
};

/// Errors: unknown subjects, a config that fits no policy, an illegal operation by the generator.
/// One trace in twenty is played twice, and each finding once more before and after it is shrunk; a
/// difference is a finding of kind `nondeterministic`.
Result<ExploreOutcome> explore(const ExploreOptions& options);

}  // namespace lockstep::cache_sim
