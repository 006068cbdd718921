// A policy that crashes or hangs ends the whole search. The watch then says which trace it was.
#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep::program {

/// From this call on, the program reports a fatal signal, and a trace that takes more than `limit`
/// of processor time, on standard error as `lockstep: trace N of seed S …`, and ends: with 11 after
/// a signal, with 12 after a hang. Signals that already have a handler keep it.
void watch_search(std::uint64_t seed, std::chrono::milliseconds limit);

/// Notes the progress of the search: trace `number` is played next, or `what` is done with it.
void watch_trace(std::int64_t number, const char* what);

/// From this call on, the first INT or TERM is only noted, so that a search can end by itself and
/// keep its findings. A second one ends the program, its children and its temporary folders.
void catch_interrupts();
bool is_interrupted();

}  // namespace lockstep::program
