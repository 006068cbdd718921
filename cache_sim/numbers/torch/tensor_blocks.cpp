#include "cache_sim/numbers/torch/tensor_blocks.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "cache_sim/numbers/compared.hpp"
#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

using at::Tensor;

namespace {

constexpr std::uint32_t kFirstState = 1;  // state slot 0 is no row's

std::int64_t bytes_of(const PoolPart& part) {
  return std::accumulate(part.shape.begin(), part.shape.end(), std::int64_t{1},
                         std::multiplies<>()) *
         static_cast<std::int64_t>(at::elementSize(part.type));
}

double distance_of(const Tensor& actual, const Tensor& expected) {
  const auto doubles = [](const Tensor& x) {
    const Tensor host = x.to(at::kCPU, at::kDouble).contiguous();
    return std::vector<double>(host.data_ptr<double>(), host.data_ptr<double>() + host.numel());
  };
  return distance(doubles(actual), doubles(expected));
}

}  // namespace

TensorBlocks::TensorBlocks(std::shared_ptr<TensorTruth> truth, const PlacedModel& placed,
                           const BlockGroups& pool, bool beside_labels)
    : truth_(std::move(truth)),
      model_(truth_->model()),
      beside_labels_(beside_labels),
      groups_(pool.groups),
      drafts_(pool.drafts),
      layout_(laid_out(model_, placed, pool)),
      batches_(model_),
      held_(static_cast<std::size_t>(pool.blocks)),
      open_blocks_(pool) {
  std::vector<std::int64_t> key{pool.blocks, pool.drafts, layout_.block_bytes};
  for (const Layer& layer : layout_.layers) key.push_back(layer.at);
  memory_ = truth_->memory(key, pool.blocks * layout_.block_bytes, [&] {
    return std::make_shared<TensorMemory>(TensorPools(model_.parts().size()));
  });
  make_room(pool.blocks, 8);
  poison_blocks(memory_->blocks, model_.activations(), 0);
}

TensorBlocks::Layout TensorBlocks::laid_out(const TensorModel& model, const PlacedModel& placed,
                                            const BlockGroups& pool) {
  Layout layout;
  std::int64_t unit_bytes = alignof(std::max_align_t), page = 0, most = 0;
  for (std::size_t i = 0; i < model.parts().size(); ++i) {
    const PoolPart& part = model.parts()[i];
    const auto unit = static_cast<std::size_t>(part.unit);
    if (layout.layers.empty() || layout.layers.back().unit != part.unit)
      layout.layers.push_back({.unit = part.unit,
                               .group = placed.groups[unit],
                               .width = conv_width(placed.config.units[unit])});
    Layer& layer = layout.layers.back();
    (part.kind == PoolKind::kv     ? layer.kv
     : part.kind == PoolKind::conv ? layer.conv
                                   : layer.recurrent) = i;
    if (part.kind == PoolKind::kv) unit_bytes = std::lcm(unit_bytes, bytes_of(part));
  }
  std::vector<std::int64_t> count(pool.groups.size());
  for (const Layer& layer : layout.layers) {
    const PoolPart& conv = model.parts()[layer.conv];
    page = std::max(page,
                    layer.has_state()
                        ? bytes_of(model.parts()[layer.recurrent]) +
                              bytes_of(conv) / (layer.width - 1) * (layer.width - 1 + pool.drafts)
                        : pool.groups[layer.group].block * bytes_of(model.parts()[layer.kv]));
  }
  page = (page + unit_bytes - 1) / unit_bytes * unit_bytes;
  for (Layer& layer : layout.layers) {
    layer.at = count[layer.group]++ * page;
    most = std::max(most, count[layer.group]);
  }
  layout.block_bytes = page * most;
  return layout;
}

/// Room for that many blocks, spare ones included, and states of a batch. Blocks keep what they
/// hold.
void TensorBlocks::make_room(std::int64_t blocks, std::int64_t states) {
  TensorMemory& memory = *memory_;
  const auto options = at::TensorOptions(at::kInt).device(model_.device());
  if (!memory.blocks.defined() || memory.blocks.size(0) < blocks) {
    const Tensor more = at::empty({room_for(blocks), layout_.block_bytes / 4}, options);
    poison_blocks(more, model_.activations(), 0);
    if (memory.blocks.defined()) more.narrow(0, 0, memory.blocks.size(0)).copy_(memory.blocks);
    memory.blocks = more;
    memory.buckets.clear();
    for (const Layer& layer : layout_.layers)
      if (!layer.has_state()) {
        std::vector<std::int64_t> shape = part(layer.kv).shape;
        shape.insert(shape.begin(), -1);
        memory.pools[layer.kv] = more.view(part(layer.kv).type).view(shape);
      }
  }
  for (const Layer& layer : layout_.layers)
    for (const std::size_t i : {layer.recurrent, layer.conv})
      if (layer.has_state() &&
          (!memory.pools[i].defined() || memory.pools[i].size(0) < states + kFirstState)) {
        std::vector<std::int64_t> shape = part(i).shape;
        shape.insert(shape.begin(), room_for(states + kFirstState));
        memory.pools[i] = at::full(shape, std::numeric_limits<double>::quiet_NaN(),
                                   at::TensorOptions(part(i).type).device(model_.device()));
        memory.buckets.clear();
      }
}

// --- What lies in a block

std::uint32_t TensorBlocks::kv_slot(BlockId number, const Layer& layer, std::int64_t place) const {
  const std::int64_t bytes = bytes_of(part(layer.kv));
  return static_cast<std::uint32_t>((number * layout_.block_bytes + layer.at) / bytes + place);
}

Tensor TensorBlocks::kv_in(BlockId number, const Layer& layer, std::int64_t place) const {
  return memory_->pools[layer.kv].select(0, kv_slot(number, layer, place));
}

Tensor TensorBlocks::recurrent_in(BlockId number, const Layer& layer) const {
  const PoolPart& own = part(layer.recurrent);
  return memory_->blocks[number]
      .view(own.type)
      .narrow(0, layer.at / 4, bytes_of(own) / 4)
      .view(own.shape);
}

/// All convolution rows of a block, [rows, channels].
Tensor TensorBlocks::conv_rows_in(BlockId number, const Layer& layer) const {
  const PoolPart& own = part(layer.conv);
  const auto size = static_cast<std::int64_t>(at::elementSize(own.type));
  const std::int64_t rows = layer.width - 1 + drafts_, channels = own.shape[0];
  return memory_->blocks[number]
      .view(own.type)
      .narrow(0, (layer.at + bytes_of(part(layer.recurrent))) / size, rows * channels)
      .view({rows, channels});
}

TensorBlocks::Held& TensorBlocks::hold(BlockId number, std::uint32_t group) {
  require(number < held_.size(), "a block is one of the pool");
  Held& held = held_[number];
  if (held.group != group) held = {.group = group};
  return held;
}

History TensorBlocks::held_kv(BlockId number, std::uint32_t group, std::int64_t place) const {
  if (number >= held_.size() || held_[number].group != group) return kNoHistory;
  const std::vector<History>& kv = held_[number].kv;
  return place < std::ssize(kv) ? kv[static_cast<std::size_t>(place)] : kNoHistory;
}

std::pair<History, History> TensorBlocks::held_states(BlockId recurrent, BlockId conv,
                                                      std::uint32_t group,
                                                      std::int64_t conv_begin) const {
  const Held &one = held_[recurrent], &other = held_[conv];
  const bool has_window = other.group == group && conv_begin < std::ssize(other.windows);
  return {one.group == group ? one.recurrent : kNoHistory,
          has_window ? other.windows[static_cast<std::size_t>(conv_begin)] : kNoHistory};
}

