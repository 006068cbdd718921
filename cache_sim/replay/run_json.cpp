#include "cache_sim/replay/run_json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cache_sim/base/files.hpp"
#include "reference/base/shell_words.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kMostOutcomes = 100'000;

std::string hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

std::string policy_of(const std::string& subject) {
  return subject.starts_with("oracle:") ? subject.substr(7) : subject;
}

Json totals_json(const SubjectTotals& totals) {
  return {{"input_tokens", totals.input_tokens},
          {"hit_tokens", totals.hit_tokens},
          {"hit_ratio", rounded_ratio(totals.hit_tokens, totals.input_tokens)}};
}

Json policy_json(const ReplaySession& run, std::size_t i) {
  const SubjectTotals& totals = run.totals(i);
  Json policy = {{"policy", policy_of(run.subject_name(i))},
                 {"capacity",
                  {{"kv_tokens", run.options().config.kv_tokens},
                   {"state_slots", run.options().config.state_slots}}}};
  policy.update(totals_json(totals));
  policy["evictions"] = {{"kv_tokens", totals.evicted_kv}, {"states", totals.evicted_states}};
  policy["preemptions"] = totals.preemptions;
  if (const auto content = run.snapshot(i))
    policy["states"] = content->states_total - content->states_free;
  return policy;
}

Json finding_json(const LocatedFinding& located, const ReplayRequest& request) {
  return {{"kind", to_string(located.finding.kind)},
          {"subject", located.subject},
          {"file", located.file},
          {"line", located.line},
          {"event", located.event},
          {"request", located.request},
          {"operation", located.operation},
          {"expected", located.finding.expected},
          {"actual", located.finding.actual},
          {"text", located.finding.text},
          {"around", located.around},
          {"trace", located.file},
          {"replay", replay_command(request)}};
}

Json requests_json(const ReplaySession& run) {
  Json requests = Json::array();
  for (const RequestOutcome& outcome : run.outcomes()) {
    Json one = {{"id", outcome.id.text()},
                {"prompt_tokens", outcome.prompt_tokens},
                {"cached_tokens", std::max<std::int64_t>(outcome.cached_tokens, 0)},
                {"output_tokens", outcome.output_tokens},
                {"finish", to_string(outcome.finish)}};
    if (outcome.first_token >= 0) one["ttft_ns"] = outcome.first_token - outcome.arrival;
    if (outcome.end >= 0) one["e2e_ns"] = outcome.end - outcome.arrival;
    requests.push_back(std::move(one));
  }
  return requests;
}

}  // namespace

double rounded_ratio(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0
                    : std::stod(fmt::format(
                          "{:.6f}", static_cast<double>(part) / static_cast<double>(whole)));
}

namespace {

std::string option_words(const ReplayRequest& request) {
  std::string words;
  for (const std::string& subject : request.subjects)
    words += " --subject " + shell_quoted(subject);
  if (!request.fidelity.empty()) words += " --fidelity " + shell_quoted(request.fidelity);
  if (!request.defect.empty()) words += " --defect " + shell_quoted(request.defect);
  if (!request.config.empty()) words += " --config " + shell_quoted(request.config);
  if (request.check != CheckLevel::all)
    words += request.check == CheckLevel::off ? " --check off" : " --check labels";
  return words;
}

}  // namespace

std::string replay_command(const ReplayRequest& request) {
  return "./lockstep replay " + shell_quoted(request.file) + option_words(request);
}

std::string run_line(const ReplayRequest& request) {
  return "lockstep replay %s" + option_words(request);
}

Json run_json(const ReplayRequest& request, const ReplayOutcome& outcome) {
  const ReplaySession& run = *outcome.run;
  Json json = {{"lockstep", 1}, {"command", "replay"}};
  json["workload"] = {{"file", request.file}};
  if (outcome.trace) json["workload"]["title"] = outcome.trace->title;
  for (const auto& [field, value] : run.options().config.fields())
    json["workload"]["config"][field] = value;
  if (!request.defect.empty()) json["defect"] = request.defect;
  json["seed"] = 0;
  json["commit"] = commit();
  json["digest"] = hex(run.digest());
  if (outcome.decisions) json["decision_digest"] = hex(outcome.decisions->decision_digest);
  json["verdict"] = run.findings().empty() ? "pass" : "finding";
  json["events"] = run.event_count();
  Json findings = Json::array();
  for (const LocatedFinding& located : run.findings())
    findings.push_back(finding_json(located, request));
  json["findings"] = findings;
  if (run.outcomes().size() <= kMostOutcomes) json["requests"] = requests_json(run);
  for (const auto& [form, left_out] : run.left_out())
    json["unsupported"].push_back(
        {{"operation", form}, {"left_out", left_out.count}, {"text", left_out.why}});
  json["policies"] = Json::array();
  for (std::size_t i = 0; i < run.subject_count(); ++i)
    json["policies"].push_back(policy_json(run, i));
  if (run.subject_count() != 0) json["totals"] = totals_json(run.totals(0));
  if (run.subject_count() > 1) {
    json["subjects"] = Json::array();
    for (std::size_t i = 0; i < run.subject_count(); ++i) {
      Json own = Json::array();
      for (const LocatedFinding& located : run.findings())
        if (located.subject == run.subject_name(i)) own.push_back(finding_json(located, request));
      json["subjects"].push_back({{"subject", run.subject_name(i)},
                                  {"verdict", own.empty() ? "pass" : "finding"},
                                  {"findings", own},
                                  {"policies", Json::array({policy_json(run, i)})},
                                  {"totals", totals_json(run.totals(i))}});
    }
  }
  json["timing"] = {{"wall_s", outcome.wall_s}, {"load_s", outcome.load_s}, {"date", today()}};
  return json;
}

}  // namespace lockstep::cache_sim
