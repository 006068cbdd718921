// SGLang 0.5.23's rules where memory is short (`scheduler=sglang`; srt/managers/scheduler.py,
// schedule_batch.py, schedule_policy.py). What differs from the plain scheduler:
//
//   admission   A prompt needs its own tokens, one more, and a page beside each prompt of the step,
//               itself included (PrefillAdder, without its reservation for outputs). Where one is
//               refused, or max_running stands in its way, nobody is looked at until a request has
//               left (batch_is_full).
//   room        All who prefill are found before the first extend; `evict room=` asks for all of
//               them at once, and for all who decode.
//   retraction  Where room for the decodes is missing, those with the fewest outputs go first,
//               among equals the longest prompt, and wait at the end of the queue
//               (_get_decode_retraction_order). After each, kRetractionSteps tokens are made free
//               for every request that stays (release_req). The rows go on in that order. Nobody is
//               retracted where a result is out that ends a request.
//   overlap     A forward is waited for although all of its requests have left, so that no step is
//               decided two forwards ahead.
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
  /// Decode steps for which a retraction makes room, for each request that stays
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

  std::vector<Chunk> chunks_;                  // that this step prefills
  std::int64_t reserved_ = 0;                  // for these
  bool finds_decodes_ = false;                 // in Phase::rules: the chunks are behind it
  bool is_full_ = false;                       // nobody is admitted until somebody has left
  bool has_cut_prompt_ = false;                // the last step ended within a prompt
  std::vector<RequestNumber> just_prefilled_;  // whose prompts the last step ended
  bool is_retracting_ = false;                 // until the step's decodes have room
  std::vector<RequestNumber> staying_;         // meanwhile: those who decode, the next to go last
  std::int64_t decode_need_ = kNoNeed;         // KV of the step's decodes that was asked for
};

}  // namespace lockstep::cache_sim
