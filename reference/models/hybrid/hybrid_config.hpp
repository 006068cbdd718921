// A hybrid decoder by configuration: a list of units, each of which adds to the residual stream,
//
//   h += unit(rms_norm(h)),   logits = head rms_norm(h)
//
// and the tiny models of the tests. Units have the names that a checkpoint of the family has in
// transformers 5.23, so that the same weights run in both.
//
//   preset              family        units
//   tiny-nemotron-h     NemotronH     Mamba2, experts, attention without positions, Mamba2, MLP
//   tiny-qwen3-next     Qwen3Next     delta net, gated attention, delta net, each with experts
//   tiny-deepseek-v3    DeepseekV3    three layers of latent attention; MLP, experts, experts
//   tiny-qwen3          Qwen3         two layers of attention and an MLP
//   tiny-window         Qwen3         the same with three layers, of which two see 8 tokens
//
// small-… are the same with the heads, states and latents of the families' released models, which
// the kernels take on their fast paths: heads of 128, states of 64 x 128 and 128 x 128, latents of
// 512 + 64.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lockstep::reference {

/// Softmax attention with grouped queries.
struct AttentionUnit {
  std::int64_t heads, kv_heads, head_dim;
  std::int64_t rotary_dims = 0;  ///< leading dimensions of a head that rotate; 0: no positions
  double rope_theta = 1e4;
  std::int64_t window = 0;   ///< tokens that a token sees, itself included; 0: all
  bool head_norms = true;    ///< q and k are normed head by head
  bool output_gate = false;  ///< q_proj has a gate beside each head
};

/// Multi-head latent attention; rotations are stretched by YaRN.
struct LatentUnit {
  std::int64_t heads, q_lora, latent, nope_dim, rope_dim, value_dim;
  double rope_theta, yarn_factor, yarn_positions;
};

/// reference/recurrent/mamba_mixer.hpp: heads of `head_dim`, states of `state` columns.
struct MambaUnit {
  std::int64_t heads, head_dim, state, groups, width;
};

/// reference/recurrent/gated_delta_net.hpp
struct DeltaNetUnit {
  std::int64_t key_heads, value_heads, key_dim, value_dim, width;
};

enum class FeedForward { swiglu, squared_relu };

struct MlpUnit {
  std::int64_t inner;
  FeedForward form = FeedForward::swiglu;
};

/// Routed experts and one that all tokens share.
struct ExpertsUnit {
  std::int64_t experts, per_token, inner, shared_inner;
  FeedForward form = FeedForward::swiglu;
  bool sigmoid_scores = false;  ///< with a bias that only affects the selection; else softmax
  std::int64_t groups = 1, groups_kept = 1;
  double scale = 1;
  bool shared_gate = false;  ///< a sigmoid of the token weighs the shared expert
};

/// The prefix of the shared expert's names: singular where a gate weighs it, as in Qwen3-Next.
std::string shared_expert_name(const ExpertsUnit& unit);

using HybridKind =
    std::variant<AttentionUnit, LatentUnit, MambaUnit, DeltaNetUnit, MlpUnit, ExpertsUnit>;

struct HybridUnit {
  std::string norm;  ///< name of the norm in front of the unit
  std::string at;    ///< prefix of the unit's names
  HybridKind kind;
};

struct HybridWeights;

/// The names of what makes a draft module's input.
struct DraftInput {
  std::string embedding_norm, hidden_norm, projection;
};

struct HybridConfig {
  std::string name;
  std::int64_t hidden, vocabulary;  ///< the head tells `vocabulary` tokens apart
  double eps;
  bool zero_centred_norms = false;  ///< norms multiply by 1 + weight
  std::string embedding = "model.embed_tokens.weight", last_norm = "model.norm.weight";
  std::vector<HybridUnit> units{};
  std::optional<DraftInput> draft{};  ///< of a draft module: hybrid_draft()
  /// Of a preset's weights: one of twelve that shows the mistakes of a cache well
  /// (properties/reference/models/hybrid/hybrid_sensitivity_test.cpp).
  std::uint64_t seed = 1;
  /// A checkpoint's (hybrid_checkpoint.hpp); what it lacks is drawn.
  std::shared_ptr<const HybridWeights> stored{};
};

/// The prefix of the names of layer `i`.
std::string hybrid_layer(std::int64_t i);

/// Adds the next layer of Qwen's and DeepSeek's families: a mixer and a feed-forward unit, each
/// behind a norm.
void add_layer(HybridConfig& model, const char* mixer_name, const HybridKind& mixer,
               const HybridKind& forward);

/// The names of the tiny presets, and of those and the small ones.
const std::vector<std::string_view>& hybrid_presets();
const std::vector<std::string_view>& hybrid_presets_of_both_sizes();

/// The preset of that name; null where there is none.
std::optional<HybridConfig> hybrid_preset(std::string_view name);

/// The module with which a model of DeepSeek-V3's or Qwen3-Next's family drafts (multi-token
/// prediction, NextN): DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2, as in
/// transformers 5.23 (modeling_layers.py, MtpLayer), vLLM and SGLang. It is one more layer, of the
/// sizes of the model's last layer with attention and with KV of its own. At the place of token t
///
///   h = projection [norm(embedding of token t + 1) | norm(hidden)]
///   h += unit(rms_norm(h)),   logits of token t + 2 = head rms_norm(h)
///
/// where `hidden` is the head's input after token t, in the model or, for a draft after a draft, in
/// the module. Embedding and head are the model's. At place 0 vLLM's deepseek_mtp.py takes zeros
/// for the embedding; transformers, SGLang and this do not.
///
///   here             DeepSeek-V3, layer I             Qwen3-Next
///   units            model.layers.I                   mtp.layers.0
///   embedding_norm   model.layers.I.enorm             mtp.pre_fc_norm_embedding
///   hidden_norm      model.layers.I.hnorm             mtp.pre_fc_norm_hidden
///   projection       model.layers.I.eh_proj           mtp.fc
///   last_norm        model.layers.I.shared_head.norm  mtp.norm
///
/// I is the number of the model's layers. Null for other families.
std::optional<HybridConfig> hybrid_draft(const HybridConfig& model);

struct HybridTensorName {
  std::string name;
  std::vector<std::int64_t> shape;
};

/// All tensors of a model, without the embedding: it is drawn by token, whatever its 64 bits are
/// (hybrid_weights.hpp).
std::vector<HybridTensorName> hybrid_tensors(const HybridConfig& config);

}  // namespace lockstep::reference
