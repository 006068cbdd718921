// The kernel of gated_delta_net_decode against the reference of the same name, and against the
// three launches that it replaces.
#include "kernels/models/gated_delta_net_decode.hpp"

#include <gmock/gmock.h>

#include "kernels/layers/rms_norm.hpp"
#include "kernels/recurrent/causal_conv1d_update.hpp"
#include "kernels/recurrent/gated_delta_rule_update.hpp"
#include "properties/kernels/models/step.hpp"
#include "reference/recurrent/gated_delta_net_decode.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using kernels::Bf16;
using kernels::DeviceTensor;

constexpr const char* kOperation = "gated_delta_net_decode";
constexpr std::int64_t K = 128, V = 128;

struct Heads {
  std::int64_t H, HV;
  std::int64_t channels() const { return 2 * H * K + HV * V; }
};

struct Question {
  bool with_bias = false;
  bool channels_contiguous = true;  ///< of windows
  bool float_weights = false;       ///< of the convolution
  int parts = 0;
};

struct Inputs {
  Inputs(const Batch& batch, const Heads& h, std::uint64_t seed)
      : x(draw<2>({batch.tokens, h.channels()}, seed, 1)),
        z(draw<3>({batch.tokens, h.HV, V}, seed, 2)),
        a(draw<2>({batch.tokens, h.HV}, seed, 3)),
        b(draw<2>({batch.tokens, h.HV}, seed, 4)),
        weight(draw<2>({h.channels(), 4}, seed, 5)),
        bias(draw<1>({h.channels()}, seed, 6)),
        A_log(draw<1>({h.HV}, seed, 7)),
        dt_bias(draw<1>({h.HV}, seed, 8)),
        norm_weight(draw<1>({V}, seed, 9)),
        window(draw<3>({batch.slots, h.channels(), 3}, seed, 10)),
        state(draw<4>({batch.slots, h.HV, V, K}, seed, 11)) {}

  Array<double, 2> x;
  Array<double, 3> z;
  Array<double, 2> a, b, weight;
  Array<double, 1> bias, A_log, dt_bias, norm_weight;
  Array<double, 3> window;
  Array<double, 4> state;
};

template <class S>
struct Answer {
  Array<S, 3> out, window;
  Array<S, 4> state;
};

template <class S>
Answer<S> reference_answer(const Inputs& in, const Batch& batch, const Question& question,
                           const StoragePoints& storage, Format window) {
  Answer<S> answer{Array<S, 3>(in.z.shape()), cast<S>(in.window), cast<S>(in.state)};
  const auto x = cast<S>(in.x), a = cast<S>(in.a), b = cast<S>(in.b), weight = cast<S>(in.weight);
  const auto z = cast<S>(in.z);
  const auto bias = cast<S>(in.bias), A_log = cast<S>(in.A_log), dt_bias = cast<S>(in.dt_bias);
  const auto norm_weight = cast<S>(in.norm_weight);
  reference::GatedDeltaNetDecode<S> net{.x = x,
                                        .z = z,
                                        .a = a,
                                        .b = b,
                                        .conv_weight = weight,
                                        .A_log = A_log,
                                        .dt_bias = dt_bias,
                                        .norm_weight = norm_weight,
                                        .slots = batch.host(),
                                        .storage = storage,
                                        .window = window};
  if (question.with_bias) net.conv_bias = bias.view();
  reference::gated_delta_net_decode<S>(net, answer.window.view(), answer.state.view(),
                                       answer.out.view());
  return answer;
}

/// Inputs and results on the device.
template <class S>
struct Device {
  Device(const Inputs& in, const Batch& batch, const Question& question)
      : question(question),
        indices(batch),
        x(in.x),
        z(in.z),
        a(in.a),
        b(in.b),
        weight(in.weight),
        wide_weight(in.weight),
        bias(in.bias),
        A_log(in.A_log),
        dt_bias(in.dt_bias),
        norm_weight(in.norm_weight),
        window(turned_if(question.channels_contiguous, in.window)),
        state(in.state),
        mixed(in.x.shape()),
        o(in.z.shape()),
        out(in.z.shape()) {}

