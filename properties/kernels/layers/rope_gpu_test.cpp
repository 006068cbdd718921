// The kernel of the rotary position embedding against its reference.
#include "kernels/layers/rope.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/layers/rope.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;
using reference::RopePairs;

/// Vectors of T tokens, and how they are turned.
struct Inputs {
  Inputs(std::int64_t T, std::int64_t heads, std::int64_t d, std::int64_t rotary,
         std::uint64_t seed)
      : heads(heads),
        d(d),
        x(on_grid<double>(Shape<2>{T, heads * d}, {.seed = seed, .limit = 2})),
        positions(Shape<1>{T}, 0),
        frequencies(Shape<1>{rotary / 2}) {
    reference::Rope<double> rope = reference::plain_rope<double>(rotary, 10000);
    if (seed % 2) {
      rope = reference::yarn_rope<double>(rotary, 10000, {.factor = 40, .mscale = 0.707});
      magnitude = static_cast<float>(rope.magnitude);
    }
    for (std::int64_t i = 0; i < rotary / 2; ++i)
      frequencies(i) = static_cast<float>(rope.frequencies(i));
    for (std::int64_t t = 0; t < T; ++t)
      positions(t) = static_cast<std::int32_t>(
          random_below(t % 3 ? 100 : 100000, seed, 2, static_cast<std::uint64_t>(t)));
  }

  std::int64_t heads, d;
  Array<double, 2> x;  // [T, heads d]
  Array<std::int32_t, 1> positions;
  Array<float, 1> frequencies;
  float magnitude = 1;
};

/// [T, heads, d] of rows
template <AnyView V>
TensorView<ElementOf<V>, 3> by_heads(const V& rows, std::int64_t heads, std::int64_t d) {
  return make_view(rows.data_handle(), Shape<3>{rows.extent(0), heads, d},
                   Shape<3>{rows.stride(0), d, 1});
}

template <class S>
Array<S, 2> reference_answer(const Inputs& in, RopePairs pairs) {
  const auto frequencies = cast<S>(in.frequencies);
  const reference::Rope<S> rope{as_vector(frequencies.view()), static_cast<S>(in.magnitude)};
  Array<S, 2> x = cast<S>(in.x);
  reference::apply_rope<S>(rope, in.positions, pairs, by_heads(x.view(), in.heads, in.d));
  return x;
}

/// Inputs and results on the device.
template <class T>
struct Device {
  explicit Device(const Inputs& in)
      : x(in.x),
        positions(in.positions),
        frequencies(in.frequencies),
        heads(in.heads),
        d(in.d),
        magnitude(in.magnitude) {}
  void run(RopePairs pairs, cudaStream_t stream = nullptr) {
    kernels::rope<T>({.x = by_heads(x.view(), heads, d),
                      .positions = std::as_const(positions).view(),
                      .frequencies = std::as_const(frequencies).view(),
                      .magnitude = magnitude,
                      .interleaved = pairs == RopePairs::interleaved},
                     stream);
  }

  GappedRows<T> x;
  DeviceTensor<std::int32_t, 1> positions;
  DeviceTensor<float, 1> frequencies;
  std::int64_t heads, d;
  float magnitude;
};

template <class T>
class RopeGpu : public GpuTest {};
using Types = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Fp16, float,
#endif
    Bf16>;
TYPED_TEST_SUITE(RopeGpu, Types);

// Both orders of pairs, plain and stretched, whole heads and parts of them.
TYPED_TEST(RopeGpu, agreesWithTheReference) {
  using T = TypeParam;
  struct Extents {
    std::int64_t T, heads, d, rotary;
  };
  std::uint64_t seed = 1;
  for (const auto& [tokens, heads, d, rotary] : {Extents{0, 2, 64, 64},
                                                 {1, 1, 2, 2},
                                                 {65, 3, 64, 64},
                                                 {63, 2, 128, 64},
                                                 {64, 1, 65, 64},
                                                 {7, 5, 10, 6},
                                                 {5, 2, 8, 0}})
    for (const RopePairs pairs : {RopePairs::interleaved, RopePairs::half_split}) {
      const Inputs in(tokens, heads, d, rotary, ++seed);
      Device<T> device(in), again(in);
      device.run(pairs);
      again.run(pairs);
      finish();
      EXPECT_TRUE(within_yardstick("rope", seed % 2 ? "x, stretched" : "x", device.x,
                                   stored<T>(reference_answer<float>(in, pairs)),
                                   reference_answer<double>(in, pairs)));
      EXPECT_TRUE(same_bits(device.x, again.x));
      // Values that are not rotated keep their bits.
      const Array<float, 2> host = device.x.host();
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t i = 0; i < heads * d; ++i)
          if (i % d >= rotary) {
            EXPECT_EQ(host(t, i), static_cast<float>(in.x(t, i)));
          }
    }
}

TYPED_TEST(RopeGpu, aGraphReplaysWithOtherContents) {
  using T = TypeParam;
  const Inputs first(9, 2, 64, 64, 30), second(9, 2, 64, 64, 32);
  Device<T> captured(first), direct(second);
  replay_behind_change([&](cudaStream_t stream) { captured.run(RopePairs::half_split, stream); },
                       [&] {
                         captured.x.set(second.x);
                         captured.positions.set(direct.positions.elements());
                       });
  direct.run(RopePairs::half_split);
  finish();
  EXPECT_TRUE(same_bits(captured.x, direct.x));
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(RopeArguments, areRefusedByName) {
  using In = kernels::Rope<Bf16>;
  const auto complaint = [](auto change) {
    In in{.x = unread<Bf16, 3>({4, 2, 8}),
          .positions = unread<const std::int32_t, 1>({4}),
          .frequencies = unread<const float, 1>({4})};
    change(in);
    return complaint_of([&] { kernels::rope<Bf16>(in, nullptr); });
  };
  EXPECT_EQ(complaint([](In& in) { in.positions = unread<const std::int32_t, 1>({5}); }),
            "rope: positions is expected to be [T] = [4]; got [5]");
  EXPECT_EQ(complaint([](In& in) { in.frequencies = unread<const float, 1>({5}); }),
            "rope: frequencies is expected to be [R / 2] with R of at most d = 8; got R / 2 = 5");
  EXPECT_EQ(complaint([](In& in) {
              in.x = unread<Bf16, 3>({4, 2, 8}, {32, 16, 2});
            }),
            "rope: x is expected to be contiguous in its last dimension; got a stride of 2");
}

}  // namespace
}  // namespace lockstep
