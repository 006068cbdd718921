// The scheduler of vLLM 0.33 (`scheduler=vllm`; vllm/v1/core/sched/scheduler.py). One step mixes
// prefill chunks and decodes, and each request gets as many tokens as it lacks.
//
// One step, at one moment of virtual time:
//   running    in order, while the step's chunked_prefill tokens last: a request gets the tokens
//              that it lacks, at most long_prefill where others run or wait. When its extend is
//              refused, the last running request is preempted, and the extend is tried again. A
//              request that is preempted for itself ends the loop. With priorities, the least
//              urgent
//              request is preempted, at any place, and the loop goes on with the next request.
//   waiting    while tokens are left, unless a request was preempted: the look-up (admit), then the
//              first chunk (extend). When one of the two is refused, or the chunk is cut to
//              nothing,
//              the look-up is undone (preempt), and no further request is admitted.
//   forward    `step ids=…`, and the cost of the step passes; a step without rows has no forward
//   results    in the order of scheduling: a token if all known tokens are computed, or `finish`
//
// The subject may cut a chunk (n= of the reply), even to nothing; then the request is passed over,
// and the next one is tried. Preempted requests wait before all others, by priority where there are
// priorities. A request that cannot be admitted while nothing else runs is refused.
//
// Drafts (config drafts=G): a decoding request has drafts to verify after its last token. As many
// of them as the step's tokens allow are scheduled with it; the others are lost. Each result that
// samples is told by `accept`, also for a row without drafts, because it publishes blocks. Rejected
// drafts are not computed. An admitted request that lacks one token is padded to 1 + G tokens with
// placeholders for drafts, so that all rows of the step have the same length, unless a prefill goes
// on in the step. The subject may leave them out (n=1). A preempted request loses its drafts.
//
// Images (encoder=N): an encoder makes images, N places in a step. They stay in an EncoderCache
// until their tokens are computed. A row ends before an image for which there is no room or no
// place left, or (whole_images) which the row would cut. A request whose row would begin in such an
// image is passed over; waiting requests may overtake it.
//
// Overlap (AsyncScheduler): a step is decided while the forward before it runs. A request that
// samples in that forward is extended by a token that is not known yet (extend async=1), and its
// result is told by `complete`. A request that ends by its length gets no step after its last one.
// A preempted request waits, overtaken by others, until its results have come, and these still
// bring it tokens. With drafts, a row always has G of them, placeholders for the drafts that the
// forward before it makes, and it begins after all placeholders of the row before. Its result, told
// by `accept`, moves the request back by the number of rejected drafts.
//
// A CPU tier (cpu_chunks=, cpu_blocks=): an admission whose answer has `host=` gets blocks for what
// is loaded (extend n=0 async=1) and no row. It waits for its load in front of all requests without
// blocks, in the order in which the loads began, or of priority; the next one is tried meanwhile.
// Each step asks for it (`complete`) until the load has been settled; then its first chunk is
// extended. If that is refused or cut to nothing, it keeps its blocks and nobody else is admitted;
// where nothing runs, it is refused for good. A look-up that is refused, because what it needs is
// being copied, is passed over. A step without rows ends with `step`, too: copies start with it.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/policies/vllm/vllm_scheduler_options.hpp"
#include "cache_sim/server/asking_scheduler.hpp"
#include "cache_sim/server/vllm/encoder_cache.hpp"

namespace lockstep::cache_sim {

/// The number of times that a request may be preempted for itself, with nothing else running and no
/// token sampled in between, before it is refused. vLLM would go on, because its pool holds the
/// longest request.
inline constexpr int kLonePreemptions = 8;

/// With a CPU tier, a request is refused for good only after more quiet steps than this: copies may
/// hold blocks so long.
inline constexpr int kQuietSteps = 2;

/// The state of a request in this scheduler.
struct VllmServedRequest : ServedRequest {
  std::uint32_t computed = 0;    ///< tokens that were extended; their results may be out
  std::uint32_t told = 0;        ///< tokens that the subject has been told
  std::uint32_t promised = 0;    ///< tokens and drafts of forwards under way that will sample
  std::uint32_t in_flight = 0;   ///< rows whose results are out
  std::uint32_t stale = 0;       ///< of these: rows from before the last preemption
  std::uint64_t arrival = 0;     ///< its place in the order of all arrivals
  std::size_t verification = 0;  ///< the next one that its line specifies
  bool prefills = true;          ///< its last step did not reach the end of the known tokens
  bool holds = false;            ///< it waits and has blocks: its load is under way or has come
  bool is_loading = false;       ///< and its load is under way, as far as it is known
  int lone_preemptions = 0;      ///< since its last token; see kLonePreemptions
  std::vector<EncoderCache::Image> images;  ///< the images of its line
  /// Tokens that are not scheduled yet, without drafts.
  std::uint32_t lacks() const { return spec->prompt_size + sampled + promised - computed; }
};

/// The reason why the scheduler asked for an operation.
enum class VllmAsks : std::uint8_t {
  nothing,
  admit,
  extend,
  load,
  loaded,
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
    std::uint32_t tokens;  // tokens extended in this step
    std::uint32_t drafts;  // of these: drafts, which are the last ones
    std::int64_t encoded;  // places of images that the step encodes for the row
    bool samples;          // the row samples a token
    bool decodes;          // one token after all known tokens
    bool verifies;         // a verification that the request's line specifies
    bool stale = false;    // the request was preempted since
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
  void settle_load(const Reply& reply, SchedulerEffects& effects);
  void go_on_after_load(RequestNumber request, SchedulerEffects& effects);
  void settle_preemption(SchedulerEffects& effects);
  void settle_step(SchedulerEffects& effects);
  void settle_result(SchedulerEffects& effects);
  void schedule(RequestNumber request, std::uint32_t tokens);
  void undo_admission(SchedulerEffects& effects);
  void forget(RequestNumber request);
  void wait(RequestNumber request, bool front);
  bool goes_before(RequestNumber a, RequestNumber b) const;

  std::vector<Row> batch_;     // rows of the step that is being decided, or of the last one
  std::vector<Row> launched_;  // rows whose results come next
  std::uint64_t arrivals_ = 0;
  std::ptrdiff_t holders_ = 0;  // the first requests of waiting_, which hold blocks
  int quiet_steps_ = 0;         // steps in a row that began with nothing running

  Phase phase_ = Phase::between_steps;
  std::uint32_t asked_tokens_ = 0;
  std::size_t cursor_ = 0;   // index into running_, waiting_ or launched_
  RequestNumber needy_ = 0;  // the request for which another one is preempted
  // State of the step:
  std::int64_t budget_ = 0;        // tokens that are left
  std::int64_t input_budget_ = 0;  // the same, with the slots that the rows' drafters need
  std::int64_t threshold_ = 0;     // most tokens of one row; 0: no limit
  bool has_preempted_ = false;
  bool goes_on_prefilling_ = false;  // one of the rows continues a prefill
  std::size_t running_rows_ = 0;     // rows of requests that ran before the step
  std::int64_t encoder_budget_ = 0;  // places of the encoder that are left
  // Images of the row that is asked for: those to encode, and repetitions of these.
  std::vector<EncoderCache::Input> planned_, repeated_;
  std::int64_t planned_size_ = 0;
  EncoderCache encoder_;
};

}  // namespace lockstep::cache_sim
