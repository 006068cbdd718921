// A child shows nothing inside, and is still held to what it says: possible numbers, reuse of what
// was computed, progress, its own complaints. Each test here is a child with one fault.
#include "cache_sim/check/closed_subject.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/run_json.hpp"
#include "cache_sim/search/explore.hpp"
#include "properties/support/program.hpp"

namespace lockstep::cache_sim {
namespace {

const std::string kExample =
    "exec:python3 " LOCKSTEP_SOURCE_DIR "/fixtures/subjects/minimal_cache.py";

/// Traces that are played against children, all in one folder.
class Child : public testing::Test {
 protected:
  /// A child that answers each verb as `answers` says, a dictionary of Python: a text, or a list of
  /// texts for the first, second, … time. N stands for the operation's n.
  std::string child(const std::string& answers) {
    return "exec:python3 " + folder_.write(fmt::format("child{}.py", ++files_), R"(
import sys
answers = {"hello": "levels=request", "admit": "cached=0", "extend": "n=N", **)" + answers +
                                                                                    R"(}
for line in sys.stdin:
    verb, *fields = line.split()
    answer = answers.get(verb, "ok")
    if isinstance(answer, list):
        answer = answer.pop(0) if len(answer) > 1 else answer[0]
    print(answer.replace("N", dict(f.split("=", 1) for f in fields).get("n", "")), flush=True)
)");
  }

  /// The outcome of a trace: `KIND: text` of the first finding, a sentence of bad input, or
  /// nothing.
  std::string played(const std::string& trace, std::vector<std::string> subjects) {
    ReplayRequest request;
    request.file = folder_.write(fmt::format("trace{}.trace", ++files_), trace);
    request.subjects = std::move(subjects);
    return outcome_of(request);
  }
  std::string outcome_of(const ReplayRequest& request) {
    Result<ReplayOutcome> outcome = replay(request);
    if (!outcome)
      return fmt::format("status {}: {}", int{outcome.error().status}, outcome.error().text);
    last_ = run_json(request, *outcome);
    if (outcome->run->findings().empty()) return "";
    const Finding& first = outcome->run->findings().front().finding;
    return fmt::format("{}: {}", to_string(first.kind), first.text);
  }

  testing_support::ScratchFolder folder_;
  Json last_;  // the JSON of the last run

