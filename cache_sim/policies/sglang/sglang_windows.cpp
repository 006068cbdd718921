// Requests of a model whose layers partly have a sliding window (reference/caches/sglang.md, 1.15).
// A request owns the window's KV of its newest tokens; the tree has that of its prefix.
#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/policies/sglang/sglang_policy.hpp"
#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

Result<void> check_window_fields(const Config& config) {
  const SglangOptions options = SglangOptions::of(config);
  if (options.window == 0) return {};
  if (options.window == 1) return fail("field window: a token sees at least one before it");
  if (options.disk) return fail("field window: the storage of disk=1 has no room for windows");
  if (options.index_keys) return fail("field window: no model has windows and index keys");
  if (options.ring != 0) return fail("field window: no model has windows and a replay ring");
  return {};
}

std::int64_t window_slots(const Config& config) {
  const SglangOptions options = SglangOptions::of(config);
  return options.window == 0 ? 0 : options.window_kv;
}

/// Speculation and transfers are not told of windows.
Result<void> SglangPolicy::check_windows(const Operation& operation) const {
  const bool speculates = !operation.drafts.empty();
  if (!speculates && operation.external <= 0) return {};
  return fail(fmt::format("{}: {}= is not for a config with window=", to_string(operation.verb),
                          speculates ? "drafts" : "external"));
}

/// KV of full attention and, where there are windows, as much of these; all of it or nothing.
bool SglangPolicy::allocate_kv(RadixRequest& request, std::int64_t needed) {
  if (!has_room(needed)) return false;
  if (needed <= 0) return true;
  const auto size = static_cast<std::uint32_t>(needed);
  kv_.allocate(size, request.kv, request.kv_tail);
  if (windows_) windows_->pool.allocate(size, request.window.slots, request.window.tail);
  request.allocated += size;
  return true;
}

/// Gives back what the request owns and the token at `last` does not see, once it is more than
/// `interval` tokens (free_swa_out_of_window_slots). A window and a page stay, and the window
/// before a tracked state.
void SglangPolicy::slide(RadixRequest& request, std::int64_t last, std::int64_t interval) {
  if (!windows_) return;
  RequestWindow& window = request.window;
  const std::int64_t reach = windows_->reach;
  if (last - reach < window.evicted + interval) return;
  window.evicted = std::max(window.evicted, request.owned);
  const std::int64_t kept =
      page_ceiling(std::max<std::int64_t>(reach, page_)) - (rules_.slides_whole_reach ? 0 : 1);
  const std::int64_t tracked = request.tracking.last_size;
  const std::int64_t from = tracked != 0 ? std::min(last - kept, tracked - reach) : last - kept;
  if (from <= window.evicted) return;
  const std::uint32_t evicted = whole_pages(static_cast<std::uint32_t>(from));
  if (evicted <= window.evicted) return;
  LOCKSTEP_MARK("window.slides");
  KvRuns old, left;
  append_slice(old, window.slots, window.evicted - window.begin, evicted - window.begin);
  windows_->pool.release(old);
  window.evicted = evicted;
  if (!rules_.sliding_forgets) return;
  append_slice(left, window.slots, evicted - window.begin, request.allocated - window.begin);
  window.slots.swap(left);
  window.begin = evicted;
}

/// Before a decode step but the first one. What the scheduler knows is the outputs whose results
/// have come, and one sampled token.
void SglangPolicy::slide_for_decoding(RadixRequest& request) {
  const std::int64_t known = std::max(request.committed() + 1, request.window.prefilled);
  if (request.window.decoded >= 1 &&
      known - 1 - windows_->reach >= request.window.evicted + options_.window_interval)
    slide(request, known - 1, 1);
  if (options_.window_release && request.window.decoded >= windows_->reach) release_early(request);
}

