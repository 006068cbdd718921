// Gathering hidden states over data-parallel ranks and taking them back.
#include "reference/attention/data_parallel_attention.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::Collective;
using reference::DpPadding;
using reference::DpStep;

/// Ranks with hidden states of width 3, idle ones among them.
struct Ranks {
  Ranks() : seed(draw_seed()) {
    step.attention_ranks = *rc::gen::element<std::int64_t>(1, 2, 4);
    step.tokens = draw_row_lengths(5, 17);
    for (std::size_t r = 0; r < step.tokens.size(); ++r)
      locals.push_back(
          on_grid<double>(Shape<2>{step.tokens[r], 3}, {.seed = seed, .stream = r + 1}));
  }
  std::uint64_t seed;
  DpStep step;
  std::vector<Array<double, 2>> locals;
};

// Scattering gives back what was gathered, in both layouts, for any contents of the rows of
// padding.
RC_GTEST_PROP(DataParallelAttention, scatterUndoesGather, ()) {
  const Ranks ranks;
  for (const DpPadding padding : {DpPadding::max_len, DpPadding::sum_len}) {
    auto all = reference::dp_gathered(ranks.step, padding, ranks.locals);
    const auto layout = reference::dp_layout(ranks.step, padding);
    std::vector<bool> real(static_cast<std::size_t>(layout.rows), false);
    for (std::size_t r = 0; r < ranks.locals.size(); ++r)
      for (std::int64_t t = 0; t < ranks.step.tokens[r]; ++t) {
        const auto row = static_cast<std::size_t>(layout.begin[r] + t);
        RC_ASSERT(!real[row]);  // no two tokens share a row
        real[row] = true;
      }
    for (std::int64_t row = 0; row < layout.rows; ++row)
      if (!real[static_cast<std::size_t>(row)])
        for (std::int64_t i = 0; i < 3; ++i) {
          RC_ASSERT(all(row, i) == 0.0);
          all(row, i) = std::numeric_limits<double>::quiet_NaN();  // stale rows of max_len
        }
    for (std::size_t r = 0; r < ranks.locals.size(); ++r)
      RC_ASSERT(same_bits(reference::dp_scattered(ranks.step, padding, all, r), ranks.locals[r]));
  }
}

// Sizes of the ranks' parts fill the buffer: equal ones in max_len, each its own in sum_len, all
// multiples of the ranks that share an attention.
RC_GTEST_PROP(DataParallelAttention, partsFillTheBuffer, ()) {
  const Ranks ranks;
  const Sizes padded = reference::dp_padded(ranks.step);
  for (std::size_t r = 0; r < padded.size(); ++r) {
    RC_ASSERT(padded[r] % ranks.step.attention_ranks == 0);
    RC_ASSERT(padded[r] >= ranks.step.tokens[r]);
    RC_ASSERT(padded[r] < ranks.step.tokens[r] + ranks.step.attention_ranks);
  }
  const auto longest = reference::dp_layout(ranks.step, DpPadding::max_len);
  const auto packed = reference::dp_layout(ranks.step, DpPadding::sum_len);
  const std::int64_t most = *std::ranges::max_element(padded);
  RC_ASSERT(longest.rows == most * ranks.step.ranks() && packed.rows == sum(padded));
  for (std::size_t r = 0; r < padded.size(); ++r) {
    RC_ASSERT(longest.begin[r] == static_cast<std::int64_t>(r) * most);
    RC_ASSERT(packed.begin[r] == (r == 0 ? 0 : packed.begin[r - 1] + padded[r - 1]));
  }
}

/// Ranks in lock step: each knows all token counts and nothing else. A group whose members do not
/// issue the same operations of the same sizes waits for ever.
bool finishes(const std::vector<std::vector<Collective>>& issued) {
  return std::ranges::all_of(issued, [&](const auto& own) { return own == issued.front(); });
}

