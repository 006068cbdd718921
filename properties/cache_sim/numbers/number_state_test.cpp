// Numbers in the slots of a cache: right use is never reported, each wrong one is, and the finding
// names the unit, the part and the slot.
#include "cache_sim/numbers/number_state.hpp"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <deque>

#include "cache_sim/numbers/labelled_numbers.hpp"

namespace lockstep {
namespace {

using cache_sim::NumberState;
using cache_sim::Truth;
using reference::HybridModel;
using testing::HasSubstr;

std::shared_ptr<Truth> truth_of(std::string_view preset, std::uint32_t capacity = 1u << 10) {
  const auto config = *reference::hybrid_preset(preset);
  return std::make_shared<Truth>(
      std::make_shared<const HybridModel>(config, reference::drawn_hybrid(config)), capacity);
}

Tokens text(const char* terms) {
  return *parse_tokens(terms);
}

/// A cache of one request whose KV slots are 1, 2, … and whose state slot is 1.
struct OneRequest {
  explicit OneRequest(std::string_view preset = "tiny-nemotron-h")
      : truth(truth_of(preset)), state(truth, 8, 64) {
    state.allocate_state(StateSlot{1});
    state.zero_state(StateSlot{1});
    for (std::uint32_t slot = 1; slot < 64; ++slot) kv.push_back(slot);
    state.allocate_kv(kv);
  }
  ForwardRow row(const Tokens& tokens, std::uint32_t begin, std::uint32_t end) const {
    return {.tokens = tokens, .begin = begin, .end = end, .state = StateSlot{1}, .kv = told(kv)};
  }
  void run(const Tokens& tokens, std::uint32_t begin, std::uint32_t end) {
    state.forward(row(tokens, begin, end));
    state.launch({});
  }
  std::string found() {
    const Findings findings = state.drain(false);
    return findings.empty() ? ""
                            : std::string(to_string(findings[0].kind)) + ": " + findings[0].text;
  }

  std::shared_ptr<Truth> truth;
  NumberState state;
  /// The slots as a row is told them, in two runs.
  std::span<const KvRun> told(KvSlots slots) const {
    const auto count = static_cast<std::uint32_t>(slots.size());
    std::shared_ptr<std::uint32_t[]> array(new std::uint32_t[count]);
    std::ranges::copy(slots, array.get());
    runs.push_back({KvRun{array, 0, count / 2}, KvRun{array, count / 2, count - count / 2}});
    return runs.back();
  }