void TensorBlocks::lose(BlockId number) {
  run();
  if (held_[number].group == PlacedModel::kNowhere) return;
  held_[number] = {};
  poison_blocks(memory_->blocks.narrow(0, number, 1), model_.activations(), number);
}

void TensorBlocks::copy(const BlockCopy& copy) {
  run();
  memory_->blocks[copy.target].copy_(memory_->blocks[copy.source]);
  held_[copy.target] = held_[copy.source];
}

void TensorBlocks::move(const BlockMove& move) {
  run();
  for (const Layer& layer : layout_.layers) {
    if (layer.group != move.group || !layer.has_state()) continue;
    if (move.recurrent != move.target)
      recurrent_in(move.target, layer).copy_(recurrent_in(move.recurrent, layer));
    const std::int64_t count = layer.width - 1 + drafts_ - move.bias;
    if (count > 0)
      conv_rows_in(move.target, layer)
          .narrow(0, 0, count)
          .copy_(conv_rows_in(move.conv, layer).narrow(0, move.bias, count).clone());
  }
  const auto [recurrent, window] = held_states(move.recurrent, move.conv, move.group, move.bias);
  std::vector<History> windows;
  if (window != kNoHistory)
    windows.assign(held_[move.conv].windows.begin() + move.bias, held_[move.conv].windows.end());
  Held& target = hold(move.target, move.group);
  target.recurrent = recurrent;
  target.windows = std::move(windows);
}

template <class Numbers>
void TensorBlocks::store(std::uint32_t group, BlockId target, History history,
                         const Numbers& numbers) {
  if (target == kNullBlock) return;
  for (const Layer& layer : layout_.layers) {
    if (layer.group != group || !layer.has_state()) continue;
    recurrent_in(target, layer).copy_(numbers(layer.recurrent));
    conv_rows_in(target, layer).narrow(0, 0, layer.width - 1).copy_(numbers(layer.conv).t());
  }
  Held& held = hold(target, group);
  held.recurrent = history;
  held.windows = {history};
}

void TensorBlocks::receive(const BlockRow& row) {
  run();
  for (const BlockKv& kv : row.kv)
    for (std::int64_t i = row.start - 1; i >= row.start - row.external; --i) {
      const BlockId number = block_at(kv.columns, i / kv.size);
      if (number == kNullBlock) continue;
      const History history = truth_->kv_of(row.tokens, static_cast<std::uint32_t>(i));
      for (const Layer& layer : layout_.layers)
        if (layer.group == kv.group)
          kv_in(number, layer, i % kv.size).copy_(truth_->numbers(layer.kv, history));
      leave_kv(number, kv.group, i % kv.size, history);
    }
  for (const BlockStates& states : row.states)
    for (const BlockStates::Store& one : states.stores) {
      const History history = truth_->state_of(row.tokens, static_cast<std::uint32_t>(row.start));
      store(states.group, one.block, history,
            [&](std::size_t i) { return truth_->numbers(i, history); });
    }
}

void TensorBlocks::leave_kv(BlockId number, std::uint32_t group, std::int64_t place,
                            History history) {
  std::vector<History>& kv = hold(number, group).kv;
  if (std::ssize(kv) <= place) kv.resize(static_cast<std::size_t>(place) + 1);
  kv[static_cast<std::size_t>(place)] = history;
}

// --- Rows

void TensorBlocks::forward(const BlockRow& row) {
  if (std::optional<Finding> wrong = outside_of_tokens(row)) {
    findings_.push_back(std::move(*wrong));
    return;
  }
  if (open_blocks_.shares(row)) run();
  open_blocks_.mark(row);
  OpenRow& open = rows_.emplace_back();
  open.request = row.request;
  open.text = row.tokens;
  open.row = {.begin = row.start,
              .drafts = row.drafts,
              .verifies = row.verifies || row.drafts > 0,
              .has_state = model_.has_states()};
  for (std::int64_t i = row.start; i < row.end; ++i)
    open.row.tokens.push_back(row.tokens[static_cast<std::uint32_t>(i)]);
  open.states.assign(row.states.begin(), row.states.end());
  open.sizes = sizes_stored(row);
  place_kv(row, open);
}

