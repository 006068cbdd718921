// Laws of the products with weights: sorting tokens by expert changes nothing.
#include "reference/layers/product.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"
#include "reference/layers/embedding.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

TEST(Product, multipliesRowsWithRows) {
  Array<double, 2> x(Shape<2>{1, 2}), weight(Shape<2>{3, 2}), out(Shape<2>{1, 3});
  x(0, 0) = 2, x(0, 1) = 3;
  weight(0, 0) = 1, weight(0, 1) = 0;
  weight(1, 0) = 10, weight(1, 1) = 100;
  weight(2, 0) = -1, weight(2, 1) = 1;
  reference::product<double>(x, weight, out);
  EXPECT_EQ(out(0, 0), 2);
  EXPECT_EQ(out(0, 1), 320);
  EXPECT_EQ(out(0, 2), 1);
  Array<double, 2> narrow(Shape<2>{3, 1}, 0.0);
  EXPECT_THROW(reference::product<double>(x, narrow, out), ContractViolation);
}

Array<std::int32_t, 2> draw_choices(std::int64_t T, std::int64_t k, std::int64_t E) {
  Array<std::int32_t, 2> experts(Shape<2>{T, k}, 0);
  for (std::int32_t& expert : experts)
    expert = *rc::gen::inRange<std::int32_t>(-2, static_cast<std::int32_t>(E));
  return experts;
}

// Gathered, sorted, multiplied by expert and combined, each token gets the sum of its experts.
RC_GTEST_PROP(Product, expertsAreThoseOfEachToken, ()) {
  const std::int64_t T = draw_length(8), k = *rc::gen::inRange(0, 4), E = *rc::gen::inRange(1, 5);
  const std::int64_t K = 3, N = 2;
  const auto experts = draw_choices(T, k, E);
  const std::uint64_t seed = draw_seed();
  const auto x = on_grid<double>(Shape<2>{T, K}, {.seed = seed, .stream = 1});
  const auto weight = on_grid<double>(Shape<3>{E, N, K}, {.seed = seed, .stream = 2});
  const auto shares = on_grid<double>(Shape<2>{T, k}, {.seed = seed, .stream = 3});

  const reference::ExpertOrder order = reference::sorted_by_expert(experts, E);
  Array<double, 2> gathered(Shape<2>{T * k, K}), multiplied(Shape<2>{T * k, N});
  Array<double, 2> out(Shape<2>{T, N});
  reference::embedding<double>(order.source, x, gathered);
  reference::grouped_product<double>(gathered, weight, order.starts, multiplied);
  reference::combine_experts<double>(multiplied, order.place, shares, out);

  Array<double, 2> expected(Shape<2>{T, N}, 0.0);
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t i = 0; i < k; ++i)
      for (std::int64_t n = 0; n < N && experts(t, i) >= 0; ++n)
        for (std::int64_t c = 0; c < K; ++c)
          expected(t, n) += shares(t, i) * weight(experts(t, i), n, c) * x(t, c);
  for (std::int64_t i = 0; i < out.size(); ++i)
    RC_ASSERT(std::abs(out.data()[i] - expected.data()[i]) < 1e-12);

  // Rows of one expert stand in the order of tokens; those after the last expert's give 0.
  const std::int64_t rows = order.starts(E);
  for (std::int64_t row = 0; row < T * k; ++row) {
    RC_ASSERT((order.source(row) >= 0) == (row < rows));
    for (std::int64_t n = 0; n < N && row >= rows; ++n) RC_ASSERT(multiplied(row, n) == 0);
  }
  for (std::int64_t e = 0; e < E; ++e)
    for (std::int64_t row = order.starts(e) + 1; row < order.starts(e + 1); ++row)
      RC_ASSERT(order.source(row - 1) <= order.source(row));
}

TEST(Product, refusesInvalidExperts) {
  const Array<std::int32_t, 2> experts(Shape<2>{1, 1}, 3);
  EXPECT_THROW(reference::sorted_by_expert(experts, 3), ContractViolation);
  const Array<double, 2> x(Shape<2>{1, 1}, 0.0);
  const Array<double, 3> weight(Shape<3>{2, 1, 1}, 0.0);
  Array<double, 2> out(Shape<2>{1, 1});
  EXPECT_THROW(reference::grouped_product<double>(x, weight, ints({0, 1}), out), ContractViolation);
}

TEST(Embedding, looksUpRowsAndPadding) {
  Array<double, 2> table(Shape<2>{3, 2}), out(Shape<2>{3, 2}), logits(Shape<2>{3, 3});
  for (std::int64_t i = 0; i < 6; ++i) table.data()[i] = static_cast<double>(i + 1);
  reference::embedding<double>(ints({2, -1, 0}), table, out);
  EXPECT_EQ(out(0, 0), 5);
  EXPECT_EQ(out(0, 1), 6);
  EXPECT_EQ(out(1, 0), 0);
  EXPECT_EQ(out(1, 1), 0);
  EXPECT_EQ(out(2, 0), 1);
  EXPECT_THROW(reference::embedding<double>(ints({3, 0, 0}), table, out), ContractViolation);
  reference::logits<double>(out, table, logits);
  EXPECT_EQ(logits(0, 1), 5 * 3 + 6 * 4);
  EXPECT_EQ(logits(1, 2), 0);
}

}  // namespace
}  // namespace lockstep
