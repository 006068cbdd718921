// From a request to a report: runs the candidate, judges every case, and says what it found.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "kernels/judge/verdict.hpp"
#include "reference/base/parallel.hpp"

namespace lockstep::judging {
namespace {

using Json = nlohmann::ordered_json;

struct JudgedCase {
  const Case* which;
  const CaseRuns* runs;
  Judgement judgement;
};

Result<ElementType> type_from(const std::string& name) {
  for (const ElementType type : {ElementType::float32, ElementType::bf16, ElementType::fp16})
    if (name == name_of(type)) return type;
  return fail(fmt::format("--types `{}`: a type is float32, bfloat16 or float16", name));
}

Result<CaseOptions> options_of(const JudgedKernel& operation, const JudgeRequest& request) {
  CaseOptions options{.seed = request.seed};
  const std::string types = request.types.empty() ? operation.default_types : request.types;
  const std::size_t slash = types.find('/');
  const Result<ElementType> activations = type_from(types.substr(0, slash));
  const Result<ElementType> states =
      slash == std::string::npos ? activations : type_from(types.substr(slash + 1));
  if (!activations) return tl::unexpected(activations.error());
  if (!states) return tl::unexpected(states.error());
  options.activations = *activations;
  options.states = *states;
  options.batch = request.batch;
  return options;
}

/// The device where nothing was asked for. A GPU is looked for without CUDA: its runtime does not
/// survive the fork.
std::string usual_device(const JudgeRequest& request) {
  if (request.device != "auto") return request.device;
  return std::filesystem::exists("/dev/nvidia0") ? "cuda" : "cpu";
}

/// Mistakes that explain every wrong case, and no right one away: the candidate computes them
/// wherever they can be told apart.
void diagnose(const JudgedKernel& operation, std::vector<JudgedCase>& cases) {
  std::vector<JudgedCase*> done, wrong;
  for (JudgedCase& one : cases) {
    if (one.runs->outcome != Outcome::done) continue;
    done.push_back(&one);
    if (one.judgement.wrong()) wrong.push_back(&one);
  }
  // The timed cases are large, and say what the small ones have said.
  const bool small_ones = std::any_of(wrong.begin(), wrong.end(),
                                      [](const JudgedCase* one) { return !one->which->timed; });
  for (JudgedCase* const one : wrong) {
    if (small_ones && one->which->timed) continue;
    for (const Mistake& mistake : operation.mistakes)
      if (agrees(operation, *one->which, one->judgement.answer, mistake.id))
        one->judgement.agrees_with.emplace_back(mistake.id);
    if (operation.named_stages && !one->runs->stages.empty())
      one->judgement.stage = operation.named_stages(*one->which, one->runs->stages);
    if (operation.stages)
      one->judgement.stage =
          operation.stages(*one->which, one->judgement.answer, operation.truth(*one->which, ""));
  }
}

std::string sentence_of(const JudgedKernel& operation, const std::string& id) {
  for (const Mistake& mistake : operation.mistakes)
    if (mistake.id == id) return std::string(mistake.sentence);
  return "";
}

/// How many wrong cases each mistake explains, the best ones first.
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

// --- The report ----------------------------------------------------------------------------------

struct Report {
  const JudgedKernel& operation;
  const JudgeRequest& request;
  const CaseOptions& options;
  const CandidateRuns& runs;
  const std::vector<JudgedCase>& cases;
  double wall_s;
};

struct LocatedFinding {
  std::string where;
  Finding finding;
};

std::vector<LocatedFinding> findings_of(const Report& report) {
  std::vector<LocatedFinding> all;
  for (const JudgedCase& one : report.cases) {
    if (one.runs->outcome == Outcome::raised || one.runs->outcome == Outcome::died)
      all.push_back(
          {one.which->name, {FindingKind::subject_died, one.runs->message, "an answer", "none"}});
    if (one.runs->outcome == Outcome::silent)
      all.push_back(
          {one.which->name, {FindingKind::subject_silent, one.runs->message, "an answer", "none"}});
    for (const Finding& finding : one.judgement.findings) all.push_back({one.which->name, finding});
  }
  std::stable_sort(all.begin(), all.end(), [](const LocatedFinding& a, const LocatedFinding& b) {
    return a.finding.kind < b.finding.kind;
  });
  return all;
}

std::string status_word(const JudgedCase& one) {
  switch (one.runs->outcome) {
    case Outcome::unsupported: return "left out";
    case Outcome::raised: return "RAISED";
    case Outcome::died: return "DIED";
    case Outcome::silent: return "SILENT";
    case Outcome::done: break;
  }
  return one.judgement.findings.empty() ? "ok" : "WRONG";
}

double floor_us(const Report& report, const Case& c) {
  return report.runs.copy_gbps > 0 ? static_cast<double>(c.bytes) / report.runs.copy_gbps / 1e3 : 0;
}

std::string speed_text(const Report& report) {
  std::string text;
  for (const JudgedCase& one : report.cases) {
    if (one.runs->time_us <= 0) continue;
    const double floor = floor_us(report, *one.which);
    text += fmt::format(
        "{}: {:.2f} us; floor {:.2f} us ({} bytes at the copy rate of this run, "
        "{:.0f} GB/s), limit_share {:.3f}\n  {}, {}\n",
        one.which->name, one.runs->time_us, floor, one.which->bytes, report.runs.copy_gbps,
        floor / one.runs->time_us, one.which->about, one.runs->how);
  }
  if (!text.empty() && !report.runs.on_gpu)
    text +=
        "  The floor of a CPU is the copy rate of one thread's (or PyTorch's) memory copy: data "
        "that stays in caches, or more threads, can be faster.\n";
  return text;
}

/// "5.3e-08 of 8.1e-07" of a state or output.
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
    for (const Tensor& tensor : one.which->tensors)
      if (tensor.role != Role::input &&
          std::find(names.begin(), names.end(), tensor.name) == names.end())
        names.push_back(tensor.name);
  std::string text = fmt::format(
      "{} · {} · {} · activations {}, states {}\n", report.operation.name, report.request.candidate,
      report.runs.device, name_of(report.options.activations), name_of(report.options.states));
  text += fmt::format("{:<24}{:<10}", "case", "verdict");
  for (const std::string& name : names) text += fmt::format("{:<23} ", name + ": error/bound");
  while (text.back() == ' ') text.pop_back();
  text += '\n';
  for (const JudgedCase& one : report.cases) {
    text += fmt::format("{:<24}{:<10}", one.which->name, status_word(one));
    if (one.runs->outcome != Outcome::done)
      text += one.runs->message;
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
  constexpr int kShown = 3;  // of a kind
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
        return one.runs->outcome == Outcome::done && one.judgement.wrong();
      }));
}

