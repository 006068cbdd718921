// A policy that crashes or hangs ends the whole search process: the watch says at which trace.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace lockstep::program {

/// From here on, a signal that ends the program and a trace that has not ended after `limit` of the
/// program's processor time are reported on standard error as `lockstep: trace N of seed S …`, and
/// the program ends: with 11 where it was killed, with 12 where it hung. Signals that somebody
/// handles already stay his.
void watch_search(std::uint64_t seed, std::chrono::milliseconds limit);

/// The search has come so far: trace `number` is played next, or `what` is done with it.
void watch_trace(std::int64_t number, const char* what);

/// From here on, the first INT or TERM is only noted, so that a search can end by itself and keep
/// what it has found; a second one ends the program, its children and its temporary folders.
void catch_interrupts();
bool is_interrupted();

}  // namespace lockstep::program
