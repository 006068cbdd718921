// The kernel of gated_delta_rule_update against the reference of the same name.
#include "kernels/recurrent/gated_delta_rule_update.hpp"

#include <gmock/gmock.h>

#include "properties/kernels/recurrent/gated_delta_inputs.hpp"
#include "properties/support/slot_laws.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;

using Extents = GatedDeltaExtents;
using Inputs = GatedDeltaInputs;

/// Options of an update beside its inputs.
struct Question {
  bool raw_gates = true;
  bool l2norm = true;
  bool snapshots = false;
  std::optional<Array<std::int32_t, 1>> parents{};
  bool starts = true;      ///< query_start_loc is given
  bool read_only = false;  ///< outputs alone
};

template <class S>
struct Answer {
  Array<S, 3> out;
  Array<S, 4> state, snapshots;
};

/// g and beta that a kernel is handed ready-made: float32.
struct ReadyGates {
  explicit ReadyGates(const Inputs& in) : g(cast<float>(in.a)), beta(cast<float>(in.b)) {
    for (float& x : g) x = -std::abs(x);
    for (float& x : beta) x = std::abs(x);
  }
  Array<float, 2> g, beta;
};

template <class S>
Answer<S> reference_answer(const Inputs& inputs, const Batch& batch, const Question& question,
                           const StoragePoints& storage) {
  const auto q = cast<S>(inputs.q), k = cast<S>(inputs.k), v = cast<S>(inputs.v);
  const auto a = cast<S>(inputs.a), b = cast<S>(inputs.b);
  const auto A_log = cast<S>(inputs.A_log), dt_bias = cast<S>(inputs.dt_bias);
  reference::GatedDeltaGates<S> gates{cast<S>(ReadyGates(inputs).g),
                                      cast<S>(ReadyGates(inputs).beta)};
  if (question.raw_gates)
    gates = reference::gated_delta_gates<S>(a.view(), b.view(), A_log.view(), dt_bias.view());
  Answer<S> answer{Array<S, 3>(v.shape()), cast<S>(inputs.state), {}};
  Shape<4> snapshot_shape = inputs.state.shape();
  snapshot_shape[0] = batch.tokens;
  answer.snapshots = Array<S, 4>(snapshot_shape);
  const reference::GatedDeltaRuleInputs<S> in{
      .q = q,
      .k = k,
      .v = v,
      .g = gates.g,
      .beta = gates.beta,
      .use_qk_l2norm = question.l2norm,
      .rows = {.query_start_loc =
                   question.starts ? std::optional<IndexView>(batch.starts.view()) : std::nullopt,
               .slots = batch.host(),
               .storage = storage}};
  std::optional<IndexView> parents;
  if (question.parents) parents = question.parents->view();
  std::optional<TensorView<S, 4>> snapshots;
  if (question.snapshots) snapshots = answer.snapshots.view();
  reference::gated_delta_rule_update<S>(in, answer.state.view(), answer.out.view(), parents,
                                        snapshots);
  return answer;
}

/// Inputs and results on the device.
template <class T, class S>
struct Device {
  Device(const Inputs& in, const Batch& batch, bool k_major = false)
      : indices(batch),
        q(in.q),
        k(in.k),
        v(in.v),
        a(in.a),
        b(in.b),
        g(ReadyGates(in).g),
        beta(ReadyGates(in).beta),
        A_log(in.A_log),
        dt_bias(in.dt_bias),
        out(in.v.shape()),
        state(turned_if(k_major, in.state)),
        snapshots(
            Shape<4>{batch.tokens, in.state.extent(1), in.state.extent(2), in.state.extent(3)}),
        k_major(k_major) {}

