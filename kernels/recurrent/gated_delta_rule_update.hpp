// Gated delta rule for decoding: one token per row, or the tokens of a verification. Equations and
// names: reference/recurrent/gated_delta_rule.hpp; slots: reference/tensors/slots.hpp.
//
//   here              vLLM, FLA                 shape, all in device memory
//   q, k              q, k                      [T, H, K]
//   v, out            v, o                      [T, HV, V]
//   g, beta           g, beta; or raw: a, b     [T, HV]
//   state             ssm_state                 [slots, HV, V, K], any strides
//   snapshots         intermediate_states       [T, HV, V, K]
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// The tokens of one step; T is the type of activations.
template <class T>
struct GatedDeltaTokens {
  TensorView<const T, 3> q;                    // [T, H, K]
  TensorView<const T, 3> k;                    // [T, H, K]
  TensorView<const T, 3> v;                    // [T, HV, V]
  MixedView<2> g;                              // [T, HV], log decay; the raw a where A_log is given
  MixedView<2> beta;                           // [T, HV]; the raw b where A_log is given
  std::optional<IndexView> query_start_loc{};  // [N + 1]
};

template <class T, class S>
struct GatedDeltaRuleUpdate {
  GatedDeltaTokens<T> tokens;
  TensorView<S, 4> state;  // [slots, HV, V, K]
  TensorView<T, 3> out;    // [T, HV, V]
  StateSlots slots{};
  MixedView<1> A_log{};  ///< [HV]: gates are computed from the raw a and b, with dt_bias [HV]
  MixedView<1> dt_bias{};
  std::optional<float> scale{};  ///< of q; K^-0.5 by default
  bool use_qk_l2norm = false;
  /// With snapshots [T, HV, V, K], parents [T] or read_only, this step's tokens do not change the
  /// state; only a fold does. With read_only or a fold, and T of 16 bits, the tokens may run in
  /// chunks: outputs then equal a decode's up to rounding.
  std::optional<TensorView<S, 4>> snapshots{};
  std::optional<IndexView> parents{};
  bool read_only = false;
  /// Tokens of an earlier verification. The first fold_accepted[row] of each row are folded into
  /// the state before this step's tokens run, which commits them without a launch of its own.
  std::optional<GatedDeltaTokens<T>> fold{};
  std::optional<IndexView> fold_accepted{};  // [N]
};

/// Decodes or verifies. Outputs of rows without a slot and of tokens after the last row are 0. The
/// running state is float32 within a launch and is rounded once per store. Throws ArgumentError.
template <class T, class S>
void gated_delta_rule_update(const GatedDeltaRuleUpdate<T, S>& in, cudaStream_t stream);

/// Commits a read-only verification: the first accepted[row] tokens of each row, or the nodes
/// nodes[row, 0 ... accepted - 1], rounding the state after each as single-token launches do. It
/// ignores tokens.q, out, snapshots and parents.
template <class T, class S>
void gated_delta_rule_replay(const GatedDeltaRuleUpdate<T, S>& in, const IndexView& accepted,
                             const std::optional<IndexTable>& nodes, cudaStream_t stream);

}  // namespace lockstep::kernels
