// Children of every kind, most of them a line of shell: what each does to the run is a finding, an
// error or an answer, within the time given, and none is left behind.
#include "cache_sim/check/exec_subject.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "properties/support/program.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {
namespace {

using namespace std::chrono_literals;

const std::string kGreets = "read -r hello; echo levels=request; read -r operation; ";
const std::string kMinimal =
    "exec python3 " LOCKSTEP_SOURCE_DIR "/fixtures/subjects/minimal_cache.py";

Operation parsed(std::string_view text) {
  const Result<Line> line = parse_line(text);
  const Result<Operation> operation =
      line.and_then([](const Line& l) { return parse_operation(l); });
  EXPECT_TRUE(operation.has_value()) << text;
  return operation.value_or(Operation{});
}

Operation admit() {
  return parsed("admit id=r1 tokens=a5");
}
Operation finish() {
  return parsed("finish id=r1");
}

/// About 3 MB as text: far more than a pipe holds.
Operation long_admit() {
  Operation operation = admit();
  std::vector<std::uint32_t> ids(300'000);
  for (std::uint32_t i = 0; i < ids.size(); ++i) ids[i] = 1'000'000'000 + i;
  operation.tokens = Tokens::of_ids(std::move(ids));
  return operation;
}

/// A pipe that children inherit: it ends when the last of them is gone.
class Witness {
 public:
  Witness() { EXPECT_EQ(::pipe(ends_), 0); }
  ~Witness() {
    ::close(ends_[0]);
    if (ends_[1] >= 0) ::close(ends_[1]);
  }
  /// Its writing end, as a file for the child's shell (which may know no numbers above 9).
  std::string file() const { return "/dev/fd/" + std::to_string(ends_[1]); }
  void leave_to_children() { ::close(std::exchange(ends_[1], -1)); }

  /// All that the children wrote, once each of them has closed the pipe, within a second.
  std::string everything() const {
    std::string text;
    char buffer[256];
    pollfd end{ends_[0], POLLIN, 0};
    while (::poll(&end, 1, 1000) > 0) {
      const ssize_t size = ::read(ends_[0], buffer, sizeof buffer);
      if (size <= 0) return text;
      text.append(buffer, static_cast<std::size_t>(size));
    }
    return text + " (somebody still holds the pipe)";
  }

 private:
  int ends_[2];
};

class ExecSubject : public testing::Test {
 protected:
  // Every child has been waited for when its subject is gone.
  void TearDown() override {
    child_.reset();
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
  }

  Subject& started(const std::string& command, std::chrono::milliseconds timeout = 10s) {
    Result<std::unique_ptr<Subject>> fresh = start_child({command, {}, timeout});
    if (!fresh) throw std::runtime_error(fresh.error().text);
    child_ = std::move(*fresh);
    return *child_;
  }

  /// The error of the child's first answer to `operation`, for a child that greets.
  Error failure(const std::string& after_greeting, std::chrono::milliseconds timeout = 10s,
                const Operation& operation = admit()) {
    Subject& subject = started(kGreets + after_greeting, timeout);
    const Result<Reply> reply = subject.apply(operation);
    if (reply) return {.text = "it answered " + reply->text(), .status = kExitPass};
    const Result<Reply> later = subject.apply(finish());
    EXPECT_TRUE(!later && later.error().text == reply.error().text)
        << "a child that failed fails for good";
    return reply.error();
  }

  static Error failure_to_start(const std::string& command,
                                std::chrono::milliseconds timeout = 10s) {
    const Result<std::unique_ptr<Subject>> child = start_child({command, {}, timeout});
    return child ? Error{.text = "it started", .status = kExitPass} : child.error();
  }

  std::unique_ptr<Subject> child_;
};

void expect_finding(const Error& error, FindingKind kind, std::string_view in_text) {
  EXPECT_EQ(error.finding ? to_string(*error.finding) : "no finding", to_string(kind))
      << error.text;
  EXPECT_EQ(error.status, kExitDiffers);
  EXPECT_NE(error.text.find(in_text), std::string::npos) << error.text;
}

void expect_environment(const Error& error, std::string_view in_text) {
  EXPECT_FALSE(error.finding.has_value()) << error.text;
  EXPECT_EQ(error.status, kExitEnvironment) << error.text;
  EXPECT_NE(error.text.find(in_text), std::string::npos) << error.text;
}

// --- Children that behave ------------------------------------------------------------------------

TEST_F(ExecSubject, aGoodChildIsASubjectLikeAnyOther) {
  Subject& subject = started(kGreets + "echo cached=4 evicted_kv=2; read -r operation; echo ok");
  EXPECT_FALSE(cache_sim::said_by(subject).capabilities.contains(Capability::tree));
  const Result<Reply> admitted = subject.apply(admit());
  ASSERT_TRUE(admitted) << admitted.error().text;
  EXPECT_EQ(admitted->text(), "cached=4 evicted_kv=2");
  const Result<Reply> finished = subject.apply(finish());
  ASSERT_TRUE(finished) << finished.error().text;
  EXPECT_EQ(finished->text(), "ok");
}

TEST_F(ExecSubject, theGreetingCarriesEveryConfigField) {
  Witness witness;
  Config config;
  ASSERT_TRUE(config.set_all("kv_tokens=77,groups=attention:8,mamba:16,step_time=3us"));
  const std::string command =
      "read -r hello; echo \"$hello\" >" + witness.file() + "; echo levels=request";
  ASSERT_TRUE(start_child({command, config}));
  std::string expected = "hello protocol=1";
  for (const auto& [name, value] : config.fields())
    expected.append(" ").append(name).append("=").append(value);
  witness.leave_to_children();
  EXPECT_EQ(witness.everything(), expected + "\n");
}

TEST_F(ExecSubject, aConfigThatDoesNotFitTheGreetingIsBadInput) {
  Config config;
  config.routing = "load\nflush";
  const Result<std::unique_ptr<Subject>> child = start_child({"cat", config});
  ASSERT_FALSE(child);
  EXPECT_EQ(child.error().status, kExitBadInput);
}

TEST_F(ExecSubject, aRefusalIsALegalAnswer) {
  Subject& subject = started(kGreets + "echo refused=no_kv");
  const Result<Reply> reply = subject.apply(admit());
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->refused, Refusal::no_kv);
}

TEST_F(ExecSubject, anAnswerJustInTimeCounts) {
  Subject& subject = started(kGreets + "sleep 0.2; printf cached=; sleep 0.1; echo 3", 5s);
  const Result<Reply> reply = subject.apply(admit());
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->get(ReplyField::cached), 3);
}

