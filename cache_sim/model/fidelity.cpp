#include "cache_sim/model/fidelity.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "reference/base/registry.hpp"
#include "reference/protocol/near_word.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::string_view kLabel = "label";

const Registration<ConfigOption> kFidelity{{.name = kFidelityField, .otherwise = kLabel}};
const Registration<ConfigOption> kModel{{.name = kModelField, .otherwise = ""}};
const Registration<FidelityEntry> kLabels{
    {.name = kLabel, .sentence = "the digest and length of the exact token prefix, no numbers"}};

}  // namespace

bool has_torch() {
  return Registry<FidelityEntry>::find(kTorchFidelities[0]) != nullptr;
}

Result<void> check_fidelity(const PolicyEntry& policy, const Config& config) {
  const std::string name = config.text(kFidelityField);
  const FidelityEntry* const fidelity = Registry<FidelityEntry>::find(name);
  if (fidelity == nullptr) {
    if (std::ranges::find(kTorchFidelities, name) != std::end(kTorchFidelities))
      return fail(fmt::format(
          "field fidelity: {} is of the program lockstep-torch, which is built with LibTorch: "
          "`./lockstep replay FILE --fidelity {}` brings both in",
          name, name));
    const std::vector<std::string_view> known = names_in(Registry<FidelityEntry>::all());
    return fail(fmt::format(
        "field fidelity: there is no `{}`{}; `lockstep list layers` shows all{}", name,
        but_near(name, known),
        known.size() > 1
            ? ""
            : ". This program was built without the headers of CCCL, so it knows labels alone; "
              "`./lockstep replay FILE --fidelity reference` brings them in"));
  }
  if (fidelity->make == nullptr) {
    if (config.text(kModelField).empty()) return {};
    return fail(fmt::format("field model: fidelity {} has no model", name));
  }
  if (!policy.tells_forwards)
    return fail(fmt::format(
        "field fidelity: policy {} does not tell its forwards, so its slots hold labels alone",
        policy.name));
  if (policy.groups != nullptr && fidelity->make_blocks == nullptr)
    return fail(fmt::format("field fidelity: {} has no memory of blocks, which policy {} needs",
                            name, policy.name));
  if (policy.has_rings != nullptr && policy.has_rings(config) && !fidelity->keeps_rings)
    return fail(fmt::format("field fidelity: {} keeps no rings, which policy {} has here", name,
                            policy.name));
  return fidelity->check(policy, config);
}

bool keeps_rings(const Config& config) {
  const FidelityEntry* const entry = Registry<FidelityEntry>::find(config.text(kFidelityField));
  return entry == nullptr || entry->keeps_rings;
}

std::vector<std::string> models_of(const PolicyEntry& policy, Config config,
                                   std::string_view fidelity) {
  std::vector<std::string> names;
  const FidelityEntry* const entry = Registry<FidelityEntry>::find(fidelity);
  if (entry == nullptr || entry->models == nullptr) return names;
  config.put(kFidelityField, fidelity);
  for (const std::string_view model : entry->models()) {
    config.put(kModelField, model);
    if (check_fidelity(policy, config)) names.emplace_back(model);
  }
  return names;
}

std::unique_ptr<NumberedPools> numbered_pools(const PolicyEntry& policy, const Config& config,
                                              LabelState& labels, PolicyEntry::SlotCounts slots) {
  const FidelityEntry& fidelity = *Registry<FidelityEntry>::find(config.text(kFidelityField));
  if (fidelity.make == nullptr || policy.groups != nullptr) return nullptr;
  return fidelity.make(policy, config, labels, slots);
}

std::unique_ptr<NumberedBlocks> numbered_blocks(const PolicyEntry& policy, const Config& config) {
  const FidelityEntry& fidelity = *Registry<FidelityEntry>::find(config.text(kFidelityField));
  if (fidelity.make_blocks == nullptr || policy.groups == nullptr) return nullptr;
  return fidelity.make_blocks(policy, config);
}

Findings told_together(Findings labels, const Findings& numbers) {
  if (labels.empty()) return numbers;
  if (numbers.empty() || labels.front().text.find(kNumbersSay) != std::string::npos) return labels;
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
