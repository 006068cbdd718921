// The yardstick and what it stands on: storage formats, test data, differences.
#include "reference/tensors/yardstick.hpp"

#include <gtest/gtest.h>

#include "properties/support/accuracy_log.hpp"
#include "reference/tensors/grid.hpp"

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

// Every format at both ends: its smallest number and half of it, its largest and what is beyond.
TEST(Formats, haveTheirEnds) {
  const double infinity = std::numeric_limits<double>::infinity();
  struct End {
    Format format;
    double smallest, largest, beyond;
  };
  for (const auto& [format, smallest, largest, beyond] :
       {End{Format::float32, 0x1p-149, 0x1.fffffep127, infinity},
        End{Format::bf16, 0x1p-133, 0x1.fep127, infinity},
        End{Format::fp16, 0x1p-24, 65504, infinity}, End{Format::e4m3, 0x1p-9, 448, 448},
        End{Format::e4m3fnuz, 0x1p-10, 240, 240}, End{Format::int8, 1, 127, 127},
        End{Format::int16, 1, 32767, 32767}}) {
    EXPECT_EQ(rounded(smallest, format), smallest);
    EXPECT_EQ(rounded(3 * smallest, format), 3 * smallest);
    EXPECT_EQ(rounded(smallest / 2, format), 0);
    EXPECT_EQ(rounded(1.5 * smallest, format), 2 * smallest);
    EXPECT_EQ(rounded(largest, format), largest);
    EXPECT_EQ(rounded(-largest, format), -largest);
    EXPECT_EQ(rounded(largest * 1.1, format), beyond);
    EXPECT_EQ(rounded(-infinity, format), -beyond);
    EXPECT_EQ(unit_in_last_place(0, format), smallest);
    EXPECT_EQ(unit_in_last_place(infinity, format), smallest);
    EXPECT_EQ(unit_in_last_place(largest, format),
              largest - rounded(largest * (1 - 1e-9) - unit_in_last_place(largest, format) * 0.9,
                                format));
  }
  EXPECT_EQ(unit_in_last_place(1, Format::bf16), 0x1p-7);
  EXPECT_EQ(unit_in_last_place(1, Format::exact), 0x1p-52);
  EXPECT_EQ(unit_in_last_place(0, Format::exact), 0x1p-1074);
  EXPECT_EQ(unit_in_last_place(126, Format::int8), 1);
  EXPECT_EQ(rounded(2.5, Format::int8), 2) << "a tie, to even";
  EXPECT_FALSE(std::signbit(rounded(-0.25, Format::int8)));
  EXPECT_EQ(rounded(std::numeric_limits<double>::max(), Format::exact),
            std::numeric_limits<double>::max());
  Matrix<double> m(1, 2);
  m << 1 + 1.0 / 256, 3;
  EXPECT_EQ(rounded_each(m, Format::exact), m);
  EXPECT_EQ(rounded_each(m, Format::bf16)(0, 0), 1);
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
  std::ranges::copy(values, array.begin());
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
  EXPECT_EQ(difference(matrix({infinity, 1, 1, 1}), matrix({1, 1, 1, infinity})).misplaced, 2);
  EXPECT_EQ(difference(matrix({nan, 1, 1, 1}), matrix({1, 1, 1, 1})).relative(), infinity);
  EXPECT_EQ(difference(matrix({nan, 1, 1, 1}), matrix({nan, 1, 1, 1})).relative(), 0);
}

// A kernel may be four times as far from the truth as float is, and not five times; and one unit in
// the last place of the largest is always allowed.
TEST(Yardstick, measuresByTheReferenceInFloat) {
  const auto truth = matrix({1, 2, 3, 4}), yardstick = matrix({1, 2, 3, 4 + 1e-3});
  EXPECT_TRUE(judge(matrix({1, 2, 3, 4 + 3.9e-3}), yardstick, truth).pass);
  const Verdict verdict = judge(matrix({1, 2, 3, 4 + 5e-3}), yardstick, truth);
  EXPECT_FALSE(verdict.pass);
  EXPECT_NE(verdict.text.find("worst at [1, 1]: 4.005000 for 4.000000"), std::string::npos)
      << verdict.text;
  EXPECT_TRUE(judge(matrix({1, 2, 3, 4 + 0x1p-21}), truth, truth).pass);
  EXPECT_FALSE(judge(matrix({1, 2, 3, 4 + 0x1p-19}), truth, truth).pass);
  EXPECT_FALSE(judge(matrix({1, 2, 3, std::nan("")}), yardstick, truth).pass);
  EXPECT_TRUE(judge(matrix({1, 2, 3, 4 + 0x1p-6}), truth, truth, {.format = Format::bf16}).pass);
  EXPECT_FALSE(judge(matrix({1, 2, 3, 4 + 0x1p-4}), truth, truth, {.format = Format::bf16}).pass);
}

