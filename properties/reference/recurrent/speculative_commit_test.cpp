// Acceptance of drafts, and that commits by copy are the accepted steps.
#include "reference/recurrent/speculative_commit.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/recurrences.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::Emitted;

// Verify with snapshots, then scatter: the states of the accepted decode steps, a = T included (an
// early scatter kernel skipped it). Nothing accepted leaves the slot.
RC_GTEST_PROP(SpeculativeCommit, aScatterIsTheAcceptedSteps, ()) {
  using Run = GatedDeltaRun<double>;
  const std::int64_t T = *rc::gen::inRange<std::int64_t>(1, 6);
  const Run run(2 * T, 3, draw_seed());
  const auto starts = starts_of({T, T}), slots = ints({2, 0});
  auto in = run.inputs(0, 2 * T);
  in.rows.query_start_loc = starts.view();
  in.rows.slots.indices = slots.view();
  auto state = run.states(), expected = run.states();
  Shape<4> shape = run.state_shape;
  shape[0] = 2 * T;
  Array<double, 4> snapshots(shape);
  Array<double, 3> out(run.out_shape);
  Run::update(in, state.view(), out.view(), {}, snapshots.view());
  const auto accepted = ints({*rc::gen::inRange<std::int64_t>(-1, T + 1), T});
  reference::scatter_accepted(
      state.view(), make_view(snapshots.data(), Shape<5>{2, T, shape[1], shape[2], shape[3]}),
      slots.view(), accepted.view());
  for (std::int64_t row = 0; row < 2; ++row)
    for (std::int64_t t = 0; t < accepted(row); ++t) {
      Array<double, 3> one({1, run.HV, run.V});
      Run::update(run.inputs(row * T + t, row * T + t + 1),
                  cut(expected.view(), slots(row), slots(row) + 1), one.view());
    }
  RC_ASSERT(same_bits(state, expected));
}

TEST(SpeculativeCommit, moreThanWasVerifiedIsNotAccepted) {
  Array<double, 2> state(Shape<2>{1, 1}, 0.0);
  const Array<double, 3> snapshots(Shape<3>{1, 2, 1}, 1.0);
  const auto slot = ints({0}), three = ints({3});
  EXPECT_THROW(
      reference::scatter_accepted(state.view(), snapshots.view(), slot.view(), three.view()),
      ContractViolation);
}

// A permutation of slots in one launch: sources are read before targets are written.
TEST(SpeculativeCommit, copiesReadAllSourcesFirst) {
  Array<double, 3> pool(Shape<3>{2, 3, 2});
  for (std::int64_t i = 0; i < pool.size(); ++i) pool.data()[i] = static_cast<double>(i);
  const Array<double, 3> before = pool;
  const auto source = ints({0, 1, 2}), target = ints({1, 2, 0});
  reference::copy_states(pool, source, target);
  for (std::int64_t layer = 0; layer < 2; ++layer)
    for (std::int64_t i = 0; i < 3; ++i)
      EXPECT_TRUE(
          same_bits(at(pool.view(), layer, target(i)), at(before.view(), layer, source(i))));
}

TEST(RejectionSampling, greedyKeepsWhatTheTargetWouldSay) {
  EXPECT_EQ(reference::accept_greedy({4, 5, 6}, {4, 5, 7, 9}), (Emitted{4, 5, 7}));
  EXPECT_EQ(reference::accept_greedy({4, 5, 6}, {4, 5, 6, 9}), (Emitted{4, 5, 6, 9}));
  EXPECT_EQ(reference::accept_greedy({4, 5}, {3, 5, 6}), (Emitted{3}));
  EXPECT_EQ(reference::accept_greedy({}, {3}), (Emitted{3}));
}

Matrix<double> distributions(std::int64_t rows, std::uint64_t stream, std::uint64_t seed) {
  Matrix<double> p(rows, 4);
  for (std::int64_t i = 0; i < rows; ++i) {  // multiples of 1/16, zeros among them
    std::int64_t left = 16;
    for (std::int64_t x = 0; x < 3; ++x) {
      const auto part =
          static_cast<std::int64_t>(random_below(static_cast<std::uint64_t>(left + 1), seed, stream,
                                                 static_cast<std::uint64_t>(3 * i + x)));
      p(i, x) = static_cast<double>(part) / 16;
      left -= part;
    }
    p(i, 3) = static_cast<double>(left) / 16;
  }
  return p;
}

