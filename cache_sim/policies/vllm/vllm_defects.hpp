// Defects of the vLLM policies: one rule broken each, at the place of the rule. Those marked (0.33)
// are what vLLM 0.33 itself does; reports/found/ describes them.
#pragma once

#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {

inline const Defect kUsesStatesOfThisStep{
    "vllm-align:uses-states-of-this-step",
    "a request resumes from a state that another request's forward of this very step will write"};
inline const Defect kCopiesUnwrittenKv{
    "vllm-align:copies-unwritten-kv",
    "a hit inside an attention block copies it before this step's forward has written it (0.33)"};

inline const Defect kForgetsTheSentState{
    "vllm-align:forgets-the-sent-state",
    "no block is counted for the state that another server sends, and one too many is popped "
    "(0.33)"};
inline const Defect kCheckpointsBehindPartialHits{
    "vllm-align:checkpoints-behind-partial-hits",
    "a chunk that begins inside a block stores a state inside itself and passes that block's end, "
    "whose key then stands for the state at its beginning (0.33)"};
inline const Defect kKeysPassedStates{
    "vllm-align:keys-passed-states",
    "a chunk after rejected drafts goes past the column in which the last state lies, and the "
    "column is keyed as the state of its block's end (0.33)"};
inline const Defect kPreemptsUnrunChunks{"vllm-align:preempts-unrun-chunks",
                                         "a request that is preempted in the step that scheduled "
                                         "it leaves keys of blocks that no forward "
                                         "has written, as the priority policy does (0.33)"};
inline const Defect kShortensChunksToNothing{"vllm-align:shortens-chunks-to-nothing",
                                             "a chunk that has to end with a block is shortened to "
                                             "nothing for the MTP modules, in every step "
                                             "(0.33)"};
inline const Defect kKeysStatesLate{
    "vllm-align:keys-states-late",
    "with MTP modules the prompt's last state is keyed by the tokens before those that they write "
    "again (0.33)"};
inline const Defect kLooksForMissingHashes{
    "vllm-align:looks-for-missing-hashes",
    "a look-up of sliding windows goes to the prompt's end, where hashes that cover several tokens "
    "after their block do not exist yet (0.33)"};
inline const Defect kSplitsByAttentionsBlock{
    "vllm-align:splits-by-attentions-block",
    "a chunk is cut at the end of an attention block, where states have blocks of another size "
    "(vLLM #54076)"};
inline const Defect kLeavesOutExtraKeys{"vllm-align:leaves-out-extra-keys",
                                        "a block's hash covers its tokens alone: requests of other "
                                        "salts, adapters and images share it"};
inline const Defect kForgetsPlacesOfImages{
    "vllm-align:forgets-places-of-images",
    "a block's hash says which images the block has, and not where they begin"};
// Of the look-up, as reported and repaired.
inline const Defect kDropsInEveryPass{
    "vllm-align:drops-in-every-pass",
    "EAGLE's last unit is dropped again in every pass over the groups (vLLM #33270)"};
inline const Defect kKeepsNoJunction{
    "vllm-align:keeps-no-junction",
    "no state is kept where a prompt leaves what is stored, so a shared prefix is never used "
    "(vLLM #45238)"};
// Of what the scheduler asks with drafts, a draft model and a watermark.
inline const Defect kKeepsRejectedTokens{
    "vllm-align:keeps-rejected-tokens",
    "a verification's rejected drafts count as computed tokens"};
inline const Defect kCutsPlacesOfDrafts{
    "vllm-align:cuts-places-of-drafts",
    "an admission that is padded with drafts keeps some of them where its chunk is cut"};
inline const Defect kAssertsWholePadding{
    "vllm-align:asserts-whole-padding",
    "an admission that is padded with drafts ends the engine where long_prefill cuts it (0.33)"};
inline const Defect kForgetsTheDraftersTokens{
    "vllm-align:forgets-the-drafters-tokens",
    "a row gets no places for the tokens that a draft model writes after it"};
inline const Defect kCountsTheDraftersPlace{
    "vllm-align:counts-the-drafters-place",
    "a chunk has to end with a block that it could only fill with the place of its draft model, "
    "and is cut to nothing in every step (0.33)"};
inline const Defect kBeginsWithRecycledStates{
    "vllm-align:begins-with-recycled-states",
    "a prompt of one token that is padded with drafts runs as a verification and begins with the "
    "state that its block held before (0.33)"};
