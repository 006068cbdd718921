#include "reference/caches/vllm_offload.hpp"

#include <algorithm>
#include <tuple>

#include "reference/base/require.hpp"

namespace lockstep::reference {

VllmOffload::VllmOffload(std::vector<Group> groups, Count hash_block, Count chunks,
                         Count blocks_per_chunk, bool has_disk)
    : groups_(std::move(groups)),
      hash_block_(hash_block),
      chunk_count_(chunks),
      blocks_per_chunk_(blocks_per_chunk),
      has_disk_(has_disk) {}

VllmOffload::Key VllmOffload::key(const std::vector<Number>& hashes, int group, Count tokens) {
  const Key made{group, hashes.at(static_cast<std::size_t>(tokens / hash_block_ - 1))};
  position_[made] = tokens;
  return made;
}

const VllmOffload::Chunk* VllmOffload::chunk(const Key& key) const {
  const auto found = chunks_.find(key);
  return found == chunks_.end() ? nullptr : &found->second;
}

// --- CPUOffloadingManager ------------------------------------------------------------------------

VllmOffload::Count VllmOffload::rank_of(Request& request) {
  if (request.rank == 0) request.rank = ++next_rank_;
  return request.rank;
}

/// Each key counts once for a request: its chunk gets the request's rank where that is a later one.
void VllmOffload::access(Request& request, const std::vector<Key>& keys) {
  if (request.generation != generation_) {
    request.accessed.clear();
    request.rank = 0;
    request.generation = generation_;
  }
  for (const Key& one : keys) {
    if (!request.accessed.insert(one).second) continue;
    const std::pair rank{rank_of(request), -position_.at(one)};
    if (chunks_.contains(one) && chunks_[one].rank < rank) chunks_[one].rank = rank;
  }
}

/// Evicts exactly so many chunks without references, or none where there are too few.
bool VllmOffload::make_room(Count wanted, const std::vector<Key>& spared) {
  std::vector<std::tuple<std::pair<Count, Count>, Key>> candidates;
  for (const auto& [key, chunk] : chunks_)
    if (chunk.references == 0 && std::ranges::count(spared, key) == 0)
      candidates.emplace_back(chunk.rank, key);
  if (static_cast<Count>(candidates.size()) < wanted) return false;
  std::ranges::sort(candidates);
  for (Count i = 0; i < wanted; ++i) {
    const Key victim = std::get<1>(candidates[static_cast<std::size_t>(i)]);
    free_places_.push_back(chunks_[victim].place);
    chunks_.erase(victim);
  }
  return true;
}

/// With a disk, after a look at which of its transfers have ended.
std::optional<std::vector<VllmOffload::Key>> VllmOffload::prepare_store(
    Request& request, const std::vector<Key>& keys) {
  if (has_disk_) poll();
  return reserve(request, keys, keys);
}

/// The keys that get chunks; none at all where there is no room.
std::optional<std::vector<VllmOffload::Key>> VllmOffload::reserve(Request& request,
                                                                  const std::vector<Key>& keys,
                                                                  const std::vector<Key>& spared) {
  std::vector<Key> fresh, seen;
  for (const Key& one : keys) {
    const Chunk* const known = chunk(one);
    if (known == nullptr) fresh.push_back(one);
    if (known == nullptr || known->references >= 0) seen.push_back(one);
  }
  access(request, seen);
  const auto wanted = static_cast<Count>(fresh.size());
  const Count unused = chunk_count_ - static_cast<Count>(chunks_.size());
  if (wanted > unused && !make_room(wanted - unused, spared)) return std::nullopt;
  // Places that have never been used go first, then the one that was freed last.
  const Count never_used = std::min(wanted, chunk_count_ - places_used_);
  for (Count i = 0; i < wanted; ++i) {
    Chunk& made = chunks_[fresh[static_cast<std::size_t>(i)]];
    made.rank = {rank_of(request), -position_.at(fresh[static_cast<std::size_t>(i)])};
    if (i < never_used) {
      made.place = static_cast<Number>(places_used_++);
    } else {
      made.place = free_places_.back();
      free_places_.pop_back();
    }
  }
  return fresh;
}

// --- The look-up ---------------------------------------------------------------------------------

/// The group's chunks among [first, last): their number from the left or, of states, up to the
/// last one that is there; and whether one of those that count is being written.
std::pair<VllmOffload::Count, bool> VllmOffload::look(Id id, const Shown& request, int group,
                                                      Count first, Count last) {
  const auto at = [&](Count i) {
    return lookup(id, request, key(request.hashes, group, (i + 1) * size_of(group)));
  };
  if (groups_[static_cast<std::size_t>(group)].holds_states) {
    while (last > first && at(last - 1) == nullptr) --last;
    return {last - first, last > first && at(last - 1)->references < 0};
  }
  Count found = first;
  bool is_pending = false;
  for (; found < last && at(found) != nullptr; ++found) is_pending |= at(found)->references < 0;
  return {found - first, is_pending};
}

/// The hit ends with a chunk of states: as long as it does not, only what is before that chunk
/// counts (vLLM 0.33 lets it end inside, with the state of the chunk's end).
std::optional<VllmOffload::Count> VllmOffload::whole_chunks(Id id, const Shown& request,
                                                            Count computed) {
  const auto states =
      std::ranges::find_if(groups_, [](const Group& group) { return group.holds_states; });
  if (states == groups_.end()) return whole_chunks(id, request, computed, request.tokens);
  const Count unit = size_of(static_cast<int>(states - groups_.begin()));
  Count end = (request.tokens - 1) / unit * unit;
  for (;;) {
    const std::optional<Count> hit = whole_chunks(id, request, computed, end);
    if (!hit || *hit == 0 || (computed + *hit) % unit == 0) return hit;
    end = (computed + *hit) / unit * unit;
    if (end <= computed) return 0;
  }
}

/// _lookup_complete_chunks(): groups of attention, then those of states, shorten the hit in turn.
std::optional<VllmOffload::Count> VllmOffload::whole_chunks(Id id, const Shown& request,
                                                            Count computed, Count end) {
  std::vector<int> attention, states;
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group)
    (groups_[static_cast<std::size_t>(group)].holds_states ? states : attention).push_back(group);
  std::vector<int> all = attention;
  all.insert(all.end(), states.begin(), states.end());
  Count hit = 0;
  bool defers = false;
  std::vector<int> round = all;
  while (!round.empty()) {
    std::vector<int> next;
    bool looked_at_states = false;
    for (const int group : round) {
      const Count size = size_of(group);
      const Count keyed = static_cast<Count>(request.hashes.size()) * hash_block_ / size;
      end = std::min(end, keyed * size);
      if (end < computed + size) return 0;
      const Count first = computed / size;
      const auto [found, is_pending] =
          look(id, request, group, first, std::min(ceiling(end, size), keyed));
      if (found == 0) return 0;
      if (is_pending)
        defers = true;
      else
        end = std::min(end, (first + found) * size);
      if (end < computed + size) return 0;
      if (end - computed < hit) {
        if (defers) {
          defers = false;
          next = all;
        } else if (looked_at_states && next.empty()) {
          next = states;
        }
      }
      looked_at_states |= groups_[static_cast<std::size_t>(group)].holds_states;
      hit = end - computed;
    }
    round = next;
  }
  if (defers) return std::nullopt;
  // A chunk that somebody is loading will soon be on the device.
  for (const int group : all) {
    const Count size = size_of(group);
    const Count last =
        std::min<Count>(ceiling(computed + hit, size),
                        static_cast<Count>(request.hashes.size()) * hash_block_ / size);
    Count i = computed / size;
    if (groups_[static_cast<std::size_t>(group)].holds_states) i = std::max(i, last - 1);
    for (; i < last; ++i)
      if (loading_.contains(key(request.hashes, group, (i + 1) * size))) return std::nullopt;
  }
  return hit;
}

