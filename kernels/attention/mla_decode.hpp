// Decode of multi-head latent attention, absorbed: queries over the paged latents themselves.
// Equations: reference/attention/mla_attention.hpp.
//
//   here          FlashMLA         shape, all in device memory
//   q             q                [B, q_len, H, 576]   absorbed: [q_nope Wk; q_pe]
//   cache         k_cache          [pages, page, 576]   [latent; k_pe]; values: its first 512;
//                                                       also in e4m3, or [pages, page, 656] bytes
//   block_table   block_table      [B, blocks]          pages of a request in order
//   seq_lens      cache_seqlens    [B]                  the queries' tokens included
//   out           out              [B, q_len, H, 512]
//   lse           softmax_lse      [B, H, q_len]        natural logarithm
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// Calls that may run at the same time name different lanes, below this number.
constexpr int kMlaDecodeLanes = 128;

/// T is the type of queries and outputs. C, the cache's: T itself; E4m3, numbers of which each is
/// times kv_scale a value; std::uint8_t, tokens of 656 bytes (latent_token.hpp of the reference).
/// Numbers and queries are multiplied as float16 then: they, and numbers times a token's scale, are
/// below 65520 (infinite otherwise).
template <class T, class C = T>
struct MlaDecode {
  TensorView<const T, 4> q;      // [B, q_len, H, 576]
  TensorView<const C, 3> cache;  // [pages, page, 576]; page: 1, 2, 4, 8, 16, 32 or a multiple of 64
  IndexTable block_table;        // [B, blocks]
  IndexView seq_lens;            // [B]
  TensorView<T, 4> out;          // [B, q_len, H, 512]
  TensorView<float, 3> lse;      // [B, H, q_len]
  float softmax_scale = 1;
  bool causal = true;  ///< bottom-right: query i sees keys j <= seq_len - q_len + i
  /// What mla_decode_workspace() says, at a multiple of 16 bytes; its contents do not matter.
  std::optional<TensorView<unsigned char, 1>> workspace{};
  int lane = 0;
  /// Between how many groups of blocks the keys are divided at most; 0: as many as the GPU runs.
  int parts = 0;
  std::optional<TensorView<const float, 1>> kv_scale{};  ///< [1], of numbers in e4m3; absent: 1
};

/// Bytes; they depend on q's shape alone, so that a captured call serves any lengths.
template <class T, class C = T>
std::int64_t mla_decode_workspace(const MlaDecode<T, C>& in);

/// A query that sees no key gives 0 and lse = +inf. How keys are divided follows from seq_lens on
/// the device, so a captured call is right for lengths that have changed; a request of length 0
/// touches no page. Keys beyond the block table's columns do not exist; entries after the last
/// page of a request are never looked at, an entry before it that names no page stands for keys of
/// zeros. Throws ArgumentError.
template <class T, class C = T>
void mla_decode(const MlaDecode<T, C>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
