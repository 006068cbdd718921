// The prefix that a slot stands for: copy copies, advance extends, free poisons, allocation without
// zeroing keeps. Each misuse is its kind of finding.
#include "cache_sim/model/label_state.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {
namespace {

constexpr StateSlot kOne{1}, kTwo{2}, kThree{3};

Tokens tokens(const char* text) {
  return parse_tokens(text).value();
}

class LabelStates : public testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(found(), "") << "a finding that the test did not expect"; }

  /// Kinds of findings since the last call.
  std::string found() {
    std::string kinds;
    for (const Finding& finding : labels_.drain()) {
      EXPECT_FALSE(finding.text.empty() || finding.expected.empty() || finding.actual.empty());
      kinds += (kinds.empty() ? "" : " ") + std::string(to_string(finding.kind));
    }
    return kinds;
  }
  void expect_label(StateSlot slot, const Tokens& prefix) {
    EXPECT_EQ(labels_.recurrent(slot), label_of(prefix, prefix.size()));
    EXPECT_EQ(labels_.conv(slot), label_of(prefix, prefix.size()));
    EXPECT_EQ(labels_.state_lengths(slot, 77).recurrent, prefix.size());
    EXPECT_EQ(labels_.state_lengths(slot, 77).conv, prefix.size());
  }
  void fresh(StateSlot slot) {
    labels_.allocate_state(slot);
    labels_.zero_state(slot);
  }

  LabelState labels_{3, 20};  // state slots 1 … 3, KV slots 0 … 19
};

TEST_F(LabelStates, advanceExtends) {
  fresh(kOne);
  expect_label(kOne, {});
  const Tokens text = tokens("a7+[1,2]+b63");
  labels_.advance_state(kOne, text, 0, 7);
  labels_.advance_state(kOne, text, 7, 8);
  labels_.advance_state(kOne, text, 8, 8);
  expect_label(kOne, text.prefix(8));
  labels_.advance_state(kOne, tokens("a7+[1]+b5"), 8, 13);
  expect_label(kOne, tokens("a7+[1]+b5"));
}

TEST_F(LabelStates, copyThenAdvanceIsAdvanceThenCopy) {
  const Tokens text = tokens("a9+b4");
  for (const StateSlot slot : {kOne, kTwo, kThree}) fresh(slot);
  labels_.advance_state(kOne, text, 0, 9);
  labels_.copy_state(kOne, kTwo);
  labels_.advance_state(kTwo, text, 9, 13);
  expect_label(kOne, text.prefix(9));
  labels_.advance_state(kOne, text, 9, 13);
  labels_.copy_state(kOne, kThree);
  expect_label(kTwo, text);
  expect_label(kThree, text);
}

// The recurrence and the convolution are different kernels: one may run and the other not.
TEST_F(LabelStates, thePartsOfAStateMoveIndependently) {
  const Tokens text = tokens("a9+b4");
  for (const StateSlot slot : {kOne, kTwo}) fresh(slot);
  labels_.advance_state(kOne, StatePart::recurrent, text, 0, 9);
  EXPECT_EQ(labels_.recurrent(kOne), label_of(text, 9));
  EXPECT_EQ(labels_.conv(kOne), label_of(text, 0));
  EXPECT_EQ(labels_.state_lengths(kOne, 77).recurrent, 9);
  EXPECT_EQ(labels_.state_lengths(kOne, 77).conv, 0);
  labels_.advance_state(kOne, text, 9, 13);
  EXPECT_EQ(found(), "wrong-state-prefix") << "the convolution has not seen the first 9 tokens";
  labels_.advance_state(kOne, StatePart::conv, text, 0, 13);
  expect_label(kOne, text);
  labels_.copy_state(kOne, kTwo, StatePart::conv);
  EXPECT_EQ(labels_.recurrent(kTwo), label_of(text, 0));
  EXPECT_EQ(labels_.conv(kTwo), label_of(text, 13));
  labels_.zero_state(kOne, StatePart::recurrent);
  EXPECT_EQ(labels_.recurrent(kOne), label_of(text, 0));
  EXPECT_EQ(labels_.conv(kOne), label_of(text, 13));
}

