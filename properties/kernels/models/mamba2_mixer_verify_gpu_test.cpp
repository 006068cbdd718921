// The kernel of mamba2_mixer_verify against the reference of the same name, and against the three
// launches that it replaces.
#include "kernels/models/mamba2_mixer_verify.hpp"

#include <gmock/gmock.h>

#include "kernels/layers/rms_norm.hpp"
#include "kernels/recurrent/causal_conv1d_update.hpp"
#include "kernels/recurrent/selective_state_update.hpp"
#include "properties/kernels/models/verification.hpp"
#include "reference/recurrent/mamba2_mixer_verify.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;

constexpr const char* kOperation = "mamba2_mixer_verify";
constexpr std::int64_t kColumns = 128;

struct Heads {
  std::int64_t H, G, P = 64;
  std::int64_t inner() const { return H * P; }
  std::int64_t channels() const { return H * P + 2 * G * kColumns; }
};

struct Question {
  bool with_bias = true;
  bool channels_contiguous = true;  ///< of windows
  bool float_weights = false;       ///< of the convolution and the norm
  bool strided = false;             ///< x, z and dt are parts of one tensor, as in_proj leaves them
  std::int64_t spare_columns = 0;   ///< of windows, beyond those of the table
  int parts = 0;
};

struct Inputs {
  Inputs(const Batch& batch, const Heads& h, const Question& question, std::uint64_t seed)
      : heads(h),
        projected(draw<2>({batch.tokens, h.inner() + h.channels() + h.H}, seed, 1)),
        weight(draw<2>({h.channels(), 4}, seed, 2)),
        bias(draw<1>({h.channels()}, seed, 3)),
        A(draw<1>({h.H}, seed, 4)),
        D(draw<1>({h.H}, seed, 5)),
        dt_bias(draw<1>({h.H}, seed, 6)),
        norm_weight(draw<1>({h.inner()}, seed, 7)),
        window(draw<3>({batch.slots, h.channels(), 2 + batch.columns + question.spare_columns},
                       seed, 8)),
        state(draw<4>({batch.slots, h.H, h.P, kColumns}, seed, 9)) {
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
  reference::mamba2_mixer_verify<S>(mixer, batch.starts.view(), answer.window.view(),
                                    answer.state.view(), answer.out.view());
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
    kernels::mamba2_mixer_verify<S>(arguments(), indices.starts.view(), stream);
  }
  void run() {
    launch();
    finish();
  }
  /// The same by the launches apart.
  void run_apart() {
    const std::int64_t T = x.shape()[0], channels = heads.channels(), inner = heads.inner();
    const std::int64_t H = heads.H, G = heads.G, P = heads.P, N = kColumns;
    kernels::CausalConv1dUpdate<Bf16, Bf16> conv{.x = std::as_const(x).view(),
                                                 .conv_state = windows(),
                                                 .weight = weights(),
                                                 .out = mixed.view(),
                                                 .silu = true,
                                                 .slots = indices.slots(),
                                                 .query_start_loc = indices.starts.view()};
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
                                              .slots = indices.slots(),
                                              .query_start_loc = indices.starts.view()},
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
  const Inputs in(batch, heads, question, seed);
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
  const Inputs in(batch, heads, question, seed);
  return expect_the_launches_bits(Device<S>(in, batch, question), Device<S>(in, batch, question),
                                  batch);
}

template <class S>
class Mamba2MixerVerifyGpu : public GpuTest {};
using StateTypes = ::testing::Types<float, Bf16>;
TYPED_TEST_SUITE(Mamba2MixerVerifyGpu, StateTypes);

// Parts of Nemotron-H, Nemotron-3-Nano, Nemotron-Nano-v2 and Falcon-H1, one group for all heads,
// and heads that not every number of blocks divides.
const std::vector<Heads> kHeads{{16, 1}, {16, 2}, {12, 1, 80}, {16, 1, 128}, {14, 1}, {4, 4, 32}};

TYPED_TEST(Mamba2MixerVerifyGpu, aVerificationIsTheReferences) {
  for (const Heads& heads : kHeads) {
    const std::int64_t columns = heads.P == 64 ? 8 : heads.P == 32 ? 2 : 4;
    expect_agreement<TypeParam>(heads,
                                Batch::draw(static_cast<std::uint64_t>(columns), 3, columns, true),
                                {.with_bias = heads.G == 1,
                                 .channels_contiguous = heads.G != 2,
                                 .float_weights = heads.P == 128,
                                 .strided = heads.P == 64,
                                 .spare_columns = columns == 8 ? 2 : 0},
                                static_cast<std::uint64_t>(columns));
  }
}

