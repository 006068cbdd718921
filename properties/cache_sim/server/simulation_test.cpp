// Traces with requests: the virtual clock, the order of service, the answers of `run`, and what
// becomes of aborted and retracted requests.
#include "cache_sim/server/simulation.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace lockstep::cache_sim {
namespace {

/// A trace that was played, by name.
class Played {
 public:
  explicit Played(const std::string& text, std::vector<std::string> subjects = {
                                               "sglang-no-buffer", "oracle:sglang-no-buffer"}) {
    Result<Trace> trace = parse_trace(text, "x.trace");
    require(trace.has_value(), trace ? "" : trace.error().text);
    trace_ = std::make_unique<Trace>(std::move(*trace));
    RunOptions options;
    options.subjects = std::move(subjects);
    options.config = trace_->config;
    options.file = "x.trace";
    Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
    require(run.has_value(), run ? "" : run.error().text);
    run_ = std::move(*run);
    play_trace(*run_, *trace_);
  }

  /// The first thing that went wrong, `line: kind: text`; empty where nothing did.
  std::string wrong() const {
    if (run_->error()) return run_->error()->text;
    if (run_->findings().empty()) return "";
    const LocatedFinding& first = run_->findings().front();
    return fmt::format("{}: {}: {}", first.line, to_string(first.finding.kind), first.finding.text);
  }
  const RequestOutcome& of(const std::string& id) const {
    const RequestOutcome* const outcome = run_->find_outcome(Name::intern(id));
    require(outcome != nullptr, "the request is in the trace");
    return *outcome;
  }
  std::string ending(const std::string& id) const {
    return fmt::format("{} {}", to_string(of(id).finish), of(id).output_tokens);
  }
  const ReplaySession& run() const { return *run_; }

