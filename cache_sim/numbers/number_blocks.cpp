#include "cache_sim/numbers/number_blocks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "cache_sim/numbers/compared.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

using reference::HybridPart;
using reference::HybridRow;
using reference::HybridTake;

NumberBlocks::NumberBlocks(std::shared_ptr<Truth> truth, const PlacedModel& placed,
                           const BlockGroups& pool, bool beside_labels)
    : truth_(std::move(truth)),
      model_(truth_->model()),
      beside_labels_(beside_labels),
      drafts_(static_cast<std::size_t>(pool.drafts)),
      groups_(pool.groups),
      layers_(layers_of(placed)),
      block_size_(laid_out(pool)),
      block_count_(static_cast<std::size_t>(pool.blocks)),
      blocks_(block_count_ * block_size_),
      used_(block_count_),
      open_blocks_(pool) {}

/// The units that keep something, in their order.
std::vector<NumberBlocks::Layer> NumberBlocks::layers_of(const PlacedModel& placed) const {
  std::vector<Layer> layers;
  for (const HybridPart& part : model_.parts()) {
    const auto unit = static_cast<std::size_t>(part.unit);
    if (layers.empty() || layers.back().unit != part.unit)
      layers.push_back({.unit = part.unit,
                        .group = placed.groups[unit],
                        .width = static_cast<std::size_t>(conv_width(placed.config.units[unit]))});
    Layer& layer = layers.back();
    const std::string_view name = part.name;
    if (name == "KV")
      layer.kv = part;
    else if (name == "conv")
      layer.conv = part;
    else
      layer.recurrent = part;
  }
  return layers;
}

/// Sets where layers begin in a block, and returns the doubles of a block.
std::size_t NumberBlocks::laid_out(const BlockGroups& pool) {
  std::size_t page = 0, most = 0;
  std::vector<std::size_t> count(pool.groups.size());
  for (const Layer& layer : layers_) {
    const auto tokens = static_cast<std::size_t>(pool.groups[layer.group].block);
    page = std::max(page, layer.has_state()
                              ? layer.recurrent.size + conv_rows(layer) * layer.channels()
                              : tokens * layer.kv.size);
  }
  for (Layer& layer : layers_) {
    layer.at = count[layer.group]++ * page;
    most = std::max(most, count[layer.group]);
  }
  return page * most;
}

std::span<double> NumberBlocks::block(BlockId number) {
  require(number < block_count_, "a block is one of the pool");
  const std::span<double> numbers{blocks_.data() + number * block_size_, block_size_};
  if (used_[number] == 0) poison(numbers, number);
  used_[number] = 1;
  return numbers;
}

double* NumberBlocks::kv_in(BlockId number, const Layer& layer, std::int64_t place) {
  return block(number).data() + layer.at + static_cast<std::size_t>(place) * layer.kv.size;
}

double* NumberBlocks::conv_row(BlockId number, const Layer& layer, std::size_t row) {
  row = std::min(row, conv_rows(layer) - 1);  // a defect may count beyond them
  return block(number).data() + layer.at + layer.recurrent.size + row * layer.channels();
}

// --- Blocks --------------------------------------------------------------------------------------

void NumberBlocks::lose(BlockId number) {
  run();
  if (used_[number] != 0) poison(block(number), number);
}

void NumberBlocks::copy(const BlockCopy& copy) {
  run();
  std::ranges::copy(block(copy.source), block(copy.target).begin());
}

void NumberBlocks::move(const BlockMove& move) {
  run();
  const auto bias = static_cast<std::size_t>(move.bias);
  for (const Layer& layer : layers_) {
    if (layer.group != move.group || !layer.has_state()) continue;
    const double* const state = block(move.recurrent).data() + layer.at;
    if (move.recurrent != move.target)
      std::copy_n(state, layer.recurrent.size, block(move.target).data() + layer.at);
    for (std::size_t row = 0; row + bias < conv_rows(layer); ++row) {
      const double* const source = conv_row(move.conv, layer, row + bias);
      double* const target = conv_row(move.target, layer, row);
      if (source != target) std::copy_n(source, layer.channels(), target);
    }
  }
}

