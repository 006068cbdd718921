// Ideal policies against their plain definitions, the published ratios, and what `compare` says.
#include "cache_sim/compare/compare.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cache_sim/compare/comparison_json.hpp"
#include "cache_sim/model/model.hpp"
#include "cache_sim/model/step_cost.hpp"
#include "properties/support/program.hpp"
#include "reference/base/philox.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace testing_support;

const std::string kMooncake =
    std::string(LOCKSTEP_SOURCE_DIR) + "/fixtures/workloads/mooncake_conversation_1000.jsonl";

Comparison compared(const std::string& workload, const std::vector<std::string>& policies,
                    const std::vector<std::optional<std::int64_t>>& capacities = {},
                    const std::string& config = "") {
  Result<Comparison> comparison = compare(
      {.workload = workload, .policies = policies, .capacities = capacities, .config = config});
  require(comparison.has_value(), comparison ? "" : comparison.error().text);
  return std::move(*comparison);
}

// --- The published ratios ------------------------------------------------------------------------

TEST(InfinitePolicies, hitTheKnownShareOfMooncakesFirstThousandRequests) {
  const Comparison comparison =
      compared(kMooncake, {"kv-bound", "state-at-end", "state-at-end-and-branch",
                           "state-every-2048", "state-every-8192"});
  std::vector<std::string> ratios;
  for (const ComparedPolicy& row : comparison.policies)
    ratios.push_back(
        fmt::format("{:.6f}", rounded_ratio(row.measures.hit_tokens, row.measures.input_tokens)));
  EXPECT_EQ(ratios,
            (std::vector<std::string>{"0.215493", "0.196256", "0.198083", "0.173439", "0.133621"}));
}

// --- Plain definitions ---------------------------------------------------------------------------

/// Paths through a small random tree of blocks: block b is the whole path that ends with it.
struct SmallWorkload {
  static constexpr std::uint32_t kBlock = 4;
  std::vector<std::vector<int>> requests;  // block numbers from the first one on

  SmallWorkload(std::uint64_t seed, int blocks, int count) {
    std::uint64_t index = 0;
    const auto below = [&](int bound) {
      return static_cast<int>(random_below(static_cast<std::uint64_t>(bound), seed, 7, index++));
    };
    std::vector<int> parent(static_cast<std::size_t>(blocks));
    for (int b = 0; b < blocks; ++b) parent[static_cast<std::size_t>(b)] = below(b + 1) - 1;
    for (int i = 0; i < count; ++i) {
      std::vector<int> path;
      for (int b = below(blocks); b >= 0; b = parent[static_cast<std::size_t>(b)])
        path.insert(path.begin(), b);
      requests.push_back(path);
    }
  }
  static Tokens tokens(const std::vector<int>& path) {
    std::vector<DocumentSlice> slices;
    slices.reserve(path.size());
    for (const int b : path)
      slices.push_back({kBlockDocuments + static_cast<Document>(b), 0, kBlock});
    return Tokens::of_slices(slices);
  }
};

PolicyMeasures measured(const std::string& policy, const SmallWorkload& workload,
                        std::int64_t capacity_blocks = 0) {
  const auto found = find_ideal(policy);
  require(found && *found, "the policy is there");
  const auto ideal = (*found)->entry->make(
      {.model = *find_model("tiny-hybrid"),
       .block = SmallWorkload::kBlock,
       .capacity_tokens = capacity_blocks * SmallWorkload::kBlock + 3,  // three are no block
       .number = (*found)->number});
  for (const std::vector<int>& path : workload.requests) {
    const Tokens tokens = SmallWorkload::tokens(path);
    ideal->serve({tokens, tokens, static_cast<std::int64_t>(tokens.size())});
  }
  return ideal->finish();
}

/// Blocks hit, states and states that were never hit, by sets of blocks.
struct Plain {
  std::int64_t hits = 0;
  std::set<int> states{}, hit_states{};
};

Plain plain_states(const SmallWorkload& workload, const std::string& policy) {
  Plain plain;
  std::set<int> present;
  std::map<int, std::set<int>> children;  // of a block
  for (const std::vector<int>& path : workload.requests) {
    std::size_t known = 0;
    while (known < path.size() && present.contains(path[known])) ++known;
    std::size_t hit = known;
    if (policy == "state-every-8") hit -= hit % 2;
    if (policy.starts_with("state-at-end"))
      while (hit > 0 && !plain.states.contains(path[hit - 1])) --hit;
    plain.hits += static_cast<std::int64_t>(hit);
    if (hit > 0) plain.hit_states.insert(path[hit - 1]);
    if (policy == "state-at-end-and-branch" && 0 < known && known < path.size() &&
        !children[path[known - 1]].empty())
      plain.states.insert(path[known - 1]);
    for (std::size_t i = 0; i < path.size(); ++i) {
      present.insert(path[i]);
      if (i > 0) children[path[i - 1]].insert(path[i]);
      if (policy == "state-every-8" && i % 2 == 1) plain.states.insert(path[i]);
    }
    if (policy.starts_with("state-at-end")) plain.states.insert(path.back());
  }
  return plain;
}

