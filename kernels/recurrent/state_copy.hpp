// Moves of whole states within pools: copies between slots of one pool (copy-on-write, fork,
// capture, restore), zeroing, and the commit of a verification's snapshots. A state is a row of
// bytes of any type.
//
//   here          vLLM, SGLang                    shape, all in device memory
//   pool          mamba pool, ssm_state           [layers, slots, row]
//   source        src block ids                   [moves]
//   target        dst block ids                   [moves]
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// A pool [layers, slots, row_bytes]. A row is contiguous; the address, row_bytes and the strides
/// are multiples of 16 bytes.
struct StatePoolBytes {
  void* data = nullptr;
  std::int64_t layers = 0, slots = 0;
  std::int64_t row_bytes = 0;
  std::int64_t layer_stride_bytes = 0, slot_stride_bytes = 0;
};

/// Copies row source[i] to row target[i] in every layer, for all i, in one launch. All sources are
/// read before any target is written, so a slot may be both. A move from or to a number that is no
/// slot is skipped. No slot may be named twice among the targets. Needs Hopper. Throws
/// ArgumentError.
void state_copy(const StatePoolBytes& pool, const IndexView& source, const IndexView& target,
                cudaStream_t stream);

/// Sets the rows of the slots to zero bytes, in every layer.
void state_zero(const StatePoolBytes& pool, const IndexView& slots, cudaStream_t stream);

/// Row slots[b] of the pool (one layer) becomes row [b, num_accepted[b] - 1] of `intermediate`,
/// whose "layers" are batch rows and whose "slots" are tokens. A count <= 0 or beyond the tokens
/// leaves the slot as it is; a number that is no slot is skipped.
void state_scatter_accepted(const StatePoolBytes& pool, const StatePoolBytes& intermediate,
                            const IndexView& slots, const IndexView& num_accepted,
                            cudaStream_t stream);

}  // namespace lockstep::kernels
