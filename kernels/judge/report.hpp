// The verdict as text and as JSON: a table of cases, findings, the known mistake that explains
// them, and times beside their floors.
#pragma once

#include "kernels/judge/batches.hpp"
#include "kernels/judge/verdict.hpp"
#include "reference/base/judged.hpp"

namespace lockstep::judging {

struct JudgedCase {
  Case which;
  CaseRuns runs;
  Judgement judgement;
};

/// A timed case: its twin (the same case with other numbers, judged untimed too), and the timed
/// calls, which get the numbers of both in turns.
struct TimedCase {
  std::size_t first = 0;  ///< index of the case in Report::cases
  JudgedCase twin;
  TimedRuns calls;
  bool fewer_rows = false;
  std::vector<Finding> findings{};  ///< about the calls
};

/// The results of a case's rows in other batches, and the findings about them.
struct BatchedCase {
  std::size_t first = 0;  ///< of the cases
  BatchFindings batches;
};

struct Report {
  const JudgedKernel& operation;
  const JudgeRequest& request;
  const CaseOptions& options;
  const Machine& machine;
  const std::vector<JudgedCase>& cases;
  const std::vector<TimedCase>& timed;
  const std::vector<BatchedCase>& batched;
  double wall_s;
};

JudgeReport finished(const Report& report);

}  // namespace lockstep::judging
