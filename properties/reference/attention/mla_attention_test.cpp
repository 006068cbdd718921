// Laws of multi-head latent attention: normal = absorbed = padded = chunked, for any cache.
#include "reference/attention/mla_attention.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/reference/attention/latents.hpp"
#include "properties/support/special_values.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

// The definition, one number at a time, from kv_b_proj itself.
RC_GTEST_PROP(MlaAttention, isTheDefinition, ()) {
  const std::int64_t L = 1 + draw_length(8), T = *rc::gen::inRange<std::int64_t>(1, L + 1);
  const Mla<double> mla(T, L, draw_seed());
  const bool causal = *rc::gen::arbitrary<bool>();
  Result<double> found(mla);
  reference::mla_normal<double>(mla.inputs(), mla.w, {.scale = 0.3, .causal = causal}, found.out,
                                found.lse);
  for (std::int64_t h = 0; h < 3; ++h)
    for (std::int64_t i = 0; i < T; ++i) {
      double sum = 0;
      Vector<double> o = Vector<double>::Zero(5);
      for (std::int64_t l = 0; l < (causal ? L - T + i + 1 : L); ++l) {
        double score = 0;
        for (std::int64_t c = 0; c < 12; ++c)
          for (std::int64_t n = 0; n < 6; ++n)
            score += mla.q_nope(i, h, n) * mla.kv_b(h * 11 + n, c) * mla.latent(l, c);
        for (std::int64_t r = 0; r < 4; ++r) score += mla.q_pe(i, h, r) * mla.k_pe(l, r);
        const double weight = std::exp(0.3 * score);
        sum += weight;
        for (std::int64_t j = 0; j < 5; ++j)
          for (std::int64_t c = 0; c < 12; ++c)
            o(j) += weight * mla.kv_b(h * 11 + 6 + j, c) * mla.latent(l, c);
      }
      RC_ASSERT((as_vector(at(found.out.view(), i, h)) - o / sum).norm() < 1e-11);
      RC_ASSERT(std::abs(found.lse(h, i) - std::log(sum)) < 1e-12);
    }
}

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

// FlashMLA's poison: NaN past every length and in unused pages, wild entries after the table.
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
  const auto q_b = draw2({30, lora ? 7 : 10}, 22), kv_a = draw2({16, 10}, 23);
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

// From hidden states, one number at a time: with and without q_lora, each head's rows in their
// place, and the rotary parts turned by their positions.
TEST(MlaAttention, projectionsAreTheDefinition) {
  const std::int64_t T = 3, hidden_size = 5;
  const auto draw = [](Shape<2> shape, std::uint64_t stream) {
    return on_grid<double>(shape, {.seed = 8, .stream = stream});
  };
  const auto hidden = draw({T, hidden_size}, 1), q_a = draw({4, hidden_size}, 2);
  const auto kv_a = draw({3 + 2, hidden_size}, 3);
  const auto q_norm = on_grid<double>(Shape<1>{4}, {.seed = 8, .stream = 4});
  const auto kv_norm = on_grid<double>(Shape<1>{3}, {.seed = 8, .stream = 5});
  const auto rope = reference::yarn_rope<double>(2, 100, {.factor = 4});
  const auto positions = ints({0, 3, 7});
  for (const bool lora : {false, true}) {
    const auto q_b = draw({16, lora ? 4 : hidden_size}, 6);
    reference::MlaLayer<double> layer{
        .H = 2, .dn = 6, .dr = 2, .q_b = q_b, .kv_a = kv_a, .kv_a_norm = kv_norm};
    if (lora) layer.q_a = q_a.view(), layer.q_a_norm = q_norm.view();
    const auto p = reference::mla_project<double>(hidden, positions, layer, rope);
    const auto product = [](const Array<double, 2>& w, std::int64_t row, const Vector<double>& x) {
      double sum = 0;
      for (std::int64_t i = 0; i < x.size(); ++i) sum += w(row, i) * x(i);
      return sum;
    };
    const auto normed = [](Vector<double> x, const Array<double, 1>& weight) {
      double squares = 0;
      for (const double e : x) squares += e * e;
      const double root = std::sqrt(squares / static_cast<double>(x.size()) + 1e-6);
      for (std::int64_t i = 0; i < x.size(); ++i) x(i) *= weight(i) / root;
      return x;
    };
    for (std::int64_t t = 0; t < T; ++t) {
      const Vector<double> x = as_vector(at(hidden.view(), t));
      Vector<double> low(4), kv(5);
      for (std::int64_t i = 0; i < 4; ++i) low(i) = product(q_a, i, x);
      for (std::int64_t i = 0; i < 5; ++i) kv(i) = product(kv_a, i, x);
      const Vector<double> to_q = lora ? normed(low, q_norm) : x;
      const double angle = static_cast<double>(positions(t)) * rope.frequencies(0);
      const double c = rope.magnitude * std::cos(angle), s = rope.magnitude * std::sin(angle);
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t n = 0; n < 6; ++n)
          EXPECT_NEAR(p.q_nope(t, h, n), product(q_b, 8 * h + n, to_q), 1e-14);
        const double a = product(q_b, 8 * h + 6, to_q), b = product(q_b, 8 * h + 7, to_q);
        EXPECT_NEAR(p.q_pe(t, h, 0), a * c - b * s, 1e-14);
        EXPECT_NEAR(p.q_pe(t, h, 1), b * c + a * s, 1e-14);
      }
      const Vector<double> latent = normed(kv.head(3), kv_norm);
      for (std::int64_t i = 0; i < 3; ++i) EXPECT_NEAR(p.latent(t, i), latent(i), 1e-14);
      EXPECT_NEAR(p.k_pe(t, 0), kv(3) * c - kv(4) * s, 1e-14);
      EXPECT_NEAR(p.k_pe(t, 1), kv(4) * c + kv(3) * s, 1e-14);
    }
  }
  EXPECT_NE(rope.magnitude, 1);
}

