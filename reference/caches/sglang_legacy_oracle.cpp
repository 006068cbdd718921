// SGLang's hybrid cache before 0.5.23: what its older versions do otherwise than
// reference/caches/sglang_oracle.hpp says. Everything else is as there.
//
// 1.10 sglang-legacy (MambaRadixCache, 0.5.9). Gives that class's decision digest on `sglang-w1`.
//   match: every state on the path of the prefix counts as used, the shortest first.
//   insert: so does every state on the key's path, and that of a split's longer half after them;
//      then the key's own.
//   evict: FULL drops, with a leaf, the prefixes above it that are left without extensions and
//      without a state, so that no KV lies where nothing can use it. What falls with a leaf's state
//      counts for nobody else: a request for KV and one for states evict apart. A shortage of KV
//      evicts as many tokens as are needed, not as many as are lacking; a slot's eviction does not
//      tell the KV that fell.
//   lock: a tombstone's state lock is not counted, and an unlock takes one away from whoever has
//      filled it meanwhile (SGLang #21379).
//   checkpoint: after its insert the key is matched again, before the lock moves.
//   match: wherever more KV than the prefix is stored a branch is told, even one that is no deeper
//      than the prefix. Nothing uses it.
//
// 1.11 sglang-v0 (#11214), as its own document states it; nobody recorded its decisions.
//   match: as in 0.5.23, one state is used, and KV from there to the root.
//   insert: an existing state of the key is not used; KV is.
//   finish: the cache gets a copy of the live state, as in a checkpoint; without a free slot for
//      it, nothing is stored.
//   evict and lock: as in 1.10, but a slot's eviction tells its KV.
#include <memory>

#include "reference/caches/sglang_oracle.hpp"

namespace lockstep::reference {
namespace {

std::unique_ptr<Subject> make_legacy(const SubjectOptions& options) {
  const SglangOracle::Variant legacy{
      .rules = {.paths_are_used = true, .bare_parents_go = true, .tombstones_lock = false},
      .evicts_full_request = true,
      .tracks_eviction_apart = true,
      .slots_tell_no_kv = true,
      .checkpoint_matches = true,
      .tells_every_branch = true};
  return std::make_unique<SglangOracle>(options.config, legacy);
}

std::unique_ptr<Subject> make_first(const SubjectOptions& options) {
  const SglangOracle::Variant first{
      .rules = {.existing_end_is_used = false, .bare_parents_go = true, .tombstones_lock = false},
      .evicts_full_request = true,
      .tracks_eviction_apart = true,
      .finish_copies = true};
  return std::make_unique<SglangOracle>(options.config, first);
}

const Registration<OracleEntry> kLegacy({"sglang-legacy", make_legacy});
const Registration<OracleEntry> kFirst({"sglang-v0", make_first});

}  // namespace
}  // namespace lockstep::reference