  TensorView<Bf16, 3> windows() {
    return question.channels_contiguous ? transposed(window.view()) : window.view();
  }
  kernels::MixedView<2> weights() const {
    return question.float_weights ? kernels::MixedView<2>(wide_weight.view())
                                  : kernels::MixedView<2>(weight.view());
  }
  kernels::GatedDeltaNetDecode<S> arguments() {
    kernels::GatedDeltaNetDecode<S> in{.x = std::as_const(x).view(),
                                       .z = std::as_const(z).view(),
                                       .a = a.view(),
                                       .b = b.view(),
                                       .conv_state = windows(),
                                       .state = state.view(),
                                       .conv_weight = weights(),
                                       .A_log = A_log.view(),
                                       .dt_bias = dt_bias.view(),
                                       .norm_weight = norm_weight.view(),
                                       .out = out.view(),
                                       .slots = indices.slots(),
                                       .parts = question.parts};
    if (question.with_bias) in.conv_bias = bias.view();
    return in;
  }
  void launch(cudaStream_t stream = nullptr) {
    kernels::gated_delta_net_decode<S>(arguments(), stream);
  }
  void run() {
    launch();
    finish();
  }
  /// The same by the launches that there were before.
  void run_apart() {
    const std::int64_t B = x.shape()[0], D = x.shape()[1], HV = z.shape()[1];
    kernels::CausalConv1dUpdate<Bf16, Bf16> conv{.x = std::as_const(x).view(),
                                                 .conv_state = windows(),
                                                 .weight = weights(),
                                                 .out = mixed.view(),
                                                 .silu = true,
                                                 .slots = indices.slots()};
    if (question.with_bias) conv.bias = bias.view();
    kernels::causal_conv1d_update<Bf16, Bf16>(conv, nullptr);
    const std::int64_t H = (D - HV * V) / (2 * K);
    const auto heads = [&](std::int64_t first, std::int64_t count) {
      return make_view(std::as_const(mixed).data() + first, Shape<3>{B, count, K},
                       Shape<3>{D, K, 1});
    };
    kernels::gated_delta_rule_update<Bf16, S>({.tokens = {.q = heads(0, H),
                                                          .k = heads(H * K, H),
                                                          .v = heads(2 * H * K, HV),
                                                          .g = a.view(),
                                                          .beta = b.view(),
                                                          .query_start_loc = {}},
                                               .state = state.view(),
                                               .out = o.view(),
                                               .slots = indices.slots(),
                                               .A_log = A_log.view(),
                                               .dt_bias = dt_bias.view(),
                                               .use_qk_l2norm = true},
                                              nullptr);
    const auto flat = [&](auto* data) { return make_view(data, Shape<2>{B * HV, V}); };
    kernels::gated_rms_norm<Bf16>({.x = flat(std::as_const(o).data()),
                                   .gate = flat(std::as_const(z).data()),
                                   .weight = norm_weight.view(),
                                   .eps = 1e-6f,
                                   .out = flat(out.data())},
                                  nullptr);
    finish();
  }

