// The kernel of mamba1_prefill against the reference of the same name.
#include "kernels/models/mamba1_prefill.hpp"

#include <gmock/gmock.h>

#include <cmath>

#include "properties/kernels/recurrent/prefill_rows.hpp"
#include "reference/recurrent/mamba1_prefill.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;

constexpr const char* kOperation = "mamba1_prefill";
constexpr std::int64_t kN = kernels::kMamba1Columns;

struct Question {
  bool gated = true;
  bool biased = true;  ///< dt_bias and skip are given
  bool softplus = true;
  bool with_state = true;
  std::int64_t gap = 0;  ///< channels between the rows of x, dt and z, and between slots
};

/// A layer's inputs on the grid: exact in every type. Whatever no row may look at is NaN.
struct Inputs {
  Inputs(const PrefillRows& rows, std::int64_t D, const Question& q, std::uint64_t seed)
      : x(draw<2>({rows.tokens, D + q.gap}, seed, 1)),
        dt(draw<2>({rows.tokens, D + q.gap}, seed, 2)),
        z(draw<2>({rows.tokens, D + q.gap}, seed, 3)),
        A(draw<2>({D, kN}, seed, 4)),
        vectors(draw<2>({rows.tokens, 8 + 2 * kN}, seed, 5)),
        skip(draw<1>({D}, seed, 6)),
        dt_bias(draw<1>({D}, seed, 7)),
        state(draw<3>({rows.slots, D + q.gap, kN}, seed, 8)) {
    for (double& a : A) a = -1.0 / 64 - std::abs(a) / 2;
    for (double& bias : dt_bias) bias = q.softplus ? bias - 2 : std::abs(bias) / 8;
    if (!q.softplus)
      for (double& d : dt) d = std::abs(d) / 8;
    const auto poison = [](auto& array, std::int64_t i) {
      fill(at(array.view(), i), std::nan(""));
    };
    rows.for_each_unread(
        q.with_state,
        [&](std::int64_t t) { poison(x, t), poison(dt, t), poison(z, t), poison(vectors, t); },
        [&](std::int64_t slot) { poison(state, slot); });
  }
  std::int64_t channel_count() const { return A.extent(0); }

  Array<double, 2> x, dt, z, A;
  Array<double, 2> vectors;  // [T, 8 + 2 N]: B and C behind other columns, as x_proj leaves them
  Array<double, 1> skip, dt_bias;
  Array<double, 3> state;
};

/// Columns [first, first + count) of a view [T, n].
template <AnyView V>
V columns(const V& view, std::int64_t first, std::int64_t count) {
  return make_view(view.data_handle() + first, Shape<2>{view.extent(0), count},
                   Shape<2>{view.stride(0), 1});
}
/// The first D channels of the slots of a view [slots, D + gap, N].
template <AnyView V>
V channels(const V& view, std::int64_t D) {
  return make_view(view.data_handle(), Shape<3>{view.extent(0), D, kN},
                   Shape<3>{view.stride(0), kN, 1});
}

template <class S>
struct Answer {
  Array<S, 2> out;
  Array<S, 3> state;
};

template <class S>
Answer<S> reference_answer(const Inputs& inputs, const PrefillRows& rows, const Question& q,
                           const StoragePoints& storage) {
  const auto x = cast<S>(inputs.x), dt = cast<S>(inputs.dt), z = cast<S>(inputs.z);
  const auto A = cast<S>(inputs.A), vectors = cast<S>(inputs.vectors);
  const auto skip = cast<S>(inputs.skip), dt_bias = cast<S>(inputs.dt_bias);
  const std::int64_t D = inputs.channel_count();
  const auto read = [](const Array<S, 2>& array, std::int64_t first, std::int64_t count) {
    return columns(TensorView<const S, 2>(array.view()), first, count);
  };
  Answer<S> answer{Array<S, 2>(Shape<2>{rows.tokens, D}), cast<S>(inputs.state)};
  reference::Mamba1Prefill<S> in{
      .x = read(x, 0, D),
      .dt = read(dt, 0, D),
      .A = A,
      .B = read(vectors, 8, kN),
      .C = read(vectors, 8 + kN, kN),
      .dt_softplus = q.softplus,
      .rows = {.query_start_loc = rows.starts.view(), .storage = storage}};
  if (q.gated) in.z = read(z, 0, D);
  if (q.biased) in.skip = skip.view(), in.dt_bias = dt_bias.view();
  std::optional<TensorView<S, 3>> state;
  if (q.with_state) {
    state = channels(answer.state.view(), D);
    in.rows.slots = {.indices = rows.indices.view()};
    in.rows.has_initial_state = rows.resumes.view();
  }
  reference::mamba1_prefill<S>(in, state, answer.out.view());
  return answer;
}

