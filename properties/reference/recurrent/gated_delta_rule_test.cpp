// Laws of the gated delta rule alone; what it shares with other recurrences is in
// recurrence_test.cpp.
#include "reference/recurrent/gated_delta_rule.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/recurrences.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using Rule = GatedDeltaRun<double>;

double relative(const Matrix<double>& a, const Matrix<double>& b) {
  return (a - b).norm() / std::max(b.norm(), 1e-300);
}

// The paper's equation as it stands, without grouping: S = alpha S (I - beta k k^T) + beta v k^T.
RC_GTEST_PROP(GatedDeltaRule, isThePapersEquation, ()) {
  const Rule run(1, 1, draw_seed());
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  Rule::update(run.inputs(0, 1), state.view(), out.view());
  for (std::int64_t hv = 0; hv < run.HV; ++hv) {
    const std::int64_t h = hv / (run.HV / run.H);
    const Vector<double> k = reference::l2_normalised(as_vector(at(run.k.view(), 0, h)));
    const Vector<double> q = reference::l2_normalised(as_vector(at(run.q.view(), 0, h)));
    const Vector<double> v = as_vector(at(run.v.view(), 0, hv));
    const Matrix<double> I = Matrix<double>::Identity(run.K, run.K);
    const double alpha = std::exp(run.g(0, hv)), beta = run.beta(0, hv);
    const Matrix<double> S = as_matrix(at(run.states().view(), 0, hv));
    const Matrix<double> next =
        alpha * S * (I - beta * k * k.transpose()) + beta * v * k.transpose();
    // The sum may cancel, so it is measured by what it is a sum of.
    const double terms = S.norm() + next.norm();
    RC_ASSERT((as_matrix(at(state.view(), 0, hv)) - next).norm() <= 1e-14 * terms);
    const Vector<double> o = next * q / std::sqrt(static_cast<double>(run.K));
    RC_ASSERT((as_vector(at(out.view(), 0, hv)) - o).norm() <= 1e-14 * terms);
  }
}

// Each stage of a chunk against its definition: A's inverse is one, W and U solve their systems,
// and the new values are those that the recurrence writes.
RC_GTEST_PROP(GatedDeltaRule, stagesOfAChunkAreTheirDefinitions, ()) {
  const std::int64_t L = std::max<std::int64_t>(1, draw_length(65));
  const Rule run(L, 1, draw_seed());
  const auto c = reference::gated_delta_chunk_of(run.inputs(0, L), {0, L}, 0);
  const Matrix<double> before = as_matrix(at(run.states().view(), 0, 0));
  const auto s = reference::gated_delta_chunk(c, before);
  const Matrix<double> I = Matrix<double>::Identity(L, L);
  RC_ASSERT(relative((I + s.A) * s.Tm, I) < 1e-12);
  RC_ASSERT(relative((I + s.A) * s.U, c.beta.asDiagonal() * c.V) < 1e-12);
  Vector<double> cumulative = c.g;
  for (std::int64_t i = 1; i < L; ++i) cumulative(i) += cumulative(i - 1);
  const Vector<double> weights = c.beta.array() * cumulative.array().exp();
  RC_ASSERT(relative((I + s.A) * s.W, weights.asDiagonal() * c.K) < 1e-12);
  Matrix<double> S = before;
  double terms = S.norm();  // the sum may cancel, so it is measured by what it is a sum of
  for (std::int64_t i = 0; i < L; ++i) {
    S *= std::exp(c.g(i));
    const Vector<double> k = c.K.row(i), v = c.V.row(i);
    const Vector<double> u = c.beta(i) * (v - S * k);
    S += u * k.transpose();
    terms = std::exp(c.g(i)) * terms + u.norm() * k.norm();
    RC_ASSERT((s.Vn.row(i).transpose() - u).norm() < 1e-12 * std::max(1.0, u.norm()));
  }
  RC_ASSERT((s.state - S).norm() <= 1e-12 * terms);
}

