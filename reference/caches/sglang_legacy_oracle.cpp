// SGLang's hybrid cache before 0.5.23: what its older versions do otherwise (sglang.md, 1.10 and
// 1.11). Everything else is as in sglang_oracle.hpp. `sglang-legacy` gives the decision digest of
// 0.5.9's MambaRadixCache on `sglang-w1`; nobody recorded those of `sglang-v0`.
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
