// SGLang 0.5.23's rules where memory is short (SchedulerOptions::sglang; srt/managers/scheduler.py,
// schedule_batch.py, schedule_policy.py). What differs from the rules in scheduler.cpp:
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
#include <algorithm>
#include <tuple>

#include "cache_sim/server/scheduler.hpp"
#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

std::int64_t Scheduler::whole_pages(std::int64_t tokens) const {
  return (tokens + options_.page - 1) / options_.page * options_.page;
}

/// Admission opens again where the last step ended within a prompt, and where nobody decodes but
/// those who prefilled in the last step: SGLang makes their batch the running one, and the flag is
/// the batch's.
void Scheduler::note_last_step() {
  const bool some_decode = std::any_of(running_.begin(), running_.end(), [&](RequestNumber number) {
    return !requests_[number].prefilling && !requests_[number].has_just_prefilled;
  });
  if (has_cut_prompt_ || !some_decode) is_full_ = false;
  has_cut_prompt_ = false;
  for (const RequestNumber number : running_) requests_[number].has_just_prefilled = false;
  chunks_.clear();
  reserved_ = 0;
}

void Scheduler::plan_chunk(RequestNumber number) {
  const auto tokens =
      static_cast<std::uint32_t>(std::min<std::int64_t>(budget_, requests_[number].to_prefill()));
  chunks_.push_back({number, tokens});
  budget_ -= whole_pages(tokens);
  reserved_ += whole_pages(tokens) + options_.page;
}

void Scheduler::ask_for_room(std::int64_t tokens, Asked asked, SchedulerEffects& effects) {
  ask(Verb::evict, 0, asked, effects);
  effects.operation->room = tokens;
}

/// With pages an allocation asks for a page beyond its tokens, for each row.
void Scheduler::end_admission(SchedulerEffects& effects) {
  cursor_ = 0;
  if (chunks_.empty()) {
    phase_ = Phase::decode_room;
    return;
  }
  phase_ = Phase::chunks;
  std::int64_t room = 0;
  for (const Chunk& chunk : chunks_) room += chunk.tokens + (options_.page > 1 ? options_.page : 0);
  ask_for_room(room, Asked::chunk_room, effects);
}

void Scheduler::next_chunk(SchedulerEffects& effects) {
  if (cursor_ == chunks_.size()) {
    if (!batch_.empty()) return begin_forward(effects);
    phase_ = Phase::decode_room;  // no chunk found the room that was promised
    return;
  }
  extend(chunks_[cursor_].request, chunks_[cursor_].tokens, effects);
}

/// KV that the request's next step takes.
std::int64_t Scheduler::decode_need(RequestNumber number) const {
  const Request& request = requests_[number];
  const bool verifies = request.verification < request.spec->drafts.size();
  const std::int64_t drafts = verifies ? request.spec->drafts[request.verification] : 0;
  return whole_pages(request.scheduled + 1 + drafts) - whole_pages(request.scheduled);
}

void Scheduler::next_decode_room(SchedulerEffects& effects) {
  if (!is_retracting_) {
    staying_.clear();
    for (const RequestNumber number : running_)
      if (may_decode(requests_[number])) staying_.push_back(number);
  }
  if (staying_.empty()) {
    is_retracting_ = false;
    cursor_ = 0;
    phase_ = Phase::decode;
    return;
  }
  std::int64_t need = 0;
  for (const RequestNumber number : staying_) need += decode_need(number);
  asked_tokens_ = static_cast<std::uint32_t>(need);
  ask_for_room(need, Asked::decode_room, effects);
}

/// A subject that does not tell what is free refuses extends, or has room.
void Scheduler::settle_decode_room(const Reply& reply, SchedulerEffects& effects) {
  if (reply.has(ReplyField::kv_free) && reply.get(ReplyField::kv_free) < asked_tokens_)
    return retract_one(effects);
  if (is_retracting_) {
    // Whoever does not decode now has a result out, and comes after them.
    std::stable_partition(running_.begin(), running_.end(), [&](RequestNumber number) {
      return std::find(staying_.begin(), staying_.end(), number) != staying_.end();
    });
    std::copy(staying_.begin(), staying_.end(), running_.begin());
    is_retracting_ = false;
  }
  cursor_ = 0;
  phase_ = Phase::decode;
  if (options_.page > 1)
    ask_for_room(options_.page * static_cast<std::int64_t>(staying_.size()), Asked::page_room,
                 effects);
}

void Scheduler::retract_one(SchedulerEffects& effects) {
  const bool ends_soon = std::any_of(running_.begin(), running_.end(), [&](RequestNumber number) {
    return !requests_[number].prefilling && !may_decode(requests_[number]);
  });
  if (!is_retracting_ && ends_soon) {
    LOCKSTEP_MARK("scheduler.waits_for_room");
    is_full_ = false;
    return end_decisions();
  }
  if (!is_retracting_) {
    std::stable_sort(staying_.begin(), staying_.end(), [&](RequestNumber a, RequestNumber b) {
      const Request& one = requests_[a];
      const Request& other = requests_[b];
      return std::tuple(one.sampled, other.spec->prompt_size) >
             std::tuple(other.sampled, one.spec->prompt_size);
    });
    is_retracting_ = true;
  }
  const RequestNumber last = staying_.back();
  staying_.pop_back();
  if (staying_.empty()) return drop(last, FinishReason::refused, effects);
  retract(last, effects);
}

}  // namespace lockstep::cache_sim
