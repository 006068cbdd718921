// The host tier of SGLang's hybrid cache, beside the tree: for each node its copy on the host, and
// the copies in flight. Rules: reference/caches/sglang.md, 1.13 and 1.16. A host slot is a slot of
// the same LayerState with a number after those of the device.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cache_sim/policies/pools.hpp"
#include "cache_sim/policies/sglang/sglang_options.hpp"
#include "cache_sim/policies/sglang/storage_tier.hpp"
#include "reference/base/ids.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// A node's copy on the host.
struct HostNode {
  KvRuns kv;        ///< one slot per token of the edge; empty: not backed up
  KvRuns window;    ///< likewise, of the sliding windows' KV
  StateSlot state;  ///< none: no state on the host
  std::uint32_t kv_lock = 0, state_lock = 0, window_lock = 0;
  std::uint64_t backup = 0;     ///< the backup of it that is not settled; 0: none
  std::uint64_t load = 0;       ///< write_back: the load of its KV that is not settled; 0: none
  std::uint32_t inserts = 0;    ///< over it, each request's once
  std::uint32_t children = 0;   ///< nodes below it, on whichever tier
  std::uint64_t state_use = 0;  ///< place in the list of host states; 0: not listed
  std::uint64_t leaf_use = 0;   ///< place in the list of host leaves; 0: not listed
  std::uint64_t twice_use = 0;  ///< place in the list of KV on both tiers; 0: not listed
  std::optional<std::list<NodeIndex>::iterator> window_place;  ///< in the list of host windows
};

/// A copy that is not settled. It holds a lock on its node's path, window and state; a load holds
/// one on the node's copies on the host, too. Locks begin after so many tokens.
struct CopyInFlight {
  std::uint64_t id;
  NodeIndex node;
  TierCopy slots;
  std::uint32_t host_begin = 0;
  std::uint32_t window_begin = 0, host_window_begin = 0;
  std::int64_t kv_tokens = 0;  ///< without those of the windows
  bool landed = false;
};

struct HostTier {
  /// The tokens of `window_kv` have slots after those of `kv_tokens`.
  HostTier(std::uint32_t first_kv, std::int64_t kv_tokens, std::int64_t window_kv,
           std::uint32_t first_state, std::int64_t state_slots, WritePolicy policy,
           LayerState& layers)
      : policy(policy),
        layers(layers),
        kv(first_kv, kv_tokens, 1, layers),
        windows(first_kv + static_cast<std::uint32_t>(kv_tokens), window_kv, 1, layers),
        states(first_state, state_slots, layers) {}

  const WritePolicy policy;
  LayerState& layers;
  KvPool kv;
  KvPool windows;
  StatePool states;
  std::vector<HostNode> nodes;  ///< by node of the tree
  // One stream for each direction: copies land in the order in which they were queued.
  std::deque<CopyInFlight> backups, loads;
  SnapshotHost::Copied to_host, to_device;  ///< queued so far
  std::uint64_t copies = 0;                 ///< so many were queued: the id of the newest
  std::uint64_t uses = 0;                   ///< of host states, and of KV on both tiers
  // Candidates of host eviction, the oldest first: leaves by access time, states by their use.
  std::map<std::uint64_t, NodeIndex> listed_leaves, listed_states;
  std::list<NodeIndex> listed_windows;  ///< likewise, of windows; the newest at the front
  // write_back: nodes whose KV came to be on both tiers, the oldest first. One that left a tier
  // since stays until a walk comes by it.
  std::map<std::uint64_t, NodeIndex> listed_twice;
  std::unique_ptr<StorageTier> storage;  ///< null: there is none

  /// Lands the oldest copy of the queue that has not; false where there is none.
  bool land(std::deque<CopyInFlight>& queue);
  /// Lands the loads up to this one.
  void land_loads(std::uint64_t id);
  /// Whether a load in flight writes the device slot.
  bool is_awaited(StateSlot slot) const;
  SnapshotHost snapshot() const;
};

}  // namespace lockstep::cache_sim
