// Bugs that kernels of attention had, by the number of their public report. Each is planted, and a
// law of the reference sees it.
#include <gtest/gtest.h>

#include "properties/support/laws.hpp"
#include "properties/support/planted.hpp"
#include "properties/support/special_values.hpp"
#include "reference/attention/mla_attention.hpp"
#include "reference/attention/static_kv_update.hpp"
#include "reference/tensors/fp8.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::Attended;

/// Attention that weighs what it may not see by 0 instead of leaving it out.
Attended<double> weighed(const Vector<double>& q, const Matrix<double>& K, const Matrix<double>& V,
                         std::int64_t visible) {
  Vector<double> weights = Vector<double>::Zero(K.rows());
  for (std::int64_t j = 0; j < visible; ++j) weights(j) = std::exp(K.row(j).dot(q));
  const double sum = weights.sum();
  return {V.transpose() * weights / sum, std::log(sum)};
}

/// The reference over one page that holds all keys, of which a request has the first `visible`.
/// (The kernel is asked the same by softmax_attention_gpu_test.cpp, whose pools are NaN elsewhere.)
Attended<double> paged(const Vector<double>& q, const Matrix<double>& K, const Matrix<double>& V,
                       std::int64_t visible) {
  const auto page_of = [](const Matrix<double>& rows) {
    return make_view(rows.data(), Shape<4>{1, rows.rows(), 1, rows.cols()});
  };
  const auto table = ints({0}), length = ints({visible}), starts = starts_of({1});
  Array<double, 3> out(Shape<3>{1, 1, V.cols()});
  Array<double, 2> lse(Shape<2>{1, 1});
  reference::paged_attention<double>(make_view(q.data(), Shape<3>{1, 1, q.size()}), page_of(K),
                                     page_of(V), make_view(table.data(), Shape<2>{1, 1}),
                                     length.view(), starts.view(), {.scale = 1.0}, out.view(),
                                     lse.view());
  return {as_vector(at(out.view(), 0, 0)), lse(0, 0)};
}

/// The output is the same for anything behind the visible keys.
template <class Attend>
bool ignores(std::int64_t rows, std::int64_t visible, double poison, Attend attend) {
  Matrix<double> K(rows, 4), V(rows, 4);
  for (std::int64_t i = 0; i < K.size(); ++i) {
    K.data()[i] = Grid{.stream = 1}(static_cast<std::uint64_t>(i));
    V.data()[i] = Grid{.stream = 2}(static_cast<std::uint64_t>(i));
  }
  const Vector<double> q = Vector<double>::Ones(4);
  const auto clean = reference::attend<double>(q, K.topRows(visible), V.topRows(visible), 1.0);
  K.bottomRows(rows - visible).setConstant(poison);
  V.bottomRows(rows - visible).setConstant(poison);
  const Attended<double> found = attend(q, K, V, visible);
  return (found.out - clean.out).norm() < 1e-14 && std::abs(found.lse - clean.lse) < 1e-13;
}

// FlashInfer #941, #942: NaN in the unfilled slots of the last page reached the output. Page 4,
// length 13.
TEST(AttentionBugs, flashinfer941_theRestOfAPageIsNotSeen) {
  catches([](auto attend) { return ignores(16, 13, kNan, attend); }, paged, weighed);
}

// flash-attention #1745, #2374: a weight of 0 times a value of NaN. One key of three is visible.
TEST(AttentionBugs, flashAttention2374_maskedValuesAreNotWeighed) {
  catches([](auto attend) { return ignores(3, 1, kNan, attend); }, paged, weighed);
  EXPECT_TRUE(ignores(3, 1, 5.0, weighed)) << "finite values would not have shown it";
}

/// The formula of the merge, without any case of its own.
Attended<double> merged_plainly(const Attended<double>& a, const Attended<double>& b) {
  const double m = std::max(a.lse, b.lse);
  const double x = std::exp(a.lse - m), y = std::exp(b.lse - m);
  return {(x * a.out + y * b.out) / (x + y), m + std::log(x + y)};
}

// vLLM #27491: two chunks of a prefix that are both empty for a query gave NaN.
TEST(AttentionBugs, vllm27491_mergingNothingWithNothingIsNothing) {
  const Attended<double> nothing{Vector<double>::Zero(2), -kInfinity};
  const auto law = [&](auto merge) {
    const Attended<double> both = merge(nothing, nothing);
    return both.lse == -kInfinity && both.out == Vector<double>::Zero(2);
  };
  catches(law, reference::merged<double>, merged_plainly);
}

