// Defects of the SGLang policies: one rule broken each, most of them seen in a public report
// (fixtures/traces has the trace that shows each). They are planted at the place of the rule.
#pragma once

#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {

// The tree.
inline const Defect kMatchKeepsPlace{"sglang-no-buffer:match-keeps-place",
                                     "a match does not make the state it used the newest one"};
inline const Defect kInsertKeepsPlace{
    "sglang-no-buffer:insert-keeps-place",
    "inserting a key that is there does not make its state the newest one"};
inline const Defect kRefreshesWholePath{
    "sglang-no-buffer:refreshes-whole-path",
    "a match makes every state on the path new, not only the one it used (SGLang before #31643)"};
inline const Defect kSplitMovesState{
    "sglang-no-buffer:split-moves-state",
    "a split gives the child's state to the new parent, which stands for fewer tokens"};
inline const Defect kSplitForgetsLock{"sglang-no-buffer:split-forgets-lock",
                                      "a split does not copy the KV lock to the new parent"};
inline const Defect kTombstoneLockUncounted{
    "sglang-no-buffer:tombstone-lock-uncounted",
    "a lock on a node without a state is not counted, so a refilled state loses another holder's "
    "lock (SGLang #21379)"};
inline const Defect kDropKeepsSize{"sglang-no-buffer:drop-keeps-size",
                                   "an evicted leaf stays in the count of evictable tokens"};
inline const Defect kEvictsLockedState{"sglang-no-buffer:evicts-locked-state",
                                       "state eviction does not look at locks"};
inline const Defect kTombstonesLeaf{
    "sglang-no-buffer:tombstones-leaf",
    "state eviction leaves the KV of a leaf behind, where nothing can use it"};
inline const Defect kTombstoneKeepsSlot{
    "sglang-no-buffer:tombstone-keeps-slot",
    "an inner node's evicted state does not go back to the free list"};
inline const Defect kFreesDuplicatesTwice{"sglang-no-buffer:frees-duplicates-twice",
                                          "KV that the tree had already is given back twice"};
inline const Defect kReusesKvWithoutState{
    "sglang-no-buffer:reuses-kv-without-state",
    "a request resumes where its KV ends although no state is there (SGLang #22493: a retraction "
    "kept the KV alone)"};
inline const Defect kDescendsAfterPartialMatch{
    "radix:descends-after-partial-match",
    "a match that ends inside an edge goes on below that edge, as if it had passed it (Marconi's "
    "published simulator)"};
inline const Defect kMatchForgetsTime{
    "radix:match-forgets-time",
    "a match does not refresh access times, so what is used is evicted first"};

inline const Defect kCapsNoPath{"sglang-no-buffer:ignores-path-cap",
                                "states pile up on a path although path_cap limits them"};
inline const Defect kSplitLeavesChildOld{
    "sglang-no-buffer:split-leaves-child-old",
    "a split does not make the longer half newer than the shorter one"};
inline const Defect kUnlocksSkipped{
    "sglang-no-buffer:unlocks-skipped-lock",
    "an unlock takes a state lock away that its lock has skipped (SKIP_DECODE_LOCK)"};
inline const Defect kMatchRenewsOne{
    "sglang-legacy:match-renews-one-state",
    "a match leaves the states above the one it used where they are"};
inline const Defect kEvictsWhatLacks{
    "sglang-legacy:evicts-what-is-missing",
    "a shortage of KV evicts the missing tokens alone, as later versions do"};
inline const Defect kKeepsBareParents{
    "sglang-legacy:keeps-bare-parents",
    "a parent that is left without children and without a state keeps its KV"};
inline const Defect kOffersChildBefore{
    "sglang-legacy:offers-child-before-append",
    "a key that ends inside an edge gets the state at that edge's end, and the length of its "
    "parent (the second of three proposed fixes, as printed)"};
inline const Defect kOffersChildAfter{
    "sglang-legacy:offers-child-after-append",
    "a key that ends inside an edge gets the state at that edge's end, and its own length (the "
    "second of three proposed fixes, repaired)"};

// The requests.
inline const Defect kFreesDonatedSlot{
    "sglang-no-buffer:frees-donated-slot",
    "a finished request frees the slot that it has just given to the tree"};
