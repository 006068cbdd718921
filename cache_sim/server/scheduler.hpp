// The plain scheduler, whose steps either prefill or decode.
//
// One step, at one moment of virtual time (cache_sim/server/schedulers.md, "The scheduler"):
//   prefill  while chunked_prefill tokens are left: first the running requests that have prompt to
//            compute, in order, then new ones from the front of the queue, up to max_running; each
//            gets one extend, which is cut where a page ends unless it is the prompt's last one
//   decode   if nothing prefills, each running request extends by one token or verifies its drafts
//   forward  `step ids=…`, and the cost of the step passes
//   results  by row: accept (a verification), checkpoint (a chunk), finish (the last token)
// When an extend is refused, the last admitted request is retracted to the front of the queue, and
// the extend is tried again. A request that cannot go on alone, or cannot be admitted while nothing
// else runs, is refused.
//
// With overlap, a step is decided while the forward before it runs. Its rows extend with async=1,
// and a chunk that is not its prompt's last is checkpointed before its result has come. The results
// of the previous step (`complete`, then as above) follow after `step`. So a request that stops by
// itself has one row too many, whose result is dropped; a request that ends by its length has none.
// The result of a verification decides where the request's next step begins, so a request with
// drafts makes every step wait for results.
//
// A family's scheduler that has the same steps but other rules for a full pool derives from this
// class and overrides the virtual functions.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/server/asking_scheduler.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// The state of a request in this scheduler.
struct ScheduledRequest : ServedRequest {
  std::uint32_t scheduled = 0;  ///< tokens that were extended; their results may be out
  std::uint32_t known = 0;      ///< tokens that the subject has been told
  std::size_t verification = 0;
  bool was_admitted = false;
  bool prefilling = true;  ///< until all tokens that were known at the last admission are scheduled
  std::uint32_t to_prefill() const { return spec->prompt_size + sampled - scheduled; }
};

/// The reason why the scheduler asked for an operation.
enum class SchedulerAsks : std::uint8_t {
  nothing,
  admit,
  extend,
  preempt,
  step,
  complete,
  accept,
  checkpoint,
  finish,
  drop,
  rules  ///< a rule of a derived scheduler
};

class Scheduler : public AskingScheduler<ScheduledRequest, SchedulerAsks> {
 public:
  explicit Scheduler(const SchedulerOptions& options) : AskingScheduler(options) {}

  bool has_work() const final { return !waiting_.empty() || !running_.empty(); }
  bool waits_for_results() const final;
  bool has_results_out() const final {
    return phase_ == Phase::forward || !batch_.empty() || has_forward_;
  }
  bool awaits_results() const final { return phase_ == Phase::forward; }

 protected:
  using Request = ScheduledRequest;
  using Asked = SchedulerAsks;
  using State = RequestState;
  enum class Phase {
    between_steps,
    chunk_ends,
    prefill,
    admission,
    rules,  // rules of a derived scheduler, before the decodes
    decode,
    forward,
    results
  };

  struct Row {
    RequestNumber request;
    std::uint32_t begin;        // tokens before this step
    std::uint32_t tokens;       // tokens extended in this step
    std::uint32_t accepts;      // accepted tokens of the output; 0 for a chunk or a plain decode
    std::uint32_t overrun;      // further accepted tokens, after the output's end
    bool chunk;                 // a chunk of a prefill
    bool samples;               // the row samples a token
    bool checkpointed = false;  // the checkpoint was made before the result
    bool completed = false;     // with overlap: the subject was told of the result
  };

  // Rules that a derived scheduler may override.
  virtual void begin_decisions() {}
  /// A chunk of the prompt is due, the first one or a later one.
  virtual void prefill(RequestNumber request, SchedulerEffects& effects);
  virtual bool may_admit();
  /// Tokens of KV that an admission has to leave free.
  virtual std::int64_t admission_room() const { return Operation::kAbsent; }
  virtual void admission_refused(SchedulerEffects& effects) { end_admission(effects); }
  /// Called when the first chunk of an admitted request was prefilled.
  virtual void admitted(const Reply& /*reply*/) {}
  virtual void end_admission(SchedulerEffects& effects);
  /// Called in Phase::rules until the phase changes.
  virtual void next_rule(SchedulerEffects& /*effects*/) { phase_ = Phase::decode; }
  /// Called with the reply to an operation that was asked for as Asked::rules.
  virtual void settle_rule(const Reply& /*reply*/, SchedulerEffects& /*effects*/) {}
  virtual void forward_begins() {}
  /// Whether the scheduler waits for a forward of which all requests have left.
  virtual bool waits_for_orphan_rows() const { return false; }
  /// Whether a retracted request goes before the waiting requests of its priority.
  virtual bool retracted_goes_first() const { return true; }
  virtual void retracted(SchedulerEffects& /*effects*/) {}
  virtual void leave_batch(RequestNumber request);

  static bool may_decode(const Request& request);
  void begin_forward(SchedulerEffects& effects);
  void end_decisions();
  void extend(RequestNumber request, std::uint32_t tokens, SchedulerEffects& effects);
  void retract(RequestNumber request, SchedulerEffects& effects);

  std::vector<Row> batch_;     // rows of the step that is being decided, or of the last one
  std::vector<Row> launched_;  // rows whose results come next

  Phase phase_ = Phase::between_steps;
  std::size_t cursor_ = 0;
  std::int64_t budget_ = 0;

 private:
  void hear(const SchedulerEvent& event, SchedulerEffects& effects) final;
  void settle(Asked asked, const Reply& reply, SchedulerEffects& effects) final;
  void next(SchedulerEffects& effects) final;
  void begin_step(SchedulerEffects& effects);
  void next_chunk_end(SchedulerEffects& effects);
  void next_prefill(SchedulerEffects& effects);
  void next_admission(SchedulerEffects& effects);
  void next_decode(SchedulerEffects& effects);
  void next_result(SchedulerEffects& effects);
  void settle_admit(RequestNumber number, const Reply& reply, SchedulerEffects& effects);
  void settle_extend(const Reply& reply, SchedulerEffects& effects);
  void settle_result(SchedulerEffects& effects);
  void verify(RequestNumber request, SchedulerEffects& effects);
  static Tokens sampled_from(const RequestSpec& spec, std::uint32_t position, std::uint32_t count);
  void look_up(SchedulerEffects& effects);
  void enqueue(RequestNumber request, bool front);

  std::uint32_t asked_tokens_ = 0;
  std::uint32_t asked_accepts_ = 0;
  std::uint32_t asked_overrun_ = 0;
  // Used where waits_for_orphan_rows():
  bool has_forward_ = false;  // the step that is being decided, or the last one, has a forward
  bool is_launched_ = false;  // the forward of the step before is under way
  // that forward is under way, and all of its requests have left
  bool orphan_rows_in_flight_ = false;
};

}  // namespace lockstep::cache_sim