// Grouped value heads: replicated keys and queries give the same.
RC_GTEST_PROP(GatedDeltaRule, valueHeadsShareKeysInConsecutiveBlocks, ()) {
  const std::int64_t T = draw_length(5);
  const Rule run(T, 1, draw_seed());
  auto in = run.inputs(0, T);
  Array<double, 3> q({T, run.HV, run.K}), k({T, run.HV, run.K});
  for_each_element(q.view(), [&](const auto& i, double& e) {
    const std::int64_t h = i[1] / (run.HV / run.H);
    e = run.q(i[0], h, i[2]);
    k(i[0], i[1], i[2]) = run.k(i[0], h, i[2]);
  });
  auto state = run.states(), replicated = run.states();
  Array<double, 3> out(run.out_shape), replicated_out(run.out_shape);
  Rule::scan(in, state.view(), out.view());
  in.q = q, in.k = k;
  Rule::scan(in, replicated.view(), replicated_out.view());
  RC_ASSERT(same_bits(out, replicated_out) && same_bits(state, replicated));
}

// The write-up's layout [K, V] and vLLM's [V, K] are one state seen two ways.
RC_GTEST_PROP(GatedDeltaRule, kMajorStatesAreTransposedViews, ()) {
  const std::int64_t T = draw_length(5);
  const Rule run(T, 1, draw_seed());
  auto state = run.states();
  const Shape<4> s = run.state_shape;
  Array<double, 4> k_major(Shape<4>{s[0], s[1], s[3], s[2]});
  for_each_element(state.view(),
                   [&](const auto& i, double e) { k_major(i[0], i[1], i[3], i[2]) = e; });
  Array<double, 3> out(run.out_shape), k_major_out(run.out_shape);
  Rule::scan(run.inputs(0, T), state.view(), out.view());
  Rule::scan(run.inputs(0, T), transposed(k_major.view()), k_major_out.view());
  RC_ASSERT(same_bits(out, k_major_out) && same_bits(state.view(), transposed(k_major.view())));
}

// Without decay, with beta = 1 and a unit key, what was written is what is read.
RC_GTEST_PROP(GatedDeltaRule, aKeyReadsTheValueThatItWrote, ()) {
  Rule run(1, 1, draw_seed());
  for (double& g : run.g) g = 0;
  for (double& beta : run.beta) beta = 1;
  for (double& k : run.k) k += 3;  // not zero
  auto in = run.inputs(0, 1);
  in.q = in.k, in.scale = 1.0;
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  Rule::update(in, state.view(), out.view());
  for_each_element(out.view(), [&](const auto& i, double o) {
    RC_ASSERT(std::abs(o - run.v(i[0], i[1], i[2])) < 1e-5);  // the norm's epsilon is 1e-6
  });
}

TEST(GatedDeltaRule, gatesForgetAndWriteLess) {
  const Array<double, 2> a(Shape<2>{1, 2}, 0.5), b(Shape<2>{1, 2}, 0.0);
  const Array<double, 1> A_log(Shape<1>{2}, 1.0), bias(Shape<1>{2}, 0.25);
  const auto gates = reference::gated_delta_gates<double>(a, b, A_log, bias);
  EXPECT_DOUBLE_EQ(gates.g(0, 1), -std::exp(1.0) * std::log1p(std::exp(0.75)));
  EXPECT_EQ(gates.beta(0, 0), 0.5);
}

TEST(GatedDeltaRule, aZeroVectorStaysZeroUnderTheNorm) {
  const Vector<double> zero = Vector<double>::Zero(5), norm = reference::l2_normalised(zero);
  EXPECT_EQ(norm, zero);
  EXPECT_NEAR(reference::l2_normalised<double>(Vector<double>::Ones(4)).norm(), 1, 1e-6);
}

// One token that forgets everything: differences of cumulative sums would lose 5e-2 in float32,
// sums of segments lose nothing.
TEST(GatedDeltaRule, chunksSurviveATokenThatForgetsAll) {
  const std::int64_t T = 64;
  GatedDeltaRun<float> run(T, 1, 7);
  for (const std::int64_t hv : {0, 1}) {
    if (hv < run.HV) run.g(31, hv) = -20000;
    if (hv < run.HV) run.g(40, hv) = -std::numeric_limits<float>::infinity();
  }
  auto state = run.states(), chunked = run.states();
  Array<float, 3> out(run.out_shape), chunked_out(run.out_shape);
  GatedDeltaRun<float>::scan(run.inputs(0, T), state.view(), out.view());
  GatedDeltaRun<float>::chunked(run.inputs(0, T), 64, chunked.view(), chunked_out.view());
  EXPECT_LT(difference(chunked_out, out).relative(), 2e-6);
  EXPECT_LT(difference(chunked, state).relative(), 2e-6);
}

