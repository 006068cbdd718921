// Laws of the static cache: buckets, masks and double writes change nothing that can be seen.
#include "reference/attention/static_kv_update.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"
#include "properties/support/special_values.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
constexpr std::int64_t kHeads = 4, kKvHeads = 2, kWidth = 4;

/// Queries, keys and values of B prompts of T tokens: [B, T, heads, d].
struct Prompts {
  Prompts(std::int64_t B, std::int64_t T, std::uint64_t seed)
      : q(on_grid<double>(Shape<4>{B, T, kHeads, kWidth}, {.seed = seed, .stream = 1})),
        k(on_grid<double>(Shape<4>{B, T, kKvHeads, kWidth}, {.seed = seed, .stream = 2})),
        v(on_grid<double>(Shape<4>{B, T, kKvHeads, kWidth}, {.seed = seed, .stream = 3})) {}
  Array<double, 4> q, k, v;
};

/// Tokens [begin, end) of every prompt, then `padding` tokens of NaN.
Array<double, 4> piece(const Array<double, 4>& all, std::int64_t begin, std::int64_t end,
                       std::int64_t padding) {
  Array<double, 4> part(
      Shape<4>{all.extent(0), end - begin + padding, all.extent(2), all.extent(3)}, kNan);
  for (std::int64_t b = 0; b < all.extent(0); ++b)
    for (std::int64_t t = begin; t < end; ++t)
      mapped(at(part.view(), b, t - begin)) = mapped(at(all.view(), b, t));
  return part;
}

// Prompts in pieces, each padded to a bucket with NaN, over a cache whose tail is NaN: every real
// position gets what plain causal attention over the whole prompt gives it.
RC_GTEST_PROP(StaticKv, bucketsGiveTheOutputsOfTheWholePrompt, ()) {
  const std::int64_t B = *rc::gen::inRange<std::int64_t>(1, 3), T = draw_length(17), M = 40;
  const Prompts prompts(B, T, draw_seed());
  Array<double, 4> k(Shape<4>{B, kKvHeads, M, kWidth}), v(k.shape());  // NaN
  Array<bool, 2> mask(Shape<2>{B, M}, false);
  std::int64_t past = 0;
  for (const std::int64_t size : draw_pieces(T)) {
    if (size == 0) continue;
    const auto bucket = reference::chosen_bucket(size, past, M, {2, 4, 8, 16, 32});
    if (!bucket) RC_DISCARD("a prompt that needs splitting");
    Sizes positions;
    for (std::int64_t i = 0; i < *bucket; ++i) positions.push_back(past + i);
    const auto cache_pos = ints(positions);
    const std::int64_t padding = *bucket - size;
    const auto q = piece(prompts.q, past, past + size, padding);
    const auto new_k = piece(prompts.k, past, past + size, padding);
    const auto new_v = piece(prompts.v, past, past + size, padding);
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < size; ++i) mask(b, past + i) = true;
    Array<double, 4> seen_k = k, seen_v = v, out(q.shape());  // the first write
    reference::write_kv<double>(new_k, cache_pos, *bucket, seen_k);
    reference::write_kv<double>(new_v, cache_pos, *bucket, seen_v);
    reference::static_kv_attention<double>(q, seen_k, seen_v, mask, cache_pos, 0.5, out);
    const auto sidecar_k = reference::sidecar_of<double>(new_k, cache_pos, M);
    const auto sidecar_v = reference::sidecar_of<double>(new_v, cache_pos, M);
    for (int times = *rc::gen::inRange(1, 3); times > 0; --times) {  // applying twice is once
      reference::apply_sidecar<double>(sidecar_k, cache_pos, size, k);
      reference::apply_sidecar<double>(sidecar_v, cache_pos, size, v);
    }
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < size; ++i) {
        Array<double, 3> expected(Shape<3>{1, kHeads, kWidth});
        Array<double, 2> lse(Shape<2>{kHeads, 1});
        reference::attention_row<double>(
            cut(at(std::as_const(prompts.q).view(), b), past + i, past + i + 1),
            cut(at(std::as_const(prompts.k).view(), b), 0, past + i + 1),
            cut(at(std::as_const(prompts.v).view(), b), 0, past + i + 1), {.scale = 0.5}, expected,
            lse);
        RC_ASSERT(difference(at(out.view(), b, i), at(expected.view(), 0)).norm < 1e-13);
        RC_ASSERT(difference(at(out.view(), b, i), at(expected.view(), 0)).misplaced == 0);
      }
    past += size;
  }
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t j = past; j < M; ++j)
      RC_ASSERT(std::isnan(k(b, 0, j, 0)));  // a bucket's tail is not committed
}

