// The disk behind vLLM's CPU tier: what it has, and the copies between the two (rules 38 to 43 of
// reference/caches/vllm.md). It stands for a secondary tier that never evicts, as the file
// system's.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/policies/vllm/tiers/cpu_chunks.hpp"

namespace lockstep::cache_sim {

/// The labels of a block when it was copied (label_blocks.hpp).
struct BlockContent {
  std::uint32_t group = 0;
  Label recurrent;
  std::uint32_t first = 0, end = 0;  ///< places that have KV
  std::vector<std::uint64_t> kv, conv;
};

class DiskTier {
 public:
  /// By column of the chunk; none where nobody follows what blocks hold.
  using Contents = std::vector<BlockContent>;
  enum class End { none, landed, failed };
  /// A copy of one request's chunks. It has ended before the manager takes note of it.
  struct Job {
    std::uint64_t request = 0;
    std::vector<ChunkKey> keys;
    std::vector<std::uint32_t> chunks;  ///< by key: its place on the CPU tier
    End end = End::none;
  };

  bool has(const ChunkKey& key) const { return chunks_.contains(key); }
  const std::map<ChunkKey, Contents>& chunks() const { return chunks_; }
  const Contents& at(const ChunkKey& key) const { return chunks_.at(key); }
  /// Skips a chunk that is there.
  void store(const ChunkKey& key, Contents contents) { chunks_.emplace(key, std::move(contents)); }
  void lose(const ChunkKey& key) { chunks_.erase(key); }
  void clear() { chunks_.clear(); }

  std::deque<Job> cascades;    ///< from the CPU tier, the oldest first
  std::deque<Job> promotions;  ///< to it
  std::vector<Job> asked;      ///< promotions that begin when the step ends, one for each request

 private:
  std::map<ChunkKey, Contents> chunks_;
};

}  // namespace lockstep::cache_sim
