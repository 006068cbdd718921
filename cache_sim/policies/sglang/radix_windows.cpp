// The tree's part in the KV of sliding windows (reference/caches/sglang.md, 1.15 and 1.16).
#include "cache_sim/policies/sglang/radix_windows.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cache_sim/policies/sglang/radix_tree.hpp"
#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

void RadixTree::use_windows(RadixWindows& windows) {
  windows_ = &windows;
  windows.nodes.resize(nodes_.size());
}

// --- The list of windows -------------------------------------------------------------------------

void RadixTree::unlist_window(NodeIndex index) {
  WindowNode& gone = windows_->nodes[index.value];
  (gone.newer.exists() ? windows_->nodes[gone.newer.value].older : windows_->newest) = gone.older;
  (gone.older.exists() ? windows_->nodes[gone.older.value].newer : windows_->oldest) = gone.newer;
  gone.newer = gone.older = NodeIndex::none();
}

/// Enters the node as the next older one than `newer`, or as the newest one where there is none.
void RadixTree::list_window(NodeIndex index, NodeIndex newer) {
  WindowNode& fresh = windows_->nodes[index.value];
  fresh.newer = newer;
  fresh.older = newer.exists() ? windows_->nodes[newer.value].older : windows_->newest;
  (newer.exists() ? windows_->nodes[newer.value].older : windows_->newest) = index;
  (fresh.older.exists() ? windows_->nodes[fresh.older.value].newer : windows_->oldest) = index;
}

/// The node and those above it become the newest, in that order, as far as a window and a page
/// reach: the others are evicted before them.
void RadixTree::renew_windows(NodeIndex end) {
  NodeIndex newer = NodeIndex::none();
  const std::uint32_t depth = node(end).depth();
  for (NodeIndex at = end;
       at != kRoot && depth - node(at).depth() < windows_->reach + options_.page;
       at = node(at).parent) {
    if (!has_window(at)) continue;
    unlist_window(at);
    list_window(at, newer);
    newer = at;
  }
}

// --- Nodes ---------------------------------------------------------------------------------------

std::int64_t& RadixTree::window_size(NodeIndex index) {
  return windows_->nodes[index.value].lock != 0 ? windows_->locked : windows_->evictable;
}

void RadixTree::set_window(NodeIndex index, KvRuns slots) {
  windows_->nodes[index.value].slots = std::move(slots);
  window_size(index) += node(index).edge_size();
  list_window(index, NodeIndex::none());
  if (host_ != nullptr) unlist_host_window(index);
  touch(index, false);
}

/// The node becomes a tombstone.
void RadixTree::drop_window(NodeIndex index, Evicted& evicted) {
  if (!has_window(index)) return;
  WindowNode& window = windows_->nodes[index.value];
  evicted.window += node(index).edge_size();
  window_size(index) -= node(index).edge_size();
  windows_->pool.release(window.slots);
  window.slots.clear();
  unlist_window(index);
  if (host_ != nullptr) list_host_window(index);
  touch(index, false);
}

/// Called before the child's edge is cut after `length` tokens. The upper half is the next older
/// one in the list.
void RadixTree::split_window(NodeIndex upper, NodeIndex child, std::uint32_t length) {
  WindowNode& below = windows_->nodes[child.value];
  WindowNode& above = windows_->nodes[upper.value];
  above.lock = rules_.split_copies_window_lock ? below.lock : 0;
  if (below.slots.empty()) return;
  KvRuns lower;
  append_slice(above.slots, below.slots, 0, length);
  append_slice(lower, below.slots, length, node(child).edge_size());
  below.slots.swap(lower);
  list_window(upper, child);
}

/// Counts on from the nodes above: tokens since the last tombstone, of the device or of both tiers,
/// from the first token on as many as any window needs.
bool RadixTree::window_ends_at(NodeIndex index, bool on_device, std::uint32_t& covered) const {
  constexpr std::uint32_t kEnough = 1u << 30;
  if (has_window(index) || (!on_device && has_host_window(index)) ||
      !rules_.tombstones_break_windows)
    covered = std::min(kEnough, covered + node(index).edge_size());
  else
    covered = 0;
  return covered >= windows_->reach;
}

// --- Inserts -------------------------------------------------------------------------------------

