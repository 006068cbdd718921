// Decode of multi-head latent attention, absorbed: queries over the paged latents themselves.
// Equations: reference/attention/mla_attention.hpp.
//
//   here          FlashMLA         shape, all in device memory
//   q             q                [B, q_len, H, 576]   absorbed: [q_nope Wk; q_pe]
//   cache         k_cache          [pages, page, 576]   [latent; k_pe]; values are its first 512
//                                                       columns; or [pages, page, 656] bytes
//   block_table   block_table      [B, blocks]          pages of a request in order
//   seq_lens      cache_seqlens    [B]                  with the queries' tokens
//   out           out              [B, q_len, H, 512]
//   lse           softmax_lse      [B, H, q_len]        natural logarithm
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// Number of lanes. A lane is a set of counters in device memory; calls that may run at the same
/// time must use different lanes.
constexpr int kMlaDecodeLanes = 128;

/// T is the type of queries and outputs. C is the type of the cache: T; E4m3, where value = number
/// * kv_scale; or std::uint8_t, tokens of 656 bytes (reference/attention/latent_token.hpp). In the
/// last two cases products take float16: queries, and numbers times a token's scale, must stay
/// below 65520, or they become infinite.
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
  /// Scratch memory: mla_decode_workspace() bytes at a multiple of 16; its contents do not matter.
  std::optional<TensorView<unsigned char, 1>> workspace{};
  int lane = 0;
  /// Parts between which the keys are divided, at most; 0: as many as the GPU can run at once.
  int parts = 0;
  std::optional<TensorView<const float, 1>> kv_scale{};  ///< [1], for C = E4m3; absent: 1
};

/// Bytes of workspace. They depend on q's shape alone, so that a captured call serves any lengths.
template <class T, class C = T>
std::int64_t mla_decode_workspace(const MlaDecode<T, C>& in);

/// A query that sees no key gives output 0 and lse = +infinity. The kernel divides the keys by
/// seq_lens on the device, so a captured call is right for lengths that have changed. A request of
/// length 0 touches no page. Lengths are cut to the block table's columns. Entries after the last
/// page of a request are never read; an earlier entry that names no page stands for keys of zeros.
/// Throws ArgumentError.
template <class T, class C = T>
void mla_decode(const MlaDecode<T, C>& in, cudaStream_t stream);

}  // namespace lockstep::kernels
