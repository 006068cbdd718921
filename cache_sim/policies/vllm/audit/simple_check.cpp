#include "cache_sim/policies/vllm/audit/simple_check.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "reference/base/counted.hpp"

namespace lockstep::cache_sim {

HeldBlocks held_by_copies(const SimpleTier& tier) {
  HeldBlocks held;
  const auto add = [&](const std::vector<BlockCopy>& copies, bool is_load) {
    for (const BlockCopy& copy : copies) {
      held.device.push_back(is_load ? copy.target : copy.source);
      held.host.push_back(tier.on_host(is_load ? copy.source : copy.target));
    }
  };
  for (const SimpleTier::Job& job : tier.stores())
    for (const SimpleTier::Part& part : job.parts) add(part.copies, false);
  for (const SimpleTier::Job& job : tier.loads())
    for (const SimpleTier::Part& part : job.parts) add(part.copies, true);
  for (const SimpleTier::Part& part : tier.new_loads()) add(part.copies, true);
  add(tier.new_stores(), false);
  add(tier.ended_stores(), false);
  return held;
}

Findings check_host_blocks(const SimpleTier& tier, LabelBlocks& labels) {
  Findings findings;
  const BlockPool& pool = tier.host();
  std::vector<std::int32_t> uses(std::size_t{pool.block_count()} + 1);
  for (const BlockId block : held_by_copies(tier).host) ++uses[block];
  for (const auto& [request, columns] : tier.hits())
    for (const std::vector<BlockId>& of_group : columns)
      for (const BlockId block : of_group)
        if (block != kNullBlock) ++uses[block];
  std::size_t unused = 0;
  for (BlockId block = 1; block < uses.size(); ++block) {
    unused += uses[block] == 0 ? 1 : 0;
    if (pool.references(block) != uses[block])
      findings.push_back(
          {FindingKind::lock_imbalance,
           fmt::format("host block {} has {}, and hits and copies refer to it {}", block,
                       counted(pool.references(block), "reference"), counted(uses[block], "time")),
           std::to_string(uses[block]), std::to_string(pool.references(block))});
    for (const BlockPool::Entry& entry : pool.entries_of(block))
      labels.check_chunk(tier.in_memory(block), entry.group, entry.key, entry.tokens);
  }
  if (findings.empty() && pool.free_count() != unused)
    findings.push_back({FindingKind::leak, "host blocks are neither free nor in use",
                        std::to_string(unused), std::to_string(pool.free_count())});
  return findings;
}

const SimpleTier::Part* load_of(const SimpleTier& tier, SimpleTier::RequestId request) {
  for (const SimpleTier::Part& part : tier.new_loads())
    if (part.request == request) return &part;
  for (const SimpleTier::Job& job : tier.loads())
    for (const SimpleTier::Part& part : job.parts)
      if (part.request == request) return &part;
  return nullptr;
}

Findings check_load(const SimpleTier& tier, const BlockRequest& request, const BlockRules& rules) {
  Findings findings;
  const SimpleTier::Part* const load = load_of(tier, request.offload);
  for (std::uint32_t group = 0; load != nullptr && group < rules.groups.size(); ++group) {
    if (!is_state(rules.groups[group].kind)) continue;
    const BlockId last = block_at(request.tables[group].columns,
                                  ceil_div(request.computed, rules.groups[group].block) - 1);
    if (std::ranges::none_of(load->copies,
                             [&](const BlockCopy& copy) { return copy.target == last; }))
      findings.push_back({FindingKind::wrong_state_prefix,
                          fmt::format("a load brings {}, and group {} gets no state of them",
                                      counted(request.computed, "token"), group),
                          fmt::format("a copy to block {}", last), "none"});
  }
  return findings;
}

}  // namespace lockstep::cache_sim
