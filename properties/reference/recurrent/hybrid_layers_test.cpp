// The two recurrent layers as wholes: a prompt computed in pieces, or token by token, gives what
// the prompt gives at once.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/reference/recurrent/hybrid_layers.hpp"
#include "properties/support/laws.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::LayerRun;

template <class Layer>
class HybridLayers : public testing::Test {};
using Layers = testing::Types<MixerLayer, DeltaNetLayer>;
TYPED_TEST_SUITE(HybridLayers, Layers);

TYPED_TEST(HybridLayers, piecesAndDecodesAreThePromptAtOnce) {
  EXPECT_TRUE(rc::check([] {
    const std::int64_t T = draw_length(33);
    const std::uint64_t seed = draw_seed();
    TypeParam layer(seed), other(seed);
    const auto hidden = on_grid<double>(Shape<2>{T, 6}, {.seed = seed, .stream = 77});
    Array<double, 2> whole(hidden.shape()), pieces(hidden.shape());
    layer.run(hidden, {.chunk_size = 64}, whole);
    std::int64_t at = 0;
    for (const std::int64_t size : draw_pieces(T)) {
      const LayerRun how{.update = size == 1, .chunk_size = *rc::gen::element(1, 8, 64)};
      other.run(cut(hidden.view(), at, at + size), how, cut(pieces.view(), at, at + size));
      at += size;
    }
    for (const double y : whole) RC_ASSERT(std::isfinite(y));
    RC_ASSERT(difference(pieces, whole).relative() < 1e-10);
    RC_ASSERT(difference(other.state, layer.state).relative() < 1e-10);
    RC_ASSERT(same_bits(other.conv_state, layer.conv_state));
  }));
}

// Scans and updates take the same steps: a cut changes no bit. Chunks of one token do not.
TYPED_TEST(HybridLayers, scansHaveTheBitsOfUpdates) {
  EXPECT_TRUE(rc::check([] {
    const std::int64_t T = draw_length(33);
    const std::uint64_t seed = draw_seed();
    TypeParam layer(seed), other(seed);
    const auto hidden = on_grid<double>(Shape<2>{T, 6}, {.seed = seed, .stream = 77});
    Array<double, 2> whole(hidden.shape()), pieces(hidden.shape());
    layer.run(hidden, {.scan = true}, whole);
    std::int64_t at = 0;
    for (const std::int64_t size : draw_pieces(T)) {
      other.run(cut(hidden.view(), at, at + size), {.update = size == 1, .scan = true},
                cut(pieces.view(), at, at + size));
      at += size;
    }
    RC_ASSERT(same_bits(pieces, whole));
    RC_ASSERT(same_bits(other.state, layer.state));
    RC_ASSERT(same_bits(other.conv_state, layer.conv_state));
  }));
  TypeParam layer(1), other(1);
  const auto hidden = on_grid<double>(Shape<2>{33, 6}, {.seed = 1});
  Array<double, 2> scanned(hidden.shape()), chunked(hidden.shape());
  layer.run(hidden, {.scan = true}, scanned);
  other.run(hidden, {.chunk_size = 1}, chunked);
  EXPECT_FALSE(same_bits(chunked, scanned));
}

// Qwen3-Next interleaves its projections by key head: the first rows of the second key head are its
// query, and its values come after the first head's.
TEST(GatedDeltaNet, projectionsArePutInOrder) {
  EXPECT_EQ(LayerRun{}.chunk_size, 128);
  DeltaNetLayer layer(3);
  const auto hidden = on_grid<double>(Shape<2>{1, 6}, {.seed = 5});
  const reference::GatedDeltaNet<double> net{2,
                                             6,
                                             3,
                                             5,
                                             layer.qkvz,
                                             layer.ba,
                                             layer.conv,
                                             layer.A_log,
                                             layer.dt_bias,
                                             layer.norm,
                                             layer.out_proj};
  const auto p = reference::gated_delta_projections<double>(hidden, net);
  const auto row = [&](const Array<double, 2>& w, std::int64_t i) {
    return as_vector(at(w.view(), i)).dot(as_vector(at(hidden.view(), 0)));
  };
  // Per key head: q 3, k 3, v 15, z 15; b 3, a 3.
  EXPECT_DOUBLE_EQ(p.qkv(0, 3), row(layer.qkvz, 36)) << "query of key head 1";
  EXPECT_DOUBLE_EQ(p.qkv(0, 6), row(layer.qkvz, 3)) << "key of key head 0";
  EXPECT_DOUBLE_EQ(p.qkv(0, 12 + 15), row(layer.qkvz, 36 + 6)) << "value head 3";
  EXPECT_DOUBLE_EQ(p.z(0, 15), row(layer.qkvz, 36 + 21));
  EXPECT_DOUBLE_EQ(p.b(0, 3), row(layer.ba, 6));
  EXPECT_DOUBLE_EQ(p.a(0, 3), row(layer.ba, 9));
}

}  // namespace
}  // namespace lockstep
