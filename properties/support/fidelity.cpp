#include "properties/support/fidelity.hpp"

#include <filesystem>
#include <memory>
#include <sstream>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/numbers/number_blocks.hpp"
#include "cache_sim/numbers/number_state.hpp"
#include "cache_sim/numbers/placed_model.hpp"
#include "properties/support/program.hpp"
#include "properties/support/search.hpp"
#include "reference/base/registry.hpp"

namespace lockstep::testing_support {
namespace {

using namespace cache_sim;  // NOLINT: all of it is used

constexpr std::int64_t kTraces = 300;  ///< of a search for one defect

std::shared_ptr<Truth> truth_of(const std::string& name, const reference::HybridConfig& config) {
  static std::map<std::string, std::shared_ptr<Truth>> known;
  if (known.size() > 4) known.clear();
  std::shared_ptr<Truth>& one = known[name];
  if (one == nullptr)
    one = std::make_shared<Truth>(
        std::make_shared<const reference::HybridModel>(config, reference::drawn_hybrid(config)));
  return one;
}

std::unique_ptr<NumberedPools> make_pools(const PolicyEntry& policy, const Config& config,
                                          LabelState&, PolicyEntry::SlotCounts slots) {
  const std::string model = policy.has_states ? "tiny-nemotron-h" : "tiny-qwen3";
  return std::make_unique<NumberState>(truth_of(model, *reference::hybrid_preset(model)),
                                       slots.states, slots.kv_end, config.page);
}

Result<PlacedModel> placed(const PolicyEntry& policy, const Config& config) {
  return policy.groups(config).and_then([](const BlockGroups& pool) {
    return placed_model(*reference::hybrid_preset(preset_for(pool)), pool);
  });
}

std::unique_ptr<NumberedBlocks> make_blocks(const PolicyEntry& policy, const Config& config) {
  const PlacedModel model = *placed(policy, config);
  return std::make_unique<NumberBlocks>(truth_of(model.key, model.config), model,
                                        *policy.groups(config), false);
}

const Registration<FidelityEntry> kNumbersAlone{
    {.name = "numbers-alone",
     .sentence = "of the tests",
     .models = nullptr,
     .check = [](const PolicyEntry& policy, const Config& config) -> Result<void> {
       if (policy.groups == nullptr) return {};
       return placed(policy, config).map([](const PlacedModel&) {});
     },
     .make = make_pools,
     .make_blocks = make_blocks}};

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

std::map<std::string, std::string> rows_of_defects() {
  std::map<std::string, std::string> rows;
  std::istringstream text(read_text(std::filesystem::path(LOCKSTEP_SOURCE_DIR) /
                                    "properties/cache_sim/numbers/defects.txt"));
  for (std::string name, row; text >> name >> row;) rows[name] = row;
  return rows;
}

const std::map<std::string, std::string>& long_traces() {
  static const std::map<std::string, std::string> traces = {
      {"a_large_pool_needs_wide_offsets", "sglang-no-buffer"},
      {"a_prompt_of_whole_chunks_misses_its_own_state", "sglang-extra-buffer"},
      {"any_chunk_reuses_the_whole_prompt", "radix"},
      {"chunk_ends_are_reused", "sglang-no-buffer"}};
  return traces;
}

std::vector<std::string> models_of(const std::string& policy) {
  const PolicyEntry& entry = *Registry<PolicyEntry>::find(policy);
  Config config;
  if (entry.layers != nullptr) config.put("layers", "mamba,attention,mamba");  // as a search draws
  std::vector<std::string> names = cache_sim::models_of(entry, config, "reference");
  if (entry.groups == nullptr) return names;
  for (const char* const field : {"block", "hash_block"}) config.put(field, 4);
  config.put("groups", "attention:4");  // a search draws groups that fit
  for (std::string& model : cache_sim::models_of(entry, config, "reference"))
    names.push_back(std::move(model));
  return names;
}

std::string row_of_matrix(const std::string& defect, const std::string& fidelity) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const ExploreOutcome outcome =
        searched_with_numbers(damaged(defect), fidelity, "", seed, kTraces);
    if (!outcome.discoveries.empty() &&
        outcome.discoveries[0].finding.finding.kind == FindingKind::number_differs)
      return "number";
  }
  return "-";
}

std::string number_that_labels_call_right(const std::string& defect, const std::string& fidelity,
                                          std::int64_t traces) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const ExploreOutcome outcome =
        searched_with_numbers(damaged(defect), fidelity, "", seed, traces);
    if (!outcome.discoveries.empty() &&
        outcome.discoveries[0].finding.finding.kind == FindingKind::number_differs)
      return outcome.discoveries[0].finding.finding.text;
  }
  return "";
}

}  // namespace lockstep::testing_support
