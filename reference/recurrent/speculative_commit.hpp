// Acceptance of a verification's drafts, and commits of their states by copies. Commits by
// recomputation are mamba2_replay() and gated_delta_rule_replay(); commits by slot tables are in
// reference/tensors/slots.hpp. Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers
// via Speculative Decoding", algorithm 1; trees: Miao et al. 2024, "SpecInfer", section 4.
//
//   here         vLLM, TensorRT-Edge-LLM       shape
//   drafts       draft_token_ids               [drafts]
//   target       target_probs, p               [drafts + 1, vocabulary], after each prefix of
//                                              drafts
//   draft        draft_probs, q                [drafts, vocabulary]
//   accepted     num_accepted_tokens           accepted drafts + 1
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "reference/recurrent/tree.hpp"
#include "reference/tensors/array.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::reference {

namespace commit_detail {

/// Whether entry i of a list names one of `count` slots; moves skip numbers below 0.
inline bool names_slot(const IndexView& list, std::int64_t i, std::int64_t count) {
  require(list(i) < count, "a slot is below the number of slots");
  return list(i) >= 0;
}

/// Copies the elements of `source` to `target`, of the same shape.
template <AnyView Source, AnyView Target>
void copy_elements(const Source& source, const Target& target) {
  for_each_element(target, [&](const auto& index, auto& element) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * source.stride(i);
    element = source.data_handle()[offset];
  });
}

}  // namespace commit_detail

/// state[slots[b]] = intermediate[b, n - 1] for n = accepted[b] in 1 ... T; n <= 0 leaves the slot
/// as it is. state is [slots, ...], intermediate [B, T, ...]. Slots below 0 are skipped.
template <AnyView State, AnyView Intermediate>
void scatter_accepted(const State& state, const Intermediate& intermediate, const IndexView& slots,
                      const IndexView& accepted) {
  static_assert(Intermediate::rank() == State::rank() + 1);
  for (std::int64_t b = 0; b < intermediate.extent(0); ++b) {
    const std::int64_t n = accepted(b);
    require(n <= intermediate.extent(1), "no more tokens are accepted than were verified");
    if (commit_detail::names_slot(slots, b, state.extent(0)) && n > 0)
      commit_detail::copy_elements(at(intermediate, b, n - 1), at(state, slots(b)));
  }
}

/// pool[:, target[i]] = pool[:, source[i]] for every layer, as if all sources were read first. The
/// pool is [layers, slots, ...]. Moves from or to a number below 0 are skipped; no slot may be the
/// target of two moves.
template <AnyView Pool>
void copy_states(const Pool& pool, const IndexView& source, const IndexView& target) {
  using commit_detail::names_slot;
  using S = std::remove_const_t<ElementOf<Pool>>;
  require(source.extent(0) == target.extent(0), "every source has a target");
  std::set<std::int32_t> named;
  for (std::int64_t i = 0; i < source.extent(0); ++i) {
    names_slot(source, i, pool.extent(1));
    const bool moves = names_slot(target, i, pool.extent(1));
    require(!moves || named.insert(target(i)).second, "no slot is the target of two moves");
  }
  for (std::int64_t layer = 0; layer < pool.extent(0); ++layer) {
    std::vector<S> read;
    for (std::int64_t i = 0; i < source.extent(0); ++i)
      if (source(i) >= 0 && target(i) >= 0)
        for_each_element(at(pool, layer, source(i)),
                         [&](const auto&, const S& element) { read.push_back(element); });
    std::size_t next = 0;
    for (std::int64_t i = 0; i < source.extent(0); ++i)
      if (source(i) >= 0 && target(i) >= 0)
        for_each_element(at(pool, layer, target(i)),
                         [&](const auto&, S& element) { element = read[next++]; });
  }
}
template <class S, std::size_t Rank>
void copy_states(Array<S, Rank>& pool, const IndexView& source, const IndexView& target) {
  copy_states(pool.view(), source, target);
}

/// pool[:, slots[i]] = 0 for every layer of a pool [layers, slots, ...]; numbers below 0 are
/// skipped.
template <AnyView Pool>
void zero_states(const Pool& pool, const IndexView& slots) {
  for (std::int64_t i = 0; i < slots.extent(0); ++i)
    for (std::int64_t layer = 0;
         commit_detail::names_slot(slots, i, pool.extent(1)) && layer < pool.extent(0); ++layer)
      fill(at(pool, layer, slots(i)), ElementOf<Pool>{});
}

