// The chunks of vLLM's CPU tier: which keys have one, who reads or writes it, and which is evicted
// next (rules 34 and 35 of reference/caches/vllm.md).
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "cache_sim/model/block_memory.hpp"

namespace lockstep::cache_sim {

/// A group's part of a prefix: the hash at its end, and the tokens that the hash stands for.
struct ChunkKey {
  std::uint32_t group = 0;
  KeyId key = 0;
  std::uint32_t tokens = 0;
  auto operator<=>(const ChunkKey&) const = default;
};

/// The chunks of the CPU tier: CPUOffloadingManager with its LRU policy (rules 34 and 35). A chunk
/// has room for `blocks_per_chunk` blocks of any group. Between the decision to store it and the
/// settlement of that copy it is written: it has its key, and nobody may load it.
class CpuChunks {
 public:
  /// The request's, negated tokens and group: the least is evicted first.
  using Rank = std::tuple<std::int64_t, std::int64_t, std::uint32_t>;
  struct Chunk {
    std::uint32_t index;
    std::int32_t readers = -1;  ///< copies that read it; -1: it is being written
    Rank rank;
    bool is_ready() const { return readers >= 0; }
  };
  /// The chunks that a request has accessed, which are ranked anew when it ends.
  struct Access {
    std::uint64_t generation = 0;  ///< of the cache that the rest is about
    std::int64_t rank = 0;         ///< 0: none yet
    std::set<ChunkKey> seen;
  };
  struct Stores {
    std::vector<ChunkKey> keys;  ///< of those offered, the ones without a chunk
    std::vector<std::uint32_t> chunks;
  };

  CpuChunks(std::int64_t count, bool pins_loads) : count_(count), pins_loads_(pins_loads) {}

  /// Null where there is no chunk of that key.
  const Chunk* find(const ChunkKey& key) const {
    const auto found = chunks_.find(key);
    return found == chunks_.end() ? nullptr : &found->second;
  }
  using Chunks = std::map<ChunkKey, Chunk>;
  const Chunks& all() const { return chunks_; }
  std::int64_t free_count() const {
    return std::ssize(free_) + count_ - static_cast<std::int64_t>(used_);
  }

  /// Chunks to read from; each key has one.
  std::vector<std::uint32_t> begin_load(std::span<const ChunkKey> keys, Access& access);
  void end_load(std::span<const ChunkKey> keys);
  /// None where there is no room. No chunk of `spared` is evicted, nor one of `keys`.
  std::optional<Stores> begin_store(std::span<const ChunkKey> keys, Access& access,
                                    std::span<const ChunkKey> spared = {});
  void end_store(std::span<const ChunkKey> keys);
  /// Nothing was written: the chunks are free.
  void abandon_store(std::span<const ChunkKey> keys);
  /// A copy to the disk reads the chunks, which is no access of a request. Their places, by key.
  std::vector<std::uint32_t> begin_read(std::span<const ChunkKey> keys);
  void end_read(std::span<const ChunkKey> keys);
  /// The request has ended: what it accessed is the newest, heads before tails.
  void finish(Access& access);
  void reset();

 private:
  std::int64_t rank_of(Access& access);
  void access(std::span<const ChunkKey> keys, Access& access);
  bool evict(std::int64_t shortfall, std::span<const ChunkKey> offered,
             std::span<const ChunkKey> spared);
  void move_to(Chunks::iterator chunk, Rank rank);
  void release(const ChunkKey& key);

  std::int64_t count_;
  bool pins_loads_;  // false: a planted defect
  Chunks chunks_;
  std::set<std::pair<Rank, ChunkKey>> order_;  // of eviction
  std::vector<std::uint32_t> free_;            // the last one is taken first
  std::uint32_t used_ = 0;                     // chunks from here on have never been used
  std::int64_t newest_ = 0;                    // rank
  std::uint64_t generation_ = 1;
};

}  // namespace lockstep::cache_sim
