// Base of the schedulers' oracles. A scheduler is a state machine; its oracle is a procedure that
// asks a question and goes on with the answer. It replays what the scheduler was told, asked and
// answered, and reports the first difference.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "reference/base/finding.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::reference {

class ScheduleListener : public ScheduleChecker {
 public:
  std::optional<Finding> check(const SchedulerEpisode& episode) override;
  std::optional<Finding> check_so_far(const SchedulerEpisode& episode) const override;

 protected:
  /// Follows the rules for the event: calls ask() and note(), sets work_ and idle_.
  virtual void play(const SchedulerEvent& event) = 0;
  virtual SchedulerStatus status(RequestNumber request) = 0;
  virtual std::unique_ptr<ScheduleListener> copy() const = 0;

  /// States that the scheduler has to ask this now; returns the reply that it got.
  const Reply& ask(const Operation& due);
  /// States that the scheduler has to say this now.
  void note(const SchedulerNote& due);

  std::optional<StepWork> work_;  ///< of the forward that the event began
  bool idle_ = false;             ///< there was nothing to do for a step

 private:
  struct Parted {
    Finding finding;
  };
  [[noreturn]] static void report_difference(std::string_view what, std::string due,
                                             std::string came);

  const SchedulerEpisode* episode_ = nullptr;
  bool is_whole_ = true;
  std::size_t next_asked_ = 0;
  std::size_t next_note_ = 0;
};

}  // namespace lockstep::reference
