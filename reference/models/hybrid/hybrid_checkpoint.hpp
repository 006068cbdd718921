// A hybrid model from a checkpoint: config.json, and weights by the names of transformers' classes.
//
//   model_type     class                   units
//   nemotron_h     NemotronHForCausalLM    Mamba2, attention, MLP, experts, by layers_block_type or
//                                          hybrid_override_pattern
//   qwen3_next     Qwen3NextForCausalLM    delta net or gated attention, and experts or an MLP
//   deepseek_v3    DeepseekV3ForCausalLM   latent attention, and an MLP or experts
//   qwen3          Qwen3ForCausalLM        attention, with a window where layer_types says so
//
// Weights are in model.safetensors, or in the files of model.safetensors.index.json. Experts may be
// stored one by one (experts.E.up_proj.weight) or together (experts.up_proj), names of NemotronH
// may begin with `backbone.`.
#pragma once

#include <string>

#include "reference/base/result.hpp"
#include "reference/models/hybrid/hybrid_config.hpp"

namespace lockstep::reference {

/// Reads the checkpoint in a folder; its name is the folder's path. Tokens below the vocabulary
/// have their rows of its embedding, others are drawn with its deviation. Errors are one sentence
/// with the file, and the field or tensor: a setting that is not known here, a tensor that is
/// missing, of another shape, or of no unit. A model has at most 2^27 numbers: they are kept in
/// double. The weights have the tensors of hybrid_draft() where the checkpoint has them.
Result<HybridConfig> read_hybrid(const std::string& folder);

}  // namespace lockstep::reference
