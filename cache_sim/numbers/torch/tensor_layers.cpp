#include "cache_sim/numbers/torch/tensor_layers.hpp"

#include <ATen/Parallel.h>
#include <ATen/TensorIndexing.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace lockstep::cache_sim {
namespace {

using at::Tensor;

/// Elements to which rows are filled up. ATen computes functions by vectors, and the last elements
/// of a tensor, fewer than two vectors, by another function.
constexpr std::int64_t kWholeVectors = 64;

class HostLayers final : public TensorLayers {
 public:
  /// Sums are of this type; results are of that of the activations, but in double where sums are.
  explicit HostLayers(at::ScalarType sums) : type_(sums) {}

  at::Device device() const override { return at::kCPU; }

  Tensor product(const Tensor& x, const Tensor& weight) const override {
    return stored(sums_by_token(x, weight), x);
  }
  Tensor logits(const Tensor& x, const Tensor& head) const override {
    return sums_by_token(x, head);
  }
  Tensor products(const Tensor& x, const Tensor& weight) const override {
    return stored(sums_by_token(x, weight), x);
  }

  Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) const override {
    return stored(normed(wide(x), eps) * wide(weight), x);
  }
  Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                        bool gate_before_norm, std::int64_t groups) const override {
    Tensor y = wide(x);
    if (gate_before_norm) y = y * silu_of(gate);
    y = normed(y.reshape({y.size(0), groups, -1}), eps).reshape(x.sizes()) * wide(weight);
    if (!gate_before_norm) y = y * silu_of(gate);
    return stored(y, x);
  }

  Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& frequencies, double magnitude,
              bool interleaved) const override {
    const std::int64_t T = positions.size(0), half = frequencies.size(0);
    const auto* const places = positions.data_ptr<std::int32_t>();
    const float* const rates = frequencies.data_ptr<float>();
    const Tensor turns = at::empty({2, T, 1, half}, at::kDouble);
    double* const cosines = turns.data_ptr<double>();
    double* const sines = cosines + T * half;
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(places[t]) * static_cast<double>(rates[i]);
        cosines[t * half + i] = std::cos(angle) * magnitude;
        sines[t * half + i] = std::sin(angle) * magnitude;
      }
    const Tensor c = wide(turns[0]), sine = wide(turns[1]);
    Tensor y = wide(x).clone(at::MemoryFormat::Contiguous);
    const auto pair = [&](std::int64_t which) {
      const Tensor turned = y.narrow(-1, 0, 2 * half);
      return interleaved ? turned.slice(-1, which, 2 * half, 2)
                         : turned.narrow(-1, which * half, half);
    };
    const Tensor a = pair(0).clone(), b = pair(1).clone();
    pair(0).copy_(a * c - b * sine);
    pair(1).copy_(b * c + a * sine);
    return stored(y, x);
  }

  void store(const Tensor& pool, const Tensor& x, const Tensor& slots) const override {
    const auto* const to = slots.data_ptr<std::int32_t>();
    for (std::int64_t t = 0; t < slots.size(0); ++t)
      if (to[t] >= 0) pool.select(0, to[t]).copy_(x.select(0, t));
  }

  Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, const SeenSlots& seen,
                   double scale) const override {
    const std::int64_t heads = q.size(1), kv_heads = keys.size(1), d = q.size(2);
    const Tensor out = at::zeros({q.size(0), heads, values.size(2)},
                                 type_ == at::kDouble ? q.options().dtype(type_) : q.options());
    const auto* const lengths = seen.lengths.data_ptr<std::int32_t>();
    const auto* const starts = seen.starts.data_ptr<std::int32_t>();
    for (std::int64_t row = 0; row < seen.lengths.size(0); ++row) {
      const Tensor listed = seen.table[row].narrow(0, 0, lengths[row]);
      const Tensor index = listed.index({listed.ge(0)});
      const Tensor K = wide(keys.index_select(0, index)).transpose(0, 1).contiguous();
      const Tensor V = wide(values.index_select(0, index)).transpose(0, 1).contiguous();
      for (std::int64_t t = starts[row]; t < starts[row + 1]; ++t) {
        const std::int64_t n = std::min(K.size(1), lengths[row] - (starts[row + 1] - 1 - t));
        if (n <= 0) continue;
        const Tensor own = wide(q[t]).reshape({kv_heads, heads / kv_heads, d});
        const Tensor scores = sums(own, K.narrow(1, 0, n).unsqueeze(1)) * scale;
        const Tensor shares = at::softmax(scores, -1).unsqueeze(-1);  // [HKV, group, n, 1]
        out[t].copy_((shares * V.narrow(1, 0, n).unsqueeze(1)).sum(-2).reshape({heads, -1}));
      }
    }
    return out;
  }

  Routes route(const Tensor& logits, const std::optional<Tensor>& bias,
               const reference::ExpertsUnit& unit) const override {
    const std::int64_t T = logits.size(0);
    Tensor scores;
    if (unit.sigmoid_scores) {
      scores = sigmoid_of(logits);
    } else {
      const Tensor e = elementwise(wide(logits) - std::get<0>(wide(logits).max(-1, true)),
                                   [](const Tensor& whole) { return at::exp(whole); });
      scores = e / e.contiguous().sum(-1, true);
    }
    Tensor choice = bias ? scores + wide(*bias) : scores;
    if (unit.groups > 1) {
      const Tensor members = choice.reshape({T, unit.groups, -1});
      const Tensor best = std::get<0>(members.sort(true, -1, true)).narrow(-1, 0, 2).sum(-1);
      const Tensor kept = std::get<1>(best.sort(true, -1, true)).narrow(-1, 0, unit.groups_kept);
      const Tensor left_out =
          at::ones({T, unit.groups}, at::kBool).scatter(-1, kept, false).unsqueeze(-1);
      choice = members.masked_fill(left_out, -INFINITY).reshape({T, -1});
    }
    const Tensor chosen = std::get<1>(choice.sort(true, -1, true)).narrow(-1, 0, unit.per_token);
    const Tensor weights = scores.gather(-1, chosen);
    return {chosen.to(at::kInt), weights / weights.sum(-1, true) * unit.scale};
  }

  Tensor swiglu(const Tensor& gate, const Tensor& up) const override {
    return stored(silu_of(gate) * wide(up), up);
  }
  Tensor squared_relu(const Tensor& x) const override {
    const Tensor positive = wide(x).relu();
    return stored(positive * positive, x);
  }
  Tensor sigmoid_gated(const Tensor& x, const Tensor& gate) const override {
    return stored(wide(x) * sigmoid_of(gate), x);
  }

  Tensor experts(const Tensor& x, const Routes& routes, const ExpertMatrices& matrices,
                 const reference::ExpertsUnit& unit) const override {
    const std::int64_t T = x.size(0), k = unit.per_token;
    const Tensor chosen = routes.experts.to(at::kLong).flatten();
    const auto of_chosen = [&](const Tensor& weight) {
      return weight.index_select(0, chosen).reshape({T, k, weight.size(1), weight.size(2)});
    };
    const Tensor raised =
        stored(sums(x.unsqueeze(1), of_chosen(matrices.up)), x);  // [T, k, F or 2 F]
    const Tensor inner =
        unit.form == reference::FeedForward::swiglu
            ? swiglu(raised.narrow(-1, 0, unit.inner), raised.narrow(-1, unit.inner, unit.inner))
            : squared_relu(raised);
    const Tensor out = stored(sums(inner, of_chosen(matrices.down)), x);
    return stored((wide(out) * wide(routes.weights).unsqueeze(-1)).sum(1), x);
  }

 private:
  Tensor wide(const Tensor& x) const { return x.to(type_); }
  /// Rounded as the activations x are.
  Tensor stored(const Tensor& y, const Tensor& x) const {
    return type_ == at::kDouble ? y : y.to(x.scalar_type());
  }
  /// f of each element, with the same bits wherever in the tensor it is.
  template <class Function>
  Tensor elementwise(const Tensor& x, const Function& f) const {
    const std::int64_t size = x.size(-1);
    const std::int64_t more = (kWholeVectors - size % kWholeVectors) % kWholeVectors;
    return f(at::constant_pad_nd(wide(x), {0, more}).contiguous()).narrow(-1, 0, size);
  }
  Tensor sigmoid_of(const Tensor& x) const {
    return elementwise(x, [](const Tensor& whole) { return at::sigmoid(whole); });
  }
  Tensor silu_of(const Tensor& x) const {
    return elementwise(x, [](const Tensor& whole) { return at::silu(whole); });
  }
  /// sum_k x[.., k] weight[.., n, k]
  Tensor sums(const Tensor& x, const Tensor& weight) const {
    return (wide(x).unsqueeze(-2) * wide(weight)).sum(-1);
  }
  /// x [.., T, K] weight [.., N, K] -> [.., T, N], a token at a time where all of them at once
  /// would not stay in a cache.
  Tensor sums_by_token(const Tensor& x, const Tensor& weight) const {
    constexpr std::int64_t kMostAtOnce = 1 << 18;
    const Tensor matrix = wide(weight);
    if (x.size(-2) * weight.numel() <= kMostAtOnce) return sums(x, matrix.unsqueeze(-3));
    std::vector<Tensor> tokens;
    for (std::int64_t t = 0; t < x.size(-2); ++t) tokens.push_back(sums(x.select(-2, t), matrix));
    return at::stack(tokens, -2);
  }
  /// Square roots and quotients are rounded correctly, by vectors and by numbers.
  static Tensor normed(const Tensor& x, double eps) {
    const Tensor squares = (x * x).contiguous().sum(-1, true) / x.size(-1);
    return x / (squares + eps).sqrt();
  }

  at::ScalarType type_;
};

}  // namespace

std::shared_ptr<const TensorLayers> host_layers() {
  at::set_num_threads(1);
  return std::make_shared<HostLayers>(at::kFloat);
}

std::shared_ptr<const TensorLayers> exact_layers() {
  return std::make_shared<HostLayers>(at::kDouble);
}

}  // namespace lockstep::cache_sim
