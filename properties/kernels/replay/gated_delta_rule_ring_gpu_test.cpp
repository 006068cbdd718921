// The kernels of gated_delta_rule_ring against the references of
// reference/recurrent/replay_rings.hpp.
#include "kernels/replay/gated_delta_rule_ring.hpp"

#include <gmock/gmock.h>

#include "kernels/recurrent/gated_delta_rule_update.hpp"
#include "properties/kernels/replay/ring_laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;

struct DeltaExtents {
  std::int64_t H, HV, K, V;
  bool raw_gates = false;
};

template <class S>
struct DeltaRun {
  static constexpr const char* kOperation = "gated_delta_rule_ring";
  using State = S;
  using Extents = DeltaExtents;
  static constexpr Extents kUsual{2, 4, 128, 128}, kOther{2, 4, 128, 128, true},
      kMany{8, 32, 128, 128};
  static constexpr Extents kTilings[] = {kUsual,          {1, 3, 128, 64, true},
                                         {1, 3, 96, 192}, {2, 2, 64, 64, true},
                                         {1, 2, 256, 64}, {8, 64, 128, 128}};

  DeltaRun(const Extents& e, const Rings& rings, std::uint64_t seed, double slow = 1)
      : e(e),
        rings(rings),
        host{draw<3>({rings.tokens(), e.H, e.K}, seed, 1),
             draw<3>({rings.tokens(), e.H, e.K}, seed, 2),
             draw<3>({rings.tokens(), e.HV, e.V}, seed, 3),
             draw<2>({rings.tokens(), e.HV}, seed, 4),
             draw<2>({rings.tokens(), e.HV}, seed, 5),
             draw<1>({e.HV}, seed, 6),
             draw<1>({e.HV}, seed, 7),
             draw<4>({rings.batch.slots, e.HV, e.V, e.K}, seed, 8),
             Array<double, 2>(Shape<2>{rings.tokens(), e.HV}),
             Array<double, 2>(Shape<2>{rings.tokens(), e.HV})},
        device(rings),
        q(host.q),
        k(host.k),
        v(host.v),
        a(host.a),
        b(host.b),
        g((make_gates(slow), host.g)),
        beta(host.beta),
        A_log(host.A_log),
        dt_bias(host.dt_bias),
        out(host.v.shape()),
        state(host.state),
        ring_k(Shape<4>{rings.batch.slots, e.H, rings.window, e.K}),
        ring_scale(Shape<3>{rings.batch.slots, e.H, rings.window}),
        ring_u(Shape<4>{rings.batch.slots, e.HV, rings.window, e.V}),
        ring_g(Shape<3>{rings.batch.slots, e.HV, rings.window}) {}

  /// Gates that a kernel is handed ready-made: float32.
  void make_gates(double slow) {
    for (std::int64_t i = 0; i < host.a.size(); ++i) {
      host.g.data()[i] = static_cast<float>(-slow * std::abs(host.a.data()[i]));
      host.beta.data()[i] = std::abs(host.b.data()[i]);
    }
  }
  std::string text() const {
    return "H " + std::to_string(e.H) + " HV " + std::to_string(e.HV) + " K " +
           std::to_string(e.K) + " V " + std::to_string(e.V);
  }

