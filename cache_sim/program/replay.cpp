// lockstep replay: prints the first wrong event and the events around it.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cache_sim/base/files.hpp"
#include "cache_sim/program/annotations.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "cache_sim/program/progress.hpp"
#include "cache_sim/program/replay_options.hpp"
#include "cache_sim/replay/run_json.hpp"
#include "cache_sim/replay/timeline.hpp"
#include "cache_sim/report/page.hpp"
#include "cache_sim/report/run_document.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::program {
namespace {

using cache_sim::LocatedFinding;
using cache_sim::ReplayOutcome;
using cache_sim::ReplayRequest;

void print_finding(const LocatedFinding& located, const ReplayRequest& request) {
  const std::string place =
      located.line > 0 ? fmt::format("{}:{}", located.file, located.line) : located.file;
  print("{}: ", place);
  print_red(to_string(located.finding.kind));
  print(" at event {}: {}\n", located.event, located.finding.text);
  print("  expected  {}\n  actual    {}\n", located.finding.expected, located.finding.actual);
  if (!located.subject.empty()) print("  subject   {}\n", located.subject);
  for (std::size_t i = 0; i < located.around.size(); ++i) {
    const bool last = i + 1 == located.around.size();
    const auto event = located.event - static_cast<std::int64_t>(located.around.size() - 1 - i);
    print("  {} {:>6}  {}\n", last ? ">" : " ", event, located.around[i]);
  }
  print("replay   {}\n", replay_command(request));
}

/// Names the other run lines of the file, because a run without findings may not be the one that
/// the file is about.
void print_run_lines(const ReplayRequest& request, const ReplayOutcome& outcome) {
  if (!outcome.run->findings().empty() || !outcome.trace || !request.run_line.empty()) return;
  if (!request.subjects.empty() || !request.defect.empty()) return;
  std::size_t others = 0;
  for (const cache_sim::RunDirective& directive : outcome.trace->runs)
    if (directive_words(directive, request.file).size() > 2) ++others;  // more than `replay FILE`
  if (others != 0)
    note("note: {} `# run:` {} of the file {} other subjects or options; --run-lines plays {}\n",
         others, others == 1 ? "line" : "lines", others == 1 ? "names" : "name",
         others == 1 ? "it" : "them");
}

void print_outcome(const ReplayRequest& request, const ReplayOutcome& outcome) {
  const cache_sim::ReplaySession& run = *outcome.run;
  for (const LocatedFinding& located : run.findings()) print_finding(located, request);
  std::string subjects;
  for (std::size_t i = 0; i < run.subject_count(); ++i)
    subjects += (i == 0 ? "" : " beside ") + run.subject_name(i);
  note("{}: {}: {}, {}, {}\n", request.file, subjects, counted(run.event_count(), "event"),
       counted(run.outcomes().size(), "request"),
       run.findings().empty()
           ? "nothing found"
           : fmt::format("{} found", to_string(run.findings().front().finding.kind)));
  for (const auto& [form, left_out] : run.left_out())
    note("  left out {}: {}\n", counted(left_out.count, "time"), left_out.why);
  std::string line = fmt::format("digest={:016x}", run.digest());
  if (outcome.decisions)
    line += fmt::format(" decision_digest={:016x}", outcome.decisions->decision_digest);
  if (run.subject_count() != 0) line += fmt::format(" hit_tokens={}", run.totals(0).hit_tokens);
  print_run_lines(request, outcome);
  note("{}\n", line);  // the digest is the last line of a run
}

std::string decisions_text(const ReplayOutcome& outcome) {
  std::string lines;
  if (!outcome.decisions) {
    for (const cache_sim::RequestOutcome& request : outcome.run->outcomes())
      lines += fmt::format("[\"{}\", {}, {}]\n", request.id.text(), request.prompt_tokens,
                           request.cached_tokens);
    return lines;
  }
  for (const std::string& line : outcome.decisions->lines) lines += line + "\n";
  if (!lines.empty()) return lines;
  for (std::size_t i = 0; i < outcome.decisions->prefixes.size(); ++i)
    lines += fmt::format("[{}, {}]\n", i, outcome.decisions->prefixes[i]);
  return lines;
}

/// Adds the events of a run to the timeline, as a process of their own.
void add_timeline(const ReplayOutcome& outcome, std::size_t process, cache_sim::Json& timeline) {
  cache_sim::Json own = timeline_json(outcome);
  for (cache_sim::Json& event : own["traceEvents"]) {
    event["pid"] = process;
    timeline["traceEvents"].push_back(std::move(event));
  }
}

std::vector<Annotation> annotations_of(const std::vector<ReplayOutcome>& outcomes) {
  std::vector<Annotation> all;
  for (const ReplayOutcome& outcome : outcomes)
    for (const LocatedFinding& located : outcome.run->findings())
      all.push_back({located.finding.kind, located.finding.text, located.file, located.line});
  return all;
}

/// Writes the output files. It is called after all inputs were read and all runs made, so that bad
/// input writes nothing.
Result<void> write_files(const ReplayOptions& options, const std::vector<ReplayRequest>& requests,
                         const std::vector<ReplayOutcome>& outcomes) {
  using cache_sim::Json;
  Json runs = Json::array();
  Json timeline = {{"displayTimeUnit", "ms"}, {"traceEvents", Json::array()}};
  std::string decisions;
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    runs.push_back(run_json(requests[i], outcomes[i]));
    if (!options.timeline_path.empty()) add_timeline(outcomes[i], i + 1, timeline);
    decisions += decisions_text(outcomes[i]);
  }
  const auto write = [](const std::string& path, const std::string& text) -> Result<void> {
    return path.empty() ? Result<void>{} : cache_sim::write_file(path, text);
  };
  const Json& json = runs.size() == 1 ? runs[0] : runs;
  return write(options.json_path, json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n")
      .and_then([&] {
        return write(options.timeline_path,
                     timeline.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
      })
      .and_then([&] { return write(options.decisions_path, decisions); })
      .and_then([&] { return options.annotations.write(annotations_of(outcomes)); })
      .and_then([&]() -> Result<void> {
        if (options.html_path.empty()) return {};
        return write(options.html_path,
                     cache_sim::runs_page(cache_sim::runs_document(requests, outcomes)));
      });
}

int run_replay(const ReplayOptions& options) {
  Result<std::vector<ReplayRequest>> requests = options.requests();
  if (!requests) return refuse(requests.error());
  if (const Result<void> apart =
          expect_apart(options.files, {options.json_path, options.timeline_path, options.html_path,
                                       options.decisions_path, options.annotations.sarif_path});
      !apart)
    return refuse(apart.error());
  std::vector<ReplayOutcome> outcomes;
  int status = kExitPass;
  // All files share a child that can be greeted again.
  const auto children = std::make_shared<cache_sim::Children>();
  for (ReplayRequest& request : *requests) {
    const Progress progress("replay " + request.file);
    request.children = children;
    request.keep_events = !options.timeline_path.empty() || !options.html_path.empty();
    Result<ReplayOutcome> outcome = cache_sim::replay(request);
    if (!outcome) return refuse(outcome.error());
    if (status == kExitPass) status = outcome->status();
    outcomes.push_back(std::move(*outcome));
  }
  options.annotations.print(annotations_of(outcomes));
  for (const std::string& remark : children->remarks()) note("note: {}\n", remark);
  for (std::size_t i = 0; i < outcomes.size(); ++i) print_outcome((*requests)[i], outcomes[i]);
  if (const Result<void> written = write_files(options, *requests, outcomes); !written)
    return refuse(written.error());
  return status;
}

}  // namespace

void add_replay(Command& app, int& status) {
  Command* const command =
      app.add_subcommand("replay", "replay traces or workloads against one or more subjects");
  const auto options = std::make_shared<ReplayOptions>();
  options->add_to(*command);
  add_quiet(*command);
  end_help(
      *command, statuses_of_runs(),
      {"lockstep replay fixtures/traces/finish_keeps_its_state.trace --subject sglang-no-buffer "
       "--subject oracle"});
  command->callback([options, &status] { status = run_replay(*options); });
}

}  // namespace lockstep::program
