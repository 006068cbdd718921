// Laws of Mamba2 alone; what it shares with other recurrences is in recurrence_test.cpp.
#include "reference/recurrent/mamba2.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/recurrences.hpp"
#include "properties/support/special_values.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using Ssm = Mamba2Run<double>;

// The definition, one number at a time: dt', decay, state and output of every channel.
RC_GTEST_PROP(Mamba2, isThePapersEquation, ()) {
  const std::int64_t T = draw_length(5);
  const Ssm run(T, 1, draw_seed());
  auto in = run.inputs(0, T);
  in.dt_softplus = *rc::gen::arbitrary<bool>();
  if (*rc::gen::arbitrary<bool>()) in.D = {};
  if (*rc::gen::arbitrary<bool>()) in.z = {};
  if (*rc::gen::arbitrary<bool>()) in.dt_bias = {};
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  Ssm::scan(in, state.view(), out.view());
  for (std::int64_t h = 0; h < run.H; ++h)
    for (std::int64_t p = 0; p < run.P; ++p) {
      const std::int64_t g = h / (run.H / run.G);
      Vector<double> s = as_vector(at(run.states().view(), 0, h, p));
      for (std::int64_t t = 0; t < T; ++t) {
        double dt = run.dt(t, h) + (in.dt_bias ? run.dt_bias(h) : 0);
        if (in.dt_softplus) dt = std::log1p(std::exp(dt));
        if (in.dt_min) dt = std::max(dt, *in.dt_min);
        if (in.dt_max) dt = std::min(dt, *in.dt_max);
        double y = 0;
        for (std::int64_t n = 0; n < run.N; ++n) {
          s(n) = std::exp(run.A(h) * dt) * s(n) + dt * run.B(t, g, n) * run.x(t, h, p);
          y += run.C(t, g, n) * s(n);
        }
        if (in.D) y += run.D(h) * run.x(t, h, p);
        if (in.z) y *= run.z(t, h, p) / (1 + std::exp(-run.z(t, h, p)));
        RC_ASSERT(std::abs(out(t, h, p) - y) < 1e-12 * (1 + s.norm()));
      }
      for (std::int64_t n = 0; n < run.N; ++n)
        RC_ASSERT(std::abs(state(0, h, p, n) - s(n)) < 1e-13 * (1 + s.norm()));
    }
}

// A right-padded batch (lengths 5 and 16 in transformers #48256): no state decays through padding.
RC_GTEST_PROP(Mamba2, paddingIsNotLookedAt, ()) {
  const std::int64_t batch = *rc::gen::inRange<std::int64_t>(1, 4), S = draw_length(17);
  const bool chunks = *rc::gen::arbitrary<bool>();
  const Ssm run(batch * S, batch, draw_seed());
  Sizes lengths;
  for (std::int64_t b = 0; b < batch; ++b)
    lengths.push_back(*rc::gen::inRange<std::int64_t>(0, S + 1));
  const auto context_lengths = ints(lengths);
  Ssm poisoned = run;
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
                                     chunks ? Ssm::chunked(in, 4, s, y) : Ssm::scan(in, s, y);
                                   });
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t L = context_lengths(b);
    Array<double, 3> alone({L, run.H, run.P});
    const auto in = run.inputs(b * S, b * S + L);
    const auto s = cut(expected.view(), b, b + 1);
    chunks ? Ssm::chunked(in, 4, s, alone.view()) : Ssm::scan(in, s, alone.view());
    RC_ASSERT(same_bits(alone.view(), cut(at(out.view(), b), 0, L)));
    for_each_element(cut(at(out.view(), b), L, S),
                     [](const auto&, double y) { RC_ASSERT(y == 0.0); });
  }
  RC_ASSERT(same_bits(state, expected));
}

// P10: heads of one group share B and C, in blocks of consecutive heads.
RC_GTEST_PROP(Mamba2, groupsAreConsecutiveHeadsThatShareBAndC, ()) {
  const std::int64_t T = draw_length(5);
  const Ssm run(T, 1, draw_seed());
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
  Ssm::scan(in, state.view(), out.view());
  in.B = B, in.C = C;
  Ssm::scan(in, replicated.view(), replicated_out.view());
  RC_ASSERT(same_bits(out, replicated_out));
  RC_ASSERT(same_bits(state, replicated));
}

// Tensor parallelism: a rank that holds some groups' heads gets what the whole layer gets there.
RC_GTEST_PROP(Mamba2, aShardOfHeadsIsTheWholeLayerThere, ()) {
  const std::int64_t T = draw_length(5);
  const Ssm run(T, 1, draw_seed());
  const std::int64_t each = run.H / run.G, g = *rc::gen::inRange<std::int64_t>(0, run.G);
  auto state = run.states(), sharded = run.states();
  Array<double, 3> out(run.out_shape), shard(Shape<3>{T, each, run.P});
  const auto whole = run.inputs(0, T);
  Ssm::scan(whole, state.view(), out.view());
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
  Ssm::scan(in, heads(sharded.view(), g * each, each), shard.view());
  RC_ASSERT(same_bits(heads(out.view(), g * each, each), shard.view()));
  RC_ASSERT(same_bits(heads(state.view(), g * each, each), heads(sharded.view(), g * each, each)));
}

