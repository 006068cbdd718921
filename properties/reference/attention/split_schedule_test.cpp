// The distribution of a decode over the machine: every block once, and splits do not matter.
#include "reference/attention/split_schedule.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"
#include "properties/support/special_values.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

// Every block of every request is in exactly one part, and the parts' splits are numbered through.
RC_GTEST_PROP(SplitSchedule, coversEveryBlockOnce, ()) {
  Sizes lengths;
  for (int count = *rc::gen::inRange(1, 12); count > 0; --count)
    lengths.push_back(*rc::gen::element<std::int64_t>(0, 1, 63, 64, 65, 500, 4097, 30000));
  const auto seq_lens = ints(lengths);
  const std::int64_t parts = *rc::gen::inRange<std::int64_t>(1, 133), B = seq_lens.size();
  const auto schedule = reference::split_schedule(seq_lens, parts);
  RC_ASSERT(static_cast<std::int64_t>(schedule.parts.size()) == parts);
  RC_ASSERT(static_cast<std::int64_t>(schedule.num_splits.size()) == B + 1);
  RC_ASSERT(schedule.num_splits.back() <= B + parts - 1);
  for (std::int64_t b = 0; b < B; ++b) {
    std::int64_t covered = 0, touched = 0;
    for (const reference::SplitPart& part : schedule.parts) {
      if (b < part.begin_request || b > part.end_request) continue;
      const std::int64_t begin = b == part.begin_request ? part.begin_block : 0;
      const std::int64_t end =
          b == part.end_request ? part.end_block : reference::split_blocks(seq_lens(b));
      RC_ASSERT(begin == covered && end > begin);
      RC_ASSERT(b != part.begin_request || part.begin_split == touched);
      covered = end;
      ++touched;
    }
    const auto at = static_cast<std::size_t>(b);
    RC_ASSERT(covered == reference::split_blocks(seq_lens(b)));
    RC_ASSERT(touched == schedule.num_splits[at + 1] - schedule.num_splits[at]);
  }
}

RC_GTEST_PROP(SplitSchedule, splitsDoNotMatter, ()) {
  const std::int64_t L = *rc::gen::element<std::int64_t>(0, 1, 63, 64, 65, 300, 700);
  const std::uint64_t seed = draw_seed();
  const Matrix<double> K =
      as_matrix(on_grid<double>(Shape<2>{L, 4}, {.seed = seed, .stream = 1}).view());
  const Vector<double> q =
      as_vector(on_grid<double>(Shape<1>{4}, {.seed = seed, .stream = 2}).view());
  const auto seq_lens = ints({129, L, 64});
  const auto schedule = reference::split_schedule(seq_lens, *rc::gen::inRange<std::int64_t>(1, 30));
  const auto split = reference::attend_split<double>(q, K, K, 0.5, schedule, 1);
  const auto whole = reference::attend<double>(q, K, K, 0.5);
  RC_ASSERT((split.out - whole.out).norm() < 1e-13);
  RC_ASSERT((L == 0 ? split.lse == kInfinity : std::abs(split.lse - whole.lse) < 1e-12));
}

// FlashMLA's scheduler may leave an empty request without any split; its result is that of no keys.
TEST(SplitSchedule, aRequestWithoutSplitsSeesNoKey) {
  const auto seq_lens = ints({65, 0, 3});
  auto schedule = reference::split_schedule(seq_lens, 1);
  ASSERT_EQ(schedule.parts.size(), 1);
  schedule.parts = {{0, 0, 0, 0, 2}, {2, 0, 0, 2, 1}};  // nobody has request 1
  schedule.num_splits = {0, 1, 1, 2};
  const Vector<double> q = Vector<double>::Ones(4);
  const auto found = reference::attend_split<double>(q, Matrix<double>(0, 4), Matrix<double>(0, 3),
                                                     0.5, schedule, 1);
  EXPECT_EQ(found.out, Vector<double>::Zero(3));
  EXPECT_EQ(found.lse, kInfinity);
  EXPECT_THROW(reference::split_schedule(seq_lens, 0), ContractViolation);
}

