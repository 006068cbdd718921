// What names the content of a block: the hash of everything up to its end. vLLM chains them,
//
//   h_i = Hash(h_{i-1}, tokens of hash block i, extra keys)
//
// so h_i stands for the whole prefix, its salt, and with multi-module MTP the `lookahead` tokens
// behind it. Here the prefix's digest takes the place of the chain (reference/protocol/tokens.hpp:
// two prefixes of one run have one digest with a probability below 2^-30), and every different hash
// gets a number, in the order of its first appearance.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "reference/base/ids.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

using KeyId = std::uint32_t;

class KeyTable {
 public:
  KeyTable(std::uint32_t hash_block, std::uint32_t lookahead)
      : hash_block_(hash_block), lookahead_(lookahead) {}

  /// Appends the keys that these tokens have and that are not in the list: one for each full hash
  /// block with `lookahead` tokens behind it.
  void extend(std::vector<KeyId>& keys, const Tokens& tokens, Name salt);

 private:
  std::uint32_t hash_block_;
  std::uint32_t lookahead_;
  std::unordered_map<std::uint64_t, KeyId> ids_;
};

}  // namespace lockstep::cache_sim