  Question question;
  DeviceBatch indices;
  DeviceTensor<Bf16, 2> x;
  DeviceTensor<Bf16, 3> z;
  DeviceTensor<Bf16, 2> a, b, weight;
  DeviceTensor<float, 2> wide_weight;
  DeviceTensor<Bf16, 1> bias;
  DeviceTensor<float, 1> A_log, dt_bias;
  DeviceTensor<Bf16, 1> norm_weight;
  DeviceTensor<Bf16, 3> window;
  DeviceTensor<S, 4> state;
  DeviceTensor<Bf16, 2> mixed;
  DeviceTensor<Bf16, 3> o, out;
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
class GatedDeltaNetDecodeGpu : public GpuTest {};
using StateTypes = ::testing::Types<float, Bf16>;
TYPED_TEST_SUITE(GatedDeltaNetDecodeGpu, StateTypes);

// Qwen3-Next on one GPU and on 2 and 4, and other numbers of value heads for a key head.
const std::vector<Heads> kHeads{{4, 8}, {2, 2}, {1, 3}, {1, 4}, {1, 8}};

TYPED_TEST(GatedDeltaNetDecodeGpu, aStepIsTheReferences) {
  for (const Heads& heads : kHeads)
    for (const std::int64_t rows : {1, 5})
      expect_agreement<TypeParam>(heads, Batch::draw(rows, rows, 1, false),
                                  {.with_bias = rows == 5,
                                   .channels_contiguous = heads.HV != 3,
                                   .float_weights = heads.HV == 4},
                                  rows);
  expect_agreement<TypeParam>({16, 32}, Batch::draw(3, 3, 1, false), {}, 3);
}

TYPED_TEST(GatedDeltaNetDecodeGpu, oneLaunchHasTheBitsOfThree) {
  for (const Heads& heads : {Heads{16, 32}, Heads{8, 16}, Heads{4, 8}})
    for (const std::int64_t rows : {1, 5})
      expect_the_launches_bits<TypeParam>(heads, Batch::draw(rows, rows, 1, false), {}, rows);
  for (const Heads& heads : kHeads)
    for (const bool contiguous : {false, true})
      expect_the_launches_bits<TypeParam>(
          heads, Batch::draw(7, 7, 1, false),
          {.with_bias = true, .channels_contiguous = contiguous, .float_weights = !contiguous}, 7);
}

// Key heads are divided by their number in all rows. Each division is held to the bits of three
// launches, and is the one that is meant.
TYPED_TEST(GatedDeltaNetDecodeGpu, everyBatchSizeIsServedByItsKernel) {
  const auto expect_kernel = [](const Heads& heads, std::int64_t rows, const std::string& kernel) {
    const Batch batch = Batch::draw(rows, rows, 1, false);
    const std::string note = expect_the_launches_bits<TypeParam>(heads, batch, {}, rows);
    EXPECT_EQ(note, kernel + " 2x4") << rows << " rows";
  };
  for (const std::int64_t rows : {1, 2}) expect_kernel({4, 8}, rows, "eighths");
  for (const std::int64_t rows : {3, 8}) expect_kernel({4, 8}, rows, "quarters");
  for (const std::int64_t rows : {9, 32}) expect_kernel({4, 8}, rows, "halves");
  for (const std::int64_t rows : {33, 130}) expect_kernel({4, 8}, rows, "whole");
  for (const std::int64_t rows : {16, 64}) expect_kernel({16, 32}, rows, "whole");
}

// However a key head's values are divided among blocks, and whoever writes the windows that all of
// them read.
TYPED_TEST(GatedDeltaNetDecodeGpu, theBitsDoNotDependOnTheParts) {
  for (const Heads& heads : kHeads)
    for (const int parts : {1, 2, 4, 8})
      for (const std::int64_t rows : {1, 5})
        expect_the_launches_bits<TypeParam>(heads, Batch::draw(rows, rows, 1, false),
                                            {.parts = parts}, parts);
}

TYPED_TEST(GatedDeltaNetDecodeGpu, aCapturedStepIsReplayedForOtherSlots) {
  expect_replays_follow_the_slots([](const Batch& batch, std::uint64_t seed) {
    return Device<TypeParam>(Inputs(batch, {4, 8}, seed), batch, {});
  });
}

TYPED_TEST(GatedDeltaNetDecodeGpu, stepsBehindEachOtherWait) {
  expect_steps_wait([](const Batch& batch, int parts) {
    return Device<TypeParam>(Inputs(batch, {4, 8}, 3), batch, {.parts = parts});
  });
}

/// The complaint about a call with this change to arguments of one row.
template <class Change>
std::string complaint_about(Change change) {
  const std::int64_t D = 512;
  kernels::GatedDeltaNetDecode<float> in{.x = unread<const Bf16, 2>({1, D}),
                                         .z = unread<const Bf16, 3>({1, 2, V}),
                                         .a = unread<const Bf16, 2>({1, 2}),
                                         .b = unread<const Bf16, 2>({1, 2}),
                                         .conv_state = unread<Bf16, 3>({3, D, 3}),
                                         .state = unread<float, 4>({3, 2, V, K}),
                                         .conv_weight = unread<const Bf16, 2>({D, 4}),
                                         .A_log = unread<const float, 1>({2}),
                                         .dt_bias = unread<const float, 1>({2}),
                                         .norm_weight = unread<const Bf16, 1>({V}),
                                         .out = unread<Bf16, 3>({1, 2, V})};
  change(in);
  return complaint_of([&] { kernels::gated_delta_net_decode<float>(in, nullptr); });
}

TEST(GatedDeltaNetDecodeArguments, areRefusedByName) {
  using In = kernels::GatedDeltaNetDecode<float>;
  using ::testing::HasSubstr;
  EXPECT_THAT(complaint_about([](In& in) {
                in.state = unread<float, 4>({3, 2, V, 64});
              }),
              HasSubstr("state is expected to be [slots, HV, 128, 128]; got [3, 2, 128, 64]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.x = unread<const Bf16, 2>({1, 500});
              }),
              HasSubstr("x is expected to be [B, 2 H 128 + HV 128] with HV / H from 1 to 8"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.z = unread<const Bf16, 3>({2, 2, V});
              }),
              HasSubstr("z is expected to be [B, HV, V] = [1, 2, 128]; got [2, 2, 128]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.conv_state = unread<Bf16, 3>({3, 512, 4});
              }),
              HasSubstr("conv_state is expected to be [slots, D, 3] = [3, 512, 3]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.conv_weight = unread<const Bf16, 2>({512, 3});
              }),
              HasSubstr("conv_weight is expected to be [D, 4]"));
  EXPECT_THAT(
      complaint_about([](In& in) { in.state = transposed(in.state); }),
      HasSubstr("state is expected to be of heads that lie without gaps at multiples of 16"));
  EXPECT_THAT(complaint_about([](In& in) { in.parts = 3; }),
              HasSubstr("parts is expected to be 0, 1, 2, 4 or 8; got 3"));
  EXPECT_THAT(complaint_about([](In& in) { in.A_log = unread<const float, 1>({3}); }),
              HasSubstr("A_log is expected to be [HV] = [2]; got [3]"));
  EXPECT_THAT(complaint_about([](In& in) {
                in.slots.out_indices = in.slots.indices = unread<const std::int32_t, 1>({1});
              }),
              HasSubstr("state_indices is expected to be [B], without other slots to write to"));
}

}  // namespace
}  // namespace lockstep
