// Draft modules: the drafts of transformers' MtpLayer, the same bits however a text is cut, and a
// model that verifies its module's drafts answers as if it had none.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "properties/reference/models/hybrid/hybrid_memory.hpp"
#include "properties/support/program.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

class HybridDrafts : public testing::TestWithParam<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(Presets, HybridDrafts,
                         testing::Values("tiny-qwen3-next", "tiny-deepseek-v3"),
                         [](const auto& info) {
                           return info.param == "tiny-qwen3-next" ? "qwen3_next" : "deepseek_v3";
                         });

std::vector<std::uint32_t> places_to(std::size_t count) {
  std::vector<std::uint32_t> places(count);
  std::iota(places.begin(), places.end(), 0);
  return places;
}

// fixtures/models/hybrid_logits.json is written by hybrid_transformers_full_test.cpp. The last of
// the drafts follows a draft.
TEST_P(HybridDrafts, areThoseOfTransformers) {
  const auto file = nlohmann::json::parse(
      read_text(std::string(LOCKSTEP_SOURCE_DIR) + "/fixtures/models/hybrid_logits.json"));
  const auto& recorded = file.at(std::string(GetParam()));
  const auto text = recorded.at("tokens").get<Text>();
  const PlainRun drafts =
      draft_run(*draft_module(GetParam()), text, plain_run(preset_model(GetParam()), text));
  const double bound = GetParam() == "tiny-deepseek-v3" ? 1e-8 : 1e-12;
  ASSERT_TRUE(recorded.at("drafts").contains(std::to_string(drafts.logits.size())));
  for (const auto& [after, logits] : recorded.at("drafts").items())
    EXPECT_LT(distance(drafts.logits.at(std::stoul(after) - 1), logits.get<Numbers>()), bound)
        << "after " << after << " tokens";
}

// A module's rows have the same bits together and one by one.
TEST_P(HybridDrafts, areTheSameInOneRow) {
  const std::optional<HybridModel> module = draft_module(GetParam());
  const Text text = drawn_text(3, 12), next(text.begin() + 1, text.end());
  const PlainRun plain = plain_run(preset_model(GetParam()), text);
  const PlainRun drafts = plain_run(*module, next, plain.hidden);
  const std::vector<std::uint32_t> kv = places_to(next.size());
  HybridMemory memory(*module, next.size(), 1);
  Numbers hidden, after(next.size() * plain.hidden[0].size());
  for (const Numbers& one : plain.hidden) hidden.insert(hidden.end(), one.begin(), one.end());
  EXPECT_EQ(
      memory.run(
          {{.tokens = next, .kv = kv, .hidden = hidden.data(), .hidden_after = after.data()}}),
      drafts.logits.back());
  for (std::size_t i = 0; i < next.size(); ++i)
    EXPECT_TRUE(std::ranges::equal(
        std::span(after).subspan(i * drafts.hidden[i].size(), drafts.hidden[i].size()),
        drafts.hidden[i]))
        << i;
}

// Each way to give a module the wrong thing moves its draft.
TEST_P(HybridDrafts, areMovedByWhatIsWrong) {
  const std::optional<HybridModel> module = draft_module(GetParam());
  const Text text = drawn_text(3, 12), next(text.begin() + 1, text.end());
  const std::vector<Numbers> hidden = plain_run(preset_model(GetParam()), text).hidden;
  const Numbers right = plain_run(*module, next, hidden).logits.back();
  const auto moved = [&](const Text& tokens, const std::vector<Numbers>& given) {
    return distance(plain_run(*module, tokens, given).logits.back(), right);
  };
  Text repeated = next, first = next;
  repeated.back() = text[text.size() - 2];
  EXPECT_GT(moved(repeated, hidden), 1e-2) << "the embedding of the place's own token";
  first[0] = 1;
  EXPECT_GT(moved(first, hidden), 1e-4) << "KV of another token";
  std::vector<Numbers> late = hidden;
  std::swap(late[next.size() - 1], late[next.size()]);
  EXPECT_GT(moved(next, late), 1e-2) << "the hidden state of the token itself";
  EXPECT_GT(moved(next, {hidden.begin(), hidden.begin() + 10}), 1e-2) << "the module's own";
}

/// The token at a place of an answer. Noise by place and token keeps answers from going in circles,
/// and is the same for a model and its module, so that they agree now and then.
std::uint64_t sampled(std::span<const double> logits, std::size_t place) {
  Numbers noisy(logits.begin(), logits.end());
  for (std::size_t v = 0; v < noisy.size(); ++v)
    noisy[v] += 8 * reference::drawn_number(1, "noise", place * noisy.size() + v);
  return static_cast<std::uint64_t>(std::ranges::max_element(noisy) - noisy.begin());
}

