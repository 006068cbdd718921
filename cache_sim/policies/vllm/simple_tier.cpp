#include "cache_sim/policies/vllm/simple_tier.hpp"

#include <algorithm>
#include <utility>

#include "reference/base/mark.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {
namespace {

/// The host's manager: hits end inside blocks where stores are eager.
BlockRules rules_of_host(BlockRules rules) {
  rules.blocks = rules.cpu_blocks;
  if (rules.lazy_offload) {
    rules.partial = false;
    rules.hit_alignment = rules.scheduler_block;
  }
  return rules;
}

/// Free blocks that lazy stores keep clean: twice those of a step (_estimate_lazy_target_blocks()).
std::int64_t lazy_target(const BlockRules& rules) {
  std::int64_t blocks = 0;
  for (const GroupSpec& group : rules.groups)
    blocks += is_state(group.kind) ? 2 : ceil_div(rules.step_tokens, group.block);
  return 2 * blocks;
}

}  // namespace

SimpleTier::SimpleTier(BlockManager& device)
    : rules_(device.rules()),
      device_(device.pool()),
      host_(rules_of_host(device.rules())),
      first_host_block_(static_cast<BlockId>(rules_.all_blocks() - rules_.cpu_blocks)),
      lazy_target_(lazy_target(rules_)) {}

// --- Look-up and loads (rules 44, 45) ------------------------------------------------------------

std::int64_t SimpleTier::look_up(const BlockRequest& request, std::int64_t local) {
  const auto skipped = std::min(local / rules_.hash_block, std::ssize(request.keys));
  const std::vector<KeyId> behind(request.keys.begin() + skipped, request.keys.end());
  if (behind.empty() || request.known - 1 <= local) return 0;
  const BlockHit& hit = host_.look_up(behind, request.known - local);
  if (hit.tokens == 0) return 0;
  if (rules_.hits_are_pinned)
    for (const std::vector<BlockId>& columns : hit.columns)
      for (const BlockId block : columns)
        if (block != kNullBlock) host_.pool().touch(block);
  hits_[request.offload] = hit.columns;
  return hit.tokens;
}

void SimpleTier::unpin(RequestId request) {
  const auto found = hits_.find(request);
  if (found == hits_.end()) return;
  std::vector<BlockId> pinned;
  for (const std::vector<BlockId>& columns : found->second)
    pinned.insert(pinned.end(), columns.begin(), columns.end());
  if (rules_.hits_are_pinned) host_.pool().give_back(pinned);
  hits_.erase(found);
}

void SimpleTier::allocated(const BlockRequest& request, std::int64_t local, std::int64_t external) {
  if (!rules_.lazy_offload) requests_.try_emplace(request.offload, rules_.groups.size());
  if (external == 0) return unpin(request.offload);
  Part part{.request = request.offload};
  const Columns& hit = hits_.at(request.offload);
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const GroupSpec& spec = rules_.groups[group];
    if (rules_.loads_one_group_less && group + 1 == rules_.groups.size()) continue;
    for (std::int64_t i = 0; i < std::ssize(hit[group]); ++i) {
      const BlockId source = hit[group][static_cast<std::size_t>(i)];
      if (source == kNullBlock) continue;
      const std::int64_t column =
          local / spec.block + (is_state(spec.kind) && !rules_.loads_states_into_columns ? 0 : i);
      const BlockId target = block_at(request.tables[group].columns, column);
      if (target != kNullBlock) part.copies.push_back({in_memory(source), target, group});
    }
  }
  if (rules_.loads_pin_chunks)
    for (const BlockCopy& copy : part.copies) host_.pool().touch(on_host(copy.source));
  unpin(request.offload);
  for (const BlockCopy& copy : part.copies) device_.touch(copy.target);
  new_loads_.push_back(std::move(part));
}

// --- Stores (rules 46 to 48) ---------------------------------------------------------------------

/// Whether an eager store takes the block: the host has no block of its first key.
bool SimpleTier::is_storable(BlockId block) const {
  if (block == kNullBlock || !device_.has_key(block) || in_flight_.contains(block)) return false;
  const BlockPool::Entry& primary = device_.primary(block);
  return host_.pool().find(primary.group, primary.key) == kNullBlock;
}

/// The host has room for the block, which has a key.
void SimpleTier::store(BlockId block, std::vector<BlockCopy>& stores) {
  stores.push_back({block, in_memory(host_.pool().pop()), device_.primary(block).group});
  if (rules_.stores_hold_sources) device_.touch(block);
  if (!rules_.lazy_offload) in_flight_.insert(block);
}

