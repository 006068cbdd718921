// Reads the config.json beside an engine of TensorRT-Edge-LLM, as far as its caches need it: the
// layers, and the sizes of their KV and states. An unknown, missing or contradictory value is an
// error that names the file and the field.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cache_sim/policies/edge_llm/hybrid_layers.hpp"
#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

struct RuntimeConfig {
  HybridLayers layers;
  std::int64_t token_bytes = 0;  ///< KV of a token in all attention layers
  std::int64_t state_bytes = 0;  ///< recurrent and conv states of a row in all recurrent layers
};

Result<RuntimeConfig> read_runtime_config(const std::string& path);
/// The error names the field alone.
Result<RuntimeConfig> parse_runtime_config(const nlohmann::json& document);

}  // namespace lockstep::cache_sim
