// The kernel of mla_decode with products in e4m3 against the reference of mla_decode. The yardstick
// rounds what products take: queries to e4m3, p to sums of two, and sums as tensor cores do.
#include "kernels/attention/mla_decode_e4m3.hpp"

#include <gmock/gmock.h>

#include <cstring>

#include "properties/kernels/attention/repeated_decode.hpp"
#include "properties/support/gpu.hpp"
#include "reference/attention/mla_attention.hpp"
#include "reference/tensors/e4m3_products.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::E4m3;

constexpr const char* kOperation = "mla_decode_e4m3";
constexpr std::int64_t kWidth = 576, kValues = 512;
constexpr float kScale = 0.135f;  // DeepSeek-V3's (128 + 64)^-0.5 1.874
constexpr float kKvScale = 0.21f;

struct Question {
  Sizes lengths;
  std::int64_t heads = 16;
  std::int64_t q_len = 1;
  std::int64_t page = 64;
  bool causal = true;
  int parts = 0;
  double spread = 1;     ///< of the queries: with large ones a few keys have all the weight
  bool in_e4m3 = false;  ///< queries are numbers of e4m3, times 1/4
};

/// Requests' latents in pages of a pool, handed out from behind; everything else is NaN, and the
/// block table's tail is wild.
struct Inputs {
  Inputs(const Question& question, std::uint64_t seed)
      : lengths(ints(question.lengths)),
        q(on_grid<double>(Shape<4>{lengths.size(), question.q_len, question.heads, kWidth},
                          {.seed = seed, .stream = 1})) {
    for (double& x : q) {
      x = rounded(x * question.spread, Format::bf16);
      if (question.in_e4m3) x = rounded(4 * x, Format::e4m3) / 4;
    }
    const std::int64_t page = question.page;
    std::int64_t pages = 3, widest = 1;
    for (const std::int64_t length : question.lengths) {
      pages += (length + page - 1) / page;
      widest = std::max(widest, (length + page - 1) / page + 1);
    }
    numbers = Array<double, 3>(Shape<3>{pages, page, kWidth}, std::nan(""));
    stored.resize(static_cast<std::size_t>(numbers.size()));
    std::memset(stored.data(), 0xff, stored.size());  // NaN
    table = Array<std::int32_t, 2>(Shape<2>{lengths.size(), widest}, 2147480000);
    std::int64_t next = pages - 2;
    for (std::int64_t b = 0; b < lengths.size(); ++b)
      for (std::int64_t l = 0; l < lengths(b); ++l) {
        if (l % page == 0) table(b, l / page) = static_cast<std::int32_t>(next--);
        const Grid grid{.seed = seed, .stream = static_cast<std::uint64_t>(100 + b * 100000 + l)};
        const std::int64_t place = table(b, l / page) * page + l % page;
        for (std::int64_t i = 0; i < kWidth; ++i) {
          const E4m3 number = kernels::from_host<E4m3>(grid(static_cast<std::size_t>(i)) / 0.2);
          stored[static_cast<std::size_t>(place * kWidth + i)] = number;
          numbers.data()[place * kWidth + i] = double{kernels::to_host(number)};
        }
      }
  }
  Array<std::int32_t, 1> lengths;
  Array<double, 4> q;
  Array<double, 3> numbers;  ///< of the cache: values divided by kKvScale
  std::vector<E4m3> stored;
  Array<std::int32_t, 2> table;
};

reference::MlaDecodeInputs<double> reference_inputs(const Inputs& in, bool causal) {
  return {.q = in.q.view(),
          .cache = in.numbers.view(),
          .block_table = in.table.view(),
          .seq_lens = in.lengths.view(),
          .softmax_scale = kScale,
          .causal = causal,
          .kv_scale = kKvScale};
}

template <class S>
struct Answer {
  explicit Answer(const Inputs& in)
      : out(Shape<4>{in.q.extent(0), in.q.extent(1), in.q.extent(2), kValues}),
        lse(Shape<3>{in.q.extent(0), in.q.extent(2), in.q.extent(1)}) {}
  Array<S, 4> out;
  Array<S, 3> lse;
};

