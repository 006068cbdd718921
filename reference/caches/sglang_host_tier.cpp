// SGLang's host tier, literally by rules [1.13] of sglang.md: a stored prefix has its KV on the
// device, on the host or on both, and so with its state. An insert backs up, or eviction from the
// device does (write_back). The host's copy stays then, a match may end at it, and an admission
// loads it. Then the storage behind it, by rules [1.14].
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "reference/base/require.hpp"
#include "reference/caches/sglang_oracle.hpp"

namespace lockstep::reference {

// --- To the host --------------------------------------------------------------------------------

/// An insert goes from stored prefix to stored prefix, and each of them that the host lacks is
/// backed up before the next one is looked for: making room may drop what would have come next.
SglangPrefixMap::Inserted SglangPrefixMap::insert_and_back_up(const Prefix& key, StateSlot state,
                                                              std::int64_t prev,
                                                              std::int64_t before,
                                                              std::int64_t evicted) {
  read_clock();
  Inserted inserted{.exist = false};
  std::int64_t at = 0;
  while (at < key.size()) {
    const std::int64_t stored = longest_shared(key);
    if (stored <= at) break;
    std::vector<Entry> path = path_of(key);
    std::erase_if(path, [&](Entry entry) { return entry->first.size() <= at; });
    if (path.empty()) {
      read_clock();
      split(key.first(stored));
      path = {records_.find(key.first(stored))};
    } else {
      path.front()->second.last_access = read_clock();
    }
    const Entry next = path.front();
    const std::int64_t end = next->first.size();
    if (next->second.on_device) {
      inserted.duplicates += std::max<std::int64_t>(0, end - std::max(at, prev));
    } else {  // what the caller has computed stays
      next->second.on_device = true;
      kv_ += end - at;
      note_both_tiers(next->second);
    }
    if (has_windows() && end > prev) refill(next->first, evicted);
    at = end;
    if (end > before) count_insert(next);
  }

  const bool is_new = at < key.size();
  kv_ += key.size() - at;
  Record& end = records_[key];
  end.last_access = read_clock();
  inserted.exist = end.state.exists();
  if (!inserted.exist) {
    end.state = state;
    end.host_use = 0;
  }
  use_state(end);
  if (!inserted.exist) cap_states(key);
  if (is_new && has_windows()) give_new_window(key, at, evicted);
  if (has_windows()) use_windows(key);
  if (is_new && key.size() > before) count_insert(records_.find(key));
  // A state that comes to a prefix which the host has already is backed up alone.
  if (!is_new && end.on_host && end.backup == 0 && !options_.backs_up_late)
    queue_backup(records_.find(key));
  return inserted;
}

/// An insert went by the prefix or ended there.
void SglangPrefixMap::count_insert(Entry entry) {
  if (options_.backs_up_late) return;
  entry->second.inserts += 1;
  if (entry->second.inserts >= options_.inserts && !entry->second.on_host) back_up(entry->first);
}

/// The prefix and its own prefixes that the host lacks, the shortest first.
void SglangPrefixMap::back_up(const Prefix& end) {
  for (const Entry entry : path_of(end))
    if (!entry->second.on_host && !queue_backup(entry)) return;
}

bool SglangPrefixMap::queue_backup(Entry entry) {
  Record& record = entry->second;
  const std::int64_t kv = record.on_host ? 0 : edge_size(entry);
  const bool state = record.state.exists() && !record.host_state;
  const std::vector<Entry> windows = unsaved_window(entry->first);
  const std::int64_t window = edge_sum(windows);
  if (kv == 0 && !state && windows.empty()) return true;
  const std::int64_t lacking = kv - host_kv_free();
  if (lacking > 0 && evict_host(lacking, 0).kv < lacking) return false;
  // Room for each of the three is made while what came before it is taken.
  host_kv_ += kv;
  if (state && host_states_free() == 0) evict_host(0, 1);
  const bool has_slot = !state || host_states_free() > 0;
  if (has_slot && host_window_free() < window) evict_host(0, 0, window);
  if (!has_slot || host_window_free() < window) {
    host_kv_ -= kv;
    return false;
  }
  host_states_ += state ? 1 : 0;
  host_window_kv_ += window;
  record.on_host = true;
  record.host_state = record.host_state || state;
  record.backup = ++copies_;
  for (const Entry covered : windows) {
    covered->second.host_window = true;
    covered->second.backup = copies_;
  }
  lock(entry->first, true);
  const std::int64_t window_begin = lock_window(entry->first);
  backups_.push_back({.number = copies_, .end = entry->first, .locks = {.window = window_begin}});
  return true;
}

/// [1.13, 14] Backs up what is about to leave the device. The copy is over before this returns.
void SglangPrefixMap::save(Entry entry) {
  if (!queue_backup(entry)) return;
  unlock_window(entry->first, backups_.back().locks.window);
  backups_.pop_back();
  unlock(entry->first, true);
  for (const Entry saved : path_of(entry->first)) saved->second.backup = 0;
  note_both_tiers(entry->second);
  write_to_storage(entry);
}

/// [1.13, 15] Saves an inner prefix whose state is about to go, unless the host has part of it.
void SglangPrefixMap::save_state(Entry entry) {
  if (entry->second.on_host || entry->second.host_state) return;
  if (host_states_free() == 0) evict_host(0, 1);
  save(entry);
}

/// Extensions of a prefix that is dropped are on the host alone, and go with it. False where one of
/// them is locked there.
bool SglangPrefixMap::drop_extensions(const Prefix& end) {
  std::vector<Entry> extensions;
  for (Entry next = records_.upper_bound(end);
       next != records_.end() && is_prefix(end, next->first); ++next)
    extensions.push_back(next);
  if (std::ranges::any_of(extensions, is_host_locked)) return false;
  Evicted unreported;
  for (auto next = extensions.rbegin(); next != extensions.rend(); ++next) {
    require(!(*next)->second.on_device, "a leaf of the device has extensions on the host alone");
    drop_from_host(*next, unreported);
  }
  return true;
}

/// [1.13, 16] KV that is on both tiers, without a copy in flight, gets its turn to be given back.
void SglangPrefixMap::note_both_tiers(Record& record) {
  const bool both = record.on_device && record.on_host && record.backup == 0 && record.load == 0;
  if (both && record.twice == 0) record.twice = ++uses_;
}

/// It leaves the device, and the host keeps it.
void SglangPrefixMap::demote(Entry leaf, Evicted& evicted) {
  const std::int64_t tokens = edge_size(leaf);
  kv_ -= tokens;
  evicted.kv += tokens;
  leaf->second.on_device = false;
  const bool had_state = leaf->second.state.exists();
  take_window(leaf, evicted);
  free_state(leaf->second, evicted);
  if (had_state) spare_no_more(leaf->second);
}

/// The device no longer has the state, so the host may evict its own.
void SglangPrefixMap::spare_no_more(Record& record) {
  if (record.host_state && record.host_state_lock == 0) record.host_use = ++uses_;
}

bool SglangPrefixMap::is_host_leaf(Entry entry) {
  const Record& record = entry->second;
  return !record.on_device && child_count(entry) == 0 && record.full_lock == 0 &&
         record.state_lock == 0 && !is_host_locked(entry);
}

void SglangPrefixMap::drop_from_host(Entry leaf, Evicted& evicted) {
  const std::int64_t tokens = edge_size(leaf);
  host_kv_ -= tokens;
  evicted.kv += tokens;
  if (leaf->second.host_state) {
    --host_states_;
    ++evicted.states;
  }
  forget_host_window(leaf, evicted);
  records_.erase(leaf);
}

/// Two walks over the prefixes that have a turn, in that order; the first one passes over leaves of
/// the device. A prefix that turns out not to be on both tiers, or gives its KV back, loses its
/// turn when both walks are over.
void SglangPrefixMap::reclaim(std::int64_t kv, Evicted& evicted) {
  std::map<std::int64_t, Entry> turns;
  for (Entry entry = records_.begin(); entry != records_.end(); ++entry)
    if (entry->second.twice != 0) turns.emplace(entry->second.twice, entry);
  std::vector<Entry> over;
  const auto walk = [&](bool with_leaves) {
    for (const auto& [turn, entry] : turns) {
      if (evicted.kv >= kv) return;
      Record& record = entry->second;
      if (!record.on_device || !record.on_host) {
        over.push_back(entry);
        continue;
      }
      const bool is_copied = record.backup != 0 || record.load != 0 || record.host_lock != 0;
      if (is_copied || (!with_leaves && is_leaf(entry))) continue;
      record.on_host = false;
      host_kv_ -= edge_size(entry);
      evicted.kv += edge_size(entry);
      over.push_back(entry);
    }
  };
  walk(false);
  walk(true);
  for (const Entry entry : over) entry->second.twice = 0;
}

SglangPrefixMap::Evicted SglangPrefixMap::evict_host(std::int64_t kv, std::int64_t states,
                                                     std::int64_t window) {
  Evicted evicted;
  if (options_.backs_up_late) reclaim(kv, evicted);
  const auto oldest = [&](auto may_go, auto age) {
    Entry found = records_.end();
    for (Entry entry = records_.begin(); entry != records_.end(); ++entry)
      if (may_go(entry) && (found == records_.end() || age(entry) < age(found))) found = entry;
    return found;
  };
  while (evicted.kv < kv) {
    const Entry leaf = oldest([&](Entry entry) { return is_host_leaf(entry); },
                              [](Entry entry) { return entry->second.last_access; });
    if (leaf == records_.end()) break;
    drop_from_host(leaf, evicted);
  }
  evict_host_windows(window, evicted);
  while (evicted.states < states) {
    const Entry victim = oldest(
        [](Entry entry) {
          return entry->second.host_use != 0 && entry->second.host_state_lock == 0;
        },
        [](Entry entry) { return entry->second.host_use; });
    if (victim == records_.end()) break;
    if (is_host_leaf(victim)) {
      drop_from_host(victim, evicted);
      continue;
    }
    victim->second.host_state = false;
    victim->second.host_use = 0;
    --host_states_;
    ++evicted.states;
  }
  return evicted;
}

// --- To the device ------------------------------------------------------------------------------

std::int64_t SglangPrefixMap::shared_on_device(const Prefix& key) {
  const std::int64_t stored = longest_shared(key);
  if (stored == 0) return 0;
  // The last shared token lies on the edge of the shortest extension of the shared part.
  if (records_.lower_bound(key.first(stored))->second.on_device) return stored;
  std::int64_t longest = 0;
  for (const Entry entry : path_of(key))
    if (entry->second.on_device) longest = entry->first.size();
  return longest;
}

std::int64_t SglangPrefixMap::missing(const Prefix& end) {
  std::int64_t tokens = 0;
  for (const Entry entry : path_of(end))
    if (!entry->second.on_device) tokens += edge_size(entry);
  return tokens;
}

std::int64_t SglangPrefixMap::lock_host(const Prefix& end) {
  const Entry entry = records_.find(end);
  ++entry->second.host_lock;
  if (entry->second.host_state_lock++ == 0) entry->second.host_use = 0;
  return end.size() - edge_size(entry);
}

/// A split since then has given the shorter half the lock as well.
void SglangPrefixMap::unlock_host(const Prefix& end, std::int64_t begin) {
  for (const Entry entry : path_of(end))
    if (entry->first.size() > begin) --entry->second.host_lock;
  Record& last = records_.at(end);
  --last.host_state_lock;
  if (!last.state.exists() && last.host_use == 0) spare_no_more(last);
}

SglangPrefixMap::LoadLocks SglangPrefixMap::lock_for_load(const Prefix& end) {
  LoadLocks locks{.host = lock_host(end), .host_window = lock_host_window(end)};
  lock(end, true);
  locks.window = lock_window(end);
  return locks;
}

void SglangPrefixMap::unlock_load(const Prefix& end, const LoadLocks& locks) {
  unlock_window(end, locks.window);
  unlock(end, true);
  unlock_host_window(end, locks.host_window);
  unlock_host(end, locks.host);
}

void SglangPrefixMap::load(const Prefix& end, StateSlot state, const LoadLocks& locks) {
  kv_ += missing(end);
  ++copies_;
  if (has_windows()) {
    const std::vector<Entry> window = window_of(end);
    for (auto entry = window.rbegin(); entry != window.rend(); ++entry)
      if (!(*entry)->second.has_window) give_window((*entry)->first);
  }
  for (const Entry entry : path_of(end)) {
    if (!entry->second.on_device && options_.backs_up_late) entry->second.load = copies_;
    entry->second.on_device = true;
  }
  Record& last = records_.at(end);
  if (state.exists()) {
    last.state = state;
    last.host_use = 0;
    use_state(last);
  }
  loads_.push_back({.number = copies_, .end = end, .locks = locks});
}

// --- Copies -------------------------------------------------------------------------------------

bool SglangPrefixMap::land(std::deque<Copy>& copies) {
  const auto next = std::ranges::find_if(copies, [](const Copy& copy) { return !copy.landed; });
  if (next == copies.end()) return false;
  next->landed = true;
  return true;
}

void SglangPrefixMap::land_loads(std::int64_t number) {
  for (Copy& load : loads_) load.landed = load.landed || load.number <= number;
}

std::int64_t SglangPrefixMap::settle() {
  std::int64_t settled = 0;
  for (; !backups_.empty() && backups_.front().landed; ++settled) {
    const Copy backup = backups_.front();
    backups_.pop_front();
    std::vector<Entry> saved = path_of(backup.end);
    std::erase_if(saved, [&](Entry entry) { return entry->second.backup != backup.number; });
    for (const Entry entry : saved) entry->second.backup = 0;
    unlock_window(backup.end, backup.locks.window);
    unlock(backup.end, true);
    for (const Entry entry : saved) write_to_storage(entry);
  }
  for (; !loads_.empty() && loads_.front().landed; ++settled) {
    const Copy load = loads_.front();
    loads_.pop_front();
    unlock_load(load.end, load.locks);
    std::vector<Entry> path = path_of(load.end);
    for (auto entry = path.rbegin(); entry != path.rend(); ++entry) {
      if ((*entry)->second.load != load.number) continue;
      (*entry)->second.load = 0;
      note_both_tiers((*entry)->second);
    }
  }
  return settled;
}

// --- The oracle's part --------------------------------------------------------------------------

/// Of KV, and then of the windows, each by itself.
bool SglangOracle::make_room_for_load(const Prefix& end) {
  const std::int64_t kv = cached_.missing(end), window = cached_.missing_window(end);
  if (kv > kv_free()) cached_.evict(kv - kv_free(), 0);
  if (kv > kv_free()) return false;
  if (window > 0 && window > window_free()) cached_.evict(0, 0, window - window_free());
  return window == 0 || window <= window_free();
}

/// Loads the request's first `more` tokens, of which the device has the first `best`; afterwards
/// `best` is what the request begins with, and it is locked. An answer where the request cannot be
/// admitted at all.
std::optional<Refusal> SglangOracle::load(Request& request, Prefix& best, std::int64_t more,
                                          bool& loaded) {
  const Prefix whole = request.known.first(more);
  const SglangPrefixMap::LoadLocks locks = cached_.lock_for_load(whole);
  const bool brings_state = !cached_.has_state(whole);
  Evicted unreported;
  if (brings_state) request.live = take_slot(unreported);
  const bool has_slot = request.live.exists();
  StateSlot of_prefix;
  // KV and the window are sought before the second slot: their eviction may free slots as well. The
  // part that another load brings is not loaded again.
  loaded = has_slot && !cached_.is_loading(whole) && make_room_for_load(whole);
  if (loaded && brings_state) {
    of_prefix = take_slot(unreported);
    loaded = of_prefix.exists();
  }
  if (loaded) {
    cached_.load(whole, of_prefix, locks);
    const Prefix before = best;
    const Request held = request;
    lock(request, whole, true);
    unlock(held, before, true);
    best = whole;
    return std::nullopt;
  }
  cached_.unlock_load(whole, locks);
  if (!brings_state) return std::nullopt;  // its slot gets the state of what the device has
  release_slot(request.live);
  request.live = StateSlot::none();
  if (!has_slot) return Refusal::no_state_slot;
  if (best.empty()) return std::nullopt;
  request.live = take_slot(unreported);  // the state that the device has is copied after all
  if (!request.live.exists()) return Refusal::no_state_slot;
  return std::nullopt;
}

Result<Reply> SglangOracle::evict(const Operation& operation) {
  const std::string& tier = operation.tier.exists() ? operation.tier.text() : "";
  if (cached_.has_storage() && tier == "disk") {
    storage_.clear();
    return Reply().set(ReplyField::kv, 0).set(ReplyField::state, 0);
  }
  const bool of_host = tier == "host";
  if (!tier.empty() && (!cached_.has_host() || (tier != "device" && !of_host)))
    return fail(fmt::format("evict: there is no tier {} here", tier));
  const bool room = operation.room != Operation::kAbsent;
  if (room && of_host) return fail("evict: room is made on the device");
  if (room) return make_room(operation);
  const std::int64_t kv = std::max<std::int64_t>(0, operation.kv);
  const std::int64_t states = std::max<std::int64_t>(0, operation.state);
  if (!of_host) return evict(kv, states);
  const Evicted evicted = cached_.evict_host(kv, states);
  return Reply().set(ReplyField::kv, evicted.kv).set(ReplyField::state, evicted.states);
}

/// All copies end first, and the host is emptied after the device.
Reply SglangOracle::flush() {
  constexpr std::int64_t kEverything = std::numeric_limits<std::int64_t>::max();
  drain();
  const Reply reply = evict(kEverything, kEverything, kEverything);
  for (Reply next = reply; cached_.has_storage() && next.get(ReplyField::kv) > 0;) {
    drain();
    next = evict(kEverything, kEverything);
  }
  if (cached_.has_host()) cached_.evict_host(kEverything, kEverything);
  return reply;
}

Result<Reply> SglangOracle::land(const Operation& operation) {
  const std::string& tier = operation.tier.text();
  if (cached_.has_storage() &&
      (operation.verb == Verb::fail || operation.from.exists() || tier == "disk"))
    return end_storage_copy(operation);
  if (operation.from.exists()) return fail("land: copies come from the device and the host alone");
  if (!cached_.has_host() || (tier != "host" && tier != "device"))
    return fail(fmt::format("land: there is no tier {} here", tier));
  const bool landed = tier == "host" ? cached_.land_backup() : cached_.land_load();
  return Reply().set(ReplyField::n, landed ? 1 : 0);
}

Result<Reply> SglangOracle::settle() {
  if (!cached_.has_host()) return fail("settle: there is one tier alone");
  return Reply().set(ReplyField::n, settle_all());
}

// --- The storage --------------------------------------------------------------------------------

std::int64_t SglangStorage::longest(const Prefix& whole, std::int64_t from) const {
  std::int64_t longest = 0;
  for (std::int64_t size = from + 1; size <= whole.size(); ++size) {
    const Prefix end = whole.first(size);
    const auto on_all = [&](std::set<Prefix> Rank::*kind) {
      return std::ranges::all_of(ranks_,
                                 [&](const Rank& rank) { return (rank.*kind).contains(end); });
    };
    if (!on_all(&Rank::pages)) break;
    if (on_all(&Rank::states)) longest = size - from;
  }
  return longest;
}

void SglangStorage::put(const Prefix& end, std::int64_t begin, bool with_state,
                        const Failing& failing) {
  for (std::int64_t number = 0; number < rank_count(); ++number) {
    if (failing.contains(number)) continue;
    Rank& rank = ranks_[static_cast<std::size_t>(number)];
    for (std::int64_t size = begin + 1; size <= end.size(); ++size)
      rank.pages.insert(end.first(size));
    if (with_state) rank.states.insert(end);
  }
}

void SglangStorage::clear() {
  ranks_.assign(ranks_.size(), {});
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
      reading_ = Reading{.of_state = false, .found = {}};
      for (const Rank& rank : ranks_) {
        std::int64_t found = 0;
        while (found < fetch.length &&
               rank.pages.contains(fetch.whole.first(fetch.anchor.size() + found + 1)))
          ++found;
        reading_->found.push_back(found);
      }
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

bool SglangStorage::end_read(const Failing& failing) {
  if (!reading_) return false;
  Reading ended = *reading_;
  reading_.reset();
  const std::int64_t number = line_.front();
  const SglangFetch& fetch = fetches.at(number);
  for (const std::int64_t rank : failing)
    if (rank < rank_count()) ended.found[static_cast<std::size_t>(rank)] = 0;
  if (ended.of_state) {
    bool came = true;
    for (std::int64_t rank = 0; rank < rank_count(); ++rank)
      came =
          came && ended.found[static_cast<std::size_t>(rank)] == 1 && !short_of_kv_.contains(rank);
    news.push_back({.fetch = number, .arrived = {}, .state = came, .over = true});
    line_.pop_front();
    go_on();
    return true;
  }
  // Each rank has told how much it has, and all go by the one that has least.
  short_of_kv_.clear();
  std::int64_t arrived = fetch.length;
  for (std::int64_t rank = 0; rank < rank_count(); ++rank) {
    const std::int64_t found = ended.found[static_cast<std::size_t>(rank)];
    if (found < fetch.length) short_of_kv_.insert(rank);
    arrived = std::min(arrived, found);
  }
  news.push_back({.fetch = number, .arrived = arrived, .state = {}});
  if (std::ssize(short_of_kv_) < rank_count() && !fetch.is_stopped) {
    reading_ = Reading{.of_state = true, .found = {}};
    for (const Rank& rank : ranks_)
      reading_->found.push_back(rank.states.contains(fetch.end()) ? 1 : 0);
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
  return std::ranges::count_if(writes_, [](const Write& write) { return write.ended; });
}

void SglangPrefixMap::settle_write() {
  unlock_host(writes_.front().end, writes_.front().begin);
  writes_.pop_front();
}

/// [1.14, 8] Each prefix on the way is used. Those that the host has keep what they have; those
/// that the device alone has get the KV, unless they are backed up late.
bool SglangPrefixMap::insert_from_storage(const Prefix& anchor, const Prefix& end) {
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
  if (!last.on_host || last.host_state) return false;
  last.host_state = true;
  if (!last.state.exists()) last.host_use = ++uses_;
  return true;
}

bool SglangPrefixMap::is_host_locked(Entry entry) {
  return entry->second.host_lock > 0 || entry->second.host_state_lock > 0 ||
         entry->second.host_window_lock > 0;
}

// --- Requests that wait -------------------------------------------------------------------------

SglangOracle::Waiting& SglangOracle::waiting_for(const Operation& operation) {
  Operation asked = operation;
  asked.late = false;
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
  if (!cached_.insert_from_storage(fetch.anchor, fetch.end())) storage_.states_back.push_back(1);
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

bool SglangOracle::end_write(const SglangStorage::Failing& failing) {
  const SglangPrefixMap::Write* const write = cached_.end_write();
  if (write == nullptr) return false;
  storage_.put(write->end, write->begin, write->with_state, failing);
  return true;
}

Result<Reply> SglangOracle::end_storage_copy(const Operation& operation) {
  SglangStorage::Failing failing;
  for (std::int64_t rank = 0; rank < storage_.rank_count(); ++rank)
    if (operation.verb == Verb::fail && (operation.rank < 0 || operation.rank == rank))
      failing.insert(rank);
  if (operation.rank >= storage_.rank_count())
    return fail(fmt::format("there is no rank {} here", operation.rank));
  const std::string from = operation.from.exists() ? operation.from.text() : "";
  const std::string way = operation.tier.text() + "<" + from;
  if (way != "disk<" && way != "host<disk")
    return fail(fmt::format("no copy goes to {} from `{}`", operation.tier.text(), from));
  const bool ended = from.empty() ? end_write(failing) : storage_.end_read(failing);
  return Reply().set(ReplyField::n, ended ? 1 : 0);
}

/// Everything in flight ends well, and the server hears of it.
void SglangOracle::drain() {
  do {
    while (cached_.land_backup() || cached_.land_load()) continue;
    while (end_write({}) || storage_.end_read({})) continue;
    settle_all();
  } while (!storage_.is_quiet() || cached_.has_copies());
}

}  // namespace lockstep::reference
