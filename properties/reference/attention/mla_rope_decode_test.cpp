// The fused decode is its parts: rotate, write, attend over the latents, project.
#include "reference/attention/mla_rope_decode.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/reference/attention/latents.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

// Every token of a prompt decoded one by one, through pages in any order, is the prompt at once by
// the definition: keys and values decompressed, positions rotated. A padded row writes nothing.
RC_GTEST_PROP(MlaRopeDecode, stepsAreThePromptAtOnce, ()) {
  const std::int64_t T = std::max<std::int64_t>(1, draw_length(17));
  const std::int64_t page = *rc::gen::element<std::int64_t>(1, 3, 64);
  const auto pairs =
      *rc::gen::element(reference::RopePairs::interleaved, reference::RopePairs::half_split);
  const Mla<double> mla(T, T, draw_seed());
  const auto rope = reference::plain_rope<double>(4, 10000);
  Sizes numbers;
  for (std::int64_t t = 0; t < T; ++t) numbers.push_back(t);
  const auto positions = ints(numbers);
  auto q_pe = mla.q_pe;
  Array<double, 2> k_pe = mla.k_pe;
  reference::apply_rope<double>(rope, positions, pairs, q_pe.view());
  reference::apply_rope<double>(rope, positions, pairs, make_view(k_pe.data(), Shape<3>{T, 1, 4}));
  Result<double> whole(mla);
  reference::mla_normal<double>({mla.q_nope, q_pe, mla.latent, k_pe}, mla.w, {.scale = 0.3},
                                whole.out, whole.lse);

  const std::int64_t blocks = (T + page - 1) / page;
  const Sizes order = draw_order(blocks + 1);
  Array<std::int32_t, 2> table(Shape<2>{2, blocks}, 0);
  for (std::int64_t i = 0; i < blocks; ++i)
    table(0, i) = static_cast<std::int32_t>(order[static_cast<std::size_t>(i)]);
  Array<double, 3> cache(Shape<3>{blocks + 1, page, 16});  // NaN
  for (std::int64_t t = 0; t < T; ++t) {
    const auto twice = [&](const auto& all) {  // the row itself, then a row of padding
      return joined(std::vector{cut(all.view(), t, t + 1), cut(all.view(), t, t + 1)});
    };
    const auto q_nope = twice(mla.q_nope), raw_q_pe = twice(mla.q_pe);
    const auto latent = twice(mla.latent), raw_k_pe = twice(mla.k_pe);
    const auto at_t = ints({t, 0}), lengths = ints({t + 1, 0});
    const auto slots = ints({table(0, t / page) * page + t % page, -1});
    Array<double, 3> out(Shape<3>{2, 3, 5});
    reference::mla_rope_decode<double>({.q_nope = q_nope,
                                        .q_pe = raw_q_pe,
                                        .latent = latent,
                                        .k_pe = raw_k_pe,
                                        .positions = at_t,
                                        .slots = slots,
                                        .block_table = table,
                                        .seq_lens = lengths,
                                        .softmax_scale = 0.3,
                                        .pairs = pairs},
                                       mla.w, rope, cache.view(), out.view());
    RC_ASSERT(difference(at(out.view(), 0), at(whole.out.view(), t)).relative() < 1e-11);
    for_each_element(at(out.view(), 1), [](const auto&, double y) { RC_ASSERT(y == 0.0); });
    const auto token = at(cache.view(), table(0, t / page), t % page);
    for (std::int64_t i = 0; i < 12; ++i) RC_ASSERT(token(i) == mla.latent(t, i));
    for (std::int64_t i = 0; i < 4; ++i) RC_ASSERT(token(12 + i) == k_pe(t, i));
  }
  std::int64_t written = 0;
  for_each_element(cache.view(), [&](const auto&, double e) { written += !std::isnan(e); });
  RC_ASSERT(written == T * 16);
}

TEST(MlaRopeDecode, latentsGoToTheirSlotsAlone) {
  const auto latent = on_grid<double>(Shape<2>{3, 3}, {.seed = 1});
  const auto k_pe = on_grid<double>(Shape<2>{3, 2}, {.seed = 2});
  Array<double, 3> cache(Shape<3>{2, 2, 5}, 7.0);
  reference::write_latents<double>(latent, k_pe, ints({3, -1, 0}), cache.view());
  EXPECT_EQ(cache(1, 1, 0), latent(0, 0));
  EXPECT_EQ(cache(1, 1, 4), k_pe(0, 1));
  EXPECT_EQ(cache(0, 0, 2), latent(2, 2));
  for (const std::int64_t i : {0, 4}) EXPECT_EQ(cache(0, 1, i) + cache(1, 0, i), 14);
  EXPECT_THROW(reference::write_latents<double>(latent, k_pe, ints({4, 0, 1}), cache.view()),
               ContractViolation);
}

// Two requests in one launch are two launches.
TEST(MlaRopeDecode, aRowDoesNotDependOnItsBatch) {
  const Mla<double> mla(2, 2, 5);
  const auto rope = reference::plain_rope<double>(4, 100);
  const auto positions = ints({3, 8}), slots = ints({1, 2}), lengths = ints({2, 1});
  const auto table = ints({0, 1});
  Array<double, 3> cache = on_grid<double>(Shape<3>{2, 2, 16}, {.seed = 6}), alone_cache = cache;
  Array<double, 3> out(Shape<3>{2, 3, 5});
  const auto inputs = [&](std::int64_t begin, std::int64_t end) {
    return reference::MlaRopeDecodeInputs<double>{
        .q_nope = cut(mla.q_nope.view(), begin, end),
        .q_pe = cut(mla.q_pe.view(), begin, end),
        .latent = cut(mla.latent.view(), begin, end),
        .k_pe = cut(mla.k_pe.view(), begin, end),
        .positions = cut(positions.view(), begin, end),
        .slots = cut(slots.view(), begin, end),
        .block_table = cut(make_view(table.data(), Shape<2>{2, 1}), begin, end),
        .seq_lens = cut(lengths.view(), begin, end),
        .softmax_scale = 0.3};
  };
  reference::mla_rope_decode<double>(inputs(0, 2), mla.w, rope, cache.view(), out.view());
  for (std::int64_t row = 0; row < 2; ++row) {
    Array<double, 3> alone(Shape<3>{1, 3, 5});
    reference::mla_rope_decode<double>(inputs(row, row + 1), mla.w, rope, alone_cache.view(),
                                       alone.view());
    EXPECT_TRUE(same_bits(at(out.view(), row), at(alone.view(), 0)));
  }
  EXPECT_TRUE(same_bits(cache, alone_cache));
}

}  // namespace
}  // namespace lockstep
