// Scaled narrow states: the error of storing them, and that nothing else adds to it.
#include "reference/recurrent/scaled_state.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/recurrences.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::block_scale;
using reference::ScaledStates;
using reference::StochasticRounding;

constexpr Format kNarrow[] = {Format::int8, Format::int16, Format::e4m3};

/// A pool of scaled states that hold about `states`.
struct Pool {
  Pool(const Array<double, 4>& states, std::int64_t block, Format format)
      : block(std::max<std::int64_t>(1, block)),
        format(format),
        values(states.shape()),
        scales(Shape<4>{states.extent(0), states.extent(1), states.extent(2),
                        (states.extent(3) + this->block - 1) / this->block}) {
    for (std::int64_t slot = 0; slot < states.extent(0); ++slot)
      for (std::int64_t h = 0; h < states.extent(1); ++h)
        reference::store_scaled<double>(as_matrix(at(states.view(), slot, h)), view(), slot, h);
  }
  ScaledStates<double> view(std::optional<StochasticRounding> stochastic = {}) {
    return {values.view(), scales.view(), block, format, stochastic};
  }
  Array<double, 4> scaled_up() {
    Array<double, 4> all(values.shape());
    for (std::int64_t slot = 0; slot < values.extent(0); ++slot)
      for (std::int64_t h = 0; h < values.extent(1); ++h)
        mapped(at(all.view(), slot, h)) = reference::scaled_up(view(), slot, h);
    return all;
  }
  std::int64_t block;
  Format format;
  Array<double, 4> values, scales;
};

// The stored number is the nearest of the block's own grid: half a step away at most, and the
// block's largest comes back but for the rounding of its scale.
RC_GTEST_PROP(ScaledState, isWithinHalfAStepOfItsBlock, ()) {
  const Format format = *rc::gen::elementOf(std::vector<Format>(kNarrow, kNarrow + 3));
  const std::int64_t C = *rc::gen::inRange<std::int64_t>(1, 9);
  const std::int64_t block = *rc::gen::inRange<std::int64_t>(1, C + 1);
  const double size = *rc::gen::element(0.0, 1e-6, 1.0, 1e5);
  auto states = on_grid<double>(Shape<4>{2, 2, 3, C}, {.seed = draw_seed()});
  for (double& s : states) s *= size;
  Pool pool(states, block, format);
  const auto back = pool.scaled_up();
  for_each_element(back.view(), [&](const auto& i, double found) {
    const double scale = pool.scales(i[0], i[1], i[2], i[3] / block);
    const double number = states(i[0], i[1], i[2], i[3]) / scale;
    RC_ASSERT(rounded(scale, Format::float32) == scale && scale > 0);
    RC_ASSERT(std::abs(number) <= traits_of(format).largest * (1 + 1e-7));
    const double unit = unit_in_last_place(number, format);
    RC_ASSERT(std::abs(found / scale - number) <= unit * (0.5 + 1e-6));
    RC_ASSERT(rounded(pool.values(i[0], i[1], i[2], i[3]), format) ==
              pool.values(i[0], i[1], i[2], i[3]));
  });
}

// A block has its own scale: what stands beside it does not matter.
TEST(ScaledState, blocksDoNotShareScales) {
  Array<double, 4> states(Shape<4>{1, 1, 1, 5}, 0.0);
  states(0, 0, 0, 0) = 1000, states(0, 0, 0, 1) = 1, states(0, 0, 0, 2) = 0.001;
  Pool rows(states, 5, Format::int8), pairs(states, 2, Format::int8);
  EXPECT_EQ(rows.scaled_up()(0, 0, 0, 2), 0) << "lost beside 1000";
  EXPECT_NEAR(pairs.scaled_up()(0, 0, 0, 2), 0.001, 1e-9);
  EXPECT_EQ(pairs.scales.extent(3), 3) << "the last block is shorter";
  EXPECT_EQ(pairs.scales(0, 0, 0, 2), 1) << "a block of zeros";
  EXPECT_EQ(pairs.values(0, 0, 0, 0), 127);
  EXPECT_EQ(block_scale(127, Format::int8), 1);
}

