// Sentences about wrong numbers, and the wrong labels that explain them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cache_sim/model/label_state.hpp"
#include "reference/base/finding.hpp"
#include "reference/protocol/forward.hpp"

namespace lockstep::cache_sim {

/// Stands between the sentence of a label and that of its numbers.
inline constexpr std::string_view kNumbersSay = ". Numbers: ";
inline constexpr const char* kLogitsAreRight = "logits are right, but not what they come from";

/// Calls act(slot) for the slots that stand for `slot` in the layers.
template <class Act>
void for_layers(std::uint32_t slot, std::span<const std::uint32_t> layers, const Act& act) {
  if (layers.empty()) act(slot);
  for (const std::uint32_t distance : layers) act(slot + distance);
}

/// The largest difference relative to the largest expected number; infinite where one is NaN.
double distance(std::span<const double> actual, std::span<const double> expected);

/// The first of the largest logits.
std::ptrdiff_t likeliest_of(std::span<const double> logits);

/// The order of magnitude alone: last digits depend on the machine.
std::string magnitude(double x);

/// The logits after `tokens` tokens are `far` off; `same` says whether the likeliest token is the
/// right one.
std::string moved_logits(std::uint32_t tokens, double far, bool same);

// Labels are held to their tokens where a state is advanced and where a structure is audited;
// numbers show each use.

/// A part of the row's state whose label is not that of the tokens before it.
std::optional<Finding> wrong_state_label(const LabelState& labels, const ForwardRow& row);

/// The first of these KV slots, by place of the text, whose label is not that of its token.
std::optional<Finding> wrong_kv_label(const LabelState& labels, const Tokens& text, KvSlots slots,
                                      std::span<const std::uint32_t> layers);

}  // namespace lockstep::cache_sim
