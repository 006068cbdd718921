// Progress of this process's long work, for cache_sim/program/progress.hpp, which shows it.
#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep {

/// Operations played, and requests served by ideal policies, since the process began. The working
/// thread counts; another thread may read.
inline std::atomic<std::int64_t> work_done{0};

inline void count_work() {
  work_done.store(work_done.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

}  // namespace lockstep
