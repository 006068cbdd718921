// The operator of a Mamba2 layer's step on the CPU: its reference bit by bit, and what it refuses.
#include "properties/kernels/torch/layer_step.hpp"
#include "properties/support/laws.hpp"
#include "reference/recurrent/mamba2_mixer_verify.hpp"

namespace lockstep::of_mamba2_mixer {
namespace {

using namespace testing_support;

constexpr const char* kName = "mamba2_mixer_decode";
constexpr std::int64_t T = 4, H = 4, G = 2, P = 3, N = 5, W = 3, kSlots = 6;
constexpr std::int64_t kInner = H * P, kChannels = kInner + 2 * G * N;

struct Step {
  Array<float, 2> x = draw<2>({T, kChannels}, 1), dt = draw<2>({T, H}, 2);
  Array<float, 3> z = draw<3>({T, H, P}, 3), window = draw<3>({kSlots, kChannels, W - 1}, 4);
  Array<float, 4> state = draw<4>({kSlots, H, P, N}, 5);
  Array<float, 2> weight = draw<2>({kChannels, W}, 6);
  Array<float, 1> bias = draw<1>({kChannels}, 7), A = draw<1>({H}, 8), D = draw<1>({H}, 9);
  Array<float, 1> dt_bias = draw<1>({H}, 10), norm_weight = draw<1>({kInner}, 11);
  Array<std::int32_t, 1> slots = ints({4, -1, 0, 5});
  Array<float, 3> wide = draw<3>({kSlots, kChannels, W}, 12);
  VerifiedRows rows;

  /// The reference's inputs, without slots.
  reference::Mamba2MixerDecode<float> inputs(at::ScalarType activations,
                                             at::ScalarType states) const {
    return {.x = x,
            .z = z,
            .dt = dt,
            .conv_weight = weight,
            .A = A,
            .D = D,
            .dt_bias = dt_bias,
            .norm_weight = norm_weight,
            .conv_bias = bias.view(),
            .storage = {.state = format_of(states), .output = format_of(activations)},
            .window = format_of(activations)};
  }

  Named verification(at::ScalarType activations, at::ScalarType states) const {
    return rows.of(arguments(activations, states), tensor_of(wide).to(activations));
  }

  Named arguments(at::ScalarType activations, at::ScalarType states) const {
    return {{"x", tensor_of(x).to(activations)},
            {"z", tensor_of(z).to(activations)},
            {"dt", tensor_of(dt).to(activations)},
            {"conv_state", tensor_of(window).to(activations)},
            {"state", tensor_of(state).to(states)},
            {"conv_weight", tensor_of(weight).to(activations)},
            {"conv_bias", tensor_of(bias).to(activations)},
            {"A", tensor_of(A)},
            {"D", tensor_of(D)},
            {"dt_bias", tensor_of(dt_bias)},
            {"norm_weight", tensor_of(norm_weight)},
            {"state_indices", tensor_of(slots)}};
  }
};

TEST(TorchMamba2Mixer, isTheReferenceBitByBit) {
  expect_decodes<Step>(kName, reference::mamba2_mixer_decode<float>);
}

TEST(TorchMamba2Mixer, aVerificationIsTheReferenceBitByBit) {
  expect_verifications<Step>(kName, reference::mamba2_mixer_verify<float>);
}

TEST(TorchMamba2Mixer, refusesAPartOfAVerification) {
  expect_a_part_is_refused(kName, Step().verification(at::kBFloat16, at::kFloat),
                           at::zeros({kSlots, kChannels, W - 1}, at::kBFloat16));
}

TEST(TorchMamba2Mixer, refusesByName) {
  expect_refusals(kName, Step().arguments(at::kBFloat16, at::kFloat),
                  {{"x", zeros({T, kChannels + 1})},
                   {"x", zeros({T, kInner + 3 * 2 * N})},
                   {"z", zeros({T, H, P + 1})},
                   {"z", zeros({T, H, P}).to(at::kFloat)},
                   {"dt", zeros({T, H + 1})},
                   {"conv_state", zeros({6, kChannels, W})},
                   {"conv_state", zeros({5, kChannels, W - 1})},
                   {"state", zeros({kSlots, H, P})},
                   {"conv_weight", zeros({kChannels, 1})},
                   {"conv_bias", zeros({kChannels + 1})},
                   {"A", zeros({H})},
                   {"D", zeros({G})},
                   {"dt_bias", zeros({G})},
                   {"norm_weight", zeros({P})},
                   {"state_indices", at::zeros({T, 2}, at::kInt)},
                   {"parts", std::int64_t{3}}});
}

}  // namespace
}  // namespace lockstep::of_mamba2_mixer
