#include "cache_sim/model/step_cost.hpp"

#include <algorithm>

namespace lockstep::cache_sim {

Nanoseconds ModelStepCost::of(const StepWork& work) const {
  const std::int64_t tokens = work.prefill_tokens + work.decode_tokens;
  const std::int64_t computing =
      scaled(tokens, model_.flops_per_token, kFlopsPerNanosecond) +
      scaled(work.seen_tokens, model_.flops_per_pair, kFlopsPerNanosecond);
  const std::int64_t reading =
      (model_.weight_bytes + work.context_tokens * model_.token_bytes) / kBytesPerNanosecond;
  return std::max(computing, reading) + kLaunch;
}

}  // namespace lockstep::cache_sim
