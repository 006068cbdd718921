// Moves of whole states within pools: copy-on-write, fork, capture and restore between slots of one
// pool, zeroing, and the commit of a verification's snapshots. A state is a row of bytes; what it
// holds does not matter here.
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

/// Rows of bytes in `slots` slots of each layer; a row is contiguous. Addresses, rows and strides
/// are of whole 16 bytes.
struct StatePoolBytes {
  void* data = nullptr;
  std::int64_t layers = 0, slots = 0;
  std::int64_t row_bytes = 0;
  std::int64_t layer_stride_bytes = 0, slot_stride_bytes = 0;
};

/// Row target[i] of every layer becomes what row source[i] was before the call, for all i, in one
/// launch: moves may overlap. A move from or to a number that is no slot is left out. No slot is
/// named twice among the targets. Needs Hopper. Throws ArgumentError.
void state_copy(const StatePoolBytes& pool, const IndexView& source, const IndexView& target,
                cudaStream_t stream);

/// Rows of the slots become zero bytes, in every layer.
void state_zero(const StatePoolBytes& pool, const IndexView& slots, cudaStream_t stream);

/// Row slots[b] of the pool (one layer) becomes row [b, num_accepted[b] - 1] of `intermediate`,
/// whose layers are batch rows and whose slots are tokens. Counts <= 0 leave the slot as it is;
/// counts beyond T and numbers that are no slot too.
void state_scatter_accepted(const StatePoolBytes& pool, const StatePoolBytes& intermediate,
                            const IndexView& slots, const IndexView& num_accepted,
                            cudaStream_t stream);

}  // namespace lockstep::kernels
