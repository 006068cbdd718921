// Selects the experts of each token, and their weights. DeepSeek-AI 2024, "DeepSeek-V3 Technical
// Report", eqs. 12 to 16 (sigmoid scores, groups, and a bias that only affects the selection). With
// softmax scores, no bias and one group it is the router of Qwen3-Next.
//
//   here     DeepSeek, SGLang          shape
//   logits   router_logits             [T, E]
//   bias     e_score_correction_bias   [E]      added for the selection, not for the weights
//   experts  topk_ids                  [T, k]   by falling score; ties go to the lower number
//   weights  topk_weights              [T, k]
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "reference/tensors/array.hpp"
#include "reference/tensors/functions.hpp"

namespace lockstep::reference {

enum class RouterScore { softmax, sigmoid };

template <class S>
struct RouterOptions {
  std::int64_t experts_per_token;  ///< k
  RouterScore score = RouterScore::softmax;
  std::optional<TensorView<const S, 1>> bias{};  // [E]
  std::int64_t groups = 1;                       ///< experts stand in groups of E / groups
  std::int64_t groups_kept = 1;  ///< groups are kept by the sum of their two best experts
  bool normalise = true;         ///< the k weights sum to 1 before the scale
  S scale = 1;
};

template <class S>
struct Routing {
  Array<std::int32_t, 2> experts;  // [T, k]
  Array<S, 2> weights;             // [T, k]
};

namespace router_detail {

/// The indices of the `count` largest values, largest first; equal values by index.
template <class S>
std::vector<std::int64_t> best(const Vector<S>& values, std::int64_t count) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(values.size()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return values(a) > values(b); });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

template <class S>
Vector<S> scores_of(const Vector<S>& logits, RouterScore score) {
  if (score == RouterScore::sigmoid) return logits.unaryExpr([](S x) { return sigmoid(x); });
  const Vector<S> e = (logits.array() - logits.maxCoeff()).exp();
  return e / e.sum();
}

/// Makes the choice values of experts outside the kept groups smaller than all others.
template <class S>
void keep_groups(Vector<S>& choice, const RouterOptions<S>& options) {
  const std::int64_t size = choice.size() / options.groups;
  Vector<S> group_scores(options.groups);
  for (std::int64_t g = 0; g < options.groups; ++g) {
    const Vector<S> members = choice.segment(g * size, size);
    S sum = 0;
    for (const std::int64_t e : best(members, std::min<std::int64_t>(2, size))) sum += members(e);
    group_scores(g) = sum;
  }
  Vector<S> kept = Vector<S>::Constant(choice.size(), -std::numeric_limits<S>::infinity());
  for (const std::int64_t g : best(group_scores, options.groups_kept))
    kept.segment(g * size, size) = choice.segment(g * size, size);
  choice = kept;
}

}  // namespace router_detail

template <class S>
Routing<S> route(const TensorView<const S, 2>& logits, const RouterOptions<S>& options) {
  const std::int64_t T = logits.extent(0), E = logits.extent(1), k = options.experts_per_token;
  require(E % options.groups == 0 && options.groups_kept <= options.groups,
          "groups divide experts");
  require(k <= E / options.groups * options.groups_kept, "the kept groups have k experts");
  Routing<S> routing{Array<std::int32_t, 2>(Shape<2>{T, k}), Array<S, 2>(Shape<2>{T, k})};
  for (std::int64_t t = 0; t < T; ++t) {
    const Vector<S> scores = router_detail::scores_of(as_vector(at(logits, t)), options.score);
    Vector<S> choice = scores;
    if (options.bias) choice += mapped(*options.bias);
    if (options.groups > 1) router_detail::keep_groups(choice, options);
    const std::vector<std::int64_t> chosen = router_detail::best(choice, k);
    S sum = 0;
    for (const std::int64_t e : chosen) sum += scores(e);
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t e = chosen[static_cast<std::size_t>(i)];
      routing.experts(t, i) = static_cast<std::int32_t>(e);
      routing.weights(t, i) = scores(e) / (options.normalise ? sum : S{1}) * options.scale;
    }
  }
  return routing;
}

}  // namespace lockstep::reference
