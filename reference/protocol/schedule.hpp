// A scheduler's interface, inputs and outputs: events, effects, notes, and the record of one event
// with everything that it led to. The schedulers of cache_sim/ and their oracles share these and
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

/// Wrong drafts are tokens of this document, which nothing else uses.
inline constexpr Document kWrongDrafts = (Document{1} << 31) - 1;
/// Tokens of this document are those that a verification accepts after the end of the output.
inline constexpr Document kBehindTheEnd = kWrongDrafts - 1;

/// The work of one forward, for the cost of a step.
struct StepWork {
  std::int64_t prefill_tokens = 0;
  std::int64_t decode_tokens = 0;
  std::int64_t context_tokens = 0;  ///< tokens of all rows before this forward
  std::int64_t seen_tokens = 0;     ///< sum, over its tokens, of the tokens that each attends to
};

/// The caller numbers requests from 0 on; they may arrive in another order.
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

/// An effect of a step on a request, for ledgers and timelines.
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

/// The options of every scheduler. A family's scheduler reads more of the configuration.
struct SchedulerOptions {
  std::int64_t chunked_prefill = 8192;
  std::int64_t max_running = 256;
  bool overlap = false;  ///< a step is decided before the results of the one before
  std::int64_t page =
      1;  ///< tokens per KV page: a chunk that is not its prompt's last ends with one
  std::vector<std::int64_t> graph_batches;  ///< rows of the captured graphs, ascending

  static SchedulerOptions of(const Config& config);
};

/// A scheduler's answers about its state.
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
  /// Adds the effects of one call of the scheduler.
  void add(const SchedulerEffects& effects);
};

/// Judges a scheduler by its episodes.
class ScheduleChecker {
 public:
  virtual ~ScheduleChecker() = default;
  /// The first difference between the episode and the effects that the rules prescribe. After a
  /// difference, later episodes are not comparable any more.
  virtual std::optional<Finding> check(const SchedulerEpisode& episode) = 0;
  /// The same for an episode that has not ended; the oracle's state does not change.
  virtual std::optional<Finding> check_so_far(const SchedulerEpisode& episode) const = 0;
};

/// The interface of a server's scheduler, a state machine: step(event) → effects. It asks a subject
/// one operation at a time and learns of the reply as its next event; it holds no clock, no subject
/// and no file, so the same events give the same effects.
class ServerScheduler {
 public:
  virtual ~ServerScheduler() = default;

  /// A misuse by the caller (a reply without a question, a step inside a step) is a broken
  /// contract. The effects, and the operation in them, stay valid until the next call.
  virtual const SchedulerEffects& step(const SchedulerEvent& event) = 0;

  virtual bool has_work() const = 0;
  /// With overlap: the last step's results must come before the next one is decided.
  virtual bool waits_for_results() const = 0;
  /// A forward was launched whose results have not come.
  virtual bool has_results_out() const = 0;
  /// A forward's results are due: forward_done is the next event.
  virtual bool awaits_results() const = 0;
  /// Requests that wait or run.
  virtual std::size_t load() const = 0;
  virtual bool ended(RequestNumber request) const = 0;
  /// Of a request that has ended, when no result of it is out: the number may arrive again.
  virtual void recycle(RequestNumber request) = 0;

  /// All of the above, for the scheduler's oracle to compare.
  SchedulerStatus status(RequestNumber request) const {
    return {has_work(), waits_for_results(), has_results_out(), awaits_results(),
            load(),     ended(request)};
  }
};

struct PolicyEntry;

/// A scheduler, by the first word of `config scheduler=` (cache_sim/server/).
struct SchedulerEntry {
  std::string_view name;
  std::string_view summary;
  /// Whether the configuration, `scheduler=` with its options among it, is one that the scheduler
  /// can serve the policy with. The error is a sentence that names the field.
  Result<void> (*check)(const Config& config, const PolicyEntry& policy);
  std::unique_ptr<ServerScheduler> (*make)(const Config& config);
  bool takes_transfers = true;  ///< knows what `external=` of a request says
  /// Goes on with what an answer `n=` leaves of a row.
  bool takes_cuts = false;
  /// Takes note of copies that have landed with a step's results, not as the next step begins.
  bool settles_with_results = false;
};

/// The oracle of a scheduler, by the scheduler's name (reference/caches/).
struct ScheduleCheckerEntry {
  std::string_view name;
  std::unique_ptr<ScheduleChecker> (*make)(const Config& config);
};

/// The scheduler if `config scheduler=` is empty.
inline constexpr std::string_view kPlainScheduler = "plain";
/// The name of the configuration's scheduler.
std::string_view scheduler_name(const Config& config);

}  // namespace lockstep