/// supports_partial_tail: one block a chunk, one size of block, states of several hashes.
bool VllmOffload::has_tails() const {
  bool has = false;
  for (const Group& group : groups_) {
    if (group.block != groups_.front().block) return false;
    has |= group.holds_states && group.block > hash_block_;
  }
  return has && blocks_per_chunk_ == 1;
}

std::optional<VllmOffload::Count> VllmOffload::matched(Id id, const Shown& request,
                                                       Count computed) {
  const std::optional<Count> whole = whole_chunks(id, request, computed);
  if (!whole || !has_tails()) return whole;
  const Count begin = computed + *whole;
  const Count last = std::min(request.prompt - 1, begin + groups_.front().block - 1);
  bool is_pending = false;
  for (Count tail = last / hash_block_ * hash_block_; tail > begin; tail -= hash_block_) {
    bool misses = false, waits = false;
    for (int group = 0; group < static_cast<int>(groups_.size()) && !misses; ++group) {
      const Chunk* const found = lookup(id, request, key(request.hashes, group, tail));
      misses = found == nullptr;
      waits |= found != nullptr && found->references < 0;
    }
    if (!misses && !waits) return tail - computed;
    is_pending |= waits;
  }
  if (is_pending && *whole == 0) return std::nullopt;
  return whole;
}

