// Runs a candidate in a process of its own, so that the judge survives whatever it does. Everything
// that decides a verdict stays with the judge: inputs, results, the clock, and the device's rate,
// which is measured before the candidate is loaded.
//
// A request and its answer are a line of JSON each, over pipes, with the same number `n`; numbers
// of tensors go through shared memory. The process is Python (child.py) or a fork of this program
// that loads a shared library (library.cpp); both answer to
//
//   request                          answer                        shared memory
//   machine   copy_rate              device gpu copy_gbps cold_bytes, or refused status
//   ping
//   load                             refused status, where the candidate cannot be loaded
//   case      tensors scalars bytes
//   run                              outcome message stages        [0, bytes): inputs, and what has
//                                                                  become of them; stages after
//   sets      count                                                [0, 2 bytes): two inputs
//   place     first                                                set i: input (first + i) % 2
//   record (how), calls (outcome message device_us: every set once), fetch index (a set, after
//   the two inputs)
#pragma once

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "kernels/judge/operation.hpp"
#include "kernels/judge/shared_memory.hpp"
#include "reference/base/child_process.hpp"
#include "reference/base/leftovers.hpp"

namespace lockstep::judging {

enum class Outcome : std::uint8_t {
  done,
  unsupported,  ///< the candidate refuses the case
  raised,       ///< it throws, or returns an error
  died,
  silent,
  garbled,  ///< the process answers something else than it was asked
  not_run,  ///< an earlier case has used up the time, or no process could be started for it
};

struct CaseRuns {
  Outcome outcome = Outcome::not_run;
  std::string message;
  std::vector<Bytes> runs;  ///< all allocations of the case, after each run
  double run_s = 0;         ///< of the last run, with the copies of its inputs
  NamedStages stages;       ///< that a Python candidate gave back
};

/// The fills of a case's runs: twice the same, then with other bytes where nothing may be read.
constexpr Fill kRunFills[] = {Fill::poison, Fill::poison, Fill::finite};
constexpr std::size_t kTimedRun = 2;  ///< timed calls start from the bytes of this run

/// A case, and what an untimed run made of it: the two inputs that timed calls get in turns.
struct TimedInput {
  const Case& which;
  const CaseRuns& runs;
};

struct TimedRuns {
  Outcome outcome = Outcome::not_run;
  std::string message;
  double us = 0;           ///< of a call
  std::string how;         ///< it was timed
  int compared = 0;        ///< calls whose results were compared with those of the untimed run
  int wrong = 0;           ///< that were others
  int wrong_input = 0;     ///< 0 or 1: the first wrong call's
  Bytes wrong_bytes;       ///< what it left
  double reported_us = 0;  ///< where the process's clock and the judge's disagree: what it said
};

struct Machine {
  std::string device;
  double copy_gbps = 0;  ///< bytes read plus bytes written per second
  double most_gbps =
      0;  ///< that no kernel is faster than: on a CPU, of all threads in their caches
  bool on_gpu = false;
  std::int64_t cold_bytes = 0;  ///< inputs so large together are in no cache
};

bool is_library(const std::string& candidate);

/// What the end of its runs says of a candidate; nothing where they ended well.
std::optional<FindingKind> kind_of(Outcome outcome);

class CandidateProcess {
 public:
  /// Starts the process, measures the machine, and loads the candidate.
  static Result<std::unique_ptr<CandidateProcess>> start(const JudgedKernel& operation,
                                                         const JudgeRequest& request,
                                                         bool with_copy_rate);

  const Machine& machine() const { return machine_; }
  /// The case with the first of kRunFills; in another process where an earlier case has ended the
  /// last one, or has left it without a GPU.
  Result<CaseRuns> run(const Case& c, std::size_t count = std::size(kRunFills));
  /// Rounds of calls over sets of inputs that take turns in other memory than before, so that
  /// nothing can be remembered and caches are cold; the results of calls are compared.
  Result<TimedRuns> time(const TimedInput& one, const TimedInput& other, std::uint64_t seed);
  /// Calls that are made again in the same memory, on a GPU by a captured graph, after it has got
  /// the other input; their results are compared.
  Result<TimedRuns> repeat(const TimedInput& one, const TimedInput& other, std::uint64_t seed);

 private:
  using Json = nlohmann::ordered_json;
  using Seconds = std::chrono::duration<double>;

  CandidateProcess(const JudgedKernel& operation, JudgeRequest request, SharedMemory shared,
                   SharedMemory script)
      : operation_(operation),
        request_(std::move(request)),
        shared_(std::move(shared)),
        script_(std::move(script)) {}

  Result<void> begin(bool with_copy_rate);
  /// Starts a process; its answer to `machine`. The candidate is not loaded yet.
  Result<Json> launch(bool with_copy_rate);
  void restart();
  /// The answer; nothing where none came: outcome_ and message_ say why.
  std::optional<Json> ask(const std::string& what, Json request = Json::object());
  /// Likewise of the first requests, where a refusal or silence ends everything.
  Result<Json> ask_first(const std::string& what, Json request = Json::object());
  Result<void> announce(const Case& c, std::int64_t room);
  bool write_inputs(const Case& c, Fill fill, std::int64_t offset) const;
  NamedStages read_stages(const Json& sizes, std::int64_t offset) const;
  template <class Runs>
  Runs failed(Runs runs) const;
  /// Memory for so many calls, and the inputs that they get in turns.
  Result<void> make_sets(std::int64_t count, const TimedInput& one, const TimedInput& other);
  /// One round; false where the process has not gone through with it.
  bool round(int number, TimedRuns& timed, double& device_us);
  bool compare(int number, std::int64_t sets, std::uint64_t seed, const TimedInput& one,
               const TimedInput& other, TimedRuns& timed);

  const JudgedKernel& operation_;
  const JudgeRequest request_;
  SharedMemory shared_, script_;
  Subreaper reaper_;  // ends what a candidate leaves behind, after the process
  std::optional<ChildProcess> process_;
  Machine machine_;
  std::chrono::milliseconds left_{};  ///< of the time-out
  Seconds asked_for_{};               ///< how long the last exchange took
  double ping_s_ = 0;                 ///< an exchange without any work
  std::int64_t number_ = 0;           ///< of the last request
  Outcome outcome_ = Outcome::done;
  std::string message_;
};

// --- Inside the process
// ---------------------------------------------------------------------------

/// What a fork with a shared library does; the exit status of the process.
int run_library(const std::string& operation, const JudgeRequest& request, int shared);

extern const char* const kChildScript;  ///< child.py

}  // namespace lockstep::judging
