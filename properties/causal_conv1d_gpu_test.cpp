// The kernels of causal_conv1d against the reference of the same name.
#include "kernels/recurrent/causal_conv1d.hpp"

#include <gmock/gmock.h>

#include <cmath>

#include "properties/support/gpu.hpp"
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

/// Rows of a prefill over the slots of a pool.
struct Layout {
  Layout(const Sizes& row_lengths, std::uint64_t seed, bool padded) : lengths(row_lengths) {
    const auto rows = static_cast<std::int64_t>(lengths.size());
    longest = std::max<std::int64_t>(1, *std::max_element(lengths.begin(), lengths.end()));
    starts = starts_of(lengths);
    counts = ints(lengths);
    tokens = padded ? rows * longest : sum(lengths) + 3;  // and padding behind the rows
    slots = 2 * rows + 1;
    indices = Array<std::int32_t, 1>(Shape<1>{rows}, -1);
    resumes = Array<bool, 1>(Shape<1>{rows}, true);
    for (std::int64_t n = 0; n < rows; ++n) {
      const auto draw = random_below(8, seed, 400, static_cast<std::uint64_t>(n));
      if (rows == 1 || draw != 0) indices(n) = static_cast<std::int32_t>(2 * (rows - 1 - n) + 1);
      resumes(n) = draw % 3 != 1;
    }
  }
  Sizes lengths;
  std::int64_t tokens, slots, longest;
  Array<std::int32_t, 1> starts, indices, counts;
  Array<bool, 1> resumes;
};

