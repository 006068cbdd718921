// The references of layers' decode steps beside the whole layers.
#include "reference/recurrent/gated_delta_net_verify.hpp"

#include <gtest/gtest.h>

#include "properties/reference/recurrent/hybrid_layers.hpp"
#include "properties/support/laws.hpp"
#include "reference/recurrent/mamba2_mixer_verify.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

/// The layer's step by its projections around the decode.
void run_in_parts(DeltaNetLayer& layer, const TensorView<const double, 2>& hidden,
                  TensorView<double, 2> out) {
  const std::int64_t B = hidden.extent(0), HV = DeltaNetLayer::HV, V = DeltaNetLayer::V;
  const auto p = reference::gated_delta_projections<double>(
      hidden, {DeltaNetLayer::H, HV, DeltaNetLayer::K, V, layer.qkvz, layer.ba, layer.conv,
               layer.A_log, layer.dt_bias, layer.norm, layer.out_proj});
  Array<double, 3> y(Shape<3>{B, HV, V});
  reference::gated_delta_net_decode<double>(
      {.x = p.qkv,
       .z = make_view<const double>(p.z.data(), Shape<3>{B, HV, V}),
       .a = p.a,
       .b = p.b,
       .conv_weight = layer.conv,
       .A_log = layer.A_log,
       .dt_bias = layer.dt_bias,
       .norm_weight = layer.norm},
      layer.conv_state, layer.state, y);
  const auto merged = reference::projected<double>(
      make_view<const double>(y.data(), Shape<2>{B, HV * V}), layer.out_proj);
  mapped(out) = mapped(merged.view());
}

/// Rows of 3, 1, 0 and 2 tokens, the last of them padding, and a token behind them. Of row 0 the
/// step before accepted three tokens, and of row 1 none.
struct VerifiedRows {
  static constexpr std::int64_t T = 7, kSlots = 14, kColumns = 3, C = 3 + kColumns - 1;
  static constexpr std::int64_t kTokens = 4;  ///< the others are padding

  VerifiedRows() : table(Shape<2>{4, kColumns}, -1) {
    for (std::int64_t n = 0; n < 3; ++n)
      for (std::int64_t c = 0; c < kColumns; ++c)
        table(n, c) = static_cast<std::int32_t>(1 + (5 * (n * kColumns + c)) % 12);
  }
  StateSlots slots() const { return {.table = table.view(), .num_accepted = accepted.view()}; }

  Array<std::int32_t, 2> table;
  Array<std::int32_t, 1> starts = ints({0, 3, 4, 4, 6}), accepted = ints({3, 0, 2, 1});
};

struct NetVerification : VerifiedRows {
  static constexpr std::int64_t HV = DeltaNetLayer::HV, V = DeltaNetLayer::V, K = DeltaNetLayer::K;
  static constexpr std::int64_t H = DeltaNetLayer::H, D = 2 * H * K + HV * V;

  explicit NetVerification(std::uint64_t seed)
      : layer(seed),
        x(on_grid<double>(Shape<2>{T, D}, {.seed = seed, .stream = 50})),
        a(on_grid<double>(Shape<2>{T, HV}, {.seed = seed, .stream = 51})),
        b(on_grid<double>(Shape<2>{T, HV}, {.seed = seed, .stream = 52})),
        z(on_grid<double>(Shape<3>{T, HV, V}, {.seed = seed, .stream = 53})),
        window(on_grid<double>(Shape<3>{kSlots, D, C}, {.seed = seed, .stream = 54})),
        state(on_grid<double>(Shape<4>{kSlots, HV, V, K}, {.seed = seed, .stream = 55})) {}

  reference::GatedDeltaNetDecode<double> inputs() const {
    return {.x = x,
            .z = z,
            .a = a,
            .b = b,
            .conv_weight = layer.conv,
            .A_log = layer.A_log,
            .dt_bias = layer.dt_bias,
            .norm_weight = layer.norm,
            .slots = slots()};
  }
  static constexpr auto kDecode = reference::gated_delta_net_decode<double>;
  Array<double, 3> run() {
    Array<double, 3> out(z.shape(), 7);
    reference::gated_delta_net_verify<double>(inputs(), starts.view(), window.view(), state.view(),
                                              out.view());
    return out;
  }
  /// The same by the references of the operations that it is made of.
  Array<double, 3> run_apart() {
    const auto in = inputs();
    Array<double, 2> mixed(x.shape());
    reference::causal_conv1d_update<double>({.x = x,
                                             .weight = layer.conv,
                                             .query_start_loc = starts.view(),
                                             .slots = in.slots,
                                             .activation = reference::Activation::silu},
                                            window.view(), mixed.view());
    const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
      return make_view<const double>(mixed.data() + first, Shape<3>{T, count, width},
                                     Shape<3>{D, width, 1});
    };
    const auto gates = reference::gated_delta_gates<double>(a, b, layer.A_log, layer.dt_bias);
    Array<double, 3> o(z.shape()), out(z.shape(), 0);
    reference::gated_delta_rule_update<double>(
        {.q = heads(0, H, K),
         .k = heads(H * K, H, K),
         .v = heads(2 * H * K, HV, V),
         .g = gates.g,
         .beta = gates.beta,
         .use_qk_l2norm = true,
         .rows = {.tokens = T, .query_start_loc = starts.view(), .slots = in.slots}},
        state.view(), o.view());
    for (std::int64_t t = 0; t < kTokens; ++t)
      reference::gated_rms_norm<double>(at(std::as_const(o).view(), t), at(in.z, t), layer.norm,
                                        1e-6, reference::GateOrder::after_norm, 1,
                                        at(out.view(), t));
    return out;
  }

  DeltaNetLayer layer;
  Array<double, 2> x, a, b;
  Array<double, 3> z, window;
  Array<double, 4> state;
};

