#include "cache_sim/policies/sglang/radix_tree.hpp"

#include <algorithm>
#include <memory>

#include "reference/base/mark.hpp"
#include "reference/base/mix.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::size_t kFirstTableSize = 16;

}  // namespace

RadixTree::RadixTree(const Options& options, const SglangRules& rules, KvPool& kv,
                     StatePool& states)
    : options_(options), rules_(rules), kv_(kv), states_(states), children_(kFirstTableSize) {
  nodes_.emplace_back();  // the root: an empty path, always alive, never in a list, never counted
  nodes_[0].alive = true;
}

// --- Children ------------------------------------------------------------------------------------

std::uint64_t RadixTree::child_hash(NodeIndex parent, Name salt, const Tokens& key,
                                    std::uint32_t at) const {
  // The odd multipliers spread parents and salts apart; with page=1 one mixing step follows.
  std::uint64_t hash = parent.value * 0xD6E8FEB86659FD93u;
  if (parent == kRoot) hash += salt.index() * 0xA0761D6478BD642Fu;
  for (std::uint32_t i = 0; i < options_.page; ++i) hash = mix64(hash ^ key[at + i]);
  return hash;
}

/// The child of `parent` whose edge starts with the page at `key[at]`; `common` is how far key[at,
/// at + limit) follows it, in whole pages.
NodeIndex RadixTree::find_child(NodeIndex parent, Name salt, const Tokens& key, std::uint32_t at,
                                std::uint32_t limit, std::uint32_t& common) const {
  if (limit < options_.page || child_count_of(parent) == 0) return NodeIndex::none();
  const std::uint64_t hash = child_hash(parent, salt, key, at);
  const std::size_t mask = children_.size() - 1;
  for (std::size_t i = hash & mask; children_[i].node.exists(); i = (i + 1) & mask) {
    if (children_[i].hash != hash) continue;
    const RadixNode& child = node(children_[i].node);
    if (child.parent != parent || child.salt != salt) continue;
    common = key.common(at, child.path, child.start, std::min(limit, child.edge_size()));
    common -= common % options_.page;
    if (common != 0) return children_[i].node;
  }
  return NodeIndex::none();
}

void RadixTree::add_child(NodeIndex child) {
  if ((child_total_ + 1) * 2 > children_.size()) grow_children();
  RadixNode& added = nodes_[child.value];
  const std::uint64_t hash = child_hash(added.parent, added.salt, added.path, added.start);
  if (host_ != nullptr) ++host_->nodes[added.parent.value].children;
  added.hash = static_cast<std::uint32_t>(hash);
  const std::size_t mask = children_.size() - 1;
  std::size_t i = hash & mask;
  while (children_[i].node.exists()) i = (i + 1) & mask;
  children_[i] = {hash, child};
  ++child_total_;
}

void RadixTree::remove_child(NodeIndex child) {
  const std::size_t mask = children_.size() - 1;
  std::size_t hole = node(child).hash & mask;
  while (children_[hole].node != child) hole = (hole + 1) & mask;
  // Entries after the hole move up unless that would put them before their own place.
  for (std::size_t i = (hole + 1) & mask; children_[i].node.exists(); i = (i + 1) & mask) {
    const std::size_t home = children_[i].hash & mask;
    if (((i - home) & mask) < ((i - hole) & mask)) continue;
    children_[hole] = children_[i];
    hole = i;
  }
  children_[hole] = {};
  --child_total_;
  if (host_ != nullptr) --host_->nodes[node(child).parent.value].children;
}

void RadixTree::grow_children() {
  std::vector<Child> old(children_.size() * 2);
  old.swap(children_);
  const std::size_t mask = children_.size() - 1;
  for (const Child& child : old) {
    if (!child.node.exists()) continue;
    std::size_t i = child.hash & mask;
    while (children_[i].node.exists()) i = (i + 1) & mask;
    children_[i] = child;
  }
}

/// Apart from touch(), which is inlined in many places.
void RadixTree::note(NodeIndex node, bool kv) {
  touched_.push_back({node, kv});
}

std::size_t RadixTree::count_children() const {
  std::size_t count = 0;
  for (const Child& child : children_) count += child.node.exists() ? 1 : 0;
  return count;
}

