// The kernel of mamba2_mixer_decode against the reference of the same name, and against the three
// launches that it replaces.
#include "kernels/models/mamba2_mixer_decode.hpp"

#include <gmock/gmock.h>

#include "kernels/layers/rms_norm.hpp"
#include "kernels/recurrent/causal_conv1d_update.hpp"
#include "kernels/recurrent/selective_state_update.hpp"
#include "properties/kernels/models/step.hpp"
#include "reference/recurrent/mamba2_mixer_decode.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;

constexpr const char* kOperation = "mamba2_mixer_decode";
constexpr std::int64_t kColumns = 128;

struct Heads {
  std::int64_t H, G, P = 64, N = kColumns;
  std::int64_t inner() const { return H * P; }
  std::int64_t channels() const { return H * P + 2 * G * N; }
};

struct Question {
  bool with_bias = true;
  bool channels_contiguous = true;  ///< of windows
  bool float_weights = false;       ///< of the convolution and the norm
  bool strided = false;             ///< x, z and dt are parts of one tensor, as in_proj leaves them
  int parts = 0;
};

struct Inputs {
  Inputs(const Batch& batch, const Heads& h, std::uint64_t seed)
      : heads(h),
        projected(draw<2>({batch.tokens, h.inner() + h.channels() + h.H}, seed, 1)),
        weight(draw<2>({h.channels(), 4}, seed, 2)),
        bias(draw<1>({h.channels()}, seed, 3)),
        A(draw<1>({h.H}, seed, 4)),
        D(draw<1>({h.H}, seed, 5)),
        dt_bias(draw<1>({h.H}, seed, 6)),
        norm_weight(draw<1>({h.inner()}, seed, 7)),
        window(draw<3>({batch.slots, h.channels(), 3}, seed, 8)),
        state(draw<4>({batch.slots, h.H, h.P, h.N}, seed, 9)) {
    for (double& a : A) a = -1.0 / 16 - std::abs(a);
  }

  Heads heads;
  Array<double, 2> projected;  ///< [z | x, B, C | dt]
  Array<double, 2> weight;
  Array<double, 1> bias, A, D, dt_bias, norm_weight;
  Array<double, 3> window;
  Array<double, 4> state;
};

/// The parts of what in_proj leaves.
template <class T>
struct Parts {
  TensorView<const T, 2> x, dt;
  TensorView<const T, 3> z;

  Parts(const TensorView<const T, 2>& projected, const Heads& h)
      : x(columns(projected, h.inner(), h.channels())),
        dt(columns(projected, h.inner() + h.channels(), h.H)),
        z(make_view<const T>(projected.data_handle(), Shape<3>{projected.extent(0), h.H, h.P},
                             Shape<3>{projected.stride(0), h.P, 1})) {}
  static TensorView<const T, 2> columns(const TensorView<const T, 2>& projected, std::int64_t first,
                                        std::int64_t count) {
    return make_view<const T>(projected.data_handle() + first, Shape<2>{projected.extent(0), count},
                              Shape<2>{projected.stride(0), 1});
  }
};

template <class S>
struct Answer {
  Array<S, 3> out, window;
  Array<S, 4> state;
};

template <class S>
Answer<S> reference_answer(const Inputs& in, const Batch& batch, const Question& question,
                           const StoragePoints& storage, Format window) {
  const Heads& h = in.heads;
  Answer<S> answer{Array<S, 3>(Shape<3>{batch.tokens, h.H, h.P}), cast<S>(in.window),
                   cast<S>(in.state)};
  const auto projected = cast<S>(in.projected), weight = cast<S>(in.weight);
  const auto bias = cast<S>(in.bias), A = cast<S>(in.A), D = cast<S>(in.D);
  const auto dt_bias = cast<S>(in.dt_bias), norm_weight = cast<S>(in.norm_weight);
  const Parts<S> parts(projected, h);
  reference::Mamba2MixerDecode<S> mixer{.x = parts.x,
                                        .z = parts.z,
                                        .dt = parts.dt,
                                        .conv_weight = weight,
                                        .A = A,
                                        .D = D,
                                        .dt_bias = dt_bias,
                                        .norm_weight = norm_weight,
                                        .slots = batch.host(),
                                        .storage = storage,
                                        .window = window};
  if (question.with_bias) mixer.conv_bias = bias.view();
  reference::mamba2_mixer_decode<S>(mixer, answer.window.view(), answer.state.view(),
                                    answer.out.view());
  return answer;
}

