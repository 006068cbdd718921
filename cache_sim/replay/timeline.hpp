// The timeline of a run, in Chrome's trace-event format (chrome://tracing, Perfetto).
#pragma once

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// It has a row for each request, a row of operations, counters of the pools, and an instant for
/// each finding. Without a scheduler, each event is one microsecond wide. Operations and counters
/// need kept events (RunOptions::keep_events).
Json timeline_json(const ReplayOutcome& outcome);

}  // namespace lockstep::cache_sim
