// The part of SGLang's tree that moves nodes between the device and the host.
#include "cache_sim/policies/sglang/host_tier.hpp"

#include <algorithm>
#include <utility>

#include "cache_sim/policies/sglang/radix_tree.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

bool HostTier::land(std::deque<CopyInFlight>& queue) {
  for (CopyInFlight& copy : queue) {
    if (copy.landed) continue;
    layers.land_copy(copy.slots);
    copy.landed = true;
    return true;
  }
  return false;
}

void HostTier::land_loads(std::uint64_t id) {
  for (CopyInFlight& load : loads) {
    if (load.id > id) return;
    if (!load.landed) land(loads);
  }
}

bool HostTier::is_awaited(StateSlot slot) const {
  return std::ranges::any_of(loads, [&](const CopyInFlight& load) {
    return !load.landed && std::ranges::any_of(load.slots.states, [&](const auto& pair) {
      return pair.target == slot;
    });
  });
}

SnapshotHost HostTier::snapshot() const {
  SnapshotHost now{kv.slot_count(), states.slot_count(), to_host, to_device};
  for (const auto* queue : {&backups, &loads})
    for (const CopyInFlight& copy : *queue) {
      if (copy.landed) continue;
      now.in_flight.push_back(
          {copy.id,
           queue == &backups,
           {copy.kv_tokens, static_cast<std::int64_t>(copy.slots.states.size())}});
    }
  return now;
}

void RadixTree::use_host(HostTier& host) {
  host_ = &host;
  host.nodes.resize(nodes_.size());
}

// --- Device to host ------------------------------------------------------------------------------

/// An insert came by. Under write_back that copies nothing.
void RadixTree::count_insert(NodeIndex index) {
  if (writes_back()) return;
  const bool at_second =
      host_->policy == WritePolicy::selective && rules_.selective_waits_for_second;
  const std::uint32_t inserts = ++host_->nodes[index.value].inserts;
  if (!is_backed_up(index) && inserts >= (at_second ? 2 : 1)) back_up(index);
}

/// The node and the nodes above it that have no KV on the host get it, the highest first, and the
/// states that they have. The first one that finds no room ends it.
void RadixTree::back_up(NodeIndex index) {
  std::vector<NodeIndex> chain{index};
  for (NodeIndex at = node(index).parent; at != kRoot && !is_backed_up(at); at = node(at).parent)
    chain.push_back(at);
  for (; !chain.empty(); chain.pop_back())
    if (!queue_backup(chain.back())) return;
}

/// False where the host has no room, even after evicting.
bool RadixTree::queue_backup(NodeIndex index) {
  const RadixNode& source = node(index);
  const std::uint32_t tokens = is_backed_up(index) ? 0 : source.edge_size();
  const bool with_state = source.state.exists() && !host_->nodes[index.value].state.exists();
  const std::vector<NodeIndex> windows = windows_to_save(index);
  if (tokens == 0 && !with_state && windows.empty()) return true;
  const std::int64_t lacking = tokens - host_->kv.free_count();
  if (lacking > 0 && evict_host(lacking, 0).kv < lacking) {
    LOCKSTEP_MARK("backup.no_kv");
    return false;
  }
  KvRuns kv;
  if (tokens != 0) kv.push_back(host_->kv.allocate(tokens));
  if (with_state && host_->states.free_count() == 0) evict_host(0, 1);
  if (with_state && host_->states.free_count() == 0) {
    LOCKSTEP_MARK("backup.no_state_slot");
    host_->kv.release(kv);
    return false;
  }
  const std::int64_t window_tokens = edge_sum(windows);
  if (window_tokens > host_->windows.free_count()) evict_host(0, 0, window_tokens);
  if (window_tokens > host_->windows.free_count()) {
    LOCKSTEP_MARK("backup.no_window");
    host_->kv.release(kv);
    return false;
  }
  HostNode& target = host_->nodes[index.value];
  CopyInFlight backup{.id = ++host_->copies, .node = index, .slots = {}, .kv_tokens = tokens};
  backup.slots.index_keys = rules_.host_has_index_keys;
  if (tokens != 0) {
    backup.slots.kv_sources = source.kv;
    backup.slots.kv_targets = kv;
    target.kv = std::move(kv);
  }
  if (with_state) {
    target.state = host_->states.allocate();
    backup.slots.states.push_back({source.state, target.state});
  }
  target.backup = backup.id;
  save_windows(windows, backup);
  host_->to_host.kv_tokens += tokens;
  host_->to_host.states += with_state ? 1 : 0;
  host_->layers.queue_copy(backup.slots);
  if (rules_.backup_locks && !writes_back()) {
    lock(index);
    if (rules_.backup_locks_window) backup.window_begin = lock_window(index);
  }
  host_->backups.push_back(std::move(backup));
  touch(index, false);
  return true;
}

