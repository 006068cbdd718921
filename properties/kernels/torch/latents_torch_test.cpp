// torch.ops.lockstep.scale_to_e4m3, latent_cache_gather, mla_layer, padded_mla_layer and
// mla_rope_decode on the CPU: they are their references, agree with one another where they are
// forms of the same layer, and refuse by name.
// The GPU's side and torch.compile: properties/kernels/torch/torch_ops_check.py.
#include "properties/kernels/torch/torch_operator.hpp"
#include "properties/support/laws.hpp"
#include "properties/support/torch_bridge.hpp"
#include "reference/attention/latent_token.hpp"
#include "reference/attention/mla_rope_decode.hpp"
#include "reference/layers/batched_product.hpp"

namespace lockstep::of_latents {
namespace {

using namespace testing_support;
using at::Tensor;

template <std::size_t Rank>
Array<float, Rank> draw(const Shape<Rank>& shape, std::uint64_t stream) {
  return on_grid<float>(shape, {.seed = 31, .stream = stream});
}
Tensor list(const Sizes& values) {
  return tensor_of(ints(values));
}
Tensor drawn(const Sizes& shape, std::uint64_t stream) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return tensor_of(draw<1>({count}, stream)).view(shape);
}
::testing::AssertionResult near(const Tensor& a, const Tensor& b, double apart = 1e-5) {
  if (a.sizes() == b.sizes() && at::allclose(a, b, apart, apart))
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << a << "\nis not\n" << b;
}

::testing::AssertionResult says(const std::string& complaint, const std::string& words) {
  if (complaint.find(words) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "it said: " << complaint.substr(0, 200);
}

// --- scale_to_e4m3 ------------------------------------------------------------------------------

TEST(ScaleToE4m3Operator, isItsReference) {
  auto x = draw<3>({2, 3, 200}, 32);
  for (std::int64_t k = 128; k < 200; ++k) x(1, 2, k) = 0;  // a group of zeros
  for (const bool by_groups : {true, false}) {
    const auto results =
        checked_call("scale_to_e4m3", {{"x", tensor_of(x)}, {"by_groups", by_groups}});
    const auto scaled = reference::scaled_numbers<float>(x.view(), by_groups);
    EXPECT_EQ(bytes_of(results[0].toTensor().to(at::kFloat)), bytes_of(tensor_of(scaled.numbers)));
    EXPECT_EQ(bytes_of(results[1].toTensor()), bytes_of(tensor_of(scaled.scale)));
  }
  EXPECT_TRUE(says(complaint_of("scale_to_e4m3", {{"x", at::zeros({2, 8})}}),
                   "x is expected to have 3 dimensions"));
}

// It gives the inputs of batched_product: the product of the values, but for e4m3's rounding.
TEST(ScaleToE4m3Operator, givesWhatAProductTakes) {
  const Tensor x = drawn({2, 3, 200}, 1), w = drawn({2, 136, 200}, 2);
  const Tensor exact = at::bmm(x, w.transpose(1, 2));
  for (const bool by_groups : {true, false}) {
    const auto of_x = call("scale_to_e4m3", {{"x", x}, {"by_groups", by_groups}});
    const auto of_w = call("scale_to_e4m3", {{"x", w}, {"by_groups", false}});
    const auto product = call(
        "batched_product",
        {{"x", of_x[0]}, {"weight", of_w[0]}, {"x_scale", of_x[1]}, {"weight_scale", of_w[1]}});
    const Tensor apart = product[0].toTensor().to(at::kFloat) - exact;
    EXPECT_LT((apart.norm() / exact.norm()).item<double>(), 0.05);
  }
}

// --- latent_cache_gather ------------------------------------------------------------------------

/// Requests of 9, 0 and 6 tokens, of which 4, 0 and 1 are new, in pages of four; wild behind them.
struct Cached {
  Sizes lengths{9, 0, 6};
  Tensor table = tensor_of(ints({5, 2, 0, 2147480000, 2147480000, 2147480000, 2147480000, -7, 1, 6,
                                 2147480000, -1}))
                     .view({3, 4});
  Tensor starts = list({0, 4, 4, 5});

  std::int64_t slot(std::int64_t r, std::int64_t i) const {
    return table[r][i / 4].item<std::int64_t>() * 4 + i % 4;
  }
  Named arguments(const Tensor& cache, std::int64_t rows) const {
    return {{"kv_cache", cache},
            {"block_table", table},
            {"seq_lens", list(lengths)},
            {"query_start_loc", starts},
            {"rows", rows}};
  }
};

// Written tokens come out again, one request behind the other, as the cache has rounded them.
TEST(LatentCacheGatherOperator, givesWhatWasWritten) {
  const Cached c;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kFloat8_e4m3fn, at::kByte}) {
    const bool bytes = type == at::kByte, scaled = type == at::kFloat8_e4m3fn;
    const std::int64_t dc = bytes ? 512 : 8, dr = bytes ? 64 : 4;
    const Tensor cache = bytes ? at::full({7, 4, 656}, 255, type)
                               : at::full({7, 4, 12}, std::nan(""), at::kFloat).to(type);
    const Tensor latents = drawn({15, dc + dr}, 3);
    Sizes slots;
    for (std::int64_t i = 0; i < 9; ++i) slots.push_back(c.slot(0, i));
    for (std::int64_t i = 0; i < 6; ++i) slots.push_back(c.slot(2, i));
    Named write{{"latent", latents.narrow(1, 0, dc)},
                {"k_pe", latents.narrow(1, dc, dr)},
                {"q_pe", at::zeros({15, 0, dr})},
                {"kv_cache", cache},
                {"slots", list(slots)},
                {"positions", at::zeros({15}, at::kInt)},
                {"frequencies", at::ones({dr / 2})}};
    Named read = c.arguments(cache, 17);
    if (scaled) write["kv_scale"] = read["kv_scale"] = at::full({1}, 0.25f);
    call("latent_cache_write", write);
    const auto all = checked_call("latent_cache_gather", read);
    EXPECT_EQ(bytes_of(all[1].toTensor()), bytes_of(list({0, 9, 9, 15})));
    const Tensor got = all[0].toTensor().to(at::kFloat);
    EXPECT_TRUE(at::equal(got.narrow(0, 15, 2), at::zeros({2, dc + dr})));
    const Tensor values = got.narrow(0, 0, 15);
    if (type == at::kFloat) {
      EXPECT_TRUE(at::equal(values, latents));
    }
    EXPECT_TRUE(near(values, latents, scaled || bytes ? 0.07 : 4e-3));

    // Tokens 2 … 4 of what lay before the new tokens (5, 0 and 5), and room for four of the six.
    read["begin"] = std::int64_t{2};
    read["size"] = std::int64_t{3};
    read["prefix"] = true;
    read["rows"] = std::int64_t{4};
    const auto part = checked_call("latent_cache_gather", read);
    EXPECT_EQ(bytes_of(part[1].toTensor()), bytes_of(list({0, 3, 3, 6})));
    EXPECT_TRUE(at::equal(part[0].toTensor().to(at::kFloat),
                          at::cat({got.narrow(0, 2, 3), got.narrow(0, 11, 1)})));
  }
}

