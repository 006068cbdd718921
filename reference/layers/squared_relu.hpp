// The feed-forward unit of Primer and Nemotron-H. So et al. 2021, "Primer: Searching for Efficient
// Transformers for Language Modeling", section 4: no gate, and the square of a ReLU.
//
//   squared_relu_mlp(x) = W_down max(W_up x, 0)^2
//
//   here        field                       shape
//   x           hidden_states               [T, D]
//   up          up_proj                     [F, D]
//   down        down_proj                   [D, F]
#pragma once

#include "reference/tensors/functions.hpp"
#include "reference/tensors/times.hpp"

namespace lockstep::reference {

template <class S>
void squared_relu_mlp(const TensorView<const S, 2>& x, const TensorView<const S, 2>& up,
                      const TensorView<const S, 2>& down, TensorView<S, 2> out) {
  for (std::int64_t t = 0; t < x.extent(0); ++t) {
    const Vector<S> raised = times<S>(up, as_vector(at(x, t))).unaryExpr([](S u) {
      return u > 0 ? u * u : (u <= 0 ? S{0} : u);  // NaN stays NaN
    });
    mapped(at(out, t)) = times<S>(down, raised);
  }
}

}  // namespace lockstep::reference
