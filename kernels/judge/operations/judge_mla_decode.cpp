// The cases of mla_decode and of mla_decode with products in e4m3, their definition and mistakes.
// They are not timed: products may bound its
// time, and the judge does not measure their rate.
#include <fmt/format.h>

#include <numeric>
#include <optional>
#include <string_view>

#include "kernels/judge/operations/attention.hpp"
#include "reference/attention/latent_token.hpp"
#include "reference/attention/mla_attention.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/tensors/e4m3_products.hpp"
#include "reference/tensors/grid.hpp"

namespace lockstep::judging::of_mla_decode {
namespace {

constexpr std::string_view kName = "mla_decode", kE4m3Name = "mla_decode_e4m3";
constexpr std::int64_t kWidth = 576, kValues = 512;
constexpr double kScale = 0.135;                 // DeepSeek-V3's (128 + 64)^-0.5 1.874
constexpr std::int32_t kNoPage = 2'147'480'000;  // block table entry after a request's last page
constexpr double kKvScale = 0.375;               // kv_scale of a cache in e4m3

// --- Cases ---------------------------------------------------------------------------------------

/// The type of the cache: that of the queries; numbers in e4m3 with one scale; or tokens of 656
/// bytes, whose groups of 128 numbers have scales that are powers of two.
enum class Stored : std::uint8_t { as_queries, numbers, tokens };

struct CaseSpec {
  std::string name;
  std::vector<std::int64_t> lengths;  ///< tokens of each request, with those of its queries
  std::int64_t H = 16;
  std::int64_t q_len = 1;
  std::int64_t page = 64;
  bool causal = true;
  bool holes = false;  ///< holes in memory between pages
  bool timed = false;
  Stored stored = Stored::as_queries;
  double spread = 1;        ///< what queries are multiplied by
  bool of_numbers = false;  ///< queries are numbers of e4m3
};

/// The numbers 0 ... count - 1, permuted by the seed.
std::vector<std::int32_t> shuffled(std::int64_t count, std::uint64_t seed) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[random_below(i, seed, 910, i)]);
  return order;
}