// Left padding: positions that the mask hides are not there.
RC_GTEST_PROP(StaticKv, leftPaddingChangesNothing, ()) {
  const std::int64_t T = 1 + draw_length(8), left = *rc::gen::inRange<std::int64_t>(1, 5);
  const Prompts prompts(1, T, draw_seed());
  const std::int64_t M = T + left;
  Array<double, 4> k(Shape<4>{1, kKvHeads, M, kWidth}), v(k.shape());
  Array<double, 4> plain_k(k.shape(), 0.0), plain_v(k.shape(), 0.0);
  Array<bool, 2> mask(Shape<2>{1, M}, false), all(Shape<2>{1, M}, true);
  Sizes numbers, shifted_numbers;
  for (std::int64_t t = 0; t < T; ++t) {
    numbers.push_back(t), shifted_numbers.push_back(t + left);
    mask(0, t + left) = true;
  }
  const auto positions = ints(numbers), shifted = ints(shifted_numbers);
  reference::write_kv<double>(prompts.k, shifted, T, k);
  reference::write_kv<double>(prompts.v, shifted, T, v);
  reference::write_kv<double>(prompts.k, positions, T, plain_k);
  reference::write_kv<double>(prompts.v, positions, T, plain_v);
  Array<double, 4> out(prompts.q.shape()), plain(prompts.q.shape());
  reference::static_kv_attention<double>(prompts.q, k, v, mask, shifted, 0.5, out);
  reference::static_kv_attention<double>(prompts.q, plain_k, plain_v, all, positions, 0.5, plain);
  RC_ASSERT(same_bits(out, plain));
}

TEST(StaticKv, aQueryThatSeesNothingGivesZero) {
  const Prompts prompts(1, 1, 0);
  const Array<double, 4> nan(Shape<4>{1, kKvHeads, 2, kWidth});
  const Array<bool, 2> nothing(Shape<2>{1, 2}, false);
  Array<double, 4> out(prompts.q.shape());
  reference::static_kv_attention<double>(prompts.q, nan, nan, nothing, ints({1}), 0.5, out);
  for (const double y : out) EXPECT_EQ(y, 0);
}

TEST(StaticKv, choosesTheSmallestBucketThatFits) {
  const std::vector<std::int64_t> buckets{32, 8, 4};
  EXPECT_EQ(reference::chosen_bucket(3, 0, 64, buckets), 4);
  EXPECT_EQ(reference::chosen_bucket(5, 0, 64, buckets), 8);
  EXPECT_EQ(reference::chosen_bucket(5, 56, 64, buckets), 8);
  EXPECT_EQ(reference::chosen_bucket(5, 57, 64, buckets), std::nullopt);
  EXPECT_EQ(reference::chosen_bucket(1, 63, 64, buckets), 1) << "one token is a decode";
  EXPECT_EQ(reference::chosen_bucket(1, 64, 64, buckets), std::nullopt);
}

TEST(StaticKv, positionsOutsideTheCacheAreErrors) {
  const Prompts prompts(1, 1, 0);
  Array<double, 4> k(Shape<4>{1, kKvHeads, 2, kWidth});
  EXPECT_THROW(reference::write_kv<double>(prompts.k, ints({2}), 1, k), ContractViolation);
}

// Zeros everywhere but at the positions of a step, and only real rows are applied.
TEST(StaticKv, sidecarsHoldOneStep) {
  const auto fresh = on_grid<double>(Shape<4>{2, 3, 2, 4}, {.seed = 1, .limit = 2});
  const auto positions = ints({4, 5, 6});
  const auto sidecar = reference::sidecar_of<double>(fresh, positions, 8);
  EXPECT_EQ(sidecar.shape(), (Shape<4>{2, 2, 8, 4}));
  for_each_element(sidecar.view(), [&](const auto& i, double e) {
    const bool written = 4 <= i[2] && i[2] <= 6;
    EXPECT_EQ(e, written ? fresh(i[0], i[2] - 4, i[1], i[3]) : 0.0);
  });
  Array<double, 4> cache(sidecar.shape(), 9.0);
  reference::apply_sidecar<double>(sidecar, positions, 2, cache);
  for_each_element(cache.view(), [&](const auto& i, double e) {
    const bool written = i[2] == 4 || i[2] == 5;
    EXPECT_EQ(e, written ? fresh(i[0], i[2] - 4, i[1], i[3]) : 9.0);
  });
  EXPECT_THROW(reference::write_kv<double>(fresh, positions, 4, cache), ContractViolation);
  EXPECT_THROW(reference::write_kv<double>(fresh, ints({-1, 0, 1}), 3, cache), ContractViolation);
  EXPECT_EQ(reference::chosen_bucket(4, 0, 64, {4, 8}), 4) << "a bucket that is just full";
}

}  // namespace
}  // namespace lockstep
