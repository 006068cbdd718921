// The kernel of mla_decode against the reference of the same name.
#include "kernels/attention/mla_decode.hpp"

#include <gmock/gmock.h>

#include <cstring>

#include "properties/kernels/attention/repeated_decode.hpp"
#include "properties/support/gpu.hpp"
#include "reference/attention/latent_token.hpp"
#include "reference/attention/mla_attention.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::E4m3;
using kernels::Fp16;

constexpr const char* kOperation = "mla_decode";
constexpr std::int64_t kWidth = 576, kValues = 512;
constexpr float kScale = 0.135f;   // DeepSeek-V3's (128 + 64)^-0.5 1.874
constexpr float kKvScale = 0.21f;  // of caches of numbers in e4m3

/// Types of queries and cache.
template <class T_, class C_ = T_>
struct Types {
  using T = T_;
  using C = C_;
};

/// A latent as a cache of C holds it, what that stands for, and what a kernel multiplies: a number
/// times its token's scale, rounded to float16 once.
template <class C>
struct Latent {
  std::vector<C> stored;
  std::vector<double> value, multiplied;

  /// Columns are as large as they come, but in tokens of 656 bytes, whose groups of 128 have scales
  /// of their own, of `kind`.
  Latent(const std::vector<double>& x, reference::TileScale kind) : value(x), multiplied(x) {
    if constexpr (std::is_same_v<C, std::uint8_t>) {
      Vector<double> wide(kWidth);
      for (std::int64_t i = 0; i < kWidth; ++i)
        wide(i) = x[static_cast<std::size_t>(i)] * std::array{1.0, 0.01, 3.0, 0.3, 1.0}[i / 128];
      const reference::LatentToken token = reference::packed_token<double>(wide, kind);
      stored.assign(token.begin(), token.end());
      wide = reference::unpacked_token<double>(token);
      std::copy(wide.begin(), wide.end(), value.begin());
      multiplied = value;
      for (std::size_t i = 0; i < kValues; ++i) multiplied[i] = rounded(value[i], Format::fp16);
    } else {
      for (std::size_t i = 0; i < x.size(); ++i) {
        stored.push_back(kernels::from_host<C>(x[i] / (std::is_same_v<C, E4m3> ? 0.2 : 1.0)));
        if (std::is_same_v<C, E4m3>)
          value[i] = multiplied[i] = double{kernels::to_host(stored.back())} * double{kKvScale};
      }
    }
  }
};

/// Of tokens that a cache of 656-byte tokens holds: tiles of 64 have powers of two, others, or both
/// in turn, and so have requests that are shorter.
reference::TileScale scales_of(std::int64_t request, std::int64_t token) {
  const std::int64_t tile = token / 64 + request;
  const bool exact = tile % 3 == 1 || (tile % 3 == 2 && token % 2 == 1);
  return exact ? reference::TileScale::exact : reference::TileScale::power_of_two;
}

struct Question {
  Sizes lengths;
  std::int64_t heads = 16;
  std::int64_t q_len = 1;
  std::int64_t page = 64;
  bool causal = true;
  int parts = 0;
  double spread = 1;     ///< of the queries: with large ones a few keys have all the weight
  bool of_keys = false;  ///< queries are keys, times `spread`
};

