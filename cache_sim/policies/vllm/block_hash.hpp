// vLLM 0.33's hash of a block of tokens, byte by byte. It names the block in the prefix cache, in
// KV events and between servers.
//
//   h_i = Hash((h_{i-1} or NONE_HASH, tokens of block i, extra keys))
//
// The triple is written as Python's pickle (protocol 5) or as canonical CBOR (RFC 8949, section
// 4.2), and the bytes are hashed with SHA-256 or with 128 bits of XXH3. NONE_HASH is the hash of a
// seed: PYTHONHASHSEED where it is set; else `vllm-none-hash`, or with xxHash something random.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

enum class BlockHashAlgorithm : std::uint8_t { sha256, sha256_cbor, xxhash, xxhash_cbor };
/// vLLM's --prefix-caching-hash-algo; nothing for another word.
std::optional<BlockHashAlgorithm> block_hash_algorithm_from(std::string_view name);

/// 32 bytes of SHA-256, or 16 of XXH3.
using BlockHash = std::string;

inline constexpr std::string_view kNoneHashSeed = "vllm-none-hash";

/// The extra keys: the block's content depends on them too. In vLLM's order.
struct BlockExtraKeys {
  struct Image {
    std::string identifier;
    std::int64_t offset;  ///< of its first token from the block's start; may be negative
  };
  std::optional<std::pair<std::string, std::string>> lora;  ///< name and path
  std::vector<Image> images;
  std::string cache_salt;  ///< of a request's first block; empty: none
  std::optional<BlockHash> prompt_embeds;

  bool empty() const { return !lora && images.empty() && cache_salt.empty() && !prompt_embeds; }
};

BlockHash none_hash(BlockHashAlgorithm algorithm, std::string_view seed);

/// `tokens`: of the block. `lookahead`: the tokens after it that the hash covers; with them the
/// extra keys become (extra keys, token, …).
BlockHash hash_block(BlockHashAlgorithm algorithm, const BlockHash& parent,
                     std::span<const Token> tokens, const BlockExtraKeys& extra,
                     std::span<const Token> lookahead = {});

}  // namespace lockstep::cache_sim
