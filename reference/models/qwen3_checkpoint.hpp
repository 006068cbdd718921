// A Qwen3 checkpoint: its config.json, and its weights by the names of transformers'
// Qwen3ForCausalLM. Weights are drawn at random by index, or read from model.safetensors.
//
//   tensor                                            shape
//   model.embed_tokens.weight                         [V, D]
//   model.layers.I.input_layernorm.weight             [D]
//   model.layers.I.self_attn.{q,k,v}_proj.weight      [HQ hd, D], [HKV hd, D], [HKV hd, D]
//   model.layers.I.self_attn.o_proj.weight            [D, HQ hd]
//   model.layers.I.self_attn.{q,k}_norm.weight        [hd], the same for all heads
//   model.layers.I.post_attention_layernorm.weight    [D], before the MLP
//   model.layers.I.mlp.{gate,up}_proj.weight          [F, D]
//   model.layers.I.mlp.down_proj.weight               [D, F]
//   model.norm.weight                                 [D]
//   lm_head.weight                                    [V, D], unless it is tied to the embedding
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::reference {

/// Fields of config.json, with their names.
struct Qwen3Config {
  std::int64_t vocab_size;
  std::int64_t hidden_size;
  std::int64_t intermediate_size;
  std::int64_t num_hidden_layers;
  std::int64_t num_attention_heads;
  std::int64_t num_key_value_heads;
  std::int64_t head_dim;
  bool tie_word_embeddings = true;
  double rms_norm_eps = 1e-6;
  double rope_theta = 1e6;
};

/// Reads config.json. It refuses, by name, settings that this model does not support (sliding
/// layers, biases, stretched RoPE).
Result<Qwen3Config> read_qwen3_config(const std::string& path);

struct Qwen3Tensor {
  std::string name;
  std::vector<std::int64_t> shape;
};

/// All tensors of a checkpoint. A tensor's index in this list is the random stream of its elements.
std::vector<Qwen3Tensor> qwen3_tensors(const Qwen3Config& config);

struct Qwen3Checkpoint {
  Qwen3Config config;
  std::map<std::string, std::vector<float>> weights;
};

/// A checkpoint with random weights. Element i of tensor t is a function of (seed, t, i), with the
/// same bits as in fixtures/subjects/static_kv/weights.py.
Qwen3Checkpoint drawn_qwen3(const Qwen3Config& config, std::uint64_t seed);

/// Reads config.json and model.safetensors of a folder. The file must have each tensor above with
/// its shape, and no other tensor.
Result<Qwen3Checkpoint> read_qwen3(const std::string& folder);

}  // namespace lockstep::reference
