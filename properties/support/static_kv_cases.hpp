// The cases of the pass table in C++: prompts, ways to generate, the original in float and in
// double, and what a runtime differs in.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/torch/static_kv/packages.hpp"
#include "kernels/torch/static_kv/torch_qwen3.hpp"
#include "reference/base/philox.hpp"

namespace lockstep::testing_support {

using namespace static_kv;
using reference::Qwen3Checkpoint;
using reference::Qwen3Config;

constexpr std::int64_t kRows = 4, kPositions = 96;

/// The shapes of fixtures/subjects/static_kv/weights.py.
inline Qwen3Config shape(bool tied) {
  if (tied)
    return {.vocab_size = 128,
            .hidden_size = 64,
            .intermediate_size = 128,
            .num_hidden_layers = 2,
            .num_attention_heads = 4,
            .num_key_value_heads = 2,
            .head_dim = 16};
  return {.vocab_size = 97,
          .hidden_size = 48,
          .intermediate_size = 80,
          .num_hidden_layers = 3,
          .num_attention_heads = 6,
          .num_key_value_heads = 2,
          .head_dim = 24,
          .tie_word_embeddings = false};
}

using Lengths = std::vector<std::size_t>;

/// Prompts of these lengths, padded to the longest. Tokens are 1 and above.
inline Prompts prompts_of(const Lengths& lengths, bool left, std::int64_t vocabulary) {
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  Prompts prompts;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    Tokens ids(longest, 0);
    std::vector<char> real(longest, 0);
    const std::size_t first = left ? longest - lengths[b] : 0;
    for (std::size_t i = 0; i < lengths[b]; ++i) {
      const auto bound = static_cast<std::uint64_t>(vocabulary - 1);
      ids[first + i] = static_cast<std::int32_t>(1 + random_below(bound, b, 9, i));
      real[first + i] = 1;
    }
    prompts.ids.push_back(ids);
    prompts.real.push_back(real);
  }
  return prompts;
}

struct Case {
  std::string name;
  Prompts prompts;
  GenerateOptions options;
};

/// 1, bucket - 1, bucket, bucket + 1 and lengths of several buckets; batches of 2 to 4. Lengths
/// around the larger bucket have greedy texts of 16 tokens alone.
inline std::vector<Case> cases(std::int64_t vocabulary) {
  const std::vector<std::pair<std::string, GenerateOptions>> ways = {
      {"greedy 16", {.new_tokens = 16}},
      {"greedy 64", {.new_tokens = 64}},
      {"temperature 0.7", {.new_tokens = 32, .temperature = 0.7f, .seed = 5}},
      {"top-p 0.8", {.new_tokens = 32, .temperature = 1, .top_p = 0.8f, .seed = 6}},
      {"stop tokens", {.new_tokens = 48, .stop = {3, 8, 20, 52}}},
      {"beams 4", {.new_tokens = 16, .beams = 4}},
      {"beams 4, stop tokens", {.new_tokens = 24, .stop = {3, 8, 20, 52}, .beams = 4}},
  };
  std::vector<Case> list;
  for (const auto& [way, options] : ways) {
    const bool all = way == "greedy 16";
    for (const std::size_t length :
         all ? Lengths{1, 7, 8, 9, 15, 16, 17, 25, 31} : Lengths{1, 7, 8, 9, 17})
      list.push_back({"prompt of " + std::to_string(length) + ", " + way,
                      prompts_of({length}, true, vocabulary), options});
    if (options.beams > 1) continue;
    for (const Lengths& lengths :
         std::vector<Lengths>{{3, 7}, {8, 1, 9}, {31, 17, 2, 8}, {9, 1, 16, 5}})
      list.push_back({"batch of " + std::to_string(lengths.size()) + ", " + way,
                      prompts_of(lengths, true, vocabulary), options});
    list.push_back(
        {"padded on the right, " + way, prompts_of({9, 1, 16, 5}, false, vocabulary), options});
  }
  return list;
}

/// A model, driven; two others get the same columns. Notes how far each of the first two is from
/// the third, which computes in double.
class Beside : public CachedModel {
 public:
  Beside(CachedModel& model, CachedModel& eager, CachedModel& exact)
      : models_{&model, &eager, &exact} {}