void NumberBlocks::receive(const BlockRow& row) {
  run();
  const Truth::Node last = truth_->at(row.tokens, static_cast<std::uint32_t>(row.start));
  for (const BlockKv& kv : row.kv) {
    Truth::Node node = last;
    for (std::int64_t i = row.start - 1; i >= row.start - row.external; --i) {
      const BlockId number = block_at(kv.columns, i / kv.size);
      for (const Layer& layer : layers_)
        if (layer.group == kv.group && number != kNullBlock)
          std::ranges::copy(truth_->kv(node).subspan(layer.kv.first, layer.kv.size),
                            kv_in(number, layer, i % kv.size));
      node = truth_->before(node);
    }
  }
  for (const BlockStates& states : row.states)
    for (const BlockStates::Store& one : states.stores)
      store(states.group, one.block, truth_->state(last));
}

/// Stores a state in a block, its conv rows from the first one on.
void NumberBlocks::store(std::uint32_t group, BlockId target, std::span<const double> state) {
  if (target == kNullBlock) return;
  for (const Layer& layer : layers_) {
    if (layer.group != group) continue;
    store_recurrent(layer, target, state);
    for (std::size_t row = 0; row + 1 < layer.width; ++row)
      store_conv_row(layer, target, row, state, row);
  }
}

void NumberBlocks::store_recurrent(const Layer& layer, BlockId target,
                                   std::span<const double> state) {
  std::ranges::copy(state.subspan(layer.recurrent.first, layer.recurrent.size),
                    block(target).data() + layer.at);
}

/// Column `column` of the state's window becomes a conv row of the block.
void NumberBlocks::store_conv_row(const Layer& layer, BlockId target, std::size_t row,
                                  std::span<const double> state, std::size_t column) {
  double* const to = conv_row(target, layer, row);
  for (std::size_t channel = 0; channel < layer.channels(); ++channel)
    to[channel] = state[layer.conv.first + channel * (layer.width - 1) + column];
}

// --- Rows ----------------------------------------------------------------------------------------

void NumberBlocks::forward(const BlockRow& row) {
  if (std::optional<Finding> wrong = outside_of_tokens(row)) {
    findings_.push_back(std::move(*wrong));
    return;
  }
  if (open_blocks_.shares(row)) run();
  open_blocks_.mark(row);
  if (rows_.size() == open_) rows_.emplace_back();
  open(row, rows_[open_++]);
}

/// Keeps what the row says.
void NumberBlocks::open(const BlockRow& row, OpenRow& kept) {
  kept.request = row.request;
  kept.text = row.tokens;
  kept.begin = static_cast<std::uint32_t>(row.start);
  kept.end = static_cast<std::uint32_t>(row.end);
  kept.drafts = static_cast<std::uint32_t>(row.drafts);
  kept.verifies = row.verifies || row.drafts > 0;
  kept.tokens.clear();
  for (std::uint32_t i = kept.begin; i < kept.end; ++i) kept.tokens.push_back(row.tokens[i]);
  kept.states.assign(row.states.begin(), row.states.end());
  kept.sizes = sizes_stored(row);
  place_kv(row, kept);
}

/// Lists where the KV of each token lies, layer by layer.
void NumberBlocks::place_kv(const BlockRow& row, OpenRow& kept) {
  kept.kv_places.clear();
  kept.kv_first.clear();
  kept.nowhere.resize(kept.tokens.size() * model_.kv_size());
  double* nowhere = kept.nowhere.data();
  for (const Layer& layer : layers_) {
    if (layer.has_state()) continue;
    const auto own = std::ranges::find(row.kv, layer.group, &BlockKv::group);
    require(own != row.kv.end(), "a row has every group");
    kept.kv_first.push_back(static_cast<std::uint32_t>(own->first));
    for (std::int64_t i = 0; i < row.end; ++i) {
      const BlockId number = block_at(own->columns, i / own->size);
      double* place = nullptr;
      if (i >= row.start && number == kNullBlock)
        place = std::exchange(nowhere, nowhere + layer.kv.size);
      else if (i >= own->first)
        place = kv_in(number, layer, i % own->size);
      kept.kv_places.push_back(place);
    }
  }
}

/// Gathers the state that the row begins with.
void NumberBlocks::read_states(OpenRow& row) {
  row.before.assign(model_.state_size(), 0.0);
  for (const BlockStates& states : row.states)
    for (const Layer& layer : layers_)
      if (layer.group == states.group && !states.from_nothing)
        read_state(layer, states.recurrent, states.conv,
                   static_cast<std::size_t>(states.conv_begin), row.before);
}