// --- Nodes ---------------------------------------------------------------------------------------

NodeIndex RadixTree::new_node() {
  NodeIndex index;
  if (dead_.empty()) {
    index = {static_cast<std::uint32_t>(nodes_.size())};
    nodes_.emplace_back();
    if (host_ != nullptr) host_->nodes.emplace_back();
    if (windows_ != nullptr) windows_->nodes.emplace_back();
  } else {
    index = dead_.back();
    dead_.pop_back();
  }
  RadixNode& fresh = nodes_[index.value];
  fresh.alive = true;
  fresh.serial = ++serials_;
  fresh.last_access = tick();
  return index;
}

/// Section 1.3: a new parent takes the first `length` tokens of the child's edge. KV is divided,
/// the KV lock copied, and everything about the state stays with the longer half: it summarises
/// tokens that the shorter half has not seen.
NodeIndex RadixTree::split(NodeIndex child_index, std::uint32_t length) {
  const NodeIndex upper_index = new_node();
  RadixNode& upper = nodes_[upper_index.value];
  RadixNode& child = nodes_[child_index.value];
  remove_child(child_index);
  upper.path = child.path.prefix(child.start + length);
  upper.start = child.start;
  upper.parent = child.parent;
  upper.salt = child.salt;
  upper.child_count = is_on_device(child_index) ? 1 : 0;
  upper.full_lock = rules_.split_copies_lock ? child.full_lock : 0;
  if (host_ != nullptr) split_host_copy(upper_index, child_index, length);
  if (windows_ != nullptr) split_window(upper_index, child_index, length);
  if (!child.kv.empty()) {
    KvRuns lower;
    append_slice(upper.kv, child.kv, 0, length);
    append_slice(lower, child.kv, length, child.edge_size());
    child.kv.swap(lower);
  }
  child.start += length;
  child.parent = upper_index;
  if (rules_.split_renews_child) child.last_access = tick();
  unlist(child_index);
  list_if_leaf(child_index);
  if (child.state.exists()) LOCKSTEP_MARK("split.above_state");
  if (!child.state.exists()) LOCKSTEP_MARK("split.above_tombstone");
  if (child.full_lock != 0) LOCKSTEP_MARK("split.locked");
  if (rules_.split_moves_state && child.state.exists()) {
    upper.state = child.state;
    child.state = StateSlot::none();
    lru_remove(child_index);
    lru_push_newest(upper_index);
  }
  add_child(upper_index);
  add_child(child_index);
  if (host_ != nullptr) list_host_leaf(child_index);
  if (rules_.insert_renews_path) renew_state(child_index);
  if (host_ != nullptr) list_twice(upper_index);
  touch(upper_index, true);
  touch(child_index, true);
  touch(upper.parent, false);
  return upper_index;
}

NodeIndex RadixTree::add_leaf(Tokens key, Name salt, NodeIndex parent) {
  const NodeIndex index = new_node();
  RadixNode& leaf = nodes_[index.value];
  leaf.path = std::move(key);
  leaf.start = node(parent).depth();
  leaf.parent = parent;
  leaf.salt = salt;
  ++nodes_[parent.value].child_count;
  unlist(parent);
  add_child(index);
  sizes_.evictable_kv += leaf.edge_size();
  touch(index, true);
  touch(parent, false);
  return index;
}

/// The state of an insert's end node: taken where the node has none. Returns whether it had one.
bool RadixTree::attach(NodeIndex index, StateSlot state) {
  RadixNode& end = nodes_[index.value];
  touch(index, false);
  if (end.state.exists()) {
    if (rules_.insert_renews_end) renew_state(index);
    return true;
  }
  if (end.state_lock != 0) LOCKSTEP_MARK("insert.refills_locked_tombstone");
  end.state = state;
  lru_push_newest(index);
  if (host_ != nullptr) unlist_host_state(index);
  (end.state_lock != 0 ? sizes_.protected_states : sizes_.evictable_states) += 1;
  cap_states(index);
  return false;
}

