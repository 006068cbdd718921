// Hybrid models by configuration: a text has the same bits however it is cut into prefills, decodes
// and verifications, whatever runs beside it, and wherever its slots lie.
#include "reference/models/hybrid/hybrid_model.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "properties/reference/models/hybrid/hybrid_memory.hpp"
#include "properties/support/program.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::HybridTake;

const HybridModel& model_of(std::string_view name) {
  static std::map<std::string_view, std::unique_ptr<HybridModel>> models;
  auto& model = models[name];
  const auto config = *reference::hybrid_preset(name);
  if (!model) model = std::make_unique<HybridModel>(config, reference::drawn_hybrid(config));
  return *model;
}

/// The bits of two lists of numbers, NaN included.
bool same(std::span<const double> a, std::span<const double> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](double x, double y) {
           return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y);
         });
}

int below(int bound) {
  return *rc::gen::inRange(0, bound);
}

/// A request of a random run: a text whose first `done` tokens are in its slots.
struct Request {
  Text text;
  PlainRun plain;
  std::uint32_t state;
  std::vector<std::uint32_t> kv;
  std::int64_t done = 0;

  // The next row.
  std::int64_t size = 0;
  Text tokens{};
  std::vector<std::int64_t> parents{};
  std::vector<std::size_t> accepted{};  ///< drafts (from 1) on the text's own path
  std::vector<HybridTake> takes{};
  Numbers states_after{};

  std::int64_t left() const { return static_cast<std::int64_t>(text.size()) - done; }
  bool verifies() const { return !states_after.empty(); }
  std::int64_t drafts() const { return static_cast<std::int64_t>(tokens.size()) - size; }
};

constexpr int kMostTokens = 24, kMostDrafts = 4, kTaken = 6;

/// Draws a row of text alone: one token (a decode), or more, with a state taken on the way.
void draw_chunk(Request& r) {
  r.size = below(2) == 0 ? 1 : 1 + below(static_cast<int>(r.left()));
  r.tokens.assign(r.text.begin() + r.done, r.text.begin() + r.done + r.size);
  if (below(3) == 0) r.takes.push_back({r.done + below(static_cast<int>(r.size) + 1), kTaken});
}

/// Draws a verification: one or two known tokens, then a chain or a tree of drafts, some of them
/// wrong.
void draw_verification(Request& r, const HybridModel& model) {
  r.size = std::min<std::int64_t>(1 + below(2), r.left());
  r.tokens.assign(r.text.begin() + r.done, r.text.begin() + r.done + r.size);
  const bool tree = below(2) == 0;
  std::size_t last = 0;  // the end of the text's own path
  const int count = 1 + below(kMostDrafts);
  for (int draft = 1; draft <= count; ++draft) {
    const std::int64_t parent = tree ? below(draft) : draft - 1;
    const std::size_t next = static_cast<std::size_t>(r.done + r.size) + r.accepted.size();
    const bool right =
        static_cast<std::size_t>(parent) == last && next < r.text.size() && below(4) > 0;
    if (tree) r.parents.push_back(parent);
    r.tokens.push_back(right ? r.text[next] : 1000 + static_cast<std::uint64_t>(draft));
    if (right) r.accepted.push_back(last = static_cast<std::size_t>(draft));
  }
  r.states_after.resize(r.tokens.size() * model.state_size() + 1);
}

HybridRow row_of(Request& r) {
  HybridRow row{
      .tokens = r.tokens, .begin = r.done, .kv = r.kv, .state = r.state, .takes = r.takes};
  if (r.verifies()) {
    row.states_after = r.states_after.data();
    row.drafts = r.drafts();
    row.parents = r.parents;
  }
  return row;
}

/// The tokens that token i of the row follows, itself included.
Text text_to(const Request& r, std::size_t i) {
  const auto inputs = static_cast<std::size_t>(r.size);
  if (i < inputs)
    return {r.text.begin(), r.text.begin() + r.done + static_cast<std::int64_t>(i) + 1};
  const std::size_t parent =
      r.parents.empty() ? i - 1 : inputs - 1 + static_cast<std::size_t>(r.parents[i - inputs]);
  Text text = text_to(r, parent);
  text.push_back(r.tokens[i]);
  return text;
}