TEST(LatentCacheGatherOperator, refusesByName) {
  const Cached c;
  const Named good = c.arguments(at::zeros({7, 4, 12}), 15);
  EXPECT_EQ(complaint_of("latent_cache_gather", good), "");
  const auto complaint = [&](const std::string& name, const c10::IValue& value) {
    Named bad = good;
    bad[name] = value;
    return complaint_of("latent_cache_gather", bad);
  };
  EXPECT_TRUE(says(complaint("kv_cache", at::zeros({5, 4, 12})),
                   "block_table is expected to be pages before a request's end; got 5"));
  EXPECT_TRUE(says(complaint("kv_cache", at::zeros({7, 4, 12}, at::kByte)),
                   "kv_cache is expected to be [pages, page, 656] in bytes"));
  EXPECT_TRUE(says(complaint("seq_lens", list({17, 0, 6})), "seq_lens is expected"));
  EXPECT_TRUE(says(complaint("seq_lens", list({9, 0})), "block_table is expected"));
  EXPECT_TRUE(says(complaint("query_start_loc", list({0, 4, 5})), "query_start_loc is expected"));
  EXPECT_TRUE(says(complaint("rows", std::int64_t{-1}), "rows, begin, size is expected"));
  EXPECT_TRUE(says(complaint("kv_scale", at::ones({1})), "kv_scale is expected to be absent"));
}

// --- The layer's forms --------------------------------------------------------------------------

constexpr std::int64_t kHeads = 3, kLatent = 12, kNope = 6, kRotary = 4, kValues = 5, kHidden = 10;

