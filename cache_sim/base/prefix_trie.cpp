#include "cache_sim/base/prefix_trie.hpp"

#include <algorithm>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

PrefixTrie::Match PrefixTrie::match(const Tokens& tokens, Name space) const {
  Match match;
  if (space.exists()) {
    const auto root = children_.find({kNone, space.index()});
    if (root == children_.end()) return match;
    match.node = root->second;
  }
  while (match.size < tokens.size()) {
    const auto child = children_.find({match.node, tokens[match.size]});
    if (child == children_.end()) return match;
    const Node& node = nodes_[child->second];
    const std::uint32_t limit = std::min(tokens.size(), node.end) - node.begin;
    match.size += node.sequence.common(node.begin, tokens, match.size, limit);
    if (match.size < node.end) {
      match.into = child->second;
      return match;
    }
    match.node = child->second;
  }
  return match;
}

PrefixTrie::Index PrefixTrie::insert(const Tokens& tokens, Name space, SplitListener* split) {
  if (space.exists() &&
      children_.try_emplace({kNone, space.index()}, static_cast<Index>(nodes_.size())).second)
    nodes_.emplace_back();
  const Match found = match(tokens, space);
  Index node = found.node;
  if (found.into != kNone) {
    node = split_above(found.into, found.size);
    if (split != nullptr) split->split(node, found.into);
  }
  if (found.size == tokens.size()) return node;
  const auto fresh = static_cast<Index>(nodes_.size());
  nodes_.push_back({tokens, found.size, tokens.size(), node, 0});
  children_.emplace(Edge{node, tokens[found.size]}, fresh);
  ++nodes_[node].child_count;
  return fresh;
}

PrefixTrie::Index PrefixTrie::split_above(Index below, std::uint32_t end) {
  const auto above = static_cast<Index>(nodes_.size());
  Node& old = nodes_[below];
  Node fresh{old.sequence, old.begin, end, old.parent, 1};
  children_.at({old.parent, old.sequence[old.begin]}) = above;
  children_.emplace(Edge{above, old.sequence[end]}, below);
  old.begin = end;
  old.parent = above;
  nodes_.push_back(std::move(fresh));
  return above;
}

void PrefixTrie::trim(Index leaf, std::uint32_t end) {
  Node& node = nodes_[leaf];
  require(leaf != kRoot && node.child_count == 0, "a leaf is trimmed");
  require(node.begin <= end && end <= node.end, "trimming shortens an edge");
  if (end == node.begin) {
    children_.erase({node.parent, node.sequence[node.begin]});
    --nodes_[node.parent].child_count;
    node.sequence = Tokens();
  }
  node.end = end;
}

}  // namespace lockstep::cache_sim