// The paper's chunk output as printed weighs the tokens of a chunk by the causal mask alone; the
// decay between them is missing (NVlabs/GatedDeltaNet issue 15). As printed it is not the
// recurrence, unless nothing decays; with the decays it is.
RC_GTEST_PROP(GatedDeltaRule, outputsOfAChunkNeedTheDecays, ()) {
  const std::int64_t L = 2 + draw_length(31);
  Rule run(L, 1, draw_seed());
  const bool decays = *rc::gen::arbitrary<bool>();
  for (double& g : run.g) g = decays ? g - 0.5 : 0.0;
  for (double& beta : run.beta) beta = beta / 2 + 0.25;
  for (Array<double, 3>* const x : {&run.q, &run.k, &run.v})
    for (double& e : *x) e += 3;  // no product cancels
  const auto c = reference::gated_delta_chunk_of(run.inputs(0, L), {0, L}, 0);
  const Matrix<double> before = as_matrix(at(run.states().view(), 0, 0));
  const auto s = reference::gated_delta_chunk(c, before);
  const Vector<double> since_start = reference::decays_from_start(c.g);
  const Matrix<double> carried = since_start.asDiagonal() * (c.Q * before.transpose());
  const Matrix<double> mask =
      Matrix<double>::Ones(L, L).triangularView<Eigen::Lower>().toDenseMatrix();
  const auto output = [&](const Matrix<double>& weights) {
    const Matrix<double> scores = (c.Q * c.K.transpose()).cwiseProduct(weights);
    return Matrix<double>(carried + scores * s.Vn);
  };
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  Rule::scan(run.inputs(0, L), state.view(), out.view());
  Matrix<double> truth(L, run.V);
  for (std::int64_t t = 0; t < L; ++t) truth.row(t) = mapped(at(out.view(), t, 0)).transpose();
  RC_ASSERT(relative(output(s.E), truth) < 1e-11);
  RC_ASSERT((relative(output(mask), truth) < 1e-11) == !decays);
}

TEST(GatedDeltaRule, refusesShapesThatDoNotFit) {
  const Rule run(2, 2, 1), longer(3, 2, 1);
  const auto good = run.inputs(0, 2), more = longer.inputs(0, 3);
  auto state = run.states();
  Array<double, 3> out(run.out_shape), long_out(longer.out_shape);
  const auto refused = [&](const auto& in, Array<double, 3>& y) {
    EXPECT_THROW(Rule::update(in, state.view(), y.view()), ContractViolation);
    EXPECT_THROW(Rule::scan(in, state.view(), y.view()), ContractViolation);
    EXPECT_THROW(Rule::chunked(in, 4, state.view(), y.view()), ContractViolation);
  };
  refused(good, long_out);
  auto in = good;
  in.k = more.k;
  refused(in, out);
  in = good, in.v = more.v;
  refused(in, out);
  in = good, in.g = more.g;
  refused(in, out);
  in = good, in.beta = more.beta;
  refused(in, out);
  const Array<double, 3> keys(Shape<3>{2, run.HV + 1, run.K}, 0.0);
  in = good, in.q = keys, in.k = keys;
  refused(in, out);
  in = good, in.rows.storage.state_each_token = true;
  EXPECT_THROW(Rule::chunked(in, 4, state.view(), out.view()), ContractViolation);
}

// Without the norm q and k are taken as they are, and the scale is what is given.
TEST(GatedDeltaRule, theNormAndTheScaleAreOptions) {
  EXPECT_FALSE(reference::GatedDeltaRuleInputs<double>{}.use_qk_l2norm);
  const Rule run(1, 1, 6);
  auto in = run.inputs(0, 1);
  in.use_qk_l2norm = false;
  in.scale = 0.75;
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  Rule::update(in, state.view(), out.view());
  for (std::int64_t hv = 0; hv < run.HV; ++hv) {
    const std::int64_t h = hv / (run.HV / run.H);
    const Vector<double> k = as_vector(at(run.k.view(), 0, h)),
                         q = as_vector(at(run.q.view(), 0, h));
    Matrix<double> S = std::exp(run.g(0, hv)) * as_matrix(at(run.states().view(), 0, hv));
    S += run.beta(0, hv) * (as_vector(at(run.v.view(), 0, hv)) - S * k) * k.transpose();
    EXPECT_LT(relative(as_matrix(at(state.view(), 0, hv)), S), 1e-14);
    EXPECT_LT((as_vector(at(out.view(), 0, hv)) - 0.75 * (S * q)).norm(), 1e-13 * (1 + S.norm()));
  }
  const Vector<double> x = Vector<double>::Constant(1, 1e-3);
  EXPECT_DOUBLE_EQ(reference::l2_normalised(x)(0), 1e-3 / std::sqrt(2e-6)) << "eps is 1e-6";
}

