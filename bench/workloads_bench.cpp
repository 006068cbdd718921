// Times of whole workloads: a real trace replayed and compared, and streamed sessions of 1,000 to
// 1,000,000 requests. With pools of fixed size the time per request does not depend on the number
// of requests before it.
#include <benchmark/benchmark.h>
#include <sys/resource.h>

#include <cstdlib>
#include <string>

#include "cache_sim/compare/compare.hpp"
#include "cache_sim/server/simulation.hpp"
#include "cache_sim/workloads/workload.hpp"

namespace {

using namespace lockstep;
using namespace lockstep::cache_sim;

/// The largest resident set of this process so far, in MiB.
double peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

/// The path of a slice of Mooncake's conversation trace, or of the file that LOCKSTEP_MOONCAKE
/// names (the whole trace).
std::string mooncake() {
  const char* const whole = std::getenv("LOCKSTEP_MOONCAKE");
  if (whole != nullptr) return whole;
  return LOCKSTEP_SOURCE_DIR "/fixtures/workloads/mooncake_conversation_1000.jsonl";
}

void replay_stream(benchmark::State& state, const std::string& workload, const char* policy,
                   std::int64_t kv_tokens, std::int64_t state_slots) {
  RunOptions options;
  options.subjects = {policy};
  options.config.kv_tokens = kv_tokens;
  options.config.state_slots = state_slots;
  options.check = CheckLevel::off;
  std::int64_t requests = 0;
  std::int64_t events = 0;
  for (auto _ : state) {
    const auto stream = open_workload(workload);
    const auto run = ReplaySession::start(options);
    if (!stream || !run) return state.SkipWithError("the workload or the policy is not there");
    if (!Simulation(**run).play(**stream)) return state.SkipWithError("the workload is bad");
    requests += static_cast<std::int64_t>((*run)->outcomes().size());
    events += (*run)->event_count();
  }
  using benchmark::Counter;
  const auto seconds_per = Counter::kIsRate | Counter::kInvert;
  state.counters["events"] = Counter(static_cast<double>(events), Counter::kIsRate);
  state.counters["per_request"] = Counter(static_cast<double>(requests), seconds_per);
  state.counters["peak_MiB"] = peak_mib();
}

/// The longest workload runs last: peak_MiB is a maximum over the process, and so is its own.
void streamed_sessions(benchmark::State& state) {
  replay_stream(state, "sessions:output=8,gap_us=20000,requests=" + std::to_string(state.range(0)),
                "sglang-extra-buffer", 131072, 256);
}
BENCHMARK(streamed_sessions)
    ->Arg(1000)
    ->Arg(10'000)
    ->Arg(100'000)
    ->Arg(1'000'000)
    ->Unit(benchmark::kMillisecond);

void replay_mooncake(benchmark::State& state) {
  replay_stream(state, mooncake(), "sglang-extra-buffer", 1'048'576, 512);
}
BENCHMARK(replay_mooncake)->Unit(benchmark::kMillisecond);

void compare_mooncake(benchmark::State& state) {
  CompareRequest request;
  request.workload = mooncake();
  request.policies = {
      "kv-bound", "state-at-end", "state-at-end-and-branch", "state-every-2048", "state-every-8192",
      "lru",      "belady"};
  request.capacities = {std::int64_t{64} << 30};
  for (auto _ : state) benchmark::DoNotOptimize(compare(request));
}
BENCHMARK(compare_mooncake)->Unit(benchmark::kMillisecond);

}  // namespace
