// The reference of batched products against the plain products and scalings that it joins.
#include "reference/layers/batched_product.hpp"

#include <gtest/gtest.h>

#include "properties/support/laws.hpp"
#include "reference/layers/product.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

template <std::size_t Rank>
Array<double, Rank> draw(const Shape<Rank>& shape, std::uint64_t stream) {
  return on_grid<double>(shape, {.seed = 1, .stream = stream});
}

// A product of every matrix with its rows; shared rows stand for each matrix's own.
TEST(BatchedProduct, isAProductForEachMatrix) {
  const Array<double, 3> x = draw<3>({3, 4, 150}, 1), weight = draw<3>({3, 5, 150}, 2);
  const Array<double, 3> one = draw<3>({1, 4, 150}, 3);
  for (const Array<double, 3>& rows : {x, one}) {
    Array<double, 3> out(Shape<3>{3, 4, 5});
    reference::batched_product<double>({.x = rows.view(), .weight = weight.view()}, out);
    for (std::int64_t g = 0; g < 3; ++g) {
      Array<double, 2> expected(Shape<2>{4, 5});
      reference::product<double>(at(rows.view(), rows.extent(0) == 1 ? 0 : g), at(weight.view(), g),
                                 expected);
      EXPECT_LT(
          difference(at(std::as_const(out).view(), g), std::as_const(expected).view()).relative(),
          1e-14);
    }
  }
}

// One scale for each tensor: SGLang's bmm_fp8. A scale for each block: the dequantised product.
TEST(BatchedProduct, scalesStandForDequantisedTensors) {
  const std::int64_t M = 3, N = 260, K = 300;
  Array<double, 3> x = draw<3>({1, M, K}, 4), weight = draw<3>({1, N, K}, 5);
  const Array<double, 3> blocks = draw<3>({1, 3, 3}, 6), rows = draw<3>({1, M, 3}, 7);
  Array<double, 3> out(Shape<3>{1, M, N});
  reference::batched_product<double>({.x = x.view(),
                                      .weight = weight.view(),
                                      .x_scale = rows.view(),
                                      .weight_scale = blocks.view()},
                                     out);
  const Matrix<double> W = dequantised_blocks<double>(at(weight.view(), 0), at(blocks.view(), 0));
  Matrix<double> X = as_matrix(at(x.view(), 0));
  for (std::int64_t m = 0; m < M; ++m)
    for (std::int64_t k = 0; k < K; ++k) X(m, k) *= rows(0, m, k / 128);
  const Matrix<double> expected = X * W.transpose();
  for (std::int64_t m = 0; m < M; ++m)
    for (std::int64_t n = 0; n < N; ++n) EXPECT_NEAR(out(0, m, n), expected(m, n), 1e-12);

  const auto of_x = reference::scaled_numbers<double>(x.view(), false);
  const auto of_weight = reference::scaled_numbers<double>(weight.view(), false);
  reference::batched_product<double>({.x = of_x.numbers.view(),
                                      .weight = of_weight.numbers.view(),
                                      .x_scale = of_x.scale.view(),
                                      .weight_scale = of_weight.scale.view()},
                                     out);
  const auto flat = [](const Array<double, 3>& a) {
    Array<double, 2> all(Shape<2>{a.extent(1), a.extent(2)});
    std::ranges::copy(a, all.begin());
    return scaled_to_fp8<double, 2>(all);
  };
  const Matrix<double> bmm = scaled_product(flat(x), flat(weight));
  for (std::int64_t m = 0; m < M; ++m)
    for (std::int64_t n = 0; n < N; ++n) EXPECT_NEAR(out(0, m, n), bmm(m, n), 1e-9);
}

// A group's largest is 448, numbers times scales are within half a unit, and zeros stay zeros.
TEST(BatchedProduct, groupsAreScaledByThemselves) {
  Array<double, 3> x = draw<3>({2, 3, 300}, 8);
  for (std::int64_t i = 0; i < x.size(); ++i) x.data()[i] *= i / 128 % 2 ? 100 : 1e-3;
  for (std::int64_t k = 0; k < 128; ++k) x(1, 2, k) = 0;
  const auto scaled = reference::scaled_numbers<double>(x.view(), true);
  for (std::int64_t g = 0; g < 2; ++g)
    for (std::int64_t m = 0; m < 3; ++m)
      for (std::int64_t first = 0; first < 300; first += 128) {
        double largest = 0;
        for (std::int64_t k = first; k < std::min<std::int64_t>(first + 128, 300); ++k) {
          const double scale = scaled.scale(g, m, first / 128), quotient = x(g, m, k) / scale;
          EXPECT_LE(std::abs(scaled.numbers(g, m, k) - quotient),
                    0.5 * unit_in_last_place(quotient, Format::e4m3));
          largest = std::max(largest, std::abs(scaled.numbers(g, m, k)));
        }
        EXPECT_EQ(largest, g == 1 && m == 2 && first == 0 ? 0 : 448);
      }
}

}  // namespace
}  // namespace lockstep
