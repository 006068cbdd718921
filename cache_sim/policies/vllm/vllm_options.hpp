// The options of vLLM's policies, read once ("What the config says" in reference/caches/vllm.md).
#pragma once

#include <cstdint>
#include <string>

#include "reference/protocol/config.hpp"

namespace lockstep::cache_sim {

struct VllmOptions {
  std::int64_t blocks;         ///< blocks of the pool
  std::int64_t block;          ///< tokens per block
  std::int64_t hash_block;     ///< tokens per hash
  std::string hash_algorithm;  ///< none, sha256, sha256_cbor, xxhash or xxhash_cbor
  std::string retention;       ///< `none` or tokens
  std::string groups;          ///< attention:816,mamba:1648
  std::int64_t checkpoint;  ///< tokens: kernels store a state inside the last chunk, at a multiple
                            ///< of so many after its start; 0: they do not
  std::int64_t shared_prefix_checkpoint;  ///< a junction inside a block is kept
  std::int64_t eagle;
  std::int64_t modules;     ///< of MTP: each reads one token further ahead in a prefill
  std::int64_t cpu_chunks;  ///< chunks of the OffloadingConnector's CPU tier; 0: there is none
  std::int64_t blocks_per_chunk;
  std::int64_t cpu_blocks;  ///< of SimpleCPUOffloadConnector, the null block too; 0: there is none
  std::int64_t lazy_offload;  ///< it stores what the device evicts next
  bool has_disk;              ///< behind the CPU tier
  std::int64_t ring;  ///< entries of a replay ring: a step in so many writes the state; 0: all do

  static VllmOptions of(const Config& config);
  /// Sets them in the configuration.
  void write(Config& config) const;
};

}  // namespace lockstep::cache_sim
