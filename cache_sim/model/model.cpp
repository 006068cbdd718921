#include "cache_sim/model/model.hpp"

#include <fmt/format.h>

namespace lockstep::cache_sim {
namespace {

// Products of small literals are part of the derivations.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

// Weights, KV and conv states are bf16; recurrent states are float32, which servers use by default.
constexpr std::int64_t kBf16 = 2;
constexpr std::int64_t kFloat32 = 4;

/// Keys and values of a token in one layer; QK^T and PV take 2 FLOPs for each of their elements.
struct Attention {
  std::int64_t layers, heads, kv_heads, head_dim;
  constexpr std::int64_t token_bytes() const { return layers * 2 * kv_heads * head_dim * kBf16; }
  constexpr std::int64_t flops_per_pair() const { return layers * 4 * heads * head_dim; }
};

/// `heads` matrices of rows x columns, and `channels` values for each of the last width - 1 tokens.
struct Recurrent {
  std::int64_t layers, heads, rows, columns, channels, conv_width;
  constexpr std::int64_t bytes() const {
    return layers * (heads * rows * columns * kFloat32 + channels * (conv_width - 1) * kBf16);
  }
};

// Qwen3-Next-80B-A3B, config.json: hidden 2048; 48 layers, every fourth is attention (16 heads, 2
// of KV, 256 wide, a gate as wide as the queries), the others gated delta rule (16 key and 32 value
// heads, 128 wide, convolution 4 wide over q, k and v); 10 of 512 experts and a shared one, 512
// wide; 79.7 billion weights.
namespace qwen3_next {
constexpr std::int64_t kHidden = 2048;
constexpr Attention kAttention{12, 16, 2, 256};
constexpr Recurrent kState{36, 32, 128, 128, (16 + 16 + 32) * 128, 4};
constexpr std::int64_t kExperts = 48 * ((10 + 1) * 3 * kHidden * 512 + kHidden * 512);  // + router
constexpr std::int64_t kAttentionWeights =
    12 * kHidden * (3 * 16 + 2 * 2) * 256;  // q, gate, o; k, v
constexpr std::int64_t kDeltaWeights =
    36 * kHidden * ((16 + 16 + 3 * 32) * 128 + 2 * 32);                         // v, z, o; a, b
constexpr std::int64_t kActive = kExperts + kAttentionWeights + kDeltaWeights;  // 3.26e9
constexpr std::int64_t kWeightBytes = 79'700'000'000 * kBf16;
}  // namespace qwen3_next
const Registration<Model> kQwen3Next{
    {"qwen3-next", "Qwen3-Next-80B-A3B: 12 layers of attention, 36 of gated delta rule",
     qwen3_next::kAttention.token_bytes(), qwen3_next::kState.bytes(), 2 * qwen3_next::kActive,
     qwen3_next::kAttention.flops_per_pair(), qwen3_next::kWeightBytes,
     qwen3_next::kAttention.layers, qwen3_next::kState.layers}};

// Nemotron-H-8B, config.json: hidden 4096; 52 layers: 24 Mamba2 (128 heads, 64 wide, state 128, 8
// groups, convolution 4 wide over x, B and C), 4 attention (32 heads, 8 of KV, 128 wide), 24 MLP
// (21504 wide, two matrices); 8.1 billion weights.
namespace nemotron_h {
constexpr std::int64_t kHidden = 4096;
constexpr std::int64_t kInner = 128 * 64;
constexpr Attention kAttention{4, 32, 8, 128};
constexpr Recurrent kState{24, 128, 64, 128, kInner + 2 * 8 * 128, 4};
constexpr std::int64_t kMambaWeights =
    24 * kHidden * (3 * kInner + 2 * 8 * 128 + 128);  // z, x, o; B, C; dt
constexpr std::int64_t kAttentionWeights = 4 * kHidden * (2 * 32 + 2 * 8) * 128;
constexpr std::int64_t kMlpWeights = 24 * 2 * kHidden * 21504;
constexpr std::int64_t kActive = kMambaWeights + kAttentionWeights + kMlpWeights;  // 7.03e9
constexpr std::int64_t kWeightBytes = 8'100'000'000 * kBf16;
}  // namespace nemotron_h
const Registration<Model> kNemotronH{
    {"nemotron-h", "Nemotron-H-8B: 4 layers of attention, 24 of Mamba2",
     nemotron_h::kAttention.token_bytes(), nemotron_h::kState.bytes(), 2 * nemotron_h::kActive,
     nemotron_h::kAttention.flops_per_pair(), nemotron_h::kWeightBytes,
     nemotron_h::kAttention.layers, nemotron_h::kState.layers}};

// DeepSeek-V3, config.json and report: 61 layers of MLA, which cache a latent of 512 and a rotary
// key of 64 a token; prefill computes 128 heads of 192-wide keys and 128-wide values; 37 of 671
// billion weights are active, a byte each (fp8).
const Registration<Model> kDeepSeekV3{{"deepseek-v3", "DeepSeek-V3: 61 layers of MLA, no state",
                                       61 * (512 + 64) * kBf16, 0, 2 * 37'000'000'000,
                                       61 * 2 * 128 * (192 + 128), 671'000'000'000, 61, 0}};

// Two small models whose figures can be followed by hand.
constexpr Attention kTinyAttention{1, 4, 1, 32};
constexpr Recurrent kTinyState{3, 4, 32, 32, 3 * 4 * 32, 4};
const Registration<Model> kTinyHybrid{
    {"tiny-hybrid", "1 layer of attention, 3 of gated delta rule, hidden 128",
     kTinyAttention.token_bytes(), kTinyState.bytes(), 2 * 4 * 12 * 128 * 128,
     kTinyAttention.flops_per_pair(), 4 * 12 * 128 * 128 * kBf16, kTinyAttention.layers,
     kTinyState.layers}};
const Registration<Model> kTinyMla{{"tiny-mla", "2 layers of MLA, latents of 64 and 16, hidden 128",
                                    2 * (64 + 16) * kBf16, 0, 2 * 2 * 12 * 128 * 128,
                                    2 * 2 * 4 * (48 + 32), 2 * 12 * 128 * 128 * kBf16, 2, 0}};

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)

}  // namespace

Result<const Model*> find_model(std::string_view name) {
  const Model* const model = Registry<Model>::find(name);
  if (model != nullptr) return model;
  std::string all;
  for (const Model& one : Registry<Model>::all())
    all += fmt::format("{}{}", all.empty() ? "" : ", ", one.name);
  return fail(fmt::format("there is no model `{}`; there are {}", name.substr(0, 60), all));
}

}  // namespace lockstep::cache_sim