  kernels::GatedDeltaRuleUpdate<T, S> arguments(const Question& question) {
    kernels::GatedDeltaRuleUpdate<T, S> in{
        .tokens = {.q = std::as_const(q).view(),
                   .k = std::as_const(k).view(),
                   .v = std::as_const(v).view(),
                   .g = question.raw_gates ? kernels::MixedView<2>(a.view()) : g.view(),
                   .beta = question.raw_gates ? kernels::MixedView<2>(b.view()) : beta.view(),
                   .query_start_loc = {}},
        .state = k_major ? transposed(state.view()) : state.view(),
        .out = out.view(),
        .slots = indices.slots(),
        .use_qk_l2norm = question.l2norm,
        .read_only = question.read_only};
    if (question.starts) in.tokens.query_start_loc = std::as_const(indices.starts).view();
    if (question.raw_gates) {
      in.A_log = A_log.view();
      in.dt_bias = dt_bias.view();
    }
    if (question.snapshots) in.snapshots = snapshots.view();
    if (question.parents) {
      parents.emplace(*question.parents);
      in.parents = std::as_const(*parents).view();
    }
    return in;
  }
  void run(const Question& question) {
    kernels::gated_delta_rule_update<T, S>(arguments(question), nullptr);
    finish();
  }
  Array<float, 4> host_state() const { return turned_if(k_major, state.host()); }

  DeviceBatch indices;
  DeviceTensor<T, 3> q, k, v;
  DeviceTensor<T, 2> a, b;
  DeviceTensor<float, 2> g, beta;
  DeviceTensor<float, 1> A_log, dt_bias;
  DeviceTensor<T, 3> out;
  DeviceTensor<S, 4> state, snapshots;
  std::optional<DeviceTensor<std::int32_t, 1>> parents;
  bool k_major;
};

template <class Types>
void expect_agreement(const Extents& e, const Batch& batch, const Question& question,
                      std::uint64_t seed, bool k_major = false) {
  using T = typename Types::first_type;
  using S = typename Types::second_type;
  const Inputs inputs(batch, e, seed);
  const auto truth = reference_answer<double>(inputs, batch, question, {});
  const auto yardstick = reference_answer<float>(inputs, batch, question, storage_of<T, S>());
  Device<T, S> device(inputs, batch, k_major);
  device.run(question);
  constexpr const char* kOperation = "gated_delta_rule_update";
  SCOPED_TRACE(kernels::last_launch.text());
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  EXPECT_TRUE(device.state.guards_intact());
  if (question.read_only) {
    EXPECT_TRUE(same_bits(device.state, Device<T, S>(inputs, batch, k_major).state));
  } else {
    EXPECT_TRUE(within_yardstick<S>(kOperation, "state", device.host_state(), yardstick.state,
                                    truth.state));
  }
  if (question.snapshots) {
    EXPECT_TRUE(within_yardstick(kOperation, "snapshots", device.snapshots, yardstick.snapshots,
                                 truth.snapshots));
  }
}

const std::vector<Extents> kExtents{{1, 1, 128, 128}, {2, 4, 128, 64}, {1, 2, 64, 33},
                                    {2, 2, 256, 8},   {1, 3, 17, 5},   {3, 3, 1, 1}};

template <class Types>
class GatedDeltaRuleUpdateGpu : public GpuTest {};
TYPED_TEST_SUITE(GatedDeltaRuleUpdateGpu, UpdateTypes);

// One token per row: the decode step of every server.
TYPED_TEST(GatedDeltaRuleUpdateGpu, aDecodeIsTheReferences) {
  for (const Extents& e : kExtents)
    for (const std::int64_t rows : {1, 3, 9})
      for (const bool raw : {false, true})
        expect_agreement<TypeParam>(e, Batch::draw(rows, rows, 1, false), {.raw_gates = raw}, rows);
}

/// The launch that is expected for kFast states, by the options and by the rows of the batch.
template <class T, class S>
std::string expected_launch(const Question& question, std::int64_t rows, bool table = false) {
  if (question.read_only) return sizeof(T) == 2 ? "verify 4x4 cached" : "staged 4x4 cached";
  return expected_update<S>(question.starts || table, rows);
}
constexpr Extents kFast{1, 2, 128, 64};

