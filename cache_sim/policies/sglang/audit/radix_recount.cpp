// The auditor's counts from nothing: every node, lock, list, slot and table of the policy, whatever
// the operations before have touched.
#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/policies/sglang/audit/radix_auditor.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {
constexpr std::uint64_t kPictureEvery = 4;  // recounts

}  // namespace

void RadixAuditor::recompute(Findings& findings) {
  findings_ = &findings;
  recount_nodes();
  recount_locks();
  if (has_states_) recount_list();
  recount_slots();
  recount_places();
  if (recounts_++ % kPictureEvery == 0) recount_picture();
}

/// The tree for a report: each node once, after its parent, with its own edge.
void RadixAuditor::recount_picture() {
  const std::optional<Snapshot> shown = policy_.snapshot();
  const RadixTree& tree = policy_.tree();
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 1; i < tree.node_count(); ++i)
    if (tree.node({i}).alive) order.push_back(i);
  std::ranges::sort(order, [&](std::uint32_t a, std::uint32_t b) {
    return std::pair(tree.node({a}).depth(), tree.node({a}).serial) <
           std::pair(tree.node({b}).depth(), tree.node({b}).serial);
  });
  std::unordered_map<std::uint32_t, int> place = {{kRoot.value, -1}};
  bool same = shown->nodes.size() == order.size() &&
              shown->kv_free == policy_.kv_pool().free_count() &&
              shown->kv_total == policy_.kv_pool().slot_count() &&
              shown->states_free == policy_.state_pool().free_count() &&
              shown->states_total == policy_.state_pool().slot_count();
  for (std::size_t i = 0; same && i < order.size(); ++i) {
    const RadixNode& now = tree.node({order[i]});
    const SnapshotNode& picture = shown->nodes[i];
    place[order[i]] = static_cast<int>(i);
    same = picture.parent == place.at(now.parent.value) && picture.depth == now.depth() &&
           picture.edge == now.path.slice(now.start, now.depth()).text(40) &&
           picture.has_state == now.state.exists() && picture.locked == (now.full_lock > 0) &&
           picture.path == now.path.prefix(now.depth()).text(40) &&
           picture.state_slot == (now.state.exists() ? now.state.value : 0);
  }
  if (!same)
    report(FindingKind::size_accounting, "the picture of the cache is not the cache",
           "every node, in order", "something else");
}

/// Tables: what is reused is neither lost nor there twice.
void RadixAuditor::recount_places() {
  const RadixTree& tree = policy_.tree();
  const auto hold = [&](const char* what, std::size_t due, std::size_t counted) {
    if (due != counted)
      report(FindingKind::size_accounting,
             fmt::format("{} {} where there are {}", counted, what, due), std::to_string(due),
             std::to_string(counted));
  };
  std::size_t alive = 0;
  for (std::uint32_t i = 1; i < tree.node_count(); ++i) alive += tree.node({i}).alive ? 1 : 0;
  hold("dead nodes wait for a new one", tree.node_count() - 1 - alive, tree.dead_count());
  hold("nodes are counted among the children of all", alive, tree.child_total());
  hold("nodes are found among the children of all", alive, tree.count_children());

  std::size_t running = 0;
  std::vector<char> row_used(static_cast<std::size_t>(policy_.config().rows()) + 1);
  const auto use_row = [&](RequestRow row) {
    if (row.value == 0 || row.value >= row_used.size() || row_used[row.value]++ != 0)
      report(FindingKind::slot_in_two_places,
             fmt::format("row {} is not one of its own", row.value), "one owner", "another");
  };
  for (const RadixRequest& request : policy_.requests()) {
    if (!request.id.exists()) continue;
    ++running;
    use_row(request.row);
  }
  for (const RequestRow row : policy_.free_rows()) use_row(row);
  hold("rows are free", static_cast<std::size_t>(policy_.config().rows()) - running,
       policy_.free_rows().size());
  hold("places of requests are free", policy_.requests().size() - running,
       policy_.free_place_count());
}

