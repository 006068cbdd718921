// Batched products with weights, and activations in e4m3, against their reference.
#include "kernels/layers/batched_product.hpp"

#include <gmock/gmock.h>

#include <initializer_list>

#include "properties/support/plain_layers.hpp"
#include "reference/layers/batched_product.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::E4m3;

constexpr const char* kOperation = "batched_product";

struct Extents {
  std::int64_t G, M, N, K;
  bool shared = false;  ///< x, by all matrices
};

/// Numbers of T, and scales where T has them. A tenth of the rows is large.
template <class T>
struct Inputs {
  Inputs(const Extents& e, std::uint64_t seed, bool blocks = false)
      : extents(e),
        x(draw<3>({e.shared ? 1 : e.G, e.M, e.K}, seed, 1)),
        weight(draw<3>({e.G, e.N, e.K}, seed, 2)) {
    for (std::int64_t i = 0; i < x.size(); ++i)
      if (i / e.K % 10 == 3) x.data()[i] *= 64;
    if (!std::is_same_v<T, E4m3>) return;
    for (double& number : x) number = rounded(number, Format::e4m3);
    for (double& number : weight) number = rounded(number, Format::e4m3);
    const std::int64_t groups = (e.K + 127) / 128;
    const auto scales = [&](const Shape<3>& shape, std::uint64_t stream) {
      Array<double, 3> scale = draw<3>(blocks ? shape : Shape<3>{1, 1, 1}, seed, stream);
      for (double& s : scale) s = 0.5 + std::abs(s);
      return scale;
    };
    x_scale = scales({x.extent(0), e.M, groups}, 3);
    weight_scale = scales({e.G, (e.N + 127) / 128, groups}, 4);
  }

  Extents extents;
  Array<double, 3> x, weight;
  std::optional<Array<double, 3>> x_scale, weight_scale;
};

template <class S, class T>
Array<S, 3> answer(const Inputs<T>& in) {
  const auto x = cast<S>(in.x), weight = cast<S>(in.weight);
  Array<S, 3> x_scale, weight_scale;
  reference::BatchedProduct<S> all{.x = x.view(), .weight = weight.view()};
  if (in.x_scale) {
    x_scale = cast<S>(*in.x_scale);
    weight_scale = cast<S>(*in.weight_scale);
    all.x_scale = std::as_const(x_scale).view();
    all.weight_scale = std::as_const(weight_scale).view();
  }
  Array<S, 3> out(Shape<3>{in.extents.G, in.extents.M, in.extents.N});
  reference::batched_product<S>(all, out);
  return out;
}

template <class T>
struct Device {
  explicit Device(const Inputs<T>& in)
      : x(in.x), weight(in.weight), out(Shape<3>{in.extents.G, in.extents.M, in.extents.N}) {
    if (!in.x_scale) return;
    x_scale.emplace(*in.x_scale);
    weight_scale.emplace(*in.weight_scale);
  }
  void run(cudaStream_t stream = nullptr, bool settled = false) {
    kernels::BatchedProduct<T> in{.x = std::as_const(x).view(),
                                  .weight = std::as_const(weight).view(),
                                  .out = out.view(),
                                  .settled_weights = settled};
    if (x_scale) {
      in.x_scale = std::as_const(*x_scale).view();
      in.weight_scale = std::as_const(*weight_scale).view();
    }
    kernels::batched_product(in, stream);
  }
  DeviceTensor<T, 3> x, weight;
  std::optional<DeviceTensor<float, 3>> x_scale, weight_scale;
  DeviceTensor<Bf16, 3> out;
};

template <class T>
void expect_agreement(const Extents& e, std::uint64_t seed, bool blocks = false) {
  SCOPED_TRACE(::testing::PrintToString(Sizes{e.G, e.M, e.N, e.K}));
  const Inputs<T> in(e, seed, blocks);
  Device<T> device(in), settled(in);
  device.run();
  settled.run(nullptr, true);
  finish();
  const std::string what = std::is_same_v<T, Bf16> ? "out"
                           : blocks                ? "out of blocks"
                                                   : "out of e4m3";
  EXPECT_TRUE(within_yardstick(kOperation, what, device.out, stored<Bf16>(answer<float>(in)),
                               answer<double>(in)));
  EXPECT_TRUE(same_bits(device.out, settled.out));
}

class BatchedProductGpu : public GpuTest {};

