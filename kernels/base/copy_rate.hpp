// A copy within device memory that runs at the chip's rate. The driver's own does not: it leaves
// copies inside a graph to an engine of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lockstep::kernels {

/// `bytes` is a multiple of 16 KiB.
void copy_on_device(void* to, const void* from, std::int64_t bytes, cudaStream_t stream);

/// Reads `bytes` once and writes them 1 or 4 times, copy after copy: what a decode and a
/// verification of four tokens with snapshots do to states, and nothing else. As above.
void fan_out_on_device(void* to, const void* from, std::int64_t bytes, int writes,
                       cudaStream_t stream);

}  // namespace lockstep::kernels
