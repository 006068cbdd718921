// Random changes of a trace, of which most make it no shorter, but after which other lines may be
// superfluous. A walk of many of them leads to traces that leaving out lines does not reach.
#pragma once

#include "cache_sim/check/session.hpp"
#include "cache_sim/draw/draw.hpp"
#include "cache_sim/search/rewrites.hpp"

namespace lockstep::cache_sim {

/// The fields that are a choice of a few values, flags and words, with the values that a search of
/// these subjects draws. Fields of `run.fixed` are left out. Nothing where a child is among the
/// subjects: what it makes of a field is not known.
FieldValues choices_for(const RunOptions& run);

/// The trace after one to six random changes: a line goes, moves or comes; a field gets one of
/// `values`; an admission gets a reason to wait; tokens are others; or a prefix is stored by a slot
/// of its own or by a request to which it was transferred; what goes to the host goes there by
/// evictions. Of a scheduler's requests, the trace as it is.
TraceForm detour(const TraceForm& trace, const FieldValues& values, Draw& draw);

}  // namespace lockstep::cache_sim
