// Child processes end with everything that they started, whatever ends them.
#include "reference/base/child_process.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

namespace lockstep {
namespace {

using namespace std::chrono_literals;

/// A pipe that processes inherit: it ends when the last of them is gone.
class Inherited {
 public:
  Inherited() { EXPECT_EQ(::pipe(ends_), 0); }
  ~Inherited() {
    ::close(ends_[0]);
    if (ends_[1] >= 0) ::close(ends_[1]);
  }
  void leave_to_children() {
    ::close(ends_[1]);
    ends_[1] = -1;
  }
  int writer() const { return ends_[1]; }
  bool has_a_byte() const { return read_size() == 1; }
  bool everybody_is_gone() const { return read_size() == 0; }

 private:
  /// Bytes that come within some seconds, at most one; -1: none, and somebody still holds the pipe.
  ssize_t read_size() const {
    pollfd end{ends_[0], POLLIN, 0};
    char byte = 0;
    return ::poll(&end, 1, 5000) == 1 ? ::read(ends_[0], &byte, 1) : -1;
  }
  int ends_[2];
};

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ChildProcess, aBodyRunsInAForkAndItsValueIsTheStatus) {
  ChildProcess child;
  int here = 1;
  ASSERT_EQ(child.start({.body = [&] { return here = 7; }}), 0);
  const auto end = child.wait_for_exit(10s);
  ASSERT_TRUE(end);
  EXPECT_EQ(ending_text(*end), "exit status 7");
  EXPECT_EQ(here, 1);
}

TEST(ChildProcess, aBodySeesTheEndOfItsInput) {
  Inherited pipe;
  ChildProcess child;
  const auto body = [&] {
    for (char byte = 0; ::read(STDIN_FILENO, &byte, 1) > 0;) continue;
    return ::write(pipe.writer(), "x", 1) == 1 ? 0 : 1;
  };
  ASSERT_EQ(child.start({.body = body}), 0);
  pipe.leave_to_children();
  child.stop(10s);
  EXPECT_TRUE(pipe.has_a_byte());
}

TEST(ChildProcess, aLogHoldsWhatTheChildSaysAndItsInputIsEmpty) {
  const auto folder = TemporaryFolder::make("test");
  ASSERT_TRUE(folder);
  ChildProcess child;
  ASSERT_EQ(child.start({.words = {"sh", "-c", "cat; echo out; echo err >&2; kill -SEGV $$"},
                         .log = folder->file("log.txt")}),
            0);
  const auto end = child.wait_for_exit(10s);
  ASSERT_TRUE(end);
  EXPECT_EQ(ending_text(*end).substr(0, 9), "signal 11");
  EXPECT_EQ(text_of(folder->file("log.txt")), "out\nerr\n");
}

TEST(ChildProcess, aMissingProgramIsReported) {
  ChildProcess child;
  EXPECT_EQ(child.start({.words = {"/nonexistent/program"}}), ENOENT);
}

// A time-out that killed the child alone left its workers running, with the GPU in their hands.
TEST(ChildProcess, aTimeOutEndsWhatTheChildStarted) {
  Inherited pipe;
  ChildProcess child;
  ASSERT_EQ(child.start({.words = {"sh", "-c", "trap '' TERM; sleep 60 & sleep 60"}}), 0);
  pipe.leave_to_children();
  EXPECT_FALSE(child.wait_for_exit(50ms));
  child.stop(0ms);
  EXPECT_TRUE(pipe.everybody_is_gone());
}

// Ctrl-C does not reach the children by itself: they have process groups of their own.
TEST(ChildProcess, aSignalTakesChildrenAndFoldersAlong) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Inherited pipe;
    ChildProcess program;
    const auto body = [] {
      clean_up_on_signals();
      const auto folder = TemporaryFolder::make("test");
      std::ofstream(folder->file("a file")) << "text";
      ChildProcess server;
      server.start({.words = {"sh", "-c", "trap '' TERM INT HUP; sleep 60 & sleep 60"}});
      const std::string line = folder->path() + "\n";
      if (::write(STDOUT_FILENO, line.data(), line.size()) < 0) return 1;
      for (;;) ::pause();
    };
    ASSERT_EQ(program.start({.body = body}), 0);
    pipe.leave_to_children();
    ASSERT_EQ(program.exchange("", 10s), Exchange::answered);
    const std::string folder = program.take_answer();
    EXPECT_TRUE(std::filesystem::exists(folder + "/a file"));
    kill(program.id(), signal);
    const auto end = program.wait_for_exit(10s);
    ASSERT_TRUE(end);
    EXPECT_EQ(end->si_status, signal) << "it ends by the signal, as its caller expects";
    EXPECT_FALSE(std::filesystem::exists(folder));
    EXPECT_TRUE(pipe.everybody_is_gone());
  }
}

/// Has a session of its own when it has answered, and a child there.
const ChildCommand kDaemon{
    .words = {"sh", "-c", "setsid sh -c 'sleep 60 & echo; sleep 60' & sleep 60"}};

