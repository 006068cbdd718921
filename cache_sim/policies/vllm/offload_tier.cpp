#include "cache_sim/policies/vllm/offload_tier.hpp"

#include <algorithm>
#include <iterator>

#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {
namespace {

CpuChunks::Rank rank_at(std::int64_t rank, const ChunkKey& key) {
  return {rank, -std::int64_t{key.tokens}, key.group};
}

}  // namespace

// --- Chunks (rules 34 and 35) --------------------------------------------------------------------

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
      found->second.rank = std::max(found->second.rank, rank);
  }
}

std::vector<std::uint32_t> CpuChunks::begin_load(std::span<const ChunkKey> keys, Access& access) {
  std::vector<std::uint32_t> chunks;
  for (const ChunkKey& key : keys) {
    Chunk& chunk = chunks_.at(key);
    chunks.push_back(chunk.index);
    if (pins_loads_) ++chunk.readers;
  }
  this->access(keys, access);
  return chunks;
}

void CpuChunks::end_load(std::span<const ChunkKey> keys) {
  if (pins_loads_)
    for (const ChunkKey& key : keys) --chunks_.at(key).readers;
}

/// Evicts so many chunks that nobody reads or writes, none of those offered; or none at all.
bool CpuChunks::evict(std::int64_t shortfall, std::span<const ChunkKey> offered) {
  std::vector<std::pair<Rank, ChunkKey>> idle;
  for (const auto& [key, chunk] : chunks_)
    if (chunk.readers == 0 && std::find(offered.begin(), offered.end(), key) == offered.end())
      idle.emplace_back(chunk.rank, key);
  if (shortfall > std::ssize(idle)) return false;
  std::sort(idle.begin(), idle.end());
  for (const auto& [rank, key] : std::span(idle).first(static_cast<std::size_t>(shortfall))) {
    free_.push_back(chunks_.at(key).index);
    chunks_.erase(key);
  }
  return true;
}