/// Copies to the host what is about to leave the device, and waits for the copy. Nothing happens
/// where the host has no room.
void RadixTree::write_back(NodeIndex index) {
  if (!queue_backup(index)) return;
  LOCKSTEP_MARK("evict.writes_back");
  if (!rules_.write_back_waits) return;
  while (host_->land(host_->backups)) continue;
  settle_backups();
}

/// The state of an inner node is about to go. It is saved, with the node's KV, unless the host has
/// either.
void RadixTree::write_back_state(NodeIndex index) {
  if (!rules_.write_back_saves_inner_states) return;
  if (is_backed_up(index) || host_->nodes[index.value].state.exists()) return;
  LOCKSTEP_MARK("evict.writes_back_inner_state");
  if (host_->states.free_count() == 0) evict_host(0, 1);
  write_back(index);
}

/// The nodes below one that leaves the tree; the host alone has them. False, and nothing happens,
/// where the storage is being written from one of them, or a prefetch begins there.
bool RadixTree::drop_extensions(NodeIndex index) {
  if (host_->nodes[index.value].children == 0) return true;
  std::vector<NodeIndex> below;
  for (std::uint32_t i = 1; i < nodes_.size(); ++i) {
    if (!nodes_[i].alive) continue;
    NodeIndex at = nodes_[i].parent;
    while (at.exists() && at != kRoot && at != index) at = node(at).parent;
    if (at == index) below.push_back({i});
  }
  for (const NodeIndex extension : below) {
    const HostNode& copy = host_->nodes[extension.value];
    if (copy.kv_lock == 0 && copy.state_lock == 0 && copy.window_lock == 0) continue;
    LOCKSTEP_MARK("evict.spares_locked_extensions");
    return false;
  }
  LOCKSTEP_MARK("evict.drops_extensions");
  std::ranges::sort(below,
                    [&](NodeIndex a, NodeIndex b) { return node(a).depth() > node(b).depth(); });
  Evicted unreported;
  for (const NodeIndex extension : below) {
    if (!rules_.dropped_extensions_free_host) host_->nodes[extension.value].kv.clear();
    drop_host_leaf(extension, unreported);
  }
  return true;
}

/// A node that leaves the tree takes its place on the host along.
void RadixTree::forget_host_copy(NodeIndex index) {
  HostNode& copy = host_->nodes[index.value];
  host_->kv.release_from(copy.kv, 0);
  host_->windows.release(copy.window);
  unlist_host_window(index);
  if (copy.state.exists()) host_->states.release(copy.state);
  unlist_host_state(index);
  if (copy.leaf_use != 0) host_->listed_leaves.erase(copy.leaf_use);
  if (copy.twice_use != 0) host_->listed_twice.erase(copy.twice_use);
  copy = HostNode{};
}

