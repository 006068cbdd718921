// The rules of vLLM's block cache under a configuration: its groups, the sizes that follow from
// them
// ("What the config says" in reference/caches/vllm.md), and the rules that a defect can break.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache_sim/model/block_memory.hpp"
#include "cache_sim/policies/vllm/block_hash.hpp"
#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

/// Groups with the same spec are looked up together: a hit is in all of them.
struct SpecGroup {
  GroupSpec spec;
  std::vector<std::uint32_t> groups;
};

struct BlockRules {
  std::vector<GroupSpec> groups;
  std::int64_t blocks = 0;  ///< block 0 among them
  std::int64_t hash_block = 0;
  std::optional<BlockHashAlgorithm> hash_algorithm;  ///< none: keys are told apart by digests
  std::optional<std::int64_t> retention;             ///< none: every block end is kept
  std::int64_t drafts = 0;                           ///< scratch states after the running one
  bool drops = false;  ///< EAGLE: a hit loses its last unit, whose KV depends on the next token
  std::int64_t hash_lookahead = 0;        ///< or hashes cover so many tokens after their block
  std::int64_t prefill_lookahead = 0;     ///< tokens after a chunk that drafting modules read
  std::int64_t checkpoint_blocks = 0;     ///< 1: kernels store a state inside their last chunk
  std::int64_t checkpoint_alignment = 0;  ///< of such a state, from the chunk's start
  bool shared_prefix_checkpoint = false;  ///< a junction inside a block is kept, too
  std::int64_t max_length = std::int64_t{1} << 30;
  std::int64_t max_in_flight = std::int64_t{1} << 30;  ///< tokens scheduled and not settled
  std::int64_t watermark = 0;                          ///< blocks
  std::int64_t cpu_chunks = 0;                         ///< of the CPU tier; 0: there is none
  std::int64_t blocks_per_chunk = 1;                   ///< of a group
  std::int64_t cpu_blocks = 0;  ///< of the host's own block manager; 0: there is none
  bool lazy_offload = false;    ///< it stores what is evicted next, not what is computed
  std::int64_t step_tokens = 0;
  bool has_disk = false;  ///< behind the CPU tier
  std::int64_t ring = 0;  ///< entries of a replay ring; 0: every step writes its state

