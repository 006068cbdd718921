// Laws of replay-state decode: state, ring and cursor together are the recurrence's state.
#include "reference/recurrent/replay_rings.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "properties/support/recurrences.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::GatedDeltaToken;
using reference::Mamba2Token;
using reference::ReplayState;
constexpr std::int64_t kV = 3, kK = 5;

Vector<double> drawn(std::int64_t size, std::uint64_t seed, std::uint64_t stream) {
  const auto values = on_grid<double>(Shape<1>{size}, {.seed = seed, .stream = stream});
  return as_vector(values.view());
}

template <class Token>
Token token(std::uint64_t seed, std::uint64_t t) {
  const auto part = [&](std::int64_t size, std::uint64_t i) {
    return drawn(size, seed, 8 * t + i);
  };
  const double a = std::abs(part(1, 4)(0)), b = std::abs(part(1, 5)(0));
  if constexpr (std::is_same_v<Token, Mamba2Token<double>>)
    return {part(kV, 1), part(kK, 2), part(kK, 3), -a, b};
  else
    return {part(kK, 1), part(kK, 2).normalized(), part(kV, 3), -a, b};
}

/// The recurrences as their papers have them.
Vector<double> step(Matrix<double>& S, const GatedDeltaToken<double>& t) {
  S *= std::exp(t.g);
  S += (t.beta * (t.v - S * t.k) * t.k.transpose()).eval();
  return S * t.q;
}
Vector<double> step(Matrix<double>& S, const Mamba2Token<double>& t) {
  S = std::exp(t.A * t.d) * S + t.d * t.x * t.B.transpose();
  return S * t.C;
}

Matrix<double> first_state(std::uint64_t seed) {
  return drawn(kV * kK, seed, 7).reshaped<Eigen::RowMajor>(kV, kK);
}

bool near(const Matrix<double>& a, const Matrix<double>& b) {
  return (a - b).norm() <= 1e-12 * (1 + b.norm());
}

template <class Token>
class ReplayStateTest : public testing::Test {};
using Tokens = testing::Types<GatedDeltaToken<double>, Mamba2Token<double>>;
TYPED_TEST_SUITE(ReplayStateTest, Tokens);

// The state need not be written at every token: outputs and materialised states are the
// recurrence's for every length of the ring and every position of the first token.
TYPED_TEST(ReplayStateTest, equalsTheRecurrence) {
  for (const std::int64_t L : {1, 2, 3, 16, 17, 100})
    for (const std::int64_t position : {0, 1, 15, 16}) {
      Matrix<double> S = first_state(3);
      auto r = reference::replay_state(S, L);
      for (std::int64_t t = 0; t < 50; ++t) {
        const auto x = token<TypeParam>(3, t);
        const Vector<double> expected = step(S, x);
        ASSERT_TRUE(near(reference::replay_step(r, position + t, L, x), expected)) << L << " " << t;
        ASSERT_TRUE(near(reference::materialised(r, r.cursor), S)) << L << " " << t;
        ASSERT_EQ(r.cursor, std::min(t + 1, (position + t + 1) % L)) << "by the request's position";
        if (L == 1) {
          ASSERT_TRUE(near(r.state, S)) << "a ring of one is the snapshot recurrence";
        }
      }
    }
}

// A slot that is used again may hold anything behind the cursor.
TYPED_TEST(ReplayStateTest, entriesBehindTheCursorAreNotRead) {
  const std::int64_t L = 4;
  auto clean = reference::replay_state(first_state(5), L), dirty = clean;
  for (std::int64_t t = 0; t < 20; ++t) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    dirty.k.bottomRows(L - dirty.cursor).setConstant(nan);
    dirty.u.bottomRows(L - dirty.cursor).setConstant(nan);
    dirty.g.tail(L - dirty.cursor).setConstant(nan);
    const auto x = token<TypeParam>(5, t);
    const Vector<double> a = reference::replay_step(clean, t, L, x);
    ASSERT_EQ(a, reference::replay_step(dirty, t, L, x));
    ASSERT_EQ(clean.state, dirty.state);
  }
}

// A prefix cache takes a state between flushes and leaves the running request alone.
TYPED_TEST(ReplayStateTest, materialisingIsAFlushOfACopy) {
  for (const Format format : {Format::exact, Format::bf16}) {
    auto r = reference::replay_state(first_state(7), 8, format);
    for (std::int64_t t = 0; t < 7; ++t) reference::replay_step(r, t, 8, token<TypeParam>(7, t));
    const Matrix<double> whole = reference::materialised(r, 7), before = r.state;
    for (std::int64_t m = 0; m <= 7; ++m) {
      auto copy = r;
      reference::flush(copy, m);
      EXPECT_EQ(copy.state, reference::materialised(r, m)) << m;
      EXPECT_EQ(copy.cursor, 7 - m);
      if (format == Format::exact) {
        EXPECT_TRUE(near(reference::materialised(copy, copy.cursor), whole));
      }
    }
    EXPECT_EQ(r.state, before);
    EXPECT_EQ(r.cursor, 7);
    EXPECT_THROW(reference::materialised(r, 8), ContractViolation);
  }
}

