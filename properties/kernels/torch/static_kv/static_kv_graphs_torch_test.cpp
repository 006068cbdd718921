// The runtime with one graph for each bucket says what the model says that was not exported, over
// LibTorch's eager Qwen3 and over packages (LOCKSTEP_STATIC_KV, as in static_kv_runtime). Compiled
// twice: with CUDA graphs for a GPU, and with the same steps called on the same tensors for a CPU.
// Typical mistakes of graphs are planted, and found.
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "properties/support/static_kv_cases.hpp"
#ifdef LOCKSTEP_STATIC_KV_GPU
#include "kernels/torch/static_kv/cuda_graph.hpp"
#else
#include "kernels/torch/static_kv/graph_runtime.hpp"
#endif

namespace lockstep {
namespace {

using namespace testing_support;
using nlohmann::json;

#ifdef LOCKSTEP_STATIC_KV_GPU
const at::Device kDevice(at::kCUDA);
constexpr auto kRecord = captured;
#else
const at::Device kDevice(at::kCPU);
constexpr auto kRecord = called;
#endif

#define SKIP_WITHOUT_DEVICE() \
  if (kDevice.is_cuda() && !at::hasCUDA()) GTEST_SKIP() << "there is no GPU"

/// A runtime whose graphs are captured.
template <class Form>
struct Recorded : Form {
  explicit Recorded(Programs programs) : Form(std::move(programs)) { Form::capture(kRecord); }
};

void record(const Compared& compared) {
  ::testing::Test::RecordProperty("cases", static_cast<int>(compared.cases));
  ::testing::Test::RecordProperty("error", std::to_string(compared.worst));
}

class StaticKvGraphs : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_DEVICE();
    there_.emplace(checkpoint_, at::kFloat, kDevice);
  }
  Programs programs(std::int64_t rows = kRows) const {
    return eager_programs(*there_, {1, 8, 16}, rows);
  }

  at::InferenceMode guard_;
  Qwen3Checkpoint checkpoint_ = reference::drawn_qwen3(shape(GetParam()), 1);
  Originals originals_{checkpoint_};
  std::optional<TorchQwen3> there_;
};

INSTANTIATE_TEST_SUITE_P(Heads, StaticKvGraphs, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "tied" : "untied"; });

TEST_P(StaticKvGraphs, overEagerProgramsAreTheOriginal) {
  Recorded<GraphRuntime> runtime(programs());
  record(expect_original(runtime, originals_, kRows));
}

// Programs that write into the cache themselves, the baseline that the sidecar's cost is measured
// by.
TEST_P(StaticKvGraphs, overProgramsInPlaceAreTheOriginal) {
  Programs in_place = programs();
  for (auto& [Q, program] : in_place.buckets)
    program = [this](const std::vector<at::Tensor>& in) { return there_->step_in_place(in); };
  Recorded<GraphRuntime> runtime(in_place);
  record(expect_original(runtime, originals_, kRows));
}

// A few steps through every bucket, small enough for compute-sanitizer.
TEST_P(StaticKvGraphs, fewStepsAreTheOriginal) {
  Recorded<GraphRuntime> runtime(programs());
  const Case c{"", prompts_of({17, 9, 3}, true, 90), {.new_tokens = 3}};
  EXPECT_EQ(difference(runtime, originals_, c), "");
}

/// Logits after a prompt that is the first thing a runtime sees: nobody has called clear().
template <class Form>
double first_error(const Programs& programs, const Originals& originals) {
  Recorded<Form> runtime(programs);
  Recomputed exact(originals.exact);
  NewColumns columns{prompts_of({9, 3}, true, 90).ids, prompts_of({9, 3}, true, 90).real, {}};
  for (const std::vector<char>& real : columns.real) {
    columns.positions.emplace_back();
    std::int32_t next = 0;
    for (const char is_real : real) columns.positions.back().push_back(is_real != 0 ? next++ : 0);
  }
  const auto mine = runtime.append(columns), theirs = exact.append(columns);
  double worst = 0;
  for (std::size_t b = 0; b < 2; ++b)
    for (std::size_t v = 0; v < (*mine)[b].size(); ++v) {
      const double apart = std::abs(static_cast<double>((*mine)[b][v]) - (*theirs)[b][v]);
      worst = apart <= worst ? worst : std::isnan(apart) ? 1e30 : apart;
    }
  return worst;
}

