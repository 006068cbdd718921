#include "reference/protocol/layer_state.hpp"

#include <array>
#include <vector>

#include "reference/base/require.hpp"

namespace lockstep {
namespace {

/// Calls `act(distance)` for each layer.
template <class Act>
void for_layers(std::span<const std::uint32_t> layers, Act act) {
  if (layers.empty()) return act(0u);
  for (const std::uint32_t distance : layers) act(distance);
}

/// Writes the KV of tokens[first, last) to the places from `place` on, layer by layer.
void write_places(LayerState& layers, const ForwardRow& row, std::span<const KvRun> runs,
                  const Tokens& tokens, std::uint32_t first, std::uint32_t last,
                  std::uint32_t place) {
  for_slots(runs, place, place + last - first, [&](KvSlots slots, std::uint32_t at) {
    for_layers(row.kv_layers, [&](std::uint32_t distance) {
      if (distance == 0) return layers.write_kv(slots, tokens, first + at - place);
      std::vector<std::uint32_t> own(slots.begin(), slots.end());
      for (std::uint32_t& slot : own) slot += distance;
      layers.write_kv(own, tokens, first + at - place);
    });
  });
}

/// The KV of a draft stands for the tokens on its way from the root.
void write_tree(LayerState& layers, const ForwardRow& row) {
  const std::uint32_t known = row.known();
  write_places(layers, row, row.kv, row.tokens, row.begin, known, row.begin);
  std::vector<Tokens> ways{row.tokens.prefix(known)};
  for (std::uint32_t draft = 1; draft <= row.drafts; ++draft) {
    const std::uint32_t place = known + draft - 1;
    const auto parent = static_cast<std::size_t>(row.parents[draft - 1]);
    ways.push_back(ways[parent].followed_by(row.tokens.slice(place, place + 1)));
    const std::uint32_t size = ways.back().size();
    write_places(layers, row, row.kv, ways.back(), size - 1, size, place);
  }
}

/// The tokens with their padding, where the row has any.
void write_chain(LayerState& layers, const ForwardRow& row, const Tokens& tokens,
                 std::uint32_t end) {
  if (row.writes_kv) write_places(layers, row, row.kv, tokens, row.begin, end, row.begin);
  write_places(layers, row, row.also, tokens, row.begin, end, row.begin);
}

void write_row(LayerState& layers, const ForwardRow& row) {
  if (!row.parents.empty()) return write_tree(layers, row);
  if (row.padded_to <= row.end) return write_chain(layers, row, row.tokens, row.end);
  const Tokens padding = Tokens::of_ids(std::vector<std::uint32_t>(row.padded_to - row.end, 0));
  write_chain(layers, row, row.tokens.prefix(row.end).followed_by(padding), row.padded_to);
}

/// The states of one layer. A part that the row keeps runs in its slot, and takes are copies of it;
/// a part that it does not keep runs from one take to the next.
void run_states(LayerState& layers, const ForwardRow& row, std::uint32_t distance) {
  const StateSlot own{row.state.value + distance};
  std::uint32_t kept = row.begin;
  const auto advance_to = [&](std::uint32_t end) {
    if (end <= kept) return;
    if (row.keeps.all())
      layers.advance_state(own, row.tokens, kept, end);
    else
      for (const StatePart part : kStateParts)
        if (row.keeps.has(part)) layers.advance_state(own, part, row.tokens, kept, end);
    kept = end;
  };
  struct Left {
    StateSlot slot;
    std::uint32_t size;
  };
  std::array<Left, 2> left{Left{own, row.begin}, Left{own, row.begin}};
  for (const StateTake& take : row.takes) {
    const StateSlot target{take.target.value + distance};
    advance_to(take.after);
    if (row.keeps.all() && take.parts.all()) {
      layers.copy_state(own, target);
      continue;
    }
    for (const StatePart part : kStateParts) {
      if (!take.parts.has(part)) continue;
      Left& last = left[static_cast<std::size_t>(part)];
      layers.copy_state(row.keeps.has(part) ? own : last.slot, target, part);
      if (row.keeps.has(part)) continue;
      layers.advance_state(target, part, row.tokens, last.size, take.after);
      last = {target, take.after};
    }
  }
  advance_to(row.end);
}

void run_ring(LayerState& layers, const ForwardRow& row, std::uint32_t distance) {
  const StateSlot own{row.state.value + distance};
  RingStep step = *row.ring;
  step.slot.value += distance;
  layers.step_ring(own, step, row.tokens, row.begin);
  if (row.keeps.conv) layers.advance_state(own, StatePart::conv, row.tokens, row.begin, row.end);
}

void verify(LayerState& layers, const ForwardRow& row, std::uint32_t distance) {
  const Tokens known = row.tokens.prefix(row.known());
  const Tokens drafts = row.tokens.slice(row.known(), row.end);
  for (const StatePart part : kStateParts)
    layers.verify_state({row.state.value + distance}, part,
                        {known, row.begin, drafts, row.parents});
}

}  // namespace

void LayerState::forward(const ForwardRow& row) {
  require(row.begin <= row.end && row.end <= row.tokens.size(),
          "a row computes tokens that it has");
  require(!row.ring || (row.end == row.begin + 1 && row.drafts == 0 && row.takes.empty()),
          "a step with a ring is a row of one token");
  if (keeps_kv()) write_row(*this, row);
  if (!row.state.exists()) return;
  for_layers(row.state_layers, [&](std::uint32_t distance) {
    if (row.drafts != 0 && row.takes.empty())
      verify(*this, row, distance);
    else if (row.ring)
      run_ring(*this, row, distance);
    else
      run_states(*this, row, distance);
  });
}

void LayerState::land_copy(const TierCopy& copy) {
  for (const auto& [source, target] : copy.states) copy_state(source, target);
  if (!keeps_kv()) return;
  std::vector<std::uint32_t> sources, targets;
  for (const KvRun& run : copy.kv_sources)
    sources.insert(sources.end(), run.slots().begin(), run.slots().end());
  for (const KvRun& run : copy.kv_targets)
    targets.insert(targets.end(), run.slots().begin(), run.slots().end());
  require(sources.size() == targets.size(), "a copy has a target for each source");
  if (!sources.empty()) copy_kv(sources, targets);
}

void LayerState::step_ring(StateSlot, const RingStep&, const Tokens&, std::uint32_t) {
  require(false, "these layers keep no rings");
}

void LayerState::fold_ring(StateSlot, std::uint32_t, const Tokens&, std::uint32_t) {
  require(false, "these layers keep no rings");
}

void LayerState::rewind_conv(StateSlot) {
  require(false, "these layers keep no rings");
}

}  // namespace lockstep