  Result<std::vector<std::vector<float>>> append(const NewColumns& columns) override {
    std::vector<std::vector<std::vector<float>>> said;
    for (CachedModel* const model : models_) {
      auto logits = model->append(columns);
      if (!logits) return logits;
      said.push_back(std::move(*logits));
    }
    for (std::size_t b = 0; b < said[2].size(); ++b)
      for (std::size_t v = 0; v < said[2][b].size(); ++v) {
        note(error, said[0][b][v], said[2][b][v]);
        note(eager_error, said[1][b][v], said[2][b][v]);
      }
    return said[0];
  }
  void reorder(const std::vector<std::int64_t>& rows) override {
    for (CachedModel* const model : models_) model->reorder(rows);
  }
  void clear() override {
    for (CachedModel* const model : models_) model->clear();
  }

  double error = 0, eager_error = 0;

 private:
  static void note(double& worst, float found, float exact) {
    const double apart = std::abs(static_cast<double>(found) - exact);
    worst = apart <= worst ? worst : std::isnan(apart) ? 1e30 : apart;
  }
  std::vector<CachedModel*> models_;
};

/// The original in float and in double.
struct Originals {
  explicit Originals(const Qwen3Checkpoint& checkpoint)
      : eager(checkpoint, at::kFloat), exact(checkpoint, at::kDouble) {}
  TorchQwen3 eager, exact;
};

/// Cases and the largest error of logits against those in double, as a multiple of the eager
/// model's own; 4 is allowed.
struct Compared {
  std::size_t cases = 0;
  double worst = 0;
};

/// The difference between a runtime and the originals in one case, or nothing.
inline std::string difference(CachedModel& model, const Originals& originals, const Case& c,
                              Compared* compared = nullptr) {
  Recomputed original(originals.eager), eager(originals.eager), exact(originals.exact);
  Beside beside(model, eager, exact);
  // Logits are compared in short texts, tokens in all.
  const bool is_short = c.options.new_tokens <= 16;
  const auto found = generate(is_short ? beside : model, c.prompts, c.options);
  if (!found) return found.error().text;
  const auto expected = generate(original, c.prompts, c.options);
  if (!expected) return expected.error().text;
  if (*found != *expected) return "tokens differ";
  if (compared != nullptr) {
    ++compared->cases;
    if (is_short) compared->worst = std::max(compared->worst, beside.error / beside.eager_error);
  }
  if (!(beside.error <= 4 * beside.eager_error + 1e-6))
    return "logits are " + std::to_string(beside.error) + " from those in double, eager ones " +
           std::to_string(beside.eager_error);
  return "";
}

/// Every case that a model of so many rows can serve.
inline Compared expect_original(CachedModel& model, const Originals& originals, std::int64_t rows,
                                const std::string& what = "") {
  Compared compared;
  for (const Case& c : cases(originals.eager.config().vocab_size)) {
    const auto needed = std::max(static_cast<std::int64_t>(c.prompts.ids.size()), c.options.beams);
    if (needed > rows) continue;
    EXPECT_EQ(difference(model, originals, c, &compared), "") << what << c.name;
  }
  return compared;
}

inline Programs eager_programs(const TorchQwen3& model, const std::vector<std::int64_t>& buckets,
                               std::int64_t rows = kRows) {
  Programs programs{.config = model.config(),
                    .rows = rows,
                    .positions = kPositions,
                    .head = model.head(),
                    .buckets = {}};
  for (const std::int64_t Q : buckets)
    programs.buckets[Q] = [&model](const std::vector<at::Tensor>& in) { return model.step(in); };
  return programs;
}

