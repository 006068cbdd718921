// The cases of mla_prefill, its definition and mistakes. It is not timed: products bound its time,
// and the judge does not measure their rate.
#include <fmt/format.h>

#include <numeric>

#include "kernels/judge/operations/attention.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_mla_prefill {
namespace {

constexpr std::string_view kName = "mla_prefill";
constexpr std::int64_t kWidth = 192, kValues = 128, kPe = 64;
constexpr std::int64_t kTile =
    128;                          // keys of a tile, which a careless kernel uses beyond a row's end
constexpr double kScale = 0.135;  // DeepSeek-V3's (128 + 64)^-0.5 1.874

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  std::vector<std::int64_t> queries, keys;  ///< counts by row
  std::int64_t H = 2;
  bool causal = true;
  bool holes = false;  ///< holes in memory between tokens of keys and values
  bool timed = false;
};

std::vector<std::int32_t> starts_of(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int32_t> starts{0};
  for (const std::int64_t size : sizes)
    starts.push_back(starts.back() + static_cast<std::int32_t>(size));
  return starts;
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  const auto rows = static_cast<std::int64_t>(w.queries.size());
  const std::vector<std::int32_t> queries = starts_of(w.queries), keys = starts_of(w.keys);
  const std::int64_t T = queries.back(), L = keys.back() + 3;
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 67 + T + L)));
  Case c{.name = w.name, .timed = w.timed};
  const ElementType type = options.activations;
  c.tensors.push_back(draw("q", type, {T, w.H, kWidth}, {"token", "head", "column"}));
  c.tensors.push_back(draw("k", type, {L, w.H, kWidth}, {"key", "head", "column"}));
  c.tensors.push_back(draw("v", type, {L, w.H, kValues}, {"key", "head", "column"}));
  for (const std::size_t i : {1, 2}) {  // after the last row are keys of nobody
    Tensor& x = c.tensors[i];
    std::fill(x.values.end() - 3 * w.H * (i == 1 ? kWidth : kValues), x.values.end(),
              std::numeric_limits<double>::quiet_NaN());
    if (w.holes) spread(x, 0, 64);
  }
  c.tensors.push_back(indices("query_start_loc", {rows + 1}, queries));
  c.tensors.push_back(indices("key_start_loc", {rows + 1}, keys));
  c.tensors.push_back(Draw::output("out", type, {T, w.H, kValues}, {"token", "head", "column"}));
  c.tensors.push_back(Draw::output("lse", ElementType::float32, {w.H, T}, {"head", "token"}));
  c.scalars = {{"softmax_scale", kScale}, {"causal", w.causal}};
  c.about =
      fmt::format("{}, {} over {}, H={}{}", counted(rows, "row"), counted(T, "query", "queries"),
                  counted(keys.back(), "key"), w.H, w.causal ? "" : ", all seen");
  return c;
}

std::vector<CaseSpec> prompts() {
  return {
      {.name = "one-row", .queries = {100}, .keys = {100}},
      {.name = "one-token", .queries = {1}, .keys = {1}},
      {.name = "one-block", .queries = {128}, .keys = {128}, .H = 1},
      {.name = "around-blocks", .queries = {127, 128, 129, 1}, .keys = {127, 128, 129, 1}},
      {.name = "around-halves", .queries = {63, 64, 65}, .keys = {63, 64, 65}, .H = 3},
      {.name = "many-heads", .queries = {20, 7}, .keys = {20, 7}, .H = 16},
      {.name = "empty-rows", .queries = {0, 9, 0, 4}, .keys = {0, 9, 0, 4}},
      {.name = "holes", .queries = {130, 15}, .keys = {130, 15}, .holes = true},
  };
}

std::vector<CaseSpec> prefixes() {
  return {
      {.name = "behind-a-prefix", .queries = {30, 5}, .keys = {150, 133}},
      {.name = "last-token", .queries = {1, 1}, .keys = {200, 64}},
      {.name = "chunk", .queries = {30, 5, 1}, .keys = {64, 129, 1}, .causal = false},
      {.name = "empty-chunk", .queries = {6, 3}, .keys = {0, 70}, .causal = false},
      {.name = "without-keys", .queries = {6, 3}, .keys = {0, 1}},
  };
}

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-scale", "without softmax_scale"},
    {"scale-of-nope", "with the scale 128^-0.5 of q_nope alone instead of softmax_scale"},
    {"no-k-pe", "without k_pe, the last 64 columns, in the scores"},
    {"values-of-keys", "with the first 128 columns of k as values"},
    {"sees-all", "with all keys of its row visible to every query"},
    {"top-left", "with a causal border from the top left: query i sees the first i + 1 keys"},
    {"itself-unseen", "with a causal border one key early: a query does not see itself"},
    {"one-row", "with all rows of the batch taken for one"},
    {"swapped-rows", "with the keys of neighbouring rows swapped"},
    {"whole-tiles", "with keys read up to a multiple of 128, the next row's among them"},
    {"next-head", "with keys and values of the next head"},
    {"mean-of-pieces", "with two pieces of the keys merged without their lse"},
    {"piece-too-many", "with an empty piece merged as if its lse were 0"},
    {"empty-plus", "with an lse of +inf where a query sees no key, as mla_decode has it"},
    {"lse-of-2", "with lse in powers of two"},
};

