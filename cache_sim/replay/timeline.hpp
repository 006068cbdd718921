// A run over time, in Chrome's trace-event format (chrome://tracing, Perfetto).
#pragma once

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// A row per request, an instant per finding. Without a scheduler, each event is a microsecond
/// wide.
Json timeline_json(const ReplayOutcome& outcome);

}  // namespace lockstep::cache_sim
