// The paged cache of latents: writes of new tokens, with the norm and the rotation before them;
// gathering of cached tokens for prompts; and joining of head vectors. Equations:
// reference/attention/mla_attention.hpp and reference/attention/mla_rope_decode.hpp. Bytes of a
// token: reference/attention/latent_token.hpp.
//
//   here          SGLang               shape, all in device memory
//   latent        kv_a                 [T, 512]     k_pe and latent are columns of one product
//   k_pe          k_pe                 [T, 64]      not rotated
//   q_pe          q_pe                 [T, H, 64]   not rotated
//   slots         out_cache_loc        [T]          page * page size + place; below 0: not stored
//   cache         kv_buffer            [pages, page, 576], or [pages, page, 656] bytes
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// C is the type of the cache: Bf16; E4m3, where value = number * kv_scale; or std::uint8_t, tokens
/// of 656 bytes. Rows begin at multiples of 16 bytes.
template <class C>
struct LatentWrite {
  TensorView<const Bf16, 2> latent;  // [T, 512]
  TensorView<const Bf16, 2> k_pe;    // [T, 64]
  MixedView<1> norm;                 // [512], weights of the norm; absent: no norm is applied
  float eps = 1e-6f;
  IndexView positions;                     // [T]
  TensorView<const float, 1> frequencies;  // [32], radians per token
  float magnitude = 1;                     ///< factor of cos and sin (YaRN)
  bool interleaved = true;                 ///< pairs are (2i, 2i + 1); else (i, i + 32)
  IndexView slots;                         // [T]; a token whose number is no slot is not stored
  TensorView<C, 3> cache;                  // [pages, page, 576 or 656]
  std::optional<TensorView<const float, 1>> kv_scale{};  ///< [1], for C = E4m3; absent: 1
  /// Scales of tokens of 656 bytes: rounded up to powers of two, as FlashMLA does; else amax / 448.
  bool power_of_two_scales = true;
  std::optional<TensorView<Bf16, 2>> latents{};     // [T, 576]: [latent; k_pe] of every token
  std::optional<TensorView<const Bf16, 3>> q_pe{};  // [T, H, 64]
  std::optional<TensorView<Bf16, 3>> rotated_q{};   // [T, H, 64]; may be q_pe
};

/// Normalises, rotates and writes every token, in one launch. Values are rounded once, from float,
/// to the cache's type. No slot may be named twice. Throws ArgumentError.
template <class C>
void write_latents(const LatentWrite<C>& in, cudaStream_t stream);

/// Gathers a part of each request's cached tokens, request after request. Of request b: tokens
/// begin
/// ... end - 1 with end = min(begin + size, tokens of b), or none. With `prefix`, the tokens of b
/// are those cached before its new ones; otherwise the new ones count too.
template <class C>
struct LatentGather {
  TensorView<const C, 3> cache;
  IndexTable block_table;     // [B, blocks]
  IndexView seq_lens;         // [B], with the new tokens
  IndexView query_start_loc;  // [B + 1]: request b has new tokens [b] ... [b + 1] - 1
  std::int64_t begin = 0, size = 0;
  bool prefix = false;
  std::optional<TensorView<const float, 1>> kv_scale{};
  TensorView<Bf16, 2> latents;  // [L, 576]; rows after the last request's are 0
  TensorView<std::int32_t, 1>
      starts;  // [B + 1], output: the first row of each request in `latents`
};

/// Rows that do not fit into L are left out. An entry of the block table that names no page gives
/// zeros. Throws ArgumentError.
template <class C>
void gather_latents(const LatentGather<C>& in, cudaStream_t stream);

/// out = [a; b; zeros] along the last dimension.
struct JoinHeads {
  TensorView<const Bf16, 3> a;                   // [T, H, da]
  std::optional<TensorView<const Bf16, 3>> b{};  // [T, 1 or H, db]; 1: the same for all heads
  TensorView<Bf16, 3> out;                       // [T, H, d], d >= da + db, all multiples of 8
};

/// Computes JoinHeads::out. Throws ArgumentError.
void join_heads(const JoinHeads& in, cudaStream_t stream);

}  // namespace lockstep::kernels