std::optional<CpuChunks::Stores> CpuChunks::begin_store(std::span<const ChunkKey> keys,
                                                        Access& access) {
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
  if (shortfall > 0 && !evict(shortfall, keys)) {
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
  for (std::size_t i = 0; i < stores.keys.size(); ++i)
    chunks_.emplace(stores.keys[i], Chunk{.index = stores.chunks[i],
                                          .rank = rank_at(rank_of(access), stores.keys[i])});
  return stores;
}

void CpuChunks::end_store(std::span<const ChunkKey> keys) {
  for (const ChunkKey& key : keys) {
    const auto found = chunks_.find(key);
    if (found != chunks_.end() && !found->second.is_ready()) found->second.readers = 0;
  }
}

void CpuChunks::finish(Access& access) {
  if (access.generation != generation_) return;
  std::vector<ChunkKey> keys(access.seen.begin(), access.seen.end());
  std::sort(keys.begin(), keys.end(), [](const ChunkKey& a, const ChunkKey& b) {
    return std::pair(a.tokens, a.group) > std::pair(b.tokens, b.group);
  });
  for (const ChunkKey& key : keys)
    if (const auto found = chunks_.find(key); found != chunks_.end())
      found->second.rank = {++newest_, 0, key.group};
}

void CpuChunks::reset() {
  chunks_.clear();
  free_.clear();
  used_ = 0;
  newest_ = 0;
  ++generation_;
}

// --- The connector -------------------------------------------------------------------------------

OffloadTier::OffloadTier(const BlockRules& rules)
    : rules_(rules), chunks_(rules.cpu_chunks, rules.loads_pin_chunks) {
  for (std::uint32_t group = 0; group < rules.groups.size(); ++group)
    (is_state(rules.groups[group].kind) ? states_ : attention_).push_back(group);
  order_ = attention_;
  if (rules.tier_hits_need_states) order_.insert(order_.end(), states_.begin(), states_.end());
}

OffloadTier::RequestId OffloadTier::add() {
  Request& request = requests_[++last_request_];
  request.seen.resize(rules_.groups.size());
  request.next.resize(rules_.groups.size());
  return last_request_;
}

ChunkKey OffloadTier::key_at(const std::vector<KeyId>& keys, std::uint32_t group,
                             std::int64_t tokens) const {
  return {.group = group,
          .key = keys[static_cast<std::size_t>(tokens / rules_.hash_block - 1)],
          .tokens = static_cast<std::uint32_t>(tokens)};
}

BlockId OffloadTier::host_block(std::uint32_t chunk, std::int64_t column) const {
  return static_cast<BlockId>(rules_.blocks + chunk * rules_.blocks_per_chunk +
                              column % rules_.blocks_per_chunk);
}

// --- Look-up (rules 29 and 30) -------------------------------------------------------------------

/// Whether the group has chunks `begin` … `end` - 1: of attention so many from the first on, of
/// states those up to the last one that is there. None: they have not all been written.
std::optional<std::int64_t> OffloadTier::find_in_group(const std::vector<KeyId>& keys,
                                                       std::uint32_t group, std::int64_t begin,
                                                       std::int64_t end) const {
  const auto at = [&](std::int64_t i) {
    return chunks_.find(key_at(keys, group, (i + 1) * chunk_of(group)));
  };
  const auto is_there = [&](const CpuChunks::Chunk& chunk) {
    return chunk.is_ready() || !rules_.look_ups_wait_for_stores;
  };
  if (is_state(rules_.groups[group].kind)) {
    for (std::int64_t i = end; i-- > begin;)
      if (const CpuChunks::Chunk* const chunk = at(i))
        return is_there(*chunk) ? std::optional(i + 1 - begin) : std::nullopt;
    return 0;
  }
  bool waits = false;
  std::int64_t i = begin;
  for (; i < end; ++i) {
    const CpuChunks::Chunk* const chunk = at(i);
    if (chunk == nullptr) break;
    waits |= !is_there(*chunk);
  }
  return waits ? std::nullopt : std::optional(i - begin);
}

std::optional<std::int64_t> OffloadTier::look_up_chunks(const BlockRequest& request,
                                                        std::int64_t local) const {
  std::int64_t most = request.known;
  if (!states_.empty()) most = floor_to(most - 1, chunk_of(states_.front()));
  std::int64_t hit = 0;
  bool waits = false;
  for (std::vector<std::uint32_t> groups = order_, again; !groups.empty(); groups.swap(again)) {
    again.clear();
    bool saw_states = false;
    for (const std::uint32_t group : groups) {
      const std::int64_t size = chunk_of(group);
      const std::int64_t keyed = keyed_chunks(request.keys, group);
      most = std::min(most, keyed * size);
      if (most - local < size) return 0;
      const std::int64_t begin = local / size;
      const std::optional<std::int64_t> found =
          find_in_group(request.keys, group, begin, std::min(ceil_div(most, size), keyed));
      if (found == 0) return 0;
      if (found)
        most = std::min(most, (begin + *found) * size);
      else
        waits = true;
      if (most - local < size) return 0;
      if (most - local < hit && waits) {  // whether it still has to wait
        waits = false;
        again = order_;
      } else if (most - local < hit && saw_states && again.empty()) {
        again = states_;
      }
      saw_states |= is_state(rules_.groups[group].kind);
      hit = most - local;
    }
  }
  if (waits) return std::nullopt;
  if (is_being_loaded(request, local, hit)) return std::nullopt;
  return hit;
}

bool OffloadTier::is_being_loaded(const BlockRequest& request, std::int64_t local,
                                  std::int64_t hit) const {
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const std::int64_t size = chunk_of(group);
    const std::int64_t end =
        std::min(ceil_div(local + hit, size), keyed_chunks(request.keys, group));
    std::int64_t begin = local / size;
    if (is_state(rules_.groups[group].kind)) begin = std::max(begin, end - 1);
    for (std::int64_t i = begin; i < end; ++i)
      if (being_loaded_.contains(key_at(request.keys, group, (i + 1) * size))) return true;
  }
  return false;
}

