// Eight-bit floats: bytes, scales and products.
#include "reference/tensors/fp8.hpp"

#include <gtest/gtest.h>

#include "reference/tensors/array.hpp"
#include "reference/tensors/grid.hpp"

namespace lockstep {
namespace {

TEST(Fp8, bytesAreTheirNumbers) {
  for (int byte = 0; byte < 256; ++byte) {
    const double value = decode_e4m3(static_cast<std::uint8_t>(byte));
    if (std::isnan(value)) continue;
    EXPECT_EQ(encode_e4m3(value), byte);
    EXPECT_EQ(rounded(value, Format::e4m3), value);
  }
  EXPECT_TRUE(std::isnan(decode_e4m3(encode_e4m3(std::nan("")))));
  EXPECT_EQ(decode_e4m3(encode_e4m3(-1e9)), -448);
}

// Blocks of 128 straddle heads and the keys' end when dn is no multiple of 128: weights are
// dequantised before they are split.
TEST(Fp8, blocksAreScaledBeforeHeadsAreCut) {
  const std::int64_t H = 2, dn = 192, dv = 100, dc = 130;
  const auto weights = on_grid<double>(Shape<2>{H * (dn + dv), dc}, {.seed = 1});
  const auto scales = on_grid<double>(Shape<2>{5, 2}, {.seed = 2});
  const Matrix<double> whole = dequantised_blocks<double>(weights, scales);
  for (const std::int64_t row : {0, 127, 128, 583})
    for (const std::int64_t column : {0, 127, 128, 129})
      EXPECT_EQ(whole(row, column), weights(row, column) * scales(row / 128, column / 128));
}

TEST(Fp8, scaledTensorsStayWithinTheFormat) {
  for (const Format format : {Format::e4m3, Format::e4m3fnuz}) {
    const auto a = on_grid<double>(Shape<2>{5, 64}, {.seed = 3});
    const auto b = on_grid<double>(Shape<2>{7, 64}, {.seed = 4});
    const auto qa = scaled_to_fp8(a, format), qb = scaled_to_fp8(b, format);
    const Matrix<double> exact = as_matrix(a.view()) * as_matrix(b.view()).transpose();
    EXPECT_LT((scaled_product(qa, qb) - exact).norm() / exact.norm(), 0.06);
    double largest = 0;
    for (const double e : qa.values) largest = std::max(largest, std::abs(e));
    EXPECT_EQ(largest, traits_of(format).largest);
  }
  const auto zeros = scaled_to_fp8(Array<double, 2>(Shape<2>{2, 2}, 0.0));
  for (const double e : zeros.values) EXPECT_EQ(e, 0);
}

// The scale is the tensor's largest over the format's, and values are divided by it.
TEST(Fp8, tensorsAreScaledByTheirLargest) {
  Array<double, 2> x(Shape<2>{1, 3});
  x(0, 0) = 7, x(0, 1) = -3.5, x(0, 2) = 0.875;
  const auto scaled = scaled_to_fp8(x);
  EXPECT_DOUBLE_EQ(scaled.scale, 7.0 / 448);
  EXPECT_EQ(scaled.values(0, 0), 448);
  EXPECT_EQ(scaled.values(0, 1), -224);
  EXPECT_EQ(scaled.values(0, 2), 56);
  EXPECT_DOUBLE_EQ(scaled_to_fp8(x, Format::e4m3fnuz).scale, 7.0 / 240);
  Array<double, 2> tiny(Shape<2>{1, 1}, 1.5e-12), below(Shape<2>{1, 1}, 0.5e-12);
  EXPECT_EQ(scaled_to_fp8(tiny).values(0, 0), 448);
  EXPECT_EQ(scaled_to_fp8(below).values(0, 0), 224) << "below 1e-12 the scale stays";
  const auto product = scaled_product(scaled, scaled);
  EXPECT_DOUBLE_EQ(product(0, 0), 49 + 3.5 * 3.5 + 0.875 * 0.875);
}

}  // namespace
}  // namespace lockstep
