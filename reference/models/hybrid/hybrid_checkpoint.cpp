#include "reference/models/hybrid/hybrid_checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "reference/models/config_fields.hpp"
#include "reference/models/hybrid/hybrid_weights.hpp"
#include "reference/models/safetensors.hpp"

namespace lockstep::reference {
namespace {

using nlohmann::json;

constexpr std::int64_t kMostNumbers = std::int64_t{1} << 27;
constexpr std::int64_t kMostLayers = 4096;

// --- config.json

/// A field that may be absent.
std::int64_t size_or(ConfigFields& fields, const char* name, std::int64_t otherwise) {
  const json found = fields.object().value(name, json());
  return found.is_null() ? otherwise : fields.size(name);
}

std::int64_t layers_of(ConfigFields& fields) {
  const std::int64_t layers = fields.size("num_hidden_layers");
  if (layers > kMostLayers)
    fields.note(fmt::format("num_hidden_layers is {}; at most {} are read", layers, kMostLayers));
  return std::min(layers, kMostLayers);
}

/// The kind of each layer: `layer_types`, of as many entries, each one of `known`; absent, what
/// otherwise(layer) says.
template <class Otherwise>
std::vector<std::string> layer_types(ConfigFields& fields, std::int64_t layers,
                                     const std::set<std::string>& known,
                                     const Otherwise& otherwise) {
  std::vector<std::string> types;
  const json found = fields.object().value("layer_types", json());
  if (!found.is_null() && (!found.is_array() || std::ssize(found) != layers))
    fields.note(fmt::format("layer_types has not {} entries", layers));
  for (std::int64_t i = 0; i < layers; ++i) {
    const bool is_told = found.is_array() && i < std::ssize(found);
    const json type = is_told ? found[static_cast<std::size_t>(i)] : json(otherwise(i));
    if (!type.is_string() || !known.contains(type))
      fields.note(fmt::format("layer_types has {}", type.dump()));
    types.push_back(type.is_string() ? type.get<std::string>() : "");
  }
  return types;
}

/// Reads the fields of softmax attention without positions.
AttentionUnit attention_of(ConfigFields& fields) {
  AttentionUnit u{.heads = fields.size("num_attention_heads"),
                  .kv_heads = fields.size("num_key_value_heads"),
                  .head_dim = fields.size("head_dim")};
  if (u.heads % u.kv_heads != 0)
    fields.note("num_attention_heads is no multiple of num_key_value_heads");
  return u;
}

/// The same, of which that share of a head rotates.
AttentionUnit rotated_attention_of(ConfigFields& fields, const json& rope, double share) {
  AttentionUnit u = attention_of(fields);
  fields.is(rope, "rope_type", "default");
  u.rope_theta = fields.positive(rope, "rope_theta");
  u.rotary_dims = static_cast<std::int64_t>(std::lround(share * static_cast<double>(u.head_dim)));
  if (u.rotary_dims % 2 != 0)
    fields.note(fmt::format("{} dimensions of a head rotate", u.rotary_dims));
  return u;
}

void read_qwen3(ConfigFields& fields, HybridConfig& model) {
  model.eps = fields.positive("rms_norm_eps");
  fields.is("hidden_act", "silu");
  fields.is("attention_bias", false);
  const AttentionUnit attention = rotated_attention_of(fields, fields.rope(), 1);
  const MlpUnit mlp{.inner = fields.size("intermediate_size")};
  const std::int64_t layers = layers_of(fields);
  const bool has_windows = fields.flag("use_sliding_window");
  const std::int64_t first = size_or(fields, "max_window_layers", 0);
  const std::vector<std::string> types =
      layer_types(fields, layers, {"full_attention", "sliding_attention"}, [&](std::int64_t i) {
        return has_windows && i >= first ? "sliding_attention" : "full_attention";
      });
  for (std::int64_t i = 0; i < layers; ++i) {
    AttentionUnit own = attention;
    if (types[static_cast<std::size_t>(i)] == "sliding_attention")
      own.window = fields.size("sliding_window");
    add_layer(model, "self_attn.", own, mlp);
  }
}

void read_qwen3_next(ConfigFields& fields, HybridConfig& model) {
  model.eps = fields.positive("rms_norm_eps");
  model.zero_centred_norms = true;
  fields.is("hidden_act", "silu");
  fields.is("attention_bias", false);
  fields.is("norm_topk_prob", true);
  const json rope = fields.rope();
  const bool has_share = rope.is_object() && rope.contains("partial_rotary_factor");
  const double share = has_share ? fields.positive(rope, "partial_rotary_factor") : 0.25;
  if (share > 1) fields.note("partial_rotary_factor is above 1");
  AttentionUnit attention = rotated_attention_of(fields, rope, std::min(share, 1.0));
  attention.output_gate = true;
  const DeltaNetUnit delta{.key_heads = fields.size("linear_num_key_heads"),
                           .value_heads = fields.size("linear_num_value_heads"),
                           .key_dim = fields.size("linear_key_head_dim"),
                           .value_dim = fields.size("linear_value_head_dim"),
                           .width = fields.size("linear_conv_kernel_dim")};
  if (delta.value_heads % delta.key_heads != 0)
    fields.note("linear_num_value_heads is no multiple of linear_num_key_heads");
  const ExpertsUnit experts{.experts = fields.size("num_experts"),
                            .per_token = fields.size("num_experts_per_tok"),
                            .inner = fields.size("moe_intermediate_size"),
                            .shared_inner = fields.size("shared_expert_intermediate_size"),
                            .shared_gate = true};
  const std::int64_t layers = layers_of(fields), step = size_or(fields, "decoder_sparse_step", 1);
  const json dense = fields.object().value("mlp_only_layers", json::array());
  const std::int64_t interval = size_or(fields, "full_attention_interval", 4);
  const std::vector<std::string> types =
      layer_types(fields, layers, {"linear_attention", "full_attention"}, [&](std::int64_t i) {
        return (i + 1) % interval == 0 ? "full_attention" : "linear_attention";
      });
  for (std::int64_t i = 0; i < layers; ++i) {
    const bool is_routed = std::ranges::find(dense, json(i)) == dense.end() && (i + 1) % step == 0;
    const HybridKind forward =
        is_routed ? HybridKind(experts) : MlpUnit{.inner = fields.size("intermediate_size")};
    if (types[static_cast<std::size_t>(i)] == "full_attention")
      add_layer(model, "self_attn.", attention, forward);
    else
      add_layer(model, "linear_attn.", delta, forward);
  }
}

void read_deepseek_v3(ConfigFields& fields, HybridConfig& model) {
  model.eps = fields.positive("rms_norm_eps");
  fields.is("hidden_act", "silu");
  fields.is("attention_bias", false);
  fields.is("norm_topk_prob", true);
  fields.is("rope_interleave", true);
  const json rope = fields.rope();
  const bool is_stretched = rope.is_object() && rope.value("rope_type", json()) == "yarn";
  if (is_stretched) {
    fields.is(rope, "beta_fast", 32);
    fields.is(rope, "beta_slow", 1);
    fields.is(rope, "mscale", 1.0);
    fields.is(rope, "mscale_all_dim", 1.0);
  } else {
    fields.is(rope, "rope_type", "default");
  }
  const LatentUnit latent{
      .heads = fields.size("num_attention_heads"),
      .q_lora = fields.size("q_lora_rank"),
      .latent = fields.size("kv_lora_rank"),
      .nope_dim = fields.size("qk_nope_head_dim"),
      .rope_dim = fields.size("qk_rope_head_dim"),
      .value_dim = fields.size("v_head_dim"),
      .rope_theta = fields.positive(rope, "rope_theta"),
      .yarn_factor = is_stretched ? fields.positive(rope, "factor") : 1,
      .yarn_positions =
          is_stretched ? fields.positive(rope, "original_max_position_embeddings") : 4096};
  if (latent.rope_dim % 2 != 0) fields.note("qk_rope_head_dim is odd");
  const std::int64_t inner = fields.size("moe_intermediate_size");
  const ExpertsUnit experts{.experts = fields.size("n_routed_experts"),
                            .per_token = fields.size("num_experts_per_tok"),
                            .inner = inner,
                            .shared_inner = inner * fields.size("n_shared_experts"),
                            .sigmoid_scores = true,
                            .groups = fields.size("n_group"),
                            .groups_kept = fields.size("topk_group"),
                            .scale = fields.positive("routed_scaling_factor")};
  const MlpUnit mlp{.inner = fields.size("intermediate_size")};
  const json dense = fields.object().value("first_k_dense_replace", json(0));
  if (!dense.is_number_unsigned()) fields.note("first_k_dense_replace is " + dense.dump());
  const std::int64_t layers = layers_of(fields);
  for (std::int64_t i = 0; i < layers; ++i)
    add_layer(model, "self_attn.", latent, json(i) < dense ? HybridKind(mlp) : experts);
}

/// The kinds of NemotronH's layers, by either of their names.
std::vector<std::string> nemotron_layers(ConfigFields& fields) {
  static const std::map<std::string, std::string> kKinds{{"M", "mamba"},
                                                         {"*", "attention"},
                                                         {"-", "mlp"},
                                                         {"E", "moe"},
                                                         {"mamba", "mamba"},
                                                         {"linear_attention", "mamba"},
                                                         {"attention", "attention"},
                                                         {"full_attention", "attention"},
                                                         {"mlp", "mlp"},
                                                         {"moe", "moe"}};
  std::vector<std::string> kinds;
  const auto add = [&](const char* field, const json& name) {
    const auto known = kKinds.find(name.is_string() ? name.get<std::string>() : "");
    if (known == kKinds.end()) fields.note(fmt::format("{} has {}", field, name.dump()));
    kinds.push_back(known == kKinds.end() ? "" : known->second);
  };
  const json types = fields.object().value("layers_block_type", json());
  const json pattern = fields.object().value("hybrid_override_pattern", json());
  if (types.is_array())
    for (const json& type : types) add("layers_block_type", type);
  else if (pattern.is_string())
    for (const char kind : pattern.get<std::string>())
      add("hybrid_override_pattern", std::string(1, kind));
  if (kinds.empty()) fields.note("layers_block_type names no layer");
  return kinds;
}

void read_nemotron_h(ConfigFields& fields, HybridConfig& model) {
  model.eps = fields.positive("layer_norm_epsilon");
  model.embedding = "model.embeddings.weight";
  model.last_norm = "model.norm_f.weight";
  for (const char* const name : {"attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"})
    fields.is(name, false);
  fields.is("use_conv_bias", true);
  fields.is("mamba_hidden_act", "silu");
  fields.is("mlp_hidden_act", "relu2");
  fields.is("sliding_window", json());
  fields.is("moe_latent_size", json());
  const std::vector<std::string> kinds = nemotron_layers(fields);
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const std::string at = hybrid_layer(static_cast<std::int64_t>(i));
    HybridUnit unit{at + "norm.weight", at + "mixer.", MlpUnit{}};
    if (kinds[i] == "mamba") {
      const MambaUnit mamba{.heads = fields.size("mamba_num_heads"),
                            .head_dim = fields.size("mamba_head_dim"),
                            .state = fields.size("ssm_state_size"),
                            .groups = fields.size("n_groups"),
                            .width = fields.size("conv_kernel")};
      if (mamba.heads % mamba.groups != 0)
        fields.note("mamba_num_heads is no multiple of n_groups");
      unit.kind = mamba;
    } else if (kinds[i] == "attention") {
      AttentionUnit attention = attention_of(fields);
      attention.head_norms = false;
      unit.kind = attention;
    } else if (kinds[i] == "mlp") {
      unit.kind =
          MlpUnit{.inner = fields.size("intermediate_size"), .form = FeedForward::squared_relu};
    } else {
      fields.is("norm_topk_prob", true);
      fields.is("n_shared_experts", 1);
      unit.kind = ExpertsUnit{.experts = fields.size("n_routed_experts"),
                              .per_token = fields.size("num_experts_per_tok"),
                              .inner = fields.size("moe_intermediate_size"),
                              .shared_inner = fields.size("moe_shared_expert_intermediate_size"),
                              .form = FeedForward::squared_relu,
                              .sigmoid_scores = true,
                              .groups = fields.size("n_group"),
                              .groups_kept = fields.size("topk_group"),
                              .scale = fields.positive("routed_scaling_factor")};
    }
    model.units.push_back(std::move(unit));
  }
}

void check_experts(ConfigFields& fields, const HybridConfig& model) {
  for (const HybridUnit& unit : model.units)
    if (const auto* const u = std::get_if<ExpertsUnit>(&unit.kind))
      if (u->per_token > u->experts || u->experts % u->groups != 0 || u->groups_kept > u->groups)
        fields.note(fmt::format("{} of {} experts in {} of {} groups cannot be chosen",
                                u->per_token, u->experts, u->groups_kept, u->groups));
}

struct Family {
  const char* model_type;
  void (*read)(ConfigFields&, HybridConfig&);
};
constexpr Family kFamilies[] = {{"nemotron_h", read_nemotron_h},
                                {"qwen3_next", read_qwen3_next},
                                {"deepseek_v3", read_deepseek_v3},
                                {"qwen3", read_qwen3}};

struct Configured {
  HybridConfig model;
  bool is_tied;
};

Result<Configured> read_config(const std::string& path) {
  const Result<json> read = read_config_object(path);
  if (!read) return tl::unexpected(read.error());
  const json& object = *read;
  const json type = object.value("model_type", json());
  const auto* const family =
      std::ranges::find_if(kFamilies, [&](const Family& one) { return type == one.model_type; });
  if (family == std::end(kFamilies))
    return fail(
        fmt::format("{}: model_type is {}; nemotron_h, qwen3_next, deepseek_v3 and qwen3 "
                    "are known",
                    path, type.dump()));
  ConfigFields fields(object, path);
  HybridConfig model{
      .hidden = fields.size("hidden_size"), .vocabulary = fields.size("vocab_size"), .eps = 1};
  family->read(fields, model);
  check_experts(fields, model);
  const bool is_tied = fields.flag("tie_word_embeddings");
  if (!fields.error().empty()) return fail(fields.error());
  return Configured{std::move(model), is_tied};
}

// --- Weights

using Stored = std::map<std::string, StoredTensor>;

/// The tensors of all files, by name.
Result<Stored> read_files(const std::string& folder) {
  const std::string index = folder + "/model.safetensors.index.json";
  std::ifstream file(index);
  if (!file) return read_safetensors(folder + "/model.safetensors");
  const json object = json::parse(file, nullptr, false);
  const json names = object.is_object() ? object.value("weight_map", json()) : json();
  if (!names.is_object()) return fail(index + ": weight_map is no object");
  std::set<std::string> files;
  for (const auto& [name, one] : names.items()) {
    if (!one.is_string() || one.get<std::string>().find('/') != std::string::npos)
      return fail(
          fmt::format("{}: weight_map: {} is in {}, no file beside it", index, name, one.dump()));
    files.insert(one);
  }
  Stored all;
  for (const std::string& name : files) {
    auto stored = read_safetensors(fmt::format("{}/{}", folder, name));
    if (!stored) return tl::unexpected(stored.error());
    all.merge(*stored);
    if (!stored->empty())
      return fail(
          fmt::format("{}/{}: {} is in another file, too", folder, name, stored->begin()->first));
  }
  return all;
}

/// The names of the model's tensors, of whose experts each is stored alone: those of its parts, in
/// order.
std::vector<std::string> parts_of(const std::string& name, std::int64_t expert) {
  constexpr std::string_view kExperts = "experts.";
  const std::size_t at = name.rfind(kExperts) + kExperts.size();
  const std::string own = name.substr(0, at) + std::to_string(expert) + ".";
  if (name.ends_with("gate_up_proj")) return {own + "gate_proj.weight", own + "up_proj.weight"};
  return {own + name.substr(at) + ".weight"};
}

bool is_of_experts(const std::string& name) {
  return name.ends_with("experts.gate_up_proj") || name.ends_with("experts.up_proj") ||
         name.ends_with("experts.down_proj");
}

class Weights {
 public:
  Weights(Stored stored, std::string folder)
      : stored_(std::move(stored)), folder_(std::move(folder)) {}

