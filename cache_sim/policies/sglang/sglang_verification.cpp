// Verifications of SGLang's hybrid caches: drafts as a chain or as a tree. The forward reads the
// committed state and writes, beside it, the state after each of its tokens (intermediate_ssm,
// intermediate_conv_window). Once the drafts are accepted, one of these becomes the committed state
// (update_mamba_state_after_mtp_verify): the recurrent and the conv part by a kernel each.
#include <fmt/format.h>

#include "cache_sim/policies/sglang/sglang_policy.hpp"
#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {
namespace {

/// The numbers of the drafts that spell `tokens`, each one a child of the one before it; fewer
/// where no draft continues.
std::vector<std::uint32_t> way_of(const VerifiedRow& row, const Tokens& tokens) {
  std::vector<std::uint32_t> way;
  for (std::uint32_t draft = 1; draft <= row.drafts.size() && way.size() < tokens.size(); ++draft) {
    const std::uint32_t before = way.empty() ? 0 : way.back();
    if (row.parent_of(draft) == before &&
        row.drafts[draft - 1] == tokens[static_cast<std::uint32_t>(way.size())])
      way.push_back(draft);
  }
  return way;
}

}  // namespace

/// Checks a tree of drafts: parents come before their children, and siblings are different tokens.
Result<void> SglangPolicy::check_tree(const Operation& operation) {
  const std::vector<std::int64_t>& parents = operation.parents;
  if (parents.size() != operation.drafts.size())
    return fail(fmt::format("extend: parents has {} for {}", counted(parents.size(), "number"),
                            counted(operation.drafts.size(), "draft")));
  for (std::size_t i = 0; i < parents.size(); ++i) {
    if (parents[i] < 0 || parents[i] > static_cast<std::int64_t>(i))
      return fail(fmt::format("extend: draft {} stands after {}, which is none of 0 … {}", i + 1,
                              parents[i], i));
    for (std::size_t j = 0; j < i; ++j)
      if (parents[j] == parents[i] && operation.drafts[static_cast<std::uint32_t>(j)] ==
                                          operation.drafts[static_cast<std::uint32_t>(i)])
        return fail(fmt::format("extend: drafts {} and {} are the same token after the same one",
                                j + 1, i + 1));
  }
  return {};
}

/// Runs a verification: reads the committed state and writes, beside it, the state after each of
/// its tokens.
void SglangPolicy::verify(RadixRequest& request, const Operation& operation) {
  request.drafts = operation.drafts;
  request.parents = operation.parents;
  request.verified_inputs = request.known.size() - request.computed;
  fold_ring(request);
  const Tokens tokens = request.known.followed_by(request.drafts);
  layers_.forward({.request = request.id,
                   .tokens = tokens,
                   .begin = request.computed,
                   .end = tokens.size(),
                   .drafts = request.drafts.size(),
                   .parents = request.parents,
                   .state = has_states_ ? slot_of(request) : StateSlot::none(),
                   .keeps = kNoParts,
                   .kv = request.kv});
  request.verifying = true;
}

void SglangPolicy::keep_verified(RadixRequest& request, std::uint32_t stop) {
  if (has_states_) commit(request, stop, request.live);
  request.computed = stop;
  count_accepted(request, static_cast<std::uint32_t>(request.kept.size()));
}

/// The KV of the kept drafts moves to the places after the known tokens (SGLang's
/// move_kv_cache, where pages make it; a row of single tokens could point at the slots instead).
void SglangPolicy::move_kept_kv(const RadixRequest& request) {
  if (request.parents.empty() || !rules_.moves_accepted_kv) return;
  KvRuns drafts;
  append_slice(drafts, request.kv, request.known.size(),
               request.known.size() + request.drafts.size());
  std::vector<std::uint32_t> slots;
  for (const KvRun& run : drafts) slots.insert(slots.end(), run.slots().begin(), run.slots().end());
  for (std::size_t i = 0; i < request.kept.size(); ++i)
    layers_.copy_kv({&slots[request.kept[i] - 1], 1}, {&slots[i], 1});
}

void SglangPolicy::commit(const RadixRequest& request, std::uint32_t position, StateSlot target) {
  if (position == request.computed) return;  // no draft of a row without inputs was kept
  const std::uint32_t inputs = request.verified_inputs;
  const std::uint32_t steps = position - request.computed;
  const std::uint32_t last = inputs + request.drafts.size() - 1;
  std::uint32_t at = steps <= inputs ? steps - 1 : inputs - 1 + request.kept[steps - inputs - 1];
  if (rules_.commit == Commit::by_length) at = steps - 1;
  if (rules_.commit == Commit::draft_end) at = last;
  for (const StatePart part : kStateParts) {
    const bool is_conv = part == StatePart::conv;
    if (is_conv && rules_.commit == Commit::recurrent_alone) continue;
    if (!is_conv && rules_.commit == Commit::conv_alone) continue;
    layers_.commit_state(slot_of(request),
                         is_conv && rules_.commit == Commit::conv_at_draft_end ? last : at, target,
                         part);
  }
}

/// The tokens kept of a verification: n - 1 drafts, whose KV is there already, and the token
/// sampled after them.
Result<Reply> SglangPolicy::accept(const Operation& operation) {
  RadixRequest* const request = find(operation.id);
  if (request == nullptr) return unknown(operation, "admitted request", operation.id);
  if (operation.tokens.size() != operation.n)
    return fail(fmt::format("accept: n={} beside {}", operation.n,
                            counted(operation.tokens.size(), "token")));
  if (request->verifying) {
    const std::uint32_t drafts = request->drafts.size();
    if (operation.n < 1 || operation.n > drafts + 1)
      return fail(fmt::format("accept: n={} is not within 1 … {} (the drafts and one more)",
                              operation.n, drafts + 1));
    const auto kept = static_cast<std::uint32_t>(operation.n) - 1;
    const VerifiedRow row{request->known, request->computed, request->drafts, request->parents};
    request->kept = way_of(row, operation.tokens.prefix(kept));
    if (request->kept.size() != kept) return fail("accept: the tokens kept are not the drafts");
    move_kept_kv(*request);
    request->known = request->known.followed_by(operation.tokens);
    keep_verified(*request, request->known.size() - 1);
    request->verifying = false;
    // With this defect the sampled token counts as computed, because a rejected draft was computed
    // in its place.
    if (rules_.counts_sampled_token && kept < drafts) ++request->computed;
    free_kv_from(*request, static_cast<std::uint32_t>(page_ceiling(request->computed)));
  } else {
    request->known = request->known.followed_by(operation.tokens);
  }
  return Reply{}.set(ReplyField::n, operation.n);
}

}  // namespace lockstep::cache_sim
