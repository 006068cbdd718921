// The plain scheduler, whose steps either prefill or decode.
//
// One step, at one moment of virtual time (schedulers.md, "The scheduler"):
//   prefill  while chunked_prefill tokens are left: requests that run and still have prompt to
//            compute, in order, then new ones from the front of the queue up to max_running; each
//            gets one extend, cut where a page ends unless it is the prompt's last
//   decode   otherwise each running request extends by one token, or verifies its drafts
//   forward  `step ids=…`, and the step's cost passes
//   results  in row order: accept (a verification), checkpoint (a chunk), finish (the last token)
// Where an extend is refused, the last admitted request is retracted to the front of the queue and
// the extend is tried again; a request that cannot go on alone, or be admitted with nothing else
// running, is refused.
//
// With overlap, a step is decided while the forward before it runs: its rows extend with async=1, a
// chunk that is not its prompt's last is checkpointed before its result is there, and the results
// of the step before (complete, then as above) follow after `step`. So a request that stops by
// itself has one row too many, whose result nobody takes; one that ends by its length has not. A
// verification's result decides where the next step begins: who has drafts to come makes every step
// wait.
//
// A family's scheduler that steps like this and has rules of its own where memory is short derives
// from this one and replaces the virtual functions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache_sim/server/asking_scheduler.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// What Scheduler knows of a request.
struct ScheduledRequest : ServedRequest {
  std::uint32_t scheduled = 0;  ///< tokens that were extended, their results perhaps still out
  std::uint32_t known = 0;      ///< tokens that the subject was told
  std::size_t verification = 0;
  bool was_admitted = false;
  bool prefilling = true;  ///< since the last admission, until all that was known then is scheduled
  std::uint32_t to_prefill() const { return spec->prompt_size + sampled - scheduled; }
};

/// What Scheduler asks an operation for.
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
  rules  ///< what a derived scheduler asks besides
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
    rules,  // a derived scheduler's, before the decodes
    decode,
    forward,
    results
  };

  struct Row {
    RequestNumber request;
    std::uint32_t begin;        // tokens before this step
    std::uint32_t tokens;       // extended in this step
    std::uint32_t accepts;      // of the output; 0 for a chunk or a plain decode
    std::uint32_t overrun;      // tokens accepted besides, after the output's end
    bool chunk;                 // of a prefill
    bool samples;               // a token comes out
    bool checkpointed = false;  // before its result
    bool completed = false;     // with overlap: the subject knows of the result
  };

  // The rules that a derived scheduler may replace.
  virtual void begin_decisions() {}
  /// A chunk of the prompt is due, the request's first one or a later one.
  virtual void prefill(RequestNumber request, SchedulerEffects& effects);
  virtual bool may_admit();
  /// KV that an admission has to leave free.
  virtual std::int64_t admission_room() const { return Operation::kAbsent; }
  virtual void admission_refused(SchedulerEffects& effects) { end_admission(effects); }
  /// After its first chunk was prefilled.
  virtual void admitted(const Reply& /*reply*/) {}
  virtual void end_admission(SchedulerEffects& effects);
  /// Goes on in Phase::rules.
  virtual void next_rule(SchedulerEffects& /*effects*/) { phase_ = Phase::decode; }
  /// The answer to what was asked for as Asked::rules.
  virtual void settle_rule(const Reply& /*reply*/, SchedulerEffects& /*effects*/) {}
  virtual void forward_begins() {}
  /// Whether a forward is waited for although all of its requests have left.
  virtual bool waits_for_orphan_rows() const { return false; }
  /// Whether a retracted request waits before its equals.
  virtual bool retracted_goes_first() const { return true; }
  virtual void retracted(SchedulerEffects& /*effects*/) {}
  virtual void leave_batch(RequestNumber request);

  static bool may_decode(const Request& request);
  void begin_forward(SchedulerEffects& effects);
  void end_decisions();
  void extend(RequestNumber request, std::uint32_t tokens, SchedulerEffects& effects);
  void retract(RequestNumber request, SchedulerEffects& effects);

  std::vector<Row> batch_;     // rows of the step that is being decided, or was last
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
  // Where orphan rows are waited for:
  bool has_forward_ = false;            // the step that is being decided, or was last, has one
  bool is_launched_ = false;            // the forward of the step before is under way
  bool orphan_rows_in_flight_ = false;  // that one, though all of its requests have left
};

}  // namespace lockstep::cache_sim