 private:
  int files_ = 0;
};

void expect_kind(const std::string& outcome, FindingKind kind, std::string_view in_text = "") {
  EXPECT_TRUE(outcome.starts_with(std::string(to_string(kind)) + ":")) << outcome;
  EXPECT_NE(outcome.find(in_text), std::string::npos) << outcome;
}

// --- Reuse of what was computed ------------------------------------------------------------------

const std::string kChat =
    "request id=first tokens=a1008 output=b40\nrun\n"
    "request id=again tokens=a1008 output=8\nrun\n"
    "request id=continued tokens=a1008+b40+c59 output=4\nrun\n";

// Beside others, the event of a finding is shown with the answer of the child that is wrong: where
// its own numbers are impossible, and where the oracle's answer differs.
TEST_F(Child, showsItsOwnAnswerAtItsFinding) {
  const std::string trace =
      "admit id=r1 tokens=a4\nextend id=r1 n=4\nfinish id=r1\nadmit id=r2 tokens=a4+b1\n";
  const std::map<std::string, FindingKind> kinds{{"0", FindingKind::missed_reuse},
                                                 {"9", FindingKind::cached_too_much}};
  for (const auto& [cached, kind] : kinds) {
    const std::string liar = child(R"({"admit": ["cached=0", "cached=)" + cached + R"("]})");
    expect_kind(played(trace, {"oracle:radix", liar}), kind);
    const Json& shown = last_["findings"][0]["around"].back();
    EXPECT_NE(shown.get<std::string>().find("→ cached=" + cached), std::string::npos) << shown;
  }
}

// A server that could hit and does not is slow, and no oracle is needed to say so: a child promises
// in its greeting what it finds again.
TEST_F(Child, rehitsAreFoundAgainAsPromised) {
  std::string text =
      testing_support::read_text(LOCKSTEP_SOURCE_DIR "/fixtures/subjects/minimal_cache.py");
  const auto replaced = [&](const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos);
    text.replace(at, from.size(), to);
  };
  const auto played_by = [&](const std::string& trace) {
    return played(trace, {"exec:python3 " + folder_.write("promises.py", text)});
  };
  replaced("again=1 honours", "again=1 rehits=16 honours");
  const std::string config = "config page=16\n";
  EXPECT_EQ(played_by(config + kChat), "");
  // As many tokens as the promise covers can hold, and no promise beyond.
  const std::string small = "config page=16 kv_tokens=1100\n";
  replaced("    size = 0\n    while", "    return 0\n    while");
  expect_kind(played_by(config + kChat), FindingKind::missed_reuse,
              "rehits=16 promises 1040, and all that was ever computed fits");
  EXPECT_EQ(played_by(small + kChat), "") << "something may have made room";
  const std::string stored = "admit id=a tokens=a32\nextend id=a n=32\nfinish id=a\n",
                    running = "admit id=b tokens=b120\nextend id=b n=120\n",
                    again = "admit id=c tokens=a48\n", narrow = "config page=16 kv_tokens=200\n";
  expect_kind(played_by(narrow + stored + again), FindingKind::missed_reuse, "promises 32");
  EXPECT_EQ(played_by(narrow + stored + running + again), "") << "a running request needs room";
  EXPECT_EQ(played_by(narrow + stored + "flush\n" + again), "") << "a flush ends what was kept";
  replaced("rehits=16 ", "");
  EXPECT_EQ(played_by(config + kChat), "") << "nothing was promised";
}

// A server that loses memory when a request is aborted says so itself: not all is free again.
TEST_F(Child, aFlushFreesWhatWasFreeBefore) {
  const std::string request = "admit id=r tokens=a4\nextend id=r n=4\n",
                    trace = "flush\n" + request + "abort id=r\nflush\ncheck\n";
  const auto by = [&](const std::string& flushes, const std::string& checks) {
    return std::vector{child(R"({"flush": [)" + flushes + R"(], "check": [)" + checks + "]}")};
  };
  expect_kind(played(trace, by(R"("kv_free=64", "kv_free=60")", R"("ok")")), FindingKind::leak,
              "60 KV slots are free after a flush with no request running, and 64 were before");
  const auto lost_states = by(R"("ok")", R"("states_free=8", "states_free=7")");
  expect_kind(played("check\n" + trace, lost_states), FindingKind::leak, "7 state slots are free");
  const auto fewer = R"("kv_free=64", "kv_free=60", "kv_free=64")";
  EXPECT_EQ(played("flush\n" + request + "flush\nabort id=r\nflush\n", by(fewer, R"("ok")")), "")
      << "a request held them";
  EXPECT_EQ(played("config overlap=1 policy=radix\n" + trace, by(fewer, R"("ok")")), "")
      << "a step may be under way";
  EXPECT_EQ(played("check\n" + request + "abort id=r\ncheck\nflush\n",
                   by(R"("kv_free=64")", R"("kv_free=64", "kv_free=60")")),
            "")
      << "the cache held them";
}

TEST_F(Child, chunksEndOnTheGridAsPromised) {
  const std::string hello = R"("hello": "levels=request chunks=16", )";
  const std::string trace =
      "admit id=r tokens=a100\nextend id=r n=40\nextend id=r n=60\nextend id=r n=20\n"
      "extend id=r n=1 tokens=b1\n";
  const std::string grid = child("{" + hello + R"("extend": ["n=32", "n=48", "n=20", "n=1"]})");
  EXPECT_EQ(played(trace, {grid}), "") << "32, 80 and all of 100";
  expect_kind(played(trace, {child("{" + hello + R"("extend": "n=N"})")}),
              FindingKind::out_of_range,
              "a chunk of request `r` ends after 40 of 100 tokens, which is no multiple of 16");
  expect_kind(played("admit id=r tokens=a100\nextend id=r n=32\nextend id=r n=60\n",
                     {child("{" + hello + R"("extend": "n=N"})")}),
              FindingKind::out_of_range, "ends after 92 of 100");
  EXPECT_EQ(played(trace, {child("{}")}), "") << "nothing was promised";
}

// Two requests of one prefix lock it once.
TEST_F(Child, hitsOfRunningRequestsAreLockedAsPromised) {
  const std::string trace =
      "admit id=r tokens=a60+b40\nextend id=r n=100\nfinish id=r\n"
      "admit id=s tokens=a60+c40\nadmit id=t tokens=a60+b41\ncheck\nabort id=t\ncheck\n";
  const auto locks = [&](const std::string& first, const std::string& second,
                         const std::string& promise) {
    return played(trace,
                  {child(R"({"hello": "levels=request )" + promise +
                         R"(", "admit": ["cached=0", "cached=60", "cached=100"], "check": [")" +
                         first + "\", \"" + second + "\"]}")});
  };
  EXPECT_EQ(locks("kv_locked=100", "kv_locked=60", "locks=1"), "");
  EXPECT_EQ(locks("kv_locked=7", "kv_locked=4", "locks=16"), "");
  expect_kind(locks("kv_locked=99", "kv_locked=60", "locks=1"), FindingKind::size_accounting,
              "kv_locked=99 of 1 token each, and the requests that run were given 100 tokens");
  expect_kind(locks("kv_locked=100", "kv_locked=59", "locks=1"), FindingKind::size_accounting,
              "were given 60 tokens of the cache, which locks=1 promises to lock");
  expect_kind(locks("kv_locked=6", "kv_locked=4", "locks=16"), FindingKind::size_accounting,
              "kv_locked=6 of 16 tokens each");
  EXPECT_EQ(locks("kv_locked=0", "kv_locked=0", ""), "") << "nothing was promised";
  EXPECT_EQ(locks("ok", "ok", "locks=1"), "") << "a child need not count";
}

TEST_F(Child, aPromiseIsANumberAboveZero) {
  for (const std::string words :
       {"rehits=0", "rehits=all", "rehits=-4", "rehits=", "chunks=0", "locks=x"})
    EXPECT_TRUE(
        played("admit id=a tokens=a4\n", {child("{\"hello\": \"levels=request " + words + "\"}")})
            .starts_with("status 3"))
        << words;
}

// The second turn of a chat begins with the first one's output, which the server computed itself.
TEST_F(Child, mayReuseOutputs) {
  EXPECT_EQ(played(kChat, {kExample}), "");
  ReplayRequest sessions;
  sessions.file = "sessions:requests=60,system=50,input=20,output=30";
  sessions.subjects = {kExample, "oracle:radix"};
  sessions.config = "policy=radix,kv_tokens=1048576";
  EXPECT_EQ(outcome_of(sessions), "");
}

TEST_F(Child, reusesNoTokenThatWasNeverComputed) {
  const std::string hit = child(R"({"admit": ["cached=0", "cached=99"]})");
  const std::string after_a_whole_prompt =
      "admit id=r tokens=a100\nextend id=r n=100\nfinish id=r\n";
  EXPECT_EQ(played(after_a_whole_prompt + "admit id=s tokens=a100\n", {hit}), "");
  // The client left in the middle of the prefill: 40 of the tokens were computed.
  const std::string in_the_middle = "admit id=r tokens=a100\nextend id=r n=40\nabort id=r\n";
  expect_kind(played(in_the_middle + "admit id=s tokens=a100\n", {hit}),
              FindingKind::cached_too_much, "no more than 40 were ever computed");
  // So does a request that still runs.
  expect_kind(played("admit id=r tokens=a100\nextend id=r n=40\nadmit id=s tokens=a100\n", {hit}),
              FindingKind::cached_too_much, "no more than 40");
  // Another namespace shares nothing.
  expect_kind(played(after_a_whole_prompt + "admit id=s salt=x tokens=a100\n", {hit}),
              FindingKind::cached_too_much, "no more than 0");
  expect_kind(played(after_a_whole_prompt + "flush\nadmit id=s tokens=a100\n", {hit}),
              FindingKind::cached_too_much, "no more than 0");
}

// KV of another adapter or of another image is another prefix: what lies before the image is
// shared, and so is an image of the same name.
TEST_F(Child, reusesNothingOfAnotherAdapterOrImage) {
  const auto hit = [&](int cached) {
    return child(fmt::format(
        R"({{"hello": "levels=request takes=keys", "admit": ["cached=0", "cached={}"]}})", cached));
  };
  const auto after = [](const std::string& first, const std::string& second) {
    return fmt::format(
        "admit id=r tokens=a100 {}\nextend id=r n=100\nfinish id=r\n"
        "admit id=s tokens=a100 {}\n",
        first, second);
  };
  expect_kind(played(after("lora=x", "lora=y"), {hit(99)}), FindingKind::cached_too_much,
              "no more than 0");
  expect_kind(played(after("lora=x", ""), {hit(99)}), FindingKind::cached_too_much);
  expect_kind(played(after("salt=x", "lora=x"), {hit(99)}), FindingKind::cached_too_much);
  expect_kind(played(after("lora=x salt=s", "lora=x"), {hit(99)}), FindingKind::cached_too_much);
  EXPECT_EQ(played(after("lora=x", "lora=x"), {hit(99)}), "");
  expect_kind(played(after("images=40:20:cat", "images=40:20:dog"), {hit(41)}),
              FindingKind::cached_too_much, "no more than 40");
  expect_kind(played(after("images=40:20:cat", ""), {hit(41)}), FindingKind::cached_too_much,
              "no more than 40");
  EXPECT_EQ(played(after("images=40:20:cat", "images=40:20:dog"), {hit(40)}), "");
  EXPECT_EQ(played(after("images=40:20:cat", "images=40:20:cat"), {hit(99)}), "");
  EXPECT_EQ(played(after("images=40:20:cat", "images=40:10:cat"), {hit(50)}), "");
  // One that still runs shares nothing either.
  expect_kind(
      played("admit id=r lora=x tokens=a9\nextend id=r n=9\nadmit id=s tokens=a9\n", {hit(8)}),
      FindingKind::cached_too_much, "no more than 0");
  expect_kind(
      played("admit id=r salt=x tokens=a9\nextend id=r n=9\nadmit id=s tokens=a9\n", {hit(8)}),
      FindingKind::cached_too_much, "no more than 0");
}

// Rejected drafts are not computed tokens of the request; the kept ones are.
TEST_F(Child, reusesAcceptedDraftsAndNoOthers) {
  const std::string verified =
      "admit id=r tokens=a10\nextend id=r n=10\naccept id=r n=1 tokens=b1\n"
      "extend id=r n=4 drafts=b1:4\naccept id=r n=3 tokens=b1:4\nfinish id=r\n";
  const std::string next = "admit id=s tokens=a10+b20\n";
  EXPECT_EQ(played(verified + next, {child(R"({"admit": ["cached=0", "cached=13"]})")}), "");
  expect_kind(played(verified + next, {child(R"({"admit": ["cached=0", "cached=14"]})")}),
              FindingKind::cached_too_much, "no more than 13");
}

// Prefixes that a tree verb stores were never admitted.
TEST_F(Child, mayReuseWhatATreeVerbStored) {
  const std::string tree =
      child(R"({"hello": "levels=request,tree", "insert": "exist=0", "admit": "cached=64"})");
  EXPECT_EQ(played("alloc as=s1\nadvance slot=s1 tokens=a64\ninsert slot=s1 tokens=a64\n"
                   "admit id=r tokens=a100\n",
                   {tree}),
            "");
}

// --- Numbers, progress and complaints ------------------------------------------------------------

TEST_F(Child, saysNoImpossibleNumber) {
  struct Case {
    std::string answers;
    FindingKind kind = FindingKind::out_of_range;
  };
  const std::string trace =
      "config kv_tokens=1000 state_slots=10\nadmit id=r tokens=a100\nextend id=r n=100\n"
      "checkpoint id=r\nevict kv=5 state=1\ncheck\nfinish id=r\nalloc as=s\n"
      "advance slot=s tokens=b9\ninsert slot=s tokens=b9\nmatch tokens=b12\nflush\n";
  const std::string most = R"({"hello": "levels=request,tree", "admit": "cached=0 kv=1000",
      "checkpoint": "exist=100 length=100", "evict": "kv=1000 state=10",
      "alloc": "slot=1 length=500", "check": "kv_free=600 kv_locked=400 states_free=10",
      "insert": "exist=9 freed_kv=9", "match": "kv=12 state=12 branch=12",
      "flush": "kv=1000 state=10", **)";
  EXPECT_EQ(played(trace, {child(most + "{}}")}), "");
  for (const Case& one : {
           Case{R"({"check": "kv_free=1001"})"},
           Case{R"({"check": "states_free=9223372036854775807"})"},
           Case{R"({"check": "kv_free=600 kv_locked=401"})", FindingKind::size_accounting},
           Case{R"({"check": "states_free=6 states_locked=5"})", FindingKind::size_accounting},
           Case{R"({"admit": "cached=0 evicted_kv=1001"})"},
           Case{R"({"admit": "cached=0 kv=1001"})"},
           Case{R"({"extend": "n=101"})"},
           Case{R"({"checkpoint": "exist=0 length=101"})"},
           Case{R"({"checkpoint": "exist=101 length=100"})"},
           Case{R"({"evict": "kv=1001"})"},
           Case{R"({"evict": "kv=0 state=11"})"},
           Case{R"({"insert": "exist=10"})"},
           Case{R"({"insert": "exist=0 freed_kv=10"})"},
           Case{R"({"match": "kv=13"})"},
           Case{R"({"match": "kv=0 state=13"})"},
           Case{R"({"match": "kv=0 branch=13"})"},
           Case{R"({"flush": "kv=1001"})"},
           Case{R"({"flush": "kv=0 state=11"})"},
       })
    expect_kind(played(trace, {child(most + one.answers + "}")}), one.kind);
}

