// Shorter forms of a trace that leaving out one run of lines does not reach, because what the trace
// shows needs something else in the place of those lines: a smaller set of lines that does the
// same, or another order of the lines around them. Lines of single operations alone are rewritten;
// of requests, lines are dropped.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/search/legality_model.hpp"
#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

/// A trace on trial. Its lines are adapted when they are played.
struct TraceForm {
  Config config;
  Steps steps;
};

/// A line of the operation, about whose answer nothing is said.
Step step_of(Operation operation);

/// Whether nothing but operations is in the trace, and nothing is said about their answers.
bool is_of_operations(const Steps& steps);

/// Plays a form; true if it shows what it has to show, and is taken.
using TakesForm = std::function<bool(const TraceForm&)>;

/// Config fields and values that they may get while lines go.
using FieldValues = std::vector<std::pair<std::string, std::string>>;

/// A trace of so many lines is read at a glance, and has no other forms.
inline constexpr std::size_t kShortTrace = 6;
/// A trace of so many lines has no distant forms, which are as many as the cube of their number.
inline constexpr std::size_t kLongTrace = 12;

/// Gives `takes` forms of `trace` with fewer lines, the likeliest ones first, and returns true at
/// the first one that it takes. They are as many as the square of the number of lines.
bool take_shorter_form(const TraceForm& trace, const TakesForm& takes);

/// Likewise forms in which lines go together with one of these values of a field, or one line goes
/// and another one moves.
bool take_distant_form(const TraceForm& trace, const FieldValues& values, const TakesForm& takes);

}  // namespace lockstep::cache_sim
