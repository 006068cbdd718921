#include "reference/models/hybrid/hybrid_config.hpp"

#include <functional>
#include <utility>

namespace lockstep::reference {
namespace {

void add_layer_at(HybridConfig& model, const std::string& at, const char* mixer_name,
                  const HybridKind& mixer, const HybridKind& forward) {
  model.units.push_back({at + "input_layernorm.weight", at + mixer_name, mixer});
  model.units.push_back({at + "post_attention_layernorm.weight", at + "mlp.", forward});
}

}  // namespace

std::string hybrid_layer(std::int64_t i) {
  return "model.layers." + std::to_string(i) + ".";
}

void add_layer(HybridConfig& model, const char* mixer_name, const HybridKind& mixer,
               const HybridKind& forward) {
  add_layer_at(model, hybrid_layer(std::ssize(model.units) / 2), mixer_name, mixer, forward);
}

namespace {

HybridConfig nemotron_h() {
  HybridConfig model{.hidden = 32, .vocabulary = 64, .eps = 1e-5};
  model.embedding = "model.embeddings.weight";
  model.last_norm = "model.norm_f.weight";
  const auto add = [&](const auto& kind) {
    const std::string at = hybrid_layer(std::ssize(model.units));
    model.units.push_back({at + "norm.weight", at + "mixer.", kind});
  };
  const MambaUnit mamba{.heads = 4, .head_dim = 8, .state = 8, .groups = 2, .width = 4};
  add(mamba);
  add(ExpertsUnit{.experts = 8,
                  .per_token = 2,
                  .inner = 16,
                  .shared_inner = 16,
                  .form = FeedForward::squared_relu,
                  .sigmoid_scores = true,
                  .groups = 2,
                  .groups_kept = 1,
                  .scale = 1.5});
  add(AttentionUnit{.heads = 4, .kv_heads = 2, .head_dim = 8, .head_norms = false});
  add(mamba);
  add(MlpUnit{.inner = 48, .form = FeedForward::squared_relu});
  return model;
}

HybridConfig qwen3_next() {
  HybridConfig model{.hidden = 32, .vocabulary = 64, .eps = 1e-6, .zero_centred_norms = true};
  const DeltaNetUnit delta{
      .key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 8, .width = 4};
  const AttentionUnit attention{
      .heads = 4, .kv_heads = 2, .head_dim = 8, .rotary_dims = 4, .output_gate = true};
  const ExpertsUnit experts{
      .experts = 8, .per_token = 2, .inner = 16, .shared_inner = 16, .shared_gate = true};
  add_layer(model, "linear_attn.", delta, experts);
  add_layer(model, "self_attn.", attention, experts);
  add_layer(model, "linear_attn.", delta, experts);
  return model;
}

HybridConfig deepseek_v3() {
  HybridConfig model{.hidden = 32, .vocabulary = 64, .eps = 1e-6};
  const LatentUnit latent{.heads = 2,
                          .q_lora = 16,
                          .latent = 16,
                          .nope_dim = 8,
                          .rope_dim = 8,
                          .value_dim = 8,
                          .rope_theta = 1e4,
                          .yarn_factor = 4,
                          .yarn_positions = 64};
  const ExpertsUnit experts{.experts = 8,
                            .per_token = 2,
                            .inner = 16,
                            .shared_inner = 16,
                            .sigmoid_scores = true,
                            .groups = 4,
                            .groups_kept = 2,
                            .scale = 1.5};
  add_layer(model, "self_attn.", latent, MlpUnit{.inner = 48});
  add_layer(model, "self_attn.", latent, experts);
  add_layer(model, "self_attn.", latent, experts);
  return model;
}

HybridConfig qwen3(const std::vector<std::int64_t>& windows) {
  HybridConfig model{.hidden = 32, .vocabulary = 64, .eps = 1e-6};
  for (const std::int64_t window : windows)
    add_layer(
        model, "self_attn.",
        AttentionUnit{.heads = 4, .kv_heads = 2, .head_dim = 8, .rotary_dims = 8, .window = window},
        MlpUnit{.inner = 48});
  return model;
}

/// The unit with the sizes of released models, but for the numbers of heads and experts.
void enlarge(AttentionUnit& u) {
  u.rotary_dims = u.rotary_dims * 128 / u.head_dim;
  u.head_dim = 128;
}
void enlarge(LatentUnit& u) {
  u = {.heads = 16,
       .q_lora = 64,
       .latent = 512,
       .nope_dim = 128,
       .rope_dim = 64,
       .value_dim = 128,
       .rope_theta = u.rope_theta,
       .yarn_factor = u.yarn_factor,
       .yarn_positions = u.yarn_positions};
}
void enlarge(MambaUnit& u) {
  u.head_dim = 64;
  u.state = 128;
}
void enlarge(DeltaNetUnit& u) {
  u.key_dim = u.value_dim = 128;
}
void enlarge(MlpUnit& u) {
  u.inner = 256;
}
void enlarge(ExpertsUnit& u) {
  u.inner = u.shared_inner = 64;
}

struct Preset {
  std::string_view name, small;
  std::uint64_t seed;
  HybridConfig (*make)();
};

constexpr Preset kPresets[] = {
    {"tiny-nemotron-h", "small-nemotron-h", 10, nemotron_h},
    {"tiny-qwen3-next", "small-qwen3-next", 11, qwen3_next},
    {"tiny-deepseek-v3", "small-deepseek-v3", 2, deepseek_v3},
    {"tiny-qwen3", "small-qwen3", 3,
     [] {
       return qwen3({0, 0});
     }},
    {"tiny-window", "small-window", 8,
     [] {
       return qwen3({8, 0, 8});
     }},
};

using Add = std::function<void(const std::string& name, std::vector<std::int64_t> shape)>;

void add_mlp(const Add& add, const std::string& at, std::int64_t inner, std::int64_t hidden,
             FeedForward form) {
  if (form == FeedForward::swiglu) add(at + "gate_proj.weight", {inner, hidden});
  add(at + "up_proj.weight", {inner, hidden});
  add(at + "down_proj.weight", {hidden, inner});
}

void add_tensors(const Add& add, std::int64_t hidden, const AttentionUnit& u) {
  const std::int64_t queries = u.heads * u.head_dim, keys = u.kv_heads * u.head_dim;
  add("q_proj.weight", {queries * (u.output_gate ? 2 : 1), hidden});
  add("k_proj.weight", {keys, hidden});
  add("v_proj.weight", {keys, hidden});
  add("o_proj.weight", {hidden, queries});
  for (const char* const norm : {"q_norm.weight", "k_norm.weight"})
    if (u.head_norms) add(norm, {u.head_dim});
}

void add_tensors(const Add& add, std::int64_t hidden, const LatentUnit& u) {
  add("q_a_proj.weight", {u.q_lora, hidden});
  add("q_a_layernorm.weight", {u.q_lora});
  add("q_b_proj.weight", {u.heads * (u.nope_dim + u.rope_dim), u.q_lora});
  add("kv_a_proj_with_mqa.weight", {u.latent + u.rope_dim, hidden});
  add("kv_a_layernorm.weight", {u.latent});
  add("kv_b_proj.weight", {u.heads * (u.nope_dim + u.value_dim), u.latent});
  add("o_proj.weight", {hidden, u.heads * u.value_dim});
}

void add_tensors(const Add& add, std::int64_t hidden, const MambaUnit& u) {
  const std::int64_t inner = u.heads * u.head_dim, channels = inner + 2 * u.groups * u.state;
  add("in_proj.weight", {inner + channels + u.heads, hidden});
  add("conv1d.weight", {channels, 1, u.width});
  add("conv1d.bias", {channels});
  for (const char* const name : {"A_log", "D", "dt_bias"}) add(name, {u.heads});
  add("norm.weight", {inner});
  add("out_proj.weight", {hidden, inner});
}

void add_tensors(const Add& add, std::int64_t hidden, const DeltaNetUnit& u) {
  const std::int64_t keys = u.key_heads * u.key_dim, values = u.value_heads * u.value_dim;
  add("in_proj_qkvz.weight", {2 * keys + 2 * values, hidden});
  add("in_proj_ba.weight", {2 * u.value_heads, hidden});
  add("conv1d.weight", {2 * keys + values, 1, u.width});
  for (const char* const name : {"A_log", "dt_bias"}) add(name, {u.value_heads});
  add("norm.weight", {u.value_dim});
  add("out_proj.weight", {hidden, values});
}

void add_tensors(const Add& add, std::int64_t hidden, const MlpUnit& u) {
  add_mlp(add, "", u.inner, hidden, u.form);
}

void add_tensors(const Add& add, std::int64_t hidden, const ExpertsUnit& u) {
  add("gate.weight", {u.experts, hidden});
  if (u.sigmoid_scores) add("gate.e_score_correction_bias", {u.experts});
  if (u.form == FeedForward::swiglu)
    add("experts.gate_up_proj", {u.experts, 2 * u.inner, hidden});
  else
    add("experts.up_proj", {u.experts, u.inner, hidden});
  add("experts.down_proj", {u.experts, hidden, u.inner});
  add_mlp(add, shared_expert_name(u), u.shared_inner, hidden, u.form);
  if (u.shared_gate) add("shared_expert_gate.weight", {1, hidden});
}

}  // namespace

std::string shared_expert_name(const ExpertsUnit& unit) {
  return unit.shared_gate ? "shared_expert." : "shared_experts.";
}

const std::vector<std::string_view>& hybrid_presets() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list;
    for (const Preset& preset : kPresets) list.push_back(preset.name);
    return list;
  }();
  return names;
}

