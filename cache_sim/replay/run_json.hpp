// The JSON of a run (cache_sim/replay/json.md). For the same seed and commit it has the same bytes,
// except for `timing`.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cache_sim/replay/replay.hpp"

namespace lockstep::cache_sim {

using Json = nlohmann::ordered_json;

/// One run as a JSON object. Several subjects stand under `subjects`, each with its own findings
/// and totals.
Json run_json(const ReplayRequest& request, const ReplayOutcome& outcome);

/// A ratio as all JSON documents print it: six digits, computed once from integers.
double rounded_ratio(std::int64_t part, std::int64_t whole);

/// The shell command that replays a finding.
std::string replay_command(const ReplayRequest& request);
/// The same command as a `# run:` line of the trace, with %s for the file.
std::string run_line(const ReplayRequest& request);

}  // namespace lockstep::cache_sim
