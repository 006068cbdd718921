// The kernels of ssd_prefill, by chunks and token by token, against the reference of the same name.
#include "kernels/recurrent/ssd_prefill.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "properties/kernels/recurrent/prefill_rows.hpp"
#include "reference/recurrent/mamba2.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;
using kernels::Fp16;
using kernels::PrefillKernel;

constexpr const char* kOperation = "ssd_prefill";

struct Extents {
  std::int64_t H, G, P, N;
};

struct Question {
  bool gated = false;
  bool skip = true;  ///< D
  bool skip_by_channel = false;
  bool softplus = true;  ///< false: steps of either sign
  bool limited = false;
  bool with_state = true;
  bool padded = false;     ///< rows of one size, with lengths
  std::int64_t every = 0;  ///< tokens between boundary states
  double decay = 1;        ///< of which A is a multiple
  PrefillKernel kernel = PrefillKernel::chunked;
};

/// A layer's inputs, on the grid: exact in every type. What no row may look at is NaN.
struct Inputs {
  Inputs(const PrefillRows& rows, const Extents& e, const Question& question, std::uint64_t seed)
      : x(draw<3>({rows.tokens, e.H, e.P}, seed, 1)),
        dt(draw<2>({rows.tokens, e.H}, seed, 2)),
        A(draw<1>({e.H}, seed, 3)),
        B(draw<3>({rows.tokens, e.G, e.N}, seed, 4)),
        C(draw<3>({rows.tokens, e.G, e.N}, seed, 5)),
        D(draw<2>({e.H, e.P}, seed, 6)),
        dt_bias(draw<1>({e.H}, seed, 7)),
        z(draw<3>({rows.tokens, e.H, e.P}, seed, 8)),
        state(draw<4>({rows.slots, e.H, e.P, e.N}, seed, 9)) {
    for (double& a : A) a = -question.decay * (1.0 / 64 + std::abs(a));
    for (double& bias : dt_bias) bias -= question.softplus ? 3 : 0;
    if (!question.softplus)
      for (double& d : dt) d /= 16;
    if (!question.skip_by_channel)
      for (std::int64_t h = 0; h < e.H; ++h)
        for (std::int64_t p = 1; p < e.P; ++p) D(h, p) = D(h, 0);
    const auto poison = [](auto& array, std::int64_t i) {
      fill(at(array.view(), i), std::nan(""));
    };
    rows.for_each_unread(
        question.with_state,
        [&](std::int64_t t) {
          poison(x, t), poison(dt, t), poison(B, t), poison(C, t), poison(z, t);
        },
        [&](std::int64_t slot) { poison(state, slot); });
  }
  Array<double, 3> x;
  Array<double, 2> dt;
  Array<double, 1> A;
  Array<double, 3> B, C;
  Array<double, 2> D;
  Array<double, 1> dt_bias;
  Array<double, 3> z;
  Array<double, 4> state;
};

template <class S>
struct Answer {
  Array<S, 3> out;
  Array<S, 4> state, boundary;
};

