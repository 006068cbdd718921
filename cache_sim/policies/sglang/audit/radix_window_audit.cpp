// The auditor's checks of sliding windows, from nothing after every operation: rules 1 to 5 of
// reference/caches/sglang.md, 1.15. What the next forward of a request reads is there, and stands
// for the request's own tokens.
#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/policies/sglang/audit/radix_auditor.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {

/// A window's slot is that of token `at` of these tokens, and nobody else's.
void RadixAuditor::own_window(std::uint32_t slot, const Tokens& tokens, std::uint32_t at,
                              const std::string& owner) {
  const KvPool& pool = policy_.windows()->pool;
  const std::uint32_t number = slot - pool.first_slot();
  if (slot < pool.first_slot() || number >= window_seen_.size())
    return report(FindingKind::out_of_range,
                  fmt::format("{} holds slot {} of the windows", owner, slot),
                  fmt::format("slots from {} on", pool.first_slot()), std::to_string(slot));
  if (window_seen_[number]++ != 0)
    report(FindingKind::slot_in_two_places,
           fmt::format("slot {} of the windows belongs to {} and to another", slot, owner),
           "one owner", "two");
  if (labels_ == nullptr) return;
  if (!labels_->kv_in_use(slot))
    report(FindingKind::freed_slot_in_use,
           fmt::format("slot {} of the windows is free and belongs to {}", slot, owner),
           "one or the other", "both");
  else if (!labels_->kv_awaited(slot) &&
           labels_->kv_fingerprint(slot) != tokens.fingerprint(at + 1))
    report(FindingKind::wrong_state_prefix,
           fmt::format("slot {} of the windows, of {}, is not that of token {}", slot, owner, at),
           label_of(tokens, at + 1).text(), "another prefix");
}

void RadixAuditor::check_windows() {
  const RadixTree& tree = policy_.tree();
  const RadixWindows& windows = *policy_.windows();
  window_seen_.assign(static_cast<std::size_t>(windows.pool.slot_count()), 0);
  window_locks_.assign(tree.node_count(), 0);
  for (const RadixRequest& request : policy_.requests())
    if (request.id.exists()) check_window_of(request);
  for (const HeldLock& held : policy_.held_locks())
    count_window_locks(held.node, held.window_begin, "a held lock");
  if (policy_.host() != nullptr)
    for (const auto* const queue : {&policy_.host()->backups, &policy_.host()->loads})
      for (const CopyInFlight& copy : *queue)
        count_window_locks(copy.node, copy.window_begin, "a copy in flight");
  std::int64_t evictable = 0;
  std::int64_t locked = 0;
  std::int64_t listed = 0;
  for (std::uint32_t i = 1; i < tree.node_count(); ++i) {
    if (!tree.node({i}).alive) continue;
    check_window_node({i});
    if (!tree.has_window({i})) continue;
    ++listed;
    (window_locks_[i] != 0 ? locked : evictable) += tree.node({i}).edge_size();
  }
  if (windows.evictable != evictable || windows.locked != locked)
    report(FindingKind::size_accounting,
           fmt::format("the tree counts {} and {} tokens of windows, and there are {} and {}",
                       windows.evictable, windows.locked, evictable, locked),
           fmt::format("{} and {}", evictable, locked),
           fmt::format("{} and {}", windows.evictable, windows.locked));
  for (NodeIndex at = windows.newest; at.exists() && listed >= 0;
       at = windows.nodes[at.value].older)
    --listed;
  if (listed != 0)
    report(FindingKind::lru_order, "the list of windows has other nodes than those with a window",
           "all of them, once", listed > 0 ? "fewer" : "more");
  const auto owned = std::ranges::count_if(window_seen_, [](char owners) { return owners != 0; });
  if (owned + windows.pool.free_count() != windows.pool.slot_count())
    report(FindingKind::leak,
           fmt::format("{} slots of the windows are free and {} are somebody's",
                       windows.pool.free_count(), owned),
           fmt::format("{} in all", windows.pool.slot_count()),
           std::to_string(owned + windows.pool.free_count()));
}

