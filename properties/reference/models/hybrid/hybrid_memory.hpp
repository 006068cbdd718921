// A hybrid model with pools of its own, in which unwritten slots are NaN, and texts that run in it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
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

/// The largest difference of a logit, relative to the largest of the truth's.
inline double distance(const Numbers& own, const Numbers& truth) {
  double largest = 0, far = 0;
  for (std::size_t v = 0; v < truth.size(); ++v) {
    largest = std::max(largest, std::abs(truth[v]));
    far = std::max(far, std::abs(own.at(v) - truth[v]));
  }
  return far / largest;
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
  std::vector<Numbers> logits;    ///< after each token
  std::vector<Numbers> states;    ///< after 0 … size tokens
  std::vector<Numbers> hidden{};  ///< that the head is given after each token
};

/// `hidden` is what a draft module is given beside its first tokens; beside the others it is given
/// what its own head was given one token before.
inline PlainRun plain_run(const HybridModel& model, const Text& text,
                          std::span<const Numbers> hidden = {}) {
  HybridMemory memory(model, text.size(), 1);
  std::vector<std::uint32_t> places(text.size());
  std::iota(places.begin(), places.end(), 0);
  memory.zero(0);
  PlainRun run{{}, {memory.state(0)}};
  for (std::size_t i = 0; i < text.size(); ++i) {
    run.hidden.emplace_back(model.config().hidden);
    const Numbers* const given = hidden.empty()      ? nullptr
                                 : i < hidden.size() ? &hidden[i]
                                                     : &run.hidden[i - 1];
    run.logits.push_back(memory.run({{.tokens = std::span(text).subspan(i, 1),
                                      .begin = static_cast<std::int64_t>(i),
                                      .kv = places,
                                      .hidden = given != nullptr ? given->data() : nullptr,
                                      .hidden_after = run.hidden.back().data()}}));
    run.states.push_back(memory.state(0));
  }
  return run;
}

/// The module that drafts for a preset; null where its family has none.
inline std::optional<HybridModel> draft_module(std::string_view preset) {
  const auto config = reference::hybrid_draft(*reference::hybrid_preset(preset));
  if (!config) return std::nullopt;
  return std::optional<HybridModel>(std::in_place, *config, reference::drawn_hybrid(*config));
}

/// The module's run over a text, whose run in its model is `plain`: what it drafts after each token
/// but the last. The last of these follows a draft.
inline PlainRun draft_run(const HybridModel& module, const Text& text, const PlainRun& plain) {
  return plain_run(module, {text.begin() + 1, text.end()},
                   std::span(plain.hidden).first(text.size() - 2));
}

}  // namespace lockstep::testing_support
