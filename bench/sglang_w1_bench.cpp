// Time of a policy on `sglang-w1` (2,000 requests, 3.28 M prompt tokens), beside a limit of the
// machine: `compared_B` is the rate of the token bytes that the matches compare, `read_B` the rate
// at which one core reads memory in the same run. Peers' times, recorded on one core of an AMD EPYC
// with the peers' tensor bookkeeping included: SGLang 0.5.23's Rust core 510 ms and Python core
// 1,090 ms (no_buffer); 480 and 870 ms (extra_buffer); 380 and 890 ms for attention alone; SGLang
// 0.5.9's class (legacy) 1,020 ms.
#include <benchmark/benchmark.h>

#include <string_view>
#include <vector>

#include "cache_sim/replay/replay.hpp"
#include "cache_sim/replay/sglang_w1_driver.hpp"

namespace {

using namespace lockstep;
using namespace lockstep::cache_sim;

const SglangW1& workload() {
  static const SglangW1 generated = SglangW1::generate({});
  return generated;
}

/// Bytes per second that one core reads from a buffer far larger than its caches; measured once.
double read_rate() {
  static const double rate = [] {
    std::vector<std::uint64_t> memory(std::size_t{32} << 20, 1);  // 256 MiB
    double best = 0;
    for (int repeat = 0; repeat < 3; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      std::uint64_t sums[8] = {};
      for (std::size_t i = 0; i < memory.size(); i += 8)
        for (std::size_t k = 0; k < 8; ++k) sums[k] += memory[i + k];
      benchmark::DoNotOptimize(sums);
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      best = std::max(best, static_cast<double>(memory.size() * 8) / spent.count());
    }
    return best;
  }();
  return rate;
}

void replay_w1(benchmark::State& state, const char* policy, CheckLevel check) {
  const SglangW1& w1 = workload();
  RunOptions options;
  options.subjects = {policy};
  options.config.chunked_prefill = 1024;
  if (std::string_view(policy).starts_with("edge-llm")) {  // eight of the rows run at once
    options.config.request_rows = 16;
    options.config.kv_tokens = std::int64_t{16} << 14;
  }
  options.check = check;
  const std::uint64_t before = Tokens::compared();
  std::int64_t hit_tokens = 0;
  for (auto _ : state) {
    state.PauseTiming();
    auto run = ReplaySession::start(options);
    state.ResumeTiming();
    const DrivenOutcome outcome =
        drive(w1, [&](const Operation& operation) { return (*run)->apply(operation); });
    (*run)->conclude();
    hit_tokens = outcome.hit_tokens;
    if (!outcome.complete) state.SkipWithError("the run stopped");
    state.PauseTiming();
    run->reset();
    state.ResumeTiming();
  }
  const auto requests = static_cast<double>(w1.requests.size());
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["requests"] =
      benchmark::Counter(requests * iterations, benchmark::Counter::kIsRate);
  state.counters["hit_tokens"] = static_cast<double>(hit_tokens);
  if (check != CheckLevel::off) return;
  // A compared token is four bytes in each of the two sequences.
  const double compared = static_cast<double>(Tokens::compared() - before) * 8;
  state.counters["compared_B"] = benchmark::Counter(compared, benchmark::Counter::kIsRate);
  state.counters["read_B"] = read_rate();
  state.counters["compared_MB_per_run"] = compared / iterations / 1e6;
}

BENCHMARK_CAPTURE(replay_w1, no_buffer_unchecked, "sglang-no-buffer", CheckLevel::off)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, no_buffer_labels, "sglang-no-buffer", CheckLevel::labels)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, no_buffer_checked, "sglang-no-buffer", CheckLevel::all)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, extra_buffer_unchecked, "sglang-extra-buffer", CheckLevel::off)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, extra_buffer_checked, "sglang-extra-buffer", CheckLevel::all)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, legacy_unchecked, "sglang-legacy", CheckLevel::off)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, radix_unchecked, "radix", CheckLevel::off)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, radix_checked, "radix", CheckLevel::all)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, marconi_unchecked, "marconi", CheckLevel::off)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, marconi_checked, "marconi", CheckLevel::all)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, marconi_artifact_unchecked, "marconi-artifact", CheckLevel::off)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, edge_llm_unchecked, "edge-llm", CheckLevel::off)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, edge_llm_checked, "edge-llm", CheckLevel::all)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, edge_llm_v0_unchecked, "edge-llm-v0", CheckLevel::off)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(replay_w1, no_buffer_oracle, "oracle:sglang-no-buffer", CheckLevel::off)
    ->Unit(benchmark::kMillisecond)
    ->Iterations(1);

/// Compares two equal sequences of explicit ids in separate buffers, and does nothing else.
void compare_tokens(benchmark::State& state) {
  const auto size = static_cast<std::uint32_t>(state.range(0));
  std::vector<std::uint32_t> ids(size);
  for (std::uint32_t i = 0; i < size; ++i) ids[i] = i * 2654435761u;
  const Tokens a = Tokens::of_ids(ids);
  const Tokens b = Tokens::of_ids(ids);
  for (auto _ : state) benchmark::DoNotOptimize(a.common(0, b, 0, size));
  state.counters["compared_B"] = benchmark::Counter(
      8.0 * size * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  state.counters["read_B"] = read_rate();
}
BENCHMARK(compare_tokens)->Arg(1024)->Arg(64 << 10)->Arg(16 << 20);

}  // namespace
