#include "cache_sim/policies/sglang/storage_tier.hpp"

#include <algorithm>

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

std::uint32_t StorageTier::longest(const std::vector<PageKey>& keys) const {
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < keys.size() && pages_.contains(keys[i]); ++i)
    if (stored_states_.contains(keys[i])) longest = i + 1;
  return longest;
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
bool StorageTier::end_write(bool fails) {
  const auto write = std::find_if(writes.begin(), writes.end(),
                                  [](const StorageWrite& queued) { return !queued.ended; });
  if (write == writes.end()) return false;
  write->ended = true;
  layers_.land_copy(write->slots);
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

void StorageTier::clear() {
  if (reading_) reading_->outlives_pages = true;
  const TierCopy read = reading_ ? reading_->slots : TierCopy{};
  const auto reads_page = [&](std::uint32_t slot) {
    return std::any_of(read.kv_sources.begin(), read.kv_sources.end(), [&](const KvRun& run) {
      return std::find(run.slots().begin(), run.slots().end(), slot) != run.slots().end();
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
  layers_.queue_copy(reading_->slots);
}

void StorageTier::begin_state() {
  const Prefetch& now = *to_read.front();
  reading_ = Read{.of_state = true, .tokens = 0, .slots = {}};
  const auto stored = stored_states_.find(now.keys[now.state_at - 1]);
  if (stored == stored_states_.end()) LOCKSTEP_MARK("prefetch.no_state");
  if (stored != stored_states_.end()) reading_->slots.states.push_back({stored->second, now.state});
  layers_.queue_copy(reading_->slots);
}

bool StorageTier::end_read(bool fails) {
  if (!reading_) return false;
  const Read ended = std::move(*reading_);
  reading_.reset();
  const PrefetchRef prefetch = to_read.front();
  layers_.land_copy(ended.slots);
  if (fails) {  // its targets hold nothing that can be told
    for (const auto& [source, target] : ended.slots.states) {
      layers_.free_state(target);
      layers_.allocate_state(target);
    }
    for (const KvRun& run : ended.slots.kv_targets) {
      layers_.free_kv(run.slots());
      layers_.allocate_kv(run.slots());
    }
  }
  if (ended.outlives_pages) {
    kv_.release(ended.slots.kv_sources);
    for (const auto& [source, target] : ended.slots.states) states_.release(source);
  }
  if (ended.of_state) {
    news.push_back({.prefetch = prefetch, .state = !fails && !ended.slots.states.empty()});
    news.back().ended = true;
    to_read.pop_front();
    if (!to_read.empty()) begin_kv();
    return true;
  }
  const std::uint32_t tokens = fails ? 0 : ended.tokens;
  news.push_back({.prefetch = prefetch, .tokens = tokens});
  if (tokens == prefetch->size && !(prefetch->stopped && rules_.reader_minds_stops))
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
