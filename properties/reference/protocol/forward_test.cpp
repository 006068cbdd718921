// A row of a forward, told to a LayerState that knows nothing of rows: which calls become of it, in
// which order.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "reference/protocol/layer_state.hpp"

namespace lockstep {
namespace {

using Lines = std::vector<std::string>;

/// Writes down every call.
class Recorder final : public LayerState {
 public:
  Lines calls;
  bool with_kv = true;

  void allocate_state(StateSlot) override {}
  void zero_state(StateSlot, StatePart) override {}
  void copy_state(StateSlot a, StateSlot b, StatePart part) override {
    say("copy {} {} {}", to_string(part), a.value, b.value);
  }
  void copy_state(StateSlot a, StateSlot b) override { say("copy {} {}", a.value, b.value); }
  void advance_state(StateSlot slot, StatePart part, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override {
    say("advance {} {}: {}", to_string(part), slot.value, piece(tokens, begin, end));
  }
  void advance_state(StateSlot slot, const Tokens& tokens, std::uint32_t begin,
                     std::uint32_t end) override {
    say("advance {}: {}", slot.value, piece(tokens, begin, end));
  }
  void free_state(StateSlot) override {}
  void verify_state(StateSlot slot, StatePart part, const VerifiedRow& row) override {
    say("verify {} {}: {}, drafts {} after {}", to_string(part), slot.value,
        piece(row.known, row.begin, row.known.size()), row.drafts.text(),
        fmt::join(row.parents, ","));
  }
  void commit_state(StateSlot, std::uint32_t, StateSlot, StatePart) override {}
  void step_ring(StateSlot slot, const RingStep& step, const Tokens& tokens,
                 std::uint32_t begin) override {
    say("ring {} of {} reads {}{}{}: {}", step.slot.value, slot.value, step.live,
        step.entry ? fmt::format(", entry {}", *step.entry) : "",
        step.writes_state ? ", writes" : "", piece(tokens, begin, begin + 1));
  }
  void receive_state(StateSlot, StatePart, const Tokens&, std::uint32_t) override {}
  void run_padding_row(StateSlot slot) override { say("padding {}", slot.value); }
  bool keeps_kv() const override { return with_kv; }
  void allocate_kv(KvSlots) override {}
  void write_kv(KvSlots slots, const Tokens& tokens, std::uint32_t begin) override {
    const auto end = begin + static_cast<std::uint32_t>(slots.size());
    say("write {}: {}", fmt::join(slots, ","), piece(tokens, begin, end));
  }
  void free_kv(KvSlots) override {}
  void copy_kv(KvSlots, KvSlots) override {}
  Lengths state_lengths(StateSlot, std::int64_t expected) const override {
    return {expected, expected};
  }

 private:
  /// The tokens before and those of the piece: `a4|a4:6`.
  static std::string piece(const Tokens& tokens, std::uint32_t begin, std::uint32_t end) {
    return tokens.prefix(begin).text() + "|" + tokens.slice(begin, end).text();
  }
  template <class... Values>
  void say(const char* format, const Values&... values) {
    calls.push_back(fmt::format(fmt::runtime(format), values...));
  }
};

/// Runs of the slots 10, 11, …, 20, 21, …: as many of each as `sizes` says.
std::vector<KvRun> runs_of(const std::vector<std::uint32_t>& sizes) {
  std::vector<KvRun> runs;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::shared_ptr<std::uint32_t[]> array(new std::uint32_t[sizes[i] + 1]);
    std::iota(array.get(), array.get() + sizes[i] + 1, static_cast<std::uint32_t>(10 * i + 9));
    runs.push_back({array, 1, sizes[i]});
  }
  return runs;
}

class ForwardRows : public testing::Test {
 protected:
  Lines calls_of(const ForwardRow& row) {
    layers_.calls.clear();
    layers_.forward(row);
    return layers_.calls;
  }

