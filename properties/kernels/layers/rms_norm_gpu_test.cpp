// The kernels of the norms against their references.
#include "kernels/layers/rms_norm.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/layers/rms_norm.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

constexpr double kEps = 1e-5;

/// A norm's inputs, on the grid: exact in every type.
struct Inputs {
  Inputs(std::int64_t T, std::int64_t D, std::uint64_t seed)
      : x(draw<2>({T, D}, seed, 1)),
        residual(draw<2>({T, D}, seed, 2)),
        gate(draw<2>({T, D}, seed, 3)),
        weight(draw<1>({D}, seed, 4)) {}

  template <std::size_t Rank>
  static Array<double, Rank> draw(const Shape<Rank>& shape, std::uint64_t seed,
                                  std::uint64_t stream) {
    return on_grid<double>(shape, {.seed = seed, .stream = stream, .limit = 2});
  }

  Array<double, 2> x, residual, gate;
  Array<double, 1> weight;
};

struct GateQuestion {
  reference::GateOrder order;
  std::int64_t groups;
  reference::Gate act;
};

template <class S>
struct Answer {
  Array<S, 2> plain, fused, residual, gated;
};

template <class S>
Answer<S> reference_answer(const Inputs& in, const GateQuestion& question, Format sum) {
  const auto x = cast<S>(in.x), gate = cast<S>(in.gate);
  const auto weight = cast<S>(in.weight);
  Answer<S> answer{Array<S, 2>(x.shape()), Array<S, 2>(x.shape()), cast<S>(in.residual),
                   Array<S, 2>(x.shape())};
  const S eps = static_cast<S>(kEps);
  reference::rms_norm<S>(x, weight, eps, answer.plain);
  reference::rms_norm_with_residual<S>(x, answer.residual.view(), weight, eps, answer.fused, sum);
  reference::gated_rms_norm<S>(x, gate, weight, eps, question.order, question.groups, answer.gated,
                               question.act);
  return answer;
}

/// Inputs and results on the device.
template <class T>
struct Device {
  explicit Device(const Inputs& in)
      : x(in.x),
        gate(in.gate),
        residual(in.residual),
        weight(in.weight),
        out(in.x.extent(0), in.x.extent(1)) {}

  void plain(cudaStream_t stream = nullptr) {
    kernels::rms_norm<T>({.x = x.inputs(), .weight = weight.view(), .eps = kEps, .out = out.view()},
                         stream);
  }
  void fused(cudaStream_t stream = nullptr) {
    kernels::rms_norm<T>({.x = x.inputs(),
                          .weight = weight.view(),
                          .eps = kEps,
                          .out = out.view(),
                          .residual = residual.view()},
                         stream);
  }
  void gated(const GateQuestion& question) {
    kernels::gated_rms_norm<T>(
        {.x = x.inputs(),
         .gate = gate.inputs(),
         .weight = weight.view(),
         .eps = kEps,
         .out = out.view(),
         .gate_before_norm = question.order == reference::GateOrder::before_norm,
         .groups = question.groups,
         .sigmoid = question.act == reference::Gate::sigmoid},
        nullptr);
  }

  GappedRows<T> x, gate, residual;
  DeviceTensor<float, 1> weight;
  GappedRows<T> out;
};

template <class T>
class RmsNormGpu : public GpuTest {};
using Types = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Fp16, float,
#endif
    Bf16>;
TYPED_TEST_SUITE(RmsNormGpu, Types);

// Each norm is its formula, whatever the width; the residual keeps the rounded sum.
TYPED_TEST(RmsNormGpu, agreesWithTheReference) {
  using T = TypeParam;
  std::uint64_t seed = 1;
  for (const std::int64_t tokens : {0, 1, 65})
    for (const std::int64_t D : {1, 63, 64, 65, 127, 384, 2048}) {
      const Inputs in(tokens, D, ++seed);
      const GateQuestion question{
          .order = seed % 2 ? reference::GateOrder::before_norm : reference::GateOrder::after_norm,
          .groups = D % 8 == 0 ? 8 : 1,
          .act = seed % 3 ? reference::Gate::silu : reference::Gate::sigmoid};
      const Format format = kernels::format_of<T>();
      // The sum is rounded once: a truth of it is of the rounded sum too.
      const auto truth = reference_answer<double>(in, question, format);
      const auto yardstick = reference_answer<float>(in, question, format);
      Device<T> device(in);
      device.plain();
      finish();
      EXPECT_TRUE(within_yardstick("rms_norm", "norm", device.out, stored<T>(yardstick.plain),
                                   truth.plain));
      device.gated(question);
      finish();
      EXPECT_TRUE(within_yardstick("rms_norm", "gated norm", device.out, stored<T>(yardstick.gated),
                                   truth.gated));
      device.fused();
      finish();
      EXPECT_TRUE(within_yardstick("rms_norm", "norm behind an addition", device.out,
                                   stored<T>(yardstick.fused), truth.fused));
      EXPECT_TRUE(device.residual.gaps_intact());
      EXPECT_TRUE(same_bits(device.residual.host(), cast<float>(truth.residual)));
    }
}

