// The kernel of mamba1_decode against the reference of the same name.
#include "kernels/models/mamba1_decode.hpp"

#include <gmock/gmock.h>

#include "properties/support/gpu.hpp"
#include "reference/recurrent/mamba1_decode.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;

constexpr const char* kOperation = "mamba1_decode";
constexpr std::int64_t kN = kernels::kMamba1Columns;

struct Question {
  bool gated = true;
  bool biased = true;  ///< dt_bias and skip are given
  bool softplus = true;
  bool normed = false;
  bool weighted = false;  ///< the norms of B and C have weights
  std::int64_t gap = 0;   ///< channels between the rows of x, dt and z
  std::int64_t low_rank = 40;
};

/// A step's inputs on the grid: exact in every type.
struct Inputs {
  Inputs(const Batch& batch, std::int64_t D, const Question& q, std::uint64_t seed)
      : x(draw<2>({batch.tokens, D + q.gap}, seed, 1)),
        dt(draw<2>({batch.tokens, D + q.gap}, seed, 2)),
        z(draw<2>({batch.tokens, D + q.gap}, seed, 3)),
        A(draw<2>({D, kN}, seed, 4)),
        vectors(draw<2>({batch.tokens, q.low_rank + 2 * kN}, seed, 5)),
        b_weight(draw<1>({kN}, seed, 6)),
        c_weight(draw<1>({kN}, seed, 7)),
        skip(draw<1>({D}, seed, 8)),
        dt_bias(draw<1>({D}, seed, 9)),
        state(draw<3>({batch.slots, D, kN}, seed, 10)) {
    for (double& a : A) a = -1.0 / 64 - std::abs(a);
    if (!q.softplus)
      for (double& d : dt) d = std::abs(d) / 8;
  }
  std::int64_t channels() const { return A.extent(0); }

  Array<double, 2> x, dt, z, A;
  Array<double, 2> vectors;  // [T, R + 2 N]: dt_low, B and C side by side, as x_proj leaves them
  Array<double, 1> b_weight, c_weight, skip, dt_bias;
  Array<double, 3> state;
};

/// Columns [first, first + count) of a view [T, n].
template <AnyView V>
V columns(const V& view, std::int64_t first, std::int64_t count) {
  return make_view(view.data_handle() + first, Shape<2>{view.extent(0), count},
                   Shape<2>{view.stride(0), 1});
}

template <class S>
struct Answer {
  Array<S, 2> out;
  Array<S, 3> state;
};

/// `in` on the host or the device: both have the same names of arguments.
template <class Arguments, class Data>
void add_options(Arguments& in, const Data& data, const Question& q, std::int64_t D) {
  if (q.gated) in.z = columns(data.z.view(), 0, D);
  if (q.biased) in.skip = data.skip.view(), in.dt_bias = data.dt_bias.view();
  in.dt_softplus = q.softplus;
  if (!q.normed) return;
  in.norm_eps = 1e-3f;
  in.dt_low = columns(data.vectors.view(), 0, q.low_rank);
  if (q.weighted) in.b_weight = data.b_weight.view(), in.c_weight = data.c_weight.view();
}

template <class S>
struct HostInputs {
  explicit HostInputs(const Inputs& in)
      : x(cast<S>(in.x)),
        dt(cast<S>(in.dt)),
        z(cast<S>(in.z)),
        A(cast<S>(in.A)),
        vectors(cast<S>(in.vectors)),
        b_weight(cast<S>(in.b_weight)),
        c_weight(cast<S>(in.c_weight)),
        skip(cast<S>(in.skip)),
        dt_bias(cast<S>(in.dt_bias)) {}
  Array<S, 2> x, dt, z, A, vectors;
  Array<S, 1> b_weight, c_weight, skip, dt_bias;
};

template <class S>
Answer<S> reference_answer(const Inputs& inputs, const Batch& batch, const Question& q,
                           const StoragePoints& storage) {
  const HostInputs<S> host(inputs);
  const std::int64_t D = inputs.channels();
  const auto read = [](const Array<S, 2>& array, std::int64_t first, std::int64_t count) {
    return columns(TensorView<const S, 2>(array.view()), first, count);
  };
  Answer<S> answer{Array<S, 2>(Shape<2>{batch.tokens, D}), cast<S>(inputs.state)};
  reference::Mamba1Decode<S> in{.x = read(host.x, 0, D),
                                .dt = read(host.dt, 0, D),
                                .A = host.A,
                                .B = read(host.vectors, q.low_rank, kN),
                                .C = read(host.vectors, q.low_rank + kN, kN),
                                .slots = batch.host(),
                                .storage = storage};
  add_options(in, host, q, D);
  reference::mamba1_decode<S>(in, answer.state.view(), answer.out.view());
  return answer;
}