std::string diagnosis_text(const Report& report) {
  std::string text;
  int examined = 0;
  for (const JudgedCase& one : report.cases)
    examined += one.runs->outcome == Outcome::done && one.judgement.wrong() && !one.which->timed;
  if (examined == 0) examined = wrong_cases(report);
  const auto all = explanations(report.operation, report.cases);
  for (const auto& [id, count] : all)
    if (count == all.front().second)
      text += fmt::format("it agrees with the definition {} ({} of {} wrong cases)\n",
                          sentence_of(report.operation, id), count, examined);
  if (all.empty() && examined > 0)
    text += "it agrees with none of the definition's known mistakes\n";
  const auto told =
      std::find_if(report.cases.begin(), report.cases.end(),
                   [](const JudgedCase& one) { return !one.judgement.stage.empty(); });
  if (told != report.cases.end())
    text += fmt::format("{}, {}\n", told->which->name, told->judgement.stage);
  return text;
}

Json case_json(const Report& report, const JudgedCase& one) {
  Json json{{"case", one.which->name}, {"about", one.which->about}, {"status", status_word(one)}};
  if (!one.runs->message.empty()) json["message"] = one.runs->message;
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

Json timing_json(const Report& report) {
  Json timing{{"device", report.runs.device}};
  if (report.runs.copy_gbps > 0) timing["copy_gbps"] = report.runs.copy_gbps;
  timing["speed"] = Json::array();
  for (const JudgedCase& one : report.cases) {
    if (one.runs->time_us <= 0) continue;
    const double floor = floor_us(report, *one.which);
    timing["speed"].push_back(
        {{"case", one.which->name},
         {"time_us", one.runs->time_us},
         {"bytes", one.which->bytes},
         {"gbps", static_cast<double>(one.which->bytes) / one.runs->time_us / 1e3},
         {"floor_us", floor},
         {"limit_share", floor / one.runs->time_us},
         {"how", one.runs->how}});
  }
  timing["wall_s"] = report.wall_s;
  timing["date"] = today();
  return timing;
}

Json report_json(const Report& report, const std::vector<LocatedFinding>& findings) {
  const char* const commit = std::getenv("LOCKSTEP_COMMIT");  // the script asks git for it
  Json json{{"lockstep", 1},
            {"command", "judge"},
            {"operation", report.operation.name},
            {"candidate", report.request.candidate},
            {"device", report.runs.on_gpu ? "cuda" : "cpu"},
            {"types",
             {{"activations", name_of(report.options.activations)},
              {"states", name_of(report.options.states)}}},
            {"seed", report.request.seed},
            {"commit", commit == nullptr ? "unknown" : commit},
            {"verdict", findings.empty() ? "pass" : "finding"}};
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
  json["timing"] = timing_json(report);
  return json;
}

JudgeReport finished(const Report& report) {
  const std::vector<LocatedFinding> findings = findings_of(report);
  JudgeReport made{.text = table(report)};
  made.text += findings_text(findings) + diagnosis_text(report) + speed_text(report);
  int judged = 0, left_out = 0;
  for (const JudgedCase& one : report.cases) {
    left_out += one.runs->outcome == Outcome::unsupported;
    judged += one.runs->outcome != Outcome::unsupported;
  }
  made.text += fmt::format("{} case{}{}: {}\n", judged, judged == 1 ? "" : "s",
                           left_out > 0 ? fmt::format(", {} left out", left_out) : "",
                           findings.empty() ? "nothing found"
                                            : fmt::format("{} finding{}", findings.size(),
                                                          findings.size() == 1 ? "" : "s"));
  made.json = report_json(report, findings).dump(1) + "\n";
  made.status = findings.empty() ? kExitPass : exit_status(findings.front().finding.kind);
  return made;
}

}  // namespace

