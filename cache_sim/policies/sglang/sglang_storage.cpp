// The storage as requests and traces see it: a request that waits for its prefetch, and the verbs
// land, fail, settle and flush. Sources: unified_radix_cache.py; scheduler.py, `_prefetch_kvcache`
// and `_prefetch_after_device_hit_loss`.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cache_sim/policies/sglang/sglang_policy.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mark.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr NodeIndex kRoot = RadixTree::kRoot;
/// After so many, a request is admitted with what the device and the host have
/// (--hicache-storage-prefetch-retry-max-attempts).
constexpr std::int64_t kMostRepeats = 8;

}  // namespace

// --- Requests that wait --------------------------------------------------------------------------

/// The request of this name, which has begun to wait now or earlier. Another one of the name has
/// left the server.
WaitingRequest& SglangPolicy::arrive(const Operation& admission) {
  Operation on_time = admission;
  on_time.late = false;
  std::string text = on_time.text();
  const auto known = waiting_.find(admission.id.index());
  if (known != waiting_.end()) {
    if (known->second.admission == text) return known->second;
    leave(known->second);
  }
  WaitingRequest& fresh = waiting_[admission.id.index()];
  fresh = {.number = ++asked_, .admission = std::move(text)};
  prefetch(fresh, admission);
  return fresh;
}

WaitingRequest* SglangPolicy::find_waiting(std::uint64_t number) {
  for (auto& [name, waiting] : waiting_)
    if (waiting.number == number) return &waiting;
  return nullptr;
}

/// Gives back what the request holds. Slots that the reader may still write stay until it ends.
void SglangPolicy::leave(WaitingRequest& waiting) {
  if (waiting.slot.exists()) states_.release(waiting.slot);
  if (waiting.prefetch == nullptr) return;
  LOCKSTEP_MARK("prefetch.left");
  waiting.prefetch->stopped = true;
  retire(waiting, true);
}

/// Looks up in the storage what follows the match, and asks for it where that is worth it.
void SglangPolicy::prefetch(WaitingRequest& waiting, const Operation& admission) {
  StorageTier& storage = *host_->storage;
  const std::uint32_t end = admission.tokens.size() - 1;
  const RadixTree::Match match = tree_.match(admission.tokens, end, admission.salt);
  waiting.matched = match.told;
  const NodeIndex anchor = match.on_host.exists() ? match.on_host : match.end;
  if (anchor != kRoot && !tree_.is_backed_up(anchor)) return;
  if (waiting.is_late) return;
  const std::uint32_t asked = end - match.told;
  if (asked < options_.prefetch_least) return;
  if (storage.occupied >= options_.host_kv / 2) {
    LOCKSTEP_MARK("prefetch.no_quota");
    return;
  }
  const RadixNode& node = tree_.node(anchor);
  auto fresh = std::make_shared<Prefetch>();
  fresh->asker = waiting.number;
  fresh->anchor = anchor;
  fresh->start = node.depth();
  fresh->asked = asked;
  fresh->path = node.path.followed_by(admission.tokens.slice(match.told, end));
  fresh->salt = admission.salt;
  fresh->keys = storage.keys_of(fresh->path, fresh->start, fresh->path.size(), fresh->salt);
  fresh->size = fresh->state_at = storage.longest(fresh->keys);
  if (anchor != kRoot) fresh->anchor_begin = tree_.lock_host(anchor);
  storage.occupied += asked;
  storage.looked_up.push_back(fresh);
  waiting.prefetch = std::move(fresh);
}

/// Whether the request may be admitted now, as its policy says. What has not come by then is given
/// up. The deadline does not pass any more once all KV has come.
bool SglangPolicy::prefetch_is_over(WaitingRequest& waiting, bool late) {
  if (waiting.prefetch == nullptr) return true;
  Prefetch& now = *waiting.prefetch;
  const bool has_kv = now.taken && now.completed >= now.size;
  switch (options_.prefetch_policy) {
    case PrefetchPolicy::best_effort: break;
    case PrefetchPolicy::wait_complete: return false;
    case PrefetchPolicy::timeout:
      if (has_kv || !(waiting.is_late || (waiting.waits && late))) {
        waiting.waits = true;
        return false;
      }
      LOCKSTEP_MARK("prefetch.is_late");
      waiting.is_late = true;
  }
  now.stopped = true;
  if (now.taken)
    end_prefetch(waiting);
  else
    retire(waiting, true);
  return true;
}

