#include "cache_sim/policies/pools.hpp"

#include <algorithm>
#include <numeric>

#include "reference/base/require.hpp"

namespace lockstep::cache_sim {

namespace {

/// The numbers of so many slots that were never used are written at once.
constexpr std::uint32_t kUnusedPiece = 1 << 16;

}  // namespace

KvPool::KvPool(std::uint32_t first, std::int64_t slots, std::uint32_t page, LayerState& layers)
    : first_unused_(first),
      end_(first + static_cast<std::uint32_t>(slots / page * page)),
      free_count_(slots / page * page),
      slot_count_(free_count_),
      first_(first),
      layers_(layers) {
  free_.emplace_back();
  drop_front();
}

/// Drops the empty front run. While there are slots that were never used, the next of them become
/// the new front run, before the freed ones.
void KvPool::drop_front() {
  free_.pop_front();
  const std::uint32_t size = std::min(kUnusedPiece, end_ - first_unused_);
  if (size == 0) return;
  auto piece = std::make_shared_for_overwrite<std::uint32_t[]>(size);
  std::iota(piece.get(), piece.get() + size, first_unused_);
  free_.push_front({std::move(piece), 0, size});
  first_unused_ += size;
}

/// Takes the first free slots: copies their numbers and removes them from the list.
void KvPool::take(std::uint32_t size, std::uint32_t* into) {
  for (std::uint32_t done = 0; done < size;) {
    KvRun& front = free_.front();
    const std::uint32_t piece = std::min(size - done, front.size);
    std::copy_n(front.slots().begin(), piece, into + done);
    front.begin += piece;
    front.size -= piece;
    done += piece;
    if (front.size == 0) drop_front();
  }
}

void KvPool::allocate(std::uint32_t size, KvRuns& onto, KvTail& tail) {
  if (size > KvTail::kSize / 4) return append_run(onto, allocate(size));
  require(size <= free_count_, "an allocation is not larger than what is free");
  if (tail.used + size > KvTail::kSize)
    tail = {std::make_shared_for_overwrite<std::uint32_t[]>(KvTail::kSize), 0};
  free_count_ -= size;
  take(size, tail.array.get() + tail.used);
  layers_.allocate_kv({tail.array.get() + tail.used, size});
  const bool goes_on = !onto.empty() && onto.back().array == tail.array &&
                       onto.back().begin + onto.back().size == tail.used;
  if (goes_on)
    onto.back().size += size;
  else
    onto.push_back({tail.array, tail.used, size});
  tail.used += size;
}

KvRun KvPool::allocate(std::uint32_t size) {
  require(size != 0 && size <= free_count_, "an allocation is not larger than what is free");
  free_count_ -= size;
  KvRun taken;
  if (free_.front().size >= size) {
    KvRun& front = free_.front();
    taken = {front.array, front.begin, size};
    front.begin += size;
    front.size -= size;
  } else {
    auto array = std::make_shared_for_overwrite<std::uint32_t[]>(size);
    take(size, array.get());
    taken = {std::move(array), 0, size};
  }
  if (!free_.empty() && free_.front().size == 0) drop_front();
  layers_.allocate_kv(taken.slots());
  return taken;
}

void KvPool::release(KvRun run) {
  layers_.free_kv(run.slots());
  free_count_ += run.size;
  free_.push_back(std::move(run));
}

void KvPool::release(const KvRuns& runs) {
  for (const KvRun& run : runs) release(run);
}

void KvPool::release_from(KvRuns& runs, std::uint32_t first) {
  auto kept = runs.begin();
  for (; kept != runs.end() && kept->size <= first; ++kept) first -= kept->size;
  require(kept != runs.end() || first == 0, "runs are cut inside or at their end");
  auto gone = kept;
  if (first != 0) {
    release({kept->array, kept->begin + first, kept->size - first});
    kept->size = first;
    ++gone;
  }
  const auto end = gone;
  for (; gone != runs.end(); ++gone) release(std::move(*gone));
  runs.erase(end, runs.end());
}

StatePool::StatePool(std::uint32_t first, std::int64_t slots, LayerState& layers)
    : first_(first),
      first_unused_(first),
      end_(first + slots),
      free_count_(slots),
      slot_count_(slots),
      layers_(layers) {}

StateSlot StatePool::allocate() {
  require(free_count_ != 0, "a state slot is free when one is taken");
  --free_count_;
  StateSlot slot{first_unused_};
  if (unused_count() != 0) {
    ++first_unused_;
  } else {
    slot = free_.front();
    free_.pop_front();
  }
  layers_.allocate_state(slot);
  return slot;
}

void StatePool::release(StateSlot slot) {
  layers_.free_state(slot);
  ++free_count_;
  free_.push_back(slot);
}

void append_run(KvRuns& runs, KvRun run) {
  if (!runs.empty() && runs.back().array == run.array &&
      runs.back().begin + runs.back().size == run.begin)
    runs.back().size += run.size;
  else
    runs.push_back(std::move(run));
}

void append_slice(KvRuns& out, const KvRuns& runs, std::uint32_t first, std::uint32_t last) {
  for (const KvRun& run : runs) {
    const std::uint32_t stop = std::min(last, run.size);
    if (first < stop) {
      append_run(out, {run.array, run.begin + first, stop - first});
      first = stop;
    }
    if (last <= run.size) return;
    first -= run.size;
    last -= run.size;
  }
  require(first >= last, "a slice lies inside its runs");
}

}  // namespace lockstep::cache_sim
