// The content of SGLang's radix tree, without the tree: a sorted map from the prefix at which a
// node ends to the node's record. Numbers in brackets are rules of reference/caches/sglang.md.
//
//   here                                          in the tree
//   a stored prefix                               a node, named by its end
//   its size less its longest stored prefix's     the length of the node's edge
//   the stored prefixes of a key                  the key's path
//   the stored extensions of a prefix             the node's subtree
//   storing a prefix inside an edge               a split
//
// Two facts about a sorted map of sequences carry every search: a key's prefixes sort before it,
// the shorter ones first; and nothing stored shares more with a key than the key's neighbours do.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "reference/base/ids.hpp"
#include "reference/protocol/operation.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::reference {

/// Tokens from the start of a prompt. A salt (empty where there is none) keeps equal tokens apart.
/// The prefixes of a prompt share its storage, because a long one is stored at each chunk's end.
struct Prefix {
  std::string salt;
  Tokens tokens;

  std::int64_t size() const { return tokens.size(); }
  bool empty() const { return tokens.empty(); }
  Prefix first(std::int64_t count) const;
  bool operator==(const Prefix& other) const = default;
  std::strong_ordering operator<=>(const Prefix& other) const;  ///< by salt, then token by token
};

inline Prefix prefix_of(const Operation& operation) {
  return {operation.salt.text(), operation.tokens};
}

class SglangPrefixMap {
 public:
  /// Rules in which older versions differ [1.10, 1.11]. The defaults are 0.5.23's.
  struct Rules {
    bool paths_are_used = false;       ///< match and insert use each state on the key's path,
                                       ///< shortest first, and a split that of its longer half
    bool existing_end_is_used = true;  ///< an insert uses the state that its key has already
    bool bare_parents_go = false;      ///< a prefix left without state and extensions is dropped
    bool tombstones_lock = true;       ///< a state lock on a tombstone counts
  };
  struct Options {
    std::int64_t page = 1;
    bool has_states = true;      ///< false: plain radix, every stored prefix can be used
    std::int64_t path_cap = -1;  ///< states on a path, softly; -1: no cap
    std::int64_t host_kv = 0;    ///< KV tokens of the host; 0: there is none [1.13]
    std::int64_t host_states = 0;
    std::int64_t host_window = 0;  ///< KV tokens of the windows on the host [1.16]
    std::int64_t inserts = 1;      ///< over a prefix, the last of which backs it up
    bool backs_up_late = false;    ///< not for an insert, but when it leaves the device
    bool has_storage = false;      ///< behind the host [1.14]
    std::int64_t reach = 0;        ///< tokens that a window has before a token; 0: none [1.15]
    Rules rules{};
  };
  /// Evicted states go to the end of `free_slots`; whoever inserts took a slot from its front.
  SglangPrefixMap(const Options& options, std::deque<StateSlot>& free_slots)
      : options_(options), free_slots_(free_slots) {}

  struct Match {
    std::int64_t full = 0;    ///< tokens whose KV is stored
    std::int64_t prefix = 0;  ///< tokens of the longest stored prefix that can be used
    std::int64_t best = 0;    ///< the same, with states and windows of the host as well
    std::int64_t told = 0;    ///< `prefix`, and tokens between it and `best` with KV on the host
  };
  struct Inserted {
    bool exist = true;            ///< the key was stored, with a state where there are states
    std::int64_t duplicates = 0;  ///< tokens stored already that the caller brought KV for
  };
  struct Evicted {
    std::int64_t kv = 0;
    std::int64_t states = 0;
    std::int64_t window = 0;
  };

  // Every key but that of whole_pages() consists of whole pages.

  /// [1.2] without copy-on-write.
  Match match(const Prefix& key);
  /// [1.4] `state` goes to the map unless the reply says exist. The caller has inserted the first
  /// `before` tokens earlier: what ends among them is not backed up again.
  Inserted insert(const Prefix& key, StateSlot state, std::int64_t prev, std::int64_t before = 0);
  /// [1.5] `end` is stored or empty.
  void lock(const Prefix& end, bool with_state);
  void unlock(const Prefix& end, bool with_state);
  /// [1.6] Until that much was freed or nothing is left that may go.
  Evicted evict(std::int64_t kv, std::int64_t states, std::int64_t window = 0);