// P7: exp(A dt) is in [0, 1], so without input a state only shrinks.
RC_GTEST_PROP(Mamba2, withoutInputAStateFades, ()) {
  Ssm run(1, 1, draw_seed());
  for (double& x : run.x) x = 0;
  auto state = run.states();
  const auto before = run.states();
  Array<double, 3> out(run.out_shape);
  Ssm::update(run.inputs(0, 1), state.view(), out.view());
  for (std::int64_t i = 0; i < state.size(); ++i)
    RC_ASSERT(std::abs(state.data()[i]) <= std::abs(before.data()[i]) &&
              state.data()[i] * before.data()[i] >= 0);
}

// Mamba1 has an A for every channel and state; with equal ones it is Mamba2.
RC_GTEST_PROP(Mamba2, anAForEveryStateMayBeTheSameForAll, ()) {
  const std::int64_t T = draw_length(5);
  const Ssm run(T, 1, draw_seed());
  auto in = run.inputs(0, T);
  Array<double, 3> A({run.H, run.P, run.N});
  for_each_element(A.view(), [&](const auto& i, double& a) { a = run.A(i[0]); });
  auto state = run.states(), general = run.states();
  Array<double, 3> out(run.out_shape), general_out(run.out_shape);
  Ssm::scan(in, state.view(), out.view());
  in.A = A;
  Ssm::scan(in, general.view(), general_out.view());
  RC_ASSERT(difference(general_out, out).relative() < 1e-14);
  RC_ASSERT(difference(general, state).relative() < 1e-14);
}