/// A leaf of the device that is backed up leaves the device; its copy stays.
void RadixTree::demote(NodeIndex index, Evicted& evicted) {
  LOCKSTEP_MARK("evict.demotes");
  RadixNode& leaf = nodes_[index.value];
  evicted.kv += leaf.edge_size();
  sizes_.evictable_kv -= leaf.edge_size();
  if (leaf.state.exists()) {
    states_.release(leaf.state);
    evicted.states += 1;
    sizes_.evictable_states -= 1;
    lru_remove(index);
    leaf.state = StateSlot::none();
    if (!rules_.demotion_keeps_host_state && host_->nodes[index.value].state.exists()) {
      host_->states.release(host_->nodes[index.value].state);
      host_->nodes[index.value].state = StateSlot::none();
    }
    list_host_state(index);
  }
  kv_.release_from(leaf.kv, 0);
  if (windows_ != nullptr) drop_window(index, evicted);
  const NodeIndex neighbour = leaf.listed ? leaf.leaf_older : NodeIndex::none();
  unlist(index);
  --nodes_[leaf.parent.value].child_count;
  touch(index, true);
  touch(leaf.parent, false);
  list_if_leaf(leaf.parent, neighbour.exists() ? neighbour : leaf_oldest_);
  list_host_leaf(index);
}

/// A state that is on the host alone may be evicted there; it enters the list as the newest.
void RadixTree::list_host_state(NodeIndex index) {
  HostNode& copy = host_->nodes[index.value];
  if (!copy.state.exists() || node(index).state.exists() || copy.state_lock != 0) return;
  unlist_host_state(index);
  copy.state_use = ++host_->uses;
  host_->listed_states.emplace(copy.state_use, index);
}

void RadixTree::unlist_host_state(NodeIndex index) {
  HostNode& copy = host_->nodes[index.value];
  if (copy.state_use != 0) host_->listed_states.erase(copy.state_use);
  copy.state_use = 0;
}

/// Of a node that is split, the state's copy stays with the longer half.
void RadixTree::split_host_copy(NodeIndex upper_index, NodeIndex child_index,
                                std::uint32_t length) {
  HostNode& upper = host_->nodes[upper_index.value];
  HostNode& child = host_->nodes[child_index.value];
  upper.kv_lock = child.kv_lock;
  upper.backup = rules_.split_copies_backup ? child.backup : 0;
  upper.load = rules_.split_copies_load ? child.load : 0;
  upper.inserts = rules_.split_copies_inserts ? child.inserts : 0;
  if (windows_ != nullptr) split_host_window(upper_index, child_index, length);
  if (child.kv.empty()) return;
  if (child.backup != 0) LOCKSTEP_MARK("split.backup_in_flight");
  KvRuns lower;
  append_slice(upper.kv, child.kv, 0, length);
  append_slice(lower, child.kv, length, node(child_index).edge_size());
  child.kv.swap(lower);
}

// --- Host eviction -------------------------------------------------------------------------------

/// On the host alone, without nodes below it and without locks.
bool RadixTree::is_host_leaf(NodeIndex index) const {
  const RadixNode& candidate = node(index);
  const HostNode& copy = host_->nodes[index.value];
  return candidate.alive && index != kRoot && !is_on_device(index) && copy.children == 0 &&
         candidate.full_lock == 0 && candidate.state_lock == 0 && copy.kv_lock == 0 &&
         copy.state_lock == 0 && copy.window_lock == 0;
}

/// Enters a node into the list of host leaves, moves it or takes it out, as it is now.
void RadixTree::list_host_leaf(NodeIndex index) {
  HostNode& copy = host_->nodes[index.value];
  const std::uint64_t use = is_host_leaf(index) ? node(index).last_access : 0;
  if (copy.leaf_use == use) return;
  if (copy.leaf_use != 0) host_->listed_leaves.erase(copy.leaf_use);
  copy.leaf_use = use;
  if (use != 0)
    require(host_->listed_leaves.emplace(use, index).second, "no two nodes have one access time");
}

