// Random traces: the policy and its oracle answer alike and the auditor finds nothing; and with any
// one rule broken, something is found.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ostream>
#include <string>
#include <vector>

#include "cache_sim/run.hpp"
#include "properties/support/random_trace.hpp"
#include "reference/base/defect.hpp"

namespace lockstep::cache_sim {
namespace {

using testing_support::play_random_trace;
using testing_support::RandomPlay;

struct Setting {
  std::string name;
  std::string config;
};
void PrintTo(const Setting& setting, std::ostream* out) {
  *out << setting.config;
}

const std::vector<Setting> kSettings = {
    {"noBuffer", "policy=sglang-no-buffer,kv_tokens=53,state_slots=5"},
    {"noBufferWithLittleKv", "policy=sglang-no-buffer,kv_tokens=27,state_slots=9"},
    {"noBufferWithoutPressure", "policy=sglang-no-buffer,kv_tokens=1000,state_slots=100"},
    {"noBufferWithFewStates", "policy=sglang-no-buffer,kv_tokens=200,state_slots=2"},
    {"noBufferStripped", "policy=sglang-no-buffer,kv_tokens=60,state_slots=6,strip_thinking=1"},
    {"noBufferCapped", "policy=sglang-no-buffer,kv_tokens=50,state_slots=8,path_cap=1"},
    {"noBufferUnlocked", "policy=sglang-no-buffer,kv_tokens=60,state_slots=6,skip_decode_lock=1"},
    {"extraBuffer",
     "policy=sglang-extra-buffer,kv_tokens=70,model_chunk=2,state_slots=12,track_interval=4"},
    {"extraBufferOnAWideGrid",
     "policy=sglang-extra-buffer,kv_tokens=90,model_chunk=3,state_slots=9,track_interval=2"},
    {"extraBufferInPages",
     "policy=sglang-extra-buffer,kv_tokens=96,model_chunk=2,page=4,state_slots=10,track_interval="
     "4"},
    {"extraBufferLazy",
     "policy=sglang-extra-buffer,kv_tokens=70,lazy=1,model_chunk=1,state_slots=6,track_interval=2"},
    {"extraBufferLazyAndStripped",
     "policy=sglang-extra-buffer,kv_tokens=90,lazy=1,model_chunk=2,state_slots=9,strip_thinking=1,"
     "track_interval=4"},
    {"extraBufferStripped",
     "policy=sglang-extra-buffer,kv_tokens=80,model_chunk=2,state_slots=12,strip_thinking=1,"
     "track_interval=2"},
    {"extraBufferCappedAndUnlocked",
     "policy=sglang-extra-buffer,kv_tokens=70,model_chunk=2,path_cap=1,skip_decode_lock=1,"
     "state_slots=12,track_interval=4"},
    {"extraBufferOverlapping",
     "policy=sglang-extra-buffer,kv_tokens=70,model_chunk=2,overlap=1,state_slots=12,"
     "track_interval=2"},
    {"extraBufferOverlappingAndLazy",
     "policy=sglang-extra-buffer,kv_tokens=70,lazy=1,model_chunk=2,overlap=1,state_slots=8,"
     "strip_thinking=1,track_interval=2"},
    {"radixOverlapping", "policy=radix,kv_tokens=40,overlap=1,page=4"},
    {"legacy", "policy=sglang-legacy,kv_tokens=53,state_slots=5"},
    {"legacyWithLittleKv", "policy=sglang-legacy,kv_tokens=27,state_slots=9"},
    {"first", "policy=sglang-v0,kv_tokens=53,state_slots=5"},
    {"firstWithLittleKv", "policy=sglang-v0,kv_tokens=27,state_slots=9"},
    {"radix", "policy=radix,kv_tokens=53"},
    {"radixInPages", "policy=radix,chunked_prefill=9,kv_tokens=63,page=4"},
    {"radixStripped", "policy=radix,kv_tokens=63,page=4,strip_thinking=1"},
    {"radixWithFewRows", "policy=radix,kv_tokens=300,max_running=3,request_rows=2"},
};

RunOptions options_of(const std::string& config) {
  RunOptions options;
  EXPECT_TRUE(options.config.set_all(config)) << config;
  options.subjects = {options.config.policy, "oracle:" + options.config.policy};
  options.file = "random";
  return options;
}

class RandomTraces : public testing::TestWithParam<Setting> {};

// Tree and sorted map agree on every trace, nothing breaks an invariant, and after the last request
// and a flush both pools are full.
TEST_P(RandomTraces, policyAndOracleAgreeAndNothingLeaks) {
  const RunOptions options = options_of(GetParam().config);
  const bool has_states = options.config.policy != "radix";
  std::int64_t refusals = 0, hits = 0;
  for (std::uint64_t number = 0; number < 300; ++number) {
    const RandomPlay play = play_random_trace(options, 1, number, 60);
    refusals += play.refusals;
    hits += play.hit_tokens;
    ASSERT_EQ(play.error, "") << play.transcript;
    ASSERT_EQ(play.finding, "") << "trace " << number << " under " << GetParam().config << ":\n"
                                << play.transcript;
    const std::int64_t whole = options.config.kv_tokens / options.config.page * options.config.page;
    ASSERT_EQ(play.left.get(ReplyField::kv_free), whole) << play.transcript;
    ASSERT_EQ(play.left.get(ReplyField::kv_locked, -1), 0);
    if (has_states) {
      ASSERT_EQ(play.left.get(ReplyField::states_free), options.config.state_slots)
          << play.transcript;
    }
  }
  EXPECT_GT(hits, 100) << "the traces reach what they are for";
  if (GetParam().name.find("Without") == std::string::npos) {
    EXPECT_GT(refusals, 20);
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, RandomTraces, testing::ValuesIn(kSettings),
                         [](const testing::TestParamInfo<Setting>& info) {
                           return info.param.name;
                         });

// The same trace is the same run.
TEST(RandomTraceMaker, dependsOnSeedAndNumberAlone) {
  const RunOptions options = options_of(kSettings[0].config);
  const std::string one = play_random_trace(options, 7, 3, 60).transcript;
  EXPECT_EQ(play_random_trace(options, 7, 3, 60).transcript, one);
  EXPECT_NE(play_random_trace(options, 7, 4, 60).transcript, one);
  EXPECT_NE(play_random_trace(options, 8, 3, 60).transcript, one);
}

// --- Planted defects -----------------------------------------------------------------------------

std::vector<std::string> defect_names() {
  std::vector<std::string> names;
  for (const DefectEntry& entry : Registry<DefectEntry>::all()) names.emplace_back(entry.name);
  return names;
}

/// Traces until something is found; -1 where nothing is.
int traces_to_find(const std::string& name, const std::string& config, int most) {
  RunOptions options = options_of(config);
  options.defect = Defect::find(name);
  options.defect_name = name;
  for (int number = 0; number < most; ++number) {
    const RandomPlay play = play_random_trace(options, 2, static_cast<std::uint64_t>(number), 60);
    EXPECT_EQ(play.error, "") << play.transcript;
    if (play.finding.empty()) continue;
    std::printf("%s: found by trace %d (%s)\n", name.c_str(), number + 1,
                play.finding.substr(0, 90).c_str());
    return number + 1;
  }
  return -1;
}

class PlantedDefects : public testing::TestWithParam<std::string> {};

// A harness that misses a bug it was given is no harness.
TEST_P(PlantedDefects, areFoundByRandomTraces) {
  const std::string policy = GetParam().substr(0, GetParam().find(':'));
  for (const Setting& setting : kSettings)
    if (setting.config.starts_with("policy=" + policy + ",") &&
        traces_to_find(GetParam(), setting.config, 300) > 0)
      return;
  FAIL() << "no random trace shows " << GetParam();
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedDefects, testing::ValuesIn(defect_names()),
                         [](const testing::TestParamInfo<std::string>& info) {
                           std::string name = info.param;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return c == ':' || c == '-'; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace lockstep::cache_sim