/// Section 1.6, path_cap: the shallowest states above a new one go, but not a locked one and not a
/// fork's.
void RadixTree::cap_states(NodeIndex tail) {
  if (options_.path_cap < 0) return;
  std::int64_t excess = -options_.path_cap;
  for (NodeIndex at = tail; at != kRoot; at = node(at).parent) {
    if (!node(at).state.exists()) continue;
    path_.push_back(at);
    ++excess;
  }
  Evicted unreported;
  for (; excess > 0 && path_.back() != tail; path_.pop_back()) {
    const RadixNode& state = node(path_.back());
    if (state.state_lock != 0 || child_count_of(path_.back()) != 1 || is_leaf(state)) continue;
    if (rules_.caps_paths) forget_state(path_.back(), unreported);
    --excess;
  }
  path_.clear();
}

// --- Match and insert ----------------------------------------------------------------------------

RadixTree::Match RadixTree::match(const Tokens& key, std::uint32_t size, Name salt) {
  Match found{.end = kRoot, .reached = kRoot};
  NodeIndex at = kRoot;
  // Tokens since the last tombstone of the windows, on the device and on either tier.
  std::uint32_t covered = 1u << 30, covered_on_either = covered;
  while (found.full < size) {
    std::uint32_t common = 0;
    NodeIndex child = find_child(at, salt, key, found.full, size - found.full, common);
    if (!child.exists()) break;
    const bool partial = common < node(child).edge_size();
    found.full += common;
    const NodeIndex lower = child;  // the child itself, where the key passes it
    if (partial) child = split(child, common);
    found.reached = child;
    const bool has_window = windows_ == nullptr || window_ends_at(child, true, covered);
    const bool on_either = host_ != nullptr &&
                           (windows_ == nullptr || window_ends_at(child, false, covered_on_either));
    const bool has_state =
        !rules_.has_states || node(child).state.exists() || rules_.reuses_kv_without_state;
    if (!has_window) LOCKSTEP_MARK("match.window_is_gone");
    if (has_window && has_state) {
      found.end = child;
      found.prefix = found.full;
    } else if (on_either && (has_state || host_->nodes[child.value].state.exists())) {
      if (has_state) LOCKSTEP_MARK("match.window_on_host");
      found.on_host = child;
      found.host_prefix = found.full;
    }
    if (partial && node(lower).state.exists() && offers_child(lower)) {
      found.end = lower;
      found.prefix =
          rules_.child_offer == ChildOffer::parents_length ? found.full - common : found.full;
    }
    if (partial && rules_.match_ends_inside_edges) break;
    at = lower;
  }
  if (found.host_prefix <= found.prefix) found.on_host = NodeIndex::none();
  if (found.on_host.exists())
    refresh_path(found.on_host);
  else if (found.end != kRoot)
    refresh_path(found.end);
  // Without states, an insert that ends where the KV does brings the window there (1.15, 6).
  const std::uint32_t grid = rules_.has_states ? options_.branch_grid : options_.page;
  const std::uint32_t branch = found.full / grid * grid;
  found.told = found.prefix;
  if (found.on_host.exists())
    for (NodeIndex on = found.on_host; node(on).depth() > found.prefix; on = node(on).parent)
      if (is_backed_up(on)) found.told += node(on).edge_size();
  if (rules_.branches_at_prefix ? found.full > found.told : branch > found.told)
    found.branch = branch;
  return found;
}

bool RadixTree::offers_children() const {
  return rules_.child_offer != ChildOffer::none;
}

bool RadixTree::offers_child(NodeIndex rest) const {
  return offers_children() &&
         (rules_.child_offer != ChildOffer::one_token_longer || node(rest).edge_size() == 1);
}

/// The matched node becomes the newest state, alone (#31643; older rules: with its path, from the
/// root on); access times fall from it towards the root, so that a parent never outlives its child.
void RadixTree::refresh_path(NodeIndex end) {
  std::uint64_t time = tick();
  for (NodeIndex at = end; at != kRoot; at = node(at).parent)
    if (rules_.match_renews_times) nodes_[at.value].last_access = time--;
  if (rules_.match_renews_path) {
    for (NodeIndex at = node(end).parent; at != kRoot; at = node(at).parent) path_.push_back(at);
    for (; !path_.empty(); path_.pop_back()) renew_state(path_.back());
  }
  if (rules_.match_renews_end) renew_state(end);
  if (windows_ != nullptr) renew_windows(end);
  NodeIndex leaf = end;  // the one node of the path that can be a leaf of the device
  while (!is_on_device(leaf)) leaf = node(leaf).parent;
  unlist(leaf);
  list_if_leaf(leaf);
  if (host_ != nullptr) list_host_leaf(end);
  touch(end, false);
}

