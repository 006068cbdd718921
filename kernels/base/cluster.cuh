// Barriers and shared memory of a thread block cluster whose size is known at the launch alone.
#pragma once

#include <cuda_bf16.h>

namespace lockstep::kernels {

/// Arrives at the cluster's barrier: what the thread has read and written is ordered before what
/// others do after their wait. Every thread of the cluster calls both. Lanes that diverged before
/// meet first, since the instructions are for whole warps.
__device__ inline void arrive_at_cluster() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Copies two values of this block's shared memory to the same place in block `rank` of the
/// cluster.
__device__ inline void copy_to_block(const __nv_bfloat16* pair, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.u32 [there], %2; }" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(pair))),
      "r"(rank), "r"(*reinterpret_cast<const unsigned*>(pair))
      : "memory");
#endif
}

/// Writes 8 bytes to the place `place` of this block's shared memory in block `rank` of the
/// cluster.
__device__ inline void store_in_block(const void* place, uint2 bytes, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v2.b32 [there], {%2, %3}; }" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(place))),
      "r"(rank), "r"(bytes.x), "r"(bytes.y)
      : "memory");
#endif
}

}  // namespace lockstep::kernels