void RadixTree::drop_host_leaf(NodeIndex index, Evicted& evicted) {
  RadixNode& leaf = nodes_[index.value];
  HostNode& copy = host_->nodes[index.value];
  evicted.kv += leaf.edge_size();
  if (copy.state.exists()) evicted.states += 1;
  if (!copy.window.empty()) evicted.window += leaf.edge_size();
  forget_host_copy(index);
  if (windows_ != nullptr) windows_->nodes[index.value] = {};
  remove_child(index);
  leaf.alive = false;
  list_host_leaf(leaf.parent);
  touch(index, true);
  touch(leaf.parent, false);
  KvRuns kv = std::move(leaf.kv);
  leaf = RadixNode{};
  leaf.kv = std::move(kv);
  dead_.push_back(index);
}

/// The node whose state the host evicts next; none where no state may go.
NodeIndex RadixTree::next_host_state() const {
  if (!rules_.host_evicts_listed_alone)
    for (std::uint32_t i = 1; i < nodes_.size(); ++i)
      if (host_->nodes[i].state.exists() && host_->nodes[i].state_use == 0) return {i};
  for (const auto& [use, index] : host_->listed_states)
    if (host_->nodes[index.value].state_lock == 0) return index;
  return NodeIndex::none();
}

/// write_back: enters a node whose KV is on both tiers, without a copy in flight, as the newest;
/// one that is listed keeps its place.
void RadixTree::list_twice(NodeIndex index) {
  if (!writes_back()) return;
  HostNode& copy = host_->nodes[index.value];
  const bool is_twice =
      is_on_device(index) && is_backed_up(index) && copy.backup == 0 && copy.load == 0;
  if (!is_twice || copy.twice_use != 0) return;
  copy.twice_use = ++host_->uses;
  host_->listed_twice.emplace(copy.twice_use, index);
}

/// Gives back KV of the host that the device has too. Leaves of the device are spared in a first
/// walk, because leaving the device costs them no copy.
void RadixTree::reclaim_twice(std::int64_t kv_tokens, Evicted& evicted) {
  std::vector<NodeIndex> passed;
  for (const bool spares_leaves : {rules_.reclaim_spares_leaves, false}) {
    for (const auto& [use, index] : host_->listed_twice) {
      if (evicted.kv >= kv_tokens) break;
      HostNode& copy = host_->nodes[index.value];
      const bool is_twice = is_on_device(index) && is_backed_up(index);
      const bool is_read =
          copy.backup != 0 || (copy.load != 0 && rules_.reclaim_spares_loads) || copy.kv_lock != 0;
      if (is_twice && (is_read || (spares_leaves && is_leaf(node(index))))) continue;
      passed.push_back(index);
      if (!is_twice) continue;
      LOCKSTEP_MARK("evict_host.reclaims");
      evicted.kv += node(index).edge_size();
      host_->kv.release_from(copy.kv, 0);
      if (!rules_.reclaim_spares_states && copy.state.exists()) {
        host_->states.release(copy.state);
        copy.state = StateSlot::none();
        unlist_host_state(index);
      }
      touch(index, false);
    }
  }
  for (const NodeIndex index : passed) {
    HostNode& copy = host_->nodes[index.value];
    if (copy.twice_use != 0) host_->listed_twice.erase(copy.twice_use);
    copy.twice_use = 0;
  }
}

void RadixTree::forget_host_state(NodeIndex index, Evicted& evicted) {
  HostNode& copy = host_->nodes[index.value];
  if (!copy.state.exists()) return;
  host_->states.release(copy.state);
  copy.state = StateSlot::none();
  unlist_host_state(index);
  evicted.states += 1;
  touch(index, false);
}

RadixTree::Evicted RadixTree::evict_host(std::int64_t kv_tokens, std::int64_t states,
                                         std::int64_t window_tokens) {
  Evicted evicted;
  if (writes_back()) reclaim_twice(kv_tokens, evicted);
  while (evicted.kv < kv_tokens && !host_->listed_leaves.empty())
    drop_host_leaf(host_->listed_leaves.begin()->second, evicted);
  evict_host_windows(window_tokens, evicted);
  while (evicted.states < states) {
    const NodeIndex oldest = next_host_state();
    if (!oldest.exists()) break;
    if (is_host_leaf(oldest)) {
      drop_host_leaf(oldest, evicted);
      continue;
    }
    LOCKSTEP_MARK("evict_host.state_alone");
    forget_host_state(oldest, evicted);
  }
  return evicted;
}

