// Token sequences as a compressed tree (a radix tree), which finds the longest stored prefix of a
// new sequence. The ideal policies keep their cache in it. A run and a log store in it the tokens
// that a server was given, which bound what the server can have cached. It has no pools, no locks
// and no slots.
//
// Sequences of different namespaces (salts) share nothing: each namespace has a root of its own.
// kRoot is the root of the sequences without a namespace.
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

  /// A node stands for the tokens [0, end) of its sequence; its edge holds the tokens [begin, end).
  /// A node keeps its index as long as its `end` stays the same: a split makes a new node above it.
  struct Node {
    Tokens sequence;
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    Index parent = kNone;
    std::uint32_t child_count = 0;
  };

  /// The stored part of a sequence: its first `size` tokens, and the last node that lies wholly
  /// within them.
  struct Match {
    Index node = kRoot;
    std::uint32_t size = 0;
    Index into = kNone;  ///< the child inside whose edge the match ends; kNone: at a node
  };

  PrefixTrie() : nodes_(1) {}

  Match match(const Tokens& tokens, Name space = Name()) const;
  /// The length of the longest prefix that the tokens share with any sequence stored in this
  /// namespace.
  std::uint32_t longest_common(const Tokens& tokens, Name space = Name()) const {
    return match(tokens, space).size;
  }

  /// Stores a sequence and returns the node that ends with it. `split`, which may be null, is
  /// called when a node is made above an existing one.
  struct SplitListener {
    virtual ~SplitListener() = default;
    virtual void split(Index above, Index below) = 0;
  };
  Index insert(const Tokens& tokens, Name space = Name(), SplitListener* split = nullptr);

  /// Shortens the edge of a leaf. A leaf whose edge is empty is unlinked, and its index is never
  /// used again.
  void trim(Index leaf, std::uint32_t end);

  const Node& node(Index index) const { return nodes_[index]; }
  std::size_t node_count() const { return nodes_.size(); }  ///< includes roots and unlinked nodes

 private:
  /// A child is found by its parent and its first token. The root of a namespace is the child of
  /// kNone whose first token is the index of the name.
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
