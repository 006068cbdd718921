// The kernel of sampling against its reference: the same tokens.
#include "kernels/layers/sampling.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/layers/sampling.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::DeviceTensor;

/// Logits of N rows, and how each row is sampled.
struct Inputs {
  Inputs(std::int64_t N, std::int64_t V, std::uint64_t seed)
      : logits(Shape<2>{N, V}),
        temperature(Shape<1>{N}),
        top_p(Shape<1>{N}),
        top_k(Shape<1>{N}, 0),
        positions(Shape<1>{N}, 0),
        seeds(Shape<1>{N}, 0) {
    constexpr float kTemperatures[] = {1, 0.7f, 0, 5, 1, 0.01f};
    constexpr float kTopP[] = {1, 0.9f, 0.5f, 0, 0.999f, 2, 0.1f};
    constexpr std::int32_t kTopK[] = {0, 50, 1, -1, 7};
    for (std::int64_t n = 0; n < N; ++n) {
      // Every third row is on the grid, where many logits are equal.
      for (std::int64_t v = 0; v < V; ++v) {
        const auto i = static_cast<std::uint64_t>(n * V + v);
        const double wide = static_cast<double>(random_below(1 << 24, seed, 1, i)) / (1 << 20) - 8;
        logits(n, v) =
            static_cast<float>(n % 3 ? wide : Grid{.seed = seed, .stream = 2, .limit = 2}(i));
      }
      temperature(n) = kTemperatures[n % 6];
      top_p(n) = kTopP[n % 7];
      top_k(n) = n % 5 == 3 ? static_cast<std::int32_t>(V) : kTopK[n % 5];
      positions(n) = static_cast<std::int32_t>(n * 17);
      seeds(n) = static_cast<std::int64_t>(random_bits(seed, 3, static_cast<std::uint64_t>(n)));
    }
  }

  std::vector<std::int32_t> expected() const {
    std::vector<std::int32_t> tokens;
    tokens.reserve(static_cast<std::size_t>(logits.extent(0)));
    for (std::int64_t n = 0; n < logits.extent(0); ++n)
      tokens.push_back(reference::sampled_token(at(logits.view(), n),
                                                {.temperature = temperature(n),
                                                 .top_k = top_k(n),
                                                 .top_p = top_p(n),
                                                 .seed = static_cast<std::uint64_t>(seeds(n)),
                                                 .position = positions(n)}));
    return tokens;
  }
  std::vector<std::int32_t> expected_greedy() const {
    std::vector<std::int32_t> tokens;
    tokens.reserve(static_cast<std::size_t>(logits.extent(0)));
    for (std::int64_t n = 0; n < logits.extent(0); ++n)
      tokens.push_back(reference::greedy_token(at(logits.view(), n)));
    return tokens;
  }

  Array<float, 2> logits;
  Array<float, 1> temperature, top_p;
  Array<std::int32_t, 1> top_k, positions;
  Array<std::int64_t, 1> seeds;
};

template <class T>
DeviceTensor<T, 1> on_device(const Array<T, 1>& array) {
  DeviceTensor<T, 1> tensor(array.shape());
  tensor.set(std::vector<T>(array.begin(), array.end()));  // 64 bits do not go through double
  return tensor;
}

struct Device {
  explicit Device(const Inputs& in)
      : logits(in.logits),
        temperature(on_device(in.temperature)),
        top_p(on_device(in.top_p)),
        top_k(on_device(in.top_k)),
        positions(on_device(in.positions)),
        seeds(on_device(in.seeds)),
        tokens(Shape<1>{in.logits.extent(0)}) {}
  void greedy(cudaStream_t stream = nullptr) {
    kernels::greedy_tokens({.logits = logits.inputs(), .tokens = tokens.view()}, stream);
  }
  void sample(cudaStream_t stream = nullptr) {
    kernels::sampled_tokens({.logits = logits.inputs(),
                             .temperature = std::as_const(temperature).view(),
                             .top_k = std::as_const(top_k).view(),
                             .top_p = std::as_const(top_p).view(),
                             .seeds = std::as_const(seeds).view(),
                             .positions = std::as_const(positions).view(),
                             .tokens = tokens.view()},
                            stream);
  }
  /// The tokens are those; noted as an exact result.
  ::testing::AssertionResult chose(const char* what, const std::vector<std::int32_t>& expected) {
    const bool same = tokens.elements() == expected && tokens.guards_intact();
    AccuracyLog::get().add_bits("sampling", what, same);
    if (same) return ::testing::AssertionSuccess();
    auto failure = ::testing::AssertionFailure() << "tokens differ in rows";
    const auto got = tokens.elements();
    for (std::size_t n = 0; n < got.size(); ++n)
      if (got[n] != expected[n])
        failure << " " << n << " (" << got[n] << " for " << expected[n] << ")";
    return failure;
  }

  GappedRows<float> logits;
  DeviceTensor<float, 1> temperature, top_p;
  DeviceTensor<std::int32_t, 1> top_k, positions;
  DeviceTensor<std::int64_t, 1> seeds;
  DeviceTensor<std::int32_t, 1> tokens;
};

class SamplingGpu : public GpuTest {};