// One tile and several, parts of tiles, K in one step and in many, divided and not.
TEST_F(BatchedProductGpu, agreesWithTheReference) {
  std::uint64_t seed = 0;
  for (const Extents& e : {Extents{1, 1, 8, 8},
                           {1, 32, 128, 64},
                           {1, 33, 136, 72},
                           {2, 5, 264, 512},
                           {1, 300, 192, 256},
                           {3, 0, 64, 64},
                           {4, 130, 512, 128},
                           {4, 7, 128, 512},
                           {1, 3, 320, 4096},
                           {1, 140, 72, 2048},
                           {1, 1100, 16, 1024},
                           {5, 40, 24, 192, true}})
    expect_agreement<Bf16>(e, ++seed);
}

TEST_F(BatchedProductGpu, numbersWithScalesAgreeToo) {
  std::uint64_t seed = 20;
  for (const bool blocks : {false, true})
    for (const Extents& e : {Extents{1, 1, 8, 16},
                             {4, 130, 512, 128},
                             {4, 7, 128, 512},
                             {1, 33, 136, 144},
                             {2, 20, 264, 1040},
                             {1, 3, 320, 4096},
                             {3, 40, 24, 192, true}})
      expect_agreement<E4m3>(e, ++seed, blocks);
}

/// Rows [m, m + count) and matrices [g, g + of) of the whole have the bits that they have alone.
template <class T>
void expect_the_same_alone(std::int64_t g, std::int64_t of, std::int64_t m, std::int64_t count) {
  const Inputs<T> in({6, 200, 264, 1024}, 7, true);
  Device<T> whole(in);
  whole.run();
  DeviceTensor<Bf16, 3> out(Shape<3>{of, count, 264});
  const auto part = [&](const auto& x, std::int64_t first, std::int64_t rows) {
    return make_view(&x.view()(g, first, 0), Shape<3>{of, rows, x.shape()[2]},
                     Shape<3>{x.shape()[1] * x.shape()[2], x.shape()[2], 1});
  };
  kernels::BatchedProduct<T> alone{.x = part(std::as_const(whole.x), m, count),
                                   .weight = part(std::as_const(whole.weight), 0, 264),
                                   .out = out.view()};
  if (whole.x_scale) {
    alone.x_scale = part(std::as_const(*whole.x_scale), m, count);
    alone.weight_scale = part(std::as_const(*whole.weight_scale), 0, 3);
  }
  kernels::batched_product(alone, nullptr);
  finish();
  const Array<float, 3> all = whole.out.host(), few = out.host();
  for (std::int64_t i = 0; i < of; ++i)
    for (std::int64_t j = 0; j < count; ++j)
      for (std::int64_t n = 0; n < 264; ++n)
        ASSERT_EQ(few(i, j, n), all(g + i, m + j, n)) << i << " " << j << " " << n;
}

// A comparison with and without a cache needs this, and so do ranks that have some of the heads:
// bits do not depend on the batch.
TEST_F(BatchedProductGpu, aRowHasTheSameBitsInEveryBatch) {
  expect_the_same_alone<Bf16>(0, 6, 0, 1);
  expect_the_same_alone<Bf16>(2, 1, 37, 32);
  expect_the_same_alone<Bf16>(3, 3, 20, 129);
  expect_the_same_alone<E4m3>(0, 6, 199, 1);
  expect_the_same_alone<E4m3>(2, 3, 37, 40);
}

/// Rows [m, m + count) of the whole, alone, have the bits that they have in it.
template <class T>
void expect_the_bits_of_few(const Extents& e, std::initializer_list<std::int64_t> counts) {
  SCOPED_TRACE(::testing::PrintToString(Sizes{e.G, e.M, e.N, e.K}));
  Device<T> whole(Inputs<T>(e, 12, true));
  whole.run();
  const Array<float, 3> all = whole.out.host();
  for (const std::int64_t count : counts)
    for (const std::int64_t m : {std::int64_t{0}, (e.M - count) / 2, e.M - count}) {
      DeviceTensor<Bf16, 3> out(Shape<3>{e.G, count, e.N});
      const auto rows = [&](const auto& x) {
        return make_view(&x.view()(0, m, 0), Shape<3>{e.G, count, x.shape()[2]},
                         Shape<3>{e.M * x.shape()[2], x.shape()[2], 1});
      };
      kernels::BatchedProduct<T> alone{.x = rows(std::as_const(whole.x)),
                                       .weight = std::as_const(whole.weight).view(),
                                       .out = out.view()};
      if (whole.x_scale) {
        alone.x_scale = rows(std::as_const(*whole.x_scale));
        alone.weight_scale = std::as_const(*whole.weight_scale).view();
      }
      kernels::batched_product(alone, nullptr);
      finish();
      EXPECT_TRUE(out.guards_intact() && whole.out.guards_intact());
      const Array<float, 3> few = out.host();
      for (std::int64_t g = 0; g < e.G; ++g)
        for (std::int64_t i = 0; i < count; ++i)
          for (std::int64_t n = 0; n < e.N; ++n)
            ASSERT_EQ(few(g, i, n), all(g, m + i, n)) << count << " from " << m << ": " << n;
    }
}

