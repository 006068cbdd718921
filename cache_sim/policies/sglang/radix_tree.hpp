// SGLang's tree of cached prefixes, 0.5.23 (TreeCore with its FULL and MAMBA components; rules:
// reference/caches/sglang.md, 1.1 to 1.6). The same tree serves `radix`, which has no states, so
// that a match may end at any node, and the hybrid policies, whose matches end at a state.
//
// Three things make it fast:
//   tokens    are compared only on a match's walk: an insert starts at the node that the request
//             has locked
//   children  are found in one flat hash table keyed by (parent, first page)
//   leaves    are kept in a list ordered by access time. A new entry was accessed just now and goes
//             to the end, or is the parent of a dropped leaf and goes near that leaf's place
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cache_sim/policies/pools.hpp"
#include "cache_sim/policies/sglang/host_tier.hpp"
#include "cache_sim/policies/sglang/radix_windows.hpp"
#include "cache_sim/policies/sglang/sglang_rules.hpp"
#include "reference/base/ids.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

/// A node takes two cache lines; the members that a walk reads are in the first one.
struct alignas(64) RadixNode {
  Tokens path;              ///< from the root to this node's end; the edge is path[start, size)
  std::uint32_t start = 0;  ///< the parent's depth
  NodeIndex parent;         ///< none for the root and for dead nodes
  std::uint32_t child_count = 0;  ///< on the device
  std::uint32_t full_lock = 0;    ///< locks in this subtree
  std::uint32_t state_lock = 0;   ///< locks at this node
  StateSlot state;                ///< none: a tombstone
  std::uint64_t last_access = 0;
  std::uint64_t serial = 0;  ///< tells nodes apart that had the same index
  std::uint32_t hash = 0;    ///< its home in the table of children
  NodeIndex lru_newer, lru_older;
  NodeIndex leaf_newer, leaf_older;
  Name salt;  ///< the namespace
  KvRuns kv;  ///< one KV slot per token of the edge; empty: the node is on the host alone
  bool alive = false;
  bool listed = false;  ///< in the list of leaves

  std::uint32_t depth() const { return path.size(); }
  std::uint32_t edge_size() const { return path.size() - start; }
};

/// A change of a node by an operation, for auditors.
struct NodeTouch {
  NodeIndex node;
  bool kv;  ///< its edge or its KV changed; otherwise only state, locks or list places did
};

class RadixTree {
 public:
  struct Options {
    std::uint32_t page = 1;
    std::uint32_t branch_grid = 64;  ///< lcm(max(model chunk, page), page)
    std::int64_t path_cap = -1;      ///< states on a path, softly; -1: no cap
  };
  struct Match {
    NodeIndex end;             ///< deepest valid node; the root where nothing can be used
    std::uint32_t prefix = 0;  ///< its depth
    std::uint32_t full = 0;    ///< tokens whose KV is there
    NodeIndex reached;         ///< the node that ends there; the root where there is none
    std::uint32_t branch = 0;  ///< the position of a state that would have served this key; 0: none
                               ///< (sglang.md, 1.2, 4)
    NodeIndex on_host;  ///< the deepest node that is valid on either tier, where the device lacks
                        ///< some of its KV, of its window, or its state
    std::uint32_t host_prefix = 0;  ///< its depth
    std::uint32_t told = 0;  ///< `prefix`, and tokens between it and `on_host` with KV on the host
  };
  struct Inserted {
    bool exist = true;  ///< the end was there, with a state where the policy has them
    NodeIndex end;
    std::uint32_t duplicates =
        0;  ///< tokens of the caller's KV that the tree had already and that are free again
  };
  struct Evicted {
    std::int64_t kv = 0;  ///< tokens
    std::int64_t states = 0;
    std::int64_t window = 0;  ///< tokens
  };
  struct Sizes {
    std::int64_t evictable_kv = 0;  ///< tokens in unlocked nodes
    std::int64_t protected_kv = 0;  ///< tokens in locked nodes
    std::int64_t evictable_states = 0;
    std::int64_t protected_states = 0;
    bool operator==(const Sizes&) const = default;
  };

