// Mamba2's state update for decoding: one token per row, or the tokens of a verification. Equations
// and names: reference/recurrent/mamba2.hpp; slots: reference/tensors/slots.hpp.
//
//   here      mamba-ssm, vLLM      shape, all in device memory
//   x, z, out x, z, out            [T, H, P]
//   dt        dt                   [T, H, P], or [T, H] expanded with stride 0
//   A         A                    [H, P, N] float32, or [H] expanded
//   B, C      B, C                 [T, G, N]
//   D         D                    [H, P], or [H] expanded
//   dt_bias   dt_bias              likewise
//   state     ssm_state            [slots, H, P, N], any strides
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// T is the type of activations, S that of states.
template <class T, class S>
struct SelectiveStateUpdate {
  TensorView<const T, 3> x;  // [T, H, P]
  MixedView<3> dt;           // [T, H, P]
  MixedView<3> A;            // [H, P, N] float32
  MixedView<3> B;            // [T, G, N] in T or float32 (slower: no kernel with 16-byte accesses)
  MixedView<3> C;            // [T, G, N] in the type of B
  TensorView<S, 4> state;    // [slots, H, P, N]
  TensorView<T, 3> out;      // [T, H, P]
  MixedView<2> D{};          // [H, P]
  MixedView<3> z{};          // [T, H, P]
  MixedView<2> dt_bias{};    // [H, P]
  bool dt_softplus = false;
  std::optional<float> dt_min{};
  std::optional<float> dt_max{};
  StateSlots slots{};
  std::optional<IndexView> query_start_loc{};  // [N + 1]
  /// Scales of states in int8 and e4m3, float32 [slots, H, P, ceil(N / scale_block)]: value =
  /// number
  /// * scale (reference/recurrent/scaled_state.hpp). Without scale_block a row has one scale. With
  /// rand_seed numbers are rounded stochastically, by Philox stream rand_stream, which the caller
  /// changes for every launch. Such states have no snapshots and no replay.
  std::optional<TensorView<float, 4>> state_scale{};
  std::optional<std::int64_t> scale_block{};  ///< numbers of a row that share a scale
  std::optional<std::uint64_t> rand_seed{};
  std::uint64_t rand_stream = 0;
  /// With snapshots [T, H, P, N], parents [T] or read_only, the state is only read.
  std::optional<TensorView<S, 4>> snapshots{};
  std::optional<IndexView> parents{};
  bool read_only = false;
  /// Receive exp(A d_t) and d_t, float32 [T, H], which a replay needs beside x and B. They require
  /// one A, dt and dt_bias per head.
  std::optional<TensorView<float, 2>> stash_decay{};
  std::optional<TensorView<float, 2>> stash_dt{};
};

/// Decodes or verifies. Outputs of rows without a slot and of tokens after the last row are 0. The
/// running state is float32 within a launch and is rounded once per store. Throws ArgumentError.
template <class T, class S>
void selective_state_update(const SelectiveStateUpdate<T, S>& in, cudaStream_t stream);

/// The inputs of a replay, kept from a verification: see SelectiveStateUpdate's stash.
template <class T>
struct SelectiveStateStash {
  TensorView<const float, 2> decay;            // [T, H]
  TensorView<const float, 2> dt;               // [T, H]
  TensorView<const T, 3> x;                    // [T, H, P]
  MixedView<3> B;                              // [T, G, N], T or float32
  std::optional<IndexView> query_start_loc{};  // [N + 1]
};

/// Commits a read-only verification: the first accepted[row] tokens of each row, or the nodes
/// nodes[row, 0 ... accepted - 1], rounding the state after each as single-token launches do.
template <class T, class S>
void selective_state_replay(const SelectiveStateStash<T>& stash, const TensorView<S, 4>& state,
                            const StateSlots& slots, const IndexView& accepted,
                            const std::optional<IndexTable>& nodes, cudaStream_t stream);

}  // namespace lockstep::kernels
