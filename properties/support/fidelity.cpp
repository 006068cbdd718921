#include "properties/support/fidelity.hpp"

#include <map>
#include <memory>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/numbers/number_state.hpp"
#include "properties/support/search.hpp"
#include "reference/base/registry.hpp"

namespace lockstep::testing_support {
namespace {

using namespace cache_sim;  // NOLINT: all of it is used

constexpr std::int64_t kTraces = 300;  ///< of a search for one defect

std::shared_ptr<Truth> truth_of(bool has_states) {
  static std::map<bool, std::shared_ptr<Truth>> known;
  std::shared_ptr<Truth>& one = known[has_states];
  const auto config = *reference::hybrid_preset(has_states ? "tiny-nemotron-h" : "tiny-qwen3");
  if (one == nullptr)
    one = std::make_shared<Truth>(
        std::make_shared<const reference::HybridModel>(config, reference::drawn_hybrid(config)));
  return one;
}

const Registration<FidelityEntry> kNumbersAlone{
    {.name = "numbers-alone",
     .sentence = "of the tests",
     .models = nullptr,
     .check = [](const PolicyEntry&, const Config&) { return Result<void>(); },
     .make = [](const PolicyEntry& policy, const Config& config, LabelState&,
                PolicyEntry::SlotCounts slots) -> std::unique_ptr<NumberedPools> {
       return std::make_unique<NumberState>(truth_of(policy.has_states), slots.states, slots.kv_end,
                                            config.page);
     }}};

/// The damaged policy alone, whose labels are looked at.
RunOptions damaged(const std::string& defect) {
  RunOptions run = run_with_defect(defect);
  run.subjects.pop_back();  // its oracle
  run.check = CheckLevel::labels;
  return run;
}

}  // namespace

ExploreOutcome searched_with_numbers(RunOptions run, const std::string& fidelity,
                                     const std::string& model, std::uint64_t seed,
                                     std::int64_t traces) {
  run.config.put(kFidelityField, fidelity);
  run.fixed.add(kFidelityField);
  run.config.put(kModelField, model);
  run.fixed.add(kModelField);
  ExploreOptions options;
  options.run = std::move(run);
  options.seed = seed;
  options.traces = traces;
  options.shrinks = false;
  Result<ExploreOutcome> outcome = explore(options);
  return outcome ? std::move(*outcome) : ExploreOutcome{};
}

std::vector<std::string> policies_with_numbers() {
  std::vector<std::string> names;
  for (const PolicyEntry& policy : Registry<PolicyEntry>::all())
    if (policy.tells_forwards) names.emplace_back(policy.name);
  return names;
}

std::vector<std::string> defects_with_numbers() {
  std::vector<std::string> names;
  for (const std::string& name : all_defects())
    if (Registry<PolicyEntry>::find(name.substr(0, name.find(':')))->tells_forwards)
      names.push_back(name);
  return names;
}

std::vector<std::string> models_of(const std::string& policy) {
  return cache_sim::models_of(*Registry<PolicyEntry>::find(policy), Config(), "reference");
}

std::string row_of_matrix(const std::string& defect) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const ExploreOutcome outcome =
        searched_with_numbers(damaged(defect), "numbers-alone", "", seed, kTraces);
    if (!outcome.discoveries.empty() &&
        outcome.discoveries[0].finding.finding.kind == FindingKind::number_differs)
      return "number";
  }
  return "-";
}

std::string number_that_labels_call_right(const std::string& defect) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const ExploreOutcome outcome =
        searched_with_numbers(damaged(defect), "reference", "", seed, kTraces);
    if (!outcome.discoveries.empty() &&
        outcome.discoveries[0].finding.finding.kind == FindingKind::number_differs)
      return outcome.discoveries[0].finding.finding.text;
  }
  return "";
}

}  // namespace lockstep::testing_support
