// SGLang 0.5.23's extra_buffer: beside its running state, a request has tracking slots, into which
// the forward leaves the states of positions that others can use. Rules:
// reference/caches/sglang.md, 1.8; the tree, the pools and everything else about a request are
// those of sglang-no-buffer.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cache_sim/policies/sglang/sglang_policy.hpp"
#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

class SglangExtraBuffer final : public SglangPolicy {
 public:
  explicit SglangExtraBuffer(const SubjectOptions& options);

  int tracking_slots() const override { return lazy() ? 1 : 2; }

 private:
  void track(RadixRequest& request, std::uint32_t stop, Forward forward) override;
  void keep_verified(RadixRequest& request, std::uint32_t stop) override;
  Reply store_unfinished(RadixRequest& request, std::uint32_t up_to) override;
  bool store_finished(RadixRequest& request, std::uint32_t kept) override;
  void prepare_verification(RadixRequest& request, std::uint32_t tokens) override;
  void results_came(RadixRequest& request) override;

  struct Tracked {
    std::uint32_t slot;
    std::uint32_t size;
  };

  Tracked tracked_within(const RadixRequest& request, std::uint32_t most) const;
  std::uint32_t tracked_in_chunk(const RadixRequest& request, std::uint32_t stop) const;
  void track_chunk(RadixRequest& request, std::uint32_t stop);
  StateSlot next_slot(Tracking& tracking, std::uint32_t position);
  StateSlot launch_lazily(Tracking& tracking, std::uint32_t position);
  void track_verified_lazily(RadixRequest& request, std::uint32_t position);
  bool take_second_slot(Tracking& tracking);
  void keep(Tracking& tracking, std::uint32_t slot, std::uint32_t size);
  static void forget_launched(Tracking& tracking, std::uint32_t slot);
  bool lazy() const { return options_.lazy; }
  bool swaps_with_results() const;

  const std::uint32_t grid_;         ///< tokens between positions that a chunk can be tracked at
  const std::uint32_t decode_grid_;  ///< the same for decoding: a multiple of it
};

SglangExtraBuffer::SglangExtraBuffer(const SubjectOptions& options)
    : SglangPolicy(options, {}),
      grid_(tree_.options().branch_grid),
      decode_grid_(
          static_cast<std::uint32_t>(std::lcm(std::int64_t{grid_}, options_.track_interval))) {}

void SglangExtraBuffer::track(RadixRequest& request, std::uint32_t stop, Forward forward) {
  if (forward == Forward::chunk) {
    track_chunk(request, stop);
    if (rules_.tracks_prefill_end && stop % decode_grid_ == 0)
      takes_.push_back({stop, next_slot(request.tracking, stop)});
    return;
  }
  // Decoding goes step by step, however many tokens one extend brings.
  const std::uint32_t first = request.computed / decode_grid_ * decode_grid_ + decode_grid_;
  for (std::uint32_t at = first; at <= stop; at += decode_grid_)
    takes_.push_back(
        {at, lazy() ? launch_lazily(request.tracking, at) : next_slot(request.tracking, at)});
}

/// A verification is one step: the last position of the grid that its kept tokens pass is tracked.
void SglangExtraBuffer::keep_verified(RadixRequest& request, std::uint32_t stop) {
  Tracking& tracking = request.tracking;
  const std::uint32_t last = stop / decode_grid_ * decode_grid_;
  if (last > request.computed && lazy())
    track_verified_lazily(request, last);
  else if (last > request.computed)
    commit(request, last, next_slot(tracking, last));
  if (rules_.tracks_old_chunk_in_verify && request.admitted >= grid_) {
    tracking.last = tracking.next;
    tracking.last_size = request.admitted / grid_ * grid_;
    layers_.copy_state(slot_of(request), tracking.slots[tracking.last]);
  }
  SglangPolicy::keep_verified(request, stop);
}

