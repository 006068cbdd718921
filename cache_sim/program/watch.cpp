#include "cache_sim/program/watch.hpp"

#include <fmt/format.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>

#include "reference/base/finding.hpp"
#include "reference/base/leftovers.hpp"

namespace lockstep::program {
namespace {

constexpr int kLooks = 4;  // how often the watch looks within the limit
// The stack of the signal handlers: a recursion may have used up the normal stack.
constexpr std::size_t kStackSize = std::size_t{64} * 1024;

// Data that a signal handler may read.
std::atomic<std::int64_t> trace_number{1};
std::atomic<const char*> doing{"it is played"};
std::atomic<std::int64_t> beats{0};
std::atomic<std::uint64_t> search_seed{0};
std::atomic<std::int64_t> beats_seen{-1};
std::atomic<int> looks{0};
std::atomic<bool> interrupted{false};
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

/// Prints the fate of the trace and ends the program. It allocates nothing.
[[noreturn]] void leave(const char* fate, ExitStatus status) {
  std::array<char, 200> text{};
  const auto end =
      fmt::format_to_n(text.data(), text.size(), "lockstep: trace {} of seed {} {} while {}\n",
                       trace_number.load(), search_seed.load(), fate, doing.load());
  [[maybe_unused]] const auto written =
      ::write(STDERR_FILENO, text.data(), std::min(end.size, text.size()));
  ::_exit(static_cast<int>(status));
}

void on_death(int) {
  leave("kills the program", kExitDiffers);
}

void on_look(int) {
  const std::int64_t now = beats.load();
  if (beats_seen.exchange(now) != now) looks = 0;
  if (++looks > kLooks) leave("has not ended", kExitLiveness);
}

void on_interrupt(int signal) {
  if (!interrupted.exchange(true)) return;
  clean_up();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction now {};
  if (::sigaction(signal, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction ours {};
  ours.sa_handler = handler;
  ours.sa_flags = SA_RESTART | SA_ONSTACK;
  ::sigaction(signal, &ours, nullptr);
}

}  // namespace

void watch_search(std::uint64_t seed, std::chrono::milliseconds limit) {
  search_seed = seed;
  static std::array<char, kStackSize> stack;
  const stack_t own{.ss_sp = stack.data(), .ss_flags = 0, .ss_size = stack.size()};
  ::sigaltstack(&own, nullptr);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) handle(signal, on_death);
  handle(SIGPROF, on_look);
  const auto between = std::max<std::int64_t>(
      1000, std::chrono::duration_cast<std::chrono::microseconds>(limit).count() / kLooks);
  const timeval every{between / 1'000'000, between % 1'000'000};
  const itimerval timer{every, every};
  ::setitimer(ITIMER_PROF, &timer, nullptr);
}

void watch_trace(std::int64_t number, const char* what) {
  trace_number = number;
  doing = what;
  ++beats;
}

void catch_interrupts() {
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) != 0 || now.sa_handler == SIG_IGN) continue;
    struct sigaction ours {};
    ours.sa_handler = on_interrupt;
    ours.sa_flags = SA_RESTART;
    ::sigaction(signal, &ours, nullptr);
  }
}

bool is_interrupted() {
  return interrupted;
}

}  // namespace lockstep::program
