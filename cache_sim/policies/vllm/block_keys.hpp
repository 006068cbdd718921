// Keys of blocks: the hash of everything up to a block's end (rule 6 of reference/caches/vllm.md).
// vLLM chains them,
//
//   h_i = Hash(h_{i-1}, tokens of hash block i, extra keys)
//
// so h_i stands for the whole prefix, for its salt, its adapter and its images up to there, and
// with multi-module MTP for the `lookahead` tokens after it. Every different hash gets a number,
// in the order of its first appearance. With an algorithm the hashes are vLLM's own
// (block_hash.hpp). Without one the prefix's digest takes the place of the chain
// (reference/protocol/tokens.hpp: two prefixes of one run have one digest with a probability below
// 2^-30): the numbers are the same, and cost less.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cache_sim/model/block_memory.hpp"
#include "cache_sim/policies/vllm/block_hash.hpp"
#include "reference/base/ids.hpp"
#include "reference/protocol/operation.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

/// The salt, adapter and images of a request: its KV and states depend on them as on its tokens.
struct ContentKeys {
  Name salt;
  Name lora;
  std::vector<ImageSpan> images;

  bool empty() const { return !salt.exists() && !lora.exists() && images.empty(); }
};

/// The tokens with these keys worked in: the first token is replaced where there is a salt or an
/// adapter, and so is the first token of each image. Two such sequences are equal exactly where
/// tokens and keys are; the length does not change.
Tokens keyed_tokens(const Tokens& tokens, const ContentKeys& keys);

class KeyTable {
 public:
  KeyTable(std::uint32_t hash_block, std::uint32_t lookahead,
           std::optional<BlockHashAlgorithm> algorithm = std::nullopt);

  /// Appends the keys that the first `size` tokens have and that are not in the list: one for each
  /// full hash block with `lookahead` tokens after it.
  void extend(std::vector<KeyId>& keys, const Tokens& tokens, std::uint32_t size,
              const ContentKeys& content);
  void extend(std::vector<KeyId>& keys, const Tokens& tokens, const ContentKeys& content) {
    extend(keys, tokens, tokens.size(), content);
  }

  /// vLLM's hash behind a key; there is one only with an algorithm.
  const BlockHash& hash(KeyId key) const { return *hashes_[key]; }

 private:
  KeyId chained(const std::vector<KeyId>& keys, const Tokens& tokens, const ContentKeys& content);

  std::uint32_t hash_block_;
  std::uint32_t lookahead_;
  std::optional<BlockHashAlgorithm> algorithm_;
  BlockHash none_;
  std::unordered_map<std::uint64_t, KeyId> ids_;      // by digest
  std::unordered_map<BlockHash, KeyId> ids_of_hash_;  // with an algorithm
  std::vector<const BlockHash*> hashes_;              // by key, in ids_of_hash_
  std::vector<Token> block_;                          // scratch: a block and what lies after it
};

}  // namespace lockstep::cache_sim
