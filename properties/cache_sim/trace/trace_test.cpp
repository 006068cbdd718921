// Reading trace files: statements, the head, and what is checked before anything runs. Bad files
// are in program_test.cpp, where a user meets them.
#include "cache_sim/trace/trace.hpp"

#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

#include "cache_sim/replay/replay.hpp"

namespace lockstep::cache_sim {
namespace {

Trace parsed(const std::string& text) {
  Result<Trace> trace = parse_trace(text, "x.trace");
  EXPECT_TRUE(trace.has_value()) << trace.error().text;
  return trace ? std::move(*trace) : Trace{};
}

std::string complaint(const std::string& text) {
  const Result<Trace> trace = parse_trace(text, "x.trace");
  return trace ? "" : trace.error().text;
}

TEST(TraceFiles, headsHaveATitleAndDirectives) {
  const Trace trace = parsed(
      "# fixtures/traces/x.trace\n# run: lockstep replay %s\n# run: lockstep replay %s --defect d\n"
      "# finds: double-free\n#\n# The title.\n# More.\n\ncheck\n");
  EXPECT_EQ(trace.title, "The title.");
  EXPECT_EQ(trace.description, (std::vector<std::string>{"The title.", "More."}));
  ASSERT_EQ(trace.runs.size(), 2u);
  EXPECT_FALSE(trace.runs[0].finds);
  EXPECT_EQ(trace.runs[1].finds, FindingKind::double_free);
  EXPECT_EQ(trace.runs[1].line, 3);
  EXPECT_EQ(directive_words(trace.runs[1], "a b.trace"),
            (std::vector<std::string>{"replay", "a b.trace", "--defect", "d"}));
  EXPECT_EQ(trace.path, "x.trace");
  EXPECT_TRUE(trace.config_lines.empty());
  EXPECT_FALSE(trace.scheduler_level);
}

TEST(TraceFiles, statementsKeepTheirLinesAndAnswers) {
  const Trace trace = parsed(
      "config kv_tokens=77\nconfig state_slots=3 page=1\n\n"
      "admit id=r tokens=a8\n----\ncached=0 state=0\n  extend\tid=r n=8 "
      "\ncheck\n----\nkv_free=69\n");
  EXPECT_EQ(trace.config_lines.at("page"), 2);
  EXPECT_EQ(trace.config.kv_tokens, 77);
  EXPECT_EQ(trace.config.state_slots, 3);
  ASSERT_EQ(trace.statements.size(), 3u);
  EXPECT_EQ(trace.statements[0].line, 4);
  EXPECT_EQ(trace.statements[0].answer_line, 6);
  ASSERT_EQ(trace.statements[0].answer.size(), 2u);
  EXPECT_EQ(trace.statements[0].answer[1].field, "state");
  EXPECT_EQ(trace.statements[1].line, 7);
  EXPECT_TRUE(trace.statements[1].answer.empty());
  EXPECT_EQ(std::get<Operation>(trace.statements[1].what).n, 8);
  EXPECT_EQ(trace.statements[2].answer_line, 10);
}

TEST(TraceFiles, aRequestNamesARankOfTheConfig) {
  const Trace trace = parsed("config ranks=3\nrequest id=n rank=2 tokens=a5 output=3\nrun\n");
  EXPECT_EQ(std::get<RequestSpec>(trace.statements[0].what).rank, 2);
  for (const char* const text : {"request id=n rank=1 tokens=a5 output=3\nrun\n",
                                 "config ranks=3\nrequest id=n rank=3 tokens=a5 output=3\nrun\n"})
    EXPECT_FALSE(parse_trace(text, "ranks")) << text;
}

TEST(TraceFiles, requestsCarryPromptAndOutputInOneSequence) {
  const Trace trace = parsed(
      "request id=n tokens=a5 output=3\n"
      "request id=t tokens=a5 output=b2+[1] at=5ms priority=-3 session=s salt=x accept=2,1 "
      "drafts=3,0 rank=0 external=0\n"
      "abort id=n at=5ms\nretract id=t\nclose session=s\nrun until=6ms steps=9\nexpect id=t\n");
  EXPECT_TRUE(trace.scheduler_level);
  const auto& counted = std::get<RequestSpec>(trace.statements[0].what);
  EXPECT_EQ(counted.prompt_size, 5u);
  EXPECT_EQ(counted.output_size(), 3u);
  EXPECT_FALSE(counted.stops);
  EXPECT_EQ(counted.at, -1);
  const auto& told = std::get<RequestSpec>(trace.statements[1].what);
  EXPECT_EQ(told.tokens.text(), "a5+b2+[1]");
  EXPECT_TRUE(told.stops);
  EXPECT_EQ(told.at, 5'000'000);
  EXPECT_EQ(told.priority, -3);
  EXPECT_EQ(told.session.text(), "s");
  EXPECT_EQ(told.salt.text(), "x");
  EXPECT_EQ(told.accept, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(told.drafts, (std::vector<std::int64_t>{3, 0}));
  EXPECT_EQ(std::get<Intervention>(trace.statements[2].what).at, 5'000'000);
  EXPECT_TRUE(std::get<Intervention>(trace.statements[3].what).retract);
  EXPECT_EQ(std::get<CloseSession>(trace.statements[4].what).session.text(), "s");
  EXPECT_EQ(std::get<RunStatement>(trace.statements[5].what).until, 6'000'000);
  EXPECT_EQ(std::get<RunStatement>(trace.statements[5].what).steps, 9);
  EXPECT_EQ(std::get<Expect>(trace.statements[6].what).id.text(), "t");
}

// Two requests with the same prompt and an output as a number sample different texts, which no
// prompt of the file can name.
TEST(TraceFiles, outputsGivenAsNumbersAreTextsOfTheirOwn) {
  const Trace trace =
      parsed("request id=a tokens=a5 output=3\nrequest id=b tokens=a5 output=3\nrun\n");
  const Tokens& a = std::get<RequestSpec>(trace.statements[0].what).tokens;
  const Tokens& b = std::get<RequestSpec>(trace.statements[1].what).tokens;
  EXPECT_EQ(a.common(0, b, 0, 8), 5u);
  EXPECT_GT(a[5] >> 32, document_from_name("zzzzzz").value());
}

TEST(TraceFiles, anAbortBelongsToTheLevelOfItsFile) {
  const Trace operations = parsed("admit id=r tokens=a1\nabort id=r\n");
  EXPECT_TRUE(std::holds_alternative<Operation>(operations.statements[1].what));
  const Trace requests = parsed("request id=r tokens=a1 output=1\nabort id=r\n");
  EXPECT_TRUE(std::holds_alternative<Intervention>(requests.statements[1].what));
  for (const char* const verb : {"evict kv=1", "flush", "check"})
    EXPECT_EQ(complaint("request id=r tokens=a1 output=1\n" + std::string(verb) + "\nrun\n"), "");
  for (const char* const verb : {"match tokens=a1", "alloc as=s", "step", "admit id=x tokens=a1"})
    EXPECT_NE(complaint(std::string(verb) + "\nrequest id=r tokens=a1 output=1\n"), "") << verb;
}

TEST(TraceFiles, anEndedRequestsNameMayComeBack) {
  EXPECT_EQ(complaint("admit id=r tokens=a1\npreempt id=r\nadmit id=r tokens=a1\n"), "");
  EXPECT_NE(complaint("request id=r tokens=a1 output=1\nrun\nrequest id=r tokens=a1 output=1\n"),
            "");
}

TEST(TraceFiles, linesOf1MebibyteAreRead) {
  std::string line = "admit id=r tokens=[7";
  while (line.size() + 3 <= kMaxLineSize) line += ",7";
  line += "]";
  line.append(kMaxLineSize - line.size(), ' ');
  EXPECT_EQ(complaint(line + "\n"), "");
  EXPECT_EQ(complaint(line + " \n"), "x.trace:1: the line is longer than 1 MiB");
}

// However a good file is cut or damaged, it is read or refused: nothing is played that is not
// there.
TEST(TraceFiles, everyPrefixIsReadOrRefusedWithItsName) {
  const std::string text =
      "# t\nconfig kv_tokens=77\nadmit id=r tokens=a8+[1,2] salt=s\n----\ncached=0\n"
      "extend id=r n=4 drafts=b2\n";
  for (std::size_t size = 0; size < text.size(); ++size) {
    const std::string said = complaint(text.substr(0, size));
    if (said.empty()) continue;
    EXPECT_EQ(said.find("x.trace:"), 0u) << said;
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  }
  for (std::size_t at = 0; at < text.size(); ++at)
    for (const char damage : {'\0', '\xff', '\n', '=', '9', '-', ' ', '+'}) {
      std::string damaged = text;
      damaged[at] = damage;
      const std::string said = complaint(damaged);
      EXPECT_EQ(said.find('\n'), std::string::npos) << said;
    }
}

}  // namespace
}  // namespace lockstep::cache_sim
