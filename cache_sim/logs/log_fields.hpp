// Fields that the lines of all formats of logs have, for the readers of these formats.
#pragma once

#include <string>
#include <string_view>

#include "cache_sim/logs/server_log.hpp"

namespace lockstep::cache_sim {

/// A name that is safe in a trace, in a table and on a terminal.
Result<std::string> read_id(const Record& line, std::string_view field);

/// Sets prompt and output from two lists of token ids.
Result<void> read_tokens(const Record& prompt_line, std::string_view prompt_field,
                         const Record& output_line, std::string_view output_field,
                         LoggedRequest& request);

/// Reads the fields that a line of every format may have: times, a salt, and whether decoding is
/// greedy.
Result<void> read_marks(const Record& line, LoggedRequest& request);

}  // namespace lockstep::cache_sim