  // Rules that no configuration changes: a planted defect does (vllm_defects.cpp).
  // Hashes and the look-up.
  bool hashes_extra_keys = true;
  bool hashes_image_places = true;
  bool looks_for_missing_hashes = false;
  bool drops_in_every_pass = false;
  bool keeps_junctions = true;
  // Allocation.
  bool uses_states_of_this_step = false;
  bool copies_unwritten_kv = false;
  bool counts_sent_state = true;
  bool makes_room_for_drafter = true;
  bool keeps_watermark = true;
  bool frees_windows_under_way = false;
  bool hits_take_references = true;
  bool releases_copy_targets = true;
  bool gives_back_retired_states = true;
  // Chunks.
  bool cuts_chunks = true;
  bool splits_by_attention_block = false;
  bool shortens_chunks_to_nothing = false;
  bool fills_drafter_places = false;
  bool cuts_draft_places = false;
  bool asserts_whole_padding = false;
  bool checkpoints_from_inside = false;  ///< also in a chunk that begins inside a block
  // Publication.
  bool keys_passed_states = false;
  bool keys_states_late = false;
  bool keys_loads_under_way = false;
  bool publishes_ahead = false;
  bool keeps_keys_of_unrun_chunks = false;
  bool drops_rejected_drafts = true;
  // The pool.
  bool keyed_blocks_go_last = true;
  bool pops_newest = false;
  bool counts_free_blocks_twice = false;
  bool unindexes_removed_keys = true;
  // The CPU tier.
  bool look_ups_wait_for_stores = true;
  bool tier_hits_end_with_states = true;
  bool tier_hits_need_states = true;
  bool loads_pin_chunks = true;
  bool loads_wait_to_land = true;
  bool aborted_loads_keep_blocks = true;
  bool stores_wait_for_forward = true;
  bool stores_committed_tokens = true;
  bool flushes_reused_blocks = true;
  bool flushes_reused_states = true;
  bool flushes_preempted = true;
  bool resets_flush = true;
  // The host's own block manager.
  bool hits_are_pinned = true;
  bool loads_states_into_columns = true;
  bool stores_hold_sources = true;
  bool publishes_settled_stores = true;
  bool resets_abandon_stores = true;
  bool loads_from_the_tier_of_the_hit = true;
  // The disk behind it.
  bool promotions_spare_their_request = true;
  bool promotions_wait_to_land = true;
  bool cascades_pin_chunks = true;
  bool failures_lose_chunks = true;
  bool failures_free_chunks = true;
  bool resets_hold_promotions = true;
  bool resets_drain_the_disk = true;
  // The worker.
  bool copies_blocks = true;
  bool copies_first_group_alone = false;
  bool defers_last_group = false;
  bool loads_one_group_less = false;
  bool resumes_by_hash_block = false;
  bool resumes_with_old_accepted = false;
  bool verifies_replays = false;
  bool begins_with_recycled_states = false;
  bool stores_chunk_ends_alone = false;
  bool keeps_block_ends = true;
  bool copies_accepted_state = true;
  bool copy_resets_accepted = true;
  bool forgets_accepted_before_turn = false;
  bool forgets_accepted_without_drafts = false;
  // The replay ring.
  bool flushes_full_rings = true;
  bool flushes_at_block_ends = true;
  bool boundary_flush_reads_all = false;
  bool flushes_write_states = true;
  bool ring_steps_move_windows = true;
  bool reads_entry_ahead = false;
  bool blocks_begin_with_empty_rings = true;
  bool counts_from_the_prompt = false;
  bool prompt_rows_read_no_ring = true;
  bool begins_with_old_base = false;
  bool rebases_rows_that_rested = false;
  bool turns_read_rings = true;

  // Derived from these by complete().
  std::int64_t scheduler_block = 0;  ///< the least common multiple of the groups' blocks
  bool partial = false;              ///< hits may end inside a block
  std::int64_t hit_alignment = 0;
  std::int64_t state_block = 0;        ///< of the Mamba groups; 0: there is none
  std::int64_t splitter_block = 0;     ///< that prefill chunks are cut by; 0: they are not
  std::vector<SpecGroup> spec_groups;  ///< full attention first

  /// Blocks of the pool and of the CPU tiers, and one through which those of a disk are looked at.
  std::int64_t all_blocks() const {
    return blocks + cpu_chunks * blocks_per_chunk + cpu_blocks + (has_disk ? 1 : 0);
  }
  /// Computes the derived members.
  void complete();
  /// `mamba`: the kind of the Mamba groups. The error is a sentence that names the field.
  static Result<BlockRules> of(const Config& config, GroupKind mamba = GroupKind::mamba);
};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
inline std::int64_t floor_to(std::int64_t a, std::int64_t unit) {
  return a / unit * unit;
}

/// The last boundary of `unit` whose state a prefill of `tokens` tokens can leave for others.
inline std::int64_t last_checkpoint(const BlockRules& rules, std::int64_t tokens,
                                    std::int64_t unit) {
  if (rules.drops) return std::max<std::int64_t>(floor_to(tokens, unit) - unit, 0);
  const std::int64_t proof = tokens - std::max<std::int64_t>(1, rules.hash_lookahead);
  return proof <= 0 ? 0 : floor_to(proof, unit);
}

/// Whether kernels can store the state after `position` tokens inside the chunk [start, end). They
/// cannot if the chunk starts inside a block: it would pass that block's end without storing its
/// state. (vLLM 0.33 does.)
bool is_checkpoint_valid(const BlockRules& rules, std::int64_t start, std::int64_t end,
                         std::int64_t position, std::int64_t block);

}  // namespace lockstep::cache_sim
