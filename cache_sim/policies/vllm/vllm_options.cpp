#include "cache_sim/policies/vllm/vllm_options.hpp"

#include "reference/base/registry.hpp"
#include "reference/protocol/host_tier.hpp"

namespace lockstep::cache_sim {

VllmOptions VllmOptions::of(const Config& config) {
  return {.blocks = config.number("blocks"),
          .block = config.number("block"),
          .hash_block = config.number("hash_block"),
          .hash_algorithm = config.text("hash_algorithm"),
          .retention = config.text("retention"),
          .groups = config.text("groups"),
          .checkpoint = config.number("checkpoint"),
          .shared_prefix_checkpoint = config.number("shared_prefix_checkpoint"),
          .eagle = config.number("eagle"),
          .modules = config.number("modules"),
          .cpu_chunks = config.number("cpu_chunks"),
          .blocks_per_chunk = config.number("blocks_per_chunk"),
          .cpu_blocks = config.number("cpu_blocks"),
          .lazy_offload = config.number("lazy_offload"),
          .has_disk = lockstep::has_disk(config),
          .ring = config.number("replay_ring")};
}

void VllmOptions::write(Config& config) const {
  config.put("blocks", blocks);
  config.put("block", block);
  config.put("hash_block", hash_block);
  config.put("hash_algorithm", hash_algorithm);
  config.put("retention", retention);
  config.put("groups", groups);
  config.put("checkpoint", checkpoint);
  config.put("shared_prefix_checkpoint", shared_prefix_checkpoint);
  config.put("eagle", eagle);
  config.put("modules", modules);
  config.put("cpu_chunks", cpu_chunks);
  config.put("blocks_per_chunk", blocks_per_chunk);
  config.put("cpu_blocks", cpu_blocks);
  config.put("lazy_offload", lazy_offload);
  config.put("disk", has_disk ? 1 : 0);
  config.put("replay_ring", ring);
}

namespace {

constexpr ConfigOption::Range kFlag{0, 1};
constexpr ConfigOption::Range kCount{0, std::int64_t{1} << 30};
constexpr ConfigOption::Range kOneOrMore{1, kCount.high};
const Registration<ConfigOption> kOptions{
    {.name = "blocks", .otherwise = "4096", .number = kOneOrMore, .for_children = true},
    {.name = "block", .otherwise = "256", .number = kOneOrMore, .for_children = true},
    {.name = "hash_block", .otherwise = "256", .number = kOneOrMore, .for_children = true},
    {.name = "hash_algorithm", .otherwise = "none"},
    {.name = "retention", .otherwise = "none", .for_children = true},
    {.name = "groups", .otherwise = "", .for_children = true},
    {.name = "checkpoint", .otherwise = "0", .number = kCount, .for_children = true},
    {.name = "shared_prefix_checkpoint", .otherwise = "0", .number = kFlag, .for_children = true},
    {.name = "eagle", .otherwise = "0", .number = {{0, 2}}, .for_children = true},
    {.name = "cpu_chunks", .otherwise = "0", .number = {{0, 1 << 24}}, .for_children = true},
    {.name = "blocks_per_chunk",
     .otherwise = "1",
     .number = {{1, 1024}},
     .for_children = true,
     .needs = {"cpu_chunks"}},
    {.name = "cpu_blocks", .otherwise = "0", .number = {{0, 1 << 24}}, .for_children = true},
    {.name = "lazy_offload",
     .otherwise = "0",
     .number = kFlag,
     .for_children = true,
     .needs = {"cpu_blocks"}},
    {.name = "modules", .otherwise = "1", .number = {{1, 1024}}, .for_children = true}};
const Registration<HostTierField> kChunks{{"cpu_chunks"}}, kHostBlocks{{"cpu_blocks"}};

}  // namespace
}  // namespace lockstep::cache_sim
