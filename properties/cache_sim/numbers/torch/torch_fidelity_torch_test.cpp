// Tensors in the slots of real policies, under random traces.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache_sim/model/fidelity.hpp"
#include "cache_sim/numbers/labelled_numbers.hpp"
#include "cache_sim/numbers/placed_model.hpp"
#include "cache_sim/numbers/torch/tensor_blocks.hpp"
#include "cache_sim/numbers/torch/tensor_state.hpp"
#include "cache_sim/replay/replay.hpp"
#include "properties/support/fidelity.hpp"
#include "properties/support/program.hpp"
#include "properties/support/search.hpp"
#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {
namespace {

using testing::HasSubstr;

std::vector<std::string> defects_with_rows() {
  std::vector<std::string> names = testing_support::defects_with_numbers();
  std::map<std::string, std::string> rows = testing_support::rows_of_defects();
  std::erase_if(names, [&](const std::string& name) { return rows[name] == "rowless"; });
  return names;
}

void expect_nothing_found(std::uint64_t seed, std::int64_t traces) {
  for (const std::string& policy : testing_support::policies_with_numbers())
    for (const std::string& model : testing_support::models_of(policy)) {
      RunOptions run;
      run.subjects = {policy};
      const ExploreOutcome outcome =
          testing_support::searched_with_numbers(std::move(run), "torch", model, seed, traces);
      EXPECT_EQ(outcome.traces, traces) << policy << " with " << model;
      for (const Discovery& found : outcome.discoveries)
        ADD_FAILURE() << policy << " with " << model << ": " << found.finding.finding.text;
    }
}

TEST(TorchFidelity, findsNothingInSoundPolicies) {
  expect_nothing_found(5, 2);
}

TEST(TorchFidelityInFull, findsNothingInTwoThousandTraces) {
  expect_nothing_found(7, 2000 / 32);
}

TEST(TorchFidelity, saysByHowMuchAWrongLabelMovesAnOutput) {
  const testing_support::ProgramRun run = testing_support::run_program(
      {"replay", "fixtures/traces/every_forward_moves_both_parts_of_the_state.trace", "--fidelity",
       "torch", "--defect", "sglang-no-buffer:drops-initial-state"});
  EXPECT_EQ(run.status, kExitInvariant) << run.out;
  EXPECT_THAT(run.out, HasSubstr("stands for the empty prefix. Numbers: logits after 6 tokens"));
  EXPECT_THAT(
      run.out,
      HasSubstr(" off, token 16 is the likeliest instead of 13; unit 0: the recurrent part"));
}

TEST(TorchFidelity, isRefusedWhereAPolicyHasRingsOrLargePools) {
  const auto refused = [](std::string_view policy, std::string_view field, std::string_view value) {
    Config config;
    config.put(kFidelityField, "torch");
    EXPECT_TRUE(config.set(field, value).has_value());
    const Result<void> fits = check_fidelity(*Registry<PolicyEntry>::find(policy), config);
    return fits ? std::string() : fits.error().text;
  };
  EXPECT_EQ(refused("sglang-no-buffer", "replay_ring", "0"), "");
  EXPECT_EQ(refused("sglang-no-buffer", "replay_ring", "4"),
            "field fidelity: torch keeps no rings, which policy sglang-no-buffer has here");
  EXPECT_EQ(refused("sglang-no-buffer", "kv_tokens", "4194304"),
            "field kv_tokens: pools of tensors have at most 1048576 slots, and here there are "
            "4194305");
  EXPECT_EQ(refused("vllm-align", "blocks", "8192"), "");
  EXPECT_EQ(refused("vllm-align", "blocks", "8193"),
            "field blocks: pools of tensors have at most 8192 blocks, and here there are 8193");
}

/// The layers that tests with defects run: those of a GPU where there is one.
const DeviceLayers& device() {
  static const DeviceLayers found = device_layers();
  return found;
}

std::shared_ptr<TensorTruth> truth_of(const std::string& name,
                                      const reference::HybridConfig& model) {
  static std::map<std::string, std::shared_ptr<TensorTruth>> known;
  if (known.size() > 8) known.clear();
  std::shared_ptr<TensorTruth>& truth = known[name];
  const bool on_gpu = device().layers != nullptr;
  if (truth == nullptr || truth->computed() > 5000)
    truth = std::make_shared<TensorTruth>(std::make_shared<const TensorModel>(
        model, reference::drawn_hybrid(model), on_gpu ? device().layers : host_layers(),
        on_gpu ? at::kBFloat16 : at::kFloat));
  return truth;
}

Result<PlacedModel> placed(const PolicyEntry& policy, const Config& config) {
  return policy.groups(config).and_then([&](const BlockGroups& pool) {
    return placed_model(*reference::hybrid_preset(model_name(policy, config)), pool);
  });
}

/// Tensors to which nobody listens beside labels, so that a run goes on after a wrong one.
const Registration<FidelityEntry> kTensorsAlone{
    {.name = "tensors-alone",
     .sentence = "of the tests",
     .models = nullptr,
     .keeps_rings = false,
     .check = [](const PolicyEntry& policy, const Config& config) -> Result<void> {
       if (policy.groups == nullptr) return {};
       return placed(policy, config).map([](const PlacedModel&) {});
     },
     .make = [](const PolicyEntry& policy, const Config& config, LabelState&,
                PolicyEntry::SlotCounts slots) -> std::unique_ptr<NumberedPools> {
       const std::string name = model_name(policy, config);
       return std::make_unique<TensorState>(truth_of(name, *reference::hybrid_preset(name)),
                                            slots.states, slots.kv_end, config.page);
     },
     .make_blocks = [](const PolicyEntry& policy,
                       const Config& config) -> std::unique_ptr<NumberedBlocks> {
       const PlacedModel model = *placed(policy, config);
       return std::make_unique<TensorBlocks>(truth_of(model.key, model.config), model,
                                             *policy.groups(config), false);
     }}};

constexpr const char* kMissedSwap = "sglang-extra-buffer:misses-swap";

TEST(TorchFidelity, aMissedSwapMovesTensorsInItsOwnTrace) {
  const Result<ReplayOutcome> outcome =
      replay({.file = std::string(LOCKSTEP_SOURCE_DIR) +
                      "/fixtures/traces/a_kept_state_survives_the_step_under_way.trace",
              .subjects = {"sglang-extra-buffer"},
              .fidelity = "tensors-alone",
              .check = CheckLevel::labels,
              .defect = kMissedSwap,
              .config = {},
              .model = {}});
  ASSERT_TRUE(outcome) << outcome.error().text;
  ASSERT_FALSE(outcome->run->findings().empty());
  const Finding& found = outcome->run->findings().front().finding;
  EXPECT_EQ(found.kind, FindingKind::number_differs) << found.text;
}

/// The defects of defects.txt that move a number in double.
std::vector<std::string> defects_of_numbers() {
  std::vector<std::string> names;
  const auto is_left_out = [](const std::string& name) {
    if (name == kMissedSwap) return true;  // one random trace in a thousand shows it
    for (const std::string_view of_rings :
         {"cursor", "flush", "ring", "entry", "window", "counts-by-layer", "counts-what-it-commits",
          "counts-rejected-drafts"})
      if (name.find(of_rings) != std::string::npos) return true;  // tensors keep no rings
    return false;
  };
  for (const auto& [name, row] : testing_support::rows_of_defects())
    if (row == "number" && !is_left_out(name)) names.push_back(name);
  return names;
}

class EveryDefectOfNumbersInFull : public testing::TestWithParam<std::string> {};

TEST_P(EveryDefectOfNumbersInFull, movesTensorsToo) {
  EXPECT_EQ(testing_support::row_of_matrix(GetParam(), "tensors-alone"), "number");
}

INSTANTIATE_TEST_SUITE_P(Each, EveryDefectOfNumbersInFull, testing::ValuesIn(defects_of_numbers()),
                         [](const auto& info) { return testing_support::test_name(info.param); });

class EveryDefectWithTensorsInFull : public testing::TestWithParam<std::string> {};

// Labels explain each mistake of a cache.
TEST_P(EveryDefectWithTensorsInFull, givesNoWrongNumberUnderRightLabels) {
  const bool on_gpu = device().layers != nullptr;
  EXPECT_EQ(testing_support::number_that_labels_call_right(GetParam(), on_gpu ? "kernels" : "torch",
                                                           on_gpu ? 6 : 60),
            "");
}

INSTANTIATE_TEST_SUITE_P(Each, EveryDefectWithTensorsInFull, testing::ValuesIn(defects_with_rows()),
                         [](const auto& info) { return testing_support::test_name(info.param); });

}  // namespace
}  // namespace lockstep::cache_sim
