// The search: what it makes is legal and is a trace file, it finds nothing where nothing is wrong,
// finds what was planted, and makes it small.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cache_sim/search/bad_input.hpp"
#include "cache_sim/search/explore.hpp"
#include "cache_sim/search/operation_player.hpp"
#include "cache_sim/search/random_requests.hpp"
#include "cache_sim/search/random_trace.hpp"
#include "cache_sim/server/simulation.hpp"
#include "cache_sim/trace/trace_writer.hpp"
#include "properties/support/program.hpp"
#include "properties/support/search.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace testing_support;

const PolicyEntry& some_policy() {
  std::vector<PolicyEntry> policies;
  // To two servers no scheduler sends requests.
  for (const OracleEntry& oracle : Registry<OracleEntry>::all())
    if (const PolicyEntry& policy = *Registry<PolicyEntry>::find(oracle.name);
        !policy.capabilities.contains(Capability::disaggregation))
      policies.push_back(policy);
  const auto at = *rc::gen::inRange<std::size_t>(0, policies.size());
  return *Registry<PolicyEntry>::find(policies[at].name);
}

/// Requests to a scheduler, from a swarm for any policy.
Trace random_scheduled_trace(std::uint64_t seed, std::uint64_t stream, const PolicyEntry& policy) {
  Draw draw(seed, stream);
  const Swarm swarm = draw_swarm(draw, accepted_by(policy), Config(), {}, SwarmLevel::requests);
  Trace trace;
  trace.config = swarm.config;
  trace.scheduler_level = true;
  trace.statements = random_requests(swarm, draw);
  return trace;
}

std::size_t findings_of(const Trace& trace, RunOptions options) {
  options.config = trace.config;
  const Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
  require(run.has_value(), run ? "" : run.error().text);
  play_trace(**run, trace);
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

// The text of a finding is the trace that was played.
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
  // Policies with blocks go with vLLM's scheduler, which is drawn for schedules alone.
  RC_PRE(!policy.config_fields.contains("blocks") || trace.config.scheduler.starts_with("vllm"));
  RunOptions options;
  options.config = trace.config;
  options.subjects = {std::string(policy.name), fmt::format("oracle:{}", policy.name)};
  Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
  RC_ASSERT(run.has_value());
  play_trace(**run, trace);
  RC_ASSERT(!(*run)->error());
  RC_ASSERT((*run)->findings().empty());
  for (const RequestOutcome& outcome : (*run)->outcomes()) RC_ASSERT(outcome.end >= 0);
}

// A field that the user set stays, even at its default; a field that a subject does not know is not
// drawn.
RC_GTEST_PROP(Swarms, drawWithinWhatIsAcceptedAndNotFixed,
              (std::uint64_t seed, std::uint64_t stream)) {
  Draw draw(seed, stream);
  const PolicyEntry& radix = *Registry<PolicyEntry>::find("radix");
  const PolicyEntry& no_buffer = *Registry<PolicyEntry>::find("sglang-no-buffer");
  const Swarm alone =
      draw_swarm(draw, accepted_by(radix), Config(), {"strip_thinking", "kv_tokens"});
  RC_CLASSIFY(alone.config.overlap != 0, "overlap");
  RC_ASSERT(alone.config.number("strip_thinking") == 0);
  RC_ASSERT(alone.config.kv_tokens == Config().kv_tokens);
  const Swarm both =
      draw_swarm(draw, accepted_by_both(accepted_by(radix), accepted_by(no_buffer)), Config());
  RC_CLASSIFY(both.config.number("strip_thinking") != 0, "strip_thinking");
  RC_ASSERT(both.config.number("path_cap") == Config().number("path_cap"));
  RC_ASSERT(both.config.page == Config().page);
  RC_ASSERT(both.tree == 0);
}