/// I3, I8, I9 and I5's sums: every node against the tokens themselves.
void RadixAuditor::recount_nodes() {
  const RadixTree& tree = policy_.tree();
  std::vector<std::uint32_t> children(tree.node_count());
  RadixTree::Sizes sizes;
  for (std::uint32_t i = 1; i < tree.node_count(); ++i) {
    const RadixNode& now = tree.node({i});
    if (!now.alive) continue;
    if (!now.kv.empty()) ++children[now.parent.value];  // on the device
    const RadixNode& parent = tree.node(now.parent);
    if (!parent.alive || parent.depth() != now.start || now.start >= now.depth() ||
        now.path.prefix(now.start) != parent.path ||
        (now.parent != kRoot && now.salt != parent.salt))
      report(FindingKind::wrong_state_prefix,
             fmt::format("{} does not continue its parent", name_of({i})),
             "the parent's path and more", now.path.text(40));
    if (tree.find(now.path, now.salt) != NodeIndex{i})
      report(FindingKind::missed_reuse, fmt::format("{} is not found from the root", name_of({i})),
             "found", "lost");
    if (tree.is_on_device({i}))
      (now.full_lock != 0 ? sizes.protected_kv : sizes.evictable_kv) += now.edge_size();
    if (now.state.exists())
      (now.state_lock != 0 ? sizes.protected_states : sizes.evictable_states) += 1;
    check_kv_labels({i});
    recount_kv_labels(now, {i});
    if (now.state.exists()) check_state_label({i});
  }
  for (std::uint32_t i = 1; i < tree.node_count(); ++i) {
    const RadixNode& now = tree.node({i});
    const bool is_leaf =
        children[i] == 0 && now.full_lock == 0 && now.state_lock == 0 && tree.is_on_device({i});
    if (now.alive && is_leaf && !now.listed)
      report(FindingKind::leak, fmt::format("{} is a leaf that eviction cannot find", name_of({i})),
             "in the list of leaves", "not in it");
  }
  for (std::uint32_t i = 0; i < tree.node_count(); ++i)
    if (tree.node({i}).alive && tree.node({i}).child_count != children[i])
      report(FindingKind::size_accounting,
             fmt::format("{} counts {}, and {} call it their parent", name_of({i}),
                         counted(tree.node({i}).child_count, "child", "children"), children[i]),
             std::to_string(children[i]), std::to_string(tree.node({i}).child_count));
  if (sizes != tree.sizes())
    report(
        FindingKind::size_accounting, "the tree's sizes are not the sums over its nodes",
        fmt::format("{} + {}, {} + {}", sizes.evictable_kv, counted(sizes.protected_kv, "KV token"),
                    sizes.evictable_states, counted(sizes.protected_states, "state")),
        fmt::format("{} + {}, {} + {}", tree.sizes().evictable_kv,
                    counted(tree.sizes().protected_kv, "KV token"), tree.sizes().evictable_states,
                    counted(tree.sizes().protected_states, "state")));
}

/// Every KV slot of the edge, not only the last of each run.
void RadixAuditor::recount_kv_labels(const RadixNode& now, NodeIndex index) {
  if (labels_ == nullptr) return;
  fingerprints_.resize(now.edge_size());
  now.path.prefix_fingerprints(now.start, now.depth(), fingerprints_);
  std::size_t at = 0;
  for (const KvRun& run : now.kv)
    for (const std::uint32_t slot : run.slots()) {
      if (at == fingerprints_.size()) return;
      if (labels_->kv_exists(slot) && !labels_->kv_awaited(slot) &&
          labels_->kv_fingerprint(slot) != fingerprints_[at])
        return report(FindingKind::wrong_state_prefix,
                      fmt::format("KV slot {} of {} is not that of token {}", slot, name_of(index),
                                  now.start + at),
                      "its own prefix", "another");
      ++at;
    }
}

/// I6: locks against their holders.
void RadixAuditor::recount_locks() {
  const RadixTree& tree = policy_.tree();
  std::vector<std::uint32_t> full(tree.node_count());
  std::vector<std::uint32_t> state(tree.node_count());
  const auto hold = [&](NodeIndex end, bool with_state) {
    if (!end.exists() || end == kRoot) return;
    state[end.value] += with_state && locks_state(end) ? 1 : 0;
    for (NodeIndex at = end; at.exists() && at != kRoot; at = tree.node(at).parent)
      ++full[at.value];
  };
  for (const RadixRequest& request : policy_.requests())
    if (request.id.exists()) hold(request.locked, request.state_locked);
  for (const HeldLock& held : policy_.held_locks()) hold(held.node, true);
  for (const Copy& copy : copies_) hold(copy.node, true);
  for (std::uint32_t i = 1; i < tree.node_count(); ++i) {
    const RadixNode& now = tree.node({i});
    if (now.alive && (now.full_lock != full[i] || now.state_lock != state[i]))
      report(FindingKind::lock_imbalance,
             fmt::format("{} counts {} KV and {}, and {} and {} are held", name_of({i}),
                         now.full_lock, counted(now.state_lock, "state lock"), full[i], state[i]),
             fmt::format("{} and {}", full[i], state[i]),
             fmt::format("{} and {}", now.full_lock, now.state_lock));
  }
}

