// Writes a trace as text, which parse_trace() reads again as the same trace.
#pragma once

#include <string>

#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

/// The line of the statement and, where an answer is expected, the two lines after it.
std::string statement_text(const Statement& statement);

/// The comment lines of `description` (stored without `#`), one `config` line with the fields that
/// differ from their defaults, then the statements.
std::string trace_text(const Trace& trace);

}  // namespace lockstep::cache_sim