Answer<double> truth_of(const Inputs& in, bool causal) {
  Answer<double> answer(in);
  reference::mla_decode<double>(reference_inputs(in, causal), answer.out, answer.lse);
  return answer;
}

/// One row's output and lse over the numbers K of the keys that it sees.
std::pair<Vector<double>, double> attended(const Vector<double>& q, const Matrix<double>& K) {
  const double power = power_for_e4m3(q);
  const Vector<double> numbers = rounded_each(q * power, Format::e4m3);
  Vector<double> scores(K.rows());
  for (std::int64_t j = 0; j < K.rows(); ++j)
    scores(j) = product_in_e4m3(numbers, K.row(j).transpose()) / power * double{kScale} * kKvScale;
  const double most = scores.maxCoeff();
  const Vector<double> p = (scores.array() - most).exp() * 32;
  const Vector<double> nearest = rounded_each(p, Format::e4m3),
                       rest = rounded_each(p - nearest, Format::e4m3);
  Vector<double> out(kValues);
  for (std::int64_t i = 0; i < kValues; ++i) {
    const Vector<double> v = K.col(i);
    out(i) = (product_in_e4m3(nearest, v) + product_in_e4m3(rest, v)) / p.sum() * kKvScale;
  }
  return {out, most + std::log(p.sum() / 32)};
}

Answer<float> yardstick_of(const Inputs& in, bool causal) {
  Answer<float> answer(in);
  for (std::int64_t b = 0; b < in.q.extent(0); ++b) {
    auto inputs = reference_inputs(in, causal);
    inputs.kv_scale = 1;
    const Matrix<double> K = reference::cached_latents(inputs, b);
    for (std::int64_t i = 0; i < in.q.extent(1); ++i) {
      const std::int64_t n = reference::visible_keys(i, in.q.extent(1), K.rows(), causal);
      for (std::int64_t h = 0; h < in.q.extent(2); ++h) {
        answer.lse(b, h, i) = std::numeric_limits<float>::infinity();
        mapped(at(answer.out.view(), b, i, h)).setZero();
        if (n == 0) continue;
        const auto [out, lse] = attended(as_vector(at(in.q.view(), b, i, h)), K.topRows(n));
        mapped(at(answer.out.view(), b, i, h)) = rounded_each(out.cast<float>(), Format::bf16);
        answer.lse(b, h, i) = static_cast<float>(lse);
      }
    }
  }
  return answer;
}

struct Device {
  explicit Device(const Inputs& in)
      : q(in.q),
        cache(shape_of(in.numbers.view())),
        kv_scale(Array<float, 1>(Shape<1>{1}, kKvScale)),
        table(in.table),
        lengths(in.lengths),
        out(Shape<4>{in.q.extent(0), in.q.extent(1), in.q.extent(2), kValues}),
        lse(Shape<3>{in.q.extent(0), in.q.extent(2), in.q.extent(1)}),
        workspace(Shape<1>{kernels::mla_decode_e4m3_workspace(arguments({}))}) {
    cache.set(in.stored);
  }

  kernels::MlaDecode<Bf16, E4m3> arguments(const Question& question) {
    return {.q = std::as_const(q).view(),
            .cache = std::as_const(cache).view(),
            .block_table = std::as_const(table).view(),
            .seq_lens = std::as_const(lengths).view(),
            .out = out.view(),
            .lse = lse.view(),
            .softmax_scale = kScale,
            .causal = question.causal,
            .parts = question.parts,
            .kv_scale = std::as_const(kv_scale).view()};
  }
  void run(const Question& question, cudaStream_t stream = nullptr) {
    kernels::MlaDecode<Bf16, E4m3> in = arguments(question);
    in.workspace = workspace.view();
    kernels::mla_decode_e4m3(in, stream);
  }

  DeviceTensor<Bf16, 4> q;
  DeviceTensor<E4m3, 3> cache;
  DeviceTensor<float, 1> kv_scale;
  DeviceTensor<std::int32_t, 2> table;
  DeviceTensor<std::int32_t, 1> lengths;
  DeviceTensor<Bf16, 4> out;
  DeviceTensor<float, 3> lse;
  DeviceTensor<unsigned char, 1> workspace;
};