TEST_F(ExecSubject, treeVerbsGoOnlyToChildrenThatUnderstandThem) {
  const Operation match = parsed("match tokens=a5");
  Subject& requests_only = started(kGreets + "echo cached=0");
  const Result<Reply> refused = requests_only.apply(match);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, kExitBadInput);
  EXPECT_FALSE(refused.error().finding.has_value());
  EXPECT_TRUE(requests_only.apply(admit())) << "bad input is not the child's fault";

  Subject& tree =
      started("read -r hello; echo levels=request,tree; read -r operation; echo kv=4 state=2");
  EXPECT_TRUE(cache_sim::said_by(tree).capabilities.contains(Capability::tree));
  const Result<Reply> reply = tree.apply(match);
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->text(), "kv=4 state=2");
}

// A child without labels is not held to lengths that it does not know; one with labels owes them.
TEST_F(ExecSubject, labelLengthsCountOnlyWhereTheChildAnnouncedThem) {
  const std::string labelled = "read -r hello; echo levels=request labels=1; read -r operation; ";
  Result<Reply> reply = started(kGreets + "echo cached=4 conv=3 state=3").apply(admit());
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->text(), "cached=4");

  reply = started(labelled + "echo cached=4 conv=3 state=4").apply(admit());
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->text(), "cached=4 conv=3 state=4");

  reply = started(labelled + "echo refused=no_row").apply(admit());
  ASSERT_TRUE(reply) << reply.error().text;

  reply = started(labelled + "echo cached=4 state=4").apply(admit());
  ASSERT_FALSE(reply);
  expect_finding(reply.error(), FindingKind::subject_garbled, "labels=1");

  // evict counts states by a field of the same name.
  reply = started(kGreets + "echo kv=2 state=1").apply(parsed("evict kv=2 state=1"));
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->text(), "kv=2 state=1");
}

// --- Death ---------------------------------------------------------------------------------------

TEST_F(ExecSubject, deathIsAFindingThatNamesTheExitStatus) {
  expect_finding(failure("exit 7"), FindingKind::subject_died, "(exit status 7)");
}

TEST_F(ExecSubject, deathIsAFindingThatNamesTheSignal) {
  expect_finding(failure("kill -SEGV $$"), FindingKind::subject_died, "signal 11");
}

TEST_F(ExecSubject, deathQuotesTheLastLineOfStandardError) {
  const Error error = failure("printf 'Traceback\\nKeyError: \\033[1mr1\\n\\n' >&2; exit 1");
  expect_finding(error, FindingKind::subject_died,
                 "exit status 1; last on its standard error: `KeyError: \\x1b[1mr1`");
}

