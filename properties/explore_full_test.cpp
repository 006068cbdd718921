// The search at length: every planted defect, and every policy over more traces than a commit waits
// for.
#include <gtest/gtest.h>

#include <string>

#include "cache_sim/trace/trace_writer.hpp"
#include "properties/support/search.hpp"

namespace lockstep::cache_sim {
namespace {

using testing_support::test_name;

class EveryDefect : public testing::TestWithParam<std::string> {};

TEST_P(EveryDefect, isFoundAndShrunk) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    SCOPED_TRACE(seed);
    testing_support::search_for(GetParam(), seed, 5000);
  }
}

INSTANTIATE_TEST_SUITE_P(Each, EveryDefect, testing::ValuesIn(testing_support::all_defects()),
                         [](const auto& info) { return test_name(info.param); });

class EveryPolicy : public testing::TestWithParam<std::string> {};

TEST_P(EveryPolicy, agreesWithItsOracle) {
  const ExploreOutcome outcome = testing_support::searched(GetParam(), "", 7, 100'000);
  for (const Discovery& found : outcome.discoveries) ADD_FAILURE() << trace_text(found.trace);
}

INSTANTIATE_TEST_SUITE_P(Each, EveryPolicy,
                         testing::ValuesIn(testing_support::policies_with_oracle()),
                         [](const auto& info) { return test_name(info.param); });

}  // namespace
}  // namespace lockstep::cache_sim
