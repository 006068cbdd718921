// The kernel of the router against its reference.
#include "kernels/layers/moe_router.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/layers/moe_router.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using reference::RouterScore;

struct Question {
  std::int64_t T, E, k;
  RouterScore score = RouterScore::softmax;
  bool bias = false;
  std::int64_t groups = 1, groups_kept = 1;
  bool normalise = true;
  float scale = 1;
};

/// On the grid: with many experts some have the same logit.
struct Inputs {
  Inputs(const Question& q, std::uint64_t seed)
      : logits(on_grid<double>(Shape<2>{q.T, q.E}, {.seed = seed, .stream = 1, .limit = 2})),
        bias(on_grid<double>(Shape<1>{q.E}, {.seed = seed, .stream = 2})) {}
  Array<double, 2> logits;
  Array<double, 1> bias;
};

template <class S>
reference::Routing<S> reference_answer(const Inputs& in, const Question& q) {
  const auto bias = cast<S>(in.bias);
  reference::RouterOptions<S> options{.experts_per_token = q.k,
                                      .score = q.score,
                                      .groups = q.groups,
                                      .groups_kept = q.groups_kept,
                                      .normalise = q.normalise,
                                      .scale = static_cast<S>(q.scale)};
  if (q.bias) options.bias = bias.view();
  return reference::route<S>(cast<S>(in.logits), options);
}

/// Inputs of type T and results on the device.
template <class T>
struct Device {
  Device(const Inputs& in, const Question& q)
      : question(q),
        logits(in.logits),
        bias(in.bias),
        experts(Shape<2>{q.T, q.k}),
        weights(Shape<2>{q.T, q.k}) {}
  void run(cudaStream_t stream = nullptr) {
    kernels::MoeRouter in{.logits = logits.inputs(),
                          .experts = experts.view(),
                          .weights = weights.view(),
                          .sigmoid = question.score == RouterScore::sigmoid,
                          .groups = question.groups,
                          .groups_kept = question.groups_kept,
                          .normalise = question.normalise,
                          .scale = question.scale};
    if (question.bias) in.bias = bias.view();
    kernels::moe_router(in, stream);
  }

  Question question;
  GappedRows<T> logits;
  DeviceTensor<float, 1> bias;
  DeviceTensor<std::int32_t, 2> experts;
  DeviceTensor<float, 2> weights;
};

const std::vector<Question> kQuestions{
    {.T = 0, .E = 4, .k = 2},
    {.T = 1, .E = 1, .k = 1},
    {.T = 65, .E = 64, .k = 8},
    {.T = 9, .E = 512, .k = 10},  // Qwen3-Next
    {.T = 7,
     .E = 256,
     .k = 8,
     .score = RouterScore::sigmoid,
     .bias = true,
     .groups = 8,
     .groups_kept = 4,
     .scale = 2.5f},  // DeepSeek-V3
    {.T = 63, .E = 33, .k = 5, .score = RouterScore::sigmoid, .normalise = false, .scale = 0.5f},
    {.T = 5, .E = 1024, .k = 32, .bias = true},
    {.T = 6, .E = 12, .k = 3, .groups = 12, .groups_kept = 3},
    {.T = 4, .E = 65, .k = 1, .bias = true, .groups = 5, .groups_kept = 1, .normalise = false}};

template <class T>
class MoeRouterGpu : public GpuTest {};
using Types = ::testing::Types<float, Bf16>;
TYPED_TEST_SUITE(MoeRouterGpu, Types);

// The same experts in the same order, equal scores by number; their weights within the yardstick.
TYPED_TEST(MoeRouterGpu, agreesWithTheReference) {
  std::uint64_t seed = 1;
  for (const Question& q : kQuestions) {
    const Inputs in(q, ++seed);
    const auto truth = reference_answer<double>(in, q);
    const auto yardstick = reference_answer<float>(in, q);
    Device<TypeParam> device(in, q), again(in, q);
    device.run();
    again.run();
    finish();
    EXPECT_TRUE(same_bits(device.experts, DeviceTensor<std::int32_t, 2>(truth.experts)))
        << q.E << " experts";
    EXPECT_TRUE(device.experts.guards_intact());
    EXPECT_TRUE(within_yardstick("moe_router", "weights", device.weights, yardstick.weights,
                                 truth.weights));
    EXPECT_TRUE(same_bits(device.experts, again.experts));
    EXPECT_TRUE(same_bits(device.weights, again.weights));
  }
}

