#include "cache_sim/policies/sglang/storage_tier.hpp"

#include <algorithm>
#include <iterator>

#include "reference/base/mark.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {

std::vector<PageKey> StorageTier::keys_of(const Tokens& path, std::uint32_t begin,
                                          std::uint32_t end, Name salt) const {
  std::vector<PageKey> keys(end - begin);
  if (rules_.storage_chains_prefixes)
    path.prefix_fingerprints(begin, end, keys);
  else
    path.slice(begin, end).prefix_fingerprints(0, end - begin, keys);
  const PageKey space = rules_.storage_keys_have_salts ? salt.index() * 0xA0761D6478BD642Fu : 0;
  for (PageKey& key : keys) key = mix64(key ^ space);
  return keys;
}

bool StorageTier::fails_on(std::int64_t failing, std::size_t rank) const {
  return failing == kAllRanks || failing == static_cast<std::int64_t>(rank);
}

/// The numbers of these pages that the rank has stored, each with a state at its end, ascending.
std::vector<std::uint32_t> StorageTier::restorable(const std::vector<PageKey>& keys,
                                                   std::size_t rank) const {
  const OtherRank* const other = rank == 0 ? nullptr : &others_[rank - 1];
  const auto has_page = [&](PageKey key) {
    return other != nullptr ? other->pages.contains(key) : pages_.contains(key);
  };
  const auto has_state = [&](PageKey key) {
    return other != nullptr ? other->states.contains(key) : stored_states_.contains(key);
  };
  std::vector<std::uint32_t> sizes;
  for (std::uint32_t i = 0; i < keys.size() && has_page(keys[i]); ++i)
    if (has_state(keys[i])) sizes.push_back(i + 1);
  return sizes;
}

std::uint32_t StorageTier::longest(const std::vector<PageKey>& keys) const {
  std::vector<std::uint32_t> shared = restorable(keys, 0);
  for (std::size_t rank = 1; rank <= others_.size() && rules_.ranks_take != RanksTake::own;
       ++rank) {
    const std::vector<std::uint32_t> other = restorable(keys, rank);
    if (rules_.ranks_take == RanksTake::least) {
      const std::uint32_t most = other.empty() ? 0 : other.back();
      if (!shared.empty()) shared = {std::min(shared.back(), most)};
      continue;
    }
    std::vector<std::uint32_t> both;
    std::set_intersection(shared.begin(), shared.end(), other.begin(), other.end(),
                          std::back_inserter(both));
    shared = std::move(both);
  }
  return shared.empty() ? 0 : shared.back();
}

bool StorageTier::is_quiet() const {
  return writes.empty() && looked_up.empty() && news.empty() && to_read.empty() &&
         released_kv.empty() && released_states.empty();
}

// --- Writes --------------------------------------------------------------------------------------

void StorageTier::write(StorageWrite write, const KvRuns& kv, StateSlot state) {
  const auto tokens = static_cast<std::uint32_t>(write.keys.size());
  if (tokens <= kv_.free_count() && states_.free_count() != 0) {
    write.slots.kv_sources = kv;
    write.slots.kv_targets.push_back(kv_.allocate(tokens));
    if (state.exists()) write.slots.states.push_back({state, states_.allocate()});
  } else {
    write.keys.clear();
  }
  layers_.queue_copy(write.slots);
  writes.push_back(std::move(write));
}

/// Pages that are stored already stay; a write that fails has stored nothing.
bool StorageTier::end_write(std::int64_t failing) {
  const auto write =
      std::ranges::find_if(writes, [](const StorageWrite& queued) { return !queued.ended; });
  if (write == writes.end()) return false;
  write->ended = true;
  layers_.land_copy(write->slots);
  for (std::size_t rank = 1; rank <= others_.size(); ++rank)
    if (!fails_on(failing, rank)) store(*write, others_[rank - 1]);
  const bool fails = fails_on(failing, 0);
  for (std::uint32_t i = 0; i < write->keys.size(); ++i) {
    KvRuns page;
    append_slice(page, write->slots.kv_targets, i, i + 1);
    if (fails || !pages_.emplace(write->keys[i], page.front()).second) kv_.release(page);
  }
  for (const auto& [source, target] : write->slots.states)
    if (fails || !stored_states_.emplace(write->keys.back(), target).second)
      states_.release(target);
  return true;
}

void StorageTier::store(const StorageWrite& write, OtherRank& rank) {
  rank.pages.insert(write.keys.begin(), write.keys.end());
  if (!write.slots.states.empty()) rank.states.insert(write.keys.back());
}