// vLLM's caches are asked for what its servers meet: several sessions that wait for their next
// turn, little memory and a cache that is reset; a connector's tokens with hardly a block to spare;
// prompts that lack one token after a hit, while others decode.
TEST(Swarms, drawWhatVllmsServersMeet) {
  const PolicyEntry& policy = *Registry<PolicyEntry>::find("vllm-align");
  int sessions = 0, connectors = 0, padded = 0;
  for (std::uint64_t stream = 0; stream < 1000; ++stream) {
    Draw draw(1, stream);
    const Swarm swarm = draw_swarm(draw, accepted_by(policy), Config());
    const std::int64_t blocks = swarm.config.number("blocks");
    sessions += swarm.turns > 0 && swarm.flush > 0 && swarm.running >= 4 && blocks <= 32;
    connectors += !swarm.scheduled && swarm.sent > 5 && blocks <= 12;
    padded += swarm.scheduled && swarm.config.drafts > 0 && swarm.overhangs > 0;
  }
  EXPECT_GT(sessions, 40);
  EXPECT_GT(connectors, 40);
  EXPECT_GT(padded, 80);
}

/// A random trace of single operations, as `explore` makes them: what was said, and whether each
/// was bad input exactly where it was made so.
struct PlayedOperations {
  std::vector<LocatedFinding> findings;
  std::int64_t answered = 0, refused = 0, bad = 0, misjudged = 0;
};

PlayedOperations play_random_operations(std::uint64_t seed, std::uint64_t stream,
                                        const PolicyEntry& policy) {
  Draw draw(seed, stream);
  const Swarm swarm = draw_swarm(draw, accepted_by(policy), Config(), {}, SwarmLevel::operations);
  RunOptions options;
  options.config = swarm.config;
  options.subjects = {std::string(policy.name), fmt::format("oracle:{}", policy.name)};
  options.skip_illegal = true;
  const Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
  require(run.has_value(), run ? "" : run.error().text);
  PlayedOperations played;
  LegalityModel model = model_for(options);
  RandomTrace random(swarm, accepted_by(policy), model, draw);
  BadInput bad_input(swarm, accepted_by(policy), model, draw);
  const auto say = [&](const Operation& operation) {
    const Reply* const reply = (*run)->apply(operation);
    if (reply != nullptr) model.follow(operation, *reply);
    return reply;
  };
  for (int i = 0; i < 100 && !(*run)->stopped(); ++i) {
    if (const std::optional<Operation> bad = bad_input.next()) {
      ++played.bad;
      if (say(*bad) != nullptr) ++played.misjudged;
    }
    const Reply* const reply = say(random.next());
    if (reply == nullptr) {
      if (!random.may_be_bad()) ++played.misjudged;
      continue;
    }
    ++(reply->refused == Refusal::none ? played.answered : played.refused);
  }
  for (const Operation& end : random.ending())
    if (!(*run)->stopped() && say(end) == nullptr) ++played.misjudged;
  for (const Verb verb : {Verb::flush, Verb::check}) {
    Operation operation;
    operation.verb = verb;
    (*run)->apply(operation);
  }
  (*run)->conclude();
  played.findings = (*run)->findings();
  return played;
}

// Any operations on any policy: it agrees with its oracle, on what is bad input too, and gives
// everything back.
RC_GTEST_PROP(OperationTraces, endWithoutAFinding, (std::uint64_t seed, std::uint64_t stream)) {
  const PlayedOperations played = play_random_operations(seed, stream, some_policy());
  RC_CLASSIFY(played.bad != 0, "with bad input");
  RC_CLASSIFY(played.refused != 0, "with refusals");
  RC_ASSERT(played.findings.empty());
  RC_ASSERT(played.misjudged == 0);
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

// A search that asks for a disk alone draws the host before it, and no sliding windows, which have
// neither.
TEST(Explore, drawsWhatADiskStandsBehind) {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const ExploreOutcome outcome = searched("sglang-no-buffer", "disk=1", seed, 40);
    EXPECT_EQ(outcome.traces, 40);
    EXPECT_FALSE(outcome.drawn.contains("window"));
  }
}

// The same seed is the same search, whatever ran before it.
TEST(Explore, isAFunctionOfItsSeed) {
  const ExploreOutcome first = searched("", "", 5, 300);
  EXPECT_EQ(searched("", "", 5, 300).digest, first.digest);
  EXPECT_NE(searched("", "", 6, 300).digest, first.digest);
}

TEST(Explore, saysWhichMarksItMissed) {
  const std::vector<std::string> missed = searched("radix", "", 1, 50).marks_missed;
  EXPECT_NE(std::ranges::find(missed, "track.branch"), missed.end())
      << "attention alone tracks no states";
}

