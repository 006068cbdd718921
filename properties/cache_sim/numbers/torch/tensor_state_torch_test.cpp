// Tensors in the slots of a cache: a right use is never reported, each wrong one is, a layer whose
// rows depend on the batch is found, and so is one that is inexact.
#include "cache_sim/numbers/torch/tensor_state.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cache_sim/numbers/torch/judged_calls.hpp"
#include "reference/models/hybrid/hybrid_model.hpp"

namespace lockstep {
namespace {

using cache_sim::BucketRules;
using cache_sim::TensorLayers;
using cache_sim::TensorModel;
using cache_sim::TensorRow;
using cache_sim::TensorState;
using cache_sim::TensorTruth;
using testing::HasSubstr;

std::shared_ptr<TensorTruth> truth_of(std::string_view preset,
                                      std::shared_ptr<const TensorLayers> layers,
                                      at::ScalarType activations = at::kFloat,
                                      BucketRules buckets = {}) {
  const auto config = *reference::hybrid_preset(preset);
  return std::make_shared<TensorTruth>(std::make_shared<const TensorModel>(
      config, reference::drawn_hybrid(config), std::move(layers), activations, buckets));
}

Tokens text(const char* terms) {
  return *parse_tokens(terms);
}

/// Requests whose state slots are 1, 2, … and whose KV slots are 30 each, one behind the other.
struct Requests {
  explicit Requests(const std::shared_ptr<TensorTruth>& truth) : state(truth, 8, 256) {
    for (const std::uint32_t slot : {1u, 2u, 3u, 4u}) {
      state.allocate_state(StateSlot{slot});
      state.LayerState::zero_state(StateSlot{slot});
      std::vector<std::uint32_t>& own = kv.emplace_back();
      for (std::uint32_t i = 0; i < 30; ++i) own.push_back(slot * 30 + i);
      state.allocate_kv(own);
    }
  }
  explicit Requests(std::string_view preset)
      : Requests(truth_of(preset, cache_sim::judged_layers(cache_sim::host_layers()))) {}

  ForwardRow row(std::uint32_t request, const Tokens& tokens, std::uint32_t begin,
                 std::uint32_t end) {
    return {.tokens = tokens,
            .begin = begin,
            .end = end,
            .state = StateSlot{request},
            .kv = told(kv[request - 1])};
  }
  void run(std::uint32_t request, const Tokens& tokens, std::uint32_t begin, std::uint32_t end) {
    state.forward(row(request, tokens, begin, end));
    state.launch({});
  }
  std::string found() {
    const Findings findings = state.drain(false);
    return findings.empty() ? ""
                            : std::string(to_string(findings[0].kind)) + ": " + findings[0].text;
  }
  std::span<const KvRun> told(KvSlots slots) {
    const auto count = static_cast<std::uint32_t>(slots.size());
    std::shared_ptr<std::uint32_t[]> array(new std::uint32_t[count]);
    std::ranges::copy(slots, array.get());
    runs.push_back({KvRun{array, 0, count / 2}, KvRun{array, count / 2, count - count / 2}});
    return runs.back();
  }