/// I7: the list of states, both ways, holds exactly the nodes with a state.
void RadixAuditor::recount_list() {
  const RadixTree& tree = policy_.tree();
  std::size_t with_state = 0;
  for (std::uint32_t i = 1; i < tree.node_count(); ++i)
    with_state += tree.node({i}).alive && tree.node({i}).state.exists();
  std::size_t listed = 0;
  NodeIndex newer = NodeIndex::none();
  NodeIndex at = tree.lru_newest();
  for (; at.exists() && listed <= with_state; newer = at, at = tree.node(at).lru_older, ++listed) {
    const RadixNode& now = tree.node(at);
    if (!now.alive || !now.state.exists() || now.lru_newer != newer)
      return report(FindingKind::lru_order,
                    fmt::format("the list of states is broken at {}", name_of(at)),
                    "a node with a state and both links", "something else");
  }
  if (listed != with_state || newer != tree.lru_oldest())
    report(FindingKind::lru_order,
           "the list of states does not hold exactly the nodes with a state",
           std::to_string(with_state), std::to_string(listed));
}

/// I1, I2, I12: every slot is free or has one owner.
void RadixAuditor::recount_slots() {
  kv_owner_.reset();
  state_owner_.reset();
  owned_kv_ = owned_states_ = 0;
  const RadixTree& tree = policy_.tree();
  for (std::uint32_t i = 1; i < tree.node_count(); ++i) {
    if (!tree.node({i}).alive) continue;
    own_kv(tree.node({i}).kv, kOfNode | i);
    own_state(tree.node({i}).state, kOfNode | i);
  }
  for (std::uint32_t i = 0; i < requests_.size(); ++i) {
    if (!requests_[i].id.exists()) continue;
    const auto now = std::ranges::find(policy_.requests(), requests_[i].id, &RadixRequest::id);
    if (now == policy_.requests().end()) continue;
    scratch_.clear();
    cut(now->kv, now->owned, now->allocated, scratch_);
    own_kv(scratch_, kOfRequest | i);
    own_state(now->live, kOfRequest | i);
    for (const StateSlot slot : now->tracking.slots) own_state(slot, kOfRequest | i);
  }
  for (std::uint32_t i = 0; i < policy_.held_slots().size(); ++i)
    own_state(policy_.held_slots()[i].slot, kOfHeld | i);
  ZeroedArray<char> free_kv(kv_owner_.size());
  std::int64_t free_kv_count = policy_.kv_pool().unused_count();
  for (const KvRun& run : policy_.kv_pool().free_runs())
    for (const std::uint32_t slot : run.slots()) {
      ++free_kv_count;
      if (free_kv[slot] != 0)
        report(FindingKind::double_free, fmt::format("KV slot {} is in the free list twice", slot),
               "once", "twice");
      if (kv_owner_[slot] != 0)
        report(
            FindingKind::freed_slot_in_use,
            fmt::format("KV slot {} is free and belongs to {}", slot, owner_name(kv_owner_[slot])),
            "one or the other", "both");
      free_kv[slot] = 1;
    }
  if (free_kv_count != policy_.kv_pool().free_count())
    report(FindingKind::size_accounting, "the KV pool's count of free slots is not their number",
           std::to_string(free_kv_count), std::to_string(policy_.kv_pool().free_count()));
  ZeroedArray<char> free_state(state_owner_.size());
  for (const StateSlot slot : policy_.state_pool().free_slots()) {
    if (slot.value >= free_state.size()) continue;
    if (free_state[slot.value] != 0)
      report(FindingKind::double_free,
             fmt::format("state slot {} is in the free list twice", slot.value), "once", "twice");
    if (state_owner_[slot.value] != 0)
      report(FindingKind::freed_slot_in_use,
             fmt::format("state slot {} is free and belongs to {}", slot.value,
                         owner_name(state_owner_[slot.value])),
             "one or the other", "both");
    free_state[slot.value] = 1;
  }
  check_totals();
}

}  // namespace lockstep::cache_sim