// One trace in twenty is played twice. The child's answer depends on which process it is.
TEST(Explore, findsASubjectThatAnswersDifferentlyTheSecondTime) {
  const testing_support::ScratchFolder folder;
  const std::string child = folder.write("child.py", R"(
import os, sys
for number, line in enumerate(sys.stdin):
    verb = line.split()[0]
    answer = {"hello": "levels=request", "admit": "cached=0"}
    answer["check"] = "kv_free=%d" % (os.getpid() % 61)
    if verb == "extend":
        answer["extend"] = "n=" + next(w[2:] for w in line.split() if w.startswith("n="))
    if verb == "accept":
        answer["accept"] = "n=1"
    print(answer.get(verb, "ok"), flush=True)
)");
  ExploreOptions options;
  options.run.subjects = {"exec:python3 " + child};
  ASSERT_TRUE(options.run.config.set_all("policy=radix,kv_tokens=64"));
  options.traces = 80;
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  ASSERT_EQ(outcome->discoveries.size(), 1u);
  EXPECT_EQ(outcome->discoveries.front().finding.finding.kind, FindingKind::nondeterministic);
  EXPECT_EQ(outcome->discoveries.front().trace_number % 20, 0);
}

// Single operations have no ranks: a search with several makes requests.
TEST(Explore, withRanksFindsWhatCanBePlayedAgain) {
  ExploreOptions options;
  options.run = testing_support::run_with_defect("sglang-legacy:match-renews-one-state");
  options.run.config.ranks = 3;
  options.run.fixed = {"ranks"};
  options.traces = 500;
  options.shrinks = false;
  for (options.seed = 1; options.seed <= 6; ++options.seed) {
    const Result<ExploreOutcome> outcome = explore(options);
    ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
    ASSERT_EQ(outcome->discoveries.size(), 1u) << "seed " << options.seed;
    const Finding& found = outcome->discoveries.front().finding.finding;
    EXPECT_TRUE(found.kind == FindingKind::lru_order || found.kind == FindingKind::reply_differs)
        << found.text;
  }
}

// A search goes on where another one has ended: what joined the corpus of one begins the next.
TEST(Explore, beginsWithTheCorpusThatItIsGiven) {
  ExploreOptions options;
  options.run.subjects = {"radix", "oracle:radix"};
  options.traces = 300;
  const Result<ExploreOutcome> first = explore(options);
  ASSERT_TRUE(first.has_value()) << first.error().text;
  ASSERT_FALSE(first->added.empty());
  for (const CorpusTrace& one : first->added) {
    EXPECT_EQ(one.subjects, options.run.subjects);
    EXPECT_FALSE(one.marks.empty());
    EXPECT_TRUE(parse_trace(trace_text(one.trace), "added").has_value());
  }

  options.corpus = first->added;
  options.corpus.push_back({{"marconi", "oracle:marconi"}, {}, {}});  // subjects that do not play
  options.traces = 1;
  const Result<ExploreOutcome> second = explore(options);
  ASSERT_TRUE(second.has_value()) << second.error().text;
  EXPECT_GE(second->corpus, first->added.size());
  EXPECT_EQ(second->marks_missed, first->marks_missed);  // one trace alone reaches fewer
  EXPECT_EQ(second->traces, 1);
}

// A trace of the corpus that shows a finding by now is one, before any trace is drawn.
TEST(Explore, findsADefectInItsCorpus) {
  ExploreOptions options;
  options.run = testing_support::run_with_defect("sglang-no-buffer:frees-donated-slot");
  const Result<Trace> trace = parse_trace(
      "config state_slots=4\nadmit id=a tokens=a8\nextend id=a n=8\nfinish id=a\ncheck\n", "x");
  ASSERT_TRUE(trace.has_value()) << trace.error().text;
  options.corpus = {{options.run.subjects, *trace, {}}};
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  ASSERT_EQ(outcome->discoveries.size(), 1u);
  EXPECT_EQ(outcome->discoveries.front().trace_number, 0);
  EXPECT_EQ(outcome->traces, 0);
}

