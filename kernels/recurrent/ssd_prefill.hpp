// Mamba2's prefill. Equations and names: reference/recurrent/mamba2.hpp; rows and slots:
// reference/tensors/slots.hpp.
//
//   here      mamba-ssm, vLLM      shape, all in device memory
//   x, z, out x, z, out            [T, H, P]
//   dt        dt                   [T, H]
//   A         A                    [H] float32
//   B, C      B, C                 [T, G, N]
//   D         D                    [H, P], or of [H] repeated with stride 0
//   dt_bias   dt_bias              [H]
//   state     ssm_states           [slots, H, P, N]
//   boundary  (none)               [sum of floor(len / every), H, P, N]
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "kernels/recurrent/prefill_batch.hpp"

namespace lockstep::kernels {

/// Which kernel computes a prefill: `sequential` token by token, for any shape and strides;
/// `chunked` on tensor cores, or an ArgumentError that says what it cannot take; `segments` the
/// same, with the same bits, where parts of a row run side by side after a launch that computes
/// states alone: for few heads.
enum class PrefillKernel { fastest, sequential, chunked, segments };

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
  /// The states after every boundary_every tokens, counted from each row's start.
  std::optional<TensorView<S, 4>> boundary_states{};
  std::int64_t boundary_every = 0;
  PrefillKernel kernel = PrefillKernel::fastest;
  /// What prefill_workspace() says, at a multiple of 16 bytes, for one call at a time; its contents
  /// do not matter. Without it `fastest` leaves rows whole.
  std::optional<TensorView<unsigned char, 1>> workspace{};
};

/// Bytes; 0 where none are needed.
template <class T, class S>
std::int64_t prefill_workspace(const SsdPrefill<T, S>& in);

/// Outputs of all tokens; the state of a row's slot becomes the one after its last token. Rows
/// without a slot give 0, tokens after a row too. The running state is float32 and rounded once
/// per store. A prefill that is cut at a multiple of 64 tokens, with a float32 state in between,
/// gives the same bits as the whole one by the same kernel. Throws ArgumentError.
template <class T, class S>
void ssd_prefill(const SsdPrefill<T, S>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