/// States that were keyed in this step, of requests that have not left.
void SimpleTier::store_handoffs(const std::vector<BlockManager::Handoff>& handoffs) {
  std::vector<RequestId> requests;  // by the order of their first states
  for (const BlockManager::Handoff& one : handoffs)
    if (std::ranges::find(requests, one.request) == requests.end()) requests.push_back(one.request);
  for (const RequestId request : requests)
    for (const BlockManager::Handoff& one : handoffs) {
      if (one.request != request || !requests_.contains(request)) continue;
      if (!is_storable(one.block)) continue;
      if (host_.pool().free_count() > 0)
        store(one.block, new_stores_);
      else
        LOCKSTEP_MARK("vllm.drops_a_state_on_a_full_host");
    }
}

/// Attention's full blocks of tokens that an earlier step has computed.
void SimpleTier::store_confirmed(const BlockRequest& request, std::int64_t computed,
                                 Progress& progress, std::vector<BlockCopy>& stores) {
  std::vector<BlockId> chosen;
  const std::int64_t room = host_.pool().free_count();
  for (std::uint32_t group = 0; group < rules_.groups.size(); ++group) {
    const GroupSpec& spec = rules_.groups[group];
    if (std::ssize(chosen) >= room) break;
    if (is_state(spec.kind)) continue;
    const std::vector<BlockId>& columns = request.tables[group].columns;
    const std::int64_t ready =
        std::min(std::ssize(columns), host_.cacheable(spec, computed) / spec.block);
    for (; progress[group] < ready; ++progress[group]) {
      const BlockId block = columns[static_cast<std::size_t>(progress[group])];
      if (!is_storable(block)) continue;
      if (std::ssize(chosen) >= room) break;
      chosen.push_back(block);
    }
  }
  for (const BlockId block : chosen) store(block, stores);
}

/// The block of the first attention group in which the prompt's last hash boundary lies, where that
/// is its key and the host lacks it; else the null block.
BlockId SimpleTier::unstored_tail(const BlockRequest& request) const {
  const auto first = std::ranges::find_if(
      rules_.groups, [](const GroupSpec& spec) { return !is_state(spec.kind); });
  const auto group = static_cast<std::uint32_t>(first - rules_.groups.begin());
  const std::int64_t tail = floor_to(request.prompt, rules_.hash_block);
  if (!rules_.partial || tail == 0 || tail > request.computed || tail % first->block == 0)
    return kNullBlock;
  const BlockId block = block_at(request.tables[group].columns, tail / first->block);
  const KeyId key = request.keys[static_cast<std::size_t>(tail / rules_.hash_block - 1)];
  const bool is_there = block != kNullBlock && !in_flight_.contains(block) &&
                        device_.has_key(block, group, key) &&
                        host_.pool().find(group, key) == kNullBlock;
  return is_there ? block : kNullBlock;
}

/// Lazy stores: the next free blocks with keys that the host lacks, from the last one looked at on.
void SimpleTier::store_next_evicted() {
  if (device_.references(cursor_) > 0) cursor_ = kNullBlock;
  const std::int64_t room = host_.pool().free_count();
  std::vector<BlockId> chosen;
  BlockId block = device_.next_free(cursor_);
  for (std::int64_t covered = 0; block != kNullBlock && covered < lazy_target_;
       ++covered, block = device_.next_free(block)) {
    if (std::ssize(chosen) >= room) break;
    cursor_ = block;
    if (is_storable(block)) chosen.push_back(block);
  }
  for (const BlockId one : chosen) store(one, new_stores_);
}

void SimpleTier::finish(const BlockRequest& request) {
  unpin(request.offload);
  const auto found = requests_.find(request.offload);
  if (found == requests_.end()) return;
  Progress progress = std::move(found->second);
  requests_.erase(found);
  const BlockId tail = unstored_tail(request);
  store_confirmed(request, request.computed, progress, ended_stores_);
  if (tail == kNullBlock || in_flight_.contains(tail) || host_.pool().free_count() == 0) return;
  LOCKSTEP_MARK("vllm.stores_a_tail_on_the_host");
  store(tail, ended_stores_);
}

void SimpleTier::preempt(const BlockRequest& request) {
  unpin(request.offload);
  requests_.erase(request.offload);
  flushes_ = true;
}