RC_GTEST_PROP(Mamba2, theFunctionalFormLeavesItsInputAlone, ()) {
  const Ssm run(2, 2, draw_seed());
  const auto states = run.states();
  auto in_place = run.states();
  Array<double, 3> out(run.out_shape), expected(run.out_shape);
  const auto next = reference::next_states(run.inputs(0, 2), states, out.view());
  Ssm::update(run.inputs(0, 2), in_place.view(), expected.view());
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
  EXPECT_FALSE(reference::Mamba2Inputs<double>{}.dt_softplus);
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

// Mamba1 as it is meant: a decay for every channel and every state.
TEST(Mamba2, everyStateHasADecayOfItsOwn) {
  const Ssm run(1, 1, 3);
  auto in = run.inputs(0, 1);
  in.dt_min = {}, in.dt_max = {}, in.D = {}, in.z = {}, in.dt_bias = {}, in.dt_softplus = false;
  auto A = on_grid<double>(Shape<3>{run.H, run.P, run.N}, {.seed = 9});
  for (double& a : A) a = -std::abs(a);
  in.A = A;
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  Ssm::update(in, state.view(), out.view());
  const auto before = run.states();
  for_each_element(state.view(), [&](const auto& i, double s) {
    const std::int64_t h = i[1], p = i[2], n = i[3];
    const double dt = run.dt(0, h);
    EXPECT_NEAR(s,
                std::exp(A(h, p, n) * dt) * before(0, h, p, n) +
                    dt * run.B(0, h / (run.H / run.G), n) * run.x(0, h, p),
                1e-14);
  });
  // The same where a channel's states share theirs.
  Array<double, 2> channels(Shape<2>{run.H, run.P});
  for_each_element(A.view(), [&](const auto& i, double& a) {
    if (i[2] == 0) channels(i[0], i[1]) = a;
    a = channels(i[0], i[1]);
  });
  auto repeated = run.states(), full = run.states();
  Array<double, 3> repeated_out(run.out_shape);
  Ssm::update(in, full.view(), out.view());
  in.A = repeat(std::as_const(channels).view(), run.N);
  Ssm::update(in, repeated.view(), repeated_out.view());
  EXPECT_TRUE(same_bits(repeated, full) && same_bits(repeated_out, out));
}

// A padded batch goes by rows of its own: padding rows write nothing, first chunks start from
// zeros, and without lengths all tokens count.
TEST(Mamba2, paddedRowsHaveSlotsAndBeginnings) {
  const Ssm run(6, 4, 11);
  const auto slots = ints({2, -1, 0});
  Array<bool, 1> resumes(Shape<1>{3}, true);
  resumes(2) = false;
  auto common = run.inputs(0, 6);
  const auto padded = [&](const TensorView<const double, 3>& v) {
    return make_view(v.data_handle(), Shape<4>{3, 2, v.extent(1), v.extent(2)},
                     Shape<4>{2 * v.stride(0), v.stride(0), v.stride(1), v.stride(2)});
  };
  common.rows.slots.indices = slots.view();
  common.rows.has_initial_state = resumes.view();
  const reference::PaddedMamba2Inputs<double> in{
      common,           padded(common.x), padded(common.dt),
      padded(common.B), padded(common.C), padded(*common.z)};
  const auto scan = [](const auto& one, const auto& s, auto y) { Ssm::scan(one, s, y); };
  auto state = run.states(), expected = run.states();
  Array<double, 4> out({3, 2, run.H, run.P});
  reference::mamba2_padded<double>(in, state.view(), out.view(), scan);
  fill(at(expected.view(), 0), 0.0);
  for (const std::int64_t row : {0, 2}) {
    Array<double, 3> alone({2, run.H, run.P});
    Ssm::scan(run.inputs(2 * row, 2 * row + 2), cut(expected.view(), slots(row), slots(row) + 1),
              alone.view());
    EXPECT_TRUE(same_bits(at(out.view(), row), alone.view()));
  }
  EXPECT_TRUE(same_bits(state, expected));
  for_each_element(at(out.view(), 1), [](const auto&, double y) { EXPECT_EQ(y, 0); });
  const auto twice = ints({2, 2, 0}), longer = ints({3, 0, 0});
  auto wrong = in;
  wrong.common.rows.slots.indices = twice.view();
  EXPECT_THROW(reference::mamba2_padded<double>(wrong, state.view(), out.view(), scan),
               ContractViolation);
  wrong = in;
  wrong.context_lengths = longer.view();
  EXPECT_THROW(reference::mamba2_padded<double>(wrong, state.view(), out.view(), scan),
               ContractViolation);
}

/// Every form of Mamba2 refuses the inputs.
void refused(const reference::Mamba2Inputs<double>& in, const Ssm& run, bool chunks_only = false) {
  auto state = run.states();
  Array<double, 3> out(run.out_shape);
  if (!chunks_only) {
    EXPECT_THROW(Ssm::update(in, state.view(), out.view()), ContractViolation);
    EXPECT_THROW(Ssm::scan(in, state.view(), out.view()), ContractViolation);
  }
  EXPECT_THROW(Ssm::chunked(in, 4, state.view(), out.view()), ContractViolation);
  EXPECT_THROW(reference::mamba2_stash(in), ContractViolation);
}

TEST(Mamba2, refusesShapesThatDoNotFit) {
  const Ssm run(2, 2, 1), longer(3, 2, 1);
  const auto good = run.inputs(0, 2), more = longer.inputs(0, 3);
  auto in = good;
  in.dt = more.dt;
  refused(in, run);
  in = good, in.B = more.B;
  refused(in, run);
  in = good, in.z = more.z;
  refused(in, run);
  const Array<double, 3> A(Shape<3>{run.H + 1, run.P, run.N}, -1.0);
  in = good, in.A = A;
  refused(in, run);
  const Array<double, 2> heads(Shape<2>{run.H, run.P + 1}, 0.0);
  in = good, in.D = heads.view();
  refused(in, run);
  in = good, in.dt_bias = heads.view();
  refused(in, run);
  const Array<double, 3> no_group(Shape<3>{2, 0, run.N}), odd(Shape<3>{2, run.H + 1, run.N}, 0.0);
  for (const auto* B : {&no_group, &odd}) {
    in = good, in.B = *B, in.C = *B;
    refused(in, run);
  }
}

TEST(Mamba2, chunksAndStashesNeedOneNumberPerHead) {
  Ssm run(2, 1, 1);
  run = Ssm(2, 1, [] {  // a seed whose heads have several channels
    std::uint64_t seed = 0;
    while (Ssm(2, 1, seed).P < 2 || Ssm(2, 1, seed).N < 2) ++seed;
    return seed;
  }());
  const auto good = run.inputs(0, 2);
  const Array<double, 3> dt(Shape<3>{2, run.H, run.P}, 0.5), A({run.H, run.P, run.N}, -1.0);
  const Array<double, 2> per_channel(Shape<2>{run.H, run.N}, -1.0), bias({run.H, run.P}, 0.5);
  auto in = good;
  in.dt = dt;
  refused(in, run, true);
  in = good, in.A = A;
  refused(in, run, true);
  in = good,
  in.A = make_view(per_channel.data(), Shape<3>{run.H, run.P, run.N}, Shape<3>{run.N, 0, 1});
  refused(in, run, true);
  in = good, in.dt_bias = bias.view();
  refused(in, run, true);
}

// One channel, one state: whatever the strides say, there is one number per head.
TEST(Mamba2, headsOfOneChannelMayHaveAnyStride) {
  const auto x = on_grid<double>(Shape<3>{3, 2, 1}, {.seed = 1});
  const Array<double, 3> A(Shape<3>{2, 1, 1}, -1.0);
  const Array<double, 2> bias(Shape<2>{2, 1}, 0.25);
  const reference::Mamba2Inputs<double> in{
      .x = x, .dt = x, .A = A, .B = cut(x.view(), 0, 3), .C = x, .dt_bias = bias.view()};
  Array<double, 4> state(Shape<4>{1, 2, 1, 1}, 0.5), chunked = state;
  Array<double, 3> out(x.shape()), chunked_out(x.shape());
  Ssm::scan(in, state.view(), out.view());
  Ssm::chunked(in, 2, chunked.view(), chunked_out.view());
  EXPECT_LT(difference(chunked_out, out).relative(), 1e-14);
}

}  // namespace
}  // namespace lockstep