TEST(InfinitePolicies, areTheirPlainDefinitions) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    const SmallWorkload workload(seed, 12, 25);
    for (const char* const policy :
         {"kv-bound", "state-at-end", "state-at-end-and-branch", "state-every-8"}) {
      const Plain plain = plain_states(workload, policy);
      const PolicyMeasures measures = measured(policy, workload);
      ASSERT_EQ(measures.hit_tokens, plain.hits * SmallWorkload::kBlock) << policy << seed;
      if (policy == std::string("kv-bound")) continue;
      ASSERT_EQ(measures.states, static_cast<std::int64_t>(plain.states.size())) << policy << seed;
      ASSERT_EQ(measures.states_never_hit,
                static_cast<std::int64_t>(plain.states.size() - plain.hit_states.size()))
          << policy << seed;
    }
  }
}

/// Block by block: when each was used last, and how deep it lies.
std::int64_t plain_lru(const SmallWorkload& workload, std::size_t capacity) {
  std::map<int, std::pair<int, int>> cached;  // block → (last use, -depth): the least goes first
  std::int64_t hits = 0;
  for (int now = 0; now < static_cast<int>(workload.requests.size()); ++now) {
    const std::vector<int>& path = workload.requests[static_cast<std::size_t>(now)];
    std::size_t known = 0;
    while (known < path.size() && cached.contains(path[known])) ++known;
    hits += static_cast<std::int64_t>(known);
    for (std::size_t i = 0; i < path.size(); ++i) cached[path[i]] = {now, -static_cast<int>(i)};
    while (cached.size() > capacity)
      cached.erase(std::ranges::min_element(
          cached, [](const auto& a, const auto& b) { return a.second < b.second; }));
  }
  return hits;
}

TEST(Lru, isTheListOfBlocksByLastUse) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    const SmallWorkload workload(seed, 14, 40);
    const auto capacity = static_cast<std::int64_t>(1 + random_below(10, seed, 8, 0));
    ASSERT_EQ(measured("lru", workload, capacity).hit_tokens,
              plain_lru(workload, static_cast<std::size_t>(capacity)) * SmallWorkload::kBlock)
        << seed;
  }
}

/// The most hits of any choice of what to keep, by trying all of them.
std::int64_t best_of_all(const SmallWorkload& workload, int capacity) {
  std::map<unsigned, std::int64_t> best{{0, 0}};  // kept blocks → hits so far
  for (const std::vector<int>& path : workload.requests) {
    std::map<unsigned, std::int64_t> next;
    for (const auto& [kept, hits] : best) {
      unsigned known = 0;
      while (known < path.size() && (kept >> path[known] & 1u) != 0) ++known;
      unsigned all = kept;
      for (const int b : path) all |= 1u << b;
      for (unsigned keep = all;; keep = (keep - 1) & all) {
        if (std::popcount(keep) <= capacity)
          next[keep] = std::max(next[keep], hits + static_cast<std::int64_t>(known));
        if (keep == 0) break;
      }
    }
    best = std::move(next);
  }
  std::int64_t most = 0;
  for (const auto& [kept, hits] : best) most = std::max(most, hits);
  return most;
}

TEST(Belady, noOtherEvictionHitsMore) {
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    const SmallWorkload workload(seed, 7, 12);
    const int capacity = 1 + static_cast<int>(random_below(5, seed, 8, 0));
    ASSERT_EQ(measured("belady", workload, capacity).hit_tokens,
              best_of_all(workload, capacity) * SmallWorkload::kBlock)
        << seed << " capacity " << capacity;
  }
}

TEST(Belady, liesBetweenLruAndTheBound) {
  for (const char* const workload : {"sessions:requests=300", "sglang-w1:requests=300"}) {
    const Comparison comparison =
        compared(workload, {"lru", "belady", "kv-bound"}, {200'000'000, 500'000'000});
    const auto hits = [&](std::size_t i) { return comparison.policies[i].measures.hit_tokens; };
    EXPECT_LT(hits(0), hits(2)) << workload;
    EXPECT_LE(hits(1), hits(3)) << workload;
    EXPECT_LE(hits(2), hits(3)) << workload;
    EXPECT_LE(hits(3), hits(4)) << workload;
  }
}

