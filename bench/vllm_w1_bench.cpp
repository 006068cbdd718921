// Time of our copy of vLLM's block cache on `vllm-w1` (2,000 requests, 2.96 M prompt tokens, 32
// decoded tokens each; four groups of layers, one of attention and three of Mamba). vLLM 0.33's own
// KVCacheManager, in Python, serves 1,322 requests a second in the same loop, and its decode step
// (one allocation over the four groups) takes 17 us. Block keys are made before the timed loop,
// since vLLM makes them when a request arrives.
#include <benchmark/benchmark.h>

#include <optional>
#include <vector>

#include "cache_sim/check/session.hpp"
#include "cache_sim/policies/vllm/block_manager.hpp"
#include "cache_sim/replay/vllm_w1_driver.hpp"
#include "reference/base/require.hpp"

namespace {

using namespace lockstep;
using namespace lockstep::cache_sim;

const VllmW1& workload() {
  static const VllmW1 generated = VllmW1::generate({});
  return generated;
}

Config config_of(const char* retention, std::int64_t blocks) {
  Config config;
  config.put("blocks", blocks);
  config.put("retention", retention);
  return config;
}

/// For each request the keys of all its blocks, those of the decoded tokens included.
const std::vector<std::vector<KeyId>>& keys() {
  static const std::vector<std::vector<KeyId>> all = [] {
    KeyTable table(kVllmW1Block, 0);
    std::vector<std::vector<KeyId>> made;
    for (const VllmW1Request& request : workload().requests)
      table.extend(made.emplace_back(), request.tokens, {});
    return made;
  }();
  return all;
}

/// The cache that VllmW1Loop drives: it calls the BlockManager directly, without operations and
/// replies.
class ManagedCache {
 public:
  ManagedCache(const Config& config, const std::vector<std::vector<KeyId>>& keys)
      : manager_(*BlockRules::of(config)), requests_(workload().requests.size()) {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      requests_[i].keys = keys[i];
      requests_[i].prompt = workload().requests[i].prompt_size;
    }
  }

  static bool stopped() { return false; }
  bool look_up(std::uint32_t number, std::uint32_t known) {
    BlockRequest& request = requests_[number];
    request.known = known;
    request.computed = 0;
    hit_ = &manager_.look_up(request.keys, known);
    request.junction = hit_->junction;
    return true;
  }
  std::uint32_t cached(std::uint32_t /*number*/) const {
    return static_cast<std::uint32_t>(hit_->tokens);
  }
  std::optional<std::uint32_t> extend(std::uint32_t number, std::uint32_t known, std::uint32_t n) {
    BlockRequest& request = requests_[number];
    request.known = known;
    const bool is_first = !request.runs;
    const std::int64_t start = is_first ? hit_->tokens : request.computed;
    const std::int64_t tokens = manager_.split(request, start, n, kVllmW1Budget);
    if (tokens == 0) return 0;
    if (manager_.allocate(
            request, {.tokens = tokens, .hit = is_first ? hit_ : nullptr, .must_fit = is_first}) !=
        Allocated::yes)
      return std::nullopt;
    request.computed = start + tokens;
    return static_cast<std::uint32_t>(tokens);
  }
  void admitted(std::uint32_t number, std::int64_t /*step*/) {
    if (requests_[number].keys.empty() || hit_->tokens == 0) return;
    hit_tokens_ += hit_->tokens;
  }
  void preempt(std::uint32_t number) { finish(number); }
  void finish(std::uint32_t number) {
    manager_.free(requests_[number]);
    requests_[number].computed = 0;
  }
  void forward() {
    manager_.end_step();
    manager_.new_step();
  }
  std::int64_t hit_tokens() const { return hit_tokens_; }
  BlockManager& manager() { return manager_; }

 private:
  BlockManager manager_;
  std::vector<BlockRequest> requests_;
  const BlockHit* hit_ = nullptr;
  std::int64_t hit_tokens_ = 0;
};