  // Sliding windows [1.15].
  bool has_windows() const { return options_.reach != 0; }
  /// The same as insert(); whoever inserts has the window's KV of tokens from `evicted` on.
  Inserted insert_with_window(const Prefix& key, StateSlot state, std::int64_t prev,
                              std::int64_t before, std::int64_t evicted);
  std::int64_t lock_window(const Prefix& end);  ///< returns the first token that is locked
  void unlock_window(const Prefix& end, std::int64_t begin);
  void unlock_state(const Prefix& end);  ///< takes back that part of a lock
  std::int64_t window_kv();              ///< tokens stored with their window
  std::int64_t locked_window_kv();

  // The host [1.13].
  bool has_host() const { return options_.host_kv != 0; }
  std::int64_t host_kv_free() const { return options_.host_kv - host_kv_; }
  std::int64_t host_states_free() const { return options_.host_states - host_states_; }
  std::int64_t host_window_free() const { return options_.host_window - host_window_kv_; }
  Evicted evict_host(std::int64_t kv, std::int64_t states, std::int64_t window = 0);
  /// Tokens of the stored prefixes of `end`, itself included, that are not on the device.
  std::int64_t missing(const Prefix& end);
  /// Tokens of the window before its end that the host alone has [1.16].
  std::int64_t missing_window(const Prefix& end);
  bool has_state(const Prefix& end) const { return records_.at(end).state.exists(); }
  /// Whether another load brings part of what its load would bring beside KV, where prefixes are
  /// backed up late.
  bool is_loading(const Prefix& end);
  std::int64_t lock_host(const Prefix& end);  ///< returns where the locked edge begins
  void unlock_host(const Prefix& end, std::int64_t begin);
  std::int64_t lock_host_window(const Prefix& end);  ///< returns the first token that is locked
  void unlock_host_window(const Prefix& end, std::int64_t begin);
  /// All locks that a load holds until it is settled: on its end and its window, on both tiers.
  struct LoadLocks {
    std::int64_t host = 0, window = 0, host_window = 0;
  };
  LoadLocks lock_for_load(const Prefix& end);
  void unlock_load(const Prefix& end, const LoadLocks& locks);
  /// Brings `end` and its prefixes to the device, with a state in that slot unless it has one. The
  /// load keeps these locks.
  void load(const Prefix& end, StateSlot state, const LoadLocks& locks);
  bool land_backup() { return land(backups_); }
  bool land_load() { return land(loads_); }
  void land_loads(std::int64_t number);  ///< up to that one
  std::int64_t newest_load() const { return loads_.empty() ? 0 : loads_.back().number; }
  std::int64_t settle();
  bool has_copies() const { return !backups_.empty() || !loads_.empty() || !writes_.empty(); }

  // The storage [1.14].
  /// A write of a prefix's edge, which begins after `begin` tokens. It holds a lock on the host.
  struct Write {
    Prefix end;
    std::int64_t begin;
    bool with_state;
    bool ended = false;
  };
  bool has_storage() const { return options_.has_storage; }
  bool is_on_host(const Prefix& end) const { return records_.at(end).on_host; }
  const Write* end_write();  ///< the oldest one that has not ended; null: there is none
  std::int64_t ended_writes() const;
  void settle_write();  ///< the oldest one, which has ended
  /// Takes so many slots of the host for what is no prefix's, or gives them back.
  void take_on_host(std::int64_t kv, std::int64_t states) {
    host_kv_ += kv;
    host_states_ += states;
  }
  /// Gives `end` and its prefixes beyond the anchor KV on the host, and `end` a state there, in
  /// slots that were taken before. KV that is not used is free again; whether the state is used is
  /// the answer.
  bool insert_from_storage(const Prefix& anchor, const Prefix& end);

