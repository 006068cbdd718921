// Test data. A value depends on (seed, stream, index) alone, and is a multiple of 1/64 in (-2, 2).
// Such numbers are exact in bf16, fp16 and float32, so inputs are never rounded.
#pragma once

#include <cstdint>

#include "reference/base/philox.hpp"
#include "reference/tensors/array.hpp"

namespace lockstep {

/// Draws multiples of 1/64 in [-limit, limit]; limit <= 2, so that seven bits and a sign hold them.
struct Grid {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  double limit = 1;

  double operator()(std::uint64_t index) const {
    const auto steps = static_cast<std::uint64_t>(limit * 64);
    const std::uint64_t step = random_below(2 * steps + 1, seed, stream, index);
    return (static_cast<double>(step) - static_cast<double>(steps)) / 64;
  }
};

template <class S, std::size_t Rank>
Array<S, Rank> on_grid(const Shape<Rank>& shape, const Grid& grid) {
  Array<S, Rank> values(shape);
  for (std::int64_t i = 0; i < values.size(); ++i)
    values.data()[i] = static_cast<S>(grid(static_cast<std::uint64_t>(i)));
  return values;
}

}  // namespace lockstep
