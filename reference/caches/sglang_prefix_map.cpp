#include "reference/caches/sglang_prefix_map.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

#include "reference/base/require.hpp"

namespace lockstep::reference {

Prefix Prefix::first(std::int64_t count) const {
  require(count <= size(), "a prefix is not longer than its sequence");
  return {salt, tokens.prefix(static_cast<std::uint32_t>(count))};
}

std::strong_ordering Prefix::operator<=>(const Prefix& other) const {
  if (salt != other.salt) return salt <=> other.salt;
  const std::uint32_t shorter = std::min(tokens.size(), other.tokens.size());
  const std::uint32_t common = tokens.common(0, other.tokens, 0, shorter);
  if (common < shorter) return tokens[common] <=> other.tokens[common];
  return tokens.size() <=> other.tokens.size();
}

// --- Looking ------------------------------------------------------------------------------------

/// Tokens that two sequences share from their starts, in whole pages: part of a page never matches.
std::int64_t SglangPrefixMap::shared(const Prefix& a, const Prefix& b) const {
  if (a.salt != b.salt) return 0;
  const std::uint32_t shorter = std::min(a.tokens.size(), b.tokens.size());
  return a.tokens.common(0, b.tokens, 0, shorter) / options_.page * options_.page;
}

bool SglangPrefixMap::is_prefix(const Prefix& shorter, const Prefix& longer) const {
  return shorter.size() <= longer.size() && shared(shorter, longer) == shorter.size();
}

std::int64_t SglangPrefixMap::longest_shared(const Prefix& key) const {
  const auto after = records_.lower_bound(key);
  std::int64_t longest = 0;
  if (after != records_.end()) longest = shared(key, after->first);
  if (after != records_.begin()) longest = std::max(longest, shared(key, std::prev(after)->first));
  return longest;
}

/// The stored prefixes of `key`, shortest first; `key` itself is one of them where it is stored.
std::vector<SglangPrefixMap::Entry> SglangPrefixMap::path_of(const Prefix& key) {
  std::vector<Entry> path;
  for (Entry entry = records_.upper_bound(key); entry != records_.begin();) {
    --entry;
    if (shared(entry->first, key) == 0) break;  // nor does anything that sorts before it
    if (is_prefix(entry->first, key)) path.push_back(entry);
  }
  std::ranges::reverse(path);
  return path;
}

std::int64_t SglangPrefixMap::edge_size(Map::const_iterator entry) const {
  const Prefix& end = entry->first;
  while (entry != records_.begin()) {
    --entry;
    if (is_prefix(entry->first, end)) return end.size() - entry->first.size();
    if (shared(entry->first, end) == 0) break;
  }
  return end.size();
}

/// Extensions that are nobody else's: skips, after each child, the child's own extensions.
std::size_t SglangPrefixMap::child_count(Entry entry) {
  std::size_t count = 0;
  Entry child = std::next(entry);
  while (child != records_.end() && is_prefix(entry->first, child->first)) {
    ++count;
    Entry next = std::next(child);
    while (next != records_.end() && is_prefix(child->first, next->first)) ++next;
    child = next;
  }
  return count;
}

/// [1.1] A device leaf: no extension and no lock. It need not have a state.
bool SglangPrefixMap::is_leaf(Entry entry) {
  if (entry->second.full_lock != 0 || entry->second.state_lock != 0) return false;
  if (!entry->second.on_device) return false;
  for (Entry next = std::next(entry);
       next != records_.end() && is_prefix(entry->first, next->first); ++next)
    if (next->second.on_device) return false;
  return true;
}

std::int64_t SglangPrefixMap::locked_kv() const {
  std::int64_t tokens = 0;
  for (auto entry = records_.begin(); entry != records_.end(); ++entry)
    if (entry->second.full_lock > 0 && entry->second.on_device) tokens += edge_size(entry);
  return tokens;
}

std::int64_t SglangPrefixMap::locked_states() const {
  return std::ranges::count_if(records_, [](const auto& entry) {
    return entry.second.state.exists() && entry.second.state_lock > 0;
  });
}

// --- Remembering --------------------------------------------------------------------------------

/// [1.3] One more stored prefix, on the edge of the shortest extension of it. The state stays with
/// the longer one: it stands for tokens that the shorter one lacks.
void SglangPrefixMap::split(const Prefix& end) {
  // Extensions follow where their prefix would stand, and the child is the shortest of them.
  Record& child = records_.lower_bound(end)->second;
  Record parent;
  parent.full_lock = child.full_lock;
  parent.on_device = child.on_device;
  parent.on_host = child.on_host;
  parent.host_lock = child.host_lock;
  parent.backup = child.backup;
  parent.load = child.load;
  parent.inserts = child.inserts;
  parent.last_access = read_clock();
  child.last_access = read_clock();
  const Entry entry = records_.emplace(end, parent).first;
  note_both_tiers(entry->second);
  if (has_windows()) split_window(entry, std::next(entry));
  if (options_.rules.paths_are_used) use_state(child);
}

void SglangPrefixMap::use_states(const std::vector<Entry>& path) {
  for (const Entry entry : path) use_state(entry->second);
}

SglangPrefixMap::Match SglangPrefixMap::match(const Prefix& key) {
  Match match;
  if (key.empty()) return match;
  match.full = longest_shared(key);
  if (match.full > 0 && !contains(key.first(match.full))) split(key.first(match.full));

  std::vector<Entry> path = path_of(key);
  // By windows, without a gap: of the device, and of either tier.
  std::int64_t covered = std::numeric_limits<std::int64_t>::max(), covered_on_either = covered;
  std::int64_t size = 0;
  for (const Entry entry : path) {
    const std::int64_t edge = entry->first.size() - size;
    const auto count = [&](std::int64_t& tokens, bool is_there) {
      if (has_windows() && !is_there) tokens = 0;
      if (tokens < options_.reach && is_there) tokens += edge;
    };
    count(covered, entry->second.has_window);
    count(covered_on_either, entry->second.has_window || entry->second.host_window);
    size = entry->first.size();
    if (can_be_matched(entry) && covered >= options_.reach) match.prefix = size;
    if ((can_be_matched(entry) || entry->second.host_state) && covered_on_either >= options_.reach)
      match.best = size;
  }
  while (!path.empty() && path.back()->first.size() > match.best) path.pop_back();
  if (path.empty()) return match;
  match.told = match.prefix;
  for (const Entry entry : path)
    if (entry->first.size() > match.prefix && entry->second.on_host) match.told += edge_size(entry);

  // Only this state counts as used; the prefixes below it are each a hair older than the next.
  if (options_.rules.paths_are_used) use_states(path);
  if (can_be_matched(path.back())) use_state(path.back()->second);
  if (has_windows()) use_windows(path.back()->first);
  std::int64_t time = read_clock();
  for (auto entry = path.rbegin(); entry != path.rend(); ++entry)
    (*entry)->second.last_access = time--;
  return match;
}

SglangPrefixMap::Inserted SglangPrefixMap::insert(const Prefix& key, StateSlot state,
                                                  std::int64_t prev, std::int64_t before) {
  if (key.empty()) return {};
  require(state.exists() == options_.has_states, "an insert brings a state where there are states");
  if (has_host()) return insert_and_back_up(key, state, prev, before, 0);
  read_clock();  // the root's touch
  const std::vector<Entry> path = path_of(key);
  for (const Entry entry : path) entry->second.last_access = read_clock();
  if (options_.rules.paths_are_used) use_states(path);
  const std::int64_t stored = longest_shared(key);
  if (stored > (path.empty() ? 0 : path.back()->first.size())) {
    read_clock();  // the touch of the one that is split, which the split repeats
    split(key.first(stored));
  }

  Inserted inserted{.exist = false, .duplicates = std::max<std::int64_t>(0, stored - prev)};
  kv_ += key.size() - stored;
  inserted.exist = store(key, state, stored < key.size());
  return inserted;
}

/// The end of an insert's key. Returns whether it was there.
bool SglangPrefixMap::store(const Prefix& key, StateSlot state, bool is_new) {
  Record& end = records_[key];
  end.last_access = read_clock();
  if (!is_new && (!options_.has_states || end.state.exists())) {
    if (options_.rules.existing_end_is_used) use_state(end);
    return true;
  }
  end.state = state;  // a new prefix, or a tombstone that gets a state again
  use_state(end);
  cap_states(key);
  return false;
}

/// [1.6] The shallowest states beyond the cap go, but not the tail's, a fork's or a locked one.
void SglangPrefixMap::cap_states(const Prefix& tail) {
  if (options_.path_cap < 0) return;
  std::vector<Entry> path = path_of(tail);
  std::erase_if(path, [](Entry entry) { return !entry->second.state.exists(); });
  std::int64_t excess = static_cast<std::int64_t>(path.size()) - options_.path_cap;
  Evicted unreported;
  for (const Entry entry : path) {
    if (excess <= 0 || entry->first == tail) return;
    if (entry->second.state_lock > 0 || child_count(entry) != 1) continue;
    if (has_host() && is_leaf(entry)) continue;
    free_state(entry->second, unreported);
    spare_no_more(entry->second);
    --excess;
  }
}

// --- Locking ------------------------------------------------------------------------------------

void SglangPrefixMap::lock(const Prefix& end, bool with_state) {
  if (end.empty()) return;
  require(contains(end), "a lock is taken on a stored prefix");
  for (const Entry entry : path_of(end)) ++entry->second.full_lock;
  Record& last = records_.at(end);
  if (with_state && (options_.rules.tombstones_lock || last.state.exists())) ++last.state_lock;
}

void SglangPrefixMap::unlock(const Prefix& end, bool with_state) {
  if (end.empty()) return;
  require(contains(end), "a locked prefix stays stored");
  for (const Entry entry : path_of(end)) {
    require(entry->second.full_lock > 0, "what is unlocked was locked");
    --entry->second.full_lock;
  }
  Record& last = records_.at(end);
  if (!with_state || (!options_.rules.tombstones_lock && !last.state.exists())) return;
  require(last.state_lock > 0, "a state that is unlocked was locked");
  --last.state_lock;
}

// --- Forgetting ---------------------------------------------------------------------------------

void SglangPrefixMap::free_state(Record& record, Evicted& evicted) {
  if (!record.state.exists()) return;
  free_slots_.push_back(record.state);
  record.state = StateSlot::none();
  ++evicted.states;
}

/// Its prefixes stay, even one that is now a tombstone without extensions; older versions drop that
/// one as well.
bool SglangPrefixMap::drop(Entry leaf, Evicted& evicted) {
  if (options_.backs_up_late && !leaf->second.on_host) save(leaf);
  if (leaf->second.on_host) {
    demote(leaf, evicted);
    return true;
  }
  if (has_host() && !drop_extensions(leaf->first)) return false;
  const std::int64_t tokens = edge_size(leaf);
  const std::vector<Entry> path = path_of(leaf->first);
  kv_ -= tokens;
  evicted.kv += tokens;
  free_state(leaf->second, evicted);
  if (leaf->second.host_state) --host_states_;
  take_window(leaf, evicted);
  Evicted unreported;
  forget_host_window(leaf, unreported);
  records_.erase(leaf);
  if (!options_.rules.bare_parents_go || path.size() < 2) return true;
  const Entry parent = path[path.size() - 2];
  if (is_leaf(parent) && !parent->second.state.exists()) drop(parent, evicted);
  return true;
}

SglangPrefixMap::Entry SglangPrefixMap::oldest_leaf(const std::set<Prefix>& but) {
  Entry oldest = records_.end();
  for (Entry entry = records_.begin(); entry != records_.end(); ++entry) {
    const bool older =
        oldest == records_.end() || entry->second.last_access < oldest->second.last_access;
    if (older && is_leaf(entry) && !but.contains(entry->first)) oldest = entry;
  }
  return oldest;
}

SglangPrefixMap::Entry SglangPrefixMap::oldest_unlocked_state(const std::set<Prefix>& but) {
  Entry oldest = records_.end();
  for (Entry entry = records_.begin(); entry != records_.end(); ++entry) {
    if (!entry->second.state.exists() || entry->second.state_lock > 0) continue;
    if (but.contains(entry->first)) continue;
    if (oldest == records_.end() || entry->second.state_use < oldest->second.state_use)
      oldest = entry;
  }
  return oldest;
}

SglangPrefixMap::Evicted SglangPrefixMap::evict(std::int64_t kv, std::int64_t states,
                                                std::int64_t window) {
  Evicted evicted;
  std::set<Prefix> stay;
  while (evicted.kv < kv) {  // FULL: leaves, by access
    const Entry leaf = oldest_leaf(stay);
    if (leaf == records_.end()) break;
    if (!drop(leaf, evicted)) stay.insert(leaf->first);
  }
  evict_windows(window, evicted);
  stay.clear();
  while (evicted.states < states) {  // MAMBA: states, by use
    const Entry victim = oldest_unlocked_state(stay);
    if (victim == records_.end()) break;
    if (is_leaf(victim)) {
      if (!drop(victim, evicted)) stay.insert(victim->first);
    } else {
      if (options_.backs_up_late) save_state(victim);
      free_state(victim->second, evicted);  // a tombstone remains
      spare_no_more(victim->second);
    }
  }
  return evicted;
}

}  // namespace lockstep::reference
