// check-log --truth: outputs beside what an empty cache says to the same prompt.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "properties/support/program.hpp"
#include "reference/base/finding.hpp"

namespace lockstep {
namespace {

using namespace testing_support;

std::string request(const std::string& id, const std::string& prompt, const std::string& output,
                    int cached, const std::string& more = R"(, "greedy": true)") {
  return fmt::format(R"({{"id": "{}", "prompt": [{}], "output": [{}], "cached": {}{}}})"
                     "\n",
                     id, prompt, output, cached, more);
}

std::string truth(const std::string& prompt, const std::string& output, const std::string& gaps) {
  return fmt::format(R"({{"prompt": [{}], "output": [{}], "gaps": [{}]}})"
                     "\n",
                     prompt, output, gaps);
}

struct Judged {
  ProgramRun run;
  nlohmann::json json;
};

Judged judged(const std::string& log, const std::string& truths,
              const std::vector<std::string>& more = {}) {
  const ScratchFolder folder;
  std::vector<std::string> words = {"check-log", folder.write("log.jsonl", log),
                                    "--truth",   folder.write("truth.jsonl", truths),
                                    "--json",    folder.path("verdict.json")};
  words.insert(words.end(), more.begin(), more.end());
  Judged all{run_program(words), nullptr};
  const std::string written = read_text(folder.path("verdict.json"));
  if (!written.empty()) all.json = nlohmann::json::parse(written);
  return all;
}

const std::string kTruths = truth("1,2,3", "4,5,6", "1.5,0.7,0.001") + truth("1,2,3,4", "5", "2");

TEST(LogTruth, aSoundLogPasses) {
  const Judged all =
      judged(request("a", "1,2,3", "4,5,6", 0) + request("b", "1,2,3,4", "5,9", 3), kTruths);
  EXPECT_EQ(all.run.status, kExitPass) << all.run.out << all.run.err;
  EXPECT_NE(all.run.out.find("2 requests, nothing found; 2 of 2 greedy outputs compared"),
            std::string::npos)
      << all.run.out;
  EXPECT_EQ(all.json["with_truth"], 2);
  EXPECT_NE(all.run.out.find("; 4 tokens compared"), std::string::npos) << all.run.out;
  EXPECT_EQ(all.json["near_ties"], 0);
  EXPECT_EQ(all.json["tokens"], 4) << "the truth after b's prompt has one token";
  EXPECT_TRUE(all.json["findings"].empty());
}

// No other request has this prompt, so the rest of the log says nothing about it. Behind its first
// wrong token the text is another one.
TEST(LogTruth, findsAWrongAnswerToAPromptSentOnce) {
  const std::string log = request("a", "1,2,3", "4,7,9", 0);
  const Judged all = judged(log, kTruths);
  EXPECT_EQ(all.run.status, kExitDiffers);
  EXPECT_NE(all.run.out.find("log.jsonl:1: output-differs: request `a`: after 4 tokens, 3 of them "
                             "of its prompt and 0 cached, `a` says 7; after the same tokens an "
                             "empty cache says 5, which leads by 0.7 ("),
            std::string::npos)
      << all.run.out;
  ASSERT_EQ(all.json["findings"].size(), 1u);
  EXPECT_EQ(all.json["findings"][0]["request"], "a");
  EXPECT_EQ(all.json["findings"][0]["kind"], "output-differs");
  EXPECT_EQ(all.json["findings"][0]["expected"], "5");
  EXPECT_EQ(all.json["findings"][0]["actual"], "7");
  EXPECT_EQ(all.json["near_ties"], 0);
  const ScratchFolder folder;
  EXPECT_EQ(run_program({"check-log", folder.write("log.jsonl", log)}).status, kExitPass);
}

// Rounding decides where the two best logits are nearly equal, and the text after that point
// differs.
TEST(LogTruth, aNearTieIsNoFinding) {
  const std::string log = request("a", "1,2,3", "4,5,8,9,9", 0);
  const Judged all = judged(log, kTruths);
  EXPECT_EQ(all.run.status, kExitPass) << all.run.out;
  EXPECT_NE(all.run.out.find("1 difference at a gap below 0.02"), std::string::npos) << all.run.out;
  EXPECT_EQ(all.json["near_ties"], 1);
  EXPECT_EQ(judged(log, kTruths, {"--gap", "0.0005"}).run.status, kExitDiffers);
  EXPECT_EQ(judged(request("a", "1,2,3", "4,7,6", 0), kTruths, {"--gap", "0.8"}).run.status,
            kExitPass);
  EXPECT_EQ(judged(request("a", "1,2,3", "7", 0), kTruths, {"--gap", "1.5"}).run.status,
            kExitDiffers)
      << "a gap of just so much is none";
}

// The truth judges whom it knows: those alike and wrong together, and not the sampled ones.
TEST(LogTruth, judgesTheRequestsWhosePromptItHas) {
  const std::string wrong_together = request("a", "1,2,3", "9", 0) + request("b", "1,2,3", "9", 2);
  const Judged all = judged(wrong_together, kTruths);
  EXPECT_EQ(all.json["findings"].size(), 2u) << all.run.out;
  EXPECT_EQ(judged(request("a", "1,2,3", "9", 0, ""), kTruths).run.status, kExitPass);
  const Judged others =
      judged(request("a", "7,7", "1,2", 0) + request("b", "7,7", "1,3", 1), kTruths);
  EXPECT_EQ(others.json["with_truth"], 0);
  EXPECT_EQ(others.json["greedy"], 2);
  ASSERT_EQ(others.json["findings"].size(), 1u) << "still compared with each other";
  EXPECT_EQ(others.json["findings"][0]["request"], "b");
}

// A prompt that goes on as the truth does has its answer there, with the gap of that token; a truth
// of its own comes first.
TEST(LogTruth, judgesAPromptThatContinuesOneOfIts) {
  const Judged all = judged(request("a", "1,2,3", "4,5,6", 0) + request("b", "1,2,3,4,5", "7", 4) +
                                request("c", "1,2,3,4", "9", 3),
                            truth("1,2,3", "4,5,6", "1,1,1") + truth("1,2,3,4", "5", "0.001"));
  EXPECT_EQ(all.json["with_truth"], 3);
  EXPECT_EQ(all.json["near_ties"], 1) << "of c: its own truth leads by little";
  ASSERT_EQ(all.json["findings"].size(), 1u) << all.run.out;
  EXPECT_EQ(all.json["findings"][0]["request"], "b");
  EXPECT_EQ(all.json["findings"][0]["expected"], "6");
  EXPECT_EQ(judged(request("b", "1,2,3,4,5", "7", 4), kTruths).json["near_ties"], 1);
  EXPECT_EQ(judged(request("b", "1,2,3,4,6", "7", 4), kTruths).json["with_truth"], 0);
}

TEST(LogTruth, refusesBadLines) {
  const std::string log = request("a", "1,2,3", "4", 0);
  const auto refused = [&](const std::string& truths) {
    const Judged all = judged(log, truths);
    EXPECT_EQ(all.run.status, kExitBadInput) << all.run.out;
    EXPECT_TRUE(all.json.is_null()) << "nothing is written";
    const std::size_t begin = all.run.err.find("truth.jsonl");
    return begin == std::string::npos ? all.run.err : all.run.err.substr(begin);
  };
  EXPECT_EQ(refused(""), "truth.jsonl: holds no truth\n");
  EXPECT_EQ(refused(truth("", "4", "1")),
            "truth.jsonl:1: field prompt: a prompt has at least one token\n");
  EXPECT_EQ(refused(truth("1", "4,5", "1")),
            "truth.jsonl:1: field gaps: 1 number for 2 tokens of the output\n");
  EXPECT_EQ(refused(truth("1", "4", "-1")), "truth.jsonl:1: field gaps[0]: -1 is below 0\n");
  EXPECT_EQ(refused(truth("1", "4", "true")),
            "truth.jsonl:1: field gaps[0]: a boolean, not a number\n");
  EXPECT_EQ(refused(truth("1", "-4", "1")), "truth.jsonl:1: field output[0]: -4 is below 0\n");
  const std::string twice = refused(truth("1", "4", "1") + truth("1", "4,5", "1,1"));
  EXPECT_TRUE(twice.starts_with("truth.jsonl:2: the truth of this prompt stands above (")) << twice;
  EXPECT_EQ(run_program({"check-log", "/dev/null", "--truth", "/dev/null"}).status, kExitBadInput);
  const ScratchFolder folder;
  const ProgramRun absent =
      run_program({"check-log", folder.write("l.jsonl", log), "--truth", folder.path("absent")});
  EXPECT_EQ(absent.status, kExitBadInput);
  EXPECT_NE(absent.err.find("absent: cannot be read"), std::string::npos) << absent.err;
}

}  // namespace
}  // namespace lockstep
