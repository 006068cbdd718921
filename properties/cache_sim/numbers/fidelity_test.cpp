// Numbers in the slots of real policies, under random traces (more of them in
// fidelity_full_test.cpp).
#include "cache_sim/model/fidelity.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "properties/reference/models/hybrid/preset_checkpoint.hpp"
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
  EXPECT_THAT(
      run.out,
      HasSubstr(" off, token 16 is the likeliest instead of 13; unit 0: the recurrent part"));
}

// The model of a checkpoint in the slots of a policy, sound and broken; one that cannot be read is
// refused in a sentence.
TEST(Fidelity, ofReferenceTakesACheckpoint) {
  for (const auto& [preset, policy] : {std::pair{"tiny-nemotron-h", "sglang-no-buffer"},
                                       {"tiny-qwen3-next", "vllm-align"},
                                       {"tiny-deepseek-v3", "radix"},
                                       {"tiny-qwen3", "radix"},
                                       {"tiny-window", "static-kv"}}) {
    const testing_support::Checkpoint stored(preset);
    RunOptions run;
    run.subjects = {policy};
    const ExploreOutcome outcome = testing_support::searched_with_numbers(
        std::move(run), "reference", stored.written(), 5, 30);
    EXPECT_EQ(outcome.traces, 30) << policy << " with " << preset;
    ASSERT_TRUE(outcome.discoveries.empty()) << outcome.discoveries[0].finding.finding.text;
  }
  testing_support::Checkpoint stored("tiny-qwen3-next");
  const auto replayed = [&] {
    return testing_support::run_program(
        {"replay", "fixtures/traces/every_forward_moves_both_parts_of_the_state.trace",
         "--fidelity", "reference", "--config", "model=" + stored.written(), "--defect",
         "sglang-no-buffer:drops-initial-state"});
  };
  const testing_support::ProgramRun run = replayed();
  EXPECT_EQ(run.status, kExitInvariant) << run.err;
  EXPECT_THAT(run.out, HasSubstr("Numbers: logits after 6 tokens"));
  stored.config.erase("linear_conv_kernel_dim");
  const testing_support::ProgramRun refused = replayed();
  EXPECT_EQ(refused.status, kExitBadInput) << refused.out;
  EXPECT_THAT(refused.err, HasSubstr("field model: "));
  EXPECT_THAT(refused.err, HasSubstr("config.json: linear_conv_kernel_dim is null"));
}

// Every run line of the fixtures, under each model that its policies can have. Four texts of 9,000
// to 58,300 tokens are left to fidelity_full_test.cpp.
TEST(Fidelity, ofReferenceChangesNoFindingOfAFixture) {
  namespace fs = std::filesystem;
  const testing_support::ScratchFolder scratch;
  const fs::path fixtures = fs::path(LOCKSTEP_SOURCE_DIR) / "fixtures";
  for (const char* const folder : {"traces", "regressions"})
    fs::copy(fixtures / folder, fs::path(scratch.path(folder)));
  for (const auto& [text, policy] : testing_support::long_traces())
    EXPECT_TRUE(fs::remove(scratch.path(fmt::format("traces/{}.trace", text)))) << text;
  const testing_support::ProgramRun run =
      testing_support::run_program({"report", "--fidelity", "reference", "--fixtures",
                                    scratch.path("."), "--out", scratch.path("pages"), "-q"});
  EXPECT_EQ(run.status, kExitPass) << run.out;
  const nlohmann::json report =
      nlohmann::json::parse(testing_support::read_text(scratch.path("pages/report.json")));
  EXPECT_EQ(report["summary"]["not_as_expected"], 0);
  EXPECT_GE(report["summary"]["runs_with_numbers"], 1000);
  // Rows over slots, and over blocks.
  for (const auto& [name, row] :
       {std::pair{"every_forward_moves_both_parts_of_the_state", "a after 4 tokens: token "},
        std::pair{"vllm_a_step_without_drafts_goes_on_from_the_accepted_state",
                  "first after 3 tokens: token "}}) {
    const std::string page =
        testing_support::read_text(scratch.path(fmt::format("pages/traces/{}.html", name)));
    EXPECT_THAT(page, HasSubstr(row)) << name;
    EXPECT_THAT(page, HasSubstr("bit by bit as without a cache")) << name;
    EXPECT_THAT(page, HasSubstr("; logits are 1e")) << name;
  }
}

