// Older versions of SGLang's hybrid cache. They share everything with sglang-no-buffer but the
// rules named here.
//
// sglang-legacy is MambaRadixCache as of 0.5.9 (reference/caches/sglang.md, 1.10). A match and an
// insert make every state on their path new, so that a conversation's old turns outlive other
// conversations; a leaf takes bare parents with it, so that no KV lies where nothing can use it.
//
// sglang-v0 is the first version (#11214) as its own document states it (sglang.md, 1.11): a
// finished request leaves a copy, a match uses one state, and an insert that finds its key renews
// the KV alone.
#include "cache_sim/policies/sglang/sglang_policy.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr SglangRules kLegacy{
    .match_renews_path = true,
    .branches_at_prefix = true,
    .insert_renews_path = true,
    .counts_bare_locks = false,
    .drops_bare_parents = true,
    .evicts_full_request = true,
    .evicts_separately = true,
    .hides_kv_of_states = true,
    .matches_after_checkpoint = true,
};

constexpr SglangRules kFirst{
    .insert_renews_end = false,
    .counts_bare_locks = false,
    .drops_bare_parents = true,
    .evicts_full_request = true,
    .evicts_separately = true,
    .finish_gives = Finish::copy,
};

std::unique_ptr<Subject> make_legacy(const SubjectOptions& options) {
  return std::make_unique<SglangPolicy>(options, kLegacy);
}
std::unique_ptr<Subject> make_first(const SubjectOptions& options) {
  return std::make_unique<SglangPolicy>(options, kFirst);
}

const Registration<PolicyEntry> kLegacyEntry{
    {.name = "sglang-legacy",
     .summary = "SGLang 0.5.9's hybrid radix cache: matches renew their whole path",
     .has_states = true,
     .config_fields = {},
     .make = make_legacy,
     .counts_locks_on_tombstones = kLegacy.counts_bare_locks,
     .capabilities = kSglangCapabilities,
     .tells_forwards = true}};
const Registration<PolicyEntry> kFirstEntry{
    {.name = "sglang-v0",
     .summary = "SGLang's first hybrid radix cache (#11214): every stored state is a copy",
     .has_states = true,
     .config_fields = {},
     .make = make_first,
     .counts_locks_on_tombstones = kFirst.counts_bare_locks,
     .capabilities = kSglangCapabilities,
     .tells_forwards = true}};

}  // namespace
}  // namespace lockstep::cache_sim
