// Plays operations that were cut out of one trace and put into another, or that follow a line which
// is gone: each is adapted to what its request and its slot have now, and what makes no sense any
// more is left out. The search and the shrinker play through it; what was played is a trace of its
// own, which a replay plays as it stands.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "cache_sim/check/run.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {

/// A statement and what it meant when it was last played, so that it can mean the same again.
struct Step {
  static constexpr std::int64_t kLiteral = -1;

  Statement statement;
  /// What it left undone: tokens not computed behind an extend, computed tokens behind a
  /// checkpoint's length; kLiteral: its number is the number.
  std::int64_t rest = kLiteral;
  /// insert: its tokens were those that its slot stood for. One that says otherwise lies about a
  /// state by itself, which is nobody's defect.
  bool of_slot = false;
  /// It is bad input by intent, so nothing makes it fit.
  bool stands = false;
};
using Steps = std::vector<Step>;

/// Statements to play as they stand.
Steps literal_steps(const std::vector<Statement>& statements);

/// What the requests, slots and matches of a trace have, so that operations can follow them.
class Ledger {
 public:
  Ledger(std::int64_t page, bool locks_states_alone)
      : page_(page), locks_states_alone_(locks_states_alone) {}

  /// Fits the step's operation to what is there, and notes what it means. False where it makes no
  /// sense.
  bool adapt(Step& step) const;
  /// Takes note of what the operation, which was answered so, did.
  void follow(const Operation& operation, const Reply& reply);

 private:
  struct Request {
    std::int64_t known = 0;
    std::int64_t computed = 0;
  };
  bool contradicts_itself(const Operation& operation) const;
  bool adapt_insert(Operation& operation, bool& of_slot) const;
  void adapt_extend(Operation& operation, std::int64_t& rest) const;
  void adapt_checkpoint(Operation& operation, std::int64_t& rest) const;
  void follow_request(const Operation& operation, const Reply& reply);
  void follow_slot(const Operation& operation, const Reply& reply);

  std::int64_t page_;
  bool locks_states_alone_;
  std::map<std::uint32_t, Request> requests_;  // by Name::index()
  std::map<std::uint32_t, Tokens> slots_;
  std::optional<Operation> shown_;  // the last operation, where it showed a node with a state
  Name bare_lock_;                  // of what may be a tombstone, where that must not last
};

class OperationPlayer {
 public:
  /// `run` must outlive the player and leaves out what is illegal (RunOptions::skip_illegal).
  explicit OperationPlayer(ReplaySession& run);

  /// The first subject's reply; null where the step was left out or the run has stopped.
  const Reply* play(Step step);
  /// What was played, up to and with what stopped the run.
  Steps& played() { return played_; }

 private:
  ReplaySession& run_;
  Ledger ledger_;
  Steps played_;
};

}  // namespace lockstep::cache_sim