// The sentence of a failure, whole, and the numbers of an evidence.
TEST(Yardstick, saysWhatIsWrong) {
  const auto truth = matrix({1, -2, 2, 4}), yardstick = matrix({1, -2, 2, 4.5});
  const Verdict verdict = judge(matrix({1, -2, 2, 7}), yardstick, truth, {.format = Format::bf16});
  EXPECT_EQ(
      verdict.text,
      "worst at [1, 1]: 7.000000 for 4.000000 (96.000000 ulp); relative Frobenius error of its "
      "row of 4 elements 6.000e-01, at most 3.930e-01 allowed; 1 of 1 rows beyond their bounds");
  EXPECT_FALSE(verdict.pass);
  EXPECT_DOUBLE_EQ(verdict.error, 0.6);
  // A unit of 4 in bf16 is 2^-5: the yardstick is off by 0.5, of which storing costs half a unit.
  const double cost = std::sqrt(0x1p-16 + 2 * 0x1p-14 + 0x1p-12);
  EXPECT_DOUBLE_EQ(verdict.bound, (cost + 4 * (0.5 - 0x1p-6) + 2 * 0x1p-8) / 5);
  EXPECT_DOUBLE_EQ(verdict.share, verdict.error / verdict.bound);
  const Verdict element = judge(matrix({1.5, -2, 2, 4}), truth, truth);
  EXPECT_EQ(element.text.substr(element.text.find("; ")),
            "; relative to the largest of its row of 4 elements 1.250e-01, at most 1.490e-07 "
            "allowed; 1 of 1 rows beyond their bounds");
  EXPECT_EQ(judge(matrix({std::nan(""), -2, 2, 4}), truth, truth).text,
            "worst at [0, 0]: nan for 1.000000 (nan ulp); 1 infinities or NaN misplaced");
  const Difference found = difference(matrix({std::nan(""), -2, 2, 4}), truth);
  EXPECT_EQ(found.text(Format::bf16),
            "worst at [0, 0]: nan for 1.000000 (nan ulp); relative Frobenius error inf; 1 "
            "infinities or NaN misplaced");
  EXPECT_DOUBLE_EQ(found.expected_norm, 5);
  EXPECT_EQ(found.expected_largest, 4);
  EXPECT_EQ(found.count, 4);
  EXPECT_DOUBLE_EQ(difference(matrix({1, -2, 2, 9}), truth).relative(), 1);
  EXPECT_EQ(difference(matrix({1, 3, 3, 4}), matrix({1, 2, 2, 4})).worst_index, "[0, 1]")
      << "the first of the worst";
}

// No single element may be far off, and neither may all be a little.
TEST(Yardstick, boundsTheWhole) {
  const auto truth = matrix({1, 2, 3, 4}), yardstick = matrix({1, 2, 3, 4 + 1e-3});
  EXPECT_FALSE(judge(matrix({1 + 3e-3, 2 + 3e-3, 3 + 3e-3, 4 + 3e-3}), yardstick, truth).pass);
  EXPECT_TRUE(judge(matrix({1 + 1e-3, 2 + 1e-3, 3 + 1e-3, 4 + 1e-3}), yardstick, truth).pass);
  const Array<double, 2> zeros(Shape<2>{2, 2}, 0.0);
  const Verdict nothing = judge(zeros, zeros, zeros);
  EXPECT_TRUE(nothing.pass);
  EXPECT_EQ(nothing.error, 0);
  EXPECT_GT(nothing.bound, 0);
  EXPECT_FALSE(judge(matrix({1, 0, 0, 0}), zeros, zeros).pass);
  const auto small = matrix({0.25, 0, 0, 0});
  EXPECT_EQ(difference(matrix({0.5, 0, 0, 0}), small).relative(), 1);
  EXPECT_EQ(judge(matrix({0.5, 0, 0, 0}), small, small).error, 1);
  EXPECT_EQ(Difference{}.relative(), 0);
  const Array<double, 2> empty(Shape<2>{0, 4});
  EXPECT_TRUE(judge(empty, empty, empty).pass);
}

