// Trace files: the operations that a cache, or the requests that a server was given, and the
// answers that are expected (cache_sim/trace/grammar.md).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "reference/base/finding.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"
#include "reference/protocol/request.hpp"

namespace lockstep::cache_sim {

/// `abort id= [at=]`, `retract id= [at=]`
struct Intervention {
  bool retract = false;
  Name id;
  Nanoseconds at = -1;
  bool during = false;  ///< during the next forward, before its results
};
struct CloseSession {
  Name session;
};
struct RunStatement {
  Nanoseconds until = -1;
  std::int64_t steps = -1;
};
struct Expect {
  Name id;
};

struct AnswerField {
  std::string field;
  std::string value;
};

struct Statement {
  int line = 0;
  std::variant<Operation, RequestSpec, Intervention, CloseSession, RunStatement, Expect> what;
  std::vector<AnswerField> answer;  ///< empty: no answer is expected
  int answer_line = 0;
};

/// A line `# run: lockstep …`, and the finding with which that run must end.
struct RunDirective {
  int line = 0;
  /// Words as a shell reads them (reference/base/shell_words.hpp); %s is the file.
  std::string command;
  std::optional<FindingKind> finds;
};

struct Trace {
  std::string path;
  std::string title;  ///< the first comment line that is neither a directive nor a file name
  std::vector<std::string> description;  ///< the comment lines
  Config config;
  std::map<std::string, int, std::less<>> config_lines;  ///< of each field that the file sets
  bool scheduler_level = false;
  std::vector<RunDirective> runs;
  std::vector<Statement> statements;
};

inline constexpr std::size_t kMaxLineSize = std::size_t{1} << 20;
/// A statement takes some 300 bytes of memory. Workloads are streamed and have no such limit.
inline constexpr std::size_t kMaxStatements = std::size_t{1} << 21;
inline constexpr std::size_t kMaxTraceSize = std::size_t{1} << 30;  ///< bytes

/// Reads and checks the whole file before anything runs. An error is one sentence that begins with
/// `path:line:` and names the field.
Result<Trace> read_trace(const std::string& path);
Result<Trace> parse_trace(std::string_view text, const std::string& path);

}  // namespace lockstep::cache_sim
