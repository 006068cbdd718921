// The kernel of selective_state_update against the reference of the same name.
#include "kernels/recurrent/selective_state_update.hpp"

#include <gmock/gmock.h>

#include <map>

#include "properties/support/gpu.hpp"
#include "reference/recurrent/mamba2.hpp"
#include "reference/recurrent/scaled_state.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

constexpr const char* kOperation = "selective_state_update";

struct Extents {
  std::int64_t H, G, P, N;
};

/// A layer's inputs for the tokens of a batch, on the grid: exact in every type.
struct Inputs {
  Inputs(const Batch& batch, const Extents& e, std::uint64_t seed, bool mamba1 = false)
      : x(draw<3>({batch.tokens, e.H, e.P}, seed, 1)),
        dt(draw<3>({batch.tokens, e.H, mamba1 ? e.P : 1}, seed, 2)),
        A(draw<3>({e.H, mamba1 ? e.P : 1, mamba1 ? e.N : 1}, seed, 3)),
        B(draw<3>({batch.tokens, e.G, e.N}, seed, 4)),
        C(draw<3>({batch.tokens, e.G, e.N}, seed, 5)),
        D(draw<1>({e.H}, seed, 6)),
        dt_bias(draw<1>({e.H}, seed, 7)),
        z(draw<3>({batch.tokens, e.H, e.P}, seed, 8)),
        state(draw<4>({batch.slots, e.H, e.P, e.N}, seed, 9)) {
    for (double& a : A) a = -1.0 / 64 - std::abs(a);
  }
  Array<double, 3> x, dt, A, B, C;
  Array<double, 1> D, dt_bias;
  Array<double, 3> z;
  Array<double, 4> state;
};

struct Question {
  bool gated = true;
  bool limited = false;
  bool snapshots = false;
  std::optional<Array<std::int32_t, 1>> parents{};
  bool starts = true;      ///< query_start_loc is given
  bool read_only = false;  ///< outputs alone
};

/// [.., 1] seen as [.., n], by a stride of 0.
template <AnyView V>
V widened(const V& view, std::size_t dimension, std::int64_t n) {
  Shape<V::rank()> extents = shape_of(view), strides = strides_of(view);
  if (extents[dimension] == 1) {
    extents[dimension] = n;
    strides[dimension] = 0;
  }
  return make_view(view.data_handle(), extents, strides);
}

/// The inputs as a reference takes them, in its scalar.
template <class S>
struct HostInputs {
  explicit HostInputs(const Inputs& in)
      : x(cast<S>(in.x)),
        dt(cast<S>(in.dt)),
        A(cast<S>(in.A)),
        B(cast<S>(in.B)),
        C(cast<S>(in.C)),
        z(cast<S>(in.z)),
        D(cast<S>(in.D)),
        dt_bias(cast<S>(in.dt_bias)) {}

  reference::Mamba2Inputs<S> arguments(const Batch& batch, const Question& question,
                                       const StoragePoints& storage) const {
    const std::int64_t P = x.extent(2), N = B.extent(2);
    reference::Mamba2Inputs<S> in{
        .x = x,
        .dt = widened(dt.view(), 2, P),
        .A = widened(widened(A.view(), 1, P), 2, N),
        .B = B,
        .C = C,
        .D = repeat(D.view(), P),
        .dt_bias = repeat(dt_bias.view(), P),
        .dt_softplus = true,
        .rows = {.tokens = batch.tokens, .slots = batch.host(), .storage = storage}};
    if (question.starts) in.rows.query_start_loc = batch.starts.view();
    if (question.gated) in.z = z;
    if (question.limited) in.dt_min = S{0.5}, in.dt_max = S{1};
    return in;
  }
  Array<S, 3> x, dt, A, B, C, z;
  Array<S, 1> D, dt_bias;
};

template <class S>
struct Answer {
  Array<S, 3> out;
  Array<S, 4> state, snapshots;
};

