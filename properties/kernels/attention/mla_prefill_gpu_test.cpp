// The kernel of mla_prefill against the reference: attention over packed keys; and what it is with
// the kernels beside it, chunks of a prefix merged and the absorbed form.
#include "kernels/attention/mla_prefill.hpp"

#include <gmock/gmock.h>

#include <climits>

#include "kernels/attention/merge_attention.hpp"
#include "kernels/attention/mla_decode.hpp"
#include "properties/support/gpu.hpp"
#include "reference/attention/softmax_attention.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

constexpr const char* kOperation = "mla_prefill";
constexpr std::int64_t kWidth = 192, kValues = 128;
constexpr float kScale = 0.135f;  // DeepSeek-V3's (128 + 64)^-0.5 1.874

struct Question {
  Sizes queries, keys;  ///< of each row of the batch
  std::int64_t heads = 2;
  bool causal = true;
  double spread = 1;  ///< of the queries: with large ones a few keys have all the weight
  float scale = kScale;
};

/// Rows one after the other, and what belongs to no row is NaN.
struct Inputs {
  Inputs(const Question& question, std::uint64_t seed)
      : query_starts(starts_of(question.queries)),
        key_starts(starts_of(question.keys)),
        q(drawn(question.queries, question.heads, kWidth, seed, 1)),
        k(drawn(question.keys, question.heads, kWidth, seed, 2)),
        v(drawn(question.keys, question.heads, kValues, seed, 3)) {
    for (double& x : q) x *= question.spread;
  }
  static Array<double, 3> drawn(const Sizes& sizes, std::int64_t heads, std::int64_t width,
                                std::uint64_t seed, std::uint64_t stream) {
    const std::int64_t tokens = sum(sizes);
    auto x = on_grid<double>(Shape<3>{tokens + 3, heads, width}, {.seed = seed, .stream = stream});
    for (std::int64_t t = tokens; t < tokens + 3; ++t)
      for_each_element(at(x.view(), t), [](const auto&, double& e) { e = std::nan(""); });
    return x;
  }
  Array<std::int32_t, 1> query_starts, key_starts;
  Array<double, 3> q, k, v;
};

template <class S>
struct Answer {
  Array<S, 3> out;
  Array<S, 2> lse;
};

template <class S>
Answer<S> empty_answer(const Inputs& in) {
  const std::int64_t tokens = in.q.extent(0), H = in.q.extent(1);
  return {Array<S, 3>(Shape<3>{tokens, H, kValues}, S{7}), Array<S, 2>(Shape<2>{H, tokens}, S{7})};
}

Answer<double> truth_of(const Inputs& in, const Question& question) {
  Answer<double> answer = empty_answer<double>(in);
  reference::softmax_attention<double>(
      in.q, in.k, in.v, in.query_starts.view(), in.key_starts.view(),
      {.scale = question.scale, .causal = question.causal}, answer.out, answer.lse);
  return answer;
}

/// In float, with probabilities and outputs rounded as the kernel stores them.
Answer<float> yardstick_of(const Inputs& in, const Question& question, Format format) {
  const auto q = cast<float>(in.q), k = cast<float>(in.k), v = cast<float>(in.v);
  Answer<float> answer = empty_answer<float>(in);
  for (std::size_t row = 0; row < question.queries.size(); ++row) {
    const auto n = static_cast<std::int64_t>(row);
    const std::int64_t first = in.key_starts(n), keys = question.keys[row];
    for (std::int64_t h = 0; h < q.extent(1); ++h) {
      const Matrix<float> K = reference::head_of(cut(k.view(), first, first + keys), h);
      const Matrix<float> V = reference::head_of(cut(v.view(), first, first + keys), h);
      for (std::int64_t i = 0; i < question.queries[row]; ++i) {
        const std::int64_t t = in.query_starts(n) + i;
        const std::int64_t seen =
            reference::visible_keys(i, question.queries[row], keys, question.causal);
        answer.lse(h, t) = -std::numeric_limits<float>::infinity();
        mapped(at(answer.out.view(), t, h)).setZero();
        if (seen == 0) continue;
        const Vector<float> scores =
            question.scale * (K.topRows(seen) * as_vector(at(q.view(), t, h)));
        const float largest = scores.maxCoeff();
        const Vector<float> weights = (scores.array() - largest).exp();
        const Vector<float> out =
            V.topRows(seen).transpose() * rounded_each(weights, format) / weights.sum();
        mapped(at(answer.out.view(), t, h)) = rounded_each(out, format);
        answer.lse(h, t) = largest + std::log(weights.sum());
      }
    }
  }
  return answer;
}

