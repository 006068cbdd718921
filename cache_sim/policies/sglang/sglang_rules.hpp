// The rules of SGLang's radix caches (reference/caches/sglang.md): where its versions differ
// (sglang_legacy.cpp), and where a planted defect breaks one (sglang_defects.cpp says which, each
// in a sentence). The defaults are 0.5.23's.
#pragma once

#include <cstdint>

namespace lockstep::cache_sim {

/// The length with which a key that ends inside an edge is offered the state at that edge's end.
enum class ChildOffer : std::uint8_t { none, parents_length, keys_length, one_token_longer };
/// The parts of the running state that a checkpoint copies; none: it gives the running slot away.
enum class CheckpointCopy : std::uint8_t { both, conv_alone, conv_later, none };
/// A finished request gives the tree its slot, a copy, or a copy with the loss of its own slot.
enum class Finish : std::uint8_t { slot, copy, fork };
/// The state that a verification commits, of those after each of its tokens.
enum class Commit : std::uint8_t {
  accepted,
  by_length,  ///< at the number of accepted drafts, also of a tree
  draft_end,
  conv_at_draft_end,
  recurrent_alone,
  conv_alone,
};
/// The count that a commit adds to a ring's cursor beside the state that it writes.
enum class AcceptedCount : std::uint8_t { none, kept, drafts };
/// The state that a tracking slot gets for a position of a chunk.
enum class TrackedAt : std::uint8_t { position, chunk_end, before_forward, batch_chunk, page };

/// The length of a prefetch, where each tensor-parallel rank has a storage of its own: the longest
/// prefix with a state that all of them have, the least of the longest ones, or each its own.
enum class RanksTake : std::uint8_t { shared, least, own };

struct SglangRules {
  bool has_states = true;  ///< false: attention alone

  // Matches.
  bool match_renews_end = true;    ///< the state that a match used becomes the newest one
  bool match_renews_path = false;  ///< so does every state above it
  bool match_renews_times = true;
  bool match_ends_inside_edges = true;
  bool reuses_kv_without_state = false;
  ChildOffer child_offer = ChildOffer::none;
  bool branches_at_prefix = false;  ///< a branch is told where it is no deeper than the prefix
  // Inserts and splits.
  bool insert_renews_path = false;  ///< every state on its path, and below a split
  bool insert_renews_end = true;    ///< the state that its end has already
  bool frees_duplicates_twice = false;
  bool split_copies_lock = true;
  bool split_moves_state = false;
  bool split_renews_child = true;
  bool caps_paths = true;
  // Locks.
  bool counts_bare_locks = true;  ///< a state lock on a tombstone counts
  bool loses_bare_locks = false;  ///< it does not, and its unlock takes another holder's lock
  // Eviction.
  bool locks_keep_states = true;
  bool evicts_leaves_whole = true;
  bool frees_evicted_states = true;
  bool counts_dropped_kv = true;
  bool drops_bare_parents = false;   ///< with a leaf go the parents that it leaves as bare leaves
  bool evicts_full_request = false;  ///< a KV shortage evicts all that is needed, not what lacks
  bool evicts_separately = false;    ///< states that fall with evicted KV do not count as evicted
  bool hides_kv_of_states = false;   ///< a slot's eviction does not tell the KV that fell with it
  bool asks_for_page_more = true;    ///< an allocation makes room for more pages than it takes

  // Admissions.
  bool matches_last_token = false;
  bool matches_first_chunk_alone = false;
  bool admission_locks = true;
  bool admission_evicts = true;
  bool locks_copied_state = true;  ///< while a slot for its copy is made free
  bool loads_into_busy_slots = false;
  bool match_copies_conv = true;
  bool zeroes_new_states = true;
  bool refusal_frees_copy = true;
  bool receives_conv = true;
  bool receives_last_token = false;
  // Forwards.
  bool finds_states_by_row = false;
  bool decode_moves_conv = true;
  bool chunk_moves_recurrent = true;    ///< a prompt's later chunk moves the recurrent state
  bool chunk_resumes_recurrent = true;  ///< and starts from what it was
  bool pads_with_old_rows = false;
  Commit commit = Commit::accepted;
  bool moves_accepted_kv = true;
  bool counts_sampled_token = false;
  // Checkpoints.
  CheckpointCopy checkpoint_copy = CheckpointCopy::both;
  bool checkpoint_asserts_room = false;
  bool matches_after_checkpoint = false;  ///< a checkpoint's key is matched again
  bool frees_refused_checkpoint = true;
  bool splits_at_prompt = true;
  bool unlocks_skipped_locks = false;
  // Ends of requests.
  Finish finish_gives = Finish::slot;
  bool states_count_from_launch = false;  ///< otherwise from their result on
  bool kv_counts_from_launch = true;
  bool finish_stops_at_end = true;
  bool finish_inserts_known_key = true;
  bool finished_key_one_short = false;
  bool floors_finished_key = false;  ///< to a multiple of 64
  bool strips_key_alone = false;     ///< a key without thinking, and the state of the whole answer
  bool cuts_key_alone = false;       ///< a key up to the answer's end, and the state after it
  bool finish_frees_tree_kv = false;
  bool frees_refused_finish = true;
  bool frees_donated_slot = false;
  bool abort_unlocks = true;
  bool abort_frees_drafts = true;

