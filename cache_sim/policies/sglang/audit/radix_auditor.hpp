// Holds a radix policy to invariants I1 to I12 of reference/caches/sglang.md, 1.9: after every
// operation for what the operation touched, and from nothing when asked. It keeps its own record of
// every node, slot and lock and shares none of the policy's decisions or helpers; it reads
// only the positions of slots and nodes. The tree reports which nodes an operation has changed
// (NodeTouch); a change that it does not report is found by the next recount from nothing: at every
// `check`, at the end of a run and otherwise after 1,000 operations.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/policies/sglang/sglang_policy.hpp"
#include "reference/base/zeroed_array.hpp"

namespace lockstep::cache_sim {

inline constexpr NodeIndex kRoot = RadixTree::kRoot;

class RadixAuditor final : public Auditor {
 public:
  /// `labels` may be null: then everything but the prefixes of states is checked.
  RadixAuditor(SglangPolicy& policy, const LabelState* labels);

  void after(const Operation& operation, const Reply& reply, Findings& findings) override;
  void recompute(Findings& findings) override;

 private:
  /// A node as it was after the last operation, and its locks as counted from their holders.
  struct NodeRecord {
    std::uint64_t serial = 0;  // 0: no node
    Label label;
    Tokens path;
    Name salt;
    NodeIndex parent;
    std::uint32_t edge_size = 0;
    std::uint32_t child_count = 0;
    std::uint32_t full_locks = 0;
    std::uint32_t state_locks = 0;
    StateSlot state;
    bool has_host_state = false;
    bool has_window = true;  ///< also where there are no windows
    std::uint64_t last_use = 0;
    KvRuns kv;  // none where the node is on the host alone
    std::uint32_t device_size() const { return kv.empty() ? 0 : edge_size; }
    bool exists() const { return serial != 0; }
  };
  struct RequestRecord {
    Name id;
    Name salt;
    Tokens known;
    std::uint32_t prompt_size = 0;
    std::uint32_t computed = 0;
    std::uint32_t written = 0;  ///< tokens that the running state has seen: fewer with a ring
    std::uint32_t owned = 0;
    NodeIndex locked;
    bool state_locked = true;
    StateSlot live;
    Tracking tracking;
    KvRuns own_kv;  // what the tree does not own
  };
  /// A node that the operation touched.
  struct Touched {
    NodeIndex node;
    bool kv;                            // its edge or KV changed
    std::uint32_t children_before = 0;  // before the operation
    bool kept_kv = false;               // what is left of its KV is where it was
  };
  /// The owner of a slot: 0 for none, else the kind of owner in the high bits and its index in the
  /// low ones.
  using Owner = std::uint32_t;
  static constexpr Owner kOfNode = 1u << 30;
  static constexpr Owner kOfRequest = 2u << 30;
  static constexpr Owner kOfHeld = 3u << 30;
  static constexpr Owner kIndexMask = kOfNode - 1;

  static void cut(const KvRuns& runs, std::uint32_t first, std::uint32_t last, KvRuns& onto);
  /// Identifies a prefix in a namespace.
  static std::uint64_t digest_key(std::uint64_t digest, std::uint32_t size, Name salt);
  const RadixNode& actual(NodeIndex node) const { return policy_.tree().node(node); }
  NodeRecord& record(NodeIndex node) { return nodes_[node.value]; }
  bool is_same_node(NodeIndex node) const;
  std::string name_of(NodeIndex node) const;
  std::string owner_name(Owner owner) const;
  void report(FindingKind kind, std::string text, std::string expected, std::string actual);

  void collect_touched();
  void touch(NodeIndex node);
  void bury(Touched& touched);
  bool keeps_tail(const KvRuns& old, const KvRuns& now);
  void take_over(const Touched& touched);
  void reparent();
  NodeIndex given_up_state(const Operation& operation) const;
  void follow_request(const Operation& operation);
  void follow_held();
  void release_settled();
  void follow_copies();
  bool locks_state(NodeIndex end) const;
  void count_locks(NodeIndex node, bool with_state, int by);
  void account(const NodeRecord& node, int by);
  void note_use(const Operation& operation, const Reply& reply);
  void use(const Tokens& tokens, std::uint32_t size, Name salt);
  void use_path(const Tokens& tokens, std::uint32_t size, Name salt);
  void use_split();
  void use_by_match(const Tokens& tokens, std::uint32_t size, Name salt);
  void use_by_insert(const Tokens& tokens, std::uint32_t size, Name salt, bool existed);
  std::uint32_t stored_size(const Operation& operation, const Reply& reply,
                            const RequestRecord& request) const;
  NodeIndex node_at(const Tokens& tokens, std::uint32_t size, Name salt) const;
  bool window_ends_at(const NodeRecord& node) const;
  std::uint32_t longest_state(const Tokens& tokens, std::uint32_t limit, Name salt) const;