template <class T>
struct Device {
  explicit Device(const Inputs& in)
      : q(in.q),
        k(in.k),
        v(in.v),
        query_starts(in.query_starts),
        key_starts(in.key_starts),
        out(empty_answer<double>(in).out),
        lse(empty_answer<float>(in).lse) {}

  void run(const Question& question, cudaStream_t stream = nullptr) {
    kernels::mla_prefill<T>({.q = std::as_const(q).view(),
                             .k = std::as_const(k).view(),
                             .v = std::as_const(v).view(),
                             .query_start_loc = std::as_const(query_starts).view(),
                             .key_start_loc = std::as_const(key_starts).view(),
                             .out = out.view(),
                             .lse = lse.view(),
                             .softmax_scale = question.scale,
                             .causal = question.causal},
                            stream);
  }

  DeviceTensor<T, 3> q, k, v;
  DeviceTensor<std::int32_t, 1> query_starts, key_starts;
  DeviceTensor<T, 3> out;
  DeviceTensor<float, 2> lse;
};

template <class T>
void expect_agreement(const Question& question, std::uint64_t seed) {
  SCOPED_TRACE("H " + std::to_string(question.heads) + ", queries " +
               ::testing::PrintToString(question.queries) + ", keys " +
               ::testing::PrintToString(question.keys) + (question.causal ? "" : ", all seen"));
  const Inputs in(question, seed);
  Device<T> device(in);
  device.run(question);
  finish();
  const Answer<double> truth = truth_of(in, question);
  const Answer<float> yardstick = yardstick_of(in, question, kernels::format_of<T>());
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  EXPECT_TRUE(within_yardstick(kOperation, "lse", device.lse, yardstick.lse, truth.lse));
}

template <class T>
class MlaPrefillGpu : public GpuTest {};
using Types = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    Fp16,
#endif
    Bf16>;
TYPED_TEST_SUITE(MlaPrefillGpu, Types);

// Around halves and wholes of blocks of queries and of tiles of keys.
TYPED_TEST(MlaPrefillGpu, anyLength) {
  for (const std::int64_t length : {1, 2, 15, 63, 64, 65, 127, 128, 129, 191, 192, 257, 400})
    expect_agreement<TypeParam>({.queries = {length, 3}, .keys = {length, 3}},
                                static_cast<std::uint64_t>(length));
}

// After a prefix, over a chunk of it alone, and queries that the border leaves without a key.
TYPED_TEST(MlaPrefillGpu, queriesAndKeysOfAnyNumbers) {
  std::uint64_t seed = 0;
  for (const bool causal : {true, false}) {
    expect_agreement<TypeParam>({.queries = {5, 130}, .keys = {300, 131}, .causal = causal},
                                ++seed);
    expect_agreement<TypeParam>({.queries = {129, 1}, .keys = {513, 77}, .causal = causal}, ++seed);
    expect_agreement<TypeParam>({.queries = {200, 64}, .keys = {70, 1}, .causal = causal}, ++seed);
  }
}