/// Lists the block of each token's KV, by group, and its slot, by layer.
void TensorBlocks::place_kv(const BlockRow& row, OpenRow& open) {
  for (const BlockKv& kv : row.kv) {
    OwnKv& own = open.kv.emplace_back(OwnKv{kv.group, kv.size, kv.first, {}});
    for (std::int64_t i = 0; i < row.end; ++i) {
      BlockId number = block_at(kv.columns, i / kv.size);
      if (number == kNullBlock && i >= row.start) {
        const bool goes_on = i > row.start && i % kv.size != 0;
        number = goes_on ? own.blocks.back() : static_cast<BlockId>(std::ssize(held_) + spare_++);
      }
      own.blocks.push_back(number);
    }
  }
  for (const Layer& layer : layout_.layers) {
    if (layer.has_state()) continue;
    const auto own = std::ranges::find(open.kv, layer.group, &OwnKv::group);
    require(own != open.kv.end(), "a row has every group");
    std::vector<std::uint32_t>& slots = open.row.kv_by_layer.emplace_back();
    for (std::int64_t i = 0; i < row.end; ++i)
      slots.push_back(kv_slot(own->blocks[static_cast<std::size_t>(i)], layer, i % own->size));
  }
}

void TensorBlocks::run() {
  std::vector<OpenRow> rows = std::exchange(rows_, {});
  if (rows.empty()) return;
  open_blocks_.close();
  std::size_t states = 0;
  for (const OpenRow& open : rows) states += 1 + open.sizes.size();
  make_room(std::ssize(held_) + std::exchange(spare_, 0), static_cast<std::int64_t>(states));
  std::vector<const TensorRow*> told;
  std::uint32_t slot = kFirstState;
  for (OpenRow& open : rows) {
    open.row.state = slot++;
    for (const std::int64_t size : open.sizes)
      if (size < open.row.begin + open.row.size()) open.row.takes.push_back({size, slot++});
    begin(open);
    told.push_back(&open.row);
  }
  const TensorResults results = batches_.run(told, *memory_, findings_);
  const Tensor all = results.logits.contiguous();
  std::span<const float> logits(all.data_ptr<float>(), static_cast<std::size_t>(all.numel()));
  for (const OpenRow& open : rows) {
    const auto own = static_cast<std::size_t>(open.row.sampled() * model_.config().vocabulary);
    compare(open, logits.first(own));
    logits = logits.subspan(own);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) end(rows[i], results.states_after[i]);
}

