// A small server around the policy `vllm-align` with its worker: requests with shared prefixes come
// and go, prefill by chunks, decode with and without drafts of which some are accepted, are
// preempted where blocks run out, and resume. Steps are synchronous: all is scheduled, the forward
// runs, then its outputs are taken. After every step each block that has a key is compared with
// the tokens that the key stands for, and each forward's first state with the tokens before it.
#pragma once

#include <cstdint>
#include <string>

#include "cache_sim/policies/vllm/label_blocks.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/defect.hpp"

namespace lockstep::testing_support {

/// Counts of a run, and its findings.
struct VllmRun {
  std::int64_t steps = 0, preemptions = 0, copies = 0, finished = 0, accepted = 0, drafted = 0;
  std::int64_t received = 0, inner_states = 0;  ///< external tokens; states stored inside a chunk
  cache_sim::LabelBlocks::Checks checks;
  std::string finding;  ///< of the last step; empty where nothing was wrong

  VllmRun& operator+=(const VllmRun& other);
  std::string text() const;
};

/// The worker's rules broken one by one, and the two rules of the scheduler without which its
/// blocks hold something else. (vLLM's own rules were tried with the same ten.)
inline constexpr const char* kVllmMutants[] = {
    "vllm-align:forgets-accepted-without-drafts",
    "vllm-align:keeps-no-block-ends",
    "vllm-align:keeps-accepted-behind-copy",
    "vllm-align:copies-the-first-state",
    "vllm-align:cuts-no-chunks",
    "vllm-align:resumes-by-hash-block",
    "vllm-align:skips-block-copies",
    "vllm-align:resumes-with-old-accepted",
    "vllm-align:uses-states-of-this-step",
    "vllm-align:verifies-replays",
};

/// Blocks of 16 tokens, hashes of 16 or 4, up to three drafts, EAGLE in both ways or not, retention
/// none or 0, one to three state groups, pools of 70 to 400 blocks.
Config drawn_vllm_config(std::uint64_t seed, std::uint64_t stream);

/// At most so many steps; ends with the first finding. `defect`: a rule to break; null for none.
/// `external`: of ten requests, so many come with tokens that another server has computed.
VllmRun run_vllm_server(const Config& config, std::uint64_t seed, std::uint64_t stream,
                        std::int64_t steps, const Defect* defect, int external = 0);

}  // namespace lockstep::testing_support