/// Requests' latents in pages of a pool, handed out from behind; everything else is NaN, and the
/// block table's tail is wild.
template <class C>
struct Inputs {
  Inputs(const Question& question, std::uint64_t seed)
      : lengths(ints(question.lengths)),
        q(on_grid<double>(Shape<4>{lengths.size(), question.q_len, question.heads, kWidth},
                          {.seed = seed, .stream = 1})) {
    for (double& x : q) x *= question.spread;
    const std::int64_t page = question.page;
    std::int64_t pages = 3, widest = 1;
    for (const std::int64_t length : question.lengths) {
      pages += (length + page - 1) / page;
      widest = std::max(widest, (length + page - 1) / page + 1);
    }
    cache = multiplied = Array<double, 3>(Shape<3>{pages, page, kWidth}, std::nan(""));
    stored_shape = {pages, page, std::is_same_v<C, std::uint8_t> ? reference::kTokenBytes : kWidth};
    stored.resize(static_cast<std::size_t>(element_count(stored_shape)));
    std::memset(stored.data(), 0xff, stored.size() * sizeof(C));  // NaN
    table = Array<std::int32_t, 2>(Shape<2>{lengths.size(), widest}, 2147480000);
    std::int64_t next = pages - 2;
    for (std::int64_t b = 0; b < lengths.size(); ++b)
      for (std::int64_t l = 0; l < lengths(b); ++l) {
        if (l % page == 0) table(b, l / page) = static_cast<std::int32_t>(next--);
        const Grid grid{.seed = seed, .stream = static_cast<std::uint64_t>(100 + b * 100000 + l)};
        const std::int64_t place = table(b, l / page) * page + l % page;
        std::vector<double> x(kWidth);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = grid(i);
        const Latent<C> latent(x, scales_of(b, l));
        std::copy(latent.value.begin(), latent.value.end(), cache.data() + place * kWidth);
        std::copy(latent.multiplied.begin(), latent.multiplied.end(),
                  multiplied.data() + place * kWidth);
        std::copy(latent.stored.begin(), latent.stored.end(),
                  stored.begin() + place * stored_shape[2]);
      }
    if (question.of_keys) take_keys(question);
  }
  /// Query and head number n of a request becomes its key 37 n.
  void take_keys(const Question& question) {
    for (std::int64_t b = 0; b < lengths.size(); ++b)
      for (std::int64_t n = 0; n < question.q_len * question.heads; ++n) {
        const std::int64_t l = 37 * n % lengths(b), page = question.page;
        const auto key = at(std::as_const(cache).view(), table(b, l / page), l % page);
        for (std::int64_t i = 0; i < kWidth; ++i)
          q(b, n / question.heads, n % question.heads, i) =
              rounded(key(i) * question.spread, Format::bf16);
      }
  }
  Array<std::int32_t, 1> lengths;
  Array<double, 4> q;
  Array<double, 3> cache, multiplied;  ///< of `stored`: Latent
  std::vector<C> stored;
  Shape<3> stored_shape{};
  Array<std::int32_t, 2> table;
};

template <class S>
struct Answer {
  Array<S, 4> out;
  Array<S, 3> lse;
};

template <class S, class C>
reference::MlaDecodeInputs<S> reference_inputs(const Array<S, 4>& q, const Array<S, 3>& cache,
                                               const Inputs<C>& in, bool causal) {
  return {.q = q.view(),
          .cache = cache.view(),
          .block_table = in.table.view(),
          .seq_lens = in.lengths.view(),
          .softmax_scale = kScale,
          .causal = causal};
}
template <class S, class C>
Answer<S> empty_answer(const Inputs<C>& in) {
  const std::int64_t B = in.q.extent(0), q_len = in.q.extent(1), H = in.q.extent(2);
  return {Array<S, 4>(Shape<4>{B, q_len, H, kValues}), Array<S, 3>(Shape<3>{B, H, q_len})};
}

template <class C>
Answer<double> truth_of(const Inputs<C>& in, bool causal) {
  Answer<double> answer = empty_answer<double>(in);
  reference::mla_decode<double>(reference_inputs(in.q, in.cache, in, causal), answer.out,
                                answer.lse);
  return answer;
}

/// In float, with probabilities and outputs rounded as the kernel stores them.
template <class C>
Answer<float> yardstick_of(const Inputs<C>& in, bool causal, Format format) {
  const auto q = cast<float>(in.q);
  const auto cache = cast<float>(in.multiplied);
  const auto inputs = reference_inputs(q, cache, in, causal);
  Answer<float> answer = empty_answer<float>(in);
  for (std::int64_t b = 0; b < q.extent(0); ++b) {
    const Matrix<float> K = reference::cached_latents(inputs, b);
    for (std::int64_t i = 0; i < q.extent(1); ++i) {
      const std::int64_t n = reference::visible_keys(i, q.extent(1), K.rows(), causal);
      for (std::int64_t h = 0; h < q.extent(2); ++h) {
        answer.lse(b, h, i) = std::numeric_limits<float>::infinity();
        mapped(at(answer.out.view(), b, i, h)).setZero();
        if (n == 0) continue;
        const Vector<float> scores = kScale * (K.topRows(n) * as_vector(at(q.view(), b, i, h)));
        const float largest = scores.maxCoeff();
        const Vector<float> weights = (scores.array() - largest).exp();
        const Vector<float> out =
            K.topLeftCorner(n, kValues).transpose() * rounded_each(weights, format) / weights.sum();
        mapped(at(answer.out.view(), b, i, h)) = rounded_each(out, format);
        answer.lse(b, h, i) = largest + std::log(weights.sum());
      }
    }
  }
  return answer;
}

