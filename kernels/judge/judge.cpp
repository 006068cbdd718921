// Makes a report of a request: runs the candidate, judges every case, and collects the findings.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "kernels/judge/report.hpp"
#include "reference/base/mix.hpp"
#include "reference/base/parallel.hpp"

namespace lockstep::judging {
namespace {

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

/// The device of a request; for "auto" a GPU if there is one. The GPU is looked for without the
/// CUDA runtime, which does not survive the fork of the candidate's process.
std::string usual_device(const JudgeRequest& request) {
  if (request.device != "auto") return request.device;
  return std::filesystem::exists("/dev/nvidia0") ? "cuda" : "cpu";
}

/// Fills agrees_with and stage of the wrong cases: the known mistakes that give the candidate's
/// answer, and the wrong stage of the computation.
void diagnose(const JudgedKernel& operation, std::vector<JudgedCase>& cases) {
  std::vector<JudgedCase*> wrong;
  for (JudgedCase& one : cases)
    if (one.runs.outcome == Outcome::done && one.judgement.wrong()) wrong.push_back(&one);
  // Timed cases are large, and rarely say more than the small ones: they are skipped if small ones
  // are wrong.
  const bool small_ones = std::any_of(wrong.begin(), wrong.end(),
                                      [](const JudgedCase* one) { return !one->which.timed; });
  if (small_ones) std::erase_if(wrong, [](const JudgedCase* one) { return one->which.timed; });
  in_parallel(wrong, [&](JudgedCase* one) {
    for (const Mistake& mistake : operation.mistakes)
      if (agrees(operation, one->which, one->judgement.answer, mistake.id))
        one->judgement.agrees_with.emplace_back(mistake.id);
    if (operation.named_stages && !one->runs.stages.empty())
      one->judgement.stage = operation.named_stages(one->which, one->runs.stages);
    if (operation.stages)
      one->judgement.stage =
          operation.stages(one->which, one->judgement.answer, operation.truth(one->which, ""));
  });
}

/// The plans whose names contain the request's filter.
Result<std::vector<CasePlan>> chosen(const JudgedKernel& operation, const JudgeRequest& request) {
  std::vector<CasePlan> plans;
  std::string names;
  for (const CasePlan& plan : operation.plans()) {
    names += (names.empty() ? "" : ", ") + plan.name;
    if (plan.large && request.only.empty() && request.device != "cuda") continue;
    if (plan.name.find(request.only) != std::string::npos) plans.push_back(plan);
  }
  if (plans.empty())
    return fail(
        fmt::format("--case `{}`: the cases of {} are {}", request.only, operation.name, names));
  return plans;
}

/// Bytes of memory available to programs; 0 if the system does not tell.
double available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string name, line; file >> name && std::getline(file, line);)
    if (name == "MemAvailable:") return 1024.0 * std::atof(line.c_str());
  return 0;
}

/// Refuses timed cases that cannot fit into memory, before they are built: they grow with --batch.
Result<void> check_memory(const JudgedKernel& operation, const std::vector<CasePlan>& plans,
                          const JudgeRequest& request) {
  // Bytes per element: doubles in the case, the truth, the yardstick and the answer, and the
  // element's own bytes in two fills and three runs.
  constexpr double kBytesPerElement = 64;
  constexpr double kGiB = 1 << 30;
  const double copies = request.timed ? 2 : 1;  // a timed case has a twin
  const auto timed = static_cast<double>(
      std::count_if(plans.begin(), plans.end(), [](const CasePlan& plan) { return plan.timed; }));
  const double wanted = timed * copies * kBytesPerElement * static_cast<double>(request.batch) *
                        static_cast<double>(operation.row_elements);
  const double available = available_memory();
  if (available == 0 || wanted <= available) return {};
  return fail(
      fmt::format("--batch {}: the timed cases of {} need about {:.0f} GiB of memory, and "
                  "{:.0f} GiB are free",
                  request.batch, operation.name, wanted / kGiB, available / kGiB));
}

/// The case's calls again in the same memory with fewer rows, as a captured graph is launched
/// again.
Result<void> repeat_with_fewer_rows(const std::vector<JudgedCase>& cases, CandidateProcess& process,
                                    std::uint64_t seed, std::vector<TimedCase>& timed) {
  const JudgedCase& first = cases.back();
  const bool far = std::any_of(first.which.tensors.begin(), first.which.tensors.end(),
                               [](const Tensor& one) { return one.far > 0; });
  std::optional<Case> fewer = far ? std::nullopt : with_fewer_rows(first.which);
  if (!fewer || first.runs.outcome != Outcome::done) return {};
  Result<CaseRuns> runs = process.run(*fewer);
  if (!runs) return tl::unexpected(runs.error());
  timed.push_back({.first = cases.size() - 1,
                   .twin = {std::move(*fewer), std::move(*runs), {}},
                   .calls = {},
                   .fewer_rows = true});
  const JudgedCase& twin = timed.back().twin;
  if (twin.runs.outcome != Outcome::done) return {};
  Result<TimedRuns> calls =
      process.repeat({first.which, first.runs}, {twin.which, twin.runs}, seed);
  if (!calls) return tl::unexpected(calls.error());
  timed.back().calls = std::move(*calls);
  return {};
}

