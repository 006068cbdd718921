// A trace back as text: what parse_trace() reads again as the same trace.
#pragma once

#include <string>

#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

/// The statement's line and, where an answer is expected, the two lines after it.
std::string statement_text(const Statement& statement);

/// Comment lines from `description` (as they stand, without `#`), one `config` line with what
/// differs from the defaults, then the statements.
std::string trace_text(const Trace& trace);

}  // namespace lockstep::cache_sim