void SimpleTier::end_schedule(std::span<const Row> rows,
                              const std::vector<BlockManager::Handoff>& handoffs) {
  if (rules_.lazy_offload) {
    store_next_evicted();
  } else {
    store_handoffs(handoffs);
    for (const bool is_first : {true, false})
      for (const Row& row : rows) {
        const auto found = requests_.find(row.request->offload);
        if (row.is_first == is_first && found != requests_.end())
          store_confirmed(*row.request, row.computed, found->second, new_stores_);
      }
  }
  new_stores_.insert(new_stores_.end(), ended_stores_.begin(), ended_stores_.end());
  ended_stores_.clear();
  // The worker.
  for (std::deque<Job>* const jobs : {&loads_, &stores_})
    for (Job& job : *jobs)
      if (flushes_ && !job.landed) land(job);
  flushes_ = false;
  if (!new_loads_.empty()) start({.parts = std::exchange(new_loads_, {})}, loads_);
  if (!rules_.stores_wait_for_forward) end_forward();
}

void SimpleTier::end_forward() {
  if (new_stores_.empty()) return;
  if (!rules_.publishes_settled_stores)
    for (const BlockCopy& copy : new_stores_) publish(copy);
  start({.parts = {{.copies = std::exchange(new_stores_, {})}}}, stores_);
}

// --- Copies in flight (rules 49, 50) -------------------------------------------------------------

void SimpleTier::start(Job job, std::deque<Job>& jobs) {
  if (labels_ != nullptr)
    for (const Part& part : job.parts)
      for (const BlockCopy& copy : part.copies)
        labels_->queue_copy(copy, rules_.groups[copy.group].block);
  jobs.push_back(std::move(job));
}

void SimpleTier::land(Job& job) {
  for (const Part& part : job.parts)
    for (const BlockCopy& copy : part.copies) {
      if (labels_ != nullptr) labels_->land_copy(copy);
      if (numbers_ != nullptr) numbers_->copy(copy);
    }
  job.landed = true;
}

bool SimpleTier::land(bool to_host) {
  for (Job& job : to_host ? stores_ : loads_) {
    if (job.landed) continue;
    land(job);
    return true;
  }
  return false;
}

/// The host's block gets all keys that the device's has by now.
void SimpleTier::publish(const BlockCopy& copy) {
  require(device_.has_key(copy.source) || !rules_.stores_hold_sources,
          "a block that is stored keeps its key");
  for (const BlockPool::Entry& entry : device_.entries_of(copy.source))
    host_.pool().add_key(on_host(copy.target), entry.group, entry.key, entry.tokens);
}

void SimpleTier::release_store(const Job& job) {
  std::vector<BlockId> device, host;
  for (const BlockCopy& copy : job.parts.front().copies) {
    device.push_back(copy.source);
    host.push_back(on_host(copy.target));
    if (!job.is_abandoned) in_flight_.erase(copy.source);
    if (!job.is_abandoned) publish(copy);
  }
  host_.pool().give_back(host);
  if (rules_.stores_hold_sources) device_.give_back(device);
}

void SimpleTier::release_load(const Part& part) {
  std::vector<BlockId> device, host;
  for (const BlockCopy& copy : part.copies) {
    device.push_back(copy.target);
    host.push_back(on_host(copy.source));
  }
  if (rules_.loads_pin_chunks) host_.pool().give_back(host);
  device_.give_back(device);
  loaded_.insert(part.request);
}

std::int64_t SimpleTier::settle(std::vector<RequestId>& loaded) {
  std::int64_t count = 0;
  for (; !loads_.empty() && loads_.front().landed; loads_.pop_front(), ++count)
    for (const Part& part : loads_.front().parts) {
      release_load(part);
      loaded.push_back(part.request);
    }
  for (; !stores_.empty() && stores_.front().landed; stores_.pop_front(), ++count)
    release_store(stores_.front());
  return count;
}

std::int64_t SimpleTier::reset() {
  while (!hits_.empty()) unpin(hits_.begin()->first);
  for (Job& job : stores_) job.is_abandoned = rules_.resets_abandon_stores;
  in_flight_.clear();
  requests_.clear();
  cursor_ = kNullBlock;
  if (!stores_.empty() || !loads_.empty()) return 0;
  std::int64_t keyed = 0;
  for (BlockId block = 1; block <= host().block_count(); ++block) keyed += host().has_key(block);
  return host_.forget_keys() ? keyed : 0;
}

}  // namespace lockstep::cache_sim
