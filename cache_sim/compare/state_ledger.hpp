// How many states a hybrid policy stored, and how many of them a request ever used: counted from
// its operations and replies, without looking inside.
#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "reference/protocol/operation.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// Which prefixes had a state, and which of them a request resumed from, learnt from operations and
/// replies alone: a checkpoint or a finish leaves a state of the length that it answers, and an
/// admission with cached tokens uses one, which was stored even where no reply said so (Marconi's
/// branches). Of a policy that never tells what it stores (vLLM's blocks) nothing is counted.
class StateLedger {
 public:
  void watch(const Operation& operation, const Reply& reply);
  std::int64_t admitted() const;
  std::int64_t never_hit() const;

 private:
  std::vector<Tokens> known_;  // by Name::index()
  std::unordered_set<std::uint64_t> stored_, hit_;
};

/// Tokens of KV in nodes below which no state lies: no request can reuse them.
std::int64_t dead_tokens(const Snapshot& content);

}  // namespace lockstep::cache_sim
