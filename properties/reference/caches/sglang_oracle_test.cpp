// The workload `sglang-w1` as it was recorded, and each rule of SGLang's radix caches alone
// (sglang_rules.txt), by the oracle and by the policy.
#include "reference/caches/sglang_oracle.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache_sim/model/label_state.hpp"
#include "cache_sim/replay/sglang_w1_driver.hpp"
#include "properties/support/program.hpp"
#include "properties/support/search.hpp"
#include "reference/base/mix.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep {
namespace {

template <class Entry>
std::unique_ptr<Subject> make_subject(std::string_view policy, const Config& config) {
  const Entry* const entry = Registry<Entry>::find(policy);
  require(entry != nullptr, "policy and oracle are registered under the policy's name");
  static NoLayerState no_layers;
  return entry->make({.config = config, .layers = &no_layers});
}
std::unique_ptr<Subject> make_oracle(std::string_view policy, const Config& config) {
  return make_subject<OracleEntry>(policy, config);
}
std::unique_ptr<Subject> make_policy(std::string_view policy, const Config& config) {
  return make_subject<PolicyEntry>(policy, config);
}

/// Speaks to an oracle or a policy in lines, as a trace does.
class Conversation {
 public:
  explicit Conversation(std::string_view policy, std::string_view config = "",
                        decltype(make_oracle) make = make_oracle) {
    Config values;
    const Result<void> set = config.empty() ? Result<void>() : values.set_all(config);
    require(set.has_value(), "a test's config is well formed");
    subject_ = make(policy, values);
  }

  Result<Reply> apply(std::string_view line) {
    const Result<Line> parsed = parse_line(line);
    require(parsed.has_value(), "a test's line is well formed");
    const Result<Operation> operation = parse_operation(*parsed);
    require(operation.has_value(), operation ? "" : operation.error().text);
    return subject_->apply(*operation);
  }

  /// The reply's text; `error` where the line was an error.
  std::string ask(std::string_view line) {
    const Result<Reply> reply = apply(line);
    return reply ? reply->text() : "error";
  }

  /// One field of a reply that must carry it.
  std::int64_t ask(std::string_view line, ReplyField field) {
    const Result<Reply> reply = apply(line);
    require(reply && reply->has(field),
            fmt::format("`{}` is answered with {}", line, to_string(field)));
    return reply->get(field);
  }

  /// Stores a prefix with a state of its own.
  void store(std::string_view tokens) {
    const std::string slot = fmt::format("store{}", stored_++);
    EXPECT_NE(ask(fmt::format("alloc as={}", slot)), "refused=no_state_slot");
    EXPECT_EQ(ask(fmt::format("insert slot={} tokens={}", slot, tokens), ReplyField::exist), 0);
  }

