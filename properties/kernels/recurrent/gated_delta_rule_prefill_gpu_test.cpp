// The kernels of gated_delta_rule_prefill against the reference of the same name.
#include "kernels/recurrent/gated_delta_rule_prefill.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "properties/kernels/recurrent/gated_delta_inputs.hpp"
#include "reference/base/philox.hpp"
#include "reference/recurrent/gated_delta_rule.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::PrefillForm;

using Extents = GatedDeltaExtents;

/// Options of a prefill beside its inputs.
struct Question {
  PrefillForm form = PrefillForm::automatic;
  bool l2norm = true;
  bool fresh = false;    ///< every other row begins with 0, whatever its slot holds
  bool k_major = false;  ///< the pool is [slots, HV, K, V]
  std::int64_t boundary_every = 0;
  bool slow = false;  ///< gates that hardly decay
};

/// Every other row resumes, where that is asked. With `slow` gates a state hardly decays in a row.
struct Inputs : GatedDeltaInputs {
  Inputs(const Batch& batch, const Extents& e, std::uint64_t seed, bool slow = false)
      : GatedDeltaInputs(batch, e, seed), resumes(Shape<1>{batch.rows()}, true) {
    for (std::int64_t row = 1; row < batch.rows(); row += 2) resumes(row) = false;
    if (slow)
      for (std::int64_t h = 0; h < e.HV; ++h) dt_bias(h) -= 12;
  }
  Array<bool, 1> resumes;
};

template <class S>
struct Answer {
  Array<S, 3> out;
  Array<S, 4> state, boundary;
};

template <class S>
Answer<S> reference_answer(const Inputs& inputs, const Batch& batch, const Question& question,
                           const StoragePoints& storage) {
  const auto q = cast<S>(inputs.q), k = cast<S>(inputs.k), v = cast<S>(inputs.v);
  const auto a = cast<S>(inputs.a), b = cast<S>(inputs.b);
  const auto A_log = cast<S>(inputs.A_log), dt_bias = cast<S>(inputs.dt_bias);
  const auto gates =
      reference::gated_delta_gates<S>(a.view(), b.view(), A_log.view(), dt_bias.view());
  Shape<4> boundary_shape = inputs.state.shape();
  boundary_shape[0] = boundary_count(batch.lengths, question.boundary_every);
  Answer<S> answer{Array<S, 3>(v.shape()), cast<S>(inputs.state), Array<S, 4>(boundary_shape)};
  reference::GatedDeltaRuleInputs<S> in{
      .q = q,
      .k = k,
      .v = v,
      .g = gates.g,
      .beta = gates.beta,
      .use_qk_l2norm = question.l2norm,
      .rows = {.query_start_loc = batch.starts.view(), .slots = batch.host(), .storage = storage}};
  if (question.fresh) in.rows.has_initial_state = std::as_const(inputs.resumes).view();
  std::optional<BoundaryStates<S>> boundary;
  if (question.boundary_every > 0)
    boundary = {.states = answer.boundary.view(), .every = question.boundary_every};
  if (question.form == PrefillForm::sequential)
    reference::gated_delta_rule_scan<S>(in, answer.state.view(), answer.out.view(), boundary);
  else
    reference::gated_delta_rule_prefill<S>(in, 64, answer.state.view(), answer.out.view(),
                                           boundary);
  return answer;
}

/// Inputs and results on the device.
template <class S>
struct Device {
  Device(const Inputs& in, const Batch& batch, const Question& question)
      : question(question),
        indices(batch),
        q(in.q),
        k(in.k),
        v(in.v),
        a(in.a),
        b(in.b),
        A_log(in.A_log),
        dt_bias(in.dt_bias),
        resumes(in.resumes),
        out(in.v.shape()),
        state(turned_if(question.k_major, in.state)),
        boundary(Shape<4>{boundary_count(batch.lengths, question.boundary_every),
                          in.state.extent(1), in.state.extent(2), in.state.extent(3)}) {}

