// Parts that all references use: functions by their values, slots by their rules, threads.
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <thread>

#include "properties/support/laws.hpp"
#include "reference/base/parallel.hpp"
#include "reference/recurrent/recurrence.hpp"
#include "reference/tensors/functions.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

TEST(Functions, haveTheirValues) {
  EXPECT_DOUBLE_EQ(reference::sigmoid(0.0), 0.5);
  EXPECT_DOUBLE_EQ(reference::sigmoid(std::log(3.0)), 0.75);
  EXPECT_DOUBLE_EQ(reference::silu(std::log(3.0)), 0.75 * std::log(3.0));
  EXPECT_DOUBLE_EQ(reference::silu(-std::log(3.0)), -0.25 * std::log(3.0));
  EXPECT_DOUBLE_EQ(reference::softplus(0.0), std::log(2.0));
  EXPECT_DOUBLE_EQ(reference::softplus(std::log(3.0)), std::log(4.0));
  EXPECT_GT(reference::softplus(20.0), 20.0) << "20 itself is not yet beyond";
  EXPECT_GT(reference::softplus(19.5), 19.5);
  EXPECT_EQ(reference::softplus(20.25), 20.25);
  EXPECT_NEAR(reference::softplus(-20.0F), std::exp(-20.0F), 1e-15) << "log1p keeps its digits";
}

TEST(Functions, decaysAreSumsOfSegments) {
  Vector<double> g(3);
  g << -1, -2, -4;
  const Matrix<double> E = reference::segment_decays(g);
  Matrix<double> expected(3, 3);
  expected << 1, 0, 0, std::exp(-2), 1, 0, std::exp(-6), std::exp(-4), 1;
  EXPECT_EQ(E, expected);
  Vector<double> since_start(3);
  since_start << std::exp(-1), std::exp(-3), std::exp(-7);
  EXPECT_EQ(reference::decays_from_start(g), since_start);
}

// All 257 multiples of 1/64 in [-2, 2] and nothing else.
TEST(TestData, reachesAllOfTheGrid) {
  std::set<double> seen;
  const Grid grid{.seed = 1, .limit = 2};
  for (std::uint64_t i = 0; i < 4096; ++i) seen.insert(grid(i));
  EXPECT_EQ(seen.size(), 257u);
  EXPECT_EQ(*seen.begin(), -2);
  EXPECT_EQ(*seen.rbegin(), 2);
  const Grid small{.seed = 1};
  for (std::uint64_t i = 0; i < 1000; ++i) EXPECT_LE(std::abs(small(i)), 1);
}

TEST(Arrays, areCastElementByElement) {
  Array<double, 2> source(Shape<2>{2, 2});
  for (std::int64_t i = 0; i < 4; ++i) source.data()[i] = static_cast<double>(i) + 1.5;
  const Array<std::int32_t, 2> whole = cast<std::int32_t>(source);
  EXPECT_EQ(whole(0, 0), 1);
  EXPECT_EQ(whole(1, 1), 4);
  EXPECT_EQ(whole.shape(), source.shape());
}

TEST(Views, repeatTransposeAndCut) {
  const auto x = on_grid<double>(Shape<3>{3, 2, 4}, {.seed = 1});
  const auto repeated = repeat(at(x.view(), 1), 5);
  EXPECT_EQ(shape_of(repeated), (Shape<3>{2, 4, 5}));
  EXPECT_EQ(repeated(1, 2, 4), x(1, 1, 2));
  const auto turned = transposed(x.view());
  EXPECT_EQ(shape_of(turned), (Shape<3>{3, 4, 2}));
  EXPECT_EQ(turned(2, 3, 1), x(2, 1, 3));
  EXPECT_EQ(cut(x.view(), 1, 3)(1, 0, 0), x(2, 0, 0));
  EXPECT_EQ(cut(x.view(), 3, 3).extent(0), 0);
  for (const auto& [begin, end] : {std::pair{-1, 1}, std::pair{2, 1}, std::pair{0, 4}})
    EXPECT_THROW(cut(x.view(), begin, end), ContractViolation);
  EXPECT_THROW(at(x.view(), 3), ContractViolation);
  EXPECT_THROW(at(x.view(), -1), ContractViolation);
}

