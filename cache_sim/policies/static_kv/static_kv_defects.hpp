// Defects of the cache of an exported model: one rule broken each, as exports get them wrong
// (fixtures/subjects/static_kv/traps.py plants the same in tensors).
#pragma once

#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {

// Calls.
inline const Defect kStaticCommitsTail{
    "static-kv:commits-the-tail",
    "what stands after a bucket's real tokens is applied to the cache and counted"};
inline const Defect kStaticWritesOnce{
    "static-kv:writes-once",
    "new keys and values go into the sidecar alone, so the call's own queries do not see them"};
inline const Defect kStaticForgetsPast{
    "static-kv:copies-no-past",
    "the copy that a call attends to is that of the call before, with other rows' keys in it"};
inline const Defect kStaticAppliesAtZero{
    "static-kv:applies-at-the-front",
    "the sidecar is applied from the first position on, wherever cache_position says"};
inline const Defect kStaticLiveLength{
    "static-kv:keeps-the-live-length",
    "the second call of a prompt counts its position from a length that has moved meanwhile"};
inline const Defect kStaticWrapsAround{
    "static-kv:wraps-around",
    "a bucket that runs over the cache's end is taken, and its tail lands on the first tokens"};
// Rows.
inline const Defect kStaticOldLength{"static-kv:keeps-the-old-length",
                                     "a new request starts at the length that its row had"};
inline const Defect kStaticOrdersKvAlone{
    "static-kv:orders-kv-alone", "a reordering moves keys and values, and lengths stay with rows"};
inline const Defect kStaticOrdersInPlace{
    "static-kv:orders-in-place",
    "a reordering copies row after row within one tensor, so a row gets what replaced its source"};
// Drafts and captured prefixes.
inline const Defect kStaticKeepsRejected{"static-kv:keeps-rejected-drafts",
                                         "a verification's rejected drafts stay counted"};
inline const Defect kStaticRestoresShort{"static-kv:restores-one-too-few",
                                         "the last token of a captured prefix is not restored"};

}  // namespace lockstep::cache_sim