// --- Host to device ------------------------------------------------------------------------------

/// The slots of the node's edge, which a request has computed again or a load brings.
void RadixTree::put_on_device(NodeIndex index, KvRuns kv) {
  RadixNode& back = nodes_[index.value];
  back.kv = std::move(kv);
  (back.full_lock != 0 ? sizes_.protected_kv : sizes_.evictable_kv) += back.edge_size();
  ++nodes_[back.parent.value].child_count;
  unlist(back.parent);
  list_if_leaf(index);
  list_host_leaf(index);
  touch(index, true);
  touch(back.parent, false);
}

std::uint32_t RadixTree::lock_host(NodeIndex index) {
  HostNode& copy = host_->nodes[index.value];
  ++copy.kv_lock;
  if (copy.state_lock++ == 0) unlist_host_state(index);
  list_host_leaf(index);
  return node(index).start;
}

/// A node that was split since has passed its lock on to the nodes down to `begin`.
void RadixTree::unlock_host(NodeIndex index, std::uint32_t begin) {
  HostNode& copy = host_->nodes[index.value];
  --copy.state_lock;
  if (copy.state_use == 0) list_host_state(index);
  for (NodeIndex at = index;; at = node(at).parent) {
    require(host_->nodes[at.value].kv_lock != 0, "a host lock is taken back once");
    --host_->nodes[at.value].kv_lock;
    list_host_leaf(at);
    if (node(at).start == begin) return;
  }
}

/// Brings to the device what is missing above `best`: KV, the window before its end, and its state,
/// into a slot of the node and into one of the request.
RadixTree::Load RadixTree::load(NodeIndex best, StateSlot& request_slot) {
  const bool brings_state = !node(best).state.exists();
  CopyInFlight load{.id = 0, .node = best, .slots = {}, .host_begin = lock_host(best)};
  load.host_window_begin = lock_host_window(best);
  lock(best);
  load.window_begin = lock_window(best);
  const auto give_up = [&] { unlock_load(load); };
  if (brings_state) {
    if (states_.free_count() == 0) evict_for_alloc(0, 1);
    if (states_.free_count() == 0) {
      LOCKSTEP_MARK("load.no_request_slot");
      give_up();
      return Load::no_request_slot;
    }
    request_slot = states_.allocate();
  }
  KvRuns kv, window_slots;
  const auto refuse = [&] {
    kv_.release(kv);
    if (windows_ != nullptr) windows_->pool.release(window_slots);
    give_up();
    if (!brings_state || !rules_.refused_load_frees_slot) return Load::refused;
    states_.release(request_slot);
    request_slot = StateSlot::none();
    return Load::refused;
  };
  const std::vector<NodeIndex> windows = windows_to_load(best);
  const bool is_loading =
      (brings_state && host_->nodes[best.value].load != 0) ||
      std::ranges::any_of(windows, [&](NodeIndex at) { return host_->nodes[at.value].load != 0; });
  if (is_loading && rules_.loads_wait_for_loads) {
    LOCKSTEP_MARK("load.other_load");
    return refuse();
  }
  std::uint32_t tokens = 0;
  for (NodeIndex at = best; !is_on_device(at); at = node(at).parent) tokens += node(at).edge_size();
  if (tokens > kv_.free_count()) evict_for_alloc(tokens - kv_.free_count(), 0);
  if (tokens > kv_.free_count()) {
    LOCKSTEP_MARK("load.no_kv");
    return refuse();
  }
  if (tokens != 0) kv.push_back(kv_.allocate(tokens));
  if (const std::uint32_t size = edge_sum(windows); size != 0) {
    const auto lacking = [&] { return size - windows_->pool.free_count(); };
    if (lacking() > 0) evict_for_alloc(0, 0, lacking());
    if (lacking() > 0) {
      LOCKSTEP_MARK("load.no_window");
      return refuse();
    }
    window_slots.push_back(windows_->pool.allocate(size));
  }
  if (brings_state && states_.free_count() == 0) evict_for_alloc(0, 1);
  if (brings_state && states_.free_count() == 0) {
    LOCKSTEP_MARK("load.no_node_slot");
    return refuse();
  }
  queue_load(std::move(load), kv, windows, window_slots, request_slot);
  return Load::queued;
}