 private:
  std::unique_ptr<Subject> subject_;
  int stored_ = 0;
};

constexpr std::string_view kNoBuffer = "sglang-no-buffer";

// --- The workload, and SGLang's decisions on it -------------------------------------------------

const cache_sim::SglangW1& default_workload() {
  static const cache_sim::SglangW1 workload = cache_sim::SglangW1::generate({});
  return workload;
}

TEST(SglangW1, hashesAreTheRecordedOnes) {
  EXPECT_EQ(mix64(0), 0xe220a8397b1dcdafu);
  EXPECT_EQ(mix64(mix64(mix64(0x5EED2026 + 1) ^ 0) ^ 0), 0x023d31ee72733a34u);
}

TEST(SglangW1, generatorMakesTheRecordedTokens) {
  const cache_sim::SglangW1& workload = default_workload();
  EXPECT_EQ(workload.token_digest(), 0x7a04faa0e91ab547u);
  ASSERT_EQ(workload.requests.size(), 2000u);
  std::int64_t prompt_tokens = 0, tokens = 0, conversations = 0;
  std::uint32_t longest = 0;
  for (const cache_sim::SglangW1Request& request : workload.requests) {
    prompt_tokens += request.prompt_size;
    tokens += request.tokens.size();
    longest = std::max(longest, request.tokens.size());
    conversations = std::max(conversations, request.conversation + 1);
  }
  EXPECT_EQ(prompt_tokens, 3'275'942);
  EXPECT_EQ(tokens - prompt_tokens, 287'172);
  EXPECT_EQ(longest, 3783u);
  EXPECT_EQ(conversations, 839);

  constexpr std::uint32_t sizes[3][2] = {{1110, 141}, {1324, 58}, {1367, 255}};
  constexpr Token first_tokens[3][3] = {
      {14706, 3111, 28795}, {2261, 31016, 14368}, {20086, 30375, 18828}};
  for (std::size_t i = 0; i < 3; ++i) {
    const cache_sim::SglangW1Request& request = workload.requests[i];
    EXPECT_EQ(request.prompt_size, sizes[i][0]);
    EXPECT_EQ(request.tokens.size() - request.prompt_size, sizes[i][1]);
    for (std::uint32_t j = 0; j < 3; ++j) EXPECT_EQ(request.tokens[j], first_tokens[i][j]);
  }
}

TEST(SglangW1, turnContinuesWithEverythingTheConversationSaidBefore) {
  const cache_sim::SglangW1& workload = default_workload();
  for (const cache_sim::SglangW1Request& request : workload.requests) {
    if (request.previous < 0) continue;
    const auto& before = workload.requests[static_cast<std::size_t>(request.previous)];
    EXPECT_EQ(request.conversation, before.conversation);
    ASSERT_LT(before.tokens.size(), request.prompt_size);
    EXPECT_EQ(request.tokens.prefix(before.tokens.size()), before.tokens);
  }
}

TEST(SglangW1, fewerRequestsAreTheFirstOnesOfTheSameSequence) {
  const auto options = cache_sim::SglangW1Options::parse("seed=0x5EED2026,requests=20");
  ASSERT_TRUE(options) << options.error().text;
  const cache_sim::SglangW1 few = cache_sim::SglangW1::generate(*options);
  ASSERT_EQ(few.requests.size(), 20u);
  for (std::size_t i = 0; i < 20; ++i)
    EXPECT_EQ(few.requests[i].tokens, default_workload().requests[i].tokens);
}

TEST(SglangW1, parametersThatMakeNoSenseAreNamed) {
  for (const std::string_view text :
       {"seeds=1", "seed", "seed=", "seed=0x", "seed=0xg", "requests=0", "requests=2x",
        "seed=1,,requests=2", "kv_tokens=0", "state_slots=-1"})
    EXPECT_FALSE(cache_sim::SglangW1Options::parse(text)) << text;
  EXPECT_EQ(cache_sim::SglangW1Options::parse("state_slots=17,kv_tokens=99")->state_slots, 17);
  EXPECT_EQ(cache_sim::SglangW1Options::parse("")->requests, 2000);
}

// The digests are of SGLang's own classes with windows of 129 tokens in a pool of 32,768, which
// answered these operations as the policies do (window_release=1).
TEST(SglangW1, windowsAreDecidedAboutAsSglangDoes) {
  struct Recorded {
    const char* policy;
    const char* digest;
    std::int64_t hit_tokens;
  };
  for (const auto& [policy, digest, hit_tokens] :
       {Recorded{"radix", "68333bcbf66f460c", 2'117'670},
        Recorded{"sglang-no-buffer", "2df3542071aca17c", 1'765'138},
        Recorded{"sglang-extra-buffer", "65c8afbccdb7bda5", 2'168'704}}) {
    Config config;
    ASSERT_TRUE(config.set_all("window=129,window_kv=32768,window_release=1"));
    const std::unique_ptr<Subject> subject = make_policy(policy, config);
    Reply reply;
    const cache_sim::DrivenOutcome outcome =
        cache_sim::drive(default_workload(), [&](const Operation& operation) -> const Reply* {
          const Result<Reply> answer = subject->apply(operation);
          if (!answer) return nullptr;
          reply = *answer;
          return &reply;
        });
    EXPECT_TRUE(outcome.complete) << policy;
    EXPECT_EQ(fmt::format("{:016x}", outcome.decision_digest), digest) << policy;
    EXPECT_EQ(outcome.hit_tokens, hit_tokens) << policy;
  }
}

TEST(SglangW1, theDriverStopsAtARefusalButGoesOnWithoutACheckpoint) {
  const Reply cached = Reply().set(ReplyField::cached, 0);
  const auto drive_refusing = [&](Verb verb) {
    const Reply refused = Reply::refusal(Refusal::no_state_slot);
    return cache_sim::drive(default_workload(), [&, verb](const Operation& operation) {
      return operation.verb == verb ? &refused : &cached;
    });
  };
  EXPECT_TRUE(drive_refusing(Verb::checkpoint).complete);
  EXPECT_FALSE(drive_refusing(Verb::extend).complete);
  EXPECT_EQ(drive_refusing(Verb::admit).prefixes.size(), 0u);
  EXPECT_FALSE(
      cache_sim::drive(default_workload(), [](const Operation&) { return nullptr; }).complete);
}

// --- The rules of sglang.md, each alone ----------------------------------------------------------

/// A section of sglang_rules.txt: its lines with their numbers.
struct Rule {
  std::string title;
  std::vector<std::pair<int, std::string>> lines;
};

[[maybe_unused]] void PrintTo(const Rule& rule, std::ostream* out) {
  *out << rule.title;
}

std::vector<Rule> rules() {
  std::vector<Rule> found;
  int number = 0;
  for (std::string line : testing_support::lines_of(testing_support::read_text(
           LOCKSTEP_SOURCE_DIR "/properties/reference/caches/sglang_rules.txt"))) {
    ++number;
    line = line.substr(0, line.find("  # "));
    if (line.starts_with("== "))
      found.push_back({line.substr(3), {}});
    else if (!line.empty() && line[0] != '#')
      found.at(found.size() - 1).lines.emplace_back(number, line);
  }
  return found;
}

/// The due answer, or the fields of it that stand before `…`, are in the answer.
bool is_answer(const std::string& answer, const std::string& due) {
  if (!due.ends_with(" …")) return answer == due;
  std::istringstream fields(due.substr(0, due.rfind(" …")));
  for (std::string field; fields >> field;)
    if ((" " + answer + " ").find(" " + field + " ") == std::string::npos) return false;
  return true;
}

/// Plays the rule; says in how many lines an answer was due.
int play(const Rule& rule, decltype(make_oracle) make) {
  std::optional<Conversation> cache;
  int compared = 0;
  for (const auto& [number, line] : rule.lines) {
    SCOPED_TRACE(fmt::format("sglang_rules.txt:{}: {}", number, line));
    const std::size_t arrow = line.find(" -> ");
    std::string question = line.substr(0, arrow);
    std::istringstream words(question);
    std::string verb, word;
    words >> verb;
    if (verb == "config") {
      words >> word;
      std::ranges::replace(question, ' ', ',');
      cache.emplace(word.substr(word.find('=') + 1), question.substr(verb.size() + 1), make);
    } else if (verb == "store") {
      while (words >> word) cache.value().store(word);
    } else {
      const std::string answer = cache.value().ask(question);
      if (arrow == std::string::npos) continue;
      EXPECT_TRUE(is_answer(answer, line.substr(arrow + 4))) << answer;
      ++compared;
    }
  }
  return compared;
}

class SglangRules : public testing::TestWithParam<Rule> {};

TEST_P(SglangRules, holdsForTheOracle) {
  EXPECT_GT(play(GetParam(), make_oracle), 0);
}

TEST_P(SglangRules, holdsForThePolicy) {
  EXPECT_GT(play(GetParam(), make_policy), 0);
}

INSTANTIATE_TEST_SUITE_P(Each, SglangRules, testing::ValuesIn(rules()), [](const auto& info) {
  return testing_support::test_name(info.param.title);
});

TEST(SglangOracle, anotherAnswerThanTheRulesIsSeen) {
  EXPECT_TRUE(is_answer("kv=4 state=0", "kv=4 state=0"));
  EXPECT_TRUE(is_answer("branch=0 kv=4 state=0", "state=0 kv=4 …"));
  EXPECT_FALSE(is_answer("branch=0 kv=4 state=0", "kv=4 state=0"));
  EXPECT_FALSE(is_answer("kv=40", "kv=4 …"));
}

TEST(SglangOracle, operationsOnWhatIsNotThereAreErrors) {
  for (const std::string_view policy : {std::string_view("radix"), kNoBuffer}) {
    Conversation cache(policy);
    for (const std::string_view line : {"extend id=r n=1",
                                        "accept id=r n=1 tokens=a1",
                                        "checkpoint id=r",
                                        "finish id=r",
                                        "abort id=r",
                                        "preempt id=r",
                                        "complete id=r",
                                        "capture as=x id=r",
                                        "restore from=x id=r",
                                        "compact mapping=-1,0",
                                        "unlock lock=l",
                                        "lock as=l tokens=a3",
                                        "advance slot=s tokens=a1",
                                        "fork slot=s as=t",
                                        "copy from=s to=t",
                                        "free slot=s",
                                        "admit id=r tokens=a8 prompt=9",
                                        "step ids=r padded=0",
                                        "admit id=r tokens=a0",
                                        "insert tokens=a3 prev=1"})
      EXPECT_EQ(cache.ask(line), "error") << policy << ' ' << line;
    EXPECT_EQ(cache.ask("step"), "ok");
    cache.ask("admit id=r tokens=a8");
    for (const std::string_view line :
         {"admit id=r tokens=a8", "extend id=r n=9", "extend id=r n=8 async=1"})
      EXPECT_EQ(cache.ask(line), "error") << policy << ' ' << line;
  }
}

}  // namespace
}  // namespace lockstep
