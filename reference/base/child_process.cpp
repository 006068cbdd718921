#include "reference/base/child_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>

#include "reference/base/printable.hpp"
#include "reference/base/require.hpp"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
// The only wall clock on which a verdict can depend: it decides whether an answer came in time.
using Clock = std::chrono::steady_clock;

constexpr std::size_t kStderrKept = 4096;  // last bytes of standard error, which tell a child's end
constexpr std::size_t kReadSize = 65536;   // the capacity of a pipe
constexpr milliseconds kGrace{200};        // time to end by itself, and again after SIGTERM
constexpr std::int64_t kLongestPoll = 60'000;

/// While it lives, a write of this thread to a closed pipe gives an error instead of SIGPIPE.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;
  ~SigpipeBlocked() {
    const timespec at_once{};
    while (!was_pending_ && sigtimedwait(&sigpipe_, nullptr, &at_once) < 0 && errno == EINTR)
      continue;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t sigpipe_;
  sigset_t before_;
  bool was_pending_;
};

int poll_time(milliseconds left) {
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, kLongestPoll));
}

/// Called in a fork: restores default signal handling, and blocks no signal.
void reset_signals() {
  for (int signal = 1; signal < NSIG; ++signal) ::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
}

}  // namespace

std::string ending_text(const siginfo_t& end) {
  if (end.si_code == CLD_EXITED) return fmt::format("exit status {}", end.si_status);
  if (end.si_pid != 0) return fmt::format("signal {}, {}", end.si_status, strsignal(end.si_status));
  return "its exit status is lost";  // the caller of this program ignores SIGCHLD
}

// --- Starting ------------------------------------------------------------------------------------

void ChildProcess::Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

/// Opens the pipes with CLOEXEC, so that no other child inherits them: a child that holds another
/// one's standard input would keep that one from seeing its end.
int ChildProcess::Streams::open_pipes() {
  for (int stream = 0; stream < 3; ++stream) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return errno;
    const bool is_input = stream == STDIN_FILENO;
    child[stream] = Descriptor(ends[is_input ? 0 : 1]);
    ours[stream] = Descriptor(ends[is_input ? 1 : 0]);
    ::fcntl(ours[stream].get(), F_SETFL, O_NONBLOCK);
  }
  return 0;
}

int ChildProcess::Streams::open_log(const std::string& log) {
  child[0] = Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (int stream = 1; stream < 3; ++stream)
    child[stream] =
        Descriptor(::open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600));
  return std::ranges::all_of(child, [](const Descriptor& end) { return end.get() >= 0; }) ? 0
                                                                                          : errno;
}

int ChildProcess::spawn(const ChildCommand& command, const Streams& streams, pid_t& pid) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  for (int stream = 0; stream < 3; ++stream)
    posix_spawn_file_actions_adddup2(&files, streams.child[stream].get(), stream);
  // The child gets a process group of its own, and default signal handling.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  posix_spawnattr_setpgroup(&attributes, 0);
  sigset_t signals;
  sigemptyset(&signals);
  posix_spawnattr_setsigmask(&attributes, &signals);
  sigaddset(&signals, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &signals);

  std::vector<std::string> words = command.words;
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int error =
      posix_spawnp(&pid, arguments[0], &files, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  return error;
}

int ChildProcess::fork_body(const ChildCommand& command, const Streams& streams, pid_t& pid) {
  pid = ::fork();
  if (pid < 0) return errno;
  if (pid > 0) {
    ::setpgid(pid, pid);  // parent and child both call it, so neither has to wait for the other
    return 0;
  }
  ::setpgid(0, 0);
  reset_signals();
  for (int stream = 0; stream < 3; ++stream) ::dup2(streams.child[stream].get(), stream);
  for (const Descriptor& end : streams.ours) ::close(end.get());  // or its input would never end
  int status = kExitEnvironment;
  try {
    status = command.body();
  } catch (const std::exception& thrown) {
    const std::string words = std::string(thrown.what()) + "\n";
    [[maybe_unused]] const auto size = ::write(STDERR_FILENO, words.data(), words.size());
  }
  std::fflush(nullptr);
  ::_exit(status);
}

int ChildProcess::start(const ChildCommand& command) {
  require(command.words.empty() == static_cast<bool>(command.body), "a child runs words or a body");
  Streams streams;
  int error = command.log.empty() ? streams.open_pipes() : streams.open_log(command.log);
  if (error != 0) return error;
  const SignalsBlocked until_it_is_noted;
  pid_t pid = 0;
  error = command.body ? fork_body(command, streams, pid) : spawn(command, streams, pid);
  if (error != 0) return error;
  pid_ = pid;
  noted_ = NotedProcessGroup(pid);
  stdin_ = std::move(streams.ours[0]);
  stdout_ = std::move(streams.ours[1]);
  stderr_ = std::move(streams.ours[2]);
  life_ = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  return 0;
}

ChildProcess::~ChildProcess() {
  stop(kGrace);
}

// --- A line out and a line back ------------------------------------------------------------------

