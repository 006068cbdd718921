// The defects of the cache of an exported model: each sets one rule to a wrong value, as exports
// get them wrong (fixtures/subjects/static_kv/traps.py plants the same in tensors).
#include "cache_sim/policies/static_kv/static_kv_policy.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using Rules = StaticKvRules;

const BrokenRule<Rules> kBroken[] = {
    // Calls.
    {"static-kv:commits-the-tail",
     "what stands after a bucket's real tokens is applied to the cache and counted",
     &Rules::commits_tail, true},
    {"static-kv:writes-once",
     "new keys and values go into the sidecar alone, so the call's own queries do not see them",
     &Rules::writes_twice, false},
    {"static-kv:copies-no-past",
     "the copy that a call attends to is that of the call before, with other rows' keys in it",
     &Rules::copies_past, false},
    {"static-kv:applies-at-the-front",
     "the sidecar is applied from the first position on, wherever cache_position says",
     &Rules::applies_at_front, true},
    {"static-kv:keeps-the-live-length",
     "the second call of a prompt counts its position from a length that has moved meanwhile",
     &Rules::counts_from_live_length, true},
    {"static-kv:wraps-around",
     "a bucket that runs over the cache's end is taken, and its tail lands on the first tokens",
     &Rules::wraps_around, true},
    // Rows.
    {"static-kv:keeps-the-old-length", "a new request starts at the length that its row had",
     &Rules::resets_length, false},
    {"static-kv:orders-kv-alone", "a reordering moves keys and values, and lengths stay with rows",
     &Rules::reorders_lengths, false},
    {"static-kv:orders-in-place",
     "a reordering copies row after row within one tensor, so a row gets what replaced its source",
     &Rules::reorders_in_place, true},
    // Drafts and captured prefixes.
    {"static-kv:keeps-rejected-drafts", "a verification's rejected drafts stay counted",
     &Rules::drops_rejected_drafts, false},
    {"static-kv:restores-one-too-few", "the last token of a captured prefix is not restored",
     &Rules::restores_last_token, false},
};

}  // namespace
}  // namespace lockstep::cache_sim
