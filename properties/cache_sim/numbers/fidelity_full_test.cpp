// Numbers in the slots of real policies: every defect, and more traces than a commit waits for.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "properties/support/fidelity.hpp"
#include "properties/support/program.hpp"
#include "properties/support/search.hpp"

namespace lockstep::cache_sim {
namespace {

using testing_support::test_name;

class EveryPolicyWithNumbers : public testing::TestWithParam<std::string> {};

TEST_P(EveryPolicyWithNumbers, isRightInTenThousandTracesOfEachModel) {
  for (const std::string& model : testing_support::models_of(GetParam())) {
    RunOptions run;
    run.subjects = {GetParam()};
    const ExploreOutcome outcome =
        testing_support::searched_with_numbers(std::move(run), "reference", model, 7, 10'000);
    EXPECT_EQ(outcome.traces, 10'000) << model;
    for (const Discovery& found : outcome.discoveries)
      ADD_FAILURE() << model << ": " << found.finding.finding.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Each, EveryPolicyWithNumbers,
                         testing::ValuesIn(testing_support::policies_with_numbers()),
                         [](const auto& info) { return test_name(info.param); });

using TraceAndModel = std::pair<std::string, std::string>;

/// The traces of long texts (fidelity_test.cpp plays all others) under each model of their policy.
std::vector<TraceAndModel> long_fixtures() {
  std::vector<TraceAndModel> all;
  for (const auto& [trace, policy] : testing_support::long_traces())
    for (const std::string& model : testing_support::models_of(policy))
      all.emplace_back(trace, model);
  return all;
}

class LongFixturesWithNumbers : public testing::TestWithParam<TraceAndModel> {};

TEST_P(LongFixturesWithNumbers, endAsTheirRunLinesSay) {
  namespace fs = std::filesystem;
  const auto& [trace, model] = GetParam();
  const std::string file = fmt::format("traces/{}.trace", trace);
  const testing_support::ScratchFolder scratch;
  fs::create_directories(scratch.path("traces"));
  fs::copy(fs::path(LOCKSTEP_SOURCE_DIR) / "fixtures" / file, fs::path(scratch.path(file)));
  const testing_support::ProgramRun run =
      testing_support::run_program({"report", "--fidelity", "reference", "--model", model,
                                    "--fixtures", scratch.path("."), "--out", scratch.path("out")});
  EXPECT_EQ(run.status, kExitPass) << run.out << run.err;
}

INSTANTIATE_TEST_SUITE_P(Each, LongFixturesWithNumbers, testing::ValuesIn(long_fixtures()),
                         [](const auto& info) {
                           return test_name(info.param.first + "_" + info.param.second);
                         });

class EveryDefectWithNumbers : public testing::TestWithParam<std::string> {};

TEST_P(EveryDefectWithNumbers, hasItsRowInTheMatrix) {
  const std::string row = testing_support::rows_of_defects()[GetParam()];
  if (row == "endless" || row == "rowless") return;
  EXPECT_EQ(testing_support::row_of_matrix(GetParam()), row);
}

// Labels explain each mistake of a cache.
TEST_P(EveryDefectWithNumbers, givesNoWrongNumberUnderRightLabels) {
  const std::string row = testing_support::rows_of_defects()[GetParam()];
  if (row == "endless" || row == "rowless") return;
  EXPECT_EQ(testing_support::number_that_labels_call_right(GetParam()), "");
}

INSTANTIATE_TEST_SUITE_P(Each, EveryDefectWithNumbers,
                         testing::ValuesIn(testing_support::defects_with_numbers()),
                         [](const auto& info) { return test_name(info.param); });

TEST(DefectsWithNumbers, haveNoRowTooMany) {
  const std::vector<std::string> all = testing_support::defects_with_numbers();
  for (const auto& [name, row] : testing_support::rows_of_defects())
    EXPECT_NE(std::ranges::find(all, name), all.end()) << name;
}

}  // namespace
}  // namespace lockstep::cache_sim
