// Times of the references at the head shapes of real models. FLOPs count the definition's
// multiplications and additions, so a form that does more work than the definition gets no credit
// for it. `of_peak` is the rate of these FLOPs divided by the rate that all cores together reach in
// Eigen's products of matrices, which is measured once, when the first benchmark begins.
#include <benchmark/benchmark.h>

#include <chrono>
#include <thread>

#include "reference/attention/mla_attention.hpp"
#include "reference/models/hybrid/hybrid_model.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"
#include "reference/recurrent/mamba2.hpp"
#include "reference/tensors/grid.hpp"

namespace lockstep {
namespace {

template <std::size_t Rank>
Array<float, Rank> drawn(const Shape<Rank>& shape, std::uint64_t stream) {
  return on_grid<float>(shape, {.stream = stream});
}

/// FLOP/s of all cores together while each multiplies 512 x 512 matrices of its own; the best of
/// five attempts.
double peak_flops() {
  static const double peak = [] {
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    constexpr int kProducts = 20;
    double best = 0;
    for (int attempt = 0; attempt < 5; ++attempt) {
      const auto start = std::chrono::steady_clock::now();
      std::vector<std::thread> threads;
      threads.reserve(static_cast<std::size_t>(cores));
      for (int i = 0; i < cores; ++i)
        threads.emplace_back([] {
          const Matrix<float> a = Matrix<float>::Ones(512, 512);
          Matrix<float> c(512, 512);
          for (int product = 0; product < kProducts; ++product) {
            c.noalias() = a * a;
            benchmark::DoNotOptimize(c.data());
          }
        });
      for (std::thread& thread : threads) thread.join();
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
      best = std::max(best, 2.0 * 512 * 512 * 512 * kProducts * cores / passed.count());
    }
    return best;
  }();
  return peak;
}

/// Times a benchmark's loop from this object's construction to its destruction and writes the
/// counters "FLOP/s" and "of_peak".
class FlopCount {
 public:
  FlopCount(benchmark::State& state, double per_iteration)
      : state_(state), flops_(per_iteration), peak_(peak_flops()) {}
  FlopCount(const FlopCount&) = delete;
  FlopCount& operator=(const FlopCount&) = delete;
  ~FlopCount() {
    using benchmark::Counter;
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
    const double done = flops_ * static_cast<double>(state_.iterations());
    state_.counters["FLOP/s"] = Counter(flops_, Counter::kIsIterationInvariantRate);
    state_.counters["of_peak"] = done / passed.count() / peak_;
  }

