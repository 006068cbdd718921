#include "reference/base/finding.hpp"

#include <array>

namespace lockstep {
namespace {

struct KindRow {
  FindingKind kind;
  std::string_view name;
  ExitStatus status;
};

constexpr std::array kKinds{
    KindRow{FindingKind::wrong_state_prefix, "wrong-state-prefix", kExitInvariant},
    KindRow{FindingKind::unaligned_state, "unaligned-state", kExitInvariant},
    KindRow{FindingKind::slot_in_two_places, "slot-in-two-places", kExitInvariant},
    KindRow{FindingKind::freed_slot_in_use, "freed-slot-in-use", kExitInvariant},
    KindRow{FindingKind::double_free, "double-free", kExitInvariant},
    KindRow{FindingKind::leak, "leak", kExitInvariant},
    KindRow{FindingKind::dirty_slot, "dirty-slot", kExitInvariant},
    KindRow{FindingKind::evicted_while_locked, "evicted-while-locked", kExitInvariant},
    KindRow{FindingKind::lock_imbalance, "lock-imbalance", kExitInvariant},
    KindRow{FindingKind::lru_order, "lru-order", kExitInvariant},
    KindRow{FindingKind::tombstone_rule, "tombstone-rule", kExitInvariant},
    KindRow{FindingKind::size_accounting, "size-accounting", kExitInvariant},
    KindRow{FindingKind::kv_state_disagree, "kv-state-disagree", kExitInvariant},
    KindRow{FindingKind::accept_disagree, "accept-disagree", kExitInvariant},
    KindRow{FindingKind::padding_leak, "padding-leak", kExitInvariant},
    KindRow{FindingKind::out_of_range, "out-of-range", kExitInvariant},
    KindRow{FindingKind::cached_too_much, "cached-too-much", kExitDiffers},
    KindRow{FindingKind::missed_reuse, "missed-reuse", kExitDiffers},
    KindRow{FindingKind::output_differs, "output-differs", kExitDiffers},
    KindRow{FindingKind::reply_differs, "reply-differs", kExitDiffers},
    KindRow{FindingKind::answer_differs, "answer-differs", kExitDiffers},
    KindRow{FindingKind::schedule_differs, "schedule-differs", kExitDiffers},
    KindRow{FindingKind::subject_died, "subject-died", kExitDiffers},
    KindRow{FindingKind::subject_silent, "subject-silent", kExitDiffers},
    KindRow{FindingKind::subject_garbled, "subject-garbled", kExitDiffers},
    KindRow{FindingKind::stuck, "stuck", kExitLiveness},
    KindRow{FindingKind::nondeterministic, "nondeterministic", kExitNondeterministic},
};

const KindRow& row_of(FindingKind kind) {
  return kKinds[static_cast<std::size_t>(kind)];
}

}  // namespace

std::string_view to_string(FindingKind kind) {
  return row_of(kind).name;
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