template <class T, class C>
struct Device {
  explicit Device(const Inputs<C>& in)
      : q(in.q),
        cache(in.stored_shape),
        kv_scale(Array<float, 1>(Shape<1>{1}, kKvScale)),
        table(in.table),
        lengths(in.lengths),
        out(Shape<4>{in.q.extent(0), in.q.extent(1), in.q.extent(2), kValues}),
        lse(Shape<3>{in.q.extent(0), in.q.extent(2), in.q.extent(1)}),
        workspace(Shape<1>{kernels::mla_decode_workspace(arguments({}))}) {
    cache.set(in.stored);
  }

  kernels::MlaDecode<T, C> arguments(const Question& question) {
    kernels::MlaDecode<T, C> all{.q = std::as_const(q).view(),
                                 .cache = std::as_const(cache).view(),
                                 .block_table = std::as_const(table).view(),
                                 .seq_lens = std::as_const(lengths).view(),
                                 .out = out.view(),
                                 .lse = lse.view(),
                                 .softmax_scale = kScale,
                                 .causal = question.causal,
                                 .parts = question.parts};
    if (std::is_same_v<C, E4m3>) all.kv_scale = std::as_const(kv_scale).view();
    return all;
  }
  void run(const Question& question, cudaStream_t stream = nullptr) {
    kernels::MlaDecode<T, C> in = arguments(question);
    in.workspace = workspace.view();
    kernels::mla_decode(in, stream);
  }

  DeviceTensor<T, 4> q;
  DeviceTensor<C, 3> cache;
  DeviceTensor<float, 1> kv_scale;
  DeviceTensor<std::int32_t, 2> table;
  DeviceTensor<std::int32_t, 1> lengths;
  DeviceTensor<T, 4> out;
  DeviceTensor<float, 3> lse;
  DeviceTensor<unsigned char, 1> workspace;
};

template <class Form>
void expect_agreement(const Question& question, const Inputs<typename Form::C>& in) {
  SCOPED_TRACE("H " + std::to_string(question.heads) + ", q_len " + std::to_string(question.q_len) +
               ", page " + std::to_string(question.page) + ", parts " +
               std::to_string(question.parts) + ", lengths " +
               ::testing::PrintToString(question.lengths));
  using T = typename Form::T;
  Device<T, typename Form::C> device(in);
  device.run(question);
  finish();
  const Answer<double> truth = truth_of(in, question.causal);
  const Answer<float> yardstick = yardstick_of(in, question.causal, kernels::format_of<T>());
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  EXPECT_TRUE(within_yardstick(kOperation, "lse", device.lse, yardstick.lse, truth.lse));
}
template <class Form>
void expect_agreement(const Question& question, std::uint64_t seed) {
  expect_agreement<Form>(question, Inputs<typename Form::C>(question, seed));
}

template <class Form>
class MlaDecodeGpu : public GpuTest {
 protected:
  using In = Inputs<typename Form::C>;
  using On = Device<typename Form::T, typename Form::C>;
};
using Forms = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Types<Fp16>,
#endif
    Types<Bf16>, Types<Bf16, E4m3>, Types<Bf16, std::uint8_t>>;
TYPED_TEST_SUITE(MlaDecodeGpu, Forms);

// Blocks of 64 rows that are full, or hold one row, several queries, parts of a query.
TYPED_TEST(MlaDecodeGpu, anyNumberOfHeadsAndQueries) {
  std::uint64_t seed = 0;
  for (const std::int64_t heads : {1, 3, 9, 16, 63, 64, 126, 128})
    for (const std::int64_t q_len : {1, 2, 4})
      expect_agreement<TypeParam>(
          {.lengths = {20, 140, 1}, .heads = heads, .q_len = q_len, .causal = seed % 3 != 0},
          ++seed);
}

TYPED_TEST(MlaDecodeGpu, anyLength) {
  for (const std::int64_t length : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 320, 700})
    expect_agreement<TypeParam>({.lengths = {length, 3, 257 - length % 257}, .q_len = 2},
                                static_cast<std::uint64_t>(length));
}