template <class T, class S>
struct Device {
  Device(const Inputs& in, const PrefillRows& rows)
      : indices(rows),
        x(in.x),
        dt(in.dt),
        z(in.z),
        vectors(in.vectors),
        A(in.A),
        skip(in.skip),
        dt_bias(in.dt_bias),
        out(Shape<2>{rows.tokens, in.channel_count()}),
        state(in.state) {}

  kernels::Mamba1Prefill<T, S> arguments(const Question& q) {
    const std::int64_t D = A.shape()[0];
    const Device& read = *this;
    kernels::Mamba1Prefill<T, S> in{.x = columns(read.x.view(), 0, D),
                                    .dt = columns(read.dt.view(), 0, D),
                                    .A = read.A.view(),
                                    .B = columns(read.vectors.view(), 8, kN),
                                    .C = columns(read.vectors.view(), 8 + kN, kN),
                                    .out = out.view(),
                                    .dt_softplus = q.softplus,
                                    .batch = indices.batch(q.with_state)};
    if (q.gated) in.z = columns(read.z.view(), 0, D);
    if (q.biased) in.skip = skip.view(), in.dt_bias = dt_bias.view();
    if (q.with_state) in.state = channels(state.view(), D);
    return in;
  }
  void run(const Question& q) {
    kernels::mamba1_prefill<T, S>(arguments(q), nullptr);
    finish();
  }
  /// Runs `count` tokens from `first` on as row `row`, with its state.
  void run_part(std::int64_t first, std::int64_t count, std::int64_t row) {
    auto in = arguments({});
    const auto part = [&](const auto& view) { return lockstep::cut(view, first, first + count); };
    in.x = part(in.x), in.dt = part(in.dt), in.B = part(in.B), in.C = part(in.C);
    in.z = part(*in.z), in.out = part(in.out);
    const DeviceTensor<std::int32_t, 1> starts(starts_of({count}));
    in.batch.query_start_loc = starts.view();
    const auto only = [&](const auto& list) {
      return make_view(list.data_handle() + row, Shape<1>{1});
    };
    in.batch.slots.indices = only(*in.batch.slots.indices);
    in.batch.has_initial_state = only(*in.batch.has_initial_state);
    kernels::mamba1_prefill<T, S>(in, nullptr);
    finish();
  }

  DevicePrefillRows indices;
  DeviceTensor<T, 2> x, dt, z, vectors;
  DeviceTensor<float, 2> A;
  DeviceTensor<float, 1> skip, dt_bias;
  DeviceTensor<T, 2> out;
  DeviceTensor<S, 3> state;
};

template <class Types>
void expect_agreement(std::int64_t D, const Sizes& lengths, const Question& q, std::uint64_t seed) {
  using T = typename Types::first_type;
  using S = typename Types::second_type;
  SCOPED_TRACE("D = " + std::to_string(D) + ", rows " + ::testing::PrintToString(lengths));
  const PrefillRows rows(lengths, seed, false);
  const Inputs inputs(rows, D, q, seed);
  const auto truth = reference_answer<double>(inputs, rows, q, {});
  const auto yardstick = reference_answer<float>(inputs, rows, q, storage_of<T, S>());
  Device<T, S> device(inputs, rows);
  device.run(q);
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  EXPECT_TRUE(within_yardstick(kOperation, "state", device.state, yardstick.state, truth.state));
}

// Lengths around a tile and around the four tokens that lanes exchange. Rounding adds up over long
// rows: they have many channels, since an error of a few numbers is no yardstick.
const std::vector<Sizes> kLengths{{32}, {1}, {64, 0, 31}, {33, 2, 3, 4, 5, 63}, {0, 0}};
const std::vector<Sizes> kLongLengths{{1, 200, 32, 0, 65, 6}, {400}};

template <class Types>
class Mamba1PrefillGpu : public GpuTest {};
TYPED_TEST_SUITE(Mamba1PrefillGpu, UpdateTypes);

// Channels of whole blocks, of parts of one and of one.
TYPED_TEST(Mamba1PrefillGpu, promptsAreTheReferences) {
  for (const std::int64_t D : {1, 8, 33, 64, 136})
    for (const Sizes& lengths : kLengths)
      expect_agreement<TypeParam>(D, lengths, {}, lengths.size());
  for (const std::int64_t D : {136, 261})
    for (const Sizes& lengths : kLongLengths)
      expect_agreement<TypeParam>(D, lengths, {}, lengths.size());
}

