// The attention of a decoder layer with multi-head latent attention (DeepSeek-V2 and V3), from
// hidden states to hidden states: projections, norms, rotation, the write into the paged cache,
// attention by one of its forms, and the output projection. Equations:
// reference/attention/mla_attention.hpp.
//
//   form       SGLang                         attention by
//   absorbed   forward_absorb                 mla_decode over the latents
//   one_shot   forward_normal                 mla_prefill over the whole context, decompressed
//   chunked    forward_normal, chunked KV     mla_prefill over the new tokens, then over chunks of
//                                             their prefix, merged
//   padded     DeepseekV2Attention            softmax_attention, 256 wide, over a cache of
//                                             decompressed keys and values
//
// All forms give the same result up to rounding; a batch takes the fastest one.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// A weight of a per-head product in e4m3. The scale is [1, 1, 1] for the whole tensor, or
/// [H, ceil(N / 128), ceil(K / 128)] for blocks of 128 x 128; any of its extents may be 1.
struct ScaledWeight {
  TensorView<const E4m3, 3> numbers;
  TensorView<const float, 3> scale;
};

/// Weights, in device memory, with rows at multiples of 16 bytes. H is the number of heads of this
/// rank. w_kc and w_vc (or their scaled versions) are for the absorbed form; if they are empty,
/// only the other forms can run, and H follows from kv_b.
struct MlaWeights {
  TensorView<const Bf16, 2> qkv_a;  // [q_lora + 576, hidden] = [q_a; latent; k_pe]; q_lora may be 0
  MixedView<1> q_a_norm;            // [q_lora]
  TensorView<const Bf16, 2> q_b;    // [H 192, q_lora, or hidden without it], per head [nope; pe]
  MixedView<1> kv_a_norm;           // [512]
  TensorView<const Bf16, 2> kv_b;   // [H 256, 512], per head [keys; values]
  TensorView<const Bf16, 3> w_kc{};  // [H, 512, 128], the keys of kv_b transposed
  TensorView<const Bf16, 3> w_vc{};  // [H, 128, 512], the values of kv_b
  TensorView<const Bf16, 2> o_proj;  // [hidden, H 128]
  /// Replace w_kc and w_vc in the absorbed form. The other operand is quantised to e4m3 too: by
  /// groups of 128 elements of a row if the weight has blocks, else by one scale.
  std::optional<ScaledWeight> scaled_w_kc{}, scaled_w_vc{};
  TensorView<const float, 1> frequencies;  // [32], radians per token
  float magnitude = 1;                     ///< factor of cos and sin
  bool interleaved = true;                 ///< pairs are (2i, 2i + 1)
  float softmax_scale = 1;                 ///< 192^-0.5, times YaRN's correction
  float eps = 1e-6f;
};

/// Tokens of B requests, and the latent cache, with C as in LatentWrite. Lengths and slots are read
/// on the device, so a captured call serves other batches of the same shape: an unused request has
/// length 0 and slots below 0.
template <class C>
struct MlaTokens {
  TensorView<const Bf16, 2> hidden;                      // [T, hidden]
  IndexView positions;                                   // [T]
  IndexView slots;                                       // [T]; below 0: not stored
  TensorView<C, 3> cache;                                // [pages, page, 576 or 656]
  std::optional<TensorView<const float, 1>> kv_scale{};  // [1]
  IndexTable block_table;                                // [B, blocks]
  IndexView seq_lens;                                    // [B], with the new tokens
  /// [B + 1]; absent: every request has T / B tokens.
  std::optional<IndexView> query_start_loc{};
  TensorView<Bf16, 2> out;  // [T, hidden]
  /// The heads' outputs before o_proj, [T, H 128]; without it they stay in the workspace.
  std::optional<TensorView<Bf16, 2>> heads{};
  /// Scratch memory: mla_layer_workspace() bytes at a multiple of 256.
  std::optional<TensorView<unsigned char, 1>> workspace{};
  int lane = 0;  ///< lane of mla_decode and mla_prefill
};

enum class MlaForm { absorbed, one_shot, chunked, padded };

/// The form of a call, and bounds of the batch that the host knows.
struct MlaPlan {
  MlaForm form = MlaForm::absorbed;
  /// one_shot: upper bound of the tokens of all contexts. chunked: tokens that a chunk holds, of
  /// all prefixes together.
  std::int64_t capacity = 0;
  std::int64_t longest_prefix = 0;  ///< chunked: upper bound of a request's prefix
};

/// The cache of the padded form.
struct PaddedCache {
  TensorView<Bf16, 4> k, v;  // [pages, page, H, 256]
};

/// Bytes of workspace.
template <class C>
std::int64_t mla_layer_workspace(const MlaWeights& weights, const MlaTokens<C>& tokens,
                                 const MlaPlan& plan);

/// Runs the layer. All forms but `absorbed` need query_start_loc. Throws ArgumentError.
template <class C>
void mla_layer(const MlaWeights& weights, const MlaTokens<C>& tokens, const MlaPlan& plan,
               cudaStream_t stream);

/// The part of the absorbed form between the projections (SGLang's fused MLA and RoPE decode): the
/// norm of latents if kv_a_norm is given, rotation, the write to the cache, attention, and the
/// projection to values. q and kv come unrotated; tokens.hidden and tokens.out are ignored; the
/// result is tokens.heads.
template <class C>
struct MlaRopeDecode {
  const MlaWeights&
      weights;  // w_kc and w_vc or the scaled ones, and those of the norm, RoPE, softmax
  MlaTokens<C> tokens;
  TensorView<Bf16, 2> q;   // [T, H 192], per head [nope; pe]
  TensorView<Bf16, 2> kv;  // [T, 576] = [latent; k_pe]
};
template <class C>
std::int64_t mla_rope_decode_workspace(const MlaRopeDecode<C>& in);
template <class C>
void mla_rope_decode(const MlaRopeDecode<C>& in, cudaStream_t stream);

/// Runs the padded form. It keeps no latents: tokens.cache is ignored.
std::int64_t padded_mla_layer_workspace(const MlaWeights& weights, const MlaTokens<Bf16>& tokens,
                                        const PaddedCache& cache);
void padded_mla_layer(const MlaWeights& weights, const MlaTokens<Bf16>& tokens,
                      const PaddedCache& cache, cudaStream_t stream);

}  // namespace lockstep::kernels