template <class S>
Answer<S> reference_answer(const Inputs& inputs, const Batch& batch, const Question& question,
                           const StoragePoints& storage) {
  const HostInputs<S> host(inputs);
  Shape<4> snapshot_shape = inputs.state.shape();
  snapshot_shape[0] = batch.tokens;
  Answer<S> answer{Array<S, 3>(inputs.x.shape()), cast<S>(inputs.state),
                   Array<S, 4>(snapshot_shape)};
  std::optional<IndexView> parents;
  if (question.parents) parents = question.parents->view();
  std::optional<TensorView<S, 4>> snapshots;
  if (question.snapshots) snapshots = answer.snapshots.view();
  reference::selective_state_update<S>(host.arguments(batch, question, storage),
                                       answer.state.view(), answer.out.view(), parents, snapshots);
  return answer;
}

template <class T, class S>
struct Device {
  Device(const Inputs& in, const Batch& batch)
      : indices(batch),
        x(in.x),
        dt(in.dt),
        z(in.z),
        B(in.B),
        C(in.C),
        A(in.A),
        D(in.D),
        dt_bias(in.dt_bias),
        out(in.x.shape()),
        state(in.state),
        snapshots(
            Shape<4>{batch.tokens, in.state.extent(1), in.state.extent(2), in.state.extent(3)}),
        decay(Shape<2>{batch.tokens, in.x.extent(1)}),
        step(decay.shape()) {}

  kernels::SelectiveStateUpdate<T, S> arguments(const Question& question) {
    const std::int64_t P = x.shape()[2], N = B.shape()[2];
    kernels::SelectiveStateUpdate<T, S> in{.x = std::as_const(x).view(),
                                           .dt = widened(dt.view(), 2, P),
                                           .A = widened(widened(A.view(), 1, P), 2, N),
                                           .B = std::as_const(B).view(),
                                           .C = std::as_const(C).view(),
                                           .state = state.view(),
                                           .out = out.view(),
                                           .D = repeat(D.view(), P),
                                           .dt_bias = repeat(dt_bias.view(), P),
                                           .dt_softplus = true,
                                           .slots = indices.slots(),
                                           .read_only = question.read_only};
    if (question.starts) in.query_start_loc = std::as_const(indices.starts).view();
    if (question.gated) in.z = z.view();
    if (question.limited) in.dt_min = 0.5f, in.dt_max = 1.0f;
    if (question.snapshots) in.snapshots = snapshots.view();
    if (question.parents) {
      parents.emplace(*question.parents);
      in.parents = std::as_const(*parents).view();
    }
    return in;
  }
  void run(const Question& question) {
    kernels::selective_state_update<T, S>(arguments(question), nullptr);
    finish();
  }

  DeviceBatch indices;
  DeviceTensor<T, 3> x, dt, z, B, C;
  DeviceTensor<float, 3> A;
  DeviceTensor<float, 1> D, dt_bias;
  DeviceTensor<T, 3> out;
  DeviceTensor<S, 4> state, snapshots;
  DeviceTensor<float, 2> decay, step;
  std::optional<DeviceTensor<std::int32_t, 1>> parents;
};

template <class Types>
void expect_agreement(const Extents& e, const Batch& batch, const Question& question,
                      std::uint64_t seed, bool mamba1 = false) {
  using T = typename Types::first_type;
  using S = typename Types::second_type;
  const Inputs inputs(batch, e, seed, mamba1);
  const auto truth = reference_answer<double>(inputs, batch, question, {});
  const auto yardstick = reference_answer<float>(inputs, batch, question, storage_of<T, S>());
  Device<T, S> device(inputs, batch);
  device.run(question);
  SCOPED_TRACE(kernels::last_launch.text());
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  if (question.read_only) {
    EXPECT_TRUE(same_bits(device.state, Device<T, S>(inputs, batch).state));
  } else {
    EXPECT_TRUE(within_yardstick(kOperation, "state", device.state, yardstick.state, truth.state));
  }
  if (question.snapshots) {
    EXPECT_TRUE(within_yardstick(kOperation, "snapshots", device.snapshots, yardstick.snapshots,
                                 truth.snapshots));
  }
}

const std::vector<Extents> kExtents{{8, 2, 64, 128}, {4, 4, 33, 128}, {2, 1, 16, 64},
                                    {2, 2, 8, 256},  {3, 1, 5, 17},   {1, 1, 1, 1}};

template <class Types>
class SelectiveStateUpdateGpu : public GpuTest {};
TYPED_TEST_SUITE(SelectiveStateUpdateGpu, UpdateTypes);

