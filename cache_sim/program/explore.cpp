// lockstep explore and lockstep shrink: find bugs with random traces, and make traces small.
#include "cache_sim/search/explore.hpp"
#include "cache_sim/base/files.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "cache_sim/program/annotations.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "cache_sim/program/progress.hpp"
#include "cache_sim/program/replay_options.hpp"
#include "cache_sim/program/watch.hpp"
#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"
#include "cache_sim/report/page.hpp"
#include "cache_sim/report/run_document.hpp"
#include "cache_sim/trace/trace_writer.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/mix.hpp"
#include "reference/base/shell_words.hpp"

namespace lockstep::program {
namespace {

namespace fs = std::filesystem;
using namespace cache_sim;

constexpr int kExitInterrupted = 130;  // 128 + SIGINT, as in shells

/// The replay request that shows a finding.
ReplayRequest replay_of(const RunOptions& run, const std::string& file) {
  ReplayRequest request;
  request.file = file;
  request.subjects = run.subjects;
  request.defect = run.defect_name;
  request.check = run.check;
  return request;
}

/// Replaces control characters, which a child's text may contain and a comment must not.
std::string one_line(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
  return text;
}

/// Adds comments to a trace, so that the file can be replayed: how to run it, what it finds, and
/// what that means. A child that fails at hello has no operation before its finding, but a file
/// needs one.
void describe(Trace& trace, const LocatedFinding& finding, const RunOptions& run,
              const std::string& origin) {
  if (trace.statements.empty())
    trace.statements.emplace_back().what = Operation{.verb = Verb::check};
  trace.description = {"run: " + run_line(replay_of(run, "%s")),
                       fmt::format("finds: {}", to_string(finding.finding.kind)),
                       one_line(finding.finding.text) + ".", one_line(origin)};
}

void print_finding(const Trace& trace, const LocatedFinding& finding, const std::string& path,
                   const RunOptions& run) {
  print_red(to_string(finding.finding.kind));
  print(": {}\n\n{}\n", finding.finding.text, trace_text(trace));
  print("written  {}\nreplay   {}\n", path, replay_command(replay_of(run, path)));
  std::fflush(stdout);
}

// --- explore -------------------------------------------------------------------------------------

struct ExploreWords {
  ReplayRequest request;
  std::uint64_t seed = 1;
  std::int64_t traces = 1000;
  bool limits_traces = false;  // the option --traces was given
  std::string time;
  std::int64_t findings = 1;
  bool raw = false;
  bool allow_exec = false;
  std::string check = "all";
  std::string timeout = "10s";
  std::string out = "findings";
  std::string corpus;
  std::string json_path;
  std::string html_path;
  AnnotationOptions annotations;

  /// The output files beside --out; empty ones were not asked for.
  std::array<std::string, 3> output_paths() const {
    return {json_path, html_path, annotations.sarif_path};
  }
};

std::vector<std::string> traces_in(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none))
    if (entry.path().extension() == ".trace") files.push_back(entry.path().string());
  std::ranges::sort(files);
  return files;
}

/// Replays the traces that an earlier search left in the folder, and returns those that still show
/// their finding. A trace that cannot be played, for example one of another machine or version, is
/// named and skipped. An interrupt ends the function.
std::vector<std::string> still_there(const std::string& folder, bool allow_exec) {
  std::vector<std::string> there;
  for (const std::string& file : traces_in(folder)) {
    if (is_interrupted()) break;
    const Result<Trace> trace = read_trace(file);
    if (!trace) {
      note("not replayed: {}\n", trace.error().text);
      continue;
    }
    for (const RunDirective& directive : trace->runs) {
      if (!directive.finds) continue;
      const auto requests = requests_of(directive, file, run_line_reader(allow_exec));
      if (!requests) {
        note("not replayed: {}\n", requests.error().text);
        continue;
      }
      for (const ReplayRequest& request : *requests) {
        const Result<ReplayOutcome> outcome = replay(request);
        if (!outcome)
          note("not replayed: {}\n", outcome.error().text);
        else if (!outcome->run->findings().empty())
          there.push_back(file);
      }
    }
  }
  return there;
}

// --- The corpus ----------------------------------------------------------------------------------

