// Approximations by the special-function units, within a few units of float's last place: for
// results that are rounded to 16 bits afterwards.
#pragma once

#include "kernels/base/device.cuh"

namespace lockstep::kernels {

/// 2^x; 0 for -infinity and for results below the normal numbers.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// x / (1 + e^-x); the constant is -log2(e).
__device__ inline float silu_fast(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;"
      : "=f"(reciprocal)
      : "f"(1.0f + exp2_fast(x * -1.4426950408889634f)));
  return x * reciprocal;
}

}  // namespace lockstep::kernels