/// Gathers a layer's part of a state from the blocks of its two halves.
void NumberBlocks::read_state(const Layer& layer, BlockId recurrent, BlockId conv,
                              std::size_t conv_begin, std::span<double> state) {
  std::copy_n(block(recurrent).data() + layer.at, layer.recurrent.size,
              state.begin() + static_cast<std::ptrdiff_t>(layer.recurrent.first));
  for (std::size_t column = 0; column + 1 < layer.width; ++column) {
    const double* const from = conv_row(conv, layer, conv_begin + column);
    for (std::size_t channel = 0; channel < layer.channels(); ++channel)
      state[layer.conv.first + channel * (layer.width - 1) + column] = from[channel];
  }
}

void NumberBlocks::run() {
  const std::size_t count = std::exchange(open_, 0);
  if (count == 0) return;
  open_blocks_.close();
  const std::size_t size = model_.state_size();
  std::size_t sampled = 0, slots = count;
  for (std::size_t i = 0; i < count; ++i) slots += rows_[i].sizes.size();
  std::vector<double> states(slots * size + 1);  // those of the rows, then those that they store
  std::vector<std::vector<HybridTake>> takes(count);
  std::vector<HybridRow> told;
  for (std::size_t i = 0, next = count; i < count; ++i) {
    OpenRow& row = rows_[i];
    read_states(row);
    std::ranges::copy(row.before, states.begin() + static_cast<std::ptrdiff_t>(i * size));
    for (const std::int64_t after : row.sizes)
      takes[i].push_back({after, static_cast<std::uint32_t>(next++)});
    while (places_.size() < row.end) places_.push_back(static_cast<std::uint32_t>(places_.size()));
    if (row.verifies) row.after.resize(row.tokens.size() * size + 1);
  }
  for (std::size_t i = 0; i < count; ++i) {
    OpenRow& row = rows_[i];
    told.push_back({.tokens = row.tokens,
                    .begin = row.begin,
                    .kv = std::span(places_).first(row.end),
                    .kv_places = row.kv_places,
                    .state = static_cast<std::uint32_t>(i),
                    .takes = takes[i],
                    .states_after = row.verifies ? row.after.data() : nullptr,
                    .drafts = row.drafts});
    sampled += told.back().sampled();
  }
  logits_.resize(sampled * model_.vocabulary());
  model_.forward(told, {nullptr, model_.kv_size()}, {states.data(), size}, logits_);
  std::span<const double> logits = logits_;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t own = told[i].sampled() * model_.vocabulary();
    compare(rows_[i], logits.first(own));
    logits = logits.subspan(own);
  }
  std::span<const double> taken = std::span(states).subspan(count * size);
  for (std::size_t i = 0; i < count; ++i) {
    store_states(rows_[i], taken);
    taken = taken.subspan(rows_[i].sizes.size() * size);
  }
}

/// Stores the row's states; `taken` has those after row.sizes.
void NumberBlocks::store_states(const OpenRow& row, std::span<const double> taken) {
  const std::size_t size = model_.state_size();
  for (const BlockStates& states : row.states) {
    if (row.verifies) {
      store_verified(row, states);
      continue;
    }
    for (const BlockStates::Store& one : states.stores) {
      const auto at = std::ranges::lower_bound(row.sizes, one.size) - row.sizes.begin();
      if (one.block != kNullBlock)
        store(states.group, one.block, taken.subspan(static_cast<std::size_t>(at) * size, size));
    }
  }
}

/// Stores the recurrent part after each token, and the conv rows of all of them in the block of the
/// window, behind those that they have in common with the state before.
void NumberBlocks::store_verified(const OpenRow& row, const BlockStates& states) {
  const std::size_t size = model_.state_size();
  const auto after = [&](std::size_t token) {
    return std::span<const double>(row.after).subspan(token * size, size);
  };
  for (const Layer& layer : layers_) {
    if (layer.group != states.group) continue;
    for (const BlockStates::Store& one : states.stores)
      if (one.block != kNullBlock)
        store_recurrent(layer, one.block,
                        after(static_cast<std::size_t>(one.size) - row.begin - 1));
    if (states.conv == kNullBlock) continue;
    const std::size_t kept = layer.width - 2;
    for (std::size_t i = 0; i < kept; ++i) store_conv_row(layer, states.conv, i, row.before, i + 1);
    for (std::size_t i = 0; i < row.tokens.size(); ++i)
      store_conv_row(layer, states.conv, kept + i, after(i), layer.width - 2);
  }
}