/// Elements of the sidecars of a bucket's program that are not zero outside of cache_position, over
/// a random past with NaN after it.
inline std::int64_t written_elsewhere(const Programs& programs, std::int64_t Q,
                                      const Program& program) {
  const auto& c = programs.config;
  const std::int64_t R = programs.rows, M = programs.positions,
                     past = std::min<std::int64_t>(5, M - Q);
  const auto options = programs.head.options();
  const auto indices = at::device(options.device()).dtype(at::kLong);
  const at::Tensor position = at::arange(past, past + Q, indices);
  const auto cached = [&] {
    at::Tensor tensor =
        at::rand({c.num_hidden_layers, R, c.num_key_value_heads, M, c.head_dim}, options);
    tensor.narrow(3, past, M - past).fill_(std::numeric_limits<double>::quiet_NaN());
    return tensor;
  };
  const at::Tensor mask = at::arange(M, indices).lt(past + Q).expand({R, M}).contiguous();
  const auto outputs = program({at::ones({R, Q}, indices), mask, cached(), cached(), position,
                                position.expand({R, Q}).contiguous()});
  std::int64_t count = 0;
  for (const at::Tensor& sidecar : {outputs.at(1), outputs.at(2)})
    for (const at::Tensor& part :
         {sidecar.narrow(3, 0, past), sidecar.narrow(3, past + Q, M - past - Q)})
      count += part.ne(0).sum().item<std::int64_t>();
  return count;
}

/// Tiny products are no work for two threads.
inline const bool kOneThread = [] {
  at::set_num_threads(1);
  return true;
}();

/// The first difference over a few cases that hurt.
inline std::string found(CachedModel& runtime, const Originals& originals) {
  for (const Case& c : {Case{"", prompts_of({5}, true, 90), {.new_tokens = 12}},
                        Case{"", prompts_of({9, 3}, true, 90), {.new_tokens = 12}},
                        Case{"", prompts_of({25}, true, 90), {.new_tokens = 12}},
                        Case{"", prompts_of({5}, true, 90), {.new_tokens = 12, .beams = 4}}}) {
    std::string what;
    try {
      what = difference(runtime, originals, c);
    } catch (const c10::Error& error) {
      what = error.what_without_backtrace();
    }
    if (!what.empty()) return what;
  }
  return "";
}

/// Folders of packages that are there: LOCKSTEP_STATIC_KV/{tied,untied}.
inline std::vector<std::string> package_folders() {
  std::vector<std::string> folders;
  const char* const root = std::getenv("LOCKSTEP_STATIC_KV");
  for (const char* const name : {"tied", "untied"})
    if (root != nullptr &&
        std::filesystem::exists(std::string(root) + "/" + name + "/expected.json"))
      folders.push_back(std::string(root) + "/" + name);
  return folders;
}

/// The value, or a test that fails with the sentence.
template <class T>
T value_of(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().text);
  return std::move(*result);
}

/// A folder of packages, and the models that they were exported from.
struct Packaged {
  explicit Packaged(const std::string& folder)
      : programs(value_of(load_packages(folder))),
        checkpoint(value_of(reference::read_qwen3(folder))),
        originals(checkpoint) {}
  Programs programs;
  Qwen3Checkpoint checkpoint;
  Originals originals;
};

/// Texts of transformers' own generate, in the folder's expected.json; how many there are.
inline int expect_transformers_texts(CachedModel& runtime, const std::string& folder) {
  std::ifstream file(folder + "/expected.json");
  const auto expected = nlohmann::json::parse(file);
  EXPECT_GT(expected.size(), 10u);
  for (const auto& c : expected) {
    Prompts prompts{c["ids"].get<std::vector<Tokens>>(), {}};
    for (const auto& row : c["mask"]) prompts.real.push_back(row.get<std::vector<char>>());
    const auto text = generate(
        runtime, prompts,
        {.new_tokens = c["new_tokens"], .stop = c["stop"].get<Tokens>(), .beams = c["beams"]});
    EXPECT_EQ(text.value_or(std::vector<Tokens>()), c["sequences"].get<std::vector<Tokens>>())
        << folder << ": " << c["name"];
  }
  return static_cast<int>(expected.size());
}

#define SKIP_WITHOUT_PACKAGES()                                               \
  if (package_folders().empty())                                              \
  GTEST_SKIP()                                                                \
      << "no packages: `python3 fixtures/subjects/transformers setup`, then " \
         "`python3 fixtures/subjects/static_kv packages FOLDER` and LOCKSTEP_STATIC_KV=FOLDER"

}  // namespace lockstep::testing_support
