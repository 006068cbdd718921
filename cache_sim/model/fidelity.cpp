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
        "there is no fidelity `{}`{}; `lockstep list layers` shows all{}", name,
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
  return fidelity->check(policy, config);
}

std::unique_ptr<NumberedPools> numbered_pools(const PolicyEntry& policy, const Config& config,
                                              LabelState& labels, PolicyEntry::SlotCounts slots) {
  const FidelityEntry& fidelity = *Registry<FidelityEntry>::find(config.text(kFidelityField));
  return fidelity.make == nullptr ? nullptr : fidelity.make(policy, config, labels, slots);
}

}  // namespace lockstep::cache_sim