  kernels::GatedDeltaRulePrefill<Bf16, S> arguments() {
    kernels::GatedDeltaRulePrefill<Bf16, S> in{
        .tokens = {.q = std::as_const(q).view(),
                   .k = std::as_const(k).view(),
                   .v = std::as_const(v).view(),
                   .g = a.view(),
                   .beta = b.view(),
                   .query_start_loc = std::as_const(indices.starts).view()},
        .state = question.k_major ? transposed(state.view()) : state.view(),
        .out = out.view(),
        .slots = indices.slots(),
        .A_log = A_log.view(),
        .dt_bias = dt_bias.view(),
        .use_qk_l2norm = question.l2norm,
        .boundary_every = question.boundary_every,
        .form = question.form};
    if (question.fresh)
      in.has_initial_state = make_view(reinterpret_cast<const bool*>(resumes.data()),
                                       Shape<1>{indices.indices.view().extent(0)});
    if (question.boundary_every > 0) in.boundary_states = boundary.view();
    const std::int64_t bytes = kernels::prefill_workspace(in).bytes;
    if (bytes > 0) {
      workspace.emplace(Shape<1>{bytes});
      workspace->set(std::vector<unsigned char>(static_cast<std::size_t>(bytes), 0));
      in.workspace = workspace->view();
    }
    return in;
  }
  void run() {
    kernels::gated_delta_rule_prefill<Bf16, S>(arguments(), nullptr);
    finish();
  }
  Array<float, 4> host_state() const { return turned_if(question.k_major, state.host()); }

  Question question;
  DeviceBatch indices;
  DeviceTensor<Bf16, 3> q, k, v;
  DeviceTensor<Bf16, 2> a, b;
  DeviceTensor<float, 1> A_log, dt_bias;
  DeviceTensor<unsigned char, 1> resumes;
  DeviceTensor<Bf16, 3> out;
  DeviceTensor<S, 4> state, boundary;
  std::optional<DeviceTensor<unsigned char, 1>> workspace;
};

/// The points where the chunked kernels round.
template <class S>
StoragePoints storage_of(PrefillForm form) {
  StoragePoints points{.state = kernels::format_of<S>(), .output = Format::bf16};
  if (form == PrefillForm::sequential) return points;
  points.chunk_state = Format::bf16;
  points.operand = Format::bf16;
  points.normalised_qk = Format::bf16;
  return points;
}

template <class S>
void expect_agreement(const Extents& e, const Batch& batch, const Question& question,
                      std::uint64_t seed) {
  const Inputs inputs(batch, e, seed, question.slow);
  const auto truth = reference_answer<double>(inputs, batch, question, {});
  const auto yardstick =
      reference_answer<float>(inputs, batch, question, storage_of<S>(question.form));
  Device<S> device(inputs, batch, question);
  ASSERT_TRUE(kernels::can_run(device.arguments(), question.form));
  device.run();
  constexpr const char* kOperation = "gated_delta_rule_prefill";
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  EXPECT_TRUE(device.state.guards_intact());
  EXPECT_TRUE(
      within_yardstick<S>(kOperation, "state", device.host_state(), yardstick.state, truth.state));
  if (question.boundary_every > 0) {
    EXPECT_TRUE(within_yardstick(kOperation, "boundary_states", device.boundary, yardstick.boundary,
                                 truth.boundary));
  }
}

constexpr PrefillForm kChunked[] = {PrefillForm::overlapped, PrefillForm::followed,
                                    PrefillForm::in_turns, PrefillForm::by_heads};
constexpr PrefillForm kForms[] = {PrefillForm::overlapped,  PrefillForm::followed,
                                  PrefillForm::in_turns,    PrefillForm::by_heads,
                                  PrefillForm::in_segments, PrefillForm::sequential};
constexpr bool takes_one_part(PrefillForm form) {
  return form == PrefillForm::overlapped || form == PrefillForm::in_turns;
}
/// A batch with rows of these lengths, each with a slot.
Batch with_lengths(std::uint64_t seed, const Sizes& lengths) {
  Batch batch = Batch::draw(seed, static_cast<std::int64_t>(lengths.size()), 2, false);
  batch.lengths = lengths;
  batch.tokens = sum(lengths);
  batch.starts = starts_of(lengths);
  for (std::int64_t n = 0; n < batch.rows(); ++n)
    batch.indices(n) = static_cast<std::int32_t>(batch.rows() - n);
  return batch;
}
const std::vector<Extents> kQwenSlices{{1, 1, 128, 64}, {1, 2, 128, 128}, {2, 8, 128, 128}};

template <class S>
class GatedDeltaRulePrefillGpu : public GpuTest {};
using States = ::testing::Types<float, Bf16>;
TYPED_TEST_SUITE(GatedDeltaRulePrefillGpu, States);