/// Decoding no longer sees the prefix: the lock on its window goes, and the one on its state.
void SglangPolicy::release_early(RadixRequest& request) {
  RequestWindow& window = request.window;
  if (window.is_released || !request.locked.exists() || request.locked == RadixTree::kRoot ||
      !tree_.covers_window(request.locked, window.lock_begin))
    return;
  LOCKSTEP_MARK("window.released_early");
  tree_.unlock_window(request.locked, window.lock_begin);
  if (rules_.early_release_frees) tree_.drop_windows(request.locked, window.lock_begin, false);
  if (rules_.early_release_frees_saved) tree_.drop_windows(request.locked, window.lock_begin, true);
  if (has_states_ && request.state_locked) tree_.unlock_state_alone(request.locked);
  request.state_locked = false;
  window.is_released = true;
}

/// A forward over the tokens up to `stop` reads the window before them and writes theirs.
void SglangPolicy::forward_window(const RadixRequest& request, std::uint32_t stop) {
  if (!windows_ || !layers_.keeps_kv()) return;
  read_window(request);
  write_window(request, stop);
}

/// Decode steps, one for each token up to `stop`. Room for all of them was made; what is evicted
/// besides is added.
void SglangPolicy::decode_with_windows(RadixRequest& request, std::uint32_t stop, bool async,
                                       RadixTree::Evicted& evicted) {
  const bool is_alone = request.computed + 1 == stop;  // then its window slid before room was made
  while (request.computed < stop) {
    if (!is_alone) {
      slide_for_decoding(request);
      RadixTree::Evicted more;
      make_room_for_kv(kv_demand(request, 1, Forward::decode), more);
      evicted.kv += more.kv;
      evicted.states += more.states;
      allocate_kv(request, page_ceiling(request.computed + 1) - request.allocated);
    }
    run(request, request.computed + 1, Forward::decode);
    ++request.window.decoded;
    if (!async) results_came(request);
  }
}

/// The forward reads the window before its first token: the tree's part, and the request's own.
void SglangPolicy::read_window(const RadixRequest& request) {
  static constexpr std::uint32_t kNone[] = {0};
  const std::uint32_t end = request.computed;
  const std::uint32_t first = end - std::min(end, windows_->reach);
  const RequestWindow& window = request.window;
  for (NodeIndex at = request.locked; at.exists() && tree_.node(at).depth() > first;
       at = tree_.node(at).parent) {
    const RadixNode& node = tree_.node(at);
    const std::uint32_t from = std::max(first, node.start);
    if (!tree_.has_window(at)) layers_.read_kv(kNone, request.known, from);
    for_slots(windows_->nodes[at.value].slots, from - node.start, node.edge_size(),
              [&](KvSlots slots, std::uint32_t place) {
                layers_.read_kv(slots, request.known, node.start + place);
              });
  }
  const std::uint32_t own = std::max(first, request.owned);
  const std::uint32_t live = std::max(window.begin, window.evicted);
  if (own < std::min(live, end)) layers_.read_kv(kNone, request.known, own);
  for_slots(window.slots, std::max(own, live) - window.begin, end - window.begin,
            [&](KvSlots slots, std::uint32_t place) {
              layers_.read_kv(slots, request.known, window.begin + place);
            });
}

void SglangPolicy::write_window(const RadixRequest& request, std::uint32_t stop) {
  const std::uint32_t begin = request.window.begin;
  for_slots(request.window.slots, request.computed - begin, stop - begin,
            [&](KvSlots slots, std::uint32_t place) {
              layers_.write_kv(slots, request.known, begin + place);
            });
}

/// Whether what is stored of the first `size` tokens ends where the request's match has found KV
/// without a window: the window is there now, and more would leave none at that place.
bool SglangPolicy::is_cut_at_branch(const RadixRequest& request, std::uint32_t size) const {
  return windows_ && !has_states_ && request.branch > request.owned && request.branch <= size &&
         rules_.branch_cuts_insert;
}

/// Gives back all that the request owns.
void SglangPolicy::free_window(RadixRequest& request) {
  if (!windows_) return;
  RequestWindow& window = request.window;
  const std::uint32_t live = std::max(window.begin, window.evicted);
  KvRuns own;
  append_slice(own, window.slots, live - window.begin, request.allocated - window.begin);
  windows_->pool.release(own);
  if (!window.is_released) tree_.unlock_window(request.locked, window.lock_begin);
  window = {};
}

}  // namespace lockstep::cache_sim