/// A tensor [6, 64] whose rows have magnitudes from 1 down to 1/4096 and whose elements vary within
/// a row by as much, stored in `format`.
struct Stored {
  explicit Stored(Format in) : format(in), truth(on_grid<double>(Shape<2>{6, 64}, {.seed = 5})) {
    for (std::int64_t r = 0; r < 6; ++r)
      for (std::int64_t c = 0; c < 64; ++c)
        truth(r, c) = std::ldexp(truth(r, c) / 3, -2 * static_cast<int>(r) - (c % 4 == 0 ? 3 : 0));
    yardstick = result([](double x, std::int64_t, std::int64_t) { return x; });
  }
  /// change(x, row, column) of every element, stored.
  template <class Change>
  Array<double, 2> result(Change change) const {
    Array<double, 2> stored = truth;
    for (std::int64_t r = 0; r < 6; ++r)
      for (std::int64_t c = 0; c < 64; ++c)
        stored(r, c) = rounded(change(truth(r, c), r, c), format);
    return stored;
  }
  template <class Change>
  bool passes(Change change) const {
    return judge(result(change), yardstick, truth, {.format = format}).pass;
  }
  Format format;
  Array<double, 2> truth, yardstick;
};

// In 16 bits a unit of the tensor's largest entry hides a kernel that gets every small row, every
// small entry of a row or the scale of all wrong. What rounding alone and float's arithmetic cost
// is allowed.
TEST(Yardstick, holdsSmallRowsAndSmallEntriesIn16Bits) {
  for (const Format format : {Format::bf16, Format::fp16}) {
    const Stored s(format);
    EXPECT_TRUE(s.passes([](double x, std::int64_t, std::int64_t) { return x; }));
    EXPECT_TRUE(s.passes([](double x, std::int64_t, std::int64_t c) {
      return x * (1 + (c % 2 ? 0x1p-20 : -0x1p-20));
    }));
    EXPECT_FALSE(
        s.passes([](double x, std::int64_t r, std::int64_t) { return r == 5 ? 1.1 * x : x; }));
    EXPECT_FALSE(
        s.passes([](double x, std::int64_t, std::int64_t c) { return c % 4 == 0 ? 1.1 * x : x; }));
    EXPECT_FALSE(s.passes([](double x, std::int64_t, std::int64_t) { return 1.01 * x; }));
    EXPECT_FALSE(s.passes([](double x, std::int64_t, std::int64_t) { return 0.99 * x; }));
  }
}

// One row's rounding errors may cancel by chance in the yardstick: it may be as far off as the rows
// beside it, and no further.
TEST(Yardstick, aRowIsNotHeldToTheLuckOfTheYardstick) {
  Array<double, 2> truth(Shape<2>{100, 64}, 1.0), yardstick(truth.shape(), 1.0);
  for (std::int64_t r = 1; r < 100; ++r)
    for (std::int64_t c = 0; c < 64; ++c) yardstick(r, c) = 1 + 0x1p-20;
  Array<double, 2> result = truth;
  result(0, 5) = 1 + 0x1p-18;
  EXPECT_TRUE(judge(result, yardstick, truth).pass);
  result(0, 5) = 1 + 0x1p-17;
  EXPECT_FALSE(judge(result, yardstick, truth).pass);
}

// Of each case the evidence keeps the verdict that came closest to its bound, not the one that was
// furthest from the truth.
TEST(Yardstick, theLogKeepsTheLargestErrorOverItsBound) {
  testing_support::AccuracyLog log;
  log.add("product", "out", {.pass = true, .error = 0.5, .bound = 1, .share = 0.5, .text = "far"});
  log.add("product", "out",
          {.pass = true, .error = 0.01, .bound = 0.0125, .share = 0.8, .text = "close"});
  log.add("product", "out", {.pass = true, .error = 0.1, .bound = 1, .share = 0.1, .text = "not"});
  const auto entry = log.entries()["product"][0];
  EXPECT_EQ(entry["worst"], "close");
  EXPECT_EQ(entry["cases"], 3);
  EXPECT_EQ(entry["error"], 0.01);
  EXPECT_EQ(entry["yardstick"], 0.0125);
}

}  // namespace
}  // namespace lockstep
