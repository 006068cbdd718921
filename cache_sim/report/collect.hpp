// Collects the content of a report in one JSON document: the runs of each fixture with their
// expected findings, a workload under policies whose decisions were recorded elsewhere, and
// comparisons of policies. The pages (cache_sim/report/page.hpp) and the JUnit file
// (cache_sim/report/junit.hpp) are made from the document alone, so their figures are those of the
// document.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"
#include "cache_sim/report/comparison.hpp"

namespace lockstep::cache_sim {

/// A finished run, for progress messages.
struct ReportProgress {
  std::string command;
  std::string outcome;  ///< the finding or result in a few words
  bool as_expected = true;
};

struct ReportOptions {
  std::string fixtures =
      "fixtures";  ///< has the folder traces/, and perhaps regressions/; shown as it is given
  /// Runs whose policies can have it are played at this fidelity, too, with every model that fits;
  /// empty: at the fidelity that they say
  std::string fidelity{};
  std::string model{};  ///< with a fidelity: this one instead of every model that fits; a preset or
                        ///< the folder of a checkpoint
  std::string workload{};                     ///< the name of a workload; empty: none
  std::vector<std::string> policies{};        ///< policies for the workload, each beside its oracle
  std::vector<ComparisonPlan> comparisons{};  ///< comparisons of hit ratio against capacity
  std::string kernels{};                      ///< the folder of the kernels' evidence; empty: none
  std::string found{};    ///< the folder of pages about servers' bugs; empty: none
  std::string version{};  ///< the program's version
  std::string date{};     ///< the date of the report; empty: not shown
  std::string command{};  ///< the command that makes the report
  ReadRunLine read_run_line;
  std::function<void(const ReportProgress&)> progress{};
};

/// Reads the workload, its policies and the comparisons from a JSON file (fixtures/report.json).
/// Errors name the file and the field.
Result<void> read_contents(const std::string& path, ReportOptions& options);

/// The Chrome trace of one run.
struct TimelineFile {
  std::string path;  ///< relative to the folder of the report
  Json timeline;
};

// NOLINTNEXTLINE(bugprone-exception-escape): moving a Json object throws nothing.
struct Report {
  Json document;
  std::vector<TimelineFile> timelines;
  /// 0 if every run ended as its file says. Otherwise the first run that did not decides: the
  /// status of its finding, or 11 if it found nothing and should have.
  ExitStatus status = kExitPass;
};

/// Makes all runs and writes nothing. The error is the first bad input.
Result<Report> collect_report(const ReportOptions& options);

/// Writes report.json, junit.xml, timelines/, the pages and, last, index.html. No file is ever
/// half-written.
Result<void> write_report(const Report& report, const std::string& folder);

/// Collects, then writes. On bad input the folder is unchanged.
Result<Report> make_report(const ReportOptions& options, const std::string& folder);

}  // namespace lockstep::cache_sim
