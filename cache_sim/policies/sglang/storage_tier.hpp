// The storage behind SGLang's host tier: its pages, the writes to it and the prefetches from it
// (cache_controller.py's queues and threads). Rules: reference/caches/sglang.md, 1.14. A page is
// the KV of one token; it and a state lie in slots of the same LayerState as those of the other
// tiers.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "cache_sim/policies/pools.hpp"
#include "cache_sim/policies/sglang/sglang_rules.hpp"
#include "reference/base/ids.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

/// Names an exact prefix with its salt.
using PageKey = std::uint64_t;

/// A write that is not settled. It holds a lock on its node's copy on the host, which begins after
/// `host_begin` tokens.
struct StorageWrite {
  NodeIndex node;
  std::uint32_t host_begin;
  std::vector<PageKey> keys;  ///< of the tokens of the node's edge
  TierCopy slots;             ///< its state, where it has one, goes under the last key
  bool ended = false;
};

/// Reads path[start, start + size) into the host for a request that waits.
struct Prefetch {
  std::uint64_t asker;         ///< number of the request
  NodeIndex anchor;            ///< the path up to `start` ends there
  std::uint32_t anchor_begin;  ///< receipt of its lock; the root has none
  Tokens path;
  Name salt;
  std::uint32_t start;
  std::uint32_t asked;         ///< tokens beyond `start` that were looked up
  std::vector<PageKey> keys;   ///< of those tokens
  std::uint32_t size = 0;      ///< tokens that the storage has, with a state at their end
  std::uint32_t state_at = 0;  ///< the number of tokens at whose end the state is sought
  bool taken = false;          ///< the slots below are taken, and it goes to the reader
  KvRuns kv;
  StateSlot state;
  std::uint32_t completed = 0;                   ///< tokens that have come, as the scheduler knows
  bool state_ended = false, state_came = false;  ///< likewise
  bool stopped = false;
};
using PrefetchRef = std::shared_ptr<Prefetch>;

/// The reader's word to the scheduler.
struct PrefetchNews {
  PrefetchRef prefetch;
  std::optional<std::uint32_t> tokens;  ///< that have come
  std::optional<bool> state;            ///< whether it has come
  bool ended = false;
};

class StorageTier {
 public:
  /// A write that finds no room stores nothing.
  struct Room {
    std::int64_t kv, states;
  };
  /// Slots from these numbers on are its own.
  StorageTier(std::uint32_t first_kv, std::uint32_t first_state, Room room, std::int64_t ranks,
              LayerState& layers, const SglangRules& rules)
      : kv_(first_kv, room.kv, 1, layers),
        states_(first_state, room.states, layers),
        layers_(layers),
        rules_(rules),
        others_(static_cast<std::size_t>(ranks - 1)) {}

  /// The keys of path[begin, end), where a node or a prefetch begins at `begin`.
  std::vector<PageKey> keys_of(const Tokens& path, std::uint32_t begin, std::uint32_t end,
                               Name salt) const;
  /// The longest number of these pages that are stored on all ranks, with a state at their end.
  std::uint32_t longest(const std::vector<PageKey>& keys) const;

  /// Queues the write of these slots of the host.
  void write(StorageWrite write, const KvRuns& kv, StateSlot state);
  /// The ranks on which a copy fails: none, all, or one of them, by its number.
  static constexpr std::int64_t kNoRank = -1, kAllRanks = -2;
  std::int64_t rank_count() const { return 1 + std::ssize(others_); }

  /// Ends the oldest write; false where there is none.
  bool end_write(std::int64_t failing);
  /// Hands the prefetch to the reader, which reads one after the other, KV before the state.
  void read(PrefetchRef prefetch);
  /// Ends what the reader is about; false where it is idle.
  bool end_read(std::int64_t failing);
  /// Forgets all pages and states.
  void clear();

  bool is_quiet() const;

  std::deque<StorageWrite> writes;
  std::deque<PrefetchRef> looked_up;  ///< that the scheduler has not heard of
  std::deque<PrefetchNews> news;
  std::deque<PrefetchRef> to_read;  ///< the front one is being read
  // Slots of the host that go back to their pools at the settle after the next look at them.
  std::deque<KvRuns> released_kv;
  std::deque<StateSlot> released_states;
  std::int64_t occupied = 0;  ///< tokens that prefetches in flight have asked for

 private:
  /// The keys that another rank than the first one has stored. Its memory is not followed: it
  /// holds what the first one's holds wherever both have something.
  struct OtherRank {
    std::set<PageKey> pages, states;
  };
  struct Read {
    bool of_state = false;
    std::uint32_t tokens = 0;
    TierCopy slots;
    std::vector<std::uint32_t> of_others{};  ///< tokens, or states, that the other ranks read
    bool outlives_pages = false;             ///< its pages were forgotten meanwhile
  };

  bool fails_on(std::int64_t failing, std::size_t rank) const;
  std::vector<std::uint32_t> restorable(const std::vector<PageKey>& keys, std::size_t rank) const;
  void store(const StorageWrite& write, OtherRank& rank);
  void begin_kv();
  void begin_state();
  void spoil(const TierCopy& copy);
  void go_on();

  KvPool kv_;
  StatePool states_;
  LayerState& layers_;
  const SglangRules& rules_;
  std::map<PageKey, KvRun> pages_;
  std::map<PageKey, StateSlot> stored_states_;
  std::vector<OtherRank> others_;
  std::optional<Read> reading_;
  bool prefetch_has_kv_ = false;  ///< of the prefetch whose state is read: all ranks have its KV
};

}  // namespace lockstep::cache_sim