  Recorder layers_;
  const Tokens text_ = Tokens::of_document(1, 0, 6);  // a6
  const std::vector<KvRun> kv_ = runs_of({3, 5});     // places 0 … 2 and 3 … 7
  static constexpr StateSlot kState{1};
};

TEST_F(ForwardRows, writeTheirKvAndAdvanceTheirState) {
  const ForwardRow row{
      .request = {}, .tokens = text_, .begin = 0, .end = 6, .state = kState, .kv = kv_};
  EXPECT_EQ(calls_of(row),
            (Lines{"write 10,11,12: |a3", "write 20,21,22: a3|a3:6", "advance 1: |a6"}));
}

// The slots of earlier tokens are there to be read, and of a page's rest nothing is written.
TEST_F(ForwardRows, writeTheirOwnPlacesAlone) {
  const ForwardRow row{
      .request = {}, .tokens = text_, .begin = 2, .end = 5, .state = kState, .kv = kv_};
  EXPECT_EQ(calls_of(row),
            (Lines{"write 12: a2|a2:3", "write 20,21: a3|a3:5", "advance 1: a2|a2:5"}));
}

TEST_F(ForwardRows, haveNoStateWhereAttentionIsAlone) {
  const ForwardRow row{.request = {}, .tokens = text_, .begin = 3, .end = 4, .kv = kv_};
  EXPECT_EQ(calls_of(row), (Lines{"write 20: a3|a3:4"}));
}

TEST_F(ForwardRows, writeNothingWhereNoKvIsKept) {
  layers_.with_kv = false;
  const ForwardRow row{
      .request = {}, .tokens = text_, .begin = 3, .end = 4, .state = kState, .kv = kv_};
  EXPECT_EQ(calls_of(row), (Lines{"advance 1: a3|a3:4"}));
}

TEST_F(ForwardRows, leaveStatesOnTheirWay) {
  const std::vector<StateTake> takes{
      {2, {5}}, {4, {6}, {.conv = false}}, {6, {6}, {.recurrent = false}}, {6, {7}}};
  const ForwardRow row{
      .request = {}, .tokens = text_, .begin = 1, .end = 6, .state = kState, .takes = takes};
  EXPECT_EQ(calls_of(row),
            (Lines{"advance 1: a1|a1:2", "copy 1 5", "advance 1: a2|a2:4", "copy recurrent 1 6",
                   "advance 1: a4|a4:6", "copy conv 1 6", "copy 1 7"}));
}

// The step with a ring comes before the conv half, whose input it keeps.
TEST_F(ForwardRows, stepWithARing) {
  ForwardRow row{.request = {}, .tokens = text_, .begin = 3, .end = 4, .state = kState};
  row.kv = kv_;
  row.ring = RingStep{.slot = kState, .live = 2, .entry = 2};
  EXPECT_EQ(calls_of(row), (Lines{"write 20: a3|a3:4", "ring 1 of 1 reads 2, entry 2: a3|a3:4",
                                  "advance conv 1: a3|a3:4"}));
  const std::vector<std::uint32_t> layers{0, 4};
  row.state_layers = layers;
  row.ring = RingStep{.slot = kState, .live = 3, .writes_state = true};
  row.keeps.conv = false;
  EXPECT_EQ(calls_of(row), (Lines{"write 20: a3|a3:4", "ring 1 of 1 reads 3, writes: a3|a3:4",
                                  "ring 5 of 5 reads 3, writes: a3|a3:4"}));
  row.end = 5;
  EXPECT_ANY_THROW(layers_.forward(row)) << "a step is of one token";
}

// A state that is taken before the first token is the one that the row began with.
TEST_F(ForwardRows, mayLeaveTheStateTheyBeginWith) {
  const std::vector<StateTake> takes{{1, {5}}};
  const ForwardRow row{
      .request = {}, .tokens = text_, .begin = 1, .end = 3, .state = kState, .takes = takes};
  EXPECT_EQ(calls_of(row), (Lines{"copy 1 5", "advance 1: a1|a1:3"}));
}

TEST_F(ForwardRows, advanceThePartsThatTheyKeep) {
  const std::vector<StateTake> takes{{4, {5}}};
  const ForwardRow row{.request = {},
                       .tokens = text_,
                       .begin = 3,
                       .end = 6,
                       .state = kState,
                       .keeps = {.conv = false},
                       .takes = takes};
  EXPECT_EQ(calls_of(row),
            (Lines{"advance recurrent 1: a3|a3:4", "copy recurrent 1 5", "copy conv 1 5",
                   "advance conv 5: a3|a3:4", "advance recurrent 1: a4|a4:6"}));
}

// A verification that leaves its states in slots: each goes on from the one before it.
TEST_F(ForwardRows, thatKeepNothingRunFromTakeToTake) {
  const std::vector<StateTake> takes{{5, {7}}, {6, {8}, {.recurrent = false}}};
  const ForwardRow row{.request = {},
                       .tokens = text_,
                       .begin = 4,
                       .end = 6,
                       .drafts = 1,
                       .state = kState,
                       .keeps = kNoParts,
                       .takes = takes};
  EXPECT_EQ(calls_of(row),
            (Lines{"copy recurrent 1 7", "advance recurrent 7: a4|a4:5", "copy conv 1 7",
                   "advance conv 7: a4|a4:5", "copy conv 7 8", "advance conv 8: a5|a5:6"}));
}

TEST_F(ForwardRows, verifyDraftsBesideTheState) {
  const ForwardRow row{.request = {},
                       .tokens = text_,
                       .begin = 3,
                       .end = 6,
                       .drafts = 2,
                       .state = kState,
                       .keeps = kNoParts,
                       .kv = kv_};
  EXPECT_EQ(calls_of(row), (Lines{"write 20,21,22: a3|a3:6",
                                  "verify recurrent 1: a3|a3:4, drafts "
                                  "a4:6 after ",
                                  "verify conv 1: a3|a3:4, drafts a4:6 after "}));
}

// The KV of a draft lies at its place and stands for the tokens on its way from the root.
TEST_F(ForwardRows, verifyTrees) {
  const Tokens tree = parse_tokens("a3+b1+c1+d1").value();
  const std::vector<std::int64_t> parents{0, 0, 1};
  const ForwardRow row{.request = {},
                       .tokens = tree,
                       .begin = 2,
                       .end = 6,
                       .drafts = 3,
                       .parents = parents,
                       .state = kState,
                       .keeps = kNoParts,
                       .kv = kv_};
  EXPECT_EQ(calls_of(row),
            (Lines{"write 12: a2|a2:3", "write 20: a3|b1", "write 21: a3|c1", "write 22: a3+b1|d1",
                   "verify recurrent 1: a2|a2:3, drafts b1+c1+d1 after 0,0,1",
                   "verify conv 1: a2|a2:3, drafts b1+c1+d1 after 0,0,1"}));
}

TEST_F(ForwardRows, goThroughLayersWithSlotsOfTheirOwn) {
  const std::vector<std::uint32_t> states{0, 100}, kvs{0, 50};
  const std::vector<StateTake> takes{{4, {5}}};
  const ForwardRow row{.request = {},
                       .tokens = text_,
                       .begin = 3,
                       .end = 5,
                       .state = kState,
                       .takes = takes,
                       .kv = kv_,
                       .state_layers = states,
                       .kv_layers = kvs};
  EXPECT_EQ(calls_of(row), (Lines{"write 20,21: a3|a3:5", "write 70,71: a3|a3:5",
                                  "advance 1: a3|a3:4", "copy 1 5", "advance 1: a4|a4:5",
                                  "advance 101: a3|a3:4", "copy 101 105", "advance 101: a4|a4:5"}));
}

// A bucket that is larger than its tokens, written into two memories.
TEST_F(ForwardRows, writePaddingAndASecondMemory) {
  const std::vector<KvRun> second = runs_of({0, 0, 8});
  ForwardRow row{.request = {},
                 .tokens = text_,
                 .begin = 3,
                 .end = 4,
                 .kv = kv_,
                 .padded_to = 6,
                 .also = second};
  EXPECT_EQ(calls_of(row),
            (Lines{"write 20,21,22: a3|a3:4+[0,0]", "write 33,34,35: a3|a3:4+[0,0]"}));
  row.writes_kv = false;
  EXPECT_EQ(calls_of(row), (Lines{"write 33,34,35: a3|a3:4+[0,0]"}));
  row.padded_to = row.end;
  EXPECT_EQ(calls_of(row), (Lines{"write 33: a3|a3:4"}));
}

TEST_F(ForwardRows, areLaunchedWithTheirPadding) {
  layers_.launch(std::array{StateSlot{0}, StateSlot{4}});
  layers_.launch({});
  EXPECT_EQ(layers_.calls, (Lines{"padding 0", "padding 4"}));
}

TEST_F(ForwardRows, standBesideTransfersAndReplays) {
  layers_.receive_kv(kv_[0].slots(), text_, 0);
  layers_.replay_state(kState, StatePart::recurrent, text_, 2, 4);
  EXPECT_EQ(layers_.calls, (Lines{"write 10,11,12: |a3", "advance recurrent 1: a2|a2:4"}));
}

TEST(ForSlots, givesThePiecesOfARange) {
  const std::vector<KvRun> kv = runs_of({3, 1, 4});
  const auto pieces = [&](std::uint32_t first, std::uint32_t last) {
    std::string text;
    for_slots(kv, first, last, [&](KvSlots slots, std::uint32_t place) {
      text += fmt::format("{}@{} ", fmt::join(slots, ","), place);
    });
    return text;
  };
  EXPECT_EQ(pieces(0, 8), "10,11,12@0 20@3 30,31,32,33@4 ");
  EXPECT_EQ(pieces(1, 2), "11@1 ");
  EXPECT_EQ(pieces(2, 5), "12@2 20@3 30@4 ");
  EXPECT_EQ(pieces(3, 3), "");
  EXPECT_EQ(pieces(6, 99), "32,33@6 ");
}

// Labels, whatever is taken on the way: a taken state stands for the tokens before it, the running
// one for all, and each slot's KV for the tokens up to its own.
RC_GTEST_PROP(ForwardLabels, standForTheTokensBeforeThem, ()) {
  const auto size = *rc::gen::inRange<std::uint32_t>(1, 80);
  const auto begin = *rc::gen::inRange<std::uint32_t>(0, size);
  const Tokens text = Tokens::of_document(3, 0, size);
  LabelState labels(8, 200);
  const std::vector<KvRun> kv = runs_of({size});
  for (const KvRun& run : kv) labels.allocate_kv(run.slots());
  for (std::uint32_t slot = 1; slot <= 8; ++slot) labels.allocate_state({slot});
  labels.zero_state({1});
  labels.forward({.request = {}, .tokens = text, .begin = 0, .end = begin, .state = {1}, .kv = kv});
  std::vector<StateTake> takes;
  std::uint32_t after = begin;
  for (std::uint32_t slot = 2; slot <= 8; ++slot) {
    after = *rc::gen::inRange<std::uint32_t>(after, size + 1);
    takes.push_back({after, {slot}});
  }
  const bool keeps = *rc::gen::arbitrary<bool>();
  labels.forward({.request = {},
                  .tokens = text,
                  .begin = begin,
                  .end = size,
                  .state = {1},
                  .keeps = keeps ? StateParts{} : kNoParts,
                  .takes = takes,
                  .kv = kv});
  RC_ASSERT(labels.drain().empty());
  for (const StatePart part : kStateParts) {
    for (const StateTake& take : takes)
      RC_ASSERT(labels.label(take.target, part) == label_of(text, take.after));
    RC_ASSERT(labels.label({1}, part) == label_of(text, keeps ? size : begin));
  }
  for (std::uint32_t i = 0; i < size; ++i)
    RC_ASSERT(labels.kv_fingerprint(kv[0].slots()[i]) == text.fingerprint(i + 1));
}

}  // namespace
}  // namespace lockstep
