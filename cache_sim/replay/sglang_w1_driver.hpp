// The driver of `sglang-w1`: a fixed loop over its requests. The decision digest over the replies
// is recorded for SGLang's own caches, so any subject can be compared with them.
#pragma once

#include <cstdint>
#include <functional>

#include "cache_sim/replay/workload_driver.hpp"
#include "cache_sim/workloads/sglang_w1.hpp"

namespace lockstep::cache_sim {

/// Called before request k is admitted (k = requests.size() before the final drain), with the
/// digest and hit tokens so far.
using DriveProgress =
    std::function<void(std::int64_t k, std::uint64_t digest, std::int64_t hit_tokens)>;

/// Drives the workload: FIFO, at most 8 in flight, prefill chunks of 1,024, the finish allocates
/// all outputs in one extend. Operations: admit, extend + checkpoint per chunk, extend (out - 1
/// output tokens), finish.
DrivenOutcome drive(const SglangW1& workload, const ApplyOperation& apply,
                    const DriveProgress& progress = {});

}  // namespace lockstep::cache_sim
