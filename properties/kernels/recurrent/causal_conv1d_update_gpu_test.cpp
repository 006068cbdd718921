// The kernel of causal_conv1d_update against the reference of the same name.
#include "kernels/recurrent/causal_conv1d_update.hpp"

#include <gmock/gmock.h>

#include "properties/support/gpu.hpp"
#include "reference/recurrent/causal_conv1d.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

constexpr const char* kOperation = "causal_conv1d_update";

struct Extents {
  std::int64_t D, W, C;
};

struct Inputs {
  Inputs(const Batch& batch, const Extents& e, std::uint64_t seed)
      : x(draw<2>({batch.tokens, e.D}, seed, 1)),
        weight(draw<2>({e.D, e.W}, seed, 2)),
        bias(draw<1>({e.D}, seed, 3)),
        state(draw<3>({batch.slots, e.D, e.C}, seed, 4)) {}
  Array<double, 2> x, weight;
  Array<double, 1> bias;
  Array<double, 3> state;
};

struct Question {
  bool silu = true;
  bool with_bias = true;
  bool one_token_rows = false;  ///< without query_start_loc
  bool channels_contiguous = true;
  bool snapshots = false;
  std::optional<Array<std::int32_t, 1>> parents{};
};

/// A conv state lies in the row's first slot; the accepted counts go beside a list.
StateSlots conv_slots(const Batch& batch, const StateSlots& all) {
  StateSlots slots = all;
  if (batch.columns == 0) slots.num_accepted.reset();
  return slots;
}

template <class S>
struct Answer {
  Array<S, 2> out;
  Array<S, 3> state, snapshots;
};

template <class S>
Answer<S> reference_answer(const Inputs& inputs, const Batch& batch, const Question& question,
                           const StoragePoints& storage) {
  const auto x = cast<S>(inputs.x), weight = cast<S>(inputs.weight);
  const auto bias = cast<S>(inputs.bias);
  Answer<S> answer{Array<S, 2>(x.shape()), cast<S>(inputs.state), {}};
  Shape<3> snapshot_shape = inputs.state.shape();
  snapshot_shape[0] = batch.tokens;
  answer.snapshots = Array<S, 3>(snapshot_shape);
  reference::CausalConv1dInputs<S> in{
      .x = x,
      .weight = weight,
      .slots = conv_slots(batch, batch.host()),
      .activation = question.silu ? reference::Activation::silu : reference::Activation::none,
      .storage = storage};
  if (question.with_bias) in.bias = bias;
  if (!question.one_token_rows) in.query_start_loc = batch.starts.view();
  std::optional<IndexView> parents;
  if (question.parents) parents = question.parents->view();
  std::optional<TensorView<S, 3>> snapshots;
  if (question.snapshots) snapshots = answer.snapshots.view();
  reference::causal_conv1d_update<S>(in, answer.state.view(), answer.out.view(), parents,
                                     snapshots);
  return answer;
}

template <class Types>
void expect_agreement(const Extents& e, const Batch& batch, const Question& question,
                      std::uint64_t seed) {
  using T = typename Types::first_type;
  using S = typename Types::second_type;
  const Inputs inputs(batch, e, seed);
  const auto truth = reference_answer<double>(inputs, batch, question, {});
  const auto yardstick = reference_answer<float>(inputs, batch, question, storage_of<T, S>());
  const DeviceBatch indices(batch);
  const DeviceTensor<T, 2> x(inputs.x), weight(inputs.weight);
  const DeviceTensor<T, 1> bias(inputs.bias);
  DeviceTensor<T, 2> out(inputs.x.shape());
  DeviceTensor<S, 3> state(turned_if(question.channels_contiguous, inputs.state));
  DeviceTensor<S, 3> snapshots(Shape<3>{batch.tokens, e.D, e.C});
  kernels::CausalConv1dUpdate<T, S> in{
      .x = x.view(),
      .conv_state = question.channels_contiguous ? transposed(state.view()) : state.view(),
      .weight = weight.view(),
      .out = out.view(),
      .silu = question.silu,
      .slots = conv_slots(batch, indices.slots())};
  if (question.with_bias) in.bias = bias.view();
  if (!question.one_token_rows) in.query_start_loc = indices.starts.view();
  if (question.snapshots) in.snapshots = snapshots.view();
  std::optional<DeviceTensor<std::int32_t, 1>> parents;
  if (question.parents) {
    parents.emplace(*question.parents);
    in.parents = std::as_const(*parents).view();
  }
  kernels::causal_conv1d_update<T, S>(in, nullptr);
  finish();
  EXPECT_TRUE(within_yardstick(kOperation, "out", out, yardstick.out, truth.out));
  EXPECT_TRUE(state.guards_intact());
  const Array<float, 3> after = turned_if(question.channels_contiguous, state.host());
  EXPECT_TRUE(same_bits(after, yardstick.state)) << "a conv state is moved, never computed";
  if (question.snapshots) {
    const Difference moved = difference(snapshots.host(), yardstick.snapshots);
    EXPECT_TRUE(moved.norm == 0 && moved.misplaced == 0) << moved.text(kernels::format_of<S>());
  }
}

template <class Types>
class CausalConv1dUpdateGpu : public GpuTest {};
TYPED_TEST_SUITE(CausalConv1dUpdateGpu, ConvolutionTypes);

const std::vector<Extents> kExtents{{8, 4, 3},  {1024, 4, 3}, {1032, 4, 4}, {24, 3, 2},  {40, 3, 3},
                                    {16, 2, 1}, {64, 2, 2},   {7, 4, 3},    {129, 3, 2}, {1, 2, 1}};

