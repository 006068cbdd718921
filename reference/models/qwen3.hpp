// Qwen3, a decoder-only language model: Qwen Team 2025, "Qwen3 Technical Report", section 2, as
// implemented in transformers 5.23 (models/qwen3/modeling_qwen3.py).
//
//   h += Attention(rms_norm(h)),  h += MLP(rms_norm(h))   in every layer
//   logits = head rms_norm(h)
//
// Attention: q and k are normed head by head, then rotated (RoPE, half-split); v is neither. Groups
// of query heads share a key head. MLP: down (silu(gate x) up x).
//
//   here             transformers        shape
//   ids              input_ids           [B, Q]
//   position_ids     position_ids        [B, Q]     left padding is not counted
//   mask             attention_mask      [B, M]     true at every real token, also the new ones
//   past_k, past_v   past_key_values     [L, B, HKV, M, hd]
//   new_k, new_v     (sidecar)           [L, B, HKV, M, hd], zero except at cache_position
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "reference/attention/static_kv_update.hpp"
#include "reference/layers/rms_norm.hpp"
#include "reference/layers/rope.hpp"
#include "reference/models/qwen3_checkpoint.hpp"

namespace lockstep::reference {

template <class S>
struct StaticKvStep {
  Matrix<S> hidden;  ///< [B Q, D], normed: the input of the head
  Array<S, 5> new_k, new_v;
};

template <class S>
class Qwen3 {
 public:
  explicit Qwen3(const Qwen3Checkpoint& checkpoint) : config_(checkpoint.config) {
    for (const Qwen3Tensor& tensor : qwen3_tensors(config_)) {
      const std::vector<float>& values = checkpoint.weights.at(tensor.name);
      const std::int64_t rows = tensor.shape[0],
                         columns = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
      require(static_cast<std::int64_t>(values.size()) == rows * columns,
              "a tensor has the elements of its shape");
      weights_.emplace(
          tensor.name,
          Eigen::Map<const Matrix<float>>(values.data(), rows, columns).template cast<S>());
    }
  }

  const Qwen3Config& config() const { return config_; }

  /// The definition: logits [T, V] of all tokens of one text at once, without a cache.
  Matrix<S> logits(const std::vector<std::int32_t>& tokens) const {
    std::vector<std::int32_t> positions(tokens.size());
    for (std::size_t t = 0; t < tokens.size(); ++t) positions[t] = static_cast<std::int32_t>(t);
    return head(decode(tokens, positions,
                       [&](std::int64_t, const auto& q, const auto& k, const auto& v, auto& out) {
                         Array<S, 2> lse(Shape<2>{q.extent(1), q.extent(0)});
                         attention_row<S>(q, k, v, {.scale = scale()}, out, lse);
                       }));
  }

  /// One call with a cache of M positions (reference/attention/static_kv_update.hpp).
  StaticKvStep<S> step(const IndexTable& ids, const IndexTable& position_ids, const MaskView& mask,
                       const IndexView& cache_position, const TensorView<const S, 5>& past_k,
                       const TensorView<const S, 5>& past_v) const {
    const std::int64_t B = ids.extent(0), Q = ids.extent(1), M = mask.extent(1);
    const Shape<5> shape{config_.num_hidden_layers, B, config_.num_key_value_heads, M,
                         config_.head_dim};
    require(shape_of(past_k) == shape && shape_of(past_v) == shape, "the cache has its shape");
    StaticKvStep<S> result{{}, Array<S, 5>(shape, S{0}), Array<S, 5>(shape, S{0})};
    const auto rows = [&](const TensorView<const S, 3>& x) {  // [B Q, heads, hd] as [B, Q, ...]
      return make_view(x.data_handle(), Shape<4>{B, Q, x.extent(1), x.extent(2)});
    };
    const auto attend = [&](std::int64_t layer, const auto& q, const auto& k, const auto& v,
                            auto& out) {
      const auto both = [&](const TensorView<const S, 3>& fresh, const TensorView<const S, 5>& past,
                            Array<S, 5>& sidecar) {
        Array<S, 4> seen(Shape<4>{B, config_.num_key_value_heads, M, config_.head_dim});
        for (std::int64_t b = 0; b < B; ++b)
          for (std::int64_t h = 0; h < seen.extent(1); ++h)
            for (std::int64_t j = 0; j < M; ++j)
              mapped(at(seen.view(), b, h, j)) = mapped(at(at(past, layer), b, h, j));
        write_kv<S>(rows(fresh), cache_position, Q, seen);
        write_kv<S>(rows(fresh), cache_position, Q, at(sidecar.view(), layer));
        return seen;
      };
      const Array<S, 4> seen_k = both(k, past_k, result.new_k);
      const Array<S, 4> seen_v = both(v, past_v, result.new_v);
      static_kv_attention<S>(rows(q), seen_k, seen_v, mask, cache_position, scale(),
                             make_view(out.data(), Shape<4>{B, Q, q.extent(1), q.extent(2)}));
    };
    std::vector<std::int32_t> tokens, positions;
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < Q; ++i) {
        tokens.push_back(ids(b, i));
        positions.push_back(position_ids(b, i));
      }
    result.hidden = decode(tokens, positions, attend);
    return result;
  }

