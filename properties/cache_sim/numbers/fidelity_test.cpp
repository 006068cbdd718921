// Numbers in the slots of real policies, under random traces (more of them in
// fidelity_full_test.cpp).
#include "cache_sim/model/fidelity.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "properties/support/fidelity.hpp"
#include "properties/support/program.hpp"
#include "properties/support/search.hpp"
#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {
namespace {

using testing::HasSubstr;

TEST(Fidelity, ofReferenceFindsNothingInSoundPolicies) {
  for (const std::string& policy : testing_support::policies_with_numbers())
    for (const std::string& model : testing_support::models_of(policy)) {
      RunOptions run;
      run.subjects = {policy};
      const ExploreOutcome outcome =
          testing_support::searched_with_numbers(std::move(run), "reference", model, 5, 30);
      EXPECT_EQ(outcome.traces, 30) << policy << " with " << model;
      ASSERT_TRUE(outcome.discoveries.empty())
          << policy << " with " << model << ": " << outcome.discoveries[0].finding.finding.text;
    }
}

// A planted defect, the wrong label and the wrong logit.
TEST(Fidelity, ofReferenceSaysByHowMuchAWrongLabelMovesAnOutput) {
  const testing_support::ProgramRun run = testing_support::run_program(
      {"replay", "fixtures/traces/every_forward_moves_both_parts_of_the_state.trace", "--fidelity",
       "reference", "--defect", "sglang-no-buffer:drops-initial-state"});
  EXPECT_EQ(run.status, kExitInvariant);
  EXPECT_THAT(run.out, HasSubstr("wrong-state-prefix"));
  EXPECT_THAT(run.out, HasSubstr("stands for the empty prefix. Numbers: logits after 6 tokens"));
  EXPECT_THAT(run.out,
              HasSubstr(" token is the likeliest; unit 0: the recurrent part of state slot"));
}

// Every run line of the fixtures, under each model that its policies can have. Four texts of 9,000
// to 58,300 tokens are left to fidelity_full_test.cpp.
TEST(Fidelity, ofReferenceChangesNoFindingOfAFixture) {
  namespace fs = std::filesystem;
  const testing_support::ScratchFolder scratch;
  const fs::path fixtures = fs::path(LOCKSTEP_SOURCE_DIR) / "fixtures";
  for (const char* const folder : {"traces", "regressions"})
    fs::copy(fixtures / folder, fs::path(scratch.path(folder)));
  for (const char* const text :
       {"a_large_pool_needs_wide_offsets", "a_prompt_of_whole_chunks_misses_its_own_state",
        "any_chunk_reuses_the_whole_prompt", "chunk_ends_are_reused"})
    EXPECT_TRUE(fs::remove(scratch.path(fmt::format("traces/{}.trace", text)))) << text;
  const testing_support::ProgramRun run =
      testing_support::run_program({"report", "--fidelity", "reference", "--fixtures",
                                    scratch.path("."), "--out", scratch.path("pages"), "-q"});
  EXPECT_EQ(run.status, kExitPass) << run.out;
  const nlohmann::json report =
      nlohmann::json::parse(testing_support::read_text(scratch.path("pages/report.json")));
  EXPECT_EQ(report["summary"]["not_as_expected"], 0);
  EXPECT_GE(report["summary"]["runs_with_numbers"], 1000);
  const std::string page = testing_support::read_text(
      scratch.path("pages/traces/every_forward_moves_both_parts_of_the_state.html"));
  EXPECT_THAT(page, HasSubstr("bit by bit as without a cache"));
  EXPECT_THAT(page, HasSubstr("; logits are 1e"));
}

// Shrinking looks at labels alone, and what it leaves says the numbers again.
TEST(Fidelity, ofReferenceIsSaidByAShrunkTrace) {
  RunOptions run = testing_support::run_with_defect("sglang-no-buffer:drops-initial-state");
  ExploreOptions options;
  options.run = run;
  options.run.config.put(kFidelityField, "reference");
  options.run.fixed.add(kFidelityField);
  options.seed = 3;
  options.traces = 300;
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value());
  ASSERT_EQ(outcome->discoveries.size(), 1u);
  EXPECT_THAT(outcome->discoveries[0].finding.finding.text, HasSubstr(". Numbers: logits after"));
  EXPECT_EQ(outcome->discoveries[0].trace.config.text(kFidelityField), "reference");
}

TEST(Fidelity, isRefusedWhereAPolicyOrAModelCannotHaveIt) {
  const auto refused = [](std::string_view policy, std::string_view fidelity,
                          std::string_view model) {
    Config config;
    config.put(kFidelityField, fidelity);
    config.put(kModelField, model);
    const Result<void> fits = check_fidelity(*Registry<PolicyEntry>::find(policy), config);
    return fits ? std::string() : fits.error().text;
  };
  EXPECT_EQ(refused("sglang-no-buffer", "reference", ""), "");
  EXPECT_EQ(refused("radix", "reference", ""), "");
  EXPECT_EQ(refused("vllm-align", "reference", ""),
            "field fidelity: policy vllm-align does not tell its forwards, so its slots hold "
            "labels alone");
  EXPECT_THAT(refused("sglang-no-buffer", "referenc", ""), HasSubstr("but `reference` is one"));
  EXPECT_THAT(refused("sglang-no-buffer", "reference", "tiny-qwen"),
              HasSubstr("field model: there is no model `tiny-qwen`"));
  EXPECT_EQ(refused("radix", "reference", "tiny-nemotron-h"),
            "field model: tiny-nemotron-h has recurrent states, and policy radix keeps none");
  EXPECT_EQ(refused("radix", "label", "tiny-qwen3"), "field model: fidelity label has no model");
}

}  // namespace
}  // namespace lockstep::cache_sim