  /// The rules must outlive the tree.
  RadixTree(const Options& options, const SglangRules& rules, KvPool& kv, StatePool& states);

  /// From now on, nodes are backed up to this host tier, which must outlive the tree.
  void use_host(HostTier& host);

  /// From now on, nodes have KV of sliding windows in these, which must outlive the tree.
  void use_windows(RadixWindows& windows);

  static constexpr NodeIndex kRoot{0};

  /// Section 1.2, without copy-on-write: splits where the key leaves an edge, refreshes access
  /// times and the state list. Of the key, the whole pages of its first `size` tokens count.
  Match match(const Tokens& key, std::uint32_t size, Name salt);

  /// Section 1.4. The caller's KV: `row` holds a slot for each token from `row_begin` on; tokens
  /// below `owned` belong to the tree already. `from` is a node that is known to lie on the key's
  /// path (or the root): no token above it is compared again. Of the key, the first `size` tokens
  /// are inserted, whole pages and at least one; the caller has inserted the first `inserted` of
  /// them before, and what ends there is not backed up for it again. With windows, the row's slots
  /// for tokens below `size` are the tree's afterwards, or free.
  Inserted insert(const Tokens& key, std::uint32_t size, Name salt, const KvRuns& row,
                  std::uint32_t row_begin, StateSlot state, std::uint32_t owned, NodeIndex from,
                  std::uint32_t inserted = 0, RequestWindow* window = nullptr);

  /// Section 1.5. `with_state` is the receipt: an unlock takes back what its lock took.
  void lock(NodeIndex node, bool with_state = true);
  void unlock(NodeIndex node, bool with_state = true);
  /// The same as unlock(from, from_state) and lock(to, to_state). `from` is `to`, a node above it,
  /// or none.
  void move_lock(NodeIndex from, bool from_state, NodeIndex to, bool to_state);
  // Section 1.15: what a lock keeps of the windows. Nothing where there are none.
  std::uint32_t lock_window(NodeIndex end);
  void unlock_window(NodeIndex end, std::uint32_t begin);
  bool covers_window(NodeIndex end, std::uint32_t begin) const;
  /// Defects: all these windows go, or those whose backup is not settled.
  void drop_windows(NodeIndex end, std::uint32_t begin, bool saved_alone);
  bool has_window(NodeIndex index) const { return !windows_->nodes[index.value].slots.empty(); }
  /// Takes back the state's part of a lock.
  void unlock_state_alone(NodeIndex end) { unlock_state(end); }
  /// Renews times and states as a match that ends at this node does.
  void refresh_path(NodeIndex end);
  /// Whether a key that ends inside an edge is offered the state at that edge's end (defects).
  bool offers_children() const;
  /// Whether a key that ends where the edge of `rest` begins is offered its state.
  bool offers_child(NodeIndex rest) const;

  /// Section 1.6: KV tokens first, then tokens of windows, then states; what falls with a leaf
  /// counts for all of them.
  Evicted evict(std::int64_t kv_tokens, std::int64_t states, std::int64_t window_tokens = 0);
  /// Evicts until that many more than now are free, or nothing is left to evict.
  Evicted evict_for_alloc(std::int64_t kv_shortfall, std::int64_t state_shortfall,
                          std::int64_t window_shortfall = 0);

  // Section 1.13, with a host tier.
  enum class Load : std::uint8_t { queued, refused, no_request_slot };
  /// Queues the load of a match's on_host; the request's slot is taken where a state is loaded. A
  /// refusal changes nothing but what eviction freed.
  Load load(NodeIndex best, StateSlot& request_slot);
  /// Leaves of the host, the oldest first, until so many tokens are free; then windows; then
  /// states.
  Evicted evict_host(std::int64_t kv_tokens, std::int64_t states, std::int64_t window_tokens = 0);
  std::int64_t settle();
  /// A prefetch anchors at a node that the host has; returns a receipt.
  std::uint32_t lock_host(NodeIndex node);
  void unlock_host(NodeIndex node, std::uint32_t begin);
  /// The same for the window that ends there.
  std::uint32_t lock_host_window(NodeIndex node);
  void unlock_host_window(NodeIndex node, std::uint32_t begin);
  void insert_on_host(Prefetch& fetched);
  bool writes_back() const { return host_ != nullptr && host_->policy == WritePolicy::back; }
  bool is_on_device(NodeIndex index) const { return index == kRoot || !node(index).kv.empty(); }
  bool is_backed_up(NodeIndex index) const { return !host_->nodes[index.value].kv.empty(); }
  bool is_host_leaf(NodeIndex index) const;