// The first token that comes out is distributed as the target, whatever the draft model says:
// summed over every draft with its probability and every draw of a fine grid.
RC_GTEST_PROP(RejectionSampling, firstTokensAreDistributedAsTheTarget, ()) {
  const std::uint64_t seed = draw_seed();
  const Matrix<double> p = distributions(2, 1, seed), q = distributions(1, 2, seed);
  Vector<double> frequency = Vector<double>::Zero(4);
  const int steps = 96;
  for (std::int64_t draft = 0; draft < 4; ++draft)
    for (int i = 0; q(0, draft) > 0 && i < steps; ++i)
      for (int j = 0; j < steps; ++j) {
        const reference::AcceptanceDraws<double> draws{
            Vector<double>::Constant(1, (i + 0.5) / steps), (j + 0.5) / steps};
        const Emitted tokens = reference::accept_random<double>({draft}, p, q, draws);
        frequency(tokens[0]) += q(0, draft) / (steps * steps);
        RC_ASSERT(tokens.size() == 1 || tokens[0] == draft);
        RC_ASSERT(p(0, tokens[0]) > 0);
      }
  for (std::int64_t x = 0; x < 4; ++x) RC_ASSERT(std::abs(frequency(x) - p(0, x)) < 0.03);
}

RC_GTEST_PROP(RejectionSampling, aDraftModelThatIsTheTargetIsAlwaysRight, ()) {
  const Matrix<double> p = distributions(3, 1, draw_seed());
  std::vector<std::int64_t> drafts;
  for (std::int64_t i = 0; i < 2; ++i)
    drafts.push_back(reference::drawn_from<double>(p.row(i).transpose(), 0.37));
  const reference::AcceptanceDraws<double> draws{Vector<double>::Constant(2, 0.999), 0.5};
  const Emitted tokens = reference::accept_random<double>(drafts, p, p.topRows(2), draws);
  RC_ASSERT(tokens.size() == 3u && tokens[0] == drafts[0] && tokens[1] == drafts[1]);
}

// Of a tree, the path that the target would have said; of a chain, what greedy acceptance keeps.
TEST(TreeAcceptance, followsTheTarget) {
  const auto parents = ints({-1, 0, 0, 2, 2, 4});
  const std::vector<std::int64_t> tokens{1, 10, 11, 12, 13, 14};
  const auto path = [&](const std::vector<std::int64_t>& choices) {
    return reference::accepted_path(parents.view(), {0, 6}, tokens, choices);
  };
  EXPECT_EQ(path({11, 0, 13, 0, 14, 0}), (Sizes{0, 2, 4, 5}));
  EXPECT_EQ(path({10, 11, 0, 0, 0, 0}), (Sizes{0, 1}));
  EXPECT_EQ(path({9, 0, 13, 0, 14, 0}), (Sizes{0})) << "below a rejected node nothing is accepted";
  EXPECT_TRUE(reference::accepted_path(ints({0}).view(), {0, 1}, {1}, {1}).empty());
}

// The first index whose cumulative weight exceeds u of the whole; indices of no weight are never
// drawn, not by rounding either.
TEST(RejectionSampling, drawsByCumulativeWeights) {
  Vector<double> weights(5);
  weights << 0, 1, 0, 3, 0;
  const auto drawn = [&](double u) { return reference::drawn_from<double>(weights, u); };
  EXPECT_EQ(drawn(0), 1);
  EXPECT_EQ(drawn(0.2499), 1);
  EXPECT_EQ(drawn(0.25), 3) << "the weight must be exceeded";
  EXPECT_EQ(drawn(0.999), 3);
  EXPECT_EQ(drawn(1), 3) << "beyond the sum: the last that has a weight";
}

// A draft with equal probabilities is kept by every draw below 1, and one that the target never
// says by none.
TEST(RejectionSampling, comparesTheDrawWithTheRatio) {
  Matrix<double> target(2, 2), draft(1, 2);
  target << 0.25, 0.75, 0, 1;
  draft << 0.5, 0.5;
  const auto first = [&](std::int64_t x, double judge) {
    const reference::AcceptanceDraws<double> draws{Vector<double>::Constant(1, judge), 0.0};
    return reference::accept_random<double>({x}, target, draft, draws);
  };
  EXPECT_EQ(first(0, 0.4999), (Emitted{0, 1}));
  EXPECT_EQ(first(0, 0.5), (Emitted{1})) << "a draw at the ratio is not below it";
  EXPECT_EQ(first(1, 0.999), (Emitted{1, 1}));
  target << 0, 1, 0, 1;
  EXPECT_EQ(first(0, 0.0), (Emitted{1}));
}