// A server's decode has no query_start_loc, and a kernel for few, some and many rows. Each of them
// is held to the yardstick, and is the one that is meant.
TYPED_TEST(GatedDeltaRuleUpdateGpu, everyBatchSizeIsServedByItsKernel) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  for (const std::int64_t rows : kBatchRows)
    for (const bool starts : {false, true}) {
      const Question question{.raw_gates = rows % 2 == 0, .starts = starts};
      SCOPED_TRACE(rows);
      expect_agreement<TypeParam>(kFast, Batch::draw(rows, rows, 1, false), question, rows);
      EXPECT_EQ(kernels::last_launch.text(), (expected_launch<T, S>(question, rows)));
    }
}
TYPED_TEST(GatedDeltaRuleUpdateGpu, everyVerificationSizeIsServedByItsKernel) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  for (const std::int64_t rows : kBatchRows)
    for (const bool read_only : {false, true}) {
      const Question question{.read_only = read_only};
      SCOPED_TRACE(rows);
      expect_agreement<TypeParam>(kFast, Batch::draw(rows, rows, 3, !read_only), question, rows);
      EXPECT_EQ(kernels::last_launch.text(), (expected_launch<T, S>(question, rows, true)));
    }
  const Batch batch = Batch::draw(3, 9, 3, false);
  expect_agreement<TypeParam>(kFast, batch, {.snapshots = true, .parents = draw_tree(batch, 3)}, 3);
  EXPECT_EQ(kernels::last_launch.text(), "any 2x1");
  expect_agreement<TypeParam>({1, 2, 17, 5}, batch, {}, 3);
  EXPECT_EQ(kernels::last_launch.text(), "any 2x4");
}

// Olmo-Hybrid's heads have keys of 96 and values of 192 numbers.
TYPED_TEST(GatedDeltaRuleUpdateGpu, headsOf96And192HaveTheirKernels) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  for (const std::int64_t rows : {2, 9})
    for (const bool verified : {false, true})
      for (const bool read_only : {false, true}) {
        const Question question{.starts = verified, .read_only = verified && read_only};
        expect_agreement<TypeParam>(
            {1, 2, 96, 192},
            Batch::draw(rows, rows, verified ? 3 : 1, !question.read_only && verified), question,
            rows);
        EXPECT_EQ(kernels::last_launch.text(), (expected_launch<T, S>(question, rows, verified)));
      }
}

// States go to other slots than they came from, by a table of their own.
TYPED_TEST(GatedDeltaRuleUpdateGpu, aSecondTableSaysWhereStatesGo) {
  for (const Extents& e : {kFast, Extents{1, 2, 17, 5}})
    for (const std::int64_t rows : {3, 9})
      expect_agreement<TypeParam>(e, Batch::draw(rows, rows, 4, true).with_targets(), {}, rows);
}

// Without indices a row has the slot of its own number, whatever the number of padding is; a batch
// without rows is all padding.
TYPED_TEST(GatedDeltaRuleUpdateGpu, batchesWithoutIndicesOrRowsAreTheContracts) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  for (const Extents& e : {kFast, Extents{1, 2, 17, 5}})
    for (const bool starts : {false, true}) {
      Batch batch = Batch::draw(3, 3, 1, false);
      for (std::int64_t n = 0; n < 3; ++n) batch.indices(n) = static_cast<std::int32_t>(n);
      const Inputs inputs(batch, e, 21);
      Device<T, S> named(inputs, batch), unnamed(inputs, batch), empty(inputs, batch);
      named.run({.starts = starts});
      auto in = unnamed.arguments({.starts = starts});
      in.slots = {.pad_slot_id = 0};
      kernels::gated_delta_rule_update<T, S>(in, nullptr);
      finish();
      EXPECT_TRUE(same_bits(unnamed.out, named.out));
      EXPECT_TRUE(same_bits(unnamed.state, named.state));

      const DeviceTensor<std::int32_t, 1> zero(ints({0}));
      in = empty.arguments({});
      in.slots = {};
      in.tokens.query_start_loc = zero.view();
      kernels::gated_delta_rule_update<T, S>(in, nullptr);
      finish();
      for (const float x : empty.out.host()) EXPECT_EQ(x, 0);
    }
}

