#include "cache_sim/report/collect.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "cache_sim/base/files.hpp"
#include "cache_sim/base/json_documents.hpp"
#include "cache_sim/base/settings.hpp"
#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/replay/timeline.hpp"
#include "cache_sim/report/junit.hpp"
#include "cache_sim/report/kernels.hpp"
#include "cache_sim/report/page.hpp"
#include "cache_sim/report/recorded.hpp"
#include "cache_sim/report/run_document.hpp"
#include "reference/base/shell_words.hpp"

namespace lockstep::cache_sim {
namespace {

namespace fs = std::filesystem;

struct Fixture {
  std::string folder;  ///< `traces` or `regressions`
  std::string stem;
  std::string file;
  Trace trace{};
};

// --- Reading -------------------------------------------------------------------------------------

Result<std::vector<std::string>> trace_files(const std::string& folder, bool needed) {
  std::vector<std::string> files;
  std::error_code error;
  if (!needed && !fs::exists(folder, error)) return files;
  fs::directory_iterator entries(folder, error);
  if (error) return fail(fmt::format("{}: the folder cannot be read", folder));
  for (const fs::directory_entry& entry : entries)
    if (entry.path().extension() == ".trace") files.push_back(entry.path().filename().string());
  std::ranges::sort(files);
  if (needed && files.empty()) return fail(fmt::format("{}: no .trace file is there", folder));
  return files;
}

/// Reads every file before the first one runs.
Result<std::vector<Fixture>> read_fixtures(const std::string& folder) {
  std::vector<Fixture> fixtures;
  for (const std::string kind : {"traces", "regressions"}) {
    const std::string place = fmt::format("{}/{}", folder, kind);
    Result<std::vector<std::string>> files = trace_files(place, kind == "traces");
    if (!files) return tl::unexpected(files.error());
    for (const std::string& name : *files) {
      Fixture fixture{.folder = kind,
                      .stem = fs::path(name).stem().string(),
                      .file = fmt::format("{}/{}", place, name)};
      Result<Trace> trace = read_trace(fixture.file);
      if (!trace) return tl::unexpected(trace.error());
      fixture.trace = std::move(*trace);
      if (fixture.trace.runs.empty())
        fixture.trace.runs.push_back({0, "lockstep replay %s", std::nullopt});
      fixtures.push_back(std::move(fixture));
    }
  }
  return fixtures;
}

Result<ComparisonPlan> read_plan(const Record& record) {
  std::array<std::string, 5> texts;
  std::size_t i = 0;
  for (const char* const field : {"title", "about", "workload", "policies", "capacities"}) {
    Result<std::string> text = record.text(field);
    if (!text) return tl::unexpected(text.error());
    texts[i++] = *std::move(text);
  }
  const auto capacities = parse_capacities(texts[4]);
  if (!capacities) return record.error("capacities", capacities.error().text);
  ComparisonPlan plan{
      .title = texts[0],
      .about = texts[1],
      .request = {
          .workload = texts[2], .policies = parse_policies(texts[3]), .capacities = *capacities}};
  if (!record.has("hosts")) return plan;
  const Result<std::string> text = record.text("hosts");
  if (!text) return tl::unexpected(text.error());
  const auto hosts = parse_hosts(*text);
  if (!hosts) return record.error("hosts", hosts.error().text);
  plan.request.hosts = *hosts;
  return plan;
}

/// A line of Markdown without its backticks and the addresses of its links.
std::string plain(std::string line) {
  std::erase(line, '`');
  for (std::size_t at = line.find("]("); at != line.npos; at = line.find("](", at)) {
    line.erase(at, std::min(line.find(')', at), line.size() - 1) + 1 - at);
    if (const std::size_t open = line.rfind('[', at); open != line.npos) line.erase(open, 1);
  }
  return line;
}

/// The pages about bugs of servers: their headings, and their first paragraphs, which say whom the
/// bug affects and whether it was reported.
Result<Json> found_bugs(const std::string& folder) {
  Json bugs = Json::array();
  std::error_code error;
  if (folder.empty() || !fs::is_directory(folder, error)) return bugs;
  std::vector<std::string> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
    if (entry.path().extension() == ".md" && entry.path().filename() != "README.md")
      files.push_back(folder + "/" + entry.path().filename().string());
  std::ranges::sort(files);
  for (const std::string& file : files) {
    std::ifstream in(file);
    std::string title, status;
    std::getline(in, title);
    while (status.empty() && std::getline(in, status)) continue;
    for (std::string more; std::getline(in, more) && !more.empty();) status += " " + more;
    if (!title.starts_with("# ") || !status.starts_with("**Status.** "))
      return fail(file + ":3: the first paragraph begins with **Status.**, below a heading");
    bugs.push_back({{"file", file},
                    {"title", plain(title.substr(2))},
                    {"status", plain(status.substr(std::string_view("**Status.** ").size()))}});
  }
  return bugs;
}

/// A `# run:` line of a file, parsed.
struct PlannedRun {
  std::string command;
  ReplayRequest request{};
};

Result<PlannedRun> plan(const Fixture& fixture, const RunDirective& directive,
                        const ReadRunLine& read_run_line) {
  auto requests = requests_of(directive, fixture.file, read_run_line);
  if (!requests) return tl::unexpected(requests.error());
  if (requests->size() != 1)
    return fail(fmt::format("{}:{}: a # run: line replays one file", fixture.file, directive.line));
  PlannedRun planned{.command = "lockstep", .request = std::move(requests->front())};
  for (const std::string& word : directive_words(directive, fixture.file))
    planned.command += " " + shell_quoted(word);
  planned.request.keep_events = true;
  return planned;
}

// --- Collecting ----------------------------------------------------------------------------------

class Collector {
 public:
  explicit Collector(const ReportOptions& options) : options_(options) {}

