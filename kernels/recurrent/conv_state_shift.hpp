// Commits a verification in the conv states of a pool: the history of the accepted tokens moves to
// the front columns, so that the next step needs no accepted counts. vLLM's postprocessing makes
// the same copy by offset.
//
//   here          vLLM                      shape, all in device memory
//   states        conv_state                [layers, slots, D, C], C >= W - 1, any strides
//   slots         state_indices             [N]
//   num_accepted  num_accepted_tokens       [N]
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// Elements of 2 or 4 bytes; strides in elements.
struct ConvStatePool {
  void* data = nullptr;
  int element_bytes = 2;
  std::int64_t layers = 0, slots = 0, channels = 0, columns = 0;
  std::int64_t layer_stride = 0, slot_stride = 0, channel_stride = 0, column_stride = 0;
};

/// For every layer, channel and row n, columns 0 ... width - 2 of slot slots[n] get the contents of
/// columns num_accepted[n] - 1 ... num_accepted[n] + width - 3; other columns keep their bytes. A
/// row whose slot is out of range, or whose count is below 1 or reaches beyond the columns, is left
/// alone. No slot may be named twice. All layers run in one launch. `width` is W, 2 ... 8. Throws
/// ArgumentError.
void conv_state_shift(const ConvStatePool& states, const IndexView& slots,
                      const IndexView& num_accepted, int width, cudaStream_t stream);

}  // namespace lockstep::kernels