/// Makes the node's state, where it has one, the newest.
void RadixTree::renew_state(NodeIndex index) {
  if (!node(index).state.exists()) return;
  lru_remove(index);
  lru_push_newest(index);
  touch(index, false);
}

RadixTree::Inserted RadixTree::insert(const Tokens& key, std::uint32_t size, Name salt,
                                      const KvRuns& row, std::uint32_t row_begin, StateSlot state,
                                      std::uint32_t owned, NodeIndex from, std::uint32_t inserted,
                                      RequestWindow* window) {
  require(size != 0 && size % options_.page == 0, "a key is whole pages, and at least one");
  Inserted done{.end = kRoot};
  std::uint32_t depth = node(from).depth();
  for (NodeIndex at = from; at != kRoot; at = node(at).parent) path_.push_back(at);
  for (; !path_.empty(); path_.pop_back()) {
    nodes_[path_.back().value].last_access = tick();
    if (rules_.insert_renews_path) renew_state(path_.back());
    if (host_ != nullptr && node(path_.back()).depth() > inserted) count_insert(path_.back());
  }

  if (owned < depth) {
    append_slice(surplus_.kv, row, owned - row_begin, depth - row_begin);
    done.duplicates = depth - owned;
  }
  NodeIndex at = from;
  while (depth < size) {
    std::uint32_t common = 0;
    NodeIndex child = find_child(at, salt, key, depth, size - depth, common);
    if (!child.exists()) break;
    nodes_[child.value].last_access = tick();
    if (rules_.insert_renews_path) renew_state(child);
    if (common < node(child).edge_size()) child = split(child, common);
    const std::uint32_t first = std::max(owned, depth);
    depth += common;
    if (!is_on_device(child)) {
      LOCKSTEP_MARK("insert.brings_to_device");
      KvRuns computed;
      append_slice(computed, row, first - row_begin, depth - row_begin);
      put_on_device(child, std::move(computed));
      list_twice(child);
      if (windows_ != nullptr) fill_window(child, *window, false);
    } else if (first < depth) {
      done.duplicates += depth - first;
      if (windows_ == nullptr)
        append_slice(surplus_.kv, row, first - row_begin, depth - row_begin);
      else
        overlap_window(child, {row, row_begin, *window}, first, surplus_);
    }
    at = child;
    if (host_ != nullptr && depth > inserted) count_insert(at);
  }
  if (!surplus_.kv.empty()) {
    LOCKSTEP_MARK("insert.duplicates");
    if (rules_.frees_duplicates_twice) kv_.release(surplus_.kv);
    kv_.release_from(surplus_.kv, 0);
  }
  if (windows_ != nullptr) windows_->pool.release_from(surplus_.window, 0);
  if (depth < size) {
    const std::uint32_t leaf_start = depth;
    at = add_leaf(key.prefix(size), salt, at);
    append_slice(nodes_[at.value].kv, row, leaf_start - row_begin, size - row_begin);
    if (windows_ != nullptr) fill_window(at, *window, true);
    done.exist = rules_.has_states && attach(at, state);
    list_if_leaf(at);
    if (host_ != nullptr && size > inserted) count_insert(at);
  } else {
    unlist(at);
    list_if_leaf(at);
    done.exist = !rules_.has_states || attach(at, state);
    // The state alone of a node that is backed up.
    if (host_ != nullptr && !writes_back() && is_backed_up(at) &&
        host_->nodes[at.value].backup == 0)
      queue_backup(at);
  }
  if (windows_ != nullptr) renew_windows(at);
  done.end = at;
  return done;
}

NodeIndex RadixTree::find(const Tokens& tokens, Name salt) const {
  NodeIndex at = kRoot;
  while (node(at).depth() < tokens.size()) {
    const std::uint32_t depth = node(at).depth();
    std::uint32_t common = 0;
    at = find_child(at, salt, tokens, depth, tokens.size() - depth, common);
    if (!at.exists() || common < node(at).edge_size()) return NodeIndex::none();
  }
  return at;
}

