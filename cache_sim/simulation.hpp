// Plays a trace: its statements one after the other, with the scheduler and its virtual clock where
// the file has requests.
#pragma once

#include <deque>
#include <memory>
#include <queue>
#include <vector>

#include "cache_sim/run.hpp"
#include "cache_sim/scheduler.hpp"
#include "cache_sim/trace.hpp"

namespace lockstep::cache_sim {

class Simulation {
 public:
  /// Both must outlive the simulation.
  Simulation(const Trace& trace, Run& run);

  /// Everything in the file, or until the run stops.
  void play();

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
  void hold_to_answer(const Statement& statement, const Reply& reply);
  void schedule(Nanoseconds at, const SchedulerEvent& event);
  void close_session(Name session);
  Reply run_until(const RunStatement& limits);
  void deliver_due();
  bool one_step();
  void launch(const StepWork& work);
  void take_results();
  void feed(SchedulerEvent event);
  void note(const SchedulerNote& note);
  void add_span(std::string_view name, Name request, Nanoseconds begin, Nanoseconds end);
  Reply expectation(Name id) const;

  const Trace& trace_;
  Run& run_;
  Scheduler scheduler_;
  std::unique_ptr<StepCost> cost_;
  Nanoseconds now_ = 0;
  std::uint64_t sequence_ = 0;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
  std::vector<const RequestSpec*> specs_;  // by request number
  std::vector<RequestNumber> number_of_;   // by Name::index()
  std::vector<std::size_t> span_of_;       // by request number: 1 + its open bar
  std::vector<Nanoseconds> queued_since_;  // by request number: its arrival or last retraction
  int line_ = 0;
  std::int64_t ended_ = 0;
  std::int64_t computed_ = 0;  // tokens of all forwards
  std::optional<StepWork> forward_;
  std::vector<Name> rows_;           // of the forward
  std::deque<Nanoseconds> flights_;  // when the forwards end whose results are still out
  Nanoseconds device_free_ = 0;      // when the last forward ends
};

}  // namespace lockstep::cache_sim
