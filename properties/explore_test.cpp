// The search: what it makes is legal and is a trace file, it finds nothing where nothing is wrong,
// finds what was planted, and makes it small.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cache_sim/explore.hpp"
#include "cache_sim/random_trace.hpp"
#include "cache_sim/simulation.hpp"
#include "cache_sim/trace_text.hpp"
#include "properties/support/search.hpp"
#include "reference/base/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using testing_support::one_defect_in_eight;
using testing_support::search_for;
using testing_support::searched;
using testing_support::test_name;

const PolicyEntry& some_policy() {
  std::vector<PolicyEntry> policies;
  for (const OracleEntry& oracle : Registry<OracleEntry>::all())
    policies.push_back(*Registry<PolicyEntry>::find(oracle.name));
  const auto at = *rc::gen::inRange<std::size_t>(0, policies.size());
  return *Registry<PolicyEntry>::find(policies[at].name);
}

/// Requests to a scheduler, from a swarm for any policy.
Trace random_scheduled_trace(std::uint64_t seed, std::uint64_t stream, const PolicyEntry& policy) {
  Draw draw(seed, stream);
  Swarm swarm = draw_swarm(draw, policy, Config());
  swarm.operations = std::min(swarm.operations, 16);
  Trace trace;
  trace.config = swarm.config;
  trace.scheduler_level = true;
  trace.statements = random_requests(swarm, draw);
  return trace;
}

std::size_t findings_of(const Trace& trace, RunOptions options) {
  options.config = trace.config;
  const Result<std::unique_ptr<Run>> run = Run::start(options);
  require(run.has_value(), run ? "" : run.error().text);
  Simulation(**run).play(trace);
  return (*run)->findings().size();
}

// A value depends on seed, stream and index alone, so that a search can be split over machines.
RC_GTEST_PROP(Generators, areAFunctionOfSeedAndStream, (std::uint64_t seed, std::uint64_t stream)) {
  const PolicyEntry& policy = some_policy();
  const std::string text = trace_text(random_scheduled_trace(seed, stream, policy));
  RC_ASSERT(trace_text(random_scheduled_trace(seed, stream, policy)) == text);
  RC_ASSERT(trace_text(random_scheduled_trace(seed + 1, stream, policy)) != text);
  RC_ASSERT(trace_text(random_scheduled_trace(seed, stream + 1, policy)) != text);
}

// What a finding is written as is what was played.
RC_GTEST_PROP(TraceText, isReadAsTheSameTrace, (std::uint64_t seed, std::uint64_t stream)) {
  const std::string text = trace_text(random_scheduled_trace(seed, stream, some_policy()));
  const Result<Trace> again = parse_trace(text, "random");
  RC_ASSERT(again.has_value());
  RC_ASSERT(again->scheduler_level);
  RC_ASSERT(trace_text(*again) == text);
}

// Any requests to any policy: it agrees with its oracle, everything ends, and nothing leaks.
RC_GTEST_PROP(ScheduledTraces, endWithoutAFinding, (std::uint64_t seed, std::uint64_t stream)) {
  const PolicyEntry& policy = some_policy();
  const Trace trace = random_scheduled_trace(seed, stream, policy);
  RunOptions options;
  options.config = trace.config;
  options.subjects = {std::string(policy.name), fmt::format("oracle:{}", policy.name)};
  Result<std::unique_ptr<Run>> run = Run::start(options);
  RC_ASSERT(run.has_value());
  Simulation(**run).play(trace);
  RC_ASSERT(!(*run)->error());
  RC_ASSERT((*run)->findings().empty());
  for (const RequestOutcome& outcome : (*run)->outcomes()) RC_ASSERT(outcome.end >= 0);
}

// --- explore -------------------------------------------------------------------------------------

class Policies : public testing::TestWithParam<std::string> {};

// Tree and sorted map agree on every trace, nothing breaks an invariant, everything ends and after
// the last request and a flush every pool is full.
TEST_P(Policies, agreeWithTheirOracles) {
  const ExploreOutcome outcome = searched(GetParam(), "", 1, 1500);
  EXPECT_EQ(outcome.traces, 1500);
  for (const Discovery& found : outcome.discoveries) ADD_FAILURE() << trace_text(found.trace);
  EXPECT_GT(outcome.operations, 1500 * 30);
}

