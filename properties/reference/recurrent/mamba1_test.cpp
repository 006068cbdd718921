// The references of a Mamba1 layer: a decode step's equations, norms and padding; prompts are
// steps.
#include "reference/recurrent/mamba1_decode.hpp"

#include <gtest/gtest.h>

#include "properties/support/laws.hpp"
#include "reference/recurrent/mamba1_prefill.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

constexpr std::int64_t kRows = 3, kD = 5, kN = 4, kR = 6;

/// A step's inputs on the grid; A is negative.
struct Step {
  explicit Step(std::uint64_t seed)
      : x(on_grid<double>(Shape<2>{kRows, kD}, {.seed = seed, .stream = 1})),
        dt(on_grid<double>(Shape<2>{kRows, kD}, {.seed = seed, .stream = 2})),
        A(on_grid<double>(Shape<2>{kD, kN}, {.seed = seed, .stream = 3})),
        B(on_grid<double>(Shape<2>{kRows, kN}, {.seed = seed, .stream = 4})),
        C(on_grid<double>(Shape<2>{kRows, kN}, {.seed = seed, .stream = 5})),
        low(on_grid<double>(Shape<2>{kRows, kR}, {.seed = seed, .stream = 6})),
        weight(on_grid<double>(Shape<1>{kN}, {.seed = seed, .stream = 7})),
        state(on_grid<double>(Shape<3>{kRows, kD, kN}, {.seed = seed, .stream = 8})) {
    for (double& a : A) a = -1.0 / 64 - std::abs(a);
  }
  reference::Mamba1Decode<double> inputs() const {
    return {.x = x, .dt = dt, .A = A, .B = B, .C = C, .dt_softplus = true};
  }
  Array<double, 2> x, dt, A, B, C, low;
  Array<double, 1> weight;
  Array<double, 3> state;
};

/// Outputs and states after the step.
std::pair<Array<double, 2>, Array<double, 3>> result_of(const Step& step,
                                                        const reference::Mamba1Decode<double>& in) {
  std::pair<Array<double, 2>, Array<double, 3>> result{Array<double, 2>(Shape<2>{kRows, kD}, 7),
                                                       step.state};
  reference::mamba1_decode<double>(in, result.second.view(), result.first.view());
  return result;
}

// Written out element by element, from the equations at the reference's head.
TEST(Mamba1Decode, isItsEquations) {
  const Step step(1);
  const auto z = on_grid<double>(Shape<2>{kRows, kD}, {.seed = 1, .stream = 9});
  const auto skip = on_grid<double>(Shape<1>{kD}, {.seed = 1, .stream = 10});
  reference::Mamba1Decode<double> in = step.inputs();
  in.z = z.view();
  in.skip = skip.view();
  const auto [out, state] = result_of(step, in);
  for (std::int64_t t = 0; t < kRows; ++t)
    for (std::int64_t c = 0; c < kD; ++c) {
      const double d = std::log1p(std::exp(step.dt(t, c)));
      double y = skip(c) * step.x(t, c);
      for (std::int64_t n = 0; n < kN; ++n) {
        const double s =
            std::exp(step.A(c, n) * d) * step.state(t, c, n) + d * step.B(t, n) * step.x(t, c);
        EXPECT_NEAR(state(t, c, n), s, 1e-12);
        y += step.C(t, n) * s;
      }
      EXPECT_NEAR(out(t, c), y * z(t, c) / (1 + std::exp(-z(t, c))), 1e-12);
    }
}

// The norms of the step equal norms made before it: of B and C as vectors, and of the low-rank dt
// in front of a projection that holds its weight.
TEST(Mamba1Decode, normsInsideAreNormsBefore) {
  const double eps = 1e-3;
  Step step(2);
  const auto projection = on_grid<double>(Shape<2>{kD, kR}, {.seed = 2, .stream = 11});
  const auto dt_weight = on_grid<double>(Shape<1>{kR}, {.seed = 2, .stream = 12});
  Step before = step;
  for (std::int64_t t = 0; t < kRows; ++t) {
    const auto normed = [&](const auto& v, const auto& w) {
      return reference::rms_normed<double>(as_vector(at(v.view(), t)), as_vector(w.view()), eps);
    };
    mapped(at(before.B.view(), t)) = normed(step.B, step.weight);
    mapped(at(before.C.view(), t)) = normed(step.C, step.weight);
    const Vector<double> low = normed(step.low, dt_weight);
    for (std::int64_t c = 0; c < kD; ++c) {
      const Vector<double> row = as_vector(at(projection.view(), c));
      before.dt(t, c) = row.dot(low);
      step.dt(t, c) =
          row.cwiseProduct(as_vector(dt_weight.view())).dot(as_vector(at(step.low.view(), t)));
    }
  }
  reference::Mamba1Decode<double> in = step.inputs();
  in.norm_eps = eps;
  in.dt_low = step.low.view();
  in.b_weight = in.c_weight = step.weight.view();
  const auto inside = result_of(step, in), outside = result_of(before, before.inputs());
  for (std::int64_t i = 0; i < kRows * kD; ++i)
    EXPECT_NEAR(inside.first.data()[i], outside.first.data()[i], 1e-12);
  for (std::int64_t i = 0; i < kRows * kD * kN; ++i)
    EXPECT_NEAR(inside.second.data()[i], outside.second.data()[i], 1e-12);
}