// With gaps of 3 numbers, rows do not begin at multiples of 16 bytes.
TYPED_TEST(Mamba1PrefillGpu, everyArgumentCounts) {
  std::uint64_t seed = 20;
  for (const Question& q : {Question{.gated = false},
                            {.biased = false},
                            {.softplus = false},
                            {.gated = false, .biased = false, .softplus = false},
                            {.with_state = false},
                            {.gap = 24},
                            {.gap = 3}})
    for (const std::int64_t D : {64, 100}) {
      expect_agreement<TypeParam>(D, {65, 3, 70, 30, 100}, q, ++seed);
    }
}

// A row's bits are the same alone and in a batch. A prefix cache rests on the rest: with a float32
// state in between, a prefill that is resumed at any token gives the bits of the uncut one.
TYPED_TEST(Mamba1PrefillGpu, aRowsBitsDependOnNoBatchAndNoCut) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  const Sizes lengths{70, 130, 9};
  PrefillRows rows(lengths, 1, false);
  for (std::int64_t n = 0; n < 3; ++n)
    rows.indices(n) = static_cast<std::int32_t>(n + 2), rows.resumes(n) = true;
  const Inputs inputs(rows, 72, {}, 6);
  Device<T, S> whole(inputs, rows);
  whole.run({});
  for (const std::int64_t cut : {0, 1, 5, 32, 66, 128}) {
    if (cut > 0 && sizeof(S) != 4) continue;
    Device<T, S> apart(inputs, rows);
    if (cut > 0) apart.run_part(70, cut, 1);
    apart.run_part(70 + cut, 130 - cut, 1);
    const auto out = apart.out.host(), all = whole.out.host();
    const auto row_of = [](const auto& array) {
      return contiguous(lockstep::cut(array.view(), 70, 200));
    };
    EXPECT_TRUE(same_bits(row_of(out), row_of(all))) << "cut at " << cut;
    const auto state = apart.state.host(), expected = whole.state.host();
    EXPECT_TRUE(same_bits(at(state.view(), 3), at(expected.view(), 3))) << "cut at " << cut;
  }
}

class Mamba1PrefillRowsGpu : public GpuTest {};

// More rows than a grid's second dimension holds.
TEST_F(Mamba1PrefillRowsGpu, areMany) {
  expect_agreement<std::pair<Bf16, float>>(8, Sizes(65537, 1), {}, 3);
}

TEST(Mamba1PrefillArguments, areRefusedByName) {
  using In = kernels::Mamba1Prefill<Bf16, float>;
  using ::testing::HasSubstr;
  const auto complaint = [](auto change) {
    In in{.x = unread<const Bf16, 2>({4, 64}),
          .dt = unread<const Bf16, 2>({4, 64}),
          .A = unread<const float, 2>({64, kN}),
          .B = unread<const Bf16, 2>({4, kN}),
          .C = unread<const Bf16, 2>({4, kN}),
          .out = unread<Bf16, 2>({4, 64}),
          .state = unread<float, 3>({3, 64, kN})};
    change(in);
    return complaint_of([&] { kernels::mamba1_prefill<Bf16, float>(in, nullptr); });
  };
  EXPECT_THAT(complaint([](In& in) {
                in.state = unread<float, 3>({5, 64, 8});
              }),
              HasSubstr("state is expected to be [slots, D, 16] = [5, 64, 16]; got [5, 64, 8]"));
  EXPECT_THAT(complaint([](In& in) {
                in.dt = unread<const Bf16, 2>({4, 63});
              }),
              HasSubstr("dt is expected to be [T, D] = [4, 64]; got [4, 63]"));
  EXPECT_THAT(complaint([](In& in) {
                in.C = unread<const Bf16, 2>({4, kN}, {20, 1});
              }),
              HasSubstr("B and C is expected to be of contiguous rows at multiples of 16 bytes"));
  EXPECT_THAT(complaint([](In& in) {
                in.A = unread<const float, 2>({64, kN}, {32, 1});
              }),
              HasSubstr("A is expected to be without gaps, at a multiple of 16 bytes"));
  EXPECT_THAT(complaint([](In& in) { in.batch.padded_size = 2; }), HasSubstr("of packed rows"));
}

}  // namespace
}  // namespace lockstep
