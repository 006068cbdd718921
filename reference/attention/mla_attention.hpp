// Multi-head latent attention. DeepSeek-AI 2024, "DeepSeek-V2", eqs. 9 to 19 and appendix C
// (absorption).
//
//   normal    k_h  = [Wk_h c ; k_pe], v_h = Wv_h c      o_h = attention(q_h; k_h, v_h)
//   absorbed  q'_h = [q_nope_h Wk_h ; q_pe_h]           o_h = attention(q'_h; [c ; k_pe], c) Wv_h^T
//
// Both forms have the scale (dn + dr)^-0.5 m^2, also the absorbed form with its 576-wide queries.
// Causal masks are bottom-right: query i of Lq sees keys j <= Lk - Lq + i.
//
//   here      paper         SGLang                    shape
//   q_nope    q^C           q_nope                    [T, H, dn]
//   q_pe      q^R           q_pe, rotated             [T, H, dr]
//   latent    c^KV          kv_a, normalised          [L, dc]
//   k_pe      k^R           k_pe, rotated             [L, dr]     shared by all heads
//   w_kc      W^UK          w_kc                      [H, dn, dc]
//   w_vc      W^UV          w_vc                      [H, dc, dv]
//   cache                   kv_buffer                 [pages, page, dc + dr] = [latent; k_pe]
//   out                     attn_output               [T, H, dv]
#pragma once

#include <algorithm>
#include <optional>

#include "reference/attention/softmax_attention.hpp"
#include "reference/layers/rms_norm.hpp"
#include "reference/layers/rope.hpp"