// Rows of several tokens with a slot for each token's state, read at the accepted column.
TYPED_TEST(GatedDeltaRuleUpdateGpu, aVerificationLeavesAStateForEveryToken) {
  for (const Extents& e : kExtents)
    for (const std::uint64_t seed : {1, 2, 3})
      expect_agreement<TypeParam>(e, Batch::draw(seed, 5, 4, true), {}, seed);
}

TYPED_TEST(GatedDeltaRuleUpdateGpu, packedRowsRunInOneSlotEach) {
  for (const std::uint64_t seed : {4, 5})
    expect_agreement<TypeParam>({2, 4, 128, 64}, Batch::draw(seed, 6, 7, false),
                                {.l2norm = seed % 2 == 0}, seed);
}

// A K-major pool is the same states by strides.
TYPED_TEST(GatedDeltaRuleUpdateGpu, aKMajorPoolServesAsWell) {
  for (const Extents& e : {Extents{2, 4, 128, 64}, Extents{1, 2, 17, 5}})
    expect_agreement<TypeParam>(e, Batch::draw(6, 4, 3, true), {}, 6, true);
}

TYPED_TEST(GatedDeltaRuleUpdateGpu, snapshotsAreTheStatesAndTheStateStays) {
  for (const Extents& e : kExtents)
    expect_agreement<TypeParam>(e, Batch::draw(7, 4, 5, false), {.snapshots = true}, 7);
}

// Tokens whose states nobody asks for may be treated as chunks.
TYPED_TEST(GatedDeltaRuleUpdateGpu, aVerificationThatOnlyReadsGivesTheSame) {
  for (const Extents& e : kExtents)
    for (const std::int64_t most : {2, 8, 20})
      expect_agreement<TypeParam>(e, Batch::draw(17, 5, most, false), {.read_only = true}, 17);
}

// Trees with invalid tokens among them: output 0, the committed state as snapshot.
TYPED_TEST(GatedDeltaRuleUpdateGpu, aTreeTokenFollowsItsParent) {
  for (const Extents& e : {Extents{2, 4, 128, 64}, Extents{1, 2, 17, 5}})
    for (const std::uint64_t seed : {8, 9, 10}) {
      const Batch batch = Batch::draw(seed, 4, 12, false);
      const auto parents = draw_tree(batch, seed);
      expect_agreement<TypeParam>(e, batch, {.snapshots = true, .parents = parents}, seed);
    }
}

// A verification that only reads, then a replay of what was accepted, is the accepted decodes.
TYPED_TEST(GatedDeltaRuleUpdateGpu, replayIsTheAcceptedDecodesBitByBit) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  constexpr std::int64_t kDrafts = 6, kRows = 7;
  for (const Extents& e : {Extents{2, 4, 128, 64}, Extents{1, 2, 17, 5}}) {
    Batch batch = Batch::draw(11, kRows, 1, false);  // slots and indices
    batch.lengths.assign(kRows, kDrafts);
    batch.starts = starts_of(batch.lengths);
    batch.tokens = kRows * kDrafts;
    const Inputs inputs(batch, e, 11);
    Array<std::int32_t, 1> accepted(Shape<1>{kRows}, 0);
    for (std::int64_t n = 0; n < kRows; ++n) accepted(n) = static_cast<std::int32_t>(n);
    const DeviceTensor<std::int32_t, 1> device_accepted(accepted);

    Device<T, S> verified(inputs, batch);
    auto verification = verified.arguments({});
    verification.read_only = true;
    kernels::gated_delta_rule_update<T, S>(verification, nullptr);
    const Device<T, S> untouched(inputs, batch);
    finish();
    EXPECT_TRUE(same_bits(verified.state, untouched.state));
    kernels::gated_delta_rule_replay<T, S>(verification, device_accepted.view(), {}, nullptr);
    kernels::gated_delta_rule_update<T, S>(verification, nullptr);

    // The same as a fold into the next verification, whose tokens are the old ones again.
    Device<T, S> folded(inputs, batch);
    auto next = folded.arguments({});
    next.fold = next.tokens;
    next.fold_accepted = device_accepted.view();
    kernels::gated_delta_rule_update<T, S>(next, nullptr);

    Device<T, S> decoded(inputs, batch);
    for (std::int64_t i = 0; i < kDrafts; ++i) {
      // The i-th launch decodes the rows that accepted more than i tokens.
      Array<std::int32_t, 1> indices(Shape<1>{batch.tokens}, -1);
      for (std::int64_t n = 0; n < kRows; ++n)
        if (accepted(n) > i) indices(n * kDrafts + i) = batch.indices(n);
      const DeviceTensor<std::int32_t, 1> device_indices(indices);
      auto step = decoded.arguments({});
      step.tokens.query_start_loc.reset();
      step.slots = {.indices = device_indices.view()};
      kernels::gated_delta_rule_update<T, S>(step, nullptr);
      finish();
    }
    finish();
    EXPECT_TRUE(same_bits(verified.state, decoded.state));
    EXPECT_TRUE(same_bits(folded.state, decoded.state));
    EXPECT_TRUE(same_bits(folded.out, verified.out));
  }
}

