// Random numbers of a search: a pure function of (seed, stream, index), so that a seed is the same
// search on every machine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "reference/base/mix.hpp"
#include "reference/base/philox.hpp"

namespace lockstep::cache_sim {

/// A stream of random numbers, drawn one after another; each trace has one.
class Draw {
 public:
  Draw(std::uint64_t seed, std::uint64_t stream) : seed_(seed), stream_(stream) {}

  /// An independent stream with this name: a draw more or less in one stream changes no number of
  /// another stream.
  Draw stream(std::string_view name) const {
    std::uint64_t number = stream_;
    for (const char c : name) number = mix64(number ^ static_cast<unsigned char>(c));
    return {seed_, number};
  }

  /// A number in 0 … bound - 1; bound >= 1.
  std::uint64_t below(std::uint64_t bound) { return random_below(bound, seed_, stream_, index_++); }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low) + 1));
  }
  bool chance(std::uint64_t times, std::uint64_t of) { return below(of) < times; }

 private:
  std::uint64_t seed_;
  std::uint64_t stream_;
  std::uint64_t index_ = 0;
};

/// The index of a random weight, drawn in proportion to the weights.
template <std::size_t N>
std::size_t pick(Draw& draw, const std::array<int, N>& weights) {
  std::uint64_t sum = 0;
  for (const int weight : weights) sum += static_cast<std::uint64_t>(weight);
  std::uint64_t at = draw.below(sum);
  std::size_t i = 0;
  while (at >= static_cast<std::uint64_t>(weights[i]))
    at -= static_cast<std::uint64_t>(weights[i++]);
  return i;
}

/// Usually `usual`; one time in eight 0, one time in eight four times as much.
inline int drawn_weight(Draw& draw, int usual) {
  const std::uint64_t kind = draw.below(8);
  if (kind == 0) return 0;
  return kind == 1 ? usual * 4 : usual;
}

}  // namespace lockstep::cache_sim
