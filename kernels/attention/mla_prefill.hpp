// Multi-head latent attention of prompts, over decompressed keys and values: packed rows, 192
// columns of queries and keys, 128 of values. Equations: reference/attention/softmax_attention.hpp.
//
//   here              FlashAttention     shape, all in device memory
//   q                 q                  [T, H, 192]   [q_nope; q_pe]
//   k, v              k, v               [L, H, 192], [L, H, 128]
//   query_start_loc   cu_seqlens_q       [N + 1]
//   key_start_loc     cu_seqlens_k       [N + 1]
//   out, lse          out, softmax_lse   [T, H, 128], [H, T]   natural logarithm
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// Number of lanes. A lane is a set of counters in device memory; calls that may run at the same
/// time must use different lanes.
constexpr int kMlaPrefillLanes = 128;

/// T is the type of queries, keys, values and outputs.
template <class T>
struct MlaPrefill {
  TensorView<const T, 3> q;   // [T, H, 192]
  TensorView<const T, 3> k;   // [L, H, 192]
  TensorView<const T, 3> v;   // [L, H, 128]
  IndexView query_start_loc;  // [N + 1]
  IndexView key_start_loc;    // [N + 1]
  TensorView<T, 3> out;       // [T, H, 128]
  TensorView<float, 2> lse;   // [H, T]
  float softmax_scale = 1;
  bool causal = true;  ///< bottom-right: query i of Lq sees keys j <= Lk - Lq + i
  int lane = 0;
};

/// A query that sees no key gives output 0 and lse = -infinity, which merge_attention takes as
/// empty. Attention of new tokens over a cached prefix is therefore the merge of this call over the
/// new tokens with this call over chunks of the prefix, with causal = false. The rows of the batch
/// are read on the device; outputs of tokens that belong to no row are left as they are. Throws
/// ArgumentError.
template <class T>
void mla_prefill(const MlaPrefill<T>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