// A memory behind the pools may hold more than they do, and copies are as many as they are.
TEST_F(Child, saysNoNumberTooManyOfItsTiers) {
  const std::string tiers = child(
      R"({"hello": "levels=request takes=tiers", "evict": "kv=5000 state=50", "settle": "n=7"})");
  EXPECT_EQ(played("config kv_tokens=1000 state_slots=10 host_kv=9000 host_states=90\n"
                   "evict kv=5000 state=50 tier=host\nsettle\n",
                   {tiers}),
            "");
}

// Tokens that somebody holds outlive a flush, and no others do.
TEST_F(Child, reusesAfterAFlushWhatIsLocked) {
  const std::string before =
      "admit id=r tokens=a4\nextend id=r n=4\nfinish id=r\nlock tokens=a4 as=l\n";
  const std::string after = "flush\nadmit id=s tokens=a4+b1\n";
  const std::string tree = R"({"hello": "levels=request,tree", "admit": ["cached=0", "cached=4"]})";
  EXPECT_EQ(played(before + after, {child(tree)}), "");
  expect_kind(played(before + "unlock lock=l\n" + after, {child(tree)}),
              FindingKind::cached_too_much);
}

// The tokens of a slot cache's request begin with what was captured, and go on after it.
TEST_F(Child, computesTheRestOfAPromptAfterARestore) {
  const std::string trace =
      "admit id=r tokens=a1\nextend id=r n=1\ncapture id=r as=s\nadmit id=q tokens=a3\n"
      "restore id=q from=s\nextend id=q n=2\ncapture id=q as=t\n";
  const auto slots = [&](int length) {
    return child(R"({"restore": "cached=1", "capture": ["length=1", "length=)" +
                 std::to_string(length) + R"("]})");
  };
  EXPECT_EQ(played(trace, {slots(3)}), "");
  expect_kind(played(trace, {slots(4)}), FindingKind::out_of_range, "cannot be more than 3");
}