inline const Defect kSharesLiveSlot{
    "sglang-no-buffer:shares-live-slot",
    "a checkpoint gives the tree the request's running slot instead of a copy of it"};
inline const Defect kAbortKeepsLock{"sglang-no-buffer:abort-keeps-lock",
                                    "an aborted request leaves its prefix locked"};
inline const Defect kAdmitsWithoutLock{
    "sglang-no-buffer:admits-without-lock",
    "an admitted request does not lock the prefix that it reads"};
inline const Defect kSkipsZeroing{
    "sglang-no-buffer:skips-zeroing",
    "a request that starts from nothing gets a recycled slot as it is"};
inline const Defect kLeaksRefusedSlot{"sglang-no-buffer:leaks-refused-slot",
                                      "a checkpoint whose key is there already keeps its copy of "
                                      "the state (SGLang #12432 and its kin)"};
inline const Defect kLeaksCowSlot{"sglang-no-buffer:leaks-cow-slot",
                                  "the slot that a match copied into is lost when the request is "
                                  "not admitted after all (SGLang #16067)"};
inline const Defect kMatchesWholePrompt{
    "sglang-no-buffer:matches-whole-prompt",
    "the last prompt token is matched too, so nothing is left to compute"};
inline const Defect kAssertsOnDonation{"sglang-no-buffer:asserts-on-donation",
                                       "a checkpoint that finds no slot kills the scheduler "
                                       "instead of being skipped (SGLang 0.5.23, #36770)"};
inline const Defect kStripsKeyOnly{"sglang-no-buffer:strips-key-only",
                                   "strip_thinking cuts the finished key to the prompt and inserts "
                                   "the state of the whole output (SGLang 0.5.23, #24380)"};
inline const Defect kOffersOneLonger{
    "sglang-no-buffer:offers-state-one-longer",
    "a key that leaves a stored one before its last token gets that one's state, which has seen "
    "one "
    "token more (llama.cpp's server, reports/found/llama_stale_checkpoint.md)"};
inline const Defect kLoadsIntoBusySlot{
    "sglang-no-buffer:loads-into-busy-slot",
    "a request that finds no slot has its state loaded into a running request's slot before it is "
    "put off (llama.cpp's server, reports/found/llama_busy_slot.md)"};
inline const Defect kFreesBelowProtected{
    "radix:frees-below-protected",
    "strip_thinking frees KV from the prompt's end on although the tree owns more of it (SGLang "
    "0.5.23 with extra buffer, #24380)"};
inline const Defect kMatchesFirstChunk{
    "radix:matches-first-chunk",
    "a request is matched as far as its first prefill chunk and no further (NVIDIA dynamo #13188)"};
inline const Defect kCopiesRecurrentAlone{
    "sglang-no-buffer:copies-recurrent-alone",
    "a hit copies the matched recurrent state and leaves the conv state of the slot as it was"};
inline const Defect kStateByRow{
    "sglang-no-buffer:state-by-row",
    "the state table is indexed by request row, not by state slot (SGLang #24244, #23975)"};
inline const Defect kNeverEvictsForRows{
    "sglang-no-buffer:allocates-without-evicting",
    "a new request's slot is taken without evicting a state first (SGLang #11616)"};
inline const Defect kEvictsWhatItCopies{
    "sglang-no-buffer:evicts-what-it-copies",
    "the matched state is not locked while a slot for its copy is made free"};
inline const Defect kForksAtFinish{
    "sglang-legacy:forks-at-finish",
    "a finished request gives the tree a copy of its state and loses its own slot (the first of "
    "three proposed fixes)"};
inline const Defect kLosesRefusedCopy{
    "sglang-v0:loses-refused-copy",
    "a finished request's copy of its state is lost where the key has a state already"};
inline const Defect kFloorsFinishedKey{
    "sglang-legacy:floors-finished-key",
    "a finished key is cut to a multiple of 64 and its state is not (the third of three proposed "
    "fixes)"};
inline const Defect kKeyOneShort{"sglang-no-buffer:key-one-short",
                                 "a finished key misses the last token that its state has seen"};

inline const Defect kNeverSplitsAtPrompt{
    "radix:never-splits-at-prompt",
    "a prompt and its outputs stay one node, so that outputs are evicted together with the prompt"};
