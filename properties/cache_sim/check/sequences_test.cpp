// Engines whose requests are sequences of one memory: clone, truncate, capture and restore,
// forwards of several, and what is sampled after the same tokens. A sound engine passes; each
// planted defect is found by a search and by its kept trace.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache_sim/check/start_subject.hpp"
#include "cache_sim/replay/replay.hpp"
#include "cache_sim/search/explore.hpp"
#include "cache_sim/search/legality_model.hpp"
#include "properties/support/program.hpp"

namespace lockstep::cache_sim {
namespace {

const std::string kRoot = LOCKSTEP_SOURCE_DIR;

/// fixtures/subjects/sequence_engine.py with the rules that the words break.
std::string engine(const std::string& words = "") {
  return fmt::format(
      "exec:PYTHONPATH={0}/cache_sim/python exec python3 -m lockstep.serve "
      "{0}/fixtures/subjects/sequence_engine.py:Engine{1}{2}",
      kRoot, words.empty() ? "" : " ", words);
}

Operation operation_of(const std::string& text) {
  return *parse_line(text).and_then([](const Line& line) { return parse_operation(line); });
}

// --- Children that answer what they are told to --------------------------------------------------

class Sequences : public testing::Test {
 protected:
  /// A child that gives these answers, one after the other, after its greeting.
  std::string child(const std::string& levels, const std::vector<std::string>& answers) {
    std::string list;
    for (const std::string& answer : answers) list += answer + "\n";
    const std::string file = folder.write(fmt::format("answers{}", ++files_), list);
    return fmt::format(
        "exec:read -r hello; echo levels={}; while read -r line <&3 && read -r asked; "
        "do echo \"$line\"; done 3<{}",
        levels, file);
  }

  /// `KIND: text` of the first finding, a sentence of bad input, or nothing.
  std::string played(const std::string& trace, const std::vector<std::string>& subjects) {
    ReplayRequest request;
    request.file = folder.write(fmt::format("trace{}.trace", ++files_), trace);
    request.subjects = subjects;
    const Result<ReplayOutcome> outcome = replay(request);
    if (!outcome)
      return fmt::format("status {}: {}", int{outcome.error().status}, outcome.error().text);
    if (outcome->run->findings().empty()) return "";
    const Finding& first = outcome->run->findings().front().finding;
    return fmt::format("{}: {}", to_string(first.kind), first.text);
  }

  testing_support::ScratchFolder folder;