// Idle ranks take part: the list of collectives is a function of what all ranks know.
RC_GTEST_PROP(DataParallelAttention, ranksIssueTheSameCollectives, ()) {
  Ranks ranks;
  ranks.step.extend = *rc::gen::arbitrary<bool>();
  ranks.step.recurrent = *rc::gen::arbitrary<bool>();
  std::vector<std::vector<Collective>> issued, without_idle;
  for (std::size_t r = 0; r < ranks.locals.size(); ++r) {
    const DpPadding padding = reference::dp_padding(ranks.step);
    issued.push_back(reference::dp_collectives(ranks.step, padding));
    without_idle.push_back(ranks.step.tokens[r] ? issued.back() : std::vector<Collective>{});
    RC_ASSERT(!issued.back().empty());
    for (const Collective& c : issued.back()) RC_ASSERT(c.rows >= 0);
  }
  RC_ASSERT(finishes(issued));
  const auto idle = std::ranges::count(ranks.step.tokens, 0);
  if (idle > 0 && idle < ranks.step.ranks()) RC_ASSERT(!finishes(without_idle));
}

TEST(DataParallelAttention, choosesTheLayout) {
  using reference::dp_padding;
  const Sizes even{8, 8, 8, 8}, uneven{64, 1, 1, 0};
  EXPECT_EQ(dp_padding({.tokens = even}), DpPadding::max_len);
  EXPECT_EQ(dp_padding({.tokens = uneven}), DpPadding::sum_len);
  EXPECT_EQ(dp_padding({.tokens = {8, 8, 0, 0}}), DpPadding::max_len) << "2 sum >= ranks * most";
  EXPECT_EQ(dp_padding({.tokens = {8, 7, 0, 0}}), DpPadding::sum_len);
  EXPECT_EQ(dp_padding({.tokens = {8, 7, 0, 0}, .attention_ranks = 4}), DpPadding::max_len);
  EXPECT_EQ(dp_padding({.tokens = uneven, .all_to_all = true}), DpPadding::max_len);
  EXPECT_EQ(dp_padding({.tokens = even, .extend = true}), DpPadding::sum_len);
  EXPECT_EQ(dp_padding({.tokens = {8}, .extend = true}), DpPadding::max_len);
  EXPECT_EQ(dp_padding({.tokens = uneven, .extend = true, .recurrent = true}), DpPadding::max_len);
  EXPECT_EQ(dp_padding({.tokens = even, .extend = true, .recurrent = true}), DpPadding::sum_len);
  EXPECT_EQ(dp_padding({.tokens = uneven, .extend = true}), DpPadding::sum_len);
  EXPECT_EQ(dp_padding({.tokens = {8, 8}, .extend = true}), DpPadding::sum_len);
  EXPECT_EQ(dp_padding({.tokens = {8, 1}, .extend = true, .recurrent = true}), DpPadding::sum_len)
      << "one token is not idle";
  EXPECT_EQ(dp_padding({.tokens = even, .fits_custom_all_reduce = true}), DpPadding::sum_len);
  EXPECT_EQ(dp_padding({.tokens = {8}, .extend = true, .fits_custom_all_reduce = true}),
            DpPadding::max_len);
}

TEST(DataParallelAttention, collectivesFitTheLayout) {
  const DpStep step{.tokens = {5, 0, 2}, .attention_ranks = 2};
  using reference::dp_collectives;
  EXPECT_EQ(dp_collectives(step, DpPadding::sum_len),
            (std::vector<Collective>{{"all_reduce", 6 + 0 + 2}}));
  EXPECT_EQ(dp_collectives(step, DpPadding::max_len),
            (std::vector<Collective>{
                {"attention_reduce_scatter", 6}, {"all_gather", 18}, {"reduce_scatter", 18}}));
  EXPECT_EQ(dp_collectives({.tokens = {5, 0}}, DpPadding::max_len),
            (std::vector<Collective>{{"all_gather", 10}, {"reduce_scatter", 10}}));
}

TEST(DataParallelAttention, everyRankGivesAsManyTokensAsAnnounced) {
  const DpStep step{.tokens = {1, 2}};
  const Array<double, 2> one(Shape<2>{1, 3}, 0.0);
  EXPECT_THROW(reference::dp_gathered<double>(step, DpPadding::sum_len, {one, one}),
               ContractViolation);
  EXPECT_THROW(reference::dp_gathered<double>(step, DpPadding::sum_len, {one}), ContractViolation);
}

}  // namespace
}  // namespace lockstep