  kernels::GatedDeltaRuleRing<S> pools() {
    return {state.view(), ring_k.view(), ring_scale.view(), ring_u.view(), ring_g.view()};
  }
  kernels::GatedDeltaRuleRingUpdate<S> arguments(std::int64_t t, std::int64_t first,
                                                 std::int64_t count) {
    const std::int64_t begin = t * rings.rows() + first, end = begin + count;
    kernels::GatedDeltaRuleRingUpdate<S> in{.ring = pools(),
                                            .q = cut(std::as_const(q).view(), begin, end),
                                            .k = cut(std::as_const(k).view(), begin, end),
                                            .v = cut(std::as_const(v).view(), begin, end),
                                            .g = cut(g.view(), begin, end),
                                            .beta = cut(beta.view(), begin, end),
                                            .out = cut(out.view(), begin, end),
                                            .cursors = device.cursors_of(t, first, count),
                                            .positions = device.positions_of(t, first, count),
                                            .use_qk_l2norm = true,
                                            .slots = device.slots(first, count)};
    if (e.raw_gates) {
      in.g = cut(a.view(), begin, end), in.beta = cut(b.view(), begin, end);
      in.A_log = A_log.view(), in.dt_bias = dt_bias.view();
    }
    return in;
  }
  void launch(std::int64_t t, std::int64_t first, std::int64_t count, const LaunchHow& how) {
    auto in = arguments(t, first, count);
    in.early_state = how.early;
    in.cursors = how.cursors.value_or(in.cursors);
    in.positions = how.positions.value_or(in.positions);
    kernels::gated_delta_rule_ring_update(in, how.stream);
  }
  /// Step t for all rows, with a state that is written at each token.
  void launch_snapshots(std::int64_t t) {
    const auto in = arguments(t, 0, rings.rows());
    kernels::gated_delta_rule_update<Bf16, S>(
        {.tokens = {.q = in.q, .k = in.k, .v = in.v, .g = in.g, .beta = in.beta},
         .state = state.view(),
         .out = in.out,
         .slots = in.slots,
         .use_qk_l2norm = true},
        nullptr);
  }
  void flush(std::int32_t count) {
    const DeviceTensor<std::int32_t, 1> counts(
        Array<std::int32_t, 1>(Shape<1>{rings.rows()}, count));
    kernels::gated_delta_rule_ring_flush(pools(), counts.view(),
                                         std::as_const(device.indices).view(),
                                         device.slots(0, rings.rows()), nullptr);
    finish();
  }
  bool same_rings(const DeltaRun& other) const {
    return same_bits(ring_k, other.ring_k) && same_bits(ring_scale, other.ring_scale) &&
           same_bits(ring_u, other.ring_u) && same_bits(ring_g, other.ring_g);
  }
  /// Step t's inputs, cursors and positions take the places of the first step's.
  void move_to_front(std::int64_t t) {
    const auto move = [&](auto& tensor) {
      const std::size_t bytes = tensor.bytes() / static_cast<std::size_t>(rings.steps);
      auto* const first = reinterpret_cast<char*>(tensor.data());
      kernels::check_cuda(cudaMemcpy(first, first + static_cast<std::size_t>(t) * bytes, bytes,
                                     cudaMemcpyDeviceToDevice),
                          "a copy");
    };
    move(q), move(k), move(v), move(a), move(b), move(g), move(beta);
    move(device.cursors), move(device.positions);
  }

  template <class R>
  RingAnswer answer(const StoragePoints& storage) const {
    const Array<R, 3> q = cast<R>(host.q), k = cast<R>(host.k), v = cast<R>(host.v);
    reference::GatedDeltaGates<R> gates{cast<R>(host.g), cast<R>(host.beta)};
    if (e.raw_gates) {
      const Array<R, 2> a = cast<R>(host.a), b = cast<R>(host.b);
      const Array<R, 1> A_log = cast<R>(host.A_log), dt_bias = cast<R>(host.dt_bias);
      gates = reference::gated_delta_gates<R>(a.view(), b.view(), A_log.view(), dt_bias.view());
    }
    Array<R, 4> state = cast<R>(host.state), rk(ring_k.shape()), ru(ring_u.shape());
    Array<R, 3> scale(ring_scale.shape()), rg(ring_g.shape()), out(host.v.shape());
    for (std::int64_t t = 0; t < rings.steps; ++t) {
      const std::int64_t begin = t * rings.rows(), end = begin + rings.rows();
      const auto part = [&](const auto& array) {
        return cut(std::as_const(array).view(), begin, end);
      };
      const reference::GatedDeltaRuleInputs<R> in{
          .q = part(q),
          .k = part(k),
          .v = part(v),
          .g = part(gates.g),
          .beta = part(gates.beta),
          .use_qk_l2norm = true,
          .rows = {.slots = rings.batch.host(), .storage = storage}};
      reference::gated_delta_ring_update<R>(
          in, {state.view(), rk.view(), scale.view(), ru.view(), rg.view()},
          at(rings.cursors.view(), t), at(rings.positions.view(), t), cut(out.view(), begin, end));
    }
    return {cast<double>(out), cast<double>(state)};
  }