/// The traces of the folder --corpus with the subjects of their first `# run:` line. A file that
/// cannot be read is named and skipped. None of them is played here.
std::vector<CorpusTrace> corpus_in(const std::string& folder) {
  std::vector<CorpusTrace> corpus;
  if (folder.empty()) return corpus;
  for (const std::string& file : traces_in(folder)) {
    Result<Trace> trace = read_trace(file);
    Result<std::vector<ReplayRequest>> requests;
    if (!trace)
      requests = tl::unexpected(trace.error());
    else if (trace->runs.empty())
      requests = fail(file + " has no line `# run: lockstep replay %s`");
    else
      requests = requests_of(trace->runs.front(), file, run_line_reader(true));
    if (!requests) {
      note("not in the corpus: {}\n", requests.error().text);
      continue;
    }
    corpus.push_back({requests->front().subjects, std::move(*trace), {}});
  }
  return corpus;
}

/// Writes what the search added, each under the digest of its text.
Result<void> write_corpus(const ExploreWords& words, const RunOptions& run,
                          const std::vector<CorpusTrace>& added) {
  if (words.corpus.empty()) return {};
  std::error_code none;  // a failure shows when a file is written
  fs::create_directories(words.corpus, none);
  for (const CorpusTrace& one : added) {
    RunOptions own = run;
    own.subjects = one.subjects;
    Trace trace = one.trace;
    trace.description = {"run: " + run_line(replay_of(own, "%s")),
                         fmt::format("Reaches {}.", fmt::join(one.marks, ", "))};
    const std::string text = trace_text(trace);
    Digest digest;
    for (const char c : text) digest.add(static_cast<unsigned char>(c));
    const std::string path = fmt::format("{}/{:016x}.trace", words.corpus, digest.value);
    if (Result<void> written = write_file(path, text); !written) return written;
  }
  return {};
}

/// The run options that produced a finding.
RunOptions run_of(const RunOptions& run, const Discovery& found) {
  RunOptions own = run;
  own.subjects = found.subjects;
  return own;
}

Json search_json(const ExploreWords& words, const RunOptions& run, const ExploreOutcome& outcome,
                 const std::vector<std::string>& paths) {
  Json json = {{"lockstep", 1}, {"command", "explore"}, {"seed", words.seed}};
  json["digest"] = fmt::format("{:016x}", outcome.digest);
  json["verdict"] = outcome.discoveries.empty() ? "pass" : "finding";
  json["subjects"] = run.subjects;
  if (!run.defect_name.empty()) json["defect"] = run.defect_name;
  json["findings"] = Json::array();
  for (std::size_t i = 0; i < outcome.discoveries.size(); ++i) {
    const Discovery& found = outcome.discoveries[i];
    json["findings"].push_back({{"kind", to_string(found.finding.finding.kind)},
                                {"text", found.finding.finding.text},
                                {"subject", found.finding.subject},
                                {"operation", found.finding.operation},
                                {"expected", found.finding.finding.expected},
                                {"actual", found.finding.finding.actual},
                                {"trace", paths[i]},
                                {"replay", replay_command(replay_of(run_of(run, found), paths[i]))},
                                {"tests_to_detect", found.trace_number},
                                {"lines_before", found.lines_before},
                                {"shrunk_lines", found.lines},
                                {"shrink_executions", found.shrink_executions}});
  }
  json["search"] = {{"traces_run", outcome.traces},        {"operations", outcome.operations},
                    {"from_corpus", outcome.from_corpus},  {"corpus", outcome.corpus},
                    {"corpus_left_out", outcome.left_out}, {"marks_missed", outcome.marks_missed}};
  json["search"]["drawn"] = Json::array();
  for (const auto& [field, counts] : outcome.drawn) {
    Json values = Json::array();
    for (const auto& [value, traces] : counts)
      values.push_back({{"value", value}, {"traces", traces}});
    json["search"]["drawn"].push_back({{"field", field}, {"values", std::move(values)}});
  }
  for (const auto& [form, why] : run.children->unsupported())
    json["search"]["unsupported"].push_back({{"operation", form}, {"text", why}});
  if (!outcome.discoveries.empty()) {
    json["search"]["tests_to_detect"] = outcome.discoveries.front().trace_number;
    json["search"]["shrunk_lines"] = outcome.discoveries.front().lines;
  }
  double shrink_s = 0;
  for (const Discovery& found : outcome.discoveries) shrink_s += found.shrink_s;
  json["timing"] = {{"wall_s", outcome.wall_s}, {"shrink_s", shrink_s}};
  return json;
}

