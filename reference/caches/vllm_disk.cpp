// The oracle of a disk behind the CPU tier: TieringOffloadingManager of vLLM 0.33 with a secondary
// tier that never evicts (vllm.md, 38 to 43), as members of VllmOffload.
//
//   here        vLLM                              what it is
//   Transfer    TransferJob                       a copy between host and disk, oldest first
//   wanted      _pending_load_submissions         promotions that begin when the schedule ends
//   was_polled  _processed_jobs_this_step         whether ended transfers were seen in this step
//   fence       OffloadingConnector._reset_fence  copies in flight at a reset: no promotion yet
#include <algorithm>

#include "reference/caches/vllm_offload.hpp"

namespace lockstep::reference {

/// _process_finished_jobs()
void VllmOffload::poll() {
  was_polled_ = true;
  for (const Transfer& transfer : transfers_) {
    if (!transfer.has_ended) continue;
    ++noted_;
    for (const Key& key : transfer.keys) {
      if (!transfer.is_promotion) {
        --chunks_.at(key).references;
      } else if (!transfer.has_failed) {
        chunks_.at(key).references = 0;
      } else {
        free_places_.push_back(chunks_.at(key).place);
        chunks_.erase(key);
      }
    }
  }
  std::erase_if(transfers_, [](const Transfer& transfer) { return transfer.has_ended; });
}

/// lookup(): the host's chunk; one that the disk has gets a place at once, and is being written.
/// No chunk of the asking request's own prefix gives way to it.
const VllmOffload::Chunk* VllmOffload::lookup(Id id, const Shown& request, const Key& key) {
  if (!has_disk_) return chunk(key);
  if (!was_polled_) poll();
  if (chunk(key) != nullptr || !disk_.contains(key) || !fence_.empty()) return chunk(key);
  std::vector<Key> own{key};
  for (const Number hash : request.hashes)
    for (int group = 0; group < static_cast<int>(groups_.size()); ++group)
      own.emplace_back(group, hash);
  if (!reserve(requests_.at(id), {key}, own)) return nullptr;
  wanted_.emplace_back(id, key);
  ++promoted_;
  return chunk(key);
}

/// on_schedule_end()
void VllmOffload::submit() {
  if (!was_polled_) poll();
  was_polled_ = false;
  std::vector<Id> order;
  std::map<Id, std::vector<Key>> by_request;
  for (const auto& [id, key] : wanted_) {
    if (!by_request.contains(id)) order.push_back(id);
    by_request[id].push_back(key);
  }
  wanted_.clear();
  for (const Id id : order) transfers_.push_back({.is_promotion = true, .keys = by_request[id]});
}

/// complete_store(): what has come to the host goes on to the disk.
void VllmOffload::cascade(const std::vector<Key>& keys) {
  for (const Key& key : keys) ++chunks_.at(key).references;
  transfers_.push_back({.is_promotion = false, .keys = keys});
}

/// The oldest transfer that has not ended. A promotion that lacks a chunk fails; who fails loses
/// its chunks.
bool VllmOffload::end_transfer(bool is_promotion, bool fails) {
  for (Transfer& transfer : transfers_) {
    if (transfer.is_promotion != is_promotion || transfer.has_ended) continue;
    transfer.has_ended = true;
    transfer.has_failed = fails;
    for (const Key& key : transfer.keys)
      transfer.has_failed |= is_promotion && !disk_.contains(key);
    for (const Key& key : transfer.keys)
      if (!is_promotion && !fails)
        disk_.insert(key);
      else if (is_promotion && transfer.has_failed)
        disk_.erase(key);
    return true;
  }
  return false;
}

bool VllmOffload::has_ended_transfers() const {
  return std::ranges::any_of(transfers_,
                             [](const Transfer& transfer) { return transfer.has_ended; });
}

/// drain_jobs(), and what reset_cache() does before the host is emptied.
void VllmOffload::drain() {
  while (end_transfer(false, false) || end_transfer(true, false)) continue;
  poll();
  wanted_.clear();
  was_polled_ = false;
}

VllmOffload::Count VllmOffload::empty_disk() {
  const auto count = static_cast<Count>(disk_.size());
  disk_.clear();
  return count;
}

void VllmOffload::leave(Id id) {
  requests_.at(id).has_ended = true;
  finished_.push_back(id);
}

void VllmOffload::tell_disk(std::vector<Count>& numbers) const {
  for (const Key& key : disk_) numbers.insert(numbers.end(), {key.first, key.second});
  std::set<Id> asking;
  for (const auto& [id, key] : wanted_) asking.insert(id);
  const auto flying = [&](bool is_promotion) {
    return std::ranges::count_if(transfers_, [&](const Transfer& transfer) {
      return transfer.is_promotion == is_promotion && !transfer.has_ended;
    });
  };
  numbers.insert(numbers.end(),
                 {0, static_cast<Count>(asking.size()), flying(false), flying(true)});
}

}  // namespace lockstep::reference
