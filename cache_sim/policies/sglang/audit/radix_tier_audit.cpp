// The auditor's checks of the host tier, from nothing after every operation: laws L1, L3, L6 and L7
// of reference/caches/sglang.md, 1.13, with what a storage behind it holds there, 1.14. That
// nothing is read before its copy has landed (L2) and that sources stay as they are (L3) is seen by
// the labels themselves; that the storage gives what it was asked for (L5), when it is on the host.
#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/policies/sglang/audit/radix_auditor.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {

/// A copy that is settled has given back its lock on the path of its node, before the same
/// operation could evict there.
void RadixAuditor::release_settled() {
  const HostTier& host = *policy_.host();
  std::erase_if(copies_, [&](const Copy& copy) {
    for (const auto* const queue : {&host.backups, &host.loads})
      for (const CopyInFlight& now : *queue)
        if (now.id == copy.id) return false;
    for (NodeIndex at = copy.node; at.exists() && at != kRoot && record(at).exists();
         at = record(at).parent) {
      account(record(at), -1);
      --record(at).full_locks;
      if (at == copy.node) --record(at).state_locks;
      account(record(at), +1);
    }
    return true;
  });
}

/// A copy that is queued takes a lock.
void RadixAuditor::follow_copies() {
  const HostTier& host = *policy_.host();
  for (const auto* const queue : {&host.backups, &host.loads})
    for (const CopyInFlight& now : *queue) {
      if (std::ranges::any_of(copies_, [&](const Copy& known) { return known.id == now.id; }))
        continue;
      copies_.push_back({now.id, now.node});
      count_locks(now.node, true, +1);
    }
}

void RadixAuditor::check_host() {
  const RadixTree& tree = policy_.tree();
  const HostTier& host = *policy_.host();
  const auto end_of = [](const auto& pool, std::uint32_t first) {
    return static_cast<std::size_t>(first + pool.slot_count());
  };
  std::vector<char> kv_seen(end_of(host.kv, host.kv.first_slot()));
  std::vector<char> states_seen(end_of(host.states, host.states.first_slot()));
  std::vector<char> windows_seen(end_of(host.windows, host.windows.first_slot()));
  std::size_t listed = 0;
  for (std::uint32_t i = 1; i < tree.node_count(); ++i) {
    if (!tree.node({i}).alive) continue;
    check_host_node({i}, kv_seen, states_seen);
    if (policy_.windows() != nullptr) check_host_window({i}, windows_seen);
    listed += host.nodes[i].window_place ? 1 : 0;
  }
  if (listed != host.listed_windows.size())
    report(FindingKind::lru_order, "the list of host windows has nodes that are not in the tree",
           std::to_string(listed), std::to_string(host.listed_windows.size()));
  if (host.storage) own_staged(kv_seen, states_seen);
  const auto conserve = [&](const char* what, const std::vector<char>& seen, const auto& pool) {
    const std::int64_t owned = std::ranges::count(seen, 1);
    if (owned + pool.free_count() != pool.slot_count())
      report(FindingKind::leak,
             fmt::format("{} host {} slots are free and {} are the tree's or a prefetch's",
                         pool.free_count(), what, owned),
             fmt::format("{} in all", pool.slot_count()),
             std::to_string(owned + pool.free_count()));
  };
  conserve("KV", kv_seen, host.kv);
  conserve("state", states_seen, host.states);
  conserve("window", windows_seen, host.windows);
  check_host_locks();
}