  /// Logits [N, V] of hidden states [N, D].
  Matrix<S> head(const Matrix<S>& hidden) const {
    const std::string name =
        config_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
    return hidden * weights_.at(name).transpose();
  }

 private:
  S scale() const { return S{1} / std::sqrt(static_cast<S>(config_.head_dim)); }

  Matrix<S> normed(const Matrix<S>& x, const std::string& name) const {
    const Vector<S> weight = weights_.at(name).col(0);
    Matrix<S> out(x.rows(), x.cols());
    for (std::int64_t t = 0; t < x.rows(); ++t)
      out.row(t) = rms_normed<S>(x.row(t).transpose(), weight, static_cast<S>(config_.rms_norm_eps))
                       .transpose();
    return out;
  }

  /// x W^T as heads [N, heads, hd], normed if there is a norm, not yet rotated.
  Array<S, 3> heads_of(const Matrix<S>& x, const std::string& projection,
                       const std::string& norm) const {
    const Matrix<S> product = x * weights_.at(projection).transpose();
    const std::int64_t hd = config_.head_dim;
    Array<S, 3> heads(Shape<3>{x.rows(), product.cols() / hd, hd});
    for (std::int64_t t = 0; t < x.rows(); ++t)
      for (std::int64_t h = 0; h < heads.extent(1); ++h) {
        Matrix<S> head = product.row(t).segment(h * hd, hd);
        mapped(at(heads.view(), t, h)) = (norm.empty() ? head : normed(head, norm)).transpose();
      }
    return heads;
  }

  /// Runs the layers and the last norm. attend(layer, q, k, v, out) computes attention.
  template <class Attend>
  Matrix<S> decode(const std::vector<std::int32_t>& tokens,
                   const std::vector<std::int32_t>& positions, const Attend& attend) const {
    const auto N = static_cast<std::int64_t>(tokens.size());
    const Rope<S> rope = plain_rope<S>(config_.head_dim, static_cast<S>(config_.rope_theta));
    const IndexView at_positions = make_view(positions.data(), Shape<1>{N});
    const Matrix<S>& table = weights_.at("model.embed_tokens.weight");
    Matrix<S> h(N, config_.hidden_size);
    for (std::int64_t t = 0; t < N; ++t) {
      const std::int32_t token = tokens[static_cast<std::size_t>(t)];
      require(0 <= token && token < table.rows(), "a token is below the size of the vocabulary");
      h.row(t) = table.row(token);
    }
    for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      const auto name = [&](const char* part) { return layer + part + ".weight"; };
      const Matrix<S> x = normed(h, name("input_layernorm"));
      Array<S, 3> q = heads_of(x, name("self_attn.q_proj"), name("self_attn.q_norm"));
      Array<S, 3> k = heads_of(x, name("self_attn.k_proj"), name("self_attn.k_norm"));
      const Array<S, 3> v = heads_of(x, name("self_attn.v_proj"), "");
      apply_rope<S>(rope, at_positions, RopePairs::half_split, q);
      apply_rope<S>(rope, at_positions, RopePairs::half_split, k);
      Array<S, 3> out(q.shape());
      attend(i, std::as_const(q).view(), std::as_const(k).view(), v.view(), out);
      const Eigen::Map<const Matrix<S>> flat(out.data(), N, q.extent(1) * q.extent(2));
      h += flat * weights_.at(name("self_attn.o_proj")).transpose();
      const Matrix<S> y = normed(h, name("post_attention_layernorm"));
      const Matrix<S> gate = y * weights_.at(name("mlp.gate_proj")).transpose();
      const Matrix<S> up = y * weights_.at(name("mlp.up_proj")).transpose();
      h += gate.unaryExpr([](S u) { return silu(u); }).cwiseProduct(up) *
           weights_.at(name("mlp.down_proj")).transpose();
    }
    return normed(h, "model.norm.weight");
  }

  Qwen3Config config_;
  std::map<std::string, Matrix<S>> weights_;
};

}  // namespace lockstep::reference