/// The position in the chunk [computed, stop) at which a state is kept; 0 for none: the branch
/// position if the chunk passes it, else the last position of a grid that starts at the chunk's
/// beginning.
std::uint32_t SglangExtraBuffer::tracked_in_chunk(const RadixRequest& request,
                                                  std::uint32_t stop) const {
  const std::uint32_t begin = request.computed;
  if (stop - begin < grid_) return 0;
  std::uint32_t position = begin + (stop - begin) / grid_ * grid_;
  if (rules_.grid_is_absolute) position = stop / grid_ * grid_;
  if (begin < request.branch && request.branch < position && rules_.tracks_branch) {
    if ((request.branch - begin) % grid_ == 0)
      position = request.branch;
    else
      LOCKSTEP_MARK("track.branch_off_the_grid");
  }
  // A key is whole pages. SGLang's chunks are, too; where ours is not, the state would fit no key.
  return position % page_ == 0 ? position : 0;
}

void SglangExtraBuffer::track_chunk(RadixRequest& request, std::uint32_t stop) {
  const std::uint32_t position = tracked_in_chunk(request, stop);
  if (rules_.forgets_branch) request.branch = 0;
  if (position == 0) return;
  if (position == request.branch) LOCKSTEP_MARK("track.branch");
  std::uint32_t taken = position;  // tokens that the state stands for; a defect changes them
  if (rules_.tracked_at == TrackedAt::chunk_end) taken = stop;
  if (rules_.tracked_at == TrackedAt::batch_chunk) {
    const std::uint32_t in_batch = batch_tokens_ + position - request.computed;
    const std::uint32_t late = in_batch % static_cast<std::uint32_t>(config_.model_chunk);
    taken = std::max(request.computed, position - std::min(late, position));
  }
  if (rules_.tracked_at == TrackedAt::before_forward && request.in_flight_count != 0)
    taken = request.computed;
  if (rules_.tracked_at == TrackedAt::page)
    taken = std::min(stop, request.computed + (position - request.computed) / page_ *
                                                  static_cast<std::uint32_t>(config_.model_chunk));
  Tracking& tracking = request.tracking;
  tracking.last = tracking.next;
  if (!lazy()) tracking.next = 1 - tracking.next;
  tracking.last_size = position;
  const StateSlot target = tracking.slots[tracking.last];
  const bool is_whole = !rules_.tracks_conv_at_chunk_end;
  takes_.push_back({taken, target, {.conv = is_whole}});
  if (!is_whole) takes_.push_back({stop, target, {.recurrent = false}});
}

bool SglangExtraBuffer::swaps_with_results() const {
  return rules_.swaps_with_results && config_.overlap != 0 && !lazy();
}

/// The slot for the state after `position` tokens, which is the last tracked one from now on.
StateSlot SglangExtraBuffer::next_slot(Tracking& tracking, std::uint32_t position) {
  const bool late = swaps_with_results();
  tracking.previous_size = tracking.next == tracking.last && !late ? 0 : tracking.last_size;
  tracking.previous = tracking.last;
  tracking.last = tracking.next;
  if (!late) tracking.next = 1 - tracking.last;
  tracking.last_size = position;
  return tracking.slots[tracking.last];
}

// --- Lazy: one slot, and a second one while a state that is under way must not write over it -----

/// Takes a free slot; evicts nothing for it. Where no slot is free, the step writes over the kept
/// state, which is lost as soon as the step is launched.
bool SglangExtraBuffer::take_second_slot(Tracking& tracking) {
  StateSlot& other = tracking.slots[1 - tracking.next];
  RadixTree::Evicted unreported;
  if (rules_.lazy_evicts) make_room_for_states(1, unreported);
  if (states_.free_count() == 0 || !rules_.lazy_takes_second_slot) {
    LOCKSTEP_MARK("track.no_second_slot");
    tracking.last_size = 0;
    return false;
  }
  LOCKSTEP_MARK("track.second_slot");
  other = states_.allocate();
  return true;
}