INSTANTIATE_TEST_SUITE_P(Each, Policies, testing::ValuesIn(testing_support::policies_with_oracle()),
                         [](const auto& info) { return test_name(info.param); });

// The same seed is the same search, whatever ran before it.
TEST(Explore, isAFunctionOfItsSeed) {
  const ExploreOutcome first = searched("", "", 5, 300);
  EXPECT_EQ(searched("", "", 5, 300).digest, first.digest);
  EXPECT_NE(searched("", "", 6, 300).digest, first.digest);
}

TEST(Explore, saysWhichMarksItMissed) {
  const std::vector<std::string> missed = searched("radix", "", 1, 50).marks_missed;
  EXPECT_NE(std::find(missed.begin(), missed.end(), "track.branch"), missed.end())
      << "attention alone tracks no states";
}

TEST(Explore, refusesSubjectsThatAreNotThere) {
  ExploreOptions options;
  options.run.subjects = {"nobody"};
  options.traces = 1;
  EXPECT_FALSE(explore(options).has_value());
}

// --- Planted defects -----------------------------------------------------------------------------

class PlantedDefects : public testing::TestWithParam<std::string> {};

// A harness that misses a bug it was given is no harness. All of them: explore_full_test.cpp.
TEST_P(PlantedDefects, areFoundAndShrunk) {
  search_for(GetParam(), 1, 500);
}

INSTANTIATE_TEST_SUITE_P(Few, PlantedDefects, testing::ValuesIn(one_defect_in_eight()),
                         [](const auto& info) { return test_name(info.param); });

// --- shrink --------------------------------------------------------------------------------------

// A smaller trace for another defect would send its reader to the wrong place.
TEST(Shrink, keepsTheKindAndNeverGrows) {
  ExploreOptions options;
  options.run = testing_support::run_with_defect("sglang-no-buffer:tombstone-lock-uncounted");
  options.traces = 500;
  options.findings = 5;
  options.shrinks = false;
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  ASSERT_EQ(outcome->discoveries.size(), 5u);
  for (const Discovery& found : outcome->discoveries) {
    const Result<ShrinkOutcome> shrunk = shrink(found.trace, options.run);
    ASSERT_TRUE(shrunk.has_value()) << shrunk.error().text;
    EXPECT_EQ(shrunk->finding.finding.kind, found.finding.finding.kind);
    EXPECT_LT(line_count(shrunk->trace), line_count(found.trace));
    const Result<ShrinkOutcome> again = shrink(shrunk->trace, options.run);
    ASSERT_TRUE(again.has_value()) << again.error().text;
    EXPECT_LE(line_count(again->trace), line_count(shrunk->trace));
  }
}

// What an insert says of its slot stays true when lines before it go, or the shrunk trace would
// show a lie of its own instead of the defect.
TEST(Shrink, keepsTheTokensOfAnInsertThoseOfItsSlot) {
  const Result<Trace> trace = parse_trace(
      "alloc as=s1\nadvance slot=s1 tokens=a4\nalloc as=s2\nadvance slot=s2 tokens=a6\n"
      "insert slot=s2 tokens=a6\ninsert slot=s1 tokens=a4\nmatch tokens=a4\n",
      "slots");
  ASSERT_TRUE(trace.has_value()) << trace.error().text;
  const RunOptions run = testing_support::run_with_defect("sglang-no-buffer:split-moves-state");
  const Result<ShrinkOutcome> shrunk = shrink(*trace, run);
  ASSERT_TRUE(shrunk.has_value()) << shrunk.error().text;
  RunOptions undamaged = run;
  undamaged.defect = nullptr;
  undamaged.defect_name = "";
  EXPECT_EQ(findings_of(shrunk->trace, undamaged), 0u) << trace_text(shrunk->trace);
}

TEST(Shrink, refusesATraceWithoutAFinding) {
  const Result<Trace> trace = parse_trace("admit id=r1 tokens=a4\nfinish id=r1\n", "sound");
  ASSERT_TRUE(trace.has_value());
  RunOptions run;
  run.subjects = {"sglang-no-buffer", "oracle:sglang-no-buffer"};
  EXPECT_FALSE(shrink(*trace, run).has_value());
}

}  // namespace
}  // namespace lockstep::cache_sim
