// The paged cache of latents, between the projections of latent attention and attention itself:
// what goes in, with the norm and the rotation before it, and what comes out again for prompts.
// Equations: reference/attention/mla_attention.hpp and mla_rope_decode.hpp; bytes of a token:
// latent_token.hpp there.
//
//   here          SGLang               shape, all in device memory
//   latent        kv_a                 [T, 512]     k_pe and latent are columns of one product
//   k_pe          k_pe                 [T, 64]      not rotated
//   q_pe          q_pe                 [T, H, 64]   not rotated
//   slots         out_cache_loc        [T]          page * page size + place; below 0: nowhere
//   cache         kv_buffer            [pages, page, 576], or [pages, page, 656] bytes
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// C is the cache's type: Bf16; E4m3, numbers of which each is times kv_scale a value;
/// std::uint8_t, tokens of 656 bytes. Rows begin at whole 16 bytes.
template <class C>
struct LatentWrite {
  TensorView<const Bf16, 2> latent;  // [T, 512]
  TensorView<const Bf16, 2> k_pe;    // [T, 64]
  MixedView<1> norm;                 // [512]; absent: the latent is normalised already
  float eps = 1e-6f;
  IndexView positions;                     // [T]
  TensorView<const float, 1> frequencies;  // [32], radians per token
  float magnitude = 1;                     ///< of cos and sin: YaRN's
  bool interleaved = true;                 ///< pairs are (2i, 2i + 1); else (i, i + 32)
  IndexView slots;                         // [T]; one that is no slot of the cache: left out
  TensorView<C, 3> cache;                  // [pages, page, 576 or 656]
  std::optional<TensorView<const float, 1>> kv_scale{};  ///< [1], of numbers in e4m3; absent: 1
  /// Scales of tokens of 656 bytes are rounded up to powers of two (FlashMLA), else amax / 448.
  bool power_of_two_scales = true;
  std::optional<TensorView<Bf16, 2>> latents{};     // [T, 576]: [latent; k_pe] of every token
  std::optional<TensorView<const Bf16, 3>> q_pe{};  // [T, H, 64]
  std::optional<TensorView<Bf16, 3>> rotated_q{};   // [T, H, 64]; may be q_pe
};

/// Every token's norm, rotation and write in one launch. What a slot holds is rounded once, from
/// float. No slot is named twice. Throws ArgumentError.
template <class C>
void write_latents(const LatentWrite<C>& in, cudaStream_t stream);

/// A part of each request's tokens, one request after the other: of request b the tokens
/// min(begin, end) ... end, with end = min(begin + size, tokens of b), where its tokens are those
/// that are cached before the new ones (prefix) or these too.
template <class C>
struct LatentGather {
  TensorView<const C, 3> cache;
  IndexTable block_table;     // [B, blocks]
  IndexView seq_lens;         // [B], the new tokens included
  IndexView query_start_loc;  // [B + 1], of the new tokens
  std::int64_t begin = 0, size = 0;
  bool prefix = false;
  std::optional<TensorView<const float, 1>> kv_scale{};
  TensorView<Bf16, 2> latents;         // [L, 576]; rows after the last request's are 0
  TensorView<std::int32_t, 1> starts;  // [B + 1], written: where each request's rows begin
};

/// L has room for all; rows beyond it are left out. An entry of the block table that names no page
/// gives zeros. Throws ArgumentError.
template <class C>
void gather_latents(const LatentGather<C>& in, cudaStream_t stream);

/// out = [a; b; zeros], of heads.
struct JoinHeads {
  TensorView<const Bf16, 3> a;                   // [T, H, da]
  std::optional<TensorView<const Bf16, 3>> b{};  // [T, 1 or H, db]   1: the same for all heads
  TensorView<Bf16, 3> out;                       // [T, H, d], d >= da + db, all multiples of 8
};

/// Throws ArgumentError.
void join_heads(const JoinHeads& in, cudaStream_t stream);

}  // namespace lockstep::kernels
