#include "reference/base/leftovers.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Data that a signal handler reads has fixed places, so that a new entry never moves an old one.
// Entries that find no place are cleaned up by destructors alone.
constexpr std::size_t kMostGroups = 1024;
constexpr std::size_t kMostFolders = 64;
constexpr std::size_t kLongestPath = 512;
constexpr std::size_t kMostInherited = 64;
constexpr int kMostGenerations = 1000;  // bounds the fight with processes that keep starting others
constexpr int kEndings[] = {SIGINT, SIGTERM, SIGHUP};

struct NotedFolder {
  std::atomic<bool> taken{false};
  std::atomic<bool> there{false};  // set after the path is written, cleared before it changes
  std::array<char, kLongestPath> path{};
};

std::array<std::atomic<pid_t>, kMostGroups> groups{};
std::array<NotedFolder, kMostFolders> folders;
std::atomic<pid_t> owner{0};  // the process that noted the entries; its forks clean up nothing
static_assert(std::atomic<pid_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

std::atomic<bool> is_subreaper{false};           // set after the two arrays below are filled
std::array<pid_t, kMostInherited> inherited{};   // children from before an exec; 0 ends the list
std::array<char, kLongestPath> children_file{};  // in /proc: the main thread's children and orphans

/// Calls `visit` with each number in children_file. Safe in a signal handler. Finds nothing on a
/// kernel without CONFIG_PROC_CHILDREN.
template <class Visit>
void for_each_child(const Visit& visit) {
  const int file = ::open(children_file.data(), O_RDONLY | O_CLOEXEC);
  std::array<char, 1024> text;
  pid_t pid = 0;
  for (ssize_t size = 0; file >= 0 && (size = ::read(file, text.data(), text.size())) > 0;)
    for (const char c : std::string_view(text.data(), static_cast<std::size_t>(size)))
      if (c >= '0' && c <= '9')
        pid = pid * 10 + (c - '0');
      else if (pid != 0)
        visit(std::exchange(pid, 0));
  if (file >= 0) ::close(file);
}

bool is_inherited(pid_t child) {
  return std::ranges::find(inherited, child) != inherited.end();
}

/// Kills and reaps all present children; false if there was none that could be killed.
bool end_generation() {
  bool any = false;
  for_each_child([&](pid_t child) {
    if (is_inherited(child)) return;
    if (::kill(child, SIGKILL) != 0) return;  // not permitted: a set-user-ID program
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) continue;
    any = true;
  });
  return any;
}

void end_generations() {
  for (int i = 0; i < kMostGenerations && end_generation(); ++i) continue;
}

/// Runs `rm -rf PATH` and waits for it: a signal handler may not remove a tree itself.
void remove_tree(const char* path) {
  const pid_t child = ::_Fork();
  if (child == 0) {
    ::execl("/bin/rm", "rm", "-rf", "--", path, static_cast<char*>(nullptr));
    ::_exit(1);
  }
  while (child > 0 && ::waitpid(child, nullptr, 0) < 0 && errno == EINTR) continue;
}

void on_ending(int signal) {
  clean_up();
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // is delivered when this handler returns
}

}  // namespace

void clean_up() {
  if (owner.load() != ::getpid()) return;
  const int error = errno;
  for (std::atomic<pid_t>& group : groups)
    if (const pid_t leader = group.exchange(0); leader > 0) ::kill(-leader, SIGKILL);
  if (is_subreaper) end_generations();
  for (NotedFolder& folder : folders)
    if (folder.there.exchange(false)) remove_tree(folder.path.data());
  errno = error;
}

void clean_up_on_signals() {
  for (const int signal : kEndings) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) continue;
    struct sigaction ours {};
    ours.sa_handler = on_ending;
    for (const int other : kEndings) sigaddset(&ours.sa_mask, other);
    ours.sa_flags = SA_RESTART;
    ::sigaction(signal, &ours, nullptr);
  }
}

SignalsBlocked::SignalsBlocked() {
  sigset_t endings;
  sigemptyset(&endings);
  for (const int signal : kEndings) sigaddset(&endings, signal);
  pthread_sigmask(SIG_BLOCK, &endings, &before_);
}
SignalsBlocked::~SignalsBlocked() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

NotedProcessGroup::NotedProcessGroup(pid_t leader) {
  owner = ::getpid();
  for (std::size_t i = 0; i < kMostGroups && place_ == kNowhere; ++i)
    if (pid_t none = 0; groups[i].compare_exchange_strong(none, leader)) place_ = i;
}

void NotedProcessGroup::forget() {
  if (place_ != kNowhere) groups[std::exchange(place_, kNowhere)] = 0;
}

Subreaper::Subreaper() {
  fmt::format_to_n(children_file.data(), kLongestPath - 1, "/proc/self/task/{}/children",
                   ::getpid());
  inherited.fill(0);
  std::size_t count = 0;
  for_each_child([&](pid_t child) {
    if (count < kMostInherited) inherited[count++] = child;
  });
  is_subreaper = count < kMostInherited && ::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0;
}

Subreaper::~Subreaper() {
  end_children();
  is_subreaper = false;
  ::prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0);
}

void Subreaper::end_children() {
  if (is_subreaper) end_generations();
}

void Subreaper::reap_orphans() {
  if (!is_subreaper) return;
  for_each_child([](pid_t child) {
    const bool is_noted = std::ranges::any_of(
        groups, [&](const std::atomic<pid_t>& leader) { return leader == child; });
    if (!is_noted && !is_inherited(child)) ::waitpid(child, nullptr, WNOHANG);
  });
}

Result<TemporaryFolder> TemporaryFolder::make(std::string_view name) {
  std::error_code error;
  const fs::path parent = fs::temp_directory_path(error);
  if (error) return fail("TMPDIR names no folder: " + error.message(), kExitEnvironment);
  std::string path = (parent / ("lockstep-" + std::string(name) + "-XXXXXX")).string();
  const SignalsBlocked blocked;
  if (::mkdtemp(path.data()) == nullptr)
    return fail(path + ": the folder cannot be made: " + std::strerror(errno), kExitEnvironment);
  owner = ::getpid();
  std::size_t place = 0;
  if (path.size() + 1 > kLongestPath) return TemporaryFolder(std::move(path), kMostFolders);
  while (place < kMostFolders && folders[place].taken.exchange(true)) ++place;
  if (place < kMostFolders) {
    std::memcpy(folders[place].path.data(), path.c_str(), path.size() + 1);
    folders[place].there = true;
  }
  return TemporaryFolder(std::move(path), place);
}

TemporaryFolder::~TemporaryFolder() {
  if (path_.empty()) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  if (place_ == kMostFolders) return;
  folders[place_].there = false;
  folders[place_].taken = false;
}

}  // namespace lockstep
