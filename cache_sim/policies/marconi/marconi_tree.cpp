#include "cache_sim/policies/marconi/marconi_tree.hpp"

#include <algorithm>
#include <tuple>

#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

MarconiTree::MarconiTree(const MarconiCosts& costs, Memory* memory, const MarconiRules& variant,
                         const MarconiRules& rules)
    : costs_(costs), memory_(memory), variant_(variant), rules_(rules) {
  nodes_.emplace_back();
  nodes_[kRoot].alive = true;
}

MarconiTree MarconiTree::counting_copy() const {
  MarconiTree copy = *this;
  copy.memory_ = nullptr;
  copy.rules_ = variant_;
  copy.locked_tokens_ = copy.locked_states_ = 0;
  for (Index i = 1; i < copy.nodes_.size(); ++i) {
    Node& node = copy.nodes_[i];
    node.kv.clear();
    node.state = StateSlot::none();
    node.locks = 0;
    if (node.alive) copy.touch(i);
  }
  return copy;
}

// --- Paths ---------------------------------------------------------------------------------------

MarconiTree::Index MarconiTree::child_of(Index parent, Name salt, Token first) const {
  const auto found = children_.find({parent, parent == kRoot ? salt.index() : 0, first});
  return found == children_.end() ? kNone : found->second;
}

MarconiTree::Walk MarconiTree::walk(const Tokens& tokens, std::uint32_t size, Name salt) const {
  Walk walk;
  while (walk.size < size) {
    const Index child = child_of(walk.node, salt, tokens[walk.size]);
    if (child == kNone) return walk;
    const Node& next = nodes_[child];
    const std::uint32_t limit = std::min(size, next.end) - walk.size;
    walk.size += tokens.common(walk.size, next.path, next.begin, limit);
    if (walk.size < next.end) {
      walk.into = child;
      return walk;
    }
    walk.node = child;
    if (next.has_state) walk.with_state = child;
  }
  return walk;
}

MarconiTree::Match MarconiTree::match(const Tokens& tokens, std::uint32_t size, Name salt) {
  ++clock_;
  Walk path = walk(tokens, size, salt);
  if (!rules_.match_ends_inside_edges && path.into != kNone && path.size < size) {
    // Looks for the rest of the key below the edge, as if the key had passed the whole edge.
    const Index below = child_of(path.into, salt, tokens[path.size]);
    if (below != kNone && nodes_[below].has_state) {
      const Node& wrong = nodes_[below];
      path.size += tokens.common(path.size, wrong.path, wrong.begin,
                                 std::min(size - path.size, wrong.edge_size()));
      nodes_[below].time = clock_;
      return {below, path.size, path.size};
    }
  }
  if (rules_.match_renews_path)
    for (Index node = path.with_state; node != kRoot; node = nodes_[node].parent)
      nodes_[node].time = clock_;
  if (path.with_state != kRoot) nodes_[path.with_state].time = clock_;
  return {path.with_state, nodes_[path.with_state].end, path.size};
}

void MarconiTree::append_path_kv(Index index, KvRuns& onto) const {
  std::vector<Index> path;
  for (Index node = index; node != kRoot; node = nodes_[node].parent) path.push_back(node);
  for (auto node = path.rbegin(); node != path.rend(); ++node)
    for (const KvRun& run : nodes_[*node].kv) append_run(onto, run);
}

// --- Nodes ---------------------------------------------------------------------------------------

MarconiTree::Index MarconiTree::new_node() {
  if (free_.empty()) {
    free_.push_back(static_cast<Index>(nodes_.size()));
    nodes_.emplace_back();
  }
  const Index index = free_.back();
  free_.pop_back();
  nodes_[index] = Node{};
  nodes_[index].alive = true;
  return index;
}

void MarconiTree::link(Index child) {
  const Node& node = nodes_[child];
  children_[edge_of(node)] = child;
  ++nodes_[node.parent].child_count;
  nodes_[node.parent].child_sum += child;
}

void MarconiTree::unlink(Index child) {
  const Node& node = nodes_[child];
  children_.erase(edge_of(node));
  --nodes_[node.parent].child_count;
  nodes_[node.parent].child_sum -= child;
}