/// The tensor `cache` [pages, page, 576] of latents, converted to the cache's type.
Tensor stored_as(Stored stored, Tensor cache) {
  if (stored == Stored::numbers) {
    cache.type = ElementType::e4m3;
    for (double& x : cache.values) x = rounded(4 * x, Format::e4m3);
  }
  if (stored != Stored::tokens) return cache;
  std::vector<double> bytes;
  for (std::size_t begin = 0; begin < cache.values.size(); begin += kWidth) {
    Vector<double> x(kWidth);
    for (std::int64_t i = 0; i < kWidth; ++i)
      x(i) = cache.values[begin + static_cast<std::size_t>(i)] *
             std::array{1.0, 1.0 / 16, 4.0, 1.0 / 4, 1.0}[static_cast<std::size_t>(i / 128)];
    const auto token = reference::packed_token<double>(x, reference::TileScale::power_of_two);
    bytes.insert(bytes.end(), token.begin(), token.end());
  }
  cache.type = ElementType::bytes;
  cache.extents[2] = reference::kTokenBytes;
  cache.strides = contiguous(cache.extents);
  cache.values = std::move(bytes);
  return cache;
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  const auto B = static_cast<std::int64_t>(w.lengths.size());
  const auto pages_of = [&](std::int64_t length) { return (length + w.page - 1) / w.page; };
  std::int64_t used = 0, widest = 0;
  for (const std::int64_t length : w.lengths) {
    used += pages_of(length);
    widest = std::max(widest, pages_of(length));
  }
  const std::int64_t pages = used + 3, blocks = widest + 2;
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 61 + w.H)));
  Case c{.name = w.name, .timed = w.timed};
  c.tensors.push_back(draw("q", options.activations, {B, w.q_len, w.H, kWidth},
                           {"request", "query", "head", "column"}));
  for (double& x : c.tensors.back().values) {
    x *= w.spread;
    if (w.of_numbers) x = rounded(x, Format::e4m3);
  }
  Tensor cache = stored_as(w.stored, draw("kv_cache", options.activations, {pages, w.page, kWidth},
                                          {"page", "place", "column"}));
  const std::int64_t width = cache.extents[2];

  // Pages are permuted. Unused pages, and tokens after a request's end, are NaN.
  const std::vector<std::int32_t> order = shuffled(pages, options.seed);
  std::vector<std::int32_t> table(static_cast<std::size_t>(B * blocks), kNoPage), lengths;
  std::vector<bool> holds(static_cast<std::size_t>(pages * w.page), false);
  std::size_t next = 0;
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t length = w.lengths[static_cast<std::size_t>(b)];
    lengths.push_back(static_cast<std::int32_t>(length));
    for (std::int64_t l = 0; l < length; ++l) {
      std::int32_t& entry = table[static_cast<std::size_t>(b * blocks + l / w.page)];
      if (l % w.page == 0) entry = order[next++];
      holds[static_cast<std::size_t>(entry * w.page + l % w.page)] = true;
    }
  }
  for (std::size_t i = 0; i < holds.size(); ++i)
    if (!holds[i])
      std::fill_n(cache.values.begin() + static_cast<std::ptrdiff_t>(i) * width, width,
                  std::numeric_limits<double>::quiet_NaN());
  if (w.holes) spread(cache, 0, 64);
  c.tensors.push_back(std::move(cache));
  c.tensors.push_back(indices("block_table", {B, blocks}, table, {"request", "block"}));
  c.tensors.push_back(indices("seq_lens", {B}, lengths, {"request"}));
  if (w.stored == Stored::numbers)
    c.tensors.push_back({.name = "kv_scale",
                         .type = ElementType::float32,
                         .extents = {1},
                         .strides = {1},
                         .values = {kKvScale}});
  c.tensors.push_back(Draw::output("out", options.activations, {B, w.q_len, w.H, kValues},
                                   {"request", "query", "head", "column"}));
  c.tensors.push_back(
      Draw::output("lse", ElementType::float32, {B, w.H, w.q_len}, {"request", "head", "query"}));
  c.scalars = {{"softmax_scale", kScale}, {"causal", w.causal}};
  c.about = fmt::format("{}, H={}, {} each, pages of {}", counted(B, "request"), w.H,
                        counted(w.q_len, "query", "queries"), w.page);
  return c;
}

std::vector<CaseSpec> batches() {
  return {
      {.name = "one-request", .lengths = {100}},
      {.name = "one-token", .lengths = {1}},
      {.name = "around-pages", .lengths = {63, 64, 65, 1, 127, 128, 129}, .H = 3},
      {.name = "long", .lengths = {700, 3}},
      {.name = "one-head", .lengths = {90, 5}, .H = 1},
      {.name = "all-heads", .lengths = {70, 20}, .H = 128},
      {.name = "odd-heads", .lengths = {66, 20}, .H = 63},
      {.name = "drafts", .lengths = {4, 70, 65}, .H = 9, .q_len = 4},
      {.name = "drafts-see-all", .lengths = {4, 70, 65}, .H = 9, .q_len = 2, .causal = false},
      {.name = "no-keys", .lengths = {0, 5, 0, 64}},
      {.name = "drafts-no-keys", .lengths = {2, 0, 66}, .H = 5, .q_len = 4},
  };
}

std::vector<CaseSpec> pages() {
  std::vector<CaseSpec> all;
  for (const std::int64_t page : {1, 16, 32, 128})
    all.push_back({.name = fmt::format("pages-of-{}", page),
                   .lengths = {130, 15, 64},
                   .H = 4,
                   .q_len = 2,
                   .page = page});
  all.push_back({.name = "holes", .lengths = {130, 15}, .H = 4, .holes = true});
  return all;
}