// Tiles of all sizes, some of which reach beyond N or back over tokens of another; many tokens with
// one, two and eight splits of K.
TEST_F(BatchedProductGpu, manyTokensHaveTheBitsOfFew) {
  expect_the_bits_of_few<Bf16>({1, 1100, 136, 2048}, {1, 70});
  expect_the_bits_of_few<Bf16>({1, 700, 4104, 200}, {1, 33, 130});
  expect_the_bits_of_few<Bf16>({1, 720, 4096, 1024}, {32, 300});
  expect_the_bits_of_few<Bf16>({1, 1024, 4096, 2048}, {32});
  expect_the_bits_of_few<Bf16>({1, 1344, 2112, 4096}, {1, 128, 300});
  expect_the_bits_of_few<Bf16>({1, 1792, 2112, 4096}, {32});
  expect_the_bits_of_few<Bf16>({1, 100, 24576, 64}, {1, 32});
  expect_the_bits_of_few<Bf16>({1, 100, 24576, 576}, {1, 40});
  expect_the_bits_of_few<Bf16>({1, 100, 12800, 1024}, {1, 40});
  expect_the_bits_of_few<Bf16>({5, 40, 520, 520}, {7, 33});
  expect_the_bits_of_few<Bf16>({125, 40, 128, 512}, {1, 20});
  expect_the_bits_of_few<E4m3>({1, 150, 16400, 272}, {1, 40, 128});
  expect_the_bits_of_few<E4m3>({1, 150, 8200, 1040}, {1, 40});
  expect_the_bits_of_few<E4m3>({3, 300, 136, 4096}, {1, 129});
}

// A NaN of one row stays there.
TEST_F(BatchedProductGpu, rowsDoNotMeet) {
  Inputs<Bf16> in({2, 70, 128, 256}, 3);
  Device<Bf16> expected(in);
  expected.run();
  in.x(1, 64, 255) = std::nan("");
  Device<Bf16> device(in);
  device.run();
  finish();
  const Array<float, 3> with = device.out.host(), without = expected.out.host();
  for (std::int64_t g = 0; g < 2; ++g)
    for (std::int64_t m = 0; m < 70; ++m)
      for (std::int64_t n = 0; n < 128; ++n)
        if (g == 1 && m == 64)
          ASSERT_TRUE(std::isnan(with(g, m, n)));
        else
          ASSERT_EQ(with(g, m, n), without(g, m, n));
}

TEST_F(BatchedProductGpu, aGraphReplaysWithOtherContents) {
  const Inputs<Bf16> first({3, 20, 128, 512}, 1), second({3, 20, 128, 512}, 2);
  Device<Bf16> captured(first), direct(second);
  replay_behind_change([&](cudaStream_t stream) { captured.run(stream, true); },
                       [&] {
                         captured.x.set(direct.x.elements());
                         captured.weight.set(direct.weight.elements());
                       });
  direct.run();
  finish();
  EXPECT_TRUE(same_bits(captured.out, direct.out));
}

// A chain of launches that start before the one in front has ended: each reads what it wrote.
TEST_F(BatchedProductGpu, launchesBehindEachOtherAreOrdered) {
  constexpr std::int64_t kM = 40, kN = 512;
  Inputs<Bf16> in({1, kM, kN, kN}, 5);
  for (double& x : in.weight) x /= 16;
  Device<Bf16> device(in);
  DeviceTensor<Bf16, 3> other(Shape<3>{1, kM, kN});
  const auto step = [&](const DeviceTensor<Bf16, 3>& from, DeviceTensor<Bf16, 3>& to) {
    kernels::batched_product<Bf16>({.x = from.view(),
                                    .weight = std::as_const(device.weight).view(),
                                    .out = to.view(),
                                    .settled_weights = true},
                                   nullptr);
  };
  const auto chain = [&](bool waits) {
    step(device.x, device.out);
    for (int i = 0; i < 6; ++i) {
      if (waits) finish();
      step(i % 2 ? other : device.out, i % 2 ? device.out : other);
    }
    finish();
    return device.out.elements();
  };
  const auto slow = chain(true);
  for (int i = 0; i < 20; ++i) {
    const auto quick = chain(false);
    ASSERT_EQ(std::memcmp(quick.data(), slow.data(), slow.size() * sizeof(Bf16)), 0);
  }
}

