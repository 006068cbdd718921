// Mistakes of a cache move the logits of the tiny models: texts of 40 tokens, a cache that is wrong
// in one way, then two right tokens. The number is the largest change of a logit relative to the
// largest logit of its token; of all texts, the least.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "properties/reference/models/hybrid/hybrid_memory.hpp"

namespace lockstep {
namespace {

using namespace testing_support;
using reference::HybridConfig;
using reference::HybridPart;
using reference::HybridWeights;

constexpr std::size_t kTokens = 40, kAfter = 2, kTexts = 40;
constexpr std::uint64_t kVocabulary = 64;

/// State slots of one text; the last one is where mistakes run.
enum Slot : std::uint32_t { kNow, kOneShort, kOneMore, kFirstOther, kZero, kTrial, kSlots };

/// The runs of one text from which mistakes are put together. KV slots of the text are 0 … 41,
/// those of another text 42 … 83; 84 holds zeros.
class Case {
 public:
  Case(const HybridModel& model, std::uint64_t number)
      : memory_(model, kZeroKv + 1, kSlots),
        text_(drawn_text(2 * number, kPlaces, kVocabulary)),
        other_(drawn_text(2 * number + 1, kPlaces, kVocabulary)) {
    for (std::size_t i = 0; i < kPlaces; ++i)
      if (other_[i] == text_[i]) other_[i] = (other_[i] + 1) % kVocabulary;
    for (std::uint32_t i = 0; i < kPlaces; ++i) own_.push_back(i), others_.push_back(kPlaces + i);
    std::ranges::fill(memory_.kv().slot(kZeroKv), 0.0);
    memory_.zero(kZero);
    Text first = text_;
    first[0] = other_[0];
    fill(first, kTokens, others_, kFirstOther);
    fill(other_, kPlaces, others_, kTrial);
    fill(text_, kTokens - 1, own_, kNow);
    memory_.copy(kNow, kOneShort);
    step(text_, kTokens - 1, kNow);
    memory_.copy(kNow, kOneMore);
    step(other_, kTokens, kOneMore);
    memory_.copy(kNow, kTrial);
    right_ = after(own_, 0);
  }

  /// The change where parts of the state come from other slots: takes(part) gives the slot.
  template <class Takes>
  double state(const Takes& takes) {
    memory_.copy(kNow, kTrial);
    for (const HybridPart& part : memory_.model.parts())
      if (std::string_view(part.name) != "KV")
        std::copy_n(memory_.states().at(takes(part)) + part.first, part.size,
                    memory_.states().at(kTrial) + part.first);
    return change(after(own_, 0));
  }
  /// The change where the KV of a token is another text's, or zero.
  double kv(std::size_t place, bool is_zero) {
    std::vector<std::uint32_t> kv = own_;
    kv[place] = is_zero ? kZeroKv : others_[place];
    memory_.copy(kNow, kTrial);
    return change(after(kv, 0));
  }
  double positions_further() {
    memory_.copy(kNow, kTrial);
    return change(after(own_, 1));
  }

 private:
  static constexpr std::uint32_t kPlaces = kTokens + kAfter, kZeroKv = 2 * kPlaces;

  void fill(const Text& text, std::size_t size, const std::vector<std::uint32_t>& kv, Slot slot) {
    memory_.zero(slot);
    memory_.run({{.tokens = std::span(text).first(size), .kv = kv, .state = slot}});
  }
  void step(const Text& text, std::size_t place, Slot slot) {
    memory_.run({{.tokens = std::span(text).subspan(place, 1),
                  .begin = static_cast<std::int64_t>(place),
                  .kv = own_,
                  .state = slot}});
  }
  /// Logits of the two tokens after the cache, from the state of kTrial.
  std::vector<Numbers> after(const std::vector<std::uint32_t>& kv, std::int64_t shift) {
    std::vector<Numbers> logits;
    for (std::size_t i = kTokens; i < kPlaces; ++i) {
      const auto place = static_cast<std::int64_t>(i);
      logits.push_back(memory_.run({{.tokens = std::span(text_).subspan(i, 1),
                                     .begin = place,
                                     .position = place + shift,
                                     .kv = kv,
                                     .state = kTrial}}));
    }
    return logits;
  }
  double change(const std::vector<Numbers>& logits) const {
    double most = 0;
    for (std::size_t i = 0; i < kAfter; ++i) {
      double far = 0, largest = 0;
      for (std::size_t v = 0; v < logits[i].size(); ++v) {
        far = std::max(far, std::abs(logits[i][v] - right_[i][v]));
        largest = std::max(largest, std::abs(right_[i][v]));
      }
      most = std::max(most, far / largest);
    }
    return most;
  }

