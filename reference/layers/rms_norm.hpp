// Root-mean-square norms. Zhang, Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
//
//   rms_norm(x)[i] = x[i] / sqrt(mean(x^2) + eps) w[i]
//
//   here      field                     shape
//   x         hidden_states             [T, D]
//   weight    weight                    [D]
//   residual  residual                  [T, D], updated in place
//   gate      z, gate                   [T, D]
//
// Mamba2 gates first and norms groups of channels (norm_before_gate = false); the gated delta net
// norms each value head first and gates the result.
#pragma once

#include <cmath>

#include "reference/tensors/functions.hpp"
#include "reference/tensors/storage.hpp"

namespace lockstep::reference {

/// The norm of one vector.
template <class S>
Vector<S> rms_normed(const Vector<S>& x, const Vector<S>& weight, S eps) {
  require(x.size() == weight.size() && x.size() > 0, "a norm has a weight for every channel");
  const S mean = x.squaredNorm() / static_cast<S>(x.size());
  return (x / std::sqrt(mean + eps)).cwiseProduct(weight);
}

template <class S>
void rms_norm(const TensorView<const S, 2>& x, const TensorView<const S, 1>& weight, S eps,
              TensorView<S, 2> out) {
  for (std::int64_t t = 0; t < x.extent(0); ++t)
    mapped(at(out, t)) = rms_normed<S>(as_vector(at(x, t)), as_vector(weight), eps);
}

/// residual += x, then the norm of the residual, as at the entry of a decoder layer. `sum` is the
/// format of the residual stream.
template <class S>
void rms_norm_with_residual(const TensorView<const S, 2>& x, const TensorView<S, 2>& residual,
                            const TensorView<const S, 1>& weight, S eps, TensorView<S, 2> out,
                            Format sum = Format::exact) {
  for (std::int64_t t = 0; t < x.extent(0); ++t) {
    const Vector<S> added = rounded_each((mapped(at(x, t)) + mapped(at(residual, t))).eval(), sum);
    mapped(at(residual, t)) = added;
    mapped(at(out, t)) = rms_normed<S>(added, as_vector(weight), eps);
  }
}

enum class GateOrder { before_norm, after_norm };
enum class Gate { silu, sigmoid };

/// The gated norm, per group of D / groups channels.
template <class S>
void gated_rms_norm(const TensorView<const S, 2>& x, const TensorView<const S, 2>& gate,
                    const TensorView<const S, 1>& weight, S eps, GateOrder order,
                    std::int64_t groups, TensorView<S, 2> out, Gate act = Gate::silu) {
  const std::int64_t D = x.extent(1);
  require(groups > 0 && D % groups == 0, "channels are a multiple of groups");
  const std::int64_t size = D / groups;
  const Vector<S> w = as_vector(weight);
  for (std::int64_t t = 0; t < x.extent(0); ++t) {
    Vector<S> u = as_vector(at(x, t));
    const Vector<S> factor = mapped(at(gate, t)).unaryExpr([&](S z) {
      return act == Gate::silu ? silu(z) : sigmoid(z);
    });
    if (order == GateOrder::before_norm) u = u.cwiseProduct(factor).eval();
    for (std::int64_t g = 0; g < groups; ++g)
      u.segment(g * size, size) =
          rms_normed<S>(u.segment(g * size, size), w.segment(g * size, size), eps);
    if (order == GateOrder::after_norm) u = u.cwiseProduct(factor).eval();
    mapped(at(out, t)) = u;
  }
}

}  // namespace lockstep::reference