// A cache of blocks counts blocks, whatever kv_tokens says.
TEST_F(Child, countsBlocksWhereItsPolicyDoes) {
  const std::string trace = "config policy=vllm-align blocks=60 kv_tokens=8\ncheck\n";
  EXPECT_EQ(played(trace, {child(R"({"check": "kv_free=50 kv_locked=9"})")}), "");
  expect_kind(played(trace, {child(R"({"check": "kv_free=61"})")}), FindingKind::out_of_range);
  expect_kind(played(trace, {child(R"({"check": "kv_free=50 kv_locked=11"})")}),
              FindingKind::size_accounting);
}

// A server that answers n=0 for ever computes nothing, and every request ended all the same.
TEST_F(Child, computesWhatItIsAskedFor) {
  const std::string request = "request id=r tokens=a100 output=3\nrun\n";
  expect_kind(played(request, {child(R"({"extend": "n=0"})")}), FindingKind::stuck,
              "100 of the 100");
  expect_kind(played(request, {child(R"({"extend": ["n=N", "n=0"]})")}), FindingKind::stuck,
              "1 of");
  EXPECT_EQ(played(request, {child("{}")}), "");
  expect_kind(played("admit id=r tokens=a10\nextend id=r n=10\naccept id=r n=1 tokens=b1\n"
                     "extend id=r n=4 drafts=b1:4\naccept id=r n=1 tokens=b1:2\n",
                     {child(R"({"extend": ["n=10", "n=2"]})")}),
              FindingKind::stuck, "2 of the");
  // Less than asked is no fault where the rest is asked for later.
  EXPECT_EQ(played("admit id=r tokens=a100\nextend id=r n=100\nextend id=r n=60\nfinish id=r\n",
                   {child(R"({"extend": ["n=40", "n=N"]})")}),
            "");
}

