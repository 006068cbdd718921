// Mamba2's decode with a state that is written once in a window of tokens. Equations and names:
// reference/recurrent/replay_state.hpp; rows and slots: reference/tensors/slots.hpp.
//
//   here       vLLM's replayssm, FlashInfer    shape, all in device memory
//   state      ssm_state                       [slots, H, P, N]
//   ring_x     x ring, x_cache                 [slots, H, L, P] bfloat16, L of 1 to 16
//   ring_B     B ring, B_cache                 [slots, G, L, N] bfloat16
//   ring_dt    dt ring, dt_cache               [slots, H, L] float32: after bias, softplus, limits
//   cursors    write_pos, prev_num_accepted    [N]: live entries of the row's ring
//   positions  num_computed_tokens             [N]: tokens of the row's request before this one
//
// A step whose token is the request's L-th, 2 L-th, ... writes the state and leaves the ring empty;
// every other one writes an entry. Afterwards a row's cursor is min(cursor + 1, (position + 1) %
// L), which the caller computes once for all layers.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// S is the type of states: float or Bf16. Matrices of a slot's head are dense, rows of 16-byte
/// pieces.
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
  /// State, ring, cursors, positions and indices may be read before the launch ahead of this one
  /// has ended. Safe if that launch writes none of them, and lets its successor start only after
  /// its own wait for what came before it; or if it is no overlapping launch.
  bool early_state = false;
};

/// One token of decode for each row. Rows without a slot, and rows whose cursor no sequence of
/// steps leads to, give 0 and write nothing. Throws ArgumentError.
template <class S>
void selective_state_ring_update(const SelectiveStateRingUpdate<S>& in, cudaStream_t stream);

/// The state after the first counts[row] entries of the ring goes to the slot targets[row]; ring
/// and cursor stay. Into the row's own slot it is a flush, and the ring is empty from then on.
template <class S>
void selective_state_ring_flush(const SelectiveStateRing<S>& ring, const MixedView<1>& A,
                                const IndexView& counts, const IndexView& targets,
                                const StateSlots& slots, cudaStream_t stream);

}  // namespace lockstep::kernels
