// Every short trace over tiny pools, completely: most bugs show in a short trace, and failing
// allocations are the paths that tests rarely take. exhaustion_full_test.cpp goes two operations
// further.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "properties/cache_sim/search/exhaustion.hpp"
#include "properties/support/search.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep {
namespace {

using testing_support::Exhausted;

class ShortTraces : public testing::TestWithParam<std::string> {};

TEST_P(ShortTraces, ofFourOperationsShowNothing) {
  const Exhausted all = testing_support::all_short_traces(GetParam(), 4);
  EXPECT_EQ(all.finding, "");
  const Capabilities known = Registry<PolicyEntry>::find(GetParam())->capabilities;
  EXPECT_GT(all.traces, known.contains(Capability::tree) ? 3000 : 1500);
  RecordProperty("traces", static_cast<int>(all.traces));
}

INSTANTIATE_TEST_SUITE_P(Each, ShortTraces,
                         testing::ValuesIn(testing_support::policies_with_oracle()),
                         [](const auto& info) { return testing_support::test_name(info.param); });

// Requests and copies in every order: a mistake shows in few operations, but in one order alone.
TEST(Copies, inEachOrderShowNothing) {
  for (const char* const policy : {"write_through", "write_through_selective", "write_back"}) {
    const Exhausted all = testing_support::all_copies(policy, "", 3);
    EXPECT_EQ(all.finding, "") << policy;
    EXPECT_GT(all.traces, 3000) << policy;
    EXPECT_GT(all.refusals, 0) << policy;
  }
}

TEST(Copies, inSomeOrderShowALoadThatNobodyWaitsFor) {
  for (const char* const defect : {"runs-before-load", "refused-load-forgets-state"})
    EXPECT_NE(
        testing_support::all_copies("write_back", std::string("sglang-no-buffer:") + defect, 4)
            .finding,
        "")
        << defect;
}

TEST(Transfers, inEachOrderShowNothing) {
  const Exhausted all = testing_support::all_transfers("", 3);
  EXPECT_EQ(all.finding, "");
  EXPECT_GT(all.traces, 3000);
  EXPECT_GT(all.refusals, 100);
}

TEST(Transfers, inSomeOrderShowAMistake) {
  for (const char* const defect : {"decodes-before-landing", "goes-on-after-failure",
                                   "reuses-aborted-targets", "source-leaves-early"})
    EXPECT_NE(testing_support::all_transfers(std::string("sglang-pd:") + defect, 3).finding, "")
        << defect;
}

// A refusal leaves everything as it was, but for what eviction freed on the way; everybody can end,
// and then nothing is lost. exhaustion_full_test.cpp leaves no operation out.
TEST(Allocations, failInTurnWithoutHarm) {
  using testing_support::Short;
  std::int64_t refusals = 0;
  for (const char* const folder : {"/fixtures/traces", "/fixtures/regressions"})
    for (const auto& entry :
         std::filesystem::directory_iterator(std::string(LOCKSTEP_SOURCE_DIR) + folder)) {
      if (entry.path().extension() != ".trace") continue;
      SCOPED_TRACE(entry.path());
      for (const Short what : {Short::of_kv, Short::of_states, Short::of_both}) {
        const Exhausted each =
            testing_support::each_allocation_failing(entry.path().string(), what, 9);
        EXPECT_EQ(each.finding, "");
        refusals += each.refusals;
      }
    }
  EXPECT_GT(refusals, 100);
}

}  // namespace
}  // namespace lockstep
