// The defects of the slot caches: each sets one rule to a wrong value. Those with a source were
// found in TensorRT-Edge-LLM by reading it, or reported of another server with the same parts.
#include "cache_sim/policies/edge_llm/edge_llm_policy.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using Rules = EdgeLlmRules;

const BrokenRule<Rules> kBroken[] = {
    // Compaction.
    {"edge-llm-v0:compacts-lengths-first",
     "lengths are compacted in place while rows still move, so a row moves with the length of "
     "another (compactKVCache of 0.5)",
     &Rules::compacts_lengths_first, true},
    {"edge-llm-v0:empty-row-keeps-length",
     "a row without tokens does not store its length, so it gets that of the row which was there "
     "(compactKVCache of 0.5)",
     &Rules::empty_row_keeps_length, true},
    {"edge-llm-v0:ignores-permutations",
     "a compaction that keeps all rows returns early, although it changes their order "
     "(compactKVCache of 0.5)",
     &Rules::ignores_permutations, true},
    {"edge-llm-v0:leaves-conv-behind",
     "a moved row takes its recurrent state and not its conv state", &Rules::move_takes_conv,
     false},
    {"edge-llm:row-for-slot",
     "a forward takes the row's number for the slot of its states, which is right until rows are "
     "compacted",
     &Rules::takes_row_for_slot, true},
    // Resetting.
    {"edge-llm:resets-lengths-beyond",
     "the lengths of a new batch are copied by the capacity of the host tensor, over rows that run "
     "(resetForNewSequences)",
     &Rules::resets_next_length, true},
    {"edge-llm:clears-a-length",
     "clearing a resident slot also clears the length of the row with that number",
     &Rules::clears_length_of_slot, true},
    {"edge-llm:never-clears", "a new request starts from the states that its slot has",
     &Rules::clears_slots, false},
    // Prefill.
    {"edge-llm:takes-padding",
     "the window of the convolution is that of the padded chunk, not of the row's own tokens "
     "(causalConv1d before context_lengths; transformers #48256)",
     &Rules::takes_padding, true},
    {"edge-llm:forgets-the-initial-state",
     "a chunk's convolution starts from nothing although tokens came before (causalConv1d before "
     "context_lengths)",
     &Rules::resumes_conv, false},
    // Speculation.
    {"edge-llm-v0:skips-what-was-accepted-whole",
     "nothing is scattered where all tokens were accepted, as if the verification had written the "
     "state (the scatter of 0.5)",
     &Rules::skips_full_acceptance, true},
    {"edge-llm:commits-the-recurrent-part-alone",
     "accepted drafts move the recurrent state and not the window of the convolution (mlx-swift-lm "
     "#218, vLLM #50272)",
     &Rules::commits_conv, false},
    {"edge-llm:verification-writes",
     "a verification leaves the row's states at its last draft, and the accept starts from there",
     &Rules::verification_writes, true},
    {"edge-llm-v0:scatters-the-next-snapshot",
     "the accepted length counts from 1 and the snapshot from 0: the state after one token more",
     &Rules::scatters_next_snapshot, true},
    // Captured prefixes and routing.
    {"edge-llm:restores-no-conv", "a restored prefix brings its recurrent state alone",
     &Rules::restores_conv, false},
    {"edge-llm:restores-kv-one-short", "a restored prefix lacks the KV of its last token",
     &Rules::restores_last_kv, false},
    {"edge-llm:routes-by-absolute-index",
     "a recurrent layer finds its states by its index among all layers, not among its kind",
     &Rules::routes_by_absolute_index, true},
};

}  // namespace
}  // namespace lockstep::cache_sim