/// Whether the request's match is shorter than the one behind which it was looked up: it is looked
/// up again, and the request is passed over.
bool SglangPolicy::has_lost_match(WaitingRequest& waiting, const RadixTree::Match& match,
                                  const Operation& admission) {
  if (match.told >= waiting.matched) return false;
  if (waiting.repeats >= kMostRepeats) {
    waiting.matched = match.told;
    return false;
  }
  LOCKSTEP_MARK("admit.lost_match");
  ++waiting.repeats;
  prefetch(waiting, admission);
  return true;
}

/// The copy for the match is made again when the request is matched again.
void SglangPolicy::pass_over(WaitingRequest& waiting, RadixRequest& request, NodeIndex matched) {
  if (!request.live.exists()) return;
  LOCKSTEP_MARK("admit.drops_copy");
  if (rules_.passing_over_drops_copy) {
    states_.release(request.live);
  } else {
    waiting.slot = request.live;
    waiting.source = tree_.node(matched).state;
  }
}

/// A defect: the request keeps the slot and the source of an earlier match, which its first forward
/// copies, unless this match has a source of its own.
void SglangPolicy::take_up(WaitingRequest& waiting, RadixRequest& request,
                           const RadixTree::Match& match) {
  if (!waiting.slot.exists()) return;
  request.live = std::exchange(waiting.slot, StateSlot::none());
  request.source = std::exchange(waiting.source, StateSlot::none());
  request.awaits = 1;
  if (match.end == kRoot && !match.on_host.exists()) return;
  states_.release(request.live);  // a copy or a load takes another one
  request.live = StateSlot::none();
  if (!match.on_host.exists()) request.source = StateSlot::none();
}

// --- Ends of prefetches --------------------------------------------------------------------------

/// These slots of the host are free when a later settle comes to them.
void SglangPolicy::release_on_host(const KvRuns& kv, std::uint32_t begin, std::uint32_t end) {
  if (begin >= end) return;
  KvRuns part;
  append_slice(part, kv, begin, end);
  host_->storage->released_kv.push_back(std::move(part));
}

/// The request has no prefetch any more. What has arrived for it goes back, the rest when the
/// reader has ended.
void SglangPolicy::retire(WaitingRequest& waiting, bool frees_arrived) {
  const PrefetchRef gone = std::move(waiting.prefetch);
  waiting.prefetch = nullptr;
  StorageTier& storage = *host_->storage;
  if (gone->anchor != kRoot) tree_.unlock_host(gone->anchor, gone->anchor_begin);
  if (rules_.prefetches_return_quota) storage.occupied -= gone->asked;
  if (!frees_arrived || !gone->taken) return;
  if (!rules_.stopped_prefetches_keep_slots) {
    gone->completed = gone->size;
    gone->state_ended = true;
  }
  release_on_host(gone->kv, 0, gone->completed);
  if (gone->state_ended) storage.released_states.push_back(gone->state);
}

/// The request takes what has come: all of it or nothing.
void SglangPolicy::end_prefetch(WaitingRequest& waiting) {
  Prefetch& ended = *waiting.prefetch;
  const bool is_whole = ended.completed == ended.size && ended.state_came;
  if (!is_whole && rules_.short_prefetches_are_dropped) {
    LOCKSTEP_MARK("prefetch.comes_short");
    return retire(waiting, true);
  }
  LOCKSTEP_MARK("prefetch.comes");
  ended.completed = ended.size;
  ended.state_ended = true;
  tree_.insert_on_host(ended);
  retire(waiting, false);
}

/// The storage has told how much it has: slots of the host are taken for that, or for as much as
/// fits. An answer for a prefetch that was stopped takes the request's next one along.
void SglangPolicy::hear_of_look_up(const PrefetchRef& prefetch) {
  WaitingRequest* const waiting = find_waiting(prefetch->asker);
  if (waiting == nullptr || waiting->prefetch == nullptr) return;
  if (prefetch->stopped || prefetch->size < options_.prefetch_least) return retire(*waiting, true);
  if (prefetch->size > host_->kv.free_count()) tree_.evict_host(prefetch->size, 0);
  const auto fits =
      static_cast<std::uint32_t>(std::min<std::int64_t>(prefetch->size, host_->kv.free_count()));
  if (fits < options_.prefetch_least) {
    LOCKSTEP_MARK("prefetch.no_kv");
    return retire(*waiting, true);
  }
  if (fits < prefetch->size) LOCKSTEP_MARK("prefetch.cut");
  prefetch->kv.push_back(host_->kv.allocate(fits));
  if (host_->states.free_count() == 0) tree_.evict_host(0, 1);
  if (host_->states.free_count() == 0) {
    LOCKSTEP_MARK("prefetch.no_state_slot");
    release_on_host(prefetch->kv, 0, fits);
    return retire(*waiting, true);
  }
  prefetch->state = host_->states.allocate();
  prefetch->size = fits;
  if (rules_.prefetch_state_follows_size) prefetch->state_at = fits;
  prefetch->taken = true;
  host_->storage->read(prefetch);
}

