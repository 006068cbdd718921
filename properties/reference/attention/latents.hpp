// Latent attention at a small head shape, its results, and a paged cache full of poison.
#pragma once

#include "properties/support/laws.hpp"
#include "reference/attention/mla_attention.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep::testing_support {

/// A small head shape with everything different: H 3, dn 6, dr 4, dv 5, dc 12.
template <class S>
struct Mla {
  Mla(std::int64_t T, std::int64_t L, std::uint64_t seed)
      : q_nope(draw<3>({T, 3, 6}, seed, 1)),
        q_pe(draw<3>({T, 3, 4}, seed, 2)),
        latent(draw<2>({L, 12}, seed, 3)),
        k_pe(draw<2>({L, 4}, seed, 4)),
        kv_b(draw<2>({3 * 11, 12}, seed, 5)),
        w(reference::split_kv_b<S>(kv_b, 3, 6)),
        out_shape{T, 3, 5},
        lse_shape{3, T} {}

  template <std::size_t Rank>
  static Array<S, Rank> draw(const Shape<Rank>& shape, std::uint64_t seed, std::uint64_t stream) {
    return on_grid<S>(shape, {.seed = seed, .stream = stream});
  }
  reference::MlaInputs<S> inputs() const { return {q_nope, q_pe, latent, k_pe}; }

  Array<S, 3> q_nope, q_pe;
  Array<S, 2> latent, k_pe, kv_b;
  reference::MlaUpWeights<S> w;
  Shape<3> out_shape;
  Shape<2> lse_shape;
};

/// An output and its lse.
template <class S>
struct Result {
  explicit Result(const Mla<S>& mla) : out(mla.out_shape), lse(mla.lse_shape) {}
  bool near(const Result& other, double tolerance) const {
    const Difference o = difference(out, other.out), l = difference(lse, other.lse);
    for (const S y : out)
      if (!std::isfinite(y)) return false;
    return !o.misplaced && !l.misplaced && o.relative() < tolerance && l.relative() < tolerance;
  }
  Array<S, 3> out;
  Array<S, 2> lse;
};

/// A batch of requests with latents of width 8 (value_dim 5) in pages; unused entries are NaN and
/// the block table's tail is wild.
struct Cache {
  Cache(const Sizes& lengths, std::int64_t page, std::uint64_t seed) : seq_lens(ints(lengths)) {
    std::int64_t blocks = 1, widest = 0;
    for (const std::int64_t length : lengths) {
      blocks += (length + page - 1) / page;
      widest = std::max(widest, (length + page - 1) / page + 1);
    }
    const Sizes order = draw_order(blocks);
    pages = Array<double, 3>(Shape<3>{blocks, page, 8});
    table = Array<std::int32_t, 2>(Shape<2>{seq_lens.size(), widest}, 2147480000);
    std::size_t next = 0;
    for (std::int64_t b = 0; b < seq_lens.size(); ++b) {
      latents.push_back(on_grid<double>(Shape<2>{seq_lens(b), 8},
                                        {.seed = seed, .stream = static_cast<std::uint64_t>(b)}));
      for (std::int64_t l = 0; l < seq_lens(b); ++l) {
        if (l % page == 0) table(b, l / page) = static_cast<std::int32_t>(order[next++]);
        mapped(at(pages.view(), table(b, l / page), l % page)) =
            mapped(at(latents.back().view(), l));
      }
    }
  }
  Array<double, 3> pages;
  Array<std::int32_t, 2> table;
  Array<std::int32_t, 1> seq_lens;
  std::vector<Array<double, 2>> latents;
};

}  // namespace lockstep::testing_support
