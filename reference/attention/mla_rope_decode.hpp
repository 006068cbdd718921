// One decode step of a latent layer (SGLang's fused MLA and RoPE decode): the rotation of queries
// and of the new key, the write of the new latent to its slot of the paged cache, attention over
// the latents, and the projection to values. It is defined by mla_attention.hpp and
// reference/layers/rope.hpp.
//
//   here          SGLang           shape
//   q_nope        q_nope           [B, H, dn]      not absorbed
//   q_pe          q_pe             [B, H, dr]      not rotated
//   latent        k_nope, kv_a     [B, dc]         normalised
//   k_pe          k_pe             [B, dr]         not rotated
//   slots         out_cache_loc    [B]             page * page size + place; below 0: not stored
//   cache         kv_buffer        [pages, page, dc + dr]
//   out           attn_output      [B, H, dv]
#pragma once

#include "reference/attention/mla_attention.hpp"

namespace lockstep::reference {

/// cache[slot / page, slot % page] = [latent; k_pe] for every token with a slot. Padding tokens
/// have a slot in a page that no request owns, or none.
template <class S>
void write_latents(const TensorView<const S, 2>& latent, const TensorView<const S, 2>& k_pe,
                   const IndexView& slots, TensorView<S, 3> cache) {
  const std::int64_t page = cache.extent(1), dc = latent.extent(1), dr = k_pe.extent(1);
  require(cache.extent(2) == dc + dr, "a cached token is a latent and a rotary key");
  for (std::int64_t t = 0; t < latent.extent(0); ++t) {
    if (slots(t) < 0) continue;
    require(slots(t) < cache.extent(0) * page, "a token's slot is in the cache");
    auto token = mapped(at(cache, slots(t) / page, slots(t) % page));
    token.head(dc) = mapped(at(latent, t));
    token.tail(dr) = mapped(at(k_pe, t));
  }
}

template <class S>
struct MlaRopeDecodeInputs {
  TensorView<const S, 3> q_nope;
  TensorView<const S, 3> q_pe;
  TensorView<const S, 2> latent;
  TensorView<const S, 2> k_pe;
  IndexView positions;     // [B]
  IndexView slots;         // [B]
  IndexTable block_table;  // [B, blocks]
  IndexView seq_lens;      // [B], with the new token
  double softmax_scale;
  RopePairs pairs = RopePairs::interleaved;
};

template <class S>
void mla_rope_decode(const MlaRopeDecodeInputs<S>& in, const MlaUpWeights<S>& w,
                     const Rope<S>& rope, TensorView<S, 3> cache, TensorView<S, 3> out) {
  const std::int64_t B = in.q_nope.extent(0), H = in.q_nope.extent(1), dc = in.latent.extent(1);
  Array<S, 3> q_pe(shape_of(in.q_pe));
  Array<S, 3> k_pe(Shape<3>{B, 1, in.k_pe.extent(1)});
  for (std::int64_t b = 0; b < B; ++b) {
    mapped(at(q_pe.view(), b)) = mapped(at(in.q_pe, b));
    mapped(at(k_pe.view(), b, 0)) = mapped(at(in.k_pe, b));
  }
  apply_rope(rope, in.positions, in.pairs, q_pe.view());
  apply_rope(rope, in.positions, in.pairs, k_pe.view());
  write_latents<S>(in.latent, make_view<const S>(k_pe.data(), Shape<2>{B, k_pe.extent(2)}),
                   in.slots, cache);

  const Array<S, 3> q = absorbed_queries<S>(in.q_nope, std::as_const(q_pe).view(), w);
  Array<S, 4> latents(Shape<4>{B, 1, H, dc});
  Array<S, 3> lse(Shape<3>{B, H, 1});
  mla_decode<S>({.q = make_view(q.data(), Shape<4>{B, 1, H, q.extent(2)}),
                 .cache = cache,
                 .block_table = in.block_table,
                 .seq_lens = in.seq_lens,
                 .softmax_scale = in.softmax_scale,
                 .value_dim = dc},
                latents, lse);
  project_values<S>(make_view<const S>(latents.data(), Shape<3>{B, H, dc}), w, out);
}

}  // namespace lockstep::reference