// --- Mamba2 ---

constexpr std::int64_t kH = MixerLayer::H, kP = MixerLayer::P, kG = MixerLayer::G;
constexpr std::int64_t kInner = kH * kP, kChannels = kInner + 2 * kG * MixerLayer::N;

/// A = -exp(A_log), with the bits of the layer, whose exponentials are those of a whole vector.
Array<double, 1> decay_rates(const MixerLayer& layer) {
  const Vector<double> rates = -as_vector(layer.A_log.view()).array().exp();
  Array<double, 1> A(Shape<1>{kH});
  std::ranges::copy(rates, A.begin());
  return A;
}

/// The layer's step by its projections around the decode.
void run_in_parts(MixerLayer& layer, const TensorView<const double, 2>& hidden,
                  TensorView<double, 2> out) {
  const std::int64_t T = hidden.extent(0);
  const Array<double, 2> in = reference::projected<double>(hidden, layer.in_proj);
  const auto columns = [&](std::int64_t first, std::int64_t count) {
    return make_view(in.data() + first, Shape<2>{T, count}, Shape<2>{in.extent(1), 1});
  };
  const Array<double, 1> A = decay_rates(layer);
  Array<double, 3> y(Shape<3>{T, kH, kP});
  reference::mamba2_mixer_decode<double>(
      {.x = columns(kInner, kChannels),
       .z = make_view(in.data(), Shape<3>{T, kH, kP}, Shape<3>{in.extent(1), kP, 1}),
       .dt = columns(kInner + kChannels, kH),
       .conv_weight = layer.conv,
       .A = A,
       .D = layer.D,
       .dt_bias = layer.dt_bias,
       .norm_weight = layer.norm,
       .conv_bias = layer.bias.view()},
      layer.conv_state, layer.state, y);
  const auto merged = reference::projected<double>(
      make_view<const double>(y.data(), Shape<2>{T, kInner}), layer.out_proj);
  mapped(out) = mapped(merged.view());
}

struct MixerVerification : VerifiedRows {
  static constexpr std::int64_t N = MixerLayer::N;

  explicit MixerVerification(std::uint64_t seed)
      : layer(seed),
        A(decay_rates(layer)),
        x(on_grid<double>(Shape<2>{T, kChannels}, {.seed = seed, .stream = 50})),
        dt(on_grid<double>(Shape<2>{T, kH}, {.seed = seed, .stream = 51})),
        z(on_grid<double>(Shape<3>{T, kH, kP}, {.seed = seed, .stream = 53})),
        window(on_grid<double>(Shape<3>{kSlots, kChannels, C}, {.seed = seed, .stream = 54})),
        state(on_grid<double>(Shape<4>{kSlots, kH, kP, N}, {.seed = seed, .stream = 55})) {}

  reference::Mamba2MixerDecode<double> inputs() const {
    return {.x = x,
            .z = z,
            .dt = dt,
            .conv_weight = layer.conv,
            .A = A,
            .D = layer.D,
            .dt_bias = layer.dt_bias,
            .norm_weight = layer.norm,
            .conv_bias = layer.bias.view(),
            .slots = slots()};
  }
  static constexpr auto kDecode = reference::mamba2_mixer_decode<double>;
  Array<double, 3> run() {
    Array<double, 3> out(z.shape(), 7);
    reference::mamba2_mixer_verify<double>(inputs(), starts.view(), window.view(), state.view(),
                                           out.view());
    return out;
  }
  /// The same by the references of the operations that it is made of.
  Array<double, 3> run_apart() {
    reference::Mamba2MixerDecode<double> in = inputs();
    Array<double, 2> mixed(x.shape());
    reference::causal_conv1d_update<double>({.x = x,
                                             .weight = layer.conv,
                                             .bias = layer.bias.view(),
                                             .query_start_loc = starts.view(),
                                             .slots = in.slots,
                                             .activation = reference::Activation::silu},
                                            window.view(), mixed.view());
    const auto heads = [&](std::int64_t first, std::int64_t count, std::int64_t width) {
      return make_view<const double>(mixed.data() + first, Shape<3>{T, count, width},
                                     Shape<3>{kChannels, width, 1});
    };
    Array<double, 3> y(z.shape()), out(z.shape(), 0);
    reference::selective_state_update<double>(
        {.x = heads(0, kH, kP),
         .dt = repeat(in.dt, kP),
         .A = repeat(repeat(in.A, kP), N),
         .B = heads(kInner, kG, N),
         .C = heads(kInner + kG * N, kG, N),
         .D = repeat(in.D, kP),
         .dt_bias = repeat(in.dt_bias, kP),
         .dt_softplus = true,
         .rows = {.tokens = T, .query_start_loc = starts.view(), .slots = in.slots}},
        state.view(), y.view());
    in.slots = {};
    reference::mixer_norm<double>(in, y, T, reference::GateOrder::before_norm,
                                  reference::Gate::silu, kG, out.view());
    for (std::int64_t t = kTokens; t < T; ++t) fill(at(out.view(), t), 0.0);
    return out;
  }

