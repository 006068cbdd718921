// Replay-state decode of sglang-no-buffer (--enable-linear-replayssm; reference/caches/sglang.md,
// 1.12): a decode step reads the state and a ring of what the last tokens added to it, appends its
// own token to the ring, and writes the state once in a window. The cursor of a slot counts the
// entries that are pending.
#include <algorithm>

#include "cache_sim/policies/sglang/sglang_policy.hpp"
#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

std::uint32_t& SglangPolicy::cursor_of(const RadixRequest& request) {
  const std::uint32_t at = rules_.finds_cursors_by_row ? request.row.value : request.live.value;
  if (cursors_.size() <= at) cursors_.resize(at + std::size_t{1});
  return cursors_[at];
}

/// Entries of the request's ring that its state has not seen; 0 where the option is off.
std::uint32_t SglangPolicy::pending(const RadixRequest& request) {
  return options_.ring == 0 ? 0 : cursor_of(request);
}

void SglangPolicy::clear_cursor(StateSlot slot) {
  if (slot.value < cursors_.size()) cursors_[slot.value] = 0;
}

/// Decodes the tokens up to `stop`, a step each.
void SglangPolicy::run_with_ring(RadixRequest& request, std::uint32_t stop) {
  const auto L = static_cast<std::uint32_t>(options_.ring);
  for (; request.computed < stop; ++request.computed) {
    std::uint32_t& cursor = cursor_of(request);
    const std::uint32_t size = request.computed + 1;
    const bool is_full = rules_.flushes_full_ring && cursor == L - 1;
    const bool on_boundary = rules_.flushes_at_boundaries && size % options_.track_interval == 0;
    const bool flushes = is_full || on_boundary;
    if (on_boundary && !is_full) LOCKSTEP_MARK("ring.flushes_early");
    RingStep step{.slot = request.live, .live = cursor};
    if (rules_.reads_entry_ahead) ++step.live;
    if (rules_.early_flush_reads_all && on_boundary) step.live = L - 1;
    if (flushes)
      step.writes_state = rules_.flush_writes_state;
    else
      step.entry = cursor;
    layers_.forward({.request = request.id,
                     .tokens = request.known,
                     .begin = request.computed,
                     .end = size,
                     .state = slot_of(request),
                     .keeps = {.recurrent = false, .conv = rules_.decode_moves_conv},
                     .ring = step,
                     .kv = request.kv});
    const std::uint32_t moved = cursor + rules_.cursor_steps;
    cursor = flushes && rules_.flush_clears_cursor ? 0 : moved % L;
  }
}

/// A verification and its commit know no ring: what is pending is written into the state first.
/// (SGLang's server decodes every token of a request by verifications, or none.)
void SglangPolicy::fold_ring(RadixRequest& request) {
  const std::uint32_t live = pending(request);
  if (live == 0 || !rules_.verification_folds_ring) return;
  LOCKSTEP_MARK("ring.folded_for_verification");
  layers_.fold_ring(request.live, live, request.known, request.computed);
  cursor_of(request) = 0;
}

/// A commit has written the state after the kept drafts.
void SglangPolicy::count_accepted(RadixRequest& request, std::uint32_t kept) {
  if (options_.ring == 0 || rules_.accepted_count == AcceptedCount::none) return;
  const std::uint32_t drafts =
      rules_.accepted_count == AcceptedCount::kept ? kept : request.drafts.size();
  cursor_of(request) = drafts % static_cast<std::uint32_t>(options_.ring);
}

/// Of `kept` computed tokens, those that the state stands for. The conv window has seen all of
/// them; it goes back, for which a slot keeps the inputs of a whole window more.
std::uint32_t SglangPolicy::give_back_pending(RadixRequest& request, std::uint32_t kept) {
  const std::uint32_t live = pending(request);
  if (live == 0 || kept != request.computed) return kept;
  LOCKSTEP_MARK("ring.pending_at_finish");
  if (rules_.finish_rewinds_conv) layers_.rewind_conv(request.live);
  return rules_.finish_cuts_pending ? kept - std::min(kept, live) : kept;
}

}  // namespace lockstep::cache_sim
