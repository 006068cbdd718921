// vLLM 0.33's scheduler (`scheduler=vllm`; vllm/v1/core/sched/scheduler.py): one step mixes
// prefill chunks and decodes, and every request gets as many tokens as it lacks.
//
// One step, at one moment of virtual time:
//   running    in order, while the step's chunked_prefill tokens last: a request gets what it
//              lacks, at most long_prefill tokens where others run or wait. Where its extend is
//              refused, the last of the running is preempted and the extend tried again; one that
//              is preempted for itself ends the loop. By priority, whoever is least urgent is
//              preempted, wherever it stands, and the loop goes on with the next request
//   waiting    while tokens are left, and nobody was preempted: the look-up (admit), then the first
//              chunk (extend). Where one is refused or cut to nothing, the look-up is undone
//              (preempt) and nobody else is admitted
//   forward    `step ids=…`, and the step's cost passes; a step without rows has none
//   results    in the order of scheduling: a token where all that was known is computed, `finish`
//
// The subject may cut a chunk (the reply's n=), to nothing as well: then the request is passed over
// and the next one is tried. Preempted requests wait in front of all others, by priority where
// those count. What cannot be admitted while nothing else runs is refused.
//
// With drafts (config drafts=G), a request that decodes has drafts to verify after its last token:
// as many of them as the step's tokens allow are scheduled with it, the others are lost. Each
// result that samples is told by `accept`, that of a row without drafts as well, since it
// publishes. Rejected drafts are not computed. Who is admitted and lacks one token is padded to 1 +
// G tokens with drafts that nobody made, so that the step is one of equal rows, unless a prefill
// goes on in it; the subject may leave them out (n=1). A request that is preempted loses its
// drafts.
//
// With encoder=N, images are made by an encoder of which a step has N places, and kept in an
// EncoderCache until their tokens are computed. A row ends before an image that has no room or no
// places left, or (whole_images) that it would cut; where it would begin in such an image, the
// request is passed over, also by others that wait.
//
// With overlap (AsyncScheduler), a step is decided while the forward before it runs: a request that
// sampled in it is extended by a token that is not there yet (extend async=1), its result is told
// by `complete`. One that ends by its length gets no step after its last one. A preempted request
// waits, overtaken by others, until its results are there, which still bring it tokens. With drafts
// a row always has G of them, places for those that the forward before will make, and begins after
// all places of the row before: its result, told by `accept`, moves it back by what was rejected.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/policies/vllm/vllm_scheduler_options.hpp"
#include "cache_sim/server/asking_scheduler.hpp"
#include "cache_sim/server/vllm/encoder_cache.hpp"