// Rejected drafts leave no trace, and flushes stay at multiples of L.
TYPED_TEST(ReplayStateTest, rejectedDraftsLeaveNoTrace) {
  const std::int64_t drafts = 5;
  for (const std::int64_t L : {1, 3, 16}) {
    Matrix<double> S = first_state(9);
    auto r = reference::replay_state(S, L - 1 + drafts);
    for (std::int64_t position = 0, round = 0; round < 20; ++round) {
      const std::int64_t accepted = round % (drafts + 1);
      for (std::int64_t i = 0; i < drafts; ++i) {
        const auto x = token<TypeParam>(9, i < accepted ? position + i : 1000 + round);
        const Vector<double> out = reference::replay_draft(r, i, x);
        if (i < accepted) {
          ASSERT_TRUE(near(out, step(S, x))) << L << " " << round;
        }
      }
      reference::replay_accept(r, position, accepted, L);
      position += accepted;
      ASSERT_EQ(r.cursor, position % L);
      ASSERT_TRUE(near(reference::materialised(r, r.cursor), S)) << L << " " << round;
    }
    EXPECT_THROW(reference::replay_draft(r, L + drafts, token<TypeParam>(9, 0)), ContractViolation);
  }
}

/// A batch's rings of one layer, NaN until they are written.
struct Mamba2Rings {
  using Run = Mamba2Run<double>;
  Mamba2Rings(const Run& run, std::int64_t L)
      : state(run.states()),
        x(Shape<4>{state.extent(0), run.H, L, run.P}),
        B(Shape<4>{state.extent(0), run.G, L, run.N}),
        dt(Shape<3>{state.extent(0), run.H, L}),
        A(run.A) {}
  reference::Mamba2Ring<double> views() { return {state, x, B, dt}; }
  void update(const reference::Mamba2Inputs<double>& in, const IndexView& cursors,
              const IndexView& positions, const TensorView<double, 3>& out) {
    reference::mamba2_ring_update<double>(in, views(), cursors, positions, out);
  }
  void flush(const IndexView& counts, const IndexView& targets, const StateSlots& slots) {
    reference::mamba2_ring_flush<double>(views(), A.view(), counts, targets, slots, Format::exact);
  }
  Array<double, 4> state, x, B;
  Array<double, 3> dt;
  const Array<double, 1> A;
};

struct GatedDeltaRings {
  using Run = GatedDeltaRun<double>;
  GatedDeltaRings(const Run& run, std::int64_t L)
      : state(run.states()),
        k(Shape<4>{state.extent(0), run.H, L, run.K}),
        u(Shape<4>{state.extent(0), run.HV, L, run.V}),
        k_scale(Shape<3>{state.extent(0), run.H, L}),
        g(Shape<3>{state.extent(0), run.HV, L}) {}
  reference::GatedDeltaRing<double> views() { return {state, k, k_scale, u, g}; }
  void update(const reference::GatedDeltaRuleInputs<double>& in, const IndexView& cursors,
              const IndexView& positions, const TensorView<double, 3>& out) {
    reference::gated_delta_ring_update<double>(in, views(), cursors, positions, out);
  }
  void flush(const IndexView& counts, const IndexView& targets, const StateSlots& slots) {
    reference::gated_delta_ring_flush<double>(views(), counts, targets, slots, Format::exact);
  }
  Array<double, 4> state, k, u;
  Array<double, 3> k_scale, g;
};

template <class Rings>
class ReplayRingsTest : public testing::Test {};
using AllRings = testing::Types<Mamba2Rings, GatedDeltaRings>;
TYPED_TEST_SUITE(ReplayRingsTest, AllRings);

// Rows of a batch at different positions, in slots of any order: each is its own recurrence, and
// a materialised state goes where it is asked for.
TYPED_TEST(ReplayRingsTest, rowsAreTheRecurrence) {
  using Run = typename TypeParam::Run;
  const std::int64_t steps = 20, rows = 3, L = 8;
  const Run run(steps * rows, 5, 11);
  TypeParam rings(run, L);
  Array<double, 4> state = run.states();
  Array<double, 3> out(run.out_shape), expected(run.out_shape);
  const auto slots = ints({4, 0, 2});
  auto cursors = ints({0, 0, 0}), positions = ints({0, 5, 23});
  for (std::int64_t t = 0; t < steps; ++t) {
    auto in = run.inputs(rows * t, rows * (t + 1));
    in.rows.slots.indices = slots.view();
    rings.update(in, cursors.view(), positions.view(), cut(out.view(), rows * t, rows * (t + 1)));
    Run::update(in, state.view(), cut(expected.view(), rows * t, rows * (t + 1)));
    for (std::int64_t row = 0; row < rows; ++row) {
      cursors(row) = reference::next_cursor(cursors(row), positions(row), L);
      ++positions(row);
    }
  }
  for (std::int64_t i = 0; i < out.size(); ++i)
    EXPECT_NEAR(out.data()[i], expected.data()[i], 1e-12 * (1 + std::abs(expected.data()[i])));
  rings.flush(cursors.view(), ints({1, 0, -1}).view(), {.indices = slots.view()});
  for (const auto& slot : {std::pair{1, 4}, {0, 0}})
    for_each_element(at(state.view(), slot.second), [&](const auto& i, double x) {
      EXPECT_NEAR(rings.state(slot.first, i[0], i[1], i[2]), x, 1e-12 * (1 + std::abs(x)));
    });
  const auto in = run.inputs(0, rows);
  EXPECT_THROW(
      rings.update(in, ints({3, 0, 0}).view(), ints({2, 0, 0}).view(), cut(out.view(), 0, rows)),
      ContractViolation)
      << "more entries than tokens since the last flush";
}

}  // namespace
}  // namespace lockstep
