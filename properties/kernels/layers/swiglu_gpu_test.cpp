// The kernel of the feed-forward unit's gate against its reference.
#include "kernels/layers/swiglu.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/layers/swiglu.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::Fp16;

Array<double, 2> draw(std::int64_t T, std::int64_t F, std::uint64_t seed) {
  return on_grid<double>(Shape<2>{T, F}, {.seed = seed, .limit = 2});
}

template <class S>
Array<S, 2> reference_answer(const Array<double, 2>& gate, const Array<double, 2>& up) {
  Array<S, 2> out(gate.shape());
  reference::swiglu_gate<S>(cast<S>(gate), cast<S>(up), out);
  return out;
}

template <class T>
class SwigluGpu : public GpuTest {};
using Types = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Fp16, float,
#endif
    Bf16>;
TYPED_TEST_SUITE(SwigluGpu, Types);

TYPED_TEST(SwigluGpu, agreesWithTheReference) {
  using T = TypeParam;
  std::uint64_t seed = 1;
  for (const std::int64_t tokens : {0, 1, 65})
    for (const std::int64_t F : {0, 1, 63, 64, 65, 257, 1000}) {
      const auto gate = draw(tokens, F, ++seed), up = draw(tokens, F, ++seed);
      GappedRows<T> device_gate(gate), device_up(up), out(tokens, F);
      kernels::swiglu<T>(
          {.gate = device_gate.inputs(), .up = device_up.inputs(), .out = out.view()}, nullptr);
      finish();
      EXPECT_TRUE(within_yardstick("swiglu", "out", out,
                                   stored<T>(reference_answer<float>(gate, up)),
                                   reference_answer<double>(gate, up)));
      GappedRows<T> in_place(gate), again(tokens, F);
      kernels::swiglu<T>(
          {.gate = in_place.inputs(), .up = device_up.inputs(), .out = in_place.view()}, nullptr);
      kernels::swiglu<T>(
          {.gate = device_gate.inputs(), .up = device_up.inputs(), .out = again.view()}, nullptr);
      finish();
      EXPECT_TRUE(same_bits(out, in_place) && same_bits(out, again));
    }
}

// silu goes to 0 far below, and to its argument far above; neither is NaN.
TYPED_TEST(SwigluGpu, largeGatesDoNotOverflow) {
  using T = TypeParam;
  Array<double, 2> gate(Shape<2>{1, 4}, 0.0);
  const Array<double, 2> up(Shape<2>{1, 4}, 2.0);
  gate(0, 0) = -1000, gate(0, 1) = 1000, gate(0, 2) = -100;
  const GappedRows<T> device_gate(gate), device_up(up);
  GappedRows<T> out(1, 4);
  kernels::swiglu<T>({.gate = device_gate.inputs(), .up = device_up.inputs(), .out = out.view()},
                     nullptr);
  finish();
  const Array<float, 2> host = out.host();
  EXPECT_EQ(host(0, 0), 0);
  EXPECT_EQ(host(0, 1), 2000);
  EXPECT_LE(std::abs(host(0, 2)), 1e-30);
  EXPECT_EQ(host(0, 3), 0);
}

TYPED_TEST(SwigluGpu, aGraphReplaysWithOtherContents) {
  using T = TypeParam;
  const auto gate = draw(5, 300, 70), up = draw(5, 300, 71);
  GappedRows<T> captured_gate(draw(5, 300, 72)), captured_up(draw(5, 300, 73)), captured(5, 300);
  const GappedRows<T> device_gate(gate), device_up(up);
  GappedRows<T> direct(5, 300);
  replay_behind_change(
      [&](cudaStream_t stream) {
        kernels::swiglu<T>(
            {.gate = captured_gate.inputs(), .up = captured_up.inputs(), .out = captured.view()},
            stream);
      },
      [&] { captured_gate.set(gate), captured_up.set(up); });
  kernels::swiglu<T>({.gate = device_gate.inputs(), .up = device_up.inputs(), .out = direct.view()},
                     nullptr);
  finish();
  EXPECT_TRUE(same_bits(captured, direct));
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(SwigluArguments, areRefusedByName) {
  using In = kernels::Swiglu<Bf16>;
  const auto complaint = [](auto change) {
    In in{.gate = unread<const Bf16, 2>({4, 8}),
          .up = unread<const Bf16, 2>({4, 8}),
          .out = unread<Bf16, 2>({4, 8})};
    change(in);
    return complaint_of([&] { kernels::swiglu<Bf16>(in, nullptr); });
  };
  EXPECT_EQ(complaint([](In& in) {
              in.up = unread<const Bf16, 2>({4, 9});
            }),
            "swiglu: up is expected to be [T, F] = [4, 8]; got [4, 9]");
  EXPECT_EQ(complaint([](In& in) {
              in.out = unread<Bf16, 2>({5, 8});
            }),
            "swiglu: out is expected to be [T, F] = [4, 8]; got [5, 8]");
  EXPECT_EQ(complaint([](In& in) {
              in.gate = unread<const Bf16, 2>({4, 8}, {16, 2});
            }),
            "swiglu: gate is expected to be contiguous in its last dimension; got a stride of 2");
}

}  // namespace
}  // namespace lockstep
