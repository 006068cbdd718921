// The defects of the vLLM policies: each sets one rule to a wrong value. Those marked (0.33) are
// what vLLM 0.33 itself does; reports/found/ describes them.
#include "cache_sim/policies/vllm/block_rules.hpp"
#include "cache_sim/trace/public_reports.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using Rules = BlockRules;

const BrokenRule<Rules> kBroken[] = {
    {"vllm-align:uses-states-of-this-step",
     "a request resumes from a state that another request's forward of this very step will write",
     &Rules::uses_states_of_this_step, true},
    {"vllm-align:copies-unwritten-kv",
     "a hit inside an attention block copies it before this step's forward has written it (0.33)",
     &Rules::copies_unwritten_kv, true},
    {"vllm-align:forgets-the-sent-state",
     "no block is counted for the state that another server sends, and one too many is popped "
     "(0.33)",
     &Rules::counts_sent_state, false},
    {"vllm-align:checkpoints-behind-partial-hits",
     "a chunk that begins inside a block stores a state inside itself and passes that block's end, "
     "whose key then stands for the state at its beginning (0.33)",
     &Rules::checkpoints_from_inside, true},
    {"vllm-align:keys-passed-states",
     "a chunk after rejected drafts goes past the column in which the last state lies, and the "
     "column is keyed as the state of its block's end (0.33)",
     &Rules::keys_passed_states, true},
    {"vllm-align:preempts-unrun-chunks",
     "a request that is preempted in the step that scheduled it leaves keys of blocks that no "
     "forward has written, as the priority policy does (0.33)",
     &Rules::keeps_keys_of_unrun_chunks, true},
    {"vllm-align:shortens-chunks-to-nothing",
     "a chunk that has to end with a block is shortened to nothing for the MTP modules, in every "
     "step (0.33)",
     &Rules::shortens_chunks_to_nothing, true},
    {"vllm-align:keys-states-late",
     "with MTP modules the prompt's last state is keyed by the tokens before those that they write "
     "again (0.33)",
     &Rules::keys_states_late, true},
    {"vllm-align:looks-for-missing-hashes",
     "a look-up of sliding windows goes to the prompt's end, where hashes that cover several "
     "tokens after their block do not exist yet (0.33)",
     &Rules::looks_for_missing_hashes, true},
    {"vllm-align:splits-by-attentions-block",
     "a chunk is cut at the end of an attention block, where states have blocks of another size "
     "(vLLM #54076)",
     &Rules::splits_by_attention_block, true},
    {"vllm-align:leaves-out-extra-keys",
     "a block's hash covers its tokens alone: requests of other salts, adapters and images share "
     "it",
     &Rules::hashes_extra_keys, false},
    {"vllm-align:forgets-places-of-images",
     "a block's hash says which images the block has, and not where they begin",
     &Rules::hashes_image_places, false},
    // Of the look-up, as reported and repaired.
    {"vllm-align:drops-in-every-pass",
     "EAGLE's last unit is dropped again in every pass over the groups (vLLM #33270)",
     &Rules::drops_in_every_pass, true},
    {"vllm-align:keeps-no-junction",
     "no state is kept where a prompt leaves what is stored, so a shared prefix is never used "
     "(vLLM #45238)",
     &Rules::keeps_junctions, false},
    // Of what the scheduler asks with drafts, a draft model and a watermark.
    {"vllm-align:keeps-rejected-tokens",
     "a verification's rejected drafts count as computed tokens", &Rules::drops_rejected_drafts,
     false},
    {"vllm-align:cuts-places-of-drafts",
     "an admission that is padded with drafts keeps some of them where its chunk is cut",
     &Rules::cuts_draft_places, true},
    {"vllm-align:asserts-whole-padding",
     "an admission that is padded with drafts ends the engine where long_prefill cuts it (0.33)",
     &Rules::asserts_whole_padding, true},
    {"vllm-align:forgets-the-drafters-tokens",
     "a row gets no places for the tokens that a draft model writes after it",
     &Rules::makes_room_for_drafter, false},
    {"vllm-align:counts-the-drafters-place",
     "a chunk has to end with a block that it could only fill with the place of its draft model, "
     "and is cut to nothing in every step (0.33)",
     &Rules::fills_drafter_places, true},
    {"vllm-align:begins-with-recycled-states",
     "a prompt of one token that is padded with drafts runs as a verification and begins with the "
     "state that its block held before (0.33)",
     &Rules::begins_with_recycled_states, true},
    {"vllm-align:publishes-ahead",
     "a result publishes what rows that are still under way will fill", &Rules::publishes_ahead,
     true},
    {"vllm-align:frees-windows-of-rows-under-way",
     "what the last row's window has passed is given back, though a row under way still reads it",
     &Rules::frees_windows_under_way, true},
    {"vllm-align:forgets-the-watermark",
     "an admission takes the blocks that those who run are to find free", &Rules::keeps_watermark,
     false},
    // Of the worker (align_worker.hpp): what moves states wrongly, and the one rule of the manager
    // whose break only the states show.
    {"vllm-align:forgets-accepted-without-drafts",
     "a step without drafts begins at the first state, whatever the step before it accepted",
     &Rules::forgets_accepted_without_drafts, true},
    {"vllm-align:keeps-no-block-ends",
     "a verification that passes a block's end leaves that end's state in scratch",
     &Rules::keeps_block_ends, false},
    {"vllm-align:keeps-accepted-behind-copy",
     "the accepted count stays when the accepted state is copied to a new block, and counts twice",
     &Rules::copy_resets_accepted, false},
    {"vllm-align:forgets-accepted-before-a-turn",
     "a session's next turn begins with the state after the first token of the last verification, "
     "however many were accepted (0.33)",
     &Rules::forgets_accepted_before_turn, true},
    {"vllm-align:copies-the-first-state",
     "a new block gets the state after the first token of the last step, not the accepted one",
     &Rules::copies_accepted_state, false},
    {"vllm-align:cuts-no-chunks",
     "a prefill chunk ends anywhere, so that blocks are keyed for states that nobody stored",
     &Rules::cuts_chunks, false},
    {"vllm-align:resumes-by-hash-block",
     "the column that a request resumes from is counted in hash blocks",
     &Rules::resumes_by_hash_block, true},
    {"vllm-align:skips-block-copies",
     "the private copy of a block that a hit shares in part is given out and never written",
     &Rules::copies_blocks, false},
    {"vllm-align:copies-the-tail-of-one-group",
     "a hit inside a block copies the block of the first group alone",
     &Rules::copies_first_group_alone, true},
    {"vllm-align:defers-one-group",
     "the copies of the last group run after the forward, those of the others before it",
     &Rules::defers_last_group, true},
    {"vllm-align:keys-what-is-under-way",
     "blocks that another server's tokens are loaded into are keyed when the load begins",
     &Rules::keys_loads_under_way, true},
    {"vllm-align:loads-one-group-less",
     "a load is taken for done when all groups but the last have theirs",
     &Rules::loads_one_group_less, true},
    {"vllm-align:resumes-with-old-accepted",
     "a request begins with the accepted count that the last one left in its row of the batch",
     &Rules::resumes_with_old_accepted, true},
    {"vllm-align:verifies-replays",
     "a few known tokens that are computed again run as a verification of drafts",
     &Rules::verifies_replays, true},
    {"vllm-all:stores-chunk-ends-alone",
     "kernels store the state after a chunk's last token, and none where they pass a block's end",
     &Rules::stores_chunk_ends_alone, true},
    // Of the CPU tier (offload_tier.hpp).
    {"vllm-align:stores-before-the-forward",
     "a store starts in the step that decides it, and reads blocks that this step's forward still "
     "writes (vLLM #45704)",
     &Rules::stores_wait_for_forward, false},
    {"vllm-align:stores-the-last-token",
     "of a request that has ended, the slot of the last sampled token is stored too, which holds "
     "nothing or a rejected draft's KV",
     &Rules::stores_committed_tokens, false},
    {"vllm-align:loads-what-is-being-stored",
     "a look-up takes a chunk for a hit whose store has not landed",
     &Rules::look_ups_wait_for_stores, false},
    {"vllm-align:loads-without-states",
     "a hit on the CPU tier is as long as attention's, whatever states are there (vLLM #53730)",
     &Rules::tier_hits_need_states, false},
    {"vllm-align:evicts-what-is-read",
     "a chunk that a load in flight reads may be evicted, and another one is stored in its place",
     &Rules::loads_pin_chunks, false},
    {"vllm-align:goes-on-before-the-load",
     "a request that waits for a load goes on before the load has landed",
     &Rules::loads_wait_to_land, false},
    {"vllm-align:frees-aborted-loads",
     "a request that is aborted gives back at once the blocks that its load in flight writes",
     &Rules::aborted_loads_keep_blocks, false},
    {"vllm-align:reuses-blocks-under-a-store",
     "a block is given out again while its store is to come, which then stores what the new owner "
     "writes",
     &Rules::flushes_reused_blocks, false},
    {"vllm-align:preempts-without-flush",
     "stores of a request that is preempted come after its blocks were given out again",
     &Rules::flushes_preempted, false},
    {"vllm-align:resets-without-flush",
     "after a reset of the CPU tier, chunks are stored where copies in flight still read or write",
     &Rules::resets_flush, false},
    // Of the host's blocks (simple_tier.hpp).
    {"vllm-align:forgets-to-pin-hits",
     "host blocks that a look-up has found may be evicted before the request gets its own",
     &Rules::hits_are_pinned, false},
    {"vllm-align:loads-states-into-the-first-column",
     "a state on the host is loaded into the first column behind the local hit, which holds no "
     "block of states",
     &Rules::loads_states_into_columns, false},
    {"vllm-align:reuses-the-source-of-a-store",
     "a block is free while a store to the host reads it", &Rules::stores_hold_sources, false},
    {"vllm-align:publishes-stores-under-way",
     "a host block is found by its keys before the copy to it has landed",
     &Rules::publishes_settled_stores, false},
    {"vllm-align:publishes-stores-from-before-a-reset",
     "a store that was in flight when the host's blocks were reset is published all the same",
     &Rules::resets_abandon_stores, false},
    // Of the pool and its bookkeeping: what the auditor is there to see.
    {"vllm-align:hits-take-no-reference",
     "the blocks of a hit stand in a request's table and are free to be popped",
     &Rules::hits_take_references, false},
    {"vllm-align:copy-targets-stay-pinned",
     "the new end of a copy is never released when the step has been decided",
     &Rules::releases_copy_targets, false},
    {"vllm-align:retired-states-keep-references",
     "states that the running one has passed leave the table and are not given back",
     &Rules::gives_back_retired_states, false},
    {"vllm-align:gives-keyed-blocks-to-the-head", "blocks that others could use are popped first",
     &Rules::keyed_blocks_go_last, false},
    {"vllm-align:pops-the-newest", "new blocks come from the tail of the free queue",
     &Rules::pops_newest, true},
    {"vllm-align:counts-free-blocks-twice",
     "a block that is given back without a key counts as two free ones",
     &Rules::counts_free_blocks_twice, true},
    {"vllm-align:index-keeps-removed-keys", "keys that a block has lost still lead to it",
     &Rules::unindexes_removed_keys, false},
};

// The project whose bug reports traces of this family cite.
const Registration<PublicProject> kVllm{{"vllm", "vllm-project/vllm"}};

}  // namespace
}  // namespace lockstep::cache_sim