TEST_F(ExecSubject, deathInTheMiddleOfAnAnswerIsDeath) {
  expect_finding(failure("printf cached=4; exit 0"), FindingKind::subject_died, "exit status 0");
}

TEST_F(ExecSubject, deathBetweenAnswersIsFoundByTheNextOperation) {
  Subject& subject = started(kGreets + "echo cached=0; exit 5");
  ASSERT_TRUE(subject.apply(admit()));
  const Result<Reply> reply = subject.apply(finish());
  ASSERT_FALSE(reply);
  expect_finding(reply.error(), FindingKind::subject_died, "finish id=r1");
}

TEST_F(ExecSubject, aClosedPipeIsDeathEvenWhereTheChildLivesOn) {
  expect_finding(failure("exec >&-; sleep 60"), FindingKind::subject_died, "lives on");
}

// The shell that starts a program does not hold that program's pipes.
TEST_F(ExecSubject, aProgramThatClosesItsOutputIsNotSilent) {
  const testing_support::ScratchFolder folder;
  const std::string file = folder.write("child.py",
                                        "import os, sys, time\n"
                                        "sys.stdin.readline()\n"
                                        "print('levels=request', flush=True)\n"
                                        "sys.stdin.readline()\n"
                                        "os.close(1)\n"
                                        "time.sleep(60)\n");
  for (const std::string before : {"", "  ", "LANG=C exec "}) {
    const Result<Reply> reply =
        started(std::string(before).append("python3 ").append(file)).apply(admit());
    ASSERT_FALSE(reply);
    expect_finding(reply.error(), FindingKind::subject_died, "it closed a pipe and lives on");
  }
}

// A write to a dead child must neither kill us nor leave a trace in the process that we are a part
// of.
TEST_F(ExecSubject, deathDuringALongPromptRaisesNoSignal) {
  Subject& subject = started("read -r hello; echo levels=request; head -c 1 >/dev/null; exit 4");
  const Result<Reply> reply = subject.apply(long_admit());
  ASSERT_FALSE(reply);
  expect_finding(reply.error(), FindingKind::subject_died, "exit status 4");
  sigset_t set;
  sigpending(&set);
  EXPECT_EQ(sigismember(&set, SIGPIPE), 0);
  pthread_sigmask(SIG_BLOCK, nullptr, &set);
  EXPECT_EQ(sigismember(&set, SIGPIPE), 0);
}

TEST_F(ExecSubject, deathBeforeTheAnswerToHelloIsAnEnvironmentError) {
  expect_environment(failure_to_start("exit 9"), "exit status 9");
  expect_environment(failure_to_start("read -r hello; echo no GPU here >&2; exit 1"),
                     "`no GPU here`");
  expect_environment(failure_to_start(""), "exit status 0");
}

TEST_F(ExecSubject, aMissingCommandIsAnEnvironmentError) {
  expect_environment(failure_to_start("/nonexistent/server --port 1"),
                     "/nonexistent/server --port 1");
}

TEST_F(ExecSubject, theGreetingNamesTheCapabilitiesOfTheChild) {
  const auto taken = [&](const std::string& words) {
    const Subject& child = started("read -r hello; echo levels=request" + words + "; cat");
    const Capabilities said = cache_sim::said_by(child).capabilities;
    return std::array{said.contains(Capability::transfers), said.contains(Capability::content_keys),
                      said.contains(Capability::draft_trees)};
  };
  EXPECT_EQ(taken(""), (std::array{false, false, false}));
  EXPECT_EQ(taken(" takes="), (std::array{false, false, false}));
  EXPECT_EQ(taken(" takes=server"), (std::array{true, false, true}));
  EXPECT_EQ(taken(" takes=external,keys"), (std::array{true, true, false}));
  EXPECT_EQ(taken(" takes=server,keys,external"), (std::array{true, true, true}));
}

TEST_F(ExecSubject, anotherProtocolCannotStart) {
  for (const std::string answer :
       {"protocol=2 levels=request", "labels=1", "levels=tree", "levels=request labels=yes",
        "error=no_model", "levels=request takes=trees", "levels=request takes=keys,keys"})
    expect_environment(failure_to_start("read -r hello; echo " + answer + "; cat"), "cannot start");
}

// --- Silence -------------------------------------------------------------------------------------