  Result<Report> collect() {
    if (!options_.fidelity.empty()) {
      Config config;
      config.put(kFidelityField, options_.fidelity);
      const Result<void> known =
          check_fidelity(*Registry<PolicyEntry>::find(default_policy()), config);
      if (!known) return fail("--fidelity: " + known.error().text);
    }
    Result<std::vector<Fixture>> fixtures = read_fixtures(options_.fixtures);
    if (!fixtures) return tl::unexpected(fixtures.error());
    Json traces = Json::array();
    for (const Fixture& fixture : *fixtures) {
      Result<Json> trace = run_fixture(fixture);
      if (!trace) return tl::unexpected(trace.error());
      traces.push_back(std::move(*trace));
    }
    Json workloads = Json::array();
    if (!options_.workload.empty()) {
      Result<Json> workload = run_workload();
      if (!workload) return tl::unexpected(workload.error());
      workloads.push_back(std::move(*workload));
    }
    for (const ComparisonPlan& plan : options_.comparisons) {
      Result<Json> comparison = comparison_of(plan);
      if (!comparison) return tl::unexpected(comparison.error());
      comparisons_.push_back(std::move(*comparison));
    }
    Result<Json> kernels = kernels_of(options_.kernels);
    if (!kernels) return tl::unexpected(kernels.error());
    kernels_ = std::move(*kernels);
    Result<Json> bugs = found_bugs(options_.found);
    if (!bugs) return tl::unexpected(bugs.error());
    found_bugs_ = std::move(*bugs);
    if (!options_.model.empty() && numbered_count_ == 0)
      return fail(fmt::format("--model {}: no run can have it{}", options_.model, why_no_model_));
    finish(std::move(traces), std::move(workloads));
    return std::move(report_);
  }

 private:
  Result<Json> run_fixture(const Fixture& fixture) {
    Json json = trace_json(fixture.file, fixture.folder, fixture.trace);
    const std::string prefix = fixture.folder == "traces" ? "" : fixture.folder + "-";
    json["page"] = fmt::format("traces/{}{}.html", prefix, fixture.stem);
    (fixture.folder == "traces" ? trace_count_ : regression_count_)++;
    for (const RunDirective& directive : fixture.trace.runs) {
      const Result<PlannedRun> planned = plan(fixture, directive, options_.read_run_line);
      if (!planned) return tl::unexpected(planned.error());
      const Result<ReplayOutcome> outcome = replay(planned->request);
      if (!outcome) return tl::unexpected(outcome.error());
      Result<Json> numbered = run_numbered(*planned, *outcome, directive.finds);
      if (!numbered) return tl::unexpected(numbered.error());
      Json run = numbered->is_null()
                     ? shown_run_json(planned->command, planned->request, *outcome, directive.finds)
                     : *std::move(numbered);
      run["line"] = directive.line;
      run["timeline"] =
          fmt::format("timelines/{}{}-{}.json", prefix, fixture.stem, json["runs"].size() + 1);
      report_.timelines.push_back({run["timeline"], timeline_json(*outcome)});
      settle(run, *outcome);
      json["runs"].push_back(std::move(run));
    }
    return json;
  }

