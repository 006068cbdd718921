// Softmax attention with grouped queries, over packed keys or a paged cache, and the merge of
// partial results. Vaswani et al. 2017, "Attention Is All You Need", eq. 1; the merge: Milakov,
// Gimelshein 2018, "Online normalizer calculation for softmax", section 3.1.
//
//   o = sum_j softmax_j(scale q . k_j) v_j           lse = ln sum_j exp(scale q . k_j)
//
//   here             FlashAttention, vLLM       shape
//   q                q                          [T, HQ, d]      head h uses key head h / (HQ / HKV)
//   k, v             k, v                       [L, HKV, d], [L, HKV, dv]
//   query_start_loc  cu_seqlens_q               [N + 1]
//   key_start_loc    cu_seqlens_k               [N + 1]
//   out, lse         out, softmax_lse           [T, HQ, dv], [HQ, T]
//
// Causal masks are bottom-right: query i of Lq sees keys j <= Lk - Lq + i. Only visible keys are
// read, so the contents of unused slots (also NaN) do not matter.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/tensors/array.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::reference {

/// A partial result. Over no keys, out is 0 and lse is -infinity.
template <class S>
struct Attended {
  Vector<S> out;
  S lse;
};

/// Attention of one query over all rows of K [L, d] and V [L, dv].
template <class S>
Attended<S> attend(const Vector<S>& q, const Eigen::Ref<const Matrix<S>>& K,
                   const Eigen::Ref<const Matrix<S>>& V, S scale) {
  if (K.rows() == 0) return {Vector<S>::Zero(V.cols()), -std::numeric_limits<S>::infinity()};
  const Vector<S> scores = scale * (K * q);
  const S largest = scores.maxCoeff();
  const Vector<S> weights = (scores.array() - largest).exp();
  const S sum = weights.sum();
  return {V.transpose() * weights / sum, largest + std::log(sum)};
}

/// Attention over the union of two disjoint sets of keys. An lse of +infinity (FlashMLA's for no
/// keys) counts as -infinity; an empty side contributes nothing, even if its output is NaN.
template <class S>
Attended<S> merged(const Attended<S>& a, const Attended<S>& b) {
  const auto empty = [](const Attended<S>& side) { return std::isinf(side.lse); };
  if (empty(a) && empty(b))
    return {Vector<S>::Zero(a.out.size()), -std::numeric_limits<S>::infinity()};
  if (empty(a)) return b;
  if (empty(b)) return a;
  const S largest = std::max(a.lse, b.lse);
  const S weight_a = std::exp(a.lse - largest), weight_b = std::exp(b.lse - largest);
  const S sum = weight_a + weight_b;
  return {(weight_a * a.out + weight_b * b.out) / sum, largest + std::log(sum)};
}

/// Merges two partial results; out [T, HQ, dv], lse [HQ, T].
template <class S>
void merge_attention(const TensorView<const S, 3>& out_a, const TensorView<const S, 2>& lse_a,
                     const TensorView<const S, 3>& out_b, const TensorView<const S, 2>& lse_b,
                     TensorView<S, 3> out, TensorView<S, 2> lse) {
  for (std::int64_t t = 0; t < out.extent(0); ++t)
    for (std::int64_t h = 0; h < out.extent(1); ++h) {
      const Attended<S> both = merged<S>({as_vector(at(out_a, t, h)), lse_a(h, t)},
                                         {as_vector(at(out_b, t, h)), lse_b(h, t)});
      mapped(at(out, t, h)) = both.out;
      lse(h, t) = both.lse;
    }
}

/// The number of leading keys, of `keys`, that query i of `queries` sees.
inline std::int64_t visible_keys(std::int64_t i, std::int64_t queries, std::int64_t keys,
                                 bool causal) {
  if (!causal) return keys;
  return std::clamp<std::int64_t>(keys - queries + i + 1, 0, keys);
}

/// x[:, h, :] for x [L, heads, d].
template <class S>
Matrix<S> head_of(const TensorView<const S, 3>& x, std::int64_t h) {
  Matrix<S> rows(x.extent(0), x.extent(2));
  for (std::int64_t l = 0; l < x.extent(0); ++l) rows.row(l) = mapped(at(x, l, h)).transpose();
  return rows;
}

struct AttentionOptions {
  double scale;
  bool causal = true;
  /// lse of a query that sees no key: -infinity, or FlashMLA's +infinity.
  double empty_lse = -std::numeric_limits<double>::infinity();
};