inline const Defect kPublishesAhead{
    "vllm-align:publishes-ahead",
    "a result publishes what rows that are still under way will fill"};
inline const Defect kFreesWindowsOfRowsUnderWay{
    "vllm-align:frees-windows-of-rows-under-way",
    "what the last row's window has passed is given back, though a row under way still reads it"};
inline const Defect kForgetsTheWatermark{
    "vllm-align:forgets-the-watermark",
    "an admission takes the blocks that those who run are to find free"};

// Of the worker (align_worker.hpp): what moves states wrongly, and the one rule of the manager
// whose break only the states show.
inline const Defect kForgetsAcceptedWithoutDrafts{
    "vllm-align:forgets-accepted-without-drafts",
    "a step without drafts begins at the first state, whatever the step before it accepted"};
inline const Defect kKeepsNoBlockEnds{
    "vllm-align:keeps-no-block-ends",
    "a verification that passes a block's end leaves that end's state in scratch"};
inline const Defect kKeepsAcceptedBehindCopy{
    "vllm-align:keeps-accepted-behind-copy",
    "the accepted count stays when the accepted state is copied to a new block, and counts twice"};
inline const Defect kForgetsAcceptedBeforeATurn{
    "vllm-align:forgets-accepted-before-a-turn",
    "a session's next turn begins with the state after the first token of the last verification, "
    "however many were accepted (0.33)"};
inline const Defect kCopiesTheFirstState{
    "vllm-align:copies-the-first-state",
    "a new block gets the state after the first token of the last step, not the accepted one"};
inline const Defect kCutsNoChunks{
    "vllm-align:cuts-no-chunks",
    "a prefill chunk ends anywhere, so that blocks are keyed for states that nobody stored"};
inline const Defect kResumesByHashBlock{
    "vllm-align:resumes-by-hash-block",
    "the column that a request resumes from is counted in hash blocks"};
inline const Defect kSkipsBlockCopies{
    "vllm-align:skips-block-copies",
    "the private copy of a block that a hit shares in part is given out and never written"};
inline const Defect kCopiesTheTailOfOneGroup{
    "vllm-align:copies-the-tail-of-one-group",
    "a hit inside a block copies the block of the first group alone"};
inline const Defect kDefersOneGroup{
    "vllm-align:defers-one-group",
    "the copies of the last group run after the forward, those of the others before it"};
inline const Defect kKeysWhatIsUnderWay{
    "vllm-align:keys-what-is-under-way",
    "blocks that another server's tokens are loaded into are keyed when the load begins"};
inline const Defect kLoadsOneGroupLess{
    "vllm-align:loads-one-group-less",
    "a load is taken for done when all groups but the last have theirs"};
inline const Defect kResumesWithOldAccepted{
    "vllm-align:resumes-with-old-accepted",
    "a request begins with the accepted count that the last one left in its row of the batch"};
inline const Defect kVerifiesReplays{
    "vllm-align:verifies-replays",
    "a few known tokens that are computed again run as a verification of drafts"};

inline const Defect kStoresChunkEndsAlone{
    "vllm-all:stores-chunk-ends-alone",
    "kernels store the state after a chunk's last token, and none where they pass a block's end"};

// Of the pool and its bookkeeping: what the auditor is there to see.
inline const Defect kHitsTakeNoReference{
    "vllm-align:hits-take-no-reference",
    "the blocks of a hit stand in a request's table and are free to be popped"};
inline const Defect kCopyTargetsStayPinned{
    "vllm-align:copy-targets-stay-pinned",
    "the new end of a copy is never released when the step has been decided"};
inline const Defect kRetiredStatesKeepReferences{
    "vllm-align:retired-states-keep-references",
    "states that the running one has passed leave the table and are not given back"};
inline const Defect kGivesKeyedBlocksToTheHead{"vllm-align:gives-keyed-blocks-to-the-head",
                                               "blocks that others could use are popped first"};
inline const Defect kPopsTheNewest{"vllm-align:pops-the-newest",
                                   "new blocks come from the tail of the free queue"};
inline const Defect kCountsFreeBlocksTwice{
    "vllm-align:counts-free-blocks-twice",
    "a block that is given back without a key counts as two free ones"};
inline const Defect kIndexKeepsRemovedKeys{"vllm-align:index-keeps-removed-keys",
                                           "keys that a block has lost still lead to it"};

}  // namespace lockstep::cache_sim
