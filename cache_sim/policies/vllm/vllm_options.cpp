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

const Registration<ConfigOption> kBlocks{{.name = "blocks",
                                          .otherwise = "4096",
                                          .number = {{1, std::int64_t{1} << 30}},
                                          .for_children = true}};
const Registration<ConfigOption> kBlock{{.name = "block",
                                         .otherwise = "256",
                                         .number = {{1, std::int64_t{1} << 30}},
                                         .for_children = true}};
const Registration<ConfigOption> kHashBlock{{.name = "hash_block",
                                             .otherwise = "256",
                                             .number = {{1, std::int64_t{1} << 30}},
                                             .for_children = true}};
const Registration<ConfigOption> kHashAlgorithm{{.name = "hash_algorithm", .otherwise = "none"}};
const Registration<ConfigOption> kRetention{
    {.name = "retention", .otherwise = "none", .for_children = true}};
const Registration<ConfigOption> kGroups{{.name = "groups", .otherwise = "", .for_children = true}};
const Registration<ConfigOption> kCheckpoint{{.name = "checkpoint",
                                              .otherwise = "0",
                                              .number = {{0, std::int64_t{1} << 30}},
                                              .for_children = true}};
const Registration<ConfigOption> kSharedPrefixCheckpoint{{.name = "shared_prefix_checkpoint",
                                                          .otherwise = "0",
                                                          .number = {{0, 1}},
                                                          .for_children = true}};
const Registration<ConfigOption> kEagle{
    {.name = "eagle", .otherwise = "0", .number = {{0, 2}}, .for_children = true}};
const Registration<ConfigOption> kCpuChunks{
    {.name = "cpu_chunks", .otherwise = "0", .number = {{0, 1 << 24}}, .for_children = true}};
const Registration<HostTierField> kChunks{{"cpu_chunks"}}, kHostBlocks{{"cpu_blocks"}};
const Registration<ConfigOption> kBlocksPerChunk{{.name = "blocks_per_chunk",
                                                  .otherwise = "1",
                                                  .number = {{1, 1024}},
                                                  .for_children = true,
                                                  .needs = {"cpu_chunks"}}};
const Registration<ConfigOption> kCpuBlocks{
    {.name = "cpu_blocks", .otherwise = "0", .number = {{0, 1 << 24}}, .for_children = true}};
const Registration<ConfigOption> kLazyOffload{{.name = "lazy_offload",
                                               .otherwise = "0",
                                               .number = {{0, 1}},
                                               .for_children = true,
                                               .needs = {"cpu_blocks"}}};
const Registration<ConfigOption> kModules{
    {.name = "modules", .otherwise = "1", .number = {{1, 1024}}, .for_children = true}};

}  // namespace
}  // namespace lockstep::cache_sim