/// The command that repeats this search.
std::string command_of(const ExploreWords& words) {
  std::string command = "lockstep explore";
  const auto add = [&](const std::string& option, const std::string& value) {
    if (!value.empty()) command += " " + option + " " + shell_quoted(value);
  };
  for (const std::string& subject : words.request.subjects) add("--subject", subject);
  add("--defect", words.request.defect);
  add("--config", words.request.config);
  add("--time", words.time);
  if (words.time.empty()) add("--traces", std::to_string(words.traces));
  add("--seed", std::to_string(words.seed));
  return command;
}

/// The page of a search: each trace that was written, replayed.
Result<std::string> search_page(const Json& search, const RunOptions& run,
                                const std::string& command, const ExploreOutcome& outcome,
                                const std::vector<std::string>& paths) {
  std::vector<ReplayRequest> requests;
  std::vector<ReplayOutcome> outcomes;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    ReplayRequest request = replay_of(run_of(run, outcome.discoveries[i]), paths[i]);
    request.keep_events = true;
    request.timeout = run.timeout;
    request.children = run.children;
    Result<ReplayOutcome> replayed = replay(request);
    if (!replayed) return tl::unexpected(replayed.error());
    requests.push_back(std::move(request));
    outcomes.push_back(std::move(*replayed));
  }
  Json document = runs_document(requests, outcomes);
  document["search"] = search["search"];
  for (const char* const key : {"seed", "digest", "subjects"})
    document["search"][key] = search[key];
  document["search"]["command"] = command;
  document["search"].emplace("unsupported", Json::array());
  document["search"]["findings"] = outcome.discoveries.size();
  make_text(document);
  return runs_page(document);
}