// States take their bytes and a hit needs one, so knowing the future helps less than with KV alone;
// with room for everything, none was kept in vain.
TEST(BeladyStates, liesBelowBeladyAndComesToTheBound) {
  const std::string workload = "sessions:requests=200,fork_every=3";
  const Comparison small =
      compared(workload, {"belady", "belady-states"}, {2'000'000'000, 20'000'000'000});
  for (const std::size_t i : {0u, 1u})
    EXPECT_LE(small.policies[2 + i].measures.hit_tokens, small.policies[i].measures.hit_tokens);
  EXPECT_LT(small.policies[2].measures.hit_tokens, small.policies[3].measures.hit_tokens);
  EXPECT_GT(small.policies[2].measures.evicted_states, 0);
  const Comparison ample = compared(workload, {"kv-bound", "belady-states"}, {std::nullopt});
  EXPECT_EQ(ample.policies[0].measures.hit_tokens, ample.policies[1].measures.hit_tokens);
  EXPECT_GT(ample.policies[1].measures.states_admitted, 0);
  EXPECT_EQ(ample.policies[1].measures.states_never_hit, 0);
}

// With room for everything, all of them are the bound.
TEST(IdealPolicies, withoutACapacityEqualTheBound) {
  const Comparison comparison =
      compared("sessions:requests=200,fork_every=3", {"kv-bound", "lru", "belady"}, {std::nullopt});
  ASSERT_EQ(comparison.policies.size(), 3u);
  for (const ComparedPolicy& row : comparison.policies) {
    EXPECT_EQ(row.measures.hit_tokens, comparison.policies[0].measures.hit_tokens);
    EXPECT_FALSE(row.capacity.has_value());
  }
}

// --- Models --------------------------------------------------------------------------------------