std::uint32_t RadixTree::stored(const Tokens& tokens, Name salt) const {
  std::uint32_t depth = 0;
  for (NodeIndex at = kRoot; at.exists();) {
    std::uint32_t common = 0;
    at = find_child(at, salt, tokens, depth, tokens.size() - depth, common);
    if (at.exists() && !is_on_device(at)) break;
    depth += common;
    if (at.exists() && common < node(at).edge_size()) break;
  }
  return depth;
}

void RadixTree::append_path_kv(NodeIndex end, std::uint32_t first, KvRuns& out) const {
  for (NodeIndex at = end; node(at).depth() > first; at = node(at).parent) path_.push_back(at);
  for (; !path_.empty(); path_.pop_back()) {
    const RadixNode& part = node(path_.back());
    append_slice(out, part.kv, std::max(first, part.start) - part.start, part.edge_size());
  }
}

// --- Locks ---------------------------------------------------------------------------------------

void RadixTree::lock_kv(NodeIndex index) {
  RadixNode& locked = nodes_[index.value];
  if (locked.full_lock++ == 0) {
    unlist(index);
    sizes_.evictable_kv -= device_size(index);
    sizes_.protected_kv += device_size(index);
    if (host_ != nullptr) list_host_leaf(index);
  }
  touch(index, false);
}

void RadixTree::unlock_kv(NodeIndex index) {
  RadixNode& unlocked = nodes_[index.value];
  require(unlocked.full_lock != 0, "a node is unlocked as often as it was locked");
  if (--unlocked.full_lock == 0) {
    sizes_.evictable_kv += device_size(index);
    sizes_.protected_kv -= device_size(index);
    if (host_ != nullptr) {
      list_if_leaf(index);
      list_host_leaf(index);
    }
  }
  touch(index, false);
}

void RadixTree::lock_state(NodeIndex index) {
  if (!rules_.has_states) return;
  RadixNode& locked = nodes_[index.value];
  if (!locked.state.exists()) {
    LOCKSTEP_MARK("lock.tombstone");
    if (!rules_.counts_bare_locks || rules_.loses_bare_locks) return;
  }
  if (locked.state_lock++ == 0 && locked.state.exists()) {
    --sizes_.evictable_states;
    ++sizes_.protected_states;
  }
  if (host_ != nullptr) list_host_leaf(index);
  touch(index, false);
}

void RadixTree::unlock_state(NodeIndex index) {
  RadixNode& unlocked = nodes_[index.value];
  if (!rules_.has_states || (rules_.loses_bare_locks && unlocked.state_lock == 0)) return;
  if (!rules_.counts_bare_locks && !unlocked.state.exists()) return;
  require(unlocked.state_lock != 0, "a state is unlocked as often as it was locked");
  if (--unlocked.state_lock == 0 && unlocked.state.exists()) {
    ++sizes_.evictable_states;
    --sizes_.protected_states;
  }
  if (host_ != nullptr) list_host_leaf(index);
  touch(index, false);
}

void RadixTree::lock(NodeIndex end, bool with_state) {
  if (end == kRoot || !end.exists()) return;
  for (NodeIndex at = end; at != kRoot; at = node(at).parent) lock_kv(at);
  if (with_state) lock_state(end);
}

void RadixTree::unlock(NodeIndex end, bool with_state) {
  if (end == kRoot || !end.exists()) return;
  if (with_state) unlock_state(end);
  for (NodeIndex at = end; at != kRoot; at = node(at).parent) unlock_kv(at);
  list_if_leaf(end);
}

/// Requests move their locks down a path, so only the new part of the path is walked.
void RadixTree::move_lock(NodeIndex from, bool from_state, NodeIndex to, bool to_state) {
  NodeIndex at = to;
  for (; at != kRoot && at != from; at = node(at).parent) lock_kv(at);
  if (at != from && offers_children()) {
    unlock(from, from_state);  // a defect's match: it lies below `to`
    from = NodeIndex::none();
  }
  require(at == from || !from.exists(), "a lock moves down its path");
  if (from_state && from.exists()) unlock_state(from);
  if (to_state) lock_state(to);
}

