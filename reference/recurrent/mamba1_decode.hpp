// One token per row through the selective scan of a Mamba1 layer. Gu, Dao 2023, "Mamba: Linear-Time
// Sequence Modeling with Selective State Spaces", eq. 2a and algorithm 2. The norms of dt, B and C:
// Lieber et al. 2024, "Jamba: A Hybrid Transformer-Mamba Language Model", section 6.4.
//
//   d = softplus(dt + dt_bias)      s = exp(A d) s + d B x      y = (C . s + D x) silu(z)
//
//   here     Jamba, vLLM                shape
//   x, z     hidden_states, gate        [T, D]
//   dt       discrete_time_step         [T, D], before dt_proj's bias is added
//   A        A                          [D, N]; A < 0
//   B, C     B, C                       [T, N]
//   skip     D                          [D]
//   dt_bias  dt_proj.bias               [D]
//   dt_low   time_step                  [T, R], the input of dt_proj
//   state    ssm_state                  [slots, D, N]
//
// With norm_eps, B, C and dt_low are RMS-normalised. A norm of dt_low divides it by one number per
// token, and dt_proj is linear: dt comes from dt_low as it is, by a dt_proj whose columns hold the
// norm's weight, and is divided here.
#pragma once

#include "reference/layers/rms_norm.hpp"
#include "reference/recurrent/mamba2.hpp"

namespace lockstep::reference {

template <class S>
struct Mamba1Decode {
  TensorView<const S, 2> x, dt;                     // [T, D]
  TensorView<const S, 2> A;                         // [D, N]
  TensorView<const S, 2> B, C;                      // [T, N]
  std::optional<TensorView<const S, 1>> skip{};     // [D]
  std::optional<TensorView<const S, 2>> z{};        // [T, D]
  std::optional<TensorView<const S, 1>> dt_bias{};  // [D]
  bool dt_softplus = false;
  std::optional<S> norm_eps{};                       ///< turns the norms on; needs dt_low
  std::optional<TensorView<const S, 2>> dt_low{};    // [T, R]
  std::optional<TensorView<const S, 1>> b_weight{};  // [N], of B's norm; without it ones
  std::optional<TensorView<const S, 1>> c_weight{};  // [N], of C's
  StateSlots slots{};
  StoragePoints storage{};
};

namespace mamba1_detail {

/// 1 / sqrt(mean(v^2) + eps).
template <class S>
S reciprocal_rms(const Vector<S>& v, S eps) {
  return S{1} / std::sqrt(v.squaredNorm() / static_cast<S>(v.size()) + eps);
}

/// A copy of [T, n] whose row t is scaled(t, row t).
template <class S, class Scaled>
Array<S, 2> each_row(const TensorView<const S, 2>& rows, Scaled scaled) {
  Array<S, 2> out(shape_of(rows));
  for (std::int64_t t = 0; t < rows.extent(0); ++t)
    mapped(at(out.view(), t)) = scaled(t, as_vector(at(rows, t)));
  return out;
}

/// [a, b] as [a, 1, b]: a model without heads is one of a single head.
template <class S>
TensorView<const S, 3> one_head(const TensorView<const S, 2>& view) {
  return make_view(view.data_handle(), Shape<3>{view.extent(0), 1, view.extent(1)},
                   Shape<3>{view.stride(0), view.stride(0), view.stride(1)});
}

}  // namespace mamba1_detail

/// Advances the states in their slots. Outputs of rows without a slot are 0.
template <class S>
void mamba1_decode(const Mamba1Decode<S>& in, const TensorView<S, 3>& state, TensorView<S, 2> out) {
  using namespace mamba1_detail;
  const std::int64_t T = in.x.extent(0), D = in.x.extent(1), N = in.B.extent(1);
  require(shape_of(in.A) == (Shape<2>{D, N}), "A is [D, N]");
  require(shape_of(state) == (Shape<3>{state.extent(0), D, N}), "the state is [slots, D, N]");
  require(!in.norm_eps || in.dt_low, "the norm of dt is that of dt_low");
  const auto normed = [&](const TensorView<const S, 2>& v,
                          const std::optional<TensorView<const S, 1>>& weight) {
    return each_row<S>(v, [&](std::int64_t, const Vector<S>& row) -> Vector<S> {
      if (!in.norm_eps) return row;
      const Vector<S> ones = Vector<S>::Ones(N);
      return rms_normed<S>(row, weight ? Vector<S>(as_vector(*weight)) : ones, *in.norm_eps);
    });
  };
  const Array<S, 2> B = normed(in.B, in.b_weight), C = normed(in.C, in.c_weight);
  const Array<S, 2> dt = each_row<S>(in.dt, [&](std::int64_t t, const Vector<S>& row) -> Vector<S> {
    if (!in.norm_eps) return row;
    return row * reciprocal_rms<S>(as_vector(at(*in.dt_low, t)), *in.norm_eps);
  });
  const auto head = [](const TensorView<const S, 1>& view) {
    return make_view(view.data_handle(), Shape<2>{1, view.extent(0)},
                     Shape<2>{view.extent(0), view.stride(0)});
  };
  Mamba2Inputs<S> ssm{.x = one_head<S>(in.x),
                      .dt = one_head<S>(dt.view()),
                      .A = make_view(in.A.data_handle(), Shape<3>{1, D, N},
                                     Shape<3>{in.A.stride(0) * D, in.A.stride(0), in.A.stride(1)}),
                      .B = one_head<S>(B.view()),
                      .C = one_head<S>(C.view()),
                      .dt_softplus = in.dt_softplus,
                      .rows = {.tokens = T, .slots = in.slots, .storage = in.storage}};
  if (in.skip) ssm.D = head(*in.skip);
  if (in.dt_bias) ssm.dt_bias = head(*in.dt_bias);
  if (in.z) ssm.z = one_head<S>(*in.z);
  selective_state_update<S>(
      ssm,
      make_view(state.data_handle(), Shape<4>{state.extent(0), 1, D, N},
                Shape<4>{state.stride(0), state.stride(0), state.stride(1), state.stride(2)}),
      make_view(out.data_handle(), Shape<3>{T, 1, D},
                Shape<3>{out.stride(0), out.stride(0), out.stride(1)}));
}

}  // namespace lockstep::reference