/// Elements of keys and values outside of the first `length` positions of the first `rows` rows
/// that somebody wrote to: all of them began as NaN.
template <class Form>
std::int64_t written_outside(const Programs& programs) {
  Recorded<Form> runtime(programs);
  const auto text = generate(runtime, prompts_of({9, 3}, true, 90), {.new_tokens = 4});
  EXPECT_TRUE(text);
  const std::int64_t length = runtime.length(), behind = programs.positions - length;
  std::int64_t written = 0;
  for (const at::Tensor& cache : {runtime.keys(), runtime.values()}) {
    const at::Tensor finite = cache.isnan().logical_not();
    written += finite.narrow(1, 2, programs.rows - 2).sum().item<std::int64_t>();
    written += finite.narrow(3, length, behind).sum().item<std::int64_t>();
  }
  return written;
}

// --- What graphs get wrong

/// The host's length, a number, goes into the graph as a constant of the capture.
struct BakesTheLength : GraphRuntime {
  using GraphRuntime::GraphRuntime;
  at::Tensor cache_position(const State& state, std::int64_t Q) const override {
    return at::arange(0, Q, state.length.options());
  }
};
/// A decode's position lags: the graph reads the length that the capture's tensor was copied from.
struct ReadsACopyOfTheLength : GraphRuntime {
  using GraphRuntime::GraphRuntime;
  at::Tensor cache_position(const State& state, std::int64_t Q) const override {
    at::Tensor& kept = copies_[Q];
    if (!kept.defined()) kept = state.length.clone();  // in the first warm-up
    return at::arange(Q, kept.options()) + kept;
  }
  mutable std::map<std::int64_t, at::Tensor> copies_;
};
struct KeepsWarmUps : GraphRuntime {
  using GraphRuntime::GraphRuntime;
  void forget_warm_ups() override {}
};
struct KeepsTheTail : GraphRuntime {
  using GraphRuntime::GraphRuntime;
  at::Tensor committed(const at::Tensor& tokens, const at::Tensor& rows,
                       std::int64_t Q) const override {
    return GraphRuntime::committed(at::full_like(tokens, Q), rows, Q);
  }
};
struct CommitsPaddingRows : GraphRuntime {
  using GraphRuntime::GraphRuntime;
  at::Tensor committed(const at::Tensor& tokens, const at::Tensor& rows,
                       std::int64_t Q) const override {
    return GraphRuntime::committed(tokens, at::full_like(rows, programs_.rows), Q);
  }
};
/// Beams are reordered into new tensors; the graphs go on with the old ones.
struct PutsReorderedRowsElsewhere : GraphRuntime {
  using GraphRuntime::GraphRuntime;
  void reorder(const std::vector<std::int64_t>& rows) override {
    state_.keys = state_.keys.clone();
    state_.values = state_.values.clone();
    GraphRuntime::reorder(rows);
  }
};

template <class Form>
std::string found_in(const Programs& programs, const Originals& originals) {
  Recorded<Form> runtime(programs);
  return found(runtime, originals);
}

TEST_P(StaticKvGraphs, plantedMistakesAreFound) {
  EXPECT_EQ(found_in<GraphRuntime>(programs(), originals_), "");
  EXPECT_NE(found_in<BakesTheLength>(programs(), originals_), "");
  EXPECT_NE(found_in<ReadsACopyOfTheLength>(programs(), originals_), "");
  EXPECT_NE(found_in<PutsReorderedRowsElsewhere>(programs(), originals_), "");
}

TEST_P(StaticKvGraphs, warmUpsLeaveNothing) {
  EXPECT_LT(first_error<GraphRuntime>(programs(), originals_), 1e-4);
  EXPECT_GT(first_error<KeepsWarmUps>(programs(), originals_), 1e-1);
}

TEST_P(StaticKvGraphs, realTokensAloneAreCommitted) {
  EXPECT_EQ(written_outside<GraphRuntime>(programs()), 0);
  EXPECT_GT(written_outside<KeepsTheTail>(programs()), 0);
  EXPECT_GT(written_outside<CommitsPaddingRows>(programs()), 0);
}

