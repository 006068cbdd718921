// The reused part of a repeated prompt does not depend on how its prefill was cut into chunks,
// beyond what the policy's own rule says.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "cache_sim/check/session.hpp"
#include "cache_sim/server/simulation.hpp"
#include "cache_sim/trace/trace.hpp"

namespace lockstep::cache_sim {
namespace {

/// Cached tokens of the last of `times` equal prompts, served one after the other.
std::int64_t cached_in_the_end(const std::string& policy, std::int64_t prompt, std::int64_t chunk,
                               int times, const std::string& more = "") {
  std::string text =
      fmt::format("config kv_tokens=100000 state_slots=64 chunked_prefill={}{}\n", chunk, more);
  for (int i = 0; i < times; ++i)
    text += fmt::format("request id=r{} tokens=a{} output=3\nrun\n", i, prompt);
  const Result<Trace> trace = parse_trace(text, "law");
  EXPECT_TRUE(trace.has_value());
  RunOptions options;
  options.config = trace->config;
  options.subjects = {policy, "oracle:" + policy};
  const auto run = ReplaySession::start(options);
  EXPECT_TRUE(run.has_value());
  play_trace(**run, *trace);
  EXPECT_TRUE((*run)->findings().empty()) << policy << " " << text;
  return (*run)->find_outcome(Name::intern(fmt::format("r{}", times - 1)))->cached_tokens;
}

constexpr std::int64_t kPrompts[] = {1, 2, 63, 64, 65, 128, 129, 1000, 1024};
constexpr std::int64_t kChunks[] = {1, 7, 64, 100, 128, 1000, 8192};

TEST(ReuseLaw, attentionAloneReusesAllButTheLastToken) {
  for (const std::int64_t prompt : kPrompts)
    for (const std::int64_t chunk : kChunks)
      for (const char* const overlap : {"", " overlap=1"})
        EXPECT_EQ(cached_in_the_end("radix", prompt, chunk, 2, overlap), prompt - 1)
            << prompt << " in chunks of " << chunk << overlap;
}

// Without buffer there are states at chunk ends and at the finish: the last chunk end below the
// prompt's last token serves.
TEST(ReuseLaw, withoutBufferTheLastChunkEndServes) {
  for (const char* const policy : {"sglang-no-buffer", "sglang-legacy", "sglang-v0"})
    for (const std::int64_t prompt : kPrompts)
      for (const std::int64_t chunk : kChunks)
        EXPECT_EQ(cached_in_the_end(policy, prompt, chunk, 2), (prompt - 1) / chunk * chunk)
            << policy << " " << prompt << " in chunks of " << chunk;
}

// With the extra buffer, chunks of whole grid steps leave the last grid position below the last
// token, from the third request on at the latest: the second one leaves a branch state.
TEST(ReuseLaw, withTheExtraBufferTheLastGridPositionServes) {
  for (const std::int64_t prompt : kPrompts)
    for (const std::int64_t chunk : {64, 128, 1024, 8192})
      for (const char* const overlap : {"", " overlap=1", " lazy=1", " page=16"})
        EXPECT_EQ(cached_in_the_end("sglang-extra-buffer", prompt, chunk, 3, overlap),
                  (prompt - 1) / 64 * 64)
            << prompt << " in chunks of " << chunk << overlap;
}

}  // namespace
}  // namespace lockstep::cache_sim