void StorageTier::clear() {
  for (OtherRank& other : others_) other = {};
  if (reading_) reading_->outlives_pages = true;
  const TierCopy read = reading_ ? reading_->slots : TierCopy{};
  const auto reads_page = [&](std::uint32_t slot) {
    return std::ranges::any_of(read.kv_sources, [&](const KvRun& run) {
      return std::ranges::find(run.slots(), slot) != run.slots().end();
    });
  };
  const auto reads_state = [&](StateSlot slot) {
    return !read.states.empty() && read.states.front().source == slot;
  };
  for (const auto& [key, page] : pages_)
    if (!reads_page(page.slots().front())) kv_.release(KvRuns{page});
  for (const auto& [key, slot] : stored_states_)
    if (!reads_state(slot)) states_.release(slot);
  pages_.clear();
  stored_states_.clear();
}

// --- Prefetches ----------------------------------------------------------------------------------

void StorageTier::read(PrefetchRef prefetch) {
  to_read.push_back(std::move(prefetch));
  if (to_read.size() == 1) begin_kv();
}

/// The pages of the front prefetch up to the first one that is missing. One that was stopped is not
/// begun.
void StorageTier::begin_kv() {
  const Prefetch& now = *to_read.front();
  if (now.stopped && rules_.reader_minds_stops) {
    LOCKSTEP_MARK("prefetch.stopped_in_the_queue");
    news.push_back({.prefetch = to_read.front(), .tokens = 0});
    return go_on();
  }
  reading_ = Read{.slots = {}};
  while (reading_->tokens < now.size) {
    const auto page = pages_.find(now.keys[reading_->tokens]);
    if (page == pages_.end()) break;
    append_run(reading_->slots.kv_sources, page->second);
    ++reading_->tokens;
  }
  append_slice(reading_->slots.kv_targets, now.kv, 0, reading_->tokens);
  for (const OtherRank& other : others_) {
    std::uint32_t tokens = 0;
    while (tokens < now.size && other.pages.contains(now.keys[tokens])) ++tokens;
    reading_->of_others.push_back(tokens);
  }
  layers_.queue_copy(reading_->slots);
}

void StorageTier::begin_state() {
  const Prefetch& now = *to_read.front();
  reading_ = Read{.of_state = true, .tokens = 0, .slots = {}};
  const auto stored = stored_states_.find(now.keys[now.state_at - 1]);
  if (stored == stored_states_.end()) LOCKSTEP_MARK("prefetch.no_state");
  if (stored != stored_states_.end()) reading_->slots.states.push_back({stored->second, now.state});
  for (const OtherRank& other : others_)
    reading_->of_others.push_back(other.states.contains(now.keys[now.state_at - 1]) ? 1 : 0);
  layers_.queue_copy(reading_->slots);
}

/// The targets of a copy that failed hold nothing that can be told.
void StorageTier::spoil(const TierCopy& copy) {
  for (const auto& [source, target] : copy.states) {
    layers_.free_state(target);
    layers_.allocate_state(target);
  }
  for (const KvRun& run : copy.kv_targets) {
    layers_.free_kv(run.slots());
    layers_.allocate_kv(run.slots());
  }
}

/// All ranks have come to the same point; what they tell is the least that one of them has. One
/// that has all KV reads its state.
bool StorageTier::end_read(std::int64_t failing) {
  if (!reading_) return false;
  const Read ended = std::move(*reading_);
  reading_.reset();
  const PrefetchRef prefetch = to_read.front();
  layers_.land_copy(ended.slots);
  const bool fails = fails_on(failing, 0);
  if (fails) spoil(ended.slots);
  if (ended.outlives_pages) {
    kv_.release(ended.slots.kv_sources);
    for (const auto& [source, target] : ended.slots.states) states_.release(source);
  }
  const std::uint32_t own =
      fails ? 0
            : static_cast<std::uint32_t>(ended.of_state ? std::ssize(ended.slots.states)
                                                        : ended.tokens);
  std::uint32_t least = own, most = own;
  for (std::size_t rank = 1; rank <= others_.size(); ++rank) {
    const std::uint32_t read = fails_on(failing, rank) ? 0 : ended.of_others[rank - 1];
    least = std::min(least, read);
    most = std::max(most, read);
  }
  if (rules_.ranks_take == RanksTake::own) least = most = own;
  if (ended.of_state) {
    const bool comes = least != 0 && prefetch_has_kv_;
    news.push_back({.prefetch = prefetch, .tokens = {}, .state = comes, .ended = true});
    to_read.pop_front();
    if (!to_read.empty()) begin_kv();
    return true;
  }
  news.push_back({.prefetch = prefetch, .tokens = least, .state = {}});
  prefetch_has_kv_ = least == prefetch->size;
  if (most == prefetch->size && !(prefetch->stopped && rules_.reader_minds_stops))
    begin_state();
  else
    go_on();
  return true;
}

/// The front prefetch ends without its state; the reader goes on to the next one.
void StorageTier::go_on() {
  news.push_back({.prefetch = to_read.front(), .tokens = {}, .state = false, .ended = true});
  to_read.pop_front();
  if (!to_read.empty()) begin_kv();
}

}  // namespace lockstep::cache_sim
