// The one pool of vLLM's blocks: every cache group takes its blocks from here. A block is free
// while nobody refers to it, and a free block keeps its keys until it is popped: the free queue is
// the eviction order. Rules 1 to 4 of reference/caches/vllm.md:
//
//   block 0        stands for "no block", columns that a group does not need: never free or keyed
//
//   pop            from the head of the queue; the block's keys are removed with it
//
//   give back      one call is one batch: blocks without a key go to the head, the first of the
//                  batch foremost; blocks with a key go to the tail, in the order of the batch
//
//   key -> blocks  contents may exist twice; the oldest block that still has the key is served
//
// A key is a chain hash and a cache group. Chain hashes are numbered densely (block_keys.hpp), so
// that a lookup is an index and not a search.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "cache_sim/model/block_memory.hpp"
#include "cache_sim/policies/vllm/block_keys.hpp"
#include "cache_sim/policies/vllm/block_rules.hpp"

namespace lockstep::cache_sim {

class BlockPool {
 public:
  /// A key that a block has, and the tokens that the key stands for.
  struct Entry {
    KeyId key;
    std::uint32_t group;
    std::uint32_t tokens;
    BlockId block;
    std::uint32_t next_of_key, previous_of_key;  // older and newer blocks with this key
    std::uint32_t next_of_block;                 // the first entry of a block is its primary one
  };
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

  /// The rules must outlive the pool.
  explicit BlockPool(const BlockRules& rules);

  std::uint32_t block_count() const { return static_cast<std::uint32_t>(blocks_.size()) - 1; }
  std::uint32_t free_count() const { return free_count_; }

  /// Pops the head; requires free_count() > 0. Its keys are gone, one reference is the caller's.
  BlockId pop();
  /// One more reference; a free block leaves the queue.
  void touch(BlockId block) {
    if (blocks_[block].references++ == 0) unlink(block);
  }
  /// One reference less of each; null blocks are left out.
  void give_back(std::span<const BlockId> batch);

  std::int32_t references(BlockId block) const { return blocks_[block].references; }
  bool has_key(BlockId block) const { return blocks_[block].first_entry != kNone; }
  bool has_key(BlockId block, std::uint32_t group, KeyId key) const;
  /// The oldest block with that key, kNullBlock for none.
  BlockId find(std::uint32_t group, KeyId key) const {
    const std::vector<std::uint32_t>& heads = first_of_key_[group];
    if (key >= heads.size() || heads[key] == kNone) return kNullBlock;
    return entries_[heads[key]].block;
  }
  /// The block's primary entry; requires has_key().
  const Entry& primary(BlockId block) const { return entries_[blocks_[block].first_entry]; }
  /// Gives the block a key: its primary one, or an alias where it has one. The same key twice on a
  /// block is there once.
  void add_key(BlockId block, std::uint32_t group, KeyId key, std::uint32_t tokens);
  void remove_keys(BlockId block);
  /// All keys of one block, in their order, become those of another one, which has none.
  void move_keys(BlockId from, BlockId to);

  /// Tells the memory which blocks lose what they hold; it must outlive the pool's last call.
  void follow(BlockMemory& memory) { memory_ = &memory; }

  // For auditors.
  BlockId first_free() const { return blocks_[kNullBlock].next; }  ///< kNullBlock after the last
  BlockId last_free() const { return blocks_[kNullBlock].previous; }
  BlockId next_free(BlockId block) const { return blocks_[block].next; }
  BlockId previous_free(BlockId block) const { return blocks_[block].previous; }
  std::vector<Entry> entries_of(BlockId block) const;
  std::vector<BlockId> blocks_of(std::uint32_t group, KeyId key) const;
  std::size_t indexed_keys() const;  ///< entries that the index leads to

 private:
  struct Block {
    BlockId next, previous;  // in the free queue; block 0 is its two ends
    std::int32_t references;
    std::uint32_t first_entry;
  };

  void link_behind(BlockId place, BlockId block);
  void unlink(BlockId block);
  void remove_entry_of_key(std::uint32_t entry);
  void insert_entry_of_key(std::uint32_t entry);

  const BlockRules& rules_;
  std::vector<Block> blocks_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> free_entries_;
  std::vector<std::vector<std::uint32_t>> first_of_key_;  // by group, by key
  std::vector<std::vector<std::uint32_t>> last_of_key_;
  std::uint32_t free_count_;
  BlockMemory* memory_ = nullptr;  // null: nobody asks what blocks hold
};

}  // namespace lockstep::cache_sim