// --- Comparison with the truth -------------------------------------------------------------------

void NumberBlocks::compare(const OpenRow& row, std::span<const double> logits) {
  const Truth::Node base = truth_->at(row.text, row.begin);
  const bool starts_wrong = !same_bits(row.before, truth_->state(base));
  const std::vector<Truth::Node> after =
      nodes_after(*truth_, base, {row.text, row.begin, row.end, row.drafts, {}});
  const std::optional<std::string> moved = moved_logits(*truth_, after, row.verifies, logits);
  if (tells_rows_)
    told_rows_.push_back(told_row(row.request.text(), truth_->size(after.back()),
                                  logits.last(model_.vocabulary()), truth_->logits(after.back()),
                                  "without a cache"));
  if (!moved && !starts_wrong) return;
  const std::string where = first_difference(row, base);
  findings_.push_back({FindingKind::number_differs,
                       fmt::format("{}: {}; {}", row_text(row.begin, row.end, row.text),
                                   moved.value_or(std::string(kOnlyReadsWrong)), where),
                       "the bits of a run without a cache", where});
}

/// The first part, in the order of the model's units, that the row read and that is not right.
std::string NumberBlocks::first_difference(const OpenRow& row, Truth::Node base) {
  const std::vector<Truth::Node> path = truth_->path(base);
  std::size_t kv_layer = 0;
  for (const Layer& layer : layers_) {
    const auto differs = [&](const HybridPart& part, std::span<const double> own,
                             std::span<const double> right) {
      return !same_bits(own, right.subspan(part.first, part.size));
    };
    if (!layer.has_state()) {
      const std::size_t at = kv_layer++;
      for (std::uint32_t place = row.kv_first[at]; place < row.begin; ++place) {
        const std::span<const double> held{row.kv_places[at * row.end + place], layer.kv.size};
        if (differs(layer.kv, held, truth_->kv(path[place])))
          return fmt::format("unit {}: KV of token {} in group {} differs{}", layer.unit, place,
                             layer.group, origin(held, "block"));
      }
      continue;
    }
    const auto own = std::ranges::find(row.states, layer.group, &BlockStates::group);
    require(own != row.states.end(), "a row has every group");
    for (const HybridPart& part : {layer.recurrent, layer.conv}) {
      const std::span<const double> held = std::span(row.before).subspan(part.first, part.size);
      if (differs(part, held, truth_->state(base)))
        return fmt::format("unit {}: the {} part of block {} differs{}", layer.unit, part.name,
                           std::string_view(part.name) == "conv" ? own->conv : own->recurrent,
                           origin(held, "block"));
    }
  }
  return "all that it read is right";
}

std::string NumberBlocks::said_of(BlockId number, std::uint32_t group, const Tokens& prefix) {
  run();
  const Truth::Node last = truth_->at(prefix, prefix.size());
  for (const Layer& layer : layers_) {
    if (layer.group != group) continue;
    if (layer.has_state()) {
      std::vector<double> state(model_.state_size());
      read_state(layer, number, number, 0, state);
      for (const HybridPart& part : {layer.recurrent, layer.conv}) {
        const std::span<const double> held = std::span(state).subspan(part.first, part.size);
        const std::span<const double> right = truth_->state(last).subspan(part.first, part.size);
        if (!same_bits(held, right))
          return fmt::format("the {} part of unit {} is {} off{}", part.name, layer.unit,
                             magnitude(distance(held, right)), origin(held, "block"));
      }
      continue;
    }
    const std::int64_t size = groups_[group].block, end = prefix.size();
    Truth::Node node = last;
    for (std::int64_t i = end - 1; i >= 0 && i / size == (end - 1) / size; --i) {
      const std::span<const double> held{kv_in(number, layer, i % size), layer.kv.size};
      const std::span<const double> right = truth_->kv(node).subspan(layer.kv.first, layer.kv.size);
      if (!same_bits(held, right))
        return fmt::format("the KV of token {} in unit {} is {} off{}", i, layer.unit,
                           magnitude(distance(held, right)), origin(held, "block"));
      node = truth_->before(node);
    }
  }
  return "all of them are right";
}

Findings NumberBlocks::drain() {
  run();
  return std::exchange(findings_, {});
}

}  // namespace lockstep::cache_sim
