#include "cache_sim/policies/vllm/tiers/cpu_chunks.hpp"

#include <algorithm>
#include <utility>

#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

CpuChunks::Rank rank_at(std::int64_t rank, const ChunkKey& key) {
  return {rank, -std::int64_t{key.tokens}, key.group};
}

}  // namespace

/// All batches of a request share the rank that it got with the first.
std::int64_t CpuChunks::rank_of(Access& access) {
  if (access.rank == 0) access.rank = ++newest_;
  return access.rank;
}

void CpuChunks::access(std::span<const ChunkKey> keys, Access& access) {
  if (access.generation != generation_) access = {.generation = generation_};
  for (const ChunkKey& key : keys) {
    if (!access.seen.insert(key).second) continue;
    const Rank rank = rank_at(rank_of(access), key);
    if (const auto found = chunks_.find(key); found != chunks_.end())
      move_to(found, std::max(found->second.rank, rank));
  }
}

std::vector<std::uint32_t> CpuChunks::begin_load(std::span<const ChunkKey> keys, Access& access) {
  std::vector<std::uint32_t> chunks;
  for (const ChunkKey& key : keys) {
    const auto found = chunks_.find(key);
    require(found != chunks_.end(), "a chunk that is loaded is there");
    chunks.push_back(found->second.index);
    if (pins_loads_) ++found->second.readers;
  }
  this->access(keys, access);
  return chunks;
}

void CpuChunks::end_load(std::span<const ChunkKey> keys) {
  if (pins_loads_)
    for (const ChunkKey& key : keys) --chunks_.at(key).readers;
}

/// Evicts so many chunks that nobody reads or writes, none of those offered or spared; or none at
/// all.
bool CpuChunks::evict(std::int64_t shortfall, std::span<const ChunkKey> offered,
                      std::span<const ChunkKey> spared) {
  const auto names = [](std::span<const ChunkKey> keys, const ChunkKey& key) {
    return std::ranges::find(keys, key) != keys.end();
  };
  std::vector<ChunkKey> idle;
  for (auto next = order_.begin(); next != order_.end() && std::ssize(idle) < shortfall; ++next)
    if (const ChunkKey& key = next->second;
        chunks_.at(key).readers == 0 && !names(offered, key) && !names(spared, key))
      idle.push_back(key);
  if (std::ssize(idle) < shortfall) return false;
  for (const ChunkKey& key : idle) release(key);
  return true;
}

void CpuChunks::move_to(Chunks::iterator chunk, Rank rank) {
  if (chunk->second.rank == rank) return;
  order_.erase({chunk->second.rank, chunk->first});
  order_.emplace(rank, chunk->first);
  chunk->second.rank = rank;
}

void CpuChunks::release(const ChunkKey& key) {
  const auto found = chunks_.find(key);
  require(found != chunks_.end(), "a chunk that becomes free is there");
  free_.push_back(found->second.index);
  order_.erase({found->second.rank, key});
  chunks_.erase(found);
}

std::optional<CpuChunks::Stores> CpuChunks::begin_store(std::span<const ChunkKey> keys,
                                                        Access& access,
                                                        std::span<const ChunkKey> spared) {
  Stores stores;
  std::vector<ChunkKey> accessed;
  for (const ChunkKey& key : keys) {
    const Chunk* const known = find(key);
    if (known == nullptr) stores.keys.push_back(key);
    if (known == nullptr || known->is_ready()) accessed.push_back(key);
  }
  this->access(accessed, access);
  if (stores.keys.empty()) return stores;
  const std::int64_t shortfall = std::ssize(stores.keys) - free_count();
  if (shortfall > 0 && !evict(shortfall, keys, spared)) {
    LOCKSTEP_MARK("vllm.no_room_on_the_cpu");
    return std::nullopt;
  }
  // Chunks that were never used come first.
  while (stores.chunks.size() < stores.keys.size() && used_ < count_)
    stores.chunks.push_back(used_++);
  while (stores.chunks.size() < stores.keys.size()) {
    stores.chunks.push_back(free_.back());
    free_.pop_back();
  }
  for (std::size_t i = 0; i < stores.keys.size(); ++i) {
    const Rank rank = rank_at(rank_of(access), stores.keys[i]);
    chunks_.emplace(stores.keys[i], Chunk{.index = stores.chunks[i], .rank = rank});
    order_.emplace(rank, stores.keys[i]);
  }
  return stores;
}

void CpuChunks::end_store(std::span<const ChunkKey> keys) {
  for (const ChunkKey& key : keys) {
    const auto found = chunks_.find(key);
    if (found != chunks_.end() && !found->second.is_ready()) found->second.readers = 0;
  }
}

void CpuChunks::abandon_store(std::span<const ChunkKey> keys) {
  for (const ChunkKey& key : keys) release(key);
}

std::vector<std::uint32_t> CpuChunks::begin_read(std::span<const ChunkKey> keys) {
  std::vector<std::uint32_t> places;
  for (const ChunkKey& key : keys) {
    Chunk& chunk = chunks_.at(key);
    ++chunk.readers;
    places.push_back(chunk.index);
  }
  return places;
}

void CpuChunks::end_read(std::span<const ChunkKey> keys) {
  for (const ChunkKey& key : keys) --chunks_.at(key).readers;
}

void CpuChunks::finish(Access& access) {
  if (access.generation != generation_) return;
  std::vector<ChunkKey> keys(access.seen.begin(), access.seen.end());
  std::ranges::sort(keys, [](const ChunkKey& a, const ChunkKey& b) {
    return std::pair(a.tokens, a.group) > std::pair(b.tokens, b.group);
  });
  for (const ChunkKey& key : keys)
    if (const auto found = chunks_.find(key); found != chunks_.end())
      move_to(found, {++newest_, 0, key.group});
}

void CpuChunks::reset() {
  chunks_.clear();
  order_.clear();
  free_.clear();
  used_ = 0;
  newest_ = 0;
  ++generation_;
}

}  // namespace lockstep::cache_sim
