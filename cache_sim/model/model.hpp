// Models, as far as a cache and a scheduler see them: bytes of a token's KV, bytes of a state, and
// what a step computes and reads. The figures are derived from the public configurations
// (cache_sim/model/model.cpp); a new model is one Registration.
#pragma once

#include <cstdint>
#include <string_view>

#include "reference/base/registry.hpp"
#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

struct Model {
  std::string_view name;
  std::string_view summary;
  std::int64_t token_bytes;       ///< KV, or latents, of one token in all layers
  std::int64_t state_bytes;       ///< recurrent and conv states of all layers; 0: attention alone
  std::int64_t flops_per_token;   ///< what does not depend on the context: 2 per active weight
  std::int64_t flops_per_pair;    ///< attention, per token and token that it sees
  std::int64_t weight_bytes;      ///< what a step reads of the weights
  std::int64_t attention_layers;  ///< layers with KV or latents
  std::int64_t state_layers;      ///< layers with states

  /// What prefilling the first `tokens` tokens of a prompt costs; a hit of that length saves it.
  /// Token i sees i + 1 tokens.
  double prefill_flops(std::int64_t tokens) const {
    const auto n = static_cast<double>(tokens);
    return n * static_cast<double>(flops_per_token) +
           n * (n + 1) / 2 * static_cast<double>(flops_per_pair);
  }
};

/// The error names the model.
Result<const Model*> find_model(std::string_view name);

inline constexpr std::string_view kDefaultModel = "qwen3-next";

}  // namespace lockstep::cache_sim