// Rows do not see each other, and neither does a second run.
TYPED_TEST(GatedDeltaRuleUpdateGpu, theOrderOfTheBatchDoesNotMatter) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  const Batch batch = Batch::draw(12, 8, 1, false);
  const Inputs inputs(batch, {2, 4, 128, 64}, 12);
  Device<T, S> once(inputs, batch), again(inputs, batch);
  once.run({});
  again.run({});
  EXPECT_TRUE(same_bits(once.out, again.out));
  EXPECT_TRUE(same_bits(once.state, again.state));

  Batch reversed = batch;
  Inputs turned = inputs;
  const std::int64_t N = batch.rows();
  for (std::int64_t n = 0; n < N; ++n) {
    reversed.indices(n) = batch.indices(N - 1 - n);
    const auto move = [&](auto& to, const auto& from) {
      const std::int64_t size = from.size() / N;
      std::copy_n(from.data() + (N - 1 - n) * size, size, to.data() + n * size);
    };
    move(turned.q, inputs.q), move(turned.k, inputs.k), move(turned.v, inputs.v);
    move(turned.a, inputs.a), move(turned.b, inputs.b);
  }
  Device<T, S> backwards(turned, reversed);
  backwards.run({});
  EXPECT_TRUE(same_bits(once.state, backwards.state));
}

// A captured graph runs on what the buffers hold when it is replayed.
TYPED_TEST(GatedDeltaRuleUpdateGpu, aGraphReplaysWithOtherContents) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  const Batch batch = Batch::draw(13, 4, 1, false);
  const Inputs first(batch, {1, 2, 128, 128}, 13);
  const Inputs second(batch, {1, 2, 128, 128}, 14);
  Device<T, S> captured(first, batch), direct(second, batch);
  replay_behind_change(
      [&](cudaStream_t stream) {
        kernels::gated_delta_rule_update<T, S>(captured.arguments({}), stream);
      },
      [&] {
        captured.q.set(direct.q.elements()), captured.k.set(direct.k.elements());
        captured.v.set(direct.v.elements()), captured.a.set(direct.a.elements());
        captured.b.set(direct.b.elements()), captured.state.set(direct.state.elements());
        captured.A_log.set(direct.A_log.elements()),
            captured.dt_bias.set(direct.dt_bias.elements());
      });
  direct.run({});
  EXPECT_TRUE(same_bits(captured.out, direct.out));
  EXPECT_TRUE(same_bits(captured.state, direct.state));
}