// An update of scaled states is the update of what they hold, stored once per slot; slots that no
// row names keep their bytes, and so do those of padding rows.
RC_GTEST_PROP(ScaledState, updatesAreThoseOfWhatIsStored, ()) {
  using Run = Mamba2Run<double>;
  const Format format = *rc::gen::elementOf(std::vector<Format>(kNarrow, kNarrow + 3));
  const Run run(3, 6, draw_seed());
  const Sizes order = draw_order(6);
  const bool moves = *rc::gen::arbitrary<bool>();
  const auto indices = ints({order[0], -1, order[1]}),
             targets = ints({order[2], order[4], order[3]});
  Pool pool(run.states(), *rc::gen::inRange<std::int64_t>(1, 4), format);
  for (double& e : pool.values) e = std::trunc(e / 2);
  for (double& e : pool.scales) e *= 4;  // larger than a store would choose: a store can be seen
  const Pool before = pool;
  auto in = run.inputs(0, 3);
  in.rows.tokens = 3;
  in.rows.slots.indices = indices.view();
  if (moves) in.rows.slots.out_indices = targets.view();
  auto plain = pool.scaled_up();
  Array<double, 3> out(run.out_shape), expected(run.out_shape);
  Run::update(in, plain.view(), expected.view());
  reference::with_scaled_states<double>(
      in.rows, pool.view(), [&](States<double> states) { Run::update(in, states, out.view()); });
  RC_ASSERT(same_bits(out, expected));
  Pool stored(plain, pool.block, format);
  const Sizes written{moves ? order[2] : order[0], moves ? order[3] : order[1]};
  for (std::int64_t slot = 0; slot < 6; ++slot) {
    const bool here = std::ranges::count(written, slot) > 0;
    const Pool& wanted = here ? stored : before;
    RC_ASSERT(same_bits(at(pool.values.view(), slot), at(wanted.values.view(), slot)));
    RC_ASSERT(same_bits(at(pool.scales.view(), slot), at(wanted.scales.view(), slot)));
  }
}

// A table of slots: the state after every token is stored, each with scales of its own.
TEST(ScaledState, everyColumnOfATableIsStored) {
  using Run = GatedDeltaRun<double>;
  const Run run(2, 4, 9);
  const auto starts = starts_of({2});
  const auto entries = ints({3, 1, 2});  // a third column that two tokens do not reach
  const auto table = make_view(entries.data(), Shape<2>{1, 3});
  auto in = run.inputs(0, 2);
  in.rows.tokens = 2;
  in.rows.query_start_loc = starts.view();
  in.rows.slots.table = table;
  Pool pool(run.states(), 2, Format::int16);
  for_each_element(at(pool.values.view(), 2),
                   [](const auto&, double& e) { e = std::trunc(e / 3); });
  for_each_element(at(pool.scales.view(), 2), [](const auto&, double& e) { e *= 4; });
  const Pool before = pool;
  auto plain = pool.scaled_up();
  Array<double, 3> out(run.out_shape);
  Run::update(in, plain.view(), out.view());
  reference::with_scaled_states<double>(in.rows, pool.view(),
                                        [&](States<double> s) { Run::update(in, s, out.view()); });
  Pool stored(plain, 2, Format::int16);
  for (const std::int64_t slot : {1, 3})
    EXPECT_TRUE(same_bits(at(pool.values.view(), slot), at(stored.values.view(), slot))) << slot;
  EXPECT_TRUE(same_bits(at(pool.values.view(), 2), at(before.values.view(), 2)));
  EXPECT_TRUE(same_bits(at(pool.scales.view(), 2), at(before.scales.view(), 2)));
}

// Stochastic rounding gives one of the two neighbours, and over 1,000 seeds their mean is the
// number itself, within four standard errors; to nearest would be off by up to half a step.
TEST(ScaledState, stochasticRoundingHasNoBias) {
  for (const Format format : {Format::int8, Format::e4m3, Format::bf16, Format::fp16})
    for (const double x : {0.3, -1.7, 5.125, 100.01, -0.0625 * 1.001}) {
      const double unit = unit_in_last_place(x, format);
      const double low = std::floor(x / unit) * unit, part = (x - low) / unit;
      double sum = 0;
      const int seeds = 1000;
      for (int seed = 0; seed < seeds; ++seed) {
        const StochasticRounding draws{.seed = static_cast<std::uint64_t>(seed)};
        const double y = rounded_stochastically(x, format, draws.draw(seed % 7));
        EXPECT_TRUE(y == low || y == low + unit) << x;
        sum += y;
      }
      const double error = unit * std::sqrt(part * (1 - part) / seeds);
      EXPECT_NEAR(sum / seeds, x, 4 * error + 1e-12) << x;
    }
}

TEST(ScaledState, numbersOfTheFormatStayWhateverIsDrawn) {
  for (const Format format : {Format::int8, Format::int16, Format::e4m3, Format::bf16})
    for (const double x : {0.0, 1.0, -3.0, 96.0, 0x1p100})
      for (const double draw : {0.0, 0.5, 0.999})
        EXPECT_EQ(rounded_stochastically(x, format, draw), rounded(x, format));
  EXPECT_EQ(rounded_stochastically(0.3, Format::exact, 0.0), 0.3);
  EXPECT_TRUE(std::isnan(rounded_stochastically(std::nan(""), Format::int8, 0.0)));
  EXPECT_EQ(rounded_stochastically(2.75, Format::int8, 0.7499), 3);
  EXPECT_EQ(rounded_stochastically(2.75, Format::int8, 0.75), 2) << "a draw is below the part";
  EXPECT_EQ(rounded_stochastically(-2.75, Format::int8, 0.1), -2) << "the upper one is towards 0";
}