/// Whether hits may end inside a block.
bool OffloadTier::supports_tails() const {
  return rules_.blocks_per_chunk == 1 && rules_.state_block > rules_.hash_block &&
         std::all_of(rules_.groups.begin(), rules_.groups.end(),
                     [&](const GroupSpec& group) { return group.block == rules_.state_block; });
}

std::optional<std::int64_t> OffloadTier::look_up(const BlockRequest& request, std::int64_t local) {
  const std::optional<std::int64_t> whole = look_up_chunks(request, local);
  if (!whole || !supports_tails()) return whole;
  const std::int64_t begin = local + *whole;
  const std::int64_t unit = rules_.hash_block;
  bool waits = false;
  for (std::int64_t tail = floor_to(std::min(request.prompt, begin + rules_.state_block) - 1, unit);
       tail > begin; tail -= unit) {
    bool is_whole = true, is_ready = true;
    for (std::uint32_t group = 0; group < rules_.groups.size() && is_whole; ++group) {
      const CpuChunks::Chunk* const chunk = chunks_.find(key_at(request.keys, group, tail));
      is_whole = chunk != nullptr;
      is_ready &= chunk == nullptr || chunk->is_ready() || !rules_.look_ups_wait_for_stores;
    }
    if (is_whole && is_ready) {
      LOCKSTEP_MARK("vllm.tail_on_the_cpu");
      return tail - local;
    }
    waits |= !is_ready;
  }
  if (waits && *whole == 0) return std::nullopt;
  return whole;
}

// --- Loads (rule 32) -----------------------------------------------------------------------------

void OffloadTier::note_blocks(const BlockRequest& request) {
  for (const BlockTable& table : request.tables)
    for (const BlockId block : table.columns)
      if (block != kNullBlock) allocated_.insert(block);
}

void OffloadTier::load(const BlockRequest& request, std::int64_t local, std::int64_t external) {
  note_blocks(request);
  const std::int64_t end = local + external;
  Request& known = requests_.at(request.offload);
  Job job{.id = ++last_job_, .request = request.offload, .is_load = true};
  std::vector<std::pair<std::int64_t, std::uint32_t>> targets;  // by chunk: first column, group
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const std::vector<BlockId>& columns = request.tables[group].columns;
    const std::int64_t block = rules_.groups[group].block;
    const std::int64_t size = chunk_of(group);
    std::int64_t column = ceil_div(local, block);
    while (column * block < end && block_at(columns, column) == kNullBlock) ++column;
    known.next[group] = ceil_div(end, size);
    for (; column * block < end;
         column = (column / rules_.blocks_per_chunk + 1) * rules_.blocks_per_chunk) {
      // A chunk may hold more tokens than are loaded; a tail is a chunk of its own.
      const std::int64_t whole = floor_to(column * block, size) + size;
      const bool is_tail = supports_tails() && end < whole;
      const ChunkKey key = key_at(request.keys, group, is_tail ? end : whole);
      if (!rules_.tier_hits_need_states && chunks_.find(key) == nullptr) continue;
      job.keys.push_back(key);
      targets.emplace_back(column, group);
    }
  }
  const std::vector<std::uint32_t> chunks = chunks_.begin_load(job.keys, known.access);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    auto [column, group] = targets[i];
    if (rules_.loads_one_group_less && group + 1 == rules_.groups.size()) continue;
    const std::int64_t block = rules_.groups[group].block;
    const std::int64_t last = column / rules_.blocks_per_chunk;
    for (; column / rules_.blocks_per_chunk == last && column * block < end; ++column)
      job.copies.push_back({.source = host_block(chunks[i], column),
                            .target = block_at(request.tables[group].columns, column),
                            .group = group});
  }
  known.jobs.insert(job.id);
  being_loaded_.insert(job.keys.begin(), job.keys.end());
  new_loads_.push_back(std::move(job));
}

// --- Stores (rule 33) ----------------------------------------------------------------------------

void OffloadTier::fence(const std::vector<BlockId>& blocks, JobId job) {
  for (const BlockId block : blocks) fences_[block].insert(job);
}