/// Compares the row's logits with those of plain runs, and accepts what is right.
void take_results(Request& r, HybridMemory& memory, std::span<const double> logits) {
  const HybridModel& model = memory.model;
  const std::size_t V = model.vocabulary(), size = model.state_size();
  if (!r.verifies()) {
    r.done += r.size;
    RC_ASSERT(same(logits, r.plain.logits[static_cast<std::size_t>(r.done - 1)]));
    for (const HybridTake& take : r.takes)
      RC_ASSERT(size == 0 || same(memory.state(take.slot),
                                  r.plain.states[static_cast<std::size_t>(take.after)]));
  } else {
    for (std::size_t i = 0; i < r.tokens.size(); ++i) {
      const PlainRun plain = plain_run(model, text_to(r, i));
      RC_ASSERT(same(logits.subspan(i * V, V), plain.logits.back()));
      RC_ASSERT(same(std::span(r.states_after).subspan(i * size, size), plain.states.back()));
    }
    const auto known = static_cast<std::size_t>(r.done + r.size);
    for (std::size_t i = 0; i < r.accepted.size(); ++i)
      std::ranges::copy(memory.kv().slot(r.kv[known + r.accepted[i] - 1]),
                        memory.kv().at(r.kv[known + i]));
    const std::size_t last =
        static_cast<std::size_t>(r.size) - 1 + (r.accepted.empty() ? 0 : r.accepted.back());
    std::copy_n(r.states_after.data() + last * size, size, memory.states().at(r.state));
    r.done += r.size + static_cast<std::int64_t>(r.accepted.size());
  }
  RC_ASSERT(size == 0 ||
            same(memory.state(r.state), r.plain.states[static_cast<std::size_t>(r.done)]));
  r.tokens.clear(), r.parents.clear(), r.accepted.clear(), r.takes.clear(), r.states_after.clear();
}

/// Runs three texts side by side in batches cut at random, with rows of padding between them.
void run_requests(const HybridModel& model) {
  HybridMemory memory(model, 200, kTaken + 1);
  std::vector<std::uint32_t> slots(199);
  std::iota(slots.begin(), slots.end(), 1);
  std::vector<Request> requests;
  for (std::uint32_t i = 0; i < 3; ++i) {
    Text text = drawn_text(*rc::gen::arbitrary<std::uint64_t>(),
                           1 + static_cast<std::size_t>(below(kMostTokens)));
    PlainRun plain = plain_run(model, text);
    requests.push_back({std::move(text), std::move(plain), i + 1, {}});
    for (int place = 0; place < kMostTokens + 2 + kMostDrafts; ++place) {
      std::swap(slots.back(),
                slots[static_cast<std::size_t>(below(static_cast<int>(slots.size())))]);
      requests.back().kv.push_back(slots.back());
      slots.pop_back();
    }
    memory.zero(i + 1);
  }
  const Text nothing{0};
  const std::vector<std::uint32_t> page_0{0};
  const HybridRow padding{.tokens = nothing, .kv = page_0, .state = 0};
  while (true) {
    std::vector<HybridRow> rows;
    std::vector<Request*> running;
    for (Request& r : requests) {
      if (r.left() == 0) continue;
      if (below(3) == 0) rows.push_back(padding), running.push_back(nullptr);
      if (r.done > 0 && below(3) == 0)
        draw_verification(r, model);
      else
        draw_chunk(r);
      if (!r.takes.empty() && std::ranges::any_of(running, [](const Request* other) {
            return other != nullptr && !other->takes.empty();
          }))
        r.takes.clear();  // one slot for taken states
      rows.push_back(row_of(r));
      running.push_back(&r);
    }
    if (running.empty()) return;
    const Numbers logits = memory.run(rows);
    std::size_t first = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t own = rows[i].sampled() * model.vocabulary();
      if (running[i] != nullptr)
        take_results(*running[i], memory, std::span(logits).subspan(first, own));
      first += own;
    }
  }
}

