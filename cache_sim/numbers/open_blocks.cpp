#include "cache_sim/numbers/open_blocks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <variant>

namespace lockstep::cache_sim {

std::int64_t conv_width(const reference::HybridUnit& unit) {
  if (const auto* const mamba = std::get_if<reference::MambaUnit>(&unit.kind)) return mamba->width;
  if (const auto* const delta = std::get_if<reference::DeltaNetUnit>(&unit.kind))
    return delta->width;
  return 0;
}

std::optional<Finding> outside_of_tokens(const BlockRow& row) {
  if (0 <= row.start && row.start < row.end && row.end <= std::int64_t{row.tokens.size()})
    return {};
  return Finding{
      FindingKind::out_of_range,
      fmt::format("a row computes tokens {} to {} of {}", row.start, row.end, row.tokens.text(60)),
      "tokens that it has", "others"};
}

std::vector<std::int64_t> sizes_stored(const BlockRow& row) {
  std::vector<std::int64_t> sizes;
  if (row.verifies || row.drafts > 0) return sizes;
  for (const BlockStates& states : row.states)
    for (const BlockStates::Store& one : states.stores)
      if (one.block != kNullBlock) sizes.push_back(one.size);
  std::ranges::sort(sizes);
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

namespace {

std::int64_t most_tokens_of(const BlockGroups& pool) {
  std::int64_t most = 1;
  for (const GroupSpec& group : pool.groups)
    if (!is_state(group.kind)) most = std::max(most, group.block);
  return most;
}

/// Calls act(block, first place, end place) for the columns of tokens [first, end), null blocks
/// left out.
template <class Act>
void for_columns(const BlockKv& kv, std::int64_t first, std::int64_t end, const Act& act) {
  for (std::int64_t at = first; at < end; at = (at / kv.size + 1) * kv.size) {
    const std::int64_t column = at / kv.size;
    const BlockId number = block_at(kv.columns, column);
    const std::int64_t last = std::min(end, (column + 1) * kv.size);
    if (number != kNullBlock) act(number, at - column * kv.size, last - column * kv.size);
  }
}

/// Calls act(block) for the blocks that a row writes states to.
template <class Act>
void for_stores(const BlockRow& row, const BlockStates& states, const Act& act) {
  for (const BlockStates::Store& one : states.stores)
    if (one.block != kNullBlock) act(one.block);
  if (row.verifies && states.conv != kNullBlock) act(states.conv);
}

}  // namespace

OpenBlocks::OpenBlocks(const BlockGroups& pool)
    : most_tokens_(static_cast<std::size_t>(most_tokens_of(pool))),
      kv_(static_cast<std::size_t>(pool.blocks)),
      state_(static_cast<std::size_t>(pool.blocks)),
      place_(static_cast<std::size_t>(pool.blocks) * most_tokens_) {}

bool OpenBlocks::shares(const BlockRow& row) const {
  bool found = false;
  for (const BlockKv& kv : row.kv) {
    for_columns(kv, kv.first, row.end, [&](BlockId number, std::int64_t, std::int64_t) {
      found = found || state_[number] == batch_;
    });
    for_columns(kv, row.start, row.end, [&](BlockId number, std::int64_t first, std::int64_t end) {
      for (std::int64_t place = first; place < end; ++place)
        found = found || place_[place_index(number, place)] == batch_;
    });
  }
  for (const BlockStates& states : row.states) {
    for (const BlockId number : {states.recurrent, states.conv})
      if (!states.from_nothing && number != kNullBlock)
        found = found || state_[number] == batch_ || kv_[number] == batch_;
    for_stores(row, states, [&](BlockId number) { found = found || kv_[number] == batch_; });
  }
  return found;
}

void OpenBlocks::mark(const BlockRow& row) {
  for (const BlockKv& kv : row.kv)
    for_columns(kv, kv.first, row.end, [&](BlockId number, std::int64_t first, std::int64_t end) {
      kv_[number] = batch_;
      for (std::int64_t place = first; place < end; ++place)
        place_[place_index(number, place)] = batch_;
    });
  for (const BlockStates& states : row.states)
    for_stores(row, states, [&](BlockId number) { state_[number] = batch_; });
}

}  // namespace lockstep::cache_sim
