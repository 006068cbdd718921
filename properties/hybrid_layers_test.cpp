// The two recurrent layers as wholes: a prompt in pieces and its decodes are the prompt at once.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/support/laws.hpp"
#include "reference/base/yardstick.hpp"
#include "reference/gated_delta_net.hpp"
#include "reference/mamba_mixer.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::LayerRun;

/// The weights of a layer, drawn from one seed, and its states for one request.
struct Weights {
  explicit Weights(std::uint64_t seed) : seed(seed) {}
  template <std::size_t Rank>
  Array<double, Rank> draw(const Shape<Rank>& shape) {
    return on_grid<double>(shape, {.seed = seed, .stream = next++});
  }
  std::uint64_t seed, next = 0;
};

struct MixerLayer : Weights {  // H 4, P 3, N 5, G 2, hidden 6, W 4
  explicit MixerLayer(std::uint64_t seed) : Weights(seed) {}
  Array<double, 2> in_proj = draw<2>({12 + 32 + 4, 6}), conv = draw<2>({32, 4});
  Array<double, 1> bias = draw<1>({32}), A_log = draw<1>({4}), D = draw<1>({4});
  Array<double, 1> dt_bias = draw<1>({4}), norm = draw<1>({12});
  Array<double, 2> out_proj = draw<2>({6, 12});
  Array<double, 3> conv_state = draw<3>({1, 32, 4});
  Array<double, 4> state = draw<4>({1, 4, 3, 5});

  void run(const TensorView<const double, 2>& hidden, const LayerRun& how,
           TensorView<double, 2> out) {
    reference::mamba_mixer<double>(
        hidden, {4, 3, 5, 2, in_proj, conv, bias.view(), A_log, D, dt_bias, norm, out_proj}, {},
        how, conv_state, state, out);
  }
};

struct DeltaNetLayer : Weights {  // H 2, HV 4, K 3, V 5, hidden 6, W 4
  explicit DeltaNetLayer(std::uint64_t seed) : Weights(seed) {}
  Array<double, 2> qkvz = draw<2>({52, 6}), ba = draw<2>({8, 6}), conv = draw<2>({32, 4});
  Array<double, 1> A_log = draw<1>({4}), dt_bias = draw<1>({4}), norm = draw<1>({5});
  Array<double, 2> out_proj = draw<2>({6, 20});
  Array<double, 3> conv_state = draw<3>({1, 32, 3});
  Array<double, 4> state = draw<4>({1, 4, 5, 3});

  void run(const TensorView<const double, 2>& hidden, const LayerRun& how,
           TensorView<double, 2> out) {
    reference::gated_delta_net<double>(hidden,
                                       {2, 4, 3, 5, qkvz, ba, conv, A_log, dt_bias, norm, out_proj},
                                       {}, how, conv_state, state, out);
  }
};

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
    RC_ASSERT(difference(pieces, whole).relative() < 1e-10);
    RC_ASSERT(difference(other.state, layer.state).relative() < 1e-10);
    RC_ASSERT(same_bits(other.conv_state, layer.conv_state));
  }));
}

// Qwen3-Next interleaves its projections by key head: the first rows of the second key head are its
// query, and its values come behind the first head's.
TEST(GatedDeltaNet, projectionsArePutInOrder) {
  DeltaNetLayer layer(3);
  const auto hidden = on_grid<double>(Shape<2>{1, 6}, {.seed = 5});
  const reference::GatedDeltaNet<double> net{2,
                                             4,
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
  EXPECT_DOUBLE_EQ(p.qkv(0, 3), row(layer.qkvz, 26)) << "query of key head 1";
  EXPECT_DOUBLE_EQ(p.qkv(0, 6), row(layer.qkvz, 3)) << "key of key head 0";
  EXPECT_DOUBLE_EQ(p.qkv(0, 12 + 10), row(layer.qkvz, 26 + 6)) << "value head 2";
  EXPECT_DOUBLE_EQ(p.z(0, 10), row(layer.qkvz, 26 + 16));
  EXPECT_DOUBLE_EQ(p.b(0, 2), row(layer.ba, 4));
  EXPECT_DOUBLE_EQ(p.a(0, 2), row(layer.ba, 6));
}

}  // namespace
}  // namespace lockstep
