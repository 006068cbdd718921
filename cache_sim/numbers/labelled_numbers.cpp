#include "cache_sim/numbers/labelled_numbers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <string>

#include "cache_sim/numbers/number_blocks.hpp"
#include "cache_sim/numbers/number_state.hpp"
#include "cache_sim/numbers/placed_model.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/registry.hpp"
#include "reference/models/hybrid/hybrid_checkpoint.hpp"
#include "reference/protocol/near_word.hpp"

namespace lockstep::cache_sim {
namespace {

using reference::HybridConfig;
using reference::HybridModel;

PolicyEntry::LayerCounts layers_of(const HybridConfig& config) {
  PolicyEntry::LayerCounts counts{0, 0};
  for (const reference::HybridUnit& unit : config.units) {
    counts.kv += std::holds_alternative<reference::AttentionUnit>(unit.kind) ||
                         std::holds_alternative<reference::LatentUnit>(unit.kind)
                     ? 1
                     : 0;
    counts.states += std::holds_alternative<reference::MambaUnit>(unit.kind) ||
                             std::holds_alternative<reference::DeltaNetUnit>(unit.kind)
                         ? 1
                         : 0;
  }
  return counts;
}

std::unique_ptr<NumberedPools> make(const PolicyEntry& policy, const Config& config,
                                    LabelState& labels, PolicyEntry::SlotCounts slots) {
  const std::string name = model_name(policy, config);
  return std::make_unique<LabelledNumbers>(
      labels, std::make_unique<NumberState>(shared_truth(name, *named_model(name)), slots.states,
                                            slots.kv_end, config.page, &labels));
}

std::unique_ptr<NumberedBlocks> make_blocks(const PolicyEntry& policy, const Config& config) {
  const BlockGroups pool = *policy.groups(config);
  const PlacedModel placed = *placed_model(*named_model(model_name(policy, config)), pool);
  return std::make_unique<NumberBlocks>(shared_truth(placed.key, placed.config), placed, pool);
}

const Registration<FidelityEntry> kReference{
    {.name = "reference",
     .sentence = "labels, and beside them the numbers of a tiny hybrid model in double, compared "
                 "bit by bit with those of a run without a cache",
     .models = reference::hybrid_presets,
     .check = check_model,
     .make = make,
     .make_blocks = make_blocks}};

}  // namespace

std::string model_name(const PolicyEntry& policy, const Config& config) {
  std::string named = config.text(kModelField);
  if (!named.empty()) return named;
  if (policy.groups != nullptr)
    if (const Result<BlockGroups> pool = policy.groups(config))
      return std::string(preset_for(*pool));
  return policy.has_states ? "tiny-nemotron-h" : "tiny-qwen3";
}

Result<HybridConfig> named_model(const std::string& name) {
  if (const std::optional<HybridConfig> preset = reference::hybrid_preset(name)) return *preset;
  if (name.find('/') == std::string::npos)
    return fail(
        fmt::format("field model: there is no model `{}`{}; there are {}, and the path of a "
                    "checkpoint's folder, with a slash",
                    name, but_near(name, reference::hybrid_presets_of_both_sizes()),
                    fmt::join(reference::hybrid_presets_of_both_sizes(), ", ")));
  // A search asks for each of its traces.
  thread_local std::optional<HybridConfig> known;
  if (known && known->name == name) return *known;
  return reference::read_hybrid(name)
      .map([&](HybridConfig read) { return *(known = std::move(read)); })
      .map_error([](const Error& error) { return Error{"field model: " + error.text}; });
}

Result<void> check_model(const PolicyEntry& policy, const Config& config) {
  const std::string name = model_name(policy, config);
  const Result<HybridConfig> model = named_model(name);
  if (!model) return tl::unexpected(model.error());
  if (policy.groups != nullptr)
    return policy.groups(config).and_then([&](const BlockGroups& pool) -> Result<void> {
      return placed_model(*model, pool).map([](const PlacedModel&) {});
    });
  const PolicyEntry::LayerCounts layers = layers_of(*model);
  if (layers.states > 0 && !policy.has_states)
    return fail(fmt::format("field model: {} has recurrent states, and policy {} keeps none", name,
                            policy.name));
  if (policy.layers == nullptr) return {};
  const PolicyEntry::LayerCounts own = policy.layers(config);
  if (own.kv != layers.kv || own.states != layers.states)
    return fail(fmt::format(
        "field model: {} has {} with KV and {} with a state, and policy {} has slots for {} and {}",
        name, counted(layers.kv, "layer"), layers.states, policy.name, own.kv, own.states));
  return {};
}

std::shared_ptr<Truth> shared_truth(const std::string& name, const HybridConfig& config) {
  constexpr std::size_t kMostKept = 4;
  thread_local std::map<std::string, std::shared_ptr<Truth>> known;
  if (const auto found = known.find(name); found != known.end()) return found->second;
  if (known.size() == kMostKept) known.clear();
  return known[name] = std::make_shared<Truth>(
             std::make_shared<const HybridModel>(config, reference::hybrid_weights(config)));
}

Findings LabelledNumbers::drain(bool completes) {
  Findings labels = labels_.drain();
  const Findings numbers = numbers_->drain(completes || !labels.empty());
  return told_together(std::move(labels), numbers);
}

}  // namespace lockstep::cache_sim