// A verification reads the state; which of the states it has left becomes the state is said later.
TEST_F(LabelStates, aVerificationLeavesAStateBehindEachToken) {
  for (const StateSlot slot : {kOne, kTwo}) fresh(slot);
  const Tokens known = tokens("a9+b1"), drafts = tokens("c3");
  labels_.advance_state(kOne, known, 0, 8);
  for (const StatePart part : kStateParts)
    labels_.verify_state(kOne, part, {.known = known, .begin = 8, .drafts = drafts, .parents = {}});
  expect_label(kOne, known.prefix(8));
  const Tokens all = known.followed_by(drafts);
  for (std::uint32_t at = 0; at < 5; ++at) {
    for (const StatePart part : kStateParts) labels_.commit_state(kOne, at, kTwo, part);
    expect_label(kTwo, all.prefix(9 + at));
  }
  labels_.commit_state(kOne, 3, kOne, StatePart::conv);
  EXPECT_EQ(labels_.recurrent(kOne), label_of(known, 8)) << "each part is committed by itself";
  EXPECT_EQ(labels_.conv(kOne), label_of(all, 12));
  labels_.commit_state(kOne, 5, kOne, StatePart::conv);
  EXPECT_EQ(found(), "out-of-range") << "the row has five tokens";
  labels_.commit_state(kTwo, 0, kOne, StatePart::conv);
  EXPECT_EQ(found(), "out-of-range") << "nothing was verified from that slot";
}

TEST_F(LabelStates, draftsOfATreeStandBehindTheirParents) {
  for (const StateSlot slot : {kOne, kTwo}) fresh(slot);
  const Tokens known = tokens("a5"), drafts = tokens("[1,2,3,4]");
  const std::vector<std::int64_t> parents{0, 0, 1, 2};
  labels_.advance_state(kOne, known, 0, 4);
  for (const StatePart part : kStateParts)
    labels_.verify_state(kOne, part,
                         {.known = known, .begin = 4, .drafts = drafts, .parents = parents});
  const char* const ways[] = {"a5", "a5+[1]", "a5+[2]", "a5+[1,3]", "a5+[2,4]"};
  for (std::uint32_t at = 0; at < 5; ++at) {
    for (const StatePart part : kStateParts) labels_.commit_state(kOne, at, kTwo, part);
    expect_label(kTwo, tokens(ways[at]));
  }
}

TEST_F(LabelStates, aVerificationContinuesItsOwnPrefix) {
  for (const StateSlot slot : {kOne, kTwo}) fresh(slot);
  const Tokens known = tokens("a5"), drafts = tokens("b2");
  const VerifiedRow row{.known = known, .begin = 4, .drafts = drafts, .parents = {}};
  labels_.verify_state(kOne, StatePart::recurrent, row);
  EXPECT_EQ(found(), "wrong-state-prefix");
  labels_.commit_state(kOne, 0, kTwo, StatePart::recurrent);
  EXPECT_EQ(found(), "out-of-range");
  labels_.advance_state(kOne, known, 0, 4);
  labels_.verify_state(kOne, StatePart::recurrent, row);
  labels_.free_state(kOne);
  labels_.commit_state(kOne, 0, kTwo, StatePart::recurrent);
  EXPECT_EQ(found(), "freed-slot-in-use");
  fresh(kOne);
  labels_.commit_state(kOne, 0, kTwo, StatePart::recurrent);
  EXPECT_EQ(found(), "out-of-range") << "what a verification left goes with its slot";
}

class LabelRings : public LabelStates {
 protected:
  /// A decode step after `begin` tokens, and the conv half behind it.
  void step(const RingStep& step, std::uint32_t begin) {
    labels_.step_ring(kOne, step, text_, begin);
    labels_.advance_state(kOne, StatePart::conv, text_, begin, begin + 1);
  }
  void begin_at(std::uint32_t size) {
    fresh(kOne);
    labels_.advance_state(kOne, text_, 0, size);
  }
  const Tokens text_ = tokens("a9+b9");
};