/// Attention of one row of a batch: q [Lq, HQ, d] over k [Lk, HKV, d] and v [Lk, HKV, dv]; lse is
/// [HQ, Lq].
template <class S>
void attention_row(const TensorView<const S, 3>& q, const TensorView<const S, 3>& k,
                   const TensorView<const S, 3>& v, const AttentionOptions& options,
                   TensorView<S, 3> out, TensorView<S, 2> lse) {
  const std::int64_t HQ = q.extent(1), HKV = k.extent(1);
  require(HKV > 0 && HQ % HKV == 0, "query heads are a multiple of key heads");
  require(v.extent(0) == k.extent(0) && v.extent(1) == HKV, "every key has a value");
  for (std::int64_t h = 0; h < HQ; ++h) {
    const Matrix<S> K = head_of(k, h / (HQ / HKV)), V = head_of(v, h / (HQ / HKV));
    for (std::int64_t i = 0; i < q.extent(0); ++i) {
      const std::int64_t n = visible_keys(i, q.extent(0), K.rows(), options.causal);
      const Attended<S> attended = attend<S>(as_vector(at(q, i, h)), K.topRows(n), V.topRows(n),
                                             static_cast<S>(options.scale));
      mapped(at(out, i, h)) = attended.out;
      lse(h, i) = n > 0 ? attended.lse : static_cast<S>(options.empty_lse);
    }
  }
}

/// lse[:, begin:end], the part of a row.
template <class S>
TensorView<S, 2> lse_of_row(const TensorView<S, 2>& lse, const RowRange& row) {
  return transposed(cut(transposed(lse), row.begin, row.end));
}

/// Attention over packed keys.
template <class S>
void softmax_attention(const TensorView<const S, 3>& q, const TensorView<const S, 3>& k,
                       const TensorView<const S, 3>& v, const IndexView& query_start_loc,
                       const IndexView& key_start_loc, const AttentionOptions& options,
                       TensorView<S, 3> out, TensorView<S, 2> lse) {
  require(query_start_loc.extent(0) == key_start_loc.extent(0), "every row has queries and keys");
  for (std::int64_t row = 0; row + 1 < query_start_loc.extent(0); ++row) {
    const RowRange queries = row_range(query_start_loc, row, q.extent(0));
    const RowRange keys = row_range(key_start_loc, row, k.extent(0));
    attention_row<S>(cut(q, queries.begin, queries.end), cut(k, keys.begin, keys.end),
                     cut(v, keys.begin, keys.end), options, cut(out, queries.begin, queries.end),
                     lse_of_row(lse, queries));
  }
}

/// The first `length` tokens of a request, from pages [pages, page, heads, d]. Later entries of the
/// block table are not read.
template <class S>
Array<S, 3> gathered_pages(const TensorView<const S, 4>& pages, const IndexView& block_table,
                           std::int64_t length) {
  const std::int64_t page = pages.extent(1);
  require((length + page - 1) / page <= block_table.extent(0), "the block table covers the tokens");
  Array<S, 3> tokens(Shape<3>{length, pages.extent(2), pages.extent(3)});
  for (std::int64_t l = 0; l < length; ++l) {
    const std::int32_t block = block_table(l / page);
    require(0 <= block && block < pages.extent(0), "a block table names pages of the pool");
    mapped(at(tokens.view(), l)) = mapped(at(pages, block, l % page));
  }
  return tokens;
}

/// Attention over a paged cache: k_pages [pages, page, HKV, d], v_pages [pages, page, HKV, dv],
/// block_table [N, blocks], seq_lens [N] with the row's queries.
template <class S>
void paged_attention(const TensorView<const S, 3>& q, const TensorView<const S, 4>& k_pages,
                     const TensorView<const S, 4>& v_pages, const IndexTable& block_table,
                     const IndexView& seq_lens, const IndexView& query_start_loc,
                     const AttentionOptions& options, TensorView<S, 3> out, TensorView<S, 2> lse) {
  for (std::int64_t row = 0; row < seq_lens.extent(0); ++row) {
    const RowRange queries = row_range(query_start_loc, row, q.extent(0));
    const Array<S, 3> k = gathered_pages(k_pages, at(block_table, row), seq_lens(row));
    const Array<S, 3> v = gathered_pages(v_pages, at(block_table, row), seq_lens(row));
    attention_row<S>(cut(q, queries.begin, queries.end), k, v, options,
                     cut(out, queries.begin, queries.end), lse_of_row(lse, queries));
  }
}

}  // namespace lockstep::reference