TYPED_TEST(SelectiveStateUpdateGpu, aDecodeIsTheReferences) {
  for (const Extents& e : kExtents)
    for (const std::int64_t rows : {1, 3, 9})
      expect_agreement<TypeParam>(e, Batch::draw(rows, rows, 1, false),
                                  {.gated = rows != 3, .limited = rows == 9}, rows);
}

/// The launch that is expected for kFast states, by the options and by the rows of the batch.
template <class S>
std::string expected_launch(const Question& question, std::int64_t rows, bool table = false) {
  if (question.read_only) return "staged 4x4 cached";
  return expected_update<S>(question.starts || table, rows);
}
constexpr Extents kFast{2, 1, 64, 128};

// A server's decode has no query_start_loc, and a kernel for few, some and many rows. Each of them
// is held to the yardstick, and is the one that is meant.
TYPED_TEST(SelectiveStateUpdateGpu, everyBatchSizeIsServedByItsKernel) {
  using S = typename TypeParam::second_type;
  for (const std::int64_t rows : kBatchRows)
    for (const bool starts : {false, true}) {
      const Question question{.gated = rows % 2 == 0, .starts = starts};
      SCOPED_TRACE(rows);
      expect_agreement<TypeParam>(kFast, Batch::draw(rows, rows, 1, false), question, rows);
      EXPECT_EQ(kernels::last_launch.text(), (expected_launch<S>(question, rows)));
    }
}
TYPED_TEST(SelectiveStateUpdateGpu, everyVerificationSizeIsServedByItsKernel) {
  using S = typename TypeParam::second_type;
  for (const std::int64_t rows : kBatchRows)
    for (const bool read_only : {false, true}) {
      const Question question{.read_only = read_only};
      SCOPED_TRACE(rows);
      expect_agreement<TypeParam>(kFast, Batch::draw(rows, rows, 3, !read_only), question, rows);
      EXPECT_EQ(kernels::last_launch.text(), (expected_launch<S>(question, rows, true)));
    }
  const Batch batch = Batch::draw(3, 9, 3, false);
  expect_agreement<TypeParam>(kFast, batch, {.snapshots = true, .parents = draw_tree(batch, 3)}, 3);
  EXPECT_EQ(kernels::last_launch.text(), "any 2x1");
  expect_agreement<TypeParam>(kFast, batch, {}, 3, true);
  EXPECT_EQ(kernels::last_launch.text(), "any 2x4") << "Mamba1";
}

// Every head of a model has kernels with 16-byte accesses, in every build.
TYPED_TEST(SelectiveStateUpdateGpu, everyHeadOfAModelHasItsKernels) {
  using ::testing::StartsWith;
  for (const std::int64_t N : {64, 128, 256})
    for (const std::int64_t P : {32, 64, 80, 128})
      for (const std::int64_t rows : {2, 9})
        for (const bool verified : {false, true}) {
          const Question question{.gated = !verified, .starts = verified};
          expect_agreement<TypeParam>(
              {2, 1, P, N}, Batch::draw(rows, rows, verified ? 3 : 1, verified), question, rows);
          EXPECT_THAT(kernels::last_launch.text(),
                      AnyOf(StartsWith("step "), StartsWith("staged "), StartsWith("chain ")))
              << "P = " << P << ", N = " << N;
        }
  for (const std::int64_t N : {64, 256}) {
    expect_agreement<TypeParam>({2, 1, 32, N}, Batch::draw(130, 130, 1, false), {.starts = false},
                                130);
    EXPECT_EQ(kernels::last_launch.text(), "step 4x1 cached") << "N = " << N;
  }
  // Two launches of float32 states fit on the device at once, or do not; or one fills it, or does
  // not fit.
  const std::map<std::int64_t, std::string> crowded{
      {32, "step 4x1 cached"}, {34, "step 2x1"}, {64, "step 4x1"}, {68, "step 2x1"}};
  for (const auto& [H, text] : crowded) {
    expect_agreement<TypeParam>({H, 2, 64, 128}, Batch::draw(8, 8, 1, false), {.starts = false}, H);
    constexpr bool kFloat = std::is_same_v<typename TypeParam::second_type, float>;
    EXPECT_EQ(kernels::last_launch.text(), kFloat ? text : "step 4x1 cached") << "H = " << H;
  }
}

