// Checkpoints of hybrid models: with the config.json that transformers writes
// (fixtures/models/hybrid_configs.json) and weights by its names, a model has the logits of its
// preset; what is missing, wrong or unknown is named.
#include "reference/models/hybrid/hybrid_checkpoint.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "properties/reference/models/hybrid/hybrid_memory.hpp"
#include "properties/reference/models/hybrid/preset_checkpoint.hpp"
#include "properties/support/program.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using nlohmann::json;
using testing::HasSubstr;

TEST(HybridCheckpoint, hasTheLogitsOfItsWeights) {
  for (const std::string_view preset : reference::hybrid_presets()) {
    const Checkpoint one{std::string(preset)};
    const auto read = one.read();
    ASSERT_TRUE(read) << read.error().text;
    const HybridModel wanted(one.model, one.weights),
        model(*read, reference::hybrid_weights(*read));
    const Text text = drawn_text(1, 24, wanted.vocabulary());
    EXPECT_EQ(plain_run(model, text).logits, plain_run(wanted, text).logits) << preset;
  }
}

// A token beyond the vocabulary is drawn, with the deviation of the table.
TEST(HybridCheckpoint, tokensBeyondTheVocabularyDiffer) {
  Checkpoint one("tiny-qwen3");
  for (float& x : one.tensors.at("model.embed_tokens.weight").values) x *= 3;
  const auto read = one.read();
  ASSERT_TRUE(read);
  const reference::HybridWeights weights = reference::hybrid_weights(*read);
  Numbers a(32), b(32), c(32);
  reference::embed(weights, 63, a);
  reference::embed(weights, 64, b);
  reference::embed(weights, 65, c);
  EXPECT_EQ(a, Numbers(weights.embedding.values.end() - 32, weights.embedding.values.end()));
  EXPECT_NE(b, c);
  EXPECT_NEAR(weights.embedding_scale, 3, 0.1);
}

TEST(HybridCheckpoint, mayTieItsHeadAndNameItsLayersByAPattern) {
  Checkpoint tied("tiny-qwen3");
  tied.config["tie_word_embeddings"] = true;
  tied.tensors.erase("lm_head.weight");
  const auto read = tied.read();
  ASSERT_TRUE(read) << read.error().text;
  EXPECT_EQ(reference::hybrid_weights(*read).tensors.at("lm_head.weight").values,
            tied.weights.embedding.values);
  Checkpoint pattern("tiny-nemotron-h");
  pattern.config.erase("layers_block_type");
  pattern.config["hybrid_override_pattern"] = "ME*M-";
  EXPECT_EQ(pattern.refusal(), "");
}

// A draft module stands beside the model, in DeepSeek-V3's checkpoint with copies of what it
// shares.
TEST(HybridCheckpoint, mayHaveADraftModule) {
  for (const char* const preset : {"tiny-qwen3-next", "tiny-deepseek-v3"}) {
    Checkpoint one(preset);
    const reference::HybridConfig draft = *reference::hybrid_draft(one.model);
    reference::HybridWeights weights = reference::drawn_hybrid(draft);
    weights.embedding = one.weights.embedding;
    for (auto& [name, tensor] : weights.tensors) {
      Checkpoint::round(tensor);
      one.store(name, tensor);
    }
    if (draft.last_norm.find("shared_head") != std::string::npos) {
      one.store("model.layers.3.embed_tokens.weight", weights.embedding);
      one.store("model.layers.3.shared_head.head.weight", weights.tensors.at("lm_head.weight"));
    }
    const auto read = one.read();
    ASSERT_TRUE(read) << read.error().text;
    const reference::HybridConfig own = *reference::hybrid_draft(*read);
    const HybridModel wanted(draft, weights), module(own, reference::hybrid_weights(own));
    const Text text = drawn_text(1, 12, wanted.vocabulary());
    const PlainRun plain = plain_run({one.model, one.weights}, text);
    EXPECT_EQ(draft_run(module, text, plain).logits, draft_run(wanted, text, plain).logits);

    auto norm = one.tensors.extract(draft.last_norm);
    EXPECT_THAT(one.refusal(), HasSubstr(draft.last_norm + " is missing"));
    one.tensors.insert(std::move(norm));
    if (!one.tensors.contains("model.layers.3.embed_tokens.weight")) continue;
    one.tensors["model.layers.3.embed_tokens.weight"].values[5] += 1;
    EXPECT_THAT(one.refusal(),
                HasSubstr("model.layers.3.embed_tokens.weight is no copy of the model's"));
  }
}

