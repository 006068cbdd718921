// A server's log: per request its prompt, its output and how many tokens it says it had cached.
// Checked without any knowledge of the server's inside (lockstep check-log).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cache_sim/base/json_documents.hpp"
#include "cache_sim/logs/truth.hpp"
#include "reference/base/finding.hpp"
#include "reference/base/ids.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

/// Where a request stands in its log.
struct LogPlace {
  std::string file;       ///< as it was given
  std::int64_t line = 0;  ///< from 1

  std::string text() const;  ///< file:line
};

struct LoggedRequest {
  std::string id;
  LogPlace place;
  Name salt;
  Tokens tokens;  ///< prompt and output
  std::uint32_t prompt_size = 0;
  std::int64_t cached = 0;  ///< as the server says
  Nanoseconds start = -1;   ///< when it was sent, and when its answer was there; -1: not logged
  Nanoseconds end = -1;
  bool greedy = false;  ///< its output is a function of its prompt alone
};

/// A format of logs, told by its first line. Names stand in server_logs.md.
struct LogFormat {
  std::string_view name;
  bool (*recognises)(const nlohmann::json& first);
  Result<LoggedRequest> (*read)(const Record& line);
};

/// The whole log. Errors name file, line and field.
Result<std::vector<LoggedRequest>> read_log(const std::string& path);

struct LogFinding {
  LogPlace place;
  std::string request;
  Finding finding;
};

struct LogVerdict {
  std::vector<LogFinding> findings;
  std::int64_t greedy = 0;      ///< requests whose outputs were compared with something
  std::int64_t with_truth = 0;  ///< … with the truth of their prompt
  std::int64_t near_ties = 0;   ///< … and leave it where its two best tokens are too close
};

/// Everything in the log that no server can answer that keeps only what it computed:
///   cached-too-much  the whole prompt, or more than any other request can have left behind that
///                    had begun before its end (without times: that stands above it). A request
///                    leaves its prompt and its output without the last token, which is sampled and
///                    never computed.
///   output-differs   a greedy request goes on otherwise than the truth of its prompt; where there
///                    is none, otherwise than another such request after the same tokens
LogVerdict judge_log(const std::vector<LoggedRequest>& log, const Truths& truths = {});

/// The log as lines of Lockstep's own format, and as a trace to replay: a `request` line for each,
/// and an `expect` line with the cached tokens that the server said. The error: a request that
/// makes too long a line for a trace.
std::string log_text(const std::vector<LoggedRequest>& log);
Result<std::string> log_trace(const std::vector<LoggedRequest>& log);

}  // namespace lockstep::cache_sim