// Heads as wide as their parts and no wider; a decode's queries have a scale of their own.
TEST(MlaAttention, partsFitAndQueriesAreScaled) {
  EXPECT_EQ(reference::MlaDecodeInputs<double>{}.value_dim, 512);
  const Mla<double> mla(2, 2, 1);
  const auto padded = reference::side_by_side<double>(mla.q_nope, mla.q_pe, 12);
  for (std::int64_t i = 0; i < 12; ++i)
    EXPECT_EQ(padded(1, 2, i), i < 6 ? mla.q_nope(1, 2, i) : i < 10 ? mla.q_pe(1, 2, i - 6) : 0.0);
  EXPECT_THROW(reference::side_by_side<double>(mla.q_nope, mla.q_pe, 9), ContractViolation);
  EXPECT_THROW(reference::split_kv_b<double>(mla.kv_b, 4, 6), ContractViolation);
  EXPECT_THROW(reference::split_kv_b<double>(mla.kv_b, 3, 11), ContractViolation);
  Result<double> result(mla);
  EXPECT_THROW(reference::mla_chunked_prefix<double>(mla.inputs(), mla.w, {.scale = 1}, 0,
                                                     result.out, result.lse),
               ContractViolation);
  const auto cache = on_grid<double>(Shape<3>{1, 4, 8}, {.seed = 1});
  const auto q = on_grid<double>(Shape<4>{1, 1, 1, 8}, {.seed = 2});
  Array<double, 4> doubled = q, out(Shape<4>{1, 1, 1, 5}), expected = out;
  for (double& e : doubled) e *= 2;
  Array<double, 3> lse(Shape<3>{1, 1, 1}), expected_lse = lse;
  const auto table = ints({0}), lengths = ints({4});
  reference::MlaDecodeInputs<double> in{.q = q,
                                        .cache = cache,
                                        .block_table = make_view(table.data(), Shape<2>{1, 1}),
                                        .seq_lens = lengths,
                                        .softmax_scale = 0.3,
                                        .value_dim = 5,
                                        .q_scale = 2};
  reference::mla_decode<double>(in, out, lse);
  in.q = doubled, in.q_scale = 1;
  reference::mla_decode<double>(in, expected, expected_lse);
  EXPECT_TRUE(same_bits(out, expected) && same_bits(lse, expected_lse));
}

}  // namespace
}  // namespace lockstep
