// Derives which states an operation has used (reference/caches/sglang.md, 1.2 and 1.4). The auditor
// compares the order of the policy's list of states with it.
#include <algorithm>

#include "cache_sim/policies/sglang/audit/radix_auditor.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {

std::uint64_t RadixAuditor::digest_key(std::uint64_t digest, std::uint32_t size, Name salt) {
  return mix64(digest ^ mix64(size ^ std::uint64_t{salt.index()} << 32));
}

/// The node that ends after the first `size` tokens; none where there is none.
NodeIndex RadixAuditor::node_at(const Tokens& tokens, std::uint32_t size, Name salt) const {
  if (size == 0 || size > tokens.size()) return NodeIndex::none();
  const auto found = node_by_digest_.find(digest_key(tokens.digest(size), size, salt));
  if (found == node_by_digest_.end() || !nodes_[found->second.value].exists())
    return NodeIndex::none();
  return found->second;
}

void RadixAuditor::use(const Tokens& tokens, std::uint32_t size, Name salt) {
  const NodeIndex node = node_at(tokens, size, salt);
  if (!node.exists()) return;
  touch(node);
  record(node).last_use = ++uses_;
}

/// Older rules: the states above that node too, the deepest last.
void RadixAuditor::use_path(const Tokens& tokens, std::uint32_t size, Name salt) {
  std::vector<std::uint32_t> sizes;
  for (NodeIndex at = node_at(tokens, size, salt); at.exists() && at != kRoot;
       at = record(at).parent)
    sizes.push_back(record(at).label.size);
  for (; !sizes.empty(); sizes.pop_back()) use(tokens, sizes.back(), salt);
}

/// Older rules: a split makes its lower half new.
void RadixAuditor::use_split() {
  for (const NodeIndex node : cut_) record(node).last_use = ++uses_;
}

void RadixAuditor::use_by_match(const Tokens& tokens, std::uint32_t size, Name salt) {
  if (rules_.insert_renews_path) use_split();
  if (rules_.match_renews_path) use_path(tokens, size, salt);
  use(tokens, size, salt);
}

void RadixAuditor::use_by_insert(const Tokens& tokens, std::uint32_t size, Name salt,
                                 bool existed) {
  if (size == 0) return;
  if (rules_.insert_renews_path) {
    use_path(tokens, size, salt);
    use_split();
  }
  if (rules_.insert_renews_end || !existed) use(tokens, size, salt);
}

/// Tokens of the key that a checkpoint or a finish has inserted, 0 where it inserted nothing.
std::uint32_t RadixAuditor::stored_size(const Operation& operation, const Reply& reply,
                                        const RequestRecord& request) const {
  const auto length = static_cast<std::uint32_t>(reply.get(ReplyField::length));
  if (policy_.tracking_slots() != 0) return length > owned_before_ ? length : 0;
  const bool whole =
      operation.verb == Verb::checkpoint
          ? (operation.up_to == Operation::kAbsent || operation.up_to == request.computed) &&
                request.written == request.computed
          : (!policy_.strips_thinking() || request.computed <= request.prompt_size) &&
                (operation.up_to == Operation::kAbsent || operation.up_to >= request.computed);
  return whole ? request.written : 0;
}

/// With a storage, a request is matched when it arrives, and each time that it asks, unless it is
/// refused for want of a row or waits for its prefetch.
void RadixAuditor::note_waiting(const Operation& operation, const Reply& reply) {
  const auto now = policy_.waiting().find(operation.id.index());
  const bool waits = now != policy_.waiting().end();
  const auto known = asked_.find(operation.id.index());
  const bool was_known = known != asked_.end();
  const Asked before = was_known ? known->second : Asked{};
  Operation first = operation;
  first.late = false;
  const bool is_same = was_known && before.admission == first.text();
  if (reply.refused == Refusal::too_long) return;
  if (!is_same) use_by_match(operation.tokens, matched_, operation.salt);
  const std::int64_t repeats = is_same ? before.repeats : 0;
  const bool is_put_off =
      reply.refused == Refusal::same_step && waits && now->second.repeats == repeats;
  if (reply.refused != Refusal::no_row && !is_put_off)
    use_by_match(operation.tokens, std::max(matched_, fetched_), operation.salt);
  if (waits)
    asked_[operation.id.index()] = {first.text(), now->second.repeats};
  else
    asked_.erase(operation.id.index());
}

