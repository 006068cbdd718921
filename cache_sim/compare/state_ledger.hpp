// Counts how many states a hybrid policy stored, and how many of them a request ever used, from its
// operations and replies, without looking inside the policy.
#pragma once

#include <cstdint>
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
  void see(std::uint64_t prefix, std::uint64_t what);

  std::vector<Tokens> known_;  // by Name::index()
  // The prefixes by open addressing: a digest without its two lowest bits, which say what was seen
  // of it; 0: none. Of ten million requests these are most of the memory.
  std::vector<std::uint64_t> prefixes_;
  std::size_t count_ = 0;
};

/// Tokens of KV in nodes without a state in their subtree, on either tier: no request can reuse
/// them.
std::int64_t dead_tokens(const Snapshot& content);

}  // namespace lockstep::cache_sim
