// The static cache against LibTorch: index_copy for the writes, scaled_dot_product_attention with a
// boolean mask for what is seen.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "properties/support/laws.hpp"
#include "properties/support/torch_bridge.hpp"
#include "reference/attention/static_kv_update.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

struct Case {
  std::int64_t past, Q, left;  ///< tokens before, new ones, left padding of the second prompt
};

class StaticKvAgainstTorch : public testing::TestWithParam<Case> {};

TEST_P(StaticKvAgainstTorch, writesAndAttentionAgree) {
  const auto [past, Q, left] = GetParam();
  const std::int64_t B = 2, HQ = 4, HKV = 2, M = 24, d = 8;
  auto k = on_grid<double>(Shape<4>{B, HKV, M, d}, {.stream = 1});  // finite garbage in the tail
  auto v = on_grid<double>(Shape<4>{B, HKV, M, d}, {.stream = 2});
  const auto q = on_grid<double>(Shape<4>{B, Q, HQ, d}, {.stream = 3, .limit = 2});
  const auto new_k = on_grid<double>(Shape<4>{B, Q, HKV, d}, {.stream = 4});
  const auto new_v = on_grid<double>(Shape<4>{B, Q, HKV, d}, {.stream = 5});
  Sizes positions;
  for (std::int64_t i = 0; i < Q; ++i) positions.push_back(past + i);
  const auto cache_pos = ints(positions);
  Array<bool, 2> mask(Shape<2>{B, M}, false);
  for (std::int64_t j = 0; j < past + Q; ++j) mask(0, j) = true, mask(1, j) = j >= left;

  const at::Tensor at_positions = tensor_of(cache_pos).to(at::kLong);
  const auto written = [&](const Array<double, 4>& cache, const Array<double, 4>& fresh) {
    return tensor_of(cache).index_copy(2, at_positions, tensor_of(fresh).transpose(1, 2));
  };
  const at::Tensor expected_k = written(k, new_k), expected_v = written(v, new_v);
  reference::write_kv<double>(new_k, cache_pos, Q, k.view());
  reference::write_kv<double>(new_v, cache_pos, Q, v.view());
  EXPECT_TRUE(same_bits(k, array_of<double, 4>(expected_k)));
  EXPECT_TRUE(same_bits(v, array_of<double, 4>(expected_v)));
  const at::Tensor zeros = at::zeros({B, HKV, M, d}, at::kDouble);
  EXPECT_TRUE(same_bits(
      reference::sidecar_of<double>(new_k, cache_pos, M),
      array_of<double, 4>(zeros.index_copy(2, at_positions, tensor_of(new_k).transpose(1, 2)))));

  const at::Tensor causal = at::arange(M).unsqueeze(0) <= at_positions.unsqueeze(1);  // [Q, M]
  const at::Tensor seen = at::logical_and(causal, tensor_of(mask).unsqueeze(1)).unsqueeze(1);
  const at::Tensor expected = at::scaled_dot_product_attention(
      tensor_of(q).transpose(1, 2), expected_k.repeat_interleave(HQ / HKV, 1),
      expected_v.repeat_interleave(HQ / HKV, 1), seen, 0.0, false, 0.5);
  Array<double, 4> out(q.shape());
  reference::static_kv_attention<double>(q, k, v, mask, cache_pos, 0.5, out);
  EXPECT_LT(difference(out, array_of<double, 4>(expected.transpose(1, 2))).relative(), 1e-14);
}

INSTANTIATE_TEST_SUITE_P(Steps, StaticKvAgainstTorch,
                         testing::Values(Case{0, 1, 0}, Case{0, 8, 0}, Case{5, 1, 3},
                                         Case{5, 16, 4}, Case{23, 1, 20}));

}  // namespace
}  // namespace lockstep
