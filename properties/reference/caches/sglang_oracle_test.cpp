// The oracle of SGLang's radix caches against what was recorded of SGLang itself, and each of its
// rules alone. Section numbers are those of reference/caches/sglang.md.
#include "reference/caches/sglang_oracle.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cache_sim/replay/sglang_w1_driver.hpp"
#include "reference/base/mix.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep {
namespace {

std::unique_ptr<Subject> make_oracle(std::string_view policy, const Config& config) {
  const OracleEntry* const entry = Registry<OracleEntry>::find(policy);
  require(entry != nullptr, "the oracle is registered under its policy's name");
  return entry->make({.config = config});
}

/// Speaks to an oracle in lines, as a trace does.
class Conversation {
 public:
  explicit Conversation(std::string_view policy, std::string_view config = "") {
    Config values;
    const Result<void> set = config.empty() ? Result<void>() : values.set_all(config);
    require(set.has_value(), "a test's config is well formed");
    subject_ = make_oracle(policy, values);
  }

  Result<Reply> apply(std::string_view line) {
    const Result<Line> parsed = parse_line(line);
    require(parsed.has_value(), "a test's line is well formed");
    const Result<Operation> operation = parse_operation(*parsed);
    require(operation.has_value(), operation ? "" : operation.error().text);
    return subject_->apply(*operation);
  }

  /// The reply's text; `error` where the line was an error.
  std::string ask(std::string_view line) {
    const Result<Reply> reply = apply(line);
    return reply ? reply->text() : "error";
  }

  /// One field of a reply that must carry it.
  std::int64_t ask(std::string_view line, ReplyField field) {
    const Result<Reply> reply = apply(line);
    require(reply && reply->has(field),
            fmt::format("`{}` is answered with {}", line, to_string(field)));
    return reply->get(field);
  }

  /// Stores a prefix with a state of its own.
  void store(std::string_view tokens) {
    const std::string slot = fmt::format("store{}", stored_++);
    EXPECT_NE(ask(fmt::format("alloc as={}", slot)), "refused=no_state_slot");
    EXPECT_EQ(ask(fmt::format("insert slot={} tokens={}", slot, tokens), ReplyField::exist), 0);
  }

  /// A request from admission to its end; the answer is what it found cached.
  std::int64_t serve(std::string_view prompt, std::string_view output, std::int64_t chunk) {
    const auto size = static_cast<std::int64_t>(parse_tokens(prompt)->size());
    const auto output_size = static_cast<std::int64_t>(parse_tokens(output)->size());
    const std::int64_t cached =
        ask(fmt::format("admit id=r tokens={}", prompt), ReplyField::cached);
    for (std::int64_t at = cached; at < size; at += chunk) {
      ask(fmt::format("extend id=r n={}", std::min(chunk, size - at)), ReplyField::n);
      ask("checkpoint id=r", ReplyField::exist);
    }
    ask(fmt::format(
            "extend id=r n={} tokens={}", output_size - 1,
            parse_tokens(output)->prefix(static_cast<std::uint32_t>(output_size - 1)).text()),
        ReplyField::n);
    ask("finish id=r", ReplyField::length);
    return cached;
  }

