// Counts how many states a hybrid policy stored, and how many of them a request ever used, from its
// operations and replies, without looking inside the policy.
#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "reference/protocol/operation.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// Remembers which prefixes had a state, and which of these states a request resumed from.
/// Operations and replies are its only source: a checkpoint or a finish leaves a state of the
/// length that it answers, and an admission with cached tokens uses a state, which must have been
/// stored even where no reply said so. Nothing is counted of a policy whose replies never tell
/// which states it stores.
class StateLedger {
 public:
  void watch(const Operation& operation, const Reply& reply);
  std::int64_t admitted() const;
  std::int64_t never_hit() const;

 private:
  std::vector<Tokens> known_;  // by Name::index()
  std::unordered_set<std::uint64_t> stored_, hit_;
};

/// Tokens of KV in nodes without a state in their subtree: no request can reuse them.
std::int64_t dead_tokens(const Snapshot& content);

}  // namespace lockstep::cache_sim
