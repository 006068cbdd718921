// The inputs and outputs of a scheduler: events, effects, notes, and the record of one event with
// everything that it led to. The scheduler of cache_sim/ and its oracle share these and
// nothing else.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "reference/base/finding.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/operation.hpp"
#include "reference/protocol/request.hpp"

namespace lockstep {

/// What a wrong draft consists of (a document that nothing else uses).
inline constexpr Document kWrongDrafts = (Document{1} << 31) - 1;
/// What a verification accepts after the token that ends the output.
inline constexpr Document kBehindTheEnd = kWrongDrafts - 1;

/// What one forward works on, for the cost of a step.
struct StepWork {
  std::int64_t prefill_tokens = 0;
  std::int64_t decode_tokens = 0;
  std::int64_t context_tokens = 0;  ///< tokens of all rows before this forward
  std::int64_t seen_tokens = 0;     ///< summed over its tokens, the tokens that each attends to
};

/// Requests are numbered by whoever brings them, from 0 on; they may arrive in another order.
using RequestNumber = std::uint32_t;

struct SchedulerEvent {
  enum class Kind {
    arrival,       ///< `spec` joins the queue
    abort,         ///< the client of `request` has gone, perhaps before it arrived
    retract,       ///< `request` goes back to the front of the queue
    step_due,      ///< a step may begin
    forward_done,  ///< the forward's results are there
    reply,         ///< the answer to the operation of the last effects
  };
  Kind kind;
  RequestNumber request = 0;
  const RequestSpec* spec = nullptr;
  const Reply* reply = nullptr;
};

/// What a step did to a request, for ledgers and timelines.
struct SchedulerNote {
  enum class Kind { admitted, sampled, retracted, ended };
  Kind kind;
  RequestNumber request;
  FinishReason reason = FinishReason::running;
  std::int64_t output_tokens = 0;
};

struct SchedulerEffects {
  Operation* operation = nullptr;  ///< to ask; nothing else happens before its reply
  std::optional<StepWork>
      forward;  ///< a forward has begun; forward_done follows when its cost has passed
  std::vector<SchedulerNote> notes;
  bool idle = false;  ///< there was nothing to do for a step
};

/// What SGLang's retraction makes room for, for each request that stays (its
/// SGLANG_RETRACT_DECODE_STEPS).
inline constexpr std::int64_t kRetractionSteps = 20;

/// How often a request may be preempted for itself, with nobody else running and no token of its
/// own in between, before it is refused. vLLM, whose pool holds the longest request, would go on.
inline constexpr int kLonePreemptions = 8;

struct SchedulerOptions {
  std::int64_t chunked_prefill = 8192;
  std::int64_t max_running = 256;
  bool overlap = false;  ///< a step is decided before the results of the one before
  std::int64_t page =
      1;                ///< tokens per KV page: a chunk that is not its prompt's last ends with one
  bool sglang = false;  ///< SGLang's rules where memory is short
  std::vector<std::int64_t> graph_batches;  ///< rows of the captured graphs, ascending
  bool vllm = false;                        ///< vLLM's scheduler instead
  // vLLM's.
  bool by_priority = false;        ///< who is preempted, and who is admitted first
  std::int64_t long_prefill = 0;   ///< tokens of a chunk where others run or wait; 0: all that fit
  bool adapts = false;             ///< long_prefill is no less than a fair share of a step's tokens
  std::int64_t watermark = 0;      ///< blocks that an admission leaves free where others run
  std::int64_t drafts = 0;         ///< most drafts of a verification
  std::int64_t draft_slots = 0;    ///< places of a step that a row needs for its drafter
  std::int64_t lookahead = 0;      ///< tokens after a row that its drafter writes KV for
  std::int64_t reads_ahead = 0;    ///< tokens after a row that its drafter reads
  std::int64_t encoder = 0;        ///< places of images that a step encodes; 0: images are tokens
  std::int64_t encoder_cache = 0;  ///< places of images that are kept
  bool whole_images = false;       ///< no row ends inside an image

  /// `scheduler=` is empty, sglang, or
  /// vllm[:priority][:long_prefill=N[:adaptive]][:watermark=BLOCKS][:draft_model]
  /// [:encoder=N[:encoder_cache=N][:whole_images]]. The error is a sentence that names the field.
  static Result<SchedulerOptions> of(const Config& config);

  /// Whether a step can encode the image, and, where it has to, compute it in one row.
  bool can_encode(const RequestSpec::Image& image) const;
};

/// What a scheduler says of itself when it is asked.
struct SchedulerStatus {
  bool has_work = false;
  bool waits_for_results = false;
  bool has_results_out = false;
  bool awaits_results = false;
  std::size_t load = 0;
  bool has_ended = false;  ///< the event's request
  bool operator==(const SchedulerStatus&) const = default;
};

/// One event and everything that the scheduler made of it.
struct SchedulerEpisode {
  struct Exchange {
    Operation operation;
    Reply reply;
  };
  SchedulerEvent event;
  std::vector<Exchange> asked;
  std::vector<SchedulerNote> notes;
  std::optional<StepWork> forward;
  bool idle = false;
  SchedulerStatus status{};  ///< in the end

  void begin(const SchedulerEvent& with);
  /// What one call of the scheduler brought.
  void add(const SchedulerEffects& effects);
};

/// Judges a scheduler by its episodes.
class ScheduleChecker {
 public:
  virtual ~ScheduleChecker() = default;
  /// The first difference between the episode and what the rules make of its event. After such a
  /// finding nothing that follows means anything.
  virtual std::optional<Finding> check(const SchedulerEpisode& episode) = 0;
  /// The same of an episode that has not come to its end, without taking note of it.
  virtual std::optional<Finding> check_so_far(const SchedulerEpisode& episode) const = 0;
};

/// Registered by reference/caches/{scheduler_oracle,vllm_scheduler_oracle}.cpp.
struct ScheduleCheckerEntry {
  std::string_view name;
  std::unique_ptr<ScheduleChecker> (*make)(const SchedulerOptions& options);
};
inline constexpr std::string_view kSchedulerOracle = "scheduler-oracle";
inline constexpr std::string_view kVllmSchedulerOracle = "vllm-scheduler-oracle";

}  // namespace lockstep