/// Inputs and results on the device.
template <class S>
struct Device {
  Device(const Inputs& in, const Batch& batch, const Question& question)
      : question(question),
        heads(in.heads),
        indices(batch),
        projected(in.projected),
        x(contiguous(Parts<double>(in.projected, heads).x)),
        z(contiguous(Parts<double>(in.projected, heads).z)),
        dt(contiguous(Parts<double>(in.projected, heads).dt)),
        weight(in.weight),
        wide_weight(in.weight),
        bias(in.bias),
        A(in.A),
        D(in.D),
        dt_bias(in.dt_bias),
        norm_weight(in.norm_weight),
        wide_norm_weight(in.norm_weight),
        window(turned_if(question.channels_contiguous, in.window)),
        state(in.state),
        mixed(x.shape()),
        y(z.shape()),
        out(z.shape()) {}

  TensorView<Bf16, 3> windows() {
    return question.channels_contiguous ? transposed(window.view()) : window.view();
  }
  kernels::MixedView<2> weights() const {
    return question.float_weights ? kernels::MixedView<2>(wide_weight.view())
                                  : kernels::MixedView<2>(weight.view());
  }
  kernels::MixedView<1> norm_weights() const {
    return question.float_weights ? kernels::MixedView<1>(wide_norm_weight.view())
                                  : kernels::MixedView<1>(norm_weight.view());
  }
  kernels::Mamba2MixerDecode<S> arguments() {
    kernels::Mamba2MixerDecode<S> in{.x = std::as_const(x).view(),
                                     .z = std::as_const(z).view(),
                                     .dt = dt.view(),
                                     .conv_state = windows(),
                                     .state = state.view(),
                                     .conv_weight = weights(),
                                     .A = A.view(),
                                     .D = D.view(),
                                     .dt_bias = dt_bias.view(),
                                     .norm_weight = norm_weights(),
                                     .out = out.view(),
                                     .slots = indices.slots(),
                                     .parts = question.parts};
    if (question.strided) {
      const Parts<Bf16> parts(std::as_const(projected).view(), heads);
      in.x = parts.x;
      in.z = parts.z;
      in.dt = parts.dt;
    }
    if (question.with_bias) in.conv_bias = bias.view();
    return in;
  }
  void launch(cudaStream_t stream = nullptr) {
    kernels::mamba2_mixer_decode<S>(arguments(), stream);
  }
  void run() {
    launch();
    finish();
  }
  /// The same by the launches that there were before.
  void run_apart() {
    const std::int64_t T = x.shape()[0], channels = heads.channels(), inner = heads.inner();
    const std::int64_t H = heads.H, G = heads.G, P = heads.P, N = heads.N;
    kernels::CausalConv1dUpdate<Bf16, Bf16> conv{.x = std::as_const(x).view(),
                                                 .conv_state = windows(),
                                                 .weight = weights(),
                                                 .out = mixed.view(),
                                                 .silu = true,
                                                 .slots = indices.slots()};
    if (question.with_bias) conv.bias = bias.view();
    kernels::causal_conv1d_update<Bf16, Bf16>(conv, nullptr);
    const auto part = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
      return make_view(std::as_const(mixed).data() + first, Shape<3>{T, count, width},
                       Shape<3>{channels, width, 1});
    };
    kernels::selective_state_update<Bf16, S>({.x = part(0, H, P),
                                              .dt = repeat(std::as_const(dt).view(), P),
                                              .A = repeat(repeat(std::as_const(A).view(), P), N),
                                              .B = part(inner, G, N),
                                              .C = part(inner + G * N, G, N),
                                              .state = state.view(),
                                              .out = y.view(),
                                              .D = repeat(std::as_const(D).view(), P),
                                              .dt_bias = repeat(std::as_const(dt_bias).view(), P),
                                              .dt_softplus = true,
                                              .slots = indices.slots()},
                                             nullptr);
    const auto flat = [&](auto* data) { return make_view(data, Shape<2>{T, inner}); };
    kernels::gated_rms_norm<Bf16>({.x = flat(std::as_const(y).data()),
                                   .gate = flat(std::as_const(z).data()),
                                   .weight = norm_weights(),
                                   .eps = 1e-5f,
                                   .out = flat(out.data()),
                                   .gate_before_norm = true,
                                   .groups = G},
                                  nullptr);
    finish();
  }

  Question question;
  Heads heads;
  DeviceBatch indices;
  DeviceTensor<Bf16, 2> projected, x;
  DeviceTensor<Bf16, 3> z;
  DeviceTensor<Bf16, 2> dt, weight;
  DeviceTensor<float, 2> wide_weight;
  DeviceTensor<Bf16, 1> bias;
  DeviceTensor<float, 1> A, D, dt_bias;
  DeviceTensor<Bf16, 1> norm_weight;
  DeviceTensor<float, 1> wide_norm_weight;
  DeviceTensor<Bf16, 3> window;
  DeviceTensor<S, 4> state;
  DeviceTensor<Bf16, 2> mixed;
  DeviceTensor<Bf16, 3> y, out;
};

