/* How `lockstep judge OPERATION --candidate LIB.so:SYMBOL` calls a kernel in a shared library.
 *
 * Include this file (it needs nothing else of Lockstep), export one function, and look the arguments up by the
 * names that the operation's schema gives them (reference/contract.md, "Operators for PyTorch"):
 *
 *     #include "judge_abi.h"
 *
 *     int my_update(const lockstep_call* call) {             // extern "C" in C++
 *       const lockstep_tensor* q = lockstep_tensor_named(call, "q");        // NULL: not given
 *       const lockstep_tensor* state = lockstep_tensor_named(call, "state"); // updated in place
 *       const lockstep_tensor* out = lockstep_tensor_named(call, "out");     // what the schema returns
 *       if (q->dtype != LOCKSTEP_BFLOAT16) return lockstep_unsupported(call, "bfloat16 alone");
 *       launch(q->data, ..., (cudaStream_t)call->stream);    // no synchronisation is needed
 *       return LOCKSTEP_OK;
 *     }
 *
 * An optional tensor that a case does not give is absent; an absent scalar has the schema's default. Indices
 * (state_indices, query_start_loc, ...) are int32. Strides count elements, and the function must honour all of
 * them. All tensors lie in host memory (LOCKSTEP_HOST) or in device memory (LOCKSTEP_CUDA). The function is called
 * several times, also while its stream is captured into a CUDA graph: it must neither synchronise nor copy to the
 * host. It must keep no pointer, and write nothing that the operation does not write: the judge checks guard bands
 * around each tensor afterwards.
 *
 * The layout of these types never changes; a new version gets a new number and only adds at the end. */
#ifndef LOCKSTEP_JUDGE_ABI_H
#define LOCKSTEP_JUDGE_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LOCKSTEP_JUDGE_ABI 1
#define LOCKSTEP_MAX_RANK 8

#ifdef __cplusplus
extern "C" {
#endif

/* Return values of the function. Any other number is a failure, shown beside the case. */
enum { LOCKSTEP_OK = 0, LOCKSTEP_UNSUPPORTED = 1, LOCKSTEP_FAILED = 2 };

enum { LOCKSTEP_HOST = 0, LOCKSTEP_CUDA = 1 };

enum {
  LOCKSTEP_FLOAT32 = 0,
  LOCKSTEP_BFLOAT16 = 1,
  LOCKSTEP_FLOAT16 = 2,
  LOCKSTEP_INT32 = 3,
  LOCKSTEP_BOOL = 4,
  LOCKSTEP_FLOAT8_E4M3 = 5, /* e4m3fn */
  LOCKSTEP_UINT8 = 6
};

typedef struct {
  const char* name;
  void* data; /* address of element [0, 0, ...] */
  int32_t dtype;
  int32_t rank;
  int64_t extents[LOCKSTEP_MAX_RANK];
  int64_t strides[LOCKSTEP_MAX_RANK]; /* in elements */
} lockstep_tensor;

/* A number, a truth value (0 or 1) or a text. */
typedef struct {
  const char* name;
  double number;
  const char* text; /* NULL unless the schema's type is `str` */
} lockstep_scalar;

typedef struct {
  int32_t abi; /* LOCKSTEP_JUDGE_ABI of the caller */
  int32_t device;
  const char* operation; /* "gated_delta_rule_update" */
  const char* case_name; /* "verify-table"; for a debugger */
  const lockstep_tensor* tensors;
  int64_t tensor_count;
  const lockstep_scalar* scalars;
  int64_t scalar_count;
  void* stream;        /* a cudaStream_t; NULL on the host */
  char* message;       /* buffer for the reason of a failure: text that ends with 0 */
  size_t message_size; /* bytes of that buffer */
} lockstep_call;

typedef int (*lockstep_candidate)(const lockstep_call* call);

/* --- Looking things up ------------------------------------------------------------------------------------- */

static inline const lockstep_tensor* lockstep_tensor_named(const lockstep_call* call, const char* name) {
  for (int64_t i = 0; i < call->tensor_count; ++i)
    if (strcmp(call->tensors[i].name, name) == 0) return &call->tensors[i];
  return NULL;
}

static inline double lockstep_number(const lockstep_call* call, const char* name, double otherwise) {
  for (int64_t i = 0; i < call->scalar_count; ++i)
    if (strcmp(call->scalars[i].name, name) == 0) return call->scalars[i].number;
  return otherwise;
}

static inline int lockstep_given(const lockstep_call* call, const char* name) {
  for (int64_t i = 0; i < call->scalar_count; ++i)
    if (strcmp(call->scalars[i].name, name) == 0) return 1;
  return lockstep_tensor_named(call, name) != NULL;
}

static inline const char* lockstep_text(const lockstep_call* call, const char* name, const char* otherwise) {
  for (int64_t i = 0; i < call->scalar_count; ++i)
    if (strcmp(call->scalars[i].name, name) == 0 && call->scalars[i].text) return call->scalars[i].text;
  return otherwise;
}

/* For a case that the function does not support: the verdict leaves it out, and shows `why` beside it. */
static inline int lockstep_unsupported(const lockstep_call* call, const char* why) {
  if (call->message_size > 0) {
    strncpy(call->message, why, call->message_size - 1);
    call->message[call->message_size - 1] = 0;
  }
  return LOCKSTEP_UNSUPPORTED;
}

#ifdef __cplusplus
}
#endif

#endif
