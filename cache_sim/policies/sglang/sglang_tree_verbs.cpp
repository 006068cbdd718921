// The tree verbs of SGLang's radix caches: a trace asks the tree itself, without a request.
#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/policies/sglang/sglang_policy.hpp"

namespace lockstep::cache_sim {

HeldSlot* SglangPolicy::find_slot(Name name) {
  const auto found = std::ranges::find(held_slots_, name, &HeldSlot::name);
  return found == held_slots_.end() ? nullptr : &*found;
}

Result<Reply> SglangPolicy::match(const Operation& operation) {
  const std::int64_t limit =
      operation.limit == Operation::kAbsent ? operation.tokens.size() : operation.limit;
  const auto size =
      static_cast<std::uint32_t>(std::min<std::int64_t>(limit, operation.tokens.size()));
  const RadixTree::Match found = tree_.match(operation.tokens, size, operation.salt);
  Reply reply;
  reply.set(ReplyField::kv, found.full);
  if (has_states_) {
    std::int64_t length = found.prefix;
    const StateSlot state = tree_.node(found.end).state;
    if (state.exists() && !(host_ && host_->is_awaited(state)))
      length = layers_.state_lengths(state, length).recurrent;
    reply.set(ReplyField::state, length).set(ReplyField::branch, found.branch);
    if (host_)
      reply.set(ReplyField::host, found.on_host.exists() ? found.host_prefix - found.prefix : 0);
  } else if (windows_) {
    reply.set(ReplyField::cached, found.prefix).set(ReplyField::branch, found.branch);
  }
  return reply;
}

Result<Reply> SglangPolicy::insert(const Operation& operation) {
  HeldSlot* const held = find_slot(operation.slot);
  if (has_states_ && held == nullptr)
    return operation.slot.exists() ? unknown(operation, "held slot", operation.slot)
                                   : fail("insert: a policy with states needs the field slot");
  const std::uint32_t size = whole_pages(operation.tokens.size());
  const std::int64_t owned = std::max<std::int64_t>(operation.prev, 0);
  if (owned > tree_.stored(operation.tokens, operation.salt))
    return fail(fmt::format("insert: prev={} is more than the tree holds of these tokens", owned));
  if (size == 0) return Reply{}.set(ReplyField::exist, 1).set(ReplyField::freed_kv, 0);
  RadixTree::Evicted unreported;
  const auto first = static_cast<std::uint32_t>(owned);
  if (!make_room_for_kv(size - owned, unreported)) return Reply::refusal(Refusal::no_kv);
  // The prefix of `prev` tokens is not locked, so making room may have evicted it.
  if (owned > tree_.stored(operation.tokens, operation.salt)) return Reply::refusal(Refusal::no_kv);
  KvRuns row;
  if (size != first) {
    row.push_back(kv_.allocate(size - first));
    layers_.receive_kv(row.front().slots(), operation.tokens, first);
  }
  RequestWindow window{.begin = static_cast<std::uint32_t>(page_ceiling(first))};
  if (windows_ && size > window.begin) {
    window.slots.push_back(windows_->pool.allocate(size - window.begin));
    layers_.receive_kv(window.slots.front().slots(), operation.tokens, window.begin);
  }
  const RadixTree::Inserted done = tree_.insert(operation.tokens, size, operation.salt, row, first,
                                                has_states_ ? held->slot : StateSlot::none(), first,
                                                RadixTree::kRoot, 0, &window);
  if (has_states_ && !done.exist)
    held_slots_.erase(held_slots_.begin() + (held - held_slots_.data()));
  return Reply{}.set(ReplyField::exist, done.exist).set(ReplyField::freed_kv, done.duplicates);
}

Result<Reply> SglangPolicy::lock(const Operation& operation) {
  for (const HeldLock& held : held_locks_)
    if (held.name == operation.as)
      return fail(fmt::format("lock: `{}` is held already", operation.as.text()));
  const NodeIndex node = tree_.find(operation.tokens, operation.salt);
  if (!node.exists() || node == RadixTree::kRoot)
    return fail("lock: no node of the tree ends at these tokens");
  tree_.lock(node);
  held_locks_.push_back({operation.as, node, tree_.lock_window(node)});
  return Reply{};
}

Result<Reply> SglangPolicy::unlock(const Operation& operation) {
  const auto held = std::ranges::find_if(
      held_locks_, [&](const HeldLock& lock) { return lock.name == operation.lock; });
  if (held == held_locks_.end()) return unknown(operation, "lock", operation.lock);
  tree_.unlock(held->node);
  tree_.unlock_window(held->node, held->window_begin);
  held_locks_.erase(held);
  return Reply{};
}

/// alloc: a slot with the state of the empty prefix; fork: a copy of another held slot.
Result<Reply> SglangPolicy::hold_slot(const Operation& operation) {
  if (!has_states_) return fail(fmt::format("{}: radix has no states", to_string(operation.verb)));
  if (find_slot(operation.as) != nullptr)
    return fail(
        fmt::format("{}: `{}` is held already", to_string(operation.verb), operation.as.text()));
  if (operation.verb == Verb::fork && find_slot(operation.slot) == nullptr)
    return unknown(operation, "held slot", operation.slot);
  RadixTree::Evicted unreported;
  if (!make_room_for_states(1, unreported)) return Reply::refusal(Refusal::no_state_slot);
  const StateSlot slot = states_.allocate();
  HeldSlot fresh{operation.as, slot, {}};
  if (operation.verb == Verb::fork) {
    const HeldSlot& source = *find_slot(operation.slot);
    layers_.copy_state(source.slot, slot);
    fresh.tokens = source.tokens;
  } else if (rules_.zeroes_new_states) {
    layers_.zero_state(slot);
  }
  held_slots_.push_back(fresh);
  return Reply{}.set(ReplyField::slot, slot.value);
}

Result<Reply> SglangPolicy::advance_slot(const Operation& operation) {
  HeldSlot* const held = find_slot(operation.slot);
  if (held == nullptr) return unknown(operation, "held slot", operation.slot);
  const std::uint32_t begin = held->tokens.size();
  held->tokens = held->tokens.followed_by(operation.tokens);
  layers_.advance_state(held->slot, held->tokens, begin, held->tokens.size());
  return Reply{}.set(ReplyField::length, held->tokens.size());
}

Result<Reply> SglangPolicy::copy(const Operation& operation) {
  HeldSlot* const from = find_slot(operation.from);
  HeldSlot* const to = find_slot(operation.to);
  if (from == nullptr || to == nullptr)
    return unknown(operation, "held slot", from == nullptr ? operation.from : operation.to);
  layers_.copy_state(from->slot, to->slot);
  to->tokens = from->tokens;
  return Reply{};
}

Result<Reply> SglangPolicy::free(const Operation& operation) {
  HeldSlot* const held = find_slot(operation.slot);
  if (held == nullptr) return unknown(operation, "held slot", operation.slot);
  states_.release(held->slot);
  held_slots_.erase(held_slots_.begin() + (held - held_slots_.data()));
  return Reply{};
}

}  // namespace lockstep::cache_sim