void OffloadTier::unfence(const std::vector<BlockId>& blocks, JobId job) {
  for (const BlockId block : blocks) {
    const auto found = fences_.find(block);
    if (found == fences_.end()) continue;
    found->second.erase(job);
    if (found->second.empty()) fences_.erase(found);
  }
}

OffloadTier::Job& OffloadTier::add_job(RequestId id, std::vector<Job>& jobs) {
  requests_.at(id).jobs.insert(++last_job_);
  return jobs.emplace_back(Job{.id = last_job_, .request = id});
}

/// The scheduler tells the blocks that the row has got: all of its tables when it first runs.
void OffloadTier::note_row(const BlockRequest& row) {
  Request& request = requests_.at(row.offload);
  for (std::uint32_t group = 0; group < row.tables.size(); ++group) {
    const std::vector<BlockId>& columns = row.tables[group].columns;
    for (std::size_t i = request.seen[group]; i < columns.size(); ++i)
      if (columns[i] != kNullBlock) allocated_.insert(columns[i]);
    request.seen[group] = columns.size();
  }
  request.has_run = true;
}

/// States of chunk ends, each a job of its own.
void OffloadTier::store_states(const BlockRequest& row,
                               const std::vector<BlockManager::Handoff>& handoffs,
                               std::vector<Job>& jobs) {
  for (const BlockManager::Handoff& one : handoffs) {
    if (one.request != row.offload || one.tokens > row.known ||
        one.tokens % chunk_of(one.group) != 0)
      continue;
    const ChunkKey key = key_at(row.keys, one.group, one.tokens);
    const std::optional<CpuChunks::Stores> stores =
        chunks_.begin_store(std::span(&key, 1), requests_.at(row.offload).access);
    if (!stores || stores->keys.empty()) continue;
    Job& job = add_job(row.offload, jobs);
    job.keys = stores->keys;
    job.fenced = {one.block};
    job.copies = {{.source = one.block,
                   .target = host_block(stores->chunks.front(), rules_.blocks_per_chunk - 1),
                   .group = one.group}};
    fence(job.fenced, job.id);
  }
}

/// The prompt's last hash boundary where it lies inside a block, with the copies of the states that
/// the next chunk writes over: the boundary's blocks of all groups together.
void OffloadTier::store_tail(const BlockRequest& row,
                             const std::vector<BlockManager::Handoff>& handoffs,
                             std::vector<Job>& jobs) {
  std::map<std::uint32_t, BlockId> copied;
  std::int64_t tokens = 0;
  for (const BlockManager::Handoff& one : handoffs) {
    if (one.request != row.offload || one.tokens % rules_.state_block == 0) continue;
    copied[one.group] = one.block;
    tokens = one.tokens;
  }
  if (copied.empty()) return;
  std::vector<ChunkKey> keys;
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group)
    keys.push_back(key_at(row.keys, group, tokens));
  const std::optional<CpuChunks::Stores> stores =
      chunks_.begin_store(keys, requests_.at(row.offload).access);
  if (!stores || stores->keys.empty()) return;
  LOCKSTEP_MARK("vllm.stores_a_tail");
  Job& job = add_job(row.offload, jobs);
  job.keys = stores->keys;
  job.tail = tokens % rules_.state_block;
  for (std::size_t i = 0; i < stores->keys.size(); ++i) {
    const std::uint32_t group = stores->keys[i].group;
    const auto found = copied.find(group);
    job.fenced.push_back(found != copied.end()
                             ? found->second
                             : block_at(row.tables[group].columns, tokens / rules_.state_block));
    job.copies.push_back(
        {.source = job.fenced.back(), .target = host_block(stores->chunks[i], 0), .group = group});
  }
  fence(job.fenced, job.id);
}

