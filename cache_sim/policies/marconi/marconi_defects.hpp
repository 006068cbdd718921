// Defects of Marconi: one rule broken each. Those with a source are slips of the paper's published
// simulator, found by reading it.
#pragma once

#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {

inline const Defect kMarconiDescends{
    "marconi:descends-after-partial-match",
    "a match that ends inside an edge goes on below that edge, as if it had passed it (the "
    "published simulator's _match_prefix_helper)"};
inline const Defect kMarconiFreesAnothers{
    "marconi:frees-the-bytes-of-another-node",
    "an evicted leaf gives back the bytes of the candidate that was looked at last (the published "
    "simulator's loop variable)"};
inline const Defect kMarconiParentFlops{
    "marconi:takes-mlp-for-attention",
    "the parent's FLOPs count MLP layers as attention layers (the published simulator)"};
inline const Defect kMarconiWholePrefix{
    "marconi:divides-by-the-whole-prefix",
    "a node's FLOPs are divided by the bytes of its whole prefix, not of its edge (the published "
    "simulator)"};
inline const Defect kMarconiInsertMatches{
    "marconi:insert-refreshes-its-parent",
    "an insert also refreshes the node that a match of its key would use (the published "
    "simulator)"};
inline const Defect kMarconiRefreshesPath{
    "marconi:refreshes-whole-path",
    "a match makes every node of its path new, not only the one it used"};
inline const Defect kMarconiNoBranch{
    "marconi:stores-no-branch",
    "no state is stored where a prompt branches off, so a shared prefix is never reused"};
inline const Defect kMarconiBranchLate{
    "marconi:takes-the-branch-at-the-chunk-end",
    "the state that is stored for the branch is the one at the end of the chunk that passes it"};
inline const Defect kMarconiEvictsShared{
    "marconi:evicts-where-prefixes-part",
    "a node with two children is a candidate, so a state that two conversations use goes first"};
inline const Defect kMarconiIgnoresLocks{"marconi:evicts-what-runs",
                                         "eviction takes what a running request uses"};
inline const Defect kMarconiMergeLosesKv{
    "marconi:merge-loses-kv",
    "a node that goes on alone after its state was evicted does not pass its KV to its child"};
inline const Defect kMarconiSplitMovesState{
    "marconi:split-moves-state",
    "a split gives the child's state to the new parent, which stands for fewer tokens"};
inline const Defect kMarconiLeaksBranch{
    "marconi:leaks-branch-state",
    "a branch whose state is there already keeps the slot that was taken for it"};
inline const Defect kMarconiCopiesRecurrent{
    "marconi:copies-the-recurrent-part-alone",
    "a hit copies the recurrent state and leaves the window of the convolution as it was"};
inline const Defect kMarconiTunesFromNow{
    "marconi:tunes-on-the-cache-of-now",
    "alpha is tuned on the cache as it is at the end of the window, which has seen its requests"};
}  // namespace lockstep::cache_sim
