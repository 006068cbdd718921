// The tree's part in the KV of sliding windows (reference/caches/sglang.md, 1.15).
#include "cache_sim/policies/sglang/radix_windows.hpp"

#include <algorithm>

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

/// Counts on from the nodes above: tokens since the last tombstone, from the first token on as many
/// as any window needs.
bool RadixTree::window_ends_at(NodeIndex index, std::uint32_t& covered) const {
  constexpr std::uint32_t kEnough = 1u << 30;
  if (has_window(index) || !rules_.tombstones_break_windows)
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

/// The window of a new leaf: of its tokens from where the row has one. At most one window lies in
/// the leaf itself, so that a lock on it holds no more.
void RadixTree::fill_window(NodeIndex leaf, const RequestWindow& row) {
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
  if (node(leaf).edge_size() > most) {
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

void RadixTree::drop_windows(NodeIndex end, std::uint32_t begin) {
  Evicted unreported;
  for (NodeIndex at = end; at != kRoot && node(at).start >= begin; at = node(at).parent)
    drop_window(at, unreported);
}

/// A leaf goes whole; elsewhere the window goes, and with it the state, which cannot be used
/// without.
void RadixTree::evict_window(NodeIndex index, Evicted& evicted) {
  if (is_leaf(node(index))) {
    drop_leaf(index, evicted);
    return;
  }
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

}  // namespace lockstep::cache_sim
