// Marconi's radix tree: every node is an edge of KV and, mostly, one state at its end. Rules 2 to 4
// and 6 of reference/caches/marconi.md.
//
// The tree owns KV slots and state slots and gives them back through a Memory. A tree without a
// Memory only counts bytes; alpha is tuned on such copies. A node keeps its index for as long as it
// stands for the same prefix.
#pragma once

#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "cache_sim/policies/marconi/marconi_rules.hpp"
#include "cache_sim/policies/pools.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {

/// Sizes and FLOPs from which eviction computes a node's value: its bytes, and the FLOPs
/// F(L) = L (a + b L) that a hit of L tokens saves.
struct MarconiCosts {
  struct Flops {
    double a, b;
    double of(std::uint32_t tokens) const {
      const double L = tokens;
      return L * (a + b * L);
    }
  };
  std::int64_t token_bytes, state_bytes;
  Flops flops;
  Flops mlp_as_attention;  ///< with the MLP layers counted as attention layers
};

class MarconiTree {
 public:
  using Index = std::uint32_t;
  static constexpr Index kRoot = 0;
  static constexpr Index kNone = std::numeric_limits<Index>::max();

  struct Node {
    Tokens path;  ///< tokens [0, end); the edge is [begin, end)
    Name salt;
    std::uint32_t begin = 0, end = 0;
    Index parent = kNone;
    std::uint32_t child_count = 0;
    std::uint64_t child_sum =
        0;                    ///< of the children's indices: where there is one child, its index
    std::uint32_t locks = 0;  ///< of running requests that use it or a node below
    bool alive = false;
    bool has_state = false;
    StateSlot state;
    KvRuns kv;
    std::uint64_t time = 0;
    double efficiency = 0;        ///< FLOPs saved per byte
    std::uint32_t place = kNone;  ///< among the candidates
    std::uint32_t edge_size() const { return end - begin; }
  };

  /// Takes evicted slots back.
  class Memory {
   public:
    virtual ~Memory() = default;
    virtual void release(const KvRuns& kv) = 0;
    virtual void release(StateSlot state) = 0;
  };

  struct Match {
    Index node = kRoot;        ///< the deepest node on the path with a state
    std::uint32_t prefix = 0;  ///< tokens that it stands for
    std::uint32_t full = 0;    ///< tokens whose KV is there
  };
  struct Inserted {
    Index end;
    bool exist;            ///< there was a state; the caller keeps the one it brought
    std::uint32_t stored;  ///< tokens that were there before; of these the caller keeps its KV
  };
  struct Evicted {
    std::int64_t kv = 0, states = 0;
  };

  /// `variant`: the rules of its copies; `rules`: its own, which a planted defect may break.
  MarconiTree(const MarconiCosts& costs, Memory* memory, const MarconiRules& variant = {},
              const MarconiRules& rules = {});
  /// A copy that counts bytes and owns nothing.
  MarconiTree counting_copy() const;

  /// Matches tokens[0, size) and makes the matched node the newest.
  Match match(const Tokens& tokens, std::uint32_t size, Name salt);
  /// Stores tokens[0, size) with a state; `kv` has the slots of all of them, null without a memory.
  Inserted insert(const Tokens& tokens, std::uint32_t size, Name salt, const KvRuns* kv,
                  StateSlot state);
  void lock(Index node) { add_lock(node, 1); }
  void unlock(Index node) { add_lock(node, -1); }
  /// Appends the slots of the path that ends with the node.
  void append_path_kv(Index node, KvRuns& onto) const;

  /// False where there is no candidate.
  bool evict_one(double alpha, Evicted& evicted);
  bool has_candidate() const { return !candidates_.empty(); }

  std::int64_t bytes() const { return bytes_; }
  /// Bytes of nodes that no running request uses.
  std::int64_t evictable_bytes() const { return bytes_ - locked_bytes(); }
  std::int64_t locked_tokens() const { return locked_tokens_; }
  std::int64_t locked_states() const { return locked_states_; }
  std::int64_t tokens() const { return tokens_; }
  std::int64_t states() const { return states_; }
  std::uint64_t clock() const { return clock_; }
  const Node& node(Index index) const { return nodes_[index]; }
  std::size_t node_count() const { return nodes_.size(); }
  const std::vector<Index>& candidates() const { return candidates_; }
  const MarconiCosts& costs() const { return costs_; }

 private:
  struct Edge {
    Index parent;
    std::uint32_t salt;
    Token first;
    bool operator==(const Edge&) const = default;
  };
  struct EdgeHash {
    std::size_t operator()(const Edge& edge) const {
      return mix64(edge.first ^ std::uint64_t{edge.parent} << 40 ^ std::uint64_t{edge.salt} << 20);
    }
  };
  /// The part of a token sequence that the tree holds, and the nodes on it.
  struct Walk {
    Index node = kRoot;        ///< the last one that lies wholly on it
    Index into = kNone;        ///< the child whose edge is left in the middle
    std::uint32_t size = 0;    ///< tokens
    Index with_state = kRoot;  ///< the last one with a state
  };

  std::int64_t locked_bytes() const {
    return locked_tokens_ * costs_.token_bytes + locked_states_ * costs_.state_bytes;
  }
  Edge edge_of(const Node& node) const {
    return {node.parent, node.parent == kRoot ? node.salt.index() : 0, node.path[node.begin]};
  }
  Index child_of(Index parent, Name salt, Token first) const;
  Walk walk(const Tokens& tokens, std::uint32_t size, Name salt) const;
  Index new_node();
  void link(Index child);
  void unlink(Index child);
  void count(const Node& node, std::int64_t sign);
  Index split(Index below, std::uint32_t at);
  void set_state(Index index, StateSlot state);
  void add_lock(Index node, std::int64_t change);
  void touch(Index index);
  Index worst(double alpha) const;
  void drop_state(Index index, Evicted& evicted);
  void remove_leaf(Index index, Evicted& evicted);
  void tidy_up(Index index, Evicted& evicted);
  void merge_into_child(Index index);
  double efficiency_of(const Node& node) const;

  MarconiCosts costs_;
  Memory* memory_;
  MarconiRules variant_, rules_;
  std::vector<Node> nodes_;
  std::vector<Index> free_;
  std::unordered_map<Edge, Index, EdgeHash> children_;
  std::vector<Index> candidates_;
  std::uint64_t clock_ = 0;
  std::int64_t tokens_ = 0, states_ = 0, bytes_ = 0;
  std::int64_t locked_tokens_ = 0, locked_states_ = 0;
};

}  // namespace lockstep::cache_sim
