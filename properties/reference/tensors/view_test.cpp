// A view finds the element that plain index arithmetic finds, whatever its strides.
#include "reference/tensors/view.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <type_traits>
#include <vector>

namespace lockstep {
namespace {

std::vector<int> counted(std::size_t size) {
  std::vector<int> values(size);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

TEST(TensorViews, ofContiguousMemoryCountThroughIt) {
  std::vector<int> values = counted(3 * 5 * 7);
  const TensorView<int, 3> view = make_view(values.data(), Shape<3>{3, 5, 7});  // [3, 5, 7]
  int next = 0;
  for (std::int64_t i = 0; i < 3; ++i)
    for (std::int64_t j = 0; j < 5; ++j)
      for (std::int64_t k = 0; k < 7; ++k) EXPECT_EQ(view(i, j, k), next++);
  EXPECT_EQ(view.extent(1), 5);
  EXPECT_EQ(view.stride(0), 35);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(view.size(), 105u);
}

TEST(TensorViews, ofATransposeSwapTheirIndices) {
  std::vector<int> values = counted(3 * 5);
  const TensorView<int, 2> rows = make_view(values.data(), Shape<2>{3, 5});
  const TensorView<int, 2> columns = make_view(values.data(), Shape<2>{5, 3}, Shape<2>{1, 5});
  for (std::int64_t i = 0; i < 3; ++i)
    for (std::int64_t j = 0; j < 5; ++j) EXPECT_EQ(&rows(i, j), &columns(j, i));
}

// A pool's slots lie further apart than a state is long: what is between them is not touched.
TEST(TensorViews, withGapsLeaveTheGapsAlone) {
  std::vector<int> values(4 * 10, -1);
  const TensorView<int, 2> view = make_view(values.data() + 3, Shape<2>{4, 5}, Shape<2>{10, 1});
  for (std::int64_t i = 0; i < 4; ++i)
    for (std::int64_t j = 0; j < 5; ++j) view(i, j) = 1;
  for (std::size_t at = 0; at < values.size(); ++at)
    EXPECT_EQ(values[at], at % 10 >= 3 && at % 10 < 8 ? 1 : -1) << at;
}

TEST(TensorViews, ofStrideZeroRepeatOneElement) {
  std::vector<int> values = counted(4);
  const TensorView<const int, 2> view =
      make_view<const int>(values.data(), Shape<2>{4, 63}, Shape<2>{1, 0});
  for (std::int64_t i = 0; i < 4; ++i)
    EXPECT_EQ(&view(i, 62), &values[static_cast<std::size_t>(i)]);
}

TEST(TensorViews, ofRankZeroAreOneElementAndOfRankOneARow) {
  int value = 7;
  EXPECT_EQ(make_view(&value, Shape<0>{})(), 7);
  std::vector<int> values = counted(9);
  const TensorView<int, 1> odd = make_view(values.data() + 1, Shape<1>{4}, Shape<1>{2});
  for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(odd(i), 2 * i + 1);
}

TEST(TensorViews, mayBeEmptyWithoutAPointer) {
  const TensorView<float, 3> view =
      make_view(static_cast<float*>(nullptr), Shape<3>{3, 0, 7});  // [3, 0, 7]
  EXPECT_TRUE(view.empty());
  EXPECT_EQ(view.extent(0), 3);
  EXPECT_EQ(view.extent(1), 0);
  EXPECT_EQ(view.stride(0), 7) << "as LibTorch does, an extent of 0 counts as 1";
}

TEST(TensorViews, ofInvalidShapesBreakTheContract) {
  int value = 7;
  EXPECT_THROW(make_view(&value, Shape<2>{1, -1}), ContractViolation);
  EXPECT_THROW(make_view(&value, Shape<1>{1}, Shape<1>{-1}), ContractViolation);
  EXPECT_THROW(make_view(static_cast<int*>(nullptr), Shape<1>{1}), ContractViolation);
  EXPECT_THROW(make_view(static_cast<int*>(nullptr), Shape<0>{}), ContractViolation);
}

// Offsets are 64 bits: a pool of states is larger than 2^31 elements.
TEST(TensorViews, reachBeyond32Bits) {
  using View = TensorView<char, 2>;
  const View::mapping_type mapping =
      make_view(static_cast<char*>(nullptr), Shape<2>{0, 2}, Shape<2>{std::int64_t{1} << 33, 1})
          .mapping();
  EXPECT_EQ(mapping.stride(0), std::int64_t{1} << 33);
  EXPECT_EQ(mapping(3, 1), (std::int64_t{3} << 33) + 1);
}

// Kernels take views by value.
TEST(TensorViews, areCopiedAsBytesAndTurnConst) {
  static_assert(std::is_trivially_copyable_v<TensorView<float, 4>>);
  static_assert(std::is_convertible_v<TensorView<float, 3>, TensorView<const float, 3>>);
  static_assert(!std::is_convertible_v<TensorView<const float, 3>, TensorView<float, 3>>);
}

}  // namespace
}  // namespace lockstep
