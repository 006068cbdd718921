// A whole Mamba2 layer. Dao, Gu 2024, "Transformers are SSMs", figure 6 (left), as implemented for
// Nemotron-H and in TensorRT-Edge-LLM.
//
//   in_proj -> [gate | conv channels | dt] -> conv, SiLU -> [x | B | C] -> update -> gated norm ->
//   out_proj
//
//   here         field                 shape
//   hidden       hidden_states         [T, hidden]
//   in_proj      in_proj.weight        [d_inner + conv_dim + H, hidden], d_inner = H P
//   conv_weight  conv1d.weight         [conv_dim, W], conv_dim = d_inner + 2 G N
//   norm_weight  norm.weight           [d_inner]
//   out_proj     out_proj.weight       [hidden, d_inner]
//   conv_state                         [slots, conv_dim, C]
//   state        ssm_state             [slots, H, P, N]
#pragma once

#include "reference/layers/rms_norm.hpp"
#include "reference/recurrent/causal_conv1d.hpp"
#include "reference/recurrent/mamba2.hpp"
#include "reference/tensors/times.hpp"

namespace lockstep::reference {

template <class S>
struct MambaMixer {
  std::int64_t H, P, N, G;
  TensorView<const S, 2> in_proj;
  TensorView<const S, 2> conv_weight;
  std::optional<TensorView<const S, 1>> conv_bias{};
  TensorView<const S, 1> A_log;    // [H]; A = -exp(A_log)
  TensorView<const S, 1> D;        // [H]
  TensorView<const S, 1> dt_bias;  // [H]
  TensorView<const S, 1> norm_weight;
  TensorView<const S, 2> out_proj;
  S eps = S(1e-5);
};

/// The mode of a call: a prefill by chunks of a given size, or an update of running requests.
struct LayerRun {
  bool update = false;
  std::int64_t chunk_size = 128;
  /// The prefill scans token by token. A text then has the same bits however it is cut into
  /// prefills and updates, which chunks do not give, not even chunks of one token.
  bool scan = false;
};

/// The states after each token of an update, which then only reads the layer's own states: see
/// causal_conv1d_update() and run_update().
template <class S>
struct LayerSnapshots {
  std::optional<IndexView> parents{};
  TensorView<S, 3> conv;   // [T, conv_dim, C]
  TensorView<S, 4> state;  // [T, ...], as the states
};
template <class S>
using OptionalSnapshots = std::optional<LayerSnapshots<S>>;

/// x weight^T for x [T, in] and weight [out, in].
template <class S>
Array<S, 2> projected(const TensorView<const S, 2>& x, const TensorView<const S, 2>& weight) {
  Array<S, 2> y(Shape<2>{x.extent(0), weight.extent(0)});
  for (std::int64_t t = 0; t < x.extent(0); ++t)
    mapped(at(y.view(), t)) = times<S>(weight, as_vector(at(x, t)));
  return y;
}

/// Channels [first, first + heads * width) of y [T, channels] as [T, heads, width].
template <class S>
TensorView<const S, 3> heads_of(const Array<S, 2>& y, std::int64_t first, std::int64_t heads,
                                std::int64_t width) {
  return make_view(y.data() + first, Shape<3>{y.extent(0), heads, width},
                   Shape<3>{y.extent(1), width, 1});
}

/// The layer's convolution followed by a SiLU: channels [T, D] by weight [D, W].
template <class S>
Array<S, 2> convolved(const TensorView<const S, 2>& channels, const TensorView<const S, 2>& weight,
                      const std::optional<TensorView<const S, 1>>& bias, const Rows& rows,
                      const LayerRun& run, const TensorView<S, 3>& conv_state,
                      const OptionalSnapshots<S>& snapshots = {}) {
  Array<S, 2> out(shape_of(channels));
  const CausalConv1dInputs<S> conv{.x = channels,
                                   .weight = weight,
                                   .bias = bias,
                                   .query_start_loc = rows.query_start_loc,
                                   .slots = rows.slots,
                                   .has_initial_state = rows.has_initial_state,
                                   .activation = Activation::silu,
                                   .storage = rows.storage};
  if (snapshots)
    causal_conv1d_update<S>(conv, conv_state, out, snapshots->parents, snapshots->conv);
  else if (run.update)
    causal_conv1d_update<S>(conv, conv_state, out);
  else
    causal_conv1d<S>(conv, conv_state, out);
  return out;
}

template <class S>
void mamba_mixer(const TensorView<const S, 2>& hidden, const MambaMixer<S>& w, const Rows& rows,
                 const LayerRun& run, const TensorView<S, 3>& conv_state,
                 const TensorView<S, 4>& state, TensorView<S, 2> out,
                 const OptionalSnapshots<S>& snapshots = {}) {
  require(!snapshots || run.update, "only an update leaves states after each token");
  const std::int64_t T = hidden.extent(0), d_inner = w.H * w.P;
  const std::int64_t conv_dim = d_inner + 2 * w.G * w.N;
  require(w.in_proj.extent(0) == d_inner + conv_dim + w.H, "in_proj gives gate, channels and dt");
  const Array<S, 2> in = projected(hidden, w.in_proj);
  const auto columns = [&](std::int64_t first, std::int64_t count) {
    return make_view(in.data() + first, Shape<2>{T, count}, Shape<2>{in.extent(1), 1});
  };

  const Array<S, 2> mixed = convolved<S>(columns(d_inner, conv_dim), w.conv_weight, w.conv_bias,
                                         rows, run, conv_state, snapshots);
  const Vector<S> decay_rates = -as_vector(w.A_log).array().exp();
  const auto A = make_view(decay_rates.data(), Shape<1>{w.H});
  const Mamba2Inputs<S> ssm{.x = heads_of(mixed, 0, w.H, w.P),
                            .dt = repeat(columns(d_inner + conv_dim, w.H), w.P),
                            .A = repeat(repeat(A, w.P), w.N),
                            .B = heads_of(mixed, d_inner, w.G, w.N),
                            .C = heads_of(mixed, d_inner + w.G * w.N, w.G, w.N),
                            .D = repeat(w.D, w.P),
                            .dt_bias = repeat(w.dt_bias, w.P),
                            .dt_softplus = true,
                            .rows = rows};
  Array<S, 3> y(Shape<3>{T, w.H, w.P});
  if (snapshots)
    selective_state_update<S>(ssm, state, y, snapshots->parents, snapshots->state);
  else if (run.update)
    selective_state_update<S>(ssm, state, y);
  else if (run.scan)
    selective_scan<S>(ssm, state, y);
  else
    ssd_prefill<S>(ssm, run.chunk_size, state, y);

  Array<S, 2> normed(Shape<2>{T, d_inner});
  gated_rms_norm<S>(make_view<const S>(y.data(), Shape<2>{T, d_inner}), columns(0, d_inner),
                    w.norm_weight, w.eps, GateOrder::before_norm, w.G, normed);
  mapped(out) = mapped(projected<S>(normed, w.out_proj).view());
}

}  // namespace lockstep::reference
