// The shift of conv states after a verification: bits are what is compared.
#include "kernels/recurrent/conv_state_shift.hpp"

#include <gmock/gmock.h>

#include "properties/support/gpu.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::DeviceTensor;

class ConvStateShiftGpu : public GpuTest {};

/// A pool [layers, slots, D, C], or with channels side by side [layers, slots, C, D].
template <class Element>
struct Pool {
  Pool(const Shape<4>& shape_, bool channels_last_)
      : shape(shape_),
        channels_last(channels_last_),
        tensor(Shape<1>{element_count(shape_)}),
        before(static_cast<std::size_t>(element_count(shape_))) {
    for (std::size_t i = 0; i < before.size(); ++i)
      before[i] = static_cast<Element>(random_bits(5, 1, i));
    tensor.set(before);
  }
  kernels::ConvStatePool pool() {
    const auto [layers, slots, D, C] = shape;
    return {.data = tensor.data(),
            .element_bytes = sizeof(Element),
            .layers = layers,
            .slots = slots,
            .channels = D,
            .columns = C,
            .layer_stride = slots * D * C,
            .slot_stride = D * C,
            .channel_stride = channels_last ? 1 : C,
            .column_stride = channels_last ? D : 1};
  }
  std::vector<Element> shifted(const Sizes& slots, const Sizes& accepted, int width) {
    std::vector<Element> after = before;
    const kernels::ConvStatePool p = pool();
    for (std::size_t n = 0; n < slots.size(); ++n) {
      if (slots[n] < 0 || slots[n] >= p.slots) continue;
      if (accepted[n] < 1 || accepted[n] - 1 + width - 1 > p.columns) continue;
      for (std::int64_t layer = 0; layer < p.layers; ++layer)
        for (std::int64_t d = 0; d < p.channels; ++d)
          for (int i = 0; i < width - 1; ++i) {
            const std::int64_t first =
                layer * p.layer_stride + slots[n] * p.slot_stride + d * p.channel_stride;
            after[static_cast<std::size_t>(first + i * p.column_stride)] =
                before[static_cast<std::size_t>(first + (accepted[n] - 1 + i) * p.column_stride)];
          }
    }
    return after;
  }

  Shape<4> shape;
  bool channels_last;
  DeviceTensor<Element, 1> tensor;
  std::vector<Element> before;
};

template <class Element>
void expect_shift(const Shape<4>& shape, bool channels_last, const Sizes& slots,
                  const Sizes& accepted, int width) {
  Pool<Element> pool(shape, channels_last);
  const DeviceTensor<std::int32_t, 1> indices(ints(slots)), counts(ints(accepted));
  kernels::conv_state_shift(pool.pool(), indices.view(), counts.view(), width, nullptr);
  finish();
  const bool same =
      pool.tensor.elements() == pool.shifted(slots, accepted, width) && pool.tensor.guards_intact();
  AccuracyLog::get().add_bits("conv_state_shift", "bit by bit", same);
  EXPECT_TRUE(same) << kernels::text_of(shape) << " width " << width;
}

// Overlapping ranges, padding, counts of 0 and 1 and beyond the columns.
TEST_F(ConvStateShiftGpu, movesTheAcceptedHistoryToTheFront) {
  const Sizes slots{3, 0, -1, 5, 1, 99, 4}, accepted{2, 1, 2, 4, 0, 2, 9};
  for (const bool channels_last : {false, true})
    for (const std::int64_t D : {1, 255, 256, 300})
      for (const int width : {2, 3, 4}) {
        expect_shift<std::uint16_t>({3, 6, D, width + 2}, channels_last, slots, accepted, width);
        expect_shift<std::uint32_t>({1, 6, D, width + 2}, channels_last, slots, accepted, width);
      }
  expect_shift<std::uint16_t>({2, 6, 64, 3}, false, {}, {}, 4);
}

TEST_F(ConvStateShiftGpu, refusesByName) {
  using ::testing::HasSubstr;
  Pool<std::uint16_t> pool({1, 2, 8, 3}, false);
  const DeviceTensor<std::int32_t, 1> one(ints({0})), two(ints({0, 1}));
  const auto complaint = [&](const kernels::ConvStatePool& states, const auto& counts, int width) {
    return complaint_of(
        [&] { kernels::conv_state_shift(states, one.view(), counts.view(), width, nullptr); });
  };
  EXPECT_EQ(complaint(pool.pool(), one, 4), "nothing");
  EXPECT_THAT(complaint(pool.pool(), two, 4), HasSubstr("num_accepted_tokens is expected to be"));
  EXPECT_THAT(complaint(pool.pool(), one, 5), HasSubstr("C at least width - 1"));
  EXPECT_THAT(complaint(pool.pool(), one, 9), HasSubstr("width is expected to be from 2 to 8"));
  auto odd = pool.pool();
  odd.element_bytes = 1;
  EXPECT_THAT(complaint(odd, one, 4), HasSubstr("elements of 2 or 4 bytes"));
  finish();
}

}  // namespace
}  // namespace lockstep
