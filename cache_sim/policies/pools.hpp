// The two memories of a hybrid server: KV slots, one per token, and state slots, one per recurrent
// state. Rows of the request table are a third thing with their own numbers (rows are not slots).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "reference/protocol/layer_state.hpp"

namespace lockstep::cache_sim {

using KvRuns = std::vector<KvRun>;

/// An array for the numbers of the newest slots of a request that grows token by token. Requests
/// that decode side by side take turns at the free list: without such arrays each slot would be a
/// run of its own.
struct KvTail {
  static constexpr std::uint32_t kSize = 256;
  std::shared_ptr<std::uint32_t[]> array;
  std::uint32_t used = kSize;
};

/// KV slots in a FIFO list: an allocation takes from the front, freed slots go to the end. Slots
/// page … page + slots - 1 exist (page 0 is the padding target), in whole pages. An allocation
/// copies its slots' numbers into one array, so that runs do not crumble however long a server
/// runs. Slots that were never used are stored as a range, so the memory of a large pool grows with
/// its use.
class KvPool {
 public:
  KvPool(std::int64_t slots, std::uint32_t page, LayerState& layers)
      : KvPool(page, slots, page, layers) {}
  /// A pool of another tier, whose slots are numbered from `first` on.
  KvPool(std::uint32_t first, std::int64_t slots, std::uint32_t page, LayerState& layers);

  std::int64_t free_count() const { return free_count_; }
  std::int64_t slot_count() const { return slot_count_; }
  std::uint32_t first_slot() const { return first_; }
  /// The free slots that were used before, or will be next; those from first_unused() on are free,
  /// too.
  const std::deque<KvRun>& free_runs() const { return free_; }
  std::uint32_t first_unused() const { return first_unused_; }
  std::int64_t unused_count() const { return end_ - first_unused_; }

  /// 1 <= size <= free_count(), whole pages.
  KvRun allocate(std::uint32_t size);
  /// The same, appended to a request's runs.
  void allocate(std::uint32_t size, KvRuns& onto, KvTail& tail);
  void release(const KvRuns& runs);
  /// Releases the slots from the `first` one on, in order, and leaves the others in `runs`.
  void release_from(KvRuns& runs, std::uint32_t first);

 private:
  void drop_front();
  void take(std::uint32_t size, std::uint32_t* into);
  void release(KvRun run);

  std::deque<KvRun> free_;  // the front one is of slots not used before, while there are any
  std::uint32_t first_unused_;
  std::uint32_t end_;
  std::int64_t free_count_;
  std::int64_t slot_count_;
  std::uint32_t first_;
  LayerState& layers_;
};

/// State slots 1 … slots in a FIFO list: allocation takes from the front, a freed slot goes to the
/// end. Slot 0 is the padding target.
class StatePool {
 public:
  StatePool(std::int64_t slots, LayerState& layers) : StatePool(1, slots, layers) {}
  /// A pool of another tier, whose slots are numbered from `first` on.
  StatePool(std::uint32_t first, std::int64_t slots, LayerState& layers);

  std::int64_t free_count() const { return free_count_; }
  std::int64_t slot_count() const { return slot_count_; }
  std::uint32_t first_slot() const { return first_; }
  /// The free slots that were used before, in order; those from first_unused() on come before them.
  const std::deque<StateSlot>& free_slots() const { return free_; }
  std::uint32_t first_unused() const { return first_unused_; }
  std::int64_t unused_count() const { return end_ - first_unused_; }

  StateSlot allocate();  ///< requires free_count() > 0
  void release(StateSlot slot);
  LayerState& layers() { return layers_; }

 private:
  std::deque<StateSlot> free_;
  std::uint32_t first_;
  std::uint32_t first_unused_;
  std::int64_t end_;
  std::int64_t free_count_;
  std::int64_t slot_count_;
  LayerState& layers_;
};

/// Appends a run of at least one slot, joining it with the last one where it continues it.
void append_run(KvRuns& runs, KvRun run);

/// Slots first … last - 1, counted from the start of the runs, appended to `out`.
void append_slice(KvRuns& out, const KvRuns& runs, std::uint32_t first, std::uint32_t last);

}  // namespace lockstep::cache_sim
