// The runtime of models exported with fixed shapes says what the model says that was not exported:
// the pass table in C++, over LibTorch's eager Qwen3 and, where LOCKSTEP_STATIC_KV names a folder
// of them (fixtures/subjects/static_kv packages), over AOTInductor packages. What such runtimes get
// wrong is planted, and found.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/torch/static_kv/packages.hpp"
#include "kernels/torch/static_kv/torch_qwen3.hpp"
#include "reference/base/philox.hpp"
#include "reference/models/qwen3.hpp"

namespace lockstep {
namespace {

using namespace static_kv;
using nlohmann::json;
using reference::Qwen3Checkpoint;
using reference::Qwen3Config;

constexpr std::int64_t kRows = 4, kPositions = 96;

/// The shapes of fixtures/subjects/static_kv/weights.py.
Qwen3Config shape(bool tied) {
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
Prompts prompts_of(const Lengths& lengths, bool left, std::int64_t vocabulary) {
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

/// 1, bucket - 1, bucket, bucket + 1 and lengths of several buckets; batches of 2 to 4. Some of
/// them, where the greedy texts of 16 tokens alone have all.
std::vector<Case> cases(std::int64_t vocabulary) {
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
         all ? Lengths{1, 7, 8, 9, 15, 16, 17, 25, 31} : Lengths{1, 9, 17})
      list.push_back({"prompt of " + std::to_string(length) + ", " + way,
                      prompts_of({length}, true, vocabulary), options});
    if (options.beams > 1) continue;
    const std::vector<Lengths> batches = {{3, 7}, {8, 1, 9}, {31, 17, 2, 8}, {9, 1, 16, 5}};
    for (const Lengths& lengths : all ? batches : std::vector<Lengths>{batches.back()})
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

/// What differs between a runtime and the originals in one case, or nothing.
std::string difference(CachedModel& model, const Originals& originals, const Case& c) {
  Recomputed original(originals.eager), eager(originals.eager), exact(originals.exact);
  Beside beside(model, eager, exact);
  // Logits are compared in short texts, tokens in all.
  const bool is_short = c.options.new_tokens <= 16;
  const auto found = generate(is_short ? beside : model, c.prompts, c.options);
  if (!found) return found.error().text;
  const auto expected = generate(original, c.prompts, c.options);
  if (!expected) return expected.error().text;
  if (*found != *expected) return "tokens differ";
  if (!(beside.error <= 4 * beside.eager_error + 1e-6))
    return "logits are " + std::to_string(beside.error) + " from those in double, eager ones " +
           std::to_string(beside.eager_error);
  return "";
}

Programs eager_programs(const TorchQwen3& model, const std::vector<std::int64_t>& buckets) {
  Programs programs{.config = model.config(),
                    .rows = kRows,
                    .positions = kPositions,
                    .head = model.head(),
                    .buckets = {}};
  for (const std::int64_t Q : buckets)
    programs.buckets[Q] = [&model](const std::vector<at::Tensor>& in) { return model.step(in); };
  return programs;
}

/// Tiny products are no work for two threads.
const bool kOneThread = [] {
  at::set_num_threads(1);
  return true;
}();

class StaticKvRuntime : public ::testing::TestWithParam<bool> {
 protected:
  Qwen3Checkpoint checkpoint_ = reference::drawn_qwen3(shape(GetParam()), 1);
  Originals originals_{checkpoint_};
  at::InferenceMode guard_;
};

INSTANTIATE_TEST_SUITE_P(Heads, StaticKvRuntime, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "tied" : "untied"; });

// LibTorch's model is the reference's: in double to its last digits, in float within four times
// what the reference itself loses in float.
TEST_P(StaticKvRuntime, eagerModelIsTheReference) {
  const Prompts prompts = prompts_of({24}, true, checkpoint_.config.vocab_size);
  const Matrix<double> exact = reference::Qwen3<double>(checkpoint_).logits(prompts.ids[0]);
  const Matrix<float> rounded = reference::Qwen3<float>(checkpoint_).logits(prompts.ids[0]);
  const at::Tensor ids = at::tensor(prompts.ids[0], at::kLong).unsqueeze(0);
  const at::Tensor positions = at::arange(24, at::kLong).unsqueeze(0);
  const at::Tensor real = at::ones({1, 24}, at::kBool);
  const auto apart = [&](const TorchQwen3& model) {
    const at::Tensor logits = model.logits(ids, positions, real)[0].to(at::kDouble).contiguous();
    const Eigen::Map<const Matrix<double>> found(logits.const_data_ptr<double>(), 24,
                                                 logits.size(1));
    return (found - exact).cwiseAbs().maxCoeff();
  };
  EXPECT_LT(apart(originals_.exact), 1e-12);
  EXPECT_LT(apart(originals_.eager), 4 * (rounded.cast<double>() - exact).cwiseAbs().maxCoeff());
}

TEST_P(StaticKvRuntime, overEagerProgramsIsTheOriginal) {
  Runtime runtime(eager_programs(originals_.eager, {1, 8, 16}));
  for (const Case& c : cases(checkpoint_.config.vocab_size))
    EXPECT_EQ(difference(runtime, originals_, c), "") << c.name;
}

/// Distinct tokens of a greedy text: a model that repeats itself would hide a lost cache.
TEST_P(StaticKvRuntime, textsAreNotOneTokenRepeated) {
  Recomputed original(originals_.eager);
  const auto text = generate(original, prompts_of({9}, true, 90), {.new_tokens = 64});
  EXPECT_GE(std::set<std::int32_t>(text->at(0).begin() + 9, text->at(0).end()).size(), 8u);
}

// --- What such runtimes get wrong
// -----------------------------------------------------------------

/// And later tokens see it.
struct CommitsTheTail : Runtime {
  using Runtime::Runtime;
  void commit(const at::Tensor& new_k, const at::Tensor& new_v, const Call& call) override {
    const std::int64_t whole = std::min(call.Q, kPositions - length_);
    mask_.narrow(0, 0, rows_).narrow(1, length_, whole).fill_(true);  // masked, it only takes room
    Runtime::commit(new_k, new_v, {whole, call.Q});
  }
};
struct CommitsOneTooFew : Runtime {
  using Runtime::Runtime;
  void commit(const at::Tensor& new_k, const at::Tensor& new_v, const Call& call) override {
    const std::int64_t before = length_;
    Runtime::commit(new_k, new_v, {std::max<std::int64_t>(call.tokens - 1, 1), call.Q});
    length_ = before + call.tokens;
  }
};
struct LosesTheMask : Runtime {
  using Runtime::Runtime;
  std::vector<at::Tensor> inputs_of(const NewColumns& columns, std::int64_t begin,
                                    const Call& call) override {
    auto inputs = Runtime::inputs_of(columns, begin, call);
    inputs[1] = at::arange(kPositions, at::kLong).lt(length_ + call.tokens).expand({kRows, -1});
    return inputs;
  }
};
struct CountsPadding : Runtime {
  using Runtime::Runtime;
  std::vector<at::Tensor> inputs_of(const NewColumns& columns, std::int64_t begin,
                                    const Call& call) override {
    auto inputs = Runtime::inputs_of(columns, begin, call);
    if (call.Q == 1) inputs[5] = inputs[4].unsqueeze(0).expand({kRows, -1});
    return inputs;
  }
};
/// The lengths of the call before, as a captured graph that is not told the new ones.
struct RepeatsOldLengths : Runtime {
  using Runtime::Runtime;
  std::vector<at::Tensor> inputs_of(const NewColumns& columns, std::int64_t begin,
                                    const Call& call) override {
    auto inputs = Runtime::inputs_of(columns, begin, call);
    if (call.Q == 1 && stale_.defined()) std::swap(inputs[4], stale_);
    if (call.Q == 1 && !stale_.defined()) stale_ = inputs[4];
    return inputs;
  }
  at::Tensor stale_;
};
struct ForgetsTheMaskOfBeams : Runtime {
  using Runtime::Runtime;
  void reorder(const std::vector<std::int64_t>&) override {}
};
struct KeepsTheCache : Runtime {
  using Runtime::Runtime;
  void clear() override {
    const at::Tensor keys = keys_, values = values_;
    Runtime::clear();
    if (keys.defined()) keys_ = keys, values_ = values;
  }
  std::vector<at::Tensor> inputs_of(const NewColumns& columns, std::int64_t begin,
                                    const Call& call) override {
    auto inputs = Runtime::inputs_of(columns, begin, call);
    inputs[1].fill_(true);  // what an earlier text left is seen as padding's keys
    return inputs;
  }
};

/// The first difference over a few cases that hurt.
std::string found(Runtime& runtime, const Originals& originals) {
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

template <class Broken>
std::string found_in(const Originals& originals) {
  Broken runtime(eager_programs(originals.eager, {1, 8, 16}));
  return found(runtime, originals);
}

TEST_P(StaticKvRuntime, plantedMistakesAreFound) {
  EXPECT_EQ(found_in<Runtime>(originals_), "");
  EXPECT_NE(found_in<CommitsTheTail>(originals_), "");
  EXPECT_NE(found_in<CommitsOneTooFew>(originals_), "");
  EXPECT_NE(found_in<LosesTheMask>(originals_), "");
  EXPECT_NE(found_in<CountsPadding>(originals_), "");
  EXPECT_NE(found_in<RepeatsOldLengths>(originals_), "");
  EXPECT_NE(found_in<ForgetsTheMaskOfBeams>(originals_), "");
  EXPECT_NE(found_in<KeepsTheCache>(originals_), "");
}

/// Programs that are wrong in themselves.
TEST_P(StaticKvRuntime, plantedProgramsAreFound) {
  const auto with = [&](const std::function<void(std::vector<at::Tensor>&)>& before,
                        const std::function<void(std::vector<at::Tensor>&)>& behind) {
    Programs programs = eager_programs(originals_.eager, {1, 8, 16});
    for (auto& [Q, program] : programs.buckets)
      program = [sound = program, before, behind](const std::vector<at::Tensor>& given) {
        std::vector<at::Tensor> inputs = given;
        before(inputs);
        auto outputs = sound(inputs);
        behind(outputs);
        return outputs;
      };
    Runtime runtime(programs);
    return found(runtime, originals_);
  };
  const auto nothing = [](std::vector<at::Tensor>&) {};
  EXPECT_EQ(with(nothing, nothing), "");
  EXPECT_NE(with([](auto& in) { in[4] = in[4] + 1; }, nothing), "") << "written one too far";
  EXPECT_NE(with([](auto& in) { in[5] = at::zeros_like(in[5]); }, nothing), "") << "no positions";
  EXPECT_NE(with(nothing, [](auto& out) { out[0] = out[0].roll(1, 1); }), "") << "another row's";
  EXPECT_NE(with(nothing, [](auto& out) { out[1] = at::zeros_like(out[1]); }), "") << "no sidecar";
  EXPECT_NE(with(nothing, [](auto& out) { std::swap(out[1], out[2]); }), "") << "k for v";
  // NaN weighed by 0: what lies behind the prefix is NaN in this runtime.
  EXPECT_NE(with(nothing, [](auto& out) { out[0] = out[0] + 0 * out[0].log(); }), "") << "NaN";
}

// --- What is refused
// ------------------------------------------------------------------------------

TEST_P(StaticKvRuntime, refusesWhatItCannotServe) {
  Runtime runtime(eager_programs(originals_.eager, {1, 8, 16}));
  const auto says = [&](const Prompts& prompts, const GenerateOptions& options) {
    const auto text = generate(runtime, prompts, options);
    return text ? std::string() : text.error().text;
  };
  EXPECT_EQ(says(prompts_of({90}, true, 90), {.new_tokens = 7}), "");
  EXPECT_EQ(says(prompts_of({90}, true, 90), {.new_tokens = 8}),
            "96 cached and 1 new tokens do not fit into a cache of 96");
  EXPECT_EQ(says(prompts_of({97}, true, 90), {}),
            "0 cached and 97 new tokens do not fit into a cache of 96");
  EXPECT_EQ(says(prompts_of({2, 2, 2, 2, 2}, true, 90), {}),
            "5 rows are more than the 4 that the model was exported with");
  EXPECT_EQ(says({{{500}}, {{1}}}, {}).substr(0, 26), "token 500 is not below the");
  EXPECT_EQ(says({{{1, 2}, {1}}, {{1, 1}, {1}}}, {}),
            "prompt 1 is not padded to the 2 tokens of the others");
  runtime.split = false;
  EXPECT_EQ(says(prompts_of({16}, true, 90), {}), "");
  EXPECT_EQ(says(prompts_of({17}, true, 90), {}),
            "17 tokens behind 0 are more than the last bucket holds");
  Runtime undecoded(eager_programs(originals_.eager, {8}));
  const auto text = generate(undecoded, prompts_of({8}, true, 90), {});
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error().text, "there is no bucket of one token, which decodes need");
  const at::Tensor halves = runtime.keys().to(at::kHalf);
  EXPECT_EQ(runtime.adopt(halves, halves, {{1}}, 1).error().text,
            "the cache holds Half, the model was exported with Float");
  EXPECT_TRUE(runtime.adopt(runtime.keys(), runtime.values(), {{1}}, 1));
}

// A prompt is cut as the plan of the reference has it: no bucket ends behind the cache.
TEST(StaticKvPlan, staysInsideTheCache) {
  Programs programs{.config = shape(true), .rows = 1, .positions = 40, .head = {}, .buckets = {}};
  for (const std::int64_t Q : {1, 4, 8, 16}) programs.buckets[Q] = Program();
  for (std::int64_t past = 0; past <= 40; ++past)
    for (std::int64_t length = 1; past + length <= 40; ++length) {
      const auto calls = plan_calls(length, past, programs);
      ASSERT_TRUE(calls);
      std::int64_t at = past;
      for (const Call& call : *calls) {
        EXPECT_LE(at + call.Q, 40);
        EXPECT_LE(1, call.tokens);
        EXPECT_LE(call.tokens, call.Q);
        at += call.tokens;
      }
      EXPECT_EQ(at, past + length);
      const auto bucket = reference::chosen_bucket(length, past, 40, {4, 8, 16});
      if (bucket) {
        EXPECT_EQ(*calls, (std::vector<Call>{{length, *bucket}}));
      }
    }
}

// --- Packages
// -------------------------------------------------------------------------------------

/// Folders of packages that are there: LOCKSTEP_STATIC_KV/{tied,untied}.
std::vector<std::string> package_folders() {
  std::vector<std::string> folders;
  const char* const root = std::getenv("LOCKSTEP_STATIC_KV");
  for (const char* const name : {"tied", "untied"})
    if (root != nullptr &&
        std::filesystem::exists(std::string(root) + "/" + name + "/expected.json"))
      folders.push_back(std::string(root) + "/" + name);
  return folders;
}

#define SKIP_WITHOUT_PACKAGES()                                               \
  if (package_folders().empty())                                              \
  GTEST_SKIP()                                                                \
      << "no packages: `python3 fixtures/subjects/transformers setup`, then " \
         "`python3 fixtures/subjects/static_kv packages FOLDER` and LOCKSTEP_STATIC_KV=FOLDER"

TEST(StaticKvPackages, areTheOriginal) {
  SKIP_WITHOUT_PACKAGES();
  const at::InferenceMode guard;
  for (const std::string& folder : package_folders()) {
    auto programs = load_packages(folder);
    ASSERT_TRUE(programs) << programs.error().text;
    const auto checkpoint = reference::read_qwen3(folder);
    ASSERT_TRUE(checkpoint) << checkpoint.error().text;
    const Originals originals(*checkpoint);
    Runtime runtime(*programs);
    std::size_t count = 0;
    for (const Case& c : cases(checkpoint->config.vocab_size)) {
      EXPECT_EQ(difference(runtime, originals, c), "") << folder << ": " << c.name;
      ++count;
    }
    std::cout << folder << ": " << count << " cases\n";
  }
}

// The weights that Python drew are those that are drawn here.
TEST(StaticKvPackages, holdTheDrawnWeights) {
  SKIP_WITHOUT_PACKAGES();
  for (const std::string& folder : package_folders()) {
    const auto checkpoint = reference::read_qwen3(folder);
    ASSERT_TRUE(checkpoint) << checkpoint.error().text;
    EXPECT_EQ(checkpoint->weights, reference::drawn_qwen3(checkpoint->config, 1).weights);
  }
}

// Tokens are those of transformers' own generate, beams and stop tokens among them.
TEST(StaticKvPackages, sayWhatTransformersSays) {
  SKIP_WITHOUT_PACKAGES();
  const at::InferenceMode guard;
  for (const std::string& folder : package_folders()) {
    auto programs = load_packages(folder);
    ASSERT_TRUE(programs) << programs.error().text;
    Runtime runtime(*programs);
    std::ifstream file(folder + "/expected.json");
    const json expected = json::parse(file);
    EXPECT_GT(expected.size(), 15u);
    for (const json& c : expected) {
      Prompts prompts{c["ids"].get<std::vector<Tokens>>(), {}};
      for (const json& row : c["mask"]) prompts.real.push_back(row.get<std::vector<char>>());
      const auto text = generate(
          runtime, prompts,
          {.new_tokens = c["new_tokens"], .stop = c["stop"].get<Tokens>(), .beams = c["beams"]});
      ASSERT_TRUE(text) << text.error().text;
      EXPECT_EQ(*text, c["sequences"].get<std::vector<Tokens>>()) << folder << ": " << c["name"];
    }
  }
}

/// A copy of a folder of packages, in which a file is changed.
class PackageFolder {
 public:
  explicit PackageFolder(const std::string& source)
      : path_(std::filesystem::temp_directory_path() /
              ("lockstep_static_kv_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
    using Options = std::filesystem::copy_options;
    std::filesystem::copy(source, path_, Options::recursive | Options::overwrite_existing);
    std::ifstream file(path("static_kv.json"));
    index_ = json::parse(file);
  }
  ~PackageFolder() { std::filesystem::remove_all(path_); }
  PackageFolder(const PackageFolder&) = delete;
  PackageFolder& operator=(const PackageFolder&) = delete;

  /// What is said of the folder with these fields changed.
  std::string refusal_with(const json& change) const {
    json index = index_;
    index.merge_patch(change);
    std::ofstream(path("static_kv.json")) << index;
    const auto programs = load_packages(path_.string());
    return programs ? "" : programs.error().text;
  }
  std::string path(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
  json index_;
};

TEST(StaticKvPackages, ofAnotherKindAreRefused) {
  SKIP_WITHOUT_PACKAGES();
  PackageFolder folder(package_folders().front());
  EXPECT_EQ(folder.refusal_with(json::object()), "");
  const auto says = [&](const json& change, const std::string& sentence) {
    const std::string said = folder.refusal_with(change);
    EXPECT_NE(said.find(sentence), std::string::npos) << said;
  };
  says({{"format", 2}}, "static_kv.json: format is 2; this runtime reads 1");
  says({{"torch", "2.12.0"}}, "static_kv.json: torch is \"2.12.0\"; this runtime was built with");
  says({{"dtype", "float16"}}, "dtype is \"float16\"; packages of float32 are served");
  says({{"rows", 0}}, "rows is 0, no size");
  says({{"buckets", {{"1", nullptr}}}}, "buckets has no bucket of one token");
  says({{"buckets", {{"32", "q32.pt2"}}}}, "q32.pt2: cannot be read; static_kv.json has a bucket");
  says({{"buckets", {{"16", "q8.pt2"}}}},
       "q8.pt2: its bucket is \"8\", static_kv.json says \"16\"");
  says({{"positions", 64}}, "its positions is \"96\", static_kv.json says \"64\"");
  says({{"transformers", "5.24.0"}}, "its transformers is \"5.23.0\"");
  std::ofstream(folder.path("q8.pt2")) << "nothing";
  says(json::object(), "q8.pt2: is no package that can be loaded");
}

}  // namespace
}  // namespace lockstep