// --- Loads and stores ----------------------------------------------------------------------------

void VllmOffload::load(Id id, const Shown& request, Count computed, Count external) {
  Request& known = requests_.at(id);
  const Count end = computed + external;
  Copy made{
      .job = ++jobs_, .id = id, .is_load = true, .keys = {}, .fenced = {}, .fenced_later = {}};
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
    const Count block = groups_[static_cast<std::size_t>(group)].block;
    const Count size = size_of(group);
    const std::vector<Number>& columns = request.columns[static_cast<std::size_t>(group)];
    // The first block behind the local hit that is no null block, and all after it.
    Count first = ceiling(computed, block);
    while (first < ceiling(end, block) && columns.at(static_cast<std::size_t>(first)) == 0) ++first;
    const bool has_tail = has_tails() && end % block != 0;
    for (Count i = first / blocks_per_chunk_; i < ceiling(end, size); ++i)
      if (first < ceiling(end, block))
        made.keys.push_back(
            key(request.hashes, group, has_tail && (i + 1) * size > end ? end : (i + 1) * size));
    known.next[static_cast<std::size_t>(group)] = ceiling(end, size);
  }
  for (const Key& one : made.keys) {
    require(chunk(one) != nullptr && chunk(one)->references >= 0,
            "a chunk that is loaded is there");
    ++chunks_[one].references;
    loading_.insert(one);
  }
  access(known, made.keys);
  known.jobs.insert(made.job);
  waiting_loads_.push_back(made);
}

VllmOffload::Copy& VllmOffload::store(Id id, std::vector<Key> keys, std::vector<Copy>& made) {
  requests_.at(id).jobs.insert(++jobs_);
  made.push_back({.job = jobs_,
                  .id = id,
                  .is_load = false,
                  .keys = std::move(keys),
                  .fenced = {},
                  .fenced_later = {}});
  return made.back();
}

/// States at the ends of chunks, a job each. What is copied from a block that a schedule has given
/// out again, since the state has left its column, is flushed.
void VllmOffload::store_offers(const Scheduled& row, const std::vector<Offer>& offers,
                               const std::set<Number>& allocated, std::vector<Copy>& made,
                               std::set<Count>& flushed) {
  for (const Offer& offer : offers) {
    if (offer.id != row.id || offer.block == 0 || offer.tokens > row.request.tokens ||
        offer.tokens % size_of(offer.group) != 0)
      continue;
    const std::optional<std::vector<Key>> kept =
        prepare_store(requests_.at(row.id), {key(row.request.hashes, offer.group, offer.tokens)});
    if (!kept || kept->empty()) continue;
    Copy& copy = store(row.id, *kept, made);
    copy.fenced = {offer.block};
    fences_[offer.block].insert(copy.job);
    const auto at = static_cast<std::size_t>(offer.group);
    const auto column = static_cast<std::size_t>(offer.tokens / groups_[at].block - 1);
    const bool has_left = row.request.columns[at].at(column) != offer.block;
    if (has_left && allocated.contains(offer.block)) flushed.insert(copy.job);
  }
}

/// A boundary inside a block, in all groups: of states the block that was copied, of attention the
/// request's.
void VllmOffload::store_tail(const Scheduled& row, const std::vector<Offer>& offers,
                             std::vector<Copy>& made) {
  const Count block = groups_.front().block;
  std::map<int, Number> sources;
  Count tokens = 0;
  for (const Offer& offer : offers)
    if (offer.id == row.id && offer.tokens % block != 0) {
      sources[offer.group] = offer.block;
      tokens = offer.tokens;
    }
  if (sources.empty()) return;
  std::vector<Key> keys;
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
    keys.push_back(key(row.request.hashes, group, tokens));
    if (!groups_[static_cast<std::size_t>(group)].holds_states)
      sources[group] = row.request.columns[static_cast<std::size_t>(group)].at(
          static_cast<std::size_t>(tokens / block));
  }
  const std::optional<std::vector<Key>> kept = prepare_store(requests_.at(row.id), keys);
  if (!kept || kept->empty()) return;
  Copy& copy = store(row.id, *kept, made);
  for (const Key& one : *kept) {
    copy.fenced.push_back(sources.at(one.first));
    fences_[sources.at(one.first)].insert(copy.job);
  }
}

