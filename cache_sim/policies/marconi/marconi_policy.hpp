// Marconi's request verbs: policies `marconi` and `marconi-artifact`. Rules:
// reference/caches/marconi.md.
#pragma once

#include <vector>

#include "cache_sim/policies/marconi/marconi_tree.hpp"
#include "cache_sim/policies/marconi/marconi_tuner.hpp"
#include "cache_sim/policies/pools.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// The sizes in bytes that follow from a configuration.
struct MarconiSizes {
  std::int64_t token_bytes, state_bytes, capacity;
  static MarconiSizes of(const Config& config);
};

/// A running request.
struct MarconiRequest {
  Name id;  ///< none: the place is free
  Name salt;
  Tokens known;
  std::uint32_t admitted = 0;   ///< tokens known at the admission
  std::uint32_t computed = 0;   ///< tokens that the live state stands for
  std::uint32_t allocated = 0;  ///< tokens that have KV; more than computed while it verifies
  std::uint32_t owned = 0;      ///< of these, the tree's
  std::uint32_t branch = 0;     ///< the position to store a state at; 0: none
  MarconiTree::Index used = MarconiTree::kRoot;  ///< the node with `owned` tokens, locked
  StateSlot live;
  KvRuns kv;
  KvTail kv_tail;
  Tokens drafts;
  bool verifying = false;
};

class MarconiPolicy final : public Subject, private MarconiTree::Memory {
 public:
  MarconiPolicy(const SubjectOptions& options, const MarconiRules& variant);

  Result<Reply> apply(const Operation& operation) override;
  std::optional<Snapshot> snapshot() const override;

  // For auditors.
  const MarconiTree& tree() const { return tree_; }
  const KvPool& kv_pool() const { return kv_; }
  const StatePool& state_pool() const { return states_; }
  const std::vector<MarconiRequest>& requests() const { return requests_; }
  const MarconiSizes& sizes() const { return sizes_; }
  std::int64_t free_bytes() const;
  double alpha() const { return tuner_.alpha(); }

 private:
  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(MarconiRequest& request, const Operation& operation);
  Result<Reply> accept(MarconiRequest& request, const Operation& operation);
  Reply finish(MarconiRequest& request);
  Reply evict(std::int64_t kv, std::int64_t states);
  Reply check() const;

  MarconiRequest* find(Name id);
  bool would_fit(std::int64_t bytes) const {
    return bytes <= free_bytes() + tree_.evictable_bytes();
  }
  bool evict_one(MarconiTree::Evicted& evicted);
  bool make_room(std::int64_t bytes, MarconiTree::Evicted& evicted);
  void start_state(MarconiRequest& request, const MarconiTree::Match& match);
  void run(MarconiRequest& request, MarconiTree::Evicted& evicted);
  void verify(MarconiRequest& request, const Tokens& drafts);
  void store_branch(MarconiRequest& request, StateSlot copy);
  bool store(MarconiRequest& request, std::uint32_t size, StateSlot state);
  void use(MarconiRequest& request, MarconiTree::Index node);
  void drop_kv(MarconiRequest& request, std::uint32_t first);
  void remove(MarconiRequest& request);

  void release(const KvRuns& kv) override { kv_.release(kv); }
  void release(StateSlot state) override { states_.release(state); }

  const Config config_;
  const MarconiRules rules_;
  LayerState& layers_;
  const MarconiSizes sizes_;
  KvPool kv_;
  StatePool states_;
  MarconiTree tree_;
  MarconiTuner tuner_;
  std::vector<MarconiRequest> requests_;
  std::vector<std::uint32_t> free_places_;
  std::vector<std::uint32_t> place_of_;  // by Name::index(), 1 + the place; 0: not admitted
  std::int64_t running_ = 0;
  std::int64_t own_tokens_ = 0;  // of running requests, beyond what the tree owns
  KvRuns scratch_;
};

}  // namespace lockstep::cache_sim