// vLLM #15492: one library says +inf where another says -inf, and the merge knew one of them.
TEST(AttentionBugs, vllm15492_eitherInfinityIsEmpty) {
  const Attended<double> something{Vector<double>::Ones(2), 0.5};
  const Attended<double> nothing{Vector<double>::Zero(2), kInfinity};
  const auto law = [&](auto merge) {
    const Attended<double> found = merge(something, nothing);
    return found.lse == 0.5 && found.out == something.out;
  };
  catches(law, reference::merged<double>, merged_plainly);
}

// vLLM #38652: an fp8 latent cache was read without its scale where a prefix was reused, so that
// the first turn was right and the second was not.
TEST(AttentionBugs, vllm38652_aReusedPrefixHasItsScale) {
  const std::int64_t L = 128, d = 8;
  const double scale = 0.0625;
  auto exact = on_grid<double>(Shape<3>{1, L, d}, {.seed = 3, .limit = 2});
  Array<double, 3> stored = exact;
  for (double& e : stored) e = rounded(e / scale, Format::e4m3);
  const auto q = on_grid<double>(Shape<4>{1, 64, 2, d}, {.seed = 4});
  const auto table = ints({0}), lengths = ints({128});
  const auto decoded = [&](const Array<double, 3>& cache, double kv_scale) {
    Array<double, 4> out(Shape<4>{1, 64, 2, 5});
    Array<double, 3> lse(Shape<3>{1, 2, 64});
    reference::mla_decode<double>({.q = q,
                                   .cache = cache,
                                   .block_table = make_view(table.data(), Shape<2>{1, 1}),
                                   .seq_lens = lengths,
                                   .softmax_scale = 0.3,
                                   .value_dim = 5,
                                   .kv_scale = kv_scale},
                                  out, lse);
    return out;
  };
  const auto truth = decoded(exact, 1);
  const auto law = [&](double kv_scale) {
    return difference(decoded(stored, kv_scale), truth).relative() < 0.1;
  };
  catches(law, scale, 1.0);
}

// Casting a query to fp8 without dividing it by its scale is right for a scale of 1 alone.
TEST(AttentionBugs, queriesInFp8AreDividedByTheScale) {
  const double scale = 0.25;
  const auto x = on_grid<double>(Shape<1>{64}, {.seed = 5, .limit = 2});
  const auto law = [&](double divisor) {
    double error = 0;
    for (const double e : x)
      error = std::max(error, std::abs(rounded(e / divisor, Format::e4m3) * scale - e));
    return error < 0.13;
  };
  catches(law, scale, 1.0);
}

/// The score of one query with one key at a distance, under YaRN's corrections.
struct Yarn {
  double magnitude, softmax_factor;
};

/// DeepSeek-V2-Lite: factor 40, mscale = mscale_all_dim = 0.707. The rotation keeps lengths, and
/// the scores are stretched by 1.590.
bool is_v2_lite(const Yarn& yarn) {
  return std::abs(yarn.magnitude - 1) < 1e-12 && std::abs(yarn.softmax_factor - 1.590) < 1e-3;
}

// mobius PR 548, transformers #47435: the softmax scale went without mscale^2.
TEST(AttentionBugs, transformers47435_theSoftmaxScaleIsCorrected) {
  const auto rope = reference::yarn_rope<double>(
      64, 10000, {.factor = 40, .mscale = 0.707, .mscale_all_dim = 0.707});
  catches(is_v2_lite, Yarn{rope.magnitude, rope.softmax_factor}, Yarn{rope.magnitude, 1});
}

// imp PR 880: cosines and sines were scaled by mscale_all_dim's factor, not by the ratio of the
// two.
TEST(AttentionBugs, imp880_rotationsAreScaledByTheRatio) {
  const auto rope = reference::yarn_rope<double>(
      64, 10000, {.factor = 40, .mscale = 0.707, .mscale_all_dim = 0.707});
  const double all_dim = reference::get_mscale(40.0, 0.707);
  EXPECT_NEAR(all_dim, 1.261, 1e-3);
  catches(is_v2_lite, Yarn{rope.magnitude, rope.softmax_factor},
          Yarn{all_dim, rope.softmax_factor});
}

