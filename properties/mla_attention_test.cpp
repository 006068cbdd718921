// Laws of multi-head latent attention: normal = absorbed = padded = chunked, for any cache.
#include "reference/mla_attention.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"
#include "reference/base/yardstick.hpp"
#include "reference/latent_token.hpp"
#include "reference/split_schedule.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A small head shape with everything different: H 3, dn 6, dr 4, dv 5, dc 12.
template <class S>
struct Mla {
  Mla(std::int64_t T, std::int64_t L, std::uint64_t seed)
      : q_nope(draw<3>({T, 3, 6}, seed, 1)),
        q_pe(draw<3>({T, 3, 4}, seed, 2)),
        latent(draw<2>({L, 12}, seed, 3)),
        k_pe(draw<2>({L, 4}, seed, 4)),
        kv_b(draw<2>({3 * 11, 12}, seed, 5)),
        w(reference::split_kv_b<S>(kv_b, 3, 6)),
        out_shape{T, 3, 5},
        lse_shape{3, T} {}

  template <std::size_t Rank>
  static Array<S, Rank> draw(const Shape<Rank>& shape, std::uint64_t seed, std::uint64_t stream) {
    return on_grid<S>(shape, {.seed = seed, .stream = stream});
  }
  reference::MlaInputs<S> inputs() const { return {q_nope, q_pe, latent, k_pe}; }

  Array<S, 3> q_nope, q_pe;
  Array<S, 2> latent, k_pe, kv_b;
  reference::MlaUpWeights<S> w;
  Shape<3> out_shape;
  Shape<2> lse_shape;
};

/// An output and its lse.
template <class S>
struct Result {
  explicit Result(const Mla<S>& mla) : out(mla.out_shape), lse(mla.lse_shape) {}
  bool near(const Result& other, double tolerance) const {
    const Difference o = difference(out, other.out), l = difference(lse, other.lse);
    return !o.misplaced && !l.misplaced && o.relative() < tolerance && l.relative() < tolerance;
  }
  Array<S, 3> out;
  Array<S, 2> lse;
};

RC_GTEST_PROP(MlaAttention, absorbedIsNormalIsPadded, ()) {
  const std::int64_t L = draw_length(33), T = std::min<std::int64_t>(draw_length(8), L);
  const Mla<double> mla(T, L, draw_seed());
  Result<double> normal(mla), absorbed(mla), padded(mla);
  const reference::AttentionOptions options{.scale = 0.3};
  reference::mla_normal<double>(mla.inputs(), mla.w, options, normal.out, normal.lse);
  reference::mla_absorbed<double>(mla.inputs(), mla.w, options, absorbed.out, absorbed.lse);
  reference::mla_padded<double>(mla.inputs(), mla.w, options, padded.out, padded.lse);
  RC_ASSERT(absorbed.near(normal, 1e-12) && padded.near(normal, 1e-13));
}

TEST(MlaAttention, formsAgreeInFloatToo) {
  const Mla<float> mla(8, 65, 1);
  Result<float> normal(mla), absorbed(mla);
  reference::mla_normal<float>(mla.inputs(), mla.w, {.scale = 0.3}, normal.out, normal.lse);
  reference::mla_absorbed<float>(mla.inputs(), mla.w, {.scale = 0.3}, absorbed.out, absorbed.lse);
  EXPECT_TRUE(absorbed.near(normal, 5e-6));
}

// A cached prefix is read in chunks of whatever the workspace holds; none, and one longer than the
// prefix, included.
RC_GTEST_PROP(MlaAttention, chunksOfThePrefixAreTheWhole, ()) {
  const std::int64_t prefix = draw_length(33), T = draw_length(5);
  const Mla<double> mla(T, prefix + T, draw_seed());
  const std::int64_t chunk = *rc::gen::inRange<std::int64_t>(1, 40);
  Result<double> whole(mla), chunked(mla);
  reference::mla_normal<double>(mla.inputs(), mla.w, {.scale = 0.3}, whole.out, whole.lse);
  reference::mla_chunked_prefix<double>(mla.inputs(), mla.w, {.scale = 0.3}, chunk, chunked.out,
                                        chunked.lse);
  RC_ASSERT(chunked.near(whole, 1e-12));
}

/// A batch of requests with latents of width 8 (value_dim 5) in pages; unused entries are NaN and
/// the block table's tail is wild.
struct Cache {
  Cache(Sizes lengths, std::int64_t page, std::uint64_t seed) : seq_lens(ints(lengths)) {
    std::int64_t blocks = 1, widest = 0;
    for (const std::int64_t length : lengths) {
      blocks += (length + page - 1) / page;
      widest = std::max(widest, (length + page - 1) / page + 1);
    }
    const Sizes order = draw_order(blocks);
    pages = Array<double, 3>(Shape<3>{blocks, page, 8});
    table = Array<std::int32_t, 2>(Shape<2>{seq_lens.size(), widest}, 2147480000);
    std::size_t next = 0;
    for (std::int64_t b = 0; b < seq_lens.size(); ++b) {
      latents.push_back(on_grid<double>(Shape<2>{seq_lens(b), 8},
                                        {.seed = seed, .stream = static_cast<std::uint64_t>(b)}));
      for (std::int64_t l = 0; l < seq_lens(b); ++l) {
        if (l % page == 0) table(b, l / page) = static_cast<std::int32_t>(order[next++]);
        mapped(at(pages.view(), table(b, l / page), l % page)) =
            mapped(at(latents.back().view(), l));
      }
    }
  }
  Array<double, 3> pages;
  Array<std::int32_t, 2> table;
  Array<std::int32_t, 1> seq_lens;
  std::vector<Array<double, 2>> latents;
};

