// Batched products with weights; x and weights may be quantised, with scales: the per-head products
// that absorb and un-absorb in latent attention (SGLang's bmm_fp8), and projections (a batch of
// one). Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; scales for groups of 128:
// DeepSeek-AI 2024, "DeepSeek-V3", 3.3.2.
//
//   out[g, m, n] = sum_k x[g, m, k] xs[g, m, k / 128] weight[g, n, k] ws[g, n / 128, k / 128]
//
//   here           SGLang                 shape
//   x              q_nope, attn_output    [1 or G, M, K]     1: the same rows for every g
//   weight         w_kc, w_vc             [G, N, K]
//   x_scale        x_scale                [G, M, ceil(K / 128)]               an extent of 1 is
//   weight_scale   weight_scale_inv       [G, ceil(N / 128), ceil(K / 128)]   repeated
//   out                                   [G, M, N]
#pragma once

#include <algorithm>
#include <optional>

#include "reference/tensors/array.hpp"
#include "reference/tensors/fp8.hpp"

namespace lockstep::reference {

constexpr std::int64_t kScaleGroup = 128;

/// The element [g, i, j] of a scale whose extents of 1 are repeated; 1 without a scale.
template <class S>
S repeated_at(const std::optional<TensorView<const S, 3>>& scale, std::int64_t g, std::int64_t i,
              std::int64_t k) {
  if (!scale) return S{1};
  const auto within = [&](std::size_t d, std::int64_t index) {
    return scale->extent(d) == 1 ? 0 : index;
  };
  return (*scale)(within(0, g), within(1, i), within(2, k));
}

template <class S>
struct BatchedProduct {
  TensorView<const S, 3> x, weight;
  std::optional<TensorView<const S, 3>> x_scale{}, weight_scale{};
};

template <class S>
void batched_product(const BatchedProduct<S>& in, TensorView<S, 3> out) {
  const std::int64_t G = in.weight.extent(0), N = in.weight.extent(1), K = in.weight.extent(2);
  require(in.x.extent(2) == K, "a product sums over a common extent");
  require(in.x.extent(0) == G || in.x.extent(0) == 1, "x is shared, or has rows for every g");
  for (std::int64_t g = 0; g < G; ++g)
    for (std::int64_t m = 0; m < in.x.extent(1); ++m) {
      const auto x = at(in.x, in.x.extent(0) == 1 ? 0 : g, m);
      for (std::int64_t n = 0; n < N; ++n) {
        S sum = 0;
        for (std::int64_t k = 0; k < K; k += kScaleGroup) {
          const std::int64_t end = std::min(k + kScaleGroup, K);
          S part = 0;
          for (std::int64_t i = k; i < end; ++i) part += x(i) * in.weight(g, n, i);
          sum += part * repeated_at(in.x_scale, g, m, k / kScaleGroup) *
                 repeated_at(in.weight_scale, g, n / kScaleGroup, k / kScaleGroup);
        }
        out(g, m, n) = sum;
      }
    }
}

/// Values quantised to e4m3, with one scale for the tensor, or one for each 128 elements of a row.
template <class S>
struct ScaledNumbers {
  Array<S, 3> numbers;
  Array<S, 3> scale;  ///< [1, 1, 1] or [G, M, ceil(K / 128)]
};

/// Quantises x = numbers * scale. The largest magnitude of a group becomes 448; a group of zeros
/// gives zeros.
template <class S>
ScaledNumbers<S> scaled_numbers(const TensorView<const S, 3>& x, bool by_groups) {
  const std::int64_t K = x.extent(2), groups = (K + kScaleGroup - 1) / kScaleGroup;
  const Shape<3> shape = by_groups ? Shape<3>{x.extent(0), x.extent(1), groups} : Shape<3>{1, 1, 1};
  const S largest = static_cast<S>(traits_of(Format::e4m3).largest);
  ScaledNumbers<S> result{Array<S, 3>(shape_of(x)), Array<S, 3>(shape, S(1e-12) / largest)};
  const auto scale_of = [&](const auto& i) -> S& {
    return by_groups ? result.scale(i[0], i[1], i[2] / kScaleGroup) : result.scale(0, 0, 0);
  };
  for_each_element(x, [&](const auto& i, const S& e) {
    scale_of(i) = std::max(scale_of(i), std::abs(e) / largest);
  });
  for_each_element(x, [&](const auto& i, const S& e) {
    result.numbers(i[0], i[1], i[2]) = rounded(e / scale_of(i), Format::e4m3);
  });
  return result;
}

}  // namespace lockstep::reference