TYPED_TEST(Mamba2MixerVerifyGpu, oneLaunchHasTheBitsOfThree) {
  expect_the_launches_bits<TypeParam>({128, 8}, Batch::draw(3, 3, 4, true), {}, 1);
  for (const std::int64_t columns : {1, 2, 3, 4, 5, 8})
    for (const std::int64_t rows : {1, 5})
      expect_the_launches_bits<TypeParam>(
          {32, 2},
          Batch::draw(static_cast<std::uint64_t>(10 * rows + columns), rows, columns, true), {}, 1);
  for (const Heads& heads : kHeads)
    for (const bool usual : {false, true})
      expect_the_launches_bits<TypeParam>(heads, Batch::draw(7, 4, usual ? 4 : 6, true),
                                          {.with_bias = usual,
                                           .channels_contiguous = usual,
                                           .float_weights = !usual,
                                           .strided = !usual,
                                           .spare_columns = usual ? 0 : 1},
                                          7);
}

// x, z and dt lie where in_proj leaves them, also at odd addresses.
TYPED_TEST(Mamba2MixerVerifyGpu, partsOfAProjectionAreTakenAsTheyLie) {
  for (const Heads& heads : {Heads{16, 2}, Heads{14, 1}, Heads{3, 1}})
    expect_the_launches_bits<TypeParam>(heads, Batch::draw(4, 4, 4, true), {.strided = true}, 4);
}

// Groups are divided by their number in all rows, and tiles of states have 16 rows where that
// pays. Each kernel is held to the bits of three launches, and is the one that is meant.
TYPED_TEST(Mamba2MixerVerifyGpu, everyBatchSizeIsServedByItsKernel) {
  const auto expect_kernel = [](const Heads& heads, std::int64_t rows, std::int64_t columns,
                                const std::string& kernel) {
    const Batch batch = Batch::draw(static_cast<std::uint64_t>(rows), rows, columns, true);
    EXPECT_EQ(expect_the_launches_bits<TypeParam>(heads, batch, {}, 1), kernel) << rows << " rows";
  };
  const std::string of_many = std::is_same_v<TypeParam, float> ? "2" : "4";
  for (const std::int64_t rows : {1, 2}) expect_kernel({32, 2}, rows, 4, "sixteenths 4x2");
  for (const std::int64_t rows : {3, 4}) expect_kernel({32, 2}, rows, 5, "eighths 8x4");
  for (const std::int64_t rows : {5, 12}) expect_kernel({32, 2}, rows, 2, "quarters 4x4");
  for (const std::int64_t rows : {13, 20}) expect_kernel({32, 2}, rows, 4, "thirds 4x4");
  for (const std::int64_t rows : {21, 33}) expect_kernel({32, 2}, rows, 3, "halves 4x4");
  for (const std::int64_t rows : {34, 70}) expect_kernel({32, 2}, rows, 5, "halves 8x" + of_many);
  expect_kernel({64, 8, 16}, 33, 8, "whole 8x" + of_many);
  expect_kernel({16, 16, 16}, 17, 2, "whole 4x2");  // a warp has a tile of 8 rows, others have none
  expect_kernel({3, 1}, 1, 3, "eighths 4x2");
  expect_kernel({2, 2, 16}, 1, 3, "halves 4x2");  // two tiles of 8 channels
}

// However a group's channels are divided among blocks, whoever norms a token, and whoever writes
// the windows that all of them read.
TYPED_TEST(Mamba2MixerVerifyGpu, theBitsDoNotDependOnTheParts) {
  for (const Heads& heads : kHeads)
    for (const int parts : {1, 2, 3, 4, 8, 16})
      if (parts == 3 || heads.H / heads.G * heads.P / 8 % parts == 0)
        expect_the_launches_bits<TypeParam>(
            heads, Batch::draw(static_cast<std::uint64_t>(parts), 3, parts == 2 ? 8 : 3, true),
            {.parts = parts}, 1);
}

// A verification of one token of each row is a decode.
TYPED_TEST(Mamba2MixerVerifyGpu, oneTokenOfEachRowIsADecode) {
  Batch batch = Batch::draw(6, 6, 1, true);
  const Inputs in(batch, {16, 2}, {}, 1);
  Device<TypeParam> verified(in, batch, {});
  batch.columns = 0;
  Device<TypeParam> decoded(in, batch, {});
  verified.run();
  kernels::mamba2_mixer_decode<TypeParam>(decoded.arguments(), nullptr);
  finish();
  EXPECT_TRUE(same_bits(verified.out, decoded.out));
  EXPECT_TRUE(same_bits(verified.state, decoded.state));
  EXPECT_TRUE(same_bits(verified.window, decoded.window));
}