/// One token of a prompt of three, in a cache of eight whose first `left` positions are padding.
struct StaticCache {
  explicit StaticCache(std::int64_t left)
      : left(left),
        q(on_grid<double>(Shape<4>{1, 3, 1, 4}, {.seed = 6, .stream = 1})),
        k(on_grid<double>(Shape<4>{1, 3, 1, 4}, {.seed = 6, .stream = 2})),
        v(on_grid<double>(Shape<4>{1, 3, 1, 4}, {.seed = 6, .stream = 3})) {}

  /// Outputs over a cache of zeros in which a query sees the positions that `sees(query, j)` says.
  template <class Sees>
  Array<double, 4> attended(Sees sees) const {
    Array<double, 4> cache_k(Shape<4>{1, 1, 8, 4}, 0.0), cache_v = cache_k, out(q.shape());
    const auto positions = ints({left, left + 1, left + 2});
    reference::write_kv<double>(k, positions, 3, cache_k);
    reference::write_kv<double>(v, positions, 3, cache_v);
    for (std::int64_t i = 0; i < 3; ++i) {
      Array<bool, 2> mask(Shape<2>{1, 8}, false);
      for (std::int64_t j = 0; j < 8; ++j) mask(0, j) = sees(left + i, j);
      Array<double, 4> one(Shape<4>{1, 1, 1, 4}), query = one;
      mapped(at(query.view(), 0, 0, 0)) = mapped(at(q.view(), 0, i, 0));
      const auto last = ints({7});  // the mask alone decides
      reference::static_kv_attention<double>(query, cache_k, cache_v, mask, last, 0.5, one);
      mapped(at(out.view(), 0, i, 0)) = mapped(at(one.view(), 0, 0, 0));
    }
    return out;
  }
  Array<double, 3> expected() const {
    Array<double, 3> out(Shape<3>{3, 1, 4});
    Array<double, 2> lse(Shape<2>{1, 3});
    reference::attention_row<double>(at(q.view(), 0), at(k.view(), 0), at(v.view(), 0),
                                     {.scale = 0.5}, out, lse);
    return out;
  }
  template <class Sees>
  bool holds(Sees sees) const {
    const auto found = attended(sees);
    return difference(at(found.view(), 0), expected().view()).relative() < 1e-13;
  }
  std::int64_t left;
  Array<double, 4> q, k, v;
};

// transformers #30400, #30414: the zeros after a static cache's tokens were not masked, and the
// text fell apart the longer the cache was.
TEST(AttentionBugs, transformers30400_theTailOfAStaticCacheIsMasked) {
  const StaticCache cache(0);
  catches([&](auto sees) { return cache.holds(sees); },
          [](std::int64_t query, std::int64_t j) { return j <= query; },
          [](std::int64_t query, std::int64_t j) { return j <= query || j >= 3; });
}

// transformers #30670: a causal mask without the padding's.
TEST(AttentionBugs, transformers30670_leftPaddingIsMasked) {
  const StaticCache cache(2);
  catches([&](auto sees) { return cache.holds(sees); },
          [](std::int64_t query, std::int64_t j) { return j <= query && j >= 2; },
          [](std::int64_t query, std::int64_t j) { return j <= query; });
}

// Scores are masked by selection: NaN + -inf is NaN.
TEST(AttentionBugs, maskedScoresAreSelectedAway) {
  const auto adds = [](const Vector<double>& q, const Matrix<double>& K, const Matrix<double>& V,
                       std::int64_t visible) {
    Vector<double> scores = K * q;
    for (std::int64_t j = visible; j < K.rows(); ++j) scores(j) += -kInfinity;
    const Vector<double> weights = scores.array().exp();
    return Attended<double>{V.topRows(visible).transpose() * weights.head(visible) / weights.sum(),
                            std::log(weights.sum())};
  };
  catches([](auto attend) { return ignores(4, 2, kNan, attend); }, paged, adds);
}

// SGLang's scale of a tile without a floor: a tile of zeros is 0 / 0.
TEST(AttentionBugs, aTileOfZerosStaysZero) {
  const auto unguarded = [](const Array<double, 2>& x) {
    const double amax = 0;
    return rounded(x(0, 0) * (448 / amax), Format::e4m3);
  };
  const auto guarded = [](const Array<double, 2>& x) { return scaled_to_fp8(x).values(0, 0); };
  catches(
      [](auto scaled) {
        return scaled(Array<double, 2>(Shape<2>{1, 4}, 0.0)) == 0;
      },
      guarded, unguarded);
}

}  // namespace
}  // namespace lockstep