namespace lockstep::reference {

template <class S>
struct MlaUpWeights {
  Array<S, 3> w_kc;  // [H, dn, dc]
  Array<S, 3> w_vc;  // [H, dc, dv]
};

/// Splits kv_b_proj.weight [H (dn + dv), dc]: per head first the dn rows of keys, then the dv of
/// values.
template <class S>
MlaUpWeights<S> split_kv_b(const TensorView<const S, 2>& kv_b, std::int64_t H, std::int64_t dn) {
  require(H > 0 && kv_b.extent(0) % H == 0, "kv_b_proj has the same rows for every head");
  const std::int64_t rows = kv_b.extent(0) / H, dv = rows - dn, dc = kv_b.extent(1);
  require(dv > 0, "every head has rows for values");
  MlaUpWeights<S> w{Array<S, 3>(Shape<3>{H, dn, dc}), Array<S, 3>(Shape<3>{H, dc, dv})};
  for (std::int64_t h = 0; h < H; ++h) {
    const std::int64_t first = h * rows;
    mapped(at(w.w_kc.view(), h)) = mapped(cut(kv_b, first, first + dn));
    mapped(at(w.w_vc.view(), h)) = mapped(cut(kv_b, first + dn, first + rows)).transpose();
  }
  return w;
}

/// The queries of a row, and the latents of its keys, which include the queries' own tokens.
template <class S>
struct MlaInputs {
  TensorView<const S, 3> q_nope;  // [T, H, dn]
  TensorView<const S, 3> q_pe;    // [T, H, dr]
  TensorView<const S, 2> latent;  // [L, dc]
  TensorView<const S, 2> k_pe;    // [L, dr]
};

/// [x; y; zeros] of `width` columns, for x [T, H, dx] and y [T, H or 1, dy].
template <class S>
Array<S, 3> side_by_side(const TensorView<const S, 3>& x, const TensorView<const S, 3>& y,
                         std::int64_t width) {
  const std::int64_t dx = x.extent(2), dy = y.extent(2);
  require(dx + dy <= width, "the parts of a head fit into its width");
  Array<S, 3> joined(Shape<3>{x.extent(0), x.extent(1), width}, S{0});
  for (std::int64_t t = 0; t < x.extent(0); ++t)
    for (std::int64_t h = 0; h < x.extent(1); ++h)
      for (std::int64_t i = 0; i < dx + dy; ++i)
        joined(t, h, i) = i < dx ? x(t, h, i) : y(t, y.extent(1) == 1 ? 0 : h, i - dx);
  return joined;
}

/// A matrix [L, d] as one head: [L, 1, d].
template <class S>
TensorView<const S, 3> one_head(const TensorView<const S, 2>& x) {
  return make_view(x.data_handle(), Shape<3>{x.extent(0), 1, x.extent(1)},
                   Shape<3>{x.stride(0), 0, x.stride(1)});
}

/// Keys and values of every head, decompressed from latents: [L, H, dn + dr] padded to `key_width`,
/// and [L, H, dv] padded to `value_width` (0: not padded).
template <class S>
std::pair<Array<S, 3>, Array<S, 3>> decompressed(const TensorView<const S, 2>& latent,
                                                 const TensorView<const S, 2>& k_pe,
                                                 const MlaUpWeights<S>& w,
                                                 std::int64_t key_width = 0,
                                                 std::int64_t value_width = 0) {
  const std::int64_t L = latent.extent(0), H = w.w_kc.extent(0), dn = w.w_kc.extent(1);
  const std::int64_t dv = w.w_vc.extent(2);
  Array<S, 3> k_nope(Shape<3>{L, H, dn});
  Array<S, 3> v(Shape<3>{L, H, std::max(dv, value_width)}, S{0});
  for (std::int64_t h = 0; h < H; ++h) {
    const Matrix<S> Wk = as_matrix(at(w.w_kc.view(), h)), Wv = as_matrix(at(w.w_vc.view(), h));
    for (std::int64_t l = 0; l < L; ++l) {
      const Vector<S> c = as_vector(at(latent, l));
      mapped(at(k_nope.view(), l, h)) = Wk * c;                  // Wk_h c
      mapped(at(v.view(), l, h)).head(dv) = Wv.transpose() * c;  // Wv_h c
    }
  }
  const std::int64_t width = std::max(dn + k_pe.extent(1), key_width);
  return {side_by_side<S>(std::as_const(k_nope).view(), one_head<S>(k_pe), width), std::move(v)};
}

/// The normal form, over decompressed keys and values; out [T, H, dv], lse [H, T].
template <class S>
void mla_normal(const MlaInputs<S>& in, const MlaUpWeights<S>& w, const AttentionOptions& options,
                TensorView<S, 3> out, TensorView<S, 2> lse) {
  const auto [k, v] = decompressed(in.latent, in.k_pe, w);
  const Array<S, 3> q = side_by_side<S>(in.q_nope, in.q_pe, k.extent(2));
  attention_row<S>(q, k, v, options, out, lse);
}

/// The padded form of early servers: q, k and v padded to `width`, a cache of decompressed keys and
/// values, and the output cropped.
template <class S>
void mla_padded(const MlaInputs<S>& in, const MlaUpWeights<S>& w, const AttentionOptions& options,
                TensorView<S, 3> out, TensorView<S, 2> lse, std::int64_t width = 256) {
  const auto [k, v] = decompressed(in.latent, in.k_pe, w, width, width);
  const Array<S, 3> q = side_by_side<S>(in.q_nope, in.q_pe, width);
  Array<S, 3> wide(Shape<3>{out.extent(0), out.extent(1), width});
  attention_row<S>(q, k, v, options, wide, lse);
  for_each_element(out, [&](const auto& i, S& e) { e = wide(i[0], i[1], i[2]); });
}

/// q' = [q_nope Wk; q_pe], [T, H, dc + dr].
template <class S>
Array<S, 3> absorbed_queries(const TensorView<const S, 3>& q_nope,
                             const TensorView<const S, 3>& q_pe, const MlaUpWeights<S>& w) {
  const std::int64_t dc = w.w_kc.extent(2);
  Array<S, 3> q(Shape<3>{q_nope.extent(0), q_nope.extent(1), dc});
  for (std::int64_t h = 0; h < q.extent(1); ++h) {
    const Matrix<S> Wk = as_matrix(at(w.w_kc.view(), h));
    for (std::int64_t t = 0; t < q.extent(0); ++t)
      mapped(at(q.view(), t, h)) = Wk.transpose() * as_vector(at(q_nope, t, h));
  }
  return side_by_side<S>(std::as_const(q).view(), q_pe, dc + q_pe.extent(2));
}

/// o_h = a_h w_vc_h for a [T, H, dc].
template <class S>
void project_values(const TensorView<const S, 3>& a, const MlaUpWeights<S>& w,
                    TensorView<S, 3> out) {
  for (std::int64_t h = 0; h < a.extent(1); ++h) {
    const Matrix<S> Wv = as_matrix(at(w.w_vc.view(), h));
    for (std::int64_t t = 0; t < a.extent(0); ++t)
      mapped(at(out, t, h)) = Wv.transpose() * as_vector(at(a, t, h));
  }
}

/// The absorbed form: multi-query attention over the latents themselves.
template <class S>
void mla_absorbed(const MlaInputs<S>& in, const MlaUpWeights<S>& w, const AttentionOptions& options,
                  TensorView<S, 3> out, TensorView<S, 2> lse) {
  const Array<S, 3> q = absorbed_queries(in.q_nope, in.q_pe, w);
  const Array<S, 3> k = side_by_side<S>(one_head<S>(in.latent), one_head<S>(in.k_pe), q.extent(2));
  Array<S, 3> a(Shape<3>{q.extent(0), q.extent(1), in.latent.extent(1)});
  attention_row<S>(q, k, one_head<S>(in.latent), options, a, lse);
  project_values<S>(std::as_const(a).view(), w, out);
}

/// The normal form in chunks: new tokens over themselves (causal), then over their prefix chunk by
/// chunk, all merged. The last T latents are those of the new tokens.
template <class S>
void mla_chunked_prefix(const MlaInputs<S>& in, const MlaUpWeights<S>& w,
                        const AttentionOptions& options, std::int64_t chunk, TensorView<S, 3> out,
                        TensorView<S, 2> lse) {
  require(chunk >= 1, "a chunk of the prefix has at least one token");
  const std::int64_t T = in.q_nope.extent(0), prefix = in.latent.extent(0) - T;
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    return MlaInputs<S>{in.q_nope, in.q_pe, cut(in.latent, begin, end), cut(in.k_pe, begin, end)};
  };
  mla_normal(part(prefix, prefix + T), w, options, out, lse);
  Array<S, 3> part_out(shape_of(out));
  Array<S, 2> part_lse(shape_of(lse));
  for (std::int64_t begin = 0; begin < prefix; begin += chunk) {
    mla_normal<S>(part(begin, std::min(begin + chunk, prefix)), w,
                  {.scale = options.scale, .causal = false}, part_out, part_lse);
    merge_attention<S>(out, lse, std::as_const(part_out).view(), std::as_const(part_lse).view(),
                       out, lse);
  }
}