/// A layer, and two requests of 7 and 4 tokens of which 3 and 4 are new, in pages of four.
struct Layer {
  explicit Layer(std::int64_t low)
      : low(low),
        qkv_a(drawn({low + kLatent + kRotary, kHidden}, 11)),
        q_b(drawn({kHeads * (kNope + kRotary), low > 0 ? low : kHidden}, 12)),
        kv_b(drawn({kHeads * (kNope + kValues), kLatent}, 13)),
        o_proj(drawn({kHidden, kHeads * kValues}, 14)),
        kv_a_norm(tensor_of(draw<1>({kLatent}, 15)) + 1) {
    if (low > 0) q_a_norm = tensor_of(draw<1>({low}, 16)) + 1;
  }
  Tensor per_head() const { return kv_b.view({kHeads, kNope + kValues, kLatent}); }
  Tensor w_kc() const { return per_head().narrow(1, 0, kNope).transpose(1, 2).contiguous(); }
  Tensor w_vc() const { return per_head().narrow(1, kNope, kValues).contiguous(); }

  /// Tokens first[r] … last[r] of every request.
  Named tokens(const Sizes& first, const Sizes& last) const {
    Sizes positions, slots, starts{0};
    for (std::size_t r = 0; r < first.size(); ++r) {
      for (std::int64_t i = first[r]; i < last[r]; ++i) {
        positions.push_back(i);
        slots.push_back(table[static_cast<std::int64_t>(r)][i / 4].item<std::int64_t>() * 4 +
                        i % 4);
      }
      starts.push_back(static_cast<std::int64_t>(positions.size()));
    }
    return {{"positions", list(positions)},
            {"slots", list(slots)},
            {"block_table", table},
            {"seq_lens", list(last)},
            {"query_start_loc", list(starts)}};
  }
  Tensor hidden_of(const Sizes& first, const Sizes& last) const {
    std::vector<Tensor> rows;
    for (std::size_t r = 0; r < first.size(); ++r)
      rows.push_back(hidden[r].narrow(0, first[r], last[r] - first[r]));
    return at::cat(rows);
  }
  Named projections(Named arguments) const {
    arguments.insert({{"qkv_a", qkv_a},
                      {"q_a_norm", low > 0 ? c10::IValue(q_a_norm) : c10::IValue()},
                      {"q_b", q_b},
                      {"kv_a_norm", kv_a_norm},
                      {"kv_b", kv_b},
                      {"o_proj", o_proj},
                      {"frequencies", frequencies},
                      {"softmax_scale", 0.3},
                      {"magnitude", 1.25}});
    return arguments;
  }
  Named layer(const Sizes& first, const Sizes& last, const Tensor& cache) const {
    Named all = projections(tokens(first, last));
    all.insert({{"hidden", hidden_of(first, last)},
                {"kv_cache", cache},
                {"w_kc", w_kc()},
                {"w_vc", w_vc()}});
    return all;
  }
  Named padded(const Sizes& first, const Sizes& last, const Tensor& k, const Tensor& v) const {
    Named all = projections(tokens(first, last));
    all.insert({{"hidden", hidden_of(first, last)}, {"k_cache", k}, {"v_cache", v}});
    return all;
  }

  std::int64_t low;
  Tensor qkv_a, q_b, kv_b, o_proj, kv_a_norm, q_a_norm;
  Tensor frequencies = tensor_of(on_grid<float>(Shape<1>{kRotary / 2}, {.seed = 3})).abs();
  Tensor table = tensor_of(ints({3, 1, 0, 2147480000})).view({2, 2});
  std::vector<Tensor> hidden{drawn({7, kHidden}, 17), drawn({4, kHidden}, 18)};
};

const Sizes kNone{0, 0}, kBefore{4, 0}, kAll{7, 4};

Tensor empty_latents() {
  return at::full({4, 4, kLatent + kRotary}, std::nan(""), at::kFloat);
}
Tensor empty_heads(std::int64_t width = 14) {
  return at::full({4, 4, kHeads, width}, std::nan(""), at::kFloat);
}

