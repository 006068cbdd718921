// The smallest trace that still ends with the same finding: delta debugging on the lines
// (Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input"), then
// steps that need knowledge of caches: merging equal prompts, shortening them, renumbering,
// lowering pools, dropping features; all of it again until nothing gets smaller. What is then still
// longer than a few lines is written in other ways (cache_sim/search/rewrites.hpp), and what is
// longer than eight is changed at random until lines can go (cache_sim/search/detours.hpp). What is
// longer than twelve in the end is shrunk once more, with the config as it was until no line goes;
// and with a planted defect, by whatever is found with it and not without it.
//
// Lines depend on each other: after a shorter `admit`, an `extend` has another number of tokens
// left. So every candidate is played through cache_sim/search/operation_player.hpp, which adapts
// its lines.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "cache_sim/check/session.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

struct ShrinkOutcome {
  Trace trace;             ///< config and statements, without comments
  LocatedFinding finding;  ///< the finding of the shrunk trace
  std::int64_t executions = 0;
};

struct ShrinkOptions {
  std::int64_t most_executions = 100'000;
  std::function<bool()> stops{};  ///< asked before each execution; true ends the shrinking
  std::function<void(std::int64_t executions, std::size_t lines)> progress;
};

/// Whether two findings show the same defect, as far as that is visible from outside: they have the
/// same kind and, if a reply is wrong or missing, the same verb and field.
bool is_same_finding(const LocatedFinding& one, const LocatedFinding& other);

/// The finding with which the trace ends as it stands; nothing if it ends without one.
std::optional<LocatedFinding> finding_of(const Trace& trace, const RunOptions& run);

/// Shrinks a trace. `run` has the subjects, the defect and the checks; the config is the trace's,
/// and the fixed fields of `run` keep their values. Expected answers are kept if the finding is
/// about one of them. Error: the trace ends without a finding.
Result<ShrinkOutcome> shrink(const Trace& trace, const RunOptions& run,
                             const ShrinkOptions& options = {});

/// The number of lines with a verb, which is the size of a shrunk trace.
std::size_t line_count(const Trace& trace);

}  // namespace lockstep::cache_sim
