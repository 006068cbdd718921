// Qwen3 with drawn weights: the logits of transformers, and the laws of a cache of fixed length in
// a whole model. What a checkpoint may not say is refused in one sentence.
#include "reference/models/qwen3.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "properties/support/laws.hpp"
#include "properties/support/program.hpp"
#include "properties/support/special_values.hpp"
#include "reference/models/safetensors.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using nlohmann::json;
using reference::Qwen3;
using reference::Qwen3Config;

Qwen3Config shape_of_fields(const json& fields) {
  return {.vocab_size = fields["vocab_size"],
          .hidden_size = fields["hidden_size"],
          .intermediate_size = fields["intermediate_size"],
          .num_hidden_layers = fields["num_hidden_layers"],
          .num_attention_heads = fields["num_attention_heads"],
          .num_key_value_heads = fields["num_key_value_heads"],
          .head_dim = fields["head_dim"],
          .tie_word_embeddings = fields["tie_word_embeddings"]};
}

json recorded() {
  const std::string root = LOCKSTEP_SOURCE_DIR;
  return json::parse(read_text(root + "/fixtures/models/qwen3_logits.json"));
}

Qwen3Config tiny() {
  return {.vocab_size = 31,
          .hidden_size = 12,
          .intermediate_size = 20,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .head_dim = 6};
}

/// Largest difference of a model's logits from those that are recorded: of transformers 5.23, which
/// are float32, or of the same equations in float64.
template <class S>
double worst_of(const json& model, const char* recorded_as = "logits") {
  const Qwen3<S> qwen(
      reference::drawn_qwen3(shape_of_fields(model["config"]), model["seed"].get<std::uint64_t>()));
  const Matrix<S> logits = qwen.logits(model["tokens"].get<std::vector<std::int32_t>>());
  double worst = 0;
  for (const auto& [at, row] : model[recorded_as].items())
    for (std::int64_t v = 0; v < logits.cols(); ++v)
      worst = std::max(worst, std::abs(static_cast<double>(logits(std::stoi(at), v)) -
                                       row.at(static_cast<std::size_t>(v)).template get<double>()));
  return worst;
}

// fixtures/models/qwen3_logits.json is written by `fixtures/subjects/static_kv logits`. The bound
// is what float32 leaves of logits of up to 8 after 24 tokens.
TEST(Qwen3, givesTransformersLogits) {
  const json models = recorded();
  for (const auto& [name, model] : models.items()) {
    EXPECT_LT(worst_of<double>(model), 5e-5) << name;
    EXPECT_LT(worst_of<float>(model), 1e-4) << name;
  }
}

// The pass table in Python is judged by the same equations in PyTorch's float64
// (fixtures/subjects/static_kv/exact.py), which has recorded twelve decimals.
TEST(Qwen3, givesTheFloat64LogitsOfThePassTable) {
  const json models = recorded();
  for (const auto& [name, model] : models.items())
    EXPECT_LT(worst_of<double>(model, "float64"), 1e-11) << name;
}

// The comparison can fail: one token earlier in the text is another.
TEST(Qwen3, otherTokensGiveOtherLogits) {
  json models = recorded();
  for (auto& [name, model] : models.items()) {
    model["tokens"][0] = model["tokens"][0].get<int>() + 1;
    EXPECT_GT(worst_of<double>(model), 0.1) << name;
  }
}

/// Prompts of a batch, left-padded to `T` columns.
struct Batch {
  std::vector<std::vector<std::int32_t>> texts;
  std::int64_t T = 0;

  std::int64_t hole(std::size_t b) const { return T - static_cast<std::int64_t>(texts[b].size()); }
  std::int32_t id(std::size_t b, std::int64_t t) const {
    return t < hole(b) || t >= T ? 0 : texts[b][static_cast<std::size_t>(t - hole(b))];
  }
};

Batch draw_batch(std::int64_t vocabulary) {
  Batch batch;
  for (const std::int64_t length : draw_row_lengths(3, 17)) {
    auto& text = batch.texts.emplace_back();
    for (std::int64_t i = 0; i <= length; ++i)  // at least one token
      text.push_back(*rc::gen::inRange<std::int32_t>(1, static_cast<std::int32_t>(vocabulary)));
    batch.T = std::max(batch.T, static_cast<std::int64_t>(text.size()));
  }
  return batch;
}