/// Inputs of a decode over a paged latent cache. A cache (or q) in e4m3 holds numbers with one
/// scale for the tensor: value = number * scale.
template <class S>
struct MlaDecodeInputs {
  TensorView<const S, 4> q;      // [B, Lq, H, dc + dr], absorbed
  TensorView<const S, 3> cache;  // [pages, page, dc + dr]
  IndexTable block_table;        // [B, blocks]
  IndexView seq_lens;            // [B], with the queries' tokens
  double softmax_scale;
  bool causal = true;
  std::int64_t value_dim = 512;
  S kv_scale = 1;
  S q_scale = 1;  ///< scale of q in e4m3 (then kv_scale)
};

/// The values of request b's latents, [seq_len, dc + dr].
template <class S>
Matrix<S> cached_latents(const MlaDecodeInputs<S>& in, std::int64_t b) {
  const TensorView<const S, 3>& c = in.cache;
  const auto pages = make_view(c.data_handle(), Shape<4>{c.extent(0), c.extent(1), 1, c.extent(2)},
                               Shape<4>{c.stride(0), c.stride(1), 0, c.stride(2)});
  const Array<S, 3> tokens = gathered_pages<S>(pages, at(in.block_table, b), in.seq_lens(b));
  return head_of<S>(tokens.view(), 0) * in.kv_scale;
}

