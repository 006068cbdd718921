// A hybrid model with pools of its own, in which unwritten slots are NaN, and texts that run in it.
#pragma once

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "reference/base/philox.hpp"
#include "reference/models/hybrid/hybrid_model.hpp"

namespace lockstep::testing_support {

using reference::HybridModel;
using reference::HybridRow;
using reference::SlotPool;
using Text = std::vector<std::uint64_t>;
using Numbers = std::vector<double>;

inline HybridModel preset_model(std::string_view name) {
  const reference::HybridConfig config = *reference::hybrid_preset(name);
  return {config, reference::drawn_hybrid(config)};
}

/// `size` tokens below 2^64 or, where `vocabulary` is given, below it.
inline Text drawn_text(std::uint64_t stream, std::size_t size, std::uint64_t vocabulary = 0) {
  Text text(size);
  for (std::size_t i = 0; i < size; ++i)
    text[i] = vocabulary > 0 ? random_below(vocabulary, 7, stream, i) : random_bits(7, stream, i);
  return text;
}

struct HybridMemory {
  HybridMemory(const HybridModel& model, std::size_t kv_slots, std::size_t state_slots)
      : model(model),
        kv_numbers(kv_slots * model.kv_size(), std::numeric_limits<double>::quiet_NaN()),
        state_numbers(state_slots * model.state_size() + 1,
                      std::numeric_limits<double>::quiet_NaN()) {}

  SlotPool kv() { return {kv_numbers.data(), model.kv_size()}; }
  SlotPool states() { return {state_numbers.data(), model.state_size()}; }
  Numbers state(std::size_t slot) {
    const auto numbers = states().slot(slot);
    return {numbers.begin(), numbers.end()};
  }
  void zero(std::size_t slot) { std::ranges::fill(states().slot(slot), 0.0); }
  void copy(std::size_t from, std::size_t to) {
    std::ranges::copy(states().slot(from), states().at(to));
  }

  /// Logits of all sampled tokens.
  Numbers run(const std::vector<HybridRow>& rows) {
    std::size_t sampled = 0;
    for (const HybridRow& row : rows) sampled += row.sampled();
    Numbers logits(sampled * model.vocabulary());
    model.forward(rows, kv(), states(), logits);
    return logits;
  }

  const HybridModel& model;
  Numbers kv_numbers, state_numbers;
};

/// A text token by token, without a cache.
struct PlainRun {
  std::vector<Numbers> logits;  ///< after each token
  std::vector<Numbers> states;  ///< after 0 … size tokens
};

inline PlainRun plain_run(const HybridModel& model, const Text& text) {
  HybridMemory memory(model, text.size(), 1);
  std::vector<std::uint32_t> places(text.size());
  std::iota(places.begin(), places.end(), 0);
  memory.zero(0);
  PlainRun run{{}, {memory.state(0)}};
  for (std::size_t i = 0; i < text.size(); ++i) {
    run.logits.push_back(memory.run({{.tokens = std::span(text).subspan(i, 1),
                                      .begin = static_cast<std::int64_t>(i),
                                      .kv = places}}));
    run.states.push_back(memory.state(0));
  }
  return run;
}

}  // namespace lockstep::testing_support
