#include "kernels/torch/static_kv/torch_qwen3.hpp"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace lockstep::static_kv {
namespace {

using at::Tensor;

/// Rotates x [B, H, Q, hd] with cos and sin [B, 1, Q, hd / 2]; pairs are (i, i + hd / 2), as in
/// NeoX.
Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

/// Softmax attention under the mask `allowed` [B, 1, Q, M]. A query that sees no key gives 0; keys
/// and values that no query sees may be NaN. The query heads of a group are rows of one product,
/// [B, HKV, groups Q, M], so that keys need not be copied.
Tensor attend_where(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& allowed) {
  const std::int64_t B = q.size(0), groups = q.size(1) / k.size(1), Q = q.size(2), hd = q.size(3);
  const Tensor hidden = allowed.logical_not().repeat({1, 1, groups, 1});
  const Tensor seen = allowed.any(2).unsqueeze(-1);  // [B, 1, M, 1]
  const Tensor values = at::where(seen, v, at::zeros({}, v.options()));
  const double scale = 1 / std::sqrt(static_cast<double>(hd));
  // Masks are applied in place, since a copy would be one more node of the graph.
  const Tensor scores = at::matmul(q.reshape({B, k.size(1), groups * Q, hd}), k.transpose(2, 3))
                            .mul_(scale)
                            .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  return at::matmul(at::softmax(scores, -1).masked_fill_(hidden, 0), values).view(q.sizes());
}

/// The positions of the cache that each query may see, [B, 1, Q, M], from a program's inputs.
Tensor allowed_of(const std::vector<Tensor>& inputs) {
  const Tensor &mask = inputs[1], &cache_position = inputs[4];
  const Tensor past =
      at::arange(mask.size(1), cache_position.options()).le(cache_position.unsqueeze(1));
  return past.unsqueeze(0).logical_and(mask.unsqueeze(1)).unsqueeze(1);
}

}  // namespace

TorchQwen3::TorchQwen3(const reference::Qwen3Checkpoint& checkpoint, at::ScalarType dtype,
                       at::Device device)
    : config_(checkpoint.config) {
  for (const auto& [name, shape] : reference::qwen3_tensors(config_)) {
    std::vector<float> values = checkpoint.weights.at(name);
    weights_.emplace(
        name, at::from_blob(values.data(), shape, at::kFloat).to(device, dtype, false, true));
  }
}

Tensor TorchQwen3::head() const {
  return weight(config_.tie_word_embeddings ? "model.embed_tokens" : "lm_head");
}

Tensor TorchQwen3::normed(const Tensor& x, const std::string& name) const {
  return x * at::rsqrt(x.pow(2).mean(-1, true) + config_.rms_norm_eps) * weight(name);
}

template <class Attend>
Tensor TorchQwen3::decode(const Tensor& ids, const Tensor& positions, const Attend& attend) const {
  const std::int64_t B = ids.size(0), Q = ids.size(1), hd = config_.head_dim;
  const Tensor table = weight("model.embed_tokens");
  const Tensor exponents =
      at::arange(0, hd, 2, ids.options().dtype(at::kDouble)) / static_cast<double>(hd);
  const Tensor frequencies = at::pow(config_.rope_theta, -exponents);
  const Tensor angles = (positions.to(at::kDouble).unsqueeze(-1) * frequencies).unsqueeze(1);
  const Tensor cos = angles.cos().to(table.scalar_type()),
               sin = angles.sin().to(table.scalar_type());
  const auto heads = [&](const Tensor& x, const std::string& name) {
    return at::linear(x, weight(name)).view({B, Q, -1, hd});
  };
  Tensor h = at::embedding(table, ids);
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".",
                      self = layer + "self_attn.";
    const Tensor x = normed(h, layer + "input_layernorm");
    const Tensor q = normed(heads(x, self + "q_proj"), self + "q_norm").transpose(1, 2);
    const Tensor k = normed(heads(x, self + "k_proj"), self + "k_norm").transpose(1, 2);
    const Tensor v = heads(x, self + "v_proj").transpose(1, 2);
    const Tensor out = attend(i, rotated(q, cos, sin), rotated(k, cos, sin), v);
    h = h + at::linear(out.transpose(1, 2).reshape({B, Q, -1}), weight(self + "o_proj"));
    const Tensor y = normed(h, layer + "post_attention_layernorm");
    h = h + at::linear(at::silu(at::linear(y, weight(layer + "mlp.gate_proj"))) *
                           at::linear(y, weight(layer + "mlp.up_proj")),
                       weight(layer + "mlp.down_proj"));
  }
  return normed(h, "model.norm");
}

