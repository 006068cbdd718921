// The fields that an engine's config.json must have, and how layers find their caches.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "cache_sim/policies/edge_llm/edge_llm_policy.hpp"
#include "cache_sim/policies/edge_llm/runtime_config.hpp"
#include "properties/support/program.hpp"

namespace lockstep::cache_sim {
namespace {

using nlohmann::json;
using namespace testing_support;

/// Two recurrent layers around one of attention, as an exporter writes it: layers of weights alone
/// are left out.
json right_config() {
  return {{"model_type", "hybrid_mamba"},
          {"num_hidden_layers", 5},
          {"num_linear_attn_layers", 2},
          {"num_attention_layers", 1},
          {"recurrent_state_num_heads", 8},
          {"recurrent_state_head_dim", 64},
          {"recurrent_state_size", 128},
          {"recurrent_state_dtype", "float32"},
          {"conv_dim", 768},
          {"conv_kernel", 4},
          {"conv_state_dtype", "float16"},
          {"layer_types", {"mamba", "attention", "mamba"}},
          {"kv_layer_configs", {nullptr, {{"num_kv_heads", 2}, {"head_dim", 128}}, nullptr}}};
}

std::string error_of(const json& document) {
  const Result<RuntimeConfig> parsed = parse_runtime_config(document);
  return parsed ? "" : parsed.error().text;
}

TEST(RuntimeConfig, saysWhichLayersThereAreAndWhatTheyKeep) {
  const Result<RuntimeConfig> config = parse_runtime_config(right_config());
  ASSERT_TRUE(config.has_value()) << config.error().text;
  EXPECT_EQ(config->layers.count(LayerKind::mamba), 2u);
  EXPECT_EQ(config->layers.count(LayerKind::attention), 1u);
  EXPECT_EQ(config->token_bytes, 2 * 2 * 128 * 2);
  EXPECT_EQ(config->state_bytes, 2 * (8 * 64 * 128 * 4 + 768 * 4 * 2));
}

// Without recurrent layers nothing is asked about states; without a count of attention layers, all
// decoder layers are.
TEST(RuntimeConfig, asksForStatesOnlyWhereThereAreAny) {
  const json attention = {{"model_type", "hybrid_mamba"},
                          {"num_hidden_layers", 2},
                          {"num_linear_attn_layers", 0},
                          {"layer_types", {"attention", "attention"}}};
  EXPECT_EQ(error_of(attention), "");
}

TEST(RuntimeConfig, namesTheFieldThatIsWrong) {
  struct Case {
    json changes;
    std::string error;
  };
  const Case cases[] = {
      {{{"model_type", "llama"}}, "field model_type: \"llama\" is not hybrid_mamba"},
      {{{"num_linear_attn_layers", 3}},
       "field num_linear_attn_layers: 3 layers, and layer_types has 2"},
      {{{"num_attention_layers", 2}},
       "field num_attention_layers: 2 layers, and layer_types has 1"},
      {{{"conv_dim", 0}}, "field conv_dim: 0 is not a whole number from 1 to 1048576"},
      {{{"recurrent_state_size", 12.5}},
       "field recurrent_state_size: 12.5 is not a whole number from 1 to 1048576"},
      {{{"recurrent_state_dtype", "float8"}},
       "field recurrent_state_dtype: \"float8\" is no type of a cache"},
      {{{"layer_types", {"mamba", "mlp", "attention"}}},
       "field layer_types: layer 1: `mlp` is neither attention nor mamba"},
      {{{"layer_types", json::array()}},
       "field layer_types: a model has at least one layer with KV or a state"},
      {{{"kv_layer_configs", {nullptr, nullptr, nullptr}}},
       "field kv_layer_configs: entry 1 is null where the layer is attention"},
      {{{"kv_layer_configs", {nullptr, {{"num_kv_heads", 2}}, nullptr}}},
       "field kv_layer_configs: entry 1, field head_dim: it is missing"},
      {{{"kv_layer_configs", {nullptr}}}, "field kv_layer_configs: 1 entry beside 3 layers"},
      {{{"conv_kernal", 4}}, "field conv_kernal: nobody knows it"},
  };
  for (const Case& one : cases) {
    json document = right_config();
    document.update(one.changes);
    EXPECT_EQ(error_of(document), one.error);
  }
  for (const char* const needed :
       {"model_type", "num_linear_attn_layers", "layer_types", "recurrent_state_dtype",
        "conv_state_dtype", "conv_dim", "recurrent_state_num_heads"}) {
    json document = right_config();
    document.erase(needed);
    EXPECT_EQ(error_of(document), std::string("field ") + needed + ": it is missing");
  }
}

TEST(RuntimeConfig, isReadWhereAConfigNamesIt) {
  const ScratchFolder folder;
  const std::string file = folder.write("config.json", right_config().dump());
  const std::string trace =
      folder.write("t.trace", "config kv_tokens=64 max_running=4 model_config=" + file +
                                  " policy=edge-llm\nadmit id=x tokens=a4\n"
                                  "extend id=x n=4\n");
  EXPECT_EQ(run_program({"replay", trace}).status, 0);
  folder.write("bad.json", "{\"model_type\": 1}");
  for (const auto& [name, said] :
       {std::pair{"bad.json", "bad.json: field model_type: 1 is not hybrid_mamba"},
        {".", ".: is a folder, not a file"}}) {
    const auto refused =
        run_program({"replay", trace, "--config", "model_config=" + folder.path(name)});
    EXPECT_EQ(refused.status, 2);
    EXPECT_NE(refused.err.find(said), std::string::npos) << refused.err;
  }
}

TEST(HybridLayers, findTheirCachesByTheirOwnKind) {
  const Result<HybridLayers> layers = HybridLayers::parse("mamba,attention,mamba,mamba,attention");
  ASSERT_TRUE(layers.has_value());
  EXPECT_EQ(layers->at(3).local, 2u);
  EXPECT_EQ(layers->at(4).local, 1u);
  EXPECT_EQ(layers->at(4).kind, LayerKind::attention);
  EXPECT_THROW(layers->at(5), ContractViolation);
  EXPECT_FALSE(HybridLayers::parse("mamba,,mamba").has_value());
}

// No two things share a slot: rows, the spare row, snapshots and captured prefixes of every layer.
TEST(EdgeLlmLayout, givesEverythingItsOwnSlot) {
  Config config;
  config.kv_tokens = 40;
  config.max_running = 4;
  config.state_slots = 3;
  const auto layout = EdgeLlmLayout::of(config, *HybridLayers::parse("mamba,attention,mamba"));
  std::vector<int> taken(static_cast<std::size_t>(layout.states()) + 1);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    for (std::uint32_t row = 0; row <= layout.scratch(); ++row)
      ++taken.at(layout.state(layer, row).value);
    for (std::uint32_t row = 0; row < layout.rows; ++row)
      for (std::uint32_t t = 0; t < EdgeLlmLayout::kMostVerified; ++t)
        ++taken.at(layout.snapshot(layer, row, t).value);
    for (std::uint32_t place = 0; place < layout.captures; ++place)
      ++taken.at(layout.captured_state(layer, place).value);
  }
  EXPECT_EQ(taken[0], 0);  // the padding target
  EXPECT_EQ(std::ranges::count(taken, 1), layout.states());
  EXPECT_EQ(layout.kv_row(0, layout.captured_row(2)) + layout.row_size, layout.kv() + 1);
}

}  // namespace
}  // namespace lockstep::cache_sim