TEST_F(ExecSubject, silenceIsAFindingThatSaysForHowLong) {
  expect_finding(failure("sleep 60", 400ms), FindingKind::subject_silent,
                 "did not answer `admit id=r1 tokens=a5` within 400ms");
}

TEST_F(ExecSubject, halfALineIsSilence) {
  expect_finding(failure("printf cached=4; sleep 60", 400ms), FindingKind::subject_silent,
                 "`cached=4`");
}

TEST_F(ExecSubject, anAnswerAfterTheTimeIsSilence) {
  expect_finding(failure("sleep 1.5; echo cached=4", 400ms), FindingKind::subject_silent, "400ms");
}

TEST_F(ExecSubject, noiseOnStandardErrorIsNoAnswer) {
  expect_finding(failure("while sleep 0.02; do echo still loading >&2; done", 400ms),
                 FindingKind::subject_silent, "400ms");
}

TEST_F(ExecSubject, aPromptThatIsNotReadIsSilence) {
  Subject& subject = started("read -r hello; echo levels=request; sleep 60", 400ms);
  const Result<Reply> reply = subject.apply(long_admit());
  ASSERT_FALSE(reply);
  expect_finding(reply.error(), FindingKind::subject_silent, "did not read all of `admit");
}

// A busy machine may not have started the process in time: that says nothing about the server.
TEST_F(ExecSubject, silenceBeforeTheFirstGreetingIsAnEnvironmentError) {
  expect_environment(failure_to_start("sleep 60", 300ms), "--timeout gives it longer");
  expect_environment(failure_to_start("read -r hello; printf levels=; sleep 60", 300ms),
                     "`levels=`");
}

// --- Garbage -------------------------------------------------------------------------------------

TEST_F(ExecSubject, garbageIsAFindingThatQuotesIt) {
  expect_finding(failure("echo Loading model..."), FindingKind::subject_garbled,
                 "`Loading model...`");
  expect_finding(failure("printf 'cached=4\\001\\n'"), FindingKind::subject_garbled,
                 "control character");
  expect_finding(failure("echo cached=four"), FindingKind::subject_garbled, "whole number");
  expect_finding(failure("echo cached=-1"), FindingKind::subject_garbled, "below");
  expect_finding(failure("echo cached=99999999999999999999"), FindingKind::subject_garbled,
                 "64 bits");
  expect_finding(failure("echo cached=4 cached=5"), FindingKind::subject_garbled, "twice");
  expect_finding(failure("echo cached=4 speed=5"), FindingKind::subject_garbled,
                 "state, violation=, wrong=, raised=, state_tokens=, conv_tokens=");
}

TEST_F(ExecSubject, aMissingFieldIsGarbage) {
  expect_finding(failure("echo evicted_kv=0"), FindingKind::subject_garbled, "cached=");
  expect_finding(failure("echo ok", 10s, parsed("extend id=r1 n=5")), FindingKind::subject_garbled,
                 "n=");
}

TEST_F(ExecSubject, anUnknownRefusalIsGarbage) {
  expect_finding(failure("echo refused=bad_mood"), FindingKind::subject_garbled,
                 "no known refusal");
}

TEST_F(ExecSubject, aSecondLineIsGarbage) {
  Subject& subject = started(kGreets + "printf 'cached=0\\ncached=1\\n'; cat >/dev/null");
  ASSERT_TRUE(subject.apply(admit()));
  const Result<Reply> reply = subject.apply(finish());
  ASSERT_FALSE(reply);
  expect_finding(reply.error(), FindingKind::subject_garbled, "`cached=1\\x0a` unasked");
}

TEST_F(ExecSubject, aLineWithoutEndIsGarbage) {
  expect_finding(failure("tr '\\0' x </dev/zero"), FindingKind::subject_garbled, "1048576 bytes");
}

TEST_F(ExecSubject, linesWithoutEndAreGarbage) {
  Subject& subject =
      started("read -r hello; echo levels=request; head -c 1 >/dev/null; yes cached=1");
  const Result<Reply> reply = subject.apply(long_admit());
  ASSERT_FALSE(reply);
  expect_finding(reply.error(), FindingKind::subject_garbled, "more than one line");
}

TEST_F(ExecSubject, garbageAtTheGreetingIsAFinding) {
  expect_finding(failure_to_start("echo 'Loading the model'; cat"), FindingKind::subject_garbled,
                 "`Loading the model");
}

// --- Long lines ----------------------------------------------------------------------------------

