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
// All give the same but for rounding, so which one a batch takes is a matter of speed alone.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/base/dtype.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::kernels {

/// A weight of a per-head product in e4m3. An extent of 1 of the scale is repeated: one scale for
/// the tensor is [1, 1, 1], blocks of 128 x 128 are [H, ceil(N / 128), ceil(K / 128)].
struct ScaledWeight {
  TensorView<const E4m3, 3> numbers;
  TensorView<const float, 3> scale;
};

/// All in device memory, rows of whole 16 bytes. H are the heads of this rank. w_kc and w_vc are
/// the absorbed form's: without them (empty) the other forms run, and kv_b says how many heads
/// there are.
struct MlaWeights {
  TensorView<const Bf16, 2> qkv_a;  // [q_lora + 576, hidden] = [q_a; latent; k_pe]; q_lora may be 0
  MixedView<1> q_a_norm;            // [q_lora]
  TensorView<const Bf16, 2> q_b;    // [H 192, q_lora, or hidden without it], per head [nope; pe]
  MixedView<1> kv_a_norm;           // [512]
  TensorView<const Bf16, 2> kv_b;   // [H 256, 512], per head [keys; values]
  TensorView<const Bf16, 3> w_kc{};  // [H, 512, 128], the keys of kv_b transposed
  TensorView<const Bf16, 3> w_vc{};  // [H, 128, 512], the values of kv_b
  TensorView<const Bf16, 2> o_proj;  // [hidden, H 128]
  /// Instead of w_kc and w_vc in the absorbed form; x is scaled into e4m3 too, by groups of 128 of
  /// a row where the weight has blocks, else by one scale.
  std::optional<ScaledWeight> scaled_w_kc{}, scaled_w_vc{};
  TensorView<const float, 1> frequencies;  // [32], radians per token
  float magnitude = 1;                     ///< of cos and sin
  bool interleaved = true;                 ///< pairs are (2i, 2i + 1)
  float softmax_scale = 1;                 ///< 192^-0.5, times YaRN's correction
  float eps = 1e-6f;
};

/// Tokens of B requests and the latent cache, C as in LatentWrite. Lengths and slots are read on
/// the device, so a captured call serves other ones: a request that is gone has length 0 and slots
/// below 0.
template <class C>
struct MlaTokens {
  TensorView<const Bf16, 2> hidden;                      // [T, hidden]
  IndexView positions;                                   // [T]
  IndexView slots;                                       // [T]; below 0: nowhere
  TensorView<C, 3> cache;                                // [pages, page, 576 or 656]
  std::optional<TensorView<const float, 1>> kv_scale{};  // [1]
  IndexTable block_table;                                // [B, blocks]
  IndexView seq_lens;                                    // [B], the new tokens included
  /// [B + 1]; absent: every request has T / B tokens.
  std::optional<IndexView> query_start_loc{};
  TensorView<Bf16, 2> out;  // [T, hidden]
  /// The heads' outputs before o_proj, [T, H 128]; without it they stay in the workspace.
  std::optional<TensorView<Bf16, 2>> heads{};
  /// As mla_layer_workspace() says, at a multiple of 256 bytes.
  std::optional<TensorView<unsigned char, 1>> workspace{};
  int lane = 0;  ///< of mla_decode and mla_prefill
};

enum class MlaForm { absorbed, one_shot, chunked, padded };

/// How a batch is run, as the host knows it.
struct MlaPlan {
  MlaForm form = MlaForm::absorbed;
  /// one_shot: tokens of all contexts at most. chunked: tokens that a chunk of all prefixes holds.
  std::int64_t capacity = 0;
  std::int64_t longest_prefix = 0;  ///< chunked: of one request, at most
};

/// The cache of the padded form.
struct PaddedCache {
  TensorView<Bf16, 4> k, v;  // [pages, page, H, 256]
};

/// Bytes of workspace.
template <class C>
std::int64_t mla_layer_workspace(const MlaWeights& weights, const MlaTokens<C>& tokens,
                                 const MlaPlan& plan);

/// Forms but the absorbed one need query_start_loc. Throws ArgumentError.
template <class C>
void mla_layer(const MlaWeights& weights, const MlaTokens<C>& tokens, const MlaPlan& plan,
               cudaStream_t stream);

/// What lies between the projections in the absorbed form (SGLang's fused MLA and RoPE decode): the
/// norm of latents where kv_a_norm is given, rotation, the write, attention, and the projection to
/// values. q and kv are not rotated; hidden and out are not looked at, and heads are the result.
template <class C>
struct MlaRopeDecode {
  const MlaWeights& weights;  // w_kc and w_vc, or the scaled ones, and what RoPE and softmax take
  MlaTokens<C> tokens;
  TensorView<Bf16, 2> q;   // [T, H 192], per head [nope; pe]
  TensorView<Bf16, 2> kv;  // [T, 576] = [latent; k_pe]
};
template <class C>
std::int64_t mla_rope_decode_workspace(const MlaRopeDecode<C>& in);
template <class C>
void mla_rope_decode(const MlaRopeDecode<C>& in, cudaStream_t stream);

/// The padded form, which keeps no latents: tokens.cache is left alone.
std::int64_t padded_mla_layer_workspace(const MlaWeights& weights, const MlaTokens<Bf16>& tokens,
                                        const PaddedCache& cache);
void padded_mla_layer(const MlaWeights& weights, const MlaTokens<Bf16>& tokens,
                      const PaddedCache& cache, cudaStream_t stream);

}  // namespace lockstep::kernels