// Rows without queries, without keys, without either.
TYPED_TEST(MlaPrefillGpu, noKeyGivesZeroAndMinusInfinity) {
  for (const bool causal : {true, false})
    expect_agreement<TypeParam>(
        {.queries = {0, 7, 130, 0, 3}, .keys = {0, 0, 140, 9, 0}, .causal = causal}, 3);
  expect_agreement<TypeParam>({.queries = {4}, .keys = {0}}, 4);
}

// A range whose end is further below its begin than an int counts is as empty as any that is none.
TYPED_TEST(MlaPrefillGpu, aRangeThatIsNoneIsEmpty) {
  const Question question{.queries = {8}, .keys = {8}};
  const Inputs in(question, 7);
  Device<TypeParam> before(in), device(in);
  before.run(question);
  device.run(question);
  finish();
  device.query_starts.set({5, INT_MIN});
  device.run(question);
  finish();
  EXPECT_TRUE(same_bits(device.out, before.out)) << "written without a query";
  device.query_starts.set({0, 8});
  device.key_starts.set({5, INT_MIN});
  device.run(question);
  finish();
  const Array<float, 3> out = device.out.host();
  for (std::int64_t i = 0; i < 8 * question.heads * kValues; ++i)
    EXPECT_EQ(out.data()[i], 0.0f) << "no key";
}

// More rows than a warp has lanes, and more items than blocks.
TYPED_TEST(MlaPrefillGpu, manyRowsAndHeads) {
  Sizes sizes;
  for (std::int64_t n = 0; n < 70; ++n) sizes.push_back(n % 7 == 3 ? 0 : 1 + n * 5 % 40);
  expect_agreement<TypeParam>({.queries = sizes, .keys = sizes, .heads = 3}, 1);
  expect_agreement<TypeParam>({.queries = {150}, .keys = {150}, .heads = 80}, 2);
  expect_agreement<TypeParam>({.queries = {130, 260}, .keys = {130, 260}, .heads = 33}, 3);
}

// From keys that count alike to one that has all the weight; scores of either sign.
TYPED_TEST(MlaPrefillGpu, anySpreadOfScores) {
  for (const double spread : {1.0 / 64, 4.0, 32.0})
    expect_agreement<TypeParam>({.queries = {300}, .keys = {300}, .spread = spread}, 7);
  expect_agreement<TypeParam>({.queries = {200}, .keys = {200}, .scale = -0.1f}, 8);
}

/// The same queries over keys first ... first + sizes[row] - 1 of each row.
Inputs over_keys(const Inputs& in, const Sizes& first, const Sizes& sizes) {
  Inputs part = in;
  part.key_starts = starts_of(sizes);
  for (std::size_t row = 0; row < sizes.size(); ++row)
    for (const auto& [from, to] : {std::pair(&in.k, &part.k), std::pair(&in.v, &part.v)}) {
      const std::int64_t token = from->size() / from->extent(0);
      const auto n = static_cast<std::int64_t>(row);
      std::copy_n(from->data() + (in.key_starts(n) + first[row]) * token, sizes[row] * token,
                  to->data() + part.key_starts(n) * token);
    }
  return part;
}

