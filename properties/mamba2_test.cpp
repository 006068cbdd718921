// Laws of Mamba2 alone; what it shares with other recurrences is in recurrence_test.cpp.
#include "reference/mamba2.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/recurrences.hpp"
#include "reference/base/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using Run = Mamba2Run<double>;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A right-padded batch (lengths 5 and 16 in transformers #48256): no state decays through padding.
RC_GTEST_PROP(Mamba2, paddingIsNotLookedAt, ()) {
  const std::int64_t batch = *rc::gen::inRange<std::int64_t>(1, 4), S = draw_length(17);
  const bool chunks = *rc::gen::arbitrary<bool>();
  const Run run(batch * S, batch, draw_seed());
  Sizes lengths;
  for (std::int64_t b = 0; b < batch; ++b)
    lengths.push_back(*rc::gen::inRange<std::int64_t>(0, S + 1));
  const auto context_lengths = ints(lengths);
  Run poisoned = run;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = context_lengths(b); t < S; ++t) {
      for (Array<double, 3>* const all : {&poisoned.x, &poisoned.B, &poisoned.C, &poisoned.z})
        fill(at(all->view(), b * S + t), kNan);
      fill(at(poisoned.dt.view(), b * S + t), kNan);
    }
  const auto padded = [&](const TensorView<const double, 3>& v) {
    return make_view(v.data_handle(), Shape<4>{batch, S, v.extent(1), v.extent(2)},
                     Shape<4>{S * v.stride(0), v.stride(0), v.stride(1), v.stride(2)});
  };
  const auto common = poisoned.inputs(0, batch * S);
  Array<double, 4> out({batch, S, run.H, run.P});
  auto state = run.states(), expected = run.states();
  reference::mamba2_padded<double>({common, padded(common.x), padded(common.dt), padded(common.B),
                                    padded(common.C), padded(*common.z), context_lengths.view()},
                                   state.view(), out.view(),
                                   [&](const auto& in, const auto& s, auto y) {
                                     chunks ? Run::chunked(in, 4, s, y) : Run::scan(in, s, y);
                                   });
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t L = context_lengths(b);
    Array<double, 3> alone({L, run.H, run.P});
    const auto in = run.inputs(b * S, b * S + L);
    const auto s = cut(expected.view(), b, b + 1);
    chunks ? Run::chunked(in, 4, s, alone.view()) : Run::scan(in, s, alone.view());
    RC_ASSERT(same_bits(alone.view(), cut(at(out.view(), b), 0, L)));
    for_each_element(cut(at(out.view(), b), L, S),
                     [](const auto&, double y) { RC_ASSERT(y == 0.0); });
  }
  RC_ASSERT(same_bits(state, expected));
}

// P10: heads of one group share B and C, in blocks of consecutive heads.
RC_GTEST_PROP(Mamba2, groupsAreConsecutiveHeadsThatShareBAndC, ()) {
  const std::int64_t T = draw_length(5);
  const Run run(T, 1, draw_seed());
  auto in = run.inputs(0, T);
  Array<double, 3> B({T, run.H, run.N}), C({T, run.H, run.N});
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t h = 0; h < run.H; ++h)
      for (std::int64_t n = 0; n < run.N; ++n) {
        B(t, h, n) = run.B(t, h / (run.H / run.G), n);
        C(t, h, n) = run.C(t, h / (run.H / run.G), n);
      }
  auto state = run.states(), replicated = run.states();
  Array<double, 3> out(run.out_shape), replicated_out(run.out_shape);
  Run::scan(in, state.view(), out.view());
  in.B = B, in.C = C;
  Run::scan(in, replicated.view(), replicated_out.view());
  RC_ASSERT(same_bits(out, replicated_out));
  RC_ASSERT(same_bits(state, replicated));
}

// Tensor parallelism: a rank that holds some groups' heads gets what the whole layer gets there.
RC_GTEST_PROP(Mamba2, aShardOfHeadsIsTheWholeLayerThere, ()) {
  const std::int64_t T = draw_length(5);
  const Run run(T, 1, draw_seed());
  const std::int64_t each = run.H / run.G, g = *rc::gen::inRange<std::int64_t>(0, run.G);
  auto state = run.states(), sharded = run.states();
  Array<double, 3> out(run.out_shape), shard(Shape<3>{T, each, run.P});
  const auto whole = run.inputs(0, T);
  Run::scan(whole, state.view(), out.view());
  const auto heads = [](const auto& v, std::int64_t first, std::int64_t count) {
    auto shape = shape_of(v);
    shape[1] = count;
    const bool empty = element_count(shape) == 0;
    return make_view(empty ? v.data_handle() : v.data_handle() + first * v.stride(1), shape,
                     strides_of(v));
  };
  auto in = whole;
  in.x = heads(in.x, g * each, each), in.dt = heads(in.dt, g * each, each);
  in.z = heads(*in.z, g * each, each);
  in.B = heads(in.B, g, 1), in.C = heads(in.C, g, 1);
  in.A = cut(in.A, g * each, (g + 1) * each), in.D = cut(*in.D, g * each, (g + 1) * each);
  in.dt_bias = cut(*in.dt_bias, g * each, (g + 1) * each);
  Run::scan(in, heads(sharded.view(), g * each, each), shard.view());
  RC_ASSERT(same_bits(heads(out.view(), g * each, each), shard.view()));
  RC_ASSERT(same_bits(heads(state.view(), g * each, each), heads(sharded.view(), g * each, each)));
}

