#include "cache_sim/replay/replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/model/step_cost.hpp"
#include "cache_sim/server/simulation.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/base/require.hpp"
#include "reference/base/shell_words.hpp"
#include "reference/protocol/near_word.hpp"

namespace lockstep::cache_sim {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The subjects of a replay without --subject: the policy of the defect, of the file, or the
/// default policy, beside its oracle.
std::vector<std::string> default_subjects(const ReplayRequest& request, const Config& config) {
  std::string policy(default_policy());
  if (!config.policy.empty()) policy = config.policy;
  if (!request.defect.empty()) policy = request.defect.substr(0, request.defect.find(':'));
  std::vector<std::string> subjects{policy};
  if (Registry<OracleEntry>::find(policy) != nullptr) subjects.push_back("oracle:" + policy);
  return subjects;
}

/// Replaces the plain word `oracle` by the oracle of the first policy among the subjects, of the
/// config's policy, or of the default policy.
void name_oracles(std::vector<std::string>& subjects, const Config& config) {
  for (std::string& subject : subjects) {
    if (subject != "oracle") continue;
    const auto other = std::ranges::find_if(subjects, [](const std::string& name) {
      return Registry<PolicyEntry>::find(name) != nullptr;
    });
    const std::string_view otherwise = config.policy.empty() ? default_policy() : config.policy;
    subject = fmt::format("oracle:{}", other == subjects.end() ? otherwise : *other);
  }
}

/// The cost model of the request; null: step_time of the config, which a user's own decides.
Result<std::unique_ptr<StepCost>> step_cost(const ReplayRequest& request,
                                            const ReplayOutcome& outcome) {
  if (outcome.run->options().fixed.contains("step_time")) return nullptr;
  if (request.cost) return request.cost();
  if (request.model.empty()) return nullptr;
  return find_model(request.model).map([](const Model* model) -> std::unique_ptr<StepCost> {
    return std::make_unique<ModelStepCost>(*model);
  });
}

/// The file of a sentence about a configuration, with the line of the trace that sets the field in
/// question, unless --config does.
std::string place_of(std::string_view sentence, const RunOptions& options,
                     const std::optional<Trace>& trace) {
  constexpr std::string_view kField = "field ";
  const std::size_t at = sentence.find(kField);
  if (!trace || at == std::string_view::npos) return options.file;
  const std::string_view rest = sentence.substr(at + kField.size());
  const auto set = trace->config_lines.find(rest.substr(0, rest.find(':')));
  if (set == trace->config_lines.end() || options.fixed.contains(set->first)) return options.file;
  return fmt::format("{}:{}", options.file, set->second);
}

Result<void> start_run(const Result<RunOptions>& options, ReplayOutcome& outcome) {
  if (!options) return tl::unexpected(options.error());
  Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(*options);
  if (!run)
    return fail(fmt::format("{}: {}", place_of(run.error().text, *options, outcome.trace),
                            run.error().text),
                run.error().status);
  outcome.run = std::move(*run);
  return {};
}

Result<ReplayOutcome> replay_trace(const ReplayRequest& request, ReplayOutcome outcome) {
  const auto load_start = std::chrono::steady_clock::now();
  Result<Trace> trace = read_trace(request.file);
  if (!trace) return tl::unexpected(trace.error());
  outcome.trace = std::move(*trace);
  if (const Result<void> started = start_run(run_options(request, outcome.trace->config), outcome);
      !started)
    return tl::unexpected(started.error());
  Result<std::unique_ptr<StepCost>> cost = step_cost(request, outcome);
  if (!cost) return tl::unexpected(cost.error());
  outcome.load_s = seconds_since(load_start);
  const auto start = std::chrono::steady_clock::now();
  play_trace(*outcome.run, *outcome.trace, std::move(*cost));
  outcome.wall_s = seconds_since(start);
  if (outcome.run->error()) return tl::unexpected(*outcome.run->error());
  return outcome;
}

/// Plays a workload that has no driver of its own: its requests go to the scheduler as they arrive.
/// The load time is that of opening it; reading the stream belongs to the replay.
Result<ReplayOutcome> replay_workload(const ReplayRequest& request, ReplayOutcome outcome) {
  const auto load_start = std::chrono::steady_clock::now();
  OpenedStream requests = open_workload(request.file, request.limit);
  if (!requests) return tl::unexpected(requests.error());
  if (const Result<void> started = start_run(run_options(request, Config{}), outcome); !started)
    return tl::unexpected(started.error());
  Result<std::unique_ptr<StepCost>> cost = step_cost(request, outcome);
  if (!cost) return tl::unexpected(cost.error());
  outcome.load_s = seconds_since(load_start);
  const auto start = std::chrono::steady_clock::now();
  const Result<void> played = Simulation(*outcome.run, std::move(*cost)).play(**requests);
  outcome.wall_s = seconds_since(start);
  if (!played) return tl::unexpected(played.error());
  if (outcome.run->error()) return tl::unexpected(*outcome.run->error());
  return outcome;
}

Result<ReplayOutcome> replay_driven(const WorkloadDriver& driver, const ReplayRequest& request,
                                    ReplayOutcome outcome) {
  const auto load_start = std::chrono::steady_clock::now();
  std::string_view parameters = std::string_view(request.file).substr(driver.name.size());
  if (!parameters.empty()) parameters.remove_prefix(1);
  const auto workload = driver.open(parameters, request.limit);
  if (!workload) return fail(fmt::format("{}: {}", request.file, workload.error().text));
  const Result<RunOptions> options = run_options(request, (*workload)->config());
  if (!options) return tl::unexpected(options.error());
  if (options->config.ranks != 1 || options->config.overlap != 0)
    return fail(fmt::format("{}: its own driver has one rank and no overlap", request.file));
  if (const Result<void> started = start_run(options, outcome); !started)
    return tl::unexpected(started.error());
  (*workload)->generate();
  outcome.load_s = seconds_since(load_start);
  const auto start = std::chrono::steady_clock::now();
  outcome.decisions = (*workload)->drive(
      {.apply = [&](const Operation& operation) { return outcome.run->apply(operation); },
       .decided = [&] { return outcome.run->decided(); }});
  outcome.run->conclude();
  outcome.wall_s = seconds_since(start);
  if (outcome.run->error()) return tl::unexpected(*outcome.run->error());
  return outcome;
}

}  // namespace

