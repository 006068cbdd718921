// Laws of softmax attention: pages, rows and partial results do not change what a query sees.
#include "reference/attention/softmax_attention.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"
#include "properties/support/special_values.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::Attended;

/// Random queries, keys and values: q [T, HQ, d], k and v [L, HK, .].
struct Attention {
  Attention(std::int64_t T, std::int64_t L, std::uint64_t seed)
      : HK(1 + static_cast<std::int64_t>(random_below(2, seed, 50, 0))),
        HQ(HK * (1 + static_cast<std::int64_t>(random_below(3, seed, 50, 1)))),
        q(on_grid<double>(Shape<3>{T, HQ, 8}, {.seed = seed, .stream = 1, .limit = 2})),
        k(on_grid<double>(Shape<3>{L, HK, 8}, {.seed = seed, .stream = 2, .limit = 2})),
        v(on_grid<double>(Shape<3>{L, HK, 5}, {.seed = seed, .stream = 3})),
        out(Shape<3>{T, HQ, 5}),
        lse(Shape<2>{HQ, T}) {}

  std::int64_t HK, HQ;
  Array<double, 3> q, k, v;
  Array<double, 3> out;
  Array<double, 2> lse;
};

/// Keys and values of rows in pages of a pool, in a random order, everything else NaN.
struct Paged {
  Paged(const TensorView<const double, 3>& tokens, const Sizes& lengths, std::int64_t page,
        const Sizes& order)
      : pages(Shape<4>{static_cast<std::int64_t>(order.size()), page, tokens.extent(1),
                       tokens.extent(2)}) {
    std::int64_t next = 0, token = 0, widest = 0;
    for (const std::int64_t length : lengths) widest = std::max(widest, (length + page - 1) / page);
    table = Array<std::int32_t, 2>(Shape<2>{static_cast<std::int64_t>(lengths.size()), widest},
                                   2147480000);
    for (std::size_t row = 0; row < lengths.size(); ++row)
      for (std::int64_t l = 0; l < lengths[row]; ++l, ++token) {
        if (l % page == 0)
          table(static_cast<std::int64_t>(row), l / page) =
              static_cast<std::int32_t>(order[static_cast<std::size_t>(next++)]);
        const std::int32_t block = table(static_cast<std::int64_t>(row), l / page);
        mapped(at(pages.view(), block, l % page)) = mapped(at(tokens, token));
      }
  }
  Array<double, 4> pages;
  Array<std::int32_t, 2> table;
};

// Any page size and any places of the pages, with NaN in the rest of the pool.
RC_GTEST_PROP(SoftmaxAttention, pagesDoNotMatter, ()) {
  Sizes keys, queries;
  for (const std::int64_t length : draw_row_lengths(4, 31)) {
    keys.push_back(length);
    queries.push_back(*rc::gen::inRange<std::int64_t>(0, std::min<std::int64_t>(length, 4) + 1));
  }
  Attention whole(sum(queries), sum(keys), draw_seed());
  const auto query_starts = starts_of(queries), key_starts = starts_of(keys);
  reference::softmax_attention<double>(whole.q, whole.k, whole.v, query_starts, key_starts,
                                       {.scale = 0.5}, whole.out, whole.lse);
  const std::int64_t page = *rc::gen::element<std::int64_t>(1, 2, 3, 16, 64);
  std::int64_t blocks = 2;
  for (const std::int64_t length : keys) blocks += (length + page - 1) / page;
  const Sizes order = draw_order(blocks);
  const Paged k(whole.k, keys, page, order), v(whole.v, keys, page, order);
  const auto lengths = ints(keys);
  Array<double, 3> out(whole.out.shape());
  Array<double, 2> lse(whole.lse.shape());
  reference::paged_attention<double>(whole.q, k.pages, v.pages, k.table, lengths, query_starts,
                                     {.scale = 0.5}, out, lse);
  RC_ASSERT(same_bits(out, whole.out) && same_bits(lse, whole.lse));
}

