// Clean-up of child processes and temporary folders when a signal ends the program. Each is noted
// here while it exists, so that a signal handler can remove it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "reference/base/result.hpp"

namespace lockstep {

/// Installs handlers: INT, TERM and HUP then kill every noted process group, remove every noted
/// folder, and end this program by the same signal. A signal that is already handled or ignored is
/// left as it is.
void clean_up_on_signals();

/// Kills the noted process groups and removes the noted folders. Safe in a signal handler, for
/// programs that have handlers of their own. Does nothing in a fork of the program that noted them.
void clean_up();

/// While it lives, no signal that clean_up_on_signals() handles is delivered to this thread. It
/// closes the gap between the start of a process, or the creation of a folder, and its note.
class SignalsBlocked {
 public:
  SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked();

 private:
  sigset_t before_;
};

/// Notes a process group for as long as it lives.
class NotedProcessGroup {
 public:
  NotedProcessGroup() = default;
  explicit NotedProcessGroup(pid_t leader);
  NotedProcessGroup(NotedProcessGroup&& other) noexcept
      : place_(std::exchange(other.place_, kNowhere)) {}
  NotedProcessGroup& operator=(NotedProcessGroup&& other) noexcept {
    std::swap(place_, other.place_);
    return *this;
  }
  ~NotedProcessGroup() { forget(); }
  void forget();

 private:
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);
  std::size_t place_ = kNowhere;
};

/// While it lives, this program is a subreaper (prctl(2)): processes that its children leave behind
/// become its own children, whatever group or session they have moved to, and clean_up() kills
/// them. The program may have no children of another kind meanwhile; children from before an exec
/// (`lockstep ... > >(tee log)`) are left alone. One object at a time, in the main thread.
class Subreaper {
 public:
  Subreaper();
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;
  ~Subreaper();

  /// Kills and reaps all children and the processes that they leave behind, also children that are
  /// still in use.
  static void end_children();
  /// Reaps orphans that have ended, so that a long run does not collect them.
  static void reap_orphans();
};

/// A new folder in the temporary directory, removed with its contents by the destructor.
class TemporaryFolder {
 public:
  /// Makes `TMPDIR/lockstep-NAME-XXXXXX`. The error names the folder and the system's reason.
  static Result<TemporaryFolder> make(std::string_view name);
  TemporaryFolder(TemporaryFolder&& other) noexcept
      : path_(std::exchange(other.path_, "")), place_(other.place_) {}
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder();

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  TemporaryFolder(std::string path, std::size_t place) : path_(std::move(path)), place_(place) {}
  std::string path_;
  std::size_t place_;
};

}  // namespace lockstep
