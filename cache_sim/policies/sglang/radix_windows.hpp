// The KV of layers with a sliding window, beside SGLang's tree: its SWA component. Rules:
// reference/caches/sglang.md, 1.15. A slot of such KV is a KV slot of the same LayerState with a
// number after those of full attention.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_sim/policies/pools.hpp"
#include "reference/base/ids.hpp"

namespace lockstep::cache_sim {

/// A node's KV of the windows.
struct WindowNode {
  KvRuns slots;  ///< one per token of the edge; empty: a tombstone
  std::uint32_t lock = 0;
  NodeIndex newer, older;  ///< its neighbours in the list of windows
};

struct RadixWindows {
  RadixWindows(std::uint32_t first, std::int64_t slot_count, std::uint32_t page,
               std::uint32_t reach, LayerState& layers)
      : reach(reach), pool(first, slot_count, page, layers) {}

  const std::uint32_t reach;  ///< tokens before a token that it sees, at least 1
  KvPool pool;
  std::vector<WindowNode> nodes;  ///< by node of the tree
  NodeIndex newest, oldest;       ///< of the nodes that are no tombstones
  std::int64_t evictable = 0;     ///< tokens of unlocked nodes that are no tombstones
  std::int64_t locked = 0;        ///< and of locked ones
};

/// A request's part in the windows.
struct RequestWindow {
  KvRuns slots;                  ///< of its tokens from `begin` on
  KvTail tail;                   ///< of these slots
  std::uint32_t begin = 0;       ///< tokens before it are the tree's, or were given back
  std::uint32_t evicted = 0;     ///< tokens that its window has left behind ("swa_evicted_seqlen")
  std::uint32_t lock_begin = 0;  ///< the first token of its prefix whose window it has locked
  bool is_released = false;      ///< that lock was given up early
  std::uint32_t decoded = 0;     ///< decode steps since its last checkpoint
  std::uint32_t prefilled = 0;   ///< tokens up to the end of its last chunk
};

}  // namespace lockstep::cache_sim