  // Replay-state decode.
  bool allocation_clears_cursor = true;
  bool copy_clears_cursor = true;  ///< the copy of a matched state
  bool load_clears_cursor = true;
  bool flushes_full_ring = true;
  bool flushes_at_boundaries = true;   ///< where the length is a multiple of the track interval
  bool early_flush_reads_all = false;  ///< such a flush reads all entries but the last
  bool flush_writes_state = true;
  bool flush_clears_cursor = true;
  bool reads_entry_ahead = false;  ///< the place of the step's own entry is read, too
  std::uint32_t cursor_steps = 1;  ///< for each step
  bool finds_cursors_by_row = false;
  bool padding_moves_cursors = false;  ///< rows of padding repeat the batch's last row
  bool verification_folds_ring = true;
  AcceptedCount accepted_count = AcceptedCount::none;
  bool checkpoint_waits_for_flush = true;  ///< none is made while entries are pending
  bool finish_cuts_pending = true;         ///< the finished key is what the state stands for
  bool finish_rewinds_conv = true;         ///< and so is the window

  // The host tier.
  bool backup_locks = true;         ///< the device's slots, until it is settled
  bool split_copies_backup = true;  ///< both halves wait for a backup in flight
  bool demotion_keeps_host_state = true;
  bool host_evicts_listed_alone = true;  ///< states that are on the device, too, are spared
  bool refused_load_copies = true;       ///< the state that the device has for the request
  bool refused_load_frees_slot = true;
  bool loaded_clears_cursor = true;
  bool selective_waits_for_second = true;  ///< insert
  bool split_copies_inserts = true;        ///< their number
  bool write_back_waits = true;            ///< for the copy, before the slots are free
  bool write_back_saves_inner_states = true;
  bool dropped_extensions_free_host = true;
  bool reclaim_spares_leaves = true;  ///< of the device, while there is other KV on both tiers
  bool reclaim_spares_states = true;
  bool reclaim_spares_loads = true;   ///< KV that a load reads
  bool split_copies_load = true;      ///< both halves wait for a load in flight
  bool loads_wait_for_loads = true;   ///< a load of what another one brings is refused
  bool copies_wait_for_loads = true;  ///< of a matched state that is being loaded
  bool forwards_wait_for_loads = true;
  bool host_has_index_keys = true;  ///< they are copied with the KV

  // The storage behind it.
  bool storage_keys_have_salts = true;
  bool storage_chains_prefixes = true;  ///< a key names the whole prefix, not its node's part
  bool settled_writes_unlock = true;    ///< their node's copy on the host
  RanksTake ranks_take = RanksTake::shared;
  bool reader_minds_stops = true;           ///< before it reads KV, and before the state
  bool prefetch_state_follows_size = true;  ///< where the host had no room for all of it
  bool short_prefetches_are_dropped = true;
  bool stopped_prefetches_keep_slots = true;  ///< that the reader may still write
  bool ended_prefetches_free_rest = true;
  bool prefetches_free_known_kv = true;  ///< that the host has already
  bool prefetches_return_quota = true;
  bool passing_over_drops_copy = true;  ///< of the state that a match found, until the next match

  // Sliding windows.
  bool tombstones_break_windows = true;  ///< a match needs a whole window after one
  bool split_copies_window_lock = true;
  bool window_lock_covers = true;  ///< all nodes of the window, not its last one alone
  bool locks_keep_windows = true;
  bool windows_take_states = true;     ///< the state of a node goes with its window
  bool refill_keeps_locked_kv = true;  ///< of a tombstone that gets a request's window
  bool slides_whole_reach = true;      ///< the token that is computed next sees what is kept
  bool sliding_forgets = true;         ///< slots that were given back are not inserted
  bool early_release_frees = false;    ///< the window of the prefix, whoever else has locked it
  bool branch_cuts_insert = true;      ///< what has KV without a window is stored up to there
  // And with a host tier.
  bool early_release_frees_saved = false;  ///< windows whose backup is not settled
  bool backup_locks_window = true;         ///< not its KV and its state alone
  bool backup_covers_window = true;        ///< what the host lacks of it, not the node's part alone
  bool load_covers_window = true;          ///< likewise, what the device lacks
  bool covered_windows_wait = true;  ///< nodes of a backup's window wait for it like its own node
  bool host_windows_spare_backups = true;
  bool host_windows_take_states = true;  ///< the host's state of a node goes with its window
  bool write_back_saves_inner_windows = true;
  bool refused_load_copies_again = true;  ///< where a longer prefix's state was copied before
  bool copies_lock_host =
      true;  ///< what a load will bring, while a slot for the state is made free

  // The extra buffer's tracking slots.
  TrackedAt tracked_at = TrackedAt::position;
  bool tracks_conv_at_chunk_end = false;
  bool grid_is_absolute = false;  ///< tracked positions count from the prompt's start
  bool tracks_branch = true;
  bool forgets_branch = false;  ///< after the first chunk
  bool tracks_prefill_end = false;
  bool tracks_old_chunk_in_verify = false;
  bool swaps_with_results = false;  ///< with overlap, a result says which slot is written next
  bool lazy_takes_second_slot = true;
  bool lazy_evicts = false;
  bool lazy_frees_old_slot = true;
  bool lazy_gives_up_lock = true;
  bool stores_beyond_owned = false;
  bool stores_previous_state = true;
  bool donates_other_slot = false;
  bool forgets_stored_length = true;
  bool stripping_frees_tree_kv = false;
  bool frees_stored_tracking_slot = false;
  bool frees_tracking_slots = true;
};

}  // namespace lockstep::cache_sim