// A prompt at once, or its beginning and then the rest: the padded form, over decompressed keys and
// values, gives what the latents give.
TEST(PaddedMlaLayerOperator, isTheLayerOverLatents) {
  for (const std::int64_t low : {7, 0}) {
    const Layer layer(low);
    const Tensor latents = empty_latents(), k = empty_heads(), v = empty_heads();
    const Tensor whole = checked_call("mla_layer", layer.layer(kNone, kAll, latents))[0].toTensor();
    const Tensor before =
        checked_call("padded_mla_layer", layer.padded(kNone, kBefore, k, v))[0].toTensor();
    const Tensor rest =
        checked_call("padded_mla_layer", layer.padded(kBefore, kAll, k, v))[0].toTensor();
    EXPECT_TRUE(near(at::cat({before, rest}), whole));
    // Keys and values lie in their slots, zeros behind them, and nothing elsewhere.
    for (const auto& [cache, width] : {std::pair(k, kNope + kRotary), std::pair(v, kValues)}) {
      const Tensor slots = cache.flatten(0, 1), written = slots.isnan().logical_not();
      EXPECT_EQ(written.sum().item<std::int64_t>(), 11 * kHeads * 14);
      const Tensor used =
          slots.index_select(0, layer.tokens(kNone, kAll)["slots"].toTensor().to(at::kLong));
      EXPECT_TRUE(
          at::equal(used.narrow(2, width, 14 - width), at::zeros({11, kHeads, 14 - width})));
      EXPECT_GT(used.narrow(2, 0, width).abs().mean().item<float>(), 0);
    }
  }
}

// The cached values are the reference's decompressed ones, by bits.
TEST(PaddedMlaLayerOperator, cachesWhatTheReferenceDecompresses) {
  const Layer layer(0);
  const Tensor latents = empty_latents(), k = empty_heads(), v = empty_heads();
  call("mla_layer", layer.layer(kNone, kAll, latents));
  call("padded_mla_layer", layer.padded(kNone, kAll, k, v));
  const auto read = call("latent_cache_gather", {{"kv_cache", latents},
                                                 {"block_table", layer.table},
                                                 {"seq_lens", list(kAll)},
                                                 {"query_start_loc", list({0, 7, 11})},
                                                 {"rows", std::int64_t{11}}});
  const Tensor rows = read[0].toTensor();
  const auto part = [&](std::int64_t first, std::int64_t columns) {
    return make_view(static_cast<const float*>(rows.data_ptr()) + first, Shape<2>{11, columns},
                     Shape<2>{kLatent + kRotary, 1});
  };
  const auto kv_b = make_view(static_cast<const float*>(layer.kv_b.data_ptr()),
                              Shape<2>{kHeads * (kNope + kValues), kLatent});
  const auto up = reference::split_kv_b<float>(kv_b, kHeads, kNope);
  const auto [keys, values] =
      reference::decompressed<float>(part(0, kLatent), part(kLatent, kRotary), up, 14, 14);
  const Tensor slots = layer.tokens(kNone, kAll)["slots"].toTensor().to(at::kLong);
  const auto in_order = [&](const Tensor& cache) {
    return cache.flatten(0, 1).index_select(0, slots);
  };
  EXPECT_EQ(bytes_of(in_order(k)), bytes_of(tensor_of(keys)));
  EXPECT_EQ(bytes_of(in_order(v)), bytes_of(tensor_of(values)));
}

// A token without a slot leaves nothing, and still attends to what is cached.
TEST(PaddedMlaLayerOperator, aSlotBelowZeroIsNowhere) {
  const Layer layer(0);
  const Tensor k = empty_heads(), v = empty_heads();
  call("padded_mla_layer", layer.padded(kNone, kBefore, k, v));
  const std::string before = bytes_of(k) + bytes_of(v);
  Named more = layer.padded(kBefore, kAll, k, v);
  more["slots"] = at::full({7}, -1, at::kInt);
  more["seq_lens"] = list({4, 0});
  const Tensor out = call("padded_mla_layer", more)[0].toTensor();
  EXPECT_EQ(bytes_of(k) + bytes_of(v), before);
  EXPECT_TRUE(out.isfinite().all().item<bool>());
  EXPECT_TRUE(at::equal(out.narrow(0, 3, 4), at::zeros({4, kHidden})));  // an empty context
}

