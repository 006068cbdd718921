// The longest prefix of anything that was stored, against comparing with everything.
#include "cache_sim/base/prefix_trie.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "reference/base/philox.hpp"

namespace lockstep::cache_sim {
namespace {

// Sequences of several pieces, whose shared prefixes end inside edges and at their ends.
TEST(PrefixTries, findWhatAPlainComparisonFinds) {
  constexpr std::uint32_t sizes[] = {0, 1, 2, 62, 63, 64, 65, 127, 128, 129, 191, 200};
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    std::uint64_t at = 0;
    const auto below = [&](std::uint64_t bound) { return random_below(bound, seed, 5, at++); };
    PrefixTrie trie;
    std::vector<std::pair<Tokens, Name>> added;
    for (int i = 0; i < 40; ++i) {
      Tokens tokens;
      if (!added.empty() && below(4) != 0) {
        const Tokens& old = added[below(added.size())].first;
        tokens = old.prefix(std::min(sizes[below(std::size(sizes))], old.size()));
      }
      for (std::uint64_t piece = below(3); piece > 0; --piece) {
        const std::uint32_t size = sizes[below(std::size(sizes))];
        tokens = tokens.followed_by(
            below(2) == 0 ? Tokens::of_document(static_cast<Document>(1 + below(2)), 0, size)
                          : Tokens::of_ids(std::vector<std::uint32_t>(size, 7)));
      }
      const Name salt = below(5) == 0 ? Name::intern("salted") : Name();
      std::uint32_t longest = 0;
      for (const auto& [old, old_salt] : added)
        if (old_salt == salt)
          longest =
              std::max(longest, tokens.common(0, old, 0, std::min(tokens.size(), old.size())));
      ASSERT_EQ(trie.longest_common(tokens, salt), longest)
          << "seed " << seed << ": " << tokens.text(200);
      trie.insert(tokens, salt);
      added.emplace_back(tokens, salt);
      ASSERT_EQ(trie.longest_common(tokens, salt), tokens.size());
    }
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