  Extents e;
  Rings rings;
  struct {
    Array<double, 3> q, k, v;
    Array<double, 2> a, b;
    Array<double, 1> A_log, dt_bias;
    Array<double, 4> state;
    Array<double, 2> g, beta;
  } host;
  DeviceRings device;
  DeviceTensor<Bf16, 3> q, k, v;
  DeviceTensor<Bf16, 2> a, b;
  DeviceTensor<float, 2> g, beta;
  DeviceTensor<float, 1> A_log, dt_bias;
  DeviceTensor<Bf16, 3> out;
  DeviceTensor<S, 4> state;
  DeviceTensor<Bf16, 4> ring_k;
  DeviceTensor<float, 3> ring_scale;
  DeviceTensor<S, 4> ring_u;
  DeviceTensor<float, 3> ring_g;
};

using Runs = ::testing::Types<DeltaRun<float>, DeltaRun<Bf16>>;
INSTANTIATE_TYPED_TEST_SUITE_P(GatedDeltaRuleRing, RingLaws, Runs);

/// A complaint about arguments that are changed from sound ones; no GPU is needed.
template <class Change>
std::string complaint_about(Change change) {
  constexpr std::int64_t T = 2, H = 2, HV = 8, V = 128, K = 128, L = 16;
  kernels::GatedDeltaRuleRingUpdate<float> in{
      .ring = {unread<float, 4>({5, HV, V, K}), unread<Bf16, 4>({5, H, L, K}),
               unread<float, 3>({5, H, L}), unread<float, 4>({5, HV, L, V}),
               unread<float, 3>({5, HV, L})},
      .q = unread<const Bf16, 3>({T, H, K}),
      .k = unread<const Bf16, 3>({T, H, K}),
      .v = unread<const Bf16, 3>({T, HV, V}),
      .g = unread<float, 2>({T, HV}),
      .beta = unread<float, 2>({T, HV}),
      .out = unread<Bf16, 3>({T, HV, V}),
      .cursors = unread<const std::int32_t, 1>({T}),
      .positions = unread<const std::int32_t, 1>({T})};
  change(in);
  return complaint_of([&] { kernels::gated_delta_rule_ring_update<float>(in, nullptr); });
}

TEST(GatedDeltaRuleRingArguments, areRefusedByName) {
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.k = unread<Bf16, 4>({5, 2, 17, 128});
              }),
              HasSubstr("ring_k is expected to be [slots, H, L, K] with L of 1 to 16"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.k = unread<Bf16, 4>({5, 3, 16, 128});
              }),
              HasSubstr("ring_k is expected to be [slots, H, L, K] with HV a multiple of H"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.u = unread<float, 4>({5, 8, 15, 128});
              }),
              HasSubstr("ring_u is expected to be [slots, HV, L, V]"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.g = unread<float, 3>({5, 8, 15});
              }),
              HasSubstr("ring_g is expected to be [slots, HV, L]"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.k = unread<const Bf16, 3>({2, 2, 128}, {257, 128, 1});
              }),
              HasSubstr("k is expected to be contiguous in its last dimension"));
  EXPECT_THAT(complaint_about([](auto& in) { in.A_log = unread<float, 1>({8}); }),
              HasSubstr("A_log and dt_bias is expected to be both given, or neither"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.state = unread<float, 4>({5, 8, 48, 128});
                in.ring.u = unread<float, 4>({5, 8, 16, 48});
                in.v = unread<const Bf16, 3>({2, 8, 48});
                in.out = unread<Bf16, 3>({2, 8, 48});
              }),
              HasSubstr("with V a multiple of 64 and K = 64, 96, 128 or 256"));
}

}  // namespace
}  // namespace lockstep
