// vLLM 0.33's block cache for hybrid models in "align" mode, without its scheduler: which blocks a
// request gets, which of them others may use, and when they are given back.
//
// Design. One pool of blocks serves all groups (block_pool.hpp); a request has a table per group,
// column i standing for tokens [i·B, (i+1)·B). Attention fills every column. A Mamba group has real
// blocks only for the running state and the scratch states of drafts; the columns before them hold
// the null block. A state that ends a block leaves the table, stays in the pool under the key of
// its prefix, and is evicted when it has not been used for long. (In the older "all" mode they have
// a block for every column, as attention has; a request keeps the one of the token before.) Four
// calls make up a schedule:
//
//   new_step()   the states published in the step before may be used from here on
//   look_up()    the longest prefix that every group can offer; takes nothing
//   allocate()   gives back what the request has passed, takes hits and new blocks, and publishes
//                the keys of the blocks that the step will fill, before the forward has run
//   release_copies(), end_step()   of every copy of a block that a hit shares in part
//
// and, with drafts, a second publish() once it is known which were accepted. Comments cite the
// rules by their numbers in reference/caches/vllm.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache_sim/policies/vllm/block_pool.hpp"
#include "cache_sim/policies/vllm/block_rules.hpp"

namespace lockstep::cache_sim {

/// A request's blocks in one group.
struct BlockTable {
  std::vector<BlockId> columns;
  std::int64_t cached = 0;  ///< columns whose keys are published, or which hits brought
  // Of Mamba groups.
  std::int64_t retired = 0;     ///< columns that have been given back
  std::int64_t passed = -1;     ///< column of the state that a chunk began with and went past
  std::int64_t checkpoint = 0;  ///< tokens of a state that the last chunk stores inside itself
  std::int64_t checkpoint_column = 0;
  std::int64_t produced = 0;         ///< tokens of a state in its running block, keyed by itself
  std::int64_t partial_column = -1;  ///< a shared block that the next allocation has to copy
  BlockId partial_block = kNullBlock;
  bool has_running = false;  ///< the running state and its scratch have blocks
};

/// A request as the manager sees it. The caller sets the numbers, the manager the tables.
struct BlockRequest {
  std::vector<KeyId> keys;  ///< at multiples of the hash block
  std::int64_t prompt = 0;  ///< tokens
  std::int64_t known = 0;   ///< prompt and outputs
  std::int64_t computed = 0;
  std::int64_t in_flight = 0;  ///< of these, tokens whose forward has not come back
  std::int64_t junction = 0;   ///< the place at which others left its prefix, by the last look-up
  std::uint64_t offload = 0;   ///< its number in the CPU tier; 0: there is none
  bool runs = false;           ///< it holds tables
  std::vector<BlockTable> tables;
  std::int64_t quiet_until = 0;  ///< up to so many tokens an allocation has nothing to do
};

/// The result of a look-up: columns by group, null blocks where a group needs none.
struct BlockHit {
  std::int64_t tokens = 0;
  std::int64_t junction = 0;
  std::vector<std::vector<BlockId>> columns;
};

struct Allocation {
  std::int64_t tokens = 0;        ///< to compute, drafts included
  const BlockHit* hit = nullptr;  ///< of a request's first allocation
  std::int64_t lookahead = 0;     ///< slots for tokens that a draft model writes
  std::int64_t external = 0;      ///< tokens that come from another server, after the hit
  bool delays_keys = false;       ///< they are loaded later: nothing is published yet
  bool must_fit = false;          ///< all tokens have to fit, not this chunk's alone
  std::int64_t reserved = 0;      ///< blocks that have to stay free
  bool others_run = false;        ///< so that the watermark counts
};

enum class Allocated : std::uint8_t { yes, no_blocks, same_step };

class BlockManager {
 public:
  /// A block that holds the state after so many tokens, for the CPU tier.
  struct Handoff {
    std::uint64_t request;  ///< BlockRequest::offload
    std::uint32_t group;
    BlockId block;
    std::int64_t tokens;
  };

  explicit BlockManager(BlockRules rules);
  BlockManager(const BlockManager&) = delete;  // its pool refers to its rules
  BlockManager& operator=(const BlockManager&) = delete;

  const BlockRules& rules() const { return rules_; }
  const BlockPool& pool() const { return pool_; }
  BlockPool& pool() { return pool_; }

  void new_step() { ++step_; }
  void release_copies();
  void end_step() { copies_.clear(); }

  /// The hit of a prompt with these keys; valid until the next allocation.
  const BlockHit& look_up(const std::vector<KeyId>& keys, std::int64_t known);
  Allocated allocate(BlockRequest& request, const Allocation& wanted) {
    if (request.runs && request.computed + wanted.tokens <= request.quiet_until)
      return Allocated::yes;
    return allocate_slowly(request, wanted);
  }
  /// Blocks that a request with tables still needs until all tokens that are known are computed.
  std::int64_t remaining(const BlockRequest& request) const;
  /// The number of tokens, of `tokens` computed ones, that a later hit could match.
  std::int64_t cacheable(const GroupSpec& spec, std::int64_t tokens) const;
  /// Publishes what the first `tokens` tokens fill.
  void publish(BlockRequest& request, std::int64_t tokens);
  /// Gives all blocks back, group by group, the last column first.
  void free(BlockRequest& request);
  /// Gives back what `tokens` computed tokens have passed (rule 19).
  void give_back_skipped(BlockRequest& request, std::int64_t tokens);
  /// States that were keyed since the last call, group by group.
  std::vector<Handoff> take_handoffs();
  /// Forgets all keys; false where a request holds blocks.
  bool forget_keys();
  void evict(BlockId block) { pool_.remove_keys(block); }
  /// Tells the memory which blocks lose what they hold.
  void follow(BlockMemory& memory) { pool_.follow(memory); }