// FlashMLA's poison: NaN past every length and in unused pages, wild entries behind the table.
RC_GTEST_PROP(MlaAttention, decodeSeesTheRequestsOwnLatentsAlone, ()) {
  const Sizes lengths = draw_row_lengths(4, 31);
  const std::int64_t page = *rc::gen::element<std::int64_t>(1, 3, 64);
  const std::int64_t Lq = *rc::gen::inRange<std::int64_t>(1, 4);
  const std::uint64_t seed = draw_seed();
  const Cache cache(lengths, page, seed);
  const std::int64_t B = cache.seq_lens.size();
  const auto q = on_grid<double>(Shape<4>{B, Lq, 2, 8}, {.seed = seed, .stream = 99});
  const double kv_scale = *rc::gen::element(1.0, 0.25);
  Array<double, 4> out(Shape<4>{B, Lq, 2, 5});
  Array<double, 3> lse(Shape<3>{B, 2, Lq});
  reference::mla_decode<double>({.q = q,
                                 .cache = cache.pages,
                                 .block_table = cache.table,
                                 .seq_lens = cache.seq_lens,
                                 .softmax_scale = 0.3,
                                 .value_dim = 5,
                                 .kv_scale = kv_scale},
                                out, lse);
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t i = 0; i < Lq; ++i)
      for (std::int64_t h = 0; h < 2; ++h) {
        const std::int64_t n = std::max<std::int64_t>(0, cache.seq_lens(b) - Lq + i + 1);
        double sum = 0;
        Vector<double> expected = Vector<double>::Zero(5);
        for (std::int64_t l = 0; l < n; ++l) {  // the definition, without taking out a maximum
          const Vector<double> k =
              kv_scale * as_vector(at(cache.latents[static_cast<std::size_t>(b)].view(), l));
          const double weight = std::exp(0.3 * k.dot(as_vector(at(q.view(), b, i, h))));
          sum += weight;
          expected += weight * k.head(5);
        }
        if (n > 0) expected /= sum;
        RC_ASSERT((as_vector(at(out.view(), b, i, h)) - expected).norm() < 1e-12);
        RC_ASSERT(
            (n == 0 ? lse(b, h, i) == kInfinity : std::abs(lse(b, h, i) - std::log(sum)) < 1e-12));
      }
}

// Every block of every request is in exactly one part, and the parts' splits are numbered through.
RC_GTEST_PROP(SplitSchedule, coversEveryBlockOnce, ()) {
  Sizes lengths;
  for (int count = *rc::gen::inRange(1, 12); count > 0; --count)
    lengths.push_back(*rc::gen::element<std::int64_t>(0, 1, 63, 64, 65, 500, 4097, 30000));
  const auto seq_lens = ints(lengths);
  const std::int64_t parts = *rc::gen::inRange<std::int64_t>(1, 133), B = seq_lens.size();
  const auto schedule = reference::split_schedule(seq_lens, parts);
  RC_ASSERT(static_cast<std::int64_t>(schedule.parts.size()) == parts);
  RC_ASSERT(static_cast<std::int64_t>(schedule.num_splits.size()) == B + 1);
  RC_ASSERT(schedule.num_splits.back() <= B + parts - 1);
  for (std::int64_t b = 0; b < B; ++b) {
    std::int64_t covered = 0, touched = 0;
    for (const reference::SplitPart& part : schedule.parts) {
      if (b < part.begin_request || b > part.end_request) continue;
      const std::int64_t begin = b == part.begin_request ? part.begin_block : 0;
      const std::int64_t end =
          b == part.end_request ? part.end_block : reference::split_blocks(seq_lens(b));
      RC_ASSERT(begin == covered && end > begin);
      RC_ASSERT(b != part.begin_request || part.begin_split == touched);
      covered = end;
      ++touched;
    }
    const auto at = static_cast<std::size_t>(b);
    RC_ASSERT(covered == reference::split_blocks(seq_lens(b)));
    RC_ASSERT(touched == schedule.num_splits[at + 1] - schedule.num_splits[at]);
  }
}

RC_GTEST_PROP(SplitSchedule, splitsDoNotMatter, ()) {
  const std::int64_t L = *rc::gen::element<std::int64_t>(0, 1, 63, 64, 65, 300, 700);
  const std::uint64_t seed = draw_seed();
  const Matrix<double> K =
      as_matrix(on_grid<double>(Shape<2>{L, 4}, {.seed = seed, .stream = 1}).view());
  const Vector<double> q =
      as_vector(on_grid<double>(Shape<1>{4}, {.seed = seed, .stream = 2}).view());
  const auto seq_lens = ints({129, L, 64});
  const auto schedule = reference::split_schedule(seq_lens, *rc::gen::inRange<std::int64_t>(1, 30));
  const auto split = reference::attend_split<double>(q, K, K, 0.5, schedule, 1);
  const auto whole = reference::attend<double>(q, K, K, 0.5);
  RC_ASSERT((split.out - whole.out).norm() < 1e-13);
  RC_ASSERT((L == 0 ? split.lse == kInfinity : std::abs(split.lse - whole.lse) < 1e-12));
}