/// A node on an insert's way whose tokens from `first` on the row has KV for, too. A tombstone gets
/// the row's window, from where the row has one. Its KV of full attention then is the row's as
/// well, unless somebody reads what is there.
void RadixTree::overlap_window(NodeIndex index, const Incoming& row, std::uint32_t first,
                               Surplus& surplus) {
  const std::uint32_t end = node(index).depth();
  const std::uint32_t live = std::max(first, row.window.begin);
  KvRuns window;
  if (live < end)
    append_slice(window, row.window.slots, live - row.window.begin, end - row.window.begin);
  if (has_window(index) || live >= end) {
    append_slice(surplus.kv, row.kv, first - row.begin, end - row.begin);
    surplus.window.insert(surplus.window.end(), window.begin(), window.end());
    return;
  }
  if (live > node(index).start) split(index, live - node(index).start);
  append_slice(surplus.kv, row.kv, first - row.begin, live - row.begin);
  KvRuns kv;
  append_slice(kv, row.kv, live - row.begin, end - row.begin);
  if (node(index).full_lock == 0 || !rules_.refill_keeps_locked_kv) {
    LOCKSTEP_MARK("window.refills_tombstone");
    nodes_[index.value].kv.swap(kv);
  } else {
    LOCKSTEP_MARK("window.refills_locked_tombstone");
  }
  surplus.kv.insert(surplus.kv.end(), kv.begin(), kv.end());
  set_window(index, std::move(window));
  touch(index, true);
}

/// The window of a node without one: of its tokens from where the row has one. Of a new leaf, at
/// most one window lies in the leaf itself, so that a lock on it holds no more.
void RadixTree::fill_window(NodeIndex leaf, const RequestWindow& row, bool is_new) {
  const std::uint32_t end = node(leaf).depth();
  const std::uint32_t live = std::max(node(leaf).start, row.begin);
  if (live >= end) return;
  if (live > node(leaf).start) split(leaf, live - node(leaf).start);
  const std::uint32_t most = page_ceiling(windows_->reach);
  const auto slots = [&](NodeIndex index) {
    KvRuns own;
    append_slice(own, row.slots, node(index).start - row.begin, node(index).depth() - row.begin);
    return own;
  };
  if (is_new && node(leaf).edge_size() > most) {
    LOCKSTEP_MARK("window.caps_leaf");
    const NodeIndex upper = split(leaf, node(leaf).edge_size() - most);
    set_window(upper, slots(upper));
  }
  set_window(leaf, slots(leaf));
}

// --- Locks ---------------------------------------------------------------------------------------

void RadixTree::count_window_lock(NodeIndex index, int by) {
  WindowNode& window = windows_->nodes[index.value];
  require(by > 0 || window.lock != 0, "a window is unlocked as often as it was locked");
  const std::int64_t tokens = has_window(index) ? node(index).edge_size() : 0;
  window_size(index) -= tokens;
  window.lock += static_cast<std::uint32_t>(by);
  window_size(index) += tokens;
  touch(index, false);
}

/// Locks the nodes that the window before `end` covers, tombstones among them. Returns the first
/// token of them.
std::uint32_t RadixTree::lock_window(NodeIndex end) {
  if (windows_ == nullptr || !end.exists() || end == kRoot) return 0;
  for (NodeIndex at = end;; at = node(at).parent) {
    count_window_lock(at, +1);
    const std::uint32_t begin = node(at).start;
    if (begin == 0 || covers_window(end, begin) || !rules_.window_lock_covers) return begin;
  }
}

void RadixTree::unlock_window(NodeIndex end, std::uint32_t begin) {
  if (windows_ == nullptr || !end.exists()) return;
  for (NodeIndex at = end; at != kRoot && node(at).start >= begin; at = node(at).parent)
    count_window_lock(at, -1);
}

/// Whether the locked nodes before `end` are as many as a window needs: a lock that ends at the
/// root for want of tokens is not given up early.
bool RadixTree::covers_window(NodeIndex end, std::uint32_t begin) const {
  return node(end).depth() - begin >= windows_->reach;
}

// --- Eviction ------------------------------------------------------------------------------------

void RadixTree::drop_windows(NodeIndex end, std::uint32_t begin, bool saved_alone) {
  Evicted unreported;
  for (NodeIndex at = end; at != kRoot && node(at).start >= begin; at = node(at).parent)
    if (!saved_alone || (host_ != nullptr && host_->nodes[at.value].backup != 0))
      drop_window(at, unreported);
}