// The draw of an element depends on nothing but seed, stream and index, and no two are the same
// word: Philox's known answer for counter 0 and key 0 is 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
TEST(ScaledState, drawsAreWordsOfPhilox) {
  const StochasticRounding draws;
  EXPECT_EQ(draws.draw(0), 0x6627e8d5p-32);
  EXPECT_EQ(draws.draw(3), 0x9b00dbd8p-32);
  EXPECT_EQ(draws.draw(4), philox4x32_10({1, 0, 0, 0}, {0, 0})[0] * 0x1p-32);
  const StochasticRounding other{.seed = 3ULL << 32 | 2, .stream = 5ULL << 32 | 4};
  EXPECT_EQ(other.draw((6LL << 34) + 9), philox4x32_10({2, 6, 4, 5}, {2, 3})[1] * 0x1p-32);
}

// Stored stochastically, a state's mean over launches is the state: element by element, with its
// own draw.
TEST(ScaledState, aStoredStateHasNoBiasEither) {
  const auto states = on_grid<double>(Shape<4>{1, 2, 2, 3}, {.seed = 4});
  Array<double, 4> mean(states.shape(), 0.0);
  const int launches = 1000;
  Pool pool(states, 3, Format::int8);
  for (int launch = 0; launch < launches; ++launch) {
    const auto view = pool.view(StochasticRounding{.stream = static_cast<std::uint64_t>(launch)});
    for (std::int64_t h = 0; h < 2; ++h) {
      reference::store_scaled<double>(as_matrix(at(states.view(), 0, h)), view, 0, h);
      const Matrix<double> back = reference::scaled_up(view, 0, h);
      for (std::int64_t r = 0; r < 2; ++r)
        for (std::int64_t c = 0; c < 3; ++c) mean(0, h, r, c) += back(r, c) / launches;
    }
  }
  for_each_element(mean.view(), [&](const auto& i, double found) {
    const double step = pool.scales(i[0], i[1], i[2], 0);
    EXPECT_NEAR(found, states(i[0], i[1], i[2], i[3]), 2 * step / std::sqrt(launches));
  });
}

// The bound for a kernel with such states: twice the reference's own error, rounded at the same
// points. Eight bits lose about half a percent of a step's state, sixteen a thousandth of that.
TEST(ScaledState, errorsAreThoseOfTheFormat) {
  using Run = Mamba2Run<double>;
  const Run run(16, 1, 5);
  auto exact = run.states();
  Array<double, 3> truth(run.out_shape), out(run.out_shape);
  Run::scan(run.inputs(0, 16), exact.view(), truth.view());
  double errors[3];
  for (int f = 0; f < 3; ++f) {
    Pool pool(run.states(), run.N, kNarrow[f]);
    for (std::int64_t t = 0; t < 16; ++t) {
      auto in = run.inputs(t, t + 1);
      in.rows.tokens = 1;
      reference::with_scaled_states<double>(in.rows, pool.view(), [&](States<double> s) {
        Run::update(in, s, cut(out.view(), t, t + 1));
      });
    }
    errors[f] = difference(out, truth).relative();
  }
  EXPECT_GT(errors[0], 1e-4);
  EXPECT_LT(errors[0], 2e-2);
  EXPECT_LT(errors[1], errors[0] / 50);
  EXPECT_GT(errors[2], errors[0]) << "e4m3 has four bits, int8 seven";
  EXPECT_LT(errors[2], 1e-1);
}

// An element's draw is that of its index in the whole pool.
TEST(ScaledState, drawsGoByTheIndexInThePool) {
  const auto states = on_grid<double>(Shape<4>{3, 2, 4, 5}, {.seed = 6});
  Pool pool(states, 5, Format::int8);
  const StochasticRounding rounding{.seed = 8, .stream = 9};
  std::int64_t index = 0;
  for (std::int64_t slot = 0; slot < 3; ++slot)
    for (std::int64_t h = 0; h < 2; ++h)
      reference::store_scaled<double>(as_matrix(at(states.view(), slot, h)), pool.view(rounding),
                                      slot, h);
  for_each_element(pool.values.view(), [&](const auto& i, double found) {
    const double number = states(i[0], i[1], i[2], i[3]) / pool.scales(i[0], i[1], i[2], 0);
    EXPECT_EQ(found, rounded_stochastically(number, Format::int8, rounding.draw(index++)));
  });
  EXPECT_THROW(reference::with_scaled_states<double>(
                   {}, {pool.values.view(), pool.scales.view(), 0}, [](auto) {}),
               ContractViolation);
}

}  // namespace
}  // namespace lockstep