TEST(Models, bytesAreThoseOfThePublicConfigurations) {
  const Model& qwen = **find_model("qwen3-next");
  EXPECT_EQ(qwen.token_bytes, 24'576);
  EXPECT_EQ(qwen.state_bytes, 77'266'944);
  EXPECT_NEAR(static_cast<double>(qwen.flops_per_token), 6.5e9, 0.1e9);
  const Model& nemotron = **find_model("nemotron-h");
  EXPECT_EQ(nemotron.token_bytes, 16'384);
  EXPECT_EQ(nemotron.state_bytes, 102'137'856);
  EXPECT_EQ((*find_model("deepseek-v3"))->token_bytes, 70'272);
  EXPECT_NE(find_model("gpt").error().text.find("qwen3-next"), std::string::npos);
}

// One token after the other costs what all of them at once do.
TEST(Models, prefillIsTheSumOfItsTokens) {
  const Model& model = **find_model("tiny-hybrid");
  double sum = 0;
  for (std::int64_t seen = 1; seen <= 100; ++seen)
    sum += static_cast<double>(model.flops_per_token + seen * model.flops_per_pair);
  EXPECT_EQ(model.prefill_flops(100), sum);
}

// --- Policies behind the scheduler ---------------------------------------------------------------

TEST(Compare, bytesBecomeTheTwoPools) {
  const Model& model = **find_model("qwen3-next");
  const Comparison comparison = compared("sessions:requests=20", {"radix", "sglang-no-buffer"},
                                         {std::int64_t{8} << 30}, "state_share=250");
  const ComparedPolicy& radix = comparison.policies[0];
  EXPECT_EQ(radix.kv_tokens, (std::int64_t{8} << 30) / model.token_bytes);
  const ComparedPolicy& hybrid = comparison.policies[1];
  EXPECT_EQ(hybrid.state_slots, (std::int64_t{2} << 30) / model.state_bytes);
  const std::int64_t spent =
      hybrid.state_slots * model.state_bytes + hybrid.kv_tokens * model.token_bytes;
  EXPECT_LE(spent, std::int64_t{8} << 30);
  EXPECT_GT(spent + model.token_bytes, std::int64_t{8} << 30);
}

// vLLM's own figures for Qwen3-Next on one GPU, with float32 states: 2,146,304 bytes of state and
// 2,048 of a token's KV in a layer make blocks of 1,056 tokens, and 12 layers of them 25,952,256.
TEST(Compare, bytesBecomeVllmsBlocks) {
  const std::int64_t capacity = std::int64_t{8} << 30;
  const Comparison comparison =
      compared("sessions:requests=20", {"vllm-align", "vllm-align@hash_block=16"}, {capacity});
  for (const ComparedPolicy& row : comparison.policies) {
    EXPECT_EQ(row.blocks, capacity / 25'952'256);
    EXPECT_EQ(row.kv_tokens, (row.blocks - 1) * 1056) << "the null block holds nothing";
    EXPECT_EQ(row.measures.states_admitted, 0) << "no reply tells them";
    EXPECT_FALSE(compared_json(row, comparison.model).contains("states_admitted"))
        << "0 is no count";
  }
  const Result<Comparison> nemotron = compare({.workload = "sessions:requests=20",
                                               .policies = {"vllm-align"},
                                               .capacities = {capacity},
                                               .model = "nemotron-h"});
  ASSERT_TRUE(nemotron.has_value());
  // 128 x 64 x 128 floats and 3 x 10,240 bf16 of state beside 4,096 bytes of KV: 1,040 tokens; four
  // layers a group.
  EXPECT_EQ(nemotron->policies[0].blocks, capacity / (std::int64_t{1040} * 4096 * 4));
}

// A field means the same in --config and behind a policy's name, also one that a capacity would
// decide otherwise.
TEST(Compare, theConfigAndAPolicysNameSayTheSame) {
  const auto of = [](const std::string& policy, const std::string& config,
                     std::optional<std::int64_t> capacity = {}) {
    const std::vector<std::optional<std::int64_t>> capacities(capacity ? 1 : 0, capacity);
    return compared("sessions:requests=60,fork_every=4", {policy}, capacities, config).policies[0];
  };
  const std::int64_t bytes = std::int64_t{2} << 30;
  const ComparedPolicy coarse = of("vllm-align", "", bytes);
  const ComparedPolicy fine = of("vllm-align@hash_block=16", "", bytes);
  EXPECT_NE(fine.measures.hit_tokens, coarse.measures.hit_tokens);
  EXPECT_EQ(of("vllm-align", "hash_block=16", bytes).measures.hit_tokens, fine.measures.hit_tokens);
  const ComparedPolicy own = of("sglang-no-buffer@kv_tokens=9000@state_slots=20", "");
  const ComparedPolicy all = of("sglang-no-buffer", "kv_tokens=9000,state_slots=20");
  EXPECT_EQ(own.kv_tokens, 9000);
  EXPECT_EQ(own.state_slots, 20);
  EXPECT_EQ(own.capacity, all.capacity);
  EXPECT_EQ(own.measures.evicted_tokens, all.measures.evicted_tokens);
  EXPECT_EQ(of("vllm-align@blocks=100", "").capacity, of("vllm-align", "blocks=100").capacity);
  // A step takes the time that is given, be it the default.
  const Nanoseconds modelled = of("radix", "", bytes).ttft->mean;
  for (const char* const time : {"step_time=1ms", "step_time=2ms"}) {
    EXPECT_LT(of("radix", time, bytes).ttft->mean, modelled) << time;
    EXPECT_EQ(of("radix", time, bytes).ttft->mean,
              of("radix@" + std::string(time), "", bytes).ttft->mean);
  }
}

// vLLM cuts chunks to whole blocks of states; its scheduler goes on with the rest, so that all
// tokens are computed and take their memory.
TEST(Compare, vllmsPoliciesAreServedByVllmsScheduler) {
  const Comparison comparison =
      compared("sessions:requests=60,output=1500",
               {"vllm-align", "vllm-align@scheduler=vllm", "vllm-align@scheduler=vllm:priority"},
               {std::int64_t{4} << 30});
  const ComparedPolicy& row = comparison.policies[0];
  EXPECT_GT(row.preemptions, 0) << "outputs are long";
  for (const std::size_t named : {1u, 2u}) {
    EXPECT_EQ(row.measures.hit_tokens, comparison.policies[named].measures.hit_tokens);
    EXPECT_EQ(row.ttft->mean, comparison.policies[named].ttft->mean);
  }
}

// A policy with config fields of its own; `best` is the best of all alphas.
TEST(Compare, marconiWithTheBestAlphaSavesMost) {
  const Comparison comparison =
      compared("sessions:requests=150,fork_every=4",
               {"marconi", "marconi@alpha=0", "marconi@alpha=1000", "marconi@alpha=best"},
               {std::int64_t{2} << 30});
  const auto saved = [&](std::size_t i) { return comparison.policies[i].measures.flops_saved; };
  for (const std::size_t i : {0u, 1u, 2u}) {
    EXPECT_GT(comparison.policies[i].measures.evicted_states, 0);
    EXPECT_EQ(comparison.policies[i].chosen, "");
  }
  EXPECT_GE(saved(3), saved(1));
  EXPECT_GE(saved(3), saved(2));
  EXPECT_TRUE(comparison.policies[3].chosen.starts_with("alpha="));
  const Result<Comparison> refused = compare(
      {.workload = "sessions", .policies = {"marconi@alpha=high"}, .capacities = {{1 << 30}}});
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().text.find("field alpha"), std::string::npos) << refused.error().text;
}

// The share of states is an option of one policy's memory, as it is of everybody's.
TEST(Compare, aShareOfStatesStandsBehindAPolicysName) {
  const auto of = [](const std::string& policy, const std::string& config) {
    return compared("sessions:requests=60", {policy}, {std::int64_t{2} << 30}, config).policies[0];
  };
  const ComparedPolicy own = of("sglang-extra-buffer@state_share=100", "");
  const ComparedPolicy all = of("sglang-extra-buffer", "state_share=100");
  EXPECT_EQ(own.state_slots, all.state_slots);
  EXPECT_EQ(own.measures.hit_tokens, all.measures.hit_tokens);
  EXPECT_LT(own.state_slots, of("sglang-extra-buffer", "").state_slots);
  const auto refused = [](const std::string& policy) {
    return compare({.workload = "sessions:requests=3",
                    .policies = {policy},
                    .capacities = {std::int64_t{2} << 30}})
        .error()
        .text;
  };
  EXPECT_NE(refused("radix@state_share=100").find("does not use the config field state_share"),
            std::string::npos);
  EXPECT_NE(refused("sglang-no-buffer@state_share=x").find("field state_share"), std::string::npos);
}

// `hybrid` asks for everything that can serve a hybrid model, so that nobody lists policies by
// hand.
TEST(Compare, hybridIsEveryPolicyForHybridModels) {
  const std::vector<std::string> policies = parse_policies("radix,hybrid,,lru");
  EXPECT_EQ(policies.front(), "radix");
  EXPECT_EQ(policies.back(), "lru");
  for (const char* const name : {"sglang-extra-buffer", "vllm-align", "marconi"})
    EXPECT_EQ(std::ranges::count(policies, name), 1) << name;
  EXPECT_EQ(std::ranges::count(policies, "edge-llm"), 0) << "its rows share nothing";
}

// The same figures as a replay's, which counts for itself.
TEST(Compare, countsWhatAReplayCounts) {
  const ScratchFolder folder;
  const std::string config = "kv_tokens=60000,state_slots=90";
  const Comparison comparison = compared("sessions:requests=150", {"sglang-no-buffer"}, {}, config);
  const ProgramRun run =
      run_program({"replay", "sessions:requests=150", "--subject", "sglang-no-buffer", "--config",
                   config, "--model", "qwen3-next", "--json", folder.path("run.json")});
  ASSERT_EQ(run.status, kExitPass) << run.err;
  const Json json = Json::parse(read_text(folder.path("run.json")));
  const ComparedPolicy& row = comparison.policies[0];
  EXPECT_EQ(row.measures.hit_tokens, json["totals"]["hit_tokens"]);
  EXPECT_EQ(row.measures.input_tokens, json["totals"]["input_tokens"]);
  EXPECT_EQ(row.measures.evicted_tokens, json["policies"][0]["evictions"]["kv_tokens"]);
  Nanoseconds sum = 0;
  for (const Json& request : json["requests"]) sum += request["ttft_ns"].get<Nanoseconds>();
  ASSERT_TRUE(row.ttft);
  EXPECT_EQ(row.ttft->mean, sum / 150);
  EXPECT_GT(row.measures.states_admitted, 150);
  EXPECT_LT(row.measures.states_never_hit, row.measures.states_admitted);
}

// A load from the host counts as a hit, and its source was copied there before.
TEST(Compare, hitsAndCopiesAreToldByTier) {
  const Comparison comparison =
      compared("sessions:requests=150", {"sglang-no-buffer@host_kv=400000@host_states=100"}, {},
               "kv_tokens=20000,state_slots=20");
  const ComparedPolicy& row = comparison.policies[0];
  ASSERT_TRUE(row.host);
  EXPECT_EQ(row.host->kv_tokens, 400'000);
  EXPECT_EQ(row.host->state_slots, 100);
  EXPECT_GT(row.host->hit_tokens, 0);
  EXPECT_LE(row.host->hit_tokens, row.measures.hit_tokens);
  EXPECT_GE(row.host->bytes_to_device, row.host->hit_tokens * comparison.model.token_bytes / 2);
  EXPECT_GT(row.host->bytes_to_host, 0);
  EXPECT_EQ(compared_json(row, comparison.model)["host"]["hit_tokens"], row.host->hit_tokens);
  const Comparison without =
      compared("sessions:requests=150", {"sglang-no-buffer"}, {}, "kv_tokens=20000,state_slots=20");
  EXPECT_FALSE(without.policies[0].host);
  EXPECT_LT(without.policies[0].measures.hit_tokens, row.measures.hit_tokens);
}

// vLLM's host tier is one pool of chunks, behind the scheduler that loads from it; a row is what
// the fields say by themselves.
TEST(Compare, vllmsHostTierIsOnePoolOfChunks) {
  CompareRequest request{.workload = "sessions:requests=150",
                         .policies = {"vllm-align"},
                         .capacities = {std::int64_t{2} << 30},
                         .hosts = {std::int64_t{16} << 30}};
  const Result<Comparison> comparison = compare(request);
  ASSERT_TRUE(comparison) << comparison.error().text;
  const ComparedPolicy& row = comparison->policies[0];
  EXPECT_GT(row.host->hit_tokens, 0);
  EXPECT_LE(row.host->hit_tokens, row.measures.hit_tokens);
  EXPECT_GT(row.host->bytes_to_device, 0);
  EXPECT_GT(row.host->bytes_to_host, row.host->bytes_to_device / 10);
  EXPECT_EQ(row.host->kv_tokens, row.host->state_slots * row.block);
  request.policies = {
      fmt::format("vllm-align@scheduler=vllm@cpu_chunks={}", row.host->state_slots)};
  const Result<Comparison> counted = compare(request);
  ASSERT_TRUE(counted) << counted.error().text;
  EXPECT_EQ(counted->policies[0].host->bytes_to_host, row.host->bytes_to_host);
  EXPECT_EQ(counted->policies[0].measures.hit_tokens, row.measures.hit_tokens);
  request.policies = {"vllm-align@host_share=500"};
  EXPECT_EQ(compare(request).error().text,
            "policy vllm-align@host_share=500: its host tier is one pool for KV and states, which "
            "host_share cannot divide");
  request.policies = {"vllm-align"};
  request.capacities.clear();
  EXPECT_EQ(compare(request).error().text,
            "policy vllm-align: --host: the bytes of a block are known with a --capacity alone");
}

// The bytes of a host tier are cut by host_share, and a row is what the fields of that cut give.
TEST(Compare, hostTiersAreCutByTheirShare) {
  constexpr std::int64_t kGib = std::int64_t{1} << 30;
  CompareRequest request{
      .workload = "sessions:requests=150",
      .policies = {"kv-bound", "radix", "sglang-no-buffer", "sglang-no-buffer@host_share=900",
                   "sglang-no-buffer@host_kv=0"},
      .capacities = {2 * kGib},
      .hosts = {4 * kGib, 8 * kGib}};
  const Result<Comparison> comparison = compare(request);
  ASSERT_TRUE(comparison.has_value()) << comparison.error().text;
  EXPECT_TRUE(comparison->by_host);
  std::vector<std::optional<std::int64_t>> hosts;
  for (const ComparedPolicy& row : comparison->policies) hosts.push_back(row.host_bytes);
  const std::optional<std::int64_t> none;
  EXPECT_EQ(hosts, (std::vector<std::optional<std::int64_t>>{none, none, 4 * kGib, 8 * kGib,
                                                             4 * kGib, 8 * kGib, none}));
  const ComparedPolicy& row = comparison->policies[4];
  const std::int64_t bytes = row.host->kv_tokens * comparison->model.token_bytes +
                             row.host->state_slots * comparison->model.state_bytes;
  EXPECT_LE(bytes, 4 * kGib);
  EXPECT_GT(bytes, 4 * kGib - comparison->model.token_bytes);
  EXPECT_EQ(row.host->state_slots, 4 * kGib / 1000 * 900 / comparison->model.state_bytes);
  request.policies = {fmt::format("sglang-no-buffer@host_kv={}@host_states={}", row.host->kv_tokens,
                                  row.host->state_slots)};
  const Result<Comparison> by_fields = compare(request);
  ASSERT_TRUE(by_fields.has_value()) << by_fields.error().text;
  ASSERT_EQ(by_fields->policies.size(), 1u);
  EXPECT_EQ(by_fields->policies[0].measures.hit_tokens, row.measures.hit_tokens);

  request.capacities.push_back(4 * kGib);
  EXPECT_EQ(compare(request).error().text, "--host: several sizes go with one --capacity");
  request.capacities.pop_back();
  request.policies = {"sglang-no-buffer"};
  request.hosts = {1000};
  EXPECT_EQ(compare(request).error().text,
            "policy sglang-no-buffer: --host: 1000 bytes have no room for one state of model "
            "qwen3-next");
  request.policies = {"sglang-no-buffer@host_share=1000"};
  EXPECT_NE(compare(request).error().text.find("host_share"), std::string::npos);
}

// A cache that saves prefill work answers sooner.
TEST(Compare, moreHitsMakeTheFirstTokenComeSooner) {
  const Comparison comparison =
      compared("sessions:requests=300", {"radix"}, {std::int64_t{1} << 29, std::int64_t{1} << 33});
  const auto& small = comparison.policies[0];
  const auto& large = comparison.policies[1];
  EXPECT_LT(small.measures.hit_tokens, large.measures.hit_tokens);
  EXPECT_LT(small.measures.flops_saved, large.measures.flops_saved);
  EXPECT_GT(small.ttft->mean, large.ttft->mean);
}

TEST(Compare, generatedWorkloadsKeepTheirDriver) {
  const Comparison comparison = compared("sglang-w1", {"sglang-no-buffer", "radix"});
  EXPECT_EQ(comparison.policies[0].measures.hit_tokens, 1'776'161);
  EXPECT_EQ(comparison.policies[1].measures.hit_tokens, 2'662'730);
  EXPECT_FALSE(comparison.policies[0].ttft) << "it has no clock";
}

TEST(Compare, theJsonIsTheSameBytesEachTime) {
  const ScratchFolder folder;
  std::vector<std::string> texts;
  for (const char* const name : {"a.json", "b.json"}) {
    const ProgramRun run = run_program({"compare", "sessions:requests=80", "--policies",
                                        "kv-bound,state-every-64,lru,radix", "--capacity", "1GiB",
                                        "--capacity", "200000000", "--json", folder.path(name)});
    ASSERT_EQ(run.status, kExitPass) << run.err;
    EXPECT_NE(run.out.find("\ndigest="), std::string::npos);
    Json json = Json::parse(read_text(folder.path(name)));
    EXPECT_EQ(json["policies"].size(), 6u);
    EXPECT_EQ(json["policies"][0]["capacity"], "inf");
    EXPECT_EQ(json["policies"][2]["capacity"], std::int64_t{1} << 30);
    for (const char* const field : {"hit_ratio", "request_hit_ratio", "flops_saved", "state_bytes",
                                    "states_never_hit", "dead_tokens"})
      EXPECT_TRUE(json["policies"][1][field].is_number()) << field;
    json.erase("timing");
    texts.push_back(json.dump());
  }
  EXPECT_EQ(texts[0], texts[1]);
}

// The sum of the times does not fit 64 bits, their mean does.
TEST(Compare, meansOfLongTimesAreMeans) {
  const Comparison comparison = compared("sessions:requests=8,seats=8,output=1,gap_us=1", {"radix"},
                                         {}, "kv_tokens=100000,step_time=1500000000s");
  const std::optional<TimeSummary>& ttft = comparison.policies.at(0).ttft;
  ASSERT_TRUE(ttft);
  EXPECT_GE(ttft->mean, 1'000'000'000'000'000'000);
  EXPECT_LE(ttft->mean, ttft->p99);
}

// 99 of 100 requests are no slower; of two, that is the slower one.
TEST(Compare, nearlyAllTimesAreWithinTheLastPercentile) {
  for (const int requests : {1, 2, 50, 101}) {
    const ScratchFolder folder;
    const std::string workload = "sessions:seed=3,requests=" + std::to_string(requests);
    ASSERT_EQ(run_program({"replay", workload, "--subject", "radix", "--model", "qwen3-next",
                           "--json", folder.path("run.json")})
                  .status,
              kExitPass);
    std::vector<Nanoseconds> times;
    const Json run = Json::parse(read_text(folder.path("run.json")));
    for (const Json& request : run["requests"])
      times.push_back(request["ttft_ns"].get<Nanoseconds>());
    const TimeSummary ttft = *compared(workload, {"radix"}).policies[0].ttft;
    const auto beyond = [&](Nanoseconds time) {
      return std::ranges::count_if(times, [&](auto one) { return one > time; });
    };
    EXPECT_LE(beyond(ttft.p99) * 100, requests);
    EXPECT_GT(beyond(ttft.p99 - 1) * 100, requests) << "no less is enough";
    EXPECT_LE(beyond(ttft.median) * 2, requests);
  }
}

// A policy that serves the short prompts alone has not reused more: the bound holds for it, too.
TEST(Compare, whatIsRefusedCountsAsMissed) {
  const ScratchFolder folder;
  std::string lines;
  for (int i = 0; i < 6; ++i)
    lines += R"({"timestamp":)" + std::to_string(i * 1000) +
             R"(,"input_length":1024,"output_length":2,"hash_ids":[1,2]})"
             "\n";
  lines += R"({"timestamp":9000,"input_length":102400,"output_length":2,"hash_ids":[)";
  for (int id = 100; id < 300; ++id) lines += (id == 100 ? "" : ",") + std::to_string(id);
  const std::string file = folder.write("long.jsonl", lines + "]}\n");
  const Comparison comparison =
      compared(file, {"kv-bound", "radix", "radix@kv_tokens=100"}, {}, "kv_tokens=43690");
  const ComparedPolicy& bound = comparison.policies[0];
  const ComparedPolicy& small = comparison.policies[1];
  EXPECT_EQ(small.refused_requests, 1);
  EXPECT_EQ(small.measures.input_tokens, bound.measures.input_tokens);
  EXPECT_LE(small.measures.hit_tokens, bound.measures.hit_tokens);
  EXPECT_FALSE(comparison.policies[2].ttft) << "no request has a first token";
  const ProgramRun run =
      run_program({"compare", file, "--policies", "radix", "--config", "kv_tokens=43690"});
  EXPECT_NE(run.out.find("radix refuses 1 of 7 requests"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("it is short;"), std::string::npos) << run.out;
}

// Work whose products do not fit 64 bits costs the time that it costs in floating point.
TEST(ModelStepCosts, areExactForLongPrompts) {
  const Model& model = **find_model(kDefaultModel);
  const ModelStepCost cost(model);
  const StepWork work{.prefill_tokens = std::int64_t{1} << 32,
                      .seen_tokens = std::int64_t{1} << 52};
  const double nanoseconds = (0x1p32 * static_cast<double>(model.flops_per_token) +
                              0x1p52 * static_cast<double>(model.flops_per_pair)) /
                             static_cast<double>(ModelStepCost::kFlopsPerNanosecond);
  EXPECT_NEAR(static_cast<double>(cost.of(work)) / nanoseconds, 1, 1e-9);
}

// Policies run alone here, and nobody compares or audits: nothing was checked, so nothing passes.
TEST(Compare, saysThatNothingWasChecked) {
  const CompareRequest request{.workload = "sessions:requests=3", .policies = {"kv-bound"}};
  const Result<Comparison> comparison = compare(request);
  ASSERT_TRUE(comparison);
  EXPECT_EQ(comparison_json(request, *comparison)["verdict"], "unchecked");
}

TEST(Compare, badWordsAreRefusedByName) {
  struct Bad {
    std::vector<std::string> words;
    std::string says;
  };
  const std::vector<Bad> all = {
      {{"sessions", "--policies", "fifo"}, "there is no policy `fifo`"},
      {{"sessions", "--policies", "state-every-x"}, "policy state-every-x: `x` is not"},
      {{"sessions", "--policies", "state-every-0"}, "policy state-every-0: 0 is below 1"},
      {{"sessions", "--policies", "lru", "--capacity", "12 GB"}, "--capacity: `12 GB` is not"},
      {{"sessions", "--policies", "radix", "--capacity", "inf"}, "pools of a fixed size"},
      {{"sessions", "--policies", "sglang-no-buffer", "--capacity", "1MiB"},
       "no room for one state"},
      {{"sessions", "--policies", "vllm-align", "--capacity", "1MiB"},
       "no room for one block besides the null block"},
      {{"sessions", "--policies", "vllm-align@block=32", "--capacity", "8GiB"},
       "the model decides the fields block and groups"},
      {{"sessions", "--policies", "vllm-align", "--capacity", "8GiB", "--config",
        "groups=attention:16,mamba:16"},
       "the model decides the fields block and groups"},
      {{"sessions", "--policies", "radix@kv_tokens=64", "--capacity", "8GiB"},
       "--capacity: kv_tokens= of --config or policy radix@kv_tokens=64 says the same"},
      {{"sessions", "--policies", "vllm-align", "--capacity", "8GiB", "--config", "blocks=9"},
       "--capacity: blocks="},
      {{"sessions", "--policies", "sglang-no-buffer@host_share=100"},
       "policy sglang-no-buffer@host_share=100: host_share= divides what --host gives"},
      {{"sessions", "--policies", "radix@page=16@page=1"}, "field page stands twice"},
      {{"sessions", "--policies", "lru", "--capacity", "9999999999TiB"}, "9999999999 is above"},
      {{"sessions:turns=3,turns=4", "--policies", "lru"}, "parameter turns stands twice"},
      {{"sessions", "--policies", "lru", "--model", "gpt"}, "there is no model `gpt`"},
      {{"sessions", "--policies", "sglang-no-buffer", "--model", "deepseek-v3"}, "no recurrent"},
      {{"sessions", "--policies", "lru", "--config", "kv=3"}, "config has no field `kv`"},
      {{"nowhere.jsonl", "--policies", "lru"}, "nowhere.jsonl: cannot be read"},
  };
  for (const Bad& bad : all) {
    std::vector<std::string> words{"compare"};
    words.insert(words.end(), bad.words.begin(), bad.words.end());
    const ProgramRun run = run_program(words);
    EXPECT_EQ(run.status, kExitBadInput) << bad.says;
    EXPECT_EQ(run.out, "");
    EXPECT_NE(run.err.find(bad.says), std::string::npos) << bad.says << "\n" << run.err;
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
