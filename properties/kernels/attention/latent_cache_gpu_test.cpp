// Norm, rotation and write of latents, and their way back out of the paged cache, against the
// references.
#include "kernels/attention/latent_cache.hpp"

#include <gmock/gmock.h>

#include <cstring>

#include "properties/support/plain_layers.hpp"
#include "reference/attention/latent_token.hpp"
#include "reference/attention/mla_rope_decode.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::E4m3;
using reference::RopePairs;

constexpr const char* kOperation = "latent_cache";
constexpr std::int64_t kLatent = 512, kPe = 64, kWidth = 576;
constexpr float kKvScale = 0.013f;
constexpr double kEps = 1e-6;

template <class C>
constexpr std::int64_t kColumns = std::is_same_v<C, std::uint8_t> ? reference::kTokenBytes : kWidth;

struct Question {
  std::int64_t T = 7, H = 3, page = 16;
  RopePairs pairs = RopePairs::interleaved;
  bool normed = false;  ///< already: no weight
  bool power_of_two = true;
};

struct Inputs {
  Inputs(const Question& q, std::uint64_t seed)
      : question(q),
        projected(draw<2>({q.T, kWidth + 8}, seed, 1)),
        norm(draw<1>({kLatent}, seed, 2)),
        q_pe(draw<3>({q.T, q.H, kPe}, seed, 3)),
        positions(Shape<1>{q.T}, 0),
        slots(Shape<1>{q.T}, 0),
        frequencies(Shape<1>{kPe / 2}) {
    for (std::int64_t i = 0; i < projected.size(); ++i)
      if (i % 584 < 128) projected.data()[i] /= 64;  // groups of 128 differ in size
    rope = reference::yarn_rope<double>(kPe, 10000, {.factor = 40, .mscale = 0.707});
    for (std::int64_t i = 0; i < kPe / 2; ++i)
      frequencies(i) = static_cast<float>(rope.frequencies(i));
    rope.magnitude = static_cast<float>(rope.magnitude);
    pages = (q.T + 3 * q.page) / q.page;
    for (std::int64_t t = 0; t < q.T; ++t) {
      const auto index = static_cast<std::uint64_t>(t);
      positions(t) = static_cast<std::int32_t>(random_below(t % 3 ? 100 : 100000, seed, 4, index));
      const std::int64_t neighbour = (t ^ 1) < q.T ? t ^ 1 : t;
      slots(t) = static_cast<std::int32_t>(pages * q.page - 1 - neighbour);
    }
    if (q.T > 4) slots(2) = -1, slots(4) = static_cast<std::int32_t>(pages * q.page);
  }

  template <class S>
  reference::Rope<S> rope_of() const {
    const auto of = cast<S>(frequencies);
    return {as_vector(of.view()), static_cast<S>(rope.magnitude)};
  }
  /// [T, 576]: what every token's place holds before it is rounded.
  template <class S>
  Array<S, 2> latents() const {
    Array<S, 2> all(Shape<2>{question.T, kWidth});
    const auto weight = cast<S>(norm);
    for (std::int64_t t = 0; t < question.T; ++t) {
      const auto row = cast<S>(projected);
      Vector<S> x = as_vector(at(std::as_const(row).view(), t)).head(kWidth);
      if (!question.normed)
        x.head(kLatent) = reference::rms_normed<S>(
            x.head(kLatent).eval(), as_vector(std::as_const(weight).view()), S(kEps));
      mapped(at(all.view(), t)) = x;
    }
    reference::apply_rope<S>(
        rope_of<S>(), positions, question.pairs,
        make_view(all.data() + kLatent, Shape<3>{question.T, 1, kPe}, Shape<3>{kWidth, kPe, 1}));
    return all;
  }
  template <class S>
  Array<S, 3> queries() const {
    Array<S, 3> all = cast<S>(q_pe);
    reference::apply_rope<S>(rope_of<S>(), positions, question.pairs, all);
    return all;
  }

  Question question;
  Array<double, 2> projected;
  Array<double, 1> norm;
  Array<double, 3> q_pe;
  Array<std::int32_t, 1> positions, slots;
  Array<float, 1> frequencies;
  reference::Rope<double> rope;
  std::int64_t pages = 0;
};

