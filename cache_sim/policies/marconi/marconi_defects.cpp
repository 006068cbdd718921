// The defects of Marconi: each sets one rule to a wrong value. Those with a source are slips of the
// paper's published simulator, found by reading it.
#include "cache_sim/policies/marconi/marconi_rules.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using Rules = MarconiRules;

const BrokenRule<Rules> kBroken[] = {
    {"marconi:descends-after-partial-match",
     "a match that ends inside an edge goes on below that edge, as if it had passed it (the "
     "published simulator's _match_prefix_helper)",
     &Rules::match_ends_inside_edges, false},
    {"marconi:frees-the-bytes-of-another-node",
     "an evicted leaf gives back the bytes of the candidate that was looked at last (the published "
     "simulator's loop variable)",
     &Rules::frees_anothers_bytes, true},
    {"marconi:takes-mlp-for-attention",
     "the parent's FLOPs count MLP layers as attention layers (the published simulator)",
     &Rules::takes_mlp_for_attention, true},
    {"marconi:divides-by-the-whole-prefix",
     "a node's FLOPs are divided by the bytes of its whole prefix, not of its edge (the published "
     "simulator)",
     &Rules::divides_by_whole_prefix, true},
    {"marconi:insert-refreshes-its-parent",
     "an insert also refreshes the node that a match of its key would use (the published "
     "simulator)",
     &Rules::insert_matches, true},
    {"marconi:refreshes-whole-path",
     "a match makes every node of its path new, not only the one it used",
     &Rules::match_renews_path, true},
    {"marconi:stores-no-branch",
     "no state is stored where a prompt branches off, so a shared prefix is never reused",
     &Rules::stores_branches, false},
    {"marconi:takes-the-branch-at-the-chunk-end",
     "the state that is stored for the branch is the one at the end of the chunk that passes it",
     &Rules::takes_branch_at_chunk_end, true},
    {"marconi:evicts-where-prefixes-part",
     "a node with two children is a candidate, so a state that two conversations use goes first",
     &Rules::evicts_where_prefixes_part, true},
    {"marconi:evicts-what-runs", "eviction takes what a running request uses",
     &Rules::locks_keep_nodes, false},
    {"marconi:merge-loses-kv",
     "a node that goes on alone after its state was evicted does not pass its KV to its child",
     &Rules::merge_passes_kv, false},
    {"marconi:split-moves-state",
     "a split gives the child's state to the new parent, which stands for fewer tokens",
     &Rules::split_moves_state, true},
    {"marconi:leaks-branch-state",
     "a branch whose state is there already keeps the slot that was taken for it",
     &Rules::frees_refused_branch, false},
    {"marconi:copies-the-recurrent-part-alone",
     "a hit copies the recurrent state and leaves the window of the convolution as it was",
     &Rules::match_copies_conv, false},
    {"marconi:tunes-on-the-cache-of-now",
     "alpha is tuned on the cache as it is at the end of the window, which has seen its requests",
     &Rules::tunes_on_cache_of_now, true},
};

}  // namespace
}  // namespace lockstep::cache_sim