/// Computes out [B, Lq, H, value_dim] and lse [B, H, Lq] (natural logarithm). A query that sees no
/// key gives output 0 and lse +infinity.
template <class S>
void mla_decode(const MlaDecodeInputs<S>& in, TensorView<S, 4> out, TensorView<S, 3> lse) {
  for (std::int64_t b = 0; b < in.q.extent(0); ++b) {
    const Matrix<S> K = cached_latents(in, b);
    for (std::int64_t i = 0; i < in.q.extent(1); ++i) {
      const std::int64_t n = visible_keys(i, in.q.extent(1), K.rows(), in.causal);
      for (std::int64_t h = 0; h < in.q.extent(2); ++h) {
        const Vector<S> q = as_vector(at(in.q, b, i, h)) * in.q_scale;
        const Matrix<S> V = K.topLeftCorner(n, in.value_dim);
        const Attended<S> a = attend<S>(q, K.topRows(n), V, static_cast<S>(in.softmax_scale));
        mapped(at(out, b, i, h)) = a.out;
        lse(b, h, i) = n > 0 ? a.lse : std::numeric_limits<S>::infinity();
      }
    }
  }
}

/// The layer's weights, with the names of checkpoints. Without q_lora, q_b is q_proj and q_a is
/// absent.
template <class S>
struct MlaLayer {
  std::int64_t H, dn, dr;
  std::optional<TensorView<const S, 2>> q_a{};       // [q_lora, hidden]
  std::optional<TensorView<const S, 1>> q_a_norm{};  // [q_lora]
  TensorView<const S, 2> q_b;                        // [H (dn + dr), q_lora or hidden]
  TensorView<const S, 2> kv_a;                       // [dc + dr, hidden]: [latent; k_pe]
  TensorView<const S, 1> kv_a_norm;                  // [dc]
  S eps = S(1e-6);
};

template <class S>
struct MlaProjected {
  Array<S, 3> q_nope;  // [T, H, dn]
  Array<S, 3> q_pe;    // [T, H, dr], rotated
  Array<S, 2> latent;  // [T, dc], normalised, as in the cache
  Array<S, 2> k_pe;    // [T, dr], rotated, as in the cache
};

/// Queries and cache entries of hidden states [T, hidden].
template <class S>
MlaProjected<S> mla_project(const TensorView<const S, 2>& hidden, const IndexView& positions,
                            const MlaLayer<S>& layer, const Rope<S>& rope) {
  const std::int64_t T = hidden.extent(0), dc = layer.kv_a_norm.extent(0);
  const std::int64_t per_head = layer.dn + layer.dr;
  MlaProjected<S> p{Array<S, 3>(Shape<3>{T, layer.H, layer.dn}),
                    Array<S, 3>(Shape<3>{T, layer.H, layer.dr}), Array<S, 2>(Shape<2>{T, dc}),
                    Array<S, 2>(Shape<2>{T, layer.dr})};
  for (std::int64_t t = 0; t < T; ++t) {
    const Vector<S> x = as_vector(at(hidden, t));
    Vector<S> to_q = x;
    if (layer.q_a)
      to_q = rms_normed<S>(as_matrix(*layer.q_a) * x, as_vector(*layer.q_a_norm), layer.eps);
    const Vector<S> q = as_matrix(layer.q_b) * to_q, kv = as_matrix(layer.kv_a) * x;
    for (std::int64_t h = 0; h < layer.H; ++h) {
      mapped(at(p.q_nope.view(), t, h)) = q.segment(h * per_head, layer.dn);
      mapped(at(p.q_pe.view(), t, h)) = q.segment(h * per_head + layer.dn, layer.dr);
    }
    mapped(at(p.latent.view(), t)) =
        rms_normed<S>(kv.head(dc), as_vector(layer.kv_a_norm), layer.eps);
    mapped(at(p.k_pe.view(), t)) = kv.tail(layer.dr);
  }
  apply_rope(rope, positions, RopePairs::interleaved, p.q_pe.view());
  apply_rope(rope, positions, RopePairs::interleaved,
             make_view(p.k_pe.data(), Shape<3>{T, 1, layer.dr}));
  return p;
}

}  // namespace lockstep::reference