/// A batch in pieces, each padded to a bucket, on a cache that holds NaN where nobody wrote.
/// Gives the logits of every column, [B, T, V].
Array<double, 3> in_pieces(const Qwen3<double>& model, const Batch& batch, const Sizes& pieces,
                           std::int64_t M) {
  const Qwen3Config& c = model.config();
  const auto B = static_cast<std::int64_t>(batch.texts.size());
  const Shape<5> shape{c.num_hidden_layers, B, c.num_key_value_heads, M, c.head_dim};
  Array<double, 5> k(shape, kNan), v(shape, kNan);
  Array<double, 3> logits(Shape<3>{B, batch.T, c.vocab_size});
  std::int64_t past = 0;
  for (const std::int64_t size : pieces) {
    if (size == 0) continue;
    const auto bucket = reference::chosen_bucket(size, past, M, {2, 4, 8, 16, 32});
    RC_ASSERT(bucket.has_value());
    Array<std::int32_t, 2> ids(Shape<2>{B, *bucket}, 0), positions(Shape<2>{B, *bucket}, 0);
    Array<bool, 2> mask(Shape<2>{B, M}, false);
    Sizes where;
    for (std::int64_t i = 0; i < *bucket; ++i) where.push_back(past + i);
    for (std::int64_t b = 0; b < B; ++b) {
      const std::int64_t hole = batch.hole(static_cast<std::size_t>(b));
      for (std::int64_t j = hole; j < past + size; ++j) mask(b, j) = true;
      for (std::int64_t i = 0; i < size; ++i) {
        ids(b, i) = batch.id(static_cast<std::size_t>(b), past + i);
        positions(b, i) = static_cast<std::int32_t>(std::max<std::int64_t>(past + i - hole, 0));
      }
    }
    const auto cache_position = ints(where);
    const auto step =
        model.step(ids, positions, mask, cache_position, std::as_const(k), std::as_const(v));
    for (std::int64_t l = 0; l < c.num_hidden_layers; ++l) {
      reference::apply_sidecar<double>(at(step.new_k.view(), l), cache_position, size,
                                       at(k.view(), l));
      reference::apply_sidecar<double>(at(step.new_v.view(), l), cache_position, size,
                                       at(v.view(), l));
    }
    const Matrix<double> rows = model.head(step.hidden);
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < size; ++i)
        mapped(at(logits.view(), b, past + i)) = rows.row(b * *bucket + i).transpose();
    past += size;
  }
  return logits;
}

// Each token gets what the whole text gives it, for any pieces, buckets and padding.
RC_GTEST_PROP(Qwen3, piecesBehindACacheAreTheWholeText, ()) {
  Qwen3Config config = tiny();
  config.tie_word_embeddings = *rc::gen::arbitrary<bool>();
  const Qwen3<double> model(reference::drawn_qwen3(config, draw_seed()));
  const Batch batch = draw_batch(config.vocab_size);
  const Array<double, 3> logits = in_pieces(model, batch, draw_pieces(batch.T), 64);
  for (std::size_t b = 0; b < batch.texts.size(); ++b) {
    const Matrix<double> whole = model.logits(batch.texts[b]);
    for (std::int64_t t = batch.hole(b); t < batch.T; ++t) {
      const Vector<double> found = mapped(at(logits.view(), static_cast<std::int64_t>(b), t));
      RC_ASSERT((found - whole.row(t - batch.hole(b)).transpose()).cwiseAbs().maxCoeff() < 1e-11);
    }
  }
}

// Rows do not see each other: turned round, a batch gives the same turned round.
RC_GTEST_PROP(Qwen3, rowsDoNotDependOnEachOther, ()) {
  const Qwen3<double> model(reference::drawn_qwen3(tiny(), draw_seed()));
  const Batch batch = draw_batch(31);
  Batch turned = batch;
  std::ranges::reverse(turned.texts);
  const Sizes pieces = draw_pieces(batch.T);
  const auto a = in_pieces(model, batch, pieces, 64), b = in_pieces(model, turned, pieces, 64);
  const auto B = static_cast<std::int64_t>(batch.texts.size());
  for (std::int64_t row = 0; row < B; ++row)
    for (std::int64_t t = batch.hole(static_cast<std::size_t>(row)); t < batch.T; ++t)
      for (std::int64_t v = 0; v < 31; ++v)
        RC_ASSERT(std::abs(a(row, t, v) - b(B - 1 - row, t, v)) < 1e-12);
}

/// A folder of its own with a checkpoint of drawn weights.
class Qwen3Files : public ::testing::Test {
 protected:
  void SetUp() override { write(fields_, header()); }

  json header() const {
    json header = {{"__metadata__", {{"format", "pt"}}}};
    std::size_t offset = 0;
    for (const auto& tensor : reference::qwen3_tensors(tiny())) {
      const std::size_t size = 4 * checkpoint_.weights.at(tensor.name).size();
      header[tensor.name] = {
          {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + size}}};
      offset += size;
    }
    return header;
  }

  void write(const json& fields, const json& header) const {
    std::ofstream(folder_.path("config.json")) << fields;
    std::ofstream file(folder_.path("model.safetensors"), std::ios::binary);
    const std::string text = header.dump();
    const std::uint64_t size = text.size();
    file.write(reinterpret_cast<const char*>(&size), 8) << text;
    for (const auto& tensor : reference::qwen3_tensors(tiny())) {
      const auto& values = checkpoint_.weights.at(tensor.name);
      file.write(reinterpret_cast<const char*>(values.data()),
                 static_cast<std::streamsize>(4 * values.size()));
    }
  }

  std::string refusal() const {
    const auto read = reference::read_qwen3(folder_.path(""));
    return read ? "" : read.error().text;
  }

  ScratchFolder folder_;
  reference::Qwen3Checkpoint checkpoint_ = reference::drawn_qwen3(tiny(), 3);
  json fields_ = {{"model_type", "qwen3"},
                  {"hidden_act", "silu"},
                  {"attention_bias", false},
                  {"vocab_size", 31},
                  {"hidden_size", 12},
                  {"intermediate_size", 20},
                  {"num_hidden_layers", 2},
                  {"num_attention_heads", 4},
                  {"num_key_value_heads", 2},
                  {"head_dim", 6},
                  {"rms_norm_eps", 1e-6},
                  {"tie_word_embeddings", true},
                  {"use_sliding_window", false},
                  {"layer_types", {"full_attention"}},
                  {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e6}}}};
};