/// The workload through the BlockManager alone: the time is that of its own decisions.
void manage_w1(benchmark::State& state, const char* retention, std::int64_t blocks) {
  keys();
  std::int64_t hit_tokens = 0;
  for (auto _ : state) {
    state.PauseTiming();
    auto cache = std::make_unique<ManagedCache>(config_of(retention, blocks), keys());
    VllmW1Loop<ManagedCache> loop(workload(), *cache);
    state.ResumeTiming();
    loop.run();
    state.PauseTiming();
    hit_tokens = cache->hit_tokens();
    cache.reset();
    state.ResumeTiming();
  }
  state.counters["requests"] = benchmark::Counter(
      static_cast<double>(workload().requests.size()) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  state.counters["hit_tokens"] = static_cast<double>(hit_tokens);
}
BENCHMARK_CAPTURE(manage_w1, dense, "none", 4096)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(manage_w1, retention_0, "0", 4096)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(manage_w1, pressure, "none", 448)->Unit(benchmark::kMillisecond);

/// Makes the keys of all requests: without `algorithm` by our digests, with one by vLLM's own hash
/// of each block of 256 tokens.
void chain_keys(benchmark::State& state, std::optional<BlockHashAlgorithm> algorithm) {
  std::vector<KeyId> keys;
  std::int64_t tokens = 0;
  for (const VllmW1Request& request : workload().requests) tokens += request.tokens.size();
  for (auto _ : state) {
    KeyTable table(kVllmW1Block, 0, algorithm);
    for (const VllmW1Request& request : workload().requests) {
      keys.clear();
      table.extend(keys, request.tokens, {});
      benchmark::DoNotOptimize(keys.data());
    }
  }
  state.counters["tokens"] =
      benchmark::Counter(static_cast<double>(tokens) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}
BENCHMARK_CAPTURE(chain_keys, digests, std::nullopt)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(chain_keys, sha256, BlockHashAlgorithm::sha256)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(chain_keys, sha256_cbor, BlockHashAlgorithm::sha256_cbor)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(chain_keys, xxhash, BlockHashAlgorithm::xxhash)->Unit(benchmark::kMillisecond);

/// The policy vllm-align in a session of operations and replies, as `lockstep replay` runs it.
void replay_vllm_w1(benchmark::State& state, CheckLevel check) {
  RunOptions options;
  options.subjects = {"vllm-align"};
  options.config = config_of("none", 4096);
  options.check = check;
  for (auto _ : state) {
    state.PauseTiming();
    auto run = ReplaySession::start(options);
    state.ResumeTiming();
    const DrivenOutcome outcome =
        drive(workload(),
              {.apply = [&](const Operation& operation) { return (*run)->apply(operation); }});
    (*run)->conclude();
    if (!outcome.complete) state.SkipWithError("the run stopped");
  }
  state.counters["requests"] = benchmark::Counter(
      static_cast<double>(workload().requests.size()) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}
BENCHMARK_CAPTURE(replay_vllm_w1, unchecked, CheckLevel::off)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_vllm_w1, checked, CheckLevel::all)->Unit(benchmark::kMillisecond);

/// Decode steps of 32 requests in turns; an iteration is one allocation over the four groups. As in
/// a server, every 256th step of a request ends a block, publishes a state and gives states back.
void decode_step(benchmark::State& state) {
  constexpr std::int64_t kPrompt = 1024;
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  BlockManager manager(*BlockRules::of(config_of("none", std::int64_t{1} << 16)));
  std::vector<BlockRequest> requests(32);
  std::vector<KeyId> keys(static_cast<std::size_t>(kMost / kVllmW1Block));
  const auto start = [&](BlockRequest& request, KeyId first) {
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = first + static_cast<KeyId>(i);
    request.keys = keys;
    request.prompt = request.known = kPrompt;
    request.computed = 0;
    const BlockHit none{.columns = std::vector<std::vector<BlockId>>(4)};
    require(manager.allocate(request, {.tokens = kPrompt, .hit = &none}) == Allocated::yes,
            "the prompt fits");
    request.computed = kPrompt;
  };
  for (std::size_t i = 0; i < requests.size(); ++i)
    start(requests[i], static_cast<KeyId>(i * keys.size()));
  std::size_t next = 0;
  for (auto _ : state) {
    BlockRequest& request = requests[next];
    ++request.known;
    if (manager.allocate(request, {.tokens = 1}) != Allocated::yes) {
      state.PauseTiming();
      for (BlockRequest& one : requests) manager.free(one);
      for (std::size_t i = 0; i < requests.size(); ++i)
        start(requests[i], static_cast<KeyId>(i * keys.size()));
      state.ResumeTiming();
      continue;
    }
    ++request.computed;
    if (++next == requests.size()) {
      next = 0;
      manager.end_step();
      manager.new_step();
    }
  }
}
BENCHMARK(decode_step);

}  // namespace
