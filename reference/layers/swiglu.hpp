// The gated feed-forward unit. Shazeer 2020, "GLU Variants Improve Transformer", eq. 6.
//
//   swiglu(x) = W_down (silu(W_gate x) * (W_up x))
//
//   here        field                       shape
//   x           hidden_states               [T, D]
//   gate, up    gate_proj, up_proj          [F, D]
//   down        down_proj                   [D, F]
#pragma once

#include "reference/tensors/functions.hpp"

namespace lockstep::reference {

/// The part between the products: silu(gate) up, for gate and up [T, F].
template <class S>
void swiglu_gate(const TensorView<const S, 2>& gate, const TensorView<const S, 2>& up,
                 TensorView<S, 2> out) {
  mapped(out) = mapped(gate).unaryExpr([](S u) { return silu(u); }).cwiseProduct(mapped(up));
}

template <class S>
void swiglu(const TensorView<const S, 2>& x, const TensorView<const S, 2>& gate,
            const TensorView<const S, 2>& up, const TensorView<const S, 2>& down,
            TensorView<S, 2> out) {
  for (std::int64_t t = 0; t < x.extent(0); ++t) {
    const Vector<S> in = as_vector(at(x, t));
    const Vector<S> gated = (as_matrix(gate) * in).unaryExpr([](S u) { return silu(u); });
    const Vector<S> raised = as_matrix(up) * in;
    mapped(at(out, t)) = as_matrix(down) * gated.cwiseProduct(raised);
  }
}

}  // namespace lockstep::reference