template <class S>
class Definition {
 public:
  Definition(const Case& c, std::string_view mistake, bool rounded)
      : mistake_(mistake),
        stored_(rounded ? std::optional(format_of(c.tensor("q").type)) : std::nullopt),
        q_(array_of<S, 3>(c, "q")),
        k_(array_of<S, 3>(c, "k")),
        v_(array_of<S, 3>(c, "v")),
        queries_(array_of<std::int32_t, 1>(c, "query_start_loc")),
        keys_(array_of<std::int32_t, 1>(c, "key_start_loc")),
        scale_(static_cast<S>(*c.number("softmax_scale"))),
        causal_(c.flag("causal")) {
    if (mistake == "no-scale") scale_ = 1;
    if (mistake == "scale-of-nope") scale_ = static_cast<S>(1 / std::sqrt(double{kValues}));
    if (mistake == "sees-all") causal_ = false;
  }

  Answer answer() const {
    const std::int64_t T = q_.extent(0), H = q_.extent(1), rows = queries_.extent(0) - 1;
    Array<S, 3> out(Shape<3>{T, H, kValues});
    Array<S, 2> lse(Shape<2>{H, T});
    const bool one_row = mistake_ == "one-row";
    for (std::int64_t row = 0; row < (one_row ? 1 : rows); ++row) {
      const std::int64_t first = queries_(row), last = queries_(one_row ? rows : row + 1);
      for (std::int64_t h = 0; h < H; ++h) {
        const auto [K, V] = keys_of(row, mistake_ == "next-head" ? (h + 1) % H : h);
        for (std::int64_t t = first; t < last; ++t) {
          const std::int64_t n = seen(t - first, last - first, K.rows());
          const reference::Attended<S> one = attended(as_vector(at(q_.view(), t, h)), K, V, n);
          mapped(at(out.view(), t, h)) = one.out;
          lse(h, t) = one.lse;
        }
      }
    }
    return {{"out", as_values(out)}, {"lse", as_values(lse)}};
  }

 private:
  /// Keys and values of a row and head, as the mistake takes them.
  std::pair<Matrix<S>, Matrix<S>> keys_of(std::int64_t row, std::int64_t h) const {
    const std::int64_t rows = keys_.extent(0) - 1, all = keys_(rows), other = row ^ 1;
    if (mistake_ == "swapped-rows" && other < rows) row = other;
    const std::int64_t first = keys_(row);
    std::int64_t end = keys_(mistake_ == "one-row" ? rows : row + 1);
    if (mistake_ == "whole-tiles")
      end = std::min(first + (end - first + kTile - 1) / kTile * kTile, all);
    const Matrix<S> K = reference::head_of<S>(cut(k_.view(), first, end), h);
    if (mistake_ == "values-of-keys") return {K, K.leftCols(kValues)};
    return {K, reference::head_of<S>(cut(v_.view(), first, end), h)};
  }

  std::int64_t seen(std::int64_t i, std::int64_t queries, std::int64_t keys) const {
    if (mistake_ == "top-left" && causal_) return std::min(i + 1, keys);
    const bool early = mistake_ == "itself-unseen" && causal_;
    return reference::visible_keys(i - (early ? 1 : 0), queries, keys, causal_);
  }

  reference::Attended<S> attended(Vector<S> q, const Matrix<S>& K, const Matrix<S>& V,
                                  std::int64_t n) const {
    const S nothing = std::numeric_limits<S>::infinity();
    if (n == 0) return {Vector<S>::Zero(kValues), mistake_ == "empty-plus" ? nothing : -nothing};
    if (mistake_ == "no-k-pe") q.tail(kPe).setZero();
    return attention::attended<S>(q, K.topRows(n), V.topRows(n), scale_, stored_, mistake_);
  }

  std::string_view mistake_;
  std::optional<Format> stored_;
  Array<S, 3> q_, k_, v_;
  Array<std::int32_t, 1> queries_, keys_;
  S scale_;
  bool causal_;
};

const JudgedKernel kOperation{
    .name = kName,
    .summary = "prompts of multi-head latent attention: 13 cases, 15 known mistakes",
    .positional = {"q", "k", "v", "query_start_loc", "key_start_loc", "softmax_scale"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return planned<CaseSpec>({prompts(), prefixes()}, make);
        },
    .truth = [](const Case& c,
                std::string_view m) { return Definition<double>(c, m, false).answer(); },
    .yardstick = [](const Case& c,
                    std::string_view m) { return Definition<float>(c, m, true).answer(); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_mla_prefill
