// The operator of a gated-delta-net layer's step on the CPU: its reference bit by bit, and what it
// refuses.
#include "properties/kernels/torch/layer_step.hpp"
#include "properties/support/laws.hpp"
#include "reference/recurrent/gated_delta_net_verify.hpp"

namespace lockstep::of_gated_delta_net {
namespace {

using namespace testing_support;

constexpr const char* kName = "gated_delta_net_decode";
constexpr std::int64_t B = 4, H = 2, HV = 4, K = 3, V = 5, W = 3, kSlots = 6;
constexpr std::int64_t D = 2 * H * K + HV * V;

struct Step {
  Array<float, 2> x = draw<2>({B, D}, 1), a = draw<2>({B, HV}, 2), b = draw<2>({B, HV}, 3);
  Array<float, 3> z = draw<3>({B, HV, V}, 4), window = draw<3>({kSlots, D, W - 1}, 5);
  Array<float, 4> state = draw<4>({kSlots, HV, V, K}, 6);
  Array<float, 2> weight = draw<2>({D, W}, 7);
  Array<float, 1> bias = draw<1>({D}, 8), A_log = draw<1>({HV}, 9), dt_bias = draw<1>({HV}, 10);
  Array<float, 1> norm_weight = draw<1>({V}, 11);
  Array<std::int32_t, 1> slots = ints({4, -1, 0, 5});
  Array<float, 3> wide = draw<3>({kSlots, D, W}, 12);
  VerifiedRows rows;

  /// The reference's inputs, without slots.
  reference::GatedDeltaNetDecode<float> inputs(at::ScalarType activations,
                                               at::ScalarType states) const {
    return {.x = x,
            .z = z,
            .a = a,
            .b = b,
            .conv_weight = weight,
            .A_log = A_log,
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
            {"a", tensor_of(a).to(activations)},
            {"b", tensor_of(b).to(activations)},
            {"conv_state", tensor_of(window).to(activations)},
            {"state", tensor_of(state).to(states)},
            {"conv_weight", tensor_of(weight).to(activations)},
            {"conv_bias", tensor_of(bias).to(activations)},
            {"A_log", tensor_of(A_log)},
            {"dt_bias", tensor_of(dt_bias)},
            {"norm_weight", tensor_of(norm_weight)},
            {"state_indices", tensor_of(slots)}};
  }
};

TEST(TorchGatedDeltaNet, isTheReferenceBitByBit) {
  expect_decodes<Step>(kName, reference::gated_delta_net_decode<float>);
}

TEST(TorchGatedDeltaNet, aVerificationIsTheReferenceBitByBit) {
  expect_verifications<Step>(kName, reference::gated_delta_net_verify<float>);
}

TEST(TorchGatedDeltaNet, refusesAPartOfAVerification) {
  expect_a_part_is_refused(kName, Step().verification(at::kBFloat16, at::kFloat),
                           at::zeros({kSlots, D, W - 1}, at::kBFloat16));
}

TEST(TorchGatedDeltaNet, refusesByName) {
  expect_refusals(kName, Step().arguments(at::kBFloat16, at::kFloat),
                  {{"x", zeros({B, D + 1})},
                   {"x", zeros({B + 1, D}), "z"},
                   {"z", zeros({B, HV, V + 1})},
                   {"z", zeros({B, HV, V}).to(at::kFloat)},
                   {"a", zeros({B, HV + 1})},
                   {"b", zeros({B})},
                   {"conv_state", zeros({6, D, W})},
                   {"conv_state", zeros({5, D, W - 1})},
                   {"state", zeros({kSlots, HV, V})},
                   {"conv_weight", zeros({D, 1})},
                   {"conv_bias", zeros({D + 1})},
                   {"A_log", zeros({H})},
                   {"dt_bias", zeros({H})},
                   {"norm_weight", zeros({K})},
                   {"state_indices", at::zeros({B, 2}, at::kInt)},
                   {"parts", std::int64_t{3}}});
}

}  // namespace
}  // namespace lockstep::of_gated_delta_net
