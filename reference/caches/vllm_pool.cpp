#include "reference/caches/vllm_pool.hpp"

#include <algorithm>

#include "reference/base/require.hpp"

namespace lockstep::reference {

VllmPool::VllmPool(Count blocks) : blocks_(static_cast<std::size_t>(blocks)) {
  for (Number block = 1; block < static_cast<Number>(blocks); ++block) queue_.push_back(block);
}

/// The head of the queue, without the keys it had (rule 2).
VllmPool::Number VllmPool::pop() {
  require(!queue_.empty(), "a block is popped where one is free");
  const Number block = queue_.front();
  queue_.erase(queue_.begin());
  drop_keys(block);
  allocated_.insert(block);
  blocks_[static_cast<std::size_t>(block)].references = 1;
  return block;
}

void VllmPool::take(Number block) {
  if (blocks_[static_cast<std::size_t>(block)].references++ == 0) std::erase(queue_, block);
}

/// Blocks without keys go to the head, in their order; those with keys to the tail (rule 3).
void VllmPool::give_back(const std::vector<Number>& batch) {
  std::vector<Number> first;
  for (const Number block : batch) {
    if (block == 0) continue;
    Block& given = blocks_[static_cast<std::size_t>(block)];
    require(given.references > 0, "a block that is given back is referred to");
    if (--given.references > 0) continue;
    if (given.entries.empty())
      first.push_back(block);
    else
      queue_.push_back(block);
  }
  queue_.insert(queue_.begin(), first.begin(), first.end());
}

void VllmPool::put_key(Number block, Key key, Count tokens) {
  std::vector<Entry>& entries = blocks_[static_cast<std::size_t>(block)].entries;
  for (const Entry& entry : entries)
    if (entry.key == key) return;
  entries.push_back({key, tokens});
  keys_[key].push_back(block);
}

void VllmPool::drop_keys(Number block) {
  std::vector<Entry>& entries = blocks_[static_cast<std::size_t>(block)].entries;
  for (const Entry& entry : entries) {
    std::erase(keys_[entry.key], block);
    if (keys_[entry.key].empty()) keys_.erase(entry.key);
  }
  entries.clear();
}

/// The oldest block that has the key; 0 for none (rule 4).
VllmPool::Number VllmPool::holder(Key key) const {
  const auto found = keys_.find(key);
  return found == keys_.end() ? 0 : found->second.front();
}

VllmPool::Count VllmPool::forget() {
  if (queue_.size() + 1 != blocks_.size()) return 0;
  Count keyed = 0;
  for (Number block = 1; block < static_cast<Number>(blocks_.size()); ++block) {
    keyed += blocks_[static_cast<std::size_t>(block)].entries.empty() ? 0 : 1;
    drop_keys(block);
  }
  return keyed;
}

void VllmPool::tell(std::vector<Count>& numbers) const {
  numbers.insert(numbers.end(), queue_.begin(), queue_.end());
  numbers.push_back(0);
  for (std::size_t i = 1; i < blocks_.size(); ++i) {
    numbers.push_back(blocks_[i].references);
    std::vector<Entry> entries = blocks_[i].entries;
    if (!entries.empty()) {
      std::sort(entries.begin() + 1, entries.end(),
                [](const Entry& a, const Entry& b) { return a.key < b.key; });
      numbers.push_back(entries.front().tokens);
    }
    for (const Entry& entry : entries) {
      numbers.push_back(entry.key.first);
      numbers.push_back(entry.key.second);
    }
    numbers.push_back(0);
  }
  for (const auto& [key, holders] : keys_) {
    if (holders.size() < 2) continue;
    numbers.insert(numbers.end(), holders.begin(), holders.end());
    numbers.push_back(0);
  }
}

}  // namespace lockstep::reference
