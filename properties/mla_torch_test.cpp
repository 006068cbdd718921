// torch.ops.lockstep.mla_decode on the CPU: it is its reference bit by bit, and refuses by name.
// The GPU's side and torch.compile: properties/torch_ops_check.py.
#include "properties/support/laws.hpp"
#include "properties/support/torch_bridge.hpp"
#include "properties/support/torch_operator.hpp"
#include "reference/attention/mla_attention.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using at::Tensor;

/// Requests of 5, 0 and 9 tokens, two queries each, three heads, in pages of four tokens; the block
/// table is wild behind the pages.
struct Case {
  Array<float, 4> q = on_grid<float>(Shape<4>{3, 2, 3, 12}, {.seed = 1, .stream = 1});
  Array<float, 3> cache = on_grid<float>(Shape<3>{6, 4, 12}, {.seed = 1, .stream = 2});
  Array<std::int32_t, 2> table = Array<std::int32_t, 2>(Shape<2>{3, 3}, 2147480000);
  Array<std::int32_t, 1> lengths = ints({5, 0, 9});

  Case() {
    table(0, 0) = 4, table(0, 1) = 1;
    table(2, 0) = 5, table(2, 1) = 0, table(2, 2) = 2;
  }
  Named arguments() const {
    return {{"q", tensor_of(q)},
            {"kv_cache", tensor_of(cache)},
            {"block_table", tensor_of(table)},
            {"seq_lens", tensor_of(lengths)},
            {"softmax_scale", 0.3},
            {"value_dim", std::int64_t{8}}};
  }
};

TEST(MlaDecodeOperator, isItsReference) {
  const Case c;
  for (const bool causal : {true, false})
    for (const float kv_scale : {1.0f, 0.5f}) {
      Named arguments = c.arguments();
      arguments["causal"] = causal;
      if (kv_scale != 1) {
        arguments["kv_cache"] = tensor_of(c.cache).to(at::kFloat8_e4m3fn);
        arguments["kv_scale"] = at::full({}, kv_scale);
      }
      const auto results = checked_call("mla_decode", arguments);
      ASSERT_EQ(results.size(), 2u);
      const Tensor cache = arguments["kv_cache"].toTensor().to(at::kFloat);
      Array<float, 4> out(Shape<4>{3, 2, 3, 8});
      Array<float, 3> lse(Shape<3>{3, 3, 2});
      reference::mla_decode<float>(
          {.q = c.q.view(),
           .cache = make_view(static_cast<const float*>(cache.data_ptr()), c.cache.shape()),
           .block_table = c.table.view(),
           .seq_lens = c.lengths.view(),
           .softmax_scale = 0.3,
           .causal = causal,
           .value_dim = 8,
           .kv_scale = kv_scale},
          out, lse);
      EXPECT_EQ(bytes_of(results[0].toTensor()), bytes_of(tensor_of(out)));
      EXPECT_EQ(bytes_of(results[1].toTensor()), bytes_of(tensor_of(lse)));
    }
}

TEST(MlaDecodeOperator, refusesByName) {
  const Case c;
  const auto complaint = [&](const std::string& name, const c10::IValue& value) {
    Named arguments = c.arguments();
    arguments[name] = value;
    return complaint_of("mla_decode", arguments);
  };
  EXPECT_NE(complaint("kv_cache", at::zeros({6, 4, 11})).find("kv_cache is expected"),
            std::string::npos);
  EXPECT_NE(complaint("seq_lens", at::zeros({2}, at::kInt)).find("seq_lens is expected"),
            std::string::npos);
  EXPECT_NE(complaint("seq_lens", at::full({3}, 13, at::kInt))
                .find("seq_lens is expected to be between 0 and what block_table has room for"),
            std::string::npos);
  EXPECT_NE(complaint("block_table", at::full({3, 3}, 6, at::kInt))
                .find("block_table is expected to be numbers of pages"),
            std::string::npos);
  EXPECT_NE(complaint("value_dim", std::int64_t{13}).find("value_dim is expected"),
            std::string::npos);
  EXPECT_NE(complaint("kv_scale", at::ones({})).find("kv_scale is expected to be absent"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep
