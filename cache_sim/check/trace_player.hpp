// Plays a trace of operations, one after another. A trace with requests is played by the schedulers
// (cache_sim/server/simulation.hpp).
#pragma once

#include "cache_sim/check/session.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

/// Everything in the trace, which has operations alone, or until the run stops.
void play_operations(ReplaySession& run, const Trace& trace);

/// Compares the answer that the file holds below a statement with the reply. Each field of the
/// answer must be in the reply with that value; the run goes on, so that every wrong answer is
/// shown.
void check_answer(ReplaySession& run, const Statement& statement, const Reply& reply);

}  // namespace lockstep::cache_sim
