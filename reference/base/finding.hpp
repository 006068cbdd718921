// The kinds of findings of a run, and the exit status of each (cache_sim/check/findings.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class FindingKind : std::uint8_t {
  read_before_landed,    ///< a slot was read that a copy between tiers has not written yet
  source_changed,        ///< a slot was freed or written while a copy between tiers used it
  wrong_state_prefix,    ///< the state that was handed out belongs to another prefix than the match
  unaligned_state,       ///< a state was taken at a length at which the kernel produces none
  slot_in_two_places,    ///< a slot has two owners
  freed_slot_in_use,     ///< a slot is free and owned
  double_free,           ///< a free slot was freed
  leak,                  ///< a slot is neither free nor owned
  dirty_slot,            ///< a new request starts from another request's old state
  evicted_while_locked,  ///< a locked node or state was evicted
  lock_imbalance,        ///< lock counters differ from the number of holders
  lru_order,             ///< the list's order is not the order of use
  tombstone_rule,        ///< a node lacks a state that the policy promises, or has one it must not
  size_accounting,       ///< a counter differs from the counted number
  kv_state_disagree,     ///< KV and state cover different lengths
  accept_disagree,
  padding_leak,
  out_of_range,
  batch_variance,    ///< a row's bits depend on the rest of its batch
  number_differs,    ///< a row's logits or state are not those of a run without a cache
  number_agrees,     ///< a row read what a wrong label stands for, and its numbers are right
  broken_invariant,  ///< a child says that a rule of its own does not hold
  cached_too_much,   ///< more than any stored prefix, or the whole prompt
  missed_reuse,      ///< less than the policy promises
  output_differs,
  reply_differs,
  answer_differs,
  schedule_differs,  ///< the scheduler does something that its rules do not allow
  subject_died,
  subject_silent,
  subject_garbled,
  stuck,
  nondeterministic,
};

std::string_view to_string(FindingKind kind);
/// The meaning of a kind, as one sentence for users.
std::string_view meaning(FindingKind kind);
std::optional<FindingKind> finding_kind_from(std::string_view name);

/// Exit status of the program, also the status that a kind of finding decides.
enum ExitStatus : int {
  kExitPass = 0,
  kExitBadInput = 2,
  kExitEnvironment = 3,
  kExitPartial = 4,  ///< only `judge`: right, but only in the few cases that the candidate supports
  kExitInvariant = 10,
  kExitDiffers = 11,
  kExitLiveness = 12,
  kExitNondeterministic = 13,
};

ExitStatus exit_status(FindingKind kind);

/// One finding. The run adds its place; the sentence is complete without it.
struct Finding {
  FindingKind kind;
  std::string text;      ///< one sentence
  std::string expected;  ///< the right behaviour, in a few words
  std::string actual;    ///< the observed one
};
using Findings = std::vector<Finding>;

}  // namespace lockstep