TEST(SplitSchedule, countsThePartsOfAMachine) {
  EXPECT_EQ(reference::split_parts(132, 1, 16), 132);
  EXPECT_EQ(reference::split_parts(132, 1, 128), 66);
  EXPECT_EQ(reference::split_parts(132, 1, 256), 33);
}

/// A schedule in words: begin request.block.split to end request.block, per part.
std::string text_of(const reference::SplitSchedule& schedule) {
  std::string text;
  for (const reference::SplitPart& p : schedule.parts)
    text += std::to_string(p.begin_request) + "." + std::to_string(p.begin_block) + "." +
            std::to_string(p.begin_split) + "-" + std::to_string(p.end_request) + "." +
            std::to_string(p.end_block) + " ";
  for (const std::int64_t splits : schedule.num_splits) text += std::to_string(splits) + " ";
  return text;
}

// FlashMLA's walk, by hand: 5 blocks for starting a request, the payload rounded up and 5 more.
TEST(SplitSchedule, isFlashMlasWalk) {
  using reference::split_schedule;
  EXPECT_EQ(text_of(split_schedule(ints({129, 0, 65}).view(), 2)), "0.0.0-1.1 2.0.0-2.2 0 1 2 3 ");
  EXPECT_EQ(text_of(split_schedule(ints({1280}).view(), 3)),
            "0.0.0-0.9 0.9.1-0.18 0.18.2-0.20 0 3 ");
  EXPECT_EQ(text_of(split_schedule(ints({1280}).view(), 4)),
            "0.0.0-0.7 0.7.1-0.14 0.14.2-0.20 1.0.0-0.20 0 3 ")
      << "the fourth part is idle";
  EXPECT_EQ(text_of(split_schedule(ints({1280}).view(), 5)),
            "0.0.0-0.5 0.5.1-0.10 0.10.2-0.15 0.15.3-0.20 1.0.0-0.20 0 4 ")
      << "25 blocks in five parts: nothing to round up";
  EXPECT_EQ(text_of(split_schedule(ints({640, 640, 64}).view(), 3)),
            "0.0.0-0.10 1.0.0-1.10 2.0.0-2.1 0 1 2 3 ");
  EXPECT_EQ(text_of(split_schedule(ints({}).view(), 2)), "0.0.0--1.0 0.0.0--1.0 0 ");
  for (const auto& [length, blocks] :
       {std::pair{0, 1}, std::pair{1, 1}, std::pair{64, 1}, std::pair{65, 2}, std::pair{128, 2}})
    EXPECT_EQ(reference::split_blocks(length), blocks) << length;
}

TEST(SplitSchedule, countsTilesOf64Rows) {
  using reference::split_parts;
  EXPECT_EQ(split_parts(132, 1, 64), 132);
  EXPECT_EQ(split_parts(132, 1, 65), 66);
  EXPECT_EQ(split_parts(132, 1, 1), 132);
  EXPECT_EQ(split_parts(132, 2, 128), 66) << "rows are those of one key head";
  EXPECT_EQ(split_parts(132, 2, 256), 33);
  EXPECT_EQ(split_parts(4, 8, 8), 1) << "never none";
  EXPECT_EQ(split_parts(8, 4, 4), 2);
}

// All of a request's splits empty: its lse is +inf and its output 0, whatever they hold.
TEST(SplitSchedule, combinesInBaseTwo) {
  using Partial = reference::SplitPartial<double>;
  const Vector<double> one = Vector<double>::Ones(2);
  const auto two = reference::combined<double>({Partial{one, 3}, Partial{3 * one, 3}}, one.size());
  EXPECT_NEAR(two.out(0), 2, 1e-15);
  EXPECT_NEAR(two.lse, 4 * std::log(2.0), 1e-15);
  const auto none = reference::combined<double>({Partial{one, -kInfinity}}, one.size());
  EXPECT_EQ(none.lse, kInfinity);
  EXPECT_EQ(none.out, Vector<double>::Zero(2));
  EXPECT_EQ(reference::combined<double>({}, 2).lse, kInfinity);
}

}  // namespace
}  // namespace lockstep