std::vector<CaseSpec> narrow_caches() {
  std::vector<CaseSpec> all;
  for (const auto& [name, stored] :
       {std::pair("e4m3", Stored::numbers), std::pair("tokens-of-656-bytes", Stored::tokens)})
    for (const std::int64_t page : {64, 1, 16})
      all.push_back({.name = page == 64 ? name : fmt::format("{}-pages-of-{}", name, page),
                     .lengths = {130, 15, 64},
                     .H = 4,
                     .q_len = 2,
                     .page = page,
                     .stored = stored});
  return all;
}

/// Of products in e4m3: pages of whole tiles, and queries that e4m3 holds only as multiples of a
/// row's own scale, or as they are.
std::vector<CaseSpec> cases_in_e4m3() {
  std::vector<CaseSpec> all = batches();
  all.push_back({.name = "pages-of-128", .lengths = {130, 15, 64}, .H = 20, .page = 128});
  all.push_back({.name = "large-queries", .lengths = {70, 9}, .H = 5, .spread = 512});
  all.push_back({.name = "queries-in-e4m3", .lengths = {300, 20}, .of_numbers = true});
  for (CaseSpec& one : all) one.stored = Stored::numbers;
  return all;
}

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-scale", "without softmax_scale"},
    {"scale-of-width", "with the scale 576^-0.5 of the absorbed query instead of softmax_scale"},
    {"no-k-pe", "without k_pe, the last 64 columns, in the scores"},
    {"last-columns", "with values that are the last 512 columns, k_pe among them"},
    {"sees-all", "with all keys visible to every query"},
    {"top-left", "with a causal border from the top left: query i sees the first i + 1 keys"},
    {"newest-unseen", "with seq_lens taken for the length without the queries' own tokens"},
    {"whole-last-page", "with the last page read to its end"},
    {"first-page-alone", "with the request's first page read again for every later one"},
    {"swapped-requests", "with the keys of neighbouring requests swapped"},
    {"heads-first", "with queries and heads of a request changing places"},
    {"mean-of-pieces", "with two pieces of the keys merged without their lse"},
    {"piece-too-many", "with an empty piece merged as if its lse were 0"},
    {"empty-minus", "with an lse of -inf where a query sees no key"},
    {"lse-of-2", "with lse in powers of two"},
    {"no-kv-scale", "without kv_scale"},
    {"first-scale", "with the first scale of each token of 656 bytes for all its columns"},
};

/// Those of products in e4m3 besides.
const std::vector<Mistake> kE4m3Mistakes = [] {
  std::vector<Mistake> all = kMistakes;
  std::erase_if(all, [](const Mistake& one) { return one.id == "first-scale"; });
  all.push_back(
      {"queries-as-they-are", "with queries rounded to e4m3 without a scale of their row"});
  all.push_back({"p-of-one-number", "with p rounded to e4m3 once, not as a sum of two numbers"});
  return all;
}();

/// Attention of one query over at least one key. With a format of the result, what products take is
/// rounded to e4m3 and they are summed as tensor cores do; without one, only the mistake rounds.
reference::Attended<double> attended_in_e4m3(const Vector<double>& q, const Matrix<double>& K,
                                             const Matrix<double>& V, double scale,
                                             std::optional<Format> stored,
                                             std::string_view mistake) {
  const bool as_they_are = mistake == "queries-as-they-are", once = mistake == "p-of-one-number";
  const auto in_e4m3 = [&](const Vector<double>& x, bool is_mistaken) {
    return stored || is_mistaken ? rounded_each(x, Format::e4m3) : x;
  };
  const auto product = [&](const Vector<double>& a, const Vector<double>& b) {
    return stored ? product_in_e4m3(a, b) : a.dot(b);
  };
  const double power = as_they_are ? 1 : power_for_e4m3(q);
  const Vector<double> numbers = in_e4m3(q * power, as_they_are);
  Vector<double> scores(K.rows());
  for (std::int64_t j = 0; j < K.rows(); ++j)
    scores(j) = product(numbers, K.row(j).transpose()) / power * scale;
  const double most = scores.maxCoeff();
  const Vector<double> p = (scores.array() - most).exp() * 32;
  const Vector<double> nearest = in_e4m3(p, once), rest = in_e4m3(p - nearest, once);
  Vector<double> out(V.cols());
  for (std::int64_t i = 0; i < V.cols(); ++i) {
    const Vector<double> v = V.col(i);
    out(i) = product(nearest, v) + (once ? 0 : product(rest, v));
  }
  out /= p.sum();
  return {stored ? rounded_each(out, *stored) : out, most + std::log(p.sum() / 32)};
}

