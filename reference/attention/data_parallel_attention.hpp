// Data-parallel attention: every rank keeps the cache of its own requests. Before the MLP the
// ranks' hidden states are gathered, and after it each rank takes its own rows back. This file has
// SGLang's two layouts of the gathered buffer, the choice between them, and the collectives that a
// rank issues, as pure functions of the token counts that all ranks know.
//
//   here        SGLang                        unit
//   tokens      global_num_tokens             [ranks], 0 for an idle rank
//   padded      rounded up to attn_tp_size    [ranks]
//   max_len     DpPaddingMode.MAX_LEN         rank r's rows begin at r * max(padded)
//   sum_len     DpPaddingMode.SUM_LEN         rank r's rows begin at the sum of earlier ranks' rows
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "reference/tensors/array.hpp"
#include "reference/tensors/eigen.hpp"

namespace lockstep::reference {

enum class DpPadding { max_len, sum_len };

struct DpStep {
  std::vector<std::int64_t> tokens;  ///< [ranks]
  std::int64_t attention_ranks = 1;  ///< ranks that share one data-parallel rank's attention
  bool extend = false;               ///< some rank has new tokens of prompts
  bool all_to_all = false;           ///< the experts' exchange needs equal counts (pplx, deepep)
  bool recurrent = false;            ///< the model has recurrent layers
  bool fits_custom_all_reduce = false;

  std::int64_t ranks() const { return static_cast<std::int64_t>(tokens.size()); }
};

inline std::vector<std::int64_t> dp_padded(const DpStep& step) {
  std::vector<std::int64_t> padded;
  for (const std::int64_t n : step.tokens)
    padded.push_back((n + step.attention_ranks - 1) / step.attention_ranks * step.attention_ranks);
  return padded;
}

inline DpPadding dp_padding(const DpStep& step) {
  if (step.all_to_all) return DpPadding::max_len;
  const std::vector<std::int64_t> padded = dp_padded(step);
  const std::int64_t most = *std::ranges::max_element(padded);
  const std::int64_t sum = std::accumulate(padded.begin(), padded.end(), std::int64_t{0});
  if (step.extend && step.ranks() > 1) {
    const bool idle = std::ranges::count(step.tokens, 0) > 0;
    return step.recurrent && idle ? DpPadding::max_len : DpPadding::sum_len;
  }
  if (!step.extend && step.fits_custom_all_reduce) return DpPadding::sum_len;
  return 2 * sum >= step.ranks() * most ? DpPadding::max_len : DpPadding::sum_len;
}

/// The first row of each rank in the gathered buffer, and the buffer's number of rows.
struct DpLayout {
  std::vector<std::int64_t> begin;  ///< [ranks]
  std::int64_t rows;
};

inline DpLayout dp_layout(const DpStep& step, DpPadding padding) {
  const std::vector<std::int64_t> padded = dp_padded(step);
  const std::int64_t most = *std::ranges::max_element(padded);
  DpLayout layout{{}, 0};
  for (const std::int64_t n : padded) {
    layout.begin.push_back(layout.rows);
    layout.rows += padding == DpPadding::max_len ? most : n;
  }
  return layout;
}

struct Collective {
  std::string operation;
  std::int64_t rows;
  bool operator==(const Collective& other) const = default;
};

/// The collectives that a rank issues around one MLP, in order. They are the same for all ranks,
/// also idle ones; otherwise the group would wait for ever.
inline std::vector<Collective> dp_collectives(const DpStep& step, DpPadding padding) {
  const std::int64_t rows = dp_layout(step, padding).rows;
  if (padding == DpPadding::sum_len) return {{"all_reduce", rows}};
  if (step.attention_ranks == 1) return {{"all_gather", rows}, {"reduce_scatter", rows}};
  const std::int64_t own = rows / step.ranks();
  return {{"attention_reduce_scatter", own}, {"all_gather", rows}, {"reduce_scatter", rows}};
}

/// Gathers the ranks' hidden states [tokens, hidden] into one buffer [rows, hidden]. Padding rows
/// are 0 here; in SGLang's max_len they hold stale values, and nothing may depend on them.
template <class S>
Array<S, 2> dp_gathered(const DpStep& step, DpPadding padding,
                        const std::vector<Array<S, 2>>& locals) {
  require(static_cast<std::int64_t>(locals.size()) == step.ranks(), "every rank has hidden states");
  const DpLayout layout = dp_layout(step, padding);
  Array<S, 2> all(Shape<2>{layout.rows, locals.at(0).extent(1)}, S{0});
  for (std::size_t r = 0; r < locals.size(); ++r) {
    require(locals[r].extent(0) == step.tokens[r], "a rank has as many rows as it says");
    for (std::int64_t t = 0; t < step.tokens[r]; ++t)
      mapped(at(all.view(), layout.begin[r] + t)) = mapped(at(locals[r].view(), t));
  }
  return all;
}

/// The rows of one rank, from the gathered buffer.
template <class S>
Array<S, 2> dp_scattered(const DpStep& step, DpPadding padding, const Array<S, 2>& all,
                         std::size_t rank) {
  const DpLayout layout = dp_layout(step, padding);
  Array<S, 2> own(Shape<2>{step.tokens.at(rank), all.extent(1)});
  for (std::int64_t t = 0; t < own.extent(0); ++t)
    mapped(at(own.view(), t)) = mapped(at(all.view(), layout.begin[rank] + t));
  return own;
}

}  // namespace lockstep::reference
