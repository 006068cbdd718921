#include "cache_sim/check/exec_subject.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "reference/base/require.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {
namespace {

using std::chrono::milliseconds;
// The one wall clock that a verdict can hang on: it decides whether an answer came in time.
using Clock = std::chrono::steady_clock;

constexpr std::size_t kAnswerSizeMax = std::size_t{1} << 20;  // of a line, as in a trace
constexpr std::size_t kStderrKept = 4096;  // its end, which says why a child died
constexpr std::size_t kReadSize = 65536;   // what a pipe holds
constexpr milliseconds kGrace{200};        // to end by itself, and again after SIGTERM
constexpr milliseconds kTimeoutMax = std::chrono::hours(24 * 365);  // keeps the deadline in range

/// Text of a child's or for one, fit for a sentence: printable ASCII, and not too much of it.
std::string shown(std::string_view text, std::size_t limit = 60) {
  std::string out;
  for (const char c : text.substr(0, limit)) {
    if (c >= ' ' && c <= '~')
      out += c;
    else
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(c));
  }
  return text.size() > limit ? out + "…" : out;
}

// --- The process and its pipes -------------------------------------------------------------------

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
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

/// Closed in whatever other process is started meanwhile: a child that holds the standard input of
/// another one would keep it from ever seeing its end.
struct Pipe {
  Descriptor reader, writer;

  bool open() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return false;
    reader = Descriptor(ends[0]);
    writer = Descriptor(ends[1]);
    return true;
  }
};

/// While it lives, this thread gets an error and no signal from a write that nobody reads.
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

/// What came of a line for the child.
enum class Outcome : std::uint8_t {
  answered,
  ended,       ///< the child closed a pipe, most often by its death
  unread,      ///< the time is up and the line not wholly read
  silent,      ///< the time is up
  unfinished,  ///< the time is up in the middle of the answer
  endless,     ///< the answer goes on beyond kAnswerSizeMax
  repeated,    ///< a second line came before the child can have read all that it answers
};

class Process {
 public:
  Process() = default;
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() { stop(kGrace); }

  /// 0, or the errno that says why the process does not run.
  int start(const std::string& command);

  /// Sends `text` while it reads, so that neither side waits for the other with a full pipe.
  Outcome exchange(std::string_view text, milliseconds timeout);

  /// The answer that `exchange` announced, without its end of line.
  std::string take_answer();

  /// What the child wrote and nobody has taken.
  std::string_view output();

  /// How the process ended and its last words, for a sentence; waits a moment for the end.
  std::string obituary();

  /// Ends the process group. `patience`: how long the child may take over its input's end.
  void stop(milliseconds patience);

 private:
  std::optional<siginfo_t> wait_for_exit(milliseconds timeout);
  bool send(std::string_view& text);
  void read_output();
  void read_stderr();

  pid_t pid_ = 0;  // also its process group; 0 where there is none
  Descriptor stdin_, stdout_, stderr_;
  std::string inbox_;                         // what was read and not taken
  std::size_t line_end_ = std::string::npos;  // of the first line in inbox_
  std::string last_words_;
};

int Process::start(const std::string& command) {
  Pipe in, out, err;
  if (!in.open() || !out.open() || !err.open()) return errno;
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, in.reader.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, out.writer.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, err.writer.get(), STDERR_FILENO);
  // The child has a group of its own and none of what we do about signals.
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

  std::string shell = "sh", option = "-c", line = command;
  char* const arguments[] = {shell.data(), option.data(), line.data(), nullptr};
  const int error = posix_spawn(&pid_, "/bin/sh", &files, &attributes, arguments, environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    pid_ = 0;
    return error;
  }
  stdin_ = std::move(in.writer);
  stdout_ = std::move(out.reader);
  stderr_ = std::move(err.reader);
  for (const Descriptor* const end : {&stdin_, &stdout_, &stderr_})
    fcntl(end->get(), F_SETFL, O_NONBLOCK);
  return 0;
}

/// Sends what the pipe takes and drops it from `text`; false where nobody reads any more.
bool Process::send(std::string_view& text) {
  const ssize_t size = ::write(stdin_.get(), text.data(), text.size());
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  text.remove_prefix(static_cast<std::size_t>(size));
  return true;
}

/// Appends what is there, at most kReadSize bytes; closes the pipe at its end.
void read_some(Descriptor& pipe, std::string& target) {
  std::array<char, kReadSize> buffer;
  if (pipe.get() < 0) return;
  const ssize_t size = ::read(pipe.get(), buffer.data(), buffer.size());
  if (size > 0)
    target.append(buffer.data(), static_cast<std::size_t>(size));
  else if (size == 0 || (errno != EAGAIN && errno != EINTR))
    pipe.close();
}

void Process::read_output() {
  const std::size_t known = inbox_.size();
  read_some(stdout_, inbox_);
  if (line_end_ == std::string::npos) line_end_ = inbox_.find('\n', known);
}

void Process::read_stderr() {
  read_some(stderr_, last_words_);
  if (last_words_.size() > kStderrKept) last_words_.erase(0, last_words_.size() - kStderrKept);
}