  MixerLayer layer;
  Array<double, 1> A;
  Array<double, 2> x, dt;
  Array<double, 3> z, window;
  Array<double, 4> state;
};

// --- Both ---

/// Projections, decode and output projection are the layer's own step, with the same states.
template <class Layer>
void expect_parts_are_the_layer() {
  for (const std::uint64_t seed : {1, 2, 3}) {
    Layer whole(seed), parts(seed);
    for (std::uint64_t token = 0; token < 5; ++token) {
      const auto hidden = on_grid<double>(Shape<2>{1, 6}, {.seed = seed, .stream = 100 + token});
      Array<double, 2> expected(Shape<2>{1, 6}), found(Shape<2>{1, 6});
      whole.run(hidden, {.update = true}, expected.view());
      run_in_parts(parts, hidden, found.view());
      EXPECT_TRUE(same_bits(found, expected));
      EXPECT_TRUE(same_bits(parts.conv_state, whole.conv_state));
      EXPECT_TRUE(same_bits(parts.state, whole.state));
    }
  }
}

template <class Verification>
class LayerVerify : public ::testing::Test {};
using Verifications = ::testing::Types<NetVerification, MixerVerification>;
TYPED_TEST_SUITE(LayerVerify, Verifications);

// Decoding a padded row gives 0 and touches no slot, whatever its gate holds.
TYPED_TEST(LayerVerify, aPaddedRowLeavesNothing) {
  TypeParam rows(4);
  fill(rows.z.view(), std::numeric_limits<double>::quiet_NaN());
  const auto padding = ints(Sizes(TypeParam::T, -1));
  auto in = rows.inputs();
  in.slots = {.indices = padding.view()};
  const auto window = rows.layer.conv_state;
  const auto state = rows.layer.state;
  Array<double, 3> out(rows.z.shape(), 7);
  TypeParam::kDecode(in, rows.layer.conv_state, rows.layer.state, out);
  for (const double y : out) EXPECT_EQ(y, 0);
  EXPECT_TRUE(same_bits(rows.layer.conv_state, window));
  EXPECT_TRUE(same_bits(rows.layer.state, state));
}

// Decoding token by token is the convolution, the update and the norm of all tokens, with a table.
TYPED_TEST(LayerVerify, isTheOperationsThatItIsMadeOf) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    TypeParam whole(seed), apart(seed);
    EXPECT_TRUE(same_bits(whole.run(), apart.run_apart()));
    EXPECT_TRUE(same_bits(whole.window, apart.window));
    EXPECT_TRUE(same_bits(whole.state, apart.state));
  }
}

// Rejected drafts leave no trace: whatever they were, the next verification from an accepted token
// gives the same.
TYPED_TEST(LayerVerify, rejectedDraftsLeaveNoTrace) {
  for (const std::int32_t kept : {1, 2}) {
    TypeParam one(4), other(4);
    for (std::int64_t t = kept; t < 3; ++t)
      for (std::int64_t d = 0; d < other.x.extent(1); ++d) other.x(t, d) += 1;
    for (TypeParam* run : {&one, &other}) {
      run->run();
      run->accepted(0) = kept;
      run->x = TypeParam(5).x;
    }
    const auto expected = one.run(), found = other.run();
    EXPECT_TRUE(same_bits(found, expected));
    const auto slot = one.table(0, 2);
    EXPECT_TRUE(same_bits(at(other.state.view(), slot), at(one.state.view(), slot)));
    EXPECT_TRUE(same_bits(at(other.window.view(), one.table(0, 0)),
                          at(one.window.view(), one.table(0, 0))));
  }
}

TEST(GatedDeltaNetDecode, isTheMiddleOfTheLayer) {
  expect_parts_are_the_layer<DeltaNetLayer>();
}

TEST(Mamba2MixerDecode, isTheMiddleOfTheLayer) {
  expect_parts_are_the_layer<MixerLayer>();
}

}  // namespace
}  // namespace lockstep