 private:
  int files_ = 0;
};

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// The token sampled greedily after a prefix depends on nothing else.
TEST_F(Sequences, continueEqualTokensEqually) {
  const std::string two =
      "admit id=r tokens=a8\nextend id=r n=8\nadmit id=s tokens=a8\nextend id=s n=8\n";
  const auto answers = [&](const std::string& second) {
    return child("request", {"cached=0", "n=8 output=5", "cached=0", second});
  };
  EXPECT_EQ(played(two, {answers("n=8 output=5")}), "");
  EXPECT_EQ(played(two, {answers("n=8")}), "") << "what is not said is not compared";
  const std::string outcome = played(two, {answers("n=8 output=6")});
  EXPECT_TRUE(outcome.starts_with("output-differs: ")) << outcome;
  expect_in(outcome, "goes on with token 6 after 8 tokens, and request `r` went on with 5");
  // Drafts that are verified are tokens like others.
  const std::string drafts =
      "admit id=r tokens=a8\nextend id=r n=8\nadmit id=s tokens=a4\nextend id=s n=8 drafts=a4:8\n";
  EXPECT_TRUE(played(drafts, {answers("n=8 output=6")}).starts_with("output-differs: "));
  // Other tokens, and another namespace, may go on as they like.
  EXPECT_EQ(played("admit id=r tokens=a8\nextend id=r n=8\nadmit id=s tokens=b8\nextend id=s n=8\n",
                   {answers("n=8 output=6")}),
            "");
  EXPECT_EQ(played("admit id=r tokens=a8\nextend id=r n=8\n"
                   "admit id=s salt=x tokens=a8\nextend id=s n=8\n",
                   {answers("n=8 output=6")}),
            "");
}

TEST_F(Sequences, continueAsTheOtherSubjectDoes) {
  const std::string one = "admit id=r tokens=a8\nextend id=r n=8\n";
  const auto says = [&](const std::string& answer) {
    return child("request", {"cached=0", answer});
  };
  EXPECT_EQ(played(one, {says("n=8 output=5"), says("n=8 output=5")}), "");
  const std::string outcome = played(one, {says("n=8 output=5"), says("n=8 output=6")});
  EXPECT_TRUE(outcome.starts_with("output-differs: ")) << outcome;
}

TEST_F(Sequences, mayThemselvesSayThatAnAnswerIsWrong) {
  const std::string one = "admit id=r tokens=a8\nextend id=r n=8\n";
  const std::string outcome =
      played(one, {child("request", {"cached=0", "n=8 wrong=the logits are 31 % off"})});
  EXPECT_TRUE(outcome.starts_with("output-differs: ")) << outcome;
  expect_in(outcome, "the logits are 31 % off");
  EXPECT_TRUE(
      played(one, {child("request", {"cached=0", "wrong=3"})}).starts_with("output-differs"))
      << "it need not answer besides";
}

TEST_F(Sequences, areForChildrenThatHaveThem) {
  const std::string trace = "admit id=r tokens=a8\nextend id=r n=8\nclone id=r as=s\n";
  const std::string refused = played(trace, {child("request", {"cached=0", "n=8", "ok"})});
  EXPECT_TRUE(refused.starts_with("status 2: ")) << refused;
  expect_in(refused, "has no sequence verbs");
  expect_in(played(trace, {"radix"}), "status 2: ");
  for (const char* const levels : {"request,sequence", "request,tree,sequence"})
    EXPECT_EQ(played(trace, {child(levels, {"cached=0", "n=8", "ok"})}), "") << levels;
}

// The tokens of a clone, of a request that was set back, and of a restored one are those that can
// be reused, and those whose outputs are compared.
TEST_F(Sequences, areHeldToTheTokensThatTheyStandFor) {
  const std::string begin = "admit id=r tokens=a8\nextend id=r n=8\n";
  const auto sampled = [&](const std::string& middle, const std::string& output, int answers) {
    std::vector<std::string> all = {"cached=0", "n=8 output=5"};
    for (int i = 0; i < answers; ++i) all.emplace_back("ok");
    all.insert(all.end(), {"n=1 output=7", "n=1 output=" + output});
    return played(begin + middle, {child("request,sequence", all)});
  };
  const std::string clone =
      "clone id=r as=s\nextend id=r n=1 tokens=b1\nextend id=s n=1 tokens=b1\n";
  EXPECT_EQ(sampled(clone, "7", 1), "");
  EXPECT_TRUE(sampled(clone, "8", 1).starts_with("output-differs: "));
  const std::string part =
      "clone id=r as=s up_to=4\ntruncate id=r up_to=4\nextend id=r n=1 tokens=b1\n"
      "extend id=s n=1 tokens=b1\n";
  EXPECT_EQ(sampled(part, "7", 2), "");
  EXPECT_TRUE(sampled(part, "8", 2).starts_with("output-differs: "));
  std::vector<std::string> answers = {"cached=0", "n=8 output=5", "ok",       "n=1 output=7",
                                      "ok",       "n=1 output=8", "cached=10"};
  const std::string restored = begin +
                               "capture id=r as=c\nextend id=r n=1 tokens=b1\n"
                               "restore id=r from=c\nextend id=r n=1 tokens=b1\n";
  EXPECT_TRUE(
      played(restored, {child("request,sequence", answers)}).starts_with("output-differs: "));
  answers[5] = "n=1 output=7";
  const std::string reused =
      played(restored + "admit id=s tokens=a8+b1+c9\n", {child("request,sequence", answers)});
  EXPECT_TRUE(reused.starts_with("cached-too-much: ")) << reused;
  answers[6] = "cached=9";
  EXPECT_EQ(played(restored + "admit id=s tokens=a8+b1+c9\n", {child("request,sequence", answers)}),
            "");
}

// --- What makes sense to ask ---------------------------------------------------------------------

TEST_F(Sequences, areAskedWhatTheirRequestsCanDo) {
  LegalityModel model(1, true);
  const auto follow = [&](const std::string& text, const std::string& reply = "") {
    const Operation operation = operation_of(text);
    model.follow(operation, reply.empty() ? Reply() : *parse_reply(reply, operation.verb));
  };
  const auto makes_sense = [&](const std::string& text) {
    return model.makes_sense(operation_of(text));
  };
  follow("admit id=r tokens=a8", "cached=0");
  EXPECT_FALSE(makes_sense("clone id=r as=s")) << "nothing is computed";
  follow("extend id=r n=6", "n=6");
  EXPECT_TRUE(makes_sense("clone id=r as=s"));
  EXPECT_TRUE(makes_sense("clone id=r as=s up_to=6"));
  EXPECT_FALSE(makes_sense("clone id=r as=s up_to=7"));
  EXPECT_FALSE(makes_sense("clone id=r as=r")) << "it runs";
  EXPECT_FALSE(makes_sense("restore id=r from=c")) << "nothing is kept";
  EXPECT_TRUE(makes_sense("step ids=r"));
  EXPECT_FALSE(makes_sense("step ids=r,s"));
  follow("clone id=r as=s up_to=4");
  ASSERT_EQ(model.requests().size(), 2u);
  EXPECT_EQ(model.requests()[1].known.text(), "a4");
  EXPECT_EQ(model.requests()[1].computed, 4);
  follow("capture id=r as=c partial=1");
  follow("truncate id=r up_to=5");
  EXPECT_EQ(model.requests()[0].known.text(), "a5");
  EXPECT_FALSE(makes_sense("restore id=r from=c")) << "a state alone, after tokens that are gone";
  follow("capture id=r as=c");
  EXPECT_TRUE(makes_sense("restore id=s from=c"));
  follow("restore id=s from=c");
  EXPECT_EQ(model.requests()[1].computed, 5);
  follow("extend id=s n=2 drafts=b2", "n=2");
  for (const char* const text :
       {"clone id=s as=t", "truncate id=s up_to=2", "capture id=s as=c", "restore id=s from=c"})
    EXPECT_FALSE(makes_sense(text)) << text << ": its drafts wait";
}

// --- The search ----------------------------------------------------------------------------------

ExploreOutcome searched(const std::string& words, std::int64_t traces) {
  ExploreOptions options;
  options.run.subjects = {engine(words)};
  options.traces = traces;
  Result<ExploreOutcome> outcome = explore(options);
  EXPECT_TRUE(outcome.has_value()) << outcome.error().text;
  return outcome ? std::move(*outcome) : ExploreOutcome();
}

TEST_F(Sequences, ofASoundEngineShowNothing) {
  const ExploreOutcome outcome = searched("", 120);
  EXPECT_EQ(outcome.traces, 120);
  for (const Discovery& discovery : outcome.discoveries)
    ADD_FAILURE() << discovery.finding.finding.text;
}

class BrokenEngine : public testing::TestWithParam<const char*> {};

TEST_P(BrokenEngine, isFoundAndShrunk) {
  const ExploreOutcome outcome = searched(GetParam(), 1500);
  ASSERT_EQ(outcome.discoveries.size(), 1u) << outcome.traces << " traces";
  const Discovery& found = outcome.discoveries.front();
  EXPECT_EQ(found.finding.finding.kind, FindingKind::output_differs) << found.finding.finding.text;
  EXPECT_LE(found.trace.statements.size(), 16u);
  RecordProperty("trace", static_cast<int>(found.trace_number));
  RecordProperty("lines", static_cast<int>(found.trace.statements.size()));
}

std::string name_of(const testing::TestParamInfo<const char*>& info) {
  std::string name;
  for (const char c : std::string(info.param)) name += c == '-' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Each, BrokenEngine,
                         testing::Values("snapshots-stay", "restore-first", "stale-plane",
                                         "clone-rolled"),
                         name_of);

}  // namespace
}  // namespace lockstep::cache_sim