TEST(Explore, countsWhatFreshTracesDraw) {
  ExploreOptions options;
  options.run.subjects = {"radix", "oracle:radix"};
  options.traces = 200;
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  for (const auto& [field, values] : outcome->drawn) {
    std::int64_t traces = 0;
    for (const auto& [value, count] : values) traces += count;
    EXPECT_EQ(traces, outcome->traces - outcome->from_corpus) << field;
  }
  EXPECT_EQ(outcome->drawn.at("subject").size(), 1u);
  EXPECT_EQ(outcome->drawn.at("level").size(), 2u);
  EXPECT_GT(outcome->drawn.at("kv_tokens").size(), 2u);
}

TEST(Explore, refusesUnknownSubjects) {
  ExploreOptions options;
  options.run.subjects = {"nobody"};
  options.traces = 1;
  EXPECT_FALSE(explore(options).has_value());
}

// --- Planted defects -----------------------------------------------------------------------------

class PlantedDefects : public testing::TestWithParam<std::string> {};

// A harness that misses a bug it was given is no harness. All of them: explore_full_test.cpp.
TEST_P(PlantedDefects, areFoundAndShrunk) {
  search_for(GetParam(), 1, 2000);
}

INSTANTIATE_TEST_SUITE_P(Few, PlantedDefects, testing::ValuesIn(one_defect_in_eight()),
                         [](const auto& info) { return test_name(info.param); });

/// The rules of vLLM's worker, and the two of its scheduler without which blocks hold something
/// else.
constexpr const char* kRulesOfVllmsWorker[] = {"forgets-accepted-without-drafts",
                                               "keeps-no-block-ends",
                                               "keeps-accepted-behind-copy",
                                               "copies-the-first-state",
                                               "cuts-no-chunks",
                                               "resumes-by-hash-block",
                                               "skips-block-copies",
                                               "resumes-with-old-accepted",
                                               "uses-states-of-this-step",
                                               "verifies-replays"};

class RulesOfVllmsWorker : public testing::TestWithParam<const char*> {};

// Each broken rule shows in what blocks hold, without an oracle of the decisions.
TEST_P(RulesOfVllmsWorker, brokenShowInWhatBlocksHold) {
  ExploreOptions options;
  options.run = run_with_defect(fmt::format("vllm-align:{}", GetParam()));
  options.run.subjects.pop_back();
  options.traces = 2000;
  options.shrinks = false;
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  ASSERT_EQ(outcome->discoveries.size(), 1u);
  EXPECT_EQ(outcome->discoveries[0].finding.finding.kind, FindingKind::wrong_state_prefix);
}

INSTANTIATE_TEST_SUITE_P(Each, RulesOfVllmsWorker, testing::ValuesIn(kRulesOfVllmsWorker),
                         [](const auto& info) { return test_name(info.param); });

// A schedule may be put together from pieces of others, and no piece says at which time it begins.
TEST(Explore, writesSchedulesThatCanBeReadAgain) {
  ExploreOptions options;
  options.run = testing_support::run_with_defect("sglang-no-buffer:split-moves-state");
  options.seed = 2;
  options.traces = 2500;
  options.findings = 40;
  options.shrinks = false;
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  EXPECT_EQ(outcome->discoveries.size(), 40u);
  for (const Discovery& found : outcome->discoveries) {
    const Result<Trace> again = parse_trace(trace_text(found.trace), "found");
    EXPECT_TRUE(again.has_value()) << again.error().text;
  }
}

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

// Prompts of one repeated token, as clients and explicit ids have them, get as short as others.
TEST(Shrink, shortensWhatRepeats) {
  const Result<Trace> trace = parse_trace(
      "alloc as=s1\nadvance slot=s1 tokens=[1,1,1,1,1,1,1,1]\n"
      "insert slot=s1 tokens=[1,1,1,1,1,1,1,1]\nmatch tokens=[1,1,1,1]\n",
      "repeats");
  ASSERT_TRUE(trace.has_value()) << trace.error().text;
  const Result<ShrinkOutcome> shrunk =
      shrink(*trace, testing_support::run_with_defect("sglang-no-buffer:split-moves-state"));
  ASSERT_TRUE(shrunk.has_value()) << shrunk.error().text;
  EXPECT_NE(trace_text(shrunk->trace).find("match tokens=a1\n"), std::string::npos)
      << trace_text(shrunk->trace);
}