Outcome Process::exchange(std::string_view text, milliseconds timeout) {
  const SigpipeBlocked blocked;
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    // Asked before the look into the pipes: what is there when the time is up still counts.
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    pollfd ends[] = {{text.empty() ? -1 : stdin_.get(), POLLOUT, 0},
                     {stdout_.get(), POLLIN, 0},
                     {stderr_.get(), POLLIN, 0}};
    ::poll(ends, std::size(ends),
           static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 60'000)));
    if (ends[2].revents != 0) read_stderr();
    if (ends[1].revents != 0) read_output();
    if (ends[0].revents != 0 && !send(text)) return Outcome::ended;

    const bool whole_line = line_end_ != std::string::npos;
    if (whole_line && text.empty()) return Outcome::answered;
    if (whole_line && inbox_.size() > line_end_ + 1) return Outcome::repeated;
    if (!whole_line && inbox_.size() > kAnswerSizeMax) return Outcome::endless;
    if (stdout_.get() < 0) return Outcome::ended;
    if (left > milliseconds::zero()) continue;
    if (wait_for_exit(milliseconds::zero())) return Outcome::ended;  // its workers hold the pipes
    if (!text.empty()) return Outcome::unread;
    return inbox_.empty() ? Outcome::silent : Outcome::unfinished;
  }
}

std::string Process::take_answer() {
  std::string answer = inbox_.substr(0, line_end_);
  inbox_.erase(0, line_end_ + 1);
  line_end_ = inbox_.find('\n');
  return answer;
}

std::string_view Process::output() {
  if (inbox_.empty()) read_output();
  return inbox_;
}

/// Nothing where it lives on. A dead one is left unreaped, so that its number names nobody else.
std::optional<siginfo_t> Process::wait_for_exit(milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    siginfo_t end{};
    const bool unknown =
        ::waitid(P_PID, static_cast<id_t>(pid_), &end, WEXITED | WNOHANG | WNOWAIT) != 0;
    const bool late = Clock::now() >= deadline;
    read_stderr();
    std::string unwanted;
    read_some(stdout_, unwanted);                // nor may a full pipe keep the child from ending
    if (unknown || end.si_pid != 0) return end;  // unknown: whoever calls us ignores SIGCHLD
    if (late) return std::nullopt;
    pollfd ends[] = {{stdout_.get(), POLLIN, 0}, {stderr_.get(), POLLIN, 0}};
    ::poll(ends, std::size(ends), 2);
  }
}

std::string Process::obituary() {
  const std::optional<siginfo_t> end = wait_for_exit(kGrace);
  std::string how = "it closed a pipe and lives on";
  if (end && end->si_code == CLD_EXITED)
    how = fmt::format("exit status {}", end->si_status);
  else if (end && end->si_pid != 0)
    how = fmt::format("signal {}, {}", end->si_status, strsignal(end->si_status));
  else if (end)
    how = "its exit status is lost";

  std::string_view words = last_words_;
  words = words.substr(0, words.find_last_not_of(" \r\n") + 1);
  words.remove_prefix(words.find_last_of('\n') + 1);  // npos + 1 is 0
  if (!words.empty()) how += fmt::format("; last on its standard error: `{}`", shown(words, 200));
  return how;
}

void Process::stop(milliseconds patience) {
  if (pid_ == 0) return;
  stdin_.close();
  if (patience == milliseconds::zero() || !wait_for_exit(patience)) {
    ::kill(-pid_, SIGTERM);
    wait_for_exit(kGrace);
  }
  ::kill(-pid_, SIGKILL);  // whoever is left of the group
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) continue;
  pid_ = 0;
  stdout_.close();
  stderr_.close();
}

// --- The protocol --------------------------------------------------------------------------------

Result<std::string> greeting(const Config& config) {
  std::string line = "hello protocol=1";
  for (const auto& [name, value] : config.fields()) {
    if (std::any_of(value.begin(), value.end(),
                    [](unsigned char c) { return c <= ' ' || c == 0x7F; }))
      return fail(fmt::format("config field {}: `{}` holds a blank, and no child can read that",
                              name, shown(value)));
    line.append(" ").append(name).append("=").append(value);
  }
  return line;
}

/// A reply to an admit without the labels' lengths, which this child does not vouch for.
Reply without_labels(const Reply& reply) {
  Reply rest = Reply::refusal(reply.refused);
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
    const auto field = static_cast<ReplyField>(i);
    if (reply.has(field) && field != ReplyField::state && field != ReplyField::conv)
      rest.set(field, reply.get(field));
  }
  return rest;
}

class ExecSubject final : public Subject {
 public:
  explicit ExecSubject(const ChildOptions& options)
      : name_(fmt::format("child `{}`", options.command)),
        timeout_(std::min(options.timeout, kTimeoutMax)) {}

  Result<void> start(const ChildOptions& options);
  Result<Reply> apply(const Operation& operation) override;
  bool has_tree_verbs() const override { return tree_verbs_; }

