// Runs a candidate on cases in a child process, so that whatever it does, the judge lives on. Cases
// and answers go through files in a temporary folder, whether the child is Python (child.py) or a
// fork of this program that loads a shared library.
//
//   run.json           the cases: tensors, scalars, how often, what is timed
//   in_I_F.bin         the allocations of case I, one behind the other, with fill F
//   out_I_R.bin        the same behind run R
//   done_I.json        {"status": "done" | "unsupported" | "raised", "message", "time_us", "how"}
//   stages_I.json      {"NAME": bytes, …}: named stages of case I, float32 in stages_I.bin
//   environment.json   {"text", "status"}: why nothing could be run at all
//   machine.json       {"device", "copy_gbps"}
#pragma once

#include "kernels/judge/operation.hpp"

namespace lockstep::judging {

enum class Outcome : std::uint8_t { done, unsupported, raised, died, silent };

struct CaseRuns {
  Outcome outcome = Outcome::died;
  std::string message;
  std::vector<Bytes> runs;  ///< all allocations of the case, behind each run
  double time_us = 0;       ///< median; 0: not timed
  std::string how;          ///< was timed
  NamedStages stages;       ///< that a Python candidate gave back
};

struct CandidateRuns {
  std::string device;
  double copy_gbps = 0;  ///< bytes read plus bytes written per second
  bool on_gpu = false;
  std::vector<CaseRuns> cases;
};

/// The fills of a case's runs: twice the same, then with other bytes where nothing may be read.
constexpr Fill kRunFills[] = {Fill::poison, Fill::poison, Fill::finite};

bool is_library(const std::string& candidate);

Result<CandidateRuns> run_candidate(const JudgedKernel& operation, const std::vector<Case>& cases,
                                    const JudgeRequest& request);

// --- Inside the child ----------------------------------------------------------------------------

/// What a fork with a shared library does; the exit status of the child.
int run_library(const JudgedKernel& operation, const std::vector<Case>& cases,
                const JudgeRequest& request, const std::string& folder);

void write_child_file(const std::string& path, const std::string& content);

extern const char* const kChildScript;  ///< child.py

}  // namespace lockstep::judging
