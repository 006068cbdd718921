// The interface of a server's scheduler, a state machine: step(event) → effects. It
// asks a subject one operation at a time and learns of the reply as its next event; it holds no
// clock, no subject and no file, so the same events give the same effects.
#pragma once

#include <cstddef>
#include <memory>

#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

class ServerScheduler {
 public:
  virtual ~ServerScheduler() = default;

  /// Errors of the caller (a reply that nobody waits for, a step inside a step) are broken
  /// contracts. The effects, and the operation in them, are there until the next call.
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

  /// All of the above, for the scheduler's oracle to compare.
  SchedulerStatus status(RequestNumber request) const {
    return {has_work(), waits_for_results(), has_results_out(), awaits_results(),
            load(),     ended(request)};
  }
};

/// The scheduler that the options ask for.
std::unique_ptr<ServerScheduler> make_scheduler(const SchedulerOptions& options);

}  // namespace lockstep::cache_sim
