// Drawn verifications keep drafts as often as rejection sampling does, and every output is
// finished.
#include "reference/protocol/speculation.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace lockstep {
namespace {

RequestSpec request_of(std::uint32_t output, std::int64_t branches = 1) {
  RequestSpec request;
  request.tokens = Tokens::of_document(1, 0, 10 + output);
  request.prompt_size = 10;
  request.branches = branches;
  return request;
}

TEST(Speculation, verificationsSampleTheWholeOutput) {
  for (const std::int64_t branches : {1, 2, 3})
    for (const std::string text : {"chain:3:700:1", "chain:1:0", "ngram:4:500:7", "chain:7:1000"}) {
      RequestSpec request = request_of(100, branches);
      speculate(request, parse_speculation(text).value(), 5);
      ASSERT_EQ(request.drafts.size(), request.accept.size());
      for (std::size_t i = 0; i < request.drafts.size(); ++i) {
        EXPECT_GE(request.accept[i], 1);
        EXPECT_LE(request.accept[i], request.most_kept(request.drafts[i])) << text;
      }
      const auto sampled = std::accumulate(request.accept.begin(), request.accept.end(), 1ll);
      EXPECT_GE(sampled, 100) << text << ", " << branches;
      EXPECT_LT(sampled - request.accept.back(), 100) << "none is beyond the end";
    }
}

// With chance p and n drafts, a verification keeps 1 + p + p^2 + … + p^n tokens on average.
TEST(Speculation, draftsAreKeptAsRejectionSamplingKeepsThem) {
  RequestSpec request = request_of(100'000);
  speculate(request, parse_speculation("chain:3:700:9").value(), 1);
  const double kept = 99'999.0 / static_cast<double>(request.accept.size());
  EXPECT_NEAR(kept, 1 + 0.7 + 0.49 + 0.343, 0.02);
  RequestSpec greedy = request_of(101);
  speculate(greedy, parse_speculation("chain:3:1000").value(), 1);
  EXPECT_EQ(greedy.accept, std::vector<std::int64_t>(25, 4));
}

TEST(Speculation, nGramsFindNoDraftNowAndThen) {
  RequestSpec request = request_of(1000);
  speculate(request, parse_speculation("ngram:3:500").value(), 1);
  for (const std::int64_t drafts : {0, 1, 2, 3})
    EXPECT_GT(std::ranges::count(request.drafts, drafts), 50) << drafts;
}

TEST(Speculation, isAFunctionOfSeedAndStream) {
  const auto drawn = [](const char* text, std::uint64_t stream) {
    RequestSpec request = request_of(200);
    speculate(request, parse_speculation(text).value(), stream);
    return request.accept;
  };
  EXPECT_EQ(drawn("chain:3:700:1", 4), drawn("chain:3:700:1", 4));
  EXPECT_NE(drawn("chain:3:700:1", 4), drawn("chain:3:700:1", 5));
  EXPECT_NE(drawn("chain:3:700:1", 4), drawn("chain:3:700:2", 4));
}

// A tree keeps at most its longest way and the token sampled after it.
TEST(Speculation, aTreeKeepsNoMoreThanItsDepth) {
  const RequestSpec pairs = request_of(9, 2);
  EXPECT_EQ(pairs.most_kept(0), 1);
  EXPECT_EQ(pairs.most_kept(1), 2);
  EXPECT_EQ(pairs.most_kept(2), 2);
  EXPECT_EQ(pairs.most_kept(3), 3);
  EXPECT_EQ(pairs.most_kept(6), 3);
  EXPECT_EQ(pairs.most_kept(7), 4);
  EXPECT_EQ(request_of(9).most_kept(6), 7) << "a chain";
}

TEST(Speculation, badTextIsRefused) {
  for (const char* const text :
       {"", "chain", "chain:3", "tree:3:700", "chain:0:700", "chain:3:1001", "chain:3:700:1:2",
        "chain:x:700", "ngram:3:", "chain:3:700:-1"})
    EXPECT_FALSE(parse_speculation(text).has_value()) << text;
}

}  // namespace
}  // namespace lockstep
