// Sums and maxima over a warp and over a block, shared by the plain layers (kernels/layers). The
// order of additions is fixed, so a result depends neither on the run nor on the rest of the batch.
#pragma once

#include "kernels/base/device.cuh"

// Types of activations: the serving one always, the others with LOCKSTEP_ALL_SHAPES.
#ifdef LOCKSTEP_ALL_SHAPES
#define LOCKSTEP_ACTIVATIONS(X) X(Bf16) X(Fp16) X(float)
#else
#define LOCKSTEP_ACTIVATIONS(X) X(Bf16)
#endif

namespace lockstep::kernels {

constexpr unsigned kWholeWarp = 0xffffffff;

struct Plus {
  template <class X>
  __device__ X operator()(X a, X b) const {
    return a + b;
  }
};
/// The larger number; where one operand is NaN, the other one.
struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Reduces the warp's values by op; every lane gets the result. op must commute, because lanes
/// exchange values in a butterfly.
template <class X, class Op>
__device__ inline X over_warp(X x, Op op) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x = op(x, __shfl_xor_sync(kWholeWarp, x, distance));
  return x;
}

/// Reduces the values of a block of kThreads threads by op; every thread gets the result, and every
/// thread calls it.
template <int kThreads, class X, class Op>
__device__ inline X over_block(X x, Op op) {
  static_assert(kThreads % 32 == 0, "whole warps");
  __shared__ X parts[kThreads / 32];
  x = over_warp(x, op);
  __syncthreads();  // all threads have read the parts of an earlier call
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  X all = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) all = op(all, parts[i]);
  return all;
}

}  // namespace lockstep::kernels
