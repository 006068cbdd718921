// The host tier as requests and traces see it: loads at an admission, and the verbs land, settle
// and evict tier=.
#include <algorithm>
#include <limits>

#include "cache_sim/policies/sglang/sglang_policy.hpp"
#include "reference/base/mark.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kEverything = std::numeric_limits<std::int64_t>::max();

}  // namespace

/// Copies the state now, or, where a load still brings it, behind that load.
void SglangPolicy::copy_matched_state(RadixRequest& request, StateSlot matched) {
  if (host_ && rules_.copies_wait_for_loads && host_->is_awaited(matched))
    request.source = matched;
  else
    layers_.copy_state(matched, request.live);
}

/// The request's slot has the state of a longer prefix than the device serves, because the load of
/// that prefix's window is refused.
void SglangPolicy::copy_again(RadixRequest& request, NodeIndex end) {
  LOCKSTEP_MARK("load.refused_copies_again");
  request.source = StateSlot::none();
  if (end == RadixTree::kRoot)
    layers_.zero_state(request.live);
  else
    copy_matched_state(request, tree_.node(end).state);
}

/// Queues the load of what the match found on the host. Where that is refused, the request gets
/// what the device has for it. Afterwards the match ends where the request begins.
Refusal SglangPolicy::load(RadixRequest& request, RadixTree::Match& match, NodeIndex& locked) {
  const bool copied = request.live.exists();
  switch (tree_.load(match.on_host, request.live)) {
    case RadixTree::Load::no_request_slot: return Refusal::no_state_slot;
    case RadixTree::Load::refused:
      if (request.live.exists()) {
        if (copied && rules_.refused_load_copies_again) copy_again(request, match.end);
        return Refusal::none;
      }
      if (match.end == RadixTree::kRoot || !rules_.refused_load_copies) return Refusal::none;
      return copy_on_write(request, match.end, match.end) ? Refusal::none : Refusal::no_state_slot;
    case RadixTree::Load::queued: break;
  }
  match.end = match.on_host;
  match.prefix = match.host_prefix;
  const std::uint32_t window_begin = tree_.lock_window(match.end);
  tree_.lock(match.end);
  tree_.unlock_window(locked, request.window.lock_begin);
  tree_.unlock(locked);
  request.window.lock_begin = window_begin;
  locked = match.end;
  return Refusal::none;
}

/// The request reads KV of stored prefixes from now on, which any load may still bring.
void SglangPolicy::follow_loads(RadixRequest& request) const {
  if (host_ && !host_->loads.empty()) request.awaits = host_->loads.back().id;
}

/// A forward waits for the loads that were queued before its request was admitted or last stored.
void SglangPolicy::land_awaited(RadixRequest& request) {
  if (rules_.forwards_wait_for_loads) host_->land_loads(request.awaits);
  request.awaits = 0;
  if (!request.source.exists()) return;
  layers_.copy_state(request.source, request.live);
  request.source = StateSlot::none();
}

Result<Reply> SglangPolicy::evict(const Operation& operation) {
  if (storage() != nullptr && names_disk(operation)) {
    storage()->clear();
    return Reply{}.set(ReplyField::kv, 0).set(ReplyField::state, 0);
  }
  const Result<bool> of_host = names_host(operation);
  if (!of_host) return tl::unexpected(of_host.error());
  if (operation.tier.exists() && !host_) return fail("evict: tier= is for a config with host_kv=");
  if (*of_host && operation.room != Operation::kAbsent) return fail("evict: room= is the device's");
  if (operation.room != Operation::kAbsent) return make_room(operation);
  const std::int64_t kv = std::max<std::int64_t>(operation.kv, 0);
  const std::int64_t states = std::max<std::int64_t>(operation.state, 0);
  if (!*of_host) return evict(kv, states);
  const RadixTree::Evicted evicted = tree_.evict_host(kv, states);
  return Reply{}.set(ReplyField::kv, evicted.kv).set(ReplyField::state, evicted.states);
}

/// With a host tier, waits for all copies, and evicts what is on the host too.
Reply SglangPolicy::flush() {
  if (!host_) return evict(kEverything, kEverything, kEverything);
  drain();
  const Reply reply = evict(kEverything, kEverything, windows_ ? kEverything : 0);
  // A leaf of the device stays while the storage is written from below it.
  for (Reply next = reply; storage() != nullptr && next.get(ReplyField::kv) > 0;) {
    drain();
    next = evict(kEverything, kEverything);
  }
  tree_.evict_host(kEverything, kEverything);
  return reply;
}

Result<Reply> SglangPolicy::land(const Operation& operation) {
  if (!host_) return fail("land: a config without host_kv= has no copies");
  if (storage() != nullptr && (names_disk(operation) || operation.verb == Verb::fail))
    return end_storage_copy(operation);
  return names_host(operation).map([&](bool to_host) {
    return Reply{}.set(ReplyField::n, host_->land(to_host ? host_->backups : host_->loads) ? 1 : 0);
  });
}

Result<Reply> SglangPolicy::settle() {
  if (!host_) return fail("settle: a config without host_kv= has no copies");
  return Reply{}.set(ReplyField::n, settle_storage());
}

}  // namespace lockstep::cache_sim
