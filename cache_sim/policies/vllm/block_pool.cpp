#include "cache_sim/policies/vllm/block_pool.hpp"

#include <algorithm>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

BlockPool::BlockPool(const BlockRules& rules)
    : rules_(rules),
      blocks_(static_cast<std::size_t>(rules.blocks)),
      first_of_key_(rules.groups.size()),
      last_of_key_(rules.groups.size()),
      free_count_(static_cast<std::uint32_t>(rules.blocks - 1)) {
  const auto blocks = static_cast<std::uint32_t>(rules.blocks);
  require(blocks >= 2, "a pool has a block besides the null block");
  for (BlockId block = 0; block < blocks; ++block)
    blocks_[block] = {.next = (block + 1) % blocks,
                      .previous = (block + blocks - 1) % blocks,
                      .references = 0,
                      .first_entry = kNone};
}

void BlockPool::link_behind(BlockId place, BlockId block) {
  const BlockId next = blocks_[place].next;
  blocks_[block].previous = place;
  blocks_[block].next = next;
  blocks_[place].next = block;
  blocks_[next].previous = block;
  ++free_count_;
}

void BlockPool::unlink(BlockId block) {
  const Block& cell = blocks_[block];
  blocks_[cell.previous].next = cell.next;
  blocks_[cell.next].previous = cell.previous;
  --free_count_;
}

BlockId BlockPool::pop() {
  const BlockId block = rules_.pops_newest ? last_free() : first_free();
  require(block != kNullBlock, "a block is popped where one is free");
  unlink(block);
  blocks_[block].references = 1;
  if (has_key(block)) remove_keys(block);
  return block;
}

void BlockPool::give_back(std::span<const BlockId> batch) {
  BlockId head = kNullBlock;  // the batch's blocks without a key go one after the other
  for (const BlockId block : batch) {
    if (block == kNullBlock) continue;
    require(blocks_[block].references > 0, "a block that is given back is referred to");
    if (--blocks_[block].references != 0) continue;
    if (has_key(block) && rules_.keyed_blocks_go_last) {
      link_behind(blocks_[kNullBlock].previous, block);
    } else {
      link_behind(head, block);
      if (rules_.counts_free_blocks_twice) ++free_count_;
      head = block;
      if (memory_ != nullptr && !has_key(block)) memory_->lose(block);
    }
  }
}

// --- Keys ----------------------------------------------------------------------------------------

void BlockPool::insert_entry_of_key(std::uint32_t at) {
  Entry& entry = entries_[at];
  std::vector<std::uint32_t>& first = first_of_key_[entry.group];
  std::vector<std::uint32_t>& last = last_of_key_[entry.group];
  if (entry.key >= first.size()) {
    const std::size_t size = std::max<std::size_t>(entry.key + 1, first.size() * 2);
    first.resize(size, kNone);
    last.resize(size, kNone);
  }
  entry.next_of_key = kNone;
  entry.previous_of_key = last[entry.key];
  if (last[entry.key] == kNone)
    first[entry.key] = at;
  else
    entries_[last[entry.key]].next_of_key = at;
  last[entry.key] = at;
}

void BlockPool::remove_entry_of_key(std::uint32_t at) {
  const Entry& entry = entries_[at];
  if (entry.previous_of_key == kNone)
    first_of_key_[entry.group][entry.key] = entry.next_of_key;
  else
    entries_[entry.previous_of_key].next_of_key = entry.next_of_key;
  if (entry.next_of_key == kNone)
    last_of_key_[entry.group][entry.key] = entry.previous_of_key;
  else
    entries_[entry.next_of_key].previous_of_key = entry.previous_of_key;
}

bool BlockPool::has_key(BlockId block, std::uint32_t group, KeyId key) const {
  for (std::uint32_t at = blocks_[block].first_entry; at != kNone; at = entries_[at].next_of_block)
    if (entries_[at].key == key && entries_[at].group == group) return true;
  return false;
}

void BlockPool::add_key(BlockId block, std::uint32_t group, KeyId key, std::uint32_t tokens) {
  std::uint32_t* end = &blocks_[block].first_entry;
  for (; *end != kNone; end = &entries_[*end].next_of_block)
    if (entries_[*end].key == key && entries_[*end].group == group) return;
  std::uint32_t at;
  if (free_entries_.empty()) {
    at = static_cast<std::uint32_t>(entries_.size());
    *end = at;  // before the entries move
    entries_.emplace_back();
  } else {
    at = free_entries_.back();
    free_entries_.pop_back();
    *end = at;
  }
  entries_[at] = {.key = key, .group = group, .tokens = tokens, .block = block};
  entries_[at].next_of_block = kNone;
  insert_entry_of_key(at);
}

void BlockPool::remove_keys(BlockId block) {
  std::uint32_t at = blocks_[block].first_entry;
  while (at != kNone) {
    if (rules_.unindexes_removed_keys) {
      remove_entry_of_key(at);
      free_entries_.push_back(at);
    }
    at = entries_[at].next_of_block;
  }
  blocks_[block].first_entry = kNone;
  if (memory_ != nullptr && blocks_[block].references == 0) memory_->lose(block);
}

void BlockPool::move_keys(BlockId from, BlockId to) {
  require(!has_key(to), "keys move to a block that has none");
  const std::vector<Entry> moved = entries_of(from);
  remove_keys(from);
  for (const Entry& entry : moved) add_key(to, entry.group, entry.key, entry.tokens);
}

std::vector<BlockPool::Entry> BlockPool::entries_of(BlockId block) const {
  std::vector<Entry> all;
  for (std::uint32_t at = blocks_[block].first_entry; at != kNone; at = entries_[at].next_of_block)
    all.push_back(entries_[at]);
  return all;
}

std::vector<BlockId> BlockPool::blocks_of(std::uint32_t group, KeyId key) const {
  std::vector<BlockId> all;
  if (key >= first_of_key_[group].size()) return all;
  for (std::uint32_t at = first_of_key_[group][key]; at != kNone; at = entries_[at].next_of_key)
    all.push_back(entries_[at].block);
  return all;
}

std::size_t BlockPool::indexed_keys() const {
  std::size_t count = 0;
  for (const std::vector<std::uint32_t>& heads : first_of_key_)
    for (std::uint32_t at : heads)
      for (; at != kNone && count <= entries_.size(); at = entries_[at].next_of_key) ++count;
  return count;
}

}  // namespace lockstep::cache_sim
