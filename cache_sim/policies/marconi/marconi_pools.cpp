// Marconi's memory is one pool of bytes, which KV and states share.
#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/model/pool_layout.hpp"

namespace lockstep::cache_sim {
namespace {

bool applies(const PolicyEntry& policy) {
  return policy.config_fields.contains("pool_bytes");
}

Result<PoolContents> contents(const PoolMemory& memory) {
  PoolContents pools;
  pools.state_slots = std::min(memory.bytes / memory.model.state_bytes, kMostSlots);
  if (pools.state_slots == 0) return no_room_for("state", memory);
  pools.kv_tokens = std::min(memory.bytes / memory.model.token_bytes, kMostSlots);
  pools.kv_tokens -= pools.kv_tokens % memory.page;
  if (pools.kv_tokens == 0) return no_room_for("page of KV", memory);
  return pools;
}

std::string fields(const PoolMemory& memory) {
  std::string pool = fmt::format("pool_bytes={},token_bytes={},state_bytes={}", memory.bytes,
                                 memory.model.token_bytes, memory.model.state_bytes);
  if (memory.policy.config_fields.contains("flops_token"))
    pool += fmt::format(",flops_token={},flops_pair={}", memory.model.flops_per_token,
                        memory.model.flops_per_pair);
  return pool;
}

const Registration<PoolLayout> kPools{
    {.name = "marconi", .applies = applies, .contents = contents, .fields = fields}};

}  // namespace
}  // namespace lockstep::cache_sim