template <class S>
Answer<S> reference_answer(const Inputs& inputs, const PrefillRows& rows, const Question& question,
                           const StoragePoints& storage) {
  const std::int64_t P = inputs.x.extent(2), N = inputs.B.extent(2);
  const auto x = cast<S>(inputs.x), B = cast<S>(inputs.B), C = cast<S>(inputs.C);
  const auto z = cast<S>(inputs.z);
  const auto dt = cast<S>(inputs.dt), D = cast<S>(inputs.D);
  const auto A = cast<S>(inputs.A), dt_bias = cast<S>(inputs.dt_bias);
  Answer<S> answer{
      Array<S, 3>(x.shape()), cast<S>(inputs.state),
      Array<S, 4>(Shape<4>{boundary_count(rows.lengths, question.every), inputs.x.extent(1), P, N},
                  std::nan(""))};
  reference::Mamba2Inputs<S> in{.x = x,
                                .dt = repeat(dt.view(), P),
                                .A = repeat(repeat(A.view(), P), N),
                                .B = B,
                                .C = C,
                                .dt_bias = repeat(dt_bias.view(), P),
                                .dt_softplus = question.softplus,
                                .steps_in_scores = true,
                                .rows = {.storage = storage}};
  if (question.skip) in.D = D;
  if (question.gated) in.z = z;
  if (question.limited) in.dt_min = S{0.0625}, in.dt_max = S{0.25};
  std::optional<TensorView<S, 4>> state;
  if (question.with_state) {
    state = answer.state.view();
    in.rows.slots = {.indices = rows.indices.view()};
    in.rows.has_initial_state = rows.resumes.view();
  }
  if (question.padded) {
    const auto batch = static_cast<std::int64_t>(rows.lengths.size());
    const auto in_rows = [&](const auto& view) {
      Shape<4> extents{batch, rows.longest, view.extent(1), view.extent(2)};
      return make_view(
          view.data_handle(), extents,
          Shape<4>{view.stride(0) * rows.longest, view.stride(0), view.stride(1), view.stride(2)});
    };
    reference::PaddedMamba2Inputs<S> padded{.common = in,
                                            .x = in_rows(in.x),
                                            .dt = in_rows(in.dt),
                                            .B = in_rows(in.B),
                                            .C = in_rows(in.C),
                                            .context_lengths = rows.counts.view()};
    if (in.z) padded.z = in_rows(*in.z);
    padded.common.z.reset();
    reference::mamba2_padded(padded, state, in_rows(answer.out.view()),
                             [](const auto& one, const auto& pool, const auto& out) {
                               reference::ssd_prefill<S>(one, 64, pool, out);
                             });
    return answer;
  }
  in.rows.query_start_loc = rows.starts.view();
  std::optional<BoundaryStates<S>> boundary;
  if (question.every) boundary = {answer.boundary.view(), question.every};
  reference::ssd_prefill<S>(in, 64, state, answer.out.view(), boundary);
  return answer;
}

template <class T, class S>
struct Device {
  Device(const Inputs& in, const PrefillRows& rows, const Question& question)
      : indices(rows),
        x(in.x),
        B(in.B),
        C(in.C),
        z(in.z),
        dt(in.dt),
        D(in.D),
        A(in.A),
        dt_bias(in.dt_bias),
        out(in.x.shape()),
        state(in.state),
        boundary(Shape<4>{boundary_count(rows.lengths, question.every), in.state.extent(1),
                          in.state.extent(2), in.state.extent(3)}) {}

  kernels::SsdPrefill<T, S> arguments(const Question& question) {
    kernels::SsdPrefill<T, S> in{.x = std::as_const(x).view(),
                                 .dt = dt.view(),
                                 .A = A.view(),
                                 .B = std::as_const(B).view(),
                                 .C = std::as_const(C).view(),
                                 .out = out.view(),
                                 .dt_bias = dt_bias.view(),
                                 .dt_softplus = question.softplus,
                                 .batch = indices.batch(question.with_state),
                                 .boundary_every = question.every,
                                 .kernel = question.kernel};
    if (question.skip) {
      in.D = D.view();
      if (!question.skip_by_channel) in.D.strides[1] = 0;
    }
    if (question.gated) in.z = std::as_const(z).view();
    if (question.limited) in.dt_min = 0.0625f, in.dt_max = 0.25f;
    if (question.with_state) in.state = state.view();
    if (question.every) in.boundary_states = boundary.view();
    return in;
  }
  void run(const Question& question) {
    auto in = arguments(question);
    DeviceTensor<unsigned char, 1> workspace(Shape<1>{kernels::prefill_workspace(in)});
    in.workspace = workspace.view();
    kernels::ssd_prefill<T, S>(in, nullptr);
    finish();
  }