/// Rows of the cases that have passed in other batches.
Result<std::vector<BatchedCase>> run_batches(const std::vector<CasePlan>& plans,
                                             const JudgedKernel& operation,
                                             const JudgeRequest& request,
                                             const std::vector<JudgedCase>& cases,
                                             CandidateProcess& process) {
  std::vector<BatchedCase> batched;
  for (std::size_t i = 0; request.batch_invariant && i < cases.size(); ++i) {
    const JudgedCase& one = cases[i];
    const bool stable = std::none_of(
        one.judgement.findings.begin(), one.judgement.findings.end(),
        [](const Finding& finding) { return finding.kind == FindingKind::nondeterministic; });
    if (one.runs.outcome != Outcome::done || !stable || plans[i].large || operation.exact) continue;
    if (request.progress)
      request.progress(
          fmt::format("batches of {} ({} of {})", one.which.name, i + 1, cases.size()));
    Result<BatchFindings> found = compare_batches(one.which, one.runs, process);
    if (!found) return tl::unexpected(found.error());
    batched.push_back({i, std::move(*found)});
  }
  return batched;
}

/// Builds every case, runs it, and times those that are timed.
Result<void> run_cases(const std::vector<CasePlan>& plans, const CaseOptions& options,
                       const JudgeRequest& request, CandidateProcess& process,
                       std::vector<JudgedCase>& cases, std::vector<TimedCase>& timed) {
  struct Built {
    const CasePlan& plan;
    Case which, twin;
  };
  CaseOptions other = options;
  other.seed = mix64(options.seed);
  std::vector<Built> built;
  built.reserve(plans.size());
  for (const CasePlan& plan : plans) built.push_back({plan, {}, {}});
  const auto say = [&](std::string_view what, const Case& c, std::size_t number) {
    if (!request.progress) return;
    request.progress(fmt::format("{} {} ({} of {})", what, c.name, number, plans.size()));
  };
  in_parallel(built, [&](Built& one) {
    one.which = one.plan.make(options);
    if (one.plan.timed && request.timed) one.twin = one.plan.make(other);
  });
  for (Built& one : built) {
    say("case", one.which, cases.size() + 1);
    Result<CaseRuns> runs = process.run(one.which);
    if (!runs) return tl::unexpected(runs.error());
    cases.push_back({std::move(one.which), std::move(*runs), {}});
    const JudgedCase& first = cases.back();
    if (process.machine().on_gpu || one.plan.timed)
      if (auto repeated = repeat_with_fewer_rows(cases, process, options.seed, timed); !repeated)
        return repeated;
    if (!one.plan.timed || !request.timed || first.runs.outcome != Outcome::done) continue;
    runs = process.run(one.twin);
    if (!runs) return tl::unexpected(runs.error());
    timed.push_back({.first = cases.size() - 1,
                     .twin = {std::move(one.twin), std::move(*runs), {}},
                     .calls = {}});
    TimedCase& both = timed.back();
    if (both.twin.runs.outcome != Outcome::done) continue;
    say("timing", first.which, cases.size());
    Result<TimedRuns> calls =
        process.time({first.which, first.runs}, {both.twin.which, both.twin.runs}, options.seed);
    if (!calls) return tl::unexpected(calls.error());
    both.calls = std::move(*calls);
  }
  return {};
}

void judge_cases(const JudgedKernel& operation, std::vector<JudgedCase>& cases,
                 std::vector<TimedCase>& timed) {
  std::vector<JudgedCase*> all;
  all.reserve(cases.size() + timed.size());
  for (JudgedCase& one : cases) all.push_back(&one);
  for (TimedCase& one : timed) all.push_back(&one.twin);
  in_parallel(all, [&](JudgedCase* one) {
    if (one->runs.outcome == Outcome::done)
      one->judgement = judgement_of(operation, one->which, one->runs);
  });
  in_parallel(timed, [&](TimedCase& one) {
    const JudgedCase& wrong = one.calls.wrong_input == 0 ? cases[one.first] : one.twin;
    one.findings = findings_of_calls(operation, wrong.which, one.calls,
                                     one.fewer_rows ? "repeated call" : "timed call");
  });
  diagnose(operation, cases);
}

}  // namespace

Result<JudgeReport> judge_operation(const JudgedKernel& operation, const JudgeRequest& given) {
  const auto begin = std::chrono::steady_clock::now();
  JudgeRequest request = given;
  if (const std::size_t colon = request.candidate.find_last_of(':');
      colon == std::string::npos || colon == 0 || colon + 1 == request.candidate.size())
    return fail(
        fmt::format("--candidate `{}` is not MODULE:FUNCTION, FILE.py:FUNCTION or LIB.so:SYMBOL",
                    request.candidate));
  request.device = usual_device(request);
  if (request.batch == 0) request.batch = request.device == "cuda" ? 64 : 4;
  const Result<CaseOptions> options = options_of(operation, request);
  if (!options) return tl::unexpected(options.error());
  const Result<std::vector<CasePlan>> plans = chosen(operation, request);
  if (!plans) return tl::unexpected(plans.error());
  if (const auto fits = check_memory(operation, *plans, request); !fits)
    return tl::unexpected(fits.error());
  const bool any_timed = request.timed && std::any_of(plans->begin(), plans->end(),
                                                      [](const auto& plan) { return plan.timed; });
  // The process starts first, so that a candidate that cannot be loaded costs no built case.
  const auto process = CandidateProcess::start(operation, request, any_timed);
  if (!process) return tl::unexpected(process.error());
  std::vector<JudgedCase> cases;
  std::vector<TimedCase> timed;
  cases.reserve(plans->size());  // cases must not move: timed calls refer to earlier ones
  if (const auto run = run_cases(*plans, *options, request, **process, cases, timed); !run)
    return tl::unexpected(run.error());
  if (request.progress) request.progress("comparing with the reference");
  judge_cases(operation, cases, timed);
  const auto batched = run_batches(*plans, operation, request, cases, **process);
  if (!batched) return tl::unexpected(batched.error());
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  return finished(
      {operation, request, *options, (*process)->machine(), cases, timed, *batched, wall.count()});
}

}  // namespace lockstep::judging