 private:
  std::unique_ptr<Subject> subject_;
  int stored_ = 0;
};

constexpr std::string_view kNoBuffer = "sglang-no-buffer";

// --- The workload, and SGLang's decisions on it -------------------------------------------------

const cache_sim::SglangW1& default_workload() {
  static const cache_sim::SglangW1 workload = cache_sim::SglangW1::generate({});
  return workload;
}

TEST(SglangW1, hashesAreTheRecordedOnes) {
  EXPECT_EQ(mix64(0), 0xe220a8397b1dcdafu);
  EXPECT_EQ(mix64(mix64(mix64(0x5EED2026 + 1) ^ 0) ^ 0), 0x023d31ee72733a34u);
}

TEST(SglangW1, generatorMakesTheRecordedTokens) {
  const cache_sim::SglangW1& workload = default_workload();
  EXPECT_EQ(workload.token_digest(), 0x7a04faa0e91ab547u);
  ASSERT_EQ(workload.requests.size(), 2000u);
  std::int64_t prompt_tokens = 0, tokens = 0, conversations = 0;
  std::uint32_t longest = 0;
  for (const cache_sim::SglangW1Request& request : workload.requests) {
    prompt_tokens += request.prompt_size;
    tokens += request.tokens.size();
    longest = std::max(longest, request.tokens.size());
    conversations = std::max(conversations, request.conversation + 1);
  }
  EXPECT_EQ(prompt_tokens, 3'275'942);
  EXPECT_EQ(tokens - prompt_tokens, 287'172);
  EXPECT_EQ(longest, 3783u);
  EXPECT_EQ(conversations, 839);

  constexpr std::uint32_t sizes[3][2] = {{1110, 141}, {1324, 58}, {1367, 255}};
  constexpr Token first_tokens[3][3] = {
      {14706, 3111, 28795}, {2261, 31016, 14368}, {20086, 30375, 18828}};
  for (std::size_t i = 0; i < 3; ++i) {
    const cache_sim::SglangW1Request& request = workload.requests[i];
    EXPECT_EQ(request.prompt_size, sizes[i][0]);
    EXPECT_EQ(request.tokens.size() - request.prompt_size, sizes[i][1]);
    for (std::uint32_t j = 0; j < 3; ++j) EXPECT_EQ(request.tokens[j], first_tokens[i][j]);
  }
}

TEST(SglangW1, turnContinuesWithEverythingTheConversationSaidBefore) {
  const cache_sim::SglangW1& workload = default_workload();
  for (const cache_sim::SglangW1Request& request : workload.requests) {
    if (request.previous < 0) continue;
    const auto& before = workload.requests[static_cast<std::size_t>(request.previous)];
    EXPECT_EQ(request.conversation, before.conversation);
    ASSERT_LT(before.tokens.size(), request.prompt_size);
    EXPECT_EQ(request.tokens.prefix(before.tokens.size()), before.tokens);
  }
}

TEST(SglangW1, fewerRequestsAreTheFirstOnesOfTheSameSequence) {
  const auto options = cache_sim::SglangW1Options::parse("seed=0x5EED2026,requests=20");
  ASSERT_TRUE(options) << options.error().text;
  const cache_sim::SglangW1 few = cache_sim::SglangW1::generate(*options);
  ASSERT_EQ(few.requests.size(), 20u);
  for (std::size_t i = 0; i < 20; ++i)
    EXPECT_EQ(few.requests[i].tokens, default_workload().requests[i].tokens);
}

TEST(SglangW1, parametersThatMakeNoSenseAreNamed) {
  for (const std::string_view text :
       {"seeds=1", "seed", "seed=", "seed=0x", "seed=0xg", "requests=0", "requests=2x",
        "seed=1,,requests=2", "kv_tokens=0", "state_slots=-1"})
    EXPECT_FALSE(cache_sim::SglangW1Options::parse(text)) << text;
  EXPECT_EQ(cache_sim::SglangW1Options::parse("state_slots=17,kv_tokens=99")->state_slots, 17);
  EXPECT_EQ(cache_sim::SglangW1Options::parse("")->requests, 2000);
}

/// fixtures/workloads/recorded_decisions.json.
nlohmann::json recorded_decisions() {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/fixtures/workloads/recorded_decisions.json");
  return nlohmann::json::parse(file).at("records");
}

// The digests are of SGLang's own classes: whoever gives them decides as SGLang does, eviction by
// eviction.
TEST(SglangOracle, decidesOnTheWorkloadAsSglangDid) {
  const nlohmann::json records = recorded_decisions();
  ASSERT_EQ(records.size(), 4u);
  for (const nlohmann::json& recorded : records) {
    const std::unique_ptr<Subject> oracle =
        make_oracle(recorded.at("policy").get<std::string>(), {});
    const auto point = [](std::int64_t k, std::uint64_t digest, std::int64_t hit_tokens) {
      return nlohmann::json{{"requests", k},
                            {"decision_digest", fmt::format("{:016x}", digest)},
                            {"hit_tokens", hit_tokens}};
    };
    nlohmann::json seen = nlohmann::json::array();
    Reply reply;
    const cache_sim::DrivenOutcome outcome = cache_sim::drive(
        default_workload(),
        [&](const Operation& operation) -> const Reply* {
          const Result<Reply> answer = oracle->apply(operation);
          if (!answer) return nullptr;
          reply = *answer;
          return &reply;
        },
        [&](std::int64_t k, std::uint64_t digest, std::int64_t hit_tokens) {
          if (k == 10 || k == 100 || k == 500 || k == 1000)
            seen.push_back(point(k, digest, hit_tokens));
        });
    EXPECT_TRUE(outcome.complete);
    EXPECT_EQ(outcome.input_tokens, 3'275'942);
    EXPECT_EQ(fmt::format("{:016x}", outcome.decision_digest), recorded.at("decision_digest"));
    EXPECT_EQ(outcome.hit_tokens, recorded.at("hit_tokens"));
    ASSERT_EQ(outcome.prefixes.size(), 2000u);
    if (!recorded.contains("after")) continue;  // of the older SGLang only the end is known
    EXPECT_EQ(seen, recorded.at("after")) << recorded.at("policy");
    EXPECT_EQ(nlohmann::json(std::vector(outcome.prefixes.begin(), outcome.prefixes.begin() + 14)),
              recorded.at("first_prefixes"));
  }
}

TEST(SglangW1, theDriverStopsAtARefusalButGoesOnWithoutACheckpoint) {
  const Reply cached = Reply().set(ReplyField::cached, 0);
  const auto drive_refusing = [&](Verb verb) {
    const Reply refused = Reply::refusal(Refusal::no_state_slot);
    return cache_sim::drive(default_workload(), [&, verb](const Operation& operation) {
      return operation.verb == verb ? &refused : &cached;
    });
  };
  EXPECT_TRUE(drive_refusing(Verb::checkpoint).complete);
  EXPECT_FALSE(drive_refusing(Verb::extend).complete);
  EXPECT_EQ(drive_refusing(Verb::admit).prefixes.size(), 0u);
  EXPECT_FALSE(
      cache_sim::drive(default_workload(), [](const Operation&) { return nullptr; }).complete);
}

// --- What a client sees -------------------------------------------------------------------------

// A state is a point value: with the last token always computed, a state at a prompt's end cannot
// serve the same prompt.
TEST(SglangOracle, samePromptFindsOnlyChunkBoundariesAndItsContinuationFindsEverything) {
  Conversation once(kNoBuffer);
  EXPECT_EQ(once.serve("a1000", "b8", 8192), 0);
  EXPECT_EQ(once.serve("a1000", "b8", 8192), 0);
  EXPECT_EQ(once.serve("a1000+b8+c50", "d8", 8192), 1007);

  Conversation chunked(kNoBuffer);
  EXPECT_EQ(chunked.serve("a9000", "b8", 8192), 0);
  EXPECT_EQ(chunked.serve("a9000", "b8", 8192), 8192);

  Conversation thrice(kNoBuffer);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(thrice.serve("a1008", "b40", 8192), 0);
  EXPECT_EQ(thrice.serve("a1008+b40+c59", "d8", 8192), 1047);
}

TEST(SglangOracle, plainRadixServesAllButTheLastToken) {
  Conversation radix("radix");
  EXPECT_EQ(radix.serve("a1000", "b8", 8192), 0);
  EXPECT_EQ(radix.serve("a1000", "b8", 8192), 999);
  EXPECT_EQ(radix.serve("a500+c500", "b8", 8192), 500);
}

TEST(SglangOracle, namespacesShareNothing) {
  Conversation radix("radix");
  EXPECT_EQ(radix.ask("insert tokens=a9 salt=x"), "exist=0 freed_kv=0");
  EXPECT_EQ(radix.ask("match tokens=a9"), "kv=0");
  EXPECT_EQ(radix.ask("match tokens=a9 salt=y"), "kv=0");
  EXPECT_EQ(radix.ask("match tokens=a9 salt=x"), "kv=9");
  EXPECT_EQ(radix.ask("admit id=r tokens=a9 salt=x", ReplyField::cached), 8);
}

// --- 1.2, 1.3: match and split ------------------------------------------------------------------

TEST(SglangOracle, matchEndsAtTheDeepestStateAndCountsAllStoredTokens) {
  Conversation cache(kNoBuffer);
  cache.store("a100");
  cache.store("a300");
  EXPECT_EQ(cache.ask("match tokens=a250"), "branch=192 kv=250 state=100");
  EXPECT_EQ(cache.ask("match tokens=a300+b5"), "branch=0 kv=300 state=300");
  EXPECT_EQ(cache.ask("match tokens=a300 limit=120"), "branch=0 kv=120 state=100");
  EXPECT_EQ(cache.ask("match tokens=a300 limit=0"), "branch=0 kv=0 state=0");
  EXPECT_EQ(cache.ask("match tokens=b10"), "branch=0 kv=0 state=0");
}

// The branch position is on the grid of pages and of the model's own chunks.
TEST(SglangOracle, branchIsOnTheGridOfTheModelsChunk) {
  Conversation cache(kNoBuffer, "model_chunk=10");
  cache.store("a55");
  EXPECT_EQ(cache.ask("match tokens=a54"), "branch=50 kv=54 state=0");
}

TEST(SglangOracle, splitLeavesTheStateWithTheLongerHalf) {
  Conversation cache(kNoBuffer);
  cache.store("a6");
  EXPECT_EQ(cache.ask("match tokens=a4"), "branch=0 kv=4 state=0");
  EXPECT_EQ(cache.ask("match tokens=a6"), "branch=0 kv=6 state=6");
  EXPECT_EQ(cache.ask("lock tokens=a4 as=there"), "ok");   // the shorter half is stored now,
  EXPECT_EQ(cache.ask("lock tokens=a5 as=not"), "error");  // and nothing else is
}

TEST(SglangOracle, splitMakesBothHalvesNew) {
  Conversation cache(kNoBuffer);
  cache.store("a6");
  cache.store("b5");
  cache.ask("match tokens=a4");  // without a state on the way only the split itself reads the clock
  cache.store("c5");
  EXPECT_EQ(cache.ask("evict kv=1"), "kv=5 state=1");
  EXPECT_EQ(cache.ask("match tokens=b5", ReplyField::kv), 0);
  EXPECT_EQ(cache.ask("evict kv=1"), "kv=2 state=1");  // the longer half of a,
  EXPECT_EQ(cache.ask("evict kv=1"), "kv=4 state=0");  // the shorter one, now a leaf,
  EXPECT_EQ(cache.ask("match tokens=c5", ReplyField::state), 5);
}

TEST(SglangOracle, splitUnderALockLocksBothHalves) {
  Conversation cache(kNoBuffer);
  cache.store("a6");
  EXPECT_EQ(cache.ask("lock tokens=a6 as=l"), "ok");
  cache.ask("match tokens=a4");
  EXPECT_EQ(cache.ask("check"), "kv_free=131066 kv_locked=6 states_free=255 states_locked=1");
  EXPECT_EQ(cache.ask("unlock lock=l"), "ok");
  EXPECT_EQ(cache.ask("check"), "kv_free=131066 kv_locked=0 states_free=255 states_locked=0");
}

TEST(SglangOracle, partOfAPageNeverMatches) {
  Conversation radix("radix", "page=4");
  EXPECT_EQ(radix.ask("insert tokens=a11"), "exist=0 freed_kv=0");  // stored: 8
  EXPECT_EQ(radix.ask("match tokens=a11"), "kv=8");
  EXPECT_EQ(radix.ask("match tokens=a7+b9"), "kv=4");
  EXPECT_EQ(radix.ask("match tokens=a3"), "kv=0");
  EXPECT_EQ(radix.ask("insert tokens=a6+b9"), "exist=0 freed_kv=4");
  EXPECT_EQ(radix.ask("check"), "kv_free=131056 kv_locked=0");
}

// SGLang #31643: refreshing the whole path kept prefixes that nobody resumes from.
TEST(SglangOracle, matchRefreshesNoStateButTheOneItUses) {
  Conversation cache(kNoBuffer);
  for (const std::string_view tokens : {"a10", "b10", "a20", "b20"}) cache.store(tokens);
  cache.ask("match tokens=a20");
  EXPECT_EQ(cache.ask("evict state=1"), "kv=0 state=1");  // a10's, though a20 was just used
  EXPECT_EQ(cache.ask("evict state=1"), "kv=0 state=1");
  EXPECT_EQ(cache.ask("match tokens=b10", ReplyField::state), 0);
  EXPECT_EQ(cache.ask("match tokens=a10", ReplyField::state), 0);
  EXPECT_EQ(cache.ask("match tokens=a20", ReplyField::state), 20);
  EXPECT_EQ(cache.ask("evict state=1"), "kv=10 state=1");  // b20 is a leaf
}

// KV ages by whole paths, unlike states: what a match goes through is as new as its end.
TEST(SglangOracle, matchRefreshesTheKvOfItsWholePath) {
  Conversation cache(kNoBuffer);
  for (const std::string_view tokens : {"a4", "a4+b3", "c5"}) cache.store(tokens);
  cache.ask("match tokens=a4+b3");
  cache.ask("lock tokens=c5 as=l");
  EXPECT_EQ(cache.ask("evict kv=1"), "kv=3 state=1");
  cache.ask("unlock lock=l");
  EXPECT_EQ(cache.ask("evict kv=1"), "kv=5 state=1");
  EXPECT_EQ(cache.ask("evict kv=1"), "kv=4 state=1");
}

// --- 1.4: insert --------------------------------------------------------------------------------

TEST(SglangOracle, insertTakesTheStateUnlessTheKeyHasOne) {
  Conversation cache(kNoBuffer);
  cache.store("a6");
  cache.ask("alloc as=s");
  cache.ask("advance slot=s tokens=a6");
  EXPECT_EQ(cache.ask("insert slot=s tokens=a6"), "exist=1 freed_kv=6");
  EXPECT_EQ(cache.ask("insert slot=s tokens=a3"), "exist=0 freed_kv=3");  // splits and fills
  EXPECT_EQ(cache.ask("insert slot=s tokens=a3"), "error");  // the slot is the cache's now
  EXPECT_EQ(cache.ask("match tokens=a3", ReplyField::state), 3);
}

TEST(SglangOracle, plainRadixInsertSaysWhetherTheWholeKeyWasThere) {
  Conversation radix("radix");
  EXPECT_EQ(radix.ask("insert tokens=a6"), "exist=0 freed_kv=0");
  EXPECT_EQ(radix.ask("insert tokens=a3"), "exist=1 freed_kv=3");
  EXPECT_EQ(radix.ask("insert tokens=a9"), "exist=0 freed_kv=6");
}

TEST(SglangOracle, insertFreesTheCallersDuplicatesBeyondWhatTheCacheOwns) {
  Conversation cache(kNoBuffer);
  cache.store("a5");
  cache.ask("alloc as=s");
  EXPECT_EQ(cache.ask("insert slot=s tokens=a8 prev=6"), "error");  // only 5 tokens are stored
  EXPECT_EQ(cache.ask("insert slot=s tokens=a8 prev=2"), "exist=0 freed_kv=3");
  EXPECT_EQ(cache.ask("check", ReplyField::kv_free), 131072 - 8);
}

TEST(SglangOracle, insertGivesATombstoneItsStateBack) {
  Conversation cache(kNoBuffer);
  cache.store("a3");
  cache.store("a6");
  EXPECT_EQ(cache.ask("evict state=1"), "kv=0 state=1");
  EXPECT_EQ(cache.ask("match tokens=a3"), "branch=0 kv=3 state=0");
  cache.store("a3");
  EXPECT_EQ(cache.ask("evict state=1"), "kv=3 state=1");  // the refilled state is the newer one
  EXPECT_EQ(cache.ask("match tokens=a6"), "branch=0 kv=3 state=3");
}

TEST(SglangOracle, insertNeedsKvForWhatTheCallerDoesNotShare) {
  Conversation cache(kNoBuffer, "kv_tokens=10");
  cache.store("a6");
  EXPECT_EQ(cache.ask("lock tokens=a6 as=l"), "ok");
  cache.ask("alloc as=s");
  EXPECT_EQ(cache.ask("insert slot=s tokens=b5"), "refused=no_kv");
  EXPECT_EQ(cache.ask("insert slot=s tokens=a10"), "refused=no_kv");
  EXPECT_EQ(cache.ask("insert slot=s tokens=a10 prev=6"), "exist=0 freed_kv=0");
}

// Stored tokens that nobody locks are no KV to build on: making room takes them first.
TEST(SglangOracle, insertIsRefusedWhereMakingRoomTookWhatItCountsOn) {
  Conversation radix("radix", "kv_tokens=10");
  radix.ask("insert tokens=a6");
  EXPECT_EQ(radix.ask("insert tokens=a6+b5 prev=6"), "refused=no_kv");
  EXPECT_EQ(radix.ask("match tokens=a6"), "kv=0");
}

// --- 1.5: locks ---------------------------------------------------------------------------------

// SGLang #21379: a lock on a tombstone was not counted, and its unlock took back somebody else's.
TEST(SglangOracle, lockOnATombstoneCounts) {
  Conversation cache(kNoBuffer);
  cache.store("a3");
  cache.store("a6");
  cache.ask("evict state=1");
  EXPECT_EQ(cache.ask("lock tokens=a3 as=one"), "ok");
  EXPECT_EQ(cache.ask("check", ReplyField::states_locked), 0);
  cache.store("a3");
  EXPECT_EQ(cache.ask("check", ReplyField::states_locked), 1);
  EXPECT_EQ(cache.ask("lock tokens=a3 as=two"), "ok");
  EXPECT_EQ(cache.ask("unlock lock=one"), "ok");
  EXPECT_EQ(cache.ask("evict state=2"), "kv=3 state=1");
  EXPECT_EQ(cache.ask("unlock lock=two"), "ok");
  EXPECT_EQ(cache.ask("evict state=2"), "kv=3 state=1");
}

TEST(SglangOracle, lockKeepsTheWholePathsKvButOnlyItsOwnState) {
  Conversation cache(kNoBuffer);
  cache.store("a3");
  cache.store("a6");
  cache.store("b5");
  EXPECT_EQ(cache.ask("lock tokens=a6 as=l"), "ok");
  EXPECT_EQ(cache.ask("check"), "kv_free=131061 kv_locked=6 states_free=253 states_locked=1");
  EXPECT_EQ(cache.ask("flush"), "kv=5 state=2");
  EXPECT_EQ(cache.ask("match tokens=a6"), "branch=0 kv=6 state=6");
  EXPECT_EQ(cache.ask("unlock lock=l"), "ok");
  EXPECT_EQ(cache.ask("flush"), "kv=6 state=1");
}

// --- 1.6: eviction ------------------------------------------------------------------------------

TEST(SglangOracle, statesThatFallWithTheirKvCount) {
  Conversation cache(kNoBuffer);
  cache.store("a5");
  cache.store("b5");
  EXPECT_EQ(cache.ask("evict kv=1 state=1"), "kv=5 state=1");
  EXPECT_EQ(cache.ask("evict kv=6 state=1"), "kv=5 state=1");
  EXPECT_EQ(cache.ask("evict kv=1 state=1"), "kv=0 state=0");
}

// What 0.5.23 changed: the legacy class deleted tombstones without children.
TEST(SglangOracle, tombstoneWithoutExtensionsKeepsItsKvUntilItIsTheOldestLeaf) {
  Conversation cache(kNoBuffer);
  cache.store("a3");
  cache.store("a6");
  EXPECT_EQ(cache.ask("evict state=1"), "kv=0 state=1");
  EXPECT_EQ(cache.ask("evict state=1"), "kv=3 state=1");
  EXPECT_EQ(cache.ask("evict state=1"), "kv=0 state=0");
  EXPECT_EQ(cache.ask("match tokens=a6"), "branch=0 kv=3 state=0");
  EXPECT_EQ(cache.ask("evict kv=1"), "kv=3 state=0");
}

// The sequence of SGLang's own test_mamba_radix_cache_1.
TEST(SglangOracle, answersSglangsOwnUnitTest) {
  Conversation cache(kNoBuffer);
  for (const std::string_view tokens :
       {"[1,2,3]", "[1,2,3,4,5,6,7]", "[10,11,12]", "[1,2,3,4,5,60,70]"})
    cache.store(tokens);
  EXPECT_EQ(cache.ask("evict kv=1"), "kv=3 state=1");     // [10,11,12]
  EXPECT_EQ(cache.ask("evict state=1"), "kv=0 state=1");  // [1,2,3] becomes a tombstone
  EXPECT_EQ(cache.ask("match tokens=[1,2,3,4,5]"), "branch=0 kv=5 state=0");
  EXPECT_EQ(cache.ask("match tokens=[1,2,3,4,5,60,70]"), "branch=0 kv=7 state=7");
  EXPECT_EQ(cache.ask("match tokens=[1,2,3,4,5,6,7]"), "branch=0 kv=7 state=7");
  EXPECT_EQ(cache.ask("evict state=1"), "kv=2 state=1");
  EXPECT_EQ(cache.ask("match tokens=[1,2,3,4,5,60,70]"), "branch=0 kv=5 state=0");
}

TEST(SglangOracle, pathCapSparesForksLocksAndTheNewestState) {
  Conversation cache(kNoBuffer, "path_cap=1");
  cache.store("a3");
  cache.store("a3+b3");  // a3 has one extension: its state goes
  EXPECT_EQ(cache.ask("match tokens=a3", ReplyField::state), 0);
  cache.store("a3");     // one extension still, but it is the newest itself
  cache.store("a3+c3");  // a3 is a fork now
  EXPECT_EQ(cache.ask("match tokens=a3", ReplyField::state), 3);
  EXPECT_EQ(cache.ask("lock tokens=a3+c3 as=l"), "ok");
  cache.store("a3+c6");
  EXPECT_EQ(cache.ask("match tokens=a3+c3", ReplyField::state), 6);
  EXPECT_EQ(cache.ask("check", ReplyField::states_free), 256 - 4);
}

// --- State slots --------------------------------------------------------------------------------

TEST(SglangOracle, slotsAreTakenInTheOrderInWhichTheyBecameFree) {
  Conversation cache(kNoBuffer, "state_slots=3");
  EXPECT_EQ(cache.ask("alloc as=x"), "slot=1");
  EXPECT_EQ(cache.ask("alloc as=y"), "slot=2");
  EXPECT_EQ(cache.ask("free slot=x"), "ok");
  EXPECT_EQ(cache.ask("fork slot=y as=z"), "slot=3");
  EXPECT_EQ(cache.ask("insert slot=y tokens=a2"), "exist=0 freed_kv=0");
  EXPECT_EQ(cache.ask("alloc as=x"), "slot=1");
  EXPECT_EQ(cache.ask("alloc as=w"), "slot=2");  // evicts a2
  EXPECT_EQ(cache.ask("alloc as=v"), "refused=no_state_slot");
  EXPECT_EQ(cache.ask("match tokens=a2", ReplyField::kv), 0);
}

TEST(SglangOracle, evictedSlotsWaitBehindTheFreeOnes) {
  Conversation cache(kNoBuffer, "state_slots=4");
  cache.store("a2");
  cache.store("b2");
  EXPECT_EQ(cache.ask("evict state=2"), "kv=4 state=2");
  for (const int slot : {3, 4, 1, 2})
    EXPECT_EQ(cache.ask(fmt::format("alloc as=s{}", slot)), fmt::format("slot={}", slot));
}

TEST(SglangOracle, heldSlotStandsForWhatItWasAdvancedOver) {
  Conversation cache(kNoBuffer);
  cache.ask("alloc as=x");
  EXPECT_EQ(cache.ask("advance slot=x tokens=a7"), "length=7");
  cache.ask("fork slot=x as=y");
  EXPECT_EQ(cache.ask("advance slot=y tokens=b2"), "length=9");
  EXPECT_EQ(cache.ask("copy from=x to=y"), "ok");
  EXPECT_EQ(cache.ask("advance slot=y tokens=b1"), "length=8");
}

// --- 1.7: requests ------------------------------------------------------------------------------

TEST(SglangOracle, copyOnWriteNeverEvictsWhatItCopies) {
  Conversation cache(kNoBuffer, "state_slots=2");
  cache.store("a10");
  cache.ask("alloc as=taken");
  EXPECT_EQ(cache.ask("admit id=r tokens=a20"), "refused=no_state_slot");
  EXPECT_EQ(cache.ask("check"), "kv_free=131062 kv_locked=0 states_free=0 states_locked=0");
  EXPECT_EQ(cache.ask("match tokens=a10"), "branch=0 kv=10 state=10");
}

TEST(SglangOracle, onlyTheEvictionForAFreshSlotIsTold) {
  Conversation cache(kNoBuffer, "state_slots=2");
  cache.store("a10");
  cache.store("b5");
  EXPECT_EQ(cache.ask("admit id=hit tokens=a20"),
            "cached=10 conv=10 evicted_kv=0 evicted_states=0 state=10");
  EXPECT_EQ(cache.ask("match tokens=b5", ReplyField::kv), 0);
  EXPECT_EQ(cache.ask("abort id=hit"), "ok");
  cache.ask("alloc as=taken");
  EXPECT_EQ(cache.ask("admit id=miss tokens=c20"),
            "cached=0 conv=0 evicted_kv=10 evicted_states=1 state=0");
}

// SGLang #36770: with every state locked the donation slot was asserted and took the scheduler
// down.
TEST(SglangOracle, checkpointWithoutADonationSlotIsRefusedAndTheRequestGoesOn) {
  Conversation two(kNoBuffer, "state_slots=2");
  EXPECT_EQ(two.ask("admit id=r tokens=a8", ReplyField::cached), 0);
  EXPECT_EQ(two.ask("extend id=r n=4"), "evicted_kv=0 evicted_states=0 n=4");
  EXPECT_EQ(two.ask("checkpoint id=r"), "exist=0 length=4");
  EXPECT_EQ(two.ask("extend id=r n=4", ReplyField::n), 4);
  EXPECT_EQ(two.ask("checkpoint id=r"), "refused=no_state_slot");
  EXPECT_EQ(two.ask("check"), "kv_free=131064 kv_locked=4 states_free=0 states_locked=1");
  EXPECT_EQ(two.ask("finish id=r"), "exist=0 length=8");
  EXPECT_EQ(two.ask("check"), "kv_free=131064 kv_locked=0 states_free=0 states_locked=0");

  Conversation three(kNoBuffer, "state_slots=3");
  three.ask("admit id=r tokens=a8");
  for (int i = 1; i <= 2; ++i) {
    three.ask("extend id=r n=4");
    EXPECT_EQ(three.ask("checkpoint id=r"), fmt::format("exist=0 length={}", 4 * i));
  }
}

TEST(SglangOracle, checkpointOfAnotherLengthThanTheStatesStoresNothing) {
  Conversation cache(kNoBuffer);
  cache.ask("admit id=r tokens=a8");
  EXPECT_EQ(cache.ask("checkpoint id=r"), "exist=1 length=0");
  cache.ask("extend id=r n=8");
  EXPECT_EQ(cache.ask("checkpoint id=r up_to=5"), "exist=0 length=0");
  EXPECT_EQ(cache.ask("checkpoint id=r up_to=9"), "error");
  EXPECT_EQ(cache.ask("match tokens=a8", ReplyField::kv), 0);
  EXPECT_EQ(cache.ask("checkpoint id=r"), "exist=0 length=8");
  EXPECT_EQ(cache.ask("checkpoint id=r"), "exist=1 length=8");
  EXPECT_EQ(cache.ask("finish id=r"), "exist=1 length=8");
  EXPECT_EQ(cache.ask("check"), "kv_free=131064 kv_locked=0 states_free=255 states_locked=0");
}

TEST(SglangOracle, plainRadixStoresWholePagesAndFreesTheRest) {
  Conversation radix("radix", "page=4,kv_tokens=20");
  radix.ask("admit id=r tokens=a10");
  EXPECT_EQ(radix.ask("extend id=r n=10", ReplyField::n), 10);
  EXPECT_EQ(radix.ask("check"), "kv_free=8 kv_locked=0");
  EXPECT_EQ(radix.ask("checkpoint id=r up_to=3"), "exist=1 length=0");
  EXPECT_EQ(radix.ask("checkpoint id=r"), "exist=0 length=8");
  EXPECT_EQ(radix.ask("checkpoint id=r up_to=6"), "exist=1 length=8");
  EXPECT_EQ(radix.ask("check"), "kv_free=8 kv_locked=8");
  EXPECT_EQ(radix.ask("finish id=r"), "exist=1 length=8");
  EXPECT_EQ(radix.ask("check"), "kv_free=12 kv_locked=0");
}

// Two requests compute the same prompt at once: the second one's KV and states go back.
TEST(SglangOracle, theSecondOfTwoEqualRequestsKeepsNothingTwice) {
  Conversation cache(kNoBuffer);
  for (const std::string_view id : {"one", "two"}) {
    EXPECT_EQ(cache.ask(fmt::format("admit id={} tokens=a8", id), ReplyField::cached), 0);
    cache.ask(fmt::format("extend id={} n=8", id));
  }
  EXPECT_EQ(cache.ask("check", ReplyField::kv_free), 131072 - 16);
  EXPECT_EQ(cache.ask("checkpoint id=one"), "exist=0 length=8");
  EXPECT_EQ(cache.ask("checkpoint id=two"), "exist=1 length=8");
  EXPECT_EQ(cache.ask("check"), "kv_free=131064 kv_locked=8 states_free=253 states_locked=1");
  EXPECT_EQ(cache.ask("finish id=one"), "exist=1 length=8");
  EXPECT_EQ(cache.ask("finish id=two"), "exist=1 length=8");
  EXPECT_EQ(cache.ask("check"), "kv_free=131064 kv_locked=0 states_free=255 states_locked=0");
}

TEST(SglangOracle, preemptedRequestLeavesItsCheckpointsAndNothingElse) {
  Conversation cache(kNoBuffer);
  cache.ask("admit id=r tokens=a8");
  cache.ask("extend id=r n=5");
  cache.ask("checkpoint id=r");
  cache.ask("extend id=r n=3");
  EXPECT_EQ(cache.ask("preempt id=r"), "ok");
  EXPECT_EQ(cache.ask("check"), "kv_free=131067 kv_locked=0 states_free=255 states_locked=0");
  EXPECT_EQ(cache.ask("admit id=r tokens=a8", ReplyField::cached), 5);
  EXPECT_EQ(cache.ask("finish id=r insert=0"), "ok");
}

TEST(SglangOracle, finishWithStrippedThinkingLeavesThePromptOfPlainRadixAndNothingOfAState) {
  Conversation radix("radix", "strip_thinking=1");
  radix.ask("admit id=r tokens=a100");
  radix.ask("extend id=r n=100");
  radix.ask("extend id=r n=60 tokens=b60");
  EXPECT_EQ(radix.ask("finish id=r"), "exist=0 length=100");
  EXPECT_EQ(radix.ask("check"), "kv_free=130972 kv_locked=0");

  Conversation hybrid(kNoBuffer, "strip_thinking=1");
  hybrid.ask("admit id=r tokens=a100");
  hybrid.ask("extend id=r n=100");
  hybrid.ask("extend id=r n=60 tokens=b60");
  EXPECT_EQ(hybrid.ask("finish id=r"), "exist=1 length=0");
  EXPECT_EQ(hybrid.ask("check"), "kv_free=131072 kv_locked=0 states_free=256 states_locked=0");
}

// 0.5.23 frees KV that the cache owns (or asserts) where a resumed request's checkpoint went past
// the original prompt.
TEST(SglangOracle, strippedThinkingAfterAResumeFreesNothingThatTheCacheOwns) {
  for (const std::string_view policy : {std::string_view("radix"), kNoBuffer}) {
    Conversation cache(policy, "strip_thinking=1");
    cache.ask("admit id=r tokens=a100");
    cache.ask("extend id=r n=100");
    cache.ask("checkpoint id=r");
    cache.ask("extend id=r n=59 tokens=b60");
    cache.ask("preempt id=r");
    EXPECT_EQ(cache.ask("admit id=r prompt=100 tokens=a100+b60", ReplyField::cached), 100);
    cache.ask("extend id=r n=60");
    EXPECT_EQ(cache.ask("checkpoint id=r"), "exist=0 length=160");
    cache.ask("extend id=r n=20 tokens=c20");
    EXPECT_EQ(cache.ask("finish id=r"), "exist=1 length=160");
    EXPECT_EQ(cache.ask("check", ReplyField::kv_free), 131072 - 160);
    EXPECT_EQ(cache.ask("check", ReplyField::kv_locked), 0);
    EXPECT_EQ(cache.ask("match tokens=a100+b60", ReplyField::kv), 160);
  }
}

TEST(SglangOracle, skippedDecodeLockLetsTheStateGoButNotTheKv) {
  Conversation cache(kNoBuffer, "skip_decode_lock=1");
  cache.ask("admit id=r tokens=a8");
  cache.ask("extend id=r n=8");
  cache.ask("checkpoint id=r");
  EXPECT_EQ(cache.ask("check"), "kv_free=131064 kv_locked=8 states_free=254 states_locked=0");
  EXPECT_EQ(cache.ask("flush"), "kv=0 state=1");
  EXPECT_EQ(cache.ask("abort id=r"), "ok");
  EXPECT_EQ(cache.ask("check"), "kv_free=131064 kv_locked=0 states_free=256 states_locked=0");
}

TEST(SglangOracle, extendEvictsWhatIsMissingAndARefusedOneChangesNothing) {
  Conversation cache(kNoBuffer, "kv_tokens=20");
  cache.store("b6");
  cache.store("c6");
  cache.ask("admit id=r tokens=a20");
  EXPECT_EQ(cache.ask("extend id=r n=8"), "evicted_kv=0 evicted_states=0 n=8");
  EXPECT_EQ(cache.ask("extend id=r n=1"), "evicted_kv=6 evicted_states=1 n=1");
  EXPECT_EQ(cache.ask("lock tokens=c6 as=l"), "ok");
  EXPECT_EQ(cache.ask("extend id=r n=6"), "refused=no_kv");
  EXPECT_EQ(cache.ask("extend id=r n=5"), "evicted_kv=0 evicted_states=0 n=5");
  EXPECT_EQ(cache.ask("extend id=r n=7"), "error");  // 6 tokens are left
}

TEST(SglangOracle, admissionIsRefusedWhereTheRequestCanNeverRunOrHasNoRow) {
  Conversation cache(kNoBuffer, "kv_tokens=20,max_running=1");
  EXPECT_EQ(cache.ask("admit id=r tokens=a21"), "refused=too_long");
  EXPECT_EQ(cache.ask("admit id=r tokens=a20", ReplyField::cached), 0);
  EXPECT_EQ(cache.ask("admit id=s tokens=a2"), "refused=no_row");
  EXPECT_EQ(cache.ask("abort id=r"), "ok");
  EXPECT_EQ(cache.ask("admit id=s tokens=a2", ReplyField::cached), 0);
}

// SGLang #16067: the copy's slot was lost where the scheduler then did not admit.
TEST(SglangOracle, admissionIsRefusedWhereThePromptCannotFitBesideWhatIsLocked) {
  Conversation cache(kNoBuffer, "kv_tokens=10");
  cache.store("a4");
  EXPECT_EQ(cache.ask("lock tokens=a4 as=l"), "ok");
  EXPECT_EQ(cache.ask("admit id=r tokens=b7"), "refused=no_kv");
  EXPECT_EQ(cache.ask("admit id=r tokens=a4+b7"), "refused=too_long");
  EXPECT_EQ(cache.ask("admit id=r tokens=b6", ReplyField::cached), 0);
  EXPECT_EQ(cache.ask("extend id=r n=6", ReplyField::n), 6);
  EXPECT_EQ(cache.ask("admit id=hit tokens=a4+b1"), "refused=no_kv");
  EXPECT_EQ(cache.ask("check"), "kv_free=0 kv_locked=4 states_free=254 states_locked=1");
}

// Rejected draft tokens leave nothing behind: neither KV nor a place in what is stored.
TEST(SglangOracle, verificationKeepsTheInputsAndTheAcceptedDrafts) {
  Conversation cache(kNoBuffer);
  cache.ask("admit id=r tokens=a8");
  cache.ask("extend id=r n=8");
  EXPECT_EQ(cache.ask("accept id=r n=1 tokens=b1"),
            "n=1");  // sampled, computed by the next forward
  EXPECT_EQ(cache.ask("extend id=r n=3 drafts=c3"), "error");
  EXPECT_EQ(cache.ask("extend id=r n=4 drafts=c3"), "evicted_kv=0 evicted_states=0 n=4");
  EXPECT_EQ(cache.ask("check", ReplyField::kv_free), 131072 - 12);
  for (const std::string_view early : {"extend id=r n=1", "checkpoint id=r", "finish id=r"})
    EXPECT_EQ(cache.ask(early), "error") << early;
  EXPECT_EQ(cache.ask("accept id=r n=2 tokens=d2"), "error");
  EXPECT_EQ(cache.ask("accept id=r n=5 tokens=c3+d2"), "error");
  EXPECT_EQ(cache.ask("accept id=r n=2 tokens=c1+d1"), "n=2");
  EXPECT_EQ(cache.ask("check", ReplyField::kv_free), 131072 - 10);
  EXPECT_EQ(cache.ask("finish id=r"), "exist=0 length=10");
  EXPECT_EQ(cache.ask("match tokens=a8+b1+c3"), "branch=0 kv=10 state=10");
}

TEST(SglangOracle, requestMayLeaveInTheMiddleOfAVerification) {
  for (const std::string_view end : {"abort id=r", "preempt id=r", "finish id=r insert=0"}) {
    Conversation cache(kNoBuffer);
    cache.ask("admit id=r tokens=a8");
    cache.ask("extend id=r n=10 drafts=c2");
    EXPECT_EQ(cache.ask(end), "ok");
    EXPECT_EQ(cache.ask("check"), "kv_free=131072 kv_locked=0 states_free=256 states_locked=0");
  }
}

TEST(SglangOracle, operationsOnWhatIsNotThereAreErrors) {
  for (const std::string_view policy : {std::string_view("radix"), kNoBuffer}) {
    Conversation cache(policy);
    for (const std::string_view line : {"extend id=r n=1",
                                        "accept id=r n=1 tokens=a1",
                                        "checkpoint id=r",
                                        "finish id=r",
                                        "abort id=r",
                                        "preempt id=r",
                                        "complete id=r",
                                        "capture as=x id=r",
                                        "restore from=x id=r",
                                        "compact mapping=-1,0",
                                        "unlock lock=l",
                                        "lock as=l tokens=a3",
                                        "advance slot=s tokens=a1",
                                        "fork slot=s as=t",
                                        "copy from=s to=t",
                                        "free slot=s",
                                        "admit id=r tokens=a8 prompt=9",
                                        "step ids=r padded=0",
                                        "admit id=r tokens=a0",
                                        "insert tokens=a3 prev=1"})
      EXPECT_EQ(cache.ask(line), "error") << policy << ' ' << line;
    EXPECT_EQ(cache.ask("step"), "ok");
    cache.ask("admit id=r tokens=a8");
    for (const std::string_view line :
         {"admit id=r tokens=a8", "extend id=r n=9", "extend id=r n=8 async=1"})
      EXPECT_EQ(cache.ask(line), "error") << policy << ' ' << line;
  }
}

// --- Liveness -----------------------------------------------------------------------------------

/// A random line about a few requests, states and overlapping prompts. A pure function: draws are
/// told apart by number, because the order in which arguments are evaluated is the compiler's.
std::string random_line(std::uint64_t seed, std::uint64_t index) {
  const auto draw = [&](std::uint64_t which, std::uint64_t count) {
    return mix64(mix64(mix64(seed) ^ index) ^ which) % count;
  };
  const std::uint64_t id = draw(0, 4);
  const std::uint64_t shared = 1 + draw(1, 12);
  const std::string tokens = fmt::format("a{}+{}{}", shared, "bc"[draw(2, 2)], 1 + draw(3, 12));
  switch (draw(4, 13)) {
    case 0:
    case 1: return fmt::format("admit id=r{} tokens={}", id, tokens);
    case 2:
    case 3: return fmt::format("extend id=r{} n={} tokens=d{}", id, 1 + draw(5, 9), draw(6, 3));
    case 4: return fmt::format("checkpoint id=r{}", id);
    case 5: return fmt::format("finish id=r{}", id);
    case 6: return fmt::format("preempt id=r{}", id);
    case 7: return fmt::format("match tokens={}", tokens);
    case 8: return fmt::format("alloc as=s{}", id);
    case 9: return fmt::format("insert slot=s{} tokens={}", id, tokens);
    case 10: return fmt::format("lock as=l{} tokens=a{}", id, shared);
    case 11: return fmt::format("unlock lock=l{}", id);
    default: return fmt::format("evict kv={} state={}", draw(5, 20), draw(6, 2));
  }
}

// Whatever happened: when nobody runs or holds anything, evicting everything fills both memories
// again.
TEST(SglangOracle, everythingIsFreeAfterAllIsOver) {
  for (const std::string_view policy :
       {std::string_view("radix"), kNoBuffer, std::string_view("sglang-extra-buffer")}) {
    const std::int64_t page = policy == "radix" ? 3 : 1;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      Conversation cache(policy, fmt::format("kv_tokens=60,state_slots=6,page={},model_chunk=2,"
                                             "track_interval=2",
                                             page));
      for (std::uint64_t i = 0; i < 300; ++i) {
        cache.ask(random_line(seed, i));
        const Reply check = *cache.apply("check");
        EXPECT_GE(check.get(ReplyField::kv_free), 0);
        EXPECT_LE(check.get(ReplyField::kv_free) + check.get(ReplyField::kv_locked), 60);
      }
      for (int id = 0; id < 4; ++id)
        for (const char* const end : {"abort id=r", "free slot=s", "unlock lock=l"})
          cache.ask(fmt::format("{}{}", end, id));
      cache.ask("flush");
      const Reply check = *cache.apply("check");
      EXPECT_EQ(check.get(ReplyField::kv_free), 60) << policy << " seed " << seed;
      EXPECT_EQ(check.get(ReplyField::kv_locked), 0);
      if (policy != "radix") {
        EXPECT_EQ(check.get(ReplyField::states_free), 6) << seed;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