void SglangPolicy::hear_of(const PrefetchNews& news) {
  Prefetch& of = *news.prefetch;
  WaitingRequest* const waiting = find_waiting(of.asker);
  const bool is_current = waiting != nullptr && waiting->prefetch == news.prefetch;
  if (is_current && news.tokens) of.completed = *news.tokens;
  if (is_current && news.state) {
    of.state_came = *news.state;
    of.state_ended = true;
  }
  if (!news.ended) return;
  if (is_current) end_prefetch(*waiting);
  if (of.kv.empty() || !rules_.ended_prefetches_free_rest) return;
  release_on_host(of.kv, of.completed, of.size);
  if (!of.state_ended) host_->storage->released_states.push_back(of.state);
}

// --- Verbs ---------------------------------------------------------------------------------------

/// check_hicache_events: of each queue so much as it holds at the start. Returns the number of
/// copies and prefetches that have ended.
std::int64_t SglangPolicy::settle_storage() {
  StorageTier* const storage = this->storage();
  if (storage == nullptr) return tree_.settle();
  const auto in_flight = [&] {
    return std::ranges::count_if(
        waiting_, [](const auto& entry) { return entry.second.prefetch != nullptr; });
  };
  const auto before = in_flight();
  std::size_t looked_up = storage->looked_up.size(), news = storage->news.size(),
              kv = storage->released_kv.size(), states = storage->released_states.size();
  const auto ended =
      std::ranges::count_if(storage->writes, [](const StorageWrite& write) { return write.ended; });
  const auto pop = [](auto& queue) {
    auto front = std::move(queue.front());
    queue.pop_front();
    return front;
  };
  const std::int64_t settled = tree_.settle();
  for (; looked_up != 0; --looked_up) hear_of_look_up(pop(storage->looked_up));
  for (; news != 0; --news) hear_of(pop(storage->news));
  for (auto left = ended; left != 0; --left) {
    const StorageWrite write = pop(storage->writes);
    if (rules_.settled_writes_unlock) tree_.unlock_host(write.node, write.host_begin);
  }
  for (; kv != 0; --kv) host_->kv.release(pop(storage->released_kv));
  for (; states != 0; --states) host_->states.release(pop(storage->released_states));
  return settled + ended + (before - in_flight());
}

/// The oldest write, or what the reader is about.
Result<Reply> SglangPolicy::end_storage_copy(const Operation& operation) {
  const bool reads = operation.from.exists();
  const std::string& tier = operation.tier.text();
  if (tier != (reads ? "host" : "disk") || (reads && operation.from.text() != "disk"))
    return fail("land, fail: a storage has tier=disk and tier=host from=disk");
  StorageTier& storage = *host_->storage;
  if (operation.rank >= storage.rank_count())
    return fail(fmt::format("fail: rank={} is beyond the {}", operation.rank,
                            counted(storage.rank_count(), "rank")));
  const std::int64_t failing = operation.verb != Verb::fail           ? StorageTier::kNoRank
                               : operation.rank == Operation::kAbsent ? StorageTier::kAllRanks
                                                                      : operation.rank;
  const bool ended = reads ? storage.end_read(failing) : storage.end_write(failing);
  return Reply{}.set(ReplyField::n, ended ? 1 : 0);
}

/// All copies land and are settled.
void SglangPolicy::drain() {
  do {
    while (host_->land(host_->backups) || host_->land(host_->loads)) continue;
    StorageTier* const storage = this->storage();
    while (storage != nullptr &&
           (storage->end_write(StorageTier::kNoRank) || storage->end_read(StorageTier::kNoRank)))
      continue;
    settle_storage();
  } while (storage() != nullptr && (!storage()->is_quiet() || !host_->backups.empty()));
}

}  // namespace lockstep::cache_sim
