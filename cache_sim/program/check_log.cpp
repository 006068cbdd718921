// lockstep check-log: whether a server's answers were possible, and its log as a trace.
#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/base/files.hpp"
#include "cache_sim/logs/server_log.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::program {
namespace {

struct CheckLogWords {
  std::string file;
  std::string log_path;
  std::string trace_path;
};

Result<void> write_files(const CheckLogWords& words,
                         const std::vector<cache_sim::LoggedRequest>& log) {
  if (!words.trace_path.empty()) {
    const Result<std::string> trace = cache_sim::log_trace(log);
    if (!trace) return tl::unexpected(trace.error());
    if (auto written = cache_sim::write_file(words.trace_path, *trace); !written) return written;
  }
  if (words.log_path.empty()) return {};
  return cache_sim::write_file(words.log_path, cache_sim::log_text(log));
}

int run_check_log(const CheckLogWords& words) {
  const Result<std::vector<cache_sim::LoggedRequest>> log = cache_sim::read_log(words.file);
  if (!log) return refuse(log.error());
  const std::vector<cache_sim::LogFinding> findings = cache_sim::judge_log(*log);
  if (const Result<void> written = write_files(words, *log); !written)
    return refuse(written.error());
  Digest digest;
  std::int64_t cached = 0;
  for (const cache_sim::LoggedRequest& request : *log) {
    cached += request.cached;
    digest.add(request.tokens.digest());
    digest.add(static_cast<std::uint64_t>(request.cached));
  }
  for (const cache_sim::LogFinding& one : findings)
    print("{}: {}: request `{}`: {}\n  expected  {}\n  actual    {}\n", one.place,
          to_string(one.finding.kind), one.request, one.finding.text, one.finding.expected,
          one.finding.actual);
  const bool any_greedy =
      std::any_of(log->begin(), log->end(), [](const auto& request) { return request.greedy; });
  print("{}: {} requests, {}{}\n", words.file, log->size(),
        findings.empty()
            ? "nothing found"
            : fmt::format("{} finding{}", findings.size(), findings.size() == 1 ? "" : "s"),
        any_greedy ? "" : "; outputs were not compared: no request is marked greedy");
  print("digest={:016x} hit_tokens={}\n", digest.value, cached);
  return findings.empty() ? kExitPass : exit_status(findings.front().finding.kind);
}

}  // namespace

void add_check_log(CLI::App& app, int& status) {
  CLI::App* const command = app.add_subcommand(
      "check-log", "judge a server's log: were its cached tokens and outputs possible?");
  const auto words = std::make_shared<CheckLogWords>();
  command
      ->add_option("FILE", words->file,
                   "JSON lines: Lockstep's log, SGLang's /generate answers, vLLM's request outputs")
      ->required();
  command->add_option("--log", words->log_path, "write the log in Lockstep's own format");
  command->add_option("--trace", words->trace_path, "write its requests as a trace to replay");
  command->callback([words, &status] { status = run_check_log(*words); });
}

}  // namespace lockstep::program
