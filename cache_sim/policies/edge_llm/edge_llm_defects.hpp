// Defects of the slot caches: one rule broken each. Those with a source were found in
// TensorRT-Edge-LLM by reading it, or reported of another server with the same parts.
#pragma once

#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {

// Compaction.
inline const Defect kEdgeLengthsFirst{
    "edge-llm-v0:compacts-lengths-first",
    "lengths are compacted in place while rows still move, so a row moves with the length of "
    "another (compactKVCache of 0.5)"};
inline const Defect kEdgeEmptyRow{
    "edge-llm-v0:empty-row-keeps-length",
    "a row without tokens does not store its length, so it gets that of the row which was there "
    "(compactKVCache of 0.5)"};
inline const Defect kEdgeIgnoresOrder{
    "edge-llm-v0:ignores-permutations",
    "a compaction that keeps all rows returns early, although it changes their order "
    "(compactKVCache of 0.5)"};
inline const Defect kEdgeLeavesConv{"edge-llm-v0:leaves-conv-behind",
                                    "a moved row takes its recurrent state and not its conv state"};
inline const Defect kEdgeRowForSlot{
    "edge-llm:row-for-slot",
    "a forward takes the row's number for the slot of its states, which is right until rows are "
    "compacted"};
// Resetting.
inline const Defect kEdgeResetsBeyond{
    "edge-llm:resets-lengths-beyond",
    "the lengths of a new batch are copied by the capacity of the host tensor, over rows that run "
    "(resetForNewSequences)"};
inline const Defect kEdgeClearsLength{
    "edge-llm:clears-a-length",
    "clearing a resident slot also clears the length of the row with that number"};
inline const Defect kEdgeNeverClears{"edge-llm:never-clears",
                                     "a new request starts from the states that its slot has"};
// Prefill.
inline const Defect kEdgeTakesPadding{
    "edge-llm:takes-padding",
    "the window of the convolution is that of the padded chunk, not of the row's own tokens "
    "(causalConv1d before context_lengths; transformers #48256)"};
inline const Defect kEdgeForgetsInitial{
    "edge-llm:forgets-the-initial-state",
    "a chunk's convolution starts from nothing although tokens came before (causalConv1d before "
    "context_lengths)"};
// Speculation.
inline const Defect kEdgeSkipsFull{
    "edge-llm-v0:skips-what-was-accepted-whole",
    "nothing is scattered where all tokens were accepted, as if the verification had written the "
    "state (the scatter of 0.5)"};
inline const Defect kEdgeRecurrentAlone{
    "edge-llm:commits-the-recurrent-part-alone",
    "accepted drafts move the recurrent state and not the window of the convolution "
    "(mlx-swift-lm #218, vLLM #50272)"};
inline const Defect kEdgeVerifyWrites{
    "edge-llm:verification-writes",
    "a verification leaves the row's states at its last draft, and the accept starts from there"};
inline const Defect kEdgeScattersNext{
    "edge-llm-v0:scatters-the-next-snapshot",
    "the accepted length counts from 1 and the snapshot from 0: the state after one token more"};
// Captured prefixes and routing.
inline const Defect kEdgeRestoresHalf{"edge-llm:restores-no-conv",
                                      "a restored prefix brings its recurrent state alone"};
inline const Defect kEdgeRestoresShort{"edge-llm:restores-kv-one-short",
                                       "a restored prefix lacks the KV of its last token"};
inline const Defect kEdgeAbsoluteIndex{
    "edge-llm:routes-by-absolute-index",
    "a recurrent layer finds its states by its index among all layers, not among its kind"};

}  // namespace lockstep::cache_sim
