// The policy `vllm-align` decides as vLLM 0.33's own block manager did, block by block.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache_sim/replay/replay.hpp"
#include "properties/support/program.hpp"

namespace lockstep::cache_sim {
namespace {

struct Golden {
  const char* workload;
  const char* file;
  std::int64_t hit_tokens;
};
constexpr Golden kGolden[] = {{"vllm-w1", "A_dense_B256_h256_n4096.jsonl", 2'299'648},
                              {"vllm-w1:retention=0", "B_ret0_B256_h256_n4096.jsonl", 2'297'600},
                              {"vllm-w1:blocks=448", "E_dense_n448.jsonl", 538'112}};

ReplayOutcome replayed(const std::string& workload, const std::string& defect,
                       const std::string& config = "") {
  ReplayRequest request;
  request.file = workload;
  request.subjects = {"vllm-align"};
  request.defect = defect;
  request.config = config;
  Result<ReplayOutcome> outcome = replay(request);
  EXPECT_TRUE(outcome.has_value()) << outcome.error().text;
  return outcome ? std::move(*outcome) : ReplayOutcome{};
}

std::vector<std::string> golden_lines(const char* file) {
  return testing_support::lines_of(
      testing_support::read_text(std::string(LOCKSTEP_SOURCE_DIR "/fixtures/vllm_golden/") + file));
}

// Hits, junctions, steps and block numbers of all 2,000 requests, with memory to spare and without.
TEST(VllmAlign, decidesOnTheWorkloadAsVllmDid) {
  for (const Golden& golden : kGolden) {
    SCOPED_TRACE(golden.workload);
    const ReplayOutcome outcome = replayed(golden.workload, "");
    ASSERT_TRUE(outcome.decisions);
    EXPECT_TRUE(outcome.decisions->complete);
    EXPECT_EQ(outcome.decisions->hit_tokens, golden.hit_tokens);
    const std::vector<std::string> expected = golden_lines(golden.file);
    ASSERT_EQ(outcome.decisions->lines.size(), 2000u);
    ASSERT_EQ(expected.size(), 2000u);
    for (std::size_t i = 0; i < expected.size(); ++i)
      ASSERT_EQ(outcome.decisions->lines[i], expected[i]) << "line " << i + 1;
    EXPECT_TRUE(outcome.run->findings().empty());
  }
}

// Decisions depend on which hashes are equal, not on what they are: vLLM's own give the same ones.
TEST(VllmAlign, decidesTheSameByVllmsOwnHashes) {
  const std::vector<std::string> golden = golden_lines("E_dense_n448.jsonl");
  for (const char* algorithm : {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}) {
    SCOPED_TRACE(algorithm);
    const ReplayOutcome outcome =
        replayed("vllm-w1:blocks=448", "", std::string("hash_algorithm=") + algorithm);
    ASSERT_TRUE(outcome.decisions);
    EXPECT_EQ(outcome.decisions->lines, golden);
    EXPECT_TRUE(outcome.run->findings().empty());
  }
}

// A rule broken shows in these lines: states of the step under way are not used.
TEST(VllmAlign, aBrokenRuleShowsInTheDecisions) {
  const ReplayOutcome outcome =
      replayed("vllm-w1:blocks=448", "vllm-align:uses-states-of-this-step");
  ASSERT_TRUE(outcome.decisions);
  const std::vector<std::string> golden = golden_lines("E_dense_n448.jsonl");
  ASSERT_EQ(golden.size(), 2000u);
  EXPECT_NE(outcome.decisions->lines, golden);
}

// The parameters of the workload and the groups of a configuration are read, and refused by name.
TEST(VllmAlign, refusesConfigurationsByField) {
  const auto error_of = [](const char* config) {
    ReplayRequest request;
    request.file = "vllm-w1:requests=10";
    request.subjects = {"vllm-align"};
    request.config = config;
    const Result<ReplayOutcome> outcome = replay(request);
    return outcome ? std::string() : outcome.error().text;
  };
  EXPECT_EQ(error_of("groups=attention:256,window:256:300,mamba:512,hash_block=256"), "");
  EXPECT_NE(error_of("groups=attention:256,conv:4").find("field groups: `conv:4`"),
            std::string::npos);
  EXPECT_NE(error_of("groups=window:16").find("needs its window"), std::string::npos);
  EXPECT_NE(error_of("hash_block=96").find("field hash_block: 96"), std::string::npos);
  EXPECT_NE(error_of("retention=100").find("field retention: 100"), std::string::npos);
  EXPECT_NE(error_of("groups=attention:256,retention=256").find("field retention"),
            std::string::npos);
  EXPECT_NE(error_of("blocks=1").find("field blocks"), std::string::npos);
  EXPECT_NE(error_of("drafts=256").find("field drafts: 256"), std::string::npos);
  EXPECT_NE(error_of("modules=2").find("field modules"), std::string::npos);
  EXPECT_NE(error_of("modules=300,eagle=1").find("field modules: 300"), std::string::npos);
  for (const char* const config :
       {"replay_ring=4,drafts=1", "replay_ring=4,eagle=1", "replay_ring=4,cpu_chunks=4"})
    EXPECT_NE(error_of(config).find("field replay_ring: not with"), std::string::npos) << config;
  EXPECT_NE(error_of("replay_ring=4,groups=attention:256").find("field replay_ring: rings are for"),
            std::string::npos);
  EXPECT_NE(error_of("hash_algorithm=md5").find("field hash_algorithm: `md5`"), std::string::npos);
  EXPECT_NE(error_of("shared_prefix_checkpoint=1").find("field shared_prefix_checkpoint"),
            std::string::npos);
  EXPECT_EQ(error_of("shared_prefix_checkpoint=1,eagle=2,hash_block=64"), "");
}

}  // namespace
}  // namespace lockstep::cache_sim
