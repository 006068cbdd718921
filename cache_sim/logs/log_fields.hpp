// Fields that the lines of all formats of logs have, for the readers of these formats.
#pragma once

#include <string_view>

#include "cache_sim/logs/server_log.hpp"

namespace lockstep::cache_sim {

/// A field of a line, or of an object in it.
struct LogField {
  const Record& line;
  std::string_view name;
};

/// Reads a request from the four fields that a format has under names of its own, and from those
/// that a line of every format may have: times, a salt, and whether decoding is greedy.
Result<LoggedRequest> read_request(const Record& line, const LogField& id, const LogField& prompt,
                                   const LogField& output, const LogField& cached);

}  // namespace lockstep::cache_sim