// New tokens over themselves and over a chunk of their prefix, or over none, merged: the whole.
TYPED_TEST(MlaPrefillGpu, chunksOfThePrefixMergeIntoTheWhole) {
  const Sizes queries{30, 5, 1, 130}, prefix{140, 0, 64, 1};
  Sizes keys = queries;
  for (std::size_t row = 0; row < keys.size(); ++row) keys[row] += prefix[row];
  const Question whole{.queries = queries, .keys = keys};
  const Inputs in(whole, 5);
  Device<TypeParam> own(over_keys(in, prefix, queries)), chunk(over_keys(in, Sizes(4, 0), prefix));
  own.run(whole);
  chunk.run({.queries = queries, .keys = prefix, .causal = false});
  Device<TypeParam> merged(in);
  // tokens that belong to no row stay as they were
  const auto out = [&](auto view) { return cut(view, 0, sum(queries)); };
  const auto lse = [&](auto view) { return transposed(cut(transposed(view), 0, sum(queries))); };
  kernels::merge_attention<TypeParam>({.out_a = out(std::as_const(chunk.out).view()),
                                       .lse_a = lse(std::as_const(chunk.lse).view()),
                                       .out_b = out(std::as_const(own.out).view()),
                                       .lse_b = lse(std::as_const(own.lse).view()),
                                       .out = out(merged.out.view()),
                                       .lse = lse(merged.lse.view())},
                                      nullptr);
  finish();
  const Answer<double> truth = truth_of(in, whole);
  const Answer<float> yardstick = yardstick_of(in, whole, kernels::format_of<TypeParam>());
  EXPECT_TRUE(within_yardstick(kOperation, "merged out", merged.out, yardstick.out, truth.out));
  EXPECT_TRUE(within_yardstick(kOperation, "merged lse", merged.lse, yardstick.lse, truth.lse));
}

/// Keys and values decompressed from latents, and the same for mla_decode. Each of their columns is
/// one of the latent's times a power of two, so that both forms multiply the same numbers.
struct BothForms {
  static constexpr std::int64_t kLatent = 512, kPe = 64, kPage = 16;
  static std::int64_t column_of_key(std::int64_t h, std::int64_t d) {
    return (4 * d + h) % kLatent;
  }
  static std::int64_t column_of_value(std::int64_t h, std::int64_t d) {
    return (4 * d + 3 * h + 1) % kLatent;
  }
  static double factor(std::int64_t h, std::int64_t d) {
    return std::array{0.5, -1.0, 2.0, 1.0}[static_cast<std::size_t>((h + d) % 4)];
  }

  BothForms(const Question& question, std::uint64_t seed) : normal(question, seed) {
    const auto rows = static_cast<std::int64_t>(question.keys.size());
    const std::int64_t H = question.heads, q_len = question.queries[0];
    q = Array<double, 4>(Shape<4>{rows, q_len, H, kLatent + kPe}, 0.0);
    lengths = ints(question.keys);
    std::int64_t pages = 0, widest = 0;
    for (const std::int64_t size : question.keys) {
      pages += (size + kPage - 1) / kPage;
      widest = std::max(widest, (size + kPage - 1) / kPage);
    }
    cache = Array<double, 3>(Shape<3>{pages, kPage, kLatent + kPe}, std::nan(""));
    table = Array<std::int32_t, 2>(Shape<2>{rows, widest}, 2147480000);
    std::int64_t next = pages;
    for (std::int64_t n = 0; n < rows; ++n) {
      for (std::int64_t l = 0; l < lengths(n); ++l) {
        if (l % kPage == 0) table(n, l / kPage) = static_cast<std::int32_t>(--next);
        const std::int64_t t = normal.key_starts(n) + l;
        const Grid grid{.seed = seed, .stream = static_cast<std::uint64_t>(50 + t)};
        const auto latent = [&](std::int64_t i) -> double& {
          return cache(table(n, l / kPage), l % kPage, i);
        };
        for (std::int64_t i = 0; i < kLatent + kPe; ++i)
          latent(i) = grid(static_cast<std::uint64_t>(i));
        for (std::int64_t h = 0; h < H; ++h) {
          for (std::int64_t d = 0; d < kWidth - kPe; ++d)
            normal.k(t, h, d) = factor(h, d) * latent(column_of_key(h, d));
          for (std::int64_t d = 0; d < kPe; ++d)
            normal.k(t, h, kWidth - kPe + d) = latent(kLatent + d);
          for (std::int64_t d = 0; d < kValues; ++d)
            normal.v(t, h, d) = factor(h, d + 1) * latent(column_of_value(h, d));
        }
      }
      for (std::int64_t i = 0; i < q_len; ++i)
        for (std::int64_t h = 0; h < H; ++h) {
          const std::int64_t t = normal.query_starts(n) + i;
          for (std::int64_t d = 0; d < kWidth - kPe; ++d)
            q(n, i, h, column_of_key(h, d)) = factor(h, d) * normal.q(t, h, d);
          for (std::int64_t d = 0; d < kPe; ++d)
            q(n, i, h, kLatent + d) = normal.q(t, h, kWidth - kPe + d);
        }
    }
  }

