// lockstep check-log: checks whether a server's answers were possible, and turns its log into a
// trace.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cache_sim/base/files.hpp"
#include "cache_sim/logs/server_log.hpp"
#include "cache_sim/program/annotations.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "cache_sim/program/progress.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::program {
namespace {

struct CheckLogWords {
  std::string file;
  std::string log_path;
  std::string trace_path;
  std::string truth_path;
  std::string json_path;
  AnnotationOptions annotations;
  double gap_min = cache_sim::Truths::kGapMin;
};

/// The end of a sentence: the outputs that were compared, and with which truth.
std::string comparison_text(const CheckLogWords& words, const cache_sim::LogVerdict& verdict) {
  if (verdict.greedy == 0) return "; outputs were not compared: no request is marked greedy";
  const std::string greedy = counted(verdict.greedy, "greedy output");
  const std::string tokens = counted(verdict.tokens, "token");
  if (words.truth_path.empty()) return fmt::format("; {} of {} compared", tokens, greedy);
  return fmt::format("; {} of {} compared with the truth, {} at a gap below {}; {} compared",
                     verdict.with_truth, greedy, counted(verdict.near_ties, "difference"),
                     words.gap_min, tokens);
}

nlohmann::ordered_json verdict_json(const CheckLogWords& words, std::size_t requests,
                                    const cache_sim::LogVerdict& verdict) {
  nlohmann::ordered_json findings = nlohmann::ordered_json::array();
  for (const cache_sim::LogFinding& one : verdict.findings)
    findings.push_back({{"place", one.place.text()},
                        {"request", one.request},
                        {"kind", to_string(one.finding.kind)},
                        {"text", one.finding.text},
                        {"expected", one.finding.expected},
                        {"actual", one.finding.actual}});
  return {{"log", words.file},
          {"truth", words.truth_path},
          {"gap_min", words.gap_min},
          {"requests", requests},
          {"greedy", verdict.greedy},
          {"with_truth", verdict.with_truth},
          {"near_ties", verdict.near_ties},
          {"tokens", verdict.tokens},
          {"findings", std::move(findings)}};
}

/// The findings, each at the line of its request in the log.
std::vector<Annotation> annotations_of(const cache_sim::LogVerdict& verdict) {
  std::vector<Annotation> all;
  for (const cache_sim::LogFinding& one : verdict.findings)
    all.push_back({one.finding.kind, fmt::format("request `{}`: {}", one.request, one.finding.text),
                   one.place.file, one.place.line});
  return all;
}

Result<void> write_files(const CheckLogWords& words,
                         const std::vector<cache_sim::LoggedRequest>& log,
                         const cache_sim::LogVerdict& verdict) {
  if (!words.trace_path.empty()) {
    const Result<std::string> trace = cache_sim::log_trace(log);
    if (!trace) return tl::unexpected(trace.error());
    if (auto written = cache_sim::write_file(words.trace_path, *trace); !written) return written;
  }
  if (!words.json_path.empty()) {
    const auto json = verdict_json(words, log.size(), verdict);
    const auto text = json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    if (auto written = cache_sim::write_file(words.json_path, text); !written) return written;
  }
  if (Result<void> written = words.annotations.write(annotations_of(verdict)); !written)
    return written;
  if (words.log_path.empty()) return {};
  return cache_sim::write_file(words.log_path, cache_sim::log_text(log));
}

int run_check_log(const CheckLogWords& words) {
  if (const Result<void> apart = expect_apart(
          {words.file, words.truth_path},
          {words.log_path, words.trace_path, words.json_path, words.annotations.sarif_path});
      !apart)
    return refuse(apart.error());
  const Progress progress("check-log " + words.file);
  const Result<std::vector<cache_sim::LoggedRequest>> log = cache_sim::read_log(words.file);
  if (!log) return refuse(log.error());
  Result<cache_sim::Truths> truths = cache_sim::Truths();
  if (!words.truth_path.empty()) truths = cache_sim::Truths::read(words.truth_path, words.gap_min);
  if (!truths) return refuse(truths.error());
  const cache_sim::LogVerdict verdict = cache_sim::judge_log(*log, *truths);
  const std::vector<cache_sim::LogFinding>& findings = verdict.findings;
  if (const Result<void> written = write_files(words, *log, verdict); !written)
    return refuse(written.error());
  Digest digest;
  std::int64_t cached = 0;
  for (const cache_sim::LoggedRequest& request : *log) {
    cached += request.cached;
    digest.add(request.tokens.digest());
    digest.add(static_cast<std::uint64_t>(request.cached));
  }
  for (const cache_sim::LogFinding& one : findings)
    print("{}: {}: request `{}`: {}\n  expected  {}\n  actual    {}\n", one.place.text(),
          to_string(one.finding.kind), one.request, one.finding.text, one.finding.expected,
          one.finding.actual);
  words.annotations.print(annotations_of(verdict));
  note("{}: {}, {}{}\n", words.file, counted(log->size(), "request"),
       findings.empty() ? "nothing found" : counted(findings.size(), "finding"),
       comparison_text(words, verdict));
  note("digest={:016x} hit_tokens={}\n", digest.value, cached);
  return findings.empty() ? kExitPass : exit_status(findings.front().finding.kind);
}

/// The sources of logs that can be read, for the help text.
std::string formats_text() {
  std::string all;
  for (const cache_sim::LogFormat& format : Registry<cache_sim::LogFormat>::all())
    all += fmt::format("{}{}", all.empty() ? "" : ", ", format.summary);
  return all;
}

}  // namespace

void add_check_log(Command& app, int& status) {
  Command* const command = app.add_subcommand(
      "check-log", "judge a server's log: were its cached tokens and outputs possible?");
  const auto words = std::make_shared<CheckLogWords>();
  command->add_option("FILE", words->file, "JSON lines: " + formats_text())->required();
  command->add_output("--log", words->log_path, "write the log in Lockstep's own format");
  command->add_output("--trace", words->trace_path, "write its requests as a trace to replay");
  command->add_option(
      "--truth", words->truth_path,
      "JSON lines: prompts, and the greedy output of each from an empty cache (default: "
      "outputs are compared with each other)");
  command
      ->add_option(
          "--gap", words->gap_min,
          "a difference from the truth where its logit leads by less is no finding; in units of "
          "the logits")
      ->number_from(0)
      ->capture_default_str();
  command->add_output("--json", words->json_path, "write the findings to this file");
  words->annotations.add_to(*command);
  add_quiet(*command);
  end_help(*command,
           {{kExitPass, "nothing found"},
            {kExitBadInput, "bad usage or bad input; nothing is written"},
            {kExitEnvironment, "the environment: a full disk"},
            {kExitDiffers, "more tokens were cached than can have been, or outputs differ"}},
           {"lockstep check-log fixtures/logs/three_turns.jsonl"});
  command->callback([words, &status] { status = run_check_log(*words); });
}

}  // namespace lockstep::program