void expect_agreement(const Question& question, const Inputs& in) {
  SCOPED_TRACE("H " + std::to_string(question.heads) + ", q_len " + std::to_string(question.q_len) +
               ", page " + std::to_string(question.page) + ", parts " +
               std::to_string(question.parts) + ", lengths " +
               ::testing::PrintToString(question.lengths));
  Device device(in);
  device.run(question);
  finish();
  const Answer<double> truth = truth_of(in, question.causal);
  const Answer<float> yardstick = yardstick_of(in, question.causal);
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  EXPECT_TRUE(within_yardstick(kOperation, "lse", device.lse, yardstick.lse, truth.lse));
}
void expect_agreement(const Question& question, std::uint64_t seed) {
  expect_agreement(question, Inputs(question, seed));
}

class MlaDecodeE4m3Gpu : public GpuTest {};

// Blocks of 64 rows that are full, or hold one row, several queries, parts of a query; up to 16
// rows another kernel runs.
TEST_F(MlaDecodeE4m3Gpu, anyNumberOfHeadsAndQueries) {
  std::uint64_t seed = 0;
  for (const std::int64_t heads : {1, 8, 9, 16, 17, 63, 64, 126})
    for (const std::int64_t q_len : {1, 3}) {
      expect_agreement({.lengths = {20, 140, 1},
                        .heads = heads,
                        .q_len = q_len,
                        .causal = seed % 3 != 0,
                        .in_e4m3 = seed % 2 == 0},
                       seed + 1);
      ++seed;
    }
}

TEST_F(MlaDecodeE4m3Gpu, anyLength) {
  for (const std::int64_t length : {1, 2, 15, 17, 31, 33, 63, 64, 65, 127, 128, 129, 700})
    for (const std::int64_t heads : {4, 20})
      expect_agreement({.lengths = {length, 3, 257 - length % 257}, .heads = heads, .q_len = 2},
                       static_cast<std::uint64_t>(length));
}

// Contexts without a key, and queries that the causal border leaves without one.
TEST_F(MlaDecodeE4m3Gpu, noKeyGivesZeroAndInfinity) {
  expect_agreement({.lengths = {0, 0}}, 1);
  expect_agreement({.lengths = {0, 300, 0, 0, 64, 0}, .heads = 128}, 2);
  expect_agreement({.lengths = {2, 0, 1, 66}, .q_len = 4}, 3);
  expect_agreement({.lengths = {2, 0, 1, 66}, .heads = 3, .q_len = 4, .causal = false}, 4);
}

// One part, parts of several requests, parts within one, more parts than tiles.
TEST_F(MlaDecodeE4m3Gpu, anyNumberOfParts) {
  for (const int parts : {1, 2, 3, 5, 7, 16, 66, 0}) {
    expect_agreement({.lengths = {20, 900, 140, 1, 333, 0}, .heads = 5, .parts = parts}, 1);
    expect_agreement({.lengths = {800}, .heads = 20, .parts = parts}, 2);
  }
  // The next block of rows has one group of 8 rows, or more.
  for (const std::int64_t heads : {65, 75, 100})
    expect_agreement({.lengths = {800, 64}, .heads = heads}, 3);
  expect_agreement({.lengths = Sizes(40, 130), .heads = 2, .parts = 9}, 4);
  expect_agreement({.lengths = {2000, 1, 1, 1}, .heads = 5}, 5);
  // Pieces of one tile, more than merging holds at a time, for all its threads and for two sets.
  for (const int tiles : {19, 45})
    for (const std::int64_t heads : {16, 64})
      expect_agreement({.lengths = {std::int64_t{64} * tiles}, .heads = heads, .parts = tiles}, 6);
}

// From keys that count alike to one that has all the weight: outputs are rescaled, or are not.
TEST_F(MlaDecodeE4m3Gpu, anySpreadOfScores) {
  for (const double spread : {1.0 / 64, 4.0, 32.0})
    for (const int parts : {1, 0})
      for (const std::int64_t heads : {16, 30})
        expect_agreement({.lengths = {500, 90}, .heads = heads, .parts = parts, .spread = spread},
                         7);
}