// Every token is the reference's: greedy, by top-k, by top-p and by both, at every temperature.
TEST_F(SamplingGpu, drawsTheReferencesTokens) {
  std::uint64_t seed = 1;
  for (const auto& [N, V] :
       {std::pair{0, 5}, {1, 1}, {65, 63}, {64, 64}, {63, 65}, {35, 1000}, {6, 5000}}) {
    const Inputs in(N, V, ++seed);
    Device device(in);
    device.greedy();
    finish();
    EXPECT_TRUE(device.chose("greedy tokens", in.expected_greedy())) << V << " tokens";
    device.sample();
    finish();
    EXPECT_TRUE(device.chose("sampled tokens", in.expected())) << V << " tokens";
    device.sample();
    finish();
    EXPECT_TRUE(device.chose("sampled tokens", in.expected())) << "again";
  }
}

// Logits that are no numbers or infinite are chosen as the reference chooses them.
TEST_F(SamplingGpu, specialLogitsAreNoError) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Inputs in(24, 70, 50);
  for (std::int64_t n = 0; n < 24; ++n)
    for (std::int64_t v = 0; v < 70; ++v) {
      if (n % 8 == 1 && v % 2) in.logits(n, v) = kNan;
      if (n % 8 == 2) in.logits(n, v) = v % 3 ? -kInfinity : kNan;
      if (n % 8 == 3 && v > 40) in.logits(n, v) = kInfinity;
      if (n % 8 == 4) in.logits(n, v) = v % 2 ? 0.0f : -0.0f;
      if (n % 8 == 5) in.logits(n, v) = kNan;
      if (n % 8 == 6 && v != 33) in.logits(n, v) = -kInfinity;
    }
  Device device(in);
  device.greedy();
  finish();
  EXPECT_TRUE(device.chose("greedy tokens, special logits", in.expected_greedy()));
  device.sample();
  finish();
  EXPECT_TRUE(device.chose("sampled tokens, special logits", in.expected()));
}

// Without top-k and top-p, all tokens can be drawn.
TEST_F(SamplingGpu, limitsMayBeAbsent) {
  Inputs in(40, 200, 60);
  Device device(in);
  kernels::sampled_tokens({.logits = device.logits.inputs(),
                           .temperature = std::as_const(device.temperature).view(),
                           .seeds = std::as_const(device.seeds).view(),
                           .positions = std::as_const(device.positions).view(),
                           .tokens = device.tokens.view()},
                          nullptr);
  finish();
  for (std::int64_t n = 0; n < 40; ++n) in.top_k(n) = 0, in.top_p(n) = 1;
  EXPECT_TRUE(device.chose("sampled tokens, no limits", in.expected()));
}

TEST_F(SamplingGpu, aGraphReplaysWithOtherContents) {
  const Inputs first(9, 300, 70), second(9, 300, 71);
  Device captured(first), direct(second);
  replay_behind_change([&](cudaStream_t stream) { captured.sample(stream); },
                       [&] {
                         captured.logits.set(second.logits);
                         captured.seeds.set(direct.seeds.elements());
                       });
  EXPECT_TRUE(captured.chose("sampled tokens", second.expected()));
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(SamplingArguments, areRefusedByName) {
  using In = kernels::SampledTokens;
  const auto complaint = [](auto change) {
    In in{.logits = unread<const float, 2>({4, 9}),
          .temperature = unread<const float, 1>({4}),
          .top_k = unread<const std::int32_t, 1>({4}),
          .top_p = unread<const float, 1>({4}),
          .seeds = unread<const std::int64_t, 1>({4}),
          .positions = unread<const std::int32_t, 1>({4}),
          .tokens = unread<std::int32_t, 1>({4})};
    change(in);
    return complaint_of([&] { kernels::sampled_tokens(in, nullptr); });
  };
  const std::string name = "sampled_tokens: ";
  EXPECT_EQ(complaint([](In& in) { in.tokens = unread<std::int32_t, 1>({5}); }),
            name + "tokens is expected to be [N] = [4]; got [5]");
  EXPECT_EQ(complaint([](In& in) { in.temperature = unread<const float, 1>({5}); }),
            name + "temperature is expected to be [N] = [4]; got [5]");
  EXPECT_EQ(complaint([](In& in) { in.top_k = unread<const std::int32_t, 1>({5}); }),
            name + "top_k is expected to be [N] = [4]; got [5]");
  EXPECT_EQ(complaint([](In& in) { in.top_p = unread<const float, 1>({5}); }),
            name + "top_p is expected to be [N] = [4]; got [5]");
  EXPECT_EQ(complaint([](In& in) { in.seeds = unread<const std::int64_t, 1>({5}); }),
            name + "seeds is expected to be [N] = [4]; got [5]");
  EXPECT_EQ(complaint([](In& in) { in.positions = unread<const std::int32_t, 1>({5}); }),
            name + "positions is expected to be [N] = [4]; got [5]");
  EXPECT_EQ(complaint([](In& in) {
              in.logits = unread<const float, 2>({4, 1 << 22});
            }),
            name + "logits is expected to be [N, V] with V from 1 to 2^22 - 1; got [4, 4194304]");
  EXPECT_EQ(complaint_of([] {
              kernels::greedy_tokens({.logits = unread<const float, 2>({4, 9}, {9, 2}),
                                      .tokens = unread<std::int32_t, 1>({4})},
                                     nullptr);
            }),
            "greedy_tokens: logits is expected to be contiguous in its last dimension; got a "
            "stride of 2");
}

}  // namespace
}  // namespace lockstep
