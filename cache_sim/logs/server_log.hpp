// The log of a server: the prompt and the output of each request, and how many tokens the server
// says it had cached. It is checked without any knowledge of the server's insides (lockstep
// check-log).
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

/// The place of a request in its log.
struct LogPlace {
  std::string file;       ///< the path as it was given
  std::int64_t line = 0;  ///< from 1

  std::string text() const;  ///< file:line
};

struct LoggedRequest {
  std::string id;
  LogPlace place;
  Name salt;
  Tokens tokens;  ///< prompt and output
  std::uint32_t prompt_size = 0;
  std::int64_t cached = 0;  ///< by the server's answer
  Nanoseconds start = -1;   ///< time of sending; -1: not logged
  Nanoseconds end = -1;     ///< time of the answer
  bool greedy = false;      ///< the output is a function of the prompt alone
};

/// A format of logs, recognised by the first line. The formats are described in
/// cache_sim/logs/server_logs.md.
struct LogFormat {
  std::string_view name;
  std::string_view summary;  ///< the source of such logs, for help texts
  bool (*recognises)(const nlohmann::json& first);
  Result<LoggedRequest> (*read)(const Record& line);
};

/// Reads a whole log. Errors name the file, the line and the field.
Result<std::vector<LoggedRequest>> read_log(const std::string& path);

struct LogFinding {
  LogPlace place;
  std::string request;
  Finding finding;
};

struct LogVerdict {
  std::vector<LogFinding> findings;
  std::int64_t greedy = 0;      ///< requests whose outputs were compared with another output
  std::int64_t with_truth = 0;  ///< of these: compared with the truth of their prompt
  /// of these: differ from the truth at a token whose two best logits are too close to decide
  std::int64_t near_ties = 0;
  std::int64_t tokens = 0;  ///< of outputs: compared with a truth or with another request's
};

/// Finds results that no server can give that keeps only what it computed:
///   cached-too-much  The whole prompt was cached, or more of it than any other request can have
///                    left behind that had begun before this one ended (in a log without times: any
///                    request above it). A request leaves its prompt and its output without the
///                    last
///                    token, which is sampled and never computed.
///   output-differs   A greedy request continues differently from the truth of its prompt or,
///   without
///                    a truth, from another greedy request after the same tokens.
LogVerdict judge_log(const std::vector<LoggedRequest>& log, const Truths& truths = {});

/// The log as lines of Lockstep's own format, and as a trace to replay. The trace has a `request`
/// line for each request, and an `expect` line with the cached tokens that the server said. The
/// error is a request that is too long for a line of a trace.
std::string log_text(const std::vector<LoggedRequest>& log);
Result<std::string> log_trace(const std::vector<LoggedRequest>& log);

}  // namespace lockstep::cache_sim
