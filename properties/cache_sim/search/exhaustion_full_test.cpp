// Every short trace over tiny pools, as long as can be enumerated in minutes.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "properties/cache_sim/search/exhaustion.hpp"
#include "properties/support/search.hpp"

namespace lockstep {
namespace {

using testing_support::Exhausted;

class LongerTraces : public testing::TestWithParam<std::string> {};

TEST_P(LongerTraces, ofSixOperationsShowNothing) {
  const Exhausted all = testing_support::all_short_traces(GetParam(), 6);
  EXPECT_EQ(all.finding, "");
  EXPECT_GT(all.traces, 100'000);
}

INSTANTIATE_TEST_SUITE_P(Each, LongerTraces,
                         testing::ValuesIn(testing_support::policies_with_oracle()),
                         [](const auto& info) { return testing_support::test_name(info.param); });

class EveryOrderOfCopies : public testing::TestWithParam<const char*> {};

TEST_P(EveryOrderOfCopies, ofFiveOperationsShowsNothing) {
  const Exhausted all = testing_support::all_copies(GetParam(), "", 5);
  EXPECT_EQ(all.finding, "");
  EXPECT_GT(all.traces, 100'000);
}

INSTANTIATE_TEST_SUITE_P(Each, EveryOrderOfCopies,
                         testing::Values("write_through", "write_through_selective", "write_back"));

TEST(EveryOrderOfTransfers, ofFiveOperationsShowsNothing) {
  const Exhausted all = testing_support::all_transfers("", 5);
  EXPECT_EQ(all.finding, "");
  EXPECT_GT(all.traces, 100'000);
}

TEST(EveryOrderOfTransfers, ofFourOperationsShowsEachMistake) {
  for (const std::string& defect : testing_support::all_defects()) {
    if (!defect.starts_with("sglang-pd:")) continue;
    EXPECT_NE(testing_support::all_transfers(defect, 4).finding, "") << defect;
  }
}

TEST(Allocations, everyOneFailsInTurnWithoutHarm) {
  using testing_support::Short;
  for (const char* const folder : {"/fixtures/traces", "/fixtures/regressions"})
    for (const auto& entry :
         std::filesystem::directory_iterator(std::string(LOCKSTEP_SOURCE_DIR) + folder)) {
      if (entry.path().extension() != ".trace") continue;
      SCOPED_TRACE(entry.path());
      for (const Short what : {Short::of_kv, Short::of_states, Short::of_both})
        EXPECT_EQ(testing_support::each_allocation_failing(entry.path().string(), what, 1).finding,
                  "");
    }
}

}  // namespace
}  // namespace lockstep