// --- Eviction ------------------------------------------------------------------------------------

bool RadixTree::is_leaf(const RadixNode& candidate) const {
  return candidate.alive && candidate.parent.exists() && candidate.child_count == 0 &&
         candidate.full_lock == 0 && candidate.state_lock == 0 &&
         (host_ == nullptr || !candidate.kv.empty());
}

void RadixTree::lru_remove(NodeIndex index) {
  RadixNode& gone = nodes_[index.value];
  (gone.lru_newer.exists() ? nodes_[gone.lru_newer.value].lru_older : lru_newest_) = gone.lru_older;
  (gone.lru_older.exists() ? nodes_[gone.lru_older.value].lru_newer : lru_oldest_) = gone.lru_newer;
  gone.lru_newer = gone.lru_older = NodeIndex::none();
}

void RadixTree::lru_push_newest(NodeIndex index) {
  RadixNode& fresh = nodes_[index.value];
  fresh.lru_older = lru_newest_;
  (lru_newest_.exists() ? nodes_[lru_newest_.value].lru_newer : lru_oldest_) = index;
  lru_newest_ = index;
}

/// Enters a node into the list of leaves where it is one, at the place of its access time; `near`
/// is a listed leaf of about that age.
void RadixTree::list_if_leaf(NodeIndex index, NodeIndex near) {
  RadixNode& fresh = nodes_[index.value];
  if (fresh.listed || !is_leaf(fresh)) return;
  NodeIndex older = near.exists() ? near : leaf_newest_;
  while (older.exists() && node(older).last_access > fresh.last_access)
    older = node(older).leaf_older;
  NodeIndex newer = older.exists() ? node(older).leaf_newer : leaf_oldest_;
  while (newer.exists() && node(newer).last_access < fresh.last_access)
    newer = node(newer).leaf_newer;
  older = newer.exists() ? node(newer).leaf_older : leaf_newest_;
  fresh.listed = true;
  fresh.leaf_newer = newer;
  fresh.leaf_older = older;
  (newer.exists() ? nodes_[newer.value].leaf_older : leaf_newest_) = index;
  (older.exists() ? nodes_[older.value].leaf_newer : leaf_oldest_) = index;
}

void RadixTree::unlist(NodeIndex index) {
  RadixNode& gone = nodes_[index.value];
  if (!gone.listed) return;
  (gone.leaf_newer.exists() ? nodes_[gone.leaf_newer.value].leaf_older : leaf_newest_) =
      gone.leaf_older;
  (gone.leaf_older.exists() ? nodes_[gone.leaf_older.value].leaf_newer : leaf_oldest_) =
      gone.leaf_newer;
  gone.listed = false;
}

/// KV and state go, and the parent may have become a leaf; it stays even where it is a childless
/// tombstone (older rules: it goes too, and so on upwards). False where the leaf has to stay.
bool RadixTree::drop_leaf(NodeIndex index, Evicted& evicted) {
  if (writes_back() && !is_backed_up(index)) write_back(index);
  if (host_ != nullptr && is_backed_up(index)) {
    demote(index, evicted);
    return true;
  }
  if (host_ != nullptr && !drop_extensions(index)) return false;
  RadixNode& leaf = nodes_[index.value];
  evicted.kv += leaf.edge_size();
  auto& leaf_kv = leaf.full_lock != 0 ? sizes_.protected_kv : sizes_.evictable_kv;
  if (rules_.counts_dropped_kv) leaf_kv -= leaf.edge_size();
  if (leaf.state.exists()) {
    states_.release(leaf.state);
    evicted.states += 1;
    (leaf.state_lock != 0 ? sizes_.protected_states : sizes_.evictable_states) -= 1;
    lru_remove(index);
  } else {
    LOCKSTEP_MARK("evict.tombstone_leaf");
  }
  kv_.release_from(leaf.kv, 0);
  if (windows_ != nullptr) {
    drop_window(index, evicted);
    windows_->nodes[index.value] = {};
  }
  const NodeIndex neighbour = leaf.listed ? leaf.leaf_older : NodeIndex::none();
  unlist(index);
  if (host_ != nullptr) forget_host_copy(index);
  remove_child(index);
  const NodeIndex parent = leaf.parent;
  --nodes_[parent.value].child_count;
  touch(index, true);
  touch(parent, false);
  KvRuns kv = std::move(leaf.kv);
  std::destroy_at(&leaf);
  std::construct_at(&leaf)->kv = std::move(kv);  // its capacity, for the node that gets this index
  dead_.push_back(index);
  if (rules_.drops_bare_parents && is_leaf(node(parent)) && !node(parent).state.exists())
    drop_leaf(parent, evicted);
  else
    list_if_leaf(parent, neighbour.exists() ? neighbour : leaf_oldest_);
  return true;
}

