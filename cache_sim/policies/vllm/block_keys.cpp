#include "cache_sim/policies/vllm/block_keys.hpp"

#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {

void KeyTable::extend(std::vector<KeyId>& keys, const Tokens& tokens, Name salt) {
  for (;;) {
    const auto end = static_cast<std::uint32_t>((keys.size() + 1) * hash_block_);
    if (end + lookahead_ > tokens.size()) return;
    Digest hash;
    hash.add(tokens.digest(end + lookahead_));
    hash.add(end);
    hash.add(salt.index());
    keys.push_back(ids_.try_emplace(hash.value, static_cast<KeyId>(ids_.size())).first->second);
  }
}

}  // namespace lockstep::cache_sim
