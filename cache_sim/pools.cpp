#include "cache_sim/pools.hpp"

#include <algorithm>
#include <bit>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

KvPool::KvPool(std::int64_t slots, std::uint32_t page, LayerState& layers)
    : free_count_(slots / page * page), slot_count_(free_count_), page_(page), layers_(layers) {
  const auto end = static_cast<std::size_t>(page + free_count_);
  words_.assign(end / 64 + 1, 0);
  for (std::size_t slot = page; slot < end; ++slot)
    words_[slot / 64] |= std::uint64_t{1} << (slot % 64);
}

/// The next run of free slots at or behind the cursor, at most `size` long, now taken.
KvExtent KvPool::take_run(std::uint32_t size) {
  while (words_[cursor_] == 0) cursor_ = cursor_ + 1 == words_.size() ? 0 : cursor_ + 1;
  const int first = std::countr_zero(words_[cursor_]);
  const auto begin = static_cast<std::uint32_t>(cursor_ * 64) + static_cast<std::uint32_t>(first);
  std::uint32_t taken = 0;
  std::uint32_t bit = static_cast<std::uint32_t>(first);
  for (;;) {
    const std::uint64_t rest = words_[cursor_] >> bit;
    const std::uint32_t ones = std::min<std::uint32_t>(
        static_cast<std::uint32_t>(std::countr_one(rest)), std::min(64 - bit, size - taken));
    const std::uint64_t mask = ones == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << ones) - 1;
    words_[cursor_] &= ~(mask << bit);
    taken += ones;
    if (taken == size || bit + ones < 64 || cursor_ + 1 == words_.size()) break;
    ++cursor_;
    bit = 0;
  }
  return {begin, taken};
}

void KvPool::allocate(std::uint32_t size, std::vector<KvExtent>& out) {
  require(size <= free_count_, "an allocation is not larger than what is free");
  free_count_ -= size;
  while (size != 0) {
    const KvExtent run = take_run(size);
    layers_.allocate_kv({&run, 1});
    append_extent(out, run);
    size -= run.size;
  }
}

void KvPool::release(std::span<const KvExtent> extents) {
  layers_.free_kv(extents);
  for (const KvExtent& extent : extents) {
    free_count_ += extent.size;
    std::uint32_t slot = extent.begin;
    const std::uint32_t end = extent.begin + extent.size;
    while (slot < end) {
      const std::uint32_t bit = slot % 64;
      const std::uint32_t count = std::min(64 - bit, end - slot);
      const std::uint64_t mask = count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
      words_[slot / 64] |= mask << bit;
      slot += count;
    }
  }
}

StatePool::StatePool(std::int64_t slots, LayerState& layers) : slot_count_(slots), layers_(layers) {
  for (std::int64_t slot = 1; slot <= slots; ++slot)
    free_.push_back({static_cast<std::uint32_t>(slot)});
}

StateSlot StatePool::allocate() {
  require(!free_.empty(), "a state slot is free when one is taken");
  const StateSlot slot = free_.front();
  free_.pop_front();
  layers_.allocate_state(slot);
  return slot;
}

void StatePool::release(StateSlot slot) {
  layers_.free_state(slot);
  free_.push_back(slot);
}

void append_slice(std::vector<KvExtent>& out, std::span<const KvExtent> extents,
                  std::uint32_t first, std::uint32_t last) {
  for (const KvExtent& extent : extents) {
    if (first >= last) return;
    if (first < extent.size) {
      const std::uint32_t stop = std::min(last, extent.size);
      append_extent(out, {extent.begin + first, stop - first});
      first = extent.size;
      if (stop == last) return;
    }
    first -= extent.size;
    last -= extent.size;
  }
  require(first >= last, "a slice lies inside its extents");
}

}  // namespace lockstep::cache_sim
