// Plays operations in a place where they were not written: cut out of another trace, or after a
// line that was removed. Each is adapted to what its request and its slot have now, or left out
// where it has become meaningless. The search and the shrinker play through it; what was played is
// a trace of its own, which a replay plays as it stands.
#pragma once

#include <memory>

#include "cache_sim/check/session.hpp"
#include "cache_sim/search/legality_model.hpp"

namespace lockstep::cache_sim {

/// Starts a run and plays it; once more from the beginning where a child said only after others had
/// done an operation that it does not support it.
template <class Play>
Result<std::unique_ptr<ReplaySession>> played_run(const RunOptions& options, Play play) {
  for (;;) {
    Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
    if (!run) return run;
    play(**run);
    if (!std::holds_alternative<MustRestart>((*run)->state())) return run;
  }
}

/// What those who play operations to such a run know of what its subjects take.
LegalityModel model_for(const RunOptions& options);

class OperationPlayer {
 public:
  /// `run` must outlive the player and leaves out what is illegal (RunOptions::skip_illegal).
  explicit OperationPlayer(ReplaySession& run);

  /// The first subject's reply; null where the step was left out, because it is bad input or
  /// because a child does not support it, and where the run has stopped.
  const Reply* play(Step step);
  /// What was played, up to and with what stopped the run.
  Steps& played() { return played_; }
  const LegalityModel& model() const { return model_; }

 private:
  ReplaySession& run_;
  bool all_are_children_;
  LegalityModel model_;
  Steps played_;
};

}  // namespace lockstep::cache_sim
