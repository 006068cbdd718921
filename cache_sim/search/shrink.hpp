// The smallest trace that still ends with the same finding: delta debugging on the lines
// (Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input"), then
// steps that need knowledge of caches: merging equal prompts, shortening them, renumbering,
// lowering pools, dropping features; all of it again until nothing gets smaller.
//
// Lines depend on each other: an `extend` after a shorter `admit` has another number of tokens
// left. So every candidate is played through cache_sim/search/operation_player.hpp, which adapts
// its lines.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "cache_sim/check/session.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

struct ShrinkOutcome {
  Trace trace;             ///< config and statements alone
  LocatedFinding finding;  ///< of the shrunk trace
  std::int64_t executions = 0;
};

struct ShrinkOptions {
  std::int64_t most_executions = 20'000;
  std::function<bool()> stops{};  ///< asked before each execution; true: what there is must do
  std::function<void(std::int64_t executions, std::size_t lines)> progress;
};

/// Whether two findings show the same defect, as far as one can tell from outside: the kind is the
/// same and, where a reply is wrong or missing, the verb and the field too.
bool is_same_finding(const LocatedFinding& one, const LocatedFinding& other);

/// What the trace as it stands ends with; nothing where that is no finding.
std::optional<LocatedFinding> finding_of(const Trace& trace, const RunOptions& run);

/// `run` says which subjects, defect and checks; its config is the trace's, and its fixed fields
/// keep their values. Expected answers are kept where the finding is one of theirs. Error: the
/// trace ends without a finding.
Result<ShrinkOutcome> shrink(const Trace& trace, const RunOptions& run,
                             const ShrinkOptions& options = {});

/// Verb lines of a trace, the measure of a shrunk one.
std::size_t line_count(const Trace& trace);

}  // namespace lockstep::cache_sim