/// From now on slots[slot] is the one that is kept, and the other one is free again.
void SglangExtraBuffer::keep(Tracking& tracking, std::uint32_t slot, std::uint32_t size) {
  StateSlot& other = tracking.slots[1 - slot];
  if (other.exists() && rules_.lazy_frees_old_slot) {
    states_.release(other);
    other = StateSlot::none();
    forget_launched(tracking, 1 - slot);
  }
  tracking.last = tracking.next = slot;
  tracking.last_size = size;
}

void SglangExtraBuffer::forget_launched(Tracking& tracking, std::uint32_t slot) {
  std::erase_if(tracking.launched,
                [&](const Tracking::Launched& launched) { return launched.slot == slot; });
}

/// The slot in which a decode step leaves the state after `position` tokens; it is kept once the
/// step's result is there.
StateSlot SglangExtraBuffer::launch_lazily(Tracking& tracking, std::uint32_t position) {
  const std::uint32_t other = 1 - tracking.next;
  // A second slot that is there waits for a result or for a verification.
  if (!tracking.slots[other].exists() && take_second_slot(tracking)) {
    tracking.next = other;
  } else {
    if (tracking.next == tracking.last) tracking.last_size = 0;
    forget_launched(tracking, tracking.next);
  }
  tracking.launched.push_back({tracking.next, position});
  return tracking.slots[tracking.next];
}

void SglangExtraBuffer::results_came(RadixRequest& request) {
  Tracking& tracking = request.tracking;
  // With swaps_with_results (a defect) a result changes the slot for the last step that is known
  // then: its own step or the one ahead of it. A prefill's result changes nothing.
  const std::uint32_t known = request.in_flight_count != 0 ? request.computed : request.committed();
  if (swaps_with_results() && request.committed() > request.admitted && known % decode_grid_ == 0)
    tracking.next = 1 - tracking.next;
  while (!tracking.launched.empty() && tracking.launched.front().size <= request.committed()) {
    const Tracking::Launched done = tracking.launched.front();
    tracking.launched.erase(tracking.launched.begin());
    keep(tracking, done.slot, done.size);
  }
}

/// The verification may keep any number of its tokens, so the second slot is taken if it could pass
/// a position of the grid. SGLang looks twice as far as the verification can get.
void SglangExtraBuffer::prepare_verification(RadixRequest& request, std::uint32_t tokens) {
  if (!lazy()) return;
  Tracking& tracking = request.tracking;
  const std::uint32_t furthest = request.computed + 2 * tokens;
  if (request.computed / decode_grid_ != furthest / decode_grid_ &&
      !tracking.slots[1 - tracking.next].exists())
    take_second_slot(tracking);
}

void SglangExtraBuffer::track_verified_lazily(RadixRequest& request, std::uint32_t position) {
  Tracking& tracking = request.tracking;
  const std::uint32_t other = 1 - tracking.next;
  const std::uint32_t slot = tracking.slots[other].exists() ? other : tracking.next;
  commit(request, position, tracking.slots[slot]);
  if (slot == tracking.next) {
    tracking.last = slot;
    tracking.last_size = position;
  } else {
    keep(tracking, slot, position);
  }
}

/// The last tracked state that stands for at most `most` tokens: it or, where a later step has
/// tracked again, the one before. Its size is 0 where there is none. What the tree owns already is
/// never tracked.
SglangExtraBuffer::Tracked SglangExtraBuffer::tracked_within(const RadixRequest& request,
                                                             std::uint32_t most) const {
  const Tracking& tracking = request.tracking;
  Tracked found{tracking.last, tracking.last_size};
  if (found.size > most && !rules_.stores_beyond_owned) {
    LOCKSTEP_MARK("track.last_is_beyond");
    found = {tracking.previous, rules_.stores_previous_state ? tracking.previous_size : 0};
    if (found.size > most) found.size = 0;
  }
  return found;
}