  /// The tensor of that name and shape, which no other one takes.
  Result<HybridTensor> take(const HybridTensorName& wanted) {
    if (!is_of_experts(wanted.name) || find(wanted.name) != stored_.end())
      return one(wanted.name, wanted.shape);
    HybridTensor all{wanted.shape, {}};
    for (std::int64_t expert = 0; expert < wanted.shape[0]; ++expert) {
      const std::vector<std::string> parts = parts_of(wanted.name, expert);
      for (const std::string& part : parts) {
        auto own = one(part, {wanted.shape[1] / std::ssize(parts), wanted.shape[2]});
        if (!own) return own;
        all.values.insert(all.values.end(), own->values.begin(), own->values.end());
      }
    }
    return all;
  }
  bool has(const std::string& name) { return find(name) != stored_.end(); }
  /// DeepSeek-V3's checkpoint has another copy of the embedding and the head in its draft module.
  Result<void> take_copy(const std::string& name, const HybridTensor& original) {
    if (!has(name)) return {};
    return one(name, original.shape).and_then([&](const HybridTensor& copy) -> Result<void> {
      if (copy.values == original.values) return {};
      return fail(fmt::format("{}: {} is no copy of the model's", folder_, name));
    });
  }
  Result<void> check_empty() const {
    if (stored_.empty()) return {};
    return fail(fmt::format("{}: {} is no tensor of this model", folder_, stored_.begin()->first));
  }

