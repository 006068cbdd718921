#include "cache_sim/compare/state_ledger.hpp"

#include <algorithm>

namespace lockstep::cache_sim {

void StateLedger::watch(const Operation& operation, const Reply& reply) {
  if (reply.refused != Refusal::none) return;
  const std::uint32_t id = operation.id.index();
  switch (operation.verb) {
    case Verb::admit:
      if (known_.size() <= id) known_.resize(id + 1);
      known_[id] = operation.tokens;
      if (const std::int64_t cached = reply.get(ReplyField::cached); cached > 0)
        hit_.insert(operation.tokens.digest(static_cast<std::uint32_t>(cached)));
      return;
    case Verb::extend:
    case Verb::accept: known_[id] = known_[id].followed_by(operation.tokens); return;
    case Verb::checkpoint:
    case Verb::finish: {
      const std::int64_t length = reply.get(ReplyField::length);
      if (0 < length && length <= known_[id].size())
        stored_.insert(known_[id].digest(static_cast<std::uint32_t>(length)));
      if (operation.verb == Verb::finish) known_[id] = Tokens();
      return;
    }
    default: return;
  }
}

std::int64_t StateLedger::admitted() const {
  return stored_.empty() ? 0 : static_cast<std::int64_t>(hit_.size()) + never_hit();
}

std::int64_t StateLedger::never_hit() const {
  return std::count_if(stored_.begin(), stored_.end(),
                       [&](std::uint64_t state) { return !hit_.contains(state); });
}

// Walks the nodes backwards, because parents precede their children.
std::int64_t dead_tokens(const Snapshot& content) {
  std::vector<bool> alive(content.nodes.size());
  std::int64_t dead = 0;
  for (std::size_t i = content.nodes.size(); i-- > 0;) {
    const SnapshotNode& node = content.nodes[i];
    const auto parent = static_cast<std::size_t>(node.parent);
    alive[i] = alive[i] || node.has_state;
    if (alive[i] && node.parent >= 0) alive[parent] = true;
    if (!alive[i]) dead += node.depth - (node.parent < 0 ? 0 : content.nodes[parent].depth);
  }
  return dead;
}

}  // namespace lockstep::cache_sim