  DevicePrefillRows indices;
  DeviceTensor<T, 3> x, B, C, z;
  DeviceTensor<T, 2> dt;
  DeviceTensor<float, 2> D;
  DeviceTensor<float, 1> A, dt_bias;
  DeviceTensor<T, 3> out;
  DeviceTensor<S, 4> state, boundary;
};

template <class Types>
void expect_agreement(const Extents& e, const Sizes& lengths, const Question& question,
                      std::uint64_t seed) {
  using T = typename Types::first_type;
  using S = typename Types::second_type;
  SCOPED_TRACE("H " + std::to_string(e.H) + ", G " + std::to_string(e.G) + ", P " +
               std::to_string(e.P) + ", N " + std::to_string(e.N) + ", rows " +
               ::testing::PrintToString(lengths));
  const PrefillRows rows(lengths, seed, question.padded);
  const Inputs inputs(rows, e, question, seed);
  const auto truth = reference_answer<double>(inputs, rows, question, {});
  const auto yardstick = reference_answer<float>(inputs, rows, question,
                                                 {.state = kernels::format_of<S>(),
                                                  .chunk_state = kernels::format_of<T>(),
                                                  .operand = kernels::format_of<T>(),
                                                  .output = kernels::format_of<T>()});
  Device<T, S> device(inputs, rows, question);
  device.run(question);
  const std::string by = question.kernel == PrefillKernel::chunked    ? " by chunks"
                         : question.kernel == PrefillKernel::segments ? " by segments"
                                                                      : " by tokens";
  EXPECT_TRUE(within_yardstick(kOperation, "out" + by, device.out, yardstick.out, truth.out));
  EXPECT_TRUE(
      within_yardstick(kOperation, "state" + by, device.state, yardstick.state, truth.state));
  if (question.every) {
    EXPECT_TRUE(within_yardstick(kOperation, "boundary states" + by, device.boundary,
                                 yardstick.boundary, truth.boundary));
  }
}

const std::vector<Extents> kExtents{
    {4, 2, 64, 128}, {3, 1, 80, 128}, {2, 2, 128, 128}, {2, 1, 16, 128},
#ifdef LOCKSTEP_ALL_SHAPES
    {2, 1, 64, 64},  {2, 2, 64, 256}, {1, 1, 80, 256},
#endif
};
// Every length around a chunk and around a warp's rows.
const std::vector<Sizes> kLengths{
    {64}, {1}, {128, 0, 63}, {65, 15, 16, 17, 127}, {1, 200, 64, 0, 129, 48}, {320}, {0, 0}};

template <class Types>
class SsdPrefillGpu : public GpuTest {};
using TypePairs = ::testing::Types<std::pair<Bf16, float>, std::pair<Bf16, Bf16>>;
TYPED_TEST_SUITE(SsdPrefillGpu, TypePairs);

TYPED_TEST(SsdPrefillGpu, chunksAreTheReferences) {
  for (const Extents& e : kExtents)
    for (const Sizes& lengths : kLengths)
      expect_agreement<TypeParam>(e, lengths, {}, lengths.size());
}

TYPED_TEST(SsdPrefillGpu, everyArgumentCounts) {
  const Sizes lengths{65, 3, 192, 30, 100};
  for (const Extents& e : kExtents)
    for (const PrefillKernel kernel : {PrefillKernel::chunked, PrefillKernel::sequential}) {
      std::uint64_t seed = 20;
      for (Question question : {Question{.gated = true},
                                {.gated = true, .skip = false},
                                {.skip = false, .limited = true},
                                {.gated = true, .skip_by_channel = true},
                                {.softplus = false},
                                {.softplus = false, .limited = true},
                                {.with_state = false},
                                {.gated = true, .padded = true},
                                {.with_state = false, .padded = true},
                                {.decay = 64},
                                {.decay = 1.0 / 1024}}) {
        question.kernel = kernel;
        expect_agreement<TypeParam>(e, lengths, question, ++seed);
      }
    }
}