void RadixAuditor::check_host_node(NodeIndex node, std::vector<char>& kv_seen,
                                   std::vector<char>& states_seen) {
  const RadixTree& tree = policy_.tree();
  const RadixNode& now = tree.node(node);
  const HostNode& copy = policy_.host()->nodes[node.value];
  const bool is_backed_up = !copy.kv.empty();
  if (!tree.is_on_device(node) && !is_backed_up)
    report(FindingKind::tombstone_rule, fmt::format("{} is on no tier", name_of(node)),
           "its KV on the device or on the host", "neither");
  // Under write_back the host may give up KV that the device has, and what lies below it stays.
  if (now.parent != kRoot &&
      ((tree.is_on_device(node) && !tree.is_on_device(now.parent)) ||
       (is_backed_up && !tree.is_backed_up(now.parent) && !tree.writes_back())))
    report(FindingKind::tombstone_rule,
           fmt::format("{} is on a tier that lacks the node above it", name_of(node)),
           "whole paths on each tier", "a gap");
  const auto own = [&](std::vector<char>& seen, std::uint32_t slot, const char* what) {
    if (slot < seen.size() && seen[slot]++ == 0) return;
    report(FindingKind::slot_in_two_places,
           fmt::format("host {} slot {} of {} is another node's, too", what, slot, name_of(node)),
           "one owner", "two");
  };
  std::uint32_t slots = 0;
  for (const KvRun& run : copy.kv) {
    slots += run.size;
    for (const std::uint32_t slot : run.slots()) own(kv_seen, slot, "KV");
  }
  if (is_backed_up && slots != now.edge_size())
    report(FindingKind::size_accounting,
           fmt::format("{} has {} on the host", name_of(node), counted(slots, "KV slot")),
           std::to_string(now.edge_size()), std::to_string(slots));
  if (copy.state.exists()) own(states_seen, copy.state.value, "state");
  const bool is_alone = copy.state.exists() && !now.state.exists();
  // A state that a prefetch brings to a locked node is listed, and passed over.
  const bool may_be_listed = is_alone && (copy.state_lock == 0 || policy_.host()->storage);
  const bool is_evictable = is_alone && copy.state_lock == 0;
  if (copy.state_use != 0 ? !may_be_listed : is_evictable)
    report(FindingKind::lru_order,
           fmt::format("the host state of {} is {}in the list of host states", name_of(node),
                       copy.state_use != 0 ? "" : "not "),
           "in it while it is on the host alone and not locked",
           copy.state_use != 0 ? "in it" : "not in it");
  if (copy.leaf_use != (tree.is_host_leaf(node) ? now.last_access : 0))
    report(FindingKind::lru_order,
           fmt::format("{} is {}in the list of host leaves", name_of(node),
                       copy.leaf_use == 0        ? "not "
                       : tree.is_host_leaf(node) ? "out of its place "
                                                 : ""),
           "at its access time while it is a leaf of the host", std::to_string(copy.leaf_use));
  const bool is_twice =
      tree.is_on_device(node) && is_backed_up && copy.backup == 0 && copy.load == 0;
  if (tree.writes_back() && is_twice && copy.twice_use == 0)
    report(FindingKind::leak,
           fmt::format("the host's KV of {}, which the device has too, cannot be found to be "
                       "reclaimed",
                       name_of(node)),
           "in the list of KV on both tiers", "not in it");
  check_host_labels(node);
}

/// The window on the host: a slot for each token, each the node's alone, in the list while the host
/// alone has it and nobody locks it.
void RadixAuditor::check_host_window(NodeIndex node, std::vector<char>& seen) {
  const RadixNode& now = policy_.tree().node(node);
  const HostNode& copy = policy_.host()->nodes[node.value];
  std::uint32_t slots = 0;
  for (const KvRun& run : copy.window)
    for (const std::uint32_t slot : run.slots()) {
      ++slots;
      if (slot < seen.size() && seen[slot]++ == 0) continue;
      report(FindingKind::slot_in_two_places,
             fmt::format("slot {} of the windows on the host, of {}, has another owner, too", slot,
                         name_of(node)),
             "one owner", "two");
    }
  if (slots != 0 && slots != now.edge_size())
    report(
        FindingKind::size_accounting,
        fmt::format("{} has {} of the windows on the host", name_of(node), counted(slots, "slot")),
        std::to_string(now.edge_size()), std::to_string(slots));
  const bool is_evictable = slots != 0 && !policy_.tree().has_window(node) && copy.window_lock == 0;
  if (copy.window_place.has_value() != is_evictable)
    report(FindingKind::lru_order,
           fmt::format("the host window of {} is {}in the list of host windows", name_of(node),
                       copy.window_place ? "" : "not "),
           "in it while it is on the host alone and not locked",
           copy.window_place ? "in it" : "not in it");
}

