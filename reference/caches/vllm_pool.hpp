// The blocks of vLLM's caches for the oracle: rules 1 to 4 of vllm.md, over plain lists.
//
//   here       vLLM                         what it is
//   Block      KVCacheBlock                 references and keys of one block
//   queue      FreeKVCacheBlockQueue        free blocks, the next one to be popped first
//   keys       cached_block_hash_to_block   by key, the blocks that have it, oldest first
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace lockstep::reference {

class VllmPool {
 public:
  using Count = std::int64_t;
  using Number = int;                  ///< of a block, or of a hash
  using Key = std::pair<int, Number>;  ///< group and hash

  struct Entry {
    Key key;
    Count tokens;
  };
  struct Block {
    Count references = 0;
    std::vector<Entry> entries;  ///< the first is the primary one
  };

  /// Block 0, the null block, is one of them.
  explicit VllmPool(Count blocks);

  Number pop();
  void take(Number block);
  void give_back(const std::vector<Number>& batch);
  void put_key(Number block, Key key, Count tokens);
  void drop_keys(Number block);
  Number holder(Key key) const;
  const Block& block(Number block) const { return blocks_[static_cast<std::size_t>(block)]; }
  const std::vector<Number>& queue() const { return queue_; }
  /// Takes all keys where every block is free. The number of blocks that had some.
  Count forget();
  /// Appends the numbers that contents= covers.
  void tell(std::vector<Count>& numbers) const;

 protected:
  std::vector<Block> blocks_;
  std::vector<Number> queue_;
  std::map<Key, std::vector<Number>> keys_;
  std::set<Number> allocated_;  ///< blocks that were popped in this step
};

}  // namespace lockstep::reference