template <class S>
class Definition {
 public:
  Definition(const Case& c, std::string_view mistake, bool rounded, bool in_e4m3 = false)
      : mistake_(mistake),
        in_e4m3_(in_e4m3),
        stored_(rounded ? std::optional(format_of(c.tensor("q").type)) : std::nullopt),
        q_(array_of<S, 4>(c, "q")),
        cache_(latents(c, mistake)),
        table_(array_of<std::int32_t, 2>(c, "block_table")),
        lengths_(array_of<std::int32_t, 1>(c, "seq_lens")),
        scale_(static_cast<S>(*c.number("softmax_scale"))),
        causal_(c.flag("causal")) {
    if (mistake == "no-scale") scale_ = 1;
    if (mistake == "scale-of-width") scale_ = static_cast<S>(1 / std::sqrt(double{kWidth}));
    if (mistake == "sees-all") causal_ = false;
  }

  Answer answer() const {
    const std::int64_t B = q_.extent(0), q_len = q_.extent(1), H = q_.extent(2);
    Array<S, 4> out(Shape<4>{B, q_len, H, kValues});
    Array<S, 3> lse(Shape<3>{B, H, q_len});
    for (std::int64_t b = 0; b < B; ++b) {
      const Matrix<S> K = keys(b);
      for (std::int64_t i = 0; i < q_len; ++i)
        for (std::int64_t h = 0; h < H; ++h) {
          const std::int64_t row = h * q_len + i;
          const bool turned = mistake_ == "heads-first";
          const auto q = turned ? at(q_.view(), b, row / H, row % H) : at(q_.view(), b, i, h);
          const reference::Attended<S> one = attended(as_vector(q), K, seen(i, K.rows()));
          mapped(at(out.view(), b, i, h)) = one.out;
          lse(b, h, i) = one.lse;
        }
    }
    return {{"out", as_values(out)}, {"lse", as_values(lse)}};
  }

 private:
  /// The values of the cache, [pages, page, 576].
  static Array<S, 3> latents(const Case& c, std::string_view mistake) {
    Array<S, 3> cache = array_of<S, 3>(c, "kv_cache");
    if (c.find("kv_scale") != nullptr && mistake != "no-kv-scale")
      for (S& x : cache) x *= static_cast<S>(c.tensor("kv_scale").values[0]);
    if (c.tensor("kv_cache").type != ElementType::bytes) return cache;
    Array<S, 3> values(Shape<3>{cache.extent(0), cache.extent(1), kWidth},
                       std::numeric_limits<S>::quiet_NaN());
    for (std::int64_t i = 0; i < cache.extent(0) * cache.extent(1); ++i) {
      const S* const bytes = cache.data() + i * reference::kTokenBytes;
      if (std::isnan(bytes[0])) continue;
      reference::LatentToken token;
      std::copy_n(bytes, token.size(), token.begin());
      if (mistake == "first-scale")
        for (std::size_t tile = 1; tile < 4; ++tile)
          std::copy_n(token.begin() + kValues, 4, token.begin() + kValues + 4 * tile);
      const Vector<S> x = reference::unpacked_token<S>(token);
      std::copy(x.begin(), x.end(), values.data() + i * kWidth);
    }
    return values;
  }

