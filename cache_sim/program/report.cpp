// lockstep report: replays every fixture and compares it with its expected findings, plays a
// workload under policies, and writes a page about them.
#include <fmt/format.h>

#include <filesystem>

#include "cache_sim/base/files.hpp"
#include "cache_sim/program/command.hpp"
#include "cache_sim/program/commands.hpp"
#include "cache_sim/program/output.hpp"
#include "cache_sim/program/progress.hpp"
#include "cache_sim/program/replay_options.hpp"
#include "cache_sim/report/collect.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/shell_words.hpp"

namespace lockstep::program {
namespace {

namespace fs = std::filesystem;

struct ReportWords {
  std::string fixtures;
  std::string out;
  std::string fidelity;
  std::string model;
  bool allow_exec = false;
};

/// The root of the checkout that contains the current directory.
std::optional<fs::path> source_root() {
  std::error_code error;
  for (fs::path folder = fs::current_path(error); !error; folder = folder.parent_path()) {
    if (fs::is_directory(folder / "fixtures" / "traces", error) &&
        fs::is_regular_file(folder / "reference" / "contract.md", error))
      return folder;
    error.clear();
    if (folder == folder.parent_path()) break;
  }
  return std::nullopt;
}

void print_summary(const cache_sim::Json& document, const std::string& page) {
  const cache_sim::Json& summary = document["summary"];
  const auto number = [&](const char* key) { return summary[key].get<std::int64_t>(); };
  note("{}, {}: {} as expected, {} not; {} planted defects found, as {} of finding\n",
       counted(number("traces"), "trace"), counted(number("runs"), "run"), number("as_expected"),
       number("not_as_expected"), number("defects_shown"), counted(number("kinds_shown"), "kind"));
  if (number("runs_with_numbers") > 0)
    note("{} more with the numbers of a model in the slots\n",
         counted(number("runs_with_numbers"), "run"));
  note("page  {}\n", page);
}

std::string command_of(const ReportWords& words) {
  std::string command = "./lockstep report";
  if (!words.fixtures.empty()) command += " --fixtures " + shell_quoted(words.fixtures);
  if (!words.fidelity.empty()) command += " --fidelity " + shell_quoted(words.fidelity);
  if (!words.model.empty()) command += " --model " + shell_quoted(words.model);
  if (words.allow_exec) command += " --allow-exec";
  return command;
}

int run_report(const ReportWords& words) {
  std::error_code error;
  if (!words.model.empty() && words.fidelity.empty())
    return refuse({"--model: of which numbers? name --fidelity, too"});
  const std::optional<fs::path> root = source_root();
  if (!root && (words.fixtures.empty() || words.out.empty()))
    return refuse(
        {"this is no checkout of Lockstep (no folder from here upward has fixtures/traces and "
         "reference/contract.md); "
         "name --fixtures and --out"});
  cache_sim::ReportOptions options;
  std::string out = words.out.empty() ? (*root / "reports" / "html").string()
                                      : fs::absolute(words.out, error).string();
  if (!words.fixtures.empty())
    options.fixtures = fs::absolute(words.fixtures, error).lexically_normal().string();
  // Run lines name files relative to the root of the checkout, so that a report is the same from
  // any directory of it.
  if (root) {
    const fs::path inside = fs::path(options.fixtures).lexically_relative(*root);
    if (!inside.empty() && *inside.begin() != "..") options.fixtures = inside.string();
    fs::current_path(*root, error);
    if (error)
      return refuse(
          {fmt::format("{}: the folder cannot be entered", root->string()), kExitEnvironment});
  }
  while (options.fixtures.size() > 1 && options.fixtures.back() == '/') options.fixtures.pop_back();
  options.fidelity = words.fidelity;
  options.model = words.model;
  options.read_run_line = run_line_reader(words.allow_exec);
  // Content about this project alone is left out of a report on a user's own traces.
  if (root && options.fixtures == "fixtures") {
    const Result<void> read = cache_sim::read_contents("fixtures/report.json", options);
    if (!read) return refuse(read.error());
    options.kernels = "reports/kernels";
    options.found = "reports/found";
  }
  options.version = LOCKSTEP_VERSION;
  options.date = cache_sim::today();
  options.command = command_of(words);
  Progress progress("report");
  std::int64_t runs = 0;
  options.progress = [&](const cache_sim::ReportProgress& done) {
    progress.say(fmt::format("{}, {}", counted(++runs, "run"), done.command));
    if (done.as_expected) return;
    print("✗ {}: {}\n", done.command, done.outcome);
    std::fflush(stdout);
  };
  const Result<cache_sim::Report> report = cache_sim::make_report(options, out);
  if (!report) return refuse(report.error());
  print_summary(report->document, fs::path(out).lexically_normal().string() + "/index.html");
  return report->status;
}

}  // namespace

void add_report(Command& app, int& status) {
  Command* const command =
      app.add_subcommand("report", "replay every fixture and write the page about it");
  const auto words = std::make_shared<ReportWords>();
  command->add_option(
      "--fixtures", words->fixtures,
      "the folder with traces/ and regressions/ (default: fixtures of the checkout)");
  add_fidelity(*command, words->fidelity);
  command->add_option("--model", words->model,
                      "with --fidelity: a model's name or the folder of a checkpoint (default: "
                      "each model that a run's policies can have)");
  add_allow_exec(*command, words->allow_exec);
  command->add_output("--out", words->out,
                      "the folder of the pages (default: reports/html of the checkout)");
  add_quiet(*command);
  std::vector<StatusHelp> statuses = statuses_of_runs();
  statuses.front().meaning = "every run ended as its trace says";
  end_help(*command, statuses, {"lockstep report --fixtures fixtures --out pages --allow-exec"});
  command->callback([words, &status] { status = run_report(*words); });
}

}  // namespace lockstep::program