// Lengths around a chunk, rows without tokens and without a slot, tokens after the last row.
TYPED_TEST(GatedDeltaRulePrefillGpu, raggedRowsAreTheReferences) {
  for (const PrefillForm form : kChunked)
    for (const Extents& e : kQwenSlices)
      for (const std::uint64_t seed : {1, 2, 3})
        if (takes_one_part(form) || e.V > 64)
          expect_agreement<TypeParam>(e, Batch::draw(seed, 3, 130, false), {.form = form}, seed);
}

// Rows long enough that a second chain makes their first outputs; one of them has a single chunk.
TYPED_TEST(GatedDeltaRulePrefillGpu, followersMakeTheFirstOutputs) {
  for (const Extents& e : {Extents{1, 2, 128, 128}, Extents{1, 1, 128, 256}})
    expect_agreement<TypeParam>(e, with_lengths(12, {1300, 60, 901}),
                                {.form = PrefillForm::followed}, 12);
  expect_agreement<TypeParam>({1, 2, 128, 128}, with_lengths(13, {1100, 1500}),
                              {.fresh = true, .k_major = true, .boundary_every = 128}, 13);
}

// Rows of many segments, of two and of one, rows without a slot or tokens, tokens after the last;
// gates that forget a state within a segment, and gates that do not.
TYPED_TEST(GatedDeltaRulePrefillGpu, segmentsAreJoinedToTheReferencesRows) {
  for (const bool slow : {false, true}) {
    const Question plain{.form = PrefillForm::in_segments, .slow = slow};
    for (const Extents& e : {Extents{1, 2, 128, 128}, Extents{1, 1, 128, 256}})
      expect_agreement<TypeParam>(e, with_lengths(15, {1300, 60, 901, 130, 1}), plain, 15);
    expect_agreement<TypeParam>({2, 8, 128, 128}, with_lengths(16, {2500}), plain, 16);
    expect_agreement<TypeParam>({1, 2, 128, 128}, Batch::draw(17, 3, 700, false), plain, 17);
    Question more = plain;
    more.fresh = more.k_major = true;
    more.boundary_every = 128;
    expect_agreement<TypeParam>({1, 2, 128, 128}, with_lengths(18, {1100, 1500}), more, 18);
  }
}

// More pieces of work than processors: blocks take several, and the automatic choice is by heads.
TYPED_TEST(GatedDeltaRulePrefillGpu, manyRowsAreTheReferences) {
  for (const PrefillForm form :
       {PrefillForm::automatic, PrefillForm::in_turns, PrefillForm::by_heads})
    expect_agreement<TypeParam>({2, 8, 128, 128}, Batch::draw(11, 24, 130, false), {.form = form},
                                11);
}

TYPED_TEST(GatedDeltaRulePrefillGpu, freshRowsBeginWithZero) {
  for (const PrefillForm form : kForms)
    expect_agreement<TypeParam>({1, 2, 128, 128}, Batch::draw(4, 5, 100, false),
                                {.form = form, .fresh = true}, 4);
}

// States at boundaries are those that a radix cache keeps.
TYPED_TEST(GatedDeltaRulePrefillGpu, boundaryStatesAreTheStatesThere) {
  for (const PrefillForm form : kForms)
    expect_agreement<TypeParam>({1, 2, 128, 128}, Batch::draw(5, 4, 300, false),
                                {.form = form, .boundary_every = 64}, 5);
  expect_agreement<TypeParam>({1, 2, 128, 128}, Batch::draw(5, 4, 100, false),
                              {.form = PrefillForm::sequential, .boundary_every = 7}, 5);
}

TYPED_TEST(GatedDeltaRulePrefillGpu, aKMajorPoolServesAsWell) {
  for (const PrefillForm form : kForms)
    expect_agreement<TypeParam>({1, 2, 128, 128}, Batch::draw(6, 3, 140, false),
                                {.form = form, .k_major = true}, 6);
}

TYPED_TEST(GatedDeltaRulePrefillGpu, otherShapesRunTokenByToken) {
  for (const Extents& e : {Extents{1, 3, 17, 5}, Extents{2, 2, 64, 64}, Extents{1, 2, 256, 33}})
    expect_agreement<TypeParam>(e, Batch::draw(7, 4, 40, false), {}, 7);
}

