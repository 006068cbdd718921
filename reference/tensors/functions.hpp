// Functions that several layers share.
#pragma once

#include <cmath>

#include "reference/tensors/eigen.hpp"

namespace lockstep::reference {

template <class S>
S sigmoid(S x) {
  return S{1} / (S{1} + std::exp(-x));
}

template <class S>
S silu(S x) {
  return x / (S{1} + std::exp(-x));
}

/// log(1 + e^x); x itself for x > 20.
template <class S>
S softplus(S x) {
  return x <= S{20} ? std::log1p(std::exp(x)) : x;
}

/// E_ij = exp(sum_{j < l <= i} g_l) for j <= i, else 0: the decay between two tokens of a chunk.
/// Each segment is summed by itself, because differences of cumulative sums lose digits after a
/// strongly decaying token. The mask comes before the exponential, which would overflow in the
/// upper triangle.
template <class S>
Matrix<S> segment_decays(const Vector<S>& g) {
  Matrix<S> E = Matrix<S>::Zero(g.size(), g.size());
  for (std::int64_t j = 0; j < g.size(); ++j) {
    S sum = 0;
    E(j, j) = 1;
    for (std::int64_t i = j + 1; i < g.size(); ++i) E(i, j) = std::exp(sum += g(i));
  }
  return E;
}

/// exp(sum_{l <= i} g_l): the decay since the chunk's start.
template <class S>
Vector<S> decays_from_start(const Vector<S>& g) {
  Vector<S> decays(g.size());
  S sum = 0;
  for (std::int64_t i = 0; i < g.size(); ++i) decays(i) = std::exp(sum += g(i));
  return decays;
}

}  // namespace lockstep::reference