template <class C>
struct Device {
  explicit Device(const Inputs& in)
      : question(in.question),
        magnitude(static_cast<float>(in.rope.magnitude)),
        projected(in.projected),
        norm(in.norm),
        q_pe(in.q_pe),
        rotated(Shape<3>{in.question.T, in.question.H, kPe}),
        positions(in.positions),
        slots(in.slots),
        frequencies(in.frequencies),
        kv_scale(Array<float, 1>(Shape<1>{1}, kKvScale)),
        cache(Shape<3>{in.pages, in.question.page, kColumns<C>}),
        latents(Shape<2>{in.question.T, kWidth}) {}

  void run(cudaStream_t stream = nullptr) {
    const auto columns = [&](std::int64_t first, std::int64_t count) {
      return make_view(std::as_const(projected).data() + first, Shape<2>{question.T, count},
                       Shape<2>{kWidth + 8, 1});
    };
    kernels::LatentWrite<C> in{.latent = columns(0, kLatent),
                               .k_pe = columns(kLatent, kPe),
                               .eps = static_cast<float>(kEps),
                               .positions = std::as_const(positions).view(),
                               .frequencies = std::as_const(frequencies).view(),
                               .magnitude = magnitude,
                               .interleaved = question.pairs == RopePairs::interleaved,
                               .slots = std::as_const(slots).view(),
                               .cache = cache.view(),
                               .power_of_two_scales = question.power_of_two,
                               .latents = latents.view(),
                               .q_pe = std::as_const(q_pe).view(),
                               .rotated_q = rotated.view()};
    if (!question.normed) in.norm = std::as_const(norm).view();
    if (std::is_same_v<C, E4m3>) in.kv_scale = std::as_const(kv_scale).view();
    kernels::write_latents(in, stream);
  }

  Question question;
  float magnitude;
  DeviceTensor<Bf16, 2> projected;
  DeviceTensor<Bf16, 1> norm;
  DeviceTensor<Bf16, 3> q_pe, rotated;
  DeviceTensor<std::int32_t, 1> positions, slots;
  DeviceTensor<float, 1> frequencies, kv_scale;
  DeviceTensor<C, 3> cache;
  DeviceTensor<Bf16, 2> latents;
};

/// Of a token of 656 bytes: numbers as they would be without rounding, by the scales that it has,
/// which are those of its values.
void expect_token(const std::uint8_t* bytes, const Vector<double>& values, bool power_of_two,
                  Array<double, 2>& truth, Array<float, 2>& numbers, std::int64_t row) {
  for (std::int64_t i = 0; i < kLatent; ++i) {
    float scale = 0;
    std::memcpy(&scale, bytes + kLatent + i / 128 * 4, 4);
    if (i % 128 == 0) {
      const double amax = values.segment(i, 128).cwiseAbs().maxCoeff();
      const auto kind =
          power_of_two ? reference::TileScale::power_of_two : reference::TileScale::exact;
      EXPECT_NEAR(scale / reference::tile_scale(amax, kind), 1.0, power_of_two ? 0.0 : 1e-6);
    }
    truth(row, i) = values(i) / static_cast<double>(scale);
    numbers(row, i) = static_cast<float>(decode_e4m3(bytes[i]));
  }
}