  TensorState state;
  std::vector<std::vector<std::uint32_t>> kv;
  std::deque<std::array<KvRun, 2>> runs;
};

// The model of tensors is that of the reference: float32 against double, over every kind of call.
TEST(TensorModel, hasTheLogitsOfTheReference) {
  for (const std::string_view preset : reference::hybrid_presets()) {
    const auto tensors = truth_of(preset, cache_sim::host_layers());
    const auto config = *reference::hybrid_preset(preset);
    cache_sim::Truth exact(
        std::make_shared<const reference::HybridModel>(config, reference::drawn_hybrid(config)));
    const Tokens tokens = text("a20");
    for (const auto& [begin, size, drafts] :
         {std::array<std::int64_t, 3>{0, 20, 0}, {7, 6, 0}, {12, 1, 0}, {9, 4, 3}, {0, 2, 1}}) {
      TensorRow row{.begin = begin, .drafts = drafts, .verifies = drafts > 0};
      for (std::int64_t i = 0; i < size; ++i)
        row.tokens.push_back(tokens[static_cast<std::uint32_t>(begin + i)]);
      row.kv.resize(static_cast<std::size_t>(begin + size));
      cache_sim::RowStart start{
          .states = std::vector<cache_sim::History>(tensors->model().parts().size()),
          .kv = {std::vector<cache_sim::History>(static_cast<std::size_t>(begin))}};
      const cache_sim::RowTruth& found = tensors->row(tokens, row, start);
      const auto right = exact.logits(exact.at(tokens, static_cast<std::uint32_t>(begin + size)));
      const float* const last = found.logits.data() + found.logits.size() - right.size();
      double largest = 0, far = 0;
      for (std::size_t i = 0; i < right.size(); ++i) {
        largest = std::max(largest, std::abs(right[i]));
        far = std::max(far, std::abs(static_cast<double>(last[i]) - right[i]));
      }
      EXPECT_FALSE(std::isnan(last[0])) << preset;
      EXPECT_LT(far, 1e-4 * largest) << preset << " over tokens " << begin << " + " << size;
    }
  }
}

// A label that is wrong where the numbers are right is a fault of the harness itself.
TEST(Tensors, thatAgreeUnderAWrongLabelAreReported) {
  LabelState labels(8, 256);
  TensorState state(truth_of("tiny-nemotron-h", cache_sim::host_layers()), 8, 256, 1, &labels);
  Requests all("tiny-nemotron-h");
  state.allocate_state(StateSlot{1});
  state.LayerState::zero_state(StateSlot{1});
  labels.allocate_state(StateSlot{1});
  state.allocate_kv(all.kv[0]);
  const Tokens tokens = text("a12");
  state.forward(all.row(1, tokens, 0, 5));
  state.launch({});
  const Findings found = state.drain(false);
  ASSERT_EQ(found.size(), 1u);  // of the label, which nobody has told that the state was zeroed
  EXPECT_EQ(found[0].kind, FindingKind::number_agrees);
  EXPECT_THAT(found[0].text, HasSubstr("and its numbers are those of the row alone"));
}

/// Latents of the tiny model are none of the kernels'.
std::vector<std::string_view> presets_of_kernels() {
  std::vector<std::string_view> names = reference::hybrid_presets_of_both_sizes();
  std::erase(names, "tiny-deepseek-v3");
  return names;
}

/// The findings of a prefill, a chunk, decodes beside other rows, a verification, what it commits,
/// and a branch behind a copied state.
std::string found_in_a_right_run(std::string_view preset,
                                 const std::shared_ptr<const TensorLayers>& layers,
                                 at::ScalarType activations) {
  Requests all(truth_of(preset, cache_sim::judged_layers(layers), activations));
  const Tokens a = text("a12+b8"), b = text("c14"), c = text("a5+d9");
  all.state.forward(all.row(1, a, 0, 7));
  all.state.forward(all.row(2, b, 0, 1));
  all.state.forward(all.row(3, c, 0, 4));
  all.state.launch({});
  all.state.forward(all.row(1, a, 7, 8));
  all.state.forward(all.row(2, b, 1, 2));
  all.state.forward(all.row(3, c, 4, 5));
  all.state.launch({});
  const Tokens drafted = text("a11+c1");
  ForwardRow verified = all.row(1, drafted, 8, 12);
  verified.drafts = 3;
  all.state.forward(verified);
  all.state.forward(all.row(2, b, 2, 9));
  all.state.launch({});
  for (const StatePart part : kStateParts)
    all.state.commit_state(StateSlot{1}, 2, StateSlot{1}, part);  // c0 is rejected
  all.state.LayerState::copy_state(StateSlot{2}, StateSlot{4});
  all.state.forward(all.row(1, a, 11, 20));
  all.state.forward(all.row(2, b, 9, 10));
  all.state.launch({});
  ForwardRow branch = all.row(4, b, 9, 12);
  std::vector<std::uint32_t> slots(all.kv[1].begin(), all.kv[1].begin() + 9);
  slots.insert(slots.end(), all.kv[3].begin(), all.kv[3].end());
  branch.kv = all.told(slots);
  all.state.forward(branch);
  all.state.launch({});
  return all.found();
}

TEST(Tensors, ofARightRunAreNeverReported) {
  for (const at::ScalarType activations : {at::kFloat, at::kBFloat16})
    for (const std::string_view preset : reference::hybrid_presets())
      EXPECT_EQ(found_in_a_right_run(preset, cache_sim::host_layers(), activations), "") << preset;
}

TEST(TensorsOnAGpu, ofARightRunAreNeverReported) {
  const cache_sim::DeviceLayers device = cache_sim::device_layers();
  if (device.layers == nullptr) GTEST_SKIP() << "needs a GPU: " << device.reason;
  for (const std::string_view preset : presets_of_kernels())
    EXPECT_EQ(found_in_a_right_run(preset, device.layers, at::kBFloat16), "") << preset;
}

/// The findings of decodes in buckets of one, two and four rows, one of these filled up, whose rows
/// change their order and grow.
std::string found_in_buckets(std::string_view preset,
                             const std::shared_ptr<const TensorLayers>& layers,
                             at::ScalarType activations, BucketRules rules = {}) {
  Requests all(truth_of(preset, layers, activations, rules));
  const std::vector<Tokens> texts{text("a12"), text("b13"), text("c14"), text("d12")};
  std::vector<std::uint32_t> at{3, 4, 5, 9};
  for (const std::uint32_t request : {1u, 2u, 3u, 4u})  // the first four forwards are judged
    all.run(request, texts[request - 1], 0, at[request - 1]);
  for (const std::vector<std::uint32_t>& batch : std::vector<std::vector<std::uint32_t>>{
           {1, 2, 3}, {1, 2, 3}, {3, 1, 2}, {2, 3}, {1}, {3, 2}, {2, 1, 3}, {4}}) {
    for (const std::uint32_t request : batch) {
      const std::uint32_t begin = at[request - 1]++;
      all.state.forward(all.row(request, texts[request - 1], begin, begin + 1));
    }
    all.state.launch({});
  }
  EXPECT_EQ(all.state.replays(), 8);
  return all.found();
}

void expect_buckets(std::string_view preset, const std::shared_ptr<const TensorLayers>& layers,
                    at::ScalarType activations) {
  const auto found = [&](BucketRules rules) {
    return found_in_buckets(preset, layers, activations, rules);
  };
  const bool has_states = truth_of(preset, layers, activations)->model().has_states();
  EXPECT_EQ(found({}), "") << preset;
  EXPECT_THAT(found({.refreshes_lists = false}), HasSubstr("number-differs")) << preset;
  EXPECT_THAT(found({.refreshes_lengths = false}), HasSubstr("number-differs")) << preset;
  EXPECT_THAT(found({.padding_slot = 0}), HasSubstr("padding of a bucket writes")) << preset;
  if (!has_states) return;
  EXPECT_THAT(found({.padding_slot = 4}), HasSubstr("part of state slot 4 differs")) << preset;
  EXPECT_THAT(found({.warms_up_on_padding = false}), HasSubstr("number-differs")) << preset;
}

TEST(Buckets, areRightAndEachWrongRuleIsReported) {
  for (const std::string_view preset : reference::hybrid_presets())
    expect_buckets(preset, cache_sim::host_layers(), at::kFloat);
}

TEST(TensorsOnAGpu, ofCapturedBucketsAreRightAndEachWrongRuleIsReported) {
  const cache_sim::DeviceLayers device = cache_sim::device_layers();
  if (device.layers == nullptr) GTEST_SKIP() << "needs a GPU: " << device.reason;
  for (const std::string_view preset : presets_of_kernels())
    expect_buckets(preset, device.layers, at::kBFloat16);
}

// States that a row leaves on its way, padding behind its text, and a second memory of KV.
TEST(Tensors, ofTakesAndPaddingAreRight) {
  for (const std::string_view preset : {"tiny-nemotron-h", "tiny-qwen3-next"}) {
    Requests all(preset);
    const Tokens tokens = text("a18");
    const std::vector<StateTake> takes{{3, StateSlot{2}, {.conv = false}},
                                       {3, StateSlot{3}},
                                       {4, StateSlot{2}, {.recurrent = false}}};
    ForwardRow row = all.row(1, tokens, 0, 9);
    row.takes = takes;
    row.padded_to = 12;
    row.also = all.told(all.kv[1]);
    all.state.forward(row);
    all.state.launch({});
    all.run(1, tokens, 9, 10);
    ForwardRow taken = all.row(3, tokens, 3, 6);
    std::vector<std::uint32_t> slots(all.kv[1].begin(), all.kv[1].begin() + 3);
    slots.insert(slots.end(), all.kv[2].begin(), all.kv[2].end());
    taken.kv = all.told(slots);
    all.state.forward(taken);
    all.state.launch({});
    EXPECT_EQ(all.found(), "") << preset;
    all.run(2, tokens, 4, 5);  // its recurrent part is that of 3 tokens
    EXPECT_THAT(all.found(), HasSubstr("unit 0: the recurrent part of state slot 2 differs"));
  }
}

TEST(Tensors, ofAVerifiedTreeFollowTheirPaths) {
  Requests all("tiny-qwen3-next");
  all.run(1, text("a6"), 0, 6);
  const std::vector<std::int64_t> parents{0, 0, 1, 2};
  const Tokens drafted = text("a7+[1]+a7:8+[2]+a8:9");
  ForwardRow tree = all.row(1, drafted, 6, 11);
  tree.drafts = 4;
  tree.parents = parents;
  all.state.forward(tree);
  all.state.launch({});
  for (const StatePart part : kStateParts)
    all.state.commit_state(StateSlot{1}, 4, StateSlot{1}, part);
  all.state.copy_kv(std::vector{all.kv[0][8], all.kv[0][10]},
                    std::vector{all.kv[0][7], all.kv[0][8]});
  all.run(1, text("a10"), 9, 10);
  EXPECT_EQ(all.found(), "");
}

// Each way to be wrong, and the words that name it.
TEST(Tensors, ofAWrongSlotAreReportedByUnitAndPart) {
  const auto found = [](const auto& spoil) {
    Requests all("tiny-nemotron-h");
    all.run(1, text("a10"), 0, 10);
    all.run(2, text("a9"), 0, 9);
    EXPECT_EQ(all.found(), "");
    spoil(all);
    all.run(1, text("a12"), 10, 12);
    return all.found();
  };
  EXPECT_EQ(found([](Requests&) {}), "");
  EXPECT_THAT(found([](Requests& all) { std::swap(all.kv[0][2], all.kv[0][3]); }),
              HasSubstr("unit 2: KV slot 33 of token 2 differs"));
  EXPECT_THAT(found([](Requests& all) { all.state.free_kv(std::vector{all.kv[0][9]}); }),
              HasSubstr("logits after 12 tokens are NaN off; unit 2: KV slot 39 of token 9 "
                        "differs, which holds what KV slot 39 had before anybody wrote it"));
  EXPECT_THAT(found([](Requests& all) { all.state.zero_state(StateSlot{1}, StatePart::conv); }),
              HasSubstr("unit 0: the conv part of state slot 1 differs"));
  EXPECT_THAT(found([](Requests& all) {
                all.state.copy_state(StateSlot{2}, StateSlot{1}, StatePart::recurrent);
              }),
              HasSubstr("unit 0: the recurrent part of state slot 1 differs"));
  EXPECT_THAT(found([](Requests& all) { all.state.free_state(StateSlot{1}); }),
              HasSubstr("which holds what state slot 1 had before anybody wrote it"));
}

/// Layers that are wrong on purpose.
class WrongProducts : public TensorLayers {
 public:
  WrongProducts(std::shared_ptr<const TensorLayers> right, bool by_batch)
      : by_batch_(by_batch), right_(std::move(right)) {}

