// Moves of states within pools: bits are what is compared.
#include "kernels/recurrent/state_copy.hpp"

#include <gmock/gmock.h>

#include "properties/support/gpu.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::DeviceTensor;

class StatePoolGpu : public GpuTest {};

using Rows = std::vector<std::int32_t>;  // [layers, slots, row] of 4-byte words

struct Pool {
  Pool(std::int64_t layers, std::int64_t slots, std::int64_t words, std::uint64_t seed)
      : shape{layers, slots, words}, tensor(shape), words_at_first(layers * slots * words) {
    for (std::size_t i = 0; i < words_at_first.size(); ++i)
      words_at_first[i] = static_cast<std::int32_t>(random_bits(seed, 1, i));
    tensor.set(words_at_first);
  }
  kernels::StatePoolBytes bytes() {
    return {tensor.data(), shape[0], shape[1], shape[2] * 4, shape[1] * shape[2] * 4, shape[2] * 4};
  }
  /// The pool after rows moved as if all sources were read first.
  Rows moved(const Sizes& source, const Sizes& target) const {
    Rows after = words_at_first;
    const std::int64_t slots = shape[1], words = shape[2];
    for (std::size_t i = 0; i < source.size(); ++i) {
      const auto is_slot = [&](std::int64_t slot) { return 0 <= slot && slot < slots; };
      if (!is_slot(source[i]) || !is_slot(target[i])) continue;
      for (std::int64_t layer = 0; layer < shape[0]; ++layer)
        std::copy_n(words_at_first.begin() + (layer * slots + source[i]) * words, words,
                    after.begin() + (layer * slots + target[i]) * words);
    }
    return after;
  }
  /// The words are those expected; noted as an exact result.
  ::testing::AssertionResult holds(const char* what, const Rows& expected) {
    const bool same = tensor.elements() == expected && tensor.guards_intact();
    AccuracyLog::get().add_bits("state_copy", what, same);
    return same ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << "bits differ";
  }

  Shape<3> shape;
  DeviceTensor<std::int32_t, 3> tensor;
  Rows words_at_first;
};

// Forks, rotations and copies of copies: what a move reads is what was there before the call.
TEST_F(StatePoolGpu, copiesReadAllSourcesBeforeTheyWrite) {
  const std::vector<std::pair<Sizes, Sizes>> cases{
      {{0}, {1}},
      {{0, 1, 2, 3}, {1, 2, 3, 0}},      // a rotation
      {{5, 5, 5}, {1, 2, 3}},            // forks
      {{1, 0}, {0, 1}},                  // a swap
      {{-1, 99, 4, 3}, {0, 1, -7, 99}},  // moves that name no slot are left out
      {{2, 2}, {2, 6}},                  // one onto itself
      {{}, {}}};
  for (const std::int64_t words : {4, 12, 1000, 40000})
    for (const auto& [source, target] : cases) {
      Pool pool(3, 8, words, 1);
      const DeviceTensor<std::int32_t, 1> from(ints(source)), to(ints(target));
      kernels::state_copy(pool.bytes(), from.view(), to.view(), nullptr);
      finish();
      EXPECT_TRUE(pool.holds("copy, bit by bit", pool.moved(source, target)));
    }
}

TEST_F(StatePoolGpu, manyMovesFitIntoOneLaunch) {
  constexpr std::int64_t kSlots = 3000;
  Pool pool(2, kSlots, 100, 2);
  Sizes source, target;
  for (std::int64_t i = 0; i < kSlots; ++i) {
    source.push_back(i);
    target.push_back((i * 7 + 3) % kSlots);
  }
  const DeviceTensor<std::int32_t, 1> from(ints(source)), to(ints(target));
  kernels::state_copy(pool.bytes(), from.view(), to.view(), nullptr);
  finish();
  EXPECT_TRUE(pool.holds("copy, bit by bit", pool.moved(source, target)));
}

TEST_F(StatePoolGpu, zeroedSlotsAreZeroInEveryLayer) {
  Pool pool(3, 8, 1000, 3);
  const DeviceTensor<std::int32_t, 1> slots(ints({2, -1, 7, 99}));
  kernels::state_zero(pool.bytes(), slots.view(), nullptr);
  finish();
  Rows expected = pool.words_at_first;
  for (std::int64_t layer = 0; layer < 3; ++layer)
    for (const std::int64_t slot : {2, 7})
      std::fill_n(expected.begin() + (layer * 8 + slot) * 1000, 1000, 0);
  EXPECT_TRUE(pool.holds("zero, bit by bit", expected));
}

// n <= 0 leaves the slot, 1 ... T copies row n - 1, T included.
TEST_F(StatePoolGpu, theAcceptedSnapshotBecomesTheState) {
  constexpr std::int64_t kTokens = 4, kWords = 1000;
  Pool pool(1, 8, kWords, 4), snapshots(6, kTokens, kWords, 5);
  const Sizes slots{3, 0, 7, 1, -1, 5}, accepted{1, 4, 0, -2, 2, 5};
  const DeviceTensor<std::int32_t, 1> to(ints(slots)), counts(ints(accepted));
  kernels::state_scatter_accepted(pool.bytes(), snapshots.bytes(), to.view(), counts.view(),
                                  nullptr);
  finish();
  Rows expected = pool.words_at_first;
  for (const auto& [b, slot, n] : {std::tuple{0, 3, 1}, {1, 0, 4}})
    std::copy_n(snapshots.words_at_first.begin() + (b * kTokens + n - 1) * kWords, kWords,
                expected.begin() + slot * kWords);
  EXPECT_TRUE(pool.holds("scatter, bit by bit", expected));
}

TEST_F(StatePoolGpu, oddRowsAreRefusedByName) {
  Pool pool(1, 4, 5, 6);
  const DeviceTensor<std::int32_t, 1> slots(ints({0}));
  EXPECT_THAT(
      complaint_of([&] { kernels::state_copy(pool.bytes(), slots.view(), slots.view(), nullptr); }),
      ::testing::HasSubstr("state is expected to be of rows and strides of a multiple of "
                           "16 bytes; got rows of 20 bytes"));
}

}  // namespace
}  // namespace lockstep