/// A leaf goes whole; elsewhere the window goes, and with it the state, which cannot be used
/// without.
void RadixTree::evict_window(NodeIndex index, Evicted& evicted) {
  if (is_leaf(node(index))) {
    drop_leaf(index, evicted);
    return;
  }
  if (writes_back()) write_back_window(index);
  LOCKSTEP_MARK("evict.window");
  drop_window(index, evicted);
  if (node(index).state.exists() && rules_.windows_take_states) forget_state(index, evicted);
}

void RadixTree::evict_windows(Evicted& evicted, const std::function<bool()>& done) {
  const auto evictable = [&](NodeIndex from) {
    while (from.exists() && windows_->nodes[from.value].lock != 0 && rules_.locks_keep_windows)
      from = windows_->nodes[from.value].newer;
    return from;
  };
  if (windows_ == nullptr || done()) return;
  for (NodeIndex victim = evictable(windows_->oldest); !done() && victim.exists();) {
    // Chosen before the step, as for states.
    const NodeIndex next = evictable(windows_->nodes[victim.value].newer);
    evict_window(victim, evicted);
    victim = next;
  }
}

// --- The host (1.16) -----------------------------------------------------------------------------

/// A window that is on the host alone may be evicted there; it enters the list as the newest.
void RadixTree::list_host_window(NodeIndex index) {
  HostNode& copy = host_->nodes[index.value];
  if (copy.window.empty() || has_window(index) || copy.window_lock != 0 || copy.window_place)
    return;
  copy.window_place = host_->listed_windows.insert(host_->listed_windows.begin(), index);
}

void RadixTree::unlist_host_window(NodeIndex index) {
  HostNode& copy = host_->nodes[index.value];
  if (copy.window_place) host_->listed_windows.erase(*copy.window_place);
  copy.window_place.reset();
}

/// Called before the child's edge is cut after `length` tokens, and before its window on the device
/// is. The upper half is the next older one in the list.
void RadixTree::split_host_window(NodeIndex upper_index, NodeIndex child_index,
                                  std::uint32_t length) {
  HostNode& upper = host_->nodes[upper_index.value];
  HostNode& child = host_->nodes[child_index.value];
  upper.window_lock = child.window_lock;
  if (child.window.empty()) return;
  KvRuns lower;
  append_slice(upper.window, child.window, 0, length);
  append_slice(lower, child.window, length, node(child_index).edge_size());
  child.window.swap(lower);
  if (child.window_place)
    upper.window_place = host_->listed_windows.insert(std::next(*child.window_place), upper_index);
}

void RadixTree::forget_host_window(NodeIndex index, Evicted& evicted) {
  HostNode& copy = host_->nodes[index.value];
  if (copy.window.empty()) return;
  evicted.window += node(index).edge_size();
  host_->windows.release(copy.window);
  copy.window.clear();
  unlist_host_window(index);
  touch(index, false);
}

/// The window used longest ago of those on the host alone goes; with a leaf all, elsewhere the
/// state on the host as well, so a node with a backup in flight is passed.
void RadixTree::evict_host_windows(std::int64_t tokens, Evicted& evicted) {
  while (evicted.window < tokens) {
    const auto place = std::find_if(
        host_->listed_windows.rbegin(), host_->listed_windows.rend(), [&](NodeIndex index) {
          return host_->nodes[index.value].backup == 0 || !rules_.host_windows_spare_backups;
        });
    if (place == host_->listed_windows.rend()) return;
    const NodeIndex oldest = *place;
    if (is_host_leaf(oldest)) {
      drop_host_leaf(oldest, evicted);
      continue;
    }
    LOCKSTEP_MARK("evict_host.window_alone");
    forget_host_window(oldest, evicted);
    if (rules_.host_windows_take_states) forget_host_state(oldest, evicted);
  }
}

std::uint32_t RadixTree::lock_host_window(NodeIndex end) {
  if (windows_ == nullptr) return 0;
  for (NodeIndex at = end;; at = node(at).parent) {
    if (host_->nodes[at.value].window_lock++ == 0) unlist_host_window(at);
    const std::uint32_t begin = node(at).start;
    if (begin == 0 || covers_window(end, begin) || !rules_.window_lock_covers) return begin;
  }
}