  /// The run once more with numbers, under each model that all its policies can have. What is shown
  /// is the first one that is not as expected, or else the first; null where there is none.
  Result<Json> run_numbered(const PlannedRun& planned, const ReplayOutcome& labels,
                            std::optional<FindingKind> finds) {
    Json shown;
    if (options_.fidelity.empty()) return shown;
    for (const std::string& model : models_of_run(labels)) {
      PlannedRun numbered = planned;
      ReplayRequest& request = numbered.request;
      request.fidelity = options_.fidelity;
      request.config = joined_settings({fmt::format("{}={}", kModelField, model), request.config});
      const Result<ReplayOutcome> outcome = replay(request);
      if (!outcome) return tl::unexpected(outcome.error());
      ++numbered_count_;
      if (!shown.is_null() && found_by(*outcome) == finds) continue;
      shown = shown_run_json(replay_command(request).substr(2), request, *outcome, finds);
      if (!shown["as_expected"]) break;
    }
    return shown;
  }

  /// The models with which a policy is played.
  std::vector<std::string> models_for(const PolicyEntry& policy, Config config) {
    if (options_.model.empty()) return models_of(policy, std::move(config), options_.fidelity);
    config.put(kFidelityField, options_.fidelity);
    config.put(kModelField, options_.model);
    const Result<void> fits = check_fidelity(policy, config);
    if (fits) return {options_.model};
    if (why_no_model_.empty()) why_no_model_ = "; of the first: " + fits.error().text;
    return {};
  }

  std::vector<std::string> models_of_run(const ReplayOutcome& labels) {
    std::vector<std::string> all;
    bool is_first = true;
    for (std::size_t i = 0; i < labels.run->subject_count(); ++i) {
      const PolicyEntry* const policy = Registry<PolicyEntry>::find(labels.run->subject_name(i));
      if (policy == nullptr) continue;  // an oracle, or a child
      const std::vector<std::string> own = models_for(*policy, labels.run->options().config);
      if (std::exchange(is_first, false))
        all = own;
      else
        std::erase_if(all, [&](const std::string& model) {
          return std::ranges::find(own, model) == own.end();
        });
    }
    return all;
  }

  Result<Json> run_workload() {
    Json json = {{"workload", options_.workload}, {"runs", Json::array()}};
    const auto recorded = recorded_decisions(
        options_.fixtures + "/workloads/recorded_decisions.json", options_.workload);
    if (!recorded) return tl::unexpected(recorded.error());
    for (const std::string& policy : options_.policies) {
      PlannedRun planned;
      planned.request.file = options_.workload;
      planned.request.subjects = {policy, "oracle:" + policy};
      planned.command = replay_command(planned.request).substr(2);  // without ./
      const Result<ReplayOutcome> outcome = replay(planned.request);
      if (!outcome) return tl::unexpected(outcome.error());
      Json run = verdict_json(planned.command, planned.request, *outcome, std::nullopt);
      run["policy"] = policy;
      run["run"] = run_json(planned.request, *outcome);
      run["request_count"] = outcome->run->outcomes().size();
      run["run"].erase("requests");
      check_against(*recorded, policy, run);
      settle(run, *outcome);
      json["runs"].push_back(std::move(run));
    }
    return json;
  }

  /// A run is not as expected if its decisions differ from those recorded of the server's own
  /// cache.
  static void check_against(const std::vector<RecordedDecisions>& all, const std::string& policy,
                            Json& run) {
    const auto recorded = std::ranges::find(all, policy, &RecordedDecisions::policy);
    if (recorded == all.end()) return;
    run["recorded"] = {{"decision_digest", recorded->decision_digest},
                       {"hit_tokens", recorded->hit_tokens}};
    const std::string digest = run["run"]["decision_digest"];
    if (!run["as_expected"] || digest == recorded->decision_digest) return;
    run["as_expected"] = false;
    run["complaint"] = fmt::format("The decision digest is {} and was recorded as {}.", digest,
                                   recorded->decision_digest);
  }

  /// Counts a run. The first run that is not as expected decides the exit status.
  void settle(const Json& run, const ReplayOutcome& outcome) {
    const bool as_expected = run["as_expected"];
    ++run_count_;
    if (as_expected) ++as_expected_count_;
    event_count_ += outcome.run->event_count();
    request_count_ += static_cast<std::int64_t>(outcome.run->outcomes().size());
    if (const auto found = found_by(outcome); found && as_expected) {
      ++kinds_[*found];
      if (!run["defect"].is_null()) defects_.insert(run["defect"]["name"]);
    }
    if (!as_expected && report_.status == kExitPass)
      report_.status = outcome.status() == kExitPass ? kExitDiffers : outcome.status();
    if (report_.document.is_null()) report_.document["commit"] = run["run"]["commit"];
    if (options_.progress)
      options_.progress({run["command"],
                         as_expected ? "as expected: " + kind_text(found_by(outcome)) + " found"
                                     : run["complaint"].get<std::string>(),
                         as_expected});
  }