template <class C>
void expect_cache(const Inputs& in, const Device<C>& device) {
  const auto truth = in.latents<double>();
  const auto yardstick = in.latents<float>();
  const std::int64_t page = in.question.page;
  const std::vector<C> cache = device.cache.elements();
  std::vector<bool> written(static_cast<std::size_t>(in.pages * page), false);
  std::vector<std::int64_t> tokens;
  for (std::int64_t t = 0; t < in.question.T; ++t)
    if (0 <= in.slots(t) && in.slots(t) < in.pages * page) {
      ASSERT_FALSE(written[static_cast<std::size_t>(in.slots(t))]) << "a test names a slot twice";
      written[static_cast<std::size_t>(in.slots(t))] = true;
      tokens.push_back(t);
    }
  for (std::size_t slot = 0; slot < written.size(); ++slot) {
    const auto* const bytes =
        reinterpret_cast<const unsigned char*>(cache.data() + slot * kColumns<C>);
    if (!written[slot]) {
      ASSERT_TRUE(std::all_of(bytes, bytes + kColumns<C> * sizeof(C), [](unsigned char byte) {
        return byte == 0xff;
      })) << slot;
    }
  }
  const auto rows = static_cast<std::int64_t>(tokens.size());
  Array<double, 2> expected(Shape<2>{rows, kWidth});
  Array<float, 2> plain(expected.shape()), got(expected.shape());
  Array<double, 2> numbers_truth(Shape<2>{rows, kLatent});
  Array<float, 2> numbers(numbers_truth.shape());
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t t = tokens[static_cast<std::size_t>(i)];
    const C* const token = cache.data() + in.slots(t) * kColumns<C>;
    const double scale = std::is_same_v<C, E4m3> ? 1.0 / kKvScale : 1.0;
    for (std::int64_t j = 0; j < kWidth; ++j) {
      expected(i, j) = std::clamp(truth(t, j) * scale, -448.0 / (scale == 1 ? 1e-9 : 1),
                                  448.0 / (scale == 1 ? 1e-9 : 1));
      plain(i, j) = static_cast<float>(
          rounded(std::is_same_v<C, E4m3> ? expected(i, j) : double{yardstick(t, j)},
                  std::is_same_v<C, E4m3> ? Format::e4m3 : Format::bf16));
    }
    if constexpr (std::is_same_v<C, std::uint8_t>) {
      expect_token(token, as_vector(at(std::as_const(truth).view(), t)), in.question.power_of_two,
                   numbers_truth, numbers, i);
      for (std::int64_t j = 0; j < kPe; ++j) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, token + 528 + 2 * j, 2);
        got(i, kLatent + j) = std::bit_cast<float>(std::uint32_t{bits} << 16);
      }
      for (std::int64_t j = 0; j < kLatent; ++j) got(i, j) = plain(i, j);  // compared as numbers
    } else {
      for (std::int64_t j = 0; j < kWidth; ++j) got(i, j) = kernels::to_host(token[j]);
    }
  }
  if constexpr (std::is_same_v<C, std::uint8_t>) {
    Array<float, 2> nearest(numbers.shape());
    for (std::int64_t i = 0; i < nearest.size(); ++i)
      nearest.data()[i] = static_cast<float>(rounded(numbers_truth.data()[i], Format::e4m3));
    EXPECT_TRUE(within_yardstick<E4m3>(kOperation, "numbers of 656 bytes", numbers, nearest,
                                       numbers_truth));
    EXPECT_TRUE(within_yardstick<Bf16>(kOperation, "k_pe of 656 bytes", got, plain, expected));
  } else {
    EXPECT_TRUE(within_yardstick<C>(kOperation, "cache", got, plain, expected));
  }
  EXPECT_TRUE(device.cache.guards_intact());
}

template <class C>
class LatentCacheGpu : public GpuTest {};
using Caches = ::testing::Types<Bf16, E4m3, std::uint8_t>;
TYPED_TEST_SUITE(LatentCacheGpu, Caches);

TYPED_TEST(LatentCacheGpu, writesWhatTheReferenceDoes) {
  std::uint64_t seed = 0;
  for (const Question& question : {Question{},
                                   {.T = 1, .page = 1},
                                   {.T = 65, .H = 16, .page = 64},
                                   {.T = 6, .H = 1, .page = 32, .pairs = RopePairs::half_split},
                                   {.T = 5, .page = 64, .normed = true},
                                   {.T = 9, .power_of_two = false},
                                   {.T = 3, .H = 0}}) {
    const Inputs in(question, ++seed);
    Device<TypeParam> device(in);
    device.run();
    finish();
    expect_cache(in, device);
    EXPECT_TRUE(within_yardstick(kOperation, "latents", device.latents,
                                 stored<Bf16>(in.latents<float>()), in.latents<double>()));
    EXPECT_TRUE(within_yardstick(kOperation, "q_pe", device.rotated,
                                 stored<Bf16>(in.queries<float>()), in.queries<double>()));
  }
}