// The same of small pages, which lanes copy, for blocks of rows that share keys too.
TYPED_TEST(MlaDecodeGpu, anyLengthOfSmallPages) {
  for (const std::int64_t length : {1, 15, 63, 64, 65, 129, 700})
    for (const std::int64_t heads : {5, 70})
      expect_agreement<TypeParam>({.lengths = {length, 0, 3, 257 - length % 257},
                                   .heads = heads,
                                   .q_len = 2,
                                   .page = length % 2 == 0 ? 8 : 1},
                                  static_cast<std::uint64_t>(length));
}

// Contexts without a key, and queries that the causal border leaves without one.
TYPED_TEST(MlaDecodeGpu, noKeyGivesZeroAndInfinity) {
  expect_agreement<TypeParam>({.lengths = {0, 0}}, 1);
  expect_agreement<TypeParam>({.lengths = {0, 300, 0, 0, 64, 0}, .heads = 128}, 2);
  expect_agreement<TypeParam>({.lengths = {2, 0, 1, 66}, .q_len = 4}, 3);
  expect_agreement<TypeParam>({.lengths = {2, 0, 1, 66}, .q_len = 4, .causal = false}, 4);
}

// One part, parts of several requests, parts within one, more parts than tiles.
TYPED_TEST(MlaDecodeGpu, anyNumberOfParts) {
  for (const int parts : {1, 2, 3, 5, 7, 16, 66, 0}) {
    expect_agreement<TypeParam>({.lengths = {20, 900, 140, 1, 333, 0}, .parts = parts}, 1);
    expect_agreement<TypeParam>({.lengths = {800}, .heads = 80, .parts = parts}, 2);
  }
  // The next block of rows has rows of one warp, of two, of three.
  for (const std::int64_t heads : {65, 90, 100})
    expect_agreement<TypeParam>({.lengths = {800, 64}, .heads = heads}, 3);
  expect_agreement<TypeParam>({.lengths = Sizes(40, 130), .parts = 9}, 4);
  expect_agreement<TypeParam>({.lengths = {2000, 1, 1, 1}, .heads = 5}, 5);
  // Pieces of one tile, more than merging holds at a time, for all its threads and for two sets.
  for (const int tiles : {19, 45})
    expect_agreement<TypeParam>({.lengths = {64 * tiles}, .heads = 64, .parts = tiles}, 6);
}

// From keys that count alike to one that has all the weight: outputs are rescaled, or are not.
TYPED_TEST(MlaDecodeGpu, anySpreadOfScores) {
  for (const double spread : {1.0 / 64, 4.0, 32.0})
    for (const int parts : {1, 0})
      expect_agreement<TypeParam>({.lengths = {500, 90}, .parts = parts, .spread = spread}, 7);
}

// Scores of 250 to 1,000, to which all columns add up, so that what numbers of a key have in common
// is not averaged away: lse is within 2e-5 of that of the numbers that are multiplied. A kernel
// that rounds the scales of 656-byte tokens to float16 is off by 2e-4.
TYPED_TEST(MlaDecodeGpu, queriesThatAreKeys) {
  for (const std::int64_t page : {16, 64})
    for (const double spread : {4.0, 16.0}) {
      const Question question{.lengths = {500, 90, 64},
                              .page = page,
                              .causal = false,
                              .spread = spread,
                              .of_keys = true};
      typename TestFixture::In in(question, 8);
      expect_agreement<TypeParam>(question, in);
      typename TestFixture::On device(in);
      device.run(question);
      finish();
      in.cache = in.multiplied;
      const Array<double, 3> expected = truth_of(in, question.causal).lse;
      const Array<float, 3> lse = device.lse.host();
      for (std::int64_t i = 0; i < expected.size(); ++i)
        EXPECT_NEAR(lse.data()[i], expected.data()[i], 2e-5 * std::abs(expected.data()[i])) << i;
    }
}

// The output of a request depends on its keys alone: not on the size and order of pages.
TYPED_TEST(MlaDecodeGpu, pagesDoNotMatter) {
  for (const std::int64_t heads : {20, 70}) {
    Question question{.lengths = {300, 65, 1000, 64}, .heads = heads, .q_len = 2};
    const typename TestFixture::In whole(question, 5);
    typename TestFixture::On expected(whole);
    expected.run(question);
    finish();
    for (const std::int64_t page : {1, 2, 4, 8, 16, 32, 128}) {
      question.page = page;
      typename TestFixture::On device(typename TestFixture::In(question, 5));
      device.run(question);
      finish();
      EXPECT_TRUE(same_bits(device.out, expected.out)) << page;
      EXPECT_TRUE(same_bits(device.lse, expected.lse)) << page;
    }
  }
}

