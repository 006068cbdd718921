// Random traces of operations: requests in any order of their verbs, and tree verbs between them,
// over few tokens, so that prefixes are shared, split and evicted. Each operation is legal input;
// which one it is depends on the seed and on what was answered before.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache_sim/run.hpp"
#include "reference/base/config.hpp"
#include "reference/base/operation.hpp"

namespace lockstep::testing_support {

class RandomTrace {
 public:
  RandomTrace(std::uint64_t seed, std::uint64_t number, const Config& config, bool has_states)
      : seed_(seed), number_(number), config_(config), has_states_(has_states) {}

  Operation next();
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

  std::uint64_t below(std::uint64_t bound);
  Tokens some_tokens();
  Tokens fresh_tokens(std::uint64_t size);
  Name some_salt();
  Name fresh_name(const char* prefix);
  Operation of_request();
  Operation of_tree();
  Operation admission();
  Operation use_of_slot(std::size_t slot);

  std::uint64_t seed_, number_;
  Config config_;
  bool has_states_;
  std::uint64_t index_ = 0;
  int names_ = 0;
  Operation last_;
  std::size_t place_ = 0;  // the request or slot that the last operation is about
  std::vector<Request> requests_;
  std::vector<Slot> slots_;
  std::vector<Name> locks_;
  std::vector<Tokens> seen_;
  Operation ending_;  // a node that the last reply showed: tokens and salt
  bool node_is_there_ = false;
  bool may_lock_ = false;  // it has a state, or tombstones can be locked as well
};

/// What a random trace came to.
struct RandomPlay {
  std::string transcript;  ///< a line per operation, `operation → reply`
  std::string finding;     ///< `kind: text`, or empty
  std::string error;       ///< the generator made an illegal operation
  Reply left;              ///< the check's reply after everything ended and a flush
  std::int64_t refusals = 0, hit_tokens = 0;
};

/// Plays `operations` random operations against the subjects, then ends everything, flushes and
/// checks.
RandomPlay play_random_trace(const cache_sim::RunOptions& options, std::uint64_t seed,
                             std::uint64_t number, int operations);

}  // namespace lockstep::testing_support
