#include "reference/caches/sglang_storage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "reference/base/require.hpp"
#include "reference/caches/sglang_oracle.hpp"

namespace lockstep::reference {
namespace {

Prefix prefix_of(const Operation& operation) {
  return {operation.salt.text(), operation.tokens};
}

}  // namespace

// --- The storage --------------------------------------------------------------------------------

std::int64_t SglangStorage::longest(const Prefix& whole, std::int64_t from) const {
  std::int64_t longest = 0;
  for (std::int64_t size = from + 1; size <= whole.size(); ++size) {
    const Prefix end = whole.first(size);
    if (!pages_.contains(end)) break;
    if (states_.contains(end)) longest = size - from;
  }
  return longest;
}

void SglangStorage::put(const Prefix& end, std::int64_t begin, bool with_state) {
  for (std::int64_t size = begin + 1; size <= end.size(); ++size) pages_.insert(end.first(size));
  if (with_state) states_.insert(end);
}

void SglangStorage::clear() {
  pages_.clear();
  states_.clear();
}

void SglangStorage::read(std::int64_t fetch) {
  line_.push_back(fetch);
  if (line_.size() == 1) go_on();
}

/// Begins with the KV of the first fetch in line. One that was stopped is over at once.
void SglangStorage::go_on() {
  while (!line_.empty()) {
    const SglangFetch& fetch = fetches.at(line_.front());
    if (!fetch.is_stopped) {
      std::int64_t found = 0;
      while (found < fetch.length &&
             pages_.contains(fetch.whole.first(fetch.anchor.size() + found + 1)))
        ++found;
      reading_ = Reading{.of_state = false, .found = found};
      return;
    }
    news.push_back({.fetch = line_.front(), .arrived = 0, .state = {}});
    over();
  }
}

/// No state comes, and the fetch is over.
void SglangStorage::over() {
  news.push_back({.fetch = line_.front(), .arrived = {}, .state = false, .over = true});
  line_.pop_front();
}

bool SglangStorage::end_read(bool fails) {
  if (!reading_) return false;
  const Reading ended = *reading_;
  reading_.reset();
  const std::int64_t number = line_.front();
  const SglangFetch& fetch = fetches.at(number);
  if (ended.of_state) {
    const bool came = !fails && ended.found != 0;
    news.push_back({.fetch = number, .arrived = {}, .state = came, .over = true});
    line_.pop_front();
    go_on();
    return true;
  }
  const std::int64_t arrived = fails ? 0 : ended.found;
  news.push_back({.fetch = number, .arrived = arrived, .state = {}});
  if (arrived == fetch.length && !fetch.is_stopped) {
    reading_ = Reading{.of_state = true, .found = states_.contains(fetch.end()) ? 1 : 0};
    return true;
  }
  over();
  go_on();
  return true;
}

// --- The host's part ----------------------------------------------------------------------------

/// [1.14, 1] Writes what the host has of the prefix, and keeps it there meanwhile.
void SglangPrefixMap::write_to_storage(Entry entry) {
  if (!options_.has_storage || !entry->second.on_host) return;
  const std::int64_t begin = lock_host(entry->first);
  writes_.push_back({.end = entry->first, .begin = begin, .with_state = entry->second.host_state});
}

const SglangPrefixMap::Write* SglangPrefixMap::end_write() {
  for (Write& write : writes_) {
    if (write.ended) continue;
    write.ended = true;
    return &write;
  }
  return nullptr;
}

std::int64_t SglangPrefixMap::ended_writes() const {
  return std::count_if(writes_.begin(), writes_.end(),
                       [](const Write& write) { return write.ended; });
}

void SglangPrefixMap::settle_write() {
  unlock_host(writes_.front().end, writes_.front().begin);
  writes_.pop_front();
}

/// [1.14, 8] Each prefix on the way is used. Those that the host has keep what they have; those
/// that the device alone has get the KV, unless they are backed up late.
void SglangPrefixMap::insert_from_storage(const Prefix& anchor, const Prefix& end) {
  const std::int64_t staged = end.size() - anchor.size();
  std::int64_t used = 0;
  if (!anchor.empty()) records_.at(anchor).last_access = read_clock();
  for (std::int64_t at = anchor.size(); at < end.size();) {
    const std::int64_t stored = longest_shared(end);
    if (stored <= at) {
      read_clock();
      Record fresh;
      fresh.on_device = false;
      fresh.on_host = true;
      fresh.last_access = read_clock();
      records_.emplace(end, fresh);
      used += end.size() - at;
      break;
    }
    std::vector<Entry> path = path_of(end);
    std::erase_if(path, [&](Entry entry) { return entry->first.size() <= at; });
    if (path.empty()) {
      read_clock();
      split(end.first(stored));
      path = {records_.find(end.first(stored))};
    } else {
      path.front()->second.last_access = read_clock();
    }
    Record& next = path.front()->second;
    if (!next.on_host && !options_.backs_up_late) {
      next.on_host = true;
      used += edge_size(path.front());
    }
    at = path.front()->first.size();
  }
  host_kv_ -= staged - used;
  Record& last = records_.at(end);
  if (!last.on_host || last.host_state) {
    --host_states_;
    return;
  }
  last.host_state = true;
  if (!last.state.exists()) last.host_use = ++uses_;
}

bool SglangPrefixMap::is_host_locked(Entry entry) {
  return entry->second.host_lock > 0 || entry->second.host_state_lock > 0;
}

// --- Requests that wait -------------------------------------------------------------------------

SglangOracle::Waiting& SglangOracle::waiting_for(const Operation& operation) {
  Operation asked = operation;
  asked.async = false;
  const auto known = waiting_.find(operation.id.text());
  if (known != waiting_.end()) {
    if (known->second.asked == asked.text()) return known->second;
    if (SglangFetch* const fetch = fetch_of(known->second)) {
      fetch->is_stopped = true;
      give_up(known->second);
    }
  }
  Waiting& waiting = waiting_[operation.id.text()] = Waiting{.asked = asked.text()};
  look_up(waiting, operation);
  return waiting;
}

SglangFetch* SglangOracle::fetch_of(const Waiting& waiting) {
  return waiting.fetch == 0 ? nullptr : &storage_.fetches.at(waiting.fetch);
}

/// [1.14, 2]
void SglangOracle::look_up(Waiting& waiting, const Operation& operation) {
  const Prefix known = prefix_of(operation);
  const Prefix key = known.first(known.size() - 1);
  const auto match = cached_.match(key);
  waiting.matched = match.told;
  const Prefix anchor = known.first(match.best);
  if (!anchor.empty() && !cached_.is_on_host(anchor)) return;
  const std::int64_t asked = key.size() - match.told;
  const std::int64_t quota = config_.number("host_kv") / 2;
  if (waiting.is_late || asked < config_.number("prefetch_least") || storage_.occupied >= quota)
    return;
  SglangFetch fetch{.anchor = anchor, .whole = anchor, .asked = asked};
  fetch.whole.tokens = anchor.tokens.followed_by(known.tokens.slice(
      static_cast<std::uint32_t>(match.told), static_cast<std::uint32_t>(key.size())));
  fetch.length = storage_.longest(fetch.whole, anchor.size());
  if (!anchor.empty()) fetch.host_begin = cached_.lock_host(anchor);
  storage_.occupied += asked;
  waiting.fetch = ++fetches_;
  waiting.fetches.insert(fetches_);
  storage_.fetches.emplace(fetches_, std::move(fetch));
  storage_.looked_up.push_back(fetches_);
}

/// [1.14, 5] Whether nothing keeps the request from being matched.
bool SglangOracle::fetch_is_over(Waiting& waiting, bool late) {
  SglangFetch* const fetch = fetch_of(waiting);
  if (fetch == nullptr) return true;
  const std::string policy = config_.text("prefetch_policy");
  if (policy == "wait_complete") return false;
  if (policy == "timeout") {
    const bool all_kv = fetch->has_room && fetch->arrived == fetch->length;
    const bool passed = waiting.is_late || (late && waiting.waits);
    if (all_kv || !passed) {
      waiting.waits = true;
      return false;
    }
    waiting.is_late = true;
  }
  fetch->is_stopped = true;
  if (fetch->has_room)
    finish_fetch(waiting);
  else
    give_up(waiting);
  return true;
}

/// [1.14, 6] The request's fetch is not its own any more; what has arrived goes back.
void SglangOracle::give_up(Waiting& waiting) {
  const SglangFetch& fetch = storage_.fetches.at(waiting.fetch);
  waiting.fetch = 0;
  if (!fetch.anchor.empty()) cached_.unlock_host(fetch.anchor, fetch.host_begin);
  storage_.occupied -= fetch.asked;
  if (!fetch.has_room) return;
  for (std::int64_t i = 0; i < fetch.arrived; ++i) storage_.kv_back.push_back(1);
  if (fetch.state_over) storage_.states_back.push_back(1);
}

/// [1.14, 7]
void SglangOracle::finish_fetch(Waiting& waiting) {
  SglangFetch& fetch = storage_.fetches.at(waiting.fetch);
  if (fetch.arrived < fetch.length || !fetch.state_arrived) return give_up(waiting);
  cached_.insert_from_storage(fetch.anchor, fetch.end());
  fetch.has_room = false;  // its slots are the cache's
  give_up(waiting);
}

/// [1.14, 9]
bool SglangOracle::has_lost_match(Waiting& waiting, std::int64_t told, const Operation& operation) {
  if (told >= waiting.matched) return false;
  if (waiting.repeats == 8) {
    waiting.matched = told;
    return false;
  }
  ++waiting.repeats;
  look_up(waiting, operation);
  return true;
}

/// [1.14, 3] Room on the host for what the storage has, or for a part of that.
void SglangOracle::make_room_for(std::int64_t number) {
  Waiting* asker = nullptr;
  for (auto& [name, waiting] : waiting_)
    if (waiting.fetches.contains(number)) asker = &waiting;
  if (asker == nullptr || asker->fetch == 0) return;
  SglangFetch& fetch = storage_.fetches.at(number);
  const std::int64_t least = config_.number("prefetch_least");
  if (fetch.is_stopped || fetch.length < least) return give_up(*asker);
  if (cached_.host_kv_free() < fetch.length) cached_.evict_host(fetch.length, 0);
  const std::int64_t fits = std::min(fetch.length, cached_.host_kv_free());
  if (fits < least) return give_up(*asker);
  cached_.take_on_host(fits, 0);
  if (cached_.host_states_free() == 0) cached_.evict_host(0, 1);
  if (cached_.host_states_free() == 0) {
    for (std::int64_t i = 0; i < fits; ++i) storage_.kv_back.push_back(1);
    return give_up(*asker);
  }
  cached_.take_on_host(0, 1);
  fetch.length = fits;
  fetch.has_room = true;
  storage_.read(number);
}

void SglangOracle::hear(const SglangStorage::News& news) {
  SglangFetch& fetch = storage_.fetches.at(news.fetch);
  Waiting* asker = nullptr;
  for (auto& [name, waiting] : waiting_)
    if (waiting.fetch == news.fetch) asker = &waiting;
  if (asker != nullptr) {
    if (news.arrived) fetch.arrived = *news.arrived;
    if (news.state) {
      fetch.state_over = true;
      fetch.state_arrived = *news.state;
    }
  }
  if (!news.over) return;
  if (asker != nullptr) finish_fetch(*asker);
  if (fetch.has_room) {  // the rest
    for (std::int64_t i = fetch.arrived; i < fetch.length; ++i) storage_.kv_back.push_back(1);
    if (!fetch.state_over) storage_.states_back.push_back(1);
  }
}

// --- Verbs --------------------------------------------------------------------------------------

/// [1.14, 10] Of each queue what was there when the server began to look.
std::int64_t SglangOracle::settle_all() {
  std::set<std::int64_t> before;
  for (const auto& [name, waiting] : waiting_)
    if (waiting.fetch != 0) before.insert(waiting.fetch);
  const std::size_t looked_up = storage_.looked_up.size(), news = storage_.news.size();
  const std::size_t kv = storage_.kv_back.size(), states = storage_.states_back.size();
  const std::int64_t writes = cached_.ended_writes();
  const std::int64_t settled = cached_.settle();
  const auto next = [](auto& queue) {
    const auto first = queue.front();
    queue.pop_front();
    return first;
  };
  for (std::size_t i = 0; i < looked_up; ++i) make_room_for(next(storage_.looked_up));
  for (std::size_t i = 0; i < news; ++i) hear(next(storage_.news));
  for (std::int64_t i = 0; i < writes; ++i) cached_.settle_write();
  for (std::size_t i = 0; i < kv; ++i) cached_.take_on_host(-next(storage_.kv_back), 0);
  for (std::size_t i = 0; i < states; ++i) cached_.take_on_host(0, -next(storage_.states_back));
  for (const auto& [name, waiting] : waiting_) before.erase(waiting.fetch);
  return settled + writes + static_cast<std::int64_t>(before.size());
}

bool SglangOracle::end_write(bool fails) {
  const SglangPrefixMap::Write* const write = cached_.end_write();
  if (write == nullptr) return false;
  if (!fails) storage_.put(write->end, write->begin, write->with_state);
  return true;
}

Result<Reply> SglangOracle::end_storage_copy(const Operation& operation) {
  const bool fails = operation.verb == Verb::fail;
  const std::string from = operation.from.exists() ? operation.from.text() : "";
  const std::string way = operation.tier.text() + "<" + from;
  if (way != "disk<" && way != "host<disk")
    return fail(fmt::format("no copy goes to {} from `{}`", operation.tier.text(), from));
  const bool ended = from.empty() ? end_write(fails) : storage_.end_read(fails);
  return Reply().set(ReplyField::n, ended ? 1 : 0);
}

/// Everything in flight ends well, and the server hears of it.
void SglangOracle::drain() {
  do {
    while (cached_.land_backup() || cached_.land_load()) continue;
    while (end_write(false) || storage_.end_read(false)) continue;
    settle_all();
  } while (!storage_.is_quiet() || cached_.has_copies());
}

}  // namespace lockstep::reference
