#include "cache_sim/policies/vllm/block_keys.hpp"

#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {

KeyTable::KeyTable(std::uint32_t hash_block, std::uint32_t lookahead,
                   std::optional<BlockHashAlgorithm> algorithm)
    : hash_block_(hash_block), lookahead_(lookahead), algorithm_(algorithm) {
  if (algorithm) none_ = none_hash(*algorithm, kNoneHashSeed);
}

void KeyTable::extend(std::vector<KeyId>& keys, const Tokens& tokens, Name salt) {
  for (;;) {
    const auto end = static_cast<std::uint32_t>((keys.size() + 1) * hash_block_);
    if (end + lookahead_ > tokens.size()) return;
    if (algorithm_) {
      keys.push_back(chained(keys, tokens, salt));
      continue;
    }
    Digest hash;
    hash.add(tokens.digest(end + lookahead_));
    hash.add(end);
    hash.add(salt.index());
    keys.push_back(ids_.try_emplace(hash.value, static_cast<KeyId>(ids_.size())).first->second);
  }
}

/// The key behind those in the list.
KeyId KeyTable::chained(const std::vector<KeyId>& keys, const Tokens& tokens, Name salt) {
  const auto begin = static_cast<std::uint32_t>(keys.size() * hash_block_);
  block_.clear();
  for (std::uint32_t i = begin; i < begin + hash_block_ + lookahead_; ++i)
    block_.push_back(tokens[i]);
  BlockExtraKeys extra;
  if (keys.empty() && salt.exists()) extra.cache_salt = salt.text();
  const std::span<const Token> all(block_);
  const auto [place, is_new] =
      ids_of_hash_.try_emplace(hash_block(*algorithm_, keys.empty() ? none_ : *hashes_[keys.back()],
                                          all.first(hash_block_), extra, all.subspan(hash_block_)),
                               static_cast<KeyId>(hashes_.size()));
  if (is_new) hashes_.push_back(&place->first);
  return place->second;
}

}  // namespace lockstep::cache_sim
