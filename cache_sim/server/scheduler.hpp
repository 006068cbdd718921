// The scheduler whose steps either prefill or decode, as SGLang's do.
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
// itself has one row too many, whose result nobody takes; one that ends by its length has not
// (SGLang, _reqs_finishing_inflight). A verification's result decides where the next step begins:
// who has drafts to come makes every step wait.
//
// With options.sglang a step makes room for all of its rows at once, before the first extend, and
// what happens where that fails is SGLang's (sglang_rules.cpp).
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
  bool has_just_prefilled = false;  ///< in the last step
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
  chunk_room,   ///< for the step's chunks
  decode_room,  ///< for the step's decodes, without which one is retracted
  freed_room,   ///< what else is freed after a retraction
  page_room     ///< a page for each decode
};

class Scheduler final : public AskingScheduler<ScheduledRequest, SchedulerAsks> {
 public:
  explicit Scheduler(const SchedulerOptions& options) : AskingScheduler(options) {}

  bool has_work() const override { return !waiting_.empty() || !running_.empty(); }
  bool waits_for_results() const override;
  /// With SGLang's rules those of a forward whose requests have all left, too.
  bool has_results_out() const override {
    return phase_ == Phase::forward || !batch_.empty() || has_forward_;
  }
  bool awaits_results() const override { return phase_ == Phase::forward; }

 private:
  using Request = ScheduledRequest;
  using Asked = SchedulerAsks;
  using State = RequestState;
  enum class Phase {
    between_steps,
    chunk_ends,
    prefill,
    admission,
    chunks,       // SGLang's: of all who were found to prefill
    decode_room,  // SGLang's: for all who decode
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

  void hear(const SchedulerEvent& event, SchedulerEffects& effects) override;
  void settle(Asked asked, const Reply& reply, SchedulerEffects& effects) override;
  void next(SchedulerEffects& effects) override;
  void begin_step(SchedulerEffects& effects);
  void next_chunk_end(SchedulerEffects& effects);
  void next_prefill(SchedulerEffects& effects);
  void next_admission(SchedulerEffects& effects);
  static bool may_decode(const Request& request);
  void next_decode(SchedulerEffects& effects);
  void next_result(SchedulerEffects& effects);
  void settle_admit(RequestNumber number, const Reply& reply, SchedulerEffects& effects);
  void settle_extend(const Reply& reply, SchedulerEffects& effects);
  void settle_result(SchedulerEffects& effects);
  void extend(RequestNumber request, std::uint32_t tokens, SchedulerEffects& effects);
  void verify(RequestNumber request, SchedulerEffects& effects);
  static Tokens sampled_from(const RequestSpec& spec, std::uint32_t position, std::uint32_t count);
  void retract(RequestNumber request, SchedulerEffects& effects);
  void begin_forward(SchedulerEffects& effects);
  void end_decisions();
  void look_up(SchedulerEffects& effects);
  void enqueue(RequestNumber request, bool front);
  void leave_batch(RequestNumber request);

  // SGLang's rules.
  struct Chunk {
    RequestNumber request;
    std::uint32_t tokens;
  };
  std::int64_t whole_pages(std::int64_t tokens) const;
  void note_last_step();
  void plan_chunk(RequestNumber request);
  void ask_for_room(std::int64_t tokens, Asked asked, SchedulerEffects& effects);
  void end_admission(SchedulerEffects& effects);
  void next_chunk(SchedulerEffects& effects);
  std::int64_t decode_need(RequestNumber request) const;
  void next_decode_room(SchedulerEffects& effects);
  void settle_decode_room(const Reply& reply, SchedulerEffects& effects);
  void retract_one(SchedulerEffects& effects);

  std::vector<Row> batch_;     // rows of the step that is being decided, or was last
  std::vector<Row> launched_;  // rows whose results come next

  Phase phase_ = Phase::between_steps;
  std::uint32_t asked_tokens_ = 0;
  std::uint32_t asked_accepts_ = 0;
  std::uint32_t asked_overrun_ = 0;
  std::size_t cursor_ = 0;
  std::int64_t budget_ = 0;

  // SGLang's rules.
  std::vector<Chunk> chunks_;    // that this step prefills
  std::int64_t reserved_ = 0;    // for these
  bool is_full_ = false;         // nobody is admitted until somebody has left
  bool has_cut_prompt_ = false;  // the last step ended within a prompt
  bool has_forward_ = false;     // with overlap: the step that is being decided, or was last
  bool is_launched_ = false;     // the forward of the step before is under way
  bool waits_for_rows_of_nobody_ = false;  // for that one, though all of its requests have left
  bool is_retracting_ = false;             // until the step's decodes have room
  std::vector<RequestNumber> staying_;     // meanwhile: those who decode, the next to go last
};

}  // namespace lockstep::cache_sim