const std::vector<std::string_view>& hybrid_presets_of_both_sizes() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list = hybrid_presets();
    for (const Preset& preset : kPresets) list.push_back(preset.small);
    return list;
  }();
  return names;
}

std::optional<HybridConfig> hybrid_preset(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (name != preset.name && name != preset.small) continue;
    HybridConfig config = preset.make();
    config.name = name;
    config.seed = preset.seed;
    if (name == preset.name) return config;
    config.hidden = 128;
    for (HybridUnit& unit : config.units) std::visit([](auto& kind) { enlarge(kind); }, unit.kind);
    return config;
  }
  return std::nullopt;
}

std::optional<HybridConfig> hybrid_draft(const HybridConfig& model) {
  std::size_t last = 0;
  for (std::size_t i = 0; i < model.units.size(); ++i)
    if (std::holds_alternative<AttentionUnit>(model.units[i].kind) ||
        std::holds_alternative<LatentUnit>(model.units[i].kind))
      last = i;
  const bool latent = std::holds_alternative<LatentUnit>(model.units[last].kind);
  if (!latent && !model.zero_centred_norms) return std::nullopt;
  const std::string at = latent ? hybrid_layer(std::ssize(model.units) / 2) : "mtp.layers.0.";
  HybridConfig draft = model;
  draft.units.clear();
  add_layer_at(draft, at, "self_attn.", model.units[last].kind, model.units[last + 1].kind);
  draft.last_norm = latent ? at + "shared_head.norm.weight" : "mtp.norm.weight";
  draft.draft = latent ? DraftInput{at + "enorm.weight", at + "hnorm.weight", at + "eh_proj.weight"}
                       : DraftInput{"mtp.pre_fc_norm_embedding.weight",
                                    "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight"};
  return draft;
}

std::vector<HybridTensorName> hybrid_tensors(const HybridConfig& config) {
  std::vector<HybridTensorName> list;
  if (config.draft)
    list = {{config.draft->embedding_norm, {config.hidden}},
            {config.draft->hidden_norm, {config.hidden}},
            {config.draft->projection, {config.hidden, 2 * config.hidden}}};
  for (const HybridUnit& unit : config.units) {
    list.push_back({unit.norm, {config.hidden}});
    const Add add = [&](const std::string& name, std::vector<std::int64_t> shape) {
      list.push_back({unit.at + name, std::move(shape)});
    };
    std::visit([&](const auto& kind) { add_tensors(add, config.hidden, kind); }, unit.kind);
  }
  list.push_back({config.last_norm, {config.hidden}});
  list.push_back({"lm_head.weight", {config.vocabulary, config.hidden}});
  return list;
}

}  // namespace lockstep::reference