TEST(ParallelFor, doesEveryPieceOnce) {
  for (const std::int64_t count : {0, 1, 2, 3, 1000})
    for (const std::int64_t work : {std::int64_t{0}, kWorthAThread, 100 * kWorthAThread}) {
      std::vector<std::atomic<int>> done(static_cast<std::size_t>(count));
      parallel_for(count, work, [&](std::int64_t i) { ++done[static_cast<std::size_t>(i)]; });
      for (const auto& times : done) EXPECT_EQ(times, 1);
    }
}

// Little work stays where it is; the first exception comes back from wherever it was thrown, and
// the other pieces are done.
TEST(ParallelFor, keepsLittleWorkInItsThreadAndRethrowsExceptions) {
  const auto here = std::this_thread::get_id();
  for (const std::int64_t work : {std::int64_t{0}, std::int64_t{64}, kWorthAThread})
    parallel_for(20, work, [&](std::int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), here);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    });
  EXPECT_THROW(parallel_for(1, 0, [](std::int64_t) { throw std::runtime_error("a piece"); }),
               std::runtime_error);
  EXPECT_THROW(parallel_for(64, 64 * kWorthAThread,
                            [&](std::int64_t i) {
                              if (i % 7 == 3) throw std::runtime_error("a piece");
                            }),
               std::runtime_error);
  std::set<std::thread::id> ids;
  std::mutex guard;
  parallel_for(64, 64 * kWorthAThread, [&](std::int64_t) {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    const std::lock_guard lock(guard);
    ids.insert(std::this_thread::get_id());
  });
  EXPECT_TRUE(std::thread::hardware_concurrency() < 2 || ids.size() > 1);
}

TEST(Pieces, endAtMultiplesAtBoundariesAndAtTheRowsEnd) {
  EXPECT_EQ(piece_end(0, 4, 0, 100), 4);
  EXPECT_EQ(piece_end(4, 4, 0, 6), 6);
  EXPECT_EQ(piece_end(5, 4, 0, 100), 8) << "a piece that begins after a boundary";
  EXPECT_EQ(piece_end(4, 8, 6, 100), 6);
  EXPECT_EQ(piece_end(6, 8, 6, 100), 8);
  EXPECT_EQ(piece_end(8, 8, 6, 100), 12);
}

/// Rows of a batch with one slot or a table each: whether an update accepts them.
struct SlotRules {
  bool accepts(const StateSlots& slots, const Sizes& lengths) const {
    const auto starts = starts_of(lengths);
    try {
      check_slots(slots, starts.view(), sum(lengths), 4);
      return true;
    } catch (const ContractViolation&) {
      return false;
    }
  }
};