  /// The node whose path is exactly `tokens`; none where there is none. No effect.
  NodeIndex find(const Tokens& tokens, Name salt) const;
  /// The number of tokens whose KV is in the tree on the device, in whole pages. No effect.
  std::uint32_t stored(const Tokens& tokens, Name salt) const;
  /// The KV slots of path[first, node depth) in order, appended.
  void append_path_kv(NodeIndex node, std::uint32_t first, KvRuns& out) const;

  const RadixNode& node(NodeIndex index) const { return nodes_[index.value]; }
  std::uint32_t node_count() const {
    return static_cast<std::uint32_t>(nodes_.size());
  }  ///< indices, dead ones too
  const Sizes& sizes() const { return sizes_; }
  std::size_t dead_count() const { return dead_.size(); }  ///< indices that wait for a node
  std::size_t child_total() const { return child_total_; }
  std::size_t count_children() const;
  NodeIndex lru_newest() const { return lru_newest_; }
  NodeIndex lru_oldest() const { return lru_oldest_; }
  bool is_leaf(const RadixNode& node) const;
  /// On the device or on the host.
  std::uint32_t child_count_of(NodeIndex index) const {
    return host_ == nullptr ? node(index).child_count : host_->nodes[index.value].children;
  }
  const Options& options() const { return options_; }

  /// From now on, every node that an operation changes is noted.
  void start_auditing() { auditing_ = true; }
  std::vector<NodeTouch>& touched() { return touched_; }

 private:
  struct Child {
    std::uint64_t hash = 0;
    NodeIndex node;
  };

  /// The row of an insert, and slots of it that nobody keeps.
  struct Incoming {
    const KvRuns& kv;
    std::uint32_t begin;
    RequestWindow& window;
  };
  struct Surplus {
    KvRuns kv, window;
  };

  std::uint64_t tick() { return ++clock_ << 20; }
  std::uint64_t child_hash(NodeIndex parent, Name salt, const Tokens& key, std::uint32_t at) const;
  NodeIndex find_child(NodeIndex parent, Name salt, const Tokens& key, std::uint32_t at,
                       std::uint32_t limit, std::uint32_t& common) const;
  void add_child(NodeIndex child);
  void remove_child(NodeIndex child);
  void grow_children();
  NodeIndex new_node();
  NodeIndex split(NodeIndex child, std::uint32_t length);
  NodeIndex add_leaf(Tokens key, Name salt, NodeIndex parent);
  bool attach(NodeIndex node, StateSlot state);
  void lock_kv(NodeIndex node);
  void unlock_kv(NodeIndex node);
  void lock_state(NodeIndex node);
  void unlock_state(NodeIndex node);
  void cap_states(NodeIndex tail);
  void renew_state(NodeIndex node);