template <class S>
void expect_agreement(const Heads& heads, const Batch& batch, const Question& question,
                      std::uint64_t seed) {
  const Inputs in(batch, heads, seed);
  const auto truth = reference_answer<double>(in, batch, question, {}, Format::exact);
  const auto yardstick =
      reference_answer<float>(in, batch, question, storage_of<Bf16, S>(), Format::bf16);
  Device<S> device(in, batch, question);
  device.run();
  SCOPED_TRACE(kernels::last_launch.text());
  EXPECT_TRUE(within_yardstick(kOperation, "out", device.out, yardstick.out, truth.out));
  EXPECT_TRUE(within_yardstick(kOperation, "state", device.state, yardstick.state, truth.state));
  EXPECT_TRUE(device.window.guards_intact());
  EXPECT_TRUE(
      same_bits(turned_if(question.channels_contiguous, device.window.host()), yardstick.window))
      << "a window is moved, never computed";
}

template <class S>
std::string expect_the_launches_bits(const Heads& heads, const Batch& batch,
                                     const Question& question, std::uint64_t seed) {
  const Inputs in(batch, heads, seed);
  return expect_the_steps_bits(Device<S>(in, batch, question), Device<S>(in, batch, question),
                               batch);
}

template <class S>
class Mamba2MixerDecodeGpu : public GpuTest {};
using StateTypes = ::testing::Types<float, Bf16>;
TYPED_TEST_SUITE(Mamba2MixerDecodeGpu, StateTypes);

// Parts of Nemotron-H, Nemotron-3-Nano, Nemotron-Nano-v2 and Falcon-H1, one group for all heads,
// and heads that not every number of blocks divides; parts of Nemotron-H-56B and Falcon-H1-34B with
// N of 256, of Zamba2 and Falcon-H1-Tiny with N of 64.
const std::vector<Heads> kHeads{{16, 1},         {16, 2},       {12, 1, 80},      {8, 1, 128},
                                {14, 1},         {4, 4, 32},    {16, 2, 64, 256}, {4, 1, 128, 256},
                                {12, 1, 64, 64}, {8, 2, 32, 64}};

TYPED_TEST(Mamba2MixerDecodeGpu, aStepIsTheReferences) {
  for (const Heads& heads : kHeads)
    for (const std::int64_t rows : {1, 5})
      expect_agreement<TypeParam>(heads, Batch::draw(rows, rows, 1, false),
                                  {.with_bias = rows == 5,
                                   .channels_contiguous = heads.G != 2,
                                   .float_weights = heads.P == 128,
                                   .strided = heads.P == 64},
                                  rows);
  expect_agreement<TypeParam>({128, 8}, Batch::draw(3, 3, 1, false), {}, 3);
}

