// The fidelities whose numbers are tensors: `torch` on a CPU, `kernels` on a GPU.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "cache_sim/numbers/labelled_numbers.hpp"
#include "cache_sim/numbers/placed_model.hpp"
#include "cache_sim/numbers/torch/judged_calls.hpp"
#include "cache_sim/numbers/torch/tensor_blocks.hpp"
#include "cache_sim/numbers/torch/tensor_state.hpp"
#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {
namespace {

/// Rows that a truth remembers before the next run begins with an empty one.
constexpr std::int64_t kMostRows = 1 << 14;

/// The truth of a model. The runs of a thread share it: it remembers rows, and no run changes their
/// numbers.
std::shared_ptr<TensorTruth> shared_tensor_truth(const std::string& name,
                                                 const reference::HybridConfig& config,
                                                 const std::shared_ptr<const TensorLayers>& layers,
                                                 at::ScalarType activations) {
  constexpr std::size_t kMostKept = 16;
  thread_local std::map<std::pair<std::string, bool>, std::shared_ptr<TensorTruth>> known;
  const std::pair key{name, layers->device().is_cpu()};
  if (known.size() == kMostKept && !known.contains(key)) known.clear();
  std::shared_ptr<TensorTruth>& truth = known[key];
  if (truth == nullptr || truth->computed() > kMostRows)
    truth = std::make_shared<TensorTruth>(std::make_shared<const TensorModel>(
        config, reference::hybrid_weights(config), layers, activations));
  return truth;
}

std::unique_ptr<NumberedPools> made(const PolicyEntry& policy, const Config& config,
                                    LabelState& labels, PolicyEntry::SlotCounts slots,
                                    const std::shared_ptr<const TensorLayers>& layers,
                                    at::ScalarType activations) {
  const std::string name = model_name(policy, config);
  return std::make_unique<LabelledNumbers>(
      labels, std::make_unique<TensorState>(
                  shared_tensor_truth(name, *named_model(name), layers, activations), slots.states,
                  slots.kv_end, config.page, &labels));
}

std::unique_ptr<NumberedBlocks> made_blocks(const PolicyEntry& policy, const Config& config,
                                            const std::shared_ptr<const TensorLayers>& layers,
                                            at::ScalarType activations) {
  const BlockGroups pool = *policy.groups(config);
  const PlacedModel placed = *placed_model(*named_model(model_name(policy, config)), pool);
  return std::make_unique<TensorBlocks>(
      shared_tensor_truth(placed.key, placed.config, layers, activations), placed, pool);
}

constexpr std::int64_t kMostKvSlots = 1 << 20, kMostStateSlots = 1 << 16, kMostBlocks = 1 << 13;

/// A pool of tensors is written as a whole where it is made, so it has to be small.
Result<void> check_tensors(const PolicyEntry& policy, const Config& config) {
  if (Result<void> fits = check_model(policy, config); !fits) return fits;
  const auto refuse = [](const char* field, std::int64_t count, std::int64_t most,
                         const char* of = "slots") {
    return fail("field " + std::string(field) + ": pools of tensors have at most " +
                std::to_string(most) + " " + of + ", and here there are " + std::to_string(count));
  };
  if (policy.groups != nullptr) {
    const std::int64_t blocks = policy.groups(config)->blocks;
    if (blocks > kMostBlocks) return refuse("blocks", blocks, kMostBlocks, "blocks");
    return {};
  }
  const PolicyEntry::SlotCounts slots = policy.slots_in(config);
  if (slots.kv_end > kMostKvSlots) return refuse("kv_tokens", slots.kv_end, kMostKvSlots);
  if (slots.states > kMostStateSlots) return refuse("state_slots", slots.states, kMostStateSlots);
  return {};
}

const std::shared_ptr<const TensorLayers>& layers_of_host() {
  static const std::shared_ptr<const TensorLayers> layers = judged_layers(host_layers());
  return layers;
}

const Registration<FidelityEntry> kTorch{
    {.name = "torch",
     .sentence = "labels, and beside them the tensors of a tiny hybrid model in float32, run by "
                 "torch.ops.lockstep.* on the CPU and compared bit by bit with each row alone",
     .models = reference::hybrid_presets,
     .keeps_rings = false,
     .check = check_tensors,
     .make =
         [](const PolicyEntry& policy, const Config& config, LabelState& labels,
            PolicyEntry::SlotCounts slots) {
           return made(policy, config, labels, slots, layers_of_host(), at::kFloat);
         },
     .make_blocks =
         [](const PolicyEntry& policy, const Config& config) {
           return made_blocks(policy, config, layers_of_host(), at::kFloat);
         }}};

const DeviceLayers& layers_of_kernels() {
  static const DeviceLayers layers = [] {
    DeviceLayers found = device_layers();
    if (found.layers != nullptr) found.layers = judged_layers(found.layers);
    return found;
  }();
  return layers;
}

/// Latent attention is a kernel of one size alone.
constexpr std::int64_t kLatentColumns = 512, kRotatedColumns = 64;

Result<void> check_kernels(const PolicyEntry& policy, const Config& config) {
  if (Result<void> fits = check_tensors(policy, config); !fits) return fits;
  const std::string name = model_name(policy, config);
  const reference::HybridConfig model = *named_model(name);
  for (const reference::HybridUnit& unit : model.units)
    if (const auto* const latent = std::get_if<reference::LatentUnit>(&unit.kind);
        latent != nullptr &&
        (latent->latent != kLatentColumns || latent->rope_dim != kRotatedColumns))
      return fail("field model: " + name + " has latents of " + std::to_string(latent->latent) +
                  " + " + std::to_string(latent->rope_dim) + " columns, and the kernels take " +
                  std::to_string(kLatentColumns) + " + " + std::to_string(kRotatedColumns) +
                  "; small-deepseek-v3 has them, and --fidelity torch runs any");
  if (layers_of_kernels().layers == nullptr)
    return fail("field fidelity: kernels run on a GPU, and " + layers_of_kernels().reason);
  return {};
}

const Registration<FidelityEntry> kKernels{
    {.name = "kernels",
     .sentence = "the same in bfloat16 on a GPU, by the project's own kernels",
     .models = reference::hybrid_presets_of_both_sizes,
     .keeps_rings = false,
     .check = check_kernels,
     .make =
         [](const PolicyEntry& policy, const Config& config, LabelState& labels,
            PolicyEntry::SlotCounts slots) {
           return made(policy, config, labels, slots, layers_of_kernels().layers, at::kBFloat16);
         },
     .make_blocks =
         [](const PolicyEntry& policy, const Config& config) {
           return made_blocks(policy, config, layers_of_kernels().layers, at::kBFloat16);
         }}};

}  // namespace
}  // namespace lockstep::cache_sim