/// Takes back the locks of a load that has ended or is refused.
void RadixTree::unlock_load(const CopyInFlight& load) {
  unlock_window(load.node, load.window_begin);
  unlock(load.node);
  unlock_host_window(load.node, load.host_window_begin);
  unlock_host(load.node, load.host_begin);
}

/// Gives the nodes above the load's that the device lacks these slots, and its state, where it is
/// on the host alone, one more.
void RadixTree::queue_load(CopyInFlight load, const KvRuns& kv,
                           const std::vector<NodeIndex>& windows, const KvRuns& window_slots,
                           StateSlot request_slot) {
  const NodeIndex best = load.node;
  load.id = ++host_->copies;
  std::vector<NodeIndex> missing;
  for (NodeIndex at = best; !is_on_device(at); at = node(at).parent) missing.push_back(at);
  load.slots.index_keys = rules_.host_has_index_keys;
  for (std::uint32_t at = 0; !missing.empty(); missing.pop_back()) {
    const NodeIndex index = missing.back();
    const std::uint32_t end = at + node(index).edge_size();
    load.kv_tokens += end - at;
    KvRuns own;
    append_slice(own, kv, at, end);
    at = end;
    const KvRuns& source = host_->nodes[index.value].kv;
    load.slots.kv_sources.insert(load.slots.kv_sources.end(), source.begin(), source.end());
    put_on_device(index, std::move(own));
    if (writes_back()) host_->nodes[index.value].load = load.id;
  }
  load.slots.kv_targets = kv;
  load_windows(windows, window_slots, load);
  RadixNode& loaded = nodes_[best.value];
  if (!loaded.state.exists()) {
    loaded.state = states_.allocate();
    unlist_host_state(best);
    lru_push_newest(best);
    ++sizes_.protected_states;  // the load holds a lock
    const StateSlot source = host_->nodes[best.value].state;
    load.slots.states = {{source, loaded.state}, {source, request_slot}};
  }
  host_->to_device.kv_tokens += load.kv_tokens;
  host_->to_device.states += static_cast<std::int64_t>(load.slots.states.size());
  touch(best, false);
  host_->layers.queue_copy(load.slots);
  host_->loads.push_back(std::move(load));
  LOCKSTEP_MARK("load.queued");
}

// --- Copies --------------------------------------------------------------------------------------

/// Ends the copies that have landed; returns their number.
std::int64_t RadixTree::settle() {
  std::int64_t settled = settle_backups();
  for (auto& loads = host_->loads; !loads.empty() && loads.front().landed; ++settled) {
    const CopyInFlight load = std::move(loads.front());
    loads.pop_front();
    unlock_load(load);
    for (NodeIndex at = load.node; writes_back() && at != kRoot; at = node(at).parent) {
      if (host_->nodes[at.value].load != load.id) continue;
      host_->nodes[at.value].load = 0;
      list_twice(at);
    }
  }
  return settled;
}