  Prefix whole_pages(const Prefix& key) const {
    return key.first(key.size() / options_.page * options_.page);
  }
  bool contains(const Prefix& end) const { return records_.contains(end); }
  /// The number of the key's tokens that are stored on the device. No effect.
  std::int64_t shared_on_device(const Prefix& key);
  /// The number of the key's tokens that are stored. No effect.
  std::int64_t longest_shared(const Prefix& key) const;

  std::int64_t kv() const { return kv_; }  ///< tokens stored on the device
  std::int64_t locked_kv() const;
  std::int64_t locked_states() const;

 private:
  struct Record {
    std::int64_t full_lock = 0;
    std::int64_t state_lock = 0;
    std::int64_t last_access = 0;  ///< t: clock * 2^20 - distance from the matched prefix
    StateSlot state;               ///< none: a tombstone
    std::int64_t state_use = 0;    ///< sequence number of the state's last use
    bool on_device = true;         ///< its KV; otherwise the host alone has it
    bool on_host = false;
    bool host_state = false;
    std::int64_t host_lock = 0, host_state_lock = 0;
    std::int64_t host_use = 0;  ///< number with which its host state became the newest; 0: spared
    std::int64_t backup = 0;    ///< number of a backup that is not settled
    std::int64_t load = 0;      ///< number of a load of its KV that is not settled, backing up late
    std::int64_t inserts = 0;   ///< over it, each request's once
    bool has_window = false;    ///< the window's KV of its edge
    std::int64_t window_lock = 0;
    bool host_window = false;
    std::int64_t host_window_lock = 0;
    std::int64_t twice = 0;  ///< number with which its KV came to be on both tiers; 0: forgotten
  };
  /// A copy that is not settled.
  struct Copy {
    std::int64_t number;
    Prefix end;
    LoadLocks locks{};  ///< of a backup: that of the window alone
    bool landed = false;
  };
  using Map = std::map<Prefix, Record>;
  using Entry = Map::iterator;
  static constexpr std::int64_t kTick = 1 << 20;  // more than any path has nodes

  std::int64_t read_clock() { return ++clock_ * kTick; }
  std::int64_t shared(const Prefix& a, const Prefix& b) const;
  bool is_prefix(const Prefix& shorter, const Prefix& longer) const;
  std::vector<Entry> path_of(const Prefix& key);
  std::int64_t edge_size(Map::const_iterator entry) const;
  std::size_t child_count(Entry entry);
  bool can_be_matched(Entry entry) const {
    return !options_.has_states || entry->second.state.exists();
  }
  bool is_leaf(Entry entry);

  void split(const Prefix& end);
  void use_state(Record& record) { record.state_use = ++uses_; }
  void use_states(const std::vector<Entry>& path);
  void cap_states(const Prefix& tail);
  void free_state(Record& record, Evicted& evicted);
  bool drop(Entry leaf, Evicted& evicted);  ///< false: it has to stay
  Inserted insert_and_back_up(const Prefix& key, StateSlot state, std::int64_t prev,
                              std::int64_t before, std::int64_t evicted);
  bool store(const Prefix& key, StateSlot state, bool is_new);
  void refill(const Prefix& end, std::int64_t evicted);
  void give_new_window(const Prefix& key, std::int64_t stored, std::int64_t evicted);
  void give_window(const Prefix& end);
  std::vector<Entry> window_of(const Prefix& end);
  std::vector<Entry> unsaved_window(const Prefix& end);
  std::int64_t edge_sum(const std::vector<Entry>& entries) const;
  void spare_window_no_more(Entry entry);
  void forget_host_window(Entry entry, Evicted& evicted);
  void evict_host_windows(std::int64_t window, Evicted& evicted);
  void save_window(Entry entry);
  void split_window(Entry parent, Entry child);
  void take_window(Entry entry, Evicted& evicted);
  void use_windows(const Prefix& end);
  void evict_windows(std::int64_t window, Evicted& evicted);
  void count_insert(Entry entry);
  void back_up(const Prefix& end);
  void save(Entry entry);
  void save_state(Entry entry);
  bool drop_extensions(const Prefix& end);
  void note_both_tiers(Record& record);
  void reclaim(std::int64_t kv, Evicted& evicted);
  bool queue_backup(Entry entry);
  void demote(Entry leaf, Evicted& evicted);
  void spare_no_more(Record& record);
  bool is_host_leaf(Entry entry);
  void drop_from_host(Entry leaf, Evicted& evicted);
  static bool land(std::deque<Copy>& copies);
  void write_to_storage(Entry entry);
  static bool is_host_locked(Entry entry);
  Entry oldest_leaf(const std::set<Prefix>& but);
  Entry oldest_unlocked_state(const std::set<Prefix>& but);