/// The tokens begin ... end - 1 of the only row, from the state that is there.
void run_part(Device<float>& device, std::int64_t begin, std::int64_t end) {
  auto in = device.arguments();
  const DeviceTensor<std::int32_t, 1> local_starts(ints({0, end - begin}));
  in.tokens.q = cut(in.tokens.q, begin, end);
  in.tokens.k = cut(in.tokens.k, begin, end);
  in.tokens.v = cut(in.tokens.v, begin, end);
  in.out = cut(in.out, begin, end);
  in.tokens.g = cut(device.a.view(), begin, end);
  in.tokens.beta = cut(device.b.view(), begin, end);
  in.tokens.query_start_loc = local_starts.view();
  kernels::gated_delta_rule_prefill<Bf16, float>(in, nullptr);
  finish();
}

// A prompt that is cut at a multiple of a chunk and resumed gives the bits of the uncut run, where
// states are float32: prefix caching is sound.
class GatedDeltaRulePrefillCuts : public GpuTest {};
TEST_F(GatedDeltaRulePrefillCuts, aResumedPromptHasTheBitsOfTheUncutOne) {
  for (const PrefillForm form : kChunked)
    for (const std::int64_t middle : {64, 128, 192, 960}) {
      const Question question{.form = form};
      const Batch batch = with_lengths(8, {middle < 250 ? 250 : 1600});
      const Inputs inputs(batch, {1, 2, 128, 128}, 8);
      Device<float> whole(inputs, batch, question), cut_up(inputs, batch, question);
      whole.run();
      run_part(cut_up, 0, middle);
      run_part(cut_up, middle, batch.tokens);
      EXPECT_TRUE(same_bits(whole.out, cut_up.out));
      EXPECT_TRUE(same_bits(whole.state, cut_up.state));
    }
}

// The same over random prompts with several cuts each, every part in a form of its own; what the
// uncut run stores at a boundary is what a run that ends there leaves.
TEST_F(GatedDeltaRulePrefillCuts, randomCutsAndBoundaryStatesHaveTheBitsOfTheUncutRun) {
  std::uint64_t draws = 0;
  const auto below = [&](std::uint64_t end) {
    return static_cast<std::int64_t>(random_below(end, 21, 0, draws++));
  };
  for (int prompt = 0; prompt < 24; ++prompt) {
    const PrefillForm form = kChunked[prompt % 4];
    const Batch batch = with_lengths(14, {65 + below(prompt % 3 == 0 ? 1500 : 400)});
    const Inputs inputs(batch, {1, 2, 128, 128}, 14 + static_cast<std::uint64_t>(prompt));
    Device<float> whole(inputs, batch, {.form = form, .boundary_every = 64});
    whole.run();
    const auto boundaries = whole.boundary.host();
    std::int64_t begin = 0;
    Device<float> cut_up(inputs, batch, {});
    while (begin < batch.tokens) {
      const std::int64_t end = std::min(begin + 64 * (1 + below(8)), batch.tokens);
      cut_up.question.form = kChunked[below(4)];
      run_part(cut_up, begin, end);
      begin = end;
      if (end % 64 != 0) continue;
      const auto left = cut_up.state.host();
      int different = 0;
      for (std::int64_t h = 0; h < left.extent(1); ++h)
        for (std::int64_t i = 0; i < left.extent(2); ++i)
          for (std::int64_t j = 0; j < left.extent(3); ++j)
            different += left(batch.indices(0), h, i, j) != boundaries(end / 64 - 1, h, i, j);
      EXPECT_EQ(different, 0) << "of prompt " << prompt << " at token " << end;
    }
    EXPECT_TRUE(same_bits(whole.out, cut_up.out)) << "prompt " << prompt;
    EXPECT_TRUE(same_bits(whole.state, cut_up.state)) << "prompt " << prompt;
  }
}

// All chunked forms do the same arithmetic, and a second run finds the workspace as it should be.
TEST_F(GatedDeltaRulePrefillCuts, formsAndRunsAgreeBitByBit) {
  for (const Batch& batch : {Batch::draw(9, 3, 200, false), with_lengths(9, {1500, 900, 700})}) {
    const Inputs inputs(batch, {1, 2, 128, 128}, 9);
    Device<float> overlapped(inputs, batch, {.form = PrefillForm::overlapped});
    Device<float> followed(inputs, batch, {.form = PrefillForm::followed});
    Device<float> in_turns(inputs, batch, {.form = PrefillForm::in_turns});
    Device<float> by_heads(inputs, batch, {.form = PrefillForm::by_heads});
    in_turns.run();
    by_heads.run();
    EXPECT_TRUE(same_bits(by_heads.out, in_turns.out));
    EXPECT_TRUE(same_bits(by_heads.state, in_turns.state));
    const Device<float> untouched(inputs, batch, {});
    for (Device<float>* const two : {&overlapped, &followed}) {
      auto arguments = two->arguments();
      for (int run = 0; run < 2; ++run) {
        two->state.set(untouched.state.elements());
        two->out.set(untouched.out.elements());
        kernels::gated_delta_rule_prefill<Bf16, float>(arguments, nullptr);
        finish();
        EXPECT_TRUE(same_bits(two->out, in_turns.out));
        EXPECT_TRUE(same_bits(two->state, in_turns.state));
      }
    }
  }
}