/// Adds a node's edge and state to the sums, or subtracts them.
void MarconiTree::count(const Node& node, std::int64_t sign) {
  tokens_ += sign * node.edge_size();
  states_ += node.has_state ? sign : 0;
  bytes_ +=
      sign * (node.edge_size() * costs_.token_bytes + (node.has_state ? costs_.state_bytes : 0));
  if (node.locks == 0) return;
  locked_tokens_ += sign * node.edge_size();
  locked_states_ += node.has_state ? sign : 0;
}

/// A new node for the first part of an edge; the longer half stays the node that it was.
MarconiTree::Index MarconiTree::split(Index below, std::uint32_t at) {
  LOCKSTEP_MARK("marconi.split");
  const Index above = new_node();
  unlink(below);
  Node& lower = nodes_[below];
  Node& upper = nodes_[above];
  upper.path = lower.path.prefix(at);
  upper.salt = lower.salt;
  upper.begin = lower.begin;
  upper.end = at;
  upper.parent = lower.parent;
  upper.locks = lower.locks;
  upper.time = lower.time;
  append_slice(upper.kv, lower.kv, 0, lower.kv.empty() ? 0 : at - lower.begin);
  if (!lower.kv.empty()) {
    KvRuns rest;
    append_slice(rest, lower.kv, at - lower.begin, lower.edge_size());
    lower.kv.swap(rest);
  }
  lower.begin = at;
  lower.parent = above;
  if (rules_.split_moves_state) {
    std::swap(upper.state, lower.state);
    std::swap(upper.has_state, lower.has_state);
  }
  link(above);
  link(below);
  touch(below);
  return above;
}

void MarconiTree::set_state(Index index, StateSlot state) {
  Node& node = nodes_[index];
  count(node, -1);
  node.state = state;
  node.has_state = true;
  count(node, 1);
}

MarconiTree::Inserted MarconiTree::insert(const Tokens& tokens, std::uint32_t size, Name salt,
                                          const KvRuns* kv, StateSlot state) {
  ++clock_;
  const Walk path = walk(tokens, size, salt);
  if (rules_.insert_matches && path.with_state != kRoot) nodes_[path.with_state].time = clock_;
  Index end = path.into == kNone ? path.node : split(path.into, path.size);
  if (path.size < size) {
    const Index leaf = new_node();
    Node& node = nodes_[leaf];
    node.path = tokens.prefix(size);
    node.salt = salt;
    node.begin = path.size;
    node.end = size;
    node.parent = end;
    if (kv != nullptr) append_slice(node.kv, *kv, path.size, size);
    count(node, 1);
    link(leaf);
    touch(end);
    end = leaf;
  }
  const bool exist = nodes_[end].has_state;
  if (!exist) set_state(end, state);
  nodes_[end].time = clock_;
  touch(end);
  return {end, exist, path.size};
}

void MarconiTree::add_lock(Index index, std::int64_t change) {
  for (; index != kRoot; index = nodes_[index].parent) {
    Node& node = nodes_[index];
    count(node, -1);
    node.locks = static_cast<std::uint32_t>(node.locks + change);
    count(node, 1);
    touch(index);
  }
}

// --- Eviction ------------------------------------------------------------------------------------

double MarconiTree::efficiency_of(const Node& node) const {
  const MarconiCosts::Flops& parent =
      rules_.takes_mlp_for_attention ? costs_.mlp_as_attention : costs_.flops;
  const double saved = costs_.flops.of(node.end) - parent.of(node.begin);
  const std::int64_t bytes =
      (rules_.divides_by_whole_prefix ? node.end : node.edge_size()) * costs_.token_bytes +
      costs_.state_bytes;
  return saved / static_cast<double>(bytes);
}

/// The node has changed: computes again whether it is a candidate, and its efficiency.
void MarconiTree::touch(Index index) {
  if (index == kRoot) return;
  Node& node = nodes_[index];
  const std::uint32_t most_children = rules_.evicts_where_prefixes_part ? 2 : 1;
  const bool is_candidate = node.alive && node.has_state && node.child_count <= most_children &&
                            (node.locks == 0 || !rules_.locks_keep_nodes);
  if (is_candidate) node.efficiency = efficiency_of(node);
  if (is_candidate == (node.place != kNone)) return;
  if (is_candidate) {
    node.place = static_cast<std::uint32_t>(candidates_.size());
    candidates_.push_back(index);
    return;
  }
  const Index last = candidates_.back();
  candidates_[node.place] = last;
  nodes_[last].place = node.place;
  candidates_.pop_back();
  node.place = kNone;
}

