// The scheduling rules of SGLang 0.5.23 for a full pool (`scheduler=sglang`;
// srt/managers/scheduler.py, schedule_batch.py, schedule_policy.py). Differences from the plain
// scheduler:
//
//   admission   A prompt needs room for its tokens and one more, and one page for each prompt of
//               the step, itself included (PrefillAdder, without its reservation for outputs). Once
//               a prompt is refused, or max_running is reached, no prompt is looked at until a
//               request has left (batch_is_full).
//   room        All chunks of a step are chosen before the first extend. One `evict room=` asks for
//               the room of all chunks, and one for the room of all decodes.
//   retraction  Where the decodes have no room, the requests with the fewest outputs are retracted
//               first, among equals those with the longest prompt. They wait at the end of the
//               queue (_get_decode_retraction_order). After each, kRetractionSteps tokens are freed
//               for every request that stays (release_req), and the rows keep that order. No
//               request is retracted while the result that ends a request is out.
//   overlap     The scheduler waits for a forward even if all of its requests have left, so that no
//               step is decided two forwards ahead.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "cache_sim/server/scheduler.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/subject.hpp"

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

std::int64_t SglangScheduler::whole_pages(std::int64_t tokens) const {
  return (tokens + options_.page - 1) / options_.page * options_.page;
}

/// Reopens admission where the last step ended within a prompt, and where the only decoding
/// requests are those that prefilled in the last step: SGLang then makes their batch the running
/// one, and with it takes that batch's flag (batch_is_full).
void SglangScheduler::begin_decisions() {
  const bool some_decode = std::ranges::any_of(running_, [&](RequestNumber number) {
    return !requests_[number].prefilling &&
           std::ranges::find(just_prefilled_, number) == just_prefilled_.end();
  });
  if (has_cut_prompt_ || !some_decode) is_full_ = false;
  has_cut_prompt_ = false;
  just_prefilled_.clear();
  chunks_.clear();
  reserved_ = 0;
}

void SglangScheduler::forward_begins() {
  for (const Row& row : batch_) {
    if (row.chunk && row.samples) just_prefilled_.push_back(row.request);
    has_cut_prompt_ |= row.chunk && !row.samples;
  }
}

/// Notes the chunk. It is extended once all chunks of the step are known.
void SglangScheduler::prefill(RequestNumber number, SchedulerEffects& /*effects*/) {
  const auto tokens =
      static_cast<std::uint32_t>(std::min<std::int64_t>(budget_, requests_[number].to_prefill()));
  chunks_.push_back({number, tokens});
  budget_ -= whole_pages(tokens);
  reserved_ += whole_pages(tokens) + options_.page;
}

bool SglangScheduler::may_admit() {
  const bool has_room = Scheduler::may_admit();
  if (!has_room && budget_ > 0 && !waiting_.empty()) is_full_ = true;
  return has_room && !is_full_;
}

void SglangScheduler::admitted(const Reply& reply) {
  if (reply.has(ReplyField::kv) && reply.get(ReplyField::kv) <= reserved_) is_full_ = true;
}

void SglangScheduler::leave_batch(RequestNumber request) {
  Scheduler::leave_batch(request);
  std::erase_if(chunks_, [&](const Chunk& chunk) { return chunk.request == request; });
  is_full_ = false;
}

void SglangScheduler::retracted(SchedulerEffects& effects) {
  if (is_retracting_)
    ask_for_room(kRetractionSteps * static_cast<std::int64_t>(staying_.size()), effects);
}

void SglangScheduler::ask_for_room(std::int64_t tokens, SchedulerEffects& effects) {
  ask(Verb::evict, 0, Asked::rules, effects);
  effects.operation->room = tokens;
}

/// Asks for room for all chunks of the step. With pages, SGLang asks for one page more than the
/// tokens of each row.
void SglangScheduler::end_admission(SchedulerEffects& effects) {
  cursor_ = 0;
  phase_ = Phase::rules;
  finds_decodes_ = chunks_.empty();
  if (finds_decodes_) return;
  std::int64_t room = 0;
  for (const Chunk& chunk : chunks_) room += chunk.tokens + (options_.page > 1 ? options_.page : 0);
  ask_for_room(room, effects);
}

void SglangScheduler::next_rule(SchedulerEffects& effects) {
  if (finds_decodes_) return next_decode_room(effects);
  if (cursor_ == chunks_.size()) {
    if (!batch_.empty()) return begin_forward(effects);
    finds_decodes_ = true;  // no chunk was extended, although room was promised
    return;
  }
  extend(chunks_[cursor_].request, chunks_[cursor_].tokens, effects);
}

/// Tokens of KV that the request's next step allocates.
std::int64_t SglangScheduler::decode_need(RequestNumber number) const {
  const Request& request = requests_[number];
  const bool verifies = request.verification < request.spec->drafts.size();
  const std::int64_t drafts = verifies ? request.spec->drafts[request.verification] : 0;
  return whole_pages(request.scheduled + 1 + drafts) - whole_pages(request.scheduled);
}

void SglangScheduler::next_decode_room(SchedulerEffects& effects) {
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
  decode_need_ = need;
  ask_for_room(need, effects);
}

/// Settles the room for decodes. A subject that does not tell its free KV is taken to have room; it
/// refuses the extend where it has none.
void SglangScheduler::settle_rule(const Reply& reply, SchedulerEffects& effects) {
  const std::int64_t need = std::exchange(decode_need_, kNoNeed);
  if (need == kNoNeed) return;
  if (reply.has(ReplyField::kv_free) && reply.get(ReplyField::kv_free) < need)
    return retract_one(effects);
  if (is_retracting_) {
    // A running request that does not decode has a result out. It comes after those that decode.
    std::stable_partition(running_.begin(), running_.end(), [&](RequestNumber number) {
      return std::ranges::find(staying_, number) != staying_.end();
    });
    std::ranges::copy(staying_, running_.begin());
    is_retracting_ = false;
  }
  cursor_ = 0;
  phase_ = Phase::decode;
  if (options_.page > 1)
    ask_for_room(options_.page * static_cast<std::int64_t>(staying_.size()), effects);
}

void SglangScheduler::retract_one(SchedulerEffects& effects) {
  const bool ends_soon = std::ranges::any_of(running_, [&](RequestNumber number) {
    return !requests_[number].prefilling && !may_decode(requests_[number]);
  });
  if (!is_retracting_ && ends_soon) {
    LOCKSTEP_MARK("scheduler.waits_for_room");
    is_full_ = false;
    return end_decisions();
  }
  if (!is_retracting_) {
    std::ranges::stable_sort(staying_, [&](RequestNumber a, RequestNumber b) {
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

namespace {

const Registration<SchedulerEntry> kRegistered{
    {.name = "sglang",
     .summary = "the plain scheduler with SGLang 0.5.23's rules where memory is short",
     .check = [](const Config& config, const PolicyEntry& policy) -> Result<void> {
       if (const std::size_t colon = config.scheduler.find(':'); colon != std::string::npos)
         return fail(fmt::format("field scheduler: sglang has no option `{}`",
                                 config.scheduler.substr(colon + 1)));
       if (!policy.capabilities.contains(Capability::tree))
         return fail(fmt::format("field scheduler: policy {} is none of SGLang's", policy.name));
       return {};
     },
     .make = [](const Config& config) -> std::unique_ptr<ServerScheduler> {
       return std::make_unique<SglangScheduler>(SchedulerOptions::of(config));
     }}};

}  // namespace
}  // namespace lockstep::cache_sim
