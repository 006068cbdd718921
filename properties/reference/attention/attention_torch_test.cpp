// Attention, norms and rotations against LibTorch's own operators.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "properties/support/torch_bridge.hpp"
#include "reference/attention/mla_attention.hpp"
#include "reference/layers/swiglu.hpp"
#include "reference/tensors/grid.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

template <std::size_t Rank>
Array<double, Rank> drawn(const Shape<Rank>& shape, std::uint64_t stream) {
  return on_grid<double>(shape, {.seed = 11, .stream = stream, .limit = 2});
}

/// [T, heads, d] as LibTorch's attention wants it: [1, heads, T, d].
at::Tensor by_head(const at::Tensor& x) {
  return x.transpose(0, 1).unsqueeze(0);
}

/// True where query i of T sees key j of L: bottom-right.
at::Tensor causal_mask(std::int64_t T, std::int64_t L) {
  return at::ones({T, L}, at::kBool).tril(L - T);
}

class AttentionAgainstTorch
    : public testing::TestWithParam<std::tuple<std::int64_t, std::int64_t>> {};

TEST_P(AttentionAgainstTorch, groupedQueriesAgree) {
  const auto [T, L] = GetParam();
  const auto q = drawn<3>({T, 6, 16}, 1), k = drawn<3>({L, 2, 16}, 2), v = drawn<3>({L, 2, 8}, 3);
  const at::Tensor expected = at::scaled_dot_product_attention(
      by_head(tensor_of(q)), by_head(tensor_of(k).repeat_interleave(3, 1)),
      by_head(tensor_of(v).repeat_interleave(3, 1)), causal_mask(T, L), 0.0, false, 0.25);
  Array<double, 3> out(Shape<3>{T, 6, 8});
  Array<double, 2> lse(Shape<2>{6, T});
  reference::attention_row<double>(q, k, v, {.scale = 0.25}, out, lse);
  EXPECT_LT(difference(out, array_of<double, 3>(expected[0].transpose(0, 1))).relative(), 1e-12);
  const at::Tensor scores =
      at::einsum("thd,lhd->htl", {tensor_of(q), tensor_of(k).repeat_interleave(3, 1)}) * 0.25;
  const at::Tensor expected_lse =
      at::logsumexp(scores.masked_fill(~causal_mask(T, L), -INFINITY), {2});
  EXPECT_LT(difference(lse, array_of<double, 2>(expected_lse)).relative(), 1e-12);
}

// In float and in bf16 LibTorch's operator is within the yardstick, which rounds its outputs
// likewise.
TEST_P(AttentionAgainstTorch, floatAndBf16StayWithinTheYardstick) {
  const auto [T, L] = GetParam();
  const auto run = [T = T, L = L]<class S>(S, Format format) {
    const auto q = on_grid<S>(Shape<3>{T, 6, 16}, {.seed = 11, .stream = 1, .limit = 2});
    const auto k = on_grid<S>(Shape<3>{L, 2, 16}, {.seed = 11, .stream = 2, .limit = 2});
    const auto v = on_grid<S>(Shape<3>{L, 2, 8}, {.seed = 11, .stream = 3, .limit = 2});
    Array<S, 3> out(Shape<3>{T, 6, 8});
    Array<S, 2> lse(Shape<2>{6, T});
    reference::attention_row<S>(q, k, v, {.scale = 0.25}, out, lse);
    for (S& y : out) y = rounded(y, format);
    return out;
  };
  const auto truth = run(double{}, Format::exact);
  for (const auto& [dtype, format] :
       {std::pair{at::kFloat, Format::float32}, std::pair{at::kBFloat16, Format::bf16}}) {
    const auto q = tensor_of(drawn<3>({T, 6, 16}, 1)).to(dtype);
    const auto k = tensor_of(drawn<3>({L, 2, 16}, 2)).to(dtype).repeat_interleave(3, 1);
    const auto v = tensor_of(drawn<3>({L, 2, 8}, 3)).to(dtype).repeat_interleave(3, 1);
    const at::Tensor found = at::scaled_dot_product_attention(by_head(q), by_head(k), by_head(v),
                                                              causal_mask(T, L), 0.0, false, 0.25);
    const Verdict verdict = judge(array_of<float, 3>(found[0].transpose(0, 1).to(at::kFloat)),
                                  run(float{}, format), truth, {.format = format});
    EXPECT_TRUE(verdict.pass) << verdict.text;
  }
}