// A pool of more than 2^31 elements: its last slot gives what the same state in a small pool gives.
TYPED_TEST(GatedDeltaRuleUpdateGpu, offsetsGoBeyond32Bits) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  // NOLINTNEXTLINE(bugprone-implicit-widening-of-multiplication-result): 524,288
  constexpr std::int64_t kState = 32 * 128 * 128;
  const std::int64_t slots = (std::int64_t{1} << 31) / kState + 2;
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < static_cast<std::size_t>(slots) * kState * sizeof(S) * 2)
    GTEST_SKIP() << "there is too little device memory for a pool beyond 2^31 elements";
  Batch batch = Batch::draw(15, 1, 1, false);
  batch.slots = 1;
  batch.indices(0) = 0;
  const Inputs inputs(batch, {16, 32, 128, 128}, 15);
  Device<T, S> small(inputs, batch), large(inputs, batch);
  small.run({});
  DeviceTensor<S, 4> pool(Shape<4>{slots, 32, 128, 128});
  S* const last = pool.data() + (slots - 1) * kState;
  ASSERT_EQ(cudaMemcpy(last, large.state.data(), large.state.bytes(), cudaMemcpyDeviceToDevice),
            cudaSuccess);
  const DeviceTensor<std::int32_t, 1> index(ints({slots - 1}));
  auto in = large.arguments({});
  in.state = pool.view();
  in.slots = {.indices = index.view()};
  kernels::gated_delta_rule_update<T, S>(in, nullptr);
  finish();
  ASSERT_EQ(cudaMemcpy(large.state.data(), last, large.state.bytes(), cudaMemcpyDeviceToDevice),
            cudaSuccess);
  EXPECT_TRUE(same_bits(small.out, large.out));
  EXPECT_TRUE(same_bits(small.state, large.state));
  EXPECT_TRUE(pool.guards_intact());
}

// Slots may be a column of a wide tensor: its 60,000 rows reach beyond 2^31 elements.
TYPED_TEST(GatedDeltaRuleUpdateGpu, offsetsOfIndicesGoBeyond32Bits) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  constexpr std::int64_t kRows = 60000;
  Batch batch = Batch::draw(15, kRows, 1, false);
  const Inputs inputs(batch, {1, 1, 4, 4}, 15);
  const WideColumn column(batch.indices);
  for (const bool starts : {false, true}) {
    Device<T, S> narrow(inputs, batch), wide(inputs, batch);
    narrow.run({.starts = starts});
    auto in = wide.arguments({.starts = starts});
    in.slots.indices = column.view();
    kernels::gated_delta_rule_update<T, S>(in, nullptr);
    finish();
    EXPECT_TRUE(same_bits(narrow.out, wide.out));
    EXPECT_TRUE(same_bits(narrow.state, wide.state));
  }
}

/// The kernel as a law asks it: activations in bf16, which holds the run's numbers, states in
/// float32.
SlotResult kernel_update(const SlotRun& run, const SlotCall& call, const Array<double, 4>& states) {
  const std::int64_t T = call.end - call.begin;
  const auto tokens = [&]<std::size_t Rank>(const Array<double, Rank>& all) {
    return contiguous(cut(all.view(), call.begin, call.end));
  };
  const DeviceTensor<Bf16, 3> q(tokens(run.q)), k(tokens(run.k)), v(tokens(run.v));
  const DeviceTensor<float, 2> g(tokens(run.g)), beta(tokens(run.beta));
  DeviceTensor<Bf16, 3> out(Shape<3>{T, run.HV, run.V});
  DeviceTensor<float, 4> pool(states), snapshots(Shape<4>{T, run.HV, run.V, run.K});
  kernels::GatedDeltaRuleUpdate<Bf16, float> in{
      .tokens = {.q = q.view(), .k = k.view(), .v = v.view(), .g = g.view(), .beta = beta.view()},
      .state = pool.view(),
      .out = out.view(),
      .slots = {.pad_slot_id = call.pad_slot_id},
      .use_qk_l2norm = true};
  std::vector<DeviceTensor<std::int32_t, 1>> lists;  // views into them stay valid
  lists.reserve(3);
  const auto list = [&](const std::optional<Array<std::int32_t, 1>>& values) {
    if (!values) return std::optional<IndexView>();
    return std::optional<IndexView>(std::as_const(lists.emplace_back(*values)).view());
  };
  in.tokens.query_start_loc = list(call.starts);
  in.slots.indices = list(call.indices);
  in.slots.num_accepted = list(call.accepted);
  std::optional<DeviceTensor<std::int32_t, 2>> table;
  if (call.table) in.slots.table = std::as_const(table.emplace(*call.table)).view();
  if (call.snapshots) in.snapshots = snapshots.view();
  kernels::gated_delta_rule_update<Bf16, float>(in, nullptr);
  finish();
  return {cast<double>(out.host()), cast<double>(pool.host())};
}