  HybridMemory memory_;
  Text text_, other_;
  std::vector<std::uint32_t> own_, others_;
  std::vector<Numbers> right_;
};

struct Mistake {
  std::string_view name;
  double (*change)(Case&);
};

bool is(const HybridPart& part, std::string_view name) {
  return part.name == name;
}

constexpr Mistake kMistakes[] = {
    {"state one token short",
     [](Case& c) { return c.state([](const auto&) { return kOneShort; }); }},
    {"recurrent part one short",
     [](Case& c) {
       return c.state([](const auto& part) { return is(part, "recurrent") ? kOneShort : kNow; });
     }},
    {"conv part one short",
     [](Case& c) {
       return c.state([](const auto& part) { return is(part, "conv") ? kOneShort : kNow; });
     }},
    {"conv part zero",
     [](Case& c) {
       return c.state([](const auto& part) { return is(part, "conv") ? kZero : kNow; });
     }},
    {"a rejected token in the state",
     [](Case& c) { return c.state([](const auto&) { return kOneMore; }); }},
    {"state zero", [](Case& c) { return c.state([](const auto&) { return kZero; }); }},
    {"first layer's state zero",
     [](Case& c) {
       return c.state([](const auto& part) { return part.unit == 0 ? kZero : kNow; });
     }},
    {"state of another first token",
     [](Case& c) { return c.state([](const auto&) { return kFirstOther; }); }},
    {"KV of the first token another's", [](Case& c) { return c.kv(0, false); }},
    {"KV in the middle another's", [](Case& c) { return c.kv(kTokens / 2, false); }},
    {"KV of the last token another's", [](Case& c) { return c.kv(kTokens - 1, false); }},
    {"KV of the last token zero", [](Case& c) { return c.kv(kTokens - 1, true); }},
    {"positions one further", [](Case& c) { return c.positions_further(); }},
};

/// Per mistake, the changes of all texts, sorted.
std::map<std::string_view, std::vector<double>> changes(const HybridModel& model) {
  std::map<std::string_view, std::vector<double>> all;
  for (std::uint64_t number = 0; number < kTexts; ++number) {
    Case text(model, number);
    for (const Mistake& mistake : kMistakes) all[mistake.name].push_back(mistake.change(text));
  }
  for (auto& [name, list] : all) std::ranges::sort(list);
  return all;
}

struct Least {
  std::string_view preset;
  /// By mistake, in the order of kMistakes: the least change; 0: the model has nothing that depends
  /// on it.
  std::vector<double> least;
};

class HybridSensitivity : public testing::TestWithParam<Least> {};

INSTANTIATE_TEST_SUITE_P(
    Presets, HybridSensitivity,
    testing::Values(
        Least{"tiny-nemotron-h",
              {0.29, 0.02, 0.25, 0.39, 0.14, 0.75, 0.28, 0.10, 0.003, 0.003, 0.003, 0.002, 0}},
        Least{"tiny-qwen3-next",
              {0.31, 0.05, 0.34, 0.43, 0.31, 0.79, 0.21, 0.10, 4e-4, 4e-4, 4e-4, 1e-4, 0.10}},
        Least{"tiny-deepseek-v3", {0, 0, 0, 0, 0, 0, 0, 0, 0.007, 0.007, 0.007, 0.007, 0.1}},
        Least{"tiny-qwen3", {0, 0, 0, 0, 0, 0, 0, 0, 0.03, 0.03, 0.03, 0.03, 0.1}},
        Least{"tiny-window", {0, 0, 0, 0, 0, 0, 0, 0, 0.02, 0.02, 0.1, 0.05, 0.1}}),
    [](const auto& info) {
      std::string name(info.param.preset);
      std::ranges::replace(name, '-', '_');
      return name;
    });

TEST_P(HybridSensitivity, everyMistakeMovesTheLogitsOfEveryText) {
  const auto all = changes(preset_model(GetParam().preset));
  for (std::size_t i = 0; i < std::size(kMistakes); ++i) {
    const std::vector<double>& list = all.at(kMistakes[i].name);
    if (GetParam().least[i] > 0)
      EXPECT_GE(list.front(), GetParam().least[i]) << kMistakes[i].name;
    else
      EXPECT_EQ(list.back(), 0) << kMistakes[i].name;
  }
}

/// Weights as careless tests draw them: deviation 0.02, norms 1, A = 1, 2, …, dt_bias and D 1.
HybridWeights careless(const HybridConfig& config) {
  HybridWeights weights = reference::drawn_hybrid(config);
  weights.embedding_scale = 0.02;
  for (auto& [name, tensor] : weights.tensors)
    for (std::size_t i = 0; i < tensor.values.size(); ++i) {
      const bool ones = name.find("norm") != std::string::npos || name.ends_with(".D") ||
                        name.ends_with("dt_bias");
      tensor.values[i] = ones                      ? 1
                         : name.ends_with("A_log") ? std::log(static_cast<double>(i + 1))
                                                   : 0.02 * reference::drawn_number(1, name, i);
    }
  return weights;
}

// The weights make the difference: a recurrent state that is one token short, or of another text,
// changes careless models by next to nothing.
TEST(CarelessWeights, doNotShowWrongStates) {
  const std::map<std::string_view, double> ours_to_careless{{"tiny-nemotron-h", 1000},
                                                            {"tiny-qwen3-next", 5}};
  for (const auto& [preset, factor] : ours_to_careless) {
    const HybridConfig config = *reference::hybrid_preset(preset);
    const auto drawn = changes(preset_model(preset));
    const auto dull = changes(HybridModel(config, careless(config)));
    for (const char* const mistake : {"recurrent part one short", "state of another first token"}) {
      const double ours = drawn.at(mistake)[kTexts / 2],
                   careless_ones = dull.at(mistake)[kTexts / 2];
      EXPECT_GT(ours, careless_ones * (mistake[0] == 'r' ? factor : 5)) << preset << mistake;
    }
  }
}

}  // namespace
}  // namespace lockstep