/// Whole chunks of attention that the request has filled since the last time.
void OffloadTier::store_prefix(RequestId id, const BlockRequest* row, std::vector<Job>& jobs) {
  Request& request = requests_.at(id);
  if (!request.has_run) return;
  const std::vector<KeyId>& keys = row != nullptr ? row->keys : request.keys;
  const std::int64_t tokens = row != nullptr ? std::min(row->computed, row->known) : request.tokens;
  const auto columns_of = [&](std::uint32_t group) -> const std::vector<BlockId>& {
    return row != nullptr ? row->tables[group].columns : request.columns[group];
  };
  std::vector<ChunkKey> offered;
  std::vector<std::int64_t> ends(rules_.groups.size());
  for (const std::uint32_t group : attention_) {
    const std::int64_t size = chunk_of(group);
    ends[group] = std::min({tokens / size, keyed_chunks(keys, group),
                            std::ssize(columns_of(group)) / rules_.blocks_per_chunk});
    for (std::int64_t i = request.next[group]; i < ends[group]; ++i)
      offered.push_back(key_at(keys, group, (i + 1) * size));
  }
  if (offered.empty()) return;
  const std::optional<CpuChunks::Stores> stores = chunks_.begin_store(offered, request.access);
  if (!stores) return;  // they are offered again
  for (const std::uint32_t group : attention_)
    request.next[group] = std::max(request.next[group], ends[group]);
  if (stores->keys.empty()) return;
  Job& job = add_job(id, jobs);
  job.keys = stores->keys;
  for (std::size_t i = 0; i < stores->keys.size(); ++i) {
    const std::uint32_t group = stores->keys[i].group;
    const std::int64_t last = stores->keys[i].tokens / rules_.groups[group].block;
    for (std::int64_t column = last - rules_.blocks_per_chunk; column < last; ++column) {
      job.fenced_at_end.push_back(block_at(columns_of(group), column));
      job.copies.push_back({.source = job.fenced_at_end.back(),
                            .target = host_block(stores->chunks[i], column),
                            .group = group});
    }
  }
  if (row != nullptr) return;
  fence(job.fenced_at_end, job.id);
  for (const BlockId block : job.fenced_at_end)
    if (allocated_.contains(block) && rules_.flushes_reused_blocks) flush_.insert(job.id);
}

void OffloadTier::finish(const BlockRequest& request, bool is_aborted) {
  Request& known = requests_.at(request.offload);
  known.has_ended = true;
  known.keys = request.keys;
  // The last sampled token has no KV, or that of a rejected draft.
  const std::int64_t committed = request.known - (rules_.stores_committed_tokens ? 1 : 0);
  known.tokens =
      std::min(is_aborted ? request.computed : std::max(request.prompt, committed), request.known);
  known.columns.resize(rules_.groups.size());
  if (known.has_run)
    for (const std::uint32_t group : attention_)
      known.columns[group] = request.tables[group].columns;
  const auto fence_own = [&](const auto& jobs) {
    for (const Job& job : jobs)
      if (known.jobs.contains(job.id)) fence(job.fenced_at_end, job.id);
  };
  fence_own(waiting_);
  fence_own(stores_);
  ended_.push_back(request.offload);
}

void OffloadTier::end_schedule(std::span<const BlockRequest* const> rows,
                               const std::map<RequestId, const BlockRequest*>& all,
                               const std::vector<BlockManager::Handoff>& handoffs,
                               const std::vector<BlockCopy>& copies) {
  for (const BlockRequest* const row : rows) note_row(*row);
  for (const BlockCopy& copy : copies) allocated_.insert(copy.target);
  for (const RequestId id : preempted_)
    if (rules_.flushes_preempted)
      flush_.insert(requests_.at(id).jobs.begin(), requests_.at(id).jobs.end());
  if (rules_.flushes_reused_blocks)
    for (const BlockId block : allocated_)
      if (const auto found = fences_.find(block); found != fences_.end())
        flush_.insert(found->second.begin(), found->second.end());
  std::vector<Job> jobs;
  std::vector<RequestId> told;  // by the order of their first states
  for (const BlockManager::Handoff& one : handoffs)
    if (std::find(told.begin(), told.end(), one.request) == told.end()) told.push_back(one.request);
  for (const RequestId id : told) store_states(*all.at(id), handoffs, jobs);
  if (supports_tails())
    for (const RequestId id : told) store_tail(*all.at(id), handoffs, jobs);
  for (const BlockRequest* const row : rows) store_prefix(row->offload, row, jobs);
  for (const RequestId id : ended_) store_prefix(id, nullptr, jobs);
  for (const RequestId id : ended_) {
    Request& request = requests_.at(id);
    request.is_ended_told = true;
    chunks_.finish(request.access);
    if (request.jobs.empty()) requests_.erase(id);
  }
  // The worker.
  for (Job& job : jobs)
    if (flush_.contains(job.id)) waiting_.push_back(job);
  std::erase_if(jobs, [&](const Job& job) { return flush_.contains(job.id); });
  for (Job& job : waiting_) start(std::move(job));
  waiting_.clear();
  land_up_to(stores_, flush_);
  land_up_to(loads_, flush_);
  for (Job& job : new_loads_) start(std::move(job));
  new_loads_.clear();
  waiting_ = std::move(jobs);
  if (!rules_.stores_wait_for_forward) {
    for (Job& job : waiting_) start(std::move(job));
    waiting_.clear();
  }
  preempted_.clear();
  ended_.clear();
  allocated_.clear();
  flush_.clear();
}

