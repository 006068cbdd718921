// Rotary position embedding. Su et al. 2021, "RoFormer", eq. 34; stretched contexts: Peng et al.
// 2023, "YaRN: Efficient Context Window Extension of Large Language Models", eqs. 17 to 22.
//
//   (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)
//   angle = position f_i,   f_i = base^(-2i / d)
//
// with (a, b) = (2i, 2i + 1), interleaved (DeepSeek), or (i, i + d/2), half-split (NeoX, Qwen).
//
//   here           SGLang, transformers       unit
//   x              q_pe, k_pe                 [T, heads, d], d even
//   positions      positions                  [T]
//   frequencies    inv_freq                   [d / 2], radians per token
//   magnitude      _mscale of cos and sin     1 without YaRN
//
// YaRN corrects twice: cos and sin by get_mscale(factor, mscale) / get_mscale(factor,
// mscale_all_dim), and the softmax scale by get_mscale(factor, mscale_all_dim)^2 where
// mscale_all_dim is set.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>

#include "reference/tensors/slots.hpp"

namespace lockstep::reference {

enum class RopePairs { interleaved, half_split };

template <class S>
struct Rope {
  Vector<S> frequencies;
  S magnitude = 1;       ///< factor of cos and sin
  S softmax_factor = 1;  ///< factor of the softmax scale
};

template <class S>
Rope<S> plain_rope(std::int64_t d, S base) {
  require(d % 2 == 0, "rotary dimensions come in pairs");
  Rope<S> rope{Vector<S>(d / 2)};
  for (std::int64_t i = 0; i < d / 2; ++i)
    rope.frequencies(i) = std::pow(base, -static_cast<S>(2 * i) / static_cast<S>(d));
  return rope;
}

template <class S>
struct YarnOptions {
  S factor;                         ///< stretched context / trained context
  S original_positions = 4096;      ///< trained context
  S beta_fast = 32, beta_slow = 1;  ///< rotations over the trained context that bound the blend
  std::optional<S> mscale{};        ///< 1 if absent
  std::optional<S> mscale_all_dim{};
  S attention_factor = 1;
};

template <class S>
S get_mscale(S factor, S mscale) {
  return factor <= 1 ? S{1} : S(0.1) * mscale * std::log(factor) + 1;
}

template <class S>
Rope<S> yarn_rope(std::int64_t d, S base, const YarnOptions<S>& options) {
  const S width = static_cast<S>(d);
  const auto correction = [&](S rotations) {  // the dimension with so many rotations
    return width * std::log(options.original_positions / (rotations * 2 * std::numbers::pi_v<S>)) /
           (2 * std::log(base));
  };
  const S low = std::max(std::floor(correction(options.beta_fast)), S{0});
  S high = std::min(std::ceil(correction(options.beta_slow)), width - 1);
  if (low == high) high += S(0.001);
  Rope<S> rope = plain_rope(d, base);
  for (std::int64_t i = 0; i < d / 2; ++i) {
    const S ramp = std::clamp((static_cast<S>(i) - low) / (high - low), S{0}, S{1});
    const S extrapolated = rope.frequencies(i), interpolated = extrapolated / options.factor;
    rope.frequencies(i) = interpolated * ramp + extrapolated * (1 - ramp);
  }
  const S all_dim = options.mscale_all_dim.value_or(S{0});
  rope.magnitude = get_mscale(options.factor, options.mscale.value_or(S{1})) /
                   get_mscale(options.factor, all_dim) * options.attention_factor;
  if (options.mscale_all_dim)
    rope.softmax_factor = std::pow(get_mscale(options.factor, all_dim), S{2});
  return rope;
}

/// Rotates x in place; dimensions of x beyond 2 * frequencies stay as they are.
template <class S>
void apply_rope(const Rope<S>& rope, const IndexView& positions, RopePairs pairs,
                TensorView<S, 3> x) {
  const std::int64_t half = rope.frequencies.size();
  require(x.extent(2) >= 2 * half, "x has the rotary dimensions");
  require(positions.extent(0) == x.extent(0), "every token has a position");
  for (std::int64_t t = 0; t < x.extent(0); ++t)
    for (std::int64_t i = 0; i < half; ++i) {
      const S angle = static_cast<S>(positions(t)) * rope.frequencies(i);
      const S c = std::cos(angle) * rope.magnitude, s = std::sin(angle) * rope.magnitude;
      const std::int64_t a = pairs == RopePairs::interleaved ? 2 * i : i;
      const std::int64_t b = pairs == RopePairs::interleaved ? 2 * i + 1 : i + half;
      for (std::int64_t h = 0; h < x.extent(1); ++h) {
        const S xa = x(t, h, a), xb = x(t, h, b);
        x(t, h, a) = xa * c - xb * s;
        x(t, h, b) = xb * c + xa * s;
      }
    }
}

}  // namespace lockstep::reference