TYPED_TEST(MoeRouterGpu, aGraphReplaysWithOtherContents) {
  const Question q{.T = 9, .E = 64, .k = 8, .bias = true};
  const Inputs first(q, 50), second(q, 51);
  Device<TypeParam> captured(first, q), direct(second, q);
  replay_behind_change([&](cudaStream_t stream) { captured.run(stream); },
                       [&] {
                         captured.logits.set(second.logits);
                         captured.bias.set(direct.bias.elements());
                       });
  direct.run();
  finish();
  EXPECT_TRUE(same_bits(captured.experts, direct.experts));
  EXPECT_TRUE(same_bits(captured.weights, direct.weights));
}

// Logits that are no numbers route somewhere, each expert once, and nothing is written beside.
TYPED_TEST(MoeRouterGpu, logitsThatAreNoNumbersNameExperts) {
  const Question q{.T = 3, .E = 40, .k = 4, .groups = 4, .groups_kept = 2};
  Inputs in(q, 60);
  for (std::int64_t e = 0; e < q.E; e += 3) in.logits(1, e) = std::nan("");
  for (std::int64_t e = 0; e < q.E; ++e) in.logits(2, e) = std::nan("");
  Device<TypeParam> device(in, q);
  device.run();
  finish();
  const std::vector<std::int32_t> experts = device.experts.elements();
  for (std::size_t t = 0; t < 3; ++t)
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(0 <= experts[t * 4 + i] && experts[t * 4 + i] < q.E);
      for (std::size_t j = 0; j < i; ++j) EXPECT_NE(experts[t * 4 + i], experts[t * 4 + j]);
    }
  EXPECT_TRUE(device.experts.guards_intact() && device.weights.guards_intact());
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(MoeRouterArguments, areRefusedByName) {
  using In = kernels::MoeRouter;
  const auto complaint = [](auto change) {
    In in{.logits = unread<const float, 2>({4, 8}),
          .experts = unread<std::int32_t, 2>({4, 2}),
          .weights = unread<float, 2>({4, 2})};
    change(in);
    return complaint_of([&] { kernels::moe_router(in, nullptr); });
  };
  EXPECT_EQ(complaint([](In& in) { in.bias = unread<const float, 1>({7}); }),
            "moe_router: bias is expected to be [E] = [8]; got [7]");
  EXPECT_EQ(complaint([](In& in) {
              in.weights = unread<float, 2>({4, 3});
            }),
            "moe_router: weights is expected to be [T, k] = [4, 2]; got [4, 3]");
  EXPECT_EQ(complaint([](In& in) {
              in.experts = unread<std::int32_t, 2>({5, 2});
            }),
            "moe_router: experts is expected to be [T, k] = [4, 2]; got [5, 2]");
  EXPECT_EQ(complaint([](In& in) { in.groups = 3; }),
            "moe_router: groups is expected to be from 1 to 64 and a divisor of E = 8; got 3");
  EXPECT_EQ(complaint([](In& in) { in.groups_kept = 2; }),
            "moe_router: groups_kept is expected to be from 1 to groups; got 2");
  EXPECT_THAT(complaint([](In& in) { in.groups = 8; }),
              ::testing::HasSubstr("of the experts of the kept groups; got k = 2"));
  EXPECT_EQ(complaint([](In& in) {
              in.logits = unread<const float, 2>({4, 1025});
            }),
            "moe_router: logits is expected to be [T, E] with E from 1 to 1024; got E = 1025");
}

}  // namespace
}  // namespace lockstep