Result<ExploreOptions> explore_options(const ExploreWords& words, const RunOptions& run,
                                       Progress& progress) {
  ExploreOptions options;
  options.run = run;
  options.seed = words.seed;
  options.traces = words.traces;
  options.findings = words.findings;
  options.shrinks = !words.raw;
  if (!words.time.empty()) {
    const Result<Nanoseconds> time = parse_time(words.time);
    if (!time) return fail("--time: " + time.error().text);
    options.time = std::chrono::milliseconds(std::max<Nanoseconds>(1, *time / 1'000'000));
    if (!words.limits_traces) options.traces = std::numeric_limits<std::int64_t>::max();
    options.shrink_time = std::max(options.time, std::chrono::milliseconds(60'000));
  }
  const auto limit = read_timeout(words.timeout);
  if (!limit) return tl::unexpected(limit.error());
  options.run.timeout = *limit;
  options.progress = [&progress](const ExploreOptions::Progress& now) {
    watch_trace(now.shrinking ? now.traces : now.traces + 1,
                now.shrinking ? "it is shrunk" : "it is played");
    progress.say(fmt::format("{}, {}{}", counted(now.traces, "trace"),
                             counted(now.findings, "finding"),
                             now.shrinking ? ", one is shrunk" : ""));
  };
  return options;
}

/// Checks by writing that the folder is writable, because a search of hours must not fail at its
/// end. It leaves nothing behind.
Result<void> expect_writable(fs::path folder) {
  if (folder.empty()) folder = ".";
  std::error_code error;
  std::vector<fs::path> made;
  for (fs::path at = fs::absolute(folder); !fs::exists(at, error); at = at.parent_path())
    made.push_back(at);
  fs::create_directories(folder, error);
  if (error)
    return fail(fmt::format("{}: the folder cannot be made: {}", folder.string(), error.message()),
                kExitEnvironment);
  constexpr std::size_t kUsualSize = 65536;
  const fs::path probe = folder / fmt::format(".lockstep-{}", ::getpid());
  const Result<void> written = write_file(probe.string(), std::string(kUsualSize, '\n'));
  fs::remove(probe, error);
  for (const fs::path& folder_made : made) fs::remove(folder_made, error);
  if (!written)
    return fail(fmt::format("{}: files cannot be written there", folder.string()),
                kExitEnvironment);
  return {};
}

Result<void> expect_outputs_writable(const ExploreWords& words) {
  if (Result<void> folder = expect_writable(words.out); !folder) return folder;
  for (const std::string& path : words.output_paths()) {
    std::error_code none;
    const bool is_special = fs::exists(path, none) && !fs::is_regular_file(path, none);
    if (path.empty() || is_special) continue;
    Result<void> folder = expect_writable(fs::path(path).parent_path());
    if (!folder) return folder;
  }
  return {};
}

/// Writes discoveries when they are made, so that none is lost, however the search ends.
class DiscoveryWriter {
 public:
  DiscoveryWriter(const ExploreWords& words, const RunOptions& run) : words_(words), run_(run) {}

  void write(const Discovery& found) {
    std::error_code none;
    fs::create_directories(words_.out, none);
    const std::string number = found.trace_number != 0 ? std::to_string(found.trace_number)
                                                       : fmt::format("corpus{}", paths_.size() + 1);
    paths_.push_back(fmt::format("{}/{}-{}-{}.trace", words_.out,
                                 to_string(found.finding.finding.kind), words_.seed, number));
    const RunOptions own = run_of(run_, found);
    Trace trace = found.trace;
    describe(trace, found.finding, own,
             fmt::format("Found by {}; {} before it was shrunk.",
                         found.trace_number != 0
                             ? fmt::format("trace {} of seed {}", found.trace_number, words_.seed)
                             : "a trace of the corpus",
                         counted(found.lines_before, "line")));
    const Result<void> written = write_file(paths_.back(), trace_text(trace));
    print_finding(trace, found.finding, paths_.back(), own);
    if (written) return;
    refuse({.text = written.error().text + "; the trace stands above"});
    is_complete_ = false;
  }

  const std::vector<std::string>& paths() const { return paths_; }
  bool is_complete() const { return is_complete_; }

 private:
  const ExploreWords& words_;
  const RunOptions& run_;
  std::vector<std::string> paths_;
  bool is_complete_ = true;
};

/// The missed marks that are beside a reached one: `split.locked` if `split.above` was reached.
/// Marks of policies that did not play are left out.
std::vector<std::string> marks_nearly_reached(const std::vector<std::string>& missed) {
  const auto family = [](std::string_view mark) { return mark.substr(0, mark.find('.')); };
  std::set<std::string_view> reached;
  for (const MarkEntry& mark : Registry<MarkEntry>::all())
    if (std::ranges::find(missed, mark.name) == missed.end()) reached.insert(family(mark.name));
  std::vector<std::string> near;
  std::ranges::copy_if(missed, std::back_inserter(near),
                       [&](const std::string& mark) { return reached.contains(family(mark)); });
  return near;
}

void print_search(const ExploreWords& words, const RunOptions& run, const ExploreOutcome& outcome) {
  for (const auto& [form, why] : run.children->unsupported()) note("left out: {}\n", why);
  for (const std::string& remark : run.children->remarks()) note("note: {}\n", remark);
  if (outcome.left_out != 0)
    note("not in the corpus: {} that cannot be played, the first {}\n",
         counted(outcome.left_out, "trace"), outcome.first_left_out);
  note("{}, {}, {} of {} from a corpus of {}: {}{}\n", counted(outcome.traces, "trace"),
       counted(outcome.operations, "operation"), outcome.from_corpus,
       counted(outcome.traces, "trace"), outcome.corpus,
       outcome.discoveries.empty() ? "nothing found"
                                   : fmt::format("{} found", outcome.discoveries.size()),
       is_interrupted() ? ", interrupted" : "");
  const std::vector<std::string> near = marks_nearly_reached(outcome.marks_missed);
  if (!near.empty() && !is_quiet())
    print_text(fmt::format("never reached: {}\n", fmt::join(near, ", ")));
  note("digest={:016x} seed={}\n", outcome.digest, words.seed);
}

/// Writes the data, the annotations and the page of a search. Missing folders are made only now, so
/// that a search without findings leaves none.
Result<void> write_outputs(const ExploreWords& words, const RunOptions& run,
                           const ExploreOutcome& outcome, const std::vector<std::string>& paths) {
  for (const std::string& path : words.output_paths()) {
    std::error_code none;  // a failure shows when the file is written
    if (const fs::path folder = fs::path(path).parent_path(); !folder.empty())
      fs::create_directories(folder, none);
  }
  if (Result<void> written = write_corpus(words, run, outcome.added); !written) return written;
  const Json json = search_json(words, run, outcome, paths);
  if (!words.json_path.empty()) {
    const std::string text = json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
    if (Result<void> written = write_file(words.json_path, text); !written) return written;
  }
  std::vector<Annotation> annotations;
  for (std::size_t i = 0; i < outcome.discoveries.size(); ++i) {
    const Finding& finding = outcome.discoveries[i].finding.finding;
    annotations.push_back({finding.kind, finding.text, paths[i]});
  }
  words.annotations.print(annotations);
  if (Result<void> written = words.annotations.write(annotations); !written) return written;
  if (words.html_path.empty()) return {};
  const Result<std::string> page = search_page(json, run, command_of(words), outcome, paths);
  if (!page) return tl::unexpected(page.error());
  return write_file(words.html_path, *page);
}

int run_explore(const ExploreWords& words) {
  Result<RunOptions> run = run_options(words.request, Config());
  if (!run) return refuse(run.error());
  run->check = check_level(words.check);
  // Without a subject, a defect or a config policy, each trace draws its policy.
  if (words.request.subjects.empty() && words.request.defect.empty() && run->config.policy.empty())
    run->subjects.clear();
  Progress progress(fmt::format("explore, seed {}", words.seed));
  Result<ExploreOptions> options = explore_options(words, *run, progress);
  if (!options) return refuse(options.error());
  catch_interrupts();
  if (const Result<void> writable = expect_outputs_writable(words); !writable)
    return refuse(writable.error());
  watch_trace(0, "earlier findings are replayed");
  watch_search(words.seed, options->run.timeout);
  const std::vector<std::string> there = still_there(words.out, words.allow_exec);
  for (const std::string& file : there) print("{}: is still there\n", file);

  options->corpus = corpus_in(words.corpus);
  watch_trace(options->corpus.empty() ? 1 : 0,
              options->corpus.empty() ? "it is played" : "the corpus is played");
  DiscoveryWriter writer(words, *run);
  options->stops = is_interrupted;
  options->found = [&](const Discovery& found) { writer.write(found); };
  const Result<ExploreOutcome> outcome = explore(*options);
  if (!outcome) return refuse(outcome.error());

  if (const Result<void> written = write_outputs(words, *run, *outcome, writer.paths()); !written)
    return refuse(written.error());
  print_search(words, *run, *outcome);
  if (!writer.is_complete()) return kExitEnvironment;
  if (!outcome->discoveries.empty())
    return exit_status(outcome->discoveries.front().finding.finding.kind);
  if (is_interrupted()) return kExitInterrupted;
  return there.empty() ? kExitPass : kExitInvariant;
}

// --- shrink --------------------------------------------------------------------------------------

int run_shrink(ReplayRequest request, const std::string& timeout, const std::string& out) {
  const auto limit = read_timeout(timeout);
  if (!limit) return refuse(limit.error());
  request.timeout = *limit;
  const Result<Trace> trace = read_trace(request.file);
  if (!trace) return refuse(trace.error());
  Result<RunOptions> run = run_options(request, trace->config);
  if (!run) return refuse(run.error());
  Trace configured = *trace;
  configured.config = run->config;
  Progress progress("shrink " + request.file);
  ShrinkOptions options;
  options.progress = [&](std::int64_t executions, std::size_t lines) {
    progress.say(
        fmt::format("{}, {} left", counted(executions, "execution"), counted(lines, "line")));
  };
  Result<ShrinkOutcome> shrunk = shrink(configured, *run, options);
  if (!shrunk) return refuse({.text = request.file + ": " + shrunk.error().text});
  describe(shrunk->trace, shrunk->finding, *run, "Shrunk from " + request.file + ".");
  if (const Result<void> written = write_file(out, trace_text(shrunk->trace)); !written)
    return refuse(written.error());
  print_finding(shrunk->trace, shrunk->finding, out, *run);
  note("{} of {} {} left after {}\n", line_count(shrunk->trace),
       counted(line_count(*trace), "line"), is_or_are(line_count(shrunk->trace)),
       counted(shrunk->executions, "execution"));
  return exit_status(shrunk->finding.finding.kind);
}

}  // namespace

void add_explore(Command& app, int& status) {
  Command* const command = app.add_subcommand(
      "explore", "play random traces; a finding is shrunk and written as a trace file");
  const auto words = std::make_shared<ExploreWords>();
  command
      ->add_option(
          "--subject", words->request.subjects,
          "a policy, oracle:POLICY, oracle, or exec:COMMAND; several are compared reply by "
          "reply (default: each trace draws a policy, beside its oracle)")
      ->repeatable();
  command->add_option("--defect", words->request.defect,
                      "plant a defect (lockstep list defects; default: none)");
  command->add_option(
      "--config", words->request.config,
      "fields that are not drawn, and not changed by shrinking: key=value,… (default: none)");
  command->add_option("--seed", words->seed, "the number that decides every trace")
      ->whole_number()
      ->capture_default_str();
  Option* const traces = command->add_option("--traces", words->traces, "how many traces at most")
                             ->positive()
                             ->capture_default_str();
  command->add_option("--time", words->time,
                      "how long at most: a number with ns, us, ms or s; without --traces, as many "
                      "traces as there is time for (default: no limit but --traces)");
  command->add_option("--findings", words->findings, "stop after this many findings")
      ->positive()
      ->capture_default_str();
  command
      ->add_option(
          "--timeout", words->timeout,
          "how long a trace may compute, and a child take for one answer: a number with ns, us, "
          "ms or s")
      ->capture_default_str();
  add_fidelity(*command, words->request.fidelity);
  add_check(*command, words->check);
  add_allow_exec(*command, words->allow_exec);
  command->add_flag("--no-shrink", words->raw, "write traces as they were found");
  command
      ->add_output("--out", words->out,
                   "the folder for findings; traces that lie there are played first")
      ->capture_default_str();
  command->add_output("--corpus", words->corpus,
                      "a folder of traces to begin with, to which the search adds those that reach "
                      "new code marks (default: none)");
  command->add_output("--json", words->json_path, "write the search's data to this file");
  command->add_output("--html", words->html_path, "write a page about the findings to this file");
  words->annotations.add_to(*command);
  add_quiet(*command);
  std::vector<StatusHelp> statuses = statuses_of_runs();
  statuses[3].meaning += ", or a finding of the folder --out is still there";
  statuses.push_back({kExitInterrupted, "interrupted, and nothing was found"});
  end_help(*command, statuses,
           {"lockstep explore --subject sglang-no-buffer --subject oracle --traces 200 --seed 7"});
  command->callback([words, traces, &status] {
    words->limits_traces = traces->is_given();
    status = run_explore(*words);
  });
}

void add_shrink(Command& app, int& status) {
  Command* const command =
      app.add_subcommand("shrink", "write the smallest trace with the same kind of finding");
  const auto request = std::make_shared<ReplayRequest>();
  const auto timeout = std::make_shared<std::string>("10s");
  const auto out = std::make_shared<std::string>();
  command->add_option("FILE", request->file, "a trace with a finding")->required();
  command
      ->add_option("--subject", request->subjects,
                   "a policy, oracle:POLICY, oracle, or exec:COMMAND (default: as replay chooses)")
      ->repeatable();
  command->add_option("--defect", request->defect,
                      "plant a defect (lockstep list defects; default: none)");
  command->add_option("--config", request->config,
                      "config fields over the file's own: key=value,… (default: none)");
  command
      ->add_option("--timeout", *timeout,
                   "how long a child may take for one answer: a number with ns, us, ms or s")
      ->capture_default_str();
  command->add_output("-o,--out", *out, "the file to write")->required();
  add_quiet(*command);
  std::vector<StatusHelp> statuses = statuses_of_runs();
  statuses.erase(statuses.begin());
  statuses.front().meaning = "bad usage or bad input, as a trace without a finding";
  end_help(*command, statuses,
           {"lockstep shrink fixtures/traces/finish_keeps_its_state.trace --defect "
            "sglang-no-buffer:frees-donated-slot -o small.trace",
            kExitInvariant});
  command->callback([=, &status] { status = run_shrink(*request, *timeout, *out); });
}

}  // namespace lockstep::program
