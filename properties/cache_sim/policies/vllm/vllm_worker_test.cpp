// The worker of vLLM's align mode over the blocks that `vllm-align` gives out: what has a key holds
// the state and the KV of the key's tokens, and every forward begins with those of its own. Each of
// the worker's rules is broken once, and found.
#include <gtest/gtest.h>

#include <iostream>
#include <string>

#include "properties/cache_sim/policies/vllm/vllm_server.hpp"
#include "properties/support/search.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace testing_support;

// A state block that is keyed for column p holds the state after exactly (p + 1) B tokens, or those
// of its boundary inside the block; KV and conv rows likewise.
TEST(VllmWorker, keyedBlocksHoldTheTokensOfTheirKeys) {
  VllmRun all;
  for (std::uint64_t stream = 0; stream < 24; ++stream) {
    const Config config = drawn_vllm_config(1, stream);
    all += run_vllm_server(config, 1, stream, 100, nullptr);
    ASSERT_EQ(all.finding, "") << "stream " << stream << ": groups=" << config.text("groups")
                               << " hash_block=" << config.number("hash_block")
                               << " drafts=" << config.drafts << " eagle=" << config.number("eagle")
                               << " retention=" << config.text("retention")
                               << " blocks=" << config.number("blocks");
  }
  std::cout << all.text() << "\n";
  EXPECT_GT(all.checks.hashed, 50'000);
  EXPECT_GT(all.checks.states, 10'000);
  EXPECT_GT(all.copies, 500);
  EXPECT_GT(all.preemptions, 10);
  EXPECT_GT(all.accepted, 1'000);
  EXPECT_LT(all.accepted, all.drafted);
}

// The same where kernels store a state inside the last chunk and where prefixes come from another
// server.
TEST(VllmWorker, statesInsideChunksAndSentOnesAreThoseOfTheirTokens) {
  VllmRun all;
  for (std::uint64_t stream = 0; stream < 24; ++stream) {
    Config config = drawn_vllm_config(2, stream);
    config.put("checkpoint", std::int64_t{1} << 2 * (stream % 3));
    config.put("shared_prefix_checkpoint",
               config.number("eagle") == 2 && config.number("hash_block") < config.number("block")
                   ? 1
                   : 0);
    all += run_vllm_server(config, 2, stream, 100, nullptr, 3);
    ASSERT_EQ(all.finding, "") << "stream " << stream;
  }
  std::cout << all.text() << "\n";
  EXPECT_GT(all.checks.hashed, 50'000);
  EXPECT_GT(all.received, 1'000);
  EXPECT_GT(all.inner_states, 200);
}

class VllmWorkerMutants : public testing::TestWithParam<const char*> {};

// Each broken rule shows in what blocks hold, without an oracle of the decisions.
TEST_P(VllmWorkerMutants, areFoundByWhatBlocksHold) {
  const Defect* const defect = Defect::find(GetParam());
  ASSERT_NE(defect, nullptr);
  VllmRun all;
  std::uint64_t runs = 0;
  for (; runs < 40 && all.finding.empty(); ++runs)
    all += run_vllm_server(drawn_vllm_config(1, runs), 1, runs, 600, defect);
  ASSERT_NE(all.finding, "") << "not found in " << all.text();
  std::cout << GetParam() << ": found by run " << runs << ", step " << all.steps
            << " of all, check " << all.checks.hashed + all.checks.states << ": " << all.finding
            << "\n";
  RecordProperty("runs_to_detect", static_cast<int>(runs));
  RecordProperty("steps_to_detect", static_cast<int>(all.steps));
}

INSTANTIATE_TEST_SUITE_P(Ten, VllmWorkerMutants, testing::ValuesIn(testing_support::kVllmMutants),
                         [](const auto& info) {
                           return testing_support::test_name(std::string(info.param).substr(11));
                         });

}  // namespace
}  // namespace lockstep::cache_sim