// An entry before a request's end that names no page stands for keys of zeros.
TYPED_TEST(MlaDecodeGpu, noPageIsZeros) {
  for (const std::int64_t page : {1, 16, 64, 128})
    for (const std::int64_t heads : {9, 80}) {
      const Question question{.lengths = {400, 90}, .heads = heads, .page = page};
      typename TestFixture::In zeros(question, 11);
      typename TestFixture::In none = zeros;
      for (const std::int64_t block : {0, 2}) {
        const std::int64_t token = zeros.table(0, block) * page;
        const std::int64_t token_size = zeros.stored_shape[2];
        std::memset(zeros.stored.data() + token * token_size, 0,
                    static_cast<std::size_t>(page * token_size) * sizeof(zeros.stored[0]));
        std::fill_n(zeros.cache.data() + token * kWidth, page * kWidth, 0.0);
        std::fill_n(zeros.multiplied.data() + token * kWidth, page * kWidth, 0.0);
        none.table(0, block) = block == 0 ? -3 : 2147480000;
      }
      SCOPED_TRACE(page);
      expect_agreement<TypeParam>(question, zeros);
      typename TestFixture::On expected(zeros), device(none);
      expected.run(question);
      device.run(question);
      finish();
      EXPECT_TRUE(same_bits(device.out, expected.out));
      EXPECT_TRUE(same_bits(device.lse, expected.lse));
    }
}

TYPED_TEST(MlaDecodeGpu, everyLaunchGivesTheSameBits) {
  expect_the_same_bits_of_every_launch<Question, typename TestFixture::In,
                                       typename TestFixture::On>();
}

TYPED_TEST(MlaDecodeGpu, aCapturedLaunchServesOtherLengths) {
  expect_a_captured_launch_to_serve_other_lengths<Question, typename TestFixture::In,
                                                  typename TestFixture::On>();
}

TEST(MlaDecodeArguments, areRefusedByName) {
  const auto complaint = [&](auto change) {
    kernels::MlaDecode<Bf16> in{.q = unread<const Bf16, 4>({2, 1, 16, kWidth}),
                                .cache = unread<const Bf16, 3>({5, 64, kWidth}),
                                .block_table = unread<const std::int32_t, 2>({2, 3}),
                                .seq_lens = unread<const std::int32_t, 1>({2}),
                                .out = unread<Bf16, 4>({2, 1, 16, kValues}),
                                .lse = unread<float, 3>({2, 16, 1}),
                                .parts = 1};
    change(in);
    return complaint_of([&] { kernels::mla_decode<Bf16>(in, nullptr); });
  };
  using In = kernels::MlaDecode<Bf16>;
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint([](In& in) {
                in.q = unread<const Bf16, 4>({2, 1, 16, 512});
              }),
              HasSubstr("q is expected to be [B, q_len, H, 576] = [2, 1, 16, 576]; got [2, 1, 16, "
                        "512]"));
  EXPECT_THAT(complaint([](In& in) {
                in.cache = unread<const Bf16, 3>({5, 48, kWidth});
              }),
              HasSubstr("cache is expected to be [pages, page, width] with pages of a divisor or a "
                        "multiple of 64 tokens"));
  EXPECT_THAT(complaint([](In& in) { in.seq_lens = unread<const std::int32_t, 1>({3}); }),
              HasSubstr("seq_lens is expected to be [B] = [2]; got [3]"));
  EXPECT_THAT(complaint([](In& in) {
                in.lse = unread<float, 3>({2, 1, 16});
              }),
              HasSubstr("lse is expected to be [B, H, q_len] = [2, 16, 1]"));
  EXPECT_THAT(complaint([](In& in) {
                // NOLINTNEXTLINE(bugprone-implicit-widening-of-multiplication-result): 9232
                in.q = unread<const Bf16, 4>({2, 1, 16, kWidth}, {16 * 577, 16 * 577, 577, 1});
              }),
              HasSubstr("q is expected to be with the rows of a request evenly apart"));
  EXPECT_THAT(complaint([](In& in) { in.lane = 128; }), HasSubstr("lane is expected to be below"));
  EXPECT_THAT(complaint([](In& in) { in.kv_scale = unread<const float, 1>({1}); }),
              HasSubstr("kv_scale is expected to be absent without a cache of numbers in e4m3"));
}

}  // namespace
}  // namespace lockstep
