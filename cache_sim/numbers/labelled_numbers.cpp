#include "cache_sim/numbers/labelled_numbers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string>

#include "reference/base/counted.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/near_word.hpp"

namespace lockstep::cache_sim {
namespace {

using reference::HybridConfig;
using reference::HybridModel;

std::string model_name(const PolicyEntry& policy, const Config& config) {
  std::string named = config.text(kModelField);
  if (!named.empty()) return named;
  return policy.has_states ? "tiny-nemotron-h" : "tiny-qwen3";
}

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

Result<void> check(const PolicyEntry& policy, const Config& config) {
  const std::string name = model_name(policy, config);
  const std::optional<HybridConfig> model = reference::hybrid_preset(name);
  if (!model)
    return fail(fmt::format("field model: there is no model `{}`{}; there are {}", name,
                            but_near(name, reference::hybrid_presets()),
                            fmt::join(reference::hybrid_presets(), ", ")));
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

/// The truth of a model. The runs of a search share it: it remembers prefixes, and no run changes
/// what they are.
std::shared_ptr<Truth> truth_of(const std::string& model) {
  thread_local std::map<std::string, std::shared_ptr<Truth>> known;
  std::shared_ptr<Truth>& truth = known[model];
  if (truth == nullptr) {
    const HybridConfig config = *reference::hybrid_preset(model);
    truth = std::make_shared<Truth>(
        std::make_shared<const HybridModel>(config, reference::drawn_hybrid(config)));
  }
  return truth;
}

std::unique_ptr<NumberedPools> make(const PolicyEntry& policy, const Config& config,
                                    LabelState& labels, PolicyEntry::SlotCounts slots) {
  return std::make_unique<LabelledNumbers>(labels, truth_of(model_name(policy, config)), slots,
                                           config.page);
}

const Registration<FidelityEntry> kReference{
    {.name = "reference",
     .sentence = "labels, and beside them the numbers of a tiny hybrid model in double, compared "
                 "bit by bit with those of a run without a cache",
     .models = reference::hybrid_presets,
     .check = check,
     .make = make}};

}  // namespace

Findings LabelledNumbers::drain(bool completes) {
  Findings labels = labels_.drain();
  Findings numbers = numbers_.drain(completes || !labels.empty());
  if (labels.empty()) return numbers;
  if (numbers.empty()) return labels;
  if (numbers.front().kind == FindingKind::number_agrees) {
    labels.push_back(numbers.front());
    return labels;
  }
  const std::string& said = numbers.front().text;
  const std::size_t own = said.find(kNumbersSay);  // a finding of a label that a row has read
  labels.front().text +=
      own == std::string::npos ? std::string(kNumbersSay) + said : said.substr(own);
  return labels;
}

}  // namespace lockstep::cache_sim