inline const Defect kSkipsEqualFinish{
    "radix:skips-finish-that-adds-nothing",
    "a finished request that adds no whole page does not insert and so does not make its path new"};
inline const Defect kStoresResultsAlone{
    "radix:stores-results-alone",
    "with overlap, the token of the step that is under way when a request stops is not stored"};
inline const Defect kAsksForNoPageMore{
    "radix:asks-for-no-page-more",
    "an allocation makes room for the pages that it takes and for no page beyond them"};

// The two parts of a state, which kernels of their own move.
inline const Defect kConvStaysBehind{
    "sglang-no-buffer:conv-stays-behind",
    "a forward of one token moves the recurrent state and leaves the conv window"};
inline const Defect kRecurrentStaysBehind{
    "sglang-no-buffer:recurrent-stays-behind",
    "a prompt's later chunk moves the conv window and leaves the recurrent state"};
inline const Defect kDropsInitialState{
    "sglang-no-buffer:drops-initial-state",
    "a prompt's later chunk starts its recurrent state from nothing (vLLM #22034, #23279)"};
inline const Defect kCopiesConvAlone{
    "sglang-no-buffer:copies-conv-alone",
    "a checkpoint copies the conv window and leaves what the slot's recurrent state was"};
inline const Defect kDefersConvCopy{
    "sglang-no-buffer:defers-conv-copy",
    "a checkpoint's conv copy waits for the next forward, its recurrent one does not (SGLang "
    "#24221 of one part alone)"};

// Verifications.
inline const Defect kCommitsDraftEnd{
    "sglang-no-buffer:commits-draft-end",
    "the state after a verification is the one after its last draft, not its last accepted one"};
inline const Defect kConvOfAllDrafts{
    "sglang-no-buffer:conv-of-all-drafts",
    "the conv window is shifted by all drafts, the recurrent state by the accepted ones "
    "(mlx-swift-lm #218, vLLM #50272)"};
inline const Defect kCommitsNoConv{
    "sglang-no-buffer:commits-no-conv",
    "accepted drafts move the recurrent state; the conv window stays where the verification began"};
inline const Defect kCommitsNoRecurrent{
    "sglang-no-buffer:commits-no-recurrent",
    "accepted drafts move the conv window; the recurrent state stays where the verification began"};
inline const Defect kCommitsByLength{
    "sglang-no-buffer:commits-by-length",
    "of a tree, the state is taken by how many drafts were accepted, not by which"};
inline const Defect kKeepsFirstSlots{
    "radix:keeps-first-slots",
    "of a tree of drafts, the KV of the first ones is kept, not that of the accepted ones"};
inline const Defect kCountsSampledToken{
    "radix:counts-sampled-token",
    "the token sampled after the accepted drafts counts as computed, so the KV of the rejected "
    "draft in its place is stored"};
inline const Defect kStoresBehindTheEnd{
    "radix:stores-behind-the-end",
    "what was accepted together with a stop token, and after it, is stored as well"};
inline const Defect kCutsKeyAlone{
    "sglang-no-buffer:cuts-key-alone",
    "an answer that ends inside an accepted run leaves its key with the state after the run"};

inline const Defect kAbortForgetsDrafts{
    "sglang-no-buffer:abort-forgets-drafts",
    "a request that is aborted between a verification and its result keeps the KV of its drafts"};

// Transfers and rows of nobody.
inline const Defect kReceivesWholeState{
    "sglang-no-buffer:receives-whole-state",
    "the transferred state has seen the last token, which is computed here once more"};
inline const Defect kReceivesNoConv{
    "sglang-no-buffer:receives-no-conv",
    "a transfer brings KV and the recurrent state and leaves the slot's conv window"};
inline const Defect kPadsWithOldRows{
    "sglang-no-buffer:pads-with-old-rows",
    "padding rows of a captured graph keep the slots of a larger batch before (SGLang #27325, "
    "vLLM #39064)"};

// The extra buffer.
inline const Defect kKeepsTrackingSlots{
    "sglang-extra-buffer:keeps-tracking-slots",
    "a request that ends frees its KV and its live slot and loses the tracking slots (SGLang "
    "#26941, #23496)"};
inline const Defect kFreesKeptSlot{
    "sglang-extra-buffer:frees-kept-slot",
    "a finished request frees the tracking slot that it has just given to the tree"};