 private:
  Result<std::string> ask(std::string question);
  tl::unexpected<Error> give_up(FindingKind kind, std::string text);
  tl::unexpected<Error> cannot_start(std::string_view why) const {
    return fail(fmt::format("{} cannot start: {}", name_, why), kExitEnvironment);
  }

  std::string name_;
  milliseconds timeout_;
  Process process_;
  bool tree_verbs_ = false;
  bool labels_ = false;
  std::optional<Error> failure_;  // the finding that ended the child
};

tl::unexpected<Error> ExecSubject::give_up(FindingKind kind, std::string text) {
  process_.stop(milliseconds::zero());
  failure_ = fail_as(kind, fmt::format("{} {}", name_, text)).value();
  return tl::unexpected(*failure_);
}

/// Sends a line and returns the line that answers it.
Result<std::string> ExecSubject::ask(std::string question) {
  const std::string what = shown(question);
  if (const std::string_view unasked = process_.output(); !unasked.empty())
    return give_up(
        FindingKind::subject_garbled,
        fmt::format("wrote `{}` unasked, before `{}` was sent to it", shown(unasked), what));
  question += '\n';
  const std::string time = time_text(std::chrono::nanoseconds(timeout_).count());
  switch (process_.exchange(question, timeout_)) {
    case Outcome::answered: return process_.take_answer();
    case Outcome::ended:
      return give_up(FindingKind::subject_died,
                     fmt::format("died before it answered `{}` ({})", what, process_.obituary()));
    case Outcome::unread:
      return give_up(FindingKind::subject_silent,
                     fmt::format("did not read all of `{}` within {}", what, time));
    case Outcome::silent:
      return give_up(FindingKind::subject_silent,
                     fmt::format("did not answer `{}` within {}", what, time));
    case Outcome::unfinished:
      return give_up(
          FindingKind::subject_silent,
          fmt::format("began its answer to `{}` with `{}` and did not end the line within {}", what,
                      shown(process_.output()), time));
    case Outcome::endless:
      return give_up(
          FindingKind::subject_garbled,
          fmt::format("answered `{}` with a line of more than {} bytes", what, kAnswerSizeMax));
    case Outcome::repeated: break;
  }
  return give_up(
      FindingKind::subject_garbled,
      fmt::format("answered `{}` with more than one line: `{}`", what, shown(process_.output())));
}

Result<void> ExecSubject::start(const ChildOptions& options) {
  Result<std::string> hello = greeting(options.config);
  if (!hello) return tl::unexpected(hello.error());
  if (const int error = process_.start(options.command); error != 0)
    return cannot_start(std::strerror(error));
  const Result<std::string> answer = ask(std::move(*hello));
  if (!answer && answer.error().finding == FindingKind::subject_died)
    return fail(answer.error().text, kExitEnvironment);
  if (!answer) return tl::unexpected(answer.error());

  const std::string with_verb = "hello " + *answer;  // the answer has no verb; parse_line wants one
  const Result<Line> line = parse_line(with_verb);
  if (!line)
    return give_up(FindingKind::subject_garbled,
                   fmt::format("answered hello with `{}`: {}", shown(*answer), line.error().text));
  const std::string_view levels = line->find("levels").value_or("");
  const std::string_view labels = line->find("labels").value_or("0");
  if (line->find("protocol").value_or("1") != "1" ||
      (levels != "request" && levels != "request,tree") || (labels != "0" && labels != "1"))
    return cannot_start(
        fmt::format("it answered hello with `{}` and not with levels=request or "
                    "levels=request,tree, and labels=1 if it has them",
                    shown(*answer)));
  tree_verbs_ = levels == "request,tree";
  labels_ = labels == "1";
  return {};
}

Result<Reply> ExecSubject::apply(const Operation& operation) {
  if (failure_) return tl::unexpected(*failure_);
  if (is_tree_verb(operation.verb) && !tree_verbs_)
    return fail(
        fmt::format("{}: {} understands request verbs only", to_string(operation.verb), name_));
  const Result<std::string> answer = ask(operation.text());
  if (!answer) return tl::unexpected(answer.error());
  const auto garbled = [&](std::string_view why) {
    return give_up(
        FindingKind::subject_garbled,
        fmt::format("answered `{}` with `{}`: {}", shown(operation.text()), shown(*answer), why));
  };
  Result<Reply> reply = parse_reply(*answer, operation.verb);
  if (!reply) return garbled(reply.error().text);
  // Elsewhere `state` is no label: match offers a length by it, evict counts by it.
  if (operation.verb != Verb::admit || reply->refused != Refusal::none) return reply;
  if (!labels_) return without_labels(*reply);
  if (!reply->has(ReplyField::state) || !reply->has(ReplyField::conv))
    return garbled("it announced labels=1, so an answer to admit carries state= and conv=");
  return reply;
}

}  // namespace

Result<std::unique_ptr<Subject>> start_child(const ChildOptions& options) {
  require(options.timeout > milliseconds::zero(), "a child has time to answer");
  auto child = std::make_unique<ExecSubject>(options);
  return child->start(options).map([&]() -> std::unique_ptr<Subject> { return std::move(child); });
}

}  // namespace lockstep::cache_sim
