#include "cache_sim/program/replay_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "cache_sim/base/settings.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/trace/trace.hpp"
#include "reference/base/printable.hpp"

namespace lockstep::program {

void ReplayOptions::add_to(Command& command) {
  command
      .add_option("FILE", files,
                  "trace files, workload files, or workloads by name (lockstep list workloads)")
      ->required();
  Option* const subject =
      command
          .add_option(
              "--subject", request.subjects,
              "a policy, oracle:POLICY, oracle, or exec:COMMAND; several are compared reply "
              "by reply (default: the policy of the defect or of the file, beside its oracle)")
          ->repeatable();
  add_fidelity(command, request.fidelity);
  Option* const checked = add_check(command, check);
  Option* const defect = command.add_option(
      "--defect", request.defect, "plant a defect (lockstep list defects; default: none)");
  command.add_option("--config", request.config,
                     "config fields over the file's own: key=value,… (default: none)");
  Option* const model = command.add_option(
      "--model", request.model,
      "a step takes as long as on this model (lockstep list models; default: the "
      "config's step_time)");
  Option* const limit =
      command
          .add_option("--timeout", timeout,
                      "how long a child may take for one answer: a number with ns, us, ms or s")
          ->capture_default_str();
  command.add_output("--json", json_path, "write the run's data to this file");
  command.add_output("--timeline", timeline_path,
                     "write a Chrome trace (µs of virtual time) of the run to this file");
  command.add_output("--html", html_path, "write a page about the runs to this file");
  command.add_output("--decisions", decisions_path,
                     "write a line for each admission to this file: prompt and cached tokens");
  annotations.add_to(command);
  command
      .add_flag("--run-lines", run_lines,
                "play each trace as its own `# run:` lines say; --fidelity and --config count over "
                "theirs")
      ->excludes(subject)
      ->excludes(checked)
      ->excludes(defect)
      ->excludes(model)
      ->excludes(limit);
  add_allow_exec(command, allow_exec);
}

namespace {

/// The requests of a trace's own run lines; a plain replay if it has none.
Result<std::vector<cache_sim::ReplayRequest>> requests_of_run_lines(const std::string& file,
                                                                    bool allow_exec) {
  const Result<cache_sim::Trace> trace = cache_sim::read_trace(file);
  if (!trace) return tl::unexpected(trace.error());
  std::vector<cache_sim::ReplayRequest> all;
  for (const cache_sim::RunDirective& directive : trace->runs) {
    auto own = cache_sim::requests_of(directive, file, run_line_reader(allow_exec));
    if (!own) return tl::unexpected(own.error());
    std::move(own->begin(), own->end(), std::back_inserter(all));
  }
  if (all.empty()) all.emplace_back().file = file;
  return all;
}

}  // namespace

Result<std::chrono::milliseconds> read_timeout(const std::string& text) {
  const Result<Nanoseconds> limit = parse_time(text);
  if (!limit) return fail("--timeout: " + limit.error().text);
  if (*limit == 0) return fail(fmt::format("--timeout: `{}` leaves no time for an answer", text));
  return std::chrono::milliseconds(std::max<Nanoseconds>(*limit / 1'000'000, 1));
}

Result<std::vector<cache_sim::ReplayRequest>> ReplayOptions::requests() const {
  const auto limit = read_timeout(timeout);
  if (!limit) return tl::unexpected(limit.error());
  std::vector<cache_sim::ReplayRequest> all;
  for (const std::string& file : files) {
    cache_sim::ReplayRequest one = request;
    one.file = file;
    one.timeout = *limit;
    one.check = check_level(check);
    if (!run_lines) {
      all.push_back(std::move(one));
      continue;
    }
    Result<std::vector<cache_sim::ReplayRequest>> own = requests_of_run_lines(file, allow_exec);
    if (!own) return tl::unexpected(own.error());
    for (cache_sim::ReplayRequest& run : *own) {
      if (!request.fidelity.empty()) run.fidelity = request.fidelity;
      run.config = cache_sim::joined_settings({request.config, run.config});
      all.push_back(std::move(run));
    }
  }
  return all;
}

void add_fidelity(Command& command, std::string& word) {
  command.add_option("--fidelity", word,
                     "what stands in a slot: label, its exact token prefix; reference, the numbers "
                     "of a model beside it; torch, kernels, its tensors on the CPU or a GPU "
                     "(lockstep list layers; default: the config's)");
}

Option* add_check(Command& command, std::string& word) {
  return command
      .add_option("--check", word, "what is checked: nothing, labels of states, or invariants too")
      ->one_of({"off", "labels", "all"})
      ->capture_default_str();
}

cache_sim::CheckLevel check_level(const std::string& word) {
  if (word == "off") return cache_sim::CheckLevel::off;
  return word == "labels" ? cache_sim::CheckLevel::labels : cache_sim::CheckLevel::all;
}

void add_allow_exec(Command& command, bool& allow_exec) {
  command.add_flag("--allow-exec", allow_exec,
                   "play `# run:` lines of traces that start a program (exec:COMMAND)");
}

cache_sim::ReadRunLine run_line_reader(bool allow_exec) {
  return
      [=](const std::vector<std::string>& words) -> Result<std::vector<cache_sim::ReplayRequest>> {
        Command parser("", "lockstep replay");
        ReplayOptions options;
        options.add_to(parser);
        if (const Result<void> read = parser.parse(words); !read)
          return tl::unexpected(read.error());
        if (options.run_lines) return fail("a # run: line that says --run-lines would never end");
        for (const std::string& subject : options.request.subjects)
          if (subject.starts_with("exec:") && !allow_exec)
            return fail(fmt::format(
                "its # run: line starts a program (`{}`), which is done only with --allow-exec",
                lockstep::printable(subject)));
        return options.requests();
      };
}

}  // namespace lockstep::program