// A slot's state stays where the ring begins, and a flush moves it to where the ring ends.
TEST_F(LabelRings, standBesideTheirState) {
  begin_at(9);
  step({.slot = kOne, .live = 0, .entry = 0}, 9);
  step({.slot = kOne, .live = 1, .entry = 1}, 10);
  EXPECT_EQ(labels_.recurrent(kOne), label_of(text_, 9));
  EXPECT_EQ(labels_.conv(kOne), label_of(text_, 11));
  step({.slot = kOne, .live = 2, .writes_state = true}, 11);
  expect_label(kOne, text_.prefix(12));
  step({.slot = kOne, .live = 0, .entry = 0}, 12);
  labels_.rewind_conv(kOne);
  expect_label(kOne, text_.prefix(12));
}

TEST_F(LabelRings, areFoldedIntoTheirState) {
  begin_at(9);
  for (std::uint32_t i = 0; i < 3; ++i) step({.slot = kOne, .live = i, .entry = i}, 9 + i);
  labels_.fold_ring(kOne, 3, text_, 12);
  expect_label(kOne, text_.prefix(12));
  labels_.fold_ring(kOne, 1, text_, 13);
  EXPECT_EQ(found(), "wrong-state-prefix") << "the state has seen these entries";
}

// An entry too many or too few, another text's, and one that went with its slot.
TEST_F(LabelRings, areReadInOrderAndWhole) {
  begin_at(9);
  step({.slot = kOne, .live = 0, .entry = 0}, 9);
  step({.slot = kOne, .live = 1, .entry = 1}, 10);
  labels_.step_ring(kOne, {.slot = kOne, .live = 1, .entry = 1}, text_, 11);
  EXPECT_EQ(found(), "wrong-state-prefix") << "one too few";
  labels_.step_ring(kOne, {.slot = kOne, .live = 3, .entry = 3}, text_, 11);
  EXPECT_EQ(found(), "wrong-state-prefix") << "one too many";
  labels_.step_ring(kOne, {.slot = kOne, .live = 2, .entry = 2}, tokens("a9+c9"), 11);
  EXPECT_EQ(found(), "wrong-state-prefix") << "of another text";
  labels_.step_ring(kOne, {.slot = kOne, .live = 40, .entry = 2}, text_, 11);
  EXPECT_EQ(found(), "wrong-state-prefix") << "more than there are tokens";
  step({.slot = kOne, .live = 2, .entry = 2}, 11);
  labels_.free_state(kOne);
  labels_.step_ring(kOne, {.slot = kOne, .live = 3, .entry = 3}, text_, 12);
  EXPECT_EQ(found(), "freed-slot-in-use");
  labels_.fold_ring(kOne, 3, text_, 12);
  labels_.rewind_conv(kOne);
  EXPECT_EQ(found(), "freed-slot-in-use freed-slot-in-use");
  begin_at(9);
  labels_.step_ring(kOne, {.slot = kOne, .live = 3, .entry = 3}, text_, 12);
  EXPECT_EQ(found(), "wrong-state-prefix");
  labels_.fold_ring(kOne, 1, text_, 10);
  EXPECT_EQ(found(), "wrong-state-prefix") << "a ring goes with its slot";
}

TEST_F(LabelStates, aTransferWritesAPart) {
  labels_.allocate_state(kOne);
  labels_.receive_state(kOne, StatePart::recurrent, tokens("a9"), 7);
  EXPECT_EQ(labels_.recurrent(kOne), label_of(tokens("a7"), 7));
  EXPECT_TRUE(labels_.conv(kOne).poisoned) << "nobody has sent it";
  labels_.receive_state(kTwo, StatePart::conv, tokens("a9"), 7);
  EXPECT_EQ(found(), "freed-slot-in-use");
}

TEST_F(LabelStates, paddedRowsHaveSlotZero) {
  fresh(kOne);
  labels_.run_padding_row({0});
  labels_.run_padding_row(kTwo);
  EXPECT_EQ(found(), "") << "a free slot stands for nothing";
  labels_.run_padding_row(kOne);
  EXPECT_EQ(found(), "padding-leak");
  EXPECT_TRUE(labels_.recurrent(kOne).poisoned);
  labels_.run_padding_row({4});
  EXPECT_EQ(found(), "out-of-range");
}