/// On the grid: exact in every type. What no row may look at is NaN.
struct Inputs {
  Inputs(const Layout& rows, const Extents& e, const Question& question, std::uint64_t seed)
      : x(draw<2>({rows.tokens, e.D}, seed, 1)),
        weight(draw<2>({e.D, e.W}, seed, 2)),
        bias(draw<1>({e.D}, seed, 3)),
        state(draw<3>({rows.slots, e.D, e.C}, seed, 4)) {
    const auto poison = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) fill(at(x.view(), t), std::nan(""));
    };
    for (std::int64_t n = 0; n < static_cast<std::int64_t>(rows.lengths.size()); ++n) {
      const std::int64_t length = rows.lengths[static_cast<std::size_t>(n)];
      const std::int64_t begin = question.padded ? n * rows.longest : rows.starts(n);
      const bool skipped = question.with_state && rows.indices(n) < 0;
      poison(skipped ? begin : begin + length, begin + (question.padded ? rows.longest : length));
      if (question.with_state && !skipped && !rows.resumes(n))
        fill(at(state.view(), rows.indices(n)), std::nan(""));
    }
    if (!question.padded) poison(rows.tokens - 3, rows.tokens);
  }
  template <std::size_t Rank>
  static Array<double, Rank> draw(const Shape<Rank>& shape, std::uint64_t seed,
                                  std::uint64_t stream) {
    return on_grid<double>(shape, {.seed = seed, .stream = stream});
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
Answer<S> reference_answer(const Inputs& inputs, const Layout& rows, const Question& question,
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

template <class T, class S>
void expect_agreement(const Extents& e, const Sizes& lengths, const Question& question,
                      std::uint64_t seed) {
  SCOPED_TRACE("D " + std::to_string(e.D) + ", W " + std::to_string(e.W) + ", C " +
               std::to_string(e.C) + ", rows " + ::testing::PrintToString(lengths));
  const Layout rows(lengths, seed, question.padded);
  const Inputs inputs(rows, e, question, seed);
  const auto truth = reference_answer<double>(inputs, rows, question, {});
  const auto yardstick = reference_answer<float>(
      inputs, rows, question,
      {.state = kernels::format_of<S>(), .output = kernels::format_of<T>()});
  const DeviceTensor<std::int32_t, 1> starts(rows.starts), indices(rows.indices),
      counts(rows.counts);
  DeviceTensor<unsigned char, 1> resumes(rows.resumes.shape());
  resumes.set({rows.resumes.begin(), rows.resumes.end()});
  const DeviceTensor<T, 2> x(inputs.x);
  const DeviceTensor<T, 2> weight(
      question.weights_by_tap ? contiguous(transposed(inputs.weight.view())) : inputs.weight);
  const DeviceTensor<T, 1> bias(inputs.bias);
  DeviceTensor<T, 2> out(inputs.x.shape());
  DeviceTensor<S, 3> state(
      question.channels_contiguous ? contiguous(transposed(inputs.state.view())) : inputs.state);
  kernels::CausalConv1d<T, S> in{
      .x = x.view(),
      .weight = question.weights_by_tap ? transposed(weight.view()) : weight.view(),
      .out = out.view(),
      .silu = question.silu,
      .tokens_of_block = question.tokens_of_block};
  if (question.with_bias) in.bias = bias.view();
  if (question.with_state) {
    in.conv_state = question.channels_contiguous ? transposed(state.view()) : state.view();
    in.batch.slots = {.indices = indices.view()};
    in.batch.has_initial_state =
        make_view(reinterpret_cast<const bool*>(std::as_const(resumes).data()), resumes.shape());
  }
  if (question.padded) {
    in.batch.padded_size = rows.longest;
    in.batch.context_lengths = counts.view();
  } else {
    in.batch.query_start_loc = starts.view();
  }
  kernels::causal_conv1d<T, S>(in, nullptr);
  finish();
  EXPECT_TRUE(within_yardstick(kOperation, "out", out, yardstick.out, truth.out));
  EXPECT_TRUE(state.guards_intact());
  const Array<float, 3> raw = state.host();
  const Array<float, 3> after =
      question.channels_contiguous ? contiguous(transposed(raw.view())) : raw;
  const Difference moved = difference(after, yardstick.state);
  EXPECT_TRUE(moved.norm == 0 && moved.misplaced == 0)
      << "a conv state is moved, never computed: " << moved.text(kernels::format_of<S>());
}

template <class Types>
class CausalConv1dGpu : public GpuTest {};
using TypePairs = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    std::pair<Fp16, Fp16>, std::pair<float, float>, std::pair<float, Bf16>,
#endif
    std::pair<Bf16, float>, std::pair<Bf16, Bf16>>;
TYPED_TEST_SUITE(CausalConv1dGpu, TypePairs);

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
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  for (const Extents& e : kExtents)
    for (const Sizes& lengths : kLengths)
      for (const int tokens : {16, 32, 64})
        expect_agreement<T, S>(e, lengths, {.tokens_of_block = tokens}, lengths.size());
}

TYPED_TEST(CausalConv1dGpu, everyArgumentCounts) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
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
      expect_agreement<T, S>(e, lengths, question, ++seed);
}

TEST(CausalConv1dArguments, areRefusedByName) {
  alignas(16) static std::byte nowhere[16];
  auto* const data = reinterpret_cast<Bf16*>(nowhere);
  const auto complaint = [&](std::int64_t W, std::int64_t C) -> std::string {
    const kernels::CausalConv1d<Bf16, Bf16> in{
        .x = make_view<const Bf16>(data, Shape<2>{4, 8}),
        .weight = make_view<const Bf16>(data, Shape<2>{8, W}),
        .out = make_view(data, Shape<2>{4, 8}),
        .conv_state = make_view(data, Shape<3>{2, 8, C})};
    try {
      kernels::causal_conv1d<Bf16, Bf16>(in, nullptr);
    } catch (const kernels::ArgumentError& error) {
      return error.what();
    }
    return "nothing";
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint(5, 4), HasSubstr("weight is expected to be [D, W] with W from 2 to 4"));
  EXPECT_THAT(complaint(4, 2), HasSubstr("C = 2 for W = 4"));
}

}  // namespace
}  // namespace lockstep