/// Gathers the states from which the row starts, finds its truth, compares them, and leaves the
/// histories of its KV.
void TensorBlocks::begin(OpenRow& open) {
  open.start.states.assign(model_.parts().size(), kNoHistory);
  const auto numbers = [&](std::size_t i) { return memory_->pools[i].select(0, open.row.state); };
  for (const BlockStates& states : open.states) {
    const auto [recurrent, window] =
        states.from_nothing
            ? std::pair(kEmptyText, kEmptyText)
            : held_states(states.recurrent, states.conv, states.group, states.conv_begin);
    for (const Layer& layer : layout_.layers) {
      if (layer.group != states.group || !layer.has_state()) continue;
      open.start.states[layer.recurrent] = recurrent;
      open.start.states[layer.conv] = window;
      if (states.from_nothing) {
        numbers(layer.recurrent).zero_();
        numbers(layer.conv).zero_();
        continue;
      }
      numbers(layer.recurrent).copy_(recurrent_in(states.recurrent, layer));
      const Tensor rows = conv_rows_in(states.conv, layer);
      for (std::int64_t column = 0; column + 1 < layer.width; ++column)
        numbers(layer.conv)
            .select(1, column)
            .copy_(rows[std::min(states.conv_begin + column, rows.size(0) - 1)]);
    }
  }
  for (const Layer& layer : layout_.layers) {
    if (layer.has_state()) continue;
    const OwnKv& own = *std::ranges::find(open.kv, layer.group, &OwnKv::group);
    std::vector<History>& kv = open.start.kv.emplace_back();
    for (std::int64_t i = 0; i < open.row.begin; ++i)
      kv.push_back(held_kv(own.blocks[static_cast<std::size_t>(i)], own.group, i % own.size));
  }
  open.truth = &truth_->row(open.text, open.row, open.start);
  // At once: a later row of the batch may read it, since a layer writes KV before it reads any.
  for (const OwnKv& own : open.kv)
    for (std::int64_t i = open.row.begin; i < std::ssize(own.blocks); ++i)
      if (const BlockId number = own.blocks[static_cast<std::size_t>(i)]; number < held_.size())
        leave_kv(number, own.group, i % own.size,
                 open.truth->kv[static_cast<std::size_t>(i - open.row.begin)]);
  for (const BlockStates& states : open.states)
    for (const Layer& layer : layout_.layers)
      for (const std::size_t i : {layer.recurrent, layer.conv})
        if (layer.group == states.group && layer.has_state() && open.wrong_state.empty() &&
            !same_bits(numbers(i), truth_->numbers(i, open.start.states[i])))
          open.wrong_state = layer.text() + ": the " + part(i).name() + " part of block " +
                             std::to_string(i == layer.conv ? states.conv : states.recurrent) +
                             " differs" + origin(numbers(i), "block");
}

/// Stores the row's states.
void TensorBlocks::end(const OpenRow& open, const std::vector<Tensor>& states_after) {
  const TensorRow& row = open.row;
  for (const BlockStates& states : open.states) {
    if (row.verifies) {
      store_verified(open, states, states_after);
      continue;
    }
    for (const BlockStates::Store& one : states.stores) {
      const auto take = std::ranges::find(row.takes, one.size, &reference::HybridTake::after);
      const bool is_last = take == row.takes.end();
      store(states.group, one.block,
            is_last ? open.truth->end
                    : open.truth->takes[static_cast<std::size_t>(take - row.takes.begin())],
            [&](std::size_t i) {
              return memory_->pools[i].select(0, is_last ? row.state : take->slot);
            });
    }
  }
}

/// Stores the recurrent part after each token, and the conv rows of all of them in the block of the
/// window, behind those that they have in common with the state before.
void TensorBlocks::store_verified(const OpenRow& open, const BlockStates& states,
                                  const std::vector<Tensor>& states_after) {
  const std::vector<History>& after = open.truth->states_after;
  for (const BlockStates::Store& one : states.stores) {
    if (one.block == kNullBlock) continue;
    const std::int64_t token = one.size - open.row.begin - 1;
    for (const Layer& layer : layout_.layers)
      if (layer.group == states.group && layer.has_state())
        recurrent_in(one.block, layer).copy_(states_after[layer.recurrent][token]);
    hold(one.block, states.group).recurrent = after[static_cast<std::size_t>(token)];
  }
  if (states.conv == kNullBlock) return;
  for (const Layer& layer : layout_.layers) {
    if (layer.group != states.group || !layer.has_state()) continue;
    const Tensor rows = conv_rows_in(states.conv, layer);
    const Tensor windows = states_after[layer.conv];  // [tokens, channels, width - 1]
    // The first window's columns but the last are those that it shares with the state before.
    for (std::int64_t column = 0; column + 2 < layer.width; ++column)
      rows[column].copy_(windows[0].select(1, column));
    for (std::int64_t i = 0; i < windows.size(0); ++i)
      rows[std::min(layer.width - 2 + i, rows.size(0) - 1)].copy_(
          windows[i].select(1, layer.width - 2));
  }
  hold(states.conv, states.group).windows = after;
}

// --- Comparison