TEST(Slots, areWrittenOnceAndReadByTheirWriterAlone) {
  const SlotRules rules;
  const auto list = [&](const Sizes& from, const Sizes& to, const Sizes& lengths) {
    const auto indices = ints(from), targets = ints(to);
    return rules.accepts({.indices = indices.view(), .out_indices = targets.view()}, lengths);
  };
  EXPECT_TRUE(list({0, 1}, {0, 1}, {1, 1}));
  EXPECT_TRUE(list({0, 1}, {2, 3}, {1, 1}));
  EXPECT_TRUE(list({0, 0}, {2, 3}, {1, 1})) << "a fork: two read, neither writes there";
  EXPECT_FALSE(list({0, 1}, {2, 2}, {1, 1})) << "written twice";
  EXPECT_FALSE(list({0, 1}, {1, 0}, {1, 1})) << "each reads what the other writes";
  EXPECT_FALSE(list({0, 1}, {2, 0}, {1, 1})) << "the second writes what the first reads";
  EXPECT_TRUE(list({0, 1}, {2, 0}, {1, 0})) << "a row without tokens writes nothing";
  EXPECT_TRUE(list({0, -1}, {2, 0}, {1, 1})) << "nor does one without a slot";
  EXPECT_TRUE(list({0, 1}, {-1, -1}, {1, 1})) << "two stores that go nowhere";
  EXPECT_FALSE(list({0, 4}, {2, 3}, {1, 1})) << "there are four slots";
  const auto table = [&](const Sizes& entries, const Sizes& accepted, const Sizes& lengths) {
    const auto all = ints(entries), counts = ints(accepted);
    const auto rows = static_cast<std::int64_t>(lengths.size());
    return rules.accepts({.table = make_view(all.data(), Shape<2>{rows, all.size() / rows}),
                          .num_accepted = counts.view()},
                         lengths);
  };
  EXPECT_TRUE(table({0, 1, 2, 3}, {1, 2}, {2, 2}));
  EXPECT_FALSE(table({0, 1, 2, 1}, {1, 1}, {2, 2})) << "both write slot 1";
  EXPECT_TRUE(table({0, 1, 2, 1}, {1, 1}, {2, 1})) << "the second row has one token";
  EXPECT_FALSE(table({0, 1, 2, 0}, {1, 2}, {1, 1})) << "row 1 reads slot 0, which row 0 writes";
  EXPECT_TRUE(table({0, 1, 2, 3}, {2, 2}, {1, 1})) << "read beside what is written";
  EXPECT_FALSE(table({0, 1, 2, 3}, {3, 1}, {1, 1})) << "a third column";
}

TEST(Slots, areFoundByTheContractsRules) {
  const auto entries = ints({2, 0, 1, 3}), counts = ints({0, 2});
  StateSlots slots{.table = make_view(entries.data(), Shape<2>{2, 2})};
  EXPECT_EQ(source_slot(slots, 1, 4), 1) << "without counts, column 0";
  EXPECT_EQ(accepted_before(slots, 1), 1);
  slots.num_accepted = counts.view();
  EXPECT_EQ(accepted_before(slots, 0), 1) << "0 counts as 1";
  EXPECT_EQ(source_slot(slots, 0, 4), 2);
  EXPECT_EQ(source_slot(slots, 1, 4), 3);
  EXPECT_EQ(target_slot(slots, 0, 1, 3, 4), 0);
  EXPECT_EQ(target_slot(slots, 0, 2, 3, 4), kNoSlot) << "no column for the third token";
  const StateSlots plain;
  EXPECT_EQ(source_slot(plain, 3, 4), 3);
  EXPECT_EQ(target_slot(plain, 3, 0, 2, 4), kNoSlot) << "the last token's state alone is stored";
  EXPECT_EQ(target_slot(plain, 3, 1, 2, 4), 3);
  EXPECT_THROW(source_slot(plain, 4, 4), ContractViolation);
  EXPECT_THROW(source_slot({.num_accepted = counts.view()}, 0, 4), ContractViolation);
  const auto padded = ints({0, 5});
  EXPECT_EQ(source_slot({.indices = padded.view(), .pad_slot_id = 5}, 1, 4), kNoSlot);
  EXPECT_EQ(source_slot({.indices = padded.view(), .pad_slot_id = 0}, 0, 4), kNoSlot);
}

TEST(RowRanges, areReadAsTheyStand) {
  const auto starts = starts_of({2, 0, 3});
  EXPECT_EQ(row_count(starts.view(), 9), 3);
  EXPECT_EQ(row_count({}, 9), 9);
  EXPECT_EQ(row_range(starts.view(), 2, 5).begin, 2);
  EXPECT_EQ(row_range(starts.view(), 2, 5).size(), 3);
  EXPECT_EQ(row_range({}, 4, 9).begin, 4);
  EXPECT_EQ(row_range({}, 4, 9).size(), 1);
  EXPECT_THROW(row_range(starts.view(), 2, 4), ContractViolation) << "beyond the tokens";
  EXPECT_THROW(row_range(ints({1, 2}).view(), 0, 2), ContractViolation) << "not from 0";
  EXPECT_THROW(row_range(ints({0, 2, 1}).view(), 1, 2), ContractViolation) << "falling";
}

}  // namespace
}  // namespace lockstep