// States go to other slots than they came from, by a table of their own.
TYPED_TEST(SelectiveStateUpdateGpu, aSecondTableSaysWhereStatesGo) {
  for (const std::int64_t rows : {3, 9})
    expect_agreement<TypeParam>(kFast, Batch::draw(rows, rows, 4, true).with_targets(), {}, rows);
}

// B and C may stay in float32 beside other activations: in a verification, and in a commit.
TYPED_TEST(SelectiveStateUpdateGpu, vectorsInFloat32StandBesideOtherActivations) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  for (const bool mamba1 : {false, true}) {
    const Batch batch = Batch::draw(4, 5, 3, false);
    const Inputs inputs(batch, kFast, 4, mamba1);
    const auto truth = reference_answer<double>(inputs, batch, {}, {});
    const auto yardstick = reference_answer<float>(inputs, batch, {}, storage_of<T, S>());
    const DeviceTensor<float, 3> B(inputs.B), C(inputs.C);
    Device<T, S> device(inputs, batch);
    auto in = device.arguments({});
    in.B = B.view();
    in.C = C.view();
    kernels::selective_state_update<T, S>(in, nullptr);
    finish();
    EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
    EXPECT_TRUE(within_yardstick(kOperation, "state", device.state, yardstick.state, truth.state));
  }
}

// A limit of the time step is no filter for NaN.
TYPED_TEST(SelectiveStateUpdateGpu, aTimeStepThatIsNaNStaysNaN) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  const Batch batch = Batch::draw(1, 1, 1, false);
  Inputs inputs(batch, kFast, 5);
  inputs.dt(0, 1, 0) = std::numeric_limits<double>::quiet_NaN();
  for (const bool starts : {false, true}) {
    Device<T, S> device(inputs, batch);
    device.run({.limited = true, .starts = starts});
    const Array<float, 3> out = device.out.host();
    for (std::int64_t p = 0; p < kFast.P; ++p) {
      EXPECT_FALSE(std::isnan(out(0, 0, p)));
      EXPECT_TRUE(std::isnan(out(0, 1, p)));
    }
  }
}

// Without indices a row has the slot of its own number, whatever the number of padding is; a batch
// without rows is all padding.
TYPED_TEST(SelectiveStateUpdateGpu, batchesWithoutIndicesOrRowsAreTheContracts) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  Batch batch = Batch::draw(3, 3, 1, false);
  for (std::int64_t n = 0; n < 3; ++n) batch.indices(n) = static_cast<std::int32_t>(n);
  const Inputs inputs(batch, kFast, 21);
  for (const bool starts : {false, true}) {
    Device<T, S> named(inputs, batch), unnamed(inputs, batch), empty(inputs, batch);
    named.run({.starts = starts});
    auto in = unnamed.arguments({.starts = starts});
    in.slots = {.pad_slot_id = 0};
    kernels::selective_state_update<T, S>(in, nullptr);
    finish();
    EXPECT_TRUE(same_bits(unnamed.out, named.out));
    EXPECT_TRUE(same_bits(unnamed.state, named.state));
    const DeviceTensor<std::int32_t, 1> zero(ints({0}));
    in = empty.arguments({});
    in.slots = {};
    in.query_start_loc = zero.view();
    kernels::selective_state_update<T, S>(in, nullptr);
    finish();
    for (const float x : empty.out.host()) EXPECT_EQ(x, 0);
  }
}

// A, dt and dt_bias that differ along P and N: Mamba1.
TYPED_TEST(SelectiveStateUpdateGpu, aStepPerChannelServesMamba1) {
  for (const Extents& e : kExtents)
    expect_agreement<TypeParam>(e, Batch::draw(2, 3, 2, true), {}, 2, true);
}

TYPED_TEST(SelectiveStateUpdateGpu, aVerificationLeavesAStateForEveryToken) {
  for (const Extents& e : kExtents)
    for (const std::uint64_t seed : {3, 4})
      expect_agreement<TypeParam>(e, Batch::draw(seed, 5, 4, true), {}, seed);
}

TYPED_TEST(SelectiveStateUpdateGpu, snapshotsAndTreesLeaveTheStateAlone) {
  for (const Extents& e : kExtents)
    for (const std::uint64_t seed : {5, 6}) {
      const Batch batch = Batch::draw(seed, 4, 6, false);
      expect_agreement<TypeParam>(e, batch, {.snapshots = true}, seed);
      expect_agreement<TypeParam>(e, batch, {.snapshots = true, .parents = draw_tree(batch, seed)},
                                  seed);
    }
}