TEST_F(BatchedProductGpu, scalingIntoNumbersAgreesWithTheReference) {
  for (const bool by_groups : {false, true})
    for (const Shape<3>& shape : {Shape<3>{1, 1, 8}, {3, 5, 512}, {2, 40, 136}, {1, 2, 2048}}) {
      Array<double, 3> x = draw<3>(shape, 9, static_cast<std::uint64_t>(shape[2]));
      for (std::int64_t i = 0; i < x.size(); ++i)
        if (i / 128 % 3 == 1) x.data()[i] *= i % 2 ? 32 : 0;
      const auto truth = reference::scaled_numbers<double>(std::as_const(x).view(), by_groups);
      const DeviceTensor<Bf16, 3> from(x);
      DeviceTensor<E4m3, 3> numbers(shape);
      DeviceTensor<float, 3> scale(truth.scale.shape());
      kernels::scale_to_e4m3({.x = from.view(), .numbers = numbers.view(), .scale = scale.view()},
                             nullptr);
      finish();
      const Array<float, 3> got = numbers.host(), scales = scale.host();
      EXPECT_LT(difference(scales, truth.scale).relative(), 1e-6);
      EXPECT_TRUE(numbers.guards_intact() && scale.guards_intact());
      // A number whose quotient lies between two may go either way.
      const std::int64_t groups = scales.extent(2);
      for (std::int64_t i = 0; i < x.size(); ++i) {
        const std::int64_t row = i / shape[2], group = by_groups ? i % shape[2] / 128 : 0;
        const double s = scales.data()[by_groups ? row * groups + group : 0];
        const double quotient = x.data()[i] / s;
        ASSERT_LE(std::abs(double{got.data()[i]} - quotient),
                  (0.5 + 1e-5) * unit_in_last_place(quotient, Format::e4m3) + 1e-12)
            << i;
      }
    }
}

TEST(BatchedProductArguments, areRefusedByName) {
  using ::testing::HasSubstr;
  const auto complaint = [](auto change) {
    kernels::BatchedProduct<Bf16> in{.x = unread<const Bf16, 3>({2, 3, 64}),
                                     .weight = unread<const Bf16, 3>({2, 16, 64}),
                                     .out = unread<Bf16, 3>({2, 3, 16})};
    change(in);
    return complaint_of([&] { kernels::batched_product(in, nullptr); });
  };
  using In = kernels::BatchedProduct<Bf16>;
  EXPECT_THAT(complaint([](In& in) {
                in.x = unread<const Bf16, 3>({3, 3, 64});
              }),
              HasSubstr("x is expected to be [1 or G, M, K] = [2, 3, 64]; got [3, 3, 64]"));
  EXPECT_THAT(complaint([](In& in) {
                in.weight = unread<const Bf16, 3>({2, 12, 64});
              }),
              HasSubstr("weight is expected to be [G, N, K] with N a multiple of 8"));
  EXPECT_THAT(complaint([](In& in) {
                in.out = unread<Bf16, 3>({2, 3, 24});
              }),
              HasSubstr("out is expected to be [G, M, N] = [2, 3, 16]; got [2, 3, 24]"));
  EXPECT_THAT(complaint([](In& in) {
                in.x = unread<const Bf16, 3>({2, 3, 64}, {195, 65, 1});
              }),
              HasSubstr("x is expected to be contiguous in its last dimension, with strides of "
                        "whole 16 bytes"));
  EXPECT_THAT(complaint([](In& in) {
                in.x_scale = unread<const float, 3>({1, 1, 1});
              }),
              HasSubstr("x_scale is expected to be absent without numbers in e4m3"));
  EXPECT_THAT(complaint([](In& in) { in.splits = 3; }), HasSubstr("splits is expected to be"));
  EXPECT_EQ(complaint_of([] {
              kernels::batched_product<E4m3>({.x = unread<const E4m3, 3>({1, 3, 64}),
                                              .weight = unread<const E4m3, 3>({1, 16, 64}),
                                              .out = unread<Bf16, 3>({1, 3, 16})},
                                             nullptr);
            }),
            "batched_product: x_scale is expected to be given with numbers in e4m3; got none");
  EXPECT_THAT(complaint_of([] {
                kernels::scale_to_e4m3({.x = unread<const Bf16, 3>({1, 3, 12}),
                                        .numbers = unread<E4m3, 3>({1, 3, 12}),
                                        .scale = unread<float, 3>({1, 1, 1})},
                                       nullptr);
              }),
              HasSubstr("scale_to_e4m3: x is expected to be [G, M, K] with K a multiple of 8"));
}

}  // namespace
}  // namespace lockstep
