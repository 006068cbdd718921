// Every token sequence that a subject was ever given: how long a prefix of a new one could possibly
// be cached. The bound that a subject of which nothing is known inside can still be held to.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "reference/base/ids.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

class PrefixIndex {
 public:
  void add(const Tokens& tokens, Name salt);
  /// The longest prefix that the tokens share with anything added in this namespace.
  std::uint32_t longest_common(const Tokens& tokens, Name salt) const;

 private:
  static constexpr std::uint32_t kStride = 64;

  static std::uint64_t key(const Tokens& tokens, std::uint32_t blocks, Name salt);

  /// Under the digest of the first k blocks: the sequences that go on differently behind them.
  std::unordered_map<std::uint64_t, std::vector<Tokens>> continuations_;
};

}  // namespace lockstep::cache_sim
