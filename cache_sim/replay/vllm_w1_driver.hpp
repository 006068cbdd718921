// The driver of `vllm-w1`: vLLM's synchronous scheduler in its smallest form, with at most 8,192
// tokens and 32 requests in a step, first come first served. It is the loop around vLLM 0.33's own
// KVCacheManager whose decisions fixtures/vllm_golden/ records.
//
//   1  the waiting queue is filled up to 64 requests
//   2  the running requests, in order, get tokens within the budget; one that finds no blocks
//      preempts the last running request, which goes to the front of the waiting queue
//   3  unless a request was preempted, waiting requests are admitted, until one has no room
//   4  the forward; a request whose tokens are all computed decodes the next one, and the 32nd
//      decoded token ends the request
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "cache_sim/replay/workload_driver.hpp"
#include "cache_sim/workloads/vllm_w1.hpp"

namespace lockstep::cache_sim {

inline constexpr std::uint32_t kVllmW1Budget = 8192;
inline constexpr std::size_t kVllmW1Running = 32;
inline constexpr std::size_t kVllmW1Waiting = 64;

/// A `Cache` of the loop has these members. `number` is that of the request.
///   bool look_up(number, known)             false: the run stops
///   std::uint32_t cached(number)            the hit of the last look-up
///   std::optional<std::uint32_t> extend(number, known, n)
///                                           the tokens that got blocks; nothing: there are none
///   void admitted(number, step)             the first extend has succeeded
///   void preempt(number), finish(number), forward()
///   bool stopped()
template <class Cache>
class VllmW1Loop {
 public:
  VllmW1Loop(const VllmW1& workload, Cache& cache)
      : workload_(workload), cache_(cache), progress_(workload.requests.size()) {}

  /// Plays all requests and returns the number of steps.
  std::int64_t run() {
    const auto count = static_cast<std::uint32_t>(workload_.requests.size());
    while ((!running_.empty() || !waiting_.empty() || next_ < count) && !cache_.stopped()) step();
    return steps_;
  }

 private:
  struct Progress {
    std::uint32_t known = 0;  ///< prompt and decoded tokens
    std::uint32_t computed = 0;
    std::uint32_t scheduled = 0;  ///< tokens scheduled in this step
  };

  void step() {
    ++steps_;
    while (waiting_.size() < kVllmW1Waiting && next_ < workload_.requests.size()) {
      progress_[next_].known = workload_.requests[next_].prompt_size;
      waiting_.push_back(next_++);
    }
    budget_ = kVllmW1Budget;
    scheduled_.clear();
    if (serve_running()) admit_waiting();
    cache_.forward();
    for (const std::uint32_t number : scheduled_) finish_step(number);
    std::erase_if(running_, [&](std::uint32_t number) { return progress_[number].known == 0; });
  }

  /// False if a request was preempted.
  bool serve_running() {
    bool preempted = false;
    for (std::size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
      const std::uint32_t number = running_[i];
      Progress& request = progress_[number];
      std::optional<std::uint32_t> n;
      for (;;) {
        n = cache_.extend(number, request.known,
                          std::min(request.known - request.computed, budget_));
        if (n || cache_.stopped()) break;
        preempted = true;
        const std::uint32_t last = running_.back();
        running_.pop_back();
        cache_.preempt(last);
        progress_[last].computed = 0;
        waiting_.push_front(last);
        if (last == number) return false;
      }
      if (n) schedule(number, *n);
    }
    return !preempted;
  }

  void admit_waiting() {
    while (budget_ > 0 && running_.size() < kVllmW1Running && !waiting_.empty()) {
      const std::uint32_t number = waiting_.front();
      Progress& request = progress_[number];
      if (!cache_.look_up(number, request.known)) return;
      const std::uint32_t cached = cache_.cached(number);
      const std::optional<std::uint32_t> n =
          cache_.extend(number, request.known, std::min(request.known - cached, budget_));
      if (!n || *n == 0) return cache_.preempt(number);
      cache_.admitted(number, steps_);
      waiting_.pop_front();
      running_.push_back(number);
      request.computed = cached;
      schedule(number, *n);
    }
  }

  void schedule(std::uint32_t number, std::uint32_t n) {
    if (n == 0) return;
    progress_[number].scheduled = n;
    budget_ -= n;
    scheduled_.push_back(number);
  }

  void finish_step(std::uint32_t number) {
    Progress& request = progress_[number];
    request.computed += request.scheduled;
    if (request.computed != request.known) return;
    const VllmW1Request& asked = workload_.requests[number];
    if (++request.known != asked.tokens.size()) return;
    cache_.finish(number);
    request.known = 0;  // it leaves `running_`
  }

  const VllmW1& workload_;
  Cache& cache_;
  std::vector<Progress> progress_;
  std::vector<std::uint32_t> running_;
  std::vector<std::uint32_t> scheduled_;
  std::deque<std::uint32_t> waiting_;
  std::uint32_t next_ = 0;
  std::uint32_t budget_ = 0;
  std::int64_t steps_ = 0;
};

/// Plays the workload by operations. The outcome has a line for each first admission, as in the
/// golden files: step, request, prefix, prompt, cached tokens, junction, and the columns added by
/// group.
DrivenOutcome drive(const VllmW1& workload, const DriveSession& session);

}  // namespace lockstep::cache_sim
