// The scheduling rules of SGLang 0.5.23 for a full pool (`scheduler=sglang`;
// srt/managers/scheduler.py, schedule_batch.py, schedule_policy.py). Differences from the plain
// scheduler:
//
//   admission   A prompt needs room for its tokens and one more, and one page for each prompt of
//   the
//               step, itself included (PrefillAdder, without its reservation for outputs). Once a
//               prompt is refused, or max_running is reached, no prompt is looked at until a
//               request
//               has left (batch_is_full).
//   room        All chunks of a step are chosen before the first extend. One `evict room=` asks for
//               the room of all chunks, and one for the room of all decodes.
//   retraction  Where the decodes have no room, the requests with the fewest outputs are retracted
//               first, among equals those with the longest prompt. They wait at the end of the
//               queue
//               (_get_decode_retraction_order). After each, kRetractionSteps tokens are freed for
//               every request that stays (release_req), and the rows keep that order. No request is
//               retracted while the result that ends a request is out.
//   overlap     The scheduler waits for a forward even if all of its requests have left, so that no
//               step is decided two forwards ahead.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/server/scheduler.hpp"

namespace lockstep::cache_sim {

class SglangScheduler final : public Scheduler {
 public:
  using Scheduler::Scheduler;

 private:
  struct Chunk {
    RequestNumber request;
    std::uint32_t tokens;
  };
  /// Decode steps for which a retraction frees room, for each request that stays
  /// (SGLANG_RETRACT_DECODE_STEPS).
  static constexpr std::int64_t kRetractionSteps = 20;
  static constexpr std::int64_t kNoNeed = -1;

  void begin_decisions() override;
  void prefill(RequestNumber request, SchedulerEffects& effects) override;
  bool may_admit() override;
  std::int64_t admission_room() const override { return reserved_ + options_.page + 1; }
  void admission_refused(SchedulerEffects& /*effects*/) override { is_full_ = true; }
  void admitted(const Reply& reply) override;
  void end_admission(SchedulerEffects& effects) override;
  void next_rule(SchedulerEffects& effects) override;
  void settle_rule(const Reply& reply, SchedulerEffects& effects) override;
  void forward_begins() override;
  bool waits_for_orphan_rows() const override { return options_.overlap; }
  bool retracted_goes_first() const override { return false; }
  void retracted(SchedulerEffects& effects) override;
  void leave_batch(RequestNumber request) override;

  std::int64_t whole_pages(std::int64_t tokens) const;
  void ask_for_room(std::int64_t tokens, SchedulerEffects& effects);
  std::int64_t decode_need(RequestNumber request) const;
  void next_decode_room(SchedulerEffects& effects);
  void retract_one(SchedulerEffects& effects);

  std::vector<Chunk> chunks_;    // chunks of this step
  std::int64_t reserved_ = 0;    // tokens that these chunks need
  bool finds_decodes_ = false;   // in Phase::rules: the chunks are done, the decodes follow
  bool is_full_ = false;         // no request is admitted until one has left
  bool has_cut_prompt_ = false;  // the last step ended within a prompt
  std::vector<RequestNumber> just_prefilled_;  // requests whose last chunk was in the last step
  bool is_retracting_ = false;                 // until the decodes of the step have room
  // while retracting: the decoding requests, the next one to retract last
  std::vector<RequestNumber> staying_;
  std::int64_t decode_need_ = kNoNeed;  // KV of the step's decodes that was asked for
};

}  // namespace lockstep::cache_sim
