// Plays a trace of requests: its statements one after the other, with the schedulers and their
// virtual clock. Plays a workload: its requests, as they arrive.
//
// Data-parallel ranks (config ranks=N) each have a scheduler and subjects of their own. They step
// together, because they share layers: a step takes as long as its slowest rank, and a rank without
// work runs it with no rows. A request goes to the rank that its line names, else
// where `routing` sends it: to the rank with the fewest requests (load, the default), or to the one
// that was sent the longest prefix of it before (prefix), and among equals to the first one.
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
  /// `run` must outlive the simulation. Without a cost model a step takes the config's step_time.
  explicit Simulation(ReplaySession& run, std::unique_ptr<StepCost> cost = nullptr);

  /// Everything in the trace, which has requests and must outlive the simulation, or until the run
  /// stops.
  void play(const Trace& trace);
  /// Every request of the stream, or until the run stops. What has ended is not held. The error is
  /// the stream's.
  Result<void> play(RequestStream& requests);

 private:
  /// Something that happens at a moment; ties go to what was said first.
  struct Due {
    Nanoseconds time;
    std::uint64_t sequence;
    SchedulerEvent event;
    bool operator>(const Due& other) const {
      return time != other.time ? time > other.time : sequence > other.sequence;
    }
  };

  Reply perform(const Statement& statement);
  SchedulerEvent arrival_of(const RequestSpec& spec);
  void schedule(Nanoseconds at, const SchedulerEvent& event);
  void pull(RequestStream& requests);
  void deliver_arrivals();
  std::optional<Nanoseconds> next_moment() const;
  void close_session(Name session);
  Reply run_until(const RunStatement& limits);
  void check_the_end();
  void deliver_due();
  bool one_step();
  bool launch();
  void take_results(bool (ServerScheduler::*due)() const);
  /// A rank: its requests, and what was sent there.
  struct Rank {
    std::unique_ptr<ServerScheduler> scheduler;
    std::unique_ptr<ScheduleChecker> oracle{};  // where everything is checked
    SchedulerEpisode episode{};
    std::optional<StepWork> forward{};  // of the step that is being decided
    std::vector<Name> rows{};           // of that forward
    std::int64_t padded = 0;            // rows of its graph; Operation::kAbsent: there is none
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
  void check_schedule(Rank& server, bool is_whole);
  Reply apply_to_all(const Operation& operation);
  bool any_rank(bool (ServerScheduler::*is)() const) const;
  void note(const SchedulerNote& note);
  void add_span(std::string_view name, Name request, Nanoseconds begin, Nanoseconds end);
  Reply expectation(Name id) const;

  ReplaySession& run_;
  std::vector<Rank> ranks_;
  std::unique_ptr<StepCost> cost_;
  bool keeps_spans_;  // where somebody will draw them
  Nanoseconds now_ = 0;
  std::uint64_t sequence_ = 0;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
  std::vector<const RequestSpec*> specs_;  // by request number; null where it has ended
  bool was_left_out_ = false;              // the last statement, because a child cannot do it
  RequestStream* stream_ = nullptr;
  std::optional<RequestSpec> ahead_;                         // the stream's next request
  std::unordered_map<RequestNumber, RequestSpec> streamed_;  // those that have not ended
  std::deque<Gone> gone_;                                    // of these, the latest to end
  Result<void> stream_state_;
  std::vector<RequestNumber> number_of_;   // by Name::index()
  std::vector<std::size_t> rank_of_;       // by request number: kUnrouted until it arrives
  std::vector<std::size_t> span_of_;       // by request number: 1 + its open bar
  std::vector<Nanoseconds> queued_since_;  // by request number: its arrival or last retraction
  std::vector<RequestNumber> leaving_;     // their clients go while the next forward is under way
  int line_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t ended_ = 0;
  std::int64_t computed_ = 0;        // tokens of all forwards
  std::deque<Nanoseconds> flights_;  // when the forwards end whose results are still out
  Nanoseconds device_free_ = 0;      // when the last forward ends
};

/// Plays a trace of either level.
void play_trace(ReplaySession& run, const Trace& trace, std::unique_ptr<StepCost> cost = nullptr);

}  // namespace lockstep::cache_sim