// DeepSeek's head shape, two heads of it: both forms against the definition in LibTorch.
TEST_P(AttentionAgainstTorch, latentAttentionAgrees) {
  const auto [T, L] = GetParam();
  const std::int64_t H = 2, dn = 128, dr = 64, dv = 128, dc = 512;
  const auto q_nope = drawn<3>({T, H, dn}, 1), q_pe = drawn<3>({T, H, dr}, 2);
  const auto latent = drawn<2>({L, dc}, 3), k_pe = drawn<2>({L, dr}, 4);
  const auto kv_b = on_grid<double>(Shape<2>{H * (dn + dv), dc}, {.stream = 5, .limit = 0.03125});
  const auto w = reference::split_kv_b<double>(kv_b, H, dn);
  const at::Tensor weights = tensor_of(kv_b).view({H, dn + dv, dc});
  const at::Tensor k_nope = at::einsum("lc,hnc->lhn", {tensor_of(latent), weights.slice(1, 0, dn)});
  const at::Tensor v = at::einsum("lc,hvc->lhv", {tensor_of(latent), weights.slice(1, dn)});
  const at::Tensor k = at::cat({k_nope, tensor_of(k_pe).unsqueeze(1).expand({L, H, dr})}, 2);
  const at::Tensor q = at::cat({tensor_of(q_nope), tensor_of(q_pe)}, 2);
  const double scale = 1 / std::sqrt(static_cast<double>(dn + dr));
  const auto expected =
      array_of<double, 3>(at::scaled_dot_product_attention(by_head(q), by_head(k), by_head(v),
                                                           causal_mask(T, L), 0.0, false, scale)[0]
                              .transpose(0, 1));
  Array<double, 3> out(Shape<3>{T, H, dv});
  Array<double, 2> lse(Shape<2>{H, T});
  reference::mla_normal<double>({q_nope, q_pe, latent, k_pe}, w, {.scale = scale}, out, lse);
  EXPECT_LT(difference(out, expected).relative(), 1e-12);
  reference::mla_absorbed<double>({q_nope, q_pe, latent, k_pe}, w, {.scale = scale}, out, lse);
  EXPECT_LT(difference(out, expected).relative(), 1e-12);
}

INSTANTIATE_TEST_SUITE_P(Lengths, AttentionAgainstTorch,
                         testing::Values(std::tuple(1, 1), std::tuple(1, 65), std::tuple(3, 64),
                                         std::tuple(63, 63), std::tuple(64, 200)));

TEST(LayersAgainstTorch, agree) {
  const auto x = drawn<2>({5, 48}, 1);
  const auto weight = drawn<1>({48}, 2);
  Array<double, 2> out(Shape<2>{5, 48});
  reference::rms_norm<double>(x, weight, 1e-6, out);
  const at::Tensor t = tensor_of(x);
  const at::Tensor normed = t * at::rsqrt(t.pow(2).mean(-1, true) + 1e-6) * tensor_of(weight);
  EXPECT_LT(difference(out, array_of<double, 2>(normed)).relative(), 1e-14);

  const auto gate = drawn<2>({31, 48}, 3), up = drawn<2>({31, 48}, 4), down = drawn<2>({48, 31}, 5);
  reference::swiglu<double>(x, gate, up, down, out);
  const at::Tensor fed =
      at::matmul(at::silu(at::matmul(t, tensor_of(gate).t())) * at::matmul(t, tensor_of(up).t()),
                 tensor_of(down).t());
  EXPECT_LT(difference(out, array_of<double, 2>(fed)).relative(), 1e-13);
}

// Complex numbers rotate by multiplication: the interleaved pairs are their real and imaginary
// parts.
TEST(LayersAgainstTorch, rotationsAreComplexProducts) {
  auto x = drawn<3>({70, 2, 16}, 1);
  Array<std::int32_t, 1> positions(Shape<1>{70}, 0);
  for (std::int32_t t = 0; t < 70; ++t) positions(t) = 100 * t;
  const auto rope = reference::yarn_rope<double>(16, 10000, {.factor = 40, .mscale = 1.0});
  const at::Tensor frequencies =
      at::from_blob(const_cast<double*>(rope.frequencies.data()), {8}, at::kDouble);
  const at::Tensor angles = at::outer(tensor_of(positions).to(at::kDouble), frequencies);
  const at::Tensor turns = at::polar(at::full_like(angles, rope.magnitude), angles).unsqueeze(1);
  const at::Tensor turned =
      at::view_as_real(at::view_as_complex(tensor_of(x).view({70, 2, 8, 2})) * turns);
  reference::apply_rope<double>(rope, positions, reference::RopePairs::interleaved, x.view());
  EXPECT_LT(difference(x, array_of<double, 3>(turned.reshape({70, 2, 16}))).relative(), 1e-14);
}

}  // namespace
}  // namespace lockstep
