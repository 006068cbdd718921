// Plays operations that were written for another state: pieces of another trace, or lines after a
// removed line. Each operation is adapted to the state of its request and its slot, or left out if
// it makes no sense any more. The search and the shrinker play through it. The played operations
// form a trace that a replay plays unchanged.
#pragma once

#include <memory>

#include "cache_sim/check/session.hpp"
#include "cache_sim/search/legality_model.hpp"

namespace lockstep::cache_sim {

/// Starts a run and plays it. If a child calls an operation unsupported after other subjects have
/// done it, the run is started again without such operations.
template <class Play>
Result<std::unique_ptr<ReplaySession>> played_run(const RunOptions& options, Play play) {
  for (;;) {
    Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
    if (!run) return run;
    play(**run);
    if (!std::holds_alternative<MustRestart>((*run)->state())) return run;
  }
}

/// The model of what the subjects of such a run accept.
LegalityModel model_for(const RunOptions& options);

class OperationPlayer {
 public:
  /// `run` must outlive the player, and must leave out bad input (RunOptions::skip_illegal).
  explicit OperationPlayer(ReplaySession& run);

  /// Plays a step. Returns the first subject's reply; null if the step was left out, because it is
  /// bad input or because a child does not support it, and if the run has stopped.
  const Reply* play(Step step);
  /// The steps that were played, up to and including the one that stopped the run.
  Steps& played() { return played_; }
  const LegalityModel& model() const { return model_; }

 private:
  ReplaySession& run_;
  bool all_are_children_;
  LegalityModel model_;
  Steps played_;
};

}  // namespace lockstep::cache_sim
