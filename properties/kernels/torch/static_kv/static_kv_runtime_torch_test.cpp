// The runtime of models exported with fixed shapes says what the model says that was not exported:
// the pass table in C++, over LibTorch's eager Qwen3 and, where LOCKSTEP_STATIC_KV names a folder
// of them (fixtures/subjects/static_kv packages), over AOTInductor packages. What such runtimes get
// wrong is planted, and found.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "properties/support/static_kv_cases.hpp"
#include "reference/models/qwen3.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using nlohmann::json;

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
  expect_original(runtime, originals_, kRows);
}

/// Distinct tokens of a greedy text: a model that repeats itself would hide a lost cache.
TEST_P(StaticKvRuntime, textsAreNotOneTokenRepeated) {
  Recomputed original(originals_.eager);
  const auto text = generate(original, prompts_of({9}, true, 90), {.new_tokens = 64});
  EXPECT_GE(std::set<std::int32_t>(text->at(0).begin() + 9, text->at(0).end()).size(), 8u);
}

// --- What such runtimes get wrong ----------------------------------------------------------------

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
  // NaN weighed by 0: what lies after the prefix is NaN in this runtime.
  EXPECT_NE(with(nothing, [](auto& out) { out[0] = out[0] + 0 * out[0].log(); }), "") << "NaN";
}

// Keys and values of the call's own tokens stand at cache_position, and nothing elsewhere.
TEST_P(StaticKvRuntime, sidecarsAreZeroElsewhere) {
  const Programs programs = eager_programs(originals_.eager, {1, 8, 16});
  for (const auto& [Q, program] : programs.buckets) {
    EXPECT_EQ(written_elsewhere(programs, Q, program), 0) << Q;
    const Program repeats_the_past = [sound = program](const std::vector<at::Tensor>& in) {
      auto outputs = sound(in);
      outputs[1] = in[2].index_copy(3, in[4], outputs[1].index_select(3, in[4]));
      return outputs;
    };
    EXPECT_GT(written_elsewhere(programs, Q, repeats_the_past), 0) << Q;
  }
}

// --- What is refused -----------------------------------------------------------------------------

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

// A prompt is cut as the plan of the reference has it: no bucket runs over the end of the cache.
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

// --- Packages ------------------------------------------------------------------------------------

TEST(StaticKvPackages, areTheOriginal) {
  SKIP_WITHOUT_PACKAGES();
  const at::InferenceMode guard;
  for (const std::string& folder : package_folders()) {
    const Packaged packaged(folder);
    Runtime runtime(packaged.programs);
    const Compared compared =
        expect_original(runtime, packaged.originals, packaged.programs.rows, folder + ": ");
    std::cout << folder << ": " << compared.cases << " cases, " << packaged.programs.rows
              << " rows\n";
  }
}

TEST(StaticKvPackages, sidecarsAreZeroElsewhere) {
  SKIP_WITHOUT_PACKAGES();
  const at::InferenceMode guard;
  for (const std::string& folder : package_folders()) {
    const Programs programs = value_of(load_packages(folder));
    for (const auto& [Q, program] : programs.buckets)
      EXPECT_EQ(written_elsewhere(programs, Q, program), 0) << folder << ", " << Q;
  }
}

// The weights that Python drew are those that are drawn here.
TEST(StaticKvPackages, holdTheDrawnWeights) {
  SKIP_WITHOUT_PACKAGES();
  for (const std::string& folder : package_folders()) {
    const Qwen3Checkpoint checkpoint = value_of(reference::read_qwen3(folder));
    EXPECT_EQ(checkpoint.weights, reference::drawn_qwen3(checkpoint.config, 1).weights);
  }
}

// Tokens are those of transformers' own generate, beams and stop tokens among them.
TEST(StaticKvPackages, sayWhatTransformersSays) {
  SKIP_WITHOUT_PACKAGES();
  const at::InferenceMode guard;
  for (const std::string& folder : package_folders()) {
    Runtime runtime(value_of(load_packages(folder)));
    expect_transformers_texts(runtime, folder);
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

  /// The refusal of the folder with these fields changed.
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
  says({{"format", 2}}, "static_kv.json: format is 2; this runtime reads 4");
  says({{"torch", "2.12.0"}}, "static_kv.json: torch is \"2.12.0\"; this runtime was built with");
  says({{"dtype", "float16"}}, "dtype is \"float16\"; packages of float32 and bfloat16 are served");
  says({{"device", "xpu"}}, "device is \"xpu\"; packages of cpu and cuda are served");
  if (!at::hasCUDA()) says({{"device", "cuda"}}, "device is \"cuda\", and there is no GPU");
  says({{"rows", 0}}, "rows is 0, no size");
  says({{"buckets", {{"1", nullptr}}}}, "buckets has no bucket of one token");
  says({{"buckets", {{"32", "q32.pt2"}}}}, "q32.pt2: cannot be read; static_kv.json has a bucket");
  says({{"buckets", {{"16", "q8.pt2"}}}},
       "q8.pt2: its bucket is \"8\", static_kv.json says \"16\"");
  says({{"in_place", {{"1", "q1.pt2"}}}},
       "its form is \"buckets\", static_kv.json says \"in_place\"");
  says({{"in_place", 1}}, "in_place is no list of packages by bucket");
  says({{"in_place", {{"one", "q1.pt2"}}}}, "in_place has \"one\", no number of queries");
  says({{"buckets", {{"97", "q8.pt2"}}}}, "buckets has 97, more than the 96 positions");
  says({{"positions", 64}}, "its positions is \"96\", static_kv.json says \"64\"");
  says({{"transformers", "5.24.0"}}, "its transformers is \"5.23.0\"");
  std::ofstream(folder.path("q8.pt2")) << "nothing";
  says(json::object(), "q8.pt2: is no package that can be loaded");
}

// Weights that changed after the export: the packages hold the old ones.
TEST(StaticKvPackages, besideOtherWeightsAreRefused) {
  SKIP_WITHOUT_PACKAGES();
  PackageFolder folder(package_folders().front());
  std::fstream weights(folder.path("model.safetensors"), std::ios::in | std::ios::out);
  weights.seekg(-1, std::ios::end);
  const char last = static_cast<char>(weights.get() ^ 1);
  weights.seekp(-1, std::ios::end);
  weights.put(last);
  weights.close();
  const std::string said = folder.refusal_with(json::object());
  EXPECT_NE(said.find("model.safetensors: its SHA-256 is not the one"), std::string::npos) << said;
}

}  // namespace
}  // namespace lockstep
