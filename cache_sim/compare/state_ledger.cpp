#include "cache_sim/compare/state_ledger.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::cache_sim {
namespace {

constexpr std::uint64_t kStored = 1, kHit = 2, kSeen = kStored | kHit;

/// The place of a prefix, or the empty one where it belongs.
std::uint64_t& place_of(std::vector<std::uint64_t>& prefixes, std::uint64_t digest) {
  std::size_t at = digest / (kSeen + 1);
  for (;; ++at) {
    std::uint64_t& place = prefixes[at % prefixes.size()];
    if (place == 0 || (place | kSeen) == (digest | kSeen)) return place;
  }
}

}  // namespace

void StateLedger::watch(const Operation& operation, const Reply& reply) {
  if (reply.refused != Refusal::none) return;
  const std::uint32_t id = operation.id.index();
  switch (operation.verb) {
    case Verb::admit:
      if (known_.size() <= id) known_.resize(id + 1);
      known_[id] = operation.tokens;
      if (const std::int64_t cached = reply.get(ReplyField::cached); cached > 0)
        see(operation.tokens.digest(static_cast<std::uint32_t>(cached)), kHit);
      return;
    case Verb::extend:
    case Verb::accept: known_[id] = known_[id].followed_by(operation.tokens); return;
    case Verb::checkpoint:
    case Verb::finish: {
      const std::int64_t length = reply.get(ReplyField::length);
      if (0 < length && length <= known_[id].size())
        see(known_[id].digest(static_cast<std::uint32_t>(length)), kStored);
      if (operation.verb == Verb::finish) known_[id] = Tokens();
      return;
    }
    default: return;
  }
}

void StateLedger::see(std::uint64_t prefix, std::uint64_t what) {
  if (4 * count_ >= 3 * prefixes_.size()) {
    std::vector<std::uint64_t> more(std::max<std::size_t>(2 * prefixes_.size(), 1024));
    for (const std::uint64_t known : prefixes_)
      if (known != 0) place_of(more, known) = known;
    prefixes_ = std::move(more);
  }
  std::uint64_t& place = place_of(prefixes_, prefix);
  if (place == 0) ++count_;
  place |= (prefix & ~kSeen) | what;
}

std::int64_t StateLedger::admitted() const {
  const bool tells =
      std::ranges::any_of(prefixes_, [](std::uint64_t prefix) { return (prefix & kStored) != 0; });
  return tells ? static_cast<std::int64_t>(count_) : 0;
}

std::int64_t StateLedger::never_hit() const {
  return std::ranges::count_if(prefixes_,
                               [](std::uint64_t prefix) { return (prefix & kSeen) == kStored; });
}

// Walks the nodes backwards, because parents precede their children.
std::int64_t dead_tokens(const Snapshot& content) {
  std::vector<bool> alive(content.nodes.size());
  std::int64_t dead = 0;
  for (std::size_t i = content.nodes.size(); i-- > 0;) {
    const SnapshotNode& node = content.nodes[i];
    const auto parent = static_cast<std::size_t>(node.parent);
    alive[i] = alive[i] || node.has_state || node.has_host_state;
    if (alive[i] && node.parent >= 0) alive[parent] = true;
    if (!alive[i]) dead += node.depth - (node.parent < 0 ? 0 : content.nodes[parent].depth);
  }
  return dead;
}

}  // namespace lockstep::cache_sim