TEST(HybridCheckpoint, mayStandInSeveralFiles) {
  const auto read = [](const std::string& place_of_the_norm) {
    Checkpoint one("tiny-qwen3");
    std::map<std::string, Floats> first, second;
    json map = json::object();
    for (const auto& [name, tensor] : one.tensors) {
      const bool is_first = name < "model.layers.1";
      (is_first ? first : second)[name] = tensor;
      map[name] = is_first ? "a.safetensors" : "b.safetensors";
    }
    if (place_of_the_norm == "both") first["model.norm.weight"] = second["model.norm.weight"];
    if (place_of_the_norm == "outside") map["model.norm.weight"] = "../b.safetensors";
    one.folder.write("a.safetensors", safetensors_of(first));
    one.folder.write("b.safetensors", safetensors_of(second));
    one.folder.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
    one.tensors.clear();
    return one.refusal();
  };
  EXPECT_EQ(read("one file"), "");
  EXPECT_EQ(read("both"), "b.safetensors: model.norm.weight is in another file, too");
  EXPECT_EQ(read("outside"),
            "model.safetensors.index.json: weight_map: model.norm.weight is in "
            "\"../b.safetensors\", no file beside it");
}

TEST(HybridCheckpoint, isRefusedWithTheFieldOrTensor) {
  const auto refused = [](const char* preset, const auto& spoil) {
    Checkpoint one(preset);
    spoil(one);
    return one.refusal();
  };
  EXPECT_EQ(refused("tiny-qwen3", [](Checkpoint& one) { one.config["model_type"] = "gpt2"; }),
            "config.json: model_type is \"gpt2\"; nemotron_h, qwen3_next, deepseek_v3 and qwen3 "
            "are known");
  EXPECT_EQ(refused("tiny-nemotron-h", [](Checkpoint& one) { one.config.erase("n_groups"); }),
            "config.json: n_groups is null, no size from 1 to 16777216");
  EXPECT_EQ(refused("tiny-nemotron-h",
                    [](Checkpoint& one) { one.config["layers_block_type"][1] = "rwkv"; }),
            "config.json: layers_block_type has \"rwkv\"");
  EXPECT_EQ(
      refused("tiny-qwen3-next", [](Checkpoint& one) { one.config["norm_topk_prob"] = false; }),
      "config.json: norm_topk_prob is false; only true is known here");
  EXPECT_EQ(refused("tiny-deepseek-v3",
                    [](Checkpoint& one) { one.config["rope_parameters"]["beta_fast"] = 16; }),
            "config.json: beta_fast is 16; only 32 is known here");
  EXPECT_EQ(refused("tiny-qwen3", [](Checkpoint& one) { one.config["rope_parameters"] = 3; }),
            "config.json: rope_type is null; only \"default\" is known here");
  EXPECT_EQ(refused("tiny-deepseek-v3", [](Checkpoint& one) { one.config["topk_group"] = 5; }),
            "config.json: 2 of 8 experts in 5 of 4 groups cannot be chosen");
  EXPECT_EQ(refused("tiny-window", [](Checkpoint& one) { one.config["sliding_window"] = nullptr; }),
            "config.json: sliding_window is null, no size from 1 to 16777216");
  EXPECT_EQ(refused("tiny-window", [](Checkpoint& one) { one.config["use_sliding_window"] = 1; }),
            "config.json: use_sliding_window is 1, no true or false");
  const auto with_share = [&](const json& share) {
    return refused("tiny-qwen3-next", [&](Checkpoint& one) {
      one.config["rope_parameters"]["partial_rotary_factor"] = share;
    });
  };
  EXPECT_EQ(with_share("0.25"),
            "config.json: partial_rotary_factor is \"0.25\", no number above 0");
  EXPECT_EQ(with_share(1e300), "config.json: partial_rotary_factor is above 1");
  EXPECT_THAT(refused("tiny-qwen3", [](Checkpoint& one) { one.config["vocab_size"] = 1 << 24; }),
              HasSubstr("config.json: such a model has more than 134217728 numbers"));
  EXPECT_THAT(refused("tiny-qwen3", [](Checkpoint& one) { one.tensors.erase("lm_head.weight"); }),
              HasSubstr("lm_head.weight is missing"));
  EXPECT_THAT(refused("tiny-qwen3-next",
                      [](Checkpoint& one) {
                        one.tensors.erase("model.layers.1.mlp.experts.3.up_proj.weight");
                      }),
              HasSubstr("model.layers.1.mlp.experts.3.up_proj.weight is missing"));
  EXPECT_THAT(refused("tiny-nemotron-h",
                      [](Checkpoint& one) {
                        one.tensors.at("backbone.layers.0.mixer.D").shape = {2, 2};
                      }),
              HasSubstr("backbone.layers.0.mixer.D has the shape [2,2], config.json asks for [4]"));
  EXPECT_THAT(refused("tiny-qwen3",
                      [](Checkpoint& one) {
                        one.tensors["model.layers.7.norm"] = {{1}, {0}};
                      }),
              HasSubstr("model.layers.7.norm is no tensor of this model"));
}

}  // namespace
}  // namespace lockstep