// A padded row has output 0 and touches no slot, whatever it holds; others go to their slots.
TEST(Mamba1Decode, aPaddedRowLeavesNothing) {
  Step step(3);
  const auto indices = ints({2, -1, 0});
  for (std::int64_t c = 0; c < kD; ++c) step.x(1, c) = std::numeric_limits<double>::quiet_NaN();
  reference::Mamba1Decode<double> in = step.inputs();
  in.slots.indices = indices.view();
  const auto [out, state] = result_of(step, in);
  for (std::int64_t c = 0; c < kD; ++c) EXPECT_EQ(out(1, c), 0);
  EXPECT_TRUE(same_bits(at(state.view(), 1), at(step.state.view(), 1)));
  EXPECT_FALSE(same_bits(at(state.view(), 0), at(step.state.view(), 0)));
  EXPECT_FALSE(same_bits(at(state.view(), 2), at(step.state.view(), 2)));
}

// Rows of 4, 0, 3 and 1 tokens and one token of padding; the second and the third have no state to
// resume from, the last has no slot.
TEST(Mamba1Prefill, isTheDecodeStepRepeated) {
  constexpr std::int64_t kTokens = 9, kSlots = 4;
  const auto draw = [](const auto& shape, std::uint64_t stream) {
    return on_grid<float>(shape, {.seed = 1, .stream = stream});
  };
  const auto x = draw(Shape<2>{kTokens, kD}, 1), dt = draw(Shape<2>{kTokens, kD}, 2);
  const auto B = draw(Shape<2>{kTokens, kN}, 3), C = draw(Shape<2>{kTokens, kN}, 4);
  const auto z = draw(Shape<2>{kTokens, kD}, 5), A = draw(Shape<2>{kD, kN}, 6);
  const auto skip = draw(Shape<1>{kD}, 7), bias = draw(Shape<1>{kD}, 8);
  const Array<std::int32_t, 1> starts = ints({0, 4, 4, 7, 8}), slots = ints({2, 0, 3, -1});
  Array<bool, 1> resumes(Shape<1>{4}, true);
  resumes(1) = resumes(2) = false;
  Array<float, 3> state = draw(Shape<3>{kSlots, kD, kN}, 9), stepped = state;
  Array<float, 2> out(Shape<2>{kTokens, kD}, 7), expected(Shape<2>{kTokens, kD}, 0);
  reference::mamba1_prefill<float>({.x = x,
                                    .dt = dt,
                                    .A = A,
                                    .B = B,
                                    .C = C,
                                    .skip = skip.view(),
                                    .z = z.view(),
                                    .dt_bias = bias.view(),
                                    .dt_softplus = true,
                                    .rows = {.query_start_loc = starts.view(),
                                             .slots = {.indices = slots.view()},
                                             .has_initial_state = resumes.view()}},
                                   state.view(), out.view());
  for (std::int64_t row = 0; row < 3; ++row) {
    if (!resumes(row)) fill(at(stepped.view(), slots(row)), 0.0F);
    for (std::int64_t t = starts(row); t < starts(row + 1); ++t) {
      const auto token = [&](auto& all) { return cut(all.view(), t, t + 1); };
      reference::mamba1_decode<float>(
          {.x = token(x),
           .dt = token(dt),
           .A = A,
           .B = token(B),
           .C = token(C),
           .skip = skip.view(),
           .z = token(z),
           .dt_bias = bias.view(),
           .dt_softplus = true,
           .slots = {.indices = make_view(slots.data() + row, Shape<1>{1})}},
          stepped.view(), token(expected));
    }
  }
  EXPECT_TRUE(same_bits(out, expected));
  EXPECT_TRUE(same_bits(state, stepped));
}

}  // namespace
}  // namespace lockstep