TYPED_TEST(SsdPrefillGpu, statesAtBoundaries) {
  for (const Extents& e : kExtents)
    for (const std::int64_t every : {64, 128, 50})
      expect_agreement<TypeParam>(
          e, {130, 64, 10, 257},
          {.every = every,
           .kernel = every % 64 == 0 ? PrefillKernel::chunked : PrefillKernel::sequential},
          static_cast<std::uint64_t>(every));
}

// More items than the GPU has processors: blocks go from item to item.
TYPED_TEST(SsdPrefillGpu, blocksTakeManyItems) {
  Sizes lengths;
  for (std::uint64_t i = 0; i < 40; ++i)
    lengths.push_back(static_cast<std::int64_t>(random_below(150, 7, 1, i)));
  for (const bool gated : {false, true})
    expect_agreement<TypeParam>({8, 1, 64, 128}, lengths, {.gated = gated, .every = 64}, 3);
}

// Segments of one chunk and of six, rows of every length, in place of slots that other rows read.
TYPED_TEST(SsdPrefillGpu, segmentsGiveTheBitsOfWholeRows) {
  using T = typename TypeParam::first_type;
  using S = typename TypeParam::second_type;
  std::vector<std::pair<Extents, Sizes>> cases{{{16, 2, 64, 128}, {700, 64, 0, 1300}},
                                               {{2, 1, 64, 128}, Sizes(40, 70)}};
  for (const Extents& e : kExtents) cases.emplace_back(e, Sizes{1, 200, 64, 0, 129, 448});
  for (const auto& [e, lengths] : cases) {
    std::uint64_t seed = 50;
    for (Question question : {Question{},
                              {.gated = true, .every = 128},
                              {.with_state = false},
                              {.gated = true, .padded = true},
                              {.softplus = false}}) {
      const PrefillRows rows(lengths, ++seed, question.padded);
      const Inputs inputs(rows, e, question, seed);
      Device<T, S> whole(inputs, rows, question), parts(inputs, rows, question);
      whole.run(question);
      question.kernel = PrefillKernel::segments;
      parts.run(question);
      EXPECT_TRUE(same_bits(parts.out, whole.out));
      EXPECT_TRUE(same_bits(parts.state, whole.state));
      EXPECT_TRUE(same_bits(parts.boundary, whole.boundary));
    }
    expect_agreement<TypeParam>(e, lengths, {.gated = true, .kernel = PrefillKernel::segments},
                                seed);
  }
}

// A prefix cache rests on this: a prefill resumed from the state at a multiple of the chunk gives
// the bits of the prefill that was not cut.
TEST_F(GpuTest, ssdPrefillResumedAtAChunkGivesTheSameBits) {
  const Extents e{4, 2, 64, 128};
  for (const std::int64_t cut : {64, 128, 256}) {
    const Sizes whole{300};
    const Question question{.gated = true, .every = 64};
    const PrefillRows rows(whole, 1, false);
    const Inputs inputs(rows, e, question, 11);
    Device<Bf16, float> uncut(inputs, rows, question), resumed(inputs, rows, question);
    uncut.run(question);
    auto in = resumed.arguments(question);
    in.boundary_states.reset();
    in.boundary_every = 0;
    const auto run_part = [&](std::int64_t begin, std::int64_t end) {
      kernels::SsdPrefill<Bf16, float> part = in;
      const auto rows_of = [&](const auto& view) { return lockstep::cut(view, begin, end); };
      part.x = rows_of(in.x), part.B = rows_of(in.B), part.C = rows_of(in.C);
      part.z = rows_of(*in.z);
      part.dt = rows_of(std::as_const(resumed.dt).view());
      part.out = rows_of(in.out);
      const DeviceTensor<std::int32_t, 1> starts(starts_of({end - begin}));
      part.batch.query_start_loc = starts.view();
      kernels::ssd_prefill<Bf16, float>(part, nullptr);
      finish();
    };
    run_part(0, cut);
    EXPECT_TRUE(same_bits(contiguous(at(resumed.state.host().view(), rows.indices(0))),
                          contiguous(at(uncut.boundary.host().view(), cut / 64 - 1))));
    run_part(cut, 300);
    EXPECT_TRUE(same_bits(resumed.state, uncut.state));
    EXPECT_TRUE(same_bits(contiguous(lockstep::cut(resumed.out.host().view(), 0, 300)),
                          contiguous(lockstep::cut(uncut.out.host().view(), 0, 300))));
  }
}

