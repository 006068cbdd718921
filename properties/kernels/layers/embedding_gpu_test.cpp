// The kernels of the embedding and of the logits against their references.
#include "kernels/layers/embedding.hpp"

#include <gmock/gmock.h>

#include "properties/support/plain_layers.hpp"
#include "reference/layers/embedding.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

Array<double, 2> draw(std::int64_t rows, std::int64_t D, std::uint64_t seed) {
  return on_grid<double>(Shape<2>{rows, D}, {.seed = seed});
}

/// Tokens of a vocabulary, every fifth one padding.
Array<std::int32_t, 1> draw_tokens(std::int64_t T, std::int64_t V, std::uint64_t seed) {
  Array<std::int32_t, 1> tokens(Shape<1>{T}, -1);
  for (std::int64_t t = 0; t < T; ++t)
    if (t % 5 != 3)
      tokens(t) = static_cast<std::int32_t>(
          random_below(static_cast<std::uint64_t>(V), seed, 9, static_cast<std::uint64_t>(t)));
  return tokens;
}

template <class T>
class EmbeddingGpu : public GpuTest {};
using Types = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Fp16, float,
#endif
    Bf16>;
TYPED_TEST_SUITE(EmbeddingGpu, Types);

// A lookup moves bits; padding gives 0.
TYPED_TEST(EmbeddingGpu, isTheReferences) {
  using T = TypeParam;
  std::uint64_t seed = 1;
  for (const std::int64_t tokens : {0, 1, 63, 65})
    for (const std::int64_t D : {1, 64, 257}) {
      const auto table = draw(100, D, ++seed);
      const auto ids = draw_tokens(tokens, 100, seed);
      Array<double, 2> expected(Shape<2>{tokens, D});
      reference::embedding<double>(ids, table, expected);
      const GappedRows<T> device_table(table);
      const DeviceTensor<std::int32_t, 1> device_ids(ids);
      GappedRows<T> out(tokens, D);
      kernels::embedding<T>(
          {.tokens = device_ids.view(), .table = device_table.inputs(), .out = out.view()},
          nullptr);
      finish();
      EXPECT_TRUE(within_yardstick("embedding", "vectors, bit by bit", out, cast<float>(expected),
                                   expected));
      EXPECT_TRUE(same_bits(out.host(), cast<float>(expected)));
    }
}

// A token beyond the vocabulary reads nothing.
TYPED_TEST(EmbeddingGpu, tokensBeyondTheTableGiveZero) {
  using T = TypeParam;
  const GappedRows<T> table(draw(3, 70, 50));
  const DeviceTensor<std::int32_t, 1> tokens(ints({3, 2147483647, -2147483647}));
  GappedRows<T> out(3, 70);
  kernels::embedding<T>({.tokens = tokens.view(), .table = table.inputs(), .out = out.view()},
                        nullptr);
  finish();
  EXPECT_TRUE(same_bits(out.host(), Array<float, 2>(Shape<2>{3, 70}, 0.0f)));
}

TYPED_TEST(EmbeddingGpu, logitsAgreeWithTheReference) {
  using T = TypeParam;
  std::uint64_t seed = 60;
  for (const auto& [tokens, V, D] :
       {std::tuple{0, 5, 3}, {1, 1, 1}, {3, 1000, 65}, {65, 130, 257}}) {
    const auto x = draw(tokens, D, ++seed), head = draw(V, D, ++seed);
    Array<double, 2> truth(Shape<2>{tokens, V});
    Array<float, 2> yardstick(Shape<2>{tokens, V});
    reference::logits<double>(x, head, truth);
    reference::logits<float>(cast<float>(x), cast<float>(head), yardstick);
    const GappedRows<T> device_x(x), device_head(head);
    GappedRows<float> out(tokens, V);
    kernels::logits<T>({.x = device_x.inputs(), .head = device_head.inputs(), .logits = out.view()},
                       nullptr);
    finish();
    EXPECT_TRUE(within_yardstick("embedding", "logits", out, yardstick, truth));
  }
}

TYPED_TEST(EmbeddingGpu, aGraphReplaysWithOtherContents) {
  using T = TypeParam;
  const auto table = draw(40, 65, 80), x = draw(7, 65, 81);
  const auto ids = draw_tokens(7, 40, 80);
  GappedRows<T> captured_table(draw(40, 65, 82)), captured_x(draw(7, 65, 83));
  DeviceTensor<std::int32_t, 1> captured_ids(draw_tokens(7, 40, 84));
  const GappedRows<T> device_table(table), device_x(x);
  const DeviceTensor<std::int32_t, 1> device_ids(ids);
  GappedRows<T> captured_out(7, 65), out(7, 65);
  GappedRows<float> captured_logits(7, 40), logits(7, 40);
  replay_behind_change(
      [&](cudaStream_t stream) {
        kernels::embedding<T>({.tokens = std::as_const(captured_ids).view(),
                               .table = captured_table.inputs(),
                               .out = captured_out.view()},
                              stream);
        kernels::logits<T>({.x = captured_x.inputs(),
                            .head = captured_table.inputs(),
                            .logits = captured_logits.view()},
                           stream);
      },
      [&] {
        captured_table.set(table), captured_x.set(x);
        captured_ids.set(device_ids.elements());
      });
  kernels::embedding<T>(
      {.tokens = device_ids.view(), .table = device_table.inputs(), .out = out.view()}, nullptr);
  kernels::logits<T>(
      {.x = device_x.inputs(), .head = device_table.inputs(), .logits = logits.view()}, nullptr);
  finish();
  EXPECT_TRUE(same_bits(captured_out, out));
  EXPECT_TRUE(same_bits(captured_logits, logits));
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(EmbeddingArguments, areRefusedByName) {
  const auto lookup = [](Shape<2> out) {
    return complaint_of([&] {
      kernels::embedding<Bf16>({.tokens = unread<const std::int32_t, 1>({4}),
                                .table = unread<const Bf16, 2>({10, 8}),
                                .out = unread<Bf16, 2>(out)},
                               nullptr);
    });
  };
  EXPECT_EQ(lookup({4, 9}), "embedding: out is expected to be [T, D] = [4, 8]; got [4, 9]");
  EXPECT_EQ(lookup({5, 8}), "embedding: out is expected to be [T, D] = [4, 8]; got [5, 8]");
  const auto scores = [](Shape<2> head, Shape<2> logits) {
    return complaint_of([&] {
      kernels::logits<Bf16>({.x = unread<const Bf16, 2>({4, 8}),
                             .head = unread<const Bf16, 2>(head),
                             .logits = unread<float, 2>(logits)},
                            nullptr);
    });
  };
  EXPECT_EQ(scores({10, 9}, {4, 10}),
            "logits: head is expected to be [V, D] = [10, 8]; got [10, 9]");
  EXPECT_EQ(scores({10, 8}, {4, 11}),
            "logits: logits is expected to be [T, V] = [4, 10]; got [4, 11]");
}

}  // namespace
}  // namespace lockstep
