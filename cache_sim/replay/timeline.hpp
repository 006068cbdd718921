// A run over time, in Chrome's trace-event format (chrome://tracing, Perfetto).
#pragma once

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// A row per request, one of operations, counters of the pools, an instant per finding. Without a
/// scheduler, each event is a microsecond wide; operations and counters need kept events.
Json timeline_json(const ReplayOutcome& outcome);

}  // namespace lockstep::cache_sim