void RadixAuditor::check_window_node(NodeIndex node) {
  const RadixNode& now = actual(node);
  const WindowNode& window = policy_.windows()->nodes[node.value];
  std::uint32_t at = now.start;
  for (const KvRun& run : window.slots)
    for (const std::uint32_t slot : run.slots()) {
      if (at < now.depth()) own_window(slot, now.path, at, name_of(node));
      ++at;
    }
  if (!window.slots.empty() && at != now.depth())
    report(FindingKind::size_accounting,
           fmt::format("{} has {} of the windows", name_of(node), counted(at - now.start, "slot")),
           std::to_string(now.edge_size()), std::to_string(at - now.start));
  if (window.lock != window_locks_[node.value])
    report(FindingKind::lock_imbalance,
           fmt::format("{} counts {}, and {} are held", name_of(node),
                       counted(window.lock, "lock of its window", "locks of its window"),
                       window_locks_[node.value]),
           std::to_string(window_locks_[node.value]), std::to_string(window.lock));
  window_before_.resize(policy_.tree().node_count());
  const bool was_locked = window_before_[node.value] == now.serial;
  if (was_locked && window_locks_[node.value] != 0 && window.slots.empty())
    report(FindingKind::evicted_while_locked,
           fmt::format("the window of {} was evicted although it is locked", name_of(node)),
           "it stays", "it is gone");
  window_before_[node.value] =
      window_locks_[node.value] != 0 && !window.slots.empty() ? now.serial : 0;
}

/// A lock holds its node and those above it, as far as a window reaches.
void RadixAuditor::count_window_locks(NodeIndex end, std::uint32_t begin, const std::string& by) {
  if (!end.exists() || end == kRoot) return;
  const RadixTree& tree = policy_.tree();
  if (begin != 0 && tree.node(end).depth() - begin < policy_.windows()->reach)
    report(FindingKind::lock_imbalance,
           fmt::format("{} holds {} of the window before {}", by,
                       counted(tree.node(end).depth() - begin, "token"), name_of(end)),
           std::to_string(policy_.windows()->reach),
           std::to_string(tree.node(end).depth() - begin));
  for (NodeIndex at = end; at.exists() && at != kRoot && tree.node(at).start >= begin;
       at = tree.node(at).parent)
    ++window_locks_[at.value];
}

/// The request's own slots, its lock, and what its next forward reads.
void RadixAuditor::check_window_of(const RadixRequest& request) {
  const RequestWindow& window = request.window;
  const std::string name = fmt::format("request `{}`", request.id.text());
  if (!window.is_released) count_window_locks(request.locked, window.lock_begin, name);
  const std::uint32_t live = std::max({window.begin, window.evicted, request.owned});
  std::uint32_t at = window.begin;
  for (const KvRun& run : window.slots)
    for (const std::uint32_t slot : run.slots()) {
      if (at >= live && at < request.computed) {
        own_window(slot, request.known, at, name);
      } else if (at >= live) {  // not written yet
        ++window_seen_[slot - policy_.windows()->pool.first_slot()];
      }
      ++at;
    }
  const std::uint32_t first =
      request.computed - std::min(request.computed, policy_.windows()->reach);
  std::string gap;
  const std::uint32_t own = std::max(first, request.owned);
  if (own < std::min(live, request.computed))
    gap = fmt::format("its own token {}, which was given back", own);
  const RadixTree& tree = policy_.tree();
  for (NodeIndex node = request.locked; node.exists() && node != kRoot;
       node = tree.node(node).parent)
    if (tree.node(node).depth() > first && !tree.has_window(node))
      gap = fmt::format("token {} of {}", std::max(first, tree.node(node).start), name_of(node));
  if (!gap.empty())
    report(FindingKind::freed_slot_in_use,
           fmt::format("the next forward of {} reads the window from token {} on, and has no KV "
                       "of {}",
                       name, first, gap),
           "the KV of the whole window", "slots that are somebody else's");
}

}  // namespace lockstep::cache_sim