// --- Copies in flight (rules 36, 37) -------------------------------------------------------------

void OffloadTier::start(Job job) {
  if (labels_ != nullptr)
    for (const BlockCopy& copy : job.copies)
      labels_->queue_copy(copy, job.tail > 0 ? job.tail : rules_.groups[copy.group].block);
  (job.is_load ? loads_ : stores_).push_back(std::move(job));
}

void OffloadTier::land(Job& job) {
  if (labels_ != nullptr)
    for (const BlockCopy& copy : job.copies) labels_->land_copy(copy);
  job.landed = true;
}

/// Copies of a direction land in order, so those before one that has to land do, too.
void OffloadTier::land_up_to(std::deque<Job>& jobs, const std::set<JobId>& ids) {
  std::size_t end = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i)
    if (ids.contains(jobs[i].id)) end = i + 1;
  for (std::size_t i = 0; i < end; ++i)
    if (!jobs[i].landed) land(jobs[i]);
}

bool OffloadTier::land(bool to_host) {
  for (Job& job : to_host ? stores_ : loads_) {
    if (job.landed) continue;
    land(job);
    return true;
  }
  return false;
}

void OffloadTier::end_job(const Job& job) {
  if (is_stale(job)) return;
  Request& request = requests_.at(job.request);
  if (job.is_load) {
    chunks_.end_load(job.keys);
    for (const ChunkKey& key : job.keys) being_loaded_.erase(key);
  } else {
    chunks_.end_store(job.keys);
  }
  unfence(job.fenced, job.id);
  unfence(job.fenced_at_end, job.id);
  request.jobs.erase(job.id);
  if (request.is_ended_told && request.jobs.empty()) requests_.erase(job.request);
}

std::int64_t OffloadTier::settle(std::vector<RequestId>& loaded) {
  std::int64_t count = 0;
  for (std::deque<Job>* const jobs : {&stores_, &loads_})
    for (; !jobs->empty() && jobs->front().landed; jobs->pop_front(), ++count) {
      const Job& job = jobs->front();
      end_job(job);
      if (!job.is_load) continue;
      loaded.push_back(job.request);
      loaded_.insert(job.request);
    }
  return count;
}

void OffloadTier::reset() {
  if (rules_.resets_flush)
    for (const auto* const jobs : {&stores_, &loads_})
      for (const Job& job : *jobs) flush_.insert(job.id);
  for (const Job& job : waiting_)
    if (rules_.resets_flush) flush_.insert(job.id);
  for (auto at = requests_.begin(); at != requests_.end();)
    at = at->second.has_ended ? requests_.erase(at) : std::next(at);
  ended_.clear();
  chunks_.reset();
  for (auto& [id, request] : requests_) {
    std::fill(request.next.begin(), request.next.end(), 0);
    request.jobs.clear();
  }
  first_valid_ = last_job_ + 1;
  fences_.clear();
  being_loaded_.clear();
}

}  // namespace lockstep::cache_sim
