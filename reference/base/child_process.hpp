// A child process with a process group of its own: started, talked to line by line or waited for,
// and ended with everything that it started. Servers at the end of a pipe
// (cache_sim/check/exec_subject.cpp) and candidates of the judge run in one.
#pragma once

#include <chrono>
#include <csignal>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reference/base/leftovers.hpp"

namespace lockstep {

/// What runs in the child, and where its standard streams go.
struct ChildCommand {
  std::vector<std::string> words{};  ///< the program, looked up in PATH, and its arguments
  std::function<int()> body{};       ///< instead of words: runs in a fork; its value is the status
  std::string log{};  ///< a file for standard output and error, and no standard input; empty: pipes
};

/// What came of a line for the child.
enum class Exchange : std::uint8_t {
  answered,
  ended,       ///< the child closed a pipe, most often by its death
  unread,      ///< the time is up and the line not wholly read
  silent,      ///< the time is up
  unfinished,  ///< the time is up in the middle of the answer
  endless,     ///< the answer goes on beyond ChildProcess::kAnswerSizeMax
  repeated,    ///< a second line came before the child can have read all that it answers
};

class ChildProcess {
 public:
  static constexpr std::size_t kAnswerSizeMax = std::size_t{1} << 20;  ///< bytes of a line

  ChildProcess() = default;
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  /// Closes the child's standard input and gives it a moment to end by itself; see stop().
  ~ChildProcess();

  /// 0, or the errno that says why the process does not run. Called once.
  int start(const ChildCommand& command);
  pid_t id() const { return pid_; }  ///< of the process and its group; 0: none runs

  /// Sends `text` and reads until a line has come back; both at once, so that neither side waits
  /// for the other with a full pipe. `timeout` counts from the first byte sent.
  Exchange exchange(std::string_view text, std::chrono::milliseconds timeout);
  /// The answer that `exchange` announced, without its end of line.
  std::string take_answer();
  /// What the child wrote and nobody has taken.
  std::string_view output();

  /// How the process ended; nothing where it lives on. It stays waitable, so that its number names
  /// nobody else, until stop().
  std::optional<siginfo_t> wait_for_exit(std::chrono::milliseconds timeout);
  /// How the process ended and its last line on a standard error that is a pipe, for a sentence;
  /// waits a moment for the end.
  std::string obituary();

  /// Ends the whole process group: after `patience`, in which the child may end by itself, by
  /// SIGTERM, and a moment later by SIGKILL. A process that left the group is not reached;
  /// a Subreaper ends it.
  void stop(std::chrono::milliseconds patience);

 private:
  /// An open file, closed with this object.
  class Descriptor {
   public:
    Descriptor() = default;
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
      std::swap(fd_, other.fd_);
      return *this;
    }
    ~Descriptor() { close(); }

    int get() const { return fd_; }  ///< -1 where it is closed, which poll passes over
    void close();

   private:
    int fd_ = -1;
  };
  /// The child's standard streams and our ends of them.
  struct Streams {
    Descriptor child[3];
    Descriptor ours[3];
    int open_pipes();
    int open_log(const std::string& log);
  };

  static int spawn(const ChildCommand& command, const Streams& streams, pid_t& pid);
  static int fork_body(const ChildCommand& command, const Streams& streams, pid_t& pid);
  static void read_some(Descriptor& pipe, std::string& target);
  bool send(std::string_view& text);
  void read_output();
  void read_stderr();

  pid_t pid_ = 0;  // also its process group; 0 where there is none
  NotedProcessGroup noted_;
  Descriptor stdin_, stdout_, stderr_;
  Descriptor life_;                           // readable when the process has ended (pidfd)
  std::string inbox_;                         // what was read and not taken
  std::size_t line_end_ = std::string::npos;  // of the first line in inbox_
  std::string last_words_;
};

/// `exit status 3` or `signal 11, Segmentation fault`.
std::string ending_text(const siginfo_t& end);

}  // namespace lockstep