  void lru_remove(NodeIndex node);
  void lru_push_newest(NodeIndex node);
  void list_if_leaf(NodeIndex node, NodeIndex near = NodeIndex::none());
  void unlist(NodeIndex node);
  bool drop_leaf(NodeIndex node, Evicted& evicted);
  void evict_state(NodeIndex node, Evicted& evicted);
  void forget_state(NodeIndex node, Evicted& evicted);
  void unlist_window(NodeIndex node);
  void list_window(NodeIndex node, NodeIndex newer);
  void renew_windows(NodeIndex end);
  std::int64_t& window_size(NodeIndex node);
  void set_window(NodeIndex node, KvRuns slots);
  void drop_window(NodeIndex node, Evicted& evicted);
  void split_window(NodeIndex upper, NodeIndex child, std::uint32_t length);
  bool window_ends_at(NodeIndex node, bool on_device, std::uint32_t& covered) const;
  void overlap_window(NodeIndex node, const Incoming& row, std::uint32_t first, Surplus& surplus);
  void fill_window(NodeIndex node, const RequestWindow& row, bool is_new);
  void count_window_lock(NodeIndex node, int by);
  void evict_window(NodeIndex node, Evicted& evicted);
  void evict_windows(Evicted& evicted, const std::function<bool()>& done);
  bool has_host_window(NodeIndex node) const {
    return host_ != nullptr && !host_->nodes[node.value].window.empty();
  }
  void list_host_window(NodeIndex node);
  void unlist_host_window(NodeIndex node);
  void split_host_window(NodeIndex upper, NodeIndex child, std::uint32_t length);
  void forget_host_window(NodeIndex node, Evicted& evicted);
  void forget_host_state(NodeIndex node, Evicted& evicted);
  void evict_host_windows(std::int64_t tokens, Evicted& evicted);
  std::vector<NodeIndex> windows_to_save(NodeIndex node) const;
  std::vector<NodeIndex> windows_to_load(NodeIndex best) const;
  std::uint32_t edge_sum(const std::vector<NodeIndex>& nodes) const;
  void save_windows(const std::vector<NodeIndex>& nodes, CopyInFlight& backup);
  void load_windows(const std::vector<NodeIndex>& nodes, const KvRuns& slots, CopyInFlight& load);
  void write_back_window(NodeIndex node);
  std::uint32_t page_ceiling(std::uint32_t size) const {
    return (size + options_.page - 1) / options_.page * options_.page;
  }
  void count_insert(NodeIndex node);
  void back_up(NodeIndex node);
  bool queue_backup(NodeIndex node);
  void write_back(NodeIndex node);
  void write_back_state(NodeIndex node);
  std::int64_t settle_backups();
  bool drop_extensions(NodeIndex node);
  void forget_host_copy(NodeIndex node);
  void list_twice(NodeIndex node);
  void reclaim_twice(std::int64_t kv_tokens, Evicted& evicted);
  void queue_load(CopyInFlight load, const KvRuns& kv, const std::vector<NodeIndex>& windows,
                  const KvRuns& window_slots, StateSlot request_slot);
  void unlock_load(const CopyInFlight& load);
  void demote(NodeIndex node, Evicted& evicted);
  void list_host_state(NodeIndex node);
  void unlist_host_state(NodeIndex node);
  void list_host_leaf(NodeIndex node);
  NodeIndex next_host_state() const;
  void drop_host_leaf(NodeIndex node, Evicted& evicted);
  void put_on_device(NodeIndex node, KvRuns kv);
  void store(NodeIndex node);
  void renew(NodeIndex node);
  void split_host_copy(NodeIndex upper, NodeIndex child, std::uint32_t length);
  std::uint32_t device_size(NodeIndex index) const {
    return is_on_device(index) ? node(index).edge_size() : 0;
  }
  template <class Done>
  void evict_leaves(Evicted& evicted, Done done);
  template <class Done>
  void evict_states(Evicted& evicted, Done done);

  void touch(NodeIndex node, bool kv) {
    if (auditing_) note(node, kv);
  }
  void note(NodeIndex node, bool kv);

  const Options options_;
  const SglangRules& rules_;
  HostTier* host_ = nullptr;         // null: there is none
  RadixWindows* windows_ = nullptr;  // null: there are none
  KvPool& kv_;
  StatePool& states_;
  std::vector<RadixNode> nodes_;
  std::vector<NodeIndex> dead_;
  std::vector<Child> children_;  // open addressing, linear probing; size a power of two
  std::size_t child_total_ = 0;
  NodeIndex lru_newest_, lru_oldest_;
  NodeIndex leaf_newest_, leaf_oldest_;
  Sizes sizes_;
  std::uint64_t clock_ = 0;
  std::uint64_t serials_ = 0;
  bool auditing_ = false;
  std::vector<NodeTouch> touched_;
  mutable std::vector<NodeIndex> path_;  // scratch, empty between its uses
  Surplus surplus_;                      // the same, of an insert
};

}  // namespace lockstep::cache_sim
