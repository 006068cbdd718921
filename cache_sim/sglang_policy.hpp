// The request side of SGLang's radix caches, 0.5.23: policies `radix` (attention alone) and
// `sglang-no-buffer` (one state slot a request, copied into the tree at chunk ends and donated at
// the finish). Sections 1.2 and 1.7 of the rules.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache_sim/pools.hpp"
#include "cache_sim/radix_tree.hpp"
#include "reference/base/subject.hpp"

namespace lockstep::cache_sim {

/// A running request.
struct RadixRequest {
  Name id;
  Name salt;
  Tokens known;  ///< prompt, outputs, and what extends brought
  std::uint32_t prompt_size = 0;
  std::uint32_t computed = 0;  ///< tokens whose KV and state exist
  std::uint32_t owned = 0;     ///< tokens of the row that the tree owns ("prot")
  NodeIndex locked;            ///< node at depth `owned`, none where nothing is locked
  NodeIndex reached;  ///< where its match ended in KV: on its path while it is the same node
  std::uint64_t reached_serial = 0;
  StateSlot live;  ///< the running state
  RequestRow row;
  KvRuns kv;  ///< one slot per token of [0, allocated)
  std::uint32_t allocated = 0;
  bool verifying = false;  ///< drafts are computed and not yet accepted
  Tokens drafts;
};

/// A state slot that a trace holds by name (tree verbs).
struct HeldSlot {
  Name name;
  StateSlot slot;
  Tokens tokens;
};

/// A lock that a trace holds by name.
struct HeldLock {
  Name name;
  NodeIndex node;
};

class SglangPolicy : public Subject {
 public:
  SglangPolicy(const SubjectOptions& options, bool has_states);

  Result<Reply> apply(const Operation& operation) override;
  std::unique_ptr<Auditor> make_auditor(const LabelState* labels) override;
  std::optional<Snapshot> snapshot() const override;

  // What an auditor sees.
  const RadixTree& tree() const { return tree_; }
  RadixTree& audited_tree() { return tree_; }
  const KvPool& kv_pool() const { return kv_; }
  const StatePool& state_pool() const { return states_; }
  const std::vector<RadixRequest>& requests() const {
    return requests_;
  }  ///< those without a name are free places
  const std::vector<HeldSlot>& held_slots() const { return held_slots_; }
  const std::vector<HeldLock>& held_locks() const { return held_locks_; }
  bool has_states() const { return has_states_; }
  bool strips_thinking() const { return config_.strip_thinking != 0; }

 private:
  // Request verbs.
  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(const Operation& operation);
  Result<Reply> accept(const Operation& operation);
  Result<Reply> checkpoint(const Operation& operation);
  Result<Reply> finish(const Operation& operation);
  Result<Reply> release(const Operation& operation);  // abort, preempt
  Reply evict(std::int64_t kv, std::int64_t states);
  Reply check() const;
  // Tree verbs.
  Result<Reply> match(const Operation& operation);
  Result<Reply> insert(const Operation& operation);
  Result<Reply> lock(const Operation& operation);
  Result<Reply> unlock(const Operation& operation);
  Result<Reply> hold_slot(const Operation& operation);  // alloc, fork
  Result<Reply> advance(const Operation& operation);
  Result<Reply> copy(const Operation& operation);
  Result<Reply> free(const Operation& operation);

  RadixRequest* find(Name id);
  Result<RadixRequest*> idle(const Operation& operation);
  HeldSlot* find_slot(Name name);
  bool make_room_for_kv(std::int64_t size, RadixTree::Evicted& evicted);
  bool make_room_for_state(RadixTree::Evicted& evicted);
  bool copy_on_write(RadixRequest& request, const RadixTree::Match& match);
  RadixTree::Inserted store(RadixRequest& request, std::uint32_t size, StateSlot state);
  void move_lock(RadixRequest& request, NodeIndex node);
  void write_kv(const RadixRequest& request, const Tokens& tokens, std::uint32_t end);
  void free_kv_from(RadixRequest& request, std::uint32_t first);
  void remove(RadixRequest& request);
  StateSlot slot_of(const RadixRequest& request) const;
  std::uint32_t whole_pages(std::uint32_t size) const { return size - size % page_; }
  bool planted(const Defect& defect) const { return defect_ == &defect; }

  Config config_;
  const Defect* defect_;
  LayerState& layers_;
  bool has_states_;
  std::uint32_t page_;
  KvPool kv_;
  StatePool states_;
  RadixTree tree_;
  std::vector<RadixRequest> requests_;
  std::vector<std::uint32_t> free_places_;  // indices into requests_
  std::vector<std::uint32_t> place_of_;     // by Name::index(), kNowhere where not admitted
  std::vector<RequestRow> free_rows_;
  std::vector<HeldSlot> held_slots_;
  std::vector<HeldLock> held_locks_;
  KvRuns scratch_;
};

}  // namespace lockstep::cache_sim
