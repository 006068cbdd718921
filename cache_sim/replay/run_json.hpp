// The JSON of a run (json.md). Everything
// outside `timing` is the same bytes for the same seed and commit.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cache_sim/replay/replay.hpp"

namespace lockstep::cache_sim {

using Json = nlohmann::ordered_json;

/// One run as a JSON object; several subjects stand under `subjects`, each with its own
/// findings and totals.
Json run_json(const ReplayRequest& request, const ReplayOutcome& outcome);

/// A ratio as every JSON prints it: six digits, computed once from integers.
double rounded_ratio(std::int64_t part, std::int64_t whole);

/// The command that replays a finding, for a shell.
std::string replay_command(const ReplayRequest& request);
/// The same as a `# run:` line of the trace itself, which names no file.
std::string run_line(const ReplayRequest& request);

}  // namespace lockstep::cache_sim