template <class T, class S>
struct Device {
  Device(const Inputs& in, const Batch& batch)
      : indices(batch),
        x(in.x),
        dt(in.dt),
        z(in.z),
        vectors(in.vectors),
        A(in.A),
        b_weight(in.b_weight),
        c_weight(in.c_weight),
        skip(in.skip),
        dt_bias(in.dt_bias),
        out(Shape<2>{batch.tokens, in.channels()}),
        state(in.state) {}

  kernels::Mamba1Decode<T, S> arguments(const Question& q) {
    const std::int64_t D = A.shape()[0];
    const Device& read = *this;
    kernels::Mamba1Decode<T, S> in{.x = columns(read.x.view(), 0, D),
                                   .dt = columns(read.dt.view(), 0, D),
                                   .A = read.A.view(),
                                   .B = columns(read.vectors.view(), q.low_rank, kN),
                                   .C = columns(read.vectors.view(), q.low_rank + kN, kN),
                                   .state = state.view(),
                                   .out = out.view(),
                                   .slots = indices.slots()};
    add_options(in, read, q, D);
    return in;
  }
  void run(const Question& q) {
    kernels::mamba1_decode<T, S>(arguments(q), nullptr);
    finish();
  }

  DeviceBatch indices;
  DeviceTensor<T, 2> x, dt, z, vectors;
  DeviceTensor<float, 2> A;
  DeviceTensor<T, 1> b_weight, c_weight;
  DeviceTensor<float, 1> skip, dt_bias;
  DeviceTensor<T, 2> out;
  DeviceTensor<S, 3> state;
};

template <class Types>
void expect_agreement(std::int64_t D, const Batch& batch, const Question& q, std::uint64_t seed) {
  using T = typename Types::first_type;
  using S = typename Types::second_type;
  const Inputs inputs(batch, D, q, seed);
  const auto truth = reference_answer<double>(inputs, batch, q, {});
  const auto yardstick = reference_answer<float>(inputs, batch, q, storage_of<T, S>());
  Device<T, S> device(inputs, batch);
  device.run(q);
  SCOPED_TRACE(kernels::last_launch.text() + ", D = " + std::to_string(D) + ", rows " +
               std::to_string(batch.rows()));
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  EXPECT_TRUE(within_yardstick(kOperation, "state", device.state, yardstick.state, truth.state));
}

template <class Types>
class Mamba1DecodeGpu : public GpuTest {};
TYPED_TEST_SUITE(Mamba1DecodeGpu, UpdateTypes);

// Channels of whole warps, of parts of one and of one; each with every option on and off.
TYPED_TEST(Mamba1DecodeGpu, aStepIsTheReferences) {
  const std::vector<Question> questions{{},
                                        {.gated = false, .biased = false, .softplus = false},
                                        {.biased = false, .gap = 24},
                                        {.gated = false, .gap = 3}};
  for (const std::int64_t D : {1, 8, 33, 64, 200})
    for (const std::int64_t rows : {1, 3, 9})
      for (const Question& q : questions)
        expect_agreement<TypeParam>(D, Batch::draw(rows, rows, 1, false), q, rows);
}

// Jamba's norms have weights, FalconMamba's have none; the low-rank dt of Jamba Mini has 256
// columns, that of small models fewer than a warp has lanes.
TYPED_TEST(Mamba1DecodeGpu, normsOfTheStepAreTheReferences) {
  for (const std::int64_t low_rank : {8, 48, 160, 256})
    for (const bool weighted : {false, true})
      for (const std::int64_t D : {64, 100})
        expect_agreement<TypeParam>(D, Batch::draw(5, 5, 1, false),
                                    {.normed = true, .weighted = weighted, .low_rank = low_rank},
                                    5);
}