  Inputs normal;
  Array<double, 4> q;
  Array<double, 3> cache;
  Array<std::int32_t, 2> table;
  Array<std::int32_t, 1> lengths;
};

// The absorbed form over the latents gives what the normal one gives over keys and values.
TYPED_TEST(MlaPrefillGpu, isTheAbsorbedForm) {
  const Question question{.queries = Sizes(4, 3), .keys = {3, 70, 200, 65}, .heads = 24};
  const BothForms forms(question, 6);
  Device<TypeParam> normal(forms.normal);
  normal.run(question);
  const DeviceTensor<TypeParam, 4> q(forms.q);
  const DeviceTensor<TypeParam, 3> cache(forms.cache);
  const DeviceTensor<std::int32_t, 2> table(forms.table);
  const DeviceTensor<std::int32_t, 1> lengths(forms.lengths);
  DeviceTensor<TypeParam, 4> out(Shape<4>{4, 3, question.heads, BothForms::kLatent});
  DeviceTensor<float, 3> lse(Shape<3>{4, question.heads, 3});
  kernels::MlaDecode<TypeParam> absorbed{.q = q.view(),
                                         .cache = cache.view(),
                                         .block_table = table.view(),
                                         .seq_lens = lengths.view(),
                                         .out = out.view(),
                                         .lse = lse.view(),
                                         .softmax_scale = kScale};
  DeviceTensor<unsigned char, 1> workspace(Shape<1>{kernels::mla_decode_workspace(absorbed)});
  absorbed.workspace = workspace.view();
  kernels::mla_decode(absorbed, nullptr);
  finish();
  const Array<float, 4> latents = out.host();
  const Array<float, 3> of_latents = lse.host();
  Array<float, 3> values = normal.out.host();
  Array<float, 2> sums = normal.lse.host();
  // NOLINTNEXTLINE(bugprone-implicit-widening-of-multiplication-result)
  for (std::int64_t t = 0; t < 4 * 3; ++t)
    for (std::int64_t h = 0; h < question.heads; ++h) {
      for (std::int64_t d = 0; d < kValues; ++d)
        values(t, h, d) = static_cast<float>(BothForms::factor(h, d + 1)) *
                          latents(t / 3, t % 3, h, BothForms::column_of_value(h, d));
      sums(h, t) = of_latents(t / 3, h, t % 3);
    }
  const Answer<double> truth = truth_of(forms.normal, question);
  const Answer<float> yardstick =
      yardstick_of(forms.normal, question, kernels::format_of<TypeParam>());
  EXPECT_TRUE(within_yardstick(kOperation, "out", normal.out, yardstick.out, truth.out));
  EXPECT_TRUE(
      within_yardstick<TypeParam>(kOperation, "absorbed out", values, yardstick.out, truth.out));
  EXPECT_TRUE(within_yardstick<float>(kOperation, "absorbed lse", sums, yardstick.lse, truth.lse));
}

// Blocks take items in another order each time, and counters are left as found.
TYPED_TEST(MlaPrefillGpu, everyLaunchGivesTheSameBits) {
  const Question question{.queries = {700, 65, 300}, .keys = {900, 65, 300}, .heads = 16};
  const Inputs in(question, 9);
  Device<TypeParam> first(in), again(in);
  first.run(question);
  finish();
  for (int i = 0; i < 20; ++i) again.run(question);
  finish();
  EXPECT_TRUE(same_bits(again.out, first.out));
  EXPECT_TRUE(same_bits(again.lse, first.lse));
}

