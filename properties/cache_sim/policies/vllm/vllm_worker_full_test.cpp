// The worker of vLLM's align mode at length: more than a million keys of blocks are compared with
// what the blocks hold, and each mutant is looked for from several seeds.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <vector>

#include "properties/cache_sim/policies/vllm/vllm_server.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace testing_support;

TEST(VllmWorkerAtLength, aMillionKeyedBlocksHoldTheirTokens) {
  VllmRun all;
  for (std::uint64_t seed = 1; seed <= 2; ++seed)
    for (std::uint64_t stream = 0; stream < 66; ++stream) {
      all += run_vllm_server(drawn_vllm_config(seed, stream), seed, stream, 400, nullptr);
      ASSERT_EQ(all.finding, "") << "seed " << seed << " stream " << stream;
    }
  std::cout << all.text() << "\n";
  EXPECT_GE(all.checks.hashed, 1'000'000);
  EXPECT_GE(all.checks.states, 300'000);
  EXPECT_GE(all.preemptions, 400);
  EXPECT_GE(all.copies, 6'000);
}

// Medians of eleven seeds: in how many runs, steps and comparisons a mutant shows.
TEST(VllmWorkerAtLength, mutantsAreFoundFromEverySeed) {
  const auto median = [](std::vector<std::int64_t> of) {
    std::ranges::sort(of);
    return of[of.size() / 2];
  };
  for (const char* const name : testing_support::kVllmMutants) {
    SCOPED_TRACE(name);
    std::vector<std::int64_t> runs, steps, comparisons;
    for (std::uint64_t seed = 1; seed <= 11; ++seed) {
      VllmRun all;
      std::uint64_t stream = 0;
      for (; stream < 60 && all.finding.empty(); ++stream)
        all +=
            run_vllm_server(drawn_vllm_config(seed, stream), seed, stream, 600, Defect::find(name));
      EXPECT_NE(all.finding, "") << "seed " << seed;
      runs.push_back(static_cast<std::int64_t>(stream));
      steps.push_back(all.steps);
      comparisons.push_back(all.checks.hashed + all.checks.states);
    }
    std::cout << fmt::format("{:46} median of 11 seeds: run {}, step {}, comparison {}\n", name,
                             median(runs), median(steps), median(comparisons));
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
