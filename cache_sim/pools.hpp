// The two memories of a hybrid server: KV slots, one per token, and state slots, one per recurrent
// state. Rows of the request table are a third thing with their own numbers (rows are not slots).
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "reference/base/layer_state.hpp"

namespace lockstep::cache_sim {

/// KV slots in a bitmap, handed out by next fit. SGLang's allocator is a FIFO list of single slots;
/// which KV slot a token gets shows in no reply, and a bitmap keeps runs together, so a row of
/// thousands of tokens is a few extents. Slots page … page + slots - 1 exist (page 0 is the padding
/// target), in whole pages.
class KvPool {
 public:
  KvPool(std::int64_t slots, std::uint32_t page, LayerState& layers);

  std::int64_t free_count() const { return free_count_; }
  std::int64_t slot_count() const { return slot_count_; }
  std::uint32_t first_slot() const { return page_; }
  bool is_free(std::uint32_t slot) const { return (words_[slot / 64] >> (slot % 64) & 1) != 0; }

  /// Appends extents of `size` slots to `out`, joining the last one where it continues. size <=
  /// free_count(), whole pages.
  void allocate(std::uint32_t size, std::vector<KvExtent>& out);
  void release(std::span<const KvExtent> extents);

 private:
  KvExtent take_run(std::uint32_t size);

  std::vector<std::uint64_t> words_;  // bit set: slot free
  std::size_t cursor_ = 0;            // word where the next search starts
  std::int64_t free_count_;
  std::int64_t slot_count_;
  std::uint32_t page_;
  LayerState& layers_;
};

/// State slots 1 … slots in a FIFO list: allocation takes from the front, a freed slot goes to the
/// end (section 0 of the SGLang notes: MambaSlotAllocator). Slot 0 is the padding target.
class StatePool {
 public:
  StatePool(std::int64_t slots, LayerState& layers);

  std::int64_t free_count() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t slot_count() const { return slot_count_; }
  const std::deque<StateSlot>& free_slots() const { return free_; }

  StateSlot allocate();  ///< requires free_count() > 0
  void release(StateSlot slot);
  LayerState& layers() { return layers_; }

 private:
  std::deque<StateSlot> free_;
  std::int64_t slot_count_;
  LayerState& layers_;
};

/// Appends an extent, joining it with the last one where it continues it.
inline void append_extent(std::vector<KvExtent>& extents, KvExtent extent) {
  if (extent.size == 0) return;
  if (!extents.empty() && extents.back().begin + extents.back().size == extent.begin)
    extents.back().size += extent.size;
  else
    extents.push_back(extent);
}

/// Slots first … last - 1, counted from the start of the extents, appended to `out`.
void append_slice(std::vector<KvExtent>& out, std::span<const KvExtent> extents,
                  std::uint32_t first, std::uint32_t last);

}  // namespace lockstep::cache_sim
