// Mamba2's prefill. Equations and names: reference/recurrent/mamba2.hpp; rows and slots:
// reference/tensors/slots.hpp.
//
//   here      mamba-ssm, vLLM      shape, all in device memory
//   x, z, out x, z, out            [T, H, P]
//   dt        dt                   [T, H]
//   A         A                    [H] float32
//   B, C      B, C                 [T, G, N]
//   D         D                    [H, P], or [H] expanded with stride 0
//   dt_bias   dt_bias              [H]
//   state     ssm_states           [slots, H, P, N]
//   boundary  (none)               [sum of floor(len / every), H, P, N]
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "kernels/recurrent/prefill_batch.hpp"

namespace lockstep::kernels {

/// The kernel of a prefill.
enum class PrefillKernel {
  fastest,     ///< the one that is expected to be fastest
  sequential,  ///< token by token, for any shape and strides
  chunked,     ///< on tensor cores; an ArgumentError names the argument that it cannot take
  segments     ///< chunked, with the same bits: one launch computes the states before segments of
               ///< each row, then all segments run side by side; for few heads
};

/// T is the type of activations, S that of states.
template <class T, class S>
struct SsdPrefill {
  TensorView<const T, 3> x;                   // [T, H, P]
  MixedView<2> dt;                            // [T, H]
  MixedView<1> A;                             // [H] float32
  TensorView<const T, 3> B;                   // [T, G, N]
  TensorView<const T, 3> C;                   // [T, G, N]
  TensorView<T, 3> out;                       // [T, H, P]
  std::optional<TensorView<S, 4>> state{};    // [slots, H, P, N]
  MixedView<2> D{};                           // [H, P]
  std::optional<TensorView<const T, 3>> z{};  // [T, H, P]
  MixedView<1> dt_bias{};                     // [H]
  bool dt_softplus = false;
  std::optional<float> dt_min{};
  std::optional<float> dt_max{};
  PrefillBatch batch{};
  /// Receives the states after every boundary_every tokens, counted from each row's start.
  std::optional<TensorView<S, 4>> boundary_states{};
  std::int64_t boundary_every = 0;
  PrefillKernel kernel = PrefillKernel::fastest;
  /// Scratch memory: prefill_workspace() bytes at a multiple of 16, not shared by calls that run at
  /// the same time; its contents do not matter. Without it `fastest` leaves rows whole.
  std::optional<TensorView<unsigned char, 1>> workspace{};
};

/// Bytes of workspace that the call needs.
template <class T, class S>
std::int64_t prefill_workspace(const SsdPrefill<T, S>& in);

/// Computes the outputs of all tokens. The state of a row's slot becomes the one after its last
/// token. Outputs of rows without a slot and of padding tokens are 0. The running state is float32
/// and is rounded once per store. A prefill that is cut at a multiple of 64 tokens, with a float32
/// state in between, gives the same bits as the uncut one by the same kernel. Throws ArgumentError.
template <class T, class S>
void ssd_prefill(const SsdPrefill<T, S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