/// Sends as much of `text` as the pipe takes, and removes it from `text`; false if the pipe is
/// closed.
bool ChildProcess::send(std::string_view& text) {
  const ssize_t size = ::write(stdin_.get(), text.data(), text.size());
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  text.remove_prefix(static_cast<std::size_t>(size));
  return true;
}

/// Appends available bytes to `target`, at most kReadSize; closes the pipe at its end.
void ChildProcess::read_some(Descriptor& pipe, std::string& target) {
  std::array<char, kReadSize> buffer;
  if (pipe.get() < 0) return;
  const ssize_t size = ::read(pipe.get(), buffer.data(), buffer.size());
  if (size > 0)
    target.append(buffer.data(), static_cast<std::size_t>(size));
  else if (size == 0 || (errno != EAGAIN && errno != EINTR))
    pipe.close();
}

void ChildProcess::read_output() {
  const std::size_t known = inbox_.size();
  read_some(stdout_, inbox_);
  if (line_end_ == std::string::npos) line_end_ = inbox_.find('\n', known);
}

void ChildProcess::read_stderr() {
  read_some(stderr_, last_words_);
  if (last_words_.size() > kStderrKept) last_words_.erase(0, last_words_.size() - kStderrKept);
}

Exchange ChildProcess::exchange(std::string_view text, milliseconds timeout) {
  const SigpipeBlocked blocked;
  const auto deadline = Clock::now() + timeout;
  if (!send(text)) return Exchange::ended;  // most lines fit into the pipe at once
  for (;;) {
    // The time is taken before the pipes are read: bytes that are there when it is up still count.
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    pollfd ends[] = {{text.empty() ? -1 : stdin_.get(), POLLOUT, 0},
                     {stdout_.get(), POLLIN, 0},
                     {stderr_.get(), POLLIN, 0}};
    ::poll(ends, std::size(ends), poll_time(left));
    if (ends[2].revents != 0) read_stderr();
    if (ends[1].revents != 0) read_output();
    if (ends[0].revents != 0 && !send(text)) return Exchange::ended;

    const bool whole_line = line_end_ != std::string::npos;
    if (whole_line && text.empty()) return Exchange::answered;
    if (whole_line && inbox_.size() > line_end_ + 1) return Exchange::repeated;
    if (!whole_line && inbox_.size() > kAnswerSizeMax) return Exchange::endless;
    if (stdout_.get() < 0) return Exchange::ended;
    if (left > milliseconds::zero()) continue;
    // A dead child whose own children hold the pipes open.
    if (wait_for_exit(milliseconds::zero())) return Exchange::ended;
    if (!text.empty()) return Exchange::unread;
    return inbox_.empty() ? Exchange::silent : Exchange::unfinished;
  }
}

std::string ChildProcess::take_answer() {
  std::string answer = inbox_.substr(0, line_end_);
  inbox_.erase(0, line_end_ + 1);
  line_end_ = inbox_.find('\n');
  return answer;
}

std::string_view ChildProcess::output() {
  if (inbox_.empty()) read_output();
  return inbox_;
}

// --- The end -------------------------------------------------------------------------------------

std::optional<siginfo_t> ChildProcess::wait_for_exit(milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    siginfo_t end{};
    const bool unknown =
        ::waitid(P_PID, static_cast<id_t>(pid_), &end, WEXITED | WNOHANG | WNOWAIT) != 0;
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    read_stderr();
    std::string unwanted;
    read_some(stdout_, unwanted);  // a full pipe must not keep the child from ending
    if (unknown || end.si_pid != 0) return end;
    if (left <= milliseconds::zero()) return std::nullopt;
    pollfd ends[] = {
        {stdout_.get(), POLLIN, 0}, {stderr_.get(), POLLIN, 0}, {life_.get(), POLLIN, 0}};
    // Without a pidfd (Linux before 5.3) the child is checked every two milliseconds.
    ::poll(ends, std::size(ends), life_.get() < 0 ? std::min(2, poll_time(left)) : poll_time(left));
  }
}

std::string ChildProcess::obituary() {
  const std::optional<siginfo_t> end = wait_for_exit(kGrace);
  std::string how = end ? ending_text(*end) : "it closed a pipe and lives on";
  std::string_view words = last_words_;
  words = words.substr(0, words.find_last_not_of(" \r\n") + 1);
  words.remove_prefix(words.find_last_of('\n') + 1);  // npos + 1 is 0
  if (!words.empty())
    how += fmt::format("; last on its standard error: `{}`", printable(words, 200));
  return how;
}

void ChildProcess::stop(milliseconds patience) {
  if (pid_ == 0) return;
  stdin_.close();
  if (patience == milliseconds::zero() || !wait_for_exit(patience)) {
    ::kill(-pid_, SIGTERM);
    wait_for_exit(kGrace);
  }
  ::kill(-pid_, SIGKILL);  // the rest of the group
  noted_.forget();         // before the system can reuse the number
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) continue;
  pid_ = 0;
  stdout_.close();
  stderr_.close();
  life_.close();
  Subreaper::reap_orphans();
}

}  // namespace lockstep
