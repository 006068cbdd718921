// Times of the kernels at serving shapes on a GPU. The counter `limit_share` is the time that a
// copy at the chip's copy rate would take for the bytes that a launch must move, divided by the
// measured time: 1 is the limit. bench/peers/ times other projects' kernels beside these.
#include "kernels/recurrent/causal_conv1d_update.hpp"

#include <numeric>

#include "bench/support/gpu_timing.hpp"
#include "kernels/recurrent/gated_delta_rule_prefill.hpp"
#include "kernels/recurrent/gated_delta_rule_update.hpp"
#include "kernels/recurrent/selective_state_update.hpp"
#include "kernels/recurrent/state_copy.hpp"

namespace lockstep::bench {
namespace {

using kernels::Bf16;

/// The slots 0 ... count - 1 in an order in which consecutive rows get slots that lie far apart.
std::vector<std::int32_t> scattered(std::int64_t count) {
  std::int64_t step = count * 5 / 8 | 1;
  while (std::gcd(step, count) != 1) step += 2;
  std::vector<std::int32_t> slots(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    slots[static_cast<std::size_t>(i)] = static_cast<std::int32_t>((i * step + 3) % count);
  return slots;
}

/// query_start_loc of `rows` rows of `each` tokens: 0, each, 2 each, …, rows each.
std::vector<std::int32_t> starts_of(std::int64_t rows, std::int64_t each) {
  std::vector<std::int32_t> starts(static_cast<std::size_t>(rows + 1));
  for (std::int64_t i = 0; i <= rows; ++i)
    starts[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i * each);
  return starts;
}

// --- Gated delta rule, Qwen3-Next ----------------------------------------------------------------

constexpr std::int64_t kH = 16, kHV = 32, kK = 128, kV = 128;

/// Input sets of B rows with T tokens each. The pool of a set has T slots for every row; a launch
/// that keeps one state per row uses only B of them.
template <class S>
struct GatedDelta {
  std::int64_t B, T;
  int sets;
  Buffer<Bf16> q, k, v, out;
  Buffer<float> g, beta;
  Buffer<S> state;
  Buffer<std::int32_t> slots, starts, accepted;

  /// Makes as many sets as keep L2 cold when a launch reads each row's state once and writes states
  /// `writes` times as large.
  GatedDelta(std::int64_t rows, std::int64_t tokens, double writes)
      : B(rows),
        T(tokens),
        sets(cold_sets((1 + writes) * static_cast<double>(B * kHV * kK * kV * sizeof(S)))),
        q(sets * B * T * kH * kK, -1, 1),
        k(sets * B * T * kH * kK, -1, 1),
        v(sets * B * T * kHV * kV, -1, 1),
        out(sets * B * T * kHV * kV),
        g(sets * B * T * kHV, -0.1, -0.001),
        beta(sets * B * T * kHV, 0, 1),
        state(sets * B * T * kHV * kV * kK, -1, 1),
        slots(scattered(B * T)),
        starts(starts_of(B, T)),
        accepted(std::vector<std::int32_t>(static_cast<std::size_t>(B), 1)) {}

  double state_bytes() const { return static_cast<double>(B * kHV * kK * kV * sizeof(S)); }
  double token_bytes() const {
    return static_cast<double>(B * T * (2 * kH * kK * 2 + 2 * kHV * kV * 2 + 2 * kHV * 4));
  }

  kernels::GatedDeltaTokens<Bf16> tokens(int set) const {
    const std::int64_t n = B * T, at = set * n;
    kernels::GatedDeltaTokens<Bf16> tokens{
        .q = make_view<const Bf16, 3>(q.at(at * kH * kK), {n, kH, kK}),
        .k = make_view<const Bf16, 3>(k.at(at * kH * kK), {n, kH, kK}),
        .v = make_view<const Bf16, 3>(v.at(at * kHV * kV), {n, kHV, kV}),
        .g = make_view<const float, 2>(g.at(at * kHV), {n, kHV}),
        .beta = make_view<const float, 2>(beta.at(at * kHV), {n, kHV})};
    if (T > 1) tokens.query_start_loc = make_view<const std::int32_t, 1>(starts.at(0), {B + 1});
    return tokens;
  }
  kernels::GatedDeltaRuleUpdate<Bf16, S> update(int set) const {
    const std::int64_t n = B * T;
    return {.tokens = tokens(set),
            .state = make_view<S, 4>(state.at(set * n * kHV * kV * kK), {n, kHV, kV, kK}),
            .out = make_view<Bf16, 3>(out.at(set * n * kHV * kV), {n, kHV, kV}),
            .slots = {.indices = make_view<const std::int32_t, 1>(slots.at(0), {B})},
            .use_qk_l2norm = true};
  }
};

template <class S>
void gdn_decode(benchmark::State& state) {
  const GatedDelta<S> in(state.range(0), 1, 1);
  time_launches(state, in.sets, 2 * in.state_bytes() + in.token_bytes(),
                [&](int set, cudaStream_t s) { gated_delta_rule_update(in.update(set), s); });
}

/// A verification of 4 tokens per row that writes the state after each of them into a slot.
template <class S>
void gdn_verify(benchmark::State& state) {
  const GatedDelta<S> in(state.range(0), 4, 4);
  const StateSlots table{
      .table = make_view<const std::int32_t, 2>(in.slots.at(0), {in.B, in.T}),
      .num_accepted = make_view<const std::int32_t, 1>(in.accepted.at(0), {in.B})};
  time_launches(state, in.sets, 5 * in.state_bytes() + in.token_bytes(),
                [&](int set, cudaStream_t s) {
                  auto update = in.update(set);
                  update.slots = table;
                  gated_delta_rule_update(update, s);
                });
}

/// A verification of 4 tokens per row that only reads the state, and a launch that commits the
/// accepted tokens by replay: the state moves three times, not five.
template <class S>
void gdn_verify_replay(benchmark::State& state) {
  const GatedDelta<S> in(state.range(0), 4, 2);
  const auto accepted = make_view<const std::int32_t, 1>(in.accepted.at(0), {in.B});
  time_launches(state, in.sets, 3 * in.state_bytes() + in.token_bytes(),
                [&](int set, cudaStream_t s) {
                  auto update = in.update(set);
                  update.read_only = true;
                  gated_delta_rule_update(update, s);
                  gated_delta_rule_replay(update, accepted, {}, s);
                });
}

/// A verification of 4 tokens per row that first commits the accepted tokens of the verification
/// before it in the same launch: the state moves twice.
template <class S>
void gdn_verify_fold(benchmark::State& state) {
  const GatedDelta<S> in(state.range(0), 4, 1);
  const auto accepted = make_view<const std::int32_t, 1>(in.accepted.at(0), {in.B});
  time_launches(state, in.sets, 2 * in.state_bytes() + in.token_bytes(),
                [&](int set, cudaStream_t s) {
                  auto update = in.update(set);
                  update.fold = in.tokens((set + 1) % in.sets);
                  update.fold_accepted = accepted;
                  gated_delta_rule_update(update, s);
                });
}

/// A prefill of packed prompts, one row for each entry of `lengths`; every row continues from its
/// state.
void gdn_prefill(benchmark::State& state, const std::vector<std::int32_t>& lengths,
                 kernels::PrefillForm form) {
  std::vector<std::int32_t> starts_of_rows(lengths.size() + 1, 0);
  std::inclusive_scan(lengths.begin(), lengths.end(), starts_of_rows.begin() + 1);
  const std::int64_t T = starts_of_rows.back(), N = static_cast<std::int64_t>(lengths.size());
  const double bytes = static_cast<double>(T * (2 * kH * kK * 2 + 2 * kHV * kV * 2 + 2 * kHV * 4)) +
                       2.0 * static_cast<double>(N * kHV * kV * kK * 4);
  const int sets = cold_sets(bytes);
  const Buffer<Bf16> q(sets * T * kH * kK, -1, 1), k(sets * T * kH * kK, -1, 1);
  const Buffer<Bf16> v(sets * T * kHV * kV, -1, 1), out(sets * T * kHV * kV);
  const Buffer<float> g(sets * T * kHV, -0.1, -0.001), beta(sets * T * kHV, 0, 1);
  const Buffer<float> states(sets * N * kHV * kV * kK, -1, 1);
  const Buffer<std::int32_t> starts(starts_of_rows);
  const auto arguments = [&](int set) {
    return kernels::GatedDeltaRulePrefill<Bf16, float>{
        .tokens = {.q = make_view<const Bf16, 3>(q.at(set * T * kH * kK), {T, kH, kK}),
                   .k = make_view<const Bf16, 3>(k.at(set * T * kH * kK), {T, kH, kK}),
                   .v = make_view<const Bf16, 3>(v.at(set * T * kHV * kV), {T, kHV, kV}),
                   .g = make_view<const float, 2>(g.at(set * T * kHV), {T, kHV}),
                   .beta = make_view<const float, 2>(beta.at(set * T * kHV), {T, kHV}),
                   .query_start_loc = make_view<const std::int32_t, 1>(starts.at(0), {N + 1})},
        .state = make_view<float, 4>(states.at(set * N * kHV * kV * kK), {N, kHV, kV, kK}),
        .out = make_view<Bf16, 3>(out.at(set * T * kHV * kV), {T, kHV, kV}),
        .use_qk_l2norm = true,
        .form = form};
  };
  const std::int64_t needed = kernels::prefill_workspace(arguments(0)).bytes;
  const Buffer<float> workspace(needed / 4 + 1, 0, 0);
  time_launches(state, sets, bytes, [&](int set, cudaStream_t stream) {
    auto in = arguments(set);
    in.workspace =
        make_view<unsigned char, 1>(reinterpret_cast<unsigned char*>(workspace.at(0)), {needed});
    kernels::gated_delta_rule_prefill(in, stream);
  });
}
template <kernels::PrefillForm kForm>
void gdn_prefill_one(benchmark::State& state) {
  gdn_prefill(state, {static_cast<std::int32_t>(state.range(0))}, kForm);
}
/// 16 rows of 17 to 2,048 tokens, 12,384 together.
template <kernels::PrefillForm kForm>
void gdn_prefill_mixed(benchmark::State& state) {
  gdn_prefill(state,
              {17, 2048, 512, 100, 1500, 64, 333, 900, 30, 1024, 700, 90, 1800, 240, 1300, 1726},
              kForm);
}

// --- Mamba2, Nemotron-H --------------------------------------------------------------------------

template <class S>
void ssu_decode(benchmark::State& state) {
  constexpr std::int64_t H = 128, P = 64, N = 128, G = 8;
  const std::int64_t B = state.range(0);
  const double state_bytes = static_cast<double>(B * H * P * N * sizeof(S));
  const int sets = cold_sets(2 * state_bytes);
  const Buffer<Bf16> x(sets * B * H * P, -1, 1), dt(sets * B * H, -1, 1);
  const Buffer<Bf16> in_b(sets * B * G * N, -1, 1), C(sets * B * G * N, -1, 1);
  const Buffer<Bf16> out(sets * B * H * P);
  const Buffer<float> A(H, -4, -0.5), D(H, -1, 1), dt_bias(H, -3, -1);
  const Buffer<S> states(sets * B * H * P * N, -1, 1);
  const Buffer<std::int32_t> slots(scattered(B));
  time_launches(state, sets,
                2 * state_bytes + static_cast<double>(B * (2 * H * P + 2 * G * N + H) * 2),
                [&](int set, cudaStream_t stream) {
                  const auto repeated = [&](const float* per_head) {
                    return make_view<const float, 2>(per_head, Shape<2>{H, P}, Shape<2>{1, 0});
                  };
                  kernels::selective_state_update(
                      kernels::SelectiveStateUpdate<Bf16, S>{
                          .x = make_view<const Bf16, 3>(x.at(set * B * H * P), {B, H, P}),
                          .dt = make_view<const Bf16, 3>(dt.at(set * B * H), {B, H, P}, {H, 1, 0}),
                          .A = make_view<const float, 3>(A.at(0), {H, P, N}, {1, 0, 0}),
                          .B = make_view<const Bf16, 3>(in_b.at(set * B * G * N), {B, G, N}),
                          .C = make_view<const Bf16, 3>(C.at(set * B * G * N), {B, G, N}),
                          .state = make_view<S, 4>(states.at(set * B * H * P * N), {B, H, P, N}),
                          .out = make_view<Bf16, 3>(out.at(set * B * H * P), {B, H, P}),
                          .D = repeated(D.at(0)),
                          .dt_bias = repeated(dt_bias.at(0)),
                          .dt_softplus = true,
                          .slots = {.indices = make_view<const std::int32_t, 1>(slots.at(0), {B})}},
                      stream);
                });
}

// --- Convolution and pools -----------------------------------------------------------------------

void conv_decode(benchmark::State& state) {
  constexpr std::int64_t D = 8192, W = 4;
  const std::int64_t B = state.range(0);
  const double state_bytes = static_cast<double>(B * D * (W - 1) * 2);
  const double bytes = 2 * state_bytes + static_cast<double>(2 * B * D * 2 + D * (W + 1) * 2);
  const int sets = cold_sets(bytes);
  const Buffer<Bf16> x(sets * B * D, -1, 1), out(sets * B * D);
  const Buffer<Bf16> weight(D * W, -1, 1), bias(D, -1, 1), states(sets * B * D * (W - 1), -1, 1);
  const Buffer<std::int32_t> slots(scattered(B));
  time_launches(state, sets, bytes, [&](int set, cudaStream_t stream) {
    causal_conv1d_update(
        kernels::CausalConv1dUpdate<Bf16, Bf16>{
            .x = make_view<const Bf16, 2>(x.at(set * B * D), {B, D}),
            .conv_state = make_view<Bf16, 3>(states.at(set * B * D * (W - 1)), {B, D, W - 1},
                                             {D * (W - 1), 1, D}),
            .weight = make_view<const Bf16, 2>(weight.at(0), {D, W}, {1, D}),
            .out = make_view<Bf16, 2>(out.at(set * B * D), {B, D}),
            .bias = make_view<const Bf16, 1>(bias.at(0), {D}),
            .silu = true,
            .slots = {.indices = make_view<const std::int32_t, 1>(slots.at(0), {B})}},
        stream);
  });
}

/// state_copy of 64 slots to 64 others, in each of 36 layers of 128 slots.
void pool_copy(benchmark::State& state) {
  constexpr std::int64_t kLayers = 36, kSlots = 128, kMoves = 64;
  const std::int64_t row = state.range(0);
  const double bytes = 2.0 * kLayers * kMoves * static_cast<double>(row);
  const int sets = cold_sets(bytes);
  const Buffer<Bf16> pool(sets * kLayers * kSlots * row / 2, -1, 1);
  const Buffer<std::int32_t> slots(scattered(kSlots));
  time_launches(state, sets, bytes, [&](int set, cudaStream_t stream) {
    kernels::state_copy({.data = pool.at(set * kLayers * kSlots * row / 2),
                         .layers = kLayers,
                         .slots = kSlots,
                         .row_bytes = row,
                         .layer_stride_bytes = kSlots * row,
                         .slot_stride_bytes = row},
                        make_view<const std::int32_t, 1>(slots.at(0), {kMoves}),
                        make_view<const std::int32_t, 1>(slots.at(kMoves), {kMoves}), stream);
  });
}

// --- Streams without arithmetic ------------------------------------------------------------------

/// Reads as many bytes as the states of a launch once and writes them `kWrites` times, and does
/// nothing else: no kernel with this traffic takes less time, its launch included.
template <int kWrites>
void stream_states(benchmark::State& state) {
  const std::int64_t bytes = state.range(0) << 20;
  const double moved = (1.0 + kWrites) * static_cast<double>(bytes);
  const int sets = cold_sets(moved);
  const Buffer<float> from(sets * bytes / 4, -1, 1), to(std::int64_t{kWrites} * sets * bytes / 4);
  time_launches(state, sets, moved, [&](int set, cudaStream_t stream) {
    kernels::fan_out_on_device(to.at(std::int64_t{kWrites} * set * bytes / 4),
                               from.at(set * bytes / 4), bytes, kWrites, stream);
  });
}

// -------------------------------------------------------------------------------------------------

const bool kRegistered = [] {
  using Body = void (*)(benchmark::State&);
  if (!has_gpu()) {
    benchmark::RegisterBenchmark(
        "kernels/", [](benchmark::State& state) { state.SkipWithError("there is no GPU"); });
    return true;
  }
  const auto add = [](const char* name, Body body, const std::vector<std::int64_t>& sizes) {
    auto* const benchmark = benchmark::RegisterBenchmark(name, body);
    for (const std::int64_t size : sizes) benchmark->Arg(size);
    benchmark->UseManualTime()->Unit(benchmark::kMicrosecond)->Iterations(11);
  };
  const std::vector<std::int64_t> batches{1, 16, 64, 256, 1024}, verified{1, 16, 64, 256};
  add("kernels/causal_conv1d_update/bf16", conv_decode, batches);
  add("kernels/selective_state_update/float32", ssu_decode<float>, batches);
  add("kernels/selective_state_update/bf16", ssu_decode<Bf16>, batches);
  add("kernels/gated_delta_rule_update/float32", gdn_decode<float>, batches);
  add("kernels/gated_delta_rule_update/bf16", gdn_decode<Bf16>, batches);
  add("kernels/gated_delta_rule_update/4_tokens/float32", gdn_verify<float>, verified);
  add("kernels/gated_delta_rule_update/4_tokens/bf16", gdn_verify<Bf16>, verified);
  add("kernels/gated_delta_rule_update/4_tokens_replay/float32", gdn_verify_replay<float>,
      verified);
  add("kernels/gated_delta_rule_update/4_tokens_replay/bf16", gdn_verify_replay<Bf16>, verified);
  add("kernels/gated_delta_rule_update/4_tokens_fold/float32", gdn_verify_fold<float>, verified);
  add("kernels/gated_delta_rule_update/4_tokens_fold/bf16", gdn_verify_fold<Bf16>, verified);
  using kernels::PrefillForm;
  const std::vector<std::int64_t> prompts{2048, 8192, 32768};
  add("kernels/gated_delta_rule_prefill/overlapped", gdn_prefill_one<PrefillForm::overlapped>,
      prompts);
  add("kernels/gated_delta_rule_prefill/followed", gdn_prefill_one<PrefillForm::followed>, prompts);
  add("kernels/gated_delta_rule_prefill/in_turns", gdn_prefill_one<PrefillForm::in_turns>, prompts);
  add("kernels/gated_delta_rule_prefill/by_heads", gdn_prefill_one<PrefillForm::by_heads>, prompts);
  add("kernels/gated_delta_rule_prefill/16_mixed/in_turns",
      gdn_prefill_mixed<PrefillForm::in_turns>, {});
  add("kernels/gated_delta_rule_prefill/16_mixed/by_heads",
      gdn_prefill_mixed<PrefillForm::by_heads>, {});
  const std::vector<std::int64_t> megabytes{1, 2, 4, 16, 32, 64, 128, 256, 512};
  add("kernels/streams/1_read_1_write/MiB", stream_states<1>, megabytes);
  add("kernels/streams/1_read_4_writes/MiB", stream_states<4>, megabytes);
  add("kernels/state_copy/bytes", pool_copy, {48 << 10, 2 << 20});
  return true;
}();

}  // namespace
}  // namespace lockstep::bench
