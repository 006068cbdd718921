// The schedule of FlashMLA's dense decode (DeepSeek 2025, get_mla_metadata), as pure functions: a
// greedy walk gives every part of the machine the same payload of blocks of 64 keys, and splits
// requests where a part is full. Also the combination of the partial results.
//
//   here        FlashMLA                     unit
//   parts       num_sm_parts                 groups of thread blocks that share nothing
//   seq_lens    cache_seqlens                tokens; a request without tokens counts as one block
//   num_splits  num_splits                   [B + 1], cumulative
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/attention/softmax_attention.hpp"

namespace lockstep::reference {

constexpr std::int64_t kSplitBlock = 64;    ///< keys per block
constexpr std::int64_t kSplitOverhead = 5;  ///< cost of starting a request, in blocks

/// The number of parts that a machine with `processors` processors runs at once.
inline std::int64_t split_parts(std::int64_t processors, std::int64_t key_heads,
                                std::int64_t query_rows) {
  const std::int64_t tiles = (query_rows / key_heads + 63) / 64;
  return std::max<std::int64_t>(processors / key_heads / tiles, 1);
}

struct SplitPart {
  std::int64_t begin_request;  ///< B if the part is idle
  std::int64_t begin_block;
  std::int64_t begin_split;  ///< number of the split of begin_request with which the part begins
  std::int64_t end_request;  ///< the last request
  std::int64_t end_block;    ///< end of the blocks of end_request
};

struct SplitSchedule {
  std::vector<SplitPart> parts;
  std::vector<std::int64_t> num_splits;  // [B + 1]
};

inline std::int64_t split_blocks(std::int64_t seq_len) {
  return std::max<std::int64_t>(seq_len - 1, 0) / kSplitBlock + 1;
}

inline SplitSchedule split_schedule(const IndexView& seq_lens, std::int64_t parts) {
  require(parts >= 1, "a machine has at least one part");
  const std::int64_t B = seq_lens.extent(0);
  std::int64_t total = 0;
  for (std::int64_t b = 0; b < B; ++b) total += split_blocks(seq_lens(b)) + kSplitOverhead;
  const std::int64_t payload = (total + parts - 1) / parts + kSplitOverhead;
  SplitSchedule schedule{{}, {0}};
  std::int64_t request = 0, block = 0, split = 0;
  for (std::int64_t i = 0; i < parts; ++i) {
    SplitPart part{request, block, split, 0, 0};
    for (std::int64_t left = payload; request < B;) {
      const std::int64_t rest = split_blocks(seq_lens(request)) - block;
      if (left < rest + kSplitOverhead) {  // the part ends within the request
        if (left > kSplitOverhead) block += left - kSplitOverhead, ++split;
        break;
      }
      left -= rest + kSplitOverhead;
      schedule.num_splits.push_back(schedule.num_splits.back() + split + 1);
      ++request, block = 0, split = 0;
    }
    part.end_request = block > 0 ? request : request - 1;
    part.end_block = block > 0               ? block
                     : part.end_request >= 0 ? split_blocks(seq_lens(part.end_request))
                                             : 0;
    schedule.parts.push_back(part);
  }
  return schedule;
}

/// A split's result in the form that kernels keep: normalised output, lse in base 2.
template <class S>
struct SplitPartial {
  Vector<S> out;
  S lse2;
};

/// Combines a request's splits; outputs have `dv` columns, the lse is natural. If all splits are
/// empty, or there is none (in a schedule that skips empty requests), the output is 0 and the lse
/// +infinity.
template <class S>
Attended<S> combined(const std::vector<SplitPartial<S>>& splits, std::int64_t dv) {
  const S ln2 = std::log(S{2});
  const Attended<S> empty{Vector<S>::Zero(dv), std::numeric_limits<S>::infinity()};
  if (splits.empty()) return empty;  // NOLINT(performance-no-automatic-move)
  Attended<S> whole{splits[0].out, splits[0].lse2 * ln2};
  for (std::size_t i = 1; i < splits.size(); ++i)
    whole = merged<S>(whole, {splits[i].out, splits[i].lse2 * ln2});
  return std::isinf(whole.lse) ? empty : whole;
}

/// Attention of one query over keys K [L, d] and values V [L, dv], by the schedule's splits of
/// request b.
template <class S>
Attended<S> attend_split(const Vector<S>& q, const Matrix<S>& K, const Matrix<S>& V, S scale,
                         const SplitSchedule& schedule, std::int64_t b) {
  std::vector<SplitPartial<S>> splits;
  for (const SplitPart& part : schedule.parts) {
    if (b < part.begin_request || b > part.end_request) continue;
    const std::int64_t first = b == part.begin_request ? part.begin_block : 0;
    const std::int64_t last = b == part.end_request ? part.end_block : split_blocks(K.rows());
    const std::int64_t begin = std::min(first * kSplitBlock, static_cast<std::int64_t>(K.rows()));
    const std::int64_t end = std::min(last * kSplitBlock, static_cast<std::int64_t>(K.rows()));
    const Attended<S> a =
        attend<S>(q, K.middleRows(begin, end - begin), V.middleRows(begin, end - begin), scale);
    splits.push_back({a.out, a.lse / std::log(S{2})});
  }
  return combined(splits, V.cols());
}

}  // namespace lockstep::reference