// Bottom-right: the last query sees everything, and one that comes before every key sees nothing.
RC_GTEST_PROP(SoftmaxAttention, causalQueriesSeeThePrefixThatEndsWithThem, ()) {
  const std::int64_t L = draw_length(17), T = draw_length(8);
  Attention all(T, L, draw_seed());
  const double empty = *rc::gen::element(kInfinity, -kInfinity);
  reference::attention_row<double>(all.q, all.k, all.v, {.scale = 0.5, .empty_lse = empty}, all.out,
                                   all.lse);
  for (std::int64_t i = 0; i < T; ++i) {
    const std::int64_t n = std::max<std::int64_t>(0, std::min(L, L - T + i + 1));
    Array<double, 3> one(Shape<3>{1, all.HQ, 5});
    Array<double, 2> lse(Shape<2>{all.HQ, 1});
    reference::attention_row<double>(cut(std::as_const(all.q).view(), i, i + 1),
                                     cut(std::as_const(all.k).view(), 0, n),
                                     cut(std::as_const(all.v).view(), 0, n),
                                     {.scale = 0.5, .causal = false, .empty_lse = empty}, one, lse);
    for (std::int64_t h = 0; h < all.HQ; ++h) {
      RC_ASSERT(n > 0 || (all.lse(h, i) == empty && all.out(i, h, 0) == 0));
      RC_ASSERT(std::abs(one(0, h, 0) - all.out(i, h, 0)) < 1e-14);
      RC_ASSERT(n == 0 || std::abs(lse(h, 0) - all.lse(h, i)) < 1e-13);
    }
  }
}

Attended<double> partial(const Attention& a, std::int64_t begin, std::int64_t end) {
  const Matrix<double> K = reference::head_of(a.k.view(), 0), V = reference::head_of(a.v.view(), 0);
  const Vector<double> q = as_vector(at(a.q.view(), 0, 0));
  return reference::attend<double>(q, K.middleRows(begin, end - begin),
                                   V.middleRows(begin, end - begin), 0.5);
}

bool same(const Attended<double>& a, const Attended<double>& b) {
  if (a.lse != b.lse && !(std::abs(a.lse - b.lse) < 1e-13)) return false;
  return (a.out - b.out).norm() < 1e-13;
}

// Merging is associative and commutative, has the empty result as identity, and undoes every split.
RC_GTEST_PROP(SoftmaxAttention, aMergeIsTheAttentionOverTheUnion, ()) {
  const std::int64_t L = draw_length(31);
  const Attention a(1, L, draw_seed());
  const auto x = *rc::gen::inRange<std::int64_t>(0, L + 1), y = *rc::gen::inRange(x, L + 1);
  const auto first = partial(a, 0, x), second = partial(a, x, y), third = partial(a, y, L);
  using reference::merged;
  RC_ASSERT(same(merged(merged(first, second), third), partial(a, 0, L)));
  RC_ASSERT(same(merged(first, merged(second, third)), partial(a, 0, L)));
  RC_ASSERT(same(merged(second, first), merged(first, second)));
}

// vLLM #27491 and #15492: both sides empty is no NaN, whichever infinity says so, and an empty
// side's output is not looked at.
TEST(SoftmaxAttention, mergesOfEmptySidesAreDefined) {
  const Attended<double> something{Vector<double>::Ones(3), 0.5};
  for (const double empty : {kInfinity, -kInfinity})
    for (const double garbage : {0.0, kNan}) {
      const Attended<double> nothing{Vector<double>::Constant(3, garbage), empty};
      EXPECT_TRUE(same(reference::merged(nothing, something), something));
      EXPECT_TRUE(same(reference::merged(something, nothing), something));
      const Attended<double> both = reference::merged(nothing, nothing);
      EXPECT_EQ(both.lse, -kInfinity);
      EXPECT_EQ(both.out, Vector<double>::Zero(3));
    }
}

// Large scores: the maximum is taken out before the exponential.
TEST(SoftmaxAttention, doesNotOverflow) {
  Matrix<double> K(2, 1), V(2, 1);
  K << 1000, 999;
  V << 1, 0;
  const auto a = reference::attend<double>(Vector<double>::Ones(1), K, V, 1.0);
  EXPECT_NEAR(a.out(0), 1 / (1 + std::exp(-1)), 1e-15);
  EXPECT_NEAR(a.lse, 1000 + std::log1p(std::exp(-1)), 1e-12);
}

// Sides of very different size: the larger lse is taken out before the exponential.
TEST(SoftmaxAttention, mergesDoNotOverflow) {
  const Attended<double> large{Vector<double>::Ones(1), 1000},
      small{Vector<double>::Zero(1), -1000};
  EXPECT_TRUE(same(reference::merged(large, small), large));
  EXPECT_TRUE(same(reference::merged(small, large), large));
}

TEST(SoftmaxAttention, aQueryWithoutKeysHasAnLseOfMinusInfinity) {
  const Attention none(1, 0, 1);
  Array<double, 3> out(none.out.shape());
  Array<double, 2> lse(none.lse.shape());
  reference::attention_row<double>(none.q, none.k, none.v, {.scale = 1}, out, lse);
  EXPECT_EQ(lse(0, 0), -kInfinity);
  EXPECT_EQ(out(0, 0, 0), 0);
}

}  // namespace
}  // namespace lockstep