/// L1, for what the host holds: it stands for the node's path.
void RadixAuditor::check_host_labels(NodeIndex node) {
  if (labels_ == nullptr) return;
  const RadixNode& now = actual(node);
  const HostNode& copy = policy_.host()->nodes[node.value];
  bool is_awaited = false;
  fingerprints_.resize(copy.kv.empty() && copy.window.empty() ? 0 : now.edge_size());
  if (!fingerprints_.empty()) now.path.prefix_fingerprints(now.start, now.depth(), fingerprints_);
  for (const KvRuns* const runs : {&copy.kv, &copy.window}) {
    std::size_t at = 0;
    for (const KvRun& run : *runs)
      for (const std::uint32_t slot : run.slots()) {
        if (at++ == fingerprints_.size()) return;
        if (!labels_->kv_exists(slot)) continue;
        if (labels_->kv_awaited(slot)) {
          is_awaited = true;
          continue;
        }
        if (labels_->kv_fingerprint(slot) != fingerprints_[at - 1])
          return report(FindingKind::wrong_state_prefix,
                        fmt::format("host KV slot {} of {} is not that of token {}", slot,
                                    name_of(node), now.start + at - 1),
                        "its own prefix", "another prefix");
      }
  }
  if (labels_->state_exists(copy.state)) {
    const Label due = label_of(now.path, now.depth());
    if (labels_->state_awaited(copy.state))
      is_awaited = true;
    else if (labels_->recurrent(copy.state) != due || labels_->conv(copy.state) != due)
      report(FindingKind::wrong_state_prefix,
             fmt::format("the host state in slot {} of {} stands for {}", copy.state.value,
                         name_of(node), labels_->recurrent(copy.state).text()),
             due.text(), labels_->recurrent(copy.state).text());
  }
  if (is_awaited && copy.backup == 0)
    report(FindingKind::lock_imbalance,
           fmt::format("a backup of {} is in flight, and the node does not wait for it",
                       name_of(node)),
           "a mark until the backup is settled", "none");
  if (!policy_.tree().writes_back() || copy.load != 0) return;
  for (const KvRun& run : now.kv)
    for (const std::uint32_t slot : run.slots())
      if (labels_->kv_exists(slot) && labels_->kv_awaited(slot))
        return report(FindingKind::lock_imbalance,
                      fmt::format("a load of {} is in flight, and the node does not wait for it",
                                  name_of(node)),
                      "a mark until the load is settled", "none");
}