 private:
  std::unique_ptr<Trace> trace_;
  std::unique_ptr<ReplaySession> run_;
};

TEST(SimulatedServer, takesAStepTimePerStep) {
  const Played played(
      "config chunked_prefill=4 step_time=7us\n"
      "request id=r tokens=a10 output=3\nrun\n----\nfinished=1 time=35000 violations=0\n"
      "expect id=r\n----\ncached=0 finish=length output_tokens=3\n");
  EXPECT_EQ(played.wrong(), "");
  EXPECT_EQ(played.of("r").first_token, 3 * 7000);
  EXPECT_EQ(played.of("r").end, 5 * 7000);
}

// Nothing happens between arrivals: the clock jumps.
TEST(SimulatedServer, jumpsToTheNextArrival) {
  const Played played(
      "request id=a tokens=a4 output=1 at=5ms\nrequest id=b tokens=b4 output=1 at=900s\n"
      "run\n----\nfinished=2 time=900001000000 violations=0\n");
  EXPECT_EQ(played.wrong(), "");
  EXPECT_EQ(played.of("a").arrival, 5'000'000);
  EXPECT_EQ(played.of("a").first_token, 6'000'000);
  EXPECT_EQ(played.of("b").first_token, 900'001'000'000);
}

// An arrival during a step is admitted when the step is over.
TEST(SimulatedServer, admitsAtTheBeginningOfAStep) {
  const Played played(
      "request id=a tokens=a4 output=3\nrequest id=b tokens=b4 output=1 at=1500us\nrun\n");
  EXPECT_EQ(played.wrong(), "");
  EXPECT_EQ(played.of("b").first_token, 3'000'000);
  EXPECT_EQ(played.of("a").end, 4'000'000) << "the prefill went first";
}

TEST(SimulatedServer, namesTheLineOfAWrongAnswerAndGoesOn) {
  const Played played(
      "request id=r tokens=a4 output=2\nrun\n----\nfinished=2\nexpect id=r\n----\n"
      "cached=1 finish=stop\n");
  ASSERT_EQ(played.run().findings().size(), 3u);
  EXPECT_EQ(played.wrong(),
            "4: answer-differs: the answer should carry finished=2 and carries "
            "finished=1");
  EXPECT_EQ(played.run().findings()[2].line, 7);
  EXPECT_EQ(played.run().findings()[2].finding.actual, "finish=length");
}

// A wrong answer that `expect` names was given before: a hit at the request's admission, its end at
// its last operation. Other requests run between these and the line.
TEST(SimulatedServer, aWrongAnswerOfARequestIsLocatedWhereItWasGiven) {
  const Played played(
      "request id=r tokens=a10 output=3\nrun\n----\nfinished=1\n"
      "request id=s tokens=b10 output=3\nrequest id=late tokens=c10 output=1 at=900s\n"
      "run until=1s\n"
      "expect id=r\n----\ncached=5\n"
      "expect id=r\n----\noutput_tokens=4\n"
      "expect id=late\n----\noutput_tokens=1\n");
  ASSERT_EQ(played.run().findings().size(), 3u);
  const LocatedFinding& hit = played.run().findings()[0];
  EXPECT_TRUE(hit.operation.starts_with("admit id=r ")) << hit.operation;
  EXPECT_EQ(hit.event, 1);
  EXPECT_EQ(hit.around.size(), 1u);
  EXPECT_EQ(hit.line, 10) << hit.line;
  const LocatedFinding& end = played.run().findings()[1];
  EXPECT_TRUE(end.operation.starts_with("finish id=r")) << end.operation;
  EXPECT_LT(end.event, played.run().event_count() / 2 + 1);
  EXPECT_EQ(played.run().findings()[2].event, played.run().event_count()) << "it never came";
}

// A line without `at` is said now, and one before it may be about later.
TEST(SimulatedServer, requestsOfLaterLinesMayArriveEarlier) {
  const Played played(
      "request id=late tokens=a4 output=2 at=10ms\nrequest id=now tokens=b6 output=3\nrun\n"
      "----\nfinished=2 violations=0\n");
  EXPECT_EQ(played.wrong(), "");
  EXPECT_EQ(played.ending("now"), "length 3");
  EXPECT_EQ(played.ending("late"), "length 2");
  EXPECT_EQ(played.of("now").arrival, 0);
  EXPECT_EQ(played.of("now").end, 3'000'000);
  EXPECT_EQ(played.of("late").first_token, 11'000'000);
}

// Bad input that shows only when it runs is no finding.
TEST(SimulatedServer, anImpossibleOperationIsBadInput) {
  const Played played("admit id=r tokens=a4\nextend id=r n=5\ncheck\n");
  ASSERT_TRUE(played.run().error());
  EXPECT_EQ(played.run().error()->status, kExitBadInput);
  EXPECT_EQ(played.wrong().find("x.trace:2: extend: "), 0u) << played.wrong();
  EXPECT_EQ(played.run().event_count(), 2);
}

// Rows of the request table are not state slots: their numbers part ways as soon as a state stays
// behind in the tree, whichever there is more of.
TEST(SimulatedServer, rowsAndSlotsAreNumberedApart) {
  for (const std::string rows : {"max_running=2 request_rows=2", "max_running=9 request_rows=40"})
    for (const std::string slots : {"3", "4", "40"}) {
      std::string text = fmt::format("config kv_tokens=200 state_slots={} {}\n", slots, rows);
      for (int i = 0; i < 12; ++i)
        text += fmt::format("request id=r{} tokens={}{} output={}\n", i,
                            static_cast<char>('a' + i % 5), 4 + i, 1 + i % 4);
      const Played played(text +
                          "run\n----\nfinished=12 violations=0\ncheck\n----\nviolations=0\n");
      EXPECT_EQ(played.wrong(), "") << rows << " " << slots;
    }
}

// Which requests a rank has served is told by its hits: those of another rank it cannot have.
TEST(SimulatedServer, ranksAreChosenByTheRouting) {
  const auto cached = [](const std::string& routing, const std::string& second) {
    const Played played("config ranks=2 routing=" + routing +
                            "\nrequest id=first tokens=a8 output=1\nrun\nrequest id=second "
                            "tokens=" +
                            second + " output=1\nrun\n",
                        {"radix", "oracle:radix"});
    EXPECT_EQ(played.wrong(), "") << routing;
    return played.of("second").cached_tokens;
  };
  EXPECT_EQ(cached("load", "a8+b4"), 8);   // both ranks have no request, so the first one
  EXPECT_EQ(cached("round", "a8+b4"), 0);  // the other one
  EXPECT_EQ(cached("prefix", "a2+c30"), 2);
  EXPECT_EQ(cached("balanced", "a8+b4"), 8);
  const Played uneven(
      "config ranks=2 routing=balanced kv_tokens=4096\n" +
          [] {
            std::string requests = "request id=first tokens=a8 output=1\nrun\n";
            for (int i = 0; i < 66; ++i)
              requests += fmt::format("request id=x{} rank=0 tokens=a8+b{} output=4\n", i, i + 1);
            return requests + "run steps=1\nrequest id=second tokens=a8+c2 output=1\nrun\n";
          }(),
      {"radix", "oracle:radix"});
  EXPECT_EQ(uneven.wrong(), "");
  EXPECT_EQ(uneven.of("second").cached_tokens, 0);  // 66 requests ahead: the other rank
}

// A lone request leaves three of four ranks idle.
TEST(SimulatedServer, idleTimeIsThatOfRanksWhichWaitForTheSlowest) {
  const Played lone("config ranks=4\nrequest id=r tokens=a9 output=3\nrun\n", {"radix"});
  EXPECT_DOUBLE_EQ(lone.run().rank_time.idle_share(), 0.75);
  const Played even(
      "config ranks=2\nrequest id=r rank=0 tokens=a9 output=3\n"
      "request id=s rank=1 tokens=a9 output=3\nrun\n",
      {"radix"});
  EXPECT_DOUBLE_EQ(even.run().rank_time.idle_share(), 0);
}

TEST(SimulatedServer, aRankBeyondTheConfigIsBadInput) {
  Result<Trace> trace =
      parse_trace("config ranks=2\nrequest id=r rank=1 tokens=a1 output=1\n", "x");
  ASSERT_TRUE(trace);
  RunOptions options;
  options.subjects = {"radix"};  // and the file's config is overridden: one rank
  const auto run = ReplaySession::start(options);
  play_trace(**run, *trace);
  ASSERT_TRUE((*run)->error());
  EXPECT_NE((*run)->error()->text.find("field rank: 1"), std::string::npos);
}

// A scheduler that would leave out what a request says is not believed to have done it.
TEST(SimulatedServer, aTransferThatItsSchedulerLeavesOutIsBadInput) {
  const std::string request = "request id=r tokens=a11 external=8 output=1\n";
  for (const std::string scheduler : {"", " scheduler=vllm"}) {
    const Result<Trace> trace =
        parse_trace(fmt::format("config policy=vllm-align groups=attention:4,mamba:4 block=4 "
                                "hash_block=4{}\n{}run\nexpect id=r\n----\ncached=8\n",
                                scheduler, request),
                    "x");
    ASSERT_TRUE(trace);
    RunOptions options;
    options.config = trace->config;
    options.subjects = {"vllm-align"};
    const auto run = ReplaySession::start(options);
    ASSERT_TRUE(run);
    play_trace(**run, *trace);
    ASSERT_EQ((*run)->error() != nullptr, !scheduler.empty());
    if (scheduler.empty())
      EXPECT_TRUE((*run)->findings().empty());
    else
      EXPECT_NE((*run)->error()->text.find("field external: scheduler vllm"), std::string::npos);
  }
}

}  // namespace
}  // namespace lockstep::cache_sim