  Matrix<S> keys(std::int64_t b) const {
    const std::int64_t page = cache_.extent(1), other = b ^ 1;
    if (mistake_ == "swapped-requests" && other < lengths_.extent(0)) b = other;
    std::int64_t length = lengths_(b);
    if (mistake_ == "whole-last-page") length = (length + page - 1) / page * page;
    if (mistake_ == "newest-unseen") length = std::max<std::int64_t>(length - q_.extent(1), 0);
    Matrix<S> K(length, kWidth);
    for (std::int64_t l = 0; l < length; ++l) {
      const std::int32_t entry = table_(b, mistake_ == "first-page-alone" ? 0 : l / page);
      K.row(l) = as_vector(at(cache_.view(), entry, l % page)).transpose();
    }
    return K;
  }

  std::int64_t seen(std::int64_t i, std::int64_t keys) const {
    if (mistake_ == "top-left") return std::min(i + 1, keys);
    return reference::visible_keys(i, q_.extent(1), keys, causal_);
  }

  reference::Attended<S> attended(Vector<S> q, const Matrix<S>& all, std::int64_t n) const {
    if (mistake_ == "no-k-pe") q.tail(kWidth - kValues).setZero();
    const Matrix<S> K = all.topRows(n);
    const Matrix<S> V = mistake_ == "last-columns" ? K.rightCols(kValues) : K.leftCols(kValues);
    const S nothing = mistake_ == "empty-minus" ? -std::numeric_limits<S>::infinity()
                                                : std::numeric_limits<S>::infinity();
    if (n == 0) return {Vector<S>::Zero(kValues), nothing};
    if (in_e4m3_ &&
        (stored_ || mistake_ == "queries-as-they-are" || mistake_ == "p-of-one-number")) {
      const auto one = attended_in_e4m3(q.template cast<double>(), K.template cast<double>(),
                                        V.template cast<double>(), static_cast<double>(scale_),
                                        stored_, mistake_);
      return {one.out.template cast<S>(), static_cast<S>(one.lse)};
    }
    return attention::attended<S>(q, K, V, scale_, stored_, mistake_);
  }

  std::string_view mistake_;
  bool in_e4m3_;
  std::optional<Format> stored_;
  Array<S, 4> q_;
  Array<S, 3> cache_;
  Array<std::int32_t, 2> table_;
  Array<std::int32_t, 1> lengths_;
  S scale_;
  bool causal_;
};

const JudgedKernel kOperation{
    .name = kName,
    .summary = "decode of multi-head latent attention: 22 cases, 17 known mistakes",
    .positional = {"q", "kv_cache", "block_table", "seq_lens", "softmax_scale"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(planned<CaseSpec>({batches(), pages(), narrow_caches()}, make), {},
                            "around-pages");
        },
    .truth = [](const Case& c,
                std::string_view m) { return Definition<double>(c, m, false).answer(); },
    .yardstick = [](const Case& c,
                    std::string_view m) { return Definition<float>(c, m, true).answer(); },
    .mistakes = kMistakes};

const JudgedKernel kE4m3Operation{
    .name = kE4m3Name,
    .summary = "mla_decode with products in e4m3: 14 cases, 18 known mistakes",
    .positional = {"q", "kv_cache", "block_table", "seq_lens", "softmax_scale"},
    .default_types = "bfloat16/float32",
    .plans =
        [] { return with_large(planned<CaseSpec>({cases_in_e4m3()}, make), {}, "around-pages"); },
    .truth = [](const Case& c,
                std::string_view m) { return Definition<double>(c, m, false, true).answer(); },
    .yardstick = [](const Case& c,
                    std::string_view m) { return Definition<float>(c, m, true, true).answer(); },
    .mistakes = kE4m3Mistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};
const Registration<JudgedOperation> kE4m3Registered{judged<kE4m3Operation>()};

}  // namespace
}  // namespace lockstep::judging::of_mla_decode
