// What a Qwen3 checkpoint says: its config.json, and its weights by the names of transformers'
// Qwen3ForCausalLM. Weights are drawn by index, or read from model.safetensors.
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

/// The fields of config.json, in its own names.
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

/// What no Qwen3 of this kind has (sliding layers, biases, stretched RoPE) is refused by name.
Result<Qwen3Config> read_qwen3_config(const std::string& path);

struct Qwen3Tensor {
  std::string name;
  std::vector<std::int64_t> shape;
};

/// Every tensor of a checkpoint. The place in this list is the stream that it is drawn from.
std::vector<Qwen3Tensor> qwen3_tensors(const Qwen3Config& config);

struct Qwen3Checkpoint {
  Qwen3Config config;
  std::map<std::string, std::vector<float>> weights;
};

/// Element i of tensor t is a function of (seed, t, i): the same bits as in
/// fixtures/subjects/static_kv/weights.py.
Qwen3Checkpoint drawn_qwen3(const Qwen3Config& config, std::uint64_t seed);

/// config.json and model.safetensors of a folder. Each tensor above is there with its shape, and no
/// other.
Result<Qwen3Checkpoint> read_qwen3(const std::string& folder);

}  // namespace lockstep::reference
