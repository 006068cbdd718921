#include "kernels/judge/report.hpp"
#include "reference/base/counted.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>

namespace lockstep::judging {
namespace {

using Json = nlohmann::ordered_json;

std::string sentence_of(const JudgedKernel& operation, const std::string& id) {
  for (const Mistake& mistake : operation.mistakes)
    if (mistake.id == id) return std::string(mistake.sentence);
  return "";
}

/// The number of wrong cases that each mistake explains, largest first.
std::vector<std::pair<std::string, int>> explanations(const JudgedKernel& operation,
                                                      const std::vector<JudgedCase>& cases) {
  std::vector<std::pair<std::string, int>> all;
  for (const Mistake& mistake : operation.mistakes) {
    int count = 0;
    for (const JudgedCase& one : cases)
      count += static_cast<int>(std::count(one.judgement.agrees_with.begin(),
                                           one.judgement.agrees_with.end(), mistake.id));
    if (count > 0) all.emplace_back(mistake.id, count);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  return all;
}

struct LocatedFinding {
  std::string where;
  Finding finding;
};

void add_findings(std::vector<LocatedFinding>& all, const std::string& where,
                  const JudgedCase& one) {
  if (const auto kind = kind_of(one.runs.outcome))
    all.push_back({where, {*kind, one.runs.message, "an answer", "none"}});
  for (const Finding& finding : one.judgement.findings) all.push_back({where, finding});
}

constexpr double kShareMost = 1.1;  // share of a rate beyond which noise is no explanation

/// The factor by which a call would have moved its bytes faster than the machine can move any; 0 if
/// the time is possible.
double beyond_most(const Machine& machine, const Case& c, const TimedRuns& calls) {
  if (calls.us <= 0 || machine.most_gbps <= 0) return 0;
  const double times = static_cast<double>(c.bytes) / calls.us / 1e3 / machine.most_gbps;
  return times > kShareMost ? times : 0;
}

std::vector<LocatedFinding> findings_of(const Report& report) {
  std::vector<LocatedFinding> all;
  for (const JudgedCase& one : report.cases) add_findings(all, one.which.name, one);
  for (const TimedCase& timed : report.timed) {
    const std::string& name = report.cases[timed.first].which.name;
    add_findings(all, name + (timed.fewer_rows ? " with fewer rows" : " with other numbers"),
                 timed.twin);
    const std::string_view when =
        timed.fewer_rows ? "while it was called again: " : "while it was timed: ";
    if (const auto kind = kind_of(timed.calls.outcome))
      all.push_back({name, {*kind, std::string(when) + timed.calls.message, "an answer", "none"}});
    for (const Finding& finding : timed.findings) all.push_back({name, finding});
    const Case& c = report.cases[timed.first].which;
    if (const double times = beyond_most(report.machine, c, timed.calls); times > 0)
      all.push_back({name,
                     {FindingKind::answer_differs,
                      fmt::format("{:.2f} us for {} bytes is {:.1f} times as fast as this machine "
                                  "moves any: the work is not done inside the clock",
                                  timed.calls.us, c.bytes, times),
                      fmt::format("at most {:.0f} GB/s", report.machine.most_gbps),
                      fmt::format("{:.0f} GB/s", report.machine.most_gbps * times)}});
  }
  for (const BatchedCase& one : report.batched)
    for (const Finding& finding : one.batches.findings)
      all.push_back({report.cases[one.first].which.name, finding});
  std::stable_sort(all.begin(), all.end(), [](const LocatedFinding& a, const LocatedFinding& b) {
    return a.finding.kind < b.finding.kind;
  });
  return all;
}

std::string status_word(const JudgedCase& one) {
  switch (one.runs.outcome) {
    case Outcome::unsupported: return "left out";
    case Outcome::raised: return "RAISED";
    case Outcome::died: return "DIED";
    case Outcome::silent: return "SILENT";
    case Outcome::garbled: return "GARBLED";
    case Outcome::not_run: return "not run";
    case Outcome::done: break;
  }
  return one.judgement.findings.empty() ? "ok" : "WRONG";
}

/// The time of a timed case beside its floor: the bytes that must move, at the copy rate of this
/// run.
struct Speed {
  const JudgedCase& one;
  const TimedRuns& calls;
  double floor_us;
  std::string doubt;  ///< a reason to doubt the time; empty if there is none

  double share() const { return floor_us / calls.us; }
};

std::vector<Speed> speeds_of(const Report& report) {
  std::vector<Speed> all;
  for (const TimedCase& timed : report.timed) {
    if (timed.calls.us <= 0) continue;
    const JudgedCase& one = report.cases[timed.first];
    const double rate = report.machine.copy_gbps;
    const double floor = rate > 0 ? static_cast<double>(one.which.bytes) / rate / 1e3 : 0;
    all.push_back({one, timed.calls, floor, ""});
    Speed& speed = all.back();
    if (timed.calls.wrong > 0)
      speed.doubt = "results of timed calls are wrong, so the time says nothing";
    else if (timed.calls.reported_us > 0)
      speed.doubt = fmt::format(
          "the candidate's process reports {:.2f} us, and the judge's own "
          "clock says otherwise",
          timed.calls.reported_us);
    else if (speed.share() > kShareMost)
      speed.doubt = report.machine.on_gpu
                        ? "faster than this device moves bytes: something is not done, or kept"
                        : "faster than one thread copies: several threads or a cache can be";
  }
  return all;
}

std::string speed_text(const Report& report) {
  std::string text;
  const std::vector<Speed> speeds = speeds_of(report);
  for (const Speed& speed : speeds) {
    const Case& c = speed.one.which;
    text += fmt::format(
        "{}: {:.2f} us; floor {:.2f} us ({} bytes at the copy rate of this run, "
        "{:.0f} GB/s), limit_share {:.3f}\n  {}, {}, results of {} calls compared\n",
        c.name, speed.calls.us, speed.floor_us, c.bytes, report.machine.copy_gbps, speed.share(),
        c.about, speed.calls.how, speed.calls.compared);
    if (!speed.doubt.empty()) text += "  LOOK TWICE: " + speed.doubt + "\n";
  }
  if (!speeds.empty() && !report.machine.on_gpu)
    text +=
        "  The floor of a CPU is the copy rate of one thread: data that stays in caches, or more "
        "threads, can be faster.\n";
  return text;
}

/// Error and bound of a state or output, as "5.3e-08 of 8.1e-07".
std::string measured_text(const Judgement& judgement, const std::string& name) {
  for (const Measured& one : judgement.measured)
    if (one.name == name)
      return fmt::format("{:.1e} of {:.1e}{}", one.verdict.error, one.verdict.bound,
                         one.verdict.pass ? "" : " !");
  return "";
}

std::string table(const Report& report) {
  std::vector<std::string> names;
  for (const JudgedCase& one : report.cases)
    for (const Tensor& tensor : one.which.tensors)
      if (tensor.role != Role::input &&
          std::find(names.begin(), names.end(), tensor.name) == names.end())
        names.push_back(tensor.name);
  std::string text = fmt::format(
      "{} · {} · {} · activations {}, states {}\n", report.operation.name, report.request.candidate,
      report.machine.device, name_of(report.options.activations), name_of(report.options.states));
  std::size_t width = 22;
  for (const JudgedCase& one : report.cases) width = std::max(width, one.which.name.size());
  text += fmt::format("{:<{}}  {:<10}", "case", width, "verdict");
  for (const std::string& name : names) text += fmt::format("{:<23} ", name + ": error/bound");
  while (text.back() == ' ') text.pop_back();
  text += '\n';
  for (const JudgedCase& one : report.cases) {
    text += fmt::format("{:<{}}  {:<10}", one.which.name, width, status_word(one));
    if (one.runs.outcome != Outcome::done)
      text += one.runs.message;
    else
      for (const std::string& name : names)
        text += fmt::format("{:<24}", measured_text(one.judgement, name));
    while (text.back() == ' ') text.pop_back();
    text += '\n';
  }
  return text;
}

std::string findings_text(const std::vector<LocatedFinding>& findings) {
  std::string text;
  constexpr int kShown = 3;  // findings that are printed per kind
  std::map<FindingKind, int> seen;
  for (const LocatedFinding& one : findings) {
    const int count = ++seen[one.finding.kind];
    if (count > kShown) continue;
    std::string said = one.finding.text;
    if (const std::size_t worst = said.find("; worst at "); worst != std::string::npos)
      said.replace(worst, 2, "\n  ");
    text += fmt::format("{}: {}: {}\n", one.where, to_string(one.finding.kind), said);
  }
  for (const auto& [kind, count] : seen)
    if (count > kShown)
      text += fmt::format("… and {} more of {} (--json has them all)\n", count - kShown,
                          to_string(kind));
  return text;
}

int wrong_cases(const Report& report) {
  return static_cast<int>(
      std::count_if(report.cases.begin(), report.cases.end(), [](const JudgedCase& one) {
        return one.runs.outcome == Outcome::done && one.judgement.wrong();
      }));
}

std::string diagnosis_text(const Report& report) {
  std::string text;
  int examined = 0;
  for (const JudgedCase& one : report.cases)
    examined += one.runs.outcome == Outcome::done && one.judgement.wrong() && !one.which.timed;
  if (examined == 0) examined = wrong_cases(report);
  const auto all = explanations(report.operation, report.cases);
  for (const auto& [id, count] : all)
    if (count == all.front().second)
      text +=
          fmt::format("it agrees with the definition {} ({} of {})\n",
                      sentence_of(report.operation, id), count, counted(examined, "wrong case"));
  if (all.empty() && examined > 0)
    text += fmt::format("no known mistake explains {}\n", counted(examined, "wrong case"));
  const auto told =
      std::find_if(report.cases.begin(), report.cases.end(),
                   [](const JudgedCase& one) { return !one.judgement.stage.empty(); });
  if (told != report.cases.end())
    text += fmt::format("{}, {}\n", told->which.name, told->judgement.stage);
  return text;
}

Json case_json(const Report& report, const JudgedCase& one) {
  Json json{{"case", one.which.name}, {"about", one.which.about}, {"status", status_word(one)}};
  if (!one.runs.message.empty()) json["message"] = one.runs.message;
  json["results"] = Json::array();
  for (const Measured& measured : one.judgement.measured) {
    Json result{{"name", measured.name},
                {"pass", measured.verdict.pass},
                {"error", measured.verdict.error},
                {"yardstick", measured.verdict.bound},
                {"worst", measured.verdict.text}};
    if (!measured.where.empty()) result["where"] = measured.where;
    json["results"].push_back(result);
  }
  if (!one.judgement.agrees_with.empty()) {
    json["agrees_with"] = Json::array();
    for (const std::string& id : one.judgement.agrees_with)
      json["agrees_with"].push_back({{"mistake", id}, {"text", sentence_of(report.operation, id)}});
  }
  if (!one.judgement.stage.empty()) json["stage"] = one.judgement.stage;
  return json;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

/// Batches in which rows of the cases were compared.
std::int64_t batches_compared(const Report& report) {
  std::int64_t count = 0;
  for (const BatchedCase& one : report.batched) count += one.batches.batches;
  return count;
}

Json timing_json(const Report& report) {
  Json timing{{"device", report.machine.device}};
  if (report.machine.copy_gbps > 0) timing["copy_gbps"] = report.machine.copy_gbps;
  timing["speed"] = Json::array();
  for (const Speed& speed : speeds_of(report)) {
    const Case& c = speed.one.which;
    timing["speed"].push_back({{"case", c.name},
                               {"time_us", speed.calls.us},
                               {"bytes", c.bytes},
                               {"gbps", static_cast<double>(c.bytes) / speed.calls.us / 1e3},
                               {"floor_us", speed.floor_us},
                               {"limit_share", speed.share()},
                               {"how", speed.calls.how},
                               {"calls_compared", speed.calls.compared},
                               {"calls_wrong", speed.calls.wrong}});
    if (!speed.doubt.empty()) timing["speed"].back()["doubt"] = speed.doubt;
  }
  timing["wall_s"] = report.wall_s;
  timing["date"] = today();
  return timing;
}

Json report_json(const Report& report, const std::vector<LocatedFinding>& findings,
                 std::string_view verdict) {
  const char* const commit = std::getenv("LOCKSTEP_COMMIT");  // set by the script from git
  Json json{{"lockstep", 1},
            {"command", "judge"},
            {"operation", report.operation.name},
            {"candidate", report.request.candidate},
            {"device", report.machine.on_gpu ? "cuda" : "cpu"},
            {"types",
             {{"activations", name_of(report.options.activations)},
              {"states", name_of(report.options.states)}}},
            {"seed", report.request.seed},
            {"commit", commit == nullptr ? "unknown" : commit},
            {"verdict", verdict}};
  json["findings"] = Json::array();
  for (const LocatedFinding& one : findings)
    json["findings"].push_back({{"kind", to_string(one.finding.kind)},
                                {"case", one.where},
                                {"expected", one.finding.expected},
                                {"actual", one.finding.actual},
                                {"text", one.finding.text}});
  json["agrees_with"] = Json::array();
  for (const auto& [id, count] : explanations(report.operation, report.cases))
    json["agrees_with"].push_back(
        {{"mistake", id}, {"text", sentence_of(report.operation, id)}, {"cases", count}});
  json["cases"] = Json::array();
  for (const JudgedCase& one : report.cases) json["cases"].push_back(case_json(report, one));
  if (report.request.batch_invariant) json["batches_compared"] = batches_compared(report);
  json["timing"] = timing_json(report);
  return json;
}

}  // namespace

JudgeReport finished(const Report& report) {
  const std::vector<LocatedFinding> findings = findings_of(report);
  JudgeReport made{.text = table(report)};
  made.text += findings_text(findings) + diagnosis_text(report) + speed_text(report);
  std::size_t judged = 0;
  for (const JudgedCase& one : report.cases)
    judged += one.runs.outcome != Outcome::unsupported && one.runs.outcome != Outcome::not_run;
  const std::size_t left_out = report.cases.size() - judged;
  std::string said = "nothing found";
  std::string_view verdict = "pass";
  if (!findings.empty()) {
    said = counted(findings.size(), "finding"), verdict = "finding";
    made.status = exit_status(findings.front().finding.kind);
  } else if (judged == 0) {
    said = "no verdict, because it takes no case", verdict = "unjudged";
    made.status = kExitBadInput;
  } else if (2 * judged < report.cases.size()) {
    said = fmt::format(
        "nothing found where it is defined, which is fewer than half of the cases "
        "(exit status {}; --case chooses cases)",
        static_cast<int>(kExitPartial));
    verdict = "partial", made.status = kExitPartial;
  }
  if (report.request.batch_invariant)
    made.text += fmt::format("rows were compared in {}\n",
                             counted(batches_compared(report), "batch", "batches"));
  made.text += fmt::format("{}{}: {}\n", counted(judged, "case"),
                           left_out > 0 ? fmt::format(", {} left out", left_out) : "", said);
  // Paths and messages of a candidate may contain bytes that are not UTF-8.
  made.json =
      report_json(report, findings, verdict).dump(1, ' ', false, Json::error_handler_t::replace) +
      "\n";
  return made;
}

}  // namespace lockstep::judging
