// The operations written again with LibTorch's eager tensor operations: all heads at once, one
// request, no slots. Every step is in the dtype of the tensors. Only _torch_test.cpp files include
// this.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "properties/support/recurrences.hpp"
#include "properties/support/torch_bridge.hpp"

namespace lockstep::testing_support {

struct EagerResult {
  at::Tensor out;
  at::Tensor state;
};

/// x [T, D], weight [D, W], bias [D], state [D, W - 1]: out [T, D] after a SiLU, and the new
/// state.
inline EagerResult eager_conv1d(const at::Tensor& x, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, const at::Tensor& state) {
  const at::Tensor joined = at::cat({state, x.t()}, 1);  // [D, W - 1 + T]
  const std::int64_t one = 1, zero = 0;
  const at::Tensor y =
      at::conv1d(joined.unsqueeze(0), weight.unsqueeze(1), bias, at::IntArrayRef(one),
                 at::IntArrayRef(zero), at::IntArrayRef(one), weight.size(0));
  return {at::silu(y[0].t()), joined.slice(1, joined.size(1) - state.size(1))};
}

/// x, z [T, H, P], dt' [T, H], A, D [H], B, C [T, G, N], state [H, P, N].
struct EagerMamba2 {
  at::Tensor x, dt, A, B, C, D;
  std::optional<at::Tensor> z;
  at::Tensor state;
};

inline EagerResult eager_mamba2(const EagerMamba2& in) {
  const std::int64_t T = in.x.size(0), H = in.x.size(1), per_group = H / in.B.size(1);
  at::Tensor state = in.state;
  std::vector<at::Tensor> outputs;
  for (std::int64_t t = 0; t < T; ++t) {
    const at::Tensor b = in.B[t].repeat_interleave(per_group, 0);  // [H, N]
    const at::Tensor c = in.C[t].repeat_interleave(per_group, 0);
    const at::Tensor decay = at::exp(in.A * in.dt[t]).view({H, 1, 1});
    state = state * decay + in.x[t].unsqueeze(2) * (in.dt[t].unsqueeze(1) * b).unsqueeze(1);
    const at::Tensor y = at::bmm(state, c.unsqueeze(2)).squeeze(2) + in.D.unsqueeze(1) * in.x[t];
    outputs.push_back(in.z ? y * at::silu((*in.z)[t]) : y);
  }
  return {at::stack(outputs), state};
}

template <class S>
EagerResult eager(const Mamba2Run<S>& run, at::ScalarType dtype = torch_type<S>()) {
  const auto in = run.inputs(0, 0);
  const auto as = [&](const auto& array) { return tensor_of(array).to(dtype); };
  at::Tensor dt = at::softplus(as(run.dt) + as(run.dt_bias), 1, 20);
  if (in.dt_min) dt = at::clamp_min(dt, *in.dt_min);
  if (in.dt_max) dt = at::clamp_max(dt, *in.dt_max);
  return eager_mamba2(
      {as(run.x), dt, as(run.A), as(run.B), as(run.C), as(run.D), as(run.z), as(run.states())[0]});
}

/// q, k [T, H, K], normalised here; v [T, HV, V], g, beta [T, HV], state [HV, V, K].
struct EagerGatedDelta {
  at::Tensor q, k, v, g, beta, state;
};

/// S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, ungrouped.
inline EagerResult eager_gated_delta_rule(const EagerGatedDelta& in) {
  const std::int64_t T = in.q.size(0), K = in.q.size(2), HV = in.v.size(1);
  const auto unit = [&](const at::Tensor& t) {
    return (t / at::sqrt((t * t).sum(-1, true) + 1e-6)).repeat_interleave(HV / in.q.size(1), 1);
  };
  const at::Tensor q = unit(in.q) / std::sqrt(static_cast<double>(K)), k = unit(in.k);
  const at::Tensor alpha = at::exp(in.g).view({T, HV, 1, 1}), beta = in.beta.view({T, HV, 1, 1});
  const at::Tensor I = at::eye(K, k.options());
  at::Tensor state = in.state;
  std::vector<at::Tensor> outputs;
  for (std::int64_t t = 0; t < T; ++t) {
    const at::Tensor key = k[t].unsqueeze(1);  // [HV, 1, K]
    const at::Tensor kk = at::bmm(key.transpose(1, 2), key);
    const at::Tensor vk = at::bmm(in.v[t].unsqueeze(2), key);
    state = alpha[t] * at::bmm(state, I - beta[t] * kk) + beta[t] * vk;
    outputs.push_back(at::bmm(state, q[t].unsqueeze(2)).squeeze(2));
  }
  return {at::stack(outputs), state};
}

template <class S>
EagerResult eager(const GatedDeltaRun<S>& run, at::ScalarType dtype = torch_type<S>()) {
  const auto as = [&](const auto& array) { return tensor_of(array).to(dtype); };
  return eager_gated_delta_rule(
      {as(run.q), as(run.k), as(run.v), as(run.g), as(run.beta), as(run.states())[0]});
}

inline at::Tensor eager_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * at::rsqrt(x.pow(2).mean(-1, true) + eps) * weight;
}

}  // namespace lockstep::testing_support
