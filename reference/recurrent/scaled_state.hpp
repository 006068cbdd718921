// Recurrent states quantised with scales: value = number * scale, one scale for each block of a row
// (state_scale of FlashInfer's selective_state_update, whose blocks are whole rows). Running states
// are not quantised: a launch scales up what it reads, and each store quantises once.
//
//   scale  = max|block| / largest number of the format (1 for a block of zeros), in float32
//   number = value / scale, rounded to nearest or stochastically
//
//   here        FlashInfer       shape
//   values      state            [slots, H, R, C]     numbers of the format
//   scales      state_scale      [slots, H, R, ceil(C / block)]
//   seed        rand_seed
//
// Stochastic rounding takes 32 bits of Philox for each element, by (seed, stream, index of the
// element in the pool): element i uses word i mod 4 of the block with counter i / 4.
#pragma once

#include <algorithm>
#include <cmath>

#include "reference/base/philox.hpp"
#include "reference/recurrent/recurrence.hpp"
#include "reference/tensors/array.hpp"

namespace lockstep::reference {

struct StochasticRounding {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;  ///< must change with every launch

  /// The random number of an element, in [0, 1), a multiple of 2^-32.
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

/// The scale of a block whose largest magnitude is `amax`; NaN if amax is NaN.
inline double block_scale(double amax, Format format) {
  return amax == 0 ? 1.0 : rounded(amax / traits_of(format).largest, Format::float32);
}

/// The values of one head's state, [R, C].
template <class S>
Matrix<S> scaled_up(const ScaledStates<S>& states, std::int64_t slot, std::int64_t h) {
  Matrix<S> state = as_matrix(at(states.values, slot, h));
  for (std::int64_t r = 0; r < state.rows(); ++r)
    for (std::int64_t c = 0; c < state.cols(); ++c)
      state(r, c) *= states.scales(slot, h, r, c / states.block);
  return state;
}

/// Quantises and stores one head's state.
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

/// Runs an update on scaled states: update(plain) advances unscaled states in place, in the slots
/// of `rows` (with its number of tokens set); slots that it writes are quantised afterwards. Other
/// slots keep their bytes.
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