Result<JudgeReport> judge_operation(const JudgedKernel& operation, const JudgeRequest& given) {
  const auto begin = std::chrono::steady_clock::now();
  JudgeRequest request = given;
  if (const std::size_t colon = request.candidate.find_last_of(':');
      colon == std::string::npos || colon == 0 || colon + 1 == request.candidate.size())
    return fail(
        fmt::format("--candidate `{}` is MODULE:FUNCTION, FILE.py:FUNCTION or LIB.so:SYMBOL",
                    request.candidate));
  request.device = usual_device(request);
  if (request.batch == 0) request.batch = request.device == "cuda" ? 64 : 4;
  const Result<CaseOptions> options = options_of(operation, request);
  if (!options) return tl::unexpected(options.error());
  std::vector<Case> cases;
  std::string names;
  for (const CasePlan& plan : operation.plans) {
    names += (names.empty() ? "" : ", ") + plan.name;
    if (plan.name.find(request.only) != std::string::npos) cases.push_back(plan.make(*options));
  }
  if (cases.empty())
    return fail(
        fmt::format("--case `{}`: the cases of {} are {}", request.only, operation.name, names));
  const Result<CandidateRuns> runs = run_candidate(operation, cases, request);
  if (!runs) return tl::unexpected(runs.error());
  std::vector<JudgedCase> judged;
  for (std::size_t i = 0; i < cases.size(); ++i) judged.push_back({&cases[i], &runs->cases[i], {}});
  in_parallel(judged, [&](JudgedCase& one) {
    if (one.runs->outcome == Outcome::done)
      one.judgement = judgement_of(operation, *one.which, *one.runs);
  });
  if (std::all_of(judged.begin(), judged.end(),
                  [](const JudgedCase& one) { return one.runs->outcome == Outcome::unsupported; }))
    return fail(
        fmt::format("{} supports none of the cases, so nothing was judged; of {} it says: {}",
                    request.candidate, cases[0].name, runs->cases[0].message));
  diagnose(operation, judged);
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  return finished({operation, request, *options, *runs, judged, wall.count()});
}

}  // namespace lockstep::judging