std::int64_t RadixTree::settle_backups() {
  std::int64_t settled = 0;
  for (auto& backups = host_->backups; !backups.empty() && backups.front().landed; ++settled) {
    const CopyInFlight backup = std::move(backups.front());
    backups.pop_front();
    std::vector<NodeIndex> saved;
    // Nodes whose window it has copied, too, are those above it, with others between them.
    for (NodeIndex at = backup.node; at != kRoot; at = node(at).parent) {
      if (host_->nodes[at.value].backup != backup.id) {
        if (windows_ == nullptr) break;
        continue;
      }
      host_->nodes[at.value].backup = 0;
      list_twice(at);
      saved.push_back(at);
    }
    if (rules_.backup_locks && !writes_back()) {
      if (rules_.backup_locks_window) unlock_window(backup.node, backup.window_begin);
      unlock(backup.node);
    }
    for (; host_->storage && !saved.empty(); saved.pop_back()) store(saved.back());
  }
  return settled;
}

// --- Storage -------------------------------------------------------------------------------------

/// Queues the write of what the host has of the node. From there to its settlement it holds a lock
/// on that copy.
void RadixTree::store(NodeIndex index) {
  if (!is_backed_up(index)) return;
  const RadixNode& now = node(index);
  const HostNode& copy = host_->nodes[index.value];
  StorageTier& storage = *host_->storage;
  storage.write({.node = index,
                 .host_begin = lock_host(index),
                 .keys = storage.keys_of(now.path, now.start, now.depth(), now.salt),
                 .slots = {}},
                copy.kv, copy.state);
}

/// Becomes the node used last, where it is a leaf of a tier.
void RadixTree::renew(NodeIndex index) {
  if (index == kRoot) return;
  nodes_[index.value].last_access = tick();
  unlist(index);
  list_if_leaf(index);
  list_host_leaf(index);
  touch(index, false);
}

/// Puts below its anchor what a prefetch has brought. Nodes that the host has keep their KV; those
/// that the device alone has get the new KV, but not under write_back. The state goes to the node
/// at the end where the host has none for it, or waits to be free.
void RadixTree::insert_on_host(Prefetch& fetched) {
  const std::uint32_t size = fetched.start + fetched.size;
  std::uint32_t depth = fetched.start, known = 0;
  NodeIndex at = fetched.anchor;
  renew(at);
  while (depth < size) {
    std::uint32_t common = 0;
    NodeIndex child = find_child(at, fetched.salt, fetched.path, depth, size - depth, common);
    if (!child.exists()) break;
    renew(child);
    if (common < node(child).edge_size()) child = split(child, common);
    const std::uint32_t first = std::exchange(depth, depth + common) - fetched.start;
    if (is_backed_up(child) || writes_back()) {
      known += common;
    } else {
      LOCKSTEP_MARK("prefetch.refills");
      append_slice(host_->nodes[child.value].kv, fetched.kv, first, first + common);
    }
    at = child;
  }
  if (depth < size) {
    LOCKSTEP_MARK("prefetch.new_node");
    const NodeIndex parent = at;
    at = new_node();
    RadixNode& fresh = nodes_[at.value];
    fresh.path = fetched.path.prefix(size);
    fresh.start = depth;
    fresh.parent = parent;
    fresh.salt = fetched.salt;
    add_child(at);
    append_slice(host_->nodes[at.value].kv, fetched.kv, depth - fetched.start, fetched.size);
    list_host_leaf(at);
    list_host_leaf(parent);
    touch(at, true);
    touch(parent, false);
  }
  HostNode& end = host_->nodes[at.value];
  if (!is_backed_up(at) || end.state.exists()) {
    LOCKSTEP_MARK("prefetch.state_is_there");
    host_->storage->released_states.push_back(fetched.state);
  } else {
    end.state = fetched.state;
    if (!node(at).state.exists()) {  // listed even while it is locked
      end.state_use = ++host_->uses;
      host_->listed_states.emplace(end.state_use, at);
    }
    touch(at, false);
  }
  KvRuns duplicates;
  append_slice(duplicates, fetched.kv, 0, known);
  if (rules_.prefetches_free_known_kv) host_->kv.release(duplicates);
  fetched.kv.clear();
  fetched.state = StateSlot::none();
}

}  // namespace lockstep::cache_sim