class SlotLawsGpu : public GpuTest, public ::testing::WithParamInterface<SlotLaw> {};
INSTANTIATE_TEST_SUITE_P(RecurrentBugs, SlotLawsGpu, ::testing::ValuesIn(slot_laws()),
                         [](const auto& law) { return law.param.report; });

// Mistakes that kernels of other servers made are looked for in this one; a server that calls it
// wrongly is caught by the same law.
TEST_P(SlotLawsGpu, areKeptByTheKernelAndBrokenByTheReportsMistake) {
  EXPECT_TRUE(GetParam().holds(kernel_update)) << GetParam().says;
  EXPECT_FALSE(GetParam().holds(with_mistake(GetParam(), kernel_update))) << GetParam().says;
}

/// The kernel's complaint about sound arguments that are changed. Nothing here is device memory:
/// arguments are refused before a launch, so this needs no GPU.
template <class Change>
std::string complaint_about(Change change) {
  constexpr std::int64_t kTokens = 4, kSlots = 9;
  kernels::GatedDeltaRuleUpdate<Bf16, float> in{
      .tokens = {.q = unread<Bf16, 3>({kTokens, 2, 128}),
                 .k = unread<Bf16, 3>({kTokens, 2, 128}),
                 .v = unread<Bf16, 3>({kTokens, 4, 64}),
                 .g = unread<float, 2>({kTokens, 4}),
                 .beta = unread<float, 2>({kTokens, 4}),
                 .query_start_loc = unread<std::int32_t, 1>({3})},
      .state = unread<float, 4>({kSlots, 4, 64, 128}),
      .out = unread<Bf16, 3>({kTokens, 4, 64}),
      .slots = {.table = unread<std::int32_t, 2>({2, 2}),
                .num_accepted = unread<std::int32_t, 1>({2})},
      .A_log = unread<float, 1>({4}),
      .dt_bias = unread<float, 1>({4})};
  change(in);
  return complaint_of([&] { kernels::gated_delta_rule_update<Bf16, float>(in, nullptr); });
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST(GatedDeltaRuleUpdateArguments, areRefusedByName) {
  using In = kernels::GatedDeltaRuleUpdate<Bf16, float>;
  EXPECT_THAT(complaint_about([](In& in) { in.tokens.k = cut(in.tokens.k, 0, 1); }),
              ::testing::HasSubstr("q is expected to be [T, H, K] = [1, 2, 128]; got ["));
  EXPECT_THAT(complaint_about([](In& in) { in.out = cut(in.out, 0, 1); }),
              ::testing::HasSubstr("out is expected to be [T, HV, V]"));
  EXPECT_THAT(complaint_about([](In& in) { in.dt_bias = {}; }),
              ::testing::HasSubstr("A_log and dt_bias is expected to be both given, or neither"));
  EXPECT_THAT(complaint_about([](In& in) { in.slots.indices = IndexView(); }),
              ::testing::HasSubstr("state_indices is expected to be one list or one table"));
  EXPECT_THAT(complaint_about([](In& in) { in.slots.table.reset(); }),
              ::testing::HasSubstr("num_accepted_tokens is expected to be absent"));
  EXPECT_THAT(complaint_about([](In& in) { in.fold = in.tokens; }),
              ::testing::HasSubstr("fold_accepted is expected to be given with a fold"));
  EXPECT_THAT(complaint_about([](In& in) { in.slots.out_indices = in.slots.num_accepted; }),
              ::testing::HasSubstr("a table beside a table; got a list"));
}

}  // namespace
}  // namespace lockstep