  void finish(Json traces, Json workloads) {
    Json kinds = Json::array();
    for (const auto& [kind, count] : kinds_)
      kinds.push_back({{"kind", to_string(kind)}, {"runs", count}});
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start_;
    Json document = {
        {"lockstep", 1}, {"command", "report"}, {"commit", report_.document["commit"]}};
    document["summary"] = {{"traces", trace_count_ + regression_count_},
                           {"regressions", regression_count_},
                           {"runs", run_count_},
                           {"runs_with_numbers", numbered_count_},
                           {"as_expected", as_expected_count_},
                           {"not_as_expected", run_count_ - as_expected_count_},
                           {"defects_shown", defects_.size()},
                           {"defects_known", Registry<DefectEntry>::all().size()},
                           {"kinds_shown", kinds_.size()},
                           {"events", event_count_},
                           {"requests", request_count_},
                           {"status", static_cast<int>(report_.status)}};
    document["defects_not_shown"] = Json::array();
    for (const DefectEntry& defect : Registry<DefectEntry>::all())
      if (!defects_.contains(std::string(defect.name)))
        document["defects_not_shown"].push_back(defect.name);
    document["kinds"] = std::move(kinds);
    document["traces"] = std::move(traces);
    document["workloads"] = std::move(workloads);
    document["comparisons"] = std::move(comparisons_);
    document["found_bugs"] = std::move(found_bugs_);
    document["version"] = options_.version;
    document["made_by"] = options_.command;
    document["date"] = options_.date;
    document["kernel_totals"] = kernel_totals(kernels_);
    document["kernels"] = std::move(kernels_);
    document["timing"] = {{"wall_s", wall.count()}};
    make_text(document);
    report_.document = std::move(document);
  }

  const ReportOptions& options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  Report report_;
  Json comparisons_ = Json::array(), kernels_ = Json::array(), found_bugs_ = Json::array();
  std::int64_t trace_count_ = 0, regression_count_ = 0, run_count_ = 0, as_expected_count_ = 0;
  std::int64_t numbered_count_ = 0;
  std::string why_no_model_;
  std::int64_t event_count_ = 0, request_count_ = 0;
  std::map<FindingKind, std::int64_t> kinds_;
  std::set<std::string> defects_;
};

}  // namespace

Result<void> read_contents(const std::string& path, ReportOptions& options) {
  const Result<std::unique_ptr<JsonDocuments>> documents = JsonDocuments::open(path);
  if (!documents) return tl::unexpected(documents.error());
  const Result<const nlohmann::json*> document = (*documents)->next();
  if (!document) return tl::unexpected(document.error());
  if (*document == nullptr) return fail(path + ": the file is empty");
  const Record file(**document, (*documents)->place());
  const Result<std::string> workload = file.text("workload"), policies = file.text("policies");
  const Result<std::vector<Record>> plans = file.objects("comparisons");
  if (!workload || !policies || !plans)
    return tl::unexpected(!workload   ? workload.error()
                          : !policies ? policies.error()
                                      : plans.error());
  options.workload = *workload;
  options.policies = parse_policies(*policies);
  for (const Record& record : *plans) {
    Result<ComparisonPlan> plan = read_plan(record);
    if (!plan) return tl::unexpected(plan.error());
    options.comparisons.push_back(*std::move(plan));
  }
  return {};
}

Result<Report> collect_report(const ReportOptions& options) {
  return Collector(options).collect();
}

Result<void> write_report(const Report& report, const std::string& folder) {
  std::error_code error;
  for (const char* const inner : {"/timelines", "/traces"})
    if (!error) fs::create_directories(folder + inner, error);
  if (error) return fail(fmt::format("{}: the folder cannot be made", folder), kExitEnvironment);
  constexpr auto kReplace = nlohmann::detail::error_handler_t::replace;
  for (const TimelineFile& file : report.timelines) {
    const std::string text = file.timeline.dump(-1, ' ', false, kReplace) + "\n";
    Result<void> written = write_file(fmt::format("{}/{}", folder, file.path), text);
    if (!written) return written;
  }
  return write_file(folder + "/report.json", report.document.dump(1) + "\n")
      .and_then([&] { return write_file(folder + "/junit.xml", report_junit(report.document)); })
      .and_then([&]() -> Result<void> {
        for (const Page& page : report_pages(report.document))
          if (Result<void> written = write_file(folder + "/" + page.path, page.markup); !written)
            return written;
        return {};
      });
}

Result<Report> make_report(const ReportOptions& options, const std::string& folder) {
  return collect_report(options).and_then([&](Report report) -> Result<Report> {
    if (const Result<void> written = write_report(report, folder); !written)
      return tl::unexpected(written.error());
    return report;
  });
}

}  // namespace lockstep::cache_sim