inline const Defect kDonatesOtherSlot{
    "sglang-extra-buffer:donates-other-slot",
    "a checkpoint gives the tree the tracking slot that is written next"};
inline const Defect kRemembersTracked{
    "sglang-extra-buffer:remembers-tracked",
    "a checkpoint does not forget the length that it has stored, so the next one stores it again "
    "with the slot's garbage"};
inline const Defect kTracksAtTheEnd{
    "sglang-extra-buffer:tracks-at-the-end",
    "the tracked state is the one after the whole chunk (SGLang #24221: the copy ran at the "
    "wrong time)"};
inline const Defect kTracksConvAtTheEnd{
    "sglang-extra-buffer:tracks-conv-at-the-end",
    "the tracked slot gets the recurrent state of its position and the conv state after the whole "
    "chunk"};
inline const Defect kCopiesBeforeForward{
    "sglang-extra-buffer:copies-before-forward",
    "with overlap, the tracked state is copied before the forward that makes it has run (SGLang "
    "#24221)"};
inline const Defect kCommitsAtLaunch{
    "sglang-extra-buffer:commits-at-launch",
    "with overlap, a request ends with the tokens of a step whose result nobody has (SGLang "
    "#29792, #31369)"};
inline const Defect kChunksAcrossRequests{
    "sglang-extra-buffer:chunks-across-requests",
    "the state is sought among the kernel's by the request's own tokens, and the kernel's chunks "
    "run over the whole batch (SGLang #31833, #33450)"};
inline const Defect kTracksInPages{
    "sglang-extra-buffer:tracks-in-pages",
    "the state is sought among the kernel's by the page's number, not by the chunk's (SGLang "
    "#33515)"};
inline const Defect kAbsoluteGrid{
    "sglang-extra-buffer:absolute-grid",
    "a chunk's tracked position is a multiple of the grid, and the kernel has states only at "
    "multiples counted from the chunk's start"};
inline const Defect kIgnoresBranch{"sglang-extra-buffer:ignores-branch",
                                   "no state is left where the match would have used one"};
inline const Defect kForgetsBranch{
    "sglang-extra-buffer:forgets-branch",
    "the branch position is looked for in a request's first chunk alone"};
inline const Defect kCountsPrefillEnd{
    "sglang-extra-buffer:counts-prefill-end",
    "a prompt that ends on the decode grid is tracked as if it had been decoded"};
inline const Defect kTracksInVerify{
    "sglang-extra-buffer:tracks-in-verify",
    "a verification still has the last chunk's mask and tracks its position again (SGLang #19415)"};
inline const Defect kLazyOverwrites{
    "sglang-extra-buffer:lazy-overwrites",
    "a lazy request never takes its second slot, so a step under way writes over the kept state"};
inline const Defect kLazyEvicts{
    "sglang-extra-buffer:lazy-evicts",
    "a lazy request evicts somebody's state for a second slot that it needs for one step"};
inline const Defect kLazyKeepsBoth{
    "sglang-extra-buffer:lazy-keeps-both-slots",
    "a lazy request keeps the slot of the state before when the next one is there"};
inline const Defect kLazyKeepsLock{
    "sglang-extra-buffer:lazy-keeps-state-lock",
    "a lazy checkpoint that finds no slot does not give up its lock on the state it started from"};
inline const Defect kMissesSwap{
    "sglang-extra-buffer:misses-swap",
    "with overlap, the slot that is written next changes with a result, for the step ahead of it; "
    "where none was ahead, or the result is a prefill's, the next state is written over the kept "
    "one (SGLang 0.5.23, reports/found/sglang_missed_swap.md)"};
inline const Defect kStoresBeyondOwned{
    "sglang-extra-buffer:stores-beyond-owned",
    "strip_thinking stores the last tracked state although it stands for outputs"};
inline const Defect kKeepsOneTracked{
    "sglang-extra-buffer:keeps-one-tracked",
    "only the last tracked state can be stored: where it goes too far, nothing is"};
inline const Defect kFreesFromOwned{
    "sglang-extra-buffer:frees-from-owned",
    "strip_thinking frees KV from the prompt's end on although the tree owns more of it (SGLang "
    "0.5.23, #24380)"};

}  // namespace lockstep::cache_sim
