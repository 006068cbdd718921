// What long commands say on standard error while they work: on a terminal, after two seconds, one
// line that is rewritten in place; elsewhere a line each half minute. Nothing where --quiet is
// given.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace lockstep::program {

/// Shows that a command works, as long as it lives: its name, how far it is, the seconds so far.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// How far it is; until this is called, the work_done of this process since it began.
  void say(std::string how_far);

 private:
  void show();

  std::string what_;
  std::string how_far_;
  std::mutex mutex_;
  std::condition_variable ends_;
  bool has_ended_ = false;
  std::thread thread_;
};

/// Takes the line away, so that something else can be written. The next one comes by itself.
void hide_progress();

}  // namespace lockstep::program
