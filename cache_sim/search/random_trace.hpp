// Random traces, from the swarm that was drawn first. Each operation is legal input; which one it
// is depends on the draw and on what was answered before.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cache_sim/search/swarm.hpp"
#include "cache_sim/trace/trace.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// Single operations: requests in any order of their verbs, and tree verbs between them, over few
/// tokens, so that prefixes are shared, split and evicted.
class RandomTrace {
 public:
  RandomTrace(const Swarm& swarm, const PolicyEntry& policy, Draw& draw)
      : swarm_(swarm),
        draw_(draw),
        counts_locks_on_tombstones_(policy.counts_locks_on_tombstones),
        has_states_(policy.has_states) {}

  Operation next();
  /// Whether it depends on what the cache holds if that one is bad input.
  bool may_be_bad() const { return may_be_bad_; }
  /// Sometimes, an operation that is bad input whatever was answered before.
  std::optional<Operation> bad_input();
  /// What was answered to the last operation of next().
  void answered(const Reply& reply);
  /// What ends everything that is held or runs, one operation a call; false where nothing is left.
  bool next_of_the_end(Operation& operation);

 private:
  struct Request {
    Name id;
    Name salt;
    Tokens known;
    std::int64_t computed = 0;
    Tokens drafts;      // of a verification that waits for its accept
    int in_flight = 0;  // extends whose results are out
  };
  struct Slot {
    Name name;
    Tokens tokens;
  };

  Tokens some_tokens();
  Tokens fresh_tokens(std::int64_t size);
  Name some_salt();
  Name fresh_name(const char* prefix);
  Operation of_request();
  Operation of_tree();
  Operation admission();
  Operation verdict(const Request& request);
  Operation forward(const Request& request);
  Operation use_of_slot(std::size_t slot);
  void overstate_prev(Operation& insert);
  Operation bad_forward(const Request& request);
  Operation bad_result(const Request& request);
  Operation bad_admission();
  Operation bad_of_tree();
  Operation of_the_refused();

  const Swarm& swarm_;
  Draw& draw_;
  bool counts_locks_on_tombstones_;
  bool has_states_;
  int names_ = 0;
  Operation last_;
  std::size_t place_ = 0;  // the request or slot that the last operation is about
  std::vector<Request> requests_;
  std::vector<Slot> slots_;
  std::vector<Name> locks_;
  std::vector<Name> refused_;  // requests that were not admitted
  std::vector<Tokens> seen_;
  Operation ending_;  // a node that the last reply showed: tokens and salt
  bool node_is_there_ = false;
  bool may_be_bad_ = false;
  bool may_lock_ = false;  // it has a state, or tombstones can be locked for long as well
  Name bare_lock_;         // of a tombstone, to be unlocked at once
};

/// Requests to the scheduler, with aborts, retractions and partial runs between them, a `run` to
/// the end, a flush and a check.
std::vector<Statement> random_requests(const Swarm& swarm, Draw& draw);

}  // namespace lockstep::cache_sim