TEST(PaddedMlaLayerOperator, refusesByName) {
  const Layer layer(7);
  const Named good = layer.padded(kNone, kAll, empty_heads(), empty_heads());
  const auto complaint = [&](const std::string& name, const c10::IValue& value) {
    Named bad = copies_of(good);
    bad[name] = value;
    return complaint_of("padded_mla_layer", bad);
  };
  EXPECT_TRUE(says(complaint("k_cache", empty_heads(9)), "v_cache is expected"));
  EXPECT_TRUE(says(complaint("k_cache", at::zeros({4, 4, 14})), "k_cache is expected to have 4"));
  EXPECT_TRUE(says(complaint("v_cache", empty_heads().to(at::kBFloat16)), "v_cache is expected"));
  EXPECT_TRUE(says(complaint("qkv_a", at::zeros({16, kHidden})), "qkv_a is expected"));
  EXPECT_TRUE(says(complaint("q_a_norm", at::zeros({6})), "qkv_a is expected"));
  EXPECT_TRUE(says(complaint("kv_b", at::zeros({18, kLatent})), "q_b, kv_b is expected"));
  EXPECT_TRUE(says(complaint("slots", list({0, 1})), "slots is expected"));
  EXPECT_TRUE(says(complaint("query_start_loc", list({0, 7})), "query_start_loc is expected"));
  EXPECT_TRUE(says(complaint("seq_lens", list({9, 4})), "rows and contexts that exist"));
  EXPECT_TRUE(says(complaint("seq_lens", list({7, 5})), "block_table is expected"));
  EXPECT_TRUE(says(complaint("interleaved", false), "interleaved is expected to be true"));
}

// --- mla_rope_decode ----------------------------------------------------------------------------

TEST(MlaRopeDecodeOperator, isItsReference) {
  const Layer layer(0);
  for (const bool interleaved : {true, false}) {
    Array<float, 3> cache = draw<3>({4, 4, kLatent + kRotary}, 33);
    const auto q_nope = draw<3>({2, kHeads, kNope}, 34), q_pe = draw<3>({2, kHeads, kRotary}, 35);
    const auto latent = draw<2>({2, kLatent}, 36), k_pe = draw<2>({2, kRotary}, 37);
    const auto positions = ints({5, 3}), slots = ints({1 * 4 + 1, -1}), lengths = ints({6, 4});
    const auto table = ints({3, 1, 0, 2147480000});
    const Tensor kv_cache = tensor_of(cache).clone();
    const auto results =
        checked_call("mla_rope_decode", {{"q", at::cat({tensor_of(q_nope), tensor_of(q_pe)}, 2)},
                                         {"kv", at::cat({tensor_of(latent), tensor_of(k_pe)}, 1)},
                                         {"positions", tensor_of(positions)},
                                         {"slots", tensor_of(slots)},
                                         {"kv_cache", kv_cache},
                                         {"block_table", layer.table},
                                         {"seq_lens", tensor_of(lengths)},
                                         {"w_kc", layer.w_kc()},
                                         {"w_vc", layer.w_vc()},
                                         {"frequencies", layer.frequencies},
                                         {"softmax_scale", 0.3},
                                         {"magnitude", 1.25},
                                         {"interleaved", interleaved}});
    const auto kv_b = make_view(static_cast<const float*>(layer.kv_b.data_ptr()),
                                Shape<2>{kHeads * (kNope + kValues), kLatent});
    reference::Rope<float> rope{Vector<float>(kRotary / 2), 1.25f};
    for (std::int64_t i = 0; i < kRotary / 2; ++i)
      rope.frequencies(i) = layer.frequencies[i].item<float>();
    Array<float, 3> out(Shape<3>{2, kHeads, kValues});
    reference::mla_rope_decode<float>({.q_nope = q_nope.view(),
                                       .q_pe = q_pe.view(),
                                       .latent = latent.view(),
                                       .k_pe = k_pe.view(),
                                       .positions = positions.view(),
                                       .slots = slots.view(),
                                       .block_table = make_view(table.data(), Shape<2>{2, 2}),
                                       .seq_lens = lengths.view(),
                                       .softmax_scale = 0.3,
                                       .pairs = interleaved ? reference::RopePairs::interleaved
                                                            : reference::RopePairs::half_split},
                                      reference::split_kv_b<float>(kv_b, kHeads, kNope), rope,
                                      cache.view(), out.view());
    EXPECT_EQ(bytes_of(kv_cache), bytes_of(tensor_of(cache)));
    EXPECT_TRUE(near(results[0].toTensor(), tensor_of(out)));
  }
}