  Options options_;
  std::deque<StateSlot>& free_slots_;
  Map records_;
  std::int64_t kv_ = 0;
  std::int64_t clock_ = 0;
  std::int64_t uses_ = 0;
  std::list<Prefix> windows_;       // of prefixes with a window, the one used last at the front
  std::list<Prefix> host_windows_;  // likewise, of those with one on the host alone, not locked
  std::int64_t host_window_kv_ = 0;
  std::int64_t host_kv_ = 0;
  std::int64_t host_states_ = 0;
  std::int64_t copies_ = 0;
  std::deque<Copy> backups_, loads_;
  std::deque<Write> writes_;
};

// The storage behind the host [1.14]: a set of prefixes, the reader that brings them to the host,
// and the news that the scheduler hears. Only lengths move here: that each prefix's KV and state
// are its own is by definition.

/// A prefetch: tokens of `whole` beyond its anchor, which is a stored prefix or empty.
struct SglangFetch {
  Prefix anchor;
  std::int64_t host_begin = 0;  ///< where the anchor's locked edge begins
  Prefix whole;
  std::int64_t asked = 0;    ///< tokens that count for the quota
  std::int64_t length = 0;   ///< tokens beyond the anchor that are stored, later those with room
  bool has_room = false;     ///< slots of the host are taken for them and a state
  std::int64_t arrived = 0;  ///< of these tokens, as the scheduler has heard
  bool state_over = false, state_arrived = false;
  bool is_stopped = false;

  Prefix end() const { return whole.first(anchor.size() + length); }
};

class SglangStorage {
 public:
  struct News {
    std::int64_t fetch;
    std::optional<std::int64_t> arrived;
    std::optional<bool> state;
    bool over = false;
  };

  explicit SglangStorage(std::int64_t ranks) : ranks_(static_cast<std::size_t>(ranks)) {}
  std::int64_t rank_count() const { return std::ssize(ranks_); }

  /// Tokens of `whole` beyond the first `from` that each rank has stored without a gap, up to the
  /// last one at which each has a state.
  std::int64_t longest(const Prefix& whole, std::int64_t from) const;
  /// The ranks on which a copy comes to nothing.
  using Failing = std::set<std::int64_t>;
  /// The others store the KV of the tokens of `end` beyond `begin`, and perhaps its state.
  void put(const Prefix& end, std::int64_t begin, bool with_state, const Failing& failing);
  void clear();

  void read(std::int64_t fetch);
  bool end_read(const Failing& failing);

  std::map<std::int64_t, SglangFetch> fetches;  ///< by number
  std::deque<std::int64_t> looked_up;           ///< fetches of which the scheduler has not heard
  std::deque<News> news;
  std::deque<std::int64_t> kv_back, states_back;  ///< slots of the host that will be free
  std::int64_t occupied = 0;
  bool is_quiet() const {
    return looked_up.empty() && news.empty() && line_.empty() && kv_back.empty() &&
           states_back.empty();
  }

 private:
  struct Rank {
    std::set<Prefix> pages, states;
  };
  /// A read in flight, with the tokens or states that each rank has found when it began.
  struct Reading {
    bool of_state;
    std::vector<std::int64_t> found;
  };
  void go_on();
  void read_state();
  void over();

  std::vector<Rank> ranks_;
  std::deque<std::int64_t> line_;
  std::optional<Reading> reading_;
  std::set<std::int64_t> short_of_kv_;  ///< ranks on which the KV of the fetch did not all come
};

}  // namespace lockstep::reference
