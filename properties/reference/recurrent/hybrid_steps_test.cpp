// The references of layers' decode steps beside the whole layers.
#include "reference/recurrent/gated_delta_net_decode.hpp"

#include <gtest/gtest.h>

#include "properties/reference/recurrent/hybrid_layers.hpp"
#include "properties/support/laws.hpp"
#include "reference/recurrent/mamba2_mixer_decode.hpp"

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

// A padded row has output 0 and touches no slot, whatever its gate holds.
TEST(GatedDeltaNetDecode, aPaddedRowLeavesNothing) {
  DeltaNetLayer layer(4);
  const auto conv_state = layer.conv_state;
  const auto state = layer.state;
  const auto indices = ints({-1});
  Array<double, 2> x(Shape<2>{1, 42}, 1), a(Shape<2>{1, 6}, 1);
  Array<double, 3> z(Shape<3>{1, 6, 5}, std::numeric_limits<double>::quiet_NaN());
  Array<double, 3> out(Shape<3>{1, 6, 5}, 7);
  reference::gated_delta_net_decode<double>({.x = x,
                                             .z = z,
                                             .a = a,
                                             .b = a,
                                             .conv_weight = layer.conv,
                                             .A_log = layer.A_log,
                                             .dt_bias = layer.dt_bias,
                                             .norm_weight = layer.norm,
                                             .slots = {.indices = indices.view()}},
                                            layer.conv_state, layer.state, out);
  for (const double y : out) EXPECT_EQ(y, 0);
  EXPECT_TRUE(same_bits(layer.conv_state, conv_state));
  EXPECT_TRUE(same_bits(layer.state, state));
}

// --- Mamba2 ---

constexpr std::int64_t kH = MixerLayer::H, kP = MixerLayer::P, kG = MixerLayer::G;
constexpr std::int64_t kInner = kH * kP, kChannels = kInner + 2 * kG * MixerLayer::N;

/// A = -exp(A_log), with the bits of the layer, whose exponentials are those of a whole vector.
Array<double, 1> decay_rates(const MixerLayer& layer) {
  const Vector<double> rates = -as_vector(layer.A_log.view()).array().exp();
  Array<double, 1> A(Shape<1>{kH});
  std::copy(rates.begin(), rates.end(), A.begin());
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

// A padded row has output 0 and touches no slot, whatever its gate holds.
TEST(Mamba2MixerDecode, aPaddedRowLeavesNothing) {
  MixerLayer layer(4);
  const auto conv_state = layer.conv_state;
  const auto state = layer.state;
  const auto indices = ints({-1});
  const Array<double, 1> A = decay_rates(layer);
  Array<double, 2> x(Shape<2>{1, kChannels}, 1), dt(Shape<2>{1, kH}, 1);
  Array<double, 3> z(Shape<3>{1, kH, kP}, std::numeric_limits<double>::quiet_NaN());
  Array<double, 3> out(Shape<3>{1, kH, kP}, 7);
  reference::mamba2_mixer_decode<double>({.x = x,
                                          .z = z,
                                          .dt = dt,
                                          .conv_weight = layer.conv,
                                          .A = A,
                                          .D = layer.D,
                                          .dt_bias = layer.dt_bias,
                                          .norm_weight = layer.norm,
                                          .slots = {.indices = indices.view()}},
                                         layer.conv_state, layer.state, out);
  for (const double y : out) EXPECT_EQ(y, 0);
  EXPECT_TRUE(same_bits(layer.conv_state, conv_state));
  EXPECT_TRUE(same_bits(layer.state, state));
}

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

TEST(GatedDeltaNetDecode, isTheMiddleOfTheLayer) {
  expect_parts_are_the_layer<DeltaNetLayer>();
}

TEST(Mamba2MixerDecode, isTheMiddleOfTheLayer) {
  expect_parts_are_the_layer<MixerLayer>();
}

}  // namespace
}  // namespace lockstep