// Tokens whose states nobody asks for may be treated as chunks.
TYPED_TEST(SelectiveStateUpdateGpu, aVerificationThatOnlyReadsGivesTheSame) {
  for (const Extents& e : kExtents)
    for (const std::int64_t most : {2, 8, 20})
      expect_agreement<TypeParam>(e, Batch::draw(18, 5, most, false),
                                  {.gated = most == 8, .read_only = true}, 18);
}

// A verification that only reads and stashes, then a commit, is the accepted decodes.
TYPED_TEST(SelectiveStateUpdateGpu, replayIsTheAcceptedDecodesBitByBit) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  constexpr std::int64_t kDrafts = 4, kRows = 5;
  for (const Extents& e : {Extents{8, 2, 64, 128}, Extents{3, 1, 5, 17}}) {
    Batch batch = Batch::draw(7, kRows, 1, false);
    batch.lengths.assign(kRows, kDrafts);
    batch.starts = starts_of(batch.lengths);
    batch.tokens = kRows * kDrafts;
    const Inputs inputs(batch, e, 7);
    Array<std::int32_t, 1> accepted(Shape<1>{kRows}, 0);
    for (std::int64_t n = 0; n < kRows; ++n) accepted(n) = static_cast<std::int32_t>(n);
    const DeviceTensor<std::int32_t, 1> device_accepted(accepted);

    Device<T, S> verified(inputs, batch);
    auto verification = verified.arguments({});
    verification.read_only = true;
    verification.stash_decay = verified.decay.view();
    verification.stash_dt = verified.step.view();
    kernels::selective_state_update<T, S>(verification, nullptr);
    const Device<T, S> untouched(inputs, batch);
    finish();
    EXPECT_TRUE(same_bits(verified.state, untouched.state));
    kernels::selective_state_replay<T, S>({.decay = std::as_const(verified.decay).view(),
                                           .dt = std::as_const(verified.step).view(),
                                           .x = std::as_const(verified.x).view(),
                                           .B = std::as_const(verified.B).view(),
                                           .query_start_loc = verification.query_start_loc},
                                          verified.state.view(), verification.slots,
                                          device_accepted.view(), {}, nullptr);
    Device<T, S> decoded(inputs, batch);
    for (std::int64_t i = 0; i < kDrafts; ++i) {
      Array<std::int32_t, 1> indices(Shape<1>{batch.tokens}, -1);
      for (std::int64_t n = 0; n < kRows; ++n)
        if (accepted(n) > i) indices(n * kDrafts + i) = batch.indices(n);
      const DeviceTensor<std::int32_t, 1> device_indices(indices);
      auto step = decoded.arguments({});
      step.query_start_loc.reset();
      step.slots = {.indices = device_indices.view()};
      kernels::selective_state_update<T, S>(step, nullptr);
      finish();
    }
    finish();
    EXPECT_TRUE(same_bits(verified.state, decoded.state));
  }
}

#ifdef LOCKSTEP_ALL_SHAPES
template <class Number>
class ScaledStatesGpu : public GpuTest {};
using ScaledNumbers = ::testing::Types<kernels::Int8, kernels::E4m3>;
TYPED_TEST_SUITE(ScaledStatesGpu, ScaledNumbers);

/// A pool in narrow numbers: what the device begins with, and what a reference makes of it.
template <class Number>
struct ScaledPool {
  ScaledPool(const Inputs& inputs, std::int64_t block_)
      : block(block_), numbers(scaled(inputs.state)), scales(scales_for(inputs.state, block_)) {}

  static Array<double, 4> scaled(Array<double, 4> state) {
    for (double& x : state) x = std::trunc(x * 50);
    return state;
  }
  static Array<double, 4> scales_for(const Array<double, 4>& state, std::int64_t block) {
    const Shape<4> s = state.shape();
    auto scales = on_grid<double>(Shape<4>{s[0], s[1], s[2], (s[3] + block - 1) / block}, {});
    for (double& scale : scales) scale = (std::abs(scale) + 0.125) / 64;
    return scales;
  }

