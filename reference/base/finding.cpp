#include "reference/base/finding.hpp"

#include <array>

namespace lockstep {
namespace {

struct KindRow {
  FindingKind kind;
  std::string_view name;
  ExitStatus status;
  std::string_view meaning;
};

constexpr std::array kKinds{
    KindRow{FindingKind::read_before_landed, "read-before-landed", kExitInvariant,
            "Something was read before the copy that brings it from another tier has landed."},
    KindRow{FindingKind::source_changed, "source-changed", kExitInvariant,
            "A slot was freed or written while a copy between tiers still reads or writes it."},
    KindRow{FindingKind::wrong_state_prefix, "wrong-state-prefix", kExitInvariant,
            "A state was handed out for a prefix other than the one it stands for."},
    KindRow{FindingKind::unaligned_state, "unaligned-state", kExitInvariant,
            "A state was taken at a length where the producing kernel shows none."},
    KindRow{FindingKind::slot_in_two_places, "slot-in-two-places", kExitInvariant,
            "One slot has two owners, and each will write into it."},
    KindRow{FindingKind::freed_slot_in_use, "freed-slot-in-use", kExitInvariant,
            "A slot is free and in use at the same time."},
    KindRow{FindingKind::double_free, "double-free", kExitInvariant,
            "Something was given back that was free already."},
    KindRow{FindingKind::leak, "leak", kExitInvariant,
            "Something is neither free nor owned by anybody."},
    KindRow{FindingKind::dirty_slot, "dirty-slot", kExitInvariant,
            "A new request starts from what somebody else left in a recycled slot."},
    KindRow{FindingKind::evicted_while_locked, "evicted-while-locked", kExitInvariant,
            "Something was evicted that a running request still reads."},
    KindRow{FindingKind::lock_imbalance, "lock-imbalance", kExitInvariant,
            "The lock counters are not those of the requests that hold locks."},
    KindRow{FindingKind::lru_order, "lru-order", kExitInvariant,
            "What would be evicted next is not what was used longest ago."},
    KindRow{FindingKind::tombstone_rule, "tombstone-rule", kExitInvariant,
            "A node has no state where the policy promises one, or the reverse."},
    KindRow{FindingKind::size_accounting, "size-accounting", kExitInvariant,
            "A counter is not what counting gives."},
    KindRow{FindingKind::kv_state_disagree, "kv-state-disagree", kExitInvariant,
            "The KV and the state of one request stand for different lengths."},
    KindRow{FindingKind::accept_disagree, "accept-disagree", kExitInvariant,
            "After a verification, the state is not that of the accepted tokens."},
    KindRow{FindingKind::padding_leak, "padding-leak", kExitInvariant,
            "A padding row of a batch changed a request's state."},
    KindRow{FindingKind::out_of_range, "out-of-range", kExitInvariant,
            "A number is impossible: an index beyond its table, or a count beyond its pool."},
    KindRow{FindingKind::batch_variance, "batch-variance", kExitInvariant,
            "A row's result depends on which other rows are in its batch."},
    KindRow{FindingKind::number_differs, "number-differs", kExitInvariant,
            "A row's logits or state are not, bit by bit, those of a run without a cache."},
    KindRow{FindingKind::number_agrees, "number-agrees", kExitInvariant,
            "A row read a state whose label is wrong, and its numbers are right, bit by bit: the "
            "model does not feel the mistake, or the label is wrong."},
    KindRow{FindingKind::broken_invariant, "broken-invariant", kExitInvariant,
            "A server says that a rule of its own does not hold."},
    KindRow{FindingKind::cached_too_much, "cached-too-much", kExitDiffers,
            "More was said to be cached than any stored prefix holds, or the whole prompt."},
    KindRow{FindingKind::missed_reuse, "missed-reuse", kExitDiffers,
            "Less was reused than the policy promises."},
    KindRow{FindingKind::output_differs, "output-differs", kExitDiffers,
            "The output is not the one that comes without a cache."},
    KindRow{FindingKind::reply_differs, "reply-differs", kExitDiffers,
            "Two subjects answered the same operation differently."},
    KindRow{FindingKind::answer_differs, "answer-differs", kExitDiffers,
            "The answer is not the one that the file states."},
    KindRow{FindingKind::schedule_differs, "schedule-differs", kExitDiffers,
            "The scheduler did something that its rules do not allow."},
    KindRow{FindingKind::subject_died, "subject-died", kExitDiffers,
            "The subject stopped in the middle of an operation."},
    KindRow{FindingKind::subject_silent, "subject-silent", kExitDiffers,
            "The subject did not answer in time."},
    KindRow{FindingKind::subject_garbled, "subject-garbled", kExitDiffers,
            "The subject's answer could not be read."},
    KindRow{FindingKind::stuck, "stuck", kExitLiveness, "Requests are waiting and nothing moves."},
    KindRow{FindingKind::nondeterministic, "nondeterministic", kExitNondeterministic,
            "The same run gave two different results."},
};

// A kind is the index of its row. The exit status is that of the first kind found, so rows are
// sorted by status: broken invariants come before answers that differ.
static_assert(kKinds.size() == static_cast<std::size_t>(FindingKind::nondeterministic) + 1);
static_assert([] {
  for (std::size_t i = 0; i < kKinds.size(); ++i) {
    if (static_cast<std::size_t>(kKinds[i].kind) != i) return false;
    if (i > 0 && kKinds[i - 1].status > kKinds[i].status) return false;
  }
  return true;
}());

const KindRow& row_of(FindingKind kind) {
  return kKinds[static_cast<std::size_t>(kind)];
}

}  // namespace

std::string_view to_string(FindingKind kind) {
  return row_of(kind).name;
}

std::string_view meaning(FindingKind kind) {
  return row_of(kind).meaning;
}

std::optional<FindingKind> finding_kind_from(std::string_view name) {
  for (const KindRow& row : kKinds)
    if (row.name == name) return row.kind;
  return std::nullopt;
}

ExitStatus exit_status(FindingKind kind) {
  return row_of(kind).status;
}

}  // namespace lockstep