TYPED_TEST(CausalConv1dUpdateGpu, aDecodeIsTheReferences) {
  for (const Extents& e : kExtents)
    for (const std::int64_t rows : {1, 5, 70})
      for (const bool contiguous : {false, true})
        expect_agreement<TypeParam>(e, Batch::draw(rows, rows, 1, false),
                                    {.silu = rows != 1,
                                     .with_bias = rows != 5,
                                     .one_token_rows = true,
                                     .channels_contiguous = contiguous},
                                    rows);
}

// A server's decode has no query_start_loc, and a kernel for few, some and many rows. Each of them
// is held to the yardstick, and is the one that is meant.
TYPED_TEST(CausalConv1dUpdateGpu, everyBatchSizeIsServedByItsKernel) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  const bool has_step = std::is_same_v<T, S> && sizeof(T) == 2;
  for (const std::int64_t rows : {1, 8, 9, 63, 64, 127, 128, 511, 512})
    for (const bool starts : {false, true}) {
      SCOPED_TRACE(rows);
      expect_agreement<TypeParam>({1032, 4, 3}, Batch::draw(rows, rows, 1, false),
                                  {.silu = rows % 2 == 0, .one_token_rows = !starts}, rows);
      const std::string step = rows < 64    ? "step 2x4"
                               : rows < 512 ? "step 4x4"
                                            : "step of many rows 4x4";
      EXPECT_EQ(kernels::last_launch.text(), has_step && !starts ? step : "rows 1x4");
    }
}

// A state may have more columns than the history needs: the new one is the last columns of the old
// one and the tokens.
TYPED_TEST(CausalConv1dUpdateGpu, statesMayBeWiderThanTheirHistory) {
  for (const std::uint64_t seed : {1, 2}) {
    expect_agreement<TypeParam>({40, 4, 9}, Batch::draw(seed, 5, 6, false),
                                {.channels_contiguous = seed == 1}, seed);
    expect_agreement<TypeParam>({40, 4, 7}, Batch::draw(seed, 5, 1, false),
                                {.one_token_rows = true, .channels_contiguous = seed == 1}, seed);
  }
}

// A batch without rows is all padding.
TYPED_TEST(CausalConv1dUpdateGpu, aBatchWithoutRowsGivesZeros) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  const DeviceTensor<T, 2> x(Shape<2>{5, 40}), weight(Shape<2>{40, 4});
  DeviceTensor<T, 2> out(Shape<2>{5, 40});
  DeviceTensor<S, 3> state(Shape<3>{2, 40, 3});
  const DeviceTensor<std::int32_t, 1> zero(ints({0}));
  kernels::causal_conv1d_update<T, S>({.x = x.view(),
                                       .conv_state = state.view(),
                                       .weight = weight.view(),
                                       .out = out.view(),
                                       .query_start_loc = zero.view()},
                                      nullptr);
  finish();
  for (const float y : out.host()) EXPECT_EQ(y, 0);
}

TYPED_TEST(CausalConv1dUpdateGpu, rowsOfSeveralTokensShiftTheirState) {
  for (const Extents& e : kExtents)
    for (const std::uint64_t seed : {1, 2})
      expect_agreement<TypeParam>(e, Batch::draw(seed, 5, 6, false),
                                  {.channels_contiguous = seed == 1}, seed);
}

// A speculative pool: history from the accepted column on, and the drafts kept after it.
TYPED_TEST(CausalConv1dUpdateGpu, acceptedCountsSayWhereHistoryBegins) {
  for (const std::int64_t W : {2, 3, 4})
    for (const std::uint64_t seed : {3, 4, 5})
      expect_agreement<TypeParam>({130, W, W - 1 + 4 - 1}, Batch::draw(seed, 6, 4, true),
                                  {.channels_contiguous = seed != 3}, seed);
}

TYPED_TEST(CausalConv1dUpdateGpu, snapshotsAndTreesLeaveTheStateAlone) {
  for (const Extents& e : kExtents)
    for (const std::uint64_t seed : {6, 7}) {
      const Batch batch = Batch::draw(seed, 4, 7, false);
      expect_agreement<TypeParam>(e, batch, {.snapshots = true}, seed);
      expect_agreement<TypeParam>(e, batch, {.snapshots = true, .parents = draw_tree(batch, seed)},
                                  seed);
    }
}

// Arguments are refused before a launch: nothing here is device memory, and no GPU is needed.
TEST(CausalConv1dUpdateArguments, areRefusedByName) {
  const auto complaint = [](const kernels::CausalConv1dUpdate<Bf16, Bf16>& in) {
    return complaint_of([&] { kernels::causal_conv1d_update<Bf16, Bf16>(in, nullptr); });
  };
  kernels::CausalConv1dUpdate<Bf16, Bf16> in{.x = unread<Bf16, 2>({2, 8}),
                                             .conv_state = unread<Bf16, 3>({4, 8, 2}),
                                             .weight = unread<Bf16, 2>({8, 5}),
                                             .out = unread<Bf16, 2>({2, 8})};
  EXPECT_THAT(complaint(in),
              ::testing::HasSubstr("weight is expected to be [D, W] with W from 2 to 4"));
  in.weight = unread<Bf16, 2>({8, 4});
  EXPECT_THAT(complaint(in), ::testing::HasSubstr(
                                 "conv_state is expected to be [slots, D, C] with C of at least W "
                                 "- 1; got C = 2 for W = 4"));
  in.conv_state = unread<Bf16, 3>({4, 8, 3});
  in.out = unread<Bf16, 2>({2, 7});
  EXPECT_THAT(complaint(in), ::testing::HasSubstr("out is expected to be [T, D] = [2, 8]"));
}

}  // namespace
}  // namespace lockstep