// The output is another piece than the prompt before it, which can be shorter then.
TEST(Shrink, shortensPromptsBeforeTheirOutputs) {
  const Result<Trace> trace =
      parse_trace("request id=one tokens=a300 output=a300:330\nrun\n", "prompt");
  ASSERT_TRUE(trace.has_value()) << trace.error().text;
  const Result<ShrinkOutcome> shrunk =
      shrink(*trace, testing_support::run_with_defect("sglang-no-buffer:frees-donated-slot"));
  ASSERT_TRUE(shrunk.has_value()) << shrunk.error().text;
  EXPECT_EQ(trace_text(shrunk->trace), "request id=r1 output=a1:2 tokens=a1\nrun\n");
}

// A search for a million findings keeps none of those that somebody was told.
TEST(Explore, keepsNoTraceOfAReportedFinding) {
  ExploreOptions options;
  options.run = testing_support::run_with_defect("sglang-no-buffer:frees-donated-slot");
  options.findings = 3;
  options.shrinks = false;
  std::vector<std::size_t> told;
  options.found = [&](const Discovery& found) { told.push_back(found.trace.statements.size()); };
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  ASSERT_EQ(outcome->discoveries.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_GT(told[i], 0u);
    EXPECT_EQ(outcome->discoveries[i].lines, told[i]);
    EXPECT_TRUE(outcome->discoveries[i].trace.statements.empty());
    EXPECT_TRUE(outcome->discoveries[i].finding.around.empty());
  }
}

// A child of seconds a trace, in a search that was given a minute.
TEST(Explore, shrinkingEndsAfterItsTime) {
  ExploreOptions options;
  options.run = testing_support::run_with_defect("sglang-no-buffer:tombstone-lock-uncounted");
  options.traces = 500;
  options.shrink_time = std::chrono::milliseconds(5);
  options.progress = [](const ExploreOptions::Progress& now) {
    if (now.shrinking) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome.has_value()) << outcome.error().text;
  ASSERT_EQ(outcome->discoveries.size(), 1u);
  EXPECT_GE(outcome->discoveries.front().shrink_executions, 1);
  EXPECT_LE(outcome->discoveries.front().shrink_executions, 4);
}

// The tokens of an insert stay those of its slot when lines before it go, or the shrunk trace would
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

// Another verb or another field of a reply is another defect.
TEST(Shrink, tellsFindingsApartByKindVerbAndField) {
  LocatedFinding one;
  one.finding = {FindingKind::reply_differs, "", "cached=4", "cached=5"};
  one.operation = "admit id=r tokens=a8";
  LocatedFinding other = one;
  other.finding.expected = "cached=7";
  other.operation = "admit id=q tokens=b8";
  EXPECT_TRUE(is_same_finding(one, other));
  other.finding.expected = "evicted_kv=4";
  EXPECT_FALSE(is_same_finding(one, other));
  other = one;
  other.operation = "match tokens=a8";
  EXPECT_FALSE(is_same_finding(one, other));
  other = one;
  other.finding.kind = FindingKind::missed_reuse;
  EXPECT_FALSE(is_same_finding(one, other));
}

TEST(Shrink, leavesFixedFieldsAlone) {
  Result<Trace> trace = parse_trace(
      "config chunked_prefill=9 kv_tokens=77\nalloc as=s2\nadvance slot=s2 tokens=a6\n"
      "insert slot=s2 tokens=a6\nmatch tokens=a4\n",
      "fixed");
  ASSERT_TRUE(trace.has_value()) << trace.error().text;
  RunOptions run = testing_support::run_with_defect("sglang-no-buffer:split-moves-state");
  run.fixed = {"kv_tokens"};
  const Result<ShrinkOutcome> shrunk = shrink(*trace, run);
  ASSERT_TRUE(shrunk.has_value()) << shrunk.error().text;
  EXPECT_EQ(shrunk->trace.config.kv_tokens, 77);
  EXPECT_EQ(shrunk->trace.config.chunked_prefill, Config().chunked_prefill);
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