// A norm may write where it reads.
TYPED_TEST(RmsNormGpu, worksInPlace) {
  using T = TypeParam;
  const Inputs in(7, 300, 50);
  const GateQuestion question{reference::GateOrder::after_norm, 3, reference::Gate::silu};
  Device<T> apart(in), plain(in), gated(in);
  apart.plain();
  kernels::rms_norm<T>(
      {.x = plain.x.inputs(), .weight = plain.weight.view(), .eps = kEps, .out = plain.x.view()},
      nullptr);
  finish();
  EXPECT_TRUE(same_bits(apart.out, plain.x));
  apart.gated(question);
  kernels::gated_rms_norm<T>({.x = gated.x.inputs(),
                              .gate = gated.gate.inputs(),
                              .weight = gated.weight.view(),
                              .eps = kEps,
                              .out = gated.gate.view(),
                              .groups = 3},
                             nullptr);
  finish();
  EXPECT_TRUE(same_bits(apart.out, gated.gate));
}

// A row's norm depends on that row alone, and on no run before it.
TYPED_TEST(RmsNormGpu, rowsDoNotSeeEachOther) {
  using T = TypeParam;
  const Inputs in(65, 257, 51);
  Device<T> once(in), again(in);
  once.fused();
  again.fused();
  finish();
  EXPECT_TRUE(same_bits(once.out, again.out));
  EXPECT_TRUE(same_bits(once.residual, again.residual));
  Inputs last(1, 257, 51);
  last.weight = in.weight;
  for (std::int64_t d = 0; d < 257; ++d) {
    last.x(0, d) = in.x(64, d);
    last.residual(0, d) = in.residual(64, d);
  }
  Device<T> alone(last);
  alone.fused();
  finish();
  EXPECT_TRUE(same_bits(contiguous(cut(once.out.host().view(), 64, 65)), alone.out.host()));
}

// A captured graph runs on what the buffers hold when it is replayed.
TYPED_TEST(RmsNormGpu, aGraphReplaysWithOtherContents) {
  using T = TypeParam;
  const Inputs first(5, 130, 52), second(5, 130, 53);
  Device<T> captured(first), direct(second);
  replay_behind_change([&](cudaStream_t stream) { captured.fused(stream); },
                       [&] {
                         captured.x.set(second.x);
                         captured.residual.set(second.residual);
                         captured.weight.set(direct.weight.elements());
                       });
  direct.fused();
  finish();
  EXPECT_TRUE(same_bits(captured.out, direct.out));
  EXPECT_TRUE(same_bits(captured.residual, direct.residual));
}

/// A norm that would be taken.
kernels::RmsNorm<Bf16> good_norm() {
  return {.x = unread<const Bf16, 2>({4, 8}),
          .weight = unread<const float, 1>({8}),
          .eps = kEps,
          .out = unread<Bf16, 2>({4, 8}),
          .residual = unread<Bf16, 2>({4, 8})};
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(RmsNormArguments, areRefusedByName) {
  using In = kernels::RmsNorm<Bf16>;
  const auto complaint = [](auto change) {
    In in = good_norm();
    change(in);
    return complaint_of([&] { kernels::rms_norm<Bf16>(in, nullptr); });
  };
  EXPECT_EQ(complaint([](In& in) {
              in.out = unread<Bf16, 2>({4, 7});
            }),
            "rms_norm: out is expected to be [T, D] = [4, 8]; got [4, 7]");
  EXPECT_EQ(complaint([](In& in) {
              in.residual = unread<Bf16, 2>({3, 8});
            }),
            "rms_norm: residual is expected to be [T, D] = [4, 8]; got [3, 8]");
  EXPECT_EQ(complaint([](In& in) { in.weight = unread<const float, 1>({9}); }),
            "rms_norm: weight is expected to be [D] = [8]; got [9]");
  EXPECT_EQ(complaint([](In& in) {
              in.x = unread<const Bf16, 2>({4, 8}, {1, 4});
            }),
            "rms_norm: x is expected to be contiguous in its last dimension; got a stride of 4");
  EXPECT_THAT(complaint([](In& in) {
                in.x = unread<const Bf16, 2>({4, 0});
              }),
              ::testing::HasSubstr("x is expected to be [T, D] with D of at least 1; got [4, 0]"));
}

TEST(RmsNormArguments, ofTheGatedNormAreRefusedByName) {
  using In = kernels::GatedRmsNorm<Bf16>;
  const auto complaint = [](auto change) {
    In in{.x = unread<const Bf16, 2>({4, 8}),
          .gate = unread<const Bf16, 2>({4, 8}),
          .weight = unread<const float, 1>({8}),
          .eps = kEps,
          .out = unread<Bf16, 2>({4, 8})};
    change(in);
    return complaint_of([&] { kernels::gated_rms_norm<Bf16>(in, nullptr); });
  };
  EXPECT_EQ(complaint([](In& in) {
              in.gate = unread<const Bf16, 2>({4, 9});
            }),
            "gated_rms_norm: gate is expected to be [T, D] = [4, 8]; got [4, 9]");
  EXPECT_EQ(complaint([](In& in) { in.groups = 3; }),
            "gated_rms_norm: groups is expected to be from 1 to 65535 and a divisor of D = 8; "
            "got 3");
  EXPECT_THAT(complaint([](In& in) { in.groups = 0; }), ::testing::HasSubstr("got 0"));
}

}  // namespace
}  // namespace lockstep
