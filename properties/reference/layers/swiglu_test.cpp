// The feed-forward unit, by hand.
#include "reference/layers/swiglu.hpp"

#include <gtest/gtest.h>

#include "reference/tensors/array.hpp"

namespace lockstep {
namespace {

TEST(Swiglu, multipliesTheUpProjectionByItsGate) {
  Array<double, 2> x(Shape<2>{1, 2}), gate(Shape<2>{1, 2}), up(Shape<2>{1, 2}),
      down(Shape<2>{2, 1});
  x(0, 0) = 1, x(0, 1) = 2;
  gate(0, 0) = 0.5, gate(0, 1) = 0.25;
  up(0, 0) = 3, up(0, 1) = -1;
  down(0, 0) = 1, down(1, 0) = -2;
  Array<double, 2> out(Shape<2>{1, 2});
  reference::swiglu<double>(x, gate, up, down, out);
  EXPECT_DOUBLE_EQ(out(0, 0), reference::silu(1.0));
  EXPECT_DOUBLE_EQ(out(0, 1), -2 * reference::silu(1.0));
}

TEST(Swiglu, betweenTheProductsIsTheGateTimesTheOther) {
  Array<double, 2> gate(Shape<2>{2, 2}), up(Shape<2>{2, 2}), out(Shape<2>{2, 2});
  gate(0, 0) = 1, gate(0, 1) = -1, gate(1, 0) = 0, gate(1, 1) = 2;
  up(0, 0) = 3, up(0, 1) = 5, up(1, 0) = 7, up(1, 1) = -1;
  reference::swiglu_gate<double>(gate, up, out);
  for (std::int64_t t = 0; t < 2; ++t)
    for (std::int64_t f = 0; f < 2; ++f)
      EXPECT_DOUBLE_EQ(out(t, f), reference::silu(gate(t, f)) * up(t, f));
}

}  // namespace
}  // namespace lockstep