// A tile of zeros is zeros, and no NaN.
TYPED_TEST(LatentCacheGpu, zerosStayZeros) {
  for (const bool power_of_two : {true, false}) {
    Inputs in({.T = 2, .normed = true, .power_of_two = power_of_two}, 3);
    for (double& x : in.projected) x = 0;
    Device<TypeParam> device(in);
    device.run();
    finish();
    const std::vector<TypeParam> cache = device.cache.elements();
    for (std::int64_t t = 0; t < 2; ++t)
      for (std::int64_t i = 0; i < kLatent; ++i)
        ASSERT_EQ(kernels::to_host(
                      cache[static_cast<std::size_t>(in.slots(t) * kColumns<TypeParam> + i)]),
                  0);
  }
}

TYPED_TEST(LatentCacheGpu, aGraphReplaysWithOtherSlots) {
  const Inputs first({}, 1), second({}, 2);
  Device<TypeParam> captured(first), direct(second);
  replay_behind_change([&](cudaStream_t stream) { captured.run(stream); },
                       [&] {
                         captured.projected.set(direct.projected.elements());
                         captured.norm.set(direct.norm.elements());
                         captured.q_pe.set(direct.q_pe.elements());
                         captured.positions.set(direct.positions.elements());
                         captured.slots.set(direct.slots.elements());
                       });
  direct.run();
  finish();
  EXPECT_TRUE(same_bits(captured.cache, direct.cache));
  EXPECT_TRUE(same_bits(captured.rotated, direct.rotated));
}

/// Parts of requests over pages that lie anywhere, with a wild tail of the table.
TYPED_TEST(LatentCacheGpu, gathersPartsOfRequests) {
  using C = TypeParam;
  const Sizes lengths{40, 0, 17, 3, 64}, fresh{5, 0, 17, 1, 30};
  constexpr std::int64_t kPage = 16, kPages = 20, kRows = 140;
  const Inputs all({.T = kPages * kPage, .H = 0, .page = kPage, .normed = true}, 5);
  Device<C> device(all);
  Array<std::int32_t, 1> every(Shape<1>{kPages * kPage});
  for (std::int64_t i = 0; i < every.size(); ++i) every(i) = static_cast<std::int32_t>(i);
  device.slots.set({every.begin(), every.end()});
  device.run();
  Array<std::int32_t, 2> table(Shape<2>{5, 6}, 2147480000);
  std::int32_t next = 19;
  for (std::int64_t b = 0; b < 5; ++b)
    for (std::int64_t i = 0; i * kPage < lengths[static_cast<std::size_t>(b)]; ++i)
      table(b, i) = next--;
  const DeviceTensor<std::int32_t, 2> tables(table);
  const DeviceTensor<std::int32_t, 1> lens(ints(lengths)), queries(starts_of(fresh));
  for (const bool prefix : {true, false})
    for (const auto& [begin, size] :
         {std::pair<std::int64_t, std::int64_t>{0, 1000}, {0, 16}, {7, 20}, {60, 8}, {100, 5}}) {
      DeviceTensor<Bf16, 2> out(Shape<2>{kRows, kWidth});
      DeviceTensor<std::int32_t, 1> starts(Shape<1>{6});
      kernels::LatentGather<C> in{.cache = std::as_const(device.cache).view(),
                                  .block_table = tables.view(),
                                  .seq_lens = lens.view(),
                                  .query_start_loc = queries.view(),
                                  .begin = begin,
                                  .size = size,
                                  .prefix = prefix,
                                  .latents = out.view(),
                                  .starts = starts.view()};
      if (std::is_same_v<C, E4m3>) in.kv_scale = std::as_const(device.kv_scale).view();
      kernels::gather_latents(in, nullptr);
      finish();
      const Array<float, 2> got = out.host(), values = device.latents.host();
      const auto rows = starts.elements();
      std::int64_t row = 0;
      for (std::int64_t b = 0; b < 5; ++b) {
        const auto request = static_cast<std::size_t>(b);
        ASSERT_EQ(rows[request], row);
        const std::int64_t tokens = lengths[request] - (prefix ? fresh[request] : 0);
        for (std::int64_t place = begin; place < std::min(begin + size, tokens); ++place, ++row)
          for (std::int64_t i = 0; i < kWidth; ++i) {
            const double x = values(table(b, place / kPage) * kPage + place % kPage, i);
            // A sixteenth: half a unit of e4m3, and bf16's; numbers near 0 are kept to 2^-10.
            const double off = std::is_same_v<C, Bf16> ? 0 : std::abs(x) / 15 + 0x1p-9;
            ASSERT_NEAR(got(row, i), x, off) << b << " " << place << " " << i;
          }
      }
      ASSERT_EQ(rows[5], row);
      for (; row < kRows; ++row)
        for (std::int64_t i = 0; i < kWidth; ++i) ASSERT_EQ(got(row, i), 0);
      EXPECT_TRUE(out.guards_intact() && starts.guards_intact());
    }
}