/// Attention's chunks that are full, from the first that was not offered. Where there is no room,
/// they are offered again.
void VllmOffload::store_chunks(Id id, const std::vector<Number>& hashes,
                               const std::vector<std::vector<Number>>& columns, Count tokens,
                               std::vector<Copy>& made) {
  Request& request = requests_.at(id);
  std::vector<Key> offered;
  std::vector<Number> blocks;  // of each offered chunk, one after the other
  std::vector<Count> ends = request.next;
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
    const auto at = static_cast<std::size_t>(group);
    if (groups_[at].holds_states) continue;
    const Count size = size_of(group);
    const Count storable =
        std::min({tokens / size, static_cast<Count>(columns[at].size()) / blocks_per_chunk_,
                  static_cast<Count>(hashes.size()) * hash_block_ / size});
    for (Count i = request.next[at]; i < storable; ++i) {
      offered.push_back(key(hashes, group, (i + 1) * size));
      for (Count column = i * blocks_per_chunk_; column < (i + 1) * blocks_per_chunk_; ++column)
        blocks.push_back(columns[at].at(static_cast<std::size_t>(column)));
    }
    ends[at] = std::max(ends[at], storable);
  }
  if (offered.empty()) return;
  const std::optional<std::vector<Key>> kept = prepare_store(request, offered);
  if (!kept) return;
  request.next = ends;
  if (kept->empty()) return;
  Copy& copy = store(id, *kept, made);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Key& of = offered[i / static_cast<std::size_t>(blocks_per_chunk_)];
    if (std::ranges::count(*kept, of) > 0) copy.fenced_later.push_back(blocks[i]);
  }
}

/// request_finished(), before the blocks are freed. Stores are decided with the next schedule.
void VllmOffload::finish(Id id, const Shown& request, bool is_aborted) {
  Request& known = requests_.at(id);
  known.has_ended = true;
  known.hashes = request.hashes;
  if (known.was_scheduled) known.columns = request.columns;
  const Count done = is_aborted ? request.computed : std::max(request.prompt, request.tokens - 1);
  known.tokens = std::min(done, request.tokens);
  for (const auto* const copies : {&waiting_stores_, &stores_})
    for (const Copy& copy : *copies)
      if (known.jobs.contains(copy.job))
        for (const Number block : copy.fenced_later) fences_[block].insert(copy.job);
  finished_.push_back(id);
}

void VllmOffload::build(const std::vector<Scheduled>& rows, const std::vector<Scheduled>& offering,
                        const std::vector<Offer>& offers, const std::set<Number>& allocated) {
  for (const Scheduled& row : rows) requests_.at(row.id).was_scheduled = true;
  std::set<Count> flushed = flushed_by_reset_;
  for (const Id id : preempted_)
    for (const Count job : requests_.at(id).jobs) flushed.insert(job);
  for (const Number block : allocated)
    if (fences_.contains(block)) flushed.insert(fences_[block].begin(), fences_[block].end());
  std::vector<Copy> made;
  for (const Scheduled& row : offering) store_offers(row, offers, allocated, made, flushed);
  if (has_tails())
    for (const Scheduled& row : offering) store_tail(row, offers, made);
  for (const Scheduled& row : rows)
    store_chunks(row.id, row.request.hashes, row.request.columns,
                 std::min(row.request.computed, row.request.tokens), made);
  for (const Id id : finished_) {
    Request& request = requests_.at(id);
    if (!request.was_scheduled) continue;
    const std::size_t before = made.size();
    store_chunks(id, request.hashes, request.columns, request.tokens, made);
    if (made.size() == before) continue;
    for (const Number block : made.back().fenced_later) {
      fences_[block].insert(made.back().job);
      if (allocated.contains(block)) flushed.insert(made.back().job);
    }
  }
  // on_request_finished(): new ranks, the tails' before the heads'.
  for (const Id id : finished_) {
    Request& request = requests_.at(id);
    std::vector<std::pair<Count, Key>> order;
    if (request.generation == generation_)
      for (const Key& one : request.accessed) order.emplace_back(position_.at(one), one);
    std::sort(order.rbegin(), order.rend());
    for (const auto& [tokens, one] : order)
      if (chunks_.contains(one)) chunks_[one].rank = {++next_rank_, 0};
    request.is_told = true;
    if (request.jobs.empty()) requests_.erase(id);
  }
  if (has_disk_) submit();
  preempted_.clear();
  finished_.clear();
  flushed_by_reset_.clear();
  work(made, flushed);
}