TEST(SplitSchedule, knowsTheParts) {
  EXPECT_EQ(reference::split_parts(132, 1, 16), 132);
  EXPECT_EQ(reference::split_parts(132, 1, 128), 66);
  EXPECT_EQ(reference::split_parts(132, 1, 256), 33);
}

// The bounds of field measurements: 16/448 of a tile's largest with float scales, 1/17 with powers
// of two; the rotary part is lossless in bf16, and zeros stay zeros.
RC_GTEST_PROP(LatentToken, isWithinItsFormatsError, ()) {
  using reference::TileScale;
  const TileScale kind = *rc::gen::element(TileScale::exact, TileScale::power_of_two);
  const double size = *rc::gen::element(0.0, 1e-3, 1.0, 300.0);
  const auto x = on_grid<double>(Shape<1>{576}, {.seed = draw_seed(), .limit = 2});
  Vector<double> token = as_vector(x.view());
  token.head(512) *= size;
  const Vector<double> back =
      reference::unpacked_token<double>(reference::packed_token(token, kind));
  for (std::int64_t tile = 0; tile < 4; ++tile) {
    const double amax = token.segment(tile * 128, 128).cwiseAbs().maxCoeff();
    const double bound = kind == TileScale::exact ? 0.0358 * amax : std::max(amax / 16.9, 0x1p-23);
    RC_ASSERT((back - token).segment(tile * 128, 128).cwiseAbs().maxCoeff() <= bound);
  }
  RC_ASSERT(back.tail(64) == token.tail(64));
}

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

// The layer with and without q_lora, from hidden states: a prompt in two parts, the second over the
// cache of the first, is the prompt at once.
RC_GTEST_PROP(MlaAttention, aPromptInTwoPartsIsThePromptAtOnce, ()) {
  const std::int64_t T = std::max<std::int64_t>(1, draw_length(17));
  const std::int64_t first = *rc::gen::inRange<std::int64_t>(0, T);
  const bool lora = *rc::gen::arbitrary<bool>();
  const std::uint64_t seed = draw_seed();
  const auto draw2 = [&](Shape<2> shape, std::uint64_t stream) {
    return on_grid<double>(shape, {.seed = seed, .stream = stream});
  };
  const auto hidden = draw2({T, 10}, 20), q_a = draw2({7, 10}, 21);
  const auto q_b = draw2({3 * 10, lora ? 7 : 10}, 22), kv_a = draw2({16, 10}, 23);
  const Array<double, 1> q_norm(Shape<1>{7}, 1.5), kv_norm(Shape<1>{12}, 0.5);
  const Mla<double> shapes(T, T, seed);
  reference::MlaLayer<double> layer{
      .H = 3, .dn = 6, .dr = 4, .q_b = q_b, .kv_a = kv_a, .kv_a_norm = kv_norm};
  if (lora) layer.q_a = q_a.view(), layer.q_a_norm = q_norm.view();
  const auto rope =
      reference::yarn_rope<double>(4, 10000, {.factor = 40, .mscale = 1.0, .mscale_all_dim = 1.0});
  Sizes numbers;
  for (std::int64_t t = 0; t < T; ++t) numbers.push_back(t);
  const auto positions = ints(numbers);
  const auto project = [&](std::int64_t begin, std::int64_t end) {
    return reference::mla_project<double>(cut(hidden.view(), begin, end),
                                          cut(positions.view(), begin, end), layer, rope);
  };
  const auto whole = project(0, T), head = project(0, first), tail = project(first, T);
  RC_ASSERT(same_bits(joined<TensorView<const double, 2>>({head.latent.view(), tail.latent.view()}),
                      whole.latent));
  RC_ASSERT(same_bits(joined<TensorView<const double, 2>>({head.k_pe.view(), tail.k_pe.view()}),
                      whole.k_pe));
  Result<double> at_once(shapes);
  Array<double, 3> out(Shape<3>{T - first, 3, 5});
  Array<double, 2> lse(Shape<2>{3, T - first});
  const reference::AttentionOptions options{.scale = rope.softmax_factor / std::sqrt(10.0)};
  reference::mla_normal<double>({whole.q_nope, whole.q_pe, whole.latent, whole.k_pe}, shapes.w,
                                options, at_once.out, at_once.lse);
  reference::mla_absorbed<double>({tail.q_nope, tail.q_pe, whole.latent, whole.k_pe}, shapes.w,
                                  options, out, lse);
  const auto expected = cut(at_once.out.view(), first, T);
  RC_ASSERT(difference(out.view(), expected).relative() < 1e-11);
}

}  // namespace
}  // namespace lockstep
