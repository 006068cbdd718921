#include "reference/models/qwen3_checkpoint.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "reference/base/philox.hpp"
#include "reference/models/config_fields.hpp"
#include "reference/models/safetensors.hpp"

namespace lockstep::reference {
namespace {

using nlohmann::json;

struct Law {
  float centre, spread;
};

/// Centre and spread of a tensor's random elements. They make attention sharp and the layers' sums
/// larger than the embedding, so that the next token depends on every earlier one.
Law law_of(const Qwen3Tensor& tensor) {
  const std::string& name = tensor.name;
  if (name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight")) return {1.5f, 0.5f};
  if (name.ends_with("norm.weight")) return {1.0f, 0.25f};
  if (name.ends_with("embed_tokens.weight")) return {0.0f, 0.5f};
  const bool adds = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
  return {0.0f, (adds ? 4.0f : 1.75f) / std::sqrt(static_cast<float>(tensor.shape[1]))};
}

std::int64_t elements(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::string shown(const std::vector<std::int64_t>& shape) {
  return json(shape).dump();
}

}  // namespace

Result<Qwen3Config> read_qwen3_config(const std::string& path) {
  const Result<json> read = read_config_object(path);
  if (!read) return tl::unexpected(read.error());
  const json& object = *read;
  ConfigFields fields(object, path);
  fields.is("model_type", "qwen3");
  fields.is("hidden_act", "silu");
  fields.is("attention_bias", false);
  fields.is("use_sliding_window", false);
  for (const json& type : object.value("layer_types", json::array()))
    if (type != "full_attention") fields.note("layer_types has " + type.dump());
  Qwen3Config config{.vocab_size = fields.size("vocab_size"),
                     .hidden_size = fields.size("hidden_size"),
                     .intermediate_size = fields.size("intermediate_size"),
                     .num_hidden_layers = fields.size("num_hidden_layers"),
                     .num_attention_heads = fields.size("num_attention_heads"),
                     .num_key_value_heads = fields.size("num_key_value_heads"),
                     .head_dim = fields.size("head_dim")};
  config.tie_word_embeddings = fields.flag("tie_word_embeddings");
  config.rms_norm_eps = fields.positive("rms_norm_eps");
  const json rope = fields.rope();
  config.rope_theta = fields.positive(rope, "rope_theta");
  const json type = rope.is_object() ? rope.value("rope_type", json("default")) : json();
  if (type != "default") fields.note("rope_type is " + type.dump() + "; only default is known");
  if (config.num_attention_heads % config.num_key_value_heads != 0)
    fields.note("num_attention_heads is no multiple of num_key_value_heads");
  if (config.head_dim % 2 != 0) fields.note("head_dim is odd");
  if (!fields.error().empty()) return fail(fields.error());
  return config;
}

std::vector<Qwen3Tensor> qwen3_tensors(const Qwen3Config& c) {
  const std::int64_t D = c.hidden_size, F = c.intermediate_size;
  const std::int64_t queries = c.num_attention_heads * c.head_dim;
  const std::int64_t keys = c.num_key_value_heads * c.head_dim;
  std::vector<Qwen3Tensor> tensors = {{"model.embed_tokens.weight", {c.vocab_size, D}}};
  for (std::int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    for (const Qwen3Tensor& tensor : std::vector<Qwen3Tensor>{
             {"input_layernorm", {D}},
             {"self_attn.q_proj", {queries, D}},
             {"self_attn.k_proj", {keys, D}},
             {"self_attn.v_proj", {keys, D}},
             {"self_attn.o_proj", {D, queries}},
             {"self_attn.q_norm", {c.head_dim}},
             {"self_attn.k_norm", {c.head_dim}},
             {"post_attention_layernorm", {D}},
             {"mlp.gate_proj", {F, D}},
             {"mlp.up_proj", {F, D}},
             {"mlp.down_proj", {D, F}},
         })
      tensors.push_back({layer + tensor.name + ".weight", tensor.shape});
  }
  tensors.push_back({"model.norm.weight", {D}});
  if (!c.tie_word_embeddings) tensors.push_back({"lm_head.weight", {c.vocab_size, D}});
  return tensors;
}

Qwen3Checkpoint drawn_qwen3(const Qwen3Config& config, std::uint64_t seed) {
  Qwen3Checkpoint checkpoint{config, {}};
  std::uint64_t stream = 0;
  for (const Qwen3Tensor& tensor : qwen3_tensors(config)) {
    const auto [centre, spread] = law_of(tensor);
    std::vector<float> values(static_cast<std::size_t>(elements(tensor.shape)));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint64_t bits = random_bits(seed, stream, i) >> 40;  // 24 bits: exact in float
      values[i] = centre + spread * (static_cast<float>(bits) * 0x1p-23f - 1);
    }
    checkpoint.weights.emplace(tensor.name, std::move(values));
    ++stream;
  }
  return checkpoint;
}

Result<Qwen3Checkpoint> read_qwen3(const std::string& folder) {
  const auto config = read_qwen3_config(folder + "/config.json");
  if (!config) return tl::unexpected(config.error());
  const std::string path = folder + "/model.safetensors";
  auto stored = read_safetensors(path);
  if (!stored) return tl::unexpected(stored.error());
  Qwen3Checkpoint checkpoint{*config, {}};
  for (const Qwen3Tensor& tensor : qwen3_tensors(*config)) {
    const auto found = stored->find(tensor.name);
    if (found == stored->end()) return fail(path + ": " + tensor.name + " is missing");
    if (found->second.shape != tensor.shape)
      return fail(path + ": " + tensor.name + " has the shape " + shown(found->second.shape) +
                  ", config.json asks for " + shown(tensor.shape));
    checkpoint.weights.emplace(tensor.name, std::move(found->second.values));
    stored->erase(found);
  }
  if (!stored->empty())
    return fail(path + ": " + stored->begin()->first + " is no tensor of this model");
  return checkpoint;
}

}  // namespace lockstep::reference