TEST_F(Qwen3Files, areTheModelThatWasWritten) {
  const auto read = reference::read_qwen3(folder_.path(""));
  ASSERT_TRUE(read) << read.error().text;
  EXPECT_EQ(read->weights, checkpoint_.weights);
  EXPECT_EQ(Qwen3<float>(*read).logits({1, 2, 3}), Qwen3<float>(checkpoint_).logits({1, 2, 3}));
}

TEST_F(Qwen3Files, ofAnotherKindAreRefusedByField) {
  const std::vector<std::pair<json, std::string>> wrong = {
      {{{"model_type", "llama"}}, "model_type is \"llama\""},
      {{{"attention_bias", true}}, "attention_bias is true"},
      {{{"layer_types", {"sliding_attention"}}}, "layer_types has \"sliding_attention\""},
      {{{"hidden_size", -1}}, "hidden_size is -1"},
      {{{"vocab_size", "x"}}, "vocab_size is \"x\""},
      {{{"num_key_value_heads", 3}}, "num_attention_heads is no multiple"},
      {{{"head_dim", 7}}, "head_dim is odd"},
      {{{"rope_parameters", {{"rope_type", "yarn"}, {"rope_theta", 1e6}}}},
       "rope_type is \"yarn\""},
      {{{"rms_norm_eps", 0}}, "rms_norm_eps is 0"},
  };
  for (const auto& [field, sentence] : wrong) {
    json fields = fields_;
    fields.update(field);
    write(fields, header());
    EXPECT_NE(refusal().find("config.json: " + sentence), std::string::npos) << refusal();
  }
}

TEST_F(Qwen3Files, withOtherTensorsAreRefusedByName) {
  const std::string norm = "model.norm.weight";
  const auto refused = [&](const std::string& sentence, const std::function<void(json&)>& change) {
    json changed = header();
    change(changed);
    write(fields_, changed);
    EXPECT_NE(refusal().find(sentence), std::string::npos) << refusal();
  };
  refused(norm + " is missing", [&](json& h) { h.erase(norm); });
  refused(norm + " has the shape [6,2]", [&](json& h) { h[norm]["shape"] = {6, 2}; });
  refused("bias is no tensor of this model", [&](json& h) {
    h["bias"] = {{"dtype", "F32"}, {"shape", {0}}, {"data_offsets", {0, 0}}};
  });
  refused(norm + ": dtype is \"I8\"", [&](json& h) { h[norm]["dtype"] = "I8"; });
  refused(norm + ": data_offsets hold 4 bytes", [&](json& h) { h[norm]["data_offsets"] = {0, 4}; });
  refused("lie outside", [&](json& h) { h[norm]["data_offsets"] = {0, 99999999}; });
  refused(
      "model.layers.0.self_attn.q_norm.weight: data_offsets overlap those of "
      "model.layers.0.self_attn.k_norm.weight",
      [&](json& h) {
        h["model.layers.0.self_attn.q_norm.weight"]["data_offsets"] =
            h["model.layers.0.self_attn.k_norm.weight"]["data_offsets"];
      });
  refused("has -1", [&](json& h) { h[norm]["shape"] = {-1}; });
  std::ofstream(folder_.path("model.safetensors")) << "short";
  EXPECT_NE(refusal().find("is shorter than"), std::string::npos) << refusal();
  std::ofstream(folder_.path("model.safetensors")) << "12345678{}";
  EXPECT_NE(refusal().find("its header has"), std::string::npos) << refusal();
}

// BF16 is the upper half of a float.
TEST_F(Qwen3Files, mayHoldBfloat16) {
  std::ofstream file(folder_.path("bf16.safetensors"), std::ios::binary);
  const std::string text = R"({"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})";
  const std::uint64_t size = text.size();
  const std::uint16_t values[] = {0x3F80, 0xC020};
  file.write(reinterpret_cast<const char*>(&size), 8) << text;
  file.write(reinterpret_cast<const char*>(values), 4);
  file.close();
  const auto read = reference::read_safetensors(folder_.path("bf16.safetensors"));
  ASSERT_TRUE(read) << read.error().text;
  EXPECT_EQ(read->at("x").values, (std::vector<float>{1.0f, -2.5f}));
}

}  // namespace
}  // namespace lockstep