 private:
  Stored::iterator find(const std::string& name) {
    const auto found = stored_.find(name);
    return found != stored_.end() || !name.starts_with("model.")
               ? found
               : stored_.find("backbone." + name.substr(6));
  }
  Result<HybridTensor> one(const std::string& name, const std::vector<std::int64_t>& shape) {
    const auto found = find(name);
    if (found == stored_.end()) return fail(fmt::format("{}: {} is missing", folder_, name));
    if (found->second.shape != shape)
      return fail(fmt::format("{}: {} has the shape {}, config.json asks for {}", folder_,
                              found->first, json(found->second.shape).dump(), json(shape).dump()));
    HybridTensor tensor{shape, {found->second.values.begin(), found->second.values.end()}};
    stored_.erase(found);
    return tensor;
  }

  Stored stored_;
  std::string folder_;
};

/// Takes the draft module's tensors, if it is there.
Result<void> take_draft(const HybridConfig& model, Weights& files, HybridWeights& weights) {
  const std::optional<HybridConfig> draft = hybrid_draft(model);
  if (!draft || !files.has(draft->draft->projection)) return {};
  for (const HybridTensorName& tensor : hybrid_tensors(*draft)) {
    if (weights.tensors.contains(tensor.name)) continue;  // the head
    auto taken = files.take(tensor);
    if (!taken) return tl::unexpected(taken.error());
    weights.tensors.emplace(tensor.name, std::move(*taken));
  }
  const std::string& norm = draft->last_norm;
  const std::string at = norm.substr(0, norm.find("shared_head."));
  return files.take_copy(at + "embed_tokens.weight", weights.embedding).and_then([&] {
    return files.take_copy(at + "shared_head.head.weight", weights.tensors.at("lm_head.weight"));
  });
}

}  // namespace