Tensor TorchQwen3::logits(const Tensor& ids, const Tensor& positions, const Tensor& real) const {
  const std::int64_t T = ids.size(1);
  const Tensor allowed =
      at::ones({T, T}, real.options()).tril().logical_and(real.unsqueeze(1)).unsqueeze(1);
  const Tensor hidden =
      decode(ids, positions, [&](std::int64_t, const Tensor& q, const Tensor& k, const Tensor& v) {
        return attend_where(q, k, v, allowed);
      });
  return at::linear(hidden, head());
}

std::vector<Tensor> TorchQwen3::step(const std::vector<Tensor>& inputs) const {
  const Tensor& cache_position = inputs[4];
  const Tensor allowed = allowed_of(inputs);
  Tensor new_k = at::zeros_like(inputs[2]), new_v = at::zeros_like(inputs[3]);
  const Tensor hidden = decode(
      inputs[0], inputs[5], [&](std::int64_t i, const Tensor& q, const Tensor& k, const Tensor& v) {
        new_k[i].index_copy_(2, cache_position, k);
        new_v[i].index_copy_(2, cache_position, v);
        return attend_where(q, inputs[2][i].index_copy(2, cache_position, k),
                            inputs[3][i].index_copy(2, cache_position, v), allowed);
      });
  return {hidden, new_k, new_v};
}

std::vector<Tensor> TorchQwen3::step_in_place(const std::vector<Tensor>& inputs) const {
  const Tensor& cache_position = inputs[4];
  const Tensor allowed = allowed_of(inputs);
  return {decode(inputs[0], inputs[5],
                 [&](std::int64_t i, const Tensor& q, const Tensor& k, const Tensor& v) {
                   const Tensor keys = inputs[2][i], values = inputs[3][i];
                   return attend_where(q, keys.index_copy_(2, cache_position, k),
                                       values.index_copy_(2, cache_position, v), allowed);
                 })};
}

Result<std::vector<std::vector<float>>> Recomputed::append(const NewColumns& columns) {
  const auto B = static_cast<std::int64_t>(columns.ids.size());
  const auto n = static_cast<std::int64_t>(columns.ids.front().size());
  Tensor ids = at::empty({B, n}, at::kLong), positions = at::empty({B, n}, at::kLong);
  Tensor real = at::empty({B, n}, at::kBool);
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t i = 0; i < n; ++i) {
      const auto row = static_cast<std::size_t>(b), column = static_cast<std::size_t>(i);
      ids[b][i] = columns.ids[row][column];
      positions[b][i] = columns.positions[row][column];
      real[b][i] = columns.real[row][column] != 0;
    }
  const auto joined = [](const Tensor& before, const Tensor& behind) {
    return before.defined() ? at::cat({before, behind}, 1) : behind;
  };
  ids_ = joined(ids_, ids);
  positions_ = joined(positions_, positions);
  real_ = joined(real_, real);
  return rows_of(model_.logits(ids_, positions_, real_).select(1, ids_.size(1) - 1), B);
}

void Recomputed::reorder(const std::vector<std::int64_t>& rows) {
  const Tensor order = at::tensor(rows, at::kLong);
  ids_ = ids_.index_select(0, order);
  positions_ = positions_.index_select(0, order);
  real_ = real_.index_select(0, order);
}

void Recomputed::clear() {
  ids_ = positions_ = real_ = Tensor();
}

}  // namespace lockstep::static_kv