/// A leaf goes whole; an inner node, or a leaf whose KV is locked, becomes a tombstone.
void RadixTree::evict_state(NodeIndex index, Evicted& evicted) {
  RadixNode& victim = nodes_[index.value];
  if (is_leaf(victim) && rules_.evicts_leaves_whole) {
    drop_leaf(index, evicted);
    return;
  }
  if (writes_back()) write_back_state(index);
  forget_state(index, evicted);
}

/// The node becomes a tombstone.
void RadixTree::forget_state(NodeIndex index, Evicted& evicted) {
  LOCKSTEP_MARK("evict.tombstone");
  RadixNode& victim = nodes_[index.value];
  if (rules_.frees_evicted_states) states_.release(victim.state);
  evicted.states += 1;
  (victim.state_lock != 0 ? sizes_.protected_states : sizes_.evictable_states) -= 1;
  lru_remove(index);
  victim.state = StateSlot::none();
  if (host_ != nullptr) list_host_state(index);
  touch(index, false);
}

template <class Done>
void RadixTree::evict_leaves(Evicted& evicted, Done done) {
  std::vector<NodeIndex> stay;
  while (!done()) {
    NodeIndex oldest = leaf_oldest_;
    while (oldest.exists() && std::ranges::find(stay, oldest) != stay.end())
      oldest = node(oldest).leaf_newer;
    if (!oldest.exists()) return;
    if (!drop_leaf(oldest, evicted)) stay.push_back(oldest);
  }
}

template <class Done>
void RadixTree::evict_states(Evicted& evicted, Done done) {
  const auto evictable = [&](NodeIndex from) {
    while (from.exists() && node(from).state_lock != 0 && rules_.locks_keep_states)
      from = node(from).lru_newer;
    return from;
  };
  if (done()) return;
  NodeIndex victim = evictable(lru_oldest_);
  while (!done() && victim.exists()) {
    // The next one is chosen before the step, as the original does: on the device a drop removes
    // its victim alone.
    const NodeIndex next = evictable(node(victim).lru_newer);
    evict_state(victim, evicted);
    victim = next;
  }
}

RadixTree::Evicted RadixTree::evict(std::int64_t kv_tokens, std::int64_t states,
                                    std::int64_t window_tokens) {
  Evicted evicted;
  evict_leaves(evicted, [&] { return evicted.kv >= kv_tokens; });
  if (windows_ != nullptr) evict_windows(evicted, [&] { return evicted.window >= window_tokens; });
  evict_states(evicted, [&] { return evicted.states >= states; });
  return evicted;
}

RadixTree::Evicted RadixTree::evict_for_alloc(std::int64_t kv_shortfall,
                                              std::int64_t state_shortfall,
                                              std::int64_t window_shortfall) {
  Evicted evicted;
  const std::int64_t kv_target = kv_.free_count() + kv_shortfall;
  const std::int64_t state_target = states_.free_count() + state_shortfall;
  if (windows_ != nullptr) window_shortfall += windows_->pool.free_count();
  evict_leaves(evicted, [&] { return kv_shortfall <= 0 || kv_.free_count() >= kv_target; });
  if (windows_ != nullptr)
    evict_windows(evicted, [&] { return windows_->pool.free_count() >= window_shortfall; });
  evict_states(evicted,
               [&] { return state_shortfall <= 0 || states_.free_count() >= state_target; });
  return evicted;
}

}  // namespace lockstep::cache_sim