// Copies within a pool of several layers leave every other slot as it is, and refuse what is none.
TEST(SpeculativeCommit, copiesStayWithinTheirSlots) {
  Array<double, 3> pool(Shape<3>{2, 4, 3});
  for (std::int64_t i = 0; i < pool.size(); ++i) pool.data()[i] = static_cast<double>(i);
  const Array<double, 3> before = pool;
  reference::copy_states(pool, ints({3}), ints({1}));
  for_each_element(pool.view(), [&](const auto& i, double e) {
    EXPECT_EQ(e, before(i[0], i[1] == 1 ? 3 : i[1], i[2]));
  });
  EXPECT_THROW(reference::copy_states(pool, ints({4}), ints({1})), ContractViolation);
  EXPECT_THROW(reference::copy_states(pool, ints({0}), ints({4})), ContractViolation);
  EXPECT_THROW(reference::copy_states(pool, ints({0, 2}), ints({1, 1})), ContractViolation);
  const Array<double, 3> moved = pool;
  reference::copy_states(pool, ints({0, -1}), ints({-1, 2}));
  EXPECT_TRUE(same_bits(pool, moved)) << "a move from or to no slot";
  EXPECT_THROW(reference::copy_states(pool, ints({0, 1}), ints({2})), ContractViolation);
  Array<double, 3> empty(Shape<3>{0, 4, 3});
  EXPECT_NO_THROW(reference::copy_states(empty, ints({0}), ints({1})));
  Array<double, 2> state(Shape<2>{2, 1}, 5.0);
  const Array<double, 3> snapshots(Shape<3>{1, 2, 1}, 1.0);
  reference::scatter_accepted(state.view(), snapshots.view(), ints({-1}).view(), ints({1}).view());
  EXPECT_EQ(state(0, 0) + state(1, 0), 10) << "a row without a slot";
}

// Zeroing reaches every layer of the slots that are named, and nothing else.
TEST(SpeculativeCommit, zeroedSlotsAreZeroInEveryLayer) {
  Array<double, 3> pool(Shape<3>{2, 4, 3}, 7.0);
  reference::zero_states(pool.view(), ints({2, -1, 0}).view());
  for_each_element(pool.view(),
                   [](const auto& i, double e) { EXPECT_EQ(e, i[1] % 2 == 0 ? 0 : 7); });
  EXPECT_THROW(reference::zero_states(pool.view(), ints({4}).view()), ContractViolation);
}

// The history after the accepted tokens moves to the front; columns may overlap.
TEST(SpeculativeCommit, acceptedHistoriesMoveToTheFront) {
  Array<double, 4> pool(Shape<4>{2, 4, 3, 6});
  for (std::int64_t i = 0; i < pool.size(); ++i) pool.data()[i] = static_cast<double>(i);
  const Array<double, 4> before = pool;
  const auto slots = ints({3, 1, 0, -1}), accepted = ints({2, 1, 5, 2});
  reference::shift_conv_states(pool.view(), slots.view(), accepted.view(), 4);
  for_each_element(pool.view(), [&](const auto& i, double e) {
    const bool moves = i[1] == 3 && i[3] < 3;  // 5 accepted reach beyond six columns
    EXPECT_EQ(e, before(i[0], i[1], i[2], i[3] + (moves ? 1 : 0)));
  });
}

TEST(TreeAcceptance, startsAtAKnownRoot) {
  const auto parents = ints({0, -1, 0, 1});  // a row of three after another token
  EXPECT_EQ(reference::accepted_path(parents.view(), {1, 4}, {7, 8, 9}, {8, 9, 0}),
            (Sizes{0, 1, 2}));
  EXPECT_TRUE(reference::accepted_path(parents.view(), {1, 1}, {}, {}).empty());
  EXPECT_EQ(reference::accepted_path(parents.view(), {1, 2}, {7}, {8}), (Sizes{0}));
  EXPECT_EQ(reference::accepted_path(ints({-1, 5}).view(), {0, 2}, {7, 8}, {8, 0}), (Sizes{0}))
      << "an invalid child does not make its root one";
  EXPECT_THROW(reference::accept_greedy({1}, {1}), ContractViolation);
}

}  // namespace
}  // namespace lockstep
