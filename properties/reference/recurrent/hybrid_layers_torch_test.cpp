// The two recurrent layers as wholes against eager tensors: projections, convolution, recurrence,
// gated norm, projection.
#include <gtest/gtest.h>

#include "properties/reference/recurrent/eager.hpp"
#include "properties/reference/recurrent/hybrid_layers.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

struct LayerResult {
  at::Tensor out, conv_state, state;
};

LayerResult eager(const MixerLayer& w, const at::Tensor& hidden) {
  const std::int64_t T = hidden.size(0), H = w.H, P = w.P, N = w.N, G = w.G, inner = H * P;
  const auto parts = at::matmul(hidden, tensor_of(w.in_proj).t())
                         .split_with_sizes({inner, inner + 2 * G * N, H}, 1);
  const EagerResult conv = eager_conv1d(parts[1], tensor_of(w.conv), tensor_of(w.bias),
                                        tensor_of(w.conv_state)[0].slice(1, 1));
  const auto mixed = conv.out.split_with_sizes({inner, G * N, G * N}, 1);
  const EagerResult ssm = eager_mamba2({mixed[0].reshape({T, H, P}),
                                        at::softplus(parts[2] + tensor_of(w.dt_bias), 1, 20),
                                        -at::exp(tensor_of(w.A_log)),
                                        mixed[1].reshape({T, G, N}),
                                        mixed[2].reshape({T, G, N}),
                                        tensor_of(w.D),
                                        {},
                                        tensor_of(w.state)[0]});
  const at::Tensor gated = ssm.out.reshape({T, inner}) * at::silu(parts[0]);
  const at::Tensor normed =
      eager_rms_norm(gated.view({T, G, inner / G}), tensor_of(w.norm).view({G, inner / G}), 1e-5);
  return {at::matmul(normed.reshape({T, inner}), tensor_of(w.out_proj).t()), conv.state, ssm.state};
}

LayerResult eager(const DeltaNetLayer& w, const at::Tensor& hidden) {
  const std::int64_t T = hidden.size(0), H = w.H, HV = w.HV, K = w.K, V = w.V, r = HV / H;
  const auto qkvz = at::matmul(hidden, tensor_of(w.qkvz).t())
                        .view({T, H, 2 * K + 2 * r * V})
                        .split_with_sizes({K, K, r * V, r * V}, 2);
  const auto ba =
      at::matmul(hidden, tensor_of(w.ba).t()).view({T, H, 2 * r}).split_with_sizes({r, r}, 2);
  const at::Tensor channels = at::cat(
      {qkvz[0].reshape({T, H * K}), qkvz[1].reshape({T, H * K}), qkvz[2].reshape({T, HV * V})}, 1);
  const EagerResult conv =
      eager_conv1d(channels, tensor_of(w.conv), {}, tensor_of(w.conv_state)[0]);
  const auto qkv = conv.out.split_with_sizes({H * K, H * K, HV * V}, 1);
  const at::Tensor a = ba[1].reshape({T, HV}), b = ba[0].reshape({T, HV});
  const at::Tensor g = -at::exp(tensor_of(w.A_log)) * at::softplus(a + tensor_of(w.dt_bias), 1, 20);
  const EagerResult rule = eager_gated_delta_rule(
      {qkv[0].reshape({T, H, K}), qkv[1].reshape({T, H, K}), qkv[2].reshape({T, HV, V}), g,
       at::sigmoid(b), tensor_of(w.state)[0]});
  const at::Tensor normed =
      eager_rms_norm(rule.out, tensor_of(w.norm), 1e-6) * at::silu(qkvz[3].reshape({T, HV, V}));
  return {at::matmul(normed.reshape({T, HV * V}), tensor_of(w.out_proj).t()), conv.state,
          rule.state};
}

template <class Layer>
class HybridLayersAgainstTorch : public testing::Test {};
using Layers = testing::Types<MixerLayer, DeltaNetLayer>;
TYPED_TEST_SUITE(HybridLayersAgainstTorch, Layers);

TYPED_TEST(HybridLayersAgainstTorch, outputsAndStatesAgree) {
  for (const std::int64_t T : {1, 2, 33, 130})
    for (const std::int64_t chunk : {1, 64}) {
      TypeParam layer(static_cast<std::uint64_t>(T));
      const auto hidden = on_grid<double>(Shape<2>{T, 6}, {.seed = 5, .stream = 77});
      const LayerResult expected = eager(layer, tensor_of(hidden));
      Array<double, 2> out(hidden.shape());
      layer.run(hidden, {.chunk_size = chunk}, out);
      EXPECT_LT(difference(out, array_of<double, 2>(expected.out)).relative(), 1e-12) << T;
      EXPECT_LT(difference(at(layer.state.view(), 0), array_of<double, 3>(expected.state).view())
                    .relative(),
                1e-12)
          << T;
      const auto window = expected.conv_state;  // [channels, W - 1]
      const auto kept =
          cut(transposed(at(layer.conv_state.view(), 0)),
              layer.conv_state.extent(2) - window.size(1), layer.conv_state.extent(2));
      EXPECT_LT(difference(kept, array_of<double, 2>(window.t().contiguous()).view()).relative(),
                1e-14)
          << T;
    }
}

}  // namespace
}  // namespace lockstep
