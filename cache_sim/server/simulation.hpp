// Plays a trace of requests, statement by statement, or a workload, with the schedulers and their
// virtual clock.
//
// Data-parallel ranks (config ranks=N) each have a scheduler and subjects of their own. They step
// together, because they share layers: a step takes as long as its slowest rank, and a rank without
// work takes part in it with no rows. A request goes to the rank that its line names. Otherwise
// `routing` chooses: `load`, the default, takes the rank with the fewest requests; `round` takes
// them in turn; `prefix` takes the rank that was sent the longest prefix of the prompt before;
// `balanced` does so where that is at least 0.3 of the prompt, unless one rank has more than 64
// requests and 1.5 times more than another. Ties go to the rank with fewer requests, then to the
// first one.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <queue>
#include <unordered_map>
#include <vector>

#include "cache_sim/base/prefix_trie.hpp"
#include "cache_sim/check/session.hpp"
#include "cache_sim/model/step_cost.hpp"
#include "cache_sim/trace/trace.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

class Simulation {
 public:
  /// `run` must outlive the simulation. Without a cost model, a step takes step_time of the config.
  explicit Simulation(ReplaySession& run, std::unique_ptr<StepCost> cost = nullptr);

  /// Plays all statements of the trace, or stops where the run stops. The trace has requests, and
  /// must outlive the simulation.
  void play(const Trace& trace);
  /// Plays all requests of the stream, or stops where the run stops. Requests that have ended are
  /// not held in memory. The error is the stream's.
  Result<void> play(RequestStream& requests);

 private:
  /// An event with a time. Of events at the same time, the one that was scheduled first comes
  /// first.
  struct Due {
    Nanoseconds time;
    std::uint64_t sequence;
    SchedulerEvent event;
    bool operator>(const Due& other) const {
      return time != other.time ? time > other.time : sequence > other.sequence;
    }
  };

  Reply perform(const Statement& statement);
  RequestNumber next_number() const;
  SchedulerEvent arrival_of(const RequestSpec& spec);
  void schedule(Nanoseconds at, const SchedulerEvent& event);
  void pull(RequestStream& requests);
  void deliver_arrivals();
  void forget(RequestNumber request);
  std::optional<Nanoseconds> next_moment() const;
  void close_session(Name session);
  Reply run_until(const RunStatement& limits);
  void check_the_end();
  void deliver_due();
  bool one_step();
  bool settle_copies();
  bool launch();
  void take_results(bool (ServerScheduler::*due)() const);
  /// A rank: its scheduler, its step, and the prompts that were sent to it.
  struct Rank {
    std::unique_ptr<ServerScheduler> scheduler;
    std::unique_ptr<ScheduleChecker> oracle{};  // null unless everything is checked
    SchedulerEpisode episode{};
    std::optional<StepWork> forward{};  // the step that is being decided
    std::vector<Name> rows{};           // its rows
    std::int64_t padded = 0;  // the rows of its graph; Operation::kAbsent: it runs as no graph
    PrefixTrie sent{};
  };

  struct Gone {
    std::int64_t step;
    RequestNumber request;
  };

  std::size_t route(const RequestSpec& spec);
  void deliver(const SchedulerEvent& event);
  void feed(std::size_t rank, SchedulerEvent event);
  const SchedulerEffects* effects_of(Rank& server, const SchedulerEvent& event);
  bool was_computed_whole(const Operation& operation, const Reply& reply);
  void check_schedule(Rank& server, bool is_whole);
  Reply apply_to_all(const Operation& operation);
  bool any_rank(bool (ServerScheduler::*is)() const) const;
  void note(const SchedulerNote& note);
  void add_span(std::string_view name, Name request, Nanoseconds begin, Nanoseconds end);
  Reply expectation(Name id) const;

  ReplaySession& run_;
  std::vector<Rank> ranks_;
  std::size_t routed_ = 0;  // requests, in turn
  std::unique_ptr<StepCost> cost_;
  bool keeps_spans_;  // the bars of the timeline are asked for
  bool has_host_tier_;
  bool settles_with_results_ = false;
  bool takes_cuts_ = false;
  Nanoseconds now_ = 0;
  std::uint64_t sequence_ = 0;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
  std::vector<const RequestSpec*> specs_;  // by request number; null where the request has ended
  // the last statement was left out, because a child does not support it
  bool was_left_out_ = false;
  RequestStream* stream_ = nullptr;
  std::optional<RequestSpec> ahead_;         // the next request of the stream
  std::vector<RequestNumber> free_numbers_;  // of requests that were forgotten
  // the stream's requests that have not ended
  std::unordered_map<RequestNumber, RequestSpec> streamed_;
  std::deque<Gone> gone_;  // of these, requests that ended lately
  Result<void> stream_state_;
  std::vector<RequestNumber> number_of_;   // by Name::index()
  std::vector<std::size_t> rank_of_;       // by request number; kUnrouted until it arrives
  std::vector<std::size_t> span_of_;       // by request number; 1 + the index of its open bar
  std::vector<Nanoseconds> queued_since_;  // by request number; its arrival or its last retraction
  // requests whose clients leave while the next forward is under way
  std::vector<RequestNumber> leaving_;
  int line_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t ended_ = 0;
  std::int64_t computed_ = 0;        // tokens that all forwards computed
  std::deque<Nanoseconds> flights_;  // end times of forwards whose results are out
  Nanoseconds device_free_ = 0;      // the end of the last forward
};

/// Plays a trace of operations or of requests.
void play_trace(ReplaySession& run, const Trace& trace, std::unique_ptr<StepCost> cost = nullptr);

}  // namespace lockstep::cache_sim
