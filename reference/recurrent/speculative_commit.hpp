// What becomes of a verification: which drafts are accepted, and how their states are committed by
// copies. Commits by recomputation are mamba2_replay() and gated_delta_rule_replay(); commits by
// slot tables are in base/slots.hpp. Leviathan, Kalman, Matias 2023, "Fast Inference from
// Transformers via Speculative Decoding", algorithm 1; trees: Miao et al. 2024, "SpecInfer",
// section 4.
//
//   here         vLLM, TensorRT-Edge-LLM       shape
//   drafts       draft_token_ids               [drafts]
//   target       target_probs, p               [drafts + 1, vocabulary], after each accepted prefix
//   draft        draft_probs, q                [drafts, vocabulary]
//   accepted     num_accepted_tokens           accepted drafts + 1
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/recurrent/tree.hpp"
#include "reference/tensors/array.hpp"
#include "reference/tensors/slots.hpp"

namespace lockstep::reference {

/// state[slots[b]] = intermediate[b, n - 1] for n = accepted[b] in 1 ... T; n <= 0 leaves the slot.
/// All states of a request: state [slots, ...], intermediate [B, T, ...].
template <AnyView State, AnyView Intermediate>
void scatter_accepted(const State& state, const Intermediate& intermediate, const IndexView& slots,
                      const IndexView& accepted) {
  static_assert(Intermediate::rank() == State::rank() + 1);
  for (std::int64_t b = 0; b < intermediate.extent(0); ++b) {
    const std::int64_t n = accepted(b);
    require(n <= intermediate.extent(1), "no more tokens are accepted than were verified");
    if (n <= 0 || slots(b) < 0) continue;
    const auto source = at(intermediate, b, n - 1);
    for_each_element(at(state, slots(b)), [&](const auto& index, auto& element) {
      std::int64_t offset = 0;
      for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * source.stride(i);
      element = source.data_handle()[offset];
    });
  }
}

/// pool[:, target[i]] = pool[:, source[i]] for every layer, as if all sources were read first. The
/// pool is [layers, slots, ...].
template <class S, std::size_t Rank>
void copy_states(Array<S, Rank>& pool, const IndexView& source, const IndexView& target) {
  require(source.extent(0) == target.extent(0), "every source has a target");
  const Array<S, Rank> before = pool;
  const std::int64_t size =
      pool.size() / std::max<std::int64_t>(1, pool.extent(0) * pool.extent(1));
  for (std::int64_t layer = 0; layer < pool.extent(0); ++layer)
    for (std::int64_t i = 0; i < source.extent(0); ++i) {
      require(0 <= source(i) && source(i) < pool.extent(1), "a source is a slot");
      require(0 <= target(i) && target(i) < pool.extent(1), "a target is a slot");
      const std::int64_t first = layer * pool.extent(1);
      std::copy_n(before.data() + (first + source(i)) * size, size,
                  pool.data() + (first + target(i)) * size);
    }
}

/// The tokens that a step gives: accepted drafts, then one of the target's own.
using Emitted = std::vector<std::int64_t>;

/// Drafts are kept while they are what the target would say: `choices` [drafts + 1] are its own
/// tokens after each prefix.
inline Emitted accept_greedy(const std::vector<std::int64_t>& drafts,
                             const std::vector<std::int64_t>& choices) {
  require(choices.size() == drafts.size() + 1, "the target chooses after every prefix");
  Emitted tokens;
  for (std::size_t i = 0; i < drafts.size() && drafts[i] == choices[i]; ++i)
    tokens.push_back(drafts[i]);
  tokens.push_back(choices[tokens.size()]);
  return tokens;
}

/// The first index whose cumulative weight exceeds u times the sum of all; u in [0, 1).
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

/// Numbers in [0, 1): one to judge each draft, one to draw the token that follows the accepted
/// ones.
template <class S>
struct AcceptanceDraws {
  Vector<S> judge;  // [drafts]
  S token;
};

/// Draft x is kept with probability min(1, p(x) / q(x)); the first that is not is replaced by a
/// draw from max(p - q, 0), so that what comes out is distributed as p. After the last, a draw from
/// p.
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

/// The accepted nodes of a draft tree, root first: a child is accepted if it is what the target
/// says after its parent. `tokens` and `choices` [row]; the root itself is a token that is known
/// already.
inline std::vector<std::int64_t> accepted_path(const IndexView& parents, const RowRange& row,
                                               const std::vector<std::int64_t>& tokens,
                                               const std::vector<std::int64_t>& choices) {
  std::vector<std::int64_t> path;
  if (row.size() == 0 || path_to(parents, row, 0).empty()) return path;
  path.push_back(0);
  for (std::int64_t node = 1; node < row.size(); ++node) {  // children come after their parents
    const std::int64_t last = path.back();
    if (parents(row.begin + node) == last &&
        tokens[static_cast<std::size_t>(node)] == choices[static_cast<std::size_t>(last)])
      path.push_back(node);
  }
  return path;
}

}  // namespace lockstep::reference