Result<HybridConfig> read_hybrid(const std::string& folder) {
  auto configured = read_config(folder + "/config.json");
  if (!configured) return tl::unexpected(configured.error());
  HybridConfig& model = configured->model;
  model.name = folder;
  std::vector<HybridTensorName> names = hybrid_tensors(model);
  names.push_back({model.embedding, {model.vocabulary, model.hidden}});
  std::int64_t numbers = 0;
  for (const HybridTensorName& tensor : names) {
    std::int64_t count = 1;
    for (const std::int64_t extent : tensor.shape)
      count *= std::min(extent, kMostNumbers / count + 1);
    numbers = std::min(numbers + count, kMostNumbers + 1);
  }
  if (numbers > kMostNumbers)
    return fail(
        fmt::format("{}/config.json: such a model has more than {} numbers", folder, kMostNumbers));
  auto stored = read_files(folder);
  if (!stored) return tl::unexpected(stored.error());
  Weights files(std::move(*stored), folder);
  auto weights = std::make_shared<HybridWeights>();
  for (const HybridTensorName& tensor : names) {
    if (configured->is_tied && tensor.name == "lm_head.weight") continue;
    auto taken = files.take(tensor);
    if (!taken) return tl::unexpected(taken.error());
    weights->tensors.emplace(tensor.name, std::move(*taken));
  }
  weights->embedding = std::move(weights->tensors.extract(model.embedding).mapped());
  if (configured->is_tied) weights->tensors["lm_head.weight"] = weights->embedding;
  const Result<void> rest =
      take_draft(model, files, *weights).and_then([&] { return files.check_empty(); });
  if (!rest) return tl::unexpected(rest.error());
  double squares = 0;
  for (const double x : weights->embedding.values) squares += x * x;
  weights->embedding_scale =
      std::sqrt(squares / static_cast<double>(weights->embedding.values.size()));
  model.stored = std::move(weights);
  return std::move(model);
}

}  // namespace lockstep::reference
