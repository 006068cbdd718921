#include "cache_sim/base/prefix_index.hpp"

#include <algorithm>

#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {

std::uint64_t PrefixIndex::key(const Tokens& tokens, std::uint32_t blocks, Name salt) {
  return mix64(tokens.digest(blocks * kStride) ^ mix64(blocks ^ std::uint64_t{salt.index()} << 32));
}

void PrefixIndex::add(const Tokens& tokens, Name salt) {
  for (std::uint32_t blocks = 0;; ++blocks) {
    const std::uint32_t at = blocks * kStride;
    const std::uint32_t piece = std::min(kStride, tokens.size() - at);
    if (piece == 0) return;
    std::vector<Tokens>& known = continuations_[key(tokens, blocks, salt)];
    const auto covered = [&](const Tokens& other) {
      const std::uint32_t theirs = std::min(kStride, other.size() - at);
      return theirs >= piece && other.common(at, tokens, at, piece) == piece;
    };
    if (std::none_of(known.begin(), known.end(), covered)) known.push_back(tokens);
    if (piece < kStride) return;
  }
}

std::uint32_t PrefixIndex::longest_common(const Tokens& tokens, Name salt) const {
  for (std::uint32_t blocks = tokens.size() / kStride + 1; blocks-- > 0;) {
    const auto known = continuations_.find(key(tokens, blocks, salt));
    if (known == continuations_.end()) continue;
    const std::uint32_t at = blocks * kStride;
    std::uint32_t most = 0;
    for (const Tokens& other : known->second)
      most =
          std::max(most, tokens.common(at, other, at, std::min(tokens.size(), other.size()) - at));
    return at + most;
  }
  return 0;
}

}  // namespace lockstep::cache_sim