Result<RunOptions> run_options(const ReplayRequest& request, Config config) {
  RunOptions options;
  if (const Result<void> set = config.set_all(request.config, &options.fixed); !set)
    return fail("--config: " + set.error().text);
  if (!request.fidelity.empty()) {
    if (const Result<void> set = config.set(kFidelityField, request.fidelity); !set)
      return fail("--fidelity: " + set.error().text);
    options.fixed.add(kFidelityField);
  }
  options.subjects =
      request.subjects.empty() ? default_subjects(request, config) : request.subjects;
  name_oracles(options.subjects, config);
  if (!request.defect.empty()) {
    options.defect = Defect::find(request.defect);
    if (options.defect == nullptr)
      return fail(fmt::format("there is no defect `{}`{}; `lockstep list defects` shows all",
                              request.defect,
                              but_near(request.defect, names_in(Registry<DefectEntry>::all()))));
    options.defect_name = request.defect;
    const std::string policy = request.defect.substr(0, request.defect.find(':'));
    if (std::ranges::find(options.subjects, policy) == options.subjects.end())
      return fail(fmt::format("the defect {} needs the subject {}", request.defect, policy));
  }
  options.config = std::move(config);
  options.check = request.check;
  options.timeout = request.timeout;
  options.file = request.file;
  options.keep_events = request.keep_events;
  options.watch = request.watch;
  options.ended = request.ended;
  if (request.children != nullptr) options.children = request.children;
  return options;
}

ExitStatus ReplayOutcome::status() const {
  return run->findings().empty() ? kExitPass : exit_status(run->findings().front().finding.kind);
}

namespace {

Result<ReplayOutcome> replay_once(const ReplayRequest& request) {
  const GeneratedWorkload* const generated = find_generated(request.file);
  if (generated != nullptr)
    if (const auto* const driver = Registry<WorkloadDriver>::find(generated->name))
      return replay_driven(*driver, request, {});
  if (generated != nullptr || is_workload_file(request.file)) return replay_workload(request, {});
  return replay_trace(request, {});
}

}  // namespace

/// A child shows only when it is asked that it does not support an operation. If other subjects
/// have done the operation by then, the file is played again without it, at most once for each form
/// of operation.
Result<ReplayOutcome> replay(const ReplayRequest& request) {
  ReplayRequest shared = request;
  if (shared.children == nullptr) shared.children = std::make_shared<Children>();
  for (;;) {
    Result<ReplayOutcome> outcome = replay_once(shared);
    if (!outcome && !request.run_line.empty() && !outcome.error().text.starts_with(request.file))
      outcome.error().text = fmt::format("{}: {}", request.run_line, outcome.error().text);
    if (!outcome) return outcome;
    if (const auto* const blocked = std::get_if<IsBlocked>(&outcome->run->state()))
      return fail(blocked->why);
    if (!std::holds_alternative<MustRestart>(outcome->run->state())) return outcome;
  }
}

std::vector<std::string> directive_words(const RunDirective& directive, const std::string& file) {
  Result<std::vector<std::string>> words = split_words(directive.command, file);
  require(words && !words->empty(), "a run line was read from a trace or written by us");
  words->erase(words->begin());  // `lockstep`
  return std::move(*words);
}

Result<std::vector<ReplayRequest>> requests_of(const RunDirective& directive,
                                               const std::string& file, const ReadRunLine& read) {
  const std::string place = fmt::format("{}:{}", file, directive.line);
  std::vector<std::string> words = directive_words(directive, file);
  if (words.empty() || words.front() != "replay")
    return fail(place + ": a # run: line that is played is `lockstep replay` and nothing else");
  words.erase(words.begin());
  Result<std::vector<ReplayRequest>> requests = read(words);
  if (!requests) return fail(fmt::format("{}: {}", place, requests.error().text));
  for (ReplayRequest& request : *requests) request.run_line = place;
  return requests;
}

}  // namespace lockstep::cache_sim
