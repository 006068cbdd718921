// Mamba2 and the gated delta rule against their eager forms: the equations of the papers,
// ungrouped.
#include <gtest/gtest.h>

#include "properties/reference/recurrent/eager.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

constexpr std::int64_t kLengths[] = {1, 2, 63, 64, 65, 512};

struct Mamba2 {
  template <class S>
  using Run = Mamba2Run<S>;
};
struct GatedDeltaRule {
  template <class S>
  using Run = GatedDeltaRun<S>;
};

template <class Layer>
class RecurrenceAgainstTorch : public testing::Test {
 protected:
  /// The result of the reference in S for a run from its first state on.
  template <class S>
  struct Answer {
    explicit Answer(const typename Layer::template Run<S>& run, std::int64_t T)
        : out(run.out_shape), states(run.states()) {
      Layer::template Run<S>::scan(run.inputs(0, T), states.view(), out.view());
    }
    Array<S, 3> out;
    Array<S, 4> states;
  };
};
using Recurrences = testing::Types<Mamba2, GatedDeltaRule>;
TYPED_TEST_SUITE(RecurrenceAgainstTorch, Recurrences);

TYPED_TEST(RecurrenceAgainstTorch, outputsAndStatesAgree) {
  for (const std::int64_t T : kLengths)
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      SCOPED_TRACE(testing::Message() << T << " tokens, seed " << seed);
      const typename TypeParam::template Run<double> run(T, 1, seed);
      const EagerResult expected = eager(run);
      const typename TestFixture::template Answer<double> ours(run, T);
      const auto state = array_of<double, 3>(expected.state);
      EXPECT_LT(difference(ours.out, array_of<double, 3>(expected.out)).relative(), 1e-12);
      EXPECT_LT(difference(at(ours.states.view(), 0), state.view()).relative(), 1e-12);
    }
}

// LibTorch in float is a kernel like any other: it stays within the yardstick.
TYPED_TEST(RecurrenceAgainstTorch, floatsStayWithinTheYardstick) {
  for (const std::int64_t T : kLengths) {
    const typename TypeParam::template Run<float> run(T, 1, 5);
    const typename TypeParam::template Run<double> exact(T, 1, 5);
    const typename TestFixture::template Answer<float> yardstick(run, T);
    const typename TestFixture::template Answer<double> truth(exact, T);
    const Verdict verdict = judge(array_of<float, 3>(eager(run).out), yardstick.out, truth.out);
    EXPECT_TRUE(verdict.pass) << T << " tokens: " << verdict.text;
  }
}

}  // namespace
}  // namespace lockstep