  void own_kv(const KvRuns& runs, Owner owner);
  void refuse_kv(std::uint32_t slot, Owner owner);
  void disown_kv(const KvRuns& runs, Owner owner);
  void own_state(StateSlot slot, Owner owner);
  void disown_state(StateSlot slot, Owner owner);

  void check_node(NodeIndex node);
  void check_kv_labels(NodeIndex node);
  void check_state_label(NodeIndex node);
  void check_list_place(NodeIndex node);
  void check_path_cap(NodeIndex tail);
  void check_request(const Operation& operation);
  void path_kv(NodeIndex end, KvRuns& onto) const;
  std::uint32_t written_by(const Operation& operation, const RequestRecord& before,
                           const RadixRequest& now) const;
  void check_live_state(const Operation& operation, const RadixRequest& now, std::uint32_t written);
  void check_tracked(const Operation& operation, const RequestRecord& before,
                     const RadixRequest& now);
  void check_totals();
  template <class IsFree>
  void find_unconserved(const char* what, const ZeroedArray<Owner>& owners, std::uint32_t first,
                        std::int64_t owned, std::int64_t free, IsFree is_free);

  void check_host();
  void check_host_node(NodeIndex node, std::vector<char>& kv_seen, std::vector<char>& states_seen);
  void check_host_window(NodeIndex node, std::vector<char>& seen);
  void check_host_labels(NodeIndex node);
  void check_host_locks();
  void note_waiting(const Operation& operation, const Reply& reply);
  std::uint32_t longest_fetched(const Operation& admission) const;
  void own_staged(std::vector<char>& kv_seen, std::vector<char>& states_seen);

  void check_windows();
  void check_window_node(NodeIndex node);
  void check_window_of(const RadixRequest& request);
  void count_window_locks(NodeIndex end, std::uint32_t begin, const std::string& by);
  void own_window(std::uint32_t slot, const Tokens& tokens, std::uint32_t at,
                  const std::string& owner);

  void recount_nodes();
  void recount_locks();
  void recount_list();
  void recount_slots();
  void recount_places();
  void recount_picture();
  void recount_kv_labels(const RadixNode& node, NodeIndex index);

  SglangPolicy& policy_;
  std::uint64_t recounts_ = 0;
  const SglangRules& rules_;
  const LabelState* labels_;
  bool has_states_;
  std::vector<NodeRecord> nodes_;
  std::vector<RequestRecord> requests_;
  std::vector<HeldSlot> held_slots_;
  std::vector<HeldLock> held_locks_;
  struct Copy {
    std::uint64_t id;
    NodeIndex node;
  };
  std::vector<Copy> copies_;  // that are not settled: each holds a lock
  ZeroedArray<Owner> kv_owner_;
  ZeroedArray<Owner> state_owner_;
  std::int64_t owned_kv_ = 0;
  std::int64_t owned_states_ = 0;
  RadixTree::Sizes sizes_;
  std::uint64_t uses_ = 0;
  std::unordered_map<std::uint64_t, NodeIndex> node_by_digest_;

  // Scratch of one operation.
  Findings* findings_ = nullptr;
  std::vector<Touched> touched_;
  std::vector<NodeIndex> born_;
  std::vector<NodeIndex> bereft_;     // that lost a child, each as often as it lost one
  std::vector<NodeIndex> cut_;        // whose edges a split has shortened
  std::vector<std::uint64_t> stamp_;  // by node: the operation that touched it last
  std::uint64_t operation_ = 0;
  NodeIndex given_up_;              // the node whose state lock the operation's request gave up
  RequestRecord last_gone_;         // the request that the operation ended
  std::uint32_t owned_before_ = 0;  // of the operation's request
  std::uint32_t matched_ = 0;       // tokens to the state, on either tier, that an admission found
  std::uint32_t fetched_ = 0;       // to one that the admission's prefetch has brought to the host
  /// A request that waits, as it was asked first, and its look-ups since.
  struct Asked {
    std::string admission;
    std::int64_t repeats = 0;
  };
  std::map<std::uint32_t, Asked> asked_;  // by the index of its name
  KvRuns scratch_;
  std::vector<std::uint64_t> fingerprints_;
  std::vector<char> window_seen_;             // owners, by slot of the windows
  std::vector<std::uint32_t> window_locks_;   // by node
  std::vector<std::uint64_t> window_before_;  // by node: its serial, where its window was locked
};

}  // namespace lockstep::cache_sim
