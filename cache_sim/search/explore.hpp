// The search: random traces, each from a random configuration, and, as in coverage-guided fuzzing,
// recombinations of traces that reached new marks. A finding is shrunk and becomes a trace file.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cache_sim/check/session.hpp"
#include "cache_sim/search/shrink.hpp"

namespace lockstep::cache_sim {

struct Discovery {
  /// counted from 1: the number of tests until the detection; 0: a trace of ExploreOptions::corpus
  std::int64_t trace_number = 0;
  std::vector<std::string> subjects;
  Trace trace;  ///< shrunk, with comment lines; empty if the callback `found` was given it
  std::size_t lines = 0;  ///< lines of the trace
  LocatedFinding finding;
  std::size_t lines_before = 0;
  std::int64_t shrink_executions = 0;
  double shrink_s = 0;
};

/// A trace without a finding that reached code marks together that no trace before it reached.
struct CorpusTrace {
  std::vector<std::string> subjects;
  Trace trace;
  std::vector<std::string> marks;  ///< all marks that it reached, sorted by name
};

struct ExploreOptions {
  /// Subjects, defect, checks and the fixed config fields (those in `fixed`, and those that differ
  /// from their defaults). Of the other fields, the search draws those that all subjects accept.
  /// Without subjects, each trace draws a policy that has an oracle.
  RunOptions run;
  std::uint64_t seed = 1;
  std::int64_t traces = 1000;         ///< the largest number of traces
  std::chrono::milliseconds time{0};  ///< the time limit; 0: none
  std::int64_t findings = 1;          ///< the search stops after this many findings
  /// Traces of earlier searches. They are played before the search, in this order, and are
  /// recombined from then on, without fields that have no effect. A trace for subjects that do not
  /// play here is left out, and so is one that is bad input by now.
  std::vector<CorpusTrace> corpus{};
  bool shrinks = true;
  std::chrono::milliseconds shrink_time{0};  ///< the time limit for each finding; 0: none
  /// The argument of a callback after each trace, and after each execution while a finding is
  /// shrunk.
  struct Progress {
    std::int64_t traces = 0;
    std::size_t findings = 0;
    bool shrinking = false;
  };
  std::function<void(const Progress&)> progress{};
  /// asked before each trace and each execution; true ends the search
  std::function<bool()> stops{};
  std::function<void(const Discovery&)> found{};  ///< called with each discovery when it is made
};

struct ExploreOutcome {
  std::int64_t traces = 0;
  std::int64_t operations = 0;  ///< in all traces
  std::int64_t from_corpus = 0;
  std::size_t corpus = 0;
  std::int64_t left_out = 0;   ///< traces of ExploreOptions::corpus that could not be played
  std::string first_left_out;  ///< one of them: its file and the reason
  std::uint64_t digest = 0;    ///< over the digests of all runs
  std::vector<Discovery> discoveries;
  std::vector<std::string> marks_missed;  ///< code marks that no trace reached
  std::vector<CorpusTrace> added;  ///< the traces that joined the corpus, in the order of joining
  /// The number of fresh traces that drew each value: by config field, and by `subject` and
  /// `level`. A number above 16 is counted at the power of two below it.
  std::map<std::string, std::map<std::string, std::int64_t>> drawn;
  double wall_s = 0;
};

/// Runs the search. Errors: unknown subjects, a config that fits no policy, an operation of the
/// generator that is bad input. One trace in twenty is played twice, and each finding is replayed
/// before and after it is shrunk. A difference between two runs is a finding of kind
/// `nondeterministic`.
Result<ExploreOutcome> explore(const ExploreOptions& options);

}  // namespace lockstep::cache_sim
