// Runs a candidate in a process of its own, so that the judge survives whatever the candidate does.
// The judge keeps everything that decides a verdict: inputs, results, the clock, and the device's
// copy rate, which is measured before the candidate is loaded.
//
// A request and its answer are one line of JSON each, over pipes, with the same number `n`.
// Contents of tensors go through shared memory; B is the case's bytes. The process is Python
// (child.py) or a fork of this program that loads a shared library (library.cpp). Requests, their
// fields, and the fields of the answers:
//
//   request                          answer
//   machine   copy_rate              device gpu copy_gbps cold_bytes; or refused status
//   ping                             (nothing)
//   load                             refused status, if the candidate cannot be loaded
//   case      tensors scalars bytes  (nothing)
//   run                              outcome message stages strayed. Shared memory [0, B) holds the
//                                    arguments before the call, and after it; stages follow at B
//   sets      count                  (nothing). [0, 2 B) holds two inputs for `count` sets of
//                                    memory; no tensor is far
//   place     first                  (nothing). Set i gets input (first + i) % 2
//   record                           how: a description of the timing
//   calls                            outcome message device_us. Every set is called once
//   fetch     index                  (nothing). [2 B, 3 B) gets the memory of set `index`
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
  raised,       ///< the candidate throws, or returns an error
  died,
  silent,
  garbled,  ///< the process's answer does not fit the request
  not_run,  ///< an earlier case has used up the time, or no process could be started
};

struct CaseRuns {
  Outcome outcome = Outcome::not_run;
  std::string message;
  std::vector<Bytes> runs;  ///< all allocations of the case, after each run
  double run_s = 0;         ///< seconds of the last run, with the copies of its inputs
  NamedStages stages;       ///< stages that a Python candidate returned
  std::string strayed;      ///< a far tensor between whose rows something was written
};

/// The fills of a case's three runs: twice the same, to find results that vary; then other bytes in
/// places that must not be read, to find results that depend on them.
constexpr Fill kRunFills[] = {Fill::poison, Fill::poison, Fill::finite};
constexpr std::size_t kTimedRun = 2;  ///< timed calls start from the bytes of this run

/// A case and its untimed runs, whose results are the expected ones of timed calls. Timed calls get
/// two such inputs in turns.
struct TimedInput {
  const Case& which;
  const CaseRuns& runs;
};

struct TimedRuns {
  Outcome outcome = Outcome::not_run;
  std::string message;
  double us = 0;           ///< microseconds of a call
  std::string how;         ///< description of the timing
  int compared = 0;        ///< calls whose results were compared with those of the untimed run
  int wrong = 0;           ///< compared calls with other results
  int wrong_input = 0;     ///< input (0 or 1) of the first wrong call
  Bytes wrong_bytes;       ///< memory that the first wrong call left
  double reported_us = 0;  ///< the process's time, if the judge's clock contradicts it; else 0
};

struct Machine {
  std::string device;
  double copy_gbps = 0;  ///< bytes read plus bytes written per second
  double most_gbps =
      0;  ///< upper bound of any kernel's rate; on a CPU: copies of all threads in their caches
  bool on_gpu = false;
  std::int64_t cold_bytes = 0;  ///< inputs of so many bytes together exceed all caches
};

bool is_library(const std::string& candidate);

/// The finding about a candidate whose runs ended as `outcome` says; nothing if they ended well.
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
  /// Starts a process and returns its answer to `machine`. The candidate is not loaded yet.
  Result<Json> launch(bool with_copy_rate);
  void restart();
  /// Sends a request and returns the answer; nothing if none came, and then outcome_ and message_
  /// say why.
  std::optional<Json> ask(const std::string& what, Json request = Json::object());
  /// The same for the first requests, for which a refusal or silence is an error of the command.
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
  Subreaper reaper_;  // ends processes that a candidate leaves behind
  std::optional<ChildProcess> process_;
  Machine machine_;
  std::chrono::milliseconds left_{};  ///< rest of the time-out
  Seconds asked_for_{};               ///< duration of the last exchange
  double ping_s_ = 0;                 ///< duration of an exchange without any work
  std::int64_t number_ = 0;           ///< number of the last request
  Outcome outcome_ = Outcome::done;
  std::string message_;
};

// --- Inside the process --------------------------------------------------------------------------

/// The main function of a fork that loads a shared library; returns the exit status of the process.
int run_library(const std::string& operation, const JudgeRequest& request, int shared);

extern const char* const kChildScript;  ///< the text of child.py

}  // namespace lockstep::judging