TEST_F(Child, canReportABrokenRuleOfItsOwn) {
  const std::string trace = "admit id=r tokens=a10\nextend id=r n=10\ncheck\n";
  expect_kind(played(trace, {child(R"({"extend": "n=N violation=slot 3 is free and in use"})")}),
              FindingKind::broken_invariant, "slot 3 is free and in use");
  expect_kind(played(trace, {child(R"({"extend": "violation=no n, and a reason"})")}),
              FindingKind::broken_invariant, "no n, and a reason");
  expect_kind(played(trace, {child(R"({"check": "violations=7"})")}), FindingKind::broken_invariant,
              "7 broken rules");
  expect_kind(played(trace, {"oracle:radix", child(R"({"check": "violations=7"})")}),
              FindingKind::broken_invariant, "7 broken rules");
}

TEST_F(Child, canReportAnExceptionOfItsOwn) {
  const std::string trace = "admit id=r tokens=a10\nextend id=r n=10\ncheck\n";
  expect_kind(played(trace, {child(R"({"extend": "raised=KeyError: 'r' in cache.py:31"})")}),
              FindingKind::subject_died, "raised after `extend`: KeyError: 'r' in cache.py:31");
  expect_kind(played(trace, {child(R"({"hello": "raised=ValueError: no room"})")}),
              FindingKind::subject_died, "raised after `hello`: ValueError: no room");
}