// --- The worker ----------------------------------------------------------------------------------

/// The stores of the step before start, and of this step's those that are flushed; what is flushed
/// lands, with all before it; then the loads start.
void VllmOffload::work(const std::vector<Copy>& made, const std::set<Count>& flushed) {
  stores_.insert(stores_.end(), waiting_stores_.begin(), waiting_stores_.end());
  waiting_stores_.clear();
  for (const Copy& copy : made)
    (flushed.contains(copy.job) ? stores_ : waiting_stores_).push_back(copy);
  for (auto* const copies : {&stores_, &loads_}) {
    bool lands = false;
    for (auto copy = copies->rbegin(); copy != copies->rend(); ++copy) {
      lands |= flushed.contains(copy->job);
      copy->landed |= lands;
    }
  }
  loads_.insert(loads_.end(), waiting_loads_.begin(), waiting_loads_.end());
  waiting_loads_.clear();
}

bool VllmOffload::land(bool is_load) {
  for (Copy& copy : is_load ? loads_ : stores_)
    if (!copy.landed) return copy.landed = true;
  return false;
}

std::pair<VllmOffload::Count, std::vector<VllmOffload::Id>> VllmOffload::settle() {
  Count count = 0;
  std::vector<Id> received;
  for (auto* const copies : {&stores_, &loads_})
    while (!copies->empty() && copies->front().landed) {
      const Copy copy = copies->front();
      copies->erase(copies->begin());
      ++count;
      if (copy.is_load) received.push_back(copy.id);
      fence_.erase(copy.job);
      if (copy.job < first_valid_job_) continue;
      for (const Key& one : copy.keys) {
        Chunk& chunk = chunks_.at(one);
        chunk.references = copy.is_load ? chunk.references - 1 : 0;
        if (copy.is_load) loading_.erase(one);
      }
      if (has_disk_ && !copy.is_load) cascade(copy.keys);
      for (const auto* const blocks : {&copy.fenced, &copy.fenced_later})
        for (const Number block : *blocks)
          if (fences_.contains(block)) {
            fences_[block].erase(copy.job);
            if (fences_[block].empty()) fences_.erase(block);
          }
      Request& request = requests_.at(copy.id);
      request.jobs.erase(copy.job);
      if (request.is_told && request.jobs.empty()) requests_.erase(copy.id);
    }
  return {count, received};
}

VllmOffload::Count VllmOffload::reset() {
  const auto count = static_cast<Count>(chunks_.size());
  if (has_disk_) drain();
  for (const auto* const copies : {&waiting_stores_, &stores_, &loads_})
    for (const Copy& copy : *copies) {
      flushed_by_reset_.insert(copy.job);
      fence_.insert(copy.job);
    }
  std::erase_if(requests_, [](const auto& entry) { return entry.second.has_ended; });
  for (auto& [id, request] : requests_) {
    request.jobs.clear();
    request.next.assign(groups_.size(), 0);
  }
  chunks_.clear();
  free_places_.clear();
  places_used_ = next_rank_ = 0;
  ++generation_;
  finished_.clear();
  fences_.clear();
  loading_.clear();
  first_valid_job_ = jobs_ + 1;
  return count;
}

void VllmOffload::tell(std::vector<Count>& numbers) const {
  for (const auto& [key, chunk] : chunks_)
    numbers.insert(numbers.end(), {key.first, key.second, chunk.references + 1, chunk.place,
                                   chunk.rank.first, -chunk.rank.second});
  const auto flying = [](const std::vector<Copy>& copies) {
    return std::ranges::count_if(copies, [](const Copy& copy) { return !copy.landed; });
  };
  numbers.insert(numbers.end(),
                 {0, static_cast<Count>(waiting_stores_.size()), flying(stores_), flying(loads_)});
  if (has_disk_) tell_disk(numbers);
}

}  // namespace lockstep::reference
