#include "cache_sim/policies/vllm/offload_tier.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "reference/base/mark.hpp"

namespace lockstep::cache_sim {

// --- The connector -------------------------------------------------------------------------------

OffloadTier::OffloadTier(const BlockRules& rules)
    : rules_(rules), chunks_(rules.cpu_chunks, rules.loads_pin_chunks) {
  for (std::uint32_t group = 0; group < rules.groups.size(); ++group)
    (is_state(rules.groups[group].kind) ? states_ : attention_).push_back(group);
  order_ = attention_;
  if (rules.tier_hits_need_states) order_.insert(order_.end(), states_.begin(), states_.end());
  if (rules.has_disk) disk_.emplace();
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
std::optional<std::int64_t> OffloadTier::find_in_group(const BlockRequest& request,
                                                       std::uint32_t group, std::int64_t begin,
                                                       std::int64_t end) {
  const auto at = [&](std::int64_t i) {
    return find(request, key_at(request.keys, group, (i + 1) * chunk_of(group)));
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

/// Attention's chunks may be smaller, and shorten a hit to the inside of a chunk of states, whose
/// state is that of a longer prefix: then the look-up is for what lies before this chunk.
std::optional<std::int64_t> OffloadTier::look_up_chunks(const BlockRequest& request,
                                                        std::int64_t local) {
  if (states_.empty()) return look_up_chunks(request, local, request.known);
  const std::int64_t unit = chunk_of(states_.front());
  std::int64_t most = floor_to(request.known - 1, unit);
  for (;;) {
    const std::optional<std::int64_t> hit = look_up_chunks(request, local, most);
    if (!hit || *hit == 0 || (local + *hit) % unit == 0 || !rules_.tier_hits_end_with_states)
      return hit;
    LOCKSTEP_MARK("vllm.hit_inside_a_chunk_of_states");
    most = floor_to(local + *hit, unit);
    if (most <= local) return 0;
  }
}

std::optional<std::int64_t> OffloadTier::look_up_chunks(const BlockRequest& request,
                                                        std::int64_t local, std::int64_t most) {
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
          find_in_group(request, group, begin, std::min(ceil_div(most, size), keyed));
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
         std::ranges::all_of(rules_.groups, [&](const GroupSpec& group) {
           return group.block == rules_.state_block;
         });
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
      const CpuChunks::Chunk* const chunk = find(request, key_at(request.keys, group, tail));
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
        begin_store(std::span(&key, 1), requests_.at(row.offload));
    if (!stores || stores->keys.empty()) continue;
    Job& job = add_job(row.offload, jobs);
    job.keys = stores->keys;
    job.fenced = {one.block};
    job.copies = {{.source = one.block,
                   .target = host_block(stores->chunks.front(), rules_.blocks_per_chunk - 1),
                   .group = one.group}};
    fence(job.fenced, job.id);
    // A state that came with results has left its column, and this schedule may have given its
    // block out again.
    const std::vector<BlockId>& columns = row.tables[one.group].columns;
    const std::int64_t column = one.tokens / rules_.groups[one.group].block - 1;
    if (allocated_.contains(one.block) && block_at(columns, column) != one.block &&
        rules_.flushes_reused_states)
      flush_.insert(job.id);
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
  const std::optional<CpuChunks::Stores> stores = begin_store(keys, requests_.at(row.offload));
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
  const std::optional<CpuChunks::Stores> stores = begin_store(offered, request);
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

void OffloadTier::leave(RequestId request) {
  requests_.at(request).has_ended = true;
  ended_.push_back(request);
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
    if (std::ranges::find(told, one.request) == told.end()) told.push_back(one.request);
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
  if (disk_) end_disk_step();
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
  const SnapshotHost::Copied size = what(job);
  SnapshotHost::Copied& sum = job.is_load ? to_device_ : to_host_;
  sum.kv_tokens += size.kv_tokens;
  sum.states += size.states;
  (job.is_load ? loads_ : stores_).push_back(std::move(job));
}

SnapshotHost::Copied OffloadTier::what(const Job& job) const {
  SnapshotHost::Copied size;
  for (const BlockCopy& copy : job.copies)
    if (is_state(rules_.groups[copy.group].kind))
      ++size.states;
    else
      size.kv_tokens += rules_.groups[copy.group].block;
  return size;
}

SnapshotHost OffloadTier::host() const {
  const std::int64_t chunk = rules_.state_block * rules_.blocks_per_chunk;
  SnapshotHost now{.kv_total = rules_.cpu_chunks * chunk,
                   .states_total = rules_.cpu_chunks,
                   .to_host = to_host_,
                   .to_device = to_device_};
  for (const std::deque<Job>* const jobs : {&stores_, &loads_})
    for (const Job& job : *jobs)
      if (!job.landed) now.in_flight.push_back({job.id, !job.is_load, what(job)});
  return now;
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
  if (is_stale(job)) {
    reset_fence_.erase(job.id);
    return;
  }
  Request& request = requests_.at(job.request);
  if (job.is_load) {
    chunks_.end_load(job.keys);
    for (const ChunkKey& key : job.keys) being_loaded_.erase(key);
  } else {
    chunks_.end_store(job.keys);
    if (disk_) cascade(job);
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

std::int64_t OffloadTier::reset() {
  const std::int64_t chunks = std::ssize(chunks_.all());
  if (disk_) drain_disk();
  for (const auto* const jobs : {&stores_, &loads_})
    for (const Job& job : *jobs) reset_fence_.insert(job.id);
  for (const Job& job : waiting_) reset_fence_.insert(job.id);
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
    std::ranges::fill(request.next, 0);
    request.jobs.clear();
  }
  first_valid_ = last_job_ + 1;
  fences_.clear();
  being_loaded_.clear();
  return chunks;
}

// --- The disk (rules 38 to 43) -------------------------------------------------------------------

/// Look-ups and stores take note of the disk's copies that have ended: the first look-up of a step,
/// and each store.
std::optional<CpuChunks::Stores> OffloadTier::begin_store(std::span<const ChunkKey> keys,
                                                          Request& request) {
  if (disk_) {
    is_polled_ = true;
    note_disk_copies();
  }
  return chunks_.begin_store(keys, request.access);
}

/// The chunk of that key, which a promotion may begin to bring; null where there is none.
const CpuChunks::Chunk* OffloadTier::find(const BlockRequest& request, const ChunkKey& key) {
  if (disk_ && !std::exchange(is_polled_, true)) note_disk_copies();
  const CpuChunks::Chunk* const chunk = chunks_.find(key);
  const bool is_held = !reset_fence_.empty() && rules_.resets_hold_promotions;
  return chunk == nullptr && disk_ && disk_->has(key) && !is_held ? promote(request, key) : chunk;
}

const CpuChunks::Chunk* OffloadTier::promote(const BlockRequest& request, const ChunkKey& key) {
  const std::vector<ChunkKey> spared =
      rules_.promotions_spare_their_request ? chunks_of(request) : std::vector<ChunkKey>{};
  const std::optional<CpuChunks::Stores> stores =
      chunks_.begin_store(std::span(&key, 1), requests_.at(request.offload).access, spared);
  if (!stores) {
    LOCKSTEP_MARK("vllm.no_room_for_a_promotion");
    return nullptr;
  }
  ++promoted_;
  const auto is_its = [&](const DiskTier::Job& job) { return job.request == request.offload; };
  auto job = std::ranges::find_if(disk_->asked, is_its);
  if (job == disk_->asked.end())
    job = disk_->asked.insert(job, {.request = request.offload, .keys = {}, .chunks = {}});
  job->keys.push_back(key);
  job->chunks.push_back(stores->chunks.front());
  if (labels_ != nullptr)
    for (std::int64_t column = 0; column < rules_.blocks_per_chunk; ++column)
      labels_->await(host_block(stores->chunks.front(), column), key.group);
  return chunks_.find(key);
}

std::vector<ChunkKey> OffloadTier::chunks_of(const BlockRequest& request) const {
  std::vector<ChunkKey> own;
  for (const auto& [key, chunk] : chunks_.all()) {
    const auto place = static_cast<std::size_t>(key.tokens / rules_.hash_block - 1);
    if (place < request.keys.size() && request.keys[place] == key.key) own.push_back(key);
  }
  return own;
}

/// Calls `use` with the number in the job, the column and the number of each block of its chunks.
template <class Use>
void OffloadTier::each_block(const DiskTier::Job& job, Use use) const {
  for (std::size_t i = 0; labels_ != nullptr && i < job.keys.size(); ++i)
    for (std::int64_t column = 0; column < rules_.blocks_per_chunk; ++column)
      use(i, static_cast<std::size_t>(column), host_block(job.chunks[i], column));
}

/// A store that has landed goes on to the disk, and its chunks stay while that copy reads them.
void OffloadTier::cascade(const Job& job) {
  DiskTier::Job copy{.request = job.request, .keys = job.keys, .chunks = {}};
  if (rules_.cascades_pin_chunks) {
    copy.chunks = chunks_.begin_read(job.keys);
  } else {
    for (const ChunkKey& key : job.keys) copy.chunks.push_back(chunks_.find(key)->index);
  }
  each_block(copy, [&](std::size_t i, std::size_t, BlockId block) {
    labels_->guard(block, rules_.groups[copy.keys[i].group].block);
  });
  disk_->cascades.push_back(std::move(copy));
}

void OffloadTier::land_cascade(const DiskTier::Job& job, DiskTier::End end) {
  std::vector<DiskTier::Contents> contents(job.keys.size());
  each_block(job, [&](std::size_t i, std::size_t, BlockId block) {
    contents[i].push_back(labels_->release(block));
  });
  for (std::size_t i = 0; i < job.keys.size() && end == DiskTier::End::landed; ++i)
    disk_->store(job.keys[i], std::move(contents[i]));
}

/// A promotion needs all of its chunks. Those of one that fails are lost.
void OffloadTier::land_promotion(DiskTier::Job& job) {
  const auto is_there = [&](const ChunkKey& key) { return disk_->has(key); };
  if (!std::ranges::all_of(job.keys, is_there)) job.end = DiskTier::End::failed;
  const bool has_failed = job.end == DiskTier::End::failed;
  each_block(job, [&](std::size_t i, std::size_t column, BlockId block) {
    labels_->arrive(block, has_failed ? nullptr : &disk_->at(job.keys[i])[column]);
  });
  for (const ChunkKey& key : job.keys)
    if (has_failed && rules_.failures_lose_chunks) disk_->lose(key);
}

bool OffloadTier::end_disk_copy(bool is_promotion, DiskTier::End end) {
  for (DiskTier::Job& job : is_promotion ? disk_->promotions : disk_->cascades) {
    if (job.end != DiskTier::End::none) continue;
    job.end = end;
    if (is_promotion)
      land_promotion(job);
    else
      land_cascade(job, end);
    return true;
  }
  return false;
}

bool OffloadTier::has_ended_disk_copies() const {
  const auto has_ended = [](const std::deque<DiskTier::Job>& jobs) {
    return !jobs.empty() && jobs.front().end != DiskTier::End::none;
  };
  return disk_ && (has_ended(disk_->cascades) || has_ended(disk_->promotions));
}

bool OffloadTier::sees_disk_copies() const {
  const auto have_ended = [](const std::deque<DiskTier::Job>& jobs) {
    return jobs.empty() || jobs.back().end != DiskTier::End::none;
  };
  const bool has_copies = !disk_->cascades.empty() || !disk_->promotions.empty();
  return disk_->asked.empty() && have_ended(disk_->cascades) && have_ended(disk_->promotions) &&
         !(is_polled_ && has_copies);
}

void OffloadTier::note_disk_copies() {
  const auto note = [&](std::deque<DiskTier::Job>& jobs, auto use) {
    for (; !jobs.empty() && jobs.front().end != DiskTier::End::none; jobs.pop_front(), ++noted_)
      use(jobs.front());
  };
  note(disk_->cascades, [&](const DiskTier::Job& job) {
    if (rules_.cascades_pin_chunks) chunks_.end_read(job.keys);
  });
  note(disk_->promotions, [&](const DiskTier::Job& job) {
    if (job.end == DiskTier::End::landed || !rules_.failures_free_chunks)
      chunks_.end_store(job.keys);
    else
      chunks_.abandon_store(job.keys);
  });
}

/// The last of a step: the promotions that its look-ups have started are submitted.
void OffloadTier::end_disk_step() {
  if (!std::exchange(is_polled_, false)) note_disk_copies();
  for (DiskTier::Job& job : disk_->asked) {
    if (!rules_.promotions_wait_to_land) chunks_.end_store(job.keys);
    disk_->promotions.push_back(std::move(job));
  }
  disk_->asked.clear();
}

/// Before a reset all copies of the disk land; promotions that were not submitted never begin.
void OffloadTier::drain_disk() {
  if (rules_.resets_drain_the_disk)
    for (const bool is_promotion : {false, true})
      while (end_disk_copy(is_promotion, DiskTier::End::landed)) continue;
  note_disk_copies();
  for (const DiskTier::Job& job : disk_->asked)
    each_block(job,
               [&](std::size_t, std::size_t, BlockId block) { labels_->arrive(block, nullptr); });
  disk_->asked.clear();
  is_polled_ = false;
}

std::int64_t OffloadTier::empty_disk() {
  const std::int64_t count = std::ssize(disk_->chunks());
  disk_->clear();
  return count;
}

}  // namespace lockstep::cache_sim
