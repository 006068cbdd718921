// Runs independent pieces of work on the machine's threads. Pieces share nothing, so results do not
// depend on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep {

/// Multiplications below which a thread costs more than it saves.
constexpr std::int64_t kWorthAThread = 1 << 20;

/// Calls body(i) for i = 0 ... count - 1, in any order; `work` is the approximate number of
/// multiplications of all together. Rethrows the first exception.
template <class Body>
void parallel_for(std::int64_t count, std::int64_t work, Body body) {
  const std::int64_t useful = std::min(count, work / kWorthAThread);
  const std::int64_t threads = std::min<std::int64_t>(useful, std::thread::hardware_concurrency());
  if (threads < 2) {
    for (std::int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<std::int64_t> next{0};
  std::exception_ptr failure;
  std::mutex guard;
  const auto run = [&] {
    try {
      for (std::int64_t i = next++; i < count; i = next++) body(i);
    } catch (...) {
      const std::lock_guard lock(guard);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (std::int64_t i = 1; i < threads; ++i) others.emplace_back(run);
  run();
  for (std::thread& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

/// Calls body(item) for each of a few items, each of which is worth a thread.
template <class Items, class Body>
void in_parallel(Items& items, Body body) {
  const auto count = static_cast<std::int64_t>(items.size());
  parallel_for(count, count * kWorthAThread,
               [&](std::int64_t i) { body(items[static_cast<std::size_t>(i)]); });
}

}  // namespace lockstep
