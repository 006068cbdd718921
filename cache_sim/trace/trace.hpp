// Trace files: what a cache or a server was told, and what it should have answered
// (grammar.md).
#pragma once

#include <cstdint>
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
  bool during = false;  ///< while the next forward is under way, before its results
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
  std::vector<AnswerField> answer;  ///< empty where no answer is expected
  int answer_line = 0;
};

/// `# run: lockstep …` and the finding that it must end with.
struct RunDirective {
  int line = 0;
  std::string command;  ///< words of a shell (reference/base/shell_words.hpp), %s for the file
  std::optional<FindingKind> finds;
};

struct Trace {
  std::string path;
  std::string title;  ///< the first comment line that is no directive and no file name
  std::vector<std::string> description;  ///< the comment lines
  Config config;
  bool configured = false;  ///< a config line stands in the file
  bool scheduler_level = false;
  std::vector<RunDirective> runs;
  std::vector<Statement> statements;
};

inline constexpr std::size_t kMaxLineSize = std::size_t{1} << 20;
/// A statement takes some 300 bytes of memory; workloads, which are streamed, have no such limit.
inline constexpr std::size_t kMaxStatements = std::size_t{1} << 21;
inline constexpr std::size_t kMaxTraceSize = std::size_t{1} << 30;  ///< bytes

/// Reads and checks the whole file before anything runs. Errors are one sentence `path:line: …`
/// that names the field.
Result<Trace> read_trace(const std::string& path);
Result<Trace> parse_trace(std::string_view text, const std::string& path);

/// `sglang #22935` and its like in the order in which a trace's description
/// names them; a number alone belongs to the project named last.
std::vector<std::string> public_references(const std::vector<std::string>& description);
/// Where one of them is read, by its project's list of issues, which leads on to a pull request of
/// that number; empty where the project or its place is not known.
std::string reference_url(const std::string& reference);

}  // namespace lockstep::cache_sim