// A report under one model, a preset or a checkpoint; one that no run can have is refused.
TEST(Fidelity, ofAReportIsOfTheModelThatIsNamed) {
  namespace fs = std::filesystem;
  const testing_support::ScratchFolder scratch;
  fs::create_directories(scratch.path("traces"));
  scratch.write("traces/x.trace",
                "# run: lockstep replay %s\n"
                "# run: lockstep replay %s --defect radix:matches-first-chunk\n"
                "# finds: missed-reuse\n"
                "config chunked_prefill=16 policy=radix\n"
                "request id=r tokens=a40 output=b2\nrun\n"
                "request id=again tokens=a40 output=b2\nrun\n");
  const auto report = [&](const std::string& model) {
    return testing_support::run_program({"report", "--fidelity", "reference", "--model", model,
                                         "--fixtures", scratch.path("."), "--out",
                                         scratch.path("out")});
  };
  const testing_support::Checkpoint stored("tiny-qwen3");
  for (const std::string& model : {std::string("tiny-window"), stored.written()}) {
    const testing_support::ProgramRun run = report(model);
    EXPECT_EQ(run.status, kExitPass) << run.out << run.err;
    EXPECT_THAT(run.out, HasSubstr("2 runs more with the numbers"));
  }
  const testing_support::ProgramRun without_states = report("tiny-qwen3-next");
  EXPECT_EQ(without_states.status, kExitBadInput);
  EXPECT_THAT(without_states.err, HasSubstr("--model tiny-qwen3-next: no run can have it; of the"));
  const testing_support::ProgramRun of_what =
      testing_support::run_program({"report", "--model", "tiny-window", "--fixtures",
                                    scratch.path("."), "--out", scratch.path("out")});
  EXPECT_EQ(of_what.status, kExitBadInput);
  EXPECT_THAT(of_what.err, HasSubstr("--model: of which numbers? name --fidelity, too"));
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

// The same of blocks: of one that a row reads, and of one that others could find.
TEST(Fidelity, ofReferenceSaysByHowMuchAWrongBlockMovesAnOutput) {
  const auto finding = [](const std::string& trace, const std::string& defect) {
    const testing_support::ProgramRun run =
        testing_support::run_program({"replay", "fixtures/traces/" + trace, "--subject",
                                      "vllm-align", "--fidelity", "reference", "--defect", defect});
    EXPECT_EQ(run.status, kExitInvariant);
    return run.out;
  };
  const std::string read =
      finding("vllm_a_step_without_drafts_goes_on_from_the_accepted_state.trace",
              "vllm-align:forgets-accepted-without-drafts");
  EXPECT_THAT(read, HasSubstr("wrong-state-prefix at event 6: a forward from token 5 on begins"));
  EXPECT_THAT(read, HasSubstr(". Numbers: a row over tokens 5 to 6 of a4+b1+c1: logits after 6"));
  EXPECT_THAT(read, HasSubstr("unit 0: the recurrent part of block 2 differs"));
  EXPECT_THAT(finding("vllm_a_hit_inside_a_block_copies_it.trace", "vllm-align:skips-block-copies"),
              HasSubstr("its recurrent state stands for a freed state. Numbers: the recurrent part "
                        "of unit 0 is NaN off, which holds what block 3 had before anybody wrote"));
}

/// The error for `config` in the form of --config; empty where it fits.
std::string refusal(const PolicyEntry& policy, std::string_view config_text) {
  Config config;
  if (const Result<void> set = config.set_all(config_text); !set) return set.error().text;
  const Result<void> fits = check_fidelity(policy, config);
  return fits ? "" : fits.error().text;
}

TEST(Fidelity, isRefusedWhereBlocksCannotHaveIt) {
  const PolicyEntry& align = *Registry<PolicyEntry>::find("vllm-align");
  const std::string reference = "fidelity=reference,";
  EXPECT_EQ(refusal(align, reference + "block=4,hash_block=4"), "");
  EXPECT_EQ(refusal(align, reference + "overlap=1"), "");
  EXPECT_THAT(refusal(align, reference + "overlap=1,drafts=2"), HasSubstr("field overlap: "));
  for (const std::string field : {"cpu_chunks", "replay_ring"})
    EXPECT_THAT(refusal(align, reference + field + "=4"), HasSubstr("field " + field + ": "));
  EXPECT_EQ(refusal(align, "overlap=1,drafts=2"), "");
  EXPECT_EQ(refusal(align, reference + "model=tiny-deepseek-v3"),
            "field model: tiny-deepseek-v3 has no layer for group 1 of the blocks, which holds "
            "states");
  Config config;
  config.put("groups", "mamba:4");
  config.put("hash_block", 4);
  config.put(kFidelityField, "reference");
  EXPECT_EQ(check_fidelity(align, config).error().text,
            "field model: tiny-nemotron-h has a layer of full attention, and no group of blocks "
            "can hold it");
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
  PolicyEntry silent = *Registry<PolicyEntry>::find("radix");
  silent.tells_forwards = false;
  EXPECT_EQ(refusal(silent, "fidelity=reference"),
            "field fidelity: policy radix does not tell its forwards, so its slots hold labels "
            "alone");
  EXPECT_THAT(refused("sglang-no-buffer", "referenc", ""), HasSubstr("but `reference` is one"));
  EXPECT_THAT(refused("sglang-no-buffer", "reference", "tiny-qwen"),
              HasSubstr("field model: there is no model `tiny-qwen`"));
  EXPECT_EQ(refused("radix", "reference", "tiny-nemotron-h"),
            "field model: tiny-nemotron-h has recurrent states, and policy radix keeps none");
  EXPECT_EQ(refused("radix", "label", "tiny-qwen3"), "field model: fidelity label has no model");
}

}  // namespace
}  // namespace lockstep::cache_sim
