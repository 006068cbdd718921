// Numbers in the slots of real policies: every defect, and more traces than a commit waits for.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
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

TEST(Fidelity, ofReferenceChangesNoFindingOfAnyFixture) {
  const testing_support::ScratchFolder scratch;
  const testing_support::ProgramRun run = testing_support::run_program(
      {"report", "--fidelity", "reference", "--out", scratch.path("pages"), "-q"});
  EXPECT_EQ(run.status, kExitPass) << run.out;
}

/// The rows of defects.txt: `number` where numbers alone find the defect, so a forward reads what
/// it spoils; `-` where it loses or keeps memory, locks, an order or reuse, which the auditor or
/// the oracle finds, where the damaged policy stops itself first, or where so few traces do not
/// read what it spoils; `endless` where no auditor stops the damaged policy.
std::map<std::string, std::string> rows_of_defects() {
  std::map<std::string, std::string> rows;
  std::istringstream text(testing_support::read_text(std::filesystem::path(LOCKSTEP_SOURCE_DIR) /
                                                     "properties/cache_sim/numbers/defects.txt"));
  for (std::string name, row; text >> name >> row;) rows[name] = row;
  return rows;
}

class EveryDefectWithNumbers : public testing::TestWithParam<std::string> {};

TEST_P(EveryDefectWithNumbers, hasItsRowInTheMatrix) {
  const std::string row = rows_of_defects()[GetParam()];
  if (row == "endless" || row == "rowless") return;
  EXPECT_EQ(testing_support::row_of_matrix(GetParam()), row);
}

// Labels explain each mistake of a cache.
TEST_P(EveryDefectWithNumbers, givesNoWrongNumberUnderRightLabels) {
  const std::string row = rows_of_defects()[GetParam()];
  if (row == "endless" || row == "rowless") return;
  EXPECT_EQ(testing_support::number_that_labels_call_right(GetParam()), "");
}

INSTANTIATE_TEST_SUITE_P(Each, EveryDefectWithNumbers,
                         testing::ValuesIn(testing_support::defects_with_numbers()),
                         [](const auto& info) { return test_name(info.param); });

TEST(DefectsWithNumbers, haveNoRowTooMany) {
  const std::vector<std::string> all = testing_support::defects_with_numbers();
  for (const auto& [name, row] : rows_of_defects())
    EXPECT_NE(std::find(all.begin(), all.end(), name), all.end()) << name;
}

}  // namespace
}  // namespace lockstep::cache_sim