// The last row's boundary states have no place, and one of the first row's.
TEST_F(GpuTest, ssdPrefillStoresNoBoundaryStateWithoutAPlace) {
  const PrefillRows rows({300, 130}, 14, false);  // of 4 and 2 boundaries
  for (const PrefillKernel kernel :
       {PrefillKernel::chunked, PrefillKernel::segments, PrefillKernel::sequential}) {
    const Question question{.every = 64, .kernel = kernel};
    const Inputs inputs(rows, {2, 1, 64, 128}, question, 14);
    Device<Bf16, float> all(inputs, rows, question), some(inputs, rows, question);
    all.run(question);
    auto in = some.arguments(question);
    in.boundary_states = cut(*in.boundary_states, 0, 3);
    DeviceTensor<unsigned char, 1> workspace(Shape<1>{kernels::prefill_workspace(in)});
    in.workspace = workspace.view();
    kernels::ssd_prefill<Bf16, float>(in, nullptr);
    finish();
    EXPECT_TRUE(same_bits(some.state, all.state));
    const auto kept = some.boundary.elements(), stored = all.boundary.elements();
    const auto end = kept.begin() + 3L * 2 * 64 * 128;
    EXPECT_TRUE(std::equal(kept.begin(), end, stored.begin()));
    EXPECT_TRUE(std::all_of(end, kept.end(), [](float x) { return std::isnan(x); }));
  }
}

class SsdPrefillArguments : public GpuTest {};

TEST(SsdPrefillArguments, areRefusedByName) {
  const Extents e{2, 1, 64, 128};
  const auto complaint = [&](auto change) {
    kernels::SsdPrefill<Bf16, float> in{.x = unread<const Bf16, 3>({4, e.H, e.P}),
                                        .dt = unread<const Bf16, 2>({4, e.H}),
                                        .A = unread<const float, 1>({e.H}),
                                        .B = unread<const Bf16, 3>({4, e.G, e.N}),
                                        .C = unread<const Bf16, 3>({4, e.G, e.N}),
                                        .out = unread<Bf16, 3>({4, e.H, e.P}),
                                        .state = unread<float, 4>({3, e.H, e.P, e.N})};
    change(in);
    return complaint_of([&] { kernels::ssd_prefill<Bf16, float>(in, nullptr); });
  };
  using In = kernels::SsdPrefill<Bf16, float>;
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint([](In& in) { in.dt.extents[1] = 3; }),
              HasSubstr("dt is expected to be [T, H] = [4, 2]; got [4, 3]"));
  EXPECT_THAT(complaint([](In& in) { in.A.format = Format::bf16; }),
              HasSubstr("A is expected to be float32; got bfloat16"));
  EXPECT_THAT(complaint([](In& in) { in.boundary_every = 64; }), HasSubstr("boundary_every"));
  EXPECT_THAT(complaint([](In& in) { in.batch.padded_size = 3; }), HasSubstr("x is expected"));
  EXPECT_THAT(complaint([](In& in) {
                in.kernel = PrefillKernel::chunked;
                in.boundary_states = in.state;
                in.boundary_every = 50;
              }),
              HasSubstr("boundaries at multiples of 64 tokens"));
}

}  // namespace
}  // namespace lockstep