TYPED_TEST(Mamba2MixerDecodeGpu, oneLaunchHasTheBitsOfThree) {
  for (const Heads& heads : {Heads{128, 8}, Heads{64, 8}, Heads{32, 2}})
    for (const std::int64_t rows : {1, 5})
      expect_the_launches_bits<TypeParam>(heads, Batch::draw(rows, rows, 1, false), {}, rows);
  for (const Heads& heads : kHeads)
    for (const bool usual : {false, true})
      expect_the_launches_bits<TypeParam>(heads, Batch::draw(7, 7, 1, false),
                                          {.with_bias = usual,
                                           .channels_contiguous = usual,
                                           .float_weights = !usual,
                                           .strided = !usual},
                                          7);
}

// x, z and dt lie where in_proj leaves them, also at odd addresses.
TYPED_TEST(Mamba2MixerDecodeGpu, partsOfAProjectionAreTakenAsTheyLie) {
  for (const Heads& heads : {Heads{16, 2}, Heads{14, 1}, Heads{3, 1}})
    expect_the_launches_bits<TypeParam>(heads, Batch::draw(4, 4, 1, false), {.strided = true}, 4);
}

// Groups are divided by their number in all rows. Each division is held to the bits of three
// launches, and is the one that is meant.
TYPED_TEST(Mamba2MixerDecodeGpu, everyBatchSizeIsServedByItsKernel) {
  const auto expect_kernel = [](const Heads& heads, std::int64_t rows, const std::string& kernel) {
    const Batch batch = Batch::draw(rows, rows, 1, false);
    const std::string launched = expect_the_launches_bits<TypeParam>(heads, batch, {}, rows);
    EXPECT_EQ(launched, kernel + " 2x8") << rows << " rows";
  };
  for (const std::int64_t rows : {1, 2}) expect_kernel({32, 2}, rows, "sixteenths");
  for (const std::int64_t rows : {3, 4}) expect_kernel({32, 2}, rows, "eighths");
  for (const std::int64_t rows : {5, 8, 9, 12}) expect_kernel({32, 2}, rows, "quarters");
  for (const std::int64_t rows : {13, 33}) expect_kernel({32, 2}, rows, "halves");
  for (const std::int64_t rows : {34, 66, 67, 200}) expect_kernel({32, 2}, rows, "whole");
  for (const std::int64_t rows : {9, 17}) expect_kernel({128, 8}, rows, "whole");
  expect_kernel({14, 1}, 1, "sixteenths");
  expect_kernel({3, 1}, 1, "eighths");
  expect_kernel({2, 2, 16}, 1, "halves");  // two tiles of 8 channels
}

// However a group's channels are divided among blocks, and whoever writes the windows that all of
// them read.
TYPED_TEST(Mamba2MixerDecodeGpu, theBitsDoNotDependOnTheParts) {
  for (const Heads& heads : kHeads)
    for (const int parts : {1, 2, 4, 8, 16})
      for (const std::int64_t rows : {1, 5})
        if (heads.H / heads.G * heads.P % (parts * std::max<std::int64_t>(8, 1024 / heads.N)) == 0)
          expect_the_launches_bits<TypeParam>(heads, Batch::draw(rows, rows, 1, false),
                                              {.parts = parts}, parts);
  // More groups than there is room for at once, with padded rows among them.
  for (const int parts : {1, 2, 4})
    expect_the_launches_bits<TypeParam>({4, 4, 32}, Batch::draw(9, 150, 1, false), {.parts = parts},
                                        parts);
}

TYPED_TEST(Mamba2MixerDecodeGpu, aCapturedStepIsReplayedForOtherSlots) {
  expect_replays_follow_the_slots([](const Batch& batch, std::uint64_t seed) {
    return Device<TypeParam>(Inputs(batch, {16, 2}, seed), batch, {});
  });
}

TYPED_TEST(Mamba2MixerDecodeGpu, stepsBehindEachOtherWait) {
  expect_steps_wait([](const Batch& batch, int parts) {
    return Device<TypeParam>(Inputs(batch, {16, 2}, 3), batch, {.parts = parts});
  });
}

