// A model as a cache and a scheduler need it: the bytes of a token's KV, the bytes of a state, and
// the FLOPs and bytes of a step. The figures are derived from the public configurations
// (cache_sim/model/model.cpp). A new model is one Registration.
#pragma once

#include <cstdint>
#include <string_view>

#include "reference/base/registry.hpp"
#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

struct Model {
  std::string_view name;
  std::string_view summary;
  std::int64_t token_bytes;  ///< KV, or latents, of one token in all layers
  /// recurrent and conv states of all layers; 0: the model has attention alone
  std::int64_t state_bytes;
  std::int64_t flops_per_token;   ///< FLOPs independent of the context: 2 per active weight
  std::int64_t flops_per_pair;    ///< FLOPs of attention, per token and token that it sees
  std::int64_t weight_bytes;      ///< bytes of weights that a step reads
  std::int64_t attention_layers;  ///< layers with KV or latents
  std::int64_t state_layers;      ///< layers with states

  /// FLOPs to prefill the first `tokens` tokens of a prompt, which a hit of that length saves.
  /// Token i sees i + 1 tokens.
  double prefill_flops(std::int64_t tokens) const {
    const auto n = static_cast<double>(tokens);
    return n * static_cast<double>(flops_per_token) +
           n * (n + 1) / 2 * static_cast<double>(flops_per_pair);
  }
};

/// The model of that name; the error lists all models.
Result<const Model*> find_model(std::string_view name);

inline constexpr std::string_view kDefaultModel = "qwen3-next";

}  // namespace lockstep::cache_sim
