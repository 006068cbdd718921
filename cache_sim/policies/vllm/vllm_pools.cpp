// vLLM's memory of a hybrid model is one pool of blocks, which KV and states share
// (kv_cache_utils.py, interface.py).
#include <fmt/format.h>

#include <algorithm>

#include "cache_sim/model/pool_layout.hpp"

namespace lockstep::cache_sim {
namespace {

/// The blocks of a model. Layers of a kind are divided into groups of as many layers as the rarer
/// kind has; if the other kind has less than a quarter more, a group has as many layers as that
/// one. The tokens of a block are a multiple of 16, so many that their KV in a layer takes at least
/// the bytes of a layer's state. A block has the bytes of that KV in all layers of a group.
struct BlockLayout {
  std::int64_t block = 0;        ///< tokens
  std::int64_t block_bytes = 0;  ///< of all layers of one group
  std::string groups;            ///< the config field

  static std::int64_t group_layers(const Model& model) {
    const std::int64_t few = std::min(model.attention_layers, model.state_layers);
    const std::int64_t many = std::max(model.attention_layers, model.state_layers);
    return 4 * many < 5 * few ? many : few;
  }

  static BlockLayout of(const Model& model) {
    const std::int64_t group_layers = BlockLayout::group_layers(model);
    const std::int64_t token_bytes = model.token_bytes / model.attention_layers;
    const std::int64_t state_bytes = model.state_bytes / model.state_layers;
    BlockLayout layout;
    layout.block = 16 * ((state_bytes + 16 * token_bytes - 1) / (16 * token_bytes));
    layout.block_bytes = layout.block * token_bytes * group_layers;
    const auto add = [&](std::string_view kind, std::int64_t layers) {
      for (; layers > 0; layers -= group_layers)
        layout.groups +=
            fmt::format("{}{}:{}", layout.groups.empty() ? "" : ",", kind, layout.block);
    };
    add("attention", model.attention_layers);
    add("mamba", model.state_layers);
    return layout;
  }
};

std::int64_t blocks_in(const PoolMemory& memory, const BlockLayout& layout) {
  return std::min(memory.bytes / layout.block_bytes, kMostSlots);
}

bool applies(const PolicyEntry& policy) {
  return policy.config_fields.contains("blocks");
}

Result<PoolContents> contents(const PoolMemory& memory) {
  if (memory.fixed.contains("groups") || memory.fixed.contains("block"))
    return fail(
        "with a capacity in bytes the model decides the fields block and groups; without one, "
        "`blocks` counts");
  const BlockLayout layout = BlockLayout::of(memory.model);
  PoolContents pools;
  if (!memory.fixed.contains("hash_block")) pools.lookup = layout.block;
  pools.blocks = blocks_in(memory, layout);
  if (pools.blocks < 2) return no_room_for("block besides the null block", memory);
  pools.state_slots = pools.blocks - 1;
  pools.kv_tokens = pools.state_slots * layout.block;
  return pools;
}

std::string fields(const PoolMemory& memory) {
  const BlockLayout layout = BlockLayout::of(memory.model);
  return fmt::format("blocks={},block={},hash_block={},groups={}", blocks_in(memory, layout),
                     layout.block, layout.block, layout.groups);
}

/// The CPU tier's chunks, of blocks_per_chunk blocks of one group each, in one pool.
Result<PoolLayout::Host> host(const PoolMemory& memory, const Config& config) {
  const BlockLayout layout = BlockLayout::of(memory.model);
  const std::int64_t blocks = config.number("blocks_per_chunk");
  const std::int64_t chunks =
      std::min(memory.bytes / (layout.block_bytes * blocks), std::int64_t{1} << 24);
  if (chunks == 0) return no_room_for("chunk", memory);
  return PoolLayout::Host{.kv_tokens = chunks * blocks * layout.block,
                          .state_slots = chunks,
                          .fields = fmt::format("cpu_chunks={}", chunks)};
}

std::int64_t copied(const Model& model, std::int64_t block, const SnapshotHost::Copied& what) {
  const std::int64_t token_bytes = model.token_bytes / model.attention_layers;
  return (what.kv_tokens + what.states * block) * token_bytes * BlockLayout::group_layers(model);
}

PoolLayout::Blocks blocks(const Config& config) {
  return {config.number("blocks"), config.number("block")};
}

const Registration<PoolLayout> kPools{{.name = "vllm",
                                       .applies = applies,
                                       .contents = contents,
                                       .fields = fields,
                                       .blocks = blocks,
                                       .scheduler = "scheduler=vllm",
                                       .host = host,
                                       .copied = copied}};

}  // namespace
}  // namespace lockstep::cache_sim
