// The yardstick and what it stands on: storage formats, test data, differences.
#include "reference/base/yardstick.hpp"

#include <gtest/gtest.h>

#include "reference/base/grid.hpp"

namespace lockstep {
namespace {

TEST(Formats, roundToNearestWithTiesToEven) {
  EXPECT_EQ(rounded(1 + 1.0 / 256, Format::bf16), 1);              // a tie, down to even
  EXPECT_EQ(rounded(1 + 3.0 / 256, Format::bf16), 1 + 4.0 / 256);  // a tie, up to even
  EXPECT_EQ(rounded(-(1 + 1.1 / 256), Format::bf16), -(1 + 2.0 / 256));
  EXPECT_EQ(rounded(2049.0f, Format::fp16), 2048.0f);
  EXPECT_EQ(rounded(17.0, Format::e4m3), 16);
  EXPECT_EQ(rounded(0x1p-24 * 1.5, Format::fp16), 0x1p-23) << "subnormal, a tie";
  EXPECT_EQ(rounded(0x1p-10, Format::e4m3), 0) << "half of the smallest, a tie";
  EXPECT_EQ(rounded(0x1p-10, Format::e4m3fnuz), 0x1p-10) << "its smallest";
  EXPECT_EQ(rounded(0.1, Format::float32), static_cast<double>(0.1f));
  EXPECT_EQ(rounded(0.1, Format::exact), 0.1);
}

TEST(Formats, goBeyondTheirLargestToInfinityOrSaturate) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(rounded(65519.0, Format::fp16), 65504);
  EXPECT_EQ(rounded(65520.0, Format::fp16), infinity);
  EXPECT_EQ(rounded(-1e300, Format::bf16), -infinity);
  EXPECT_EQ(rounded(1e6, Format::e4m3), 448);
  EXPECT_EQ(rounded(-infinity, Format::e4m3fnuz), -240);
  EXPECT_TRUE(std::isnan(rounded(std::nan(""), Format::e4m3)));
  EXPECT_TRUE(std::signbit(rounded(-1e-30, Format::e4m3)));
  EXPECT_FALSE(std::signbit(rounded(-1e-30, Format::e4m3fnuz))) << "it has no negative zero";
}

// The whole of e4m3: each of its numbers is its own rounding, and so are the ties between them.
TEST(Formats, knowEveryNumberOfE4m3) {
  std::vector<double> numbers{0};
  for (int bits = 1; bits < 127; ++bits) {  // 127 is NaN
    const int exponent = bits >> 3, fraction = bits & 7;
    numbers.push_back(exponent ? std::ldexp(8 + fraction, exponent - 10)
                               : std::ldexp(fraction, -9));
  }
  EXPECT_EQ(numbers.back(), 448);
  for (std::size_t i = 0; i + 1 < numbers.size(); ++i) {
    EXPECT_EQ(rounded(numbers[i], Format::e4m3), numbers[i]);
    const double even = i % 2 == 0 ? numbers[i] : numbers[i + 1];
    EXPECT_EQ(rounded((numbers[i] + numbers[i + 1]) / 2, Format::e4m3), even);
  }
}

TEST(TestData, isExactInHalfPrecision) {
  const auto values = on_grid<double>(Shape<1>{4096}, {.seed = 3, .stream = 1, .limit = 2});
  double largest = 0;
  for (const double x : values) {
    EXPECT_EQ(rounded(x, Format::bf16), x);
    EXPECT_EQ(rounded(x, Format::fp16), x);
    largest = std::max(largest, std::abs(x));
  }
  EXPECT_EQ(largest, 2);
  EXPECT_FALSE(std::equal(values.begin(), values.end(),
                          on_grid<double>(Shape<1>{4096}, {.seed = 4, .stream = 1}).begin()));
}

Array<double, 2> matrix(std::initializer_list<double> values) {
  Array<double, 2> array(Shape<2>{2, 2});
  std::copy(values.begin(), values.end(), array.begin());
  return array;
}

TEST(Differences, nameTheWorstElement) {
  const Difference found = difference(matrix({1, 2, 3.5, 4}), matrix({1, 2.25, 3, 4}));
  EXPECT_EQ(found.worst_index, "[1, 0]");
  EXPECT_EQ(found.worst_actual, 3.5);
  EXPECT_EQ(found.worst_expected, 3);
  EXPECT_EQ(found.largest, 0.5);
  EXPECT_DOUBLE_EQ(found.norm, std::sqrt(0.25 + 0.0625));
  EXPECT_EQ(found.worst_ulp(Format::bf16), 0.5 / std::ldexp(1, -6));
  EXPECT_EQ(difference(matrix({0, 0, 0, 2}), matrix({0, 0, 0, 0})).relative(), 2);
}

TEST(Differences, seeInfinitiesThatAreMisplaced) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
  EXPECT_EQ(difference(matrix({nan, infinity, 1, 2}), matrix({nan, infinity, 1, 2})).misplaced, 0);
  EXPECT_EQ(difference(matrix({nan, infinity, 1, 2}), matrix({1, -infinity, nan, 2})).misplaced, 3);
  EXPECT_EQ(difference(matrix({1, 1, 1, nan}), matrix({1, 1, 9, 1})).worst_index, "[1, 1]");
}

// A kernel may be four times as far from the truth as float is, and not five times; and one unit in
// the last place is always allowed.
TEST(Yardstick, measuresByTheReferenceInFloat) {
  const auto truth = matrix({1, 2, 3, 4}), yardstick = matrix({1, 2, 3, 4 + 1e-3});
  EXPECT_TRUE(judge(matrix({1, 2, 3, 4 + 3.9e-3}), yardstick, truth).pass);
  const Verdict verdict = judge(matrix({1, 2, 3, 4 + 5e-3}), yardstick, truth);
  EXPECT_FALSE(verdict.pass);
  EXPECT_NE(verdict.text.find("worst at [1, 1]: 4.005000 for 4.000000"), std::string::npos)
      << verdict.text;
  EXPECT_TRUE(judge(matrix({1, 2, 3, 4 + 0x1p-21}), truth, truth).pass);
  EXPECT_FALSE(judge(matrix({1, 2, 3, 4 + 0x1p-20}), truth, truth).pass);
  EXPECT_FALSE(judge(matrix({1, 2, 3, std::nan("")}), yardstick, truth).pass);
  EXPECT_TRUE(judge(matrix({1, 2, 3, 4.03}), truth, truth, {.format = Format::bf16}).pass);
}

}  // namespace
}  // namespace lockstep