  at::Tensor product(const at::Tensor& x, const at::Tensor& weight) const override {
    const at::Tensor y = right_->product(x, weight);
    if (!by_batch_) return y * (1 + 1e-5);
    // The last row of a larger batch is summed in two parts, each rounded as the activations are.
    if (x.size(0) < 3) return y;
    const std::int64_t last = x.size(0) - 1, half = x.size(1) / 2;
    const auto part = [&](std::int64_t first) {
      return right_->product(x.narrow(0, last, 1).narrow(1, first, half).contiguous(),
                             weight.narrow(1, first, half).contiguous());
    };
    return at::cat({y.narrow(0, 0, last), part(0) + part(half)});
  }
  at::Device device() const override { return right_->device(); }
  at::Tensor logits(const at::Tensor& x, const at::Tensor& head) const override {
    return right_->logits(x, head);
  }
  at::Tensor products(const at::Tensor& x, const at::Tensor& weight) const override {
    return right_->products(x, weight);
  }
  at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& w, double eps) const override {
    return right_->rms_norm(x, w, eps);
  }
  at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& w,
                            double eps, bool before, std::int64_t groups) const override {
    return right_->gated_rms_norm(x, gate, w, eps, before, groups);
  }
  at::Tensor rope(const at::Tensor& x, const at::Tensor& positions, const at::Tensor& frequencies,
                  double magnitude, bool interleaved) const override {
    return right_->rope(x, positions, frequencies, magnitude, interleaved);
  }
  void store(const at::Tensor& pool, const at::Tensor& x, const at::Tensor& slots) const override {
    right_->store(pool, x, slots);
  }
  at::Tensor attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                       const cache_sim::SeenSlots& seen, double scale) const override {
    return right_->attention(q, keys, values, seen, scale);
  }
  cache_sim::Routes route(const at::Tensor& logits, const std::optional<at::Tensor>& bias,
                          const reference::ExpertsUnit& unit) const override {
    return right_->route(logits, bias, unit);
  }
  at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) const override {
    return right_->swiglu(gate, up);
  }
  at::Tensor squared_relu(const at::Tensor& x) const override { return right_->squared_relu(x); }
  at::Tensor sigmoid_gated(const at::Tensor& x, const at::Tensor& gate) const override {
    return right_->sigmoid_gated(x, gate);
  }
  at::Tensor experts(const at::Tensor& x, const cache_sim::Routes& routes,
                     const cache_sim::ExpertMatrices& matrices,
                     const reference::ExpertsUnit& unit) const override {
    return right_->experts(x, routes, matrices, unit);
  }

 private:
  bool by_batch_;
  std::shared_ptr<const TensorLayers> right_;
};