/// A request that its model answers from rows over pools.
struct Answer {
  Answer(const HybridModel& model, const HybridModel& module, Text prompt)
      : memory(model, kPlaces, 1), drafter(module, kPlaces, 1), text(std::move(prompt)) {
    memory.zero(0);
  }

  /// Runs the tokens that are not computed yet, with drafts behind them, and keeps those that the
  /// model would have sampled, and one more.
  void verify(const Text& drafts) {
    Text tokens(text.begin() + static_cast<std::ptrdiff_t>(computed), text.end());
    tokens.insert(tokens.end(), drafts.begin(), drafts.end());
    const std::size_t known = text.size() - computed, state = memory.model.state_size();
    Numbers states(tokens.size() * state + 1);
    hidden.resize(tokens.size() * width);
    const Numbers logits = memory.run({{.tokens = tokens,
                                        .begin = static_cast<std::int64_t>(computed),
                                        .kv = kv,
                                        .states_after = states.data(),
                                        .drafts = static_cast<std::int64_t>(drafts.size()),
                                        .hidden_after = hidden.data()}});
    const std::size_t V = memory.model.vocabulary();
    std::size_t right = 0;
    const auto next = [&] {
      return sampled(std::span(logits).subspan((known - 1 + right) * V, V), text.size());
    };
    while (right < drafts.size() && next() == drafts[right]) text.push_back(drafts[right++]);
    text.push_back(next());
    ++accepted[right];
    kept = known + right;
    computed += kept;
    std::copy_n(states.data() + (kept - 1) * state, state, memory.states().at(0));
  }

  /// Drafts after the last verification: its kept tokens first, beside what the head was given.
  Text drafts(std::size_t count) {
    Text found, tokens(text.end() - static_cast<std::ptrdiff_t>(kept), text.end());
    Numbers given(hidden.begin(), hidden.begin() + static_cast<std::ptrdiff_t>(kept * width));
    for (std::size_t place = computed - kept; found.size() < count;) {
      Numbers after(given.size());
      const Numbers logits = drafter.run({{.tokens = tokens,
                                           .begin = static_cast<std::int64_t>(place),
                                           .kv = kv,
                                           .hidden = given.data(),
                                           .hidden_after = after.data()}});
      if (found.empty()) first = logits;
      found.push_back(sampled(logits, text.size() + found.size()));
      place += tokens.size();
      tokens = {found.back()};
      given.assign(after.end() - static_cast<std::ptrdiff_t>(width), after.end());
    }
    return found;
  }

  static constexpr std::size_t kPlaces = 100;
  HybridMemory memory, drafter;
  Text text;
  std::vector<std::uint32_t> kv = places_to(kPlaces);
  std::size_t width = static_cast<std::size_t>(memory.model.config().hidden);
  std::size_t computed = 0, kept = 0;
  std::map<std::size_t, int> accepted{};  ///< verifications by the number of drafts that were right
  Numbers hidden{};                       ///< of the last verification's tokens
  Numbers first{};                        ///< logits of the first draft after it
};

// The model has three words, so that a module of drawn weights is often right. Its KV stands for
// the text whatever was rejected: its first draft is that of a run over the whole text.
TEST_P(HybridDrafts, changeNoAnswer) {
  reference::HybridConfig config = *reference::hybrid_preset(GetParam());
  config.vocabulary = 3;
  const reference::HybridConfig drafts_for = *reference::hybrid_draft(config);
  const HybridModel model(config, reference::drawn_hybrid(config));
  const HybridModel module(drafts_for, reference::drawn_hybrid(drafts_for));
  const Text prompt = drawn_text(5, 9);
  Answer plain(model, module, prompt);
  while (plain.text.size() < 80) plain.verify({});
  for (std::size_t count = 1; count <= 3; ++count) {
    Answer answer(model, module, prompt);
    answer.verify({});
    while (answer.text.size() < 75) {
      const Text drafts = answer.drafts(count);
      const Text computed(answer.text.begin(), answer.text.end() - 1);
      const PlainRun whole = plain_run(module, {answer.text.begin() + 1, answer.text.end()},
                                       plain_run(model, computed).hidden);
      EXPECT_EQ(answer.first, whole.logits.back());
      answer.verify(drafts);
    }
    EXPECT_TRUE(std::equal(answer.text.begin(), answer.text.end(), plain.text.begin())) << count;
    for (std::size_t right = 0; right <= count; ++right)
      EXPECT_GT(answer.accepted[right], 0) << right << " of " << count;
  }
}

TEST(HybridDraft, isNoneWhereTheFamilyHasNone) {
  for (const std::string_view preset : {"tiny-nemotron-h", "tiny-qwen3", "tiny-window"})
    EXPECT_FALSE(draft_module(preset)) << preset;
}

}  // namespace
}  // namespace lockstep