// It is what lies between the projections of mla_layer, over every kind of cache.
TEST(MlaRopeDecodeOperator, isTheLayerBetweenItsProjections) {
  const Layer layer(0);
  for (const at::ScalarType type : {at::kFloat, at::kFloat8_e4m3fn}) {
    const Tensor cache = empty_latents().to(type), other = cache.clone();
    Named whole = layer.layer(kNone, kAll, cache), between = layer.tokens(kNone, kAll);
    const Tensor hidden = whole["hidden"].toTensor();
    between.insert({{"q", at::mm(hidden, layer.q_b.t()).view({11, kHeads, kNope + kRotary})},
                    {"kv", at::mm(hidden, layer.qkv_a.t())},
                    {"kv_a_norm", layer.kv_a_norm},
                    {"kv_cache", other},
                    {"w_kc", layer.w_kc()},
                    {"w_vc", layer.w_vc()},
                    {"frequencies", layer.frequencies},
                    {"softmax_scale", 0.3},
                    {"magnitude", 1.25}});
    if (type != at::kFloat) whole["kv_scale"] = between["kv_scale"] = at::full({1}, 0.02f);
    const Tensor expected = checked_call("mla_layer", whole)[0].toTensor();
    const Tensor heads = checked_call("mla_rope_decode", between)[0].toTensor();
    // Numbers of e4m3 may fall on either side of a boundary: products were summed in another order.
    EXPECT_TRUE(near(at::mm(heads.reshape({11, kHeads * kValues}), layer.o_proj.t()), expected,
                     type == at::kFloat ? 1e-4 : 0.1));
  }
}

// Weights in e4m3 with scales stand for their values.
TEST(MlaRopeDecodeOperator, takesScaledWeights) {
  const Layer layer(0);
  Named scaled = layer.tokens(kNone, kAll);
  scaled.insert({{"q", drawn({11, kHeads, kNope + kRotary}, 21)},
                 {"kv", drawn({11, kLatent + kRotary}, 22)},
                 {"kv_cache", empty_latents()},
                 {"frequencies", layer.frequencies},
                 {"softmax_scale", 0.3}});
  Named plain = copies_of(scaled);
  for (const auto& [name, w] : {std::pair("w_kc", layer.w_kc()), std::pair("w_vc", layer.w_vc())}) {
    const auto numbers = call("scale_to_e4m3", {{"x", w}, {"by_groups", false}});
    scaled[name] = numbers[0];
    scaled[std::string(name) + "_scale"] = numbers[1];
    plain[name] = numbers[0].toTensor().to(at::kFloat) * numbers[1].toTensor();
  }
  EXPECT_TRUE(near(checked_call("mla_rope_decode", scaled)[0].toTensor(),
                   checked_call("mla_rope_decode", plain)[0].toTensor()));
  scaled["w_kc_scale"] = at::ones({2, 1, 1});
  EXPECT_TRUE(says(complaint_of("mla_rope_decode", scaled), "w_kc_scale is expected to be"));
  scaled["w_kc_scale"] = c10::IValue();
  EXPECT_TRUE(says(complaint_of("mla_rope_decode", scaled),
                   "w_kc_scale, w_vc_scale is expected to be given"));
}

TEST(MlaRopeDecodeOperator, refusesByName) {
  const Layer layer(0);
  Named good = layer.tokens(kNone, kAll);
  good.insert({{"q", drawn({11, kHeads, kNope + kRotary}, 21)},
               {"kv", drawn({11, kLatent + kRotary}, 22)},
               {"kv_cache", empty_latents()},
               {"w_kc", layer.w_kc()},
               {"w_vc", layer.w_vc()},
               {"frequencies", layer.frequencies},
               {"softmax_scale", 0.3}});
  const auto complaint = [&](const std::string& name, const c10::IValue& value) {
    Named bad = copies_of(good);
    bad[name] = value;
    return complaint_of("mla_rope_decode", bad);
  };
  EXPECT_TRUE(says(complaint("q", drawn({11, kHeads, 9}, 21)), "q is expected to be [T, heads"));
  EXPECT_TRUE(says(complaint("kv", drawn({11, 15}, 22)), "kv is expected to be [T, latent"));
  EXPECT_TRUE(says(complaint("kv_cache", at::zeros({4, 4, 15})), "kv_cache is expected"));
  EXPECT_TRUE(says(complaint("w_vc", at::zeros({2, kValues, kLatent})), "w_vc is expected"));
  EXPECT_TRUE(says(complaint("kv_a_norm", at::ones({kLatent + 1})), "kv_a_norm is expected"));
  EXPECT_TRUE(says(complaint("query_start_loc", c10::IValue()),
                   "q is expected to be of as many tokens for each request; got 11"));
}

}  // namespace
}  // namespace lockstep::of_latents