// A process that calls setsid is in no group that could be killed; it is an orphan when its parent
// has ended.
TEST(ChildProcess, aSubreaperEndsWhatHasLeftTheGroup) {
  for (const int signal : {0, SIGTERM}) {
    Inherited pipe;
    ChildProcess program;
    const auto body = [&] {
      clean_up_on_signals();
      const Subreaper reaper;
      ChildProcess server;
      server.start(kDaemon);
      if (server.exchange("", 10s) != Exchange::answered) return 1;
      if (::write(STDOUT_FILENO, "\n", 1) < 0) return 1;
      while (signal != 0) ::pause();
      return 5;
    };
    ASSERT_EQ(program.start({.body = body}), 0);
    pipe.leave_to_children();
    ASSERT_EQ(program.exchange("", 10s), Exchange::answered);
    if (signal != 0) kill(program.id(), signal);
    const auto end = program.wait_for_exit(10s);
    ASSERT_TRUE(end);
    EXPECT_EQ(end->si_status, signal == 0 ? 5 : signal);
    EXPECT_TRUE(pipe.everybody_is_gone()) << "signal " << signal;
  }
}

// A run of days whose servers leave processes behind collects none that have ended.
TEST(ChildProcess, orphansThatHaveEndedAreReaped) {
  ChildProcess program;
  const auto body = [&] {
    const Subreaper reaper;
    pid_t orphan = 0;
    {
      ChildProcess server;
      server.start({.words = {"sh", "-c", "sh -c 'echo $$; read -r line' <&0 & sleep 60"}});
      if (server.exchange("", 10s) != Exchange::answered) return 1;
      orphan = static_cast<pid_t>(std::stol(server.take_answer()));
    }
    // It ended with its server, and was adopted; one that ends later is reaped with the next one.
    siginfo_t end{};
    while (::waitid(P_PID, static_cast<id_t>(orphan), &end, WEXITED | WNOWAIT) != 0 &&
           errno == EINTR)
      continue;
    {
      ChildProcess next;
      next.start({.words = {"true"}});
    }
    return ::waitpid(orphan, nullptr, WNOHANG) < 0 && errno == ECHILD ? 5 : 1;
  };
  ASSERT_EQ(program.start({.body = body}), 0);
  const auto end = program.wait_for_exit(10s);
  ASSERT_TRUE(end);
  EXPECT_EQ(ending_text(*end), "exit status 5");
}

// A shell can have started processes before it became this program: `lockstep … > >(tee log)`.
TEST(ChildProcess, aSubreaperSparesChildrenFromBeforeIt) {
  ChildProcess program;
  const auto body = [] {
    const pid_t before = ::fork();
    if (before == 0)
      for (;;) ::pause();
    { const Subreaper reaper; }
    const bool lives = ::waitpid(before, nullptr, WNOHANG) == 0;
    ::kill(before, SIGKILL);
    ::waitpid(before, nullptr, 0);
    return lives ? 5 : 1;
  };
  ASSERT_EQ(program.start({.body = body}), 0);
  const auto end = program.wait_for_exit(10s);
  ASSERT_TRUE(end);
  EXPECT_EQ(ending_text(*end), "exit status 5");
}

// The same of the program itself, whose server answers nothing while the signal comes.
TEST(ChildProcess, theProgramLeavesNoServerBehind) {
  Inherited pipe;
  const auto folder = TemporaryFolder::make("test");
  std::ofstream(folder->file("x.trace")) << "admit id=r tokens=a5\n";
  const std::string server =
      "exec:echo >/dev/fd/" + std::to_string(pipe.writer()) + "; trap '' TERM; sleep 60 & sleep 60";
  ChildProcess program;
  ASSERT_EQ(program.start({.words = {LOCKSTEP_PROGRAM, "replay", folder->file("x.trace"),
                                     "--subject", server}}),
            0);
  pipe.leave_to_children();
  ASSERT_TRUE(pipe.has_a_byte()) << "the server has started";
  kill(program.id(), SIGTERM);
  const auto end = program.wait_for_exit(10s);
  ASSERT_TRUE(end);
  EXPECT_EQ(end->si_status, SIGTERM);
  EXPECT_TRUE(pipe.everybody_is_gone());
}

// `nohup lockstep explore` goes on when the terminal goes.
TEST(ChildProcess, anIgnoredSignalStaysIgnored) {
  ChildProcess program;
  const auto body = [] {
    ::signal(SIGHUP, SIG_IGN);
    clean_up_on_signals();
    ::raise(SIGHUP);
    return 5;
  };
  ASSERT_EQ(program.start({.body = body}), 0);
  const auto end = program.wait_for_exit(10s);
  ASSERT_TRUE(end);
  EXPECT_EQ(ending_text(*end), "exit status 5");
}

}  // namespace
}  // namespace lockstep