// A prefill cuts its chunks at multiples of their size, counted from the row's start: each is
// gated_delta_chunk() of its tokens, by bits, with every storage point.
TEST(GatedDeltaRule, chunksAreCutAtMultiplesOfTheirSize) {
  const Rule run(10, 1, 8);
  auto in = run.inputs(0, 10);
  in.rows.storage = {.state = Format::bf16,
                     .chunk_state = Format::bf16,
                     .normalised_qk = Format::bf16,
                     .operand = Format::bf16,
                     .output = Format::bf16};
  auto pool = run.states();
  Array<double, 3> out(run.out_shape);
  Rule::chunked(in, 4, pool.view(), out.view());
  for (std::int64_t hv = 0; hv < run.HV; ++hv) {
    Matrix<double> state = as_matrix(at(run.states().view(), 0, hv));
    for (const RowRange tokens : {RowRange{0, 4}, RowRange{4, 8}, RowRange{8, 10}}) {
      const auto c = reference::gated_delta_chunk_of(in, tokens, hv);
      EXPECT_EQ(c.K, rounded_each(c.K, Format::bf16));
      const auto s = reference::gated_delta_chunk(c, state, in.rows.storage);
      for (std::int64_t i = 0; i < tokens.size(); ++i)
        for (std::int64_t j = 0; j < run.V; ++j)
          EXPECT_EQ(out(tokens.begin + i, hv, j), rounded(s.O(i, j), Format::bf16));
      state = s.state;
    }
    EXPECT_EQ(as_matrix(at(pool.view(), 0, hv)), rounded_each(state, Format::bf16));
  }
}

// Each storage point of a chunk, alone: the stages before it are exact, and those after it are
// not.
TEST(GatedDeltaRule, storagePointsRoundTheirOwnStage) {
  const Rule run(8, 1, 9);
  const auto c = reference::gated_delta_chunk_of(run.inputs(0, 8), {0, 8}, 0);
  const Matrix<double> before = as_matrix(at(run.states().view(), 0, 0)) / 3;
  const auto exact = reference::gated_delta_chunk(c, before);
  const auto narrow = reference::gated_delta_chunk(c, before, {.operand = Format::bf16});
  EXPECT_EQ(narrow.E, exact.E);
  EXPECT_EQ(narrow.A, exact.A);
  for (const auto* stored : {&narrow.Tm, &narrow.U, &narrow.W, &narrow.Vn})
    EXPECT_EQ(*stored, rounded_each(*stored, Format::bf16));
  EXPECT_EQ(narrow.Tm, rounded_each(exact.Tm, Format::bf16));
  const Matrix<double> V = rounded_each((c.beta.asDiagonal() * c.V).eval(), Format::bf16);
  EXPECT_EQ(narrow.U, rounded_each((narrow.Tm * V).eval(), Format::bf16));
  const Matrix<double> Vn = narrow.U - narrow.W * before.transpose();
  EXPECT_EQ(narrow.Vn, rounded_each(Vn, Format::bf16));
  const auto carried = reference::gated_delta_chunk(c, before, {.chunk_state = Format::bf16});
  const auto rounded_before = reference::gated_delta_chunk(c, rounded_each(before, Format::bf16));
  EXPECT_EQ(carried.Vn, rounded_before.Vn);
  EXPECT_EQ(carried.O, rounded_before.O);
  EXPECT_NE(carried.O, exact.O);
  EXPECT_NE(carried.state, rounded_before.state) << "the state itself is carried as it is";
}

}  // namespace
}  // namespace lockstep
