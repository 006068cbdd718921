// The kernels of causal_conv1d against the reference of the same name.
#include "kernels/recurrent/causal_conv1d.hpp"

#include <gmock/gmock.h>

#include <cmath>

#include "properties/kernels/recurrent/prefill_rows.hpp"
#include "reference/recurrent/causal_conv1d.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

constexpr const char* kOperation = "causal_conv1d";

struct Extents {
  std::int64_t D, W, C;
};

struct Question {
  bool silu = true;
  bool with_bias = true;
  bool with_state = true;
  bool channels_contiguous = true;  ///< in the state
  bool weights_by_tap = false;
  bool padded = false;  ///< rows of one size, with lengths
  int tokens_of_block = 0;
};

/// On the grid: exact in every type. What no row may look at is NaN.
struct Inputs {
  Inputs(const PrefillRows& rows, const Extents& e, const Question& question, std::uint64_t seed)
      : x(draw<2>({rows.tokens, e.D}, seed, 1)),
        weight(draw<2>({e.D, e.W}, seed, 2)),
        bias(draw<1>({e.D}, seed, 3)),
        state(draw<3>({rows.slots, e.D, e.C}, seed, 4)) {
    rows.for_each_unread(
        question.with_state, [&](std::int64_t t) { fill(at(x.view(), t), std::nan("")); },
        [&](std::int64_t slot) { fill(at(state.view(), slot), std::nan("")); });
  }
  Array<double, 2> x, weight;
  Array<double, 1> bias;
  Array<double, 3> state;
};

template <class S>
struct Answer {
  Array<S, 2> out;
  Array<S, 3> state;
};

template <class S>
Answer<S> reference_answer(const Inputs& inputs, const PrefillRows& rows, const Question& question,
                           const StoragePoints& storage) {
  const auto x = cast<S>(inputs.x), weight = cast<S>(inputs.weight);
  const auto bias = cast<S>(inputs.bias);
  Answer<S> answer{Array<S, 2>(x.shape()), cast<S>(inputs.state)};
  reference::CausalConv1dInputs<S> in{
      .x = x,
      .weight = weight,
      .activation = question.silu ? reference::Activation::silu : reference::Activation::none,
      .storage = storage};
  if (question.with_bias) in.bias = bias;
  std::optional<TensorView<S, 3>> state;
  if (question.with_state) {
    state = answer.state.view();
    in.slots = {.indices = rows.indices.view()};
    in.has_initial_state = rows.resumes.view();
  }
  if (question.padded) {
    const auto in_rows = [&](const auto& view) {
      return make_view(view.data_handle(),
                       Shape<3>{view.extent(0) / rows.longest, rows.longest, view.extent(1)});
    };
    reference::causal_conv1d_padded<S>(in, in_rows(in.x), rows.counts.view(), state,
                                       in_rows(answer.out.view()));
  } else {
    in.query_start_loc = rows.starts.view();
    reference::causal_conv1d<S>(in, state, answer.out.view());
  }
  return answer;
}

template <class Types>
void expect_agreement(const Extents& e, const Sizes& lengths, const Question& question,
                      std::uint64_t seed) {
  using T = typename Types::first_type;
  using S = typename Types::second_type;
  SCOPED_TRACE("D " + std::to_string(e.D) + ", W " + std::to_string(e.W) + ", C " +
               std::to_string(e.C) + ", rows " + ::testing::PrintToString(lengths));
  const PrefillRows rows(lengths, seed, question.padded);
  const Inputs inputs(rows, e, question, seed);
  const auto truth = reference_answer<double>(inputs, rows, question, {});
  const auto yardstick = reference_answer<float>(inputs, rows, question, storage_of<T, S>());
  const DevicePrefillRows indices(rows);
  const DeviceTensor<T, 2> x(inputs.x);
  const DeviceTensor<T, 2> weight(turned_if(question.weights_by_tap, inputs.weight));
  const DeviceTensor<T, 1> bias(inputs.bias);
  DeviceTensor<T, 2> out(inputs.x.shape());
  DeviceTensor<S, 3> state(turned_if(question.channels_contiguous, inputs.state));
  kernels::CausalConv1d<T, S> in{
      .x = x.view(),
      .weight = question.weights_by_tap ? transposed(weight.view()) : weight.view(),
      .out = out.view(),
      .silu = question.silu,
      .batch = indices.batch(question.with_state),
      .tokens_of_block = question.tokens_of_block};
  if (question.with_bias) in.bias = bias.view();
  if (question.with_state)
    in.conv_state = question.channels_contiguous ? transposed(state.view()) : state.view();
  kernels::causal_conv1d<T, S>(in, nullptr);
  finish();
  EXPECT_TRUE(within_yardstick(kOperation, "out", out, yardstick.out, truth.out));
  EXPECT_TRUE(state.guards_intact());
  const Array<float, 3> after = turned_if(question.channels_contiguous, state.host());
  const Difference moved = difference(after, yardstick.state);
  EXPECT_TRUE(moved.norm == 0 && moved.misplaced == 0)
      << "a conv state is moved, never computed: " << moved.text(kernels::format_of<S>());
}

template <class Types>
class CausalConv1dGpu : public GpuTest {};
TYPED_TEST_SUITE(CausalConv1dGpu, ConvolutionTypes);

const std::vector<Extents> kExtents{{8, 4, 3},  {1032, 4, 3}, {64, 4, 4}, {24, 3, 2}, {40, 3, 3},
                                    {16, 2, 1}, {64, 2, 2},   {7, 4, 3},  {1, 2, 1}};
// Rows that begin and end around the ends of blocks, shorter than the window too.
const std::vector<Sizes> kLengths{{64},
                                  {1},
                                  {0, 0},
                                  {31, 1, 1, 31, 2, 62, 0, 3},
                                  {1, 0, 2, 3, 4, 120, 30, 0},
                                  {200, 5, 61, 1, 0}};

TYPED_TEST(CausalConv1dGpu, rowsAreTheReferences) {
  for (const Extents& e : kExtents)
    for (const Sizes& lengths : kLengths)
      for (const int tokens : {16, 32, 64})
        expect_agreement<TypeParam>(e, lengths, {.tokens_of_block = tokens}, lengths.size());
}

TYPED_TEST(CausalConv1dGpu, everyArgumentCounts) {
  const Sizes lengths{33, 2, 0, 130, 64};
  std::uint64_t seed = 30;
  for (const Extents& e : kExtents)
    for (const Question& question : {Question{.silu = false},
                                     {.with_bias = false},
                                     {.with_state = false},
                                     {.channels_contiguous = false},
                                     {.weights_by_tap = true},
                                     {.padded = true},
                                     {.with_state = false, .padded = true}})
      expect_agreement<TypeParam>(e, lengths, question, ++seed);
}

TEST(CausalConv1dArguments, areRefusedByName) {
  const auto complaint = [](std::int64_t W, std::int64_t C) {
    const kernels::CausalConv1d<Bf16, Bf16> in{.x = unread<const Bf16, 2>({4, 8}),
                                               .weight = unread<const Bf16, 2>({8, W}),
                                               .out = unread<Bf16, 2>({4, 8}),
                                               .conv_state = unread<Bf16, 3>({2, 8, C})};
    return complaint_of([&] { kernels::causal_conv1d<Bf16, Bf16>(in, nullptr); });
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint(5, 4), HasSubstr("weight is expected to be [D, W] with W from 2 to 4"));
  EXPECT_THAT(complaint(4, 2), HasSubstr("C = 2 for W = 4"));
}

}  // namespace
}  // namespace lockstep