  template <class S>
  Array<S, 3> advance(const Inputs& inputs, const Batch& batch, const Question& question,
                      const StoragePoints& storage, const std::optional<std::uint64_t>& rand_seed) {
    const HostInputs<S> host(inputs);
    const auto in = host.arguments(batch, question, storage);
    auto values = cast<S>(numbers.host()), factors = cast<S>(scales.host());
    reference::ScaledStates<S> states{values.view(), factors.view(), block,
                                      kernels::format_of<Number>()};
    if (rand_seed) states.stochastic = {.seed = *rand_seed, .stream = 3};
    Array<S, 3> out(inputs.x.shape());
    reference::with_scaled_states<S>(in.rows, states, [&](const TensorView<S, 4>& plain) {
      reference::selective_state_update<S>(in, plain, out.view());
    });
    expected_numbers = cast<double>(values);
    expected_scales = cast<double>(factors);
    return out;
  }

  /// Numbers are those of the reference, but for ones that stand between two and were rounded to
  /// the other: at most one in a hundred, and by one step.
  ::testing::AssertionResult is_as_expected() const {
    const Array<float, 4> got = numbers.host(), got_scales = scales.host();
    std::int64_t moved = 0;
    for (std::int64_t i = 0; i < got_scales.size(); ++i)
      if (!(std::abs(got_scales.data()[i] / expected_scales.data()[i] - 1) < 1e-5))
        return ::testing::AssertionFailure() << "scale " << i << " is " << got_scales.data()[i]
                                             << ", not " << expected_scales.data()[i];
    for (std::int64_t i = 0; i < got.size(); ++i) {
      const double a = got.data()[i], b = expected_numbers.data()[i];
      if (a == b) continue;
      ++moved;
      const Format format = kernels::format_of<Number>();
      if (std::abs(a - b) <= std::max(unit_in_last_place(a, format), unit_in_last_place(b, format)))
        continue;
      return ::testing::AssertionFailure() << "number " << i << " is " << a << ", not " << b;
    }
    if (!numbers.guards_intact() || !scales.guards_intact())
      return ::testing::AssertionFailure() << "bytes beside the pool were written";
    if (moved * 100 <= got.size()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << moved << " of " << got.size() << " numbers differ";
  }

  std::int64_t block;
  DeviceTensor<Number, 4> numbers;
  DeviceTensor<float, 4> scales;
  Array<double, 4> expected_numbers, expected_scales;
};

// Rows without a slot, slots that nobody uses, blocks of any size, tables of slots; to nearest and
// by the draws of the reference.
TYPED_TEST(ScaledStatesGpu, areTheReferences) {
  const std::vector<std::pair<Extents, std::int64_t>> cases{
      {{8, 2, 64, 128}, 128}, {{8, 2, 64, 128}, 16}, {{4, 4, 32, 128}, 64},
      {{2, 1, 16, 64}, 64},   {{2, 2, 8, 256}, 256}, {{2, 2, 8, 256}, 128},
      {{3, 1, 5, 17}, 17},    {{3, 1, 5, 17}, 4},    {{1, 1, 1, 1}, 1}};
  for (const auto& [e, block] : cases)
    for (const std::uint64_t seed : {1, 2, 3, 4}) {
      const bool table = seed == 4;
      const Batch batch = Batch::draw(seed, 5, table ? 3 : 1, table);
      const Inputs inputs(batch, e, seed);
      const Question question{.gated = seed != 3};
      std::optional<std::uint64_t> rand_seed;
      if (seed == 2) rand_seed = 99;
      ScaledPool<TypeParam> pool(inputs, block);
      const auto yardstick = pool.template advance<float>(inputs, batch, question,
                                                          {.output = Format::bf16}, rand_seed);
      const auto truth = pool.template advance<double>(inputs, batch, question, {}, rand_seed);

      Device<Bf16, float> device(inputs, batch);  // for all but the states
      const auto like = device.arguments(question);
      kernels::SelectiveStateUpdate<Bf16, TypeParam> in{.x = like.x,
                                                        .dt = like.dt,
                                                        .A = like.A,
                                                        .B = like.B,
                                                        .C = like.C,
                                                        .state = pool.numbers.view(),
                                                        .out = like.out,
                                                        .D = like.D,
                                                        .z = like.z,
                                                        .dt_bias = like.dt_bias,
                                                        .dt_softplus = like.dt_softplus,
                                                        .slots = like.slots,
                                                        .query_start_loc = like.query_start_loc,
                                                        .state_scale = pool.scales.view(),
                                                        .scale_block = block,
                                                        .rand_seed = rand_seed,
                                                        .rand_stream = 3};
      if (!table) in.query_start_loc.reset();  // one token per row: the fast way
      kernels::selective_state_update(in, nullptr);
      finish();
      const std::string what =
          rand_seed ? "out of scaled states, stochastic" : "out of scaled states";
      EXPECT_TRUE(within_yardstick(kOperation, what, device.out, yardstick, truth));
      EXPECT_TRUE(pool.is_as_expected()) << e.P << " x " << e.N << ", blocks of " << block;
    }
}
#endif

/// The kernel's complaint about sound arguments that are changed. Nothing here is device memory:
/// arguments are refused before a launch, so this needs no GPU.
template <class Change>
std::string complaint_about(Change change) {
  constexpr std::int64_t kTokens = 2, H = 8, G = 2, P = 64, N = 128;
  const auto per_head = unread<float, 1>({H});
  kernels::SelectiveStateUpdate<Bf16, float> in{.x = unread<Bf16, 3>({kTokens, H, P}),
                                                .dt = repeat(unread<Bf16, 2>({kTokens, H}), P),
                                                .A = repeat(repeat(per_head, P), N),
                                                .B = unread<Bf16, 3>({kTokens, G, N}),
                                                .C = unread<Bf16, 3>({kTokens, G, N}),
                                                .state = unread<float, 4>({5, H, P, N}),
                                                .out = unread<Bf16, 3>({kTokens, H, P})};
  change(in);
  return complaint_of([&] { kernels::selective_state_update<Bf16, float>(in, nullptr); });
}

TEST(SelectiveStateUpdateArguments, areRefusedByName) {
  using ::testing::HasSubstr;
  const Shape<3> vectors{2, 2, 128};
  EXPECT_THAT(
      complaint_about([](auto& in) { in.A = repeat(repeat(unread<Bf16, 1>({8}), 64), 128); }),
      HasSubstr("A is expected to be float32"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.C = unread<Bf16, 3>({0, 2, 128});
              }),
              HasSubstr("C is expected to be [T, G, N]"));
  EXPECT_THAT(complaint_about([&](auto& in) { in.B = in.C = unread<Fp16>(vectors); }),
              HasSubstr("B is expected to be bfloat16, as x, or float32; got float16"));
  EXPECT_THAT(complaint_about([&](auto& in) { in.C = unread<float>(vectors); }),
              HasSubstr("C is expected to be bfloat16, as B; got float32"));
  EXPECT_THAT(complaint_about([](auto& in) {
                in.stash_dt = unread<float, 2>({2, 8});
              }),
              HasSubstr("stash_decay and stash_dt is expected to be both given, or neither"));
  EXPECT_THAT(complaint_about([](auto& in) { in.scale_block = 16; }),
              HasSubstr("scale_block is expected to be absent without state_scale"));
}

#ifdef LOCKSTEP_ALL_SHAPES
// A hundred numbers in blocks of 32 have four scales, as blocks of 25 do: the block is told.
TEST(SelectiveStateUpdateArguments, aBlockOfAScaleIsNotGuessed) {
  const auto per_head = unread<float, 1>({1});
  kernels::SelectiveStateUpdate<Bf16, kernels::Int8> in{
      .x = unread<Bf16, 3>({1, 1, 4}),
      .dt = repeat(unread<Bf16, 2>({1, 1}), 4),
      .A = repeat(repeat(per_head, 4), 100),
      .B = unread<Bf16, 3>({1, 1, 100}),
      .C = unread<Bf16, 3>({1, 1, 100}),
      .state = unread<kernels::Int8, 4>({2, 1, 4, 100}),
      .out = unread<Bf16, 3>({1, 1, 4}),
      .state_scale = unread<float, 4>({2, 1, 4, 4})};
  for (const std::int64_t block : {0, 20, 100}) {
    if (block > 0) in.scale_block = block;
    EXPECT_THROW(kernels::selective_state_update(in, nullptr), kernels::ArgumentError) << block;
  }
}
#endif

}  // namespace
}  // namespace lockstep