/// The complaint about a call with this change to arguments of one row.
template <class Change>
std::string complaint_about(Change change) {
  constexpr std::int64_t kChannels = 512;
  kernels::Mamba2MixerDecode<float> in{.x = unread<const Bf16, 2>({1, kChannels}),
                                       .z = unread<const Bf16, 3>({1, 4, 64}),
                                       .dt = unread<const Bf16, 2>({1, 4}),
                                       .conv_state = unread<Bf16, 3>({3, kChannels, 3}),
                                       .state = unread<float, 4>({3, 4, 64, kColumns}),
                                       .conv_weight = unread<const Bf16, 2>({kChannels, 4}),
                                       .A = unread<const float, 1>({4}),
                                       .D = unread<const float, 1>({4}),
                                       .dt_bias = unread<const float, 1>({4}),
                                       .norm_weight = unread<const Bf16, 1>({256}),
                                       .out = unread<Bf16, 3>({1, 4, 64})};
  change(in);
  return complaint_of([&] { kernels::mamba2_mixer_decode<float>(in, nullptr); });
}

TEST(Mamba2MixerDecodeArguments, areRefusedByName) {
  using In = kernels::Mamba2MixerDecode<float>;
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint_about([](In& in) {
                in.state = unread<float, 4>({3, 4, 64, 96});
              }),
              HasSubstr("state is expected to be [slots, H, P, N] with N of 64, 128 or 256, P a "
                        "multiple of 16 up to 128; got [3, 4, 64, 96]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.state = unread<float, 4>({3, 4, 72, kColumns});
              }),
              HasSubstr("got [3, 4, 72, 128]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.x = unread<const Bf16, 2>({1, 500});
              }),
              HasSubstr("x is expected to be [T, H P + 2 G N] with H a multiple of G"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.x = unread<const Bf16, 2>({1, 256 + 3 * 256});
              }),
              HasSubstr("x is expected to be [T, H P + 2 G N] with H a multiple of G"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.state = unread<float, 4>({3, 132, 64, kColumns});
                in.x = unread<const Bf16, 2>({1, 132 * 64 + 256});
              }),
              HasSubstr("state is expected to be of at most 2048 channels for a group"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.z = unread<const Bf16, 3>({2, 4, 64});
              }),
              HasSubstr("z is expected to be [T, H, P] = [1, 4, 64]; got [2, 4, 64]"));
  EXPECT_THAT(complaint_about([](In& in) { in.z = transposed(in.z); }), HasSubstr("z is expected"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.z = unread<const Bf16, 3>({1, 4, 64}, {512, 128, 1});
              }),
              HasSubstr("z is expected to be of heads that lie without gaps"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.conv_state = unread<Bf16, 3>({3, 512, 4});
              }),
              HasSubstr("conv_state is expected to be [slots, H P + 2 G N, 3] = [3, 512, 3]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.conv_weight = unread<const Bf16, 2>({512, 3});
              }),
              HasSubstr("conv_weight is expected to be [H P + 2 G N, 4]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.state = transposed(unread<float, 4>({3, 4, kColumns, 64}));
              }),
              HasSubstr("state is expected to be of heads that lie without gaps"));
  EXPECT_THAT(complaint_about([](In& in) { in.parts = 3; }),
              HasSubstr("parts is expected to be 0, 1, 2, 4, 8 or 16; got 3"));
  EXPECT_THAT(complaint_about([](In& in) { in.A = unread<const float, 1>({3}); }),
              HasSubstr("A is expected to be [H] = [4]; got [3]"));
  EXPECT_THAT(complaint_about([](In& in) { in.D = {}; }), HasSubstr("D is expected to be [H]"));
  EXPECT_THAT(complaint_about([](In& in) { in.norm_weight = unread<const Bf16, 1>({64}); }),
              HasSubstr("norm_weight is expected to be [H P] = [256]; got [64]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.slots.out_indices = in.slots.indices = unread<const std::int32_t, 1>({1});
              }),
              HasSubstr("state_indices is expected to be [T], without other slots to write to"));
}

}  // namespace
}  // namespace lockstep
