// The JSON of a run (reference/contract.md, "The JSON of a run") and the Chrome-trace timeline.
// Everything outside `timing` is the same bytes for the same seed and commit.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cache_sim/replay/replay.hpp"

namespace lockstep::cache_sim {

using Json = nlohmann::ordered_json;

/// One run as an object of the contract; several subjects stand under `subjects`, each with its own
/// findings and totals.
Json run_json(const ReplayRequest& request, const ReplayOutcome& outcome);

/// The timeline in Chrome's trace-event format (chrome://tracing, Perfetto): a row per request, an
/// instant per finding. Without a scheduler, each event is a microsecond wide.
Json timeline_json(const ReplayOutcome& outcome);

/// A ratio as the contract prints it: six digits, computed once from integers.
double rounded_ratio(std::int64_t part, std::int64_t whole);

/// The day, for `timing`.
std::string today();

/// The commit of the checkout that the program runs in, `unknown` outside the lockstep script.
std::string commit();

/// The command that replays a finding.
std::string replay_command(const ReplayRequest& request);

/// Writes beside the file and renames, so that nothing is half-written.
Result<void> write_file(const std::string& path, const std::string& content);

}  // namespace lockstep::cache_sim
