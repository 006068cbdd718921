// A write-up of SGLang's no_buffer mode proposed three fixes. Here each is a defect of
// sglang-legacy. On the first 400 requests of `sglang-w1` it gives the figures that it gave in the
// real 0.5.9 class: tokens hit, copies of a right and of a wrong state, wrong states in the tree,
// slots lost.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "cache_sim/policies/sglang/sglang_policy.hpp"
#include "cache_sim/replay/sglang_w1_driver.hpp"

namespace lockstep::cache_sim {
namespace {

struct Judgement {
  std::int64_t hit_tokens = 0;
  std::int64_t right_copies = 0;
  std::int64_t wrong_copies = 0;
  std::int64_t position_error = 0;  ///< sum of the differences of wrong copies' lengths
  std::int64_t tree_states = 0;
  std::int64_t wrong_tree_states = 0;
  std::int64_t lost_slots = 0;
  bool complete = true;  ///< false: a request or a checkpoint found no state slot
  bool operator==(const Judgement&) const = default;
};

std::string text(const Judgement& j) {
  return fmt::format("{} hit, {} right, {} wrong by {}, {} of {} tree states wrong, {} lost{}",
                     j.hit_tokens, j.right_copies, j.wrong_copies, j.position_error,
                     j.wrong_tree_states, j.tree_states, j.lost_slots,
                     j.complete ? "" : ", stopped");
}
std::ostream& operator<<(std::ostream& out, const Judgement& judgement) {
  return out << text(judgement);
}

/// A state is the length at which its last forward ended, as the judge of the real class had it: a
/// wrong copy counts once, and not again in all that is computed from it.
class LastLength final : public LayerState {
 public:
  explicit LastLength(std::int64_t slots) : lengths_(static_cast<std::size_t>(slots + 1)) {}
  void allocate_state(StateSlot) override {}
  void zero_state(StateSlot slot, StatePart) override { lengths_[slot.value] = 0; }
  void copy_state(StateSlot source, StateSlot target, StatePart) override {
    lengths_[target.value] = lengths_[source.value];
  }
  void advance_state(StateSlot slot, StatePart, const Tokens&, std::uint32_t,
                     std::uint32_t end) override {
    lengths_[slot.value] = end;
  }
  void free_state(StateSlot) override {}
  void verify_state(StateSlot, StatePart, const VerifiedRow&) override {}
  void commit_state(StateSlot, std::uint32_t, StateSlot, StatePart) override {}
  void receive_state(StateSlot, StatePart, const Tokens&, std::uint32_t) override {}
  void run_padding_row(StateSlot) override {}
  bool keeps_kv() const override { return false; }
  void allocate_kv(KvSlots) override {}
  void write_kv(KvSlots, const Tokens&, std::uint32_t) override {}
  void free_kv(KvSlots) override {}
  void copy_kv(KvSlots, KvSlots) override {}
  Lengths state_lengths(StateSlot slot, std::int64_t) const override {
    return {lengths_[slot.value], lengths_[slot.value]};
  }

 private:
  std::vector<std::int64_t> lengths_;
};

Judgement judge(const char* defect) {
  SglangW1Options w1;
  w1.requests = 400;
  SubjectOptions options;
  options.config.kv_tokens = w1.kv_tokens;
  options.config.state_slots = w1.state_slots;
  LastLength lengths(w1.state_slots);
  options.layers = &lengths;
  options.defect = *defect == 0 ? nullptr : Defect::find(defect);
  const auto subject = Registry<PolicyEntry>::find("sglang-legacy")->make(options);
  auto& policy = dynamic_cast<SglangPolicy&>(*subject);

  Judgement judgement;
  Reply reply;
  Name failed;
  const auto apply = [&](const Operation& operation) -> const Reply* {
    const Result<Reply> answer = policy.apply(operation);
    if (!answer) return nullptr;
    reply = *answer;
    // The real class asserts where our checkpoint is skipped, and loses that request's slot too.
    if (operation.verb == Verb::checkpoint && reply.refused != Refusal::none) {
      failed = operation.id;
      return nullptr;
    }
    if (operation.verb != Verb::admit || reply.refused != Refusal::none) return &reply;
    const std::int64_t cached = reply.get(ReplyField::cached);
    const std::int64_t length = reply.get(ReplyField::state);
    judgement.hit_tokens += cached;
    if (length != cached) {
      ++judgement.wrong_copies;
      judgement.position_error += length - cached;
    } else if (cached != 0) {
      ++judgement.right_copies;
    }
    return &reply;
  };
  judgement.complete = drive(SglangW1::generate(w1), apply).complete;

  std::int64_t held = 0;  // by requests that were running when the run stopped
  for (const RadixRequest& request : policy.requests())
    if (request.id.exists() && request.id != failed && request.live.exists()) ++held;
  for (std::uint32_t i = 1; i < policy.tree().node_count(); ++i) {
    const RadixNode& node = policy.tree().node({i});
    if (!node.alive || !node.state.exists()) continue;
    ++judgement.tree_states;
    if (lengths.state_lengths(node.state, 0).recurrent != node.depth())
      ++judgement.wrong_tree_states;
  }
  judgement.lost_slots =
      w1.state_slots - policy.state_pool().free_count() - held - judgement.tree_states;
  return judgement;
}

TEST(ProposedFixes, areJudgedAsTheRealClassJudgedThem) {
  EXPECT_EQ(judge(""), (Judgement{.hit_tokens = 386'087, .right_copies = 260, .tree_states = 256}));
  EXPECT_EQ(judge("sglang-legacy:forks-at-finish"), (Judgement{.hit_tokens = 179'387,
                                                               .right_copies = 117,
                                                               .tree_states = 8,
                                                               .lost_slots = 241,
                                                               .complete = false}));
  EXPECT_EQ(judge("sglang-legacy:offers-child-before-append"), (Judgement{.hit_tokens = 386'087,
                                                                          .right_copies = 229,
                                                                          .wrong_copies = 48,
                                                                          .position_error = 33'337,
                                                                          .tree_states = 256}));
  EXPECT_EQ(judge("sglang-legacy:offers-child-after-append"), (Judgement{.hit_tokens = 411'700,
                                                                         .right_copies = 229,
                                                                         .wrong_copies = 48,
                                                                         .position_error = 7'724,
                                                                         .tree_states = 256}));
  EXPECT_EQ(judge("sglang-legacy:floors-finished-key"), (Judgement{.hit_tokens = 380'766,
                                                                   .right_copies = 85,
                                                                   .wrong_copies = 175,
                                                                   .position_error = 5'171,
                                                                   .tree_states = 255,
                                                                   .wrong_tree_states = 101}));
}

}  // namespace
}  // namespace lockstep::cache_sim
