// A copy within device memory that runs at the chip's rate, for benchmarks. cudaMemcpyAsync does
// not reach it: inside a CUDA graph the driver gives the copy to a copy engine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace lockstep::kernels {

/// Copies `bytes` bytes, a multiple of 16 KiB.
void copy_on_device(void* to, const void* from, std::int64_t bytes, cudaStream_t stream);

/// Reads `bytes` bytes (a multiple of 16 KiB) once and writes them `writes` times (1 or 4), copy
/// after copy: the memory traffic of states in a decode (1), and in a verification of four tokens
/// with snapshots (4).
void fan_out_on_device(void* to, const void* from, std::int64_t bytes, int writes,
                       cudaStream_t stream);

}  // namespace lockstep::kernels
