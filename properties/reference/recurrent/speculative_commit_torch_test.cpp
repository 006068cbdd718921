// Acceptance of drafts and commits by copy against LibTorch's cumulative sums and indexing.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "properties/support/laws.hpp"
#include "properties/support/torch_bridge.hpp"
#include "reference/recurrent/speculative_commit.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::Emitted;

at::Tensor tensor_of_matrix(const Matrix<double>& m) {
  return at::from_blob(const_cast<double*>(m.data()), {m.rows(), m.cols()}, at::kDouble).clone();
}

/// Distributions whose weights are multiples of 1/64, and their draws.
struct Verification {
  Verification(std::int64_t drafts, std::uint64_t seed)
      : target(distributions(drafts + 1, seed, 1)), draft(distributions(drafts, seed, 2)) {
    draws.judge = Vector<double>(drafts);
    for (std::int64_t i = 0; i < drafts; ++i) {
      const auto at = static_cast<std::uint64_t>(i);
      tokens.push_back(static_cast<std::int64_t>(random_below(8, seed, 3, at)));
      draws.judge(i) = static_cast<double>(random_below(1000, seed, 4, at)) / 1000;
    }
    draws.token = static_cast<double>(random_below(1000, seed, 5, 0)) / 1000;
  }
  static Matrix<double> distributions(std::int64_t rows, std::uint64_t seed, std::uint64_t stream) {
    Matrix<double> p(rows, 8);
    for (std::int64_t i = 0; i < p.size(); ++i)
      p.data()[i] =
          static_cast<double>(random_below(5, seed, stream, static_cast<std::uint64_t>(i)));
    for (std::int64_t i = 0; i < rows; ++i) {
      p(i, 0) += 1;
      p.row(i) /= p.row(i).sum();
    }
    return p;
  }
  Matrix<double> target, draft;
  std::vector<std::int64_t> tokens;
  reference::AcceptanceDraws<double> draws;
};

/// All at once: the first draft whose draw is not below p / q ends the run.
Emitted eager(const Verification& v) {
  const auto drafts = static_cast<std::int64_t>(v.tokens.size());
  const at::Tensor p = tensor_of_matrix(v.target), q = tensor_of_matrix(v.draft);
  std::int64_t accepted = 0;
  if (drafts > 0) {
    const at::Tensor x = at::tensor(v.tokens).unsqueeze(1);
    const at::Tensor px = p.slice(0, 0, drafts).gather(1, x), qx = q.gather(1, x);
    const at::Tensor judge =
        at::from_blob(const_cast<double*>(v.draws.judge.data()), {drafts, 1}, at::kDouble);
    accepted = (judge * qx < px).to(at::kLong).cumprod(0).sum().item<std::int64_t>();
  }
  const at::Tensor rest =
      accepted < drafts ? at::clamp_min(p[accepted] - q[accepted], 0) : p[drafts];
  const at::Tensor reached = rest.cumsum(0) > v.draws.token * rest.sum();
  Emitted tokens(v.tokens.begin(), v.tokens.begin() + accepted);
  tokens.push_back(at::logical_and(reached, rest > 0).to(at::kInt).argmax().item<std::int64_t>());
  return tokens;
}

TEST(SpeculativeCommitAgainstTorch, randomAcceptanceAgrees) {
  std::int64_t all = 0, none = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const Verification v(static_cast<std::int64_t>(seed % 5), seed);
    const Emitted found = reference::accept_random(v.tokens, v.target, v.draft, v.draws);
    EXPECT_EQ(found, eager(v)) << seed;
    all += found.size() == v.tokens.size() + 1;
    none += found.size() == 1;
  }
  EXPECT_GT(all, 50);
  EXPECT_GT(none, 50);
}

TEST(SpeculativeCommitAgainstTorch, greedyAcceptanceAgrees) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::vector<std::int64_t> drafts, choices;
    for (std::uint64_t i = 0; i <= 4; ++i) {
      if (i < 4) drafts.push_back(static_cast<std::int64_t>(random_below(2, seed, 1, i)));
      choices.push_back(static_cast<std::int64_t>(random_below(2, seed, 2, i)));
    }
    const at::Tensor said = at::tensor(choices);
    const auto kept = (at::tensor(drafts) == said.slice(0, 0, 4)).to(at::kLong).cumprod(0).sum();
    Emitted expected(drafts.begin(), drafts.begin() + kept.item<std::int64_t>());
    expected.push_back(said[kept.item<std::int64_t>()].item<std::int64_t>());
    EXPECT_EQ(reference::accept_greedy(drafts, choices), expected) << seed;
  }
}

// A scatter of accepted states is an index_copy of gathered snapshots; a copy of slots likewise.
TEST(SpeculativeCommitAgainstTorch, commitsAreIndexedCopies) {
  const auto snapshots = on_grid<double>(Shape<5>{4, 3, 2, 3, 5}, {.stream = 1});
  auto state = on_grid<double>(Shape<4>{6, 2, 3, 5}, {.stream = 2});
  const auto slots = ints({5, 0, 3, 2}), accepted = ints({3, 0, 1, 2});
  at::Tensor expected = tensor_of(state);
  const at::Tensor counts = tensor_of(accepted).to(at::kLong);
  const at::Tensor rows = at::nonzero(counts > 0).squeeze(1);
  const at::Tensor gathered = tensor_of(snapshots).index({rows, counts.index_select(0, rows) - 1});
  expected.index_copy_(0, tensor_of(slots).to(at::kLong).index_select(0, rows), gathered);
  reference::scatter_accepted(state.view(), snapshots.view(), slots.view(), accepted.view());
  EXPECT_TRUE(same_bits(state, array_of<double, 4>(expected)));

  auto pool = on_grid<double>(Shape<3>{2, 6, 5}, {.stream = 3});
  const auto source = ints({1, 2, 0}), target = ints({2, 0, 4});
  at::Tensor moved = tensor_of(pool);
  moved.index_copy_(1, tensor_of(target).to(at::kLong),
                    tensor_of(pool).index_select(1, tensor_of(source).to(at::kLong)));
  reference::copy_states(pool, source, target);
  EXPECT_TRUE(same_bits(pool, array_of<double, 3>(moved)));
}

}  // namespace
}  // namespace lockstep
