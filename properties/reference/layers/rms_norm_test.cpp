// Laws of the norms: plain, with a residual, and gated.
#include "reference/layers/rms_norm.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::GateOrder;

// A norm forgets the scale of its input, up to eps.
RC_GTEST_PROP(RmsNorm, doesNotDependOnTheScaleOfItsInput, ()) {
  const std::int64_t D = 1 + draw_length(64);
  const auto x = on_grid<double>(Shape<1>{D}, {.seed = draw_seed()});
  const Vector<double> ones = Vector<double>::Ones(D), v = as_vector(x.view());
  RC_PRE(v.norm() > 0.1);
  const Vector<double> y = reference::rms_normed<double>(v, ones, 0.0);
  RC_ASSERT(std::abs(y.squaredNorm() - static_cast<double>(D)) < 1e-10 * static_cast<double>(D));
  RC_ASSERT((reference::rms_normed<double>(3 * v, ones, 0.0) - y).norm() <= 1e-12 * y.norm());
}

// The fused form is an addition and a norm; the residual keeps the sum.
RC_GTEST_PROP(RmsNorm, withResidualIsAnAdditionAndANorm, ()) {
  const std::int64_t T = draw_length(5), D = 1 + draw_length(16);
  const std::uint64_t seed = draw_seed();
  const auto x = on_grid<double>(Shape<2>{T, D}, {.seed = seed, .stream = 1});
  const auto weight = on_grid<double>(Shape<1>{D}, {.seed = seed, .stream = 2});
  auto residual = on_grid<double>(Shape<2>{T, D}, {.seed = seed, .stream = 3});
  Array<double, 2> summed = residual, out(x.shape()), expected(x.shape());
  for (std::int64_t i = 0; i < summed.size(); ++i) summed.data()[i] += x.data()[i];
  reference::rms_norm_with_residual<double>(x, residual.view(), weight, 1e-6, out);
  reference::rms_norm<double>(summed, weight, 1e-6, expected);
  RC_ASSERT(same_bits(out, expected) && same_bits(residual, summed));
}

// Mamba2 gates, then norms each group; the gated delta net norms, then gates.
TEST(GatedRmsNorm, gatesBeforeOrAfterTheNorm) {
  Array<double, 2> x(Shape<2>{1, 4}), gate(Shape<2>{1, 4}), out(Shape<2>{1, 4});
  const Array<double, 1> weight(Shape<1>{4}, 2.0);
  for (std::int64_t i = 0; i < 4; ++i) x(0, i) = static_cast<double>(i + 1), gate(0, i) = 0.5;
  gate(0, 3) = -1;
  const double a = reference::silu(0.5), b = reference::silu(-1.0);
  reference::gated_rms_norm<double>(x, gate, weight, 0, GateOrder::before_norm, 2, out);
  EXPECT_NEAR(out(0, 0), 2 * 1 / std::sqrt((1 + 4) / 2.0), 1e-15) << "a common gate cancels";
  EXPECT_NEAR(out(0, 3), 2 * 4 * b / std::sqrt((9 * a * a + 16 * b * b) / 2), 1e-15);
  reference::gated_rms_norm<double>(x, gate, weight, 0, GateOrder::after_norm, 1, out);
  EXPECT_NEAR(out(0, 3), 2 * 4 / std::sqrt(30 / 4.0) * b, 1e-15);
  reference::gated_rms_norm<double>(x, gate, weight, 0, GateOrder::after_norm, 1, out,
                                    reference::Gate::sigmoid);
  EXPECT_NEAR(out(0, 0), 2 * 1 / std::sqrt(30 / 4.0) * reference::sigmoid(0.5), 1e-15);
}

// eps stands under the root, beside the mean, and each channel has its weight, also in groups.
TEST(RmsNorm, isItsFormula) {
  Array<double, 2> x(Shape<2>{1, 4}), out(Shape<2>{1, 4}), gate(Shape<2>{1, 4}, 0.0);
  Array<double, 1> weight(Shape<1>{4});
  for (std::int64_t i = 0; i < 4; ++i)
    x(0, i) = static_cast<double>(i + 1), weight(i) = static_cast<double>(2 * i - 3);
  reference::rms_norm<double>(x, weight, 0.5, out);
  for (std::int64_t i = 0; i < 4; ++i)
    EXPECT_NEAR(out(0, i), x(0, i) / std::sqrt(30 / 4.0 + 0.5) * weight(i), 1e-15);
  reference::gated_rms_norm<double>(x, gate, weight, 0.5, GateOrder::after_norm, 2, out,
                                    reference::Gate::sigmoid);
  for (std::int64_t i = 0; i < 4; ++i)
    EXPECT_NEAR(out(0, i), 0.5 * x(0, i) / std::sqrt((i < 2 ? 5 : 25) / 2.0 + 0.5) * weight(i),
                1e-15);
  EXPECT_THROW(
      reference::gated_rms_norm<double>(x, gate, weight, 0.5, GateOrder::after_norm, 3, out),
      ContractViolation);
  const Array<double, 1> few(Shape<1>{3}, 1.0);
  EXPECT_THROW(reference::rms_norm<double>(x, few, 0.5, out), ContractViolation);
}

}  // namespace
}  // namespace lockstep