void TensorBlocks::compare(const OpenRow& open, std::span<const float> logits) {
  const std::int64_t V = model_.config().vocabulary, last = open.row.sampled() - 1;
  const std::optional<std::string> moved = moved_logits(open.row, logits, *open.truth, V);
  if (tells_rows_)
    told_rows_.push_back(told_row(
        open.request.text(), static_cast<std::uint32_t>(open.row.begin + open.row.size()),
        logits_of(logits, last, V), logits_of(open.truth->logits, last, V), "the row alone"));
  if (!moved && open.wrong_state.empty()) return;
  std::string where = open.wrong_state.empty() ? wrong_kv(open) : open.wrong_state;
  if (where.empty()) where = kReadsRight;
  const std::string read =
      row_text(static_cast<std::uint32_t>(open.row.begin),
               static_cast<std::uint32_t>(open.row.begin + open.row.size()), open.text);
  findings_.push_back({FindingKind::number_differs,
                       read + ": " + moved.value_or(std::string(kOnlyReadsWrong)) + "; " + where,
                       "the bits of the same operators over this row alone", where});
}

/// The first KV that the row read and that is not right.
std::string TensorBlocks::wrong_kv(const OpenRow& open) const {
  std::size_t at = 0;
  for (const Layer& layer : layout_.layers) {
    if (layer.has_state()) continue;
    const std::vector<History>& right = open.start.kv[at++];
    const OwnKv& own = *std::ranges::find(open.kv, layer.group, &OwnKv::group);
    for (std::int64_t i = own.first; i < open.row.begin; ++i) {
      const auto place = static_cast<std::size_t>(i);
      const Tensor held = kv_in(own.blocks[place], layer, i % own.size);
      if (!same_bits(held, truth_->numbers(layer.kv, right[place])))
        return layer.text() + ": KV of token " + std::to_string(i) + " in group " +
               std::to_string(layer.group) + " differs" + origin(held, "block");
    }
  }
  return "";
}

std::string TensorBlocks::said_of(BlockId number, std::uint32_t group, const Tokens& prefix) {
  run();
  const auto off = [&](std::size_t i, const Tensor& held, History right) {
    const Tensor wanted = truth_->numbers(i, right);
    return same_bits(held, wanted)
               ? std::string()
               : magnitude(distance_of(held, wanted)) + " off" + origin(held, "block");
  };
  const Label label = label_of(prefix, prefix.size());
  for (const Layer& layer : layout_.layers) {
    if (layer.group != group) continue;
    if (layer.has_state()) {
      const auto [recurrent, window] = held_states(number, number, group, 0);
      const auto right = [&](History held) {
        return truth_->state_label(held) == label ? held : truth_->state_of(prefix, prefix.size());
      };
      std::string said = off(layer.recurrent, recurrent_in(number, layer), right(recurrent));
      if (!said.empty()) return "the recurrent part of " + layer.text() + " is " + said;
      said = off(layer.conv, conv_rows_in(number, layer).narrow(0, 0, layer.width - 1).t(),
                 right(window));
      if (!said.empty()) return "the conv part of " + layer.text() + " is " + said;
      continue;
    }
    const std::int64_t size = groups_[group].block, end = prefix.size();
    for (std::int64_t i = end - 1; i >= 0 && i / size == (end - 1) / size; --i) {
      const auto token = static_cast<std::uint32_t>(i);
      History right = held_kv(number, group, i % size);
      if (truth_->kv_label(right) != label_of(prefix, token + 1))
        right = truth_->kv_of(prefix, token);
      const std::string said = off(layer.kv, kv_in(number, layer, i % size), right);
      if (!said.empty())
        return "the KV of token " + std::to_string(i) + " in " + layer.text() + " is " + said;
    }
  }
  return "all of them are right";
}

Findings TensorBlocks::drain() {
  run();
  return std::exchange(findings_, {});
}

}  // namespace lockstep::cache_sim
