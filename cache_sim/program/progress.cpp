#include "cache_sim/program/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <system_error>

#include "cache_sim/base/text.hpp"
#include "cache_sim/program/output.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/work_done.hpp"

namespace lockstep::program {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

constexpr seconds kSilence{2};
constexpr std::chrono::milliseconds kRewrite{200};
constexpr seconds kNextLine{30};
constexpr std::size_t kWidth = 79;

std::mutex line_mutex;
bool is_line_shown = false;

/// The first kWidth columns. A longer line would wrap, and a wrapped line cannot be rewritten.
std::string cut(const std::string& text) {
  std::size_t columns = 0;
  for (std::size_t i = 0; i < text.size(); ++i)
    if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80 && columns++ == kWidth)
      return text.substr(0, i);
  return text;
}

}  // namespace

Progress::Progress(std::string what) : what_(std::move(what)) {
  if (is_quiet()) return;
  // Signals are delivered to the main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    thread_ = std::thread([this] { show(); });
    // no thread can be started: the command works without progress
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Progress::~Progress() {
  {
    const std::lock_guard hold(mutex_);
    has_ended_ = true;
  }
  ends_.notify_all();
  if (thread_.joinable()) thread_.join();
  hide_progress();
}

void Progress::say(std::string how_far) {
  const std::lock_guard hold(mutex_);
  how_far_ = std::move(how_far);
}

void Progress::show() {
  const bool terminal = is_terminal(STDERR_FILENO);
  const auto start = Clock::now();
  const std::int64_t work_before = work_done.load(std::memory_order_relaxed);
  std::unique_lock hold(mutex_);
  std::chrono::milliseconds pause = terminal ? kSilence : kNextLine;
  while (!ends_.wait_for(hold, pause, [&] { return has_ended_; })) {
    const std::int64_t done = work_done.load(std::memory_order_relaxed) - work_before;
    std::string far = how_far_;
    if (far.empty() && done != 0) far = counted(done, "operation");
    const std::string line = cache_sim::printable(
        fmt::format("lockstep: {}: {}{} s", what_, far.empty() ? "" : far + ", ",
                    std::chrono::duration_cast<seconds>(Clock::now() - start).count()));
    const std::lock_guard hold_line(line_mutex);
    std::fputs((terminal ? "\r\033[K" + cut(line) : line + "\n").c_str(), stderr);
    is_line_shown = terminal;
    pause = terminal ? kRewrite : std::chrono::milliseconds(kNextLine);
  }
}

void hide_progress() {
  const std::lock_guard hold(line_mutex);
  if (is_line_shown) std::fputs("\r\033[K", stderr);
  is_line_shown = false;
}

}  // namespace lockstep::program
