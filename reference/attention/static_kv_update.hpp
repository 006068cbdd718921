// Attention over a cache of fixed length, as in exported models (StaticCache of transformers):
// every shape is static; positions and masks are inputs.
//
//   allowed(q, j) = j <= cache_pos[q] and mask[b, j]
//
//   here        export                     shape
//   cache       past_k, past_v             [B, HKV, M, d]     one layer
//   fresh       new keys or values         [B, Q, HKV, d]
//   sidecar     new_k, new_v               [B, HKV, M, d]     zero except at cache_pos
//   cache_pos   cache_position             [Q]
//   mask        attention_mask             [B, M]             true at every real token
//
// Each step writes new keys and values twice: to a copy of the cache, over which this layer
// attends, and to the sidecar, which the caller applies to its own cache. Padding tokens of a
// bucket are masked and not applied.
#pragma once

#include <optional>
#include <vector>

#include "reference/attention/softmax_attention.hpp"

namespace lockstep::reference {

using MaskView = TensorView<const bool, 2>;

/// cache[:, :, cache_pos[q]] = fresh[:, q] for the first `real` queries.
template <class S>
void write_kv(const TensorView<const S, 4>& fresh, const IndexView& cache_pos, std::int64_t real,
              TensorView<S, 4> cache) {
  require(real <= fresh.extent(1) && cache_pos.extent(0) == fresh.extent(1),
          "every query has a position");
  for (std::int64_t b = 0; b < fresh.extent(0); ++b)
    for (std::int64_t q = 0; q < real; ++q) {
      require(0 <= cache_pos(q) && cache_pos(q) < cache.extent(2), "a position is in the cache");
      for (std::int64_t h = 0; h < fresh.extent(2); ++h)
        mapped(at(cache, b, h, cache_pos(q))) = mapped(at(fresh, b, q, h));
    }
}

/// Zeros, with the fresh keys or values at their positions, also those of padding tokens.
template <class S>
Array<S, 4> sidecar_of(const TensorView<const S, 4>& fresh, const IndexView& cache_pos,
                       std::int64_t M) {
  Array<S, 4> sidecar(Shape<4>{fresh.extent(0), fresh.extent(2), M, fresh.extent(3)}, S{0});
  write_kv<S>(fresh, cache_pos, fresh.extent(1), sidecar);
  return sidecar;
}

/// cache[:, :, p] = sidecar[:, :, p] for p = cache_pos[:real]; a bucket's padding tokens are left
/// out.
template <class S>
void apply_sidecar(const TensorView<const S, 4>& sidecar, const IndexView& cache_pos,
                   std::int64_t real, TensorView<S, 4> cache) {
  for (std::int64_t b = 0; b < cache.extent(0); ++b)
    for (std::int64_t h = 0; h < cache.extent(1); ++h)
      for (std::int64_t q = 0; q < real; ++q)
        mapped(at(cache, b, h, cache_pos(q))) = mapped(at(sidecar, b, h, cache_pos(q)));
}

/// Computes out [B, Q, HQ, d] for q [B, Q, HQ, d]. Keys that are not allowed are skipped instead of
/// weighted by 0, because the tail of a static cache may hold NaN. A query without an allowed key
/// gives 0.
template <class S>
void static_kv_attention(const TensorView<const S, 4>& q, const TensorView<const S, 4>& k_cache,
                         const TensorView<const S, 4>& v_cache, const MaskView& mask,
                         const IndexView& cache_pos, S scale, TensorView<S, 4> out) {
  const std::int64_t HQ = q.extent(2), HKV = k_cache.extent(1), d = q.extent(3);
  require(HKV > 0 && HQ % HKV == 0, "query heads are a multiple of key heads");
  for (std::int64_t b = 0; b < q.extent(0); ++b)
    for (std::int64_t i = 0; i < q.extent(1); ++i) {
      std::vector<std::int64_t> allowed;
      for (std::int64_t j = 0; j <= cache_pos(i); ++j)
        if (mask(b, j)) allowed.push_back(j);
      for (std::int64_t h = 0; h < HQ; ++h) {
        Matrix<S> K(static_cast<std::int64_t>(allowed.size()), d), V(K.rows(), d);
        for (std::int64_t j = 0; j < K.rows(); ++j) {
          const std::int64_t position = allowed[static_cast<std::size_t>(j)];
          K.row(j) = mapped(at(k_cache, b, h / (HQ / HKV), position)).transpose();
          V.row(j) = mapped(at(v_cache, b, h / (HQ / HKV), position)).transpose();
        }
        mapped(at(out, b, i, h)) = attend<S>(as_vector(at(q, b, i, h)), K, V, scale).out;
      }
    }
}

/// The smallest bucket that holds Q tokens and fits after `past`; nothing if there is none, and
/// then the prompt is split. Q = 1 is always a decode.
inline std::optional<std::int64_t> chosen_bucket(std::int64_t Q, std::int64_t past, std::int64_t M,
                                                 const std::vector<std::int64_t>& buckets) {
  if (Q == 1) return past < M ? std::optional<std::int64_t>(1) : std::nullopt;
  std::optional<std::int64_t> best;
  for (const std::int64_t bucket : buckets)
    if (bucket >= Q && past + bucket <= M && (!best || bucket < *best)) best = bucket;
  return best;
}

}  // namespace lockstep::reference
