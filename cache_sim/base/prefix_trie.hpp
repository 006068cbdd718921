// Token sequences as a compressed tree: how long a prefix of a new sequence is known. The ideal
// policies store what they keep in it; runs and logs store what a server was given, which bounds
// what it can have cached. It has no pools, locks or slots;
// cache_sim/policies/sglang/radix_tree.hpp is a server's tree.
//
// Sequences of different namespaces (salts) share nothing: each namespace has a root of its own,
// the one without a name kRoot.
#pragma once

#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "reference/base/ids.hpp"
#include "reference/base/mix.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

class PrefixTrie {
 public:
  using Index = std::uint32_t;
  static constexpr Index kRoot = 0;
  static constexpr Index kNone = std::numeric_limits<Index>::max();

  /// Stands for the tokens [0, end) of its sequence; its edge is [begin, end). A node keeps its
  /// index for as long as it stands for the same end: a split makes a new node above it.
  struct Node {
    Tokens sequence;
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    Index parent = kNone;
    std::uint32_t child_count = 0;
  };

  /// How far a sequence is stored: `size` tokens, and the last node that lies wholly within them.
  struct Match {
    Index node = kRoot;
    std::uint32_t size = 0;
    Index into = kNone;  ///< the child whose edge was left in the middle, none at a node's end
  };

  PrefixTrie() : nodes_(1) {}

  Match match(const Tokens& tokens, Name space = Name()) const;
  /// The longest prefix that the tokens share with anything stored in this namespace.
  std::uint32_t longest_common(const Tokens& tokens, Name space = Name()) const {
    return match(tokens, space).size;
  }

  /// Stores a sequence, so that a node ends with it, and gives that node. `split`, which may be
  /// null, hears of a node that was made above another one.
  struct SplitListener {
    virtual ~SplitListener() = default;
    virtual void split(Index above, Index below) = 0;
  };
  Index insert(const Tokens& tokens, Name space = Name(), SplitListener* split = nullptr);

  /// Shortens a leaf's edge; an empty one is unlinked, and its index is never used again.
  void trim(Index leaf, std::uint32_t end);

  const Node& node(Index index) const { return nodes_[index]; }
  std::size_t node_count() const { return nodes_.size(); }  ///< unlinked ones and roots too

 private:
  /// A child by its first token; a namespace's root is the child of kNone by the name's index.
  struct Edge {
    Index parent;
    Token first;
    bool operator==(const Edge&) const = default;
  };
  struct EdgeHash {
    std::size_t operator()(const Edge& edge) const {
      return mix64(edge.first ^ std::uint64_t{edge.parent} << 40);
    }
  };
  Index split_above(Index below, std::uint32_t end);

  std::vector<Node> nodes_;
  std::unordered_map<Edge, Index, EdgeHash> children_;
};

}  // namespace lockstep::cache_sim