  /// Tokens of a prefill chunk that begins at `start` and may have `tokens`: it ends where a state
  /// has to be kept. 0: not in this step.
  std::int64_t split(const BlockRequest& request, std::int64_t start, std::int64_t tokens,
                     std::int64_t most_tokens) const;

  /// A chunk of `cut` tokens, shortened so that the prefill ends with it or leaves what the
  /// drafting modules read after a chunk. Never to nothing: a chunk that has to end with a block
  /// would be shortened in every step.
  std::int64_t leave_rest(const BlockRequest& request, std::int64_t start, std::int64_t cut) const;

  /// Copies that were queued in this step.
  const std::vector<BlockCopy>& copies() const { return copies_; }
  /// Columns that the last successful allocation added, by group: for a hit inside a block the
  /// private copy stands first.
  const std::vector<std::vector<BlockId>>& added() const { return added_; }

 private:
  struct Demand {
    std::int64_t slots = 0;  // tokens that need a place, with what a draft model looks ahead
    std::int64_t main = 0;   // without
    std::int64_t local = 0;  // computed here, the hit included
    std::int64_t total = 0;  // with external tokens
    bool is_cap = false;     // all tokens have to fit
    std::int64_t prefill_end = 0;
  };

  // Look-up.
  std::int64_t find_attention(const SpecGroup& spec, std::int64_t most, bool drops);
  std::int64_t find_window(const SpecGroup& spec, std::int64_t most, bool drops);
  std::int64_t find_mamba(const SpecGroup& spec, std::int64_t most);
  bool find_all(const SpecGroup& spec, std::int64_t end);
  void put_found(const SpecGroup& spec, std::size_t column);

  // Allocation.
  Allocated allocate_slowly(BlockRequest& request, const Allocation& wanted);
  std::int64_t need(const BlockRequest& request, const BlockHit* hit, const Demand& demand,
                    bool& same_step) const;
  std::int64_t need_of_attention(std::uint32_t group, const BlockRequest& request,
                                 std::span<const BlockId> hit, const Demand& demand) const;
  std::int64_t need_of_mamba(std::uint32_t group, const BlockRequest& request,
                             std::span<const BlockId> hit, const Demand& demand) const;
  std::int64_t checkpoint_of(std::uint32_t group, const BlockTable& table,
                             const Demand& demand) const;
  std::int64_t free_among(std::span<const BlockId> blocks) const;
  std::int64_t skipped(const GroupSpec& spec, std::int64_t tokens) const;
  void retire_states(BlockTable& table, std::int64_t columns);
  void take_hits(BlockRequest& request, const Allocation& wanted, std::int64_t local);
  void take_external(BlockRequest& request, std::int64_t total, std::int64_t external);
  void take_new(BlockRequest& request, const Demand& demand);
  void take_new_attention(std::uint32_t group, BlockTable& table, std::int64_t slots);
  void take_new_states(std::uint32_t group, BlockRequest& request, const Demand& demand);
  void copy_on_write(std::uint32_t group, BlockTable& table, BlockId copy);
  std::int64_t quiet_until(const BlockRequest& request, std::int64_t total) const;

  // Publication.
  void list_boundaries(const BlockRequest& request, const GroupSpec& spec);
  bool is_kept(const GroupSpec& spec, std::int64_t column) const;
  void publish_full(std::uint32_t group, BlockRequest& request, std::int64_t tokens);
  void publish_attention_tail(std::uint32_t group, const BlockRequest& request,
                              std::int64_t tokens);
  void publish_state_tail(std::uint32_t group, BlockRequest& request, std::int64_t tokens);
  void publish_checkpoint(std::uint32_t group, BlockRequest& request);
  bool add_partial_key(std::uint32_t group, BlockId block, KeyId key, std::int64_t tokens,
                       bool replaces);
  void note_published(std::uint32_t group, KeyId key);
  bool was_published_now(std::uint32_t group, BlockId block) const;
  KeyId key_at(const BlockRequest& request, std::int64_t tokens) const {
    return request.keys[static_cast<std::size_t>(tokens / rules_.hash_block - 1)];
  }

  const BlockRules rules_;
  BlockPool pool_;
  std::uint32_t step_ = 1;
  std::vector<std::vector<std::uint32_t>> published_;  // by group and key: the last step
  std::vector<BlockCopy> copies_;
  std::vector<Handoff> handoffs_;
  BlockHit hit_;
  const std::vector<KeyId>* sought_ = nullptr;
  std::vector<BlockId> found_;
  std::vector<std::int64_t> attention_found_;  // by kind of group, -1: not looked up
  std::vector<BlockId> batch_;
  std::vector<std::int64_t> boundaries_;  // of the request whose keys are published
  std::vector<std::vector<BlockId>> added_;
};

}  // namespace lockstep::cache_sim