TEST_F(Child, answersWithFieldsOfItsVerb) {
  const std::string trace = "admit id=r tokens=a10\nextend id=r n=10\n";
  expect_kind(played(trace, {child(R"({"admit": "cached=0 evictd_kv=1"})")}),
              FindingKind::subject_garbled, "no field `evictd_kv`");
  expect_kind(played(trace, {child(R"({"admit": "cached=0 kv_free=1"})")}),
              FindingKind::subject_garbled, "no field `kv_free`");
  EXPECT_EQ(played(trace, {child(R"({"admit": "cached=0 x_speed=fast"})")}), "");
  expect_kind(played(trace, {child(R"({"extend": "n=N blocks=2"})"),
                             child(R"({"extend": "n=N blocks=1"})")}),
              FindingKind::reply_differs, "blocks=2");
}

// --- Labels --------------------------------------------------------------------------------------

// Two states of one length, swapped: their lengths say nothing.
TEST_F(Child, handsOutNoStateOfOtherTokens) {
  const std::string trace =
      "admit id=r tokens=a64\nextend id=r n=64\nfinish id=r\n"
      "admit id=s tokens=b64\nextend id=s n=64\nfinish id=s\nadmit id=t tokens=a64+c1\n";
  const auto labelled = [&](const std::string& last_admit) {
    return child(R"({"hello": "levels=request labels=1",
                     "admit": ["cached=0 state=0 conv=0", "cached=0 state=0 conv=0", ")" +
                 last_admit + R"("]})");
  };
  EXPECT_EQ(played(trace, {labelled("cached=64 state=64 conv=64")}), "");
  EXPECT_EQ(played(trace, {labelled("cached=64 state=64 conv=64 state_tokens=a64 conv_tokens=a60+"
                                    "a60:64 cached_tokens=a64")}),
            "");
  for (const std::string wrong : {"state=63 conv=64", "state=64 conv=63"})
    expect_kind(played(trace, {labelled("cached=64 " + wrong)}), FindingKind::wrong_state_prefix);
  for (const std::string wrong : {"state_tokens=b64", "conv_tokens=b64", "cached_tokens=b64",
                                  "state_tokens=a63", "state_tokens=a64+c1"})
    expect_kind(played(trace, {labelled("cached=64 state=64 conv=64 " + wrong)}),
                FindingKind::wrong_state_prefix);
  expect_kind(played(trace, {labelled("cached=64 state=64 conv=64 state_tokens=[]")}),
              FindingKind::wrong_state_prefix, "that stands for no tokens");
  expect_kind(played(trace, {labelled("cached=64 state=64 conv=64 state_tokens=64")}),
              FindingKind::subject_garbled, "state_tokens");
  EXPECT_EQ(played(trace, {labelled("cached=64 state=64 conv=64 salt=")}), "");
  EXPECT_EQ(played(trace, {labelled("cached=0 state=0 conv=0 salt=s")}), "");
  expect_kind(played(trace, {labelled("cached=64 state=64 conv=64 state_tokens=a64 salt=s")}),
              FindingKind::wrong_state_prefix,
              "computed under the salt `s`, and the request has ``");
}

// --- What a server never does --------------------------------------------------------------------

// The oracle has evicted before the child says that it never does: both begin again without it.
TEST_F(Child, isNotAskedForWhatItDoesNotSupport) {
  const std::string trace =
      "config policy=radix kv_tokens=100\nadmit id=r tokens=a50\nextend id=r n=50\nfinish id=r\n"
      "evict kv=50\nadmit id=s tokens=a50\nextend id=s n=1\nfinish id=s\nevict kv=7\n";
  const std::string radix_without_eviction =
      child(R"({"admit": ["cached=0", "cached=49"], "evict": "unsupported"})");
  for (const std::vector<std::string>& subjects :
       {std::vector<std::string>{"oracle:radix", radix_without_eviction},
        std::vector<std::string>{radix_without_eviction, "radix", "oracle"},
        std::vector<std::string>{radix_without_eviction}}) {
    EXPECT_EQ(played(trace, subjects), "");
    EXPECT_EQ(last_["unsupported"][0]["operation"], "evict kv");
    EXPECT_EQ(last_["unsupported"][0]["left_out"], 2);
  }
}