namespace lockstep::cache_sim {

/// How often a request may be preempted for itself, with nobody else running and no token of its
/// own in between, before it is refused. vLLM, whose pool holds the longest request, would go on.
inline constexpr int kLonePreemptions = 8;

/// What VllmScheduler knows of a request.
struct VllmServedRequest : ServedRequest {
  std::uint32_t computed = 0;    ///< tokens that were extended, their results perhaps still out
  std::uint32_t told = 0;        ///< tokens that the subject knows
  std::uint32_t promised = 0;    ///< tokens and drafts of forwards under way that will sample
  std::uint32_t in_flight = 0;   ///< rows whose results are out
  std::uint32_t stale = 0;       ///< of these, those from before its last preemption
  std::uint64_t arrival = 0;     ///< its place among all arrivals
  std::size_t verification = 0;  ///< the next one that its line gives
  bool prefills = true;          ///< its last step did not reach the end of what was known
  int lone_preemptions = 0;      ///< since its last token
  std::vector<EncoderCache::Image> images;  ///< those of its line
  /// Tokens, without drafts.
  std::uint32_t lacks() const { return spec->prompt_size + sampled + promised - computed; }
};

/// What VllmScheduler asks an operation for.
enum class VllmAsks : std::uint8_t {
  nothing,
  admit,
  extend,
  undo,
  skip,
  preempt,
  retract,
  step,
  result,
  finish,
  drop
};

class VllmScheduler final
    : public AskingScheduler<VllmServedRequest, VllmAsks, VllmSchedulerOptions> {
 public:
  explicit VllmScheduler(const VllmSchedulerOptions& options)
      : AskingScheduler(options), encoder_(options.encoder_cache) {}

  bool has_work() const override {
    return !waiting_.empty() || !running_.empty() || !batch_.empty() || !launched_.empty();
  }
  bool waits_for_results() const override { return false; }
  bool has_results_out() const override { return phase_ == Phase::forward || !batch_.empty(); }
  bool awaits_results() const override { return phase_ == Phase::forward; }

 private:
  using Request = VllmServedRequest;
  using Asked = VllmAsks;
  using State = RequestState;
  enum class Phase { between_steps, running, waiting, forward, results };

  struct Row {
    RequestNumber request;
    std::uint32_t begin;   // tokens before this step
    std::uint32_t tokens;  // extended in this step
    std::uint32_t drafts;  // the last ones of these
    std::int64_t encoded;  // places of images that the step encodes for it
    bool samples;          // a token comes out
    bool decodes;          // one token after all that was known
    bool verifies;         // what its line gives for the next verification
    bool stale = false;    // its request was preempted since
  };

  void hear(const SchedulerEvent& event, SchedulerEffects& effects) override;
  void settle(Asked asked, const Reply& reply, SchedulerEffects& effects) override;
  void next(SchedulerEffects& effects) override;
  void begin_step(SchedulerEffects& effects);
  void next_running(SchedulerEffects& effects);
  void next_waiting(SchedulerEffects& effects);
  void end_decisions(SchedulerEffects& effects);
  void next_result(SchedulerEffects& effects);
  bool has_all_steps(const Request& request) const;
  std::int64_t left() const;
  std::uint32_t proposed(const Request& request) const;
  std::uint32_t share(const Request& request) const;
  bool is_padded(const Request& request) const;
  std::uint32_t fit_images(RequestNumber request, std::uint32_t tokens);
  void encode_planned(RequestNumber request);
  void release_seen_images(RequestNumber request);
  bool is_alone() const;
  void extend(RequestNumber request, std::uint32_t tokens, SchedulerEffects& effects);
  Tokens drafts_of(const Request& request, std::uint32_t drafts) const;
  static std::uint32_t kept_of(const Request& request, std::uint32_t drafts, bool verifies);
  void make_room(SchedulerEffects& effects);
  void settle_extend(const Reply& reply, SchedulerEffects& effects);
  void settle_admission(const Reply& reply, SchedulerEffects& effects);
  void settle_preemption(SchedulerEffects& effects);
  void settle_step(SchedulerEffects& effects);
  void settle_result(SchedulerEffects& effects);
  void schedule(RequestNumber request, std::uint32_t tokens);
  void undo_admission(SchedulerEffects& effects);
  void forget(RequestNumber request);
  void wait(RequestNumber request, bool front);
  bool goes_before(RequestNumber a, RequestNumber b) const;

  std::vector<Row> batch_;     // of the step that is being decided, or was last
  std::vector<Row> launched_;  // whose results come next
  std::uint64_t arrivals_ = 0;

  Phase phase_ = Phase::between_steps;
  std::uint32_t asked_tokens_ = 0;
  std::size_t cursor_ = 0;   // into running_, waiting_ or launched_
  RequestNumber needy_ = 0;  // for whom another one is preempted
  // Of this step:
  std::int64_t budget_ = 0;        // tokens that are left
  std::int64_t input_budget_ = 0;  // with the places that rows need for their drafters
  std::int64_t threshold_ = 0;     // 0: none
  bool has_preempted_ = false;
  bool goes_on_prefilling_ = false;  // a row of one that had begun its prefill before
  std::size_t running_rows_ = 0;     // of those who ran before it
  std::int64_t encoder_budget_ = 0;  // places that are left
  // Of the row that is asked for: images to encode, and those that are one of these once more.
  std::vector<EncoderCache::Input> planned_, repeated_;
  std::int64_t planned_size_ = 0;
  EncoderCache encoder_;
};

}  // namespace lockstep::cache_sim