/// Commits accepted tokens in conv states: for every layer and channel of slot slots[n], columns 0
/// ... width - 2 get the contents of columns accepted[n] - 1 ... accepted[n] + width - 3. The pool
/// is [layers, slots, D, C]. Slots below 0 are skipped, and so are counts below 2 and counts that
/// reach beyond the columns.
template <class S>
void shift_conv_states(const TensorView<S, 4>& pool, const IndexView& slots,
                       const IndexView& accepted, std::int64_t width) {
  require(2 <= width && pool.extent(3) >= width - 1, "a conv state has at least W - 1 columns");
  require(accepted.extent(0) == slots.extent(0), "every slot has a count");
  for (std::int64_t n = 0; n < slots.extent(0); ++n) {
    const std::int64_t first = accepted(n) - 1;
    if (!commit_detail::names_slot(slots, n, pool.extent(1))) continue;
    if (first < 1 || first + width - 1 > pool.extent(3)) continue;
    for (std::int64_t layer = 0; layer < pool.extent(0); ++layer) {
      const TensorView<S, 2> state = at(pool, layer, std::int64_t{slots(n)});  // [D, C]
      for (std::int64_t d = 0; d < state.extent(0); ++d)
        for (std::int64_t c = 0; c < width - 1; ++c) state(d, c) = state(d, first + c);
    }
  }
}

/// The tokens that a step emits: accepted drafts, then one token of the target model.
using Emitted = std::vector<std::int64_t>;

/// Accepts drafts as long as they equal the target's choices; `choices` [drafts + 1] are the
/// target's tokens after each prefix of drafts.
inline Emitted accept_greedy(const std::vector<std::int64_t>& drafts,
                             const std::vector<std::int64_t>& choices) {
  require(choices.size() == drafts.size() + 1, "the target chooses after every prefix");
  Emitted tokens;
  for (std::size_t i = 0; i < drafts.size() && drafts[i] == choices[i]; ++i)
    tokens.push_back(drafts[i]);
  tokens.push_back(choices[tokens.size()]);
  return tokens;
}

/// The first index whose cumulative weight exceeds u times the sum of all weights; u in [0, 1).
template <class S>
std::int64_t drawn_from(const Vector<S>& weights, S u) {
  const S goal = u * weights.sum();
  S sum = 0;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < weights.size(); ++i) {
    if (!(weights(i) > 0)) continue;
    last = i;
    if ((sum += weights(i)) > goal) return i;
  }
  return last;
}

/// Random numbers in [0, 1): one to judge each draft, one to draw the token after the accepted
/// drafts.
template <class S>
struct AcceptanceDraws {
  Vector<S> judge;  // [drafts]
  S token;
};

/// Accepts draft x with probability min(1, p(x) / q(x)). The first rejected draft is replaced by a
/// draw from max(p - q, 0), which makes emitted tokens distributed as p. If all are accepted, a
/// draw from p follows.
template <class S>
Emitted accept_random(const std::vector<std::int64_t>& drafts, const Matrix<S>& target,
                      const Matrix<S>& draft, const AcceptanceDraws<S>& draws) {
  require(target.rows() == static_cast<std::int64_t>(drafts.size()) + 1,
          "the target has a distribution after every prefix");
  Emitted tokens;
  for (const std::int64_t x : drafts) {
    const auto i = static_cast<std::int64_t>(tokens.size());
    const S p = target(i, x), q = draft(i, x);
    if (!(draws.judge(i) * q < p)) {
      const Vector<S> rest = (target.row(i) - draft.row(i)).cwiseMax(S{0}).transpose();
      tokens.push_back(drawn_from<S>(rest, draws.token));
      return tokens;
    }
    tokens.push_back(x);
  }
  tokens.push_back(drawn_from<S>(target.row(target.rows() - 1).transpose(), draws.token));
  return tokens;
}

/// The accepted nodes of a draft tree, root first: a child is accepted if its token is the target's
/// choice after its parent. `tokens` and `choices` have one entry per node of the row. The root is
/// a known token, and always accepted.
inline std::vector<std::int64_t> accepted_path(const IndexView& parents, const RowRange& row,
                                               const std::vector<std::int64_t>& tokens,
                                               const std::vector<std::int64_t>& choices) {
  std::vector<std::int64_t> path;
  if (row.size() == 0 || path_to(parents, row, 0).empty()) return path;
  path.push_back(0);
  for (std::int64_t node = 1; node < row.size(); ++node) {  // children have larger numbers
    const std::int64_t last = path.back();
    if (parents(row.begin + node) == last &&
        tokens[static_cast<std::size_t>(node)] == choices[static_cast<std::size_t>(last)])
      path.push_back(node);
  }
  return path;
}

}  // namespace lockstep::reference