void RadixTree::unlock_host_window(NodeIndex end, std::uint32_t begin) {
  if (windows_ == nullptr) return;
  for (NodeIndex at = end; at != kRoot && node(at).start >= begin; at = node(at).parent) {
    HostNode& copy = host_->nodes[at.value];
    require(copy.window_lock != 0, "a host window is unlocked as often as it was locked");
    if (--copy.window_lock == 0) list_host_window(at);
  }
}

std::uint32_t RadixTree::edge_sum(const std::vector<NodeIndex>& nodes) const {
  std::uint32_t tokens = 0;
  for (const NodeIndex index : nodes) tokens += node(index).edge_size();
  return tokens;
}

/// The nodes of the window before the node's end that the host lacks, the deepest first. They end
/// at a gap, and at a node whose backup is not settled.
std::vector<NodeIndex> RadixTree::windows_to_save(NodeIndex end) const {
  std::vector<NodeIndex> nodes;
  if (windows_ == nullptr) return nodes;
  for (NodeIndex at = end; at != kRoot && node(end).depth() - node(at).depth() < windows_->reach;
       at = node(at).parent) {
    if (host_->nodes[at.value].backup != 0) break;
    if (!has_window(at) && !has_host_window(at)) break;
    if (has_window(at) && !has_host_window(at)) nodes.push_back(at);
    if (!rules_.backup_covers_window) break;
  }
  return nodes;
}

/// The nodes of the window before the node's end that the host alone has, the deepest first.
std::vector<NodeIndex> RadixTree::windows_to_load(NodeIndex best) const {
  std::vector<NodeIndex> nodes;
  if (windows_ == nullptr) return nodes;
  for (NodeIndex at = best; at != kRoot && node(best).depth() - node(at).depth() < windows_->reach;
       at = node(at).parent) {
    if (!has_window(at) && has_host_window(at)) nodes.push_back(at);
    if (!rules_.load_covers_window) break;
  }
  return nodes;
}

/// Gives the nodes slots of the host, of which enough are free. All of them wait for the backup.
void RadixTree::save_windows(const std::vector<NodeIndex>& nodes, CopyInFlight& backup) {
  if (nodes.empty()) return;
  LOCKSTEP_MARK("backup.window");
  const KvRuns slots{host_->windows.allocate(edge_sum(nodes))};
  std::uint32_t at = 0;
  for (auto next = nodes.rbegin(); next != nodes.rend(); ++next) {
    const std::uint32_t end = at + node(*next).edge_size();
    HostNode& copy = host_->nodes[next->value];
    append_slice(copy.window, slots, std::exchange(at, end), end);
    const KvRuns& sources = windows_->nodes[next->value].slots;
    backup.slots.kv_sources.insert(backup.slots.kv_sources.end(), sources.begin(), sources.end());
    backup.slots.kv_targets.insert(backup.slots.kv_targets.end(), copy.window.begin(),
                                   copy.window.end());
    if (rules_.covered_windows_wait) copy.backup = backup.id;
    touch(*next, false);
  }
}

/// Gives the nodes these slots of the device.
void RadixTree::load_windows(const std::vector<NodeIndex>& nodes, const KvRuns& slots,
                             CopyInFlight& load) {
  if (!nodes.empty()) LOCKSTEP_MARK("load.window");
  std::uint32_t at = 0;
  for (auto next = nodes.rbegin(); next != nodes.rend(); ++next) {
    const std::uint32_t end = at + node(*next).edge_size();
    const KvRuns& sources = host_->nodes[next->value].window;
    KvRuns own;
    append_slice(own, slots, std::exchange(at, end), end);
    load.slots.kv_sources.insert(load.slots.kv_sources.end(), sources.begin(), sources.end());
    load.slots.kv_targets.insert(load.slots.kv_targets.end(), own.begin(), own.end());
    set_window(*next, std::move(own));
  }
}

/// The window of an inner node is about to go. It is saved, with the node's KV and state and the
/// rest of the window, unless the host has its KV or its window.
void RadixTree::write_back_window(NodeIndex index) {
  if (!rules_.write_back_saves_inner_windows) return;
  if (is_backed_up(index) || has_host_window(index)) return;
  LOCKSTEP_MARK("evict.writes_back_inner_window");
  const std::uint32_t tokens = edge_sum(windows_to_save(index));
  if (host_->windows.free_count() < tokens) evict_host(0, 0, tokens);
  write_back(index);
}

}  // namespace lockstep::cache_sim
