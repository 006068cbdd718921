// Mamba2's decode with a state that is written once per window of L tokens; a ring keeps the tokens
// in between. Equations and names: reference/recurrent/replay_state.hpp; rows and slots:
// reference/tensors/slots.hpp.
//
//   here       vLLM's replayssm, FlashInfer    shape, all in device memory
//   state      ssm_state                       [slots, H, P, N]
//   ring_x     x ring, x_cache                 [slots, H, L, P] bfloat16, L of 1 to 16
//   ring_B     B ring, B_cache                 [slots, G, L, N] bfloat16
//   ring_dt    dt ring, dt_cache               [slots, H, L] float32: after bias, softplus, limits
//   cursors    write_pos, prev_num_accepted    [N]: live entries of the row's ring
//   positions  num_computed_tokens             [N]: tokens of the row's request before this one
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

/// S is the type of states: float or Bf16. The matrices of a slot and head are dense, with rows of
/// a multiple of 16 bytes.
template <class S>
struct SelectiveStateRing {
  TensorView<S, 4> state;   // [slots, H, P, N]
  TensorView<Bf16, 4> x;    // [slots, H, L, P]
  TensorView<Bf16, 4> B;    // [slots, G, L, N]
  TensorView<float, 3> dt;  // [slots, H, L]
};

template <class S>
struct SelectiveStateRingUpdate {
  SelectiveStateRing<S> ring;
  TensorView<const Bf16, 3> x;  // [N, H, P]
  MixedView<2> dt;              // [N, H]
  MixedView<1> A;               // [H] float32
  TensorView<const Bf16, 3> B;  // [N, G, N]
  TensorView<const Bf16, 3> C;  // [N, G, N]
  TensorView<Bf16, 3> out;      // [N, H, P]
  IndexView cursors;            // [N]
  IndexView positions;          // [N]
  MixedView<1> D{};             // [H]
  MixedView<3> z{};             // [N, H, P]
  MixedView<1> dt_bias{};       // [H]
  bool dt_softplus = false;
  std::optional<float> dt_min{};
  std::optional<float> dt_max{};
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
void selective_state_ring_update(const SelectiveStateRingUpdate<S>& in, cudaStream_t stream);

/// Stores the state after the first counts[row] entries of the ring to slot targets[row]. Ring and
/// cursor stay as they are. If the target is the row's own slot, the entries are part of the state
/// from then on, and the caller must set the cursor to 0.
template <class S>
void selective_state_ring_flush(const SelectiveStateRing<S>& ring, const MixedView<1>& A,
                                const IndexView& counts, const IndexView& targets,
                                const StateSlots& slots, cudaStream_t stream);

}  // namespace lockstep::kernels