 private:
  benchmark::State& state_;
  double flops_, peak_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Qwen3-Next's heads: 16 of keys, 32 of values, K = V = 128. A chunk of 0 runs the recurrence, any
/// other runs the form by chunks of that many tokens. 7 FLOPs per element of S and token: decay 1,
/// S k 2, the update 2, S q 2.
void gated_delta_rule(benchmark::State& state) {
  const std::int64_t T = state.range(0), chunk = state.range(1), H = 16, HV = 32, K = 128, V = 128;
  const auto q = drawn<3>({T, H, K}, 1), k = drawn<3>({T, H, K}, 2), v = drawn<3>({T, HV, V}, 3);
  const Array<float, 2> g(Shape<2>{T, HV}, -0.1F), beta(Shape<2>{T, HV}, 0.5F);
  Array<float, 4> pool(Shape<4>{1, HV, V, K}, 0.0F);
  Array<float, 3> out(Shape<3>{T, HV, V});
  const reference::GatedDeltaRuleInputs<float> in{
      .q = q, .k = k, .v = v, .g = g, .beta = beta, .use_qk_l2norm = true};
  const FlopCount count(state, static_cast<double>(T * HV * K * V) * 7);
  for (auto _ : state) {
    if (chunk == 0)
      reference::gated_delta_rule_scan<float>(in, pool.view(), out);
    else
      reference::gated_delta_rule_prefill<float>(in, chunk, pool.view(), out);
  }
}
BENCHMARK(gated_delta_rule)
    ->Args({256, 0})
    ->Args({256, 64})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

/// Nemotron-H's heads: 64 of P = 64 rows and N = 128 columns of state, in 8 groups. A chunk of 0
/// runs the recurrence, any other runs the form by chunks of that many tokens. 5 FLOPs per element
/// of the state and token: decay 1, the update 2, S C 2.
void mamba2(benchmark::State& state) {
  const std::int64_t T = state.range(0), chunk = state.range(1), H = 64, P = 64, N = 128, G = 8;
  const auto x = drawn<3>({T, H, P}, 1), B = drawn<3>({T, G, N}, 2), C = drawn<3>({T, G, N}, 3);
  const Array<float, 2> dt(Shape<2>{T, H}, 0.1F);
  const Array<float, 1> A(Shape<1>{H}, -1.0F);
  Array<float, 4> pool(Shape<4>{1, H, P, N}, 0.0F);
  Array<float, 3> out(Shape<3>{T, H, P});
  const reference::Mamba2Inputs<float> in{
      .x = x, .dt = repeat(dt.view(), P), .A = repeat(repeat(A.view(), P), N), .B = B, .C = C};
  const FlopCount count(state, static_cast<double>(T * H * P * N) * 5);
  for (auto _ : state) {
    if (chunk == 0)
      reference::selective_scan<float>(in, pool.view(), out);
    else
      reference::ssd_prefill<float>(in, chunk, pool.view(), out);
  }
}
BENCHMARK(mamba2)->Args({256, 0})->Args({256, 128})->Unit(benchmark::kMillisecond)->UseRealTime();

/// DeepSeek-V3's heads: one query token with 128 heads over L cached latents of 576 columns.
void mla_decode(benchmark::State& state) {
  const std::int64_t L = state.range(0), H = 128, page = 64;
  const auto q = drawn<4>({1, 1, H, 576}, 1);
  const auto cache = drawn<3>({L / page, page, 576}, 2);
  Array<std::int32_t, 2> table(Shape<2>{1, L / page}, 0);
  for (std::int64_t i = 0; i < L / page; ++i) table(0, i) = static_cast<std::int32_t>(i);
  const Array<std::int32_t, 1> lengths(Shape<1>{1}, static_cast<std::int32_t>(L));
  Array<float, 4> out(Shape<4>{1, 1, H, 512});
  Array<float, 3> lse(Shape<3>{1, H, 1});
  const FlopCount count(state, static_cast<double>(2 * H * L * (576 + 512)));
  for (auto _ : state)
    reference::mla_decode<float>(
        {.q = q, .cache = cache, .block_table = table, .seq_lens = lengths, .softmax_scale = 0.07},
        out, lse);
}
BENCHMARK(mla_decode)->Arg(1024)->Unit(benchmark::kMillisecond)->UseRealTime();

/// DeepSeek-V3's kv_b_proj in the checkpoint's layout: for each of 128 heads 128 rows of W^K and
/// 128 rows of W^V, over dc = 512 columns; and one token's queries.
struct UpProjection {
  static constexpr std::int64_t H = 128, dn = 128, dr = 64, dc = 512;
  Array<float, 2> kv_b = drawn<2>({H * (dn + 128), dc}, 7);
  Array<float, 3> q_nope = drawn<3>({1, H, dn}, 8), q_pe = drawn<3>({1, H, dr}, 9);
};

/// The absorption of one token's queries by weights that are split once, before the loop.
void mla_absorb_at_load(benchmark::State& state) {
  const UpProjection p;
  const auto w = reference::split_kv_b<float>(p.kv_b, p.H, p.dn);
  for (auto _ : state)
    benchmark::DoNotOptimize(reference::absorbed_queries<float>(p.q_nope, p.q_pe, w).data());
}
BENCHMARK(mla_absorb_at_load)->Unit(benchmark::kMillisecond)->UseRealTime();

/// The absorption of one token's queries, with the split of the weights in every iteration.
void mla_absorb_in_forward(benchmark::State& state) {
  const UpProjection p;
  for (auto _ : state) {
    const auto w = reference::split_kv_b<float>(p.kv_b, p.H, p.dn);
    benchmark::DoNotOptimize(reference::absorbed_queries<float>(p.q_nope, p.q_pe, w).data());
  }
}
BENCHMARK(mla_absorb_in_forward)->Unit(benchmark::kMillisecond)->UseRealTime();

/// The counters are the bytes of one cached token in bf16: as latent and rotated key, as
/// decompressed keys and values, and as these padded to 256 columns. The time is the decompression
/// of 64 tokens without padding.
void mla_cache_memory(benchmark::State& state) {
  const UpProjection p;
  const std::int64_t L = 64, bf16 = 2;
  const auto w = reference::split_kv_b<float>(p.kv_b, p.H, p.dn);
  const auto latent = drawn<2>({L, p.dc}, 1), k_pe = drawn<2>({L, p.dr}, 2);
  double plain = 0, padded = 0;
  for (auto _ : state) {
    const auto [k, v] = reference::decompressed<float>(latent, k_pe, w);
    plain = static_cast<double>(bf16 * (k.size() + v.size())) / L;
    benchmark::DoNotOptimize(k.data());
  }
  const auto [k, v] = reference::decompressed<float>(latent, k_pe, w, 256, 256);
  padded = static_cast<double>(bf16 * (k.size() + v.size())) / L;
  const double compact = static_cast<double>(bf16 * (latent.size() + k_pe.size())) / L;
  state.counters["latent_bytes"] = compact;
  state.counters["decompressed_bytes"] = plain;
  state.counters["padded_bytes"] = padded;
  state.counters["ratio"] = plain / compact;
}
BENCHMARK(mla_cache_memory)->Unit(benchmark::kMillisecond)->UseRealTime();

/// Eigen's product of 512 x 512 matrices on one core; the references multiply by this library too.
void eigen_product(benchmark::State& state) {
  const Matrix<float> a = Matrix<float>::Ones(512, 512);
  Matrix<float> c(512, 512);
  const FlopCount count(state, 2.0 * 512 * 512 * 512);
  for (auto _ : state) {
    c.noalias() = a * a;
    benchmark::DoNotOptimize(c.data());
  }
}
BENCHMARK(eigen_product)->Unit(benchmark::kMillisecond)->UseRealTime();

/// A preset (by its place in hybrid_presets()) runs `rows` rows of `tokens` tokens each behind 40
/// others, on one core. `token` is the time of one token, embedding and head included.
void hybrid_model(benchmark::State& state) {
  const std::string_view preset =
      reference::hybrid_presets()[static_cast<std::size_t>(state.range(0))];
  const auto rows = static_cast<std::size_t>(state.range(1));
  const auto tokens = static_cast<std::size_t>(state.range(2));
  constexpr std::size_t kBefore = 40;
  const reference::HybridConfig config = *reference::hybrid_preset(preset);
  const reference::HybridModel model(config, reference::drawn_hybrid(config));
  std::vector<double> kv(rows * (kBefore + tokens) * model.kv_size());
  std::vector<double> states(rows * model.state_size() + 1), logits(rows * model.vocabulary());
  std::vector<std::uint64_t> text(kBefore + tokens);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = random_bits(1, 1, i);
  std::vector<std::vector<std::uint32_t>> slots(rows);
  std::vector<reference::HybridRow> first, next;
  for (std::uint32_t row = 0; row < rows; ++row) {
    for (std::uint32_t i = 0; i < text.size(); ++i)
      slots[row].push_back(static_cast<std::uint32_t>(row * text.size() + i));
    first.push_back({.tokens = std::span(text).first(kBefore), .kv = slots[row], .state = row});
    next.push_back({.tokens = std::span(text).subspan(kBefore),
                    .begin = kBefore,
                    .kv = slots[row],
                    .state = row,
                    .keeps_recurrent = false,
                    .keeps_conv = false});
  }
  const auto run = [&](const std::vector<reference::HybridRow>& batch) {
    model.forward(batch, {kv.data(), model.kv_size()}, {states.data(), model.state_size()}, logits);
  };
  run(first);
  for (auto _ : state) run(next);
  state.SetLabel(std::string(preset));
  state.counters["token"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * static_cast<double>(rows * tokens),
      benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(hybrid_model)
    ->ArgNames({"preset", "rows", "tokens"})
    ->ArgsProduct({{0, 1, 2, 3, 4}, {1, 4}, {1, 16}})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace lockstep
