// What a run can find, and the exit status that each kind of finding decides
// (cache_sim/check/findings.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class FindingKind : std::uint8_t {
  wrong_state_prefix,    ///< a state handed out with another label than the matched prefix
  unaligned_state,       ///< a state taken where the producing kernel has none
  slot_in_two_places,    ///< two owners
  freed_slot_in_use,     ///< free and owned
  double_free,           ///< freed while free
  leak,                  ///< neither free nor owned
  dirty_slot,            ///< a fresh request starts from somebody's old state
  evicted_while_locked,  ///< a locked node or state was evicted
  lock_imbalance,        ///< lock counters are not those of the holders
  lru_order,             ///< the list's order is not the order of use
  tombstone_rule,        ///< a node without a state where the policy promises one, or the reverse
  size_accounting,       ///< a counter is not what counting gives
  kv_state_disagree,     ///< KV and state stand for different lengths
  accept_disagree,
  padding_leak,
  out_of_range,
  batch_variance,    ///< a row's bits depend on the rest of its batch
  broken_invariant,  ///< a child says that a rule of its own does not hold
  cached_too_much,   ///< more than any stored prefix, or the whole prompt
  missed_reuse,      ///< less than the policy promises
  output_differs,
  reply_differs,
  answer_differs,
  schedule_differs,  ///< the scheduler does what its rules do not say
  subject_died,
  subject_silent,
  subject_garbled,
  stuck,
  nondeterministic,
};

std::string_view to_string(FindingKind kind);
/// What it means, as one sentence for people.
std::string_view meaning(FindingKind kind);
std::optional<FindingKind> finding_kind_from(std::string_view name);

/// Exit status of the program, also the status that a kind of finding decides.
enum ExitStatus : int {
  kExitPass = 0,
  kExitBadInput = 2,
  kExitEnvironment = 3,
  kExitPartial = 4,  ///< of `judge`: right in the few cases that a candidate takes
  kExitInvariant = 10,
  kExitDiffers = 11,
  kExitLiveness = 12,
  kExitNondeterministic = 13,
};

ExitStatus exit_status(FindingKind kind);

/// One thing that went wrong, before the run adds where: the sentence is complete without it.
struct Finding {
  FindingKind kind;
  std::string text;      ///< one sentence
  std::string expected;  ///< what should have been, in a few words
  std::string actual;    ///< what was
};
using Findings = std::vector<Finding>;

}  // namespace lockstep
