// Plays a trace of operations, one after another. A trace with requests is played by the schedulers
// (cache_sim/server/simulation.hpp).
#pragma once

#include "cache_sim/check/session.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

/// Plays all statements, which must be operations, or stops where the run stops.
void play_operations(ReplaySession& run, const Trace& trace);

/// Compares a reply with the answer that the file has below the statement: each field of the answer
/// must be in the reply with the same value. The run goes on after a wrong answer, so that every
/// wrong answer is shown.
void check_answer(ReplaySession& run, const Statement& statement, const Reply& reply);

}  // namespace lockstep::cache_sim