// The bits of a row are its own, whatever rows stand beside it.
TYPED_TEST(MlaPrefillGpu, aRowHasTheSameBitsAlone) {
  const Question question{.queries = {130, 700, 65}, .keys = {900, 700, 70}, .heads = 3};
  const Inputs in(question, 12);
  Inputs one = in;
  one.query_starts = one.key_starts = starts_of({1});
  Device<TypeParam> together(in), alone(one);
  together.run(question);
  for (std::int64_t row = 0; row < 3; ++row) {
    alone.query_starts.set({in.query_starts(row), in.query_starts(row + 1)});
    alone.key_starts.set({in.key_starts(row), in.key_starts(row + 1)});
    alone.run(question);
    finish();
  }
  EXPECT_TRUE(same_bits(alone.out, together.out));
  EXPECT_TRUE(same_bits(alone.lse, together.lse));
}

// A captured launch serves the rows that it finds.
TYPED_TEST(MlaPrefillGpu, aCapturedLaunchServesOtherRows) {
  const Question question{.queries = {300, 100}, .keys = {300, 100}};
  const Inputs in(question, 4);
  Device<TypeParam> captured(in), direct(in);
  direct.run(question);
  finish();
  captured.query_starts.set({0, 0, 0});
  replay_behind_change([&](cudaStream_t stream) { captured.run(question, stream); },
                       [&] {
                         captured.query_starts.set({0, 300, 400});
                       });
  EXPECT_TRUE(same_bits(captured.out, direct.out));
  EXPECT_TRUE(same_bits(captured.lse, direct.lse));
}

TEST(MlaPrefillArguments, areRefusedByName) {
  const auto complaint = [&](auto change) {
    kernels::MlaPrefill<Bf16> in{.q = unread<const Bf16, 3>({9, 4, kWidth}),
                                 .k = unread<const Bf16, 3>({12, 4, kWidth}),
                                 .v = unread<const Bf16, 3>({12, 4, kValues}),
                                 .query_start_loc = unread<const std::int32_t, 1>({3}),
                                 .key_start_loc = unread<const std::int32_t, 1>({3}),
                                 .out = unread<Bf16, 3>({9, 4, kValues}),
                                 .lse = unread<float, 2>({4, 9})};
    change(in);
    return complaint_of([&] { kernels::mla_prefill<Bf16>(in, nullptr); });
  };
  using In = kernels::MlaPrefill<Bf16>;
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint([](In& in) {
                in.q = unread<const Bf16, 3>({9, 4, 128});
              }),
              HasSubstr("q is expected to be [T, H, 192] = [9, 4, 192]; got [9, 4, 128]"));
  EXPECT_THAT(complaint([](In& in) {
                in.v = unread<const Bf16, 3>({11, 4, kValues});
              }),
              HasSubstr("v is expected to be [L, H, 128] = [12, 4, 128]; got [11, 4, 128]"));
  EXPECT_THAT(complaint([](In& in) { in.key_start_loc = unread<const std::int32_t, 1>({2}); }),
              HasSubstr("key_start_loc is expected to be [N + 1] = [3]; got [2]"));
  EXPECT_THAT(complaint([](In& in) {
                in.lse = unread<float, 2>({9, 4});
              }),
              HasSubstr("lse is expected to be [H, T] = [4, 9]"));
  EXPECT_THAT(complaint([](In& in) {
                // NOLINTNEXTLINE(bugprone-implicit-widening-of-multiplication-result)
                in.k = unread<const Bf16, 3>({12, 4, kWidth}, {4 * 193, 193, 1});
              }),
              HasSubstr("k is expected to be contiguous in its last dimension"));
  EXPECT_THAT(complaint([](In& in) { in.lane = 128; }), HasSubstr("lane is expected to be below"));
}

}  // namespace
}  // namespace lockstep