// 36,864 elements a token: slot 58,254 holds the first one that 31 bits do not count (vLLM #48109).
TEST(Offsets, beyond32BitsAreReported) {
  LabelState labels{10'000, 60'000, LabelState::Strides{.kv = 36'864, .state = 557'056}};
  labels.allocate_kv(std::vector<std::uint32_t>{58'253});
  labels.allocate_state({3'854});
  EXPECT_TRUE(labels.drain().empty());
  labels.allocate_kv(std::vector<std::uint32_t>{58'254});
  const Findings kv = labels.drain();
  ASSERT_EQ(kv.size(), 1u);
  EXPECT_EQ(kv[0].kind, FindingKind::out_of_range);
  EXPECT_EQ(kv[0].actual, "2147512319");
  labels.allocate_state({3'855});
  EXPECT_EQ(labels.drain().size(), 1u);
}

// A pool's table costs memory for the slots that are used: this one would have 64 GiB.
TEST(LargePools, takeMemoryForTheUsedPartAlone) {
  LabelState labels{std::int64_t{1} << 30, std::int64_t{1} << 31};
  const std::uint32_t far[] = {5, (1u << 31) - 1};
  labels.allocate_kv(far);
  labels.write_kv(far, tokens("a2"), 0);
  EXPECT_TRUE(labels.kv_in_use(far[1]));
  labels.allocate_state({1u << 30});
  EXPECT_TRUE(labels.conv({1u << 30}).poisoned);
  EXPECT_TRUE(labels.drain().empty());
}

// A recycled slot holds somebody else's state until it is zeroed.
TEST_F(LabelStates, allocationKeepsWhatFreeingPoisoned) {
  fresh(kOne);
  labels_.advance_state(kOne, tokens("a5"), 0, 5);
  labels_.free_state(kOne);
  EXPECT_FALSE(labels_.state_in_use(kOne));
  labels_.allocate_state(kOne);
  EXPECT_TRUE(labels_.state_in_use(kOne));
  EXPECT_TRUE(labels_.recurrent(kOne).poisoned);
  EXPECT_EQ(labels_.recurrent(kOne).size, 5u) << "its length is still there";
  labels_.advance_state(kOne, tokens("b3"), 0, 3);
  EXPECT_EQ(found(), "dirty-slot");
  labels_.advance_state(kOne, tokens("a9"), 5, 9);
  EXPECT_EQ(found(), "wrong-state-prefix") << "poison stands for no prefix, not even its old one";
  labels_.zero_state(kOne);
  labels_.advance_state(kOne, tokens("b3"), 0, 3);
  expect_label(kOne, tokens("b3"));
}

TEST_F(LabelStates, memoryBeforeItsFirstUseIsPoison) {
  labels_.allocate_state(kTwo);
  labels_.advance_state(kTwo, tokens("a1"), 0, 1);
  EXPECT_EQ(found(), "dirty-slot");
}

TEST_F(LabelStates, aCopyOfPoisonIsPoison) {
  labels_.allocate_state(kOne);
  fresh(kTwo);
  labels_.copy_state(kOne, kTwo);
  EXPECT_TRUE(labels_.conv(kTwo).poisoned);
  labels_.advance_state(kTwo, tokens("a1"), 0, 1);
  EXPECT_EQ(found(), "dirty-slot");
}

TEST_F(LabelStates, aStateContinuesItsOwnPrefixAndNoOther) {
  fresh(kOne);
  labels_.advance_state(kOne, tokens("a5"), 0, 5);
  labels_.advance_state(kOne, tokens("a4+b5"), 5, 9);  // as long, and another prefix
  EXPECT_EQ(found(), "wrong-state-prefix");
  labels_.advance_state(kOne, tokens("a9"), 4, 9);
  EXPECT_EQ(found(), "wrong-state-prefix");
  labels_.advance_state(kOne, tokens("a9"), 6, 9);
  EXPECT_EQ(found(), "wrong-state-prefix");
  expect_label(kOne, tokens("a5"));
}

TEST_F(LabelStates, slotsInUseAndFreeAreNotMixedUp) {
  labels_.zero_state(kOne);
  EXPECT_EQ(found(), "freed-slot-in-use");
  fresh(kOne);
  labels_.copy_state(kTwo, kOne);
  EXPECT_EQ(found(), "freed-slot-in-use");
  labels_.copy_state(kOne, kTwo);
  EXPECT_EQ(found(), "freed-slot-in-use");
  labels_.allocate_state(kOne);
  EXPECT_EQ(found(), "slot-in-two-places");
  labels_.free_state(kOne);
  labels_.free_state(kOne);
  EXPECT_EQ(found(), "double-free");
  labels_.advance_state(kOne, tokens("a1"), 0, 1);
  EXPECT_EQ(found(), "freed-slot-in-use");
}

// Slot 0 is the padding target, and rows of the request table are no slots.
TEST_F(LabelStates, slotsOutsideThePoolAreFound) {
  for (const StateSlot slot : {StateSlot{0}, StateSlot{4}, StateSlot::none()}) {
    EXPECT_FALSE(labels_.state_exists(slot));
    labels_.allocate_state(slot);
    EXPECT_EQ(found(), "out-of-range");
    labels_.advance_state(slot, tokens("a1"), 0, 1);
    EXPECT_EQ(found(), "out-of-range");
    labels_.free_state(slot);
    EXPECT_EQ(found(), "out-of-range");
  }
}

TEST_F(LabelStates, kvSlotsHoldTheDigestsOfTheirPrefixes) {
  const std::vector<std::uint32_t> slots{5, 19, 7};
  const Tokens text = tokens("a2+[9]+b2");
  labels_.allocate_kv(slots);
  labels_.write_kv(slots, text, 1);
  for (std::uint32_t i = 0; i < 3; ++i)
    EXPECT_EQ(labels_.kv_fingerprint(slots[i]), text.fingerprint(2 + i)) << i;
  EXPECT_TRUE(labels_.kv_in_use(19));
  labels_.allocate_kv(std::vector<std::uint32_t>{6, 7});
  EXPECT_EQ(found(), "slot-in-two-places");
  labels_.free_kv(slots);
  EXPECT_FALSE(labels_.kv_in_use(7));
  labels_.free_kv(std::vector<std::uint32_t>{6, 5});
  EXPECT_EQ(found(), "double-free");
  labels_.write_kv(std::vector<std::uint32_t>{7}, text, 0);
  EXPECT_EQ(found(), "freed-slot-in-use");
  EXPECT_FALSE(labels_.kv_exists(20));
}

// A layer with a sliding window reads some of a prefix's KV: slots that are free, those of another
// prefix and the slot of padding are found.
TEST_F(LabelStates, kvThatIsReadStandsForItsPrefix) {
  const std::uint32_t slots[] = {7, 5, 9};
  const KvSlots all(slots);
  const Tokens text = tokens("a3");
  labels_.allocate_kv(all);
  labels_.write_kv(all, text, 0);
  labels_.read_kv(all, text, 0);
  labels_.read_kv(all.subspan(1), text, 1);
  EXPECT_EQ(found(), "");
  labels_.read_kv(all.first(2), text, 1);
  EXPECT_EQ(found(), "wrong-state-prefix");
  labels_.read_kv(all, tokens("a2+b1"), 0);
  EXPECT_EQ(found(), "wrong-state-prefix");
  labels_.free_kv(all.subspan(1, 1));
  labels_.read_kv(all, text, 0);
  EXPECT_EQ(found(), "freed-slot-in-use");
  const std::uint32_t padding[] = {0};
  labels_.read_kv(padding, text, 0);
  EXPECT_EQ(found(), "freed-slot-in-use");
}

KvRun run_of(std::vector<std::uint32_t> slots) {
  auto array = std::make_shared<std::uint32_t[]>(slots.size());
  std::ranges::copy(slots, array.get());
  return {array, 0, static_cast<std::uint32_t>(slots.size())};
}

class CopiesOfLabels : public LabelStates {
 protected:
  void SetUp() override {
    for (const StateSlot slot : {kOne, kTwo}) fresh(slot);
    labels_.advance_state(kOne, text_, 0, 2);
    labels_.allocate_kv(source_.slots());
    labels_.allocate_kv(target_.slots());
    labels_.write_kv(source_.slots(), text_, 0);
    labels_.queue_copy(copy_);
  }

  const Tokens text_ = tokens("a3");
  const KvRun source_ = run_of({3, 4}), target_ = run_of({11, 10});
  const TierCopy copy_{.kv_sources = {source_}, .kv_targets = {target_}, .states = {{kOne, kTwo}}};
};

TEST_F(CopiesOfLabels, leaveInTheirTargetsWhatTheSourcesHold) {
  EXPECT_TRUE(labels_.state_awaited(kTwo) && labels_.kv_awaited(10));
  EXPECT_EQ(labels_.recurrent(kTwo).text(), "what a copy has not brought yet");
  fresh(kThree);
  labels_.copy_state(kOne, kThree);  // a source may be read
  expect_label(kThree, text_.prefix(2));
  labels_.land_copy(copy_);
  expect_label(kTwo, text_.prefix(2));
  EXPECT_EQ(labels_.kv_fingerprint(11), text_.fingerprint(1));
  EXPECT_EQ(labels_.kv_fingerprint(10), text_.fingerprint(2));
  labels_.advance_state(kOne, text_, 2, 3);
  labels_.free_kv(source_.slots());
  labels_.free_kv(target_.slots());
}

TEST_F(CopiesOfLabels, areNotReadBeforeTheyLand) {
  labels_.advance_state(kTwo, text_, 2, 3);
  EXPECT_EQ(found(), "read-before-landed");
  labels_.copy_state(kTwo, kOne);
  EXPECT_EQ(found(), "read-before-landed");
  const KvRun fresh_kv = run_of({5});
  labels_.allocate_kv(fresh_kv.slots());
  const std::vector<KvRun> row{target_, fresh_kv};
  labels_.forward({.request = {}, .tokens = text_, .begin = 2, .end = 3, .kv = row});
  EXPECT_EQ(found(), "read-before-landed");
}

TEST_F(CopiesOfLabels, leaveNothingWhereTheyFail) {
  labels_.fail_copy(copy_);
  EXPECT_FALSE(labels_.state_awaited(kTwo) || labels_.kv_awaited(10));
  labels_.advance_state(kTwo, text_, 2, 3);
  EXPECT_EQ(found(), "wrong-state-prefix");
  EXPECT_NE(labels_.kv_fingerprint(11), text_.fingerprint(1));
}

// Sources of a copy that nobody needs may change; its targets are still written.
TEST_F(CopiesOfLabels, thatAreAbandonedReadNothing) {
  labels_.abandon_copy(copy_);
  labels_.free_state(kOne);
  labels_.free_kv(source_.slots());
  labels_.free_kv(target_.slots().first(1));
  EXPECT_EQ(found(), "source-changed");
  TierCopy left = copy_;
  left.kv_sources.clear();
  left.states.front().source = StateSlot::none();
  labels_.fail_copy(left);
  labels_.free_state(kTwo);
}

TEST_F(CopiesOfLabels, keepTheirSlotsUntilTheyLand) {
  labels_.advance_state(kOne, text_, 2, 3);
  EXPECT_EQ(found(), "source-changed");
  labels_.zero_state(kTwo);
  EXPECT_EQ(found(), "source-changed");
  for (const KvRun& run : {source_, target_}) {
    labels_.write_kv(run.slots().first(1), text_, 0);
    EXPECT_EQ(found(), "source-changed");
    labels_.free_kv(run.slots().first(1));
    EXPECT_EQ(found(), "source-changed");
  }
  labels_.free_state(kOne);
  EXPECT_EQ(found(), "source-changed");
  labels_.free_state(kTwo);
  EXPECT_EQ(found(), "source-changed");
}

TEST(Labels, sayWhatTheyStandFor) {
  EXPECT_EQ(Label().text(), "the empty prefix");
  EXPECT_EQ(label_of(tokens("a1000"), 64).text().find("a prefix of 64 tokens ("), 0u);
  EXPECT_EQ((Label{.digest = 1, .size = 5, .poisoned = true}).text(), "a freed state");
  EXPECT_NE(label_of(tokens("a5"), 5), label_of(tokens("b5"), 5));
  EXPECT_EQ(label_of(tokens("a9"), 5), label_of(tokens("a5"), 5));
}

/// Two copies that bring a state and a token's KV together: of a conv state of the segments x and
/// B, two channels and four, each copy brings the half of both.
class SlicesOfLabels : public LabelStates {
 protected:
  void SetUp() override {
    for (const StateSlot slot : {kOne, kTwo}) fresh(slot);
    labels_.advance_state(kOne, text_, 0, 1);
    labels_.allocate_kv(source_.slots());
    labels_.allocate_kv(target_.slots());
    labels_.write_kv(source_.slots(), text_, 0);
  }

  TierCopy slice(std::uint32_t number) const {
    return {.kv_sources = {source_},
            .kv_targets = {target_},
            .states = {{kOne, kTwo}},
            .slice = number,
            .slices = 2,
            .conv = {{number, number, 1}, {2 + 2 * number, 2 + 2 * number, 2}},
            .channels = 6};
  }

  const Tokens text_ = tokens("a3");
  const KvRun source_ = run_of({3}), target_ = run_of({11});
};

TEST_F(SlicesOfLabels, areWholeWithTheLastOne) {
  for (const std::uint32_t number : {0, 1}) labels_.queue_copy(slice(number));
  labels_.land_copy(slice(1));
  EXPECT_TRUE(labels_.state_awaited(kTwo) && labels_.kv_awaited(11));
  labels_.free_state(kOne);  // the other slice still reads it
  EXPECT_EQ(found(), "source-changed");
  fresh(kOne);
  labels_.advance_state(kOne, text_, 0, 1);
  labels_.land_copy(slice(0));
  EXPECT_FALSE(labels_.state_awaited(kTwo) || labels_.kv_awaited(11));
  expect_label(kTwo, text_.prefix(1));
  EXPECT_EQ(labels_.kv_fingerprint(11), text_.fingerprint(1));
}

TEST_F(SlicesOfLabels, ofTwoPositionsStandForNoPrefix) {
  labels_.queue_copy(slice(0));
  labels_.land_copy(slice(0));
  labels_.advance_state(kOne, text_, 1, 2);
  labels_.write_kv(source_.slots(), text_, 1);
  labels_.queue_copy(slice(1));
  labels_.land_copy(slice(1));
  labels_.advance_state(kTwo, text_, 2, 3);
  EXPECT_EQ(found(), "wrong-state-prefix");
  for (const std::uint32_t size : {1, 2})
    EXPECT_NE(labels_.kv_fingerprint(11), text_.fingerprint(size));
}

// The half of x and B as if they were one: channels 0 to 2 and 3 to 5.
TEST_F(SlicesOfLabels, cutAcrossSegmentsAreNoConvState) {
  for (const std::uint32_t number : {0, 1}) {
    TierCopy copy = slice(number);
    copy.conv = {{3 * number, number, 1}, {3 * number + 1, 2 + 2 * number, 2}};
    labels_.queue_copy(copy);
    labels_.land_copy(copy);
  }
  EXPECT_EQ(labels_.recurrent(kTwo).text(), label_of(text_, 1).text());
  EXPECT_EQ(labels_.conv(kTwo).text(), "what a copy has not brought yet");
}

TEST_F(SlicesOfLabels, thatFailLeaveTheSlotWithoutALabel) {
  for (const std::uint32_t number : {0, 1}) labels_.queue_copy(slice(number));
  labels_.fail_copy(slice(0));
  labels_.land_copy(slice(1));
  EXPECT_FALSE(labels_.state_awaited(kTwo) || labels_.kv_awaited(11));
  for (const StatePart part : kStateParts)
    EXPECT_EQ(labels_.label(kTwo, part).text(), "what a copy has not brought yet");
  EXPECT_NE(labels_.kv_fingerprint(11), text_.fingerprint(1));
}

TEST_F(SlicesOfLabels, ofIndexKeysAreThoseOfTheKv) {
  labels_.keep_index_keys();
  labels_.write_kv(source_.slots(), text_, 0);
  const std::vector<KvRun> row{target_, run_of({5})};
  labels_.allocate_kv(row.back().slots());
  const auto reads = [&](bool with_keys) {
    TierCopy copy{.kv_sources = {source_}, .kv_targets = {target_}, .index_keys = with_keys};
    labels_.queue_copy(copy);
    labels_.land_copy(copy);
    labels_.forward({.request = {}, .tokens = text_, .begin = 1, .end = 2, .kv = row});
  };
  reads(true);
  EXPECT_EQ(found(), "");
  reads(false);
  EXPECT_EQ(found(), "wrong-state-prefix");
}

}  // namespace
}  // namespace lockstep