/// A tracked state goes into the tree, and a fresh slot takes its place.
Reply SglangExtraBuffer::store_unfinished(RadixRequest& request, std::uint32_t up_to) {
  const Tracked tracked = tracked_within(request, up_to);
  if (tracked.size == 0) {
    LOCKSTEP_MARK("checkpoint.nothing_tracked");
    return stored_reply(request, false);
  }
  if (lazy() && states_.free_count() == 0 && rules_.lazy_gives_up_lock) {
    // The prefill has read the matched state, so its lock may go. Its KV stays locked.
    LOCKSTEP_MARK("checkpoint.gives_up_state_lock");
    tree_.move_lock(request.locked, request.state_locked, request.locked, false);
    request.state_locked = false;
  }
  RadixTree::Evicted unreported;
  if (!make_room_for_states(1, unreported)) {
    LOCKSTEP_MARK("checkpoint.skipped");
    return Reply::refusal(Refusal::no_state_slot);
  }
  Tracking& tracking = request.tracking;
  StateSlot& slot = tracking.slots[rules_.donates_other_slot ? 1 - tracked.slot : tracked.slot];
  const StateSlot donated = slot;
  slot = states_.allocate();
  slide(request, std::int64_t{tracked.size} - 1, 1);
  const RadixTree::Inserted done = store(request, tracked.size, donated);
  move_lock(request, done.end);
  if (done.exist) states_.release(donated);
  if (rules_.forgets_stored_length) {
    // If the previous state was stored, the last one belongs to a step that is still under way.
    if (tracked.slot == tracking.last) tracking.last_size = 0;
    tracking.previous_size = 0;
  }
  return stored_reply(request, done.exist);
}

/// Stores the last tracked state within the first `kept` tokens. The other slots go back with the
/// request.
bool SglangExtraBuffer::store_finished(RadixRequest& request, std::uint32_t kept) {
  const Tracked tracked = tracked_within(request, kept);
  if (tracked.size <= request.owned) {
    if (rules_.stripping_frees_tree_kv) request.owned = std::min(request.owned, kept);
    return true;
  }
  StateSlot& slot = request.tracking.slots[tracked.slot];
  const bool exist = store(request, tracked.size, slot).exist;
  if (!exist && !rules_.frees_stored_tracking_slot) slot = StateSlot::none();
  return exist;
}

namespace {

std::unique_ptr<Subject> make(const SubjectOptions& options) {
  return std::make_unique<SglangExtraBuffer>(options);
}

/// SGLang asserts the same where it derives its grid (mamba_cache_chunk_size; its first versions
/// wanted a page that divides 64): otherwise the grid lies where no chunk of the kernel ends. That
/// it also wants a track_interval of whole pages is not asked here: the decode grid is the least
/// common multiple of both.
Result<void> check(const Config& config) {
  if (config.page % config.model_chunk != 0 && config.model_chunk % config.page != 0)
    return fail(fmt::format("field page: neither {} nor the model_chunk of {} divides the other",
                            config.page, config.model_chunk));
  if (config.overlap != 0 && config.number("window") != 0)
    return fail("field window: tracking slots beside windows are for overlap=0");
  return check_window_fields(config);
}

PolicyEntry::SlotCounts slots(const Config& config) {
  return {config.state_slots, config.kv_tokens + config.page + window_slots(config)};
}

const Registration<PolicyEntry> kExtraBuffer{
    {.name = "sglang-extra-buffer",
     .summary = "SGLang 0.5.23's hybrid radix cache with tracking slots, states on a grid",
     .has_states = true,
     .config_fields = {"page", "track_interval", "lazy", "strip_thinking", "skip_decode_lock",
                       "path_cap", "overlap", "window", "window_kv", "window_interval",
                       "window_release"},
     .make = make,
     .check = check,
     .slots = slots,
     .capabilities = kSglangCapabilities,
     .tells_forwards = true}};

}  // namespace

}  // namespace lockstep::cache_sim