/// Tokens up to the longest state that the operation has brought to the host for this prompt.
std::uint32_t RadixAuditor::longest_fetched(const Operation& admission) const {
  std::uint32_t longest = 0;
  for (const Touched& touched : touched_) {
    const RadixNode& node = policy_.tree().node(touched.node);
    const std::uint32_t size = node.depth();
    if (node.alive && policy_.host()->nodes[touched.node.value].state.exists() &&
        node.salt == admission.salt && size < admission.tokens.size() &&
        admission.tokens.digest(size) == node.path.digest(size))
      longest = std::max(longest, size);
  }
  return longest;
}

/// Which state an operation used, from the rules and the reply: a match uses the one it ends at, an
/// insert the end of its key.
void RadixAuditor::note_use(const Operation& operation, const Reply& reply) {
  const bool refused = reply.refused != Refusal::none;
  const Name salt = operation.salt;
  const bool existed = reply.get(ReplyField::exist) != 0;
  switch (operation.verb) {
    case Verb::admit:
      if (policy_.host() != nullptr && policy_.host()->storage)
        return note_waiting(operation, reply);
      // A refused admission has matched, unless the refusal was for want of a row. Tokens of a
      // transfer are no part of the match.
      if (reply.refused == Refusal::no_row || reply.refused == Refusal::too_long) return;
      return use_by_match(operation.tokens,
                          policy_.host() != nullptr ? matched_
                          : refused || operation.external > 0
                              ? longest_state(operation.tokens, operation.tokens.size() - 1, salt)
                              : static_cast<std::uint32_t>(reply.get(ReplyField::cached)),
                          salt);
    case Verb::match:
      return use_by_match(
          operation.tokens,
          static_cast<std::uint32_t>(reply.get(ReplyField::state) + reply.get(ReplyField::host)),
          salt);
    case Verb::insert: {
      const std::uint32_t page = policy_.tree().options().page;
      const std::uint32_t size = operation.tokens.size() - operation.tokens.size() % page;
      if (refused) return;
      use_by_insert(operation.tokens, size, salt, existed);
      if (!existed) check_path_cap(node_at(operation.tokens, size, salt));
      return;
    }
    case Verb::checkpoint:
    case Verb::finish: {
      if (refused || (operation.verb == Verb::finish && !operation.insert)) return;
      const auto mine = std::ranges::find(requests_, operation.id, &RequestRecord::id);
      const RequestRecord& request = mine == requests_.end() ? last_gone_ : *mine;
      const std::uint32_t size = stored_size(operation, reply, request);
      use_by_insert(request.known, size, request.salt, existed);
      if (operation.verb == Verb::checkpoint && rules_.matches_after_checkpoint)
        use_path(request.known, size, request.salt);
      return;
    }
    default: return;
  }
}

/// Whether the window before the node's end is there, or all windows of its path are.
bool RadixAuditor::window_ends_at(const NodeRecord& node) const {
  if (policy_.windows() == nullptr) return true;
  const NodeRecord* at = &node;
  for (std::uint32_t covered = 0; covered < policy_.windows()->reach;) {
    if (!at->has_window) return false;
    covered += at->edge_size;
    if (at->parent == kRoot || !at->parent.exists()) return true;
    at = &nodes_[at->parent.value];
  }
  return true;
}

std::uint32_t RadixAuditor::longest_state(const Tokens& tokens, std::uint32_t limit,
                                          Name salt) const {
  std::uint32_t longest = 0;
  for (const NodeRecord& node : nodes_)
    if (node.exists() && (node.state.exists() || node.has_host_state) && node.salt == salt &&
        window_ends_at(node) && node.label.size <= limit && node.label.size > longest &&
        tokens.digest(node.label.size) == node.label.digest)
      longest = node.label.size;
  return longest;
}

}  // namespace lockstep::cache_sim