TYPED_TEST(Mamba2MixerVerifyGpu, aRowOfMoreTokensThanColumnsLeavesNothing) {
  expect_longer_rows_leave_nothing([](const Batch& batch) {
    return Device<TypeParam>(Inputs(batch, {4, 1}, {}, 1), batch, {});
  });
}

TYPED_TEST(Mamba2MixerVerifyGpu, aCapturedVerificationIsReplayedForOtherCounts) {
  expect_replays_follow_the_counts(
      [](const Batch& batch, std::uint64_t seed) {
        return Device<TypeParam>(Inputs(batch, {16, 2}, {}, seed), batch, {});
      },
      [](Device<TypeParam> & device) -> auto& { return device.x; });
}

TYPED_TEST(Mamba2MixerVerifyGpu, verificationsBehindEachOtherWait) {
  expect_verifications_wait([](const Batch& batch, int parts) {
    return Device<TypeParam>(Inputs(batch, {16, 2}, {}, 3), batch, {.parts = parts});
  });
}

/// The complaint about a call with this change to arguments of one row of two tokens.
template <class Change>
std::string complaint_about(Change change) {
  constexpr std::int64_t kChannels = 512;
  kernels::Mamba2MixerDecode<float> in{.x = unread<const Bf16, 2>({2, kChannels}),
                                       .z = unread<const Bf16, 3>({2, 4, 64}),
                                       .dt = unread<const Bf16, 2>({2, 4}),
                                       .conv_state = unread<Bf16, 3>({3, kChannels, 4}),
                                       .state = unread<float, 4>({3, 4, 64, kColumns}),
                                       .conv_weight = unread<const Bf16, 2>({kChannels, 4}),
                                       .A = unread<const float, 1>({4}),
                                       .D = unread<const float, 1>({4}),
                                       .dt_bias = unread<const float, 1>({4}),
                                       .norm_weight = unread<const Bf16, 1>({256}),
                                       .out = unread<Bf16, 3>({2, 4, 64})};
  in.slots.table = unread<const std::int32_t, 2>({1, 2});
  in.slots.num_accepted = unread<const std::int32_t, 1>({1});
  change(in);
  return complaint_of([&] {
    kernels::mamba2_mixer_verify<float>(in, unread<const std::int32_t, 1>({2}), nullptr);
  });
}

TEST(Mamba2MixerVerifyArguments, areRefusedByName) {
  using In = kernels::Mamba2MixerDecode<float>;
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint_about([](In& in) {
                in.state = unread<float, 4>({3, 4, 64, 64});
              }),
              HasSubstr("state is expected to be [slots, H, P, 128] with P a multiple of 16 up to "
                        "128; got [3, 4, 64, 64]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.x = unread<const Bf16, 2>({2, 256 + 3 * 256});
              }),
              HasSubstr("x is expected to be [T, H P + 2 G 128] with H a multiple of G"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.state = unread<float, 4>({3, 132, 64, kColumns});
                in.x = unread<const Bf16, 2>({2, 132 * 64 + 256});
              }),
              HasSubstr("state is expected to be of at most 2048 channels for a group"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.z = unread<const Bf16, 3>({1, 4, 64});
              }),
              HasSubstr("z is expected to be [T, H, P] = [2, 4, 64]; got [1, 4, 64]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.z = unread<const Bf16, 3>({2, 4, 64}, {512, 128, 1});
              }),
              HasSubstr("z is expected to be of heads that lie without gaps"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.conv_state = unread<Bf16, 3>({3, 512, 3});
              }),
              HasSubstr("C of at least 2 + the columns of state_indices; got C = 3 for 2 columns"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.slots.table = unread<const std::int32_t, 2>({1, 9});
              }),
              HasSubstr("state_indices is expected to be [N, 1 + drafts] of at most 8 columns"));
  EXPECT_THAT(complaint_about([](In& in) { in.slots.num_accepted.reset(); }),
              HasSubstr("state_indices and num_accepted_tokens is expected to be a table and"));
  EXPECT_THAT(
      complaint_about([](In& in) { in.slots.num_accepted = unread<const std::int32_t, 1>({2}); }),
      HasSubstr("num_accepted_tokens is expected to be [N] = [1]; got [2]"));
  EXPECT_THAT(complaint_about([](In& in) { in.state = transposed(in.state); }),
              HasSubstr("state is expected to be [slots, H, P, 128]"));
  EXPECT_THAT(complaint_about([](In& in) { in.parts = 5; }),
              HasSubstr("parts is expected to be 0, 1, 2, 3, 4, 8 or 16; got 5"));
  EXPECT_THAT(complaint_about([](In& in) { in.norm_weight = unread<const Bf16, 1>({64}); }),
              HasSubstr("norm_weight is expected to be [H P] = [256]; got [64]"));
}

}  // namespace
}  // namespace lockstep