TEST_F(ExecSubject, aPromptLargerThanAnyPipeArrivesWhole) {
  const Operation operation = long_admit();
  Subject& subject =
      started("read -r hello; echo levels=request; echo cached=$(head -n 1 | wc -c); cat");
  const Result<Reply> reply = subject.apply(operation);
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->get(ReplyField::cached), static_cast<std::int64_t>(operation.text().size() + 1));
}

// Both pipes are full at once: the child writes its answer before it reads on, as we write the
// operation.
TEST_F(ExecSubject, aChildThatWritesBeforeItReadsDoesNotLockUp) {
  Subject& subject = started(
      "read -r hello; echo levels=request; head -c 1 >/dev/null; printf 'cached=1 x_note='; "
      "head -c 900000 /dev/zero | tr '\\0' x; head -c 900000 /dev/zero | tr '\\0' y >&2; echo; "
      "head -n 1 >/dev/null; echo ok");
  const Result<Reply> reply = subject.apply(long_admit());
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->text(), "cached=1");
}

TEST_F(ExecSubject, aChildThatAnswersBeforeItHasReadEverythingIsHeard) {
  Subject& subject = started(
      "read -r hello; echo levels=request; head -c 1 >/dev/null; echo cached=1; sleep 0.1; head -n "
      "1 >/dev/null; "
      "read -r operation; echo ok");
  Result<Reply> reply = subject.apply(long_admit());
  ASSERT_TRUE(reply) << reply.error().text;
  EXPECT_EQ(reply->get(ReplyField::cached), 1);
}

// --- What is left behind (every test above looks for zombies) ------------------------------------

TEST_F(ExecSubject, aChildThatEndsWithItsInputIsLeftToEndByItself) {
  Witness witness;
  started(kGreets + "echo cached=0; cat; sleep 0.05; echo goodbye >" + witness.file());
  witness.leave_to_children();
  EXPECT_TRUE(child_->apply(admit()));
  child_.reset();
  EXPECT_EQ(witness.everything(), "goodbye\n");
}

TEST_F(ExecSubject, aChildThatIgnoresItsInputsEndAndSigtermIsKilledWithItsOwnChildren) {
  Witness witness;
  started(
      "trap '' TERM; read -r hello; echo levels=request; sleep 60 & while :; do sleep 60; done");
  witness.leave_to_children();
  child_.reset();
  EXPECT_EQ(witness.everything(), "");
}

// A server's workers hold its pipes beyond its own death: that is still death, and they go too.
TEST_F(ExecSubject, backgroundProcessesEndWithTheChild) {
  Witness witness;
  expect_finding(failure("sleep 60 & exit 3", 300ms), FindingKind::subject_died, "exit status 3");
  witness.leave_to_children();
  EXPECT_EQ(witness.everything(), "");
}

// A later child that held the first one's standard input would keep it from seeing the end.
TEST_F(ExecSubject, childrenDoNotHoldEachOthersPipes) {
  Witness witness;
  Result<std::unique_ptr<Subject>> first =
      start_child({kGreets + "echo goodbye >" + witness.file(), {}});
  ASSERT_TRUE(first);
  witness.leave_to_children();
  started("read -r hello; echo levels=request; cat");
  first->reset();
  EXPECT_EQ(witness.everything(), "goodbye\n");
}

// --- The example in the README -------------------------------------------------------------------

TEST_F(ExecSubject, theExampleCachesPrefixesOfWhatFinished) {
  Subject& subject = started(kMinimal);
  const auto reply = [&](std::string_view text) {
    const Result<Reply> answered = subject.apply(parsed(text));
    return answered ? answered->text() : answered.error().text;
  };
  EXPECT_EQ(reply("admit id=r1 tokens=a100+[7,7,9]"), "cached=0 evicted_kv=0 evicted_states=0");
  EXPECT_EQ(reply("extend id=r1 n=103"), "n=103");
  EXPECT_EQ(reply("accept id=r1 n=1 tokens=b1"), "ok");
  EXPECT_EQ(reply("finish id=r1"), "ok");
  EXPECT_EQ(reply("admit id=r2 tokens=a100+[7,7,9]"), "cached=102 evicted_kv=0 evicted_states=0");
  EXPECT_EQ(reply("admit id=r3 tokens=a64+a64:100+[7,8]"),
            "cached=101 evicted_kv=0 evicted_states=0");
  EXPECT_EQ(reply("admit id=r4 tokens=a100+[7,7,9]+b2"),
            "cached=103 evicted_kv=0 evicted_states=0");
  EXPECT_EQ(reply("admit id=r5 tokens=a100 salt=other"), "cached=0 evicted_kv=0 evicted_states=0");
}

}  // namespace
}  // namespace lockstep::cache_sim