TEST_F(Child, supportsPrefillCheckpointsAndNoOthers) {
  const std::string child_of_chunks =
      child(R"({"checkpoint": ["exist=0", "unsupported", "exist=1"]})");
  EXPECT_EQ(played("admit id=r tokens=a50\nextend id=r n=50\ncheckpoint id=r\n"
                   "extend id=r n=1 tokens=b1\ncheckpoint id=r\n----\nlength=51\n"
                   "admit id=s tokens=a9\nextend id=s n=9\ncheckpoint id=s\n----\nexist=1\n",
                   {child_of_chunks}),
            "");
  EXPECT_EQ(last_["unsupported"][0]["operation"], "checkpoint while decoding");
  EXPECT_EQ(last_["unsupported"].size(), 1u);
}

// An operation that a child never supports in a trace of operations may be one that a scheduler
// needs.
TEST_F(Child, isAskedAgainByAScheduler) {
  ReplayRequest request;
  request.subjects = {"exec:python3 " + folder_.write("checks_what_has_stepped.py", R"(
import sys
stepped = False
for line in sys.stdin:
    verb, *fields = line.split()
    stepped = verb == "step" or (stepped and verb != "hello")
    n = dict(f.split("=", 1) for f in fields).get("n")
    print({"hello": "levels=request again=1", "admit": "cached=0", "extend": f"n={n}",
           "check": "ok" if stepped else "unsupported"}.get(verb, "ok"), flush=True)
)")};
  request.children = std::make_shared<Children>();
  const std::string of_operations =
      folder_.write("operations.trace", "admit id=r tokens=a5\nextend id=r n=5\ncheck\n");
  const std::string of_requests =
      folder_.write("requests.trace", "request id=r tokens=a5 output=1\nrun\ncheck\n");
  for (const bool scheduled : {false, true, false, true}) {
    request.file = scheduled ? of_requests : of_operations;
    EXPECT_EQ(outcome_of(request), "");
    EXPECT_EQ(last_.contains("unsupported"), !scheduled) << last_.dump();
  }
}

TEST_F(Child, thatCannotBeServedEndsTheRunAsBadInput) {
  const std::string text =
      played("config overlap=1 policy=radix\nrequest id=r tokens=a9 output=3\nrun\n",
             {child(R"({"extend": "unsupported"})")});
  EXPECT_TRUE(text.starts_with("status 2: ")) << text;
  EXPECT_NE(text.find("does not support `extend async`"), std::string::npos) << text;
}

TEST_F(Child, isNotFailedForAFieldThatItDoesNotReport) {
  const std::string trace =
      "admit id=r tokens=a9\n----\ncached=0 state=0 evicted_kv=0\nextend id=r n=9\nfinish id=r\n"
      "----\nexist=0 length=9\ncheck\n----\nviolations=0 kv_free=131063\n";
  EXPECT_EQ(played(trace, {child("{}")}), "");
  expect_kind(played(trace, {child(R"({"finish": "length=8"})")}), FindingKind::answer_differs,
              "length=9");
  expect_kind(played(trace, {child(R"({"admit": "refused=no_kv"})")}), FindingKind::answer_differs);
  expect_kind(played("admit id=r tokens=a9\n----\nrefused=no_kv\n", {child("{}")}),
              FindingKind::answer_differs, "refused");
}

// --- One child for many traces -------------------------------------------------------------------

/// A cache that says whether it forgets at hello; `starts` gets a line per process.
std::string cache_that(const std::string& at_hello, const std::string& starts) {
  return R"(
import sys
open(")" +
         starts +
         R"(", "a").write("started\n")
stored, running = set(), {}
for line in sys.stdin:
    verb, *words = line.split()
    fields = dict(w.split("=", 1) for w in words)
    if verb == "hello":
        )" +
         at_hello +
         R"(
        print("levels=request again=1", flush=True)
    elif verb == "admit":
        running[fields["id"]] = fields["tokens"]
        print("cached=4" if fields["tokens"] in stored else "cached=0", flush=True)
    elif verb == "finish":
        stored.add(running.pop(fields["id"]))
        print("ok", flush=True)
    else:
        print("n=" + fields["n"] if verb == "extend" else "ok", flush=True)
)";
}