// Few channels of all rows are divided among many warps; many wait for bytes, and with states of 16
// bits a warp runs through several rows. Each launch is held to the yardstick, and is the one that
// is meant.
TYPED_TEST(Mamba1DecodeGpu, everyBatchSizeIsServedByItsKernel) {
  constexpr bool kWide = sizeof(typename TypeParam::second_type) == 4;
  const auto expect_launch = [](std::int64_t D, std::int64_t rows, const std::string& note) {
    for (const bool normed : {false, true})
      expect_agreement<TypeParam>(D, Batch::draw(rows, rows, 1, false), {.normed = normed}, rows);
    EXPECT_EQ(kernels::last_launch.text(), note) << rows << " rows of " << D;
  };
  for (const std::int64_t rows : {1, 7}) expect_launch(8192, rows, kWide ? "rows 2x4" : "rows 1x4");
  for (const std::int64_t rows : {12, 130})
    expect_launch(8192, rows, kWide ? "rows 4x1" : "groups 2x1");
  expect_launch(64, 130, kWide ? "rows 2x4" : "rows 1x4");
}

// A row's bits are the same alone, in a batch, and behind other rows of its group.
TYPED_TEST(Mamba1DecodeGpu, aRowsBitsDoNotDependOnTheBatch) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  constexpr std::int64_t D = 8192, kRows = 90;
  Batch batch = Batch::draw(6, kRows, 1, false);
  const Question q{.normed = true, .weighted = true};
  const Inputs inputs(batch, D, q, 6);
  Device<T, S> whole(inputs, batch);
  whole.run(q);
  EXPECT_EQ(kernels::last_launch.text(), sizeof(S) == 4 ? "rows 4x1" : "groups 2x1");
  for (const std::int64_t n : {0, 17, 89}) {
    Device<T, S> alone(inputs, batch);
    auto in = alone.arguments(q);
    const auto row = [&](const auto& view) {
      return make_view(view.data_handle() + n * view.stride(0), Shape<2>{1, view.extent(1)},
                       Shape<2>{view.stride(0), 1});
    };
    in.x = row(in.x), in.dt = row(in.dt), in.z = row(*in.z), in.out = row(in.out);
    in.B = row(in.B), in.C = row(in.C), in.dt_low = row(*in.dt_low);
    in.slots.indices = make_view(in.slots.indices->data_handle() + n, Shape<1>{1});
    kernels::mamba1_decode<T, S>(in, nullptr);
    finish();
    EXPECT_EQ(kernels::last_launch.text(), sizeof(S) == 4 ? "rows 2x4" : "rows 1x4");
    const auto found = alone.out.host(), wanted = whole.out.host();
    EXPECT_TRUE(same_bits(at(found.view(), n), at(wanted.view(), n))) << "row " << n;
    if (batch.indices(n) < 0) continue;
    const auto state = alone.state.host(), expected = whole.state.host();
    EXPECT_TRUE(
        same_bits(at(state.view(), batch.indices(n)), at(expected.view(), batch.indices(n))))
        << "row " << n;
  }
}

// States go to other slots than they came from, and the old ones stay as they are.
TYPED_TEST(Mamba1DecodeGpu, statesGoWhereTheyAreSent) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  Batch batch = Batch::draw(4, 2, 1, false);
  batch.indices(0) = 0, batch.indices(1) = 1;
  const Inputs inputs(batch, 100, {}, 4);
  Device<T, S> in_place(inputs, batch), sent(inputs, batch), unnamed(inputs, batch);
  in_place.run({});
  auto in = sent.arguments({});
  const DeviceTensor<std::int32_t, 1> targets(ints({4, -1}));
  in.slots.out_indices = targets.view();
  kernels::mamba1_decode<T, S>(in, nullptr);
  in = unnamed.arguments({});
  in.slots = {.pad_slot_id = 0};  // without indices row n has slot n, whatever padding is called
  kernels::mamba1_decode<T, S>(in, nullptr);
  finish();
  EXPECT_TRUE(same_bits(sent.out, in_place.out));
  EXPECT_TRUE(same_bits(unnamed.state, in_place.state));
  const auto before = Device<T, S>(inputs, batch).state.host();
  const auto moved = sent.state.host(), updated = in_place.state.host();
  EXPECT_TRUE(same_bits(at(moved.view(), 4), at(updated.view(), 0)));
  for (const std::int64_t slot : {0, 1, 2, 3})
    EXPECT_TRUE(same_bits(at(moved.view(), slot), at(before.view(), slot)));
}

