// The gated delta rule's decode with a state that is written once per window of L tokens; a ring
// keeps the tokens in between. Equations and names: reference/recurrent/replay_state.hpp; rows and
// slots: reference/tensors/slots.hpp.
//
//   here          SGLang's replayssm      shape, all in device memory
//   state         temporal                [slots, HV, V, K]
//   ring_k        k                       [slots, H, L, K] bfloat16, not normalised, L of 1 to 16
//   ring_k_scale                          [slots, H, L] float32: factor that L2-normalises k, or 1
//   ring_u        d = beta (v - S k)      [slots, HV, L, V]: float32 beside float32 states, so that
//                                         a flush is exact to float32; else bfloat16
//   ring_g        g                       [slots, HV, L] float32, log decay
//   cursors       replayssm_write_pos     [N]: live entries of the row's ring
//   positions                             [N]: tokens of the row's request before this one
//
// A step whose token is the request's L-th, 2 L-th, ... writes the state and empties the ring;
// every other step writes a ring entry. After a step a row's cursor is min(cursor + 1, (position +
// 1) % L), which the caller computes once for all layers.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// S is the type of states and of u: float or Bf16. The matrices of a slot and head are dense, with
/// rows of a multiple of 16 bytes.
template <class S>
struct GatedDeltaRuleRing {
  TensorView<S, 4> state;        // [slots, HV, V, K]
  TensorView<Bf16, 4> k;         // [slots, H, L, K]
  TensorView<float, 3> k_scale;  // [slots, H, L]
  TensorView<S, 4> u;            // [slots, HV, L, V]
  TensorView<float, 3> g;        // [slots, HV, L]
};

template <class S>
struct GatedDeltaRuleRingUpdate {
  GatedDeltaRuleRing<S> ring;
  TensorView<const Bf16, 3> q;   // [N, H, K]
  TensorView<const Bf16, 3> k;   // [N, H, K]
  TensorView<const Bf16, 3> v;   // [N, HV, V]
  MixedView<2> g;                // [N, HV], log decay; the raw a where A_log is given
  MixedView<2> beta;             // [N, HV]; the raw b where A_log is given
  TensorView<Bf16, 3> out;       // [N, HV, V]
  IndexView cursors;             // [N]
  IndexView positions;           // [N]
  MixedView<1> A_log{};          // [HV]: gates are computed from the raw a and b
  MixedView<1> dt_bias{};        // [HV]
  std::optional<float> scale{};  ///< of q; K^-0.5 by default
  bool use_qk_l2norm = false;
  StateSlots slots{};  ///< a list, or nothing
  /// Allows this launch to read state, ring, cursors, positions and indices before the previous
  /// launch has ended. That is safe if the previous launch is not an overlapping one, or if it
  /// writes none of these and lets its successor start only after its own wait for earlier
  /// launches.
  bool early_state = false;
};

/// Decodes one token per row. Rows without a slot, and rows whose cursor no sequence of steps leads
/// to, give output 0 and write nothing else. Throws ArgumentError.
template <class S>
void gated_delta_rule_ring_update(const GatedDeltaRuleRingUpdate<S>& in, cudaStream_t stream);

/// Stores the state after the first counts[row] entries of the ring to slot targets[row]. Ring and
/// cursor stay as they are. If the target is the row's own slot, the entries are part of the state
/// from then on, and the caller must set the cursor to 0.
template <class S>
void gated_delta_rule_ring_flush(const GatedDeltaRuleRing<S>& ring, const IndexView& counts,
                                 const IndexView& targets, const StateSlots& slots,
                                 cudaStream_t stream);

}  // namespace lockstep::kernels