class Hybrid : public testing::TestWithParam<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(Presets, Hybrid, testing::ValuesIn(reference::hybrid_presets()),
                         [](const auto& info) {
                           std::string name(info.param);
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

// Bits depend on the row's own tokens alone, so a cache may be compared with a run without one.
TEST_P(Hybrid, everyCutAndBatchOfATextHasTheSameBits) {
  rc::check([&] { run_requests(model_of(GetParam())); });
}

// A part that a row does not keep stays in its slot, and KV that it does not write stays in its.
TEST_P(Hybrid, aRowWritesOnlyWhatItKeeps) {
  const HybridModel& model = model_of(GetParam());
  const Text text = drawn_text(3, 5);
  const std::vector<std::uint32_t> kv{4, 3, 2, 1, 0};
  for (const bool recurrent : {false, true})
    for (const bool conv : {false, true}) {
      HybridMemory memory(model, 5, 1);
      memory.zero(0);
      memory.run({{.tokens = text, .kv = kv, .keeps_recurrent = recurrent, .keeps_conv = conv}});
      const Numbers after = plain_run(model, text).states.back();
      Numbers expected(model.state_size(), 0.0);
      for (std::size_t i = 0; i < expected.size(); ++i)
        if (i < model.recurrent_size() ? recurrent : conv) expected[i] = after[i];
      EXPECT_TRUE(same(memory.state(0), expected)) << recurrent << conv;
      const Numbers written = memory.kv_numbers;
      memory.run({{.tokens = drawn_text(4, 5), .kv = kv, .writes_kv = false}});
      EXPECT_TRUE(same(memory.kv_numbers, written));
    }
}

// fixtures/models/hybrid_logits.json is written by hybrid_transformers_full_test.cpp: the classes
// of transformers in float64. YaRN is float32 inside that of DeepSeek.
TEST_P(Hybrid, hasTheLogitsOfTransformers) {
  const auto file = nlohmann::json::parse(
      read_text(std::string(LOCKSTEP_SOURCE_DIR) + "/fixtures/models/hybrid_logits.json"));
  const auto& recorded = file.at(std::string(GetParam()));
  const PlainRun plain = plain_run(model_of(GetParam()), recorded.at("tokens").get<Text>());
  const double bound = GetParam() == "tiny-deepseek-v3" ? 1e-8 : 1e-12;
  for (const auto& [after, logits] : recorded.at("logits").items())
    EXPECT_LT(distance(plain.logits.at(std::stoul(after) - 1), logits.get<Numbers>()), bound)
        << "after " << after << " tokens";
}

// A unit's slots may lie at a distance from those that the row names.
TEST_P(Hybrid, aUnitMayHaveSlotsOfItsOwn) {
  const HybridModel& model = model_of(GetParam());
  const Text text = drawn_text(3, 6);
  const PlainRun plain = plain_run(model, text);
  const std::vector<std::uint32_t> kv{4, 3, 2, 1, 0, 5}, kv_layers{12, 0, 6}, state_layers{2, 0, 4};
  HybridMemory memory(model, 18, 6);
  for (std::size_t slot = 0; slot < 6; slot += 2) memory.zero(slot + 1);
  const std::vector<HybridTake> takes{{.after = 5, .slot = 0}};
  const HybridRow row{.tokens = text,
                      .kv = kv,
                      .state = 1,
                      .state_layers = state_layers,
                      .kv_layers = kv_layers,
                      .takes = takes};
  EXPECT_TRUE(same(memory.run({row}), plain.logits.back()));
  for (const reference::HybridPart& part : model.parts()) {
    if (std::string_view(part.name) == "KV") continue;
    const auto held = [&](std::uint32_t slot) {
      return memory.states().slot(slot + state_layers[part.layer]).subspan(part.first, part.size);
    };
    EXPECT_TRUE(same(held(1), std::span(plain.states[6]).subspan(part.first, part.size)));
    EXPECT_TRUE(same(held(0), std::span(plain.states[5]).subspan(part.first, part.size)));
  }
}

// KV may lie at addresses of its own: here that of each unit lies in a memory where places run
// backwards, and a draft's behind them.
TEST_P(Hybrid, kvMayLieInNoPool) {
  const HybridModel& model = model_of(GetParam());
  const Text text = drawn_text(3, 7);
  const PlainRun plain = plain_run(model, text);
  std::vector<std::vector<double>> memories;
  std::vector<double*> all;
  for (const reference::HybridPart& part : model.parts())
    if (std::string_view(part.name) == "KV") {
      memories.emplace_back(text.size() * part.size);
      for (std::size_t i = 0; i < text.size(); ++i)
        all.push_back(memories.back().data() + (text.size() - 1 - i) * part.size);
    }
  const auto first_places = [&](std::size_t count) {
    std::vector<double*> places;
    for (std::size_t at = 0; at < all.size(); at += text.size())
      places.insert(places.end(), all.begin() + static_cast<std::ptrdiff_t>(at),
                    all.begin() + static_cast<std::ptrdiff_t>(at + count));
    return places;
  };
  std::vector<std::uint32_t> kv(text.size());
  std::iota(kv.begin(), kv.end(), 0);
  HybridMemory memory(model, 0, 1);
  memory.zero(0);
  const std::vector<double*> four = first_places(4);
  const HybridRow row{
      .tokens = std::span(text).first(4), .kv = std::span(kv).first(4), .kv_places = four};
  EXPECT_TRUE(same(memory.run({row}), plain.logits[3]));
  Numbers states_after(3 * model.state_size() + 1);
  const HybridRow verified{.tokens = std::span(text).subspan(4),
                           .begin = 4,
                           .kv = kv,
                           .kv_places = all,
                           .states_after = states_after.data(),
                           .drafts = 2};
  const Numbers logits = memory.run({verified});
  EXPECT_TRUE(same(std::span(logits).last(model.vocabulary()), plain.logits[6]));
}

// The KV of padding is written as if the text went on; nothing else of it is kept.
TEST_P(Hybrid, paddingLeavesItsKvAlone) {
  const HybridModel& model = model_of(GetParam());
  const Text text = drawn_text(3, 8);
  const PlainRun plain = plain_run(model, text);
  std::vector<std::uint32_t> kv(8);
  std::iota(kv.begin(), kv.end(), 0);
  HybridMemory memory(model, 8, 1), whole(model, 8, 1);
  memory.zero(0);
  whole.zero(0);
  whole.run({{.tokens = text, .kv = kv}});
  EXPECT_TRUE(same(memory.run({{.tokens = text, .kv = kv, .padding = 3}}), plain.logits[4]));
  EXPECT_TRUE(same(memory.state(0), plain.states[5]));
  EXPECT_TRUE(same(memory.kv_numbers, whole.kv_numbers));

  Numbers states_after(text.size() * model.state_size() + 1), expected;
  for (std::size_t i = 0; i < 5; ++i)
    expected.insert(expected.end(), plain.logits[i].begin(), plain.logits[i].end());
  memory.zero(0);
  const HybridRow verified{
      .tokens = text, .kv = kv, .padding = 3, .states_after = states_after.data(), .drafts = 2};
  EXPECT_TRUE(same(memory.run({verified}), expected));
  EXPECT_TRUE(same(memory.kv_numbers, whole.kv_numbers));
}

// The number of parameters of each preset, without the embedding, and the parts of a slot.
TEST(HybridConfig, hasTheSizesOfItsPage) {
  const std::map<std::string_view, std::size_t> parameters{{"tiny-nemotron-h", 29088},
                                                           {"tiny-qwen3-next", 60016},
                                                           {"tiny-deepseek-v3", 45648},
                                                           {"tiny-qwen3", 19648}};
  for (const auto& [name, expected] : parameters) {
    const HybridModel& model = model_of(name);
    std::size_t count = std::size_t{64} * 32;  // the embedding of a checkpoint
    for (const auto& [tensor, values] : model.weights().tensors) count += values.values.size();
    EXPECT_EQ(count, expected) << name;
  }
  EXPECT_FALSE(reference::hybrid_preset("tiny"));
  const HybridModel& nemotron = model_of("tiny-nemotron-h");
  EXPECT_EQ(nemotron.kv_size(), 32u);
  EXPECT_EQ(nemotron.recurrent_size(), 2u * 4 * 8 * 8);
  EXPECT_EQ(nemotron.state_size(), nemotron.recurrent_size() + std::size_t{2} * 64 * 3);
}

// Another unit or another shape changes no weight of this tensor, and no two tokens are alike.
TEST(HybridWeights, dependOnNameAndIndexAlone) {
  reference::HybridConfig config = *reference::hybrid_preset("tiny-qwen3");
  const auto all = reference::drawn_hybrid(config, 5);
  config.units.erase(config.units.begin());
  for (const auto& [name, tensor] : reference::drawn_hybrid(config, 5).tensors)
    EXPECT_EQ(tensor.values, all.tensors.at(name).values) << name;
  EXPECT_NE(reference::drawn_hybrid(config, 6).tensors.at("lm_head.weight").values,
            all.tensors.at("lm_head.weight").values);
  std::set<std::vector<double>> embeddings;
  for (int bit = 0; bit < 64; ++bit) {
    std::vector<double> embedding(32);
    reference::embed(all, std::uint64_t{1} << bit, embedding);
    embeddings.insert(embedding);
  }
  EXPECT_EQ(embeddings.size(), 64u);
}

}  // namespace
}  // namespace lockstep