class LatentCacheHeadsGpu : public GpuTest {};

TEST_F(LatentCacheHeadsGpu, latentCacheHeadsAreJoinedAndPadded) {
  const Array<double, 3> a = draw<3>({5, 3, 128}, 1, 1), b = draw<3>({5, 1, 64}, 1, 2);
  const DeviceTensor<Bf16, 3> left(a), right(b);
  for (const std::int64_t width : {192, 256}) {
    DeviceTensor<Bf16, 3> out(Shape<3>{5, 3, width});
    kernels::join_heads({.a = left.view(), .b = right.view(), .out = out.view()}, nullptr);
    finish();
    const Array<double, 3> expected = reference::side_by_side<double>(a.view(), b.view(), width);
    EXPECT_TRUE(same_bits(out.host(), cast<float>(expected)));
    EXPECT_TRUE(out.guards_intact());
  }
}

TEST(LatentCacheArguments, areRefusedByName) {
  using ::testing::HasSubstr;
  const auto complaint = [](auto change) {
    kernels::LatentWrite<Bf16> in{.latent = unread<const Bf16, 2>({3, kLatent}),
                                  .k_pe = unread<const Bf16, 2>({3, kPe}),
                                  .positions = unread<const std::int32_t, 1>({3}),
                                  .frequencies = unread<const float, 1>({32}),
                                  .slots = unread<const std::int32_t, 1>({3}),
                                  .cache = unread<Bf16, 3>({4, 16, kWidth})};
    change(in);
    return complaint_of([&] { kernels::write_latents(in, nullptr); });
  };
  using In = kernels::LatentWrite<Bf16>;
  EXPECT_EQ(complaint([](In& in) { in.slots = unread<const std::int32_t, 1>({4}); }),
            "write_latents: slots is expected to be [T] = [3]; got [4]");
  EXPECT_EQ(complaint([](In& in) {
              in.cache = unread<Bf16, 3>({4, 16, 512});
            }),
            "write_latents: cache is expected to be [pages, page, width] = [4, 16, 576]; got [4, "
            "16, 512]");
  EXPECT_THAT(complaint([](In& in) {
                in.q_pe = unread<const Bf16, 3>({3, 2, kPe});
              }),
              HasSubstr("rotated_q is expected to be given with q_pe"));
  EXPECT_THAT(complaint([](In& in) { in.kv_scale = unread<const float, 1>({1}); }),
              HasSubstr("kv_scale is expected to be absent without a cache of numbers in e4m3"));
  EXPECT_THAT(complaint_of([] {
                kernels::join_heads(
                    {.a = unread<const Bf16, 3>({3, 2, 128}), .out = unread<Bf16, 3>({3, 2, 64})},
                    nullptr);
              }),
              HasSubstr("join_heads: out is expected to be [T, H, d] with room for a and b"));
  EXPECT_THAT(complaint_of([] {
                kernels::gather_latents<Bf16>(
                    {.cache = unread<const Bf16, 3>({4, 16, kWidth}),
                     .block_table = unread<const std::int32_t, 2>({2, 3}),
                     .seq_lens = unread<const std::int32_t, 1>({2}),
                     .query_start_loc = unread<const std::int32_t, 1>({2}),
                     .latents = unread<Bf16, 2>({9, kWidth}),
                     .starts = unread<std::int32_t, 1>({3})},
                    nullptr);
              }),
              HasSubstr("gather_latents: query_start_loc is expected to be [B + 1] = [3]"));
}

}  // namespace
}  // namespace lockstep
