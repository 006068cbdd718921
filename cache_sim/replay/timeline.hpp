// The timeline of a run, in Chrome's trace-event format (chrome://tracing, Perfetto).
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"

namespace lockstep::cache_sim {

/// A copy between the tiers, in flight after the event `queued` and all that follow before
/// `landed`.
struct CopySpan {
  SnapshotHost::InFlight copy;
  std::int64_t queued, landed;  ///< events, counted from 1; landed: 0 where it never did
};

/// The copies that were in flight after any of the events, in the order in which they were queued.
std::vector<CopySpan> copy_spans(const std::vector<KeptEvent>& events);

/// It has a row for each request, a row of operations, the copies in flight, counters of the pools,
/// and an instant for each finding. Without a scheduler, each event is one microsecond wide.
/// Operations, copies and counters need kept events (RunOptions::keep_events).
Json timeline_json(const ReplayOutcome& outcome);

}  // namespace lockstep::cache_sim