// The output of a request depends on its keys alone: not on the size and order of pages.
TEST_F(MlaDecodeE4m3Gpu, pagesDoNotMatter) {
  for (const std::int64_t heads : {20, 70}) {
    Question question{.lengths = {300, 65, 1000, 64}, .heads = heads, .q_len = 2};
    Device expected(Inputs(question, 5));
    expected.run(question);
    finish();
    for (const std::int64_t page : {128, 192}) {
      question.page = page;
      Device device(Inputs(question, 5));
      device.run(question);
      finish();
      EXPECT_TRUE(same_bits(device.out, expected.out)) << page;
      EXPECT_TRUE(same_bits(device.lse, expected.lse)) << page;
    }
  }
}

// An entry before a request's end that names no page stands for keys of zeros.
TEST_F(MlaDecodeE4m3Gpu, noPageIsZeros) {
  for (const std::int64_t page : {64, 128})
    for (const std::int64_t heads : {9, 80}) {
      const Question question{.lengths = {400, 90}, .heads = heads, .page = page};
      Inputs zeros(question, 11);
      Inputs none = zeros;
      for (const std::int64_t block : {0, 2}) {
        const std::int64_t token = zeros.table(0, block) * page;
        std::memset(zeros.stored.data() + token * kWidth, 0,
                    static_cast<std::size_t>(page * kWidth));
        std::fill_n(zeros.numbers.data() + token * kWidth, page * kWidth, 0.0);
        none.table(0, block) = block == 0 ? -3 : 2147480000;
      }
      SCOPED_TRACE(page);
      expect_agreement(question, zeros);
      Device expected(zeros), device(none);
      expected.run(question);
      device.run(question);
      finish();
      EXPECT_TRUE(same_bits(device.out, expected.out));
      EXPECT_TRUE(same_bits(device.lse, expected.lse));
    }
}

TEST_F(MlaDecodeE4m3Gpu, everyLaunchGivesTheSameBits) {
  expect_the_same_bits_of_every_launch<Question, Inputs, Device>();
}

TEST_F(MlaDecodeE4m3Gpu, aCapturedLaunchServesOtherLengths) {
  expect_a_captured_launch_to_serve_other_lengths<Question, Inputs, Device>();
}

TEST(MlaDecodeE4m3Arguments, areRefusedByName) {
  using In = kernels::MlaDecode<Bf16, E4m3>;
  const auto complaint = [&](auto change) {
    In in{.q = unread<const Bf16, 4>({2, 1, 16, kWidth}),
          .cache = unread<const E4m3, 3>({5, 64, kWidth}),
          .block_table = unread<const std::int32_t, 2>({2, 3}),
          .seq_lens = unread<const std::int32_t, 1>({2}),
          .out = unread<Bf16, 4>({2, 1, 16, kValues}),
          .lse = unread<float, 3>({2, 16, 1}),
          .parts = 1};
    change(in);
    return complaint_of([&] { kernels::mla_decode_e4m3(in, nullptr); });
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint([](In& in) {
                in.q = unread<const Bf16, 4>({2, 1, 16, 512});
              }),
              HasSubstr("q is expected to be [B, q_len, H, 576] = [2, 1, 16, 576]; got [2, 1, 16, "
                        "512]"));
  EXPECT_THAT(complaint([](In& in) {
                in.cache = unread<const E4m3, 3>({5, 32, kWidth});
              }),
              HasSubstr("cache is expected to be [pages, page, 576] with pages of a multiple of 64 "
                        "tokens"));
  EXPECT_THAT(complaint([](In& in) { in.seq_lens = unread<const std::int32_t, 1>({3}); }),
              HasSubstr("seq_lens is expected to be [B] = [2]; got [3]"));
  EXPECT_THAT(complaint([](In& in) { in.lane = 128; }), HasSubstr("lane is expected to be below"));
}

}  // namespace
}  // namespace lockstep
