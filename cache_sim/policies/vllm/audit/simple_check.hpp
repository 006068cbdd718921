// Checks of the host's blocks (simple_tier.hpp), for the auditor of vLLM's policies:
//
//   L1  a host block that a look-up may find holds what each of its keys says
//   L4  a load brings a state to each group that has some
//   L6  a host block is free exactly where nobody refers to it
//   L7  its references are hits that wait for their request's blocks, and copies that are not
//       settled
//   L8  a request that waits for a load has one
#pragma once

#include <vector>

#include "cache_sim/policies/vllm/label_blocks.hpp"
#include "cache_sim/policies/vllm/vllm_policy.hpp"

namespace lockstep::cache_sim {

/// Ends of copies that are not settled.
struct HeldBlocks {
  std::vector<BlockId> device, host;  ///< as often as copies refer to them
};
HeldBlocks held_by_copies(const SimpleTier& tier);

/// Violations of L1, L6 and L7; `labels` takes what blocks hold that their keys do not say.
Findings check_host_blocks(const SimpleTier& tier, LabelBlocks& labels);

/// The copy that loads for the request, or is to; null where there is none.
const SimpleTier::Part* load_of(const SimpleTier& tier, SimpleTier::RequestId request);

/// Of a request that loads: L4, a state comes into the last column of each group of states.
Findings check_load(const SimpleTier& tier, const BlockRequest& request, const BlockRules& rules);

}  // namespace lockstep::cache_sim
