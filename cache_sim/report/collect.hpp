// Everything that a report says, collected into one JSON document: each fixture's runs held to what
// the file promises, a workload under the policies that were recorded elsewhere, and comparisons of
// policies. The page (cache_sim/report/page.hpp) and the JUnit file (cache_sim/report/junit.hpp)
// are made from the document alone, so that no figure of theirs can be another than the document's.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"
#include "cache_sim/report/comparison.hpp"

namespace lockstep::cache_sim {

/// What a `# run:` line asks for, from its words after `lockstep`: the program's own parser of
/// `lockstep replay`.
using ReadRunLine =
    std::function<Result<std::vector<ReplayRequest>>(const std::vector<std::string>& words)>;

/// One finished run, for progress messages.
struct ReportProgress {
  std::string command;
  std::string outcome;  ///< what it ended with, in a few words
  bool as_expected = true;
};

struct ReportOptions {
  std::string fixtures =
      "fixtures";  ///< holds traces/ and, where there are any, regressions/; shown as it is given
  std::string workload{};                     ///< its name; empty: none
  std::vector<std::string> policies{};        ///< of the workload, each beside its oracle
  std::vector<ComparisonPlan> comparisons{};  ///< hit ratio against capacity
  std::string kernels{};                      ///< the folder of their evidence; empty: none
  std::string found{};    ///< the folder of the pages about servers' bugs; empty: none
  std::string version{};  ///< of the program
  std::string date{};     ///< the day on which the report is made; empty: it names none
  std::string command{};  ///< that makes the report
  ReadRunLine read_run_line;
  std::function<void(const ReportProgress&)> progress{};
};

/// The workload, its policies and the comparisons that a JSON file names (fixtures/report.json).
/// Errors name file and field.
Result<void> read_contents(const std::string& path, ReportOptions& options);

/// The Chrome trace of one run.
struct TimelineFile {
  std::string path;  ///< below the folder of the report
  Json timeline;
};

// NOLINTNEXTLINE(bugprone-exception-escape): moving a Json object throws nothing.
struct Report {
  Json document;
  std::vector<TimelineFile> timelines;
  /// 0 where every run ended as its file promises. Else the first one that did not decides: by what
  /// it found, or with 11 where it found nothing and should have.
  ExitStatus status = kExitPass;
};

/// Runs everything and writes nothing. The error is the first bad input.
Result<Report> collect_report(const ReportOptions& options);

/// Writes report.json, junit.xml, timelines/, the pages and, last of all, index.html. Each file is
/// whole or not there.
Result<void> write_report(const Report& report, const std::string& folder);

/// Collects, then writes: where an input is bad, the folder stays as it is.
Result<Report> make_report(const ReportOptions& options, const std::string& folder);

}  // namespace lockstep::cache_sim