// A few heads of a long row are what the automatic choice cuts. Another run has the same bits.
TEST_F(GatedDeltaRulePrefillCuts, fewHeadsOfALongRowRunInSegments) {
  const Batch batch = with_lengths(19, {4000});
  const Inputs inputs(batch, {1, 2, 128, 128}, 19, true);
  Device<float> automatic(inputs, batch, {});
  Device<float> again(inputs, batch, {.form = PrefillForm::in_segments});
  Device<float> whole(inputs, batch, {.form = PrefillForm::overlapped});
  automatic.run();
  again.run();
  whole.run();
  EXPECT_TRUE(same_bits(automatic.out, again.out));
  EXPECT_TRUE(same_bits(automatic.state, again.state));
  EXPECT_FALSE(same_bits(automatic.state, whole.state));
}

// The last row's boundary states have no place, nor have two of the second's.
TEST_F(GatedDeltaRulePrefillCuts, boundaryStatesWithoutAPlaceAreNotStored) {
  const Batch batch = with_lengths(14, {300, 200, 130});  // of 4, 3 and 2 boundaries
  const Inputs inputs(batch, {1, 2, 128, 128}, 14);
  for (const PrefillForm form : kForms) {
    const Question question{.form = form, .boundary_every = 64};
    Device<float> all(inputs, batch, question), some(inputs, batch, question);
    all.run();
    auto in = some.arguments();
    in.boundary_states = cut(*in.boundary_states, 0, 5);
    kernels::gated_delta_rule_prefill<Bf16, float>(in, nullptr);
    finish();
    EXPECT_TRUE(same_bits(some.state, all.state));
    const auto kept = some.boundary.elements(), stored = all.boundary.elements();
    const auto end = kept.begin() + 5L * 2 * 128 * 128;
    EXPECT_TRUE(std::equal(kept.begin(), end, stored.begin()));
    EXPECT_TRUE(std::all_of(end, kept.end(), [](float x) { return std::isnan(x); }));
  }
}

class GatedDeltaRulePrefillArguments : public GpuTest {};

template <class Change>
std::string complaint_about(Change change) {
  const Batch batch = Batch::draw(10, 2, 70, false);
  const Inputs inputs(batch, {2, 4, 128, 128}, 10);
  Device<float> device(inputs, batch, {});
  auto in = device.arguments();
  change(in);
  return complaint_of([&] { kernels::gated_delta_rule_prefill<Bf16, float>(in, nullptr); });
}

// A wrong argument is refused with a sentence that names it, what is expected and what came.
TEST_F(GatedDeltaRulePrefillArguments, areRefusedByName) {
  using In = kernels::GatedDeltaRulePrefill<Bf16, float>;
  EXPECT_EQ(complaint_about([](In&) {}), "nothing");
  EXPECT_THAT(complaint_about([](In& in) { in.tokens.k = cut(in.tokens.k, 0, 1); }),
              ::testing::HasSubstr("q is expected to be [T, H, K] = [1, 2, 128]; got ["));
  EXPECT_THAT(complaint_about([](In& in) { in.out = cut(in.out, 0, 1); }),
              ::testing::HasSubstr("out is expected to be [T, HV, V]"));
  EXPECT_THAT(complaint_about([](In& in) { in.dt_bias = {}; }),
              ::testing::HasSubstr("A_log and dt_bias is expected to be both given, or neither"));
  EXPECT_THAT(complaint_about([](In& in) { in.workspace.reset(); }),
              ::testing::HasSubstr("workspace is expected to be of "));
  EXPECT_THAT(complaint_about([](In& in) { in.boundary_states = in.state; }),
              ::testing::HasSubstr("boundary_every is expected to be a count of tokens; got 0"));
}

}  // namespace
}  // namespace lockstep
