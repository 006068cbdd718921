// The shapes for which kernels with 16-byte accesses are compiled, one per line: serving shapes
// always, the others with LOCKSTEP_ALL_SHAPES. Any other shape runs in the general kernels. The
// updates of both recurrences have more shapes of their own.
#pragma once

// The length of a state's rows: K of the gated delta rule, N of Mamba2's prefill.
#define LOCKSTEP_SERVING_STATE_ROWS(X) X(128)  // Qwen3-Next, Nemotron-H
#ifdef LOCKSTEP_ALL_SHAPES
#define LOCKSTEP_OTHER_STATE_ROWS(X) \
  X(64)                              \
  X(256)
#else
#define LOCKSTEP_OTHER_STATE_ROWS(X)
#endif
#define LOCKSTEP_STATE_ROWS(X)   \
  LOCKSTEP_SERVING_STATE_ROWS(X) \
  LOCKSTEP_OTHER_STATE_ROWS(X)

// Pairs X(type of activations, type of states).
#define LOCKSTEP_SERVING_TYPES(X) \
  X(Bf16, float)                  \
  X(Bf16, Bf16)
#define LOCKSTEP_OTHER_TYPES(X) \
  X(Bf16, Fp16)                 \
  X(Fp16, float)                \
  X(Fp16, Fp16)                 \
  X(Fp16, Bf16)                 \
  X(float, float)               \
  X(float, Bf16)                \
  X(float, Fp16)

// The same for states with scales, compiled with LOCKSTEP_ALL_SHAPES.
#define LOCKSTEP_SCALED_TYPES(X) \
  X(Bf16, Int8)                  \
  X(Bf16, E4m3)
