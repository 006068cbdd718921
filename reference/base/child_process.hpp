// A child process with a process group of its own: it is started, exchanges lines or is waited for,
// and is ended with everything that it started. Servers behind a pipe
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

/// The program of a child, and its standard streams.
struct ChildCommand {
  std::vector<std::string> words{};  ///< the program, looked up in PATH, and its arguments
  std::function<int()> body{};       ///< instead of words: runs in a fork; returns the exit status
  std::string
      log{};  ///< a file for standard output and error, without standard input; empty: pipes
};

/// The outcome of an exchange of lines with the child.
enum class Exchange : std::uint8_t {
  answered,
  ended,       ///< the child closed a pipe, most often because it died
  unread,      ///< timed out before the child had read the whole line
  silent,      ///< timed out without an answer
  unfinished,  ///< timed out in the middle of the answer
  endless,     ///< the answer is longer than ChildProcess::kAnswerSizeMax
  repeated,    ///< a second line came, before the child can have read a second request
};

class ChildProcess {
 public:
  static constexpr std::size_t kAnswerSizeMax = std::size_t{1} << 20;  ///< bytes of a line, at most

  ChildProcess() = default;
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  /// Closes the child's standard input, gives it a moment to end by itself, and then stops it: see
  /// stop().
  ~ChildProcess();

  /// Starts the process. Returns 0, or the errno of the failure. Called once.
  int start(const ChildCommand& command);
  pid_t id() const { return pid_; }  ///< number of the process and its group; 0: none runs

  /// Sends `text` and reads until a line has come back. It does both at the same time, so that the
  /// two sides cannot wait for each other with full pipes. `timeout` counts from the first byte
  /// sent.
  Exchange exchange(std::string_view text, std::chrono::milliseconds timeout);
  /// The answer that `exchange` announced, without its end of line.
  std::string take_answer();
  /// Output of the child that has not been taken.
  std::string_view output();

  /// Waits for the end of the process and returns its status; nothing if it still runs. The process
  /// is not reaped before stop(), so its number is not reused.
  std::optional<siginfo_t> wait_for_exit(std::chrono::milliseconds timeout);
  /// The end of the process as part of a sentence: its status, and the last line of its standard
  /// error if that is a pipe. Waits a moment for the end.
  std::string obituary();

  /// Ends the whole process group: waits `patience` for the child to end by itself, then sends
  /// SIGTERM, and a moment later SIGKILL. Processes that have left the group are not reached; a
  /// Subreaper ends them.
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

    int get() const { return fd_; }  ///< -1 if it is closed, which poll() ignores
    void close();

   private:
    int fd_ = -1;
  };
  /// The child's standard streams, and this program's ends of the pipes.
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

  pid_t pid_ = 0;  // also the process group; 0: no process
  NotedProcessGroup noted_;
  Descriptor stdin_, stdout_, stderr_;
  Descriptor life_;                           // pidfd: readable when the process has ended
  std::string inbox_;                         // bytes that were read and not taken
  std::size_t line_end_ = std::string::npos;  // end of the first line in inbox_
  std::string last_words_;
};

/// The end of a process as text: `exit status 3` or `signal 11, Segmentation fault`.
std::string ending_text(const siginfo_t& end);

}  // namespace lockstep
