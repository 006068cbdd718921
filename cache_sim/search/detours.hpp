// Changes that make a trace no shorter, after which some of its lines may be superfluous: another
// way of a config field that is a choice, and another reason for which a request has to wait.
#pragma once

#include <vector>

#include "cache_sim/check/session.hpp"
#include "cache_sim/search/rewrites.hpp"

namespace lockstep::cache_sim {

/// The fields that are a choice of a few values, flags and words, with the values that a search of
/// these subjects draws. Fields of `run.fixed` are left out. Nothing where a child is among the
/// subjects: what it makes of a field is not known.
FieldValues choices_for(const RunOptions& run);

/// Forms of as many lines: each choice, each reason to wait, and each of both together. A reason is
/// the passed deadline of an admission, or more room asked for in all admissions of a request than
/// there is.
std::vector<TraceForm> detours(const TraceForm& trace, const FieldValues& choices);

}  // namespace lockstep::cache_sim
