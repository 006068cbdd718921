// Sliding windows in SGLang's radix cache [1.15]: of a stored prefix the map says whether the
// window's KV of its edge is stored as well, and of a request how many of its tokens the window has
// left behind. That a window's KV is that of its tokens is so by definition.

#include <algorithm>
#include <iterator>
#include <set>

#include "reference/base/require.hpp"
#include "reference/caches/sglang_oracle.hpp"
#include "reference/caches/sglang_prefix_map.hpp"

namespace lockstep::reference {

// --- The map ------------------------------------------------------------------------------------

void SglangPrefixMap::give_window(const Prefix& end) {
  records_.at(end).has_window = true;
  windows_.push_front(end);
  host_windows_.remove(end);
}

void SglangPrefixMap::take_window(Entry entry, Evicted& evicted) {
  if (!entry->second.has_window) return;
  entry->second.has_window = false;
  evicted.window += edge_size(entry);
  windows_.erase(std::ranges::find(windows_, entry->first));
  spare_window_no_more(entry);
}

/// Both halves have the window, and the shorter one goes right before the longer one.
void SglangPrefixMap::split_window(Entry parent, Entry child) {
  parent->second.window_lock = child->second.window_lock;
  parent->second.host_window_lock = child->second.host_window_lock;
  parent->second.host_window = child->second.host_window;
  const auto on_host = std::ranges::find(host_windows_, child->first);
  if (on_host != host_windows_.end()) host_windows_.insert(std::next(on_host), parent->first);
  if (!child->second.has_window) return;
  parent->second.has_window = true;
  const auto place = std::ranges::find(windows_, child->first);
  windows_.insert(std::next(place), parent->first);
}

/// The windows that end at most a window and a page before the end are used, the longest last.
void SglangPrefixMap::use_windows(const Prefix& end) {
  for (const Entry entry : path_of(end)) {
    if (!entry->second.has_window) continue;
    if (end.size() - entry->first.size() >= options_.reach + options_.page) continue;
    windows_.erase(std::ranges::find(windows_, entry->first));
    windows_.push_front(entry->first);
  }
}

/// A stored prefix without its window gets it from a request that has left `evicted` tokens behind.
void SglangPrefixMap::refill(const Prefix& end, std::int64_t evicted) {
  const Entry entry = records_.find(end);
  if (entry->second.has_window || evicted >= end.size()) return;
  if (evicted > end.size() - edge_size(entry)) split(end.first(evicted));
  give_window(end);
}

SglangPrefixMap::Inserted SglangPrefixMap::insert_with_window(const Prefix& key, StateSlot state,
                                                              std::int64_t prev,
                                                              std::int64_t before,
                                                              std::int64_t evicted) {
  if (key.empty()) return {};
  if (has_host()) return insert_and_back_up(key, state, prev, before, evicted);
  read_clock();  // the root's touch
  const std::int64_t stored = longest_shared(key);
  std::vector<std::int64_t> sizes;
  for (const Entry entry : path_of(key)) sizes.push_back(entry->first.size());
  if (stored > (sizes.empty() ? 0 : sizes.back())) sizes.push_back(stored);
  for (const std::int64_t size : sizes) {
    const std::int64_t time = read_clock();
    const Prefix end = key.first(size);
    if (contains(end))
      records_.at(end).last_access = time;
    else
      split(end);
    if (size > prev) refill(end, evicted);
  }
  kv_ += key.size() - stored;
  Inserted inserted{.exist = false, .duplicates = std::max<std::int64_t>(0, stored - prev)};
  if (stored == key.size()) {
    inserted.exist = store(key, state, false);
  } else {
    records_[key].last_access = read_clock();
    give_new_window(key, stored, evicted);
    store(key, state, true);
  }
  use_windows(key);
  return inserted;
}

/// The window of a key that is new beyond its first `stored` tokens.
void SglangPrefixMap::give_new_window(const Prefix& key, std::int64_t stored,
                                      std::int64_t evicted) {
  const std::int64_t live = std::max(stored, evicted);
  const std::int64_t most = (options_.reach + options_.page - 1) / options_.page * options_.page;
  if (live > stored && live < key.size()) split(key.first(live));
  if (key.size() - live > most) {  // so that a lock on the key holds one window
    split(key.first(key.size() - most));
    give_window(key.first(key.size() - most));
  }
  if (live < key.size()) give_window(key);
}

/// Locks the stored prefixes whose edges the window before `end` covers.
std::int64_t SglangPrefixMap::lock_window(const Prefix& end) {
  if (!has_windows() || end.empty()) return 0;
  std::vector<Entry> path = path_of(end);
  for (auto entry = path.rbegin(); entry != path.rend(); ++entry) {
    ++(*entry)->second.window_lock;
    const std::int64_t begin = (*entry)->first.size() - edge_size(*entry);
    if (end.size() - begin >= options_.reach) return begin;
  }
  return 0;
}

void SglangPrefixMap::unlock_window(const Prefix& end, std::int64_t begin) {
  if (!has_windows()) return;
  for (const Entry entry : path_of(end)) {
    if (entry->first.size() <= begin) continue;
    require(entry->second.window_lock > 0, "a window that is unlocked was locked");
    --entry->second.window_lock;
  }
}

void SglangPrefixMap::unlock_state(const Prefix& end) {
  --records_.at(end).state_lock;
}

std::int64_t SglangPrefixMap::window_kv() {
  std::int64_t tokens = 0;
  for (const Prefix& end : windows_) tokens += edge_size(records_.find(end));
  return tokens;
}

std::int64_t SglangPrefixMap::locked_window_kv() {
  std::int64_t tokens = 0;
  for (const Prefix& end : windows_)
    if (const Entry entry = records_.find(end); entry->second.window_lock > 0)
      tokens += edge_size(entry);
  return tokens;
}

/// The window used longest ago goes; with a leaf all, elsewhere the state as well.
void SglangPrefixMap::evict_windows(std::int64_t window, Evicted& evicted) {
  std::set<Prefix> stay;
  while (evicted.window < window) {
    const auto oldest = std::find_if(windows_.rbegin(), windows_.rend(), [&](const Prefix& end) {
      return records_.at(end).window_lock == 0 && !stay.contains(end);
    });
    if (oldest == windows_.rend()) return;
    const Entry victim = records_.find(*oldest);
    if (is_leaf(victim)) {
      if (!drop(victim, evicted)) stay.insert(victim->first);
      continue;
    }
    if (options_.backs_up_late) save_window(victim);
    take_window(victim, evicted);
    if (!victim->second.state.exists()) continue;
    free_state(victim->second, evicted);
    spare_no_more(victim->second);
  }
}

// --- On the host [1.16] -------------------------------------------------------------------------

/// The stored prefixes whose edges the window before `end` covers, the longest first.
std::vector<SglangPrefixMap::Entry> SglangPrefixMap::window_of(const Prefix& end) {
  std::vector<Entry> path = path_of(end);
  std::ranges::reverse(path);
  std::erase_if(path,
                [&](Entry entry) { return end.size() - entry->first.size() >= options_.reach; });
  return path;
}

std::int64_t SglangPrefixMap::edge_sum(const std::vector<Entry>& entries) const {
  std::int64_t tokens = 0;
  for (const Entry entry : entries) tokens += edge_size(entry);
  return tokens;
}

/// Those whose window the host lacks, up to the first one that has none on either tier or whose
/// backup is not settled.
std::vector<SglangPrefixMap::Entry> SglangPrefixMap::unsaved_window(const Prefix& end) {
  std::vector<Entry> unsaved;
  if (!has_windows()) return unsaved;
  for (const Entry entry : window_of(end)) {
    const Record& record = entry->second;
    if (record.backup != 0 || (!record.has_window && !record.host_window)) break;
    if (!record.host_window) unsaved.push_back(entry);
  }
  return unsaved;
}

std::int64_t SglangPrefixMap::missing_window(const Prefix& end) {
  std::int64_t tokens = 0;
  if (!has_windows()) return tokens;
  for (const Entry entry : window_of(end))
    if (!entry->second.has_window) tokens += edge_size(entry);
  return tokens;
}

bool SglangPrefixMap::is_loading(const Prefix& end) {
  if (!has_state(end) && records_.at(end).load != 0) return true;
  if (!has_windows()) return false;
  const std::vector<Entry> window = window_of(end);
  return std::ranges::any_of(
      window, [](Entry entry) { return !entry->second.has_window && entry->second.load != 0; });
}

/// The device no longer has the window, so the host may evict its own.
void SglangPrefixMap::spare_window_no_more(Entry entry) {
  const Record& record = entry->second;
  if (record.host_window && !record.has_window && record.host_window_lock == 0)
    host_windows_.push_front(entry->first);
}

void SglangPrefixMap::forget_host_window(Entry entry, Evicted& evicted) {
  if (!entry->second.host_window) return;
  entry->second.host_window = false;
  host_window_kv_ -= edge_size(entry);
  evicted.window += edge_size(entry);
  host_windows_.remove(entry->first);
}

/// A state is of no use without the window before it. (0.5.23 takes one that is being copied, too.)
void SglangPrefixMap::evict_host_windows(std::int64_t window, Evicted& evicted) {
  while (evicted.window < window) {
    const auto oldest =
        std::find_if(host_windows_.rbegin(), host_windows_.rend(),
                     [&](const Prefix& prefix) { return records_.at(prefix).backup == 0; });
    if (oldest == host_windows_.rend()) return;
    const Entry victim = records_.find(*oldest);
    if (is_host_leaf(victim)) {
      drop_from_host(victim, evicted);
      continue;
    }
    forget_host_window(victim, evicted);
    if (!victim->second.host_state) continue;
    victim->second.host_state = false;
    victim->second.host_use = 0;
    --host_states_;
    ++evicted.states;
  }
}

std::int64_t SglangPrefixMap::lock_host_window(const Prefix& end) {
  std::int64_t begin = 0;
  if (!has_windows()) return begin;
  for (const Entry entry : window_of(end)) {
    if (entry->second.host_window_lock++ == 0) host_windows_.remove(entry->first);
    begin = entry->first.size() - edge_size(entry);
  }
  return begin;
}

void SglangPrefixMap::unlock_host_window(const Prefix& end, std::int64_t begin) {
  if (!has_windows()) return;
  std::vector<Entry> path = path_of(end);
  for (auto entry = path.rbegin(); entry != path.rend(); ++entry) {
    if ((*entry)->first.size() <= begin) break;
    --(*entry)->second.host_window_lock;
    spare_window_no_more(*entry);
  }
}

/// Saves an inner prefix whose window is about to go, unless the host has its KV or its window.
void SglangPrefixMap::save_window(Entry entry) {
  if (entry->second.on_host || entry->second.host_window) return;
  const std::int64_t needed = edge_sum(unsaved_window(entry->first));
  if (host_window_free() < needed) evict_host(0, 0, needed);
  save(entry);
}

// --- Requests -----------------------------------------------------------------------------------

std::int64_t SglangOracle::window_free() {
  std::int64_t total = config_.number("window_kv");
  if (total == 0) total = config_.kv_tokens;
  std::int64_t used = cached_.window_kv();
  for (const auto& [name, request] : requests_)
    used += request.allocated - std::max(request.protected_size, request.window_evicted);
  return whole_pages(total) - used;
}

Result<void> SglangOracle::check_windows(const Operation& operation) const {
  if (!cached_.has_windows()) return {};
  if (!operation.drafts.empty()) return fail("drafts: there is no speculation with windows");
  if (operation.external > 0) return fail("external: there are no transfers of windows");
  return {};
}

/// The request gives back the window's KV that its token `last` no longer sees, unless that is less
/// than `interval` tokens.
void SglangOracle::slide(Request& request, std::int64_t last, std::int64_t interval) const {
  const std::int64_t reach = config_.number("window") - 1;
  if (!cached_.has_windows() || last - reach < request.window_evicted + interval) return;
  request.window_evicted = std::max(request.window_evicted, request.protected_size);
  std::int64_t from = last - up_to_whole_pages(std::max(reach, config_.page));
  if (request.latest.length > 0) from = std::min(from, request.latest.length - reach);
  request.window_evicted = whole_pages(std::max(request.window_evicted, from));
}

/// The scheduler's part in a decode step: it knows the tokens whose results are there, and the one
/// that the last of them sampled.
void SglangOracle::slide_for_decoding(Request& request) {
  const std::int64_t reach = config_.number("window") - 1;
  const std::int64_t last = std::max(request.committed() + 1, request.prefilled) - 1;
  if (request.decoded > 0 &&
      last - reach >= request.window_evicted + config_.number("window_interval"))
    slide(request, last, 1);
  const bool is_past = request.decoded >= reach && config_.number("window_release") != 0;
  if (!is_past || request.window_released || request.protected_size == 0) return;
  if (request.protected_size - request.window_locked < reach) return;
  const Prefix prefix = request.known.first(request.protected_size);
  cached_.unlock_window(prefix, request.window_locked);
  if (request.state_locked && has_states_) cached_.unlock_state(prefix);
  request.state_locked = false;
  request.window_released = true;
}

/// Several decode steps at once: room for all of them is made first, and the steps take it.
bool SglangOracle::has_room_for_steps(const Request& request, std::int64_t end, Evicted& evicted) {
  const std::int64_t page = config_.page;
  const std::int64_t sought = up_to_whole_pages(page == 1 ? end : end - 1) - request.allocated;
  make_kv_free(page == 1 ? sought : sought + page, evicted);
  return has_room(up_to_whole_pages(end) - request.allocated);
}

/// The length of what is stored of `size` tokens: no more than the KV that the match found without
/// a window, which has it now.
std::int64_t SglangOracle::cut_at_branch(const Request& request, std::int64_t size) const {
  const bool is_cut = cached_.has_windows() && !has_states_ &&
                      request.branch > request.protected_size && request.branch <= size;
  return is_cut ? request.branch : size;
}

}  // namespace lockstep::reference
