// Softmax attention with grouped queries over a paged cache, for prefill and decode, and the write
// into its pages. Equations: reference/attention/softmax_attention.hpp. A query's output depends on
// its keys alone, not on pages, chunks or other rows: prefill and decode agree bit by bit.
//
//   here              FlashAttention, vLLM    shape, all in device memory
//   q, out            q, out                  [T, HQ, d], [T, HQ, dv]
//   k_pages           k_cache                 [pages, page, HKV, d], HKV a divisor of HQ
//   v_pages           v_cache                 [pages, page, HKV, dv]
//   block_table       block_table             [N, blocks]   pages of a row in order
//   seq_lens          seqused_k               [N]           with the row's queries
//   query_start_loc   cu_seqlens_q            [N + 1]
//   lse               softmax_lse             [HQ, T] float32, natural log
//   slots             slot_mapping            [T]           page number x page size + place
#pragma once

#include <cuda_runtime_api.h>

#include <limits>
#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// T is the type of activations and of the cache. d and dv are at most 256.
template <class T>
struct SoftmaxAttention {
  TensorView<const T, 3> q;
  TensorView<const T, 4> k_pages, v_pages;
  IndexTable block_table;
  IndexView seq_lens;
  IndexView query_start_loc;
  float scale = 1;
  bool causal = true;  ///< bottom-right: query i of Lq sees keys j <= Lk - Lq + i
  TensorView<T, 3> out;
  std::optional<TensorView<float, 2>> lse{};
  /// Value of lse for a query that sees no key; its output is 0.
  float empty_lse = -std::numeric_limits<float>::infinity();
};

/// Computes out and lse. Tokens after the last row see no key. Keys of a block table entry that
/// names no page are not seen. Throws ArgumentError.
template <class T>
void softmax_attention(const SoftmaxAttention<T>& in, cudaStream_t stream);

template <class T>
struct PageWrite {
  TensorView<const T, 3> x;  // [T, heads, d]
  IndexView slots;           // [T]; a token whose number is no slot is not stored
  TensorView<T, 4> pages;    // [pages, page, heads, d]
};

/// Writes the keys or values of tokens to their slots. No slot may be named twice. Throws
/// ArgumentError.
template <class T>
void write_pages(const PageWrite<T>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
