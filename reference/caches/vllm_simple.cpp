#include "reference/caches/vllm_simple.hpp"

#include <algorithm>

#include "reference/base/require.hpp"

namespace lockstep::reference {

VllmSimple::VllmSimple(VllmPool& device, Config config)
    : VllmPool(config.blocks), device_(device), config_(std::move(config)) {}

// --- Look-up and loads (44, 45) ------------------------------------------------------------------

void VllmSimple::pin(Id id, const Columns& columns) {
  for (const std::vector<Number>& of_group : columns)
    for (const Number block : of_group)
      if (block != 0) take(block);
  hits_[id] = columns;
}

void VllmSimple::unpin(Id id) {
  std::vector<Number> pinned;
  for (const std::vector<Number>& of_group : hits_[id])
    pinned.insert(pinned.end(), of_group.begin(), of_group.end());
  give_back(pinned);
  hits_.erase(id);
}

/// The request's own blocks behind the local hit stand where the host's do. Both ends are kept.
void VllmSimple::allocated(Id id, const Shown& request, Count computed, Count external) {
  if (!config_.is_lazy && !passed_.contains(id)) passed_[id].resize(config_.groups.size());
  std::vector<Pair> pairs;
  for (std::size_t group = 0; external > 0 && group < config_.groups.size(); ++group) {
    const Count first = computed / config_.groups[group].block;
    const std::vector<Number>& hit = hits_.at(id)[group];
    for (std::size_t i = 0; i < hit.size(); ++i)
      if (hit[i] != 0)
        pairs.push_back({request.columns[group].at(static_cast<std::size_t>(first) + i), hit[i]});
  }
  for (const Pair& pair : pairs) take(pair.host);
  unpin(id);
  for (const Pair& pair : pairs) device_.take(pair.device);
  if (external > 0) loads_.copies.emplace_back(id, pairs);
}

// --- Stores (46 to 48) ---------------------------------------------------------------------------

/// Whether the block has a key that the host knows no block of, and nobody stores it.
bool VllmSimple::lacks(Number device) const {
  const std::vector<Entry>& entries = device_.block(device).entries;
  return !entries.empty() && !busy_.contains(device) && holder(entries.front().key) == 0;
}

void VllmSimple::store(const std::vector<Number>& blocks, std::vector<Pair>& copies) {
  for (const Number block : blocks) copies.push_back({block, pop()});
  for (const Number block : blocks) device_.take(block);
  if (!config_.is_lazy) busy_.insert(blocks.begin(), blocks.end());
}

/// _select_eager_blocks_to_store(): of attention, whole blocks of what earlier steps have computed.
std::vector<VllmSimple::Number> VllmSimple::confirmed(const Shown& request, Count computed,
                                                      std::vector<Count>& passed) {
  std::vector<Number> chosen;
  const std::size_t room = queue().size();
  const Count known =
      config_.inside ? computed : computed / config_.scheduler_block * config_.scheduler_block;
  for (std::size_t group = 0; group < config_.groups.size(); ++group) {
    if (config_.groups[group].holds_states || chosen.size() >= room) continue;
    const std::vector<Number>& columns = request.columns[group];
    const Count end =
        std::min<Count>(static_cast<Count>(columns.size()), known / config_.groups[group].block);
    while (passed[group] < end) {
      const Number block = columns[static_cast<std::size_t>(passed[group])];
      if (lacks(block) && chosen.size() >= room) break;
      if (lacks(block)) chosen.push_back(block);
      ++passed[group];
    }
  }
  return chosen;
}

/// _find_fa_partial_tail_source(): the block with the end of the prompt in the first group of
/// attention.
std::optional<VllmSimple::Number> VllmSimple::tail(const Shown& request) const {
  int group = 0;
  while (config_.groups[static_cast<std::size_t>(group)].holds_states) ++group;
  const Count block = config_.groups[static_cast<std::size_t>(group)].block;
  const Count end = request.prompt / config_.hash_block * config_.hash_block;
  if (!config_.inside || end == 0 || end % block == 0 || end > request.computed) return {};
  const std::vector<Number>& columns = request.columns[static_cast<std::size_t>(group)];
  if (end / block >= static_cast<Count>(columns.size())) return {};
  const Number last = columns[static_cast<std::size_t>(end / block)];
  const Key key{group, request.hashes.at(static_cast<std::size_t>(end / config_.hash_block - 1))};
  const std::vector<Entry>& entries = device_.block(last).entries;
  const bool has_it =
      std::ranges::any_of(entries, [&](const Entry& entry) { return entry.key == key; });
  if (!has_it || busy_.contains(last) || holder(key) != 0) return {};
  return last;
}

/// _prepare_lazy_store_specs(): free blocks from the last one that was seen on, as many as the
/// next steps may take.
std::vector<VllmSimple::Number> VllmSimple::next_evicted() {
  Count target = 0;
  for (const VllmOffload::Group& group : config_.groups)
    target += group.holds_states ? 2 : ceiling(config_.step_tokens, group.block);
  target *= 2;
  const std::vector<Number>& free = device_.queue();
  const auto seen = std::ranges::find(free, last_seen_);
  if (seen == free.end()) last_seen_ = 0;
  std::vector<Number> chosen;
  for (auto at = seen == free.end() ? free.begin() : seen + 1; at != free.end(); ++at, --target) {
    if (target <= 0 || chosen.size() >= queue().size()) break;
    last_seen_ = *at;
    if (lacks(*at)) chosen.push_back(*at);
  }
  return chosen;
}

void VllmSimple::finish(Id id, const Shown& request) {
  unpin(id);
  const auto found = passed_.find(id);
  if (found == passed_.end()) return;
  std::vector<Number> chosen = confirmed(request, request.computed, found->second);
  passed_.erase(found);
  const std::optional<Number> last = tail(request);
  if (last && std::ranges::find(chosen, *last) == chosen.end() && chosen.size() < queue().size())
    chosen.push_back(*last);
  store(chosen, of_ended_);
}

void VllmSimple::preempt(Id id) {
  unpin(id);
  passed_.erase(id);
  flushes_ = true;
}

void VllmSimple::build(const std::vector<Row>& rows,
                       const std::vector<VllmOffload::Offer>& offers) {
  if (config_.is_lazy) store(next_evicted(), of_step_);
  std::vector<Id> offering;
  for (const VllmOffload::Offer& offer : offers)
    if (std::ranges::find(offering, offer.id) == offering.end()) offering.push_back(offer.id);
  for (const Id id : offering)
    for (const VllmOffload::Offer& offer : offers)
      if (offer.id == id && passed_.contains(id) && lacks(offer.block) && !queue().empty())
        store({offer.block}, of_step_);
  for (const bool is_first : {true, false})
    for (const Row& row : rows)
      if (row.is_first == is_first && passed_.contains(row.id))
        store(confirmed(row.request, row.before, passed_[row.id]), of_step_);
  of_step_.insert(of_step_.end(), of_ended_.begin(), of_ended_.end());
  of_ended_.clear();
  // The worker.
  if (flushes_)
    for (Batch& batch : batches_) batch.landed = true;
  flushes_ = false;
  if (!loads_.copies.empty()) batches_.push_back(loads_);
  loads_.copies.clear();
}

void VllmSimple::save() {
  if (!of_step_.empty()) batches_.push_back({.is_load = false, .copies = {{0, of_step_}}});
  of_step_.clear();
}

// --- Copies in flight (49, 50) -------------------------------------------------------------------

bool VllmSimple::land(bool is_load) {
  for (Batch& batch : batches_) {
    if (batch.is_load != is_load || batch.landed) continue;
    batch.landed = true;
    return true;
  }
  return false;
}

/// A stored block gets the keys that its source has now.
std::pair<VllmSimple::Count, std::vector<VllmSimple::Id>> VllmSimple::settle() {
  std::pair<Count, std::vector<Id>> done;
  for (const bool is_load : {true, false})
    for (const Batch& batch : batches_) {
      if (batch.is_load != is_load || !batch.landed) continue;
      ++done.first;
      for (const auto& [id, pairs] : batch.copies) {
        std::vector<Number> host, device;
        for (const Pair& pair : pairs) {
          host.push_back(pair.host);
          device.push_back(pair.device);
          if (is_load || batch.is_void) continue;
          busy_.erase(pair.device);
          require(!device_.block(pair.device).entries.empty(), "what is stored keeps its key");
          for (const Entry& entry : device_.block(pair.device).entries)
            put_key(pair.host, entry.key, entry.tokens);
        }
        give_back(host);
        device_.give_back(device);
        if (is_load) done.second.push_back(id);
      }
    }
  std::erase_if(batches_, [](const Batch& batch) { return batch.landed; });
  return done;
}

VllmSimple::Count VllmSimple::reset() {
  while (!hits_.empty()) unpin(hits_.begin()->first);
  for (Batch& batch : batches_) batch.is_void = true;
  busy_.clear();
  passed_.clear();
  last_seen_ = 0;
  return batches_.empty() ? forget() : 0;
}

void VllmSimple::tell(std::vector<Count>& numbers) const {
  VllmPool::tell(numbers);
  numbers.push_back(last_seen_);
  for (const bool is_load : {false, true})
    numbers.push_back(std::ranges::count_if(
        batches_, [&](const Batch& batch) { return batch.is_load == is_load && !batch.landed; }));
}

}  // namespace lockstep::reference