/// L6 for slots of the host that are no node's: those of a prefetch that a request waits for, those
/// that the reader may still write for one that nobody waits for, and those that a settle will
/// free. L8: a prefetch that a request waits for is somewhere on its way.
void RadixAuditor::own_staged(std::vector<char>& kv_seen, std::vector<char>& states_seen) {
  const StorageTier& storage = *policy_.host()->storage;
  const auto own = [&](std::vector<char>& seen, std::uint32_t slot, const char* what) {
    if (slot < seen.size() && seen[slot]++ == 0) return;
    report(FindingKind::slot_in_two_places,
           fmt::format("host {} slot {} of a prefetch has another owner, too", what, slot),
           "one owner", "two");
  };
  const auto own_kv = [&](const KvRuns& runs, std::uint32_t begin) {
    for (const KvRun& run : runs)
      for (const std::uint32_t slot : run.slots()) {
        if (begin == 0) own(kv_seen, slot, "KV");
        begin -= begin != 0 ? 1 : 0;
      }
  };
  for (const KvRuns& runs : storage.released_kv) own_kv(runs, 0);
  for (const StateSlot slot : storage.released_states) own(states_seen, slot.value, "state");
  std::vector<PrefetchRef> known(storage.looked_up.begin(), storage.looked_up.end());
  known.insert(known.end(), storage.to_read.begin(), storage.to_read.end());
  for (const PrefetchNews& news : storage.news)
    if (std::ranges::find(known, news.prefetch) == known.end()) known.push_back(news.prefetch);
  std::vector<PrefetchRef> awaited;
  for (const auto& [name, waiting] : policy_.waiting()) {
    if (waiting.prefetch == nullptr) continue;
    awaited.push_back(waiting.prefetch);
    if (std::ranges::find(known, waiting.prefetch) == known.end())
      report(FindingKind::leak, "a request waits for a prefetch that nobody will end",
             "one that is looked up, read or told of", "none of these");
  }
  for (const PrefetchRef& prefetch : known) {
    const bool is_awaited = std::ranges::find(awaited, prefetch) != awaited.end();
    own_kv(prefetch->kv, is_awaited ? 0 : prefetch->completed);
    if (prefetch->state.exists() && (is_awaited || !prefetch->state_ended))
      own(states_seen, prefetch->state.value, "state");
  }
}

/// L7: host locks are those of loads, of writes to the storage and of prefetches that requests wait
/// for, each from its node down to where it began; marks of copies are those of copies that are not
/// settled.
void RadixAuditor::check_host_locks() {
  const RadixTree& tree = policy_.tree();
  const HostTier& host = *policy_.host();
  std::vector<std::uint32_t> kv(tree.node_count()), states(tree.node_count());
  std::vector<std::uint32_t> windows(tree.node_count());
  const auto count = [&](NodeIndex node, std::uint32_t begin) {
    if (node == kRoot) return;
    ++states[node.value];
    for (NodeIndex at = node; at != kRoot && tree.node(at).start >= begin;
         at = tree.node(at).parent)
      ++kv[at.value];
  };
  for (const CopyInFlight& load : host.loads) {
    count(load.node, load.host_begin);
    if (policy_.windows() == nullptr) continue;
    for (NodeIndex at = load.node; at != kRoot && tree.node(at).start >= load.host_window_begin;
         at = tree.node(at).parent)
      ++windows[at.value];
  }
  if (host.storage)
    for (const StorageWrite& write : host.storage->writes) count(write.node, write.host_begin);
  for (const auto& [name, waiting] : policy_.waiting())
    if (waiting.prefetch) count(waiting.prefetch->anchor, waiting.prefetch->anchor_begin);
  for (std::uint32_t i = 1; i < tree.node_count(); ++i) {
    const HostNode& copy = host.nodes[i];
    if (tree.node({i}).alive && copy.window_lock != windows[i])
      report(FindingKind::lock_imbalance,
             fmt::format("{} counts {} of its window on the host", name_of({i}),
                         counted(copy.window_lock, "lock")),
             std::to_string(windows[i]), std::to_string(copy.window_lock));
    if (tree.node({i}).alive && (copy.kv_lock != kv[i] || copy.state_lock != states[i]))
      report(FindingKind::lock_imbalance,
             fmt::format("{} counts {} and {} host locks", name_of({i}), copy.kv_lock,
                         copy.state_lock),
             fmt::format("{} and {}", kv[i], states[i]),
             fmt::format("{} and {}", copy.kv_lock, copy.state_lock));
    const auto is_settled = [](std::uint64_t id, const std::deque<CopyInFlight>& queue) {
      return id != 0 && std::ranges::none_of(
                            queue, [&](const CopyInFlight& queued) { return queued.id == id; });
    };
    if (is_settled(copy.backup, host.backups) || is_settled(copy.load, host.loads))
      report(FindingKind::lock_imbalance,
             fmt::format("{} waits for a copy that is settled", name_of({i})), "no mark", "one");
  }
}

}  // namespace lockstep::cache_sim