// P7: exp(A dt) is in [0, 1], so without input a state only shrinks.
RC_GTEST_PROP(Mamba2, withoutInputAStateFades, ()) {
  Run run(1, 1, draw_seed());
  for (double& x : run.x) x = 0;
  auto state = run.states();
  const auto before = run.states();
  Array<double, 3> out(run.out_shape);
  Run::update(run.inputs(0, 1), state.view(), out.view());
  for (std::int64_t i = 0; i < state.size(); ++i)
    RC_ASSERT(std::abs(state.data()[i]) <= std::abs(before.data()[i]) &&
              state.data()[i] * before.data()[i] >= 0);
}

// Mamba1 has an A for every channel and state; with equal ones it is Mamba2.
RC_GTEST_PROP(Mamba2, anAForEveryStateMayBeTheSameForAll, ()) {
  const std::int64_t T = draw_length(5);
  const Run run(T, 1, draw_seed());
  auto in = run.inputs(0, T);
  Array<double, 3> A({run.H, run.P, run.N});
  for_each_element(A.view(), [&](const auto& i, double& a) { a = run.A(i[0]); });
  auto state = run.states(), general = run.states();
  Array<double, 3> out(run.out_shape), general_out(run.out_shape);
  Run::scan(in, state.view(), out.view());
  in.A = A;
  Run::scan(in, general.view(), general_out.view());
  RC_ASSERT(difference(general_out, out).relative() < 1e-14);
  RC_ASSERT(difference(general, state).relative() < 1e-14);
}

RC_GTEST_PROP(Mamba2, theFunctionalFormLeavesItsInputAlone, ()) {
  const Run run(2, 2, draw_seed());
  const auto states = run.states();
  auto in_place = run.states();
  Array<double, 3> out(run.out_shape), expected(run.out_shape);
  const auto next = reference::next_states(run.inputs(0, 2), states, out.view());
  Run::update(run.inputs(0, 2), in_place.view(), expected.view());
  RC_ASSERT(same_bits(next, in_place) && same_bits(out, expected));
  RC_ASSERT(same_bits(states, run.states()));
}

TEST(Mamba2, timeStepsAreClampedBehindTheSoftplus) {
  const Array<double, 3> one(Shape<3>{1, 1, 1}, 1.0), A(Shape<3>{1, 1, 1}, -1.0);
  const auto after = [&](double dt, bool softplus, std::optional<double> low,
                         std::optional<double> high) {
    const Array<double, 3> steps(Shape<3>{1, 1, 1}, dt);
    Array<double, 4> state(Shape<4>{1, 1, 1, 1}, 0.0);
    Array<double, 3> out(Shape<3>{1, 1, 1});
    reference::selective_state_update<double>({.x = one,
                                               .dt = steps,
                                               .A = A,
                                               .B = one,
                                               .C = one,
                                               .dt_softplus = softplus,
                                               .dt_min = low,
                                               .dt_max = high},
                                              state.view(), out.view());
    return state(0, 0, 0, 0);  // dt', because x = B = 1
  };
  EXPECT_EQ(after(0.25, false, {}, {}), 0.25);
  EXPECT_DOUBLE_EQ(after(0.25, true, {}, {}), std::log(1 + std::exp(0.25)));
  EXPECT_EQ(after(20.5, true, {}, {}), 20.5) << "beyond 20 the softplus is the identity";
  EXPECT_EQ(after(-3, true, 0.5, {}), 0.5);
  EXPECT_EQ(after(3, true, {}, 0.5), 0.5);
  EXPECT_EQ(after(-3, false, 0.0, {}), 0.0) << "a limit of 0 is a limit";
}

TEST(Mamba2, chunksNeedOneDecayPerHead) {
  const Array<double, 3> x(Shape<3>{1, 1, 2}, 1.0), B(Shape<3>{1, 1, 2}, 1.0), A(Shape<3>{1, 2, 2});
  Array<double, 3> out(Shape<3>{1, 1, 2});
  EXPECT_THROW(
      reference::ssd_prefill<double>({.x = x, .dt = x, .A = A, .B = B, .C = B}, 64, {}, out.view()),
      ContractViolation);
}

TEST(Mamba2, takesChunksWhereTheEngineDoes) {
  EXPECT_TRUE(reference::prefers_chunks(128, 64, 128));
  EXPECT_FALSE(reference::prefers_chunks(127, 64, 128));
  EXPECT_FALSE(reference::prefers_chunks(1024, 80, 128)) << "Nemotron's heads of 80";
}

}  // namespace
}  // namespace lockstep
