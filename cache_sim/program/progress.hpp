// Progress of long commands on standard error. On a terminal it is one line that appears after two
// seconds and is rewritten in place; elsewhere it is a line each half minute. --quiet suppresses
// it.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace lockstep::program {

/// Shows progress while the object lives: the name of the command, how far it is, and the seconds
/// so far.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Sets the text that says how far the command is; before the first call, it is the work_done of
  /// this process.
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

/// Hides the line, so that other text can be written. The line comes back by itself.
void hide_progress();

}  // namespace lockstep::program
