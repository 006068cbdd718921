// The driver of `sglang-w1`: a fixed loop over its requests. The digest over its decisions was
// recorded for SGLang's own caches, so any subject can be compared with them.
#pragma once

#include "cache_sim/replay/workload_driver.hpp"
#include "cache_sim/workloads/sglang_w1.hpp"

namespace lockstep::cache_sim {

/// Drives the workload: first in, first out, at most 8 requests in flight, prefill chunks of 1,024
/// tokens, all outputs in one extend at the finish. The operations of a request are admit, an
/// extend and a checkpoint for each chunk, an extend of all output tokens but the last, and finish.
DrivenOutcome drive(const SglangW1& workload, const ApplyOperation& apply);

}  // namespace lockstep::cache_sim