/// The findings of three decodes of one batch, each of which is right alone.
std::string found_in_three_decodes(std::string_view preset,
                                   const std::shared_ptr<const TensorLayers>& layers,
                                   at::ScalarType activations) {
  Requests all(truth_of(preset, std::make_shared<WrongProducts>(layers, true), activations));
  const Tokens tokens = text("a12");
  for (const std::uint32_t request : {1u, 2u, 3u}) all.run(request, tokens, 0, 2);
  EXPECT_EQ(all.found(), "") << preset;
  for (const std::uint32_t request : {1u, 2u, 3u})
    all.state.forward(all.row(request, tokens, 2, 3));
  all.state.launch({});
  return all.found();
}

constexpr const char* kDependsOnBatch =
    "all that it read is right, so its numbers depend on the batch";

TEST(Tensors, ofALayerWhoseRowsDependOnTheBatchAreReported) {
  for (const std::string_view preset : {"tiny-qwen3", "tiny-qwen3-next"})
    EXPECT_THAT(found_in_three_decodes(preset, cache_sim::host_layers(), at::kFloat),
                HasSubstr(kDependsOnBatch))
        << preset;
}

TEST(TensorsOnAGpu, ofALayerWhoseRowsDependOnTheBatchAreReported) {
  const cache_sim::DeviceLayers device = cache_sim::device_layers();
  if (device.layers == nullptr) GTEST_SKIP() << "needs a GPU: " << device.reason;
  for (const std::string_view preset : {"tiny-qwen3-next", "small-qwen3-next"})
    EXPECT_THAT(found_in_three_decodes(preset, device.layers, at::kBFloat16),
                HasSubstr(kDependsOnBatch))
        << preset;
}

TEST(Tensors, ofALayerBeyondItsYardstickAreReported) {
  Requests all(truth_of("tiny-qwen3", cache_sim::judged_layers(std::make_shared<WrongProducts>(
                                          cache_sim::host_layers(), false))));
  all.run(1, text("a4"), 0, 4);
  EXPECT_THAT(all.found(), HasSubstr("number-differs: operator product: worst at"));
}

// Every call of a forward is judged, those of the operators by their definitions.
TEST(Tensors, areJudgedCallByCall) {
  const auto truth =
      truth_of("tiny-qwen3-next", cache_sim::judged_layers(cache_sim::host_layers()));
  cache_sim::JudgedCalls calls;
  Requests all(truth);
  all.run(1, text("a4"), 0, 4);
  EXPECT_GT(calls.judged(), 50);
  EXPECT_TRUE(calls.wrong().empty()) << calls.wrong()[0];
}

}  // namespace
}  // namespace lockstep
