// torch.ops.lockstep.mla_decode, mla_prefill and merge_attention on the CPU: they are their
// references bit by bit, and refuse by name.
// The GPU's side and torch.compile: properties/kernels/torch/torch_ops_check.py.
#include "properties/kernels/torch/torch_operator.hpp"
#include "properties/support/laws.hpp"
#include "properties/support/torch_bridge.hpp"
#include "reference/attention/latent_token.hpp"
#include "reference/attention/mla_attention.hpp"

namespace lockstep::of_mla {
namespace {

using namespace testing_support;
using at::Tensor;

/// Requests of 5, 0 and 9 tokens, two queries each, three heads, in pages of four tokens; the block
/// table is wild after the pages.
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

// A cache of tokens of 656 bytes is that of the values that they stand for, bit by bit.
TEST(MlaDecodeOperator, takesTokensOfBytes) {
  Case c;
  c.q = on_grid<float>(Shape<4>{3, 2, 3, 576}, {.seed = 1, .stream = 1});
  const auto latents = on_grid<float>(Shape<2>{24, 576}, {.seed = 1, .stream = 2});
  Array<float, 3> values(Shape<3>{6, 4, 576});
  const Tensor tokens = at::empty({6, 4, reference::kTokenBytes}, at::kByte);
  for (std::int64_t i = 0; i < 24; ++i) {
    const auto kind = i % 2 == 0 ? reference::TileScale::exact : reference::TileScale::power_of_two;
    const auto token = reference::packed_token<float>(as_vector(at(latents.view(), i)), kind);
    std::ranges::copy(token, tokens.data_ptr<std::uint8_t>() + i * reference::kTokenBytes);
    mapped(at(values.view(), i / 4, i % 4)) = reference::unpacked_token<float>(token);
  }
  Named plain = c.arguments(), packed = c.arguments();
  plain["kv_cache"] = tensor_of(values);
  packed["kv_cache"] = tokens;
  for (Named* each : {&plain, &packed}) {
    (*each)["q"] = tensor_of(c.q);
    each->erase("value_dim");
  }
  const auto expected = checked_call("mla_decode", plain);
  const auto results = checked_call("mla_decode", packed);
  EXPECT_EQ(bytes_of(results[0].toTensor()), bytes_of(expected[0].toTensor()));
  EXPECT_EQ(bytes_of(results[1].toTensor()), bytes_of(expected[1].toTensor()));

  packed["kv_cache"] = at::zeros({6, 4, 655}, at::kByte);
  EXPECT_NE(complaint_of("mla_decode", packed)
                .find("kv_cache is expected to be [pages, page, 656] in bytes"),
            std::string::npos);
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

/// Rows of 5, 0 and 3 queries over 7, 4 and 0 keys, two heads.
struct Prompts {
  Array<float, 3> q = on_grid<float>(Shape<3>{8, 2, 12}, {.seed = 2, .stream = 1});
  Array<float, 3> k = on_grid<float>(Shape<3>{11, 2, 12}, {.seed = 2, .stream = 2});
  Array<float, 3> v = on_grid<float>(Shape<3>{11, 2, 8}, {.seed = 2, .stream = 3});
  Array<std::int32_t, 1> queries = ints({0, 5, 5, 8}), keys = ints({0, 7, 11, 11});

  Named arguments() const {
    return {{"q", tensor_of(q)},
            {"k", tensor_of(k)},
            {"v", tensor_of(v)},
            {"query_start_loc", tensor_of(queries)},
            {"key_start_loc", tensor_of(keys)},
            {"softmax_scale", 0.3}};
  }
};

TEST(MlaPrefillOperator, isItsReference) {
  const Prompts p;
  for (const bool causal : {true, false}) {
    Named arguments = p.arguments();
    arguments["causal"] = causal;
    const auto results = checked_call("mla_prefill", arguments);
    ASSERT_EQ(results.size(), 2u);
    Array<float, 3> out(Shape<3>{8, 2, 8});
    Array<float, 2> lse(Shape<2>{2, 8});
    reference::softmax_attention<float>(p.q, p.k, p.v, p.queries.view(), p.keys.view(),
                                        {.scale = 0.3, .causal = causal}, out, lse);
    EXPECT_EQ(bytes_of(results[0].toTensor()), bytes_of(tensor_of(out)));
    EXPECT_EQ(bytes_of(results[1].toTensor()), bytes_of(tensor_of(lse)));
  }
}

// Keys in two chunks, merged, are all keys; the second row's chunks have no key at all.
TEST(MlaPrefillOperator, chunksMergeIntoTheWhole) {
  const Prompts p;
  Named arguments = p.arguments();
  arguments["causal"] = false;
  const auto whole = checked_call("mla_prefill", arguments);
  const auto chunk = [&](const std::vector<std::int32_t>& keys, std::int64_t first) {
    Named part = arguments;
    part["k"] = tensor_of(p.k).slice(0, first);
    part["v"] = tensor_of(p.v).slice(0, first);
    part["query_start_loc"] = tensor_of(ints({0, 5}));
    part["q"] = tensor_of(p.q).slice(0, 0, 5);
    part["key_start_loc"] = tensor_of(ints({keys[0], keys[1]}));
    return checked_call("mla_prefill", part);
  };
  const auto a = chunk({0, 4}, 0), b = chunk({0, 3}, 4), none = chunk({0, 0}, 0);
  const auto merged = [](const auto& x, const auto& y) {
    return checked_call("merge_attention",
                        {{"out_a", x[0]}, {"lse_a", x[1]}, {"out_b", y[0]}, {"lse_b", y[1]}});
  };
  const auto both = merged(merged(none, a), b);
  EXPECT_TRUE(at::allclose(both[0].toTensor(), whole[0].toTensor().slice(0, 0, 5), 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(both[1].toTensor(), whole[1].toTensor().slice(1, 0, 5), 1e-5, 1e-6));
}

TEST(MlaPrefillOperator, refusesByName) {
  const Prompts p;
  const auto complaint = [&](const std::string& name, const c10::IValue& value) {
    Named arguments = p.arguments();
    arguments[name] = value;
    return complaint_of("mla_prefill", arguments);
  };
  EXPECT_NE(
      complaint("k", at::zeros({11, 2, 11})).find("k is expected to be [L, heads, width of q]"),
      std::string::npos);
  EXPECT_NE(
      complaint("key_start_loc", tensor_of(ints({0, 1, 2}))).find("key_start_loc is expected"),
      std::string::npos);
  EXPECT_NE(complaint("query_start_loc", tensor_of(ints({0, 5, 4, 8})))
                .find("query_start_loc is expected to be rising"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep::of_mla
