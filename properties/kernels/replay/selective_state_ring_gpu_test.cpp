// The kernels of selective_state_ring against the references of
// reference/recurrent/replay_rings.hpp.
#include "kernels/replay/selective_state_ring.hpp"

#include <gmock/gmock.h>

#include "kernels/recurrent/selective_state_update.hpp"
#include "properties/kernels/replay/ring_laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;

struct SelectiveExtents {
  std::int64_t H, G, P, N;
  bool gated = false;
};

template <class S>
struct SelectiveRun {
  static constexpr const char* kOperation = "selective_state_ring";
  using State = S;
  using Extents = SelectiveExtents;
  static constexpr Extents kUsual{4, 2, 64, 128}, kOther{4, 2, 64, 128, true},
      kMany{32, 2, 64, 128};
  static constexpr Extents kTilings[] = {
      kUsual,          {2, 1, 80, 128},      {2, 2, 32, 128}, {3, 1, 128, 128, true},
      {2, 1, 64, 64},  {1, 1, 80, 64, true}, {2, 1, 32, 64},  {2, 1, 64, 256},
      {1, 1, 80, 256}, {2, 1, 32, 256, true}};

  SelectiveRun(const Extents& e, const Rings& rings, std::uint64_t seed, double slow = 1)
      : e(e),
        rings(rings),
        host{draw<3>({rings.tokens(), e.H, e.P}, seed, 1),
             draw<3>({rings.tokens(), e.H, e.P}, seed, 2),
             draw<3>({rings.tokens(), e.G, e.N}, seed, 3),
             draw<3>({rings.tokens(), e.G, e.N}, seed, 4),
             draw<2>({rings.tokens(), e.H}, seed, 5),
             draw<1>({e.H}, seed, 6),
             draw<1>({e.H}, seed, 7),
             draw<1>({e.H}, seed, 8),
             draw<4>({rings.batch.slots, e.H, e.P, e.N}, seed, 9)},
        device(rings),
        x(host.x),
        z(host.z),
        B(host.B),
        C(host.C),
        dt(host.dt),
        A((negate(host.A, slow), host.A)),
        D(host.D),
        dt_bias(host.dt_bias),
        out(host.x.shape()),
        state(host.state),
        ring_x(Shape<4>{rings.batch.slots, e.H, rings.window, e.P}),
        ring_b(Shape<4>{rings.batch.slots, e.G, rings.window, e.N}),
        ring_dt(Shape<3>{rings.batch.slots, e.H, rings.window}) {}

  static void negate(Array<double, 1>& A, double slow) {
    for (double& a : A) a = static_cast<float>(-slow * (1.0 / 64 + std::abs(a)));
  }
  std::string text() const {
    return "H " + std::to_string(e.H) + " G " + std::to_string(e.G) + " P " + std::to_string(e.P) +
           " N " + std::to_string(e.N);
  }

  kernels::SelectiveStateRing<S> pools() {
    return {state.view(), ring_x.view(), ring_b.view(), ring_dt.view()};
  }
  kernels::SelectiveStateRingUpdate<S> arguments(std::int64_t t, std::int64_t first,
                                                 std::int64_t count) {
    const std::int64_t begin = t * rings.rows() + first, end = begin + count;
    kernels::SelectiveStateRingUpdate<S> in{.ring = pools(),
                                            .x = cut(std::as_const(x).view(), begin, end),
                                            .dt = cut(dt.view(), begin, end),
                                            .A = A.view(),
                                            .B = cut(std::as_const(B).view(), begin, end),
                                            .C = cut(std::as_const(C).view(), begin, end),
                                            .out = cut(out.view(), begin, end),
                                            .cursors = device.cursors_of(t, first, count),
                                            .positions = device.positions_of(t, first, count),
                                            .D = D.view(),
                                            .dt_bias = dt_bias.view(),
                                            .dt_softplus = true,
                                            .slots = device.slots(first, count)};
    if (e.gated) {
      in.z = cut(z.view(), begin, end);
      in.dt_min = 0.5f, in.dt_max = 1.0f;
    }
    return in;
  }
  void launch(std::int64_t t, std::int64_t first, std::int64_t count, const LaunchHow& how) {
    auto in = arguments(t, first, count);
    in.early_state = how.early;
    in.cursors = how.cursors.value_or(in.cursors);
    in.positions = how.positions.value_or(in.positions);
    kernels::selective_state_ring_update(in, how.stream);
  }
  /// Step t for all rows, with a state that is written at each token.
  void launch_snapshots(std::int64_t t) {
    const auto in = arguments(t, 0, rings.rows());
    const std::int64_t begin = t * rings.rows();
    kernels::selective_state_update<Bf16, S>(
        {.x = in.x,
         .dt = repeat(cut(dt.view(), begin, begin + rings.rows()), e.P),
         .A = repeat(repeat(A.view(), e.P), e.N),
         .B = in.B,
         .C = in.C,
         .state = state.view(),
         .out = in.out,
         .D = repeat(D.view(), e.P),
         .dt_bias = repeat(dt_bias.view(), e.P),
         .dt_softplus = true,
         .slots = in.slots},
        nullptr);
  }
  void flush(std::int32_t count) {
    const DeviceTensor<std::int32_t, 1> counts(
        Array<std::int32_t, 1>(Shape<1>{rings.rows()}, count));
    kernels::selective_state_ring_flush(pools(), A.view(), counts.view(),
                                        std::as_const(device.indices).view(),
                                        device.slots(0, rings.rows()), nullptr);
    finish();
  }
  bool same_rings(const SelectiveRun& other) const {
    return same_bits(ring_x, other.ring_x) && same_bits(ring_b, other.ring_b) &&
           same_bits(ring_dt, other.ring_dt);
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
    move(x), move(B), move(C), move(dt), move(z), move(device.cursors), move(device.positions);
  }

  /// The inputs of all steps as a reference takes them.
  template <class R>
  struct Cast {
    explicit Cast(const SelectiveRun& run)
        : x(cast<R>(run.host.x)),
          z(cast<R>(run.host.z)),
          B(cast<R>(run.host.B)),
          C(cast<R>(run.host.C)),
          dt(cast<R>(run.host.dt)),
          A(cast<R>(run.host.A)),
          D(cast<R>(run.host.D)),
          dt_bias(cast<R>(run.host.dt_bias)) {}
    const Array<R, 3> x, z, B, C;
    const Array<R, 2> dt;
    const Array<R, 1> A, D, dt_bias;
  };
  template <class R>
  RingAnswer answer(const StoragePoints& storage) const {
    const Cast<R> all(*this);
    Array<R, 4> state = cast<R>(host.state);
    Array<R, 4> rx(ring_x.shape()), rb(ring_b.shape());
    Array<R, 3> rdt(ring_dt.shape()), out(host.x.shape());
    for (std::int64_t t = 0; t < rings.steps; ++t) {
      const std::int64_t begin = t * rings.rows(), end = begin + rings.rows();
      const auto part = [&](const Array<R, 3>& array) { return cut(array.view(), begin, end); };
      reference::Mamba2Inputs<R> in{.x = part(all.x),
                                    .dt = cut(repeat(all.dt.view(), e.P), begin, end),
                                    .A = repeat(repeat(all.A.view(), e.P), e.N),
                                    .B = part(all.B),
                                    .C = part(all.C),
                                    .D = repeat(all.D.view(), e.P),
                                    .dt_bias = repeat(all.dt_bias.view(), e.P),
                                    .dt_softplus = true,
                                    .rows = {.slots = rings.batch.host(), .storage = storage}};
      if (e.gated) in.z = part(all.z), in.dt_min = R{0.5}, in.dt_max = R{1};
      reference::mamba2_ring_update<R>(in, {state.view(), rx.view(), rb.view(), rdt.view()},
                                       at(rings.cursors.view(), t), at(rings.positions.view(), t),
                                       cut(out.view(), begin, end));
    }
    return {cast<double>(out), cast<double>(state)};
  }

  Extents e;
  Rings rings;
  struct {
    Array<double, 3> x, z, B, C;
    Array<double, 2> dt;
    Array<double, 1> A, D, dt_bias;
    Array<double, 4> state;
  } host;
  DeviceRings device;
  DeviceTensor<Bf16, 3> x, z, B, C;
  DeviceTensor<Bf16, 2> dt;
  DeviceTensor<float, 1> A, D, dt_bias;
  DeviceTensor<Bf16, 3> out;
  DeviceTensor<S, 4> state;
  DeviceTensor<Bf16, 4> ring_x, ring_b;
  DeviceTensor<float, 3> ring_dt;
};

using Runs = ::testing::Types<SelectiveRun<float>, SelectiveRun<Bf16>>;
INSTANTIATE_TYPED_TEST_SUITE_P(SelectiveStateRing, RingLaws, Runs);

/// A complaint about arguments that are changed from sound ones; no GPU is needed.
template <class Change>
std::string complaint_about(Change change) {
  constexpr std::int64_t T = 2, H = 8, G = 2, P = 64, N = 128, L = 16;
  kernels::SelectiveStateRingUpdate<float> in{
      .ring = {unread<float, 4>({5, H, P, N}), unread<Bf16, 4>({5, H, L, P}),
               unread<Bf16, 4>({5, G, L, N}), unread<float, 3>({5, H, L})},
      .x = unread<const Bf16, 3>({T, H, P}),
      .dt = unread<Bf16, 2>({T, H}),
      .A = unread<float, 1>({H}),
      .B = unread<const Bf16, 3>({T, G, N}),
      .C = unread<const Bf16, 3>({T, G, N}),
      .out = unread<Bf16, 3>({T, H, P}),
      .cursors = unread<const std::int32_t, 1>({T}),
      .positions = unread<const std::int32_t, 1>({T})};
  change(in);
  return complaint_of([&] { kernels::selective_state_ring_update<float>(in, nullptr); });
}

TEST(SelectiveStateRingArguments, areRefusedByName) {
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.x = unread<Bf16, 4>({5, 8, 17, 64});
              }),
              HasSubstr("ring_x is expected to be [slots, H, L, P] with L of 1 to 16"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.B = unread<Bf16, 4>({5, 3, 16, 128});
              }),
              HasSubstr("ring_B is expected to be [slots, G, L, N] with H a multiple of G"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.dt = unread<float, 3>({5, 8, 15});
              }),
              HasSubstr("ring_dt is expected to be [slots, H, L]"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.state = unread<float, 4>({5, 8, 64, 128}, {8 * 64 * 128 + 1, 8192, 128, 1});
              }),
              HasSubstr("state is expected to be contiguous in its last two dimensions"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.x = unread<const Bf16, 3>({2, 8, 64}, {513, 64, 1});
              }),
              HasSubstr("x is expected to be contiguous in its last dimension"));
  EXPECT_THAT(complaint_about([](auto& in) { in.cursors = unread<const std::int32_t, 1>({3}); }),
              HasSubstr("cursors is expected to be [N] = [2]; got [3]"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.ring.state = unread<float, 4>({5, 8, 48, 128});
                in.ring.x = unread<Bf16, 4>({5, 8, 16, 48});
                in.x = unread<const Bf16, 3>({2, 8, 48});
                in.out = unread<Bf16, 3>({2, 8, 48});
              }),
              HasSubstr("with P a multiple of 32 or 80 and N = 64, 128 or 256"));
}

}  // namespace
}  // namespace lockstep