class GreetedAgain : public Child {
 protected:
  /// The findings of so many runs of one trace, which share their children, and how many processes
  /// they took.
  std::pair<std::string, std::size_t> runs(const std::string& at_hello, int count) {
    const std::string starts = folder_.write("starts", "");
    ReplayRequest request;
    request.subjects = {"exec:python3 " + folder_.write("cache.py", cache_that(at_hello, starts))};
    request.file = folder_.write("x.trace", "admit id=r tokens=a5\nextend id=r n=5\nfinish id=r\n");
    request.children = std::make_shared<Children>();
    std::string wrong;
    for (int i = 0; i < count && wrong.empty(); ++i) wrong = outcome_of(request);
    const std::string lines = testing_support::read_text(starts);
    return {wrong, static_cast<std::size_t>(std::ranges::count(lines, '\n'))};
  }
};

TEST_F(GreetedAgain, aChildPlaysManyTraces) {
  const auto [wrong, processes] = runs("stored.clear()", 20);
  EXPECT_EQ(wrong, "");
  EXPECT_EQ(processes, 1u);
}

TEST_F(GreetedAgain, aChildThatForgetsNothingIsFound) {
  expect_kind(runs("pass", 20).first, FindingKind::cached_too_much);
}

TEST_F(GreetedAgain, anExceptionEndsTheTraceAndNotTheProcess) {
  const std::string starts = folder_.write("starts", "");
  const std::string raises = R"(
import sys
open(")" + starts + R"(", "a").write("started\n")
for line in sys.stdin:
    hello = line.startswith("hello")
    print("levels=request again=1" if hello else "raised=KeyError: 1", flush=True)
)";
  ReplayRequest request;
  request.subjects = {"exec:python3 " + folder_.write("raises.py", raises)};
  request.file = folder_.write("x.trace", "admit id=r tokens=a5\n");
  request.children = std::make_shared<Children>();
  for (int i = 0; i < 3; ++i) expect_kind(outcome_of(request), FindingKind::subject_died);
  EXPECT_EQ(testing_support::read_text(starts), "started\n");
}

TEST_F(GreetedAgain, aChildThatDiesOfASecondGreetingIsFound) {
  expect_kind(runs("if running or stored: sys.exit(3)", 20).first, FindingKind::subject_died,
              "exit status 3");
}

// --- The shipped example -------------------------------------------------------------------------

// KV counts from the launch of its forward, and a flush leaves what running requests hold.
TEST_F(Child, exampleKeepsWhatIsUnderWayAndWhatIsHeld) {
  const std::string launched =
      "config policy=radix overlap=1\nadmit id=r tokens=a10\nextend async=1 id=r n=10\n"
      "complete id=r\nextend async=1 id=r n=1 tokens=b1\n";
  const std::string ended = "finish id=r\nadmit id=s tokens=a10+b5\n";
  EXPECT_EQ(played(launched + ended, {kExample}), "");
  EXPECT_EQ(last_["requests"][1]["cached_tokens"], 11);
  EXPECT_EQ(played(launched + "complete id=r\n" + ended, {kExample, "radix", "oracle"}), "");
  EXPECT_EQ(last_["requests"][1]["cached_tokens"], 11);
  const std::string held =
      "config policy=radix\nadmit id=r tokens=a10\nextend id=r n=10\nfinish id=r\n"
      "admit id=s tokens=a8\nflush\nadmit id=t tokens=a10+b5\n";
  EXPECT_EQ(played(held, {kExample, "radix", "oracle"}), "");
  EXPECT_EQ(last_["requests"][2]["cached_tokens"], 7);
}

// Thousands of random operations beside an independent cache.
TEST_F(Child, exampleAgreesWithRadixOnRandomOperations) {
  ExploreOptions options;
  options.run.subjects = {"oracle:radix", kExample};
  // The example never evicts.
  EXPECT_TRUE(options.run.config.set_all("kv_tokens=1048576", &options.run.fixed));
  options.traces = 60;
  const Result<ExploreOutcome> outcome = explore(options);
  ASSERT_TRUE(outcome) << outcome.error().text;
  for (const Discovery& found : outcome->discoveries) ADD_FAILURE() << found.finding.finding.text;
  EXPECT_GT(outcome->operations, 1000);
}

}  // namespace
}  // namespace lockstep::cache_sim