/// The candidate with the least score; among equals the oldest, then the shortest.
MarconiTree::Index MarconiTree::worst(double alpha) const {
  constexpr double kHuge = std::numeric_limits<double>::infinity();
  const auto recency = [&](const Node& node) {
    return 1.0 / static_cast<double>(clock_ + 1 - node.time);
  };
  double low_recency = kHuge, high_recency = -kHuge, low_flops = kHuge, high_flops = -kHuge;
  for (const Index index : candidates_) {
    const Node& node = nodes_[index];
    low_recency = std::min(low_recency, recency(node));
    high_recency = std::max(high_recency, recency(node));
    low_flops = std::min(low_flops, node.efficiency);
    high_flops = std::max(high_flops, node.efficiency);
  }
  const auto norm = [](double value, double low, double high) {
    return high == low ? 0 : (value - low) / (high - low);
  };
  Index least = kNone;
  double least_score = kHuge;
  for (const Index index : candidates_) {
    const Node& node = nodes_[index];
    const double score = norm(recency(node), low_recency, high_recency) +
                         alpha * norm(node.efficiency, low_flops, high_flops);
    if (least != kNone && std::tie(score, node.time, node.end) >=
                              std::tie(least_score, nodes_[least].time, nodes_[least].end))
      continue;
    least = index;
    least_score = score;
  }
  return least;
}

bool MarconiTree::evict_one(double alpha, Evicted& evicted) {
  const Index index = worst(alpha);
  if (index == kNone) return false;
  const std::int64_t bytes_before = bytes_;
  const Node& looked_at_last = nodes_[candidates_.back()];
  const std::int64_t bytes_of_last =
      looked_at_last.edge_size() * costs_.token_bytes + costs_.state_bytes;
  const bool is_leaf = nodes_[index].child_count == 0;
  drop_state(index, evicted);
  tidy_up(index, evicted);
  if (rules_.frees_anothers_bytes && is_leaf) bytes_ = bytes_before - bytes_of_last;
  return true;
}

void MarconiTree::drop_state(Index index, Evicted& evicted) {
  Node& node = nodes_[index];
  count(node, -1);
  if (memory_ != nullptr) memory_->release(node.state);
  node.state = StateSlot::none();
  node.has_state = false;
  count(node, 1);
  ++evicted.states;
  touch(index);
}

/// Cleans up a node that has lost its state: with two children it stays, with one it becomes a part
/// of the child's edge, and without children it is removed, because no request can use its KV.
void MarconiTree::tidy_up(Index index, Evicted& evicted) {
  if (!nodes_[index].has_state && nodes_[index].child_count == 0) {
    // The parent is no candidate for removal: it has a state or another child.
    const Index parent = nodes_[index].parent;
    remove_leaf(index, evicted);
    index = parent;
  }
  if (index == kRoot) return;
  if (!nodes_[index].has_state && nodes_[index].child_count == 1) return merge_into_child(index);
  touch(index);
}

void MarconiTree::remove_leaf(Index index, Evicted& evicted) {
  Node& node = nodes_[index];
  count(node, -1);
  evicted.kv += node.edge_size();
  if (memory_ != nullptr) memory_->release(node.kv);
  unlink(index);
  node.alive = false;
  touch(index);
  node = Node{};
  free_.push_back(index);
}

void MarconiTree::merge_into_child(Index index) {
  LOCKSTEP_MARK("marconi.merge");
  const auto below = static_cast<Index>(nodes_[index].child_sum);
  Node& child = nodes_[below];
  Node& gone = nodes_[index];
  count(gone, -1);
  count(child, -1);
  unlink(below);
  unlink(index);
  if (rules_.merge_passes_kv)
    for (const KvRun& run : child.kv) append_run(gone.kv, run);
  child.kv.swap(gone.kv);
  child.begin = gone.begin;
  child.parent = gone.parent;
  link(below);
  count(child, 1);
  gone.alive = false;
  touch(index);
  gone = Node{};
  free_.push_back(index);
  touch(below);
  touch(child.parent);
}

}  // namespace lockstep::cache_sim