  mutable std::deque<std::array<KvRun, 2>> runs;  // of the rows that were told
  std::vector<std::uint32_t> kv;
};

// A prefix is computed once, whoever asks for it, and forgetting changes no number.
TEST(Truth, computesEachPrefixOnce) {
  const auto truth = truth_of("tiny-qwen3-next", 64);
  const Truth::Node a20 = truth->at(text("a20"), 20);
  EXPECT_EQ(truth->computed(), 20);
  const std::vector<double> logits(truth->logits(a20).begin(), truth->logits(a20).end());
  truth->at(text("a10+b5"), 15);
  EXPECT_EQ(truth->computed(), 25);
  EXPECT_EQ(truth->before(truth->at(text("a11"), 11)), truth->at(text("a10"), 10));
  EXPECT_EQ(truth->computed(), 25);
  truth->at(text("c60"), 60);
  const Truth::Node again = truth->at(text("a20"), 20);
  EXPECT_TRUE(std::ranges::equal(truth->logits(again), logits));
  EXPECT_EQ(truth->computed(), 25 + 60 + 20);
}

TEST(Numbers, ofARightRunAreNeverReported) {
  for (const std::string_view preset : reference::hybrid_presets()) {
    OneRequest one(preset);
    const Tokens tokens = text("a12+b8");
    one.run(tokens, 0, 7);
    one.run(tokens, 7, 8);
    const Tokens drafted = text("a11+c1");
    ForwardRow verified = one.row(drafted, 8, 12);
    verified.drafts = 3;
    one.state.forward(verified);
    one.state.launch({});
    for (const StatePart part : kStateParts)
      one.state.commit_state(StateSlot{1}, 2, StateSlot{1}, part);  // c0 is rejected
    one.run(tokens, 11, 20);
    one.state.compare_state(StateSlot{1}, tokens, 20);
    EXPECT_EQ(one.found(), "") << preset;
  }
}

TEST(Numbers, ofAVerifiedTreeFollowTheirPaths) {
  OneRequest one("tiny-qwen3-next");
  one.run(text("a6"), 0, 6);
  const std::vector<std::int64_t> parents{0, 0, 1, 2};
  const Tokens drafted = text("a7+[1]+a7:8+[2]+a8:9");
  ForwardRow tree = one.row(drafted, 6, 11);
  tree.drafts = 4;
  tree.parents = parents;
  one.state.forward(tree);
  one.state.launch({});
  EXPECT_EQ(one.found(), "");
  for (const StatePart part : kStateParts)
    one.state.commit_state(StateSlot{1}, 4, StateSlot{1}, part);
  one.state.copy_kv(std::vector{one.kv[8], one.kv[10]}, std::vector{one.kv[7], one.kv[8]});
  one.run(text("a10"), 9, 10);
  EXPECT_EQ(one.found(), "");
}

// A state and its ring together have the bits of a scan, however the ring is cut by flushes.
TEST(Numbers, ofARingAreThoseOfAScan) {
  for (const std::string_view preset : reference::hybrid_presets()) {
    OneRequest one(preset);
    const Tokens tokens = text("a7+b9");
    one.run(tokens, 0, 7);
    std::uint32_t live = 0;
    const auto step = [&](std::uint32_t begin, bool flushes) {
      ForwardRow row = one.row(tokens, begin, begin + 1);
      row.keeps.recurrent = false;
      row.ring = RingStep{.slot = StateSlot{1}, .live = live, .writes_state = flushes};
      if (!flushes) row.ring->entry = live;
      live = flushes ? 0 : live + 1;
      one.state.forward(row);
      one.state.launch({});
    };
    for (std::uint32_t begin = 7; begin < 13; ++begin) step(begin, begin == 8);
    EXPECT_EQ(live, 4u);
    one.state.rewind_conv(StateSlot{1});
    one.state.compare_state(StateSlot{1}, tokens, 9);
    EXPECT_EQ(one.found(), "") << preset << ": the slot is left where it was flushed";
    one.state.fold_ring(StateSlot{1}, 2, tokens, 11);
    EXPECT_EQ(one.found(), "") << preset;
  }
}

TEST(Numbers, ofAWrongRingAreReported) {
  const auto found = [](std::uint32_t live, std::uint32_t entries) {
    OneRequest one("tiny-qwen3-next");
    const Tokens tokens = text("a7+b9");
    one.run(tokens, 0, 7);
    for (std::uint32_t i = 0; i <= entries; ++i) {
      ForwardRow row = one.row(tokens, 7 + i, 8 + i);
      row.keeps.recurrent = false;
      row.ring = RingStep{.slot = StateSlot{1}, .live = i == entries ? live : i, .entry = i};
      one.state.forward(row);
      one.state.launch({});
    }
    return one.found();
  };
  EXPECT_EQ(found(3, 3), "");
  EXPECT_THAT(found(2, 3), HasSubstr("unit 0: the recurrent part of state slot 1 differs"));
  EXPECT_THAT(found(4, 3), HasSubstr("which holds what state slot 1 had before anybody wrote it"));
}

// The last known token was computed by an earlier row.
TEST(Numbers, ofATreeWithoutItsRootAreThoseOfTheTruth) {
  OneRequest one("tiny-qwen3-next");
  one.run(text("a7"), 0, 7);
  const std::vector<std::int64_t> parents{0, 0, 1};
  const Tokens drafted = text("a7+[1]+a7:8+[2]");
  ForwardRow tree = one.row(drafted, 7, 10);
  tree.drafts = 3;
  tree.parents = parents;
  one.state.forward(tree);
  one.state.launch({});
  for (const StatePart part : kStateParts)
    one.state.commit_state(StateSlot{1}, 1, StateSlot{1}, part);
  one.state.copy_kv(std::vector{one.kv[8]}, std::vector{one.kv[7]});
  one.run(text("a9"), 8, 9);
  EXPECT_EQ(one.found(), "");
  one.state.zero_state(StateSlot{1});
  one.state.forward(tree);
  EXPECT_THAT(one.found(), HasSubstr("number-differs: state slot 1 goes on after 7 tokens"));
}

TEST(Numbers, ofAStateTakenOnTheWayAreRight) {
  OneRequest one;
  const std::vector<StateTake> takes{{3, StateSlot{2}, {.conv = false}}, {5, StateSlot{3}}};
  const Tokens tokens = text("a9");
  ForwardRow row = one.row(tokens, 0, 9);
  row.takes = takes;
  one.state.allocate_state(StateSlot{2});
  one.state.allocate_state(StateSlot{3});
  one.state.forward(row);
  one.state.compare_state(StateSlot{3}, text("a9"), 5);  // the batch runs first
  EXPECT_EQ(one.found(), "");
  one.state.compare_state(StateSlot{2}, text("a9"), 3);
  EXPECT_THAT(one.found(),
              HasSubstr("number-differs: state slot 2 is handed out for 3 tokens of a9; "
                        "unit 0: its conv part differs, which holds what state slot 2"));
}

// A verification that takes states leaves its own slot alone, unless it is told to keep them.
TEST(Numbers, ofAVerificationThatTakesStatesAreRight) {
  for (const bool keeps : {false, true}) {
    OneRequest one;
    one.run(text("a6"), 0, 6);
    one.state.allocate_state(StateSlot{2});
    const std::vector<StateTake> takes{{8, StateSlot{2}, {}}};
    const Tokens tokens = text("a9");
    ForwardRow row = one.row(tokens, 6, 9);
    row.drafts = 2;
    row.takes = takes;
    row.keeps = {.recurrent = false, .conv = keeps};
    one.state.forward(row);
    one.state.compare_state(StateSlot{2}, tokens, 8);
    EXPECT_EQ(one.found(), "");
    one.state.compare_state(StateSlot{1}, tokens, 6);
    EXPECT_THAT(one.found(), HasSubstr(keeps ? "unit 0: its conv part differs" : ""));
    const std::vector<StateTake> nowhere{{8, StateSlot::none(), {}}};
    row.takes = nowhere;
    one.state.forward(row);
    EXPECT_THAT(one.found(), HasSubstr("out-of-range: a row over tokens 6 to 9 of a9"));
  }
}

// Each way to be wrong, and the words that name it.
TEST(Numbers, ofAWrongSlotAreReportedByUnitAndPart) {
  const auto found = [](const auto& spoil) {
    OneRequest one;
    one.run(text("a10"), 0, 10);
    EXPECT_EQ(one.found(), "");
    spoil(one);
    one.run(text("a12"), 10, 12);
    return one.found();
  };
  EXPECT_EQ(found([](OneRequest&) {}), "");
  EXPECT_THAT(found([](OneRequest& one) { one.kv[2] = one.kv[3]; }),
              HasSubstr("unit 2: KV slot 4 of token 2 differs"));
  EXPECT_THAT(
      found([](OneRequest& one) { one.state.free_kv(std::vector{one.kv[9]}); }),
      HasSubstr("logits after 12 tokens are NaN off; unit 2: KV slot 10 of token 9 differs, "
                "which holds what KV slot 10 had before anybody wrote it"));
  EXPECT_THAT(found([](OneRequest& one) { one.kv[0] = 0; }), HasSubstr("holds what KV slot 0 had"));
  EXPECT_THAT(found([](OneRequest& one) { one.state.zero_state(StateSlot{1}, StatePart::conv); }),
              HasSubstr("unit 0: the conv part of state slot 1 differs"));
  EXPECT_THAT(found([](OneRequest& one) {
                one.state.receive_state(StateSlot{1}, StatePart::recurrent, text("a9"), 9);
              }),
              HasSubstr("unit 0: the recurrent part of state slot 1 differs"));
  EXPECT_THAT(found([](OneRequest& one) { one.state.free_state(StateSlot{1}); }),
              HasSubstr("which holds what state slot 1 had before anybody wrote it"));
  for (const std::size_t size : {5, 11})  // no slot for token 5, or for the row's own last token
    EXPECT_EQ(found([&](OneRequest& one) { one.kv.resize(size); }),
              "out-of-range: a row over tokens 10 to 12 of a12 has a slot outside of its pool");
}

// Rows of a launch are one batch; rows that share a state run one after the other.
TEST(Numbers, ofRowsThatShareAStateAreThoseOfRunsInOrder) {
  OneRequest one;
  one.state.forward(one.row(text("a10"), 0, 4));
  one.state.forward(one.row(text("a10"), 4, 9));
  one.state.launch({});
  one.run(text("a10"), 9, 10);
  EXPECT_EQ(one.found(), "");
}

// Padding of a bucket is written behind the text, and all KV to a second memory too.
// A row over the places of rejected drafts, which no call has named in between.
TEST(Numbers, ofARowThatOverwritesKvAreThoseOfRunsInOrder) {
  OneRequest one("tiny-qwen3");
  const Tokens drafted = text("a5+c2");
  ForwardRow verified = one.row(drafted, 0, 7);
  verified.drafts = 2;
  one.state.forward(verified);
  one.state.forward(one.row(text("a7"), 5, 7));
  one.state.launch({});
  EXPECT_EQ(one.found(), "");
}

TEST(Numbers, ofAPaddedRowAreThoseOfItsText) {
  OneRequest one("tiny-window");
  std::vector<std::uint32_t> also(one.kv.rbegin(), one.kv.rend());
  const Tokens tokens = text("a20");
  ForwardRow row = one.row(tokens, 0, 5);
  row.padded_to = 8;
  row.also = one.told(also);
  one.state.forward(row);
  one.state.launch({});
  std::swap(one.kv, also);
  one.run(tokens, 5, 6);
  EXPECT_EQ(one.found(), "");
  one.run(tokens, 9, 10);  // it reads the padding of places 6 and 7
  EXPECT_THAT(one.found(), HasSubstr("KV slot 57 of token 6 differs"));
}

// Each layer may have slots of its own; a finding names those of the row.
TEST(Numbers, ofLayersWithOwnSlotsAreFound) {
  OneRequest one;
  one.state.allocate_state(StateSlot{3});
  one.state.zero_state(StateSlot{3});
  const std::vector<std::uint32_t> states{0, 2}, kv{7};
  const Tokens tokens = text("a12");
  const auto run = [&](std::uint32_t begin, std::uint32_t end) {
    ForwardRow row = one.row(tokens, begin, end);
    row.kv = one.told(KvSlots(one.kv).first(20));
    row.state_layers = states;
    row.kv_layers = kv;
    one.state.forward(row);
    one.state.launch({});
    return one.found();
  };
  EXPECT_EQ(run(0, 5), "");
  one.state.free_kv(std::vector{4u});  // token 3 is in slot 4 + 7
  EXPECT_EQ(run(5, 6), "");
  const Tokens drafted = text("a8+c1");
  ForwardRow verified = one.row(drafted, 6, 9);
  verified.drafts = 2;
  verified.kv = one.told(KvSlots(one.kv).first(20));
  verified.state_layers = states;
  verified.kv_layers = kv;
  one.state.forward(verified);
  for (const std::uint32_t slot : {1, 3})  // each layer's slot by itself
    for (const StatePart part : kStateParts)
      one.state.replay_state(StateSlot{slot}, part, drafted, 6, 8);
  EXPECT_EQ(run(8, 9), "");
  one.state.zero_state(StateSlot{3}, StatePart::recurrent);
  EXPECT_THAT(run(9, 10), HasSubstr("unit 3: the recurrent part of state slot 1 differs"));
}

TEST(Numbers, ofAPaddingRowDestroyTheSlotItRunsOver) {
  OneRequest one;
  one.run(text("a10"), 0, 3);
  const std::vector<StateSlot> nobody{StateSlot{0}};
  one.state.launch(nobody);
  one.run(text("a10"), 3, 4);
  EXPECT_EQ(one.found(), "");
  const std::vector<StateSlot> somebody{StateSlot{1}};
  one.state.launch(somebody);
  one.run(text("a10"), 4, 5);
  EXPECT_THAT(one.found(), HasSubstr("unit 0: the recurrent part of state slot 1 differs"));
}

// A label that is wrong where the numbers are right is a fault of the harness itself.
TEST(Numbers, thatAgreeUnderAWrongLabelAreReported) {
  LabelState labels(8, 64);
  cache_sim::LabelledNumbers both(
      labels, std::make_unique<NumberState>(truth_of("tiny-nemotron-h"), 8, 64, 1, &labels));
  OneRequest one;
  both.allocate_state(StateSlot{1});
  both.zero_state(StateSlot{1});
  both.allocate_kv(one.kv);
  const Tokens tokens = text("a12");
  both.forward(one.row(tokens, 0, 5));
  both.launch({});
  EXPECT_TRUE(both.drain(false).empty());
  labels.zero_state(StateSlot{1});  // the label alone
  both.forward(one.row(tokens, 5, 6));
  both.launch({});
  const Findings found = both.drain(false);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].kind, FindingKind::wrong_state_prefix);
  EXPECT_EQ(found[1].kind, FindingKind::number_agrees);
  EXPECT_THAT(found[1].text, HasSubstr("stands for the empty prefix, and its numbers are those"));
}

// Calls without a row use the KV of a run without a cache, as trees of a trace and transfers do.
TEST(Numbers, ofCallsWithoutRowsAreThoseOfTheTruth) {
  OneRequest one;
  const Tokens tokens = text("a12+b3");
  one.state.advance_state(StateSlot{1}, tokens, 0, 5);
  for (const StatePart part : kStateParts)
    one.state.advance_state(StateSlot{1}, part, tokens, 5, 9);
  one.state.compare_state(StateSlot{1}, tokens, 9);
  EXPECT_EQ(one.found(), "");
  const Tokens known = tokens.prefix(10), drafts = text("a10:12");
  for (const StatePart part : kStateParts)
    one.state.verify_state(StateSlot{1}, part,
                           {.known = known, .begin = 9, .drafts = drafts, .parents = {}});
  for (const StatePart part : kStateParts)
    one.state.replay_state(StateSlot{1}, part, tokens, 9, 12);
  one.state.compare_state(StateSlot{1}, tokens, 12);
  EXPECT_EQ(one.found(), "");
  one.state.write_kv(KvSlots(one.kv).first(12), tokens, 0);
  one.run(tokens, 12, 15);
  EXPECT_EQ(one.found(), "");
}

}  // namespace
}  // namespace lockstep
