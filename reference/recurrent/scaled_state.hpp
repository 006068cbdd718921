// Recurrent states in narrow numbers with scales: value = number * scale, one scale for every block
// of a row. What FlashInfer's selective_state_update calls state_scale; blocks as wide as a row are
// its layout. Running states are not narrow: a launch scales up what it reads, and each store
// scales down what it writes, once.
//
//   scale  = max|block| / largest number of the format (1 for a block of zeros), in float32
//   number = value / scale, rounded to nearest or stochastically
//
//   here        FlashInfer       shape
//   values      state            [slots, H, R, C]     numbers of the format
//   scales      state_scale      [slots, H, R, ceil(C / block)]
//   seed        rand_seed
//
// Stochastic rounding takes 32 bits of Philox for each element, a function of (seed, stream, index
// of the element in the pool): element i has word i mod 4 of the block with the counter i / 4.
#pragma once

#include <algorithm>
#include <cmath>

#include "reference/base/philox.hpp"
#include "reference/recurrent/recurrence.hpp"
#include "reference/tensors/array.hpp"

namespace lockstep::reference {

struct StochasticRounding {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;  ///< another one for every launch

  /// In [0, 1), a multiple of 2^-32.
  double draw(std::int64_t element) const {
    const auto counter = static_cast<std::uint64_t>(element / 4);
    const PhiloxBlock words = philox4x32_10(
        {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
         static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)},
        {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
    return static_cast<double>(words[static_cast<std::size_t>(element % 4)]) * 0x1p-32;
  }
};

template <class S>
struct ScaledStates {
  TensorView<S, 4> values;  // [slots, H, R, C]
  TensorView<S, 4> scales;  // [slots, H, R, ceil(C / block)]
  std::int64_t block;       ///< elements of a row that share a scale
  Format format = Format::int8;
  std::optional<StochasticRounding> stochastic{};
};

/// The scale of a block whose largest magnitude is `amax`; NaN where that is.
inline double block_scale(double amax, Format format) {
  return amax == 0 ? 1.0 : rounded(amax / traits_of(format).largest, Format::float32);
}

/// A state of one head, scaled up: [R, C].
template <class S>
Matrix<S> scaled_up(const ScaledStates<S>& states, std::int64_t slot, std::int64_t h) {
  Matrix<S> state = as_matrix(at(states.values, slot, h));
  for (std::int64_t r = 0; r < state.rows(); ++r)
    for (std::int64_t c = 0; c < state.cols(); ++c)
      state(r, c) *= states.scales(slot, h, r, c / states.block);
  return state;
}

/// Stores a state of one head, scaled down.
template <class S>
void store_scaled(const Matrix<S>& state, const ScaledStates<S>& states, std::int64_t slot,
                  std::int64_t h) {
  const std::int64_t R = state.rows(), C = state.cols(), H = states.values.extent(1);
  for (std::int64_t r = 0; r < R; ++r)
    for (std::int64_t first = 0; first < C; first += states.block) {
      const std::int64_t size = std::min(states.block, C - first);
      const double amax = static_cast<double>(
          state.row(r).segment(first, size).cwiseAbs().template maxCoeff<Eigen::PropagateNaN>());
      const double scale = block_scale(amax, states.format);
      states.scales(slot, h, r, first / states.block) = static_cast<S>(scale);
      for (std::int64_t c = first; c < first + size; ++c) {
        const double number = static_cast<double>(state(r, c)) / scale;
        const std::int64_t element = ((slot * H + h) * R + r) * C + c;
        states.values(slot, h, r, c) = static_cast<S>(
            states.stochastic
                ? rounded_stochastically(number, states.format, states.stochastic->draw(element))
                : rounded(number, states.format));
      }
    }
}

/// An update of scaled states: update(plain) advances states of the scalar's own type in place, by
/// the slots of `rows` (whose number of tokens is set); what it stores is scaled down. Other slots
/// keep their bytes.
template <class S, class Update>
void with_scaled_states(const Rows& rows, const ScaledStates<S>& states, Update update) {
  require(states.block >= 1, "a block has at least one element");
  Array<S, 4> plain(shape_of(states.values));
  const std::int64_t slots = plain.extent(0), H = plain.extent(1);
  for (std::int64_t slot = 0; slot < slots; ++slot)
    for (std::int64_t h = 0; h < H; ++h)
      mapped(at(plain.view(), slot, h)) = scaled_up(states, slot, h);
  update(plain.view());
  for (std::int64_t row = 0; row < row_count(rows.query_start_loc, rows.tokens); ++row) {
    const std::int64_t size = row_range(rows.query_start_loc, row, rows.tokens).size();
    if (source_slot(rows.slots, row, slots) == kNoSlot) continue;
    for (std::int64_t token = 0; token < size; ++token) {
      const std::int64_t target = target_slot(rows.slots, row, token, size, slots);
      for (std::int64_t h = 0; target != kNoSlot && h < H; ++h)
        store_scaled<S>(as_matrix(at(plain.view(), target, h)), states, target, h);
    }
  }
}

}  // namespace lockstep::reference