// A server's graph is captured once and replayed for other slots and other tokens.
TYPED_TEST(Mamba1DecodeGpu, aCapturedStepIsReplayedForOtherSlots) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  const Batch batch = Batch::draw(11, 6, 1, false);
  Batch other = batch;
  for (std::int64_t n = 0; n < 6; ++n)
    other.indices(n) = n % 3 == 2 ? -1 : static_cast<std::int32_t>(8 - n);
  const Inputs in(batch, 100, {}, 1), next(batch, 100, {}, 2);
  Device<T, S> captured(in, batch), direct(in, other);
  const DeviceTensor<T, 2> x(next.x);
  direct.x.set(x.elements());
  replay_behind_change(
      [&](cudaStream_t stream) { kernels::mamba1_decode<T, S>(captured.arguments({}), stream); },
      [&] {
        captured.x.set(x.elements());
        captured.indices.indices.set(direct.indices.indices.elements());
      });
  direct.run({});
  EXPECT_TRUE(same_bits(captured.out, direct.out));
  EXPECT_TRUE(same_bits(captured.state, direct.state));
}

// Launches may overlap, so that a step begins while the step before it in the same slots still
// runs; 40 of them are 40 that wait for each other.
TYPED_TEST(Mamba1DecodeGpu, stepsBehindEachOtherWait) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  const Batch batch = Batch::draw(5, 5, 1, false);
  for (const std::int64_t D : {2048, 16384}) {
    const Inputs in(batch, D, {}, 3);
    Device<T, S> together(in, batch), apart(in, batch);
    for (int step = 0; step < 40; ++step)
      kernels::mamba1_decode<T, S>(together.arguments({}), nullptr);
    finish();
    for (int step = 0; step < 40; ++step) apart.run({});
    EXPECT_TRUE(same_bits(together.state, apart.state));
    EXPECT_TRUE(same_bits(together.out, apart.out));
  }
}

/// The complaint about a call with this change to arguments of two rows.
template <class Change>
std::string complaint_about(Change change) {
  kernels::Mamba1Decode<Bf16, float> in{.x = unread<const Bf16, 2>({2, 64}),
                                        .dt = unread<const Bf16, 2>({2, 64}),
                                        .A = unread<const float, 2>({64, kN}),
                                        .B = unread<const Bf16, 2>({2, kN}),
                                        .C = unread<const Bf16, 2>({2, kN}),
                                        .state = unread<float, 3>({5, 64, kN}),
                                        .out = unread<Bf16, 2>({2, 64})};
  change(in);
  return complaint_of([&] { kernels::mamba1_decode<Bf16, float>(in, nullptr); });
}

TEST(Mamba1DecodeArguments, areRefusedByName) {
  using In = kernels::Mamba1Decode<Bf16, float>;
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint_about([](In& in) {
                in.state = unread<float, 3>({5, 64, 8});
              }),
              HasSubstr("state is expected to be [slots, D, 16] = [5, 64, 16]; got [5, 64, 8]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.B = unread<const Bf16, 2>({2, 8});
              }),
              HasSubstr("B is expected to be [T, 16] = [2, 16]; got [2, 8]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.x = unread<const Bf16, 2>({2, 0});
              }),
              HasSubstr("x is expected to be [T, D] with D from 1 to 1048576; got [2, 0]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.A = unread<const float, 2>({64, kN}, {32, 1});
              }),
              HasSubstr("A is expected to be without gaps, at a multiple of 16 bytes"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.C = unread<const Bf16, 2>({2, kN}, {20, 1});
              }),
              HasSubstr("B and C is expected to be of contiguous rows at multiples of 16 bytes"));
  EXPECT_THAT(
      complaint_about([](In& in) {
        in.state = unread<float, 3>({5, 64, kN}, {2048, 32, 1});
      }),
      HasSubstr("state is expected to be of channels without gaps at multiples of 16 bytes"));
  EXPECT_THAT(complaint_about([](In& in) { in.norm_eps = 1e-6f; }),
              HasSubstr("norm_eps and dt_low is expected to be both given, or neither"));
  EXPECT_THAT(complaint_about([](In& in) { in.c_weight = unread<const Bf16, 1>({kN}); }),
              HasSubstr("b_weight and c_weight is expected to be absent without norm_eps"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.norm_eps = 1e-6f;
                in.dt_low = unread<const Bf16, 2>({1, 40});
              }),
              HasSubstr("dt_low is expected to be [T, R] with T = 2; got [1, 40]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.slots.table = unread<const std::int32_t, 2>({2, 3});
              }),
              HasSubstr("state_indices is expected to be [T], one slot per row; got a table"));
}

}  // namespace
}  // namespace lockstep