// Any number of rows, of which a batch may fill fewer; an odd one puts tables at odd places.
TEST_P(StaticKvGraphs, rowsMayBeAnyNumber) {
  for (const std::int64_t rows : {1, 2, 3, 5}) {
    Recorded<GraphRuntime> runtime(programs(rows));
    for (std::int64_t B = 1; B <= rows; ++B) {
      Lengths lengths;
      for (std::int64_t b = 0; b < B; ++b) lengths.push_back(static_cast<std::size_t>(3 + 5 * b));
      const Case c{"", prompts_of(lengths, true, 90), {.new_tokens = 6}};
      EXPECT_EQ(difference(runtime, originals_, c), "") << B << " of " << rows << " rows";
    }
    const auto text =
        generate(runtime, prompts_of(Lengths(static_cast<std::size_t>(rows) + 1, 2), true, 90), {});
    ASSERT_FALSE(text);
    EXPECT_EQ(text.error().text, std::to_string(rows + 1) + " rows are more than the " +
                                     std::to_string(rows) + " that the model was exported with");
  }
}

// Warm-ups of a bucket that fills the cache have no room one after the other.
TEST_P(StaticKvGraphs, bucketsMayFillTheCache) {
  const Programs whole = eager_programs(*there_, {1, kPositions});
  Recorded<GraphRuntime> runtime(whole);
  const Case c{"", prompts_of({40, 9}, true, 90), {.new_tokens = 6}};
  EXPECT_EQ(difference(runtime, originals_, c), "");
  if (kDevice.is_cuda()) return;  // an index out of bounds would end the process
  const Record clears_once = [](const auto& step, const auto& clear) {
    for (int i = 0; i < kWarmUps; ++i) step();
    clear();
    return step;
  };
  GraphRuntime broken(whole);
  EXPECT_THROW(broken.capture(clears_once), c10::Error);
}

TEST_P(StaticKvGraphs, bucketsBeyondTheCacheAreNotCaptured) {
  GraphRuntime runtime(eager_programs(*there_, {1, kPositions + 1}));
  EXPECT_ANY_THROW(runtime.capture([](const auto& step, const auto&) { return step; }));
}

TEST_P(StaticKvGraphs, goOnBehindARefusal) {
  Recorded<GraphRuntime> runtime(programs());
  EXPECT_EQ(generate(runtime, prompts_of({90}, true, 90), {.new_tokens = 8}).error().text,
            "96 cached and 1 new tokens do not fit into a cache of 96");
  EXPECT_EQ(found(runtime, originals_), "");
}

// --- Packages

/// The cases of all folders; `in_place`: with decodes that write the cache themselves.
void expect_originals(bool in_place) {
  const at::InferenceMode guard;
  Compared all;
  for (const std::string& folder : package_folders()) {
    const Packaged packaged(folder);
    Programs programs = packaged.programs;
    if (in_place) programs.buckets[1] = programs.in_place.at(1);
    Recorded<GraphRuntime> runtime(programs);
    const Compared found =
        expect_original(runtime, packaged.originals, programs.rows, folder + ": ");
    all = {all.cases + found.cases, std::max(all.worst, found.worst)};
  }
  record(all);
}

// Compiled kernels for compute-sanitizer, as fewStepsAreTheOriginal above.
TEST(StaticKvGraphPackages, fewStepsAreTheOriginal) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_PACKAGES();
  const at::InferenceMode guard;
  const Packaged packaged(package_folders().front());
  const Case c{"", prompts_of({17, 9, 3}, true, 90), {.new_tokens = 3}};
  Programs programs = packaged.programs;
  for (const bool in_place : {false, true}) {
    if (in_place) programs.buckets[1] = programs.in_place.at(1);
    Recorded<GraphRuntime> runtime(programs);
    EXPECT_EQ(difference(runtime, packaged.originals, c), "") << in_place;
  }
}

TEST(StaticKvGraphPackages, areTheOriginal) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_PACKAGES();
  expect_originals(false);
}

TEST(StaticKvGraphPackages, inPlaceAreTheOriginal) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_PACKAGES();
  expect_originals(true);
}

// Tokens are those of transformers' own generate.
TEST(StaticKvGraphPackages, sayWhatTransformersSays) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_PACKAGES();
  const at::InferenceMode guard;
  int count = 0;
  for (const std::string& folder : package_folders()) {
    Recorded<GraphRuntime> runtime(value_of(load_packages(folder)));
    count += expect_transformers_texts(runtime, folder);
  }
  RecordProperty("cases", count);
}

}  // namespace
}  // namespace lockstep
