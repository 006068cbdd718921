// Turns the runs of a case into findings, errors beside the yardstick, and descriptions of the
// wrong elements' positions.
#pragma once

#include "kernels/judge/run.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep::judging {

/// One state or output beside its definition.
struct Measured {
  std::string name;
  Verdict verdict;
  std::string where;  ///< positions of the wrong elements
};

struct Judgement {
  std::vector<Finding> findings;  ///< sorted by kind
  std::vector<Measured> measured;
  std::vector<std::string> agrees_with;  ///< ids of mistakes that give the candidate's answer
  std::string stage;
  Answer answer;  ///< of the first run; elements that must not be written count as right

  bool wrong() const;  ///< a state or output is beyond the yardstick
};

Judgement judgement_of(const JudgedKernel& operation, const Case& c, const CaseRuns& runs);

/// Findings of a case's timed calls. The results of the first wrong call, which had this case's
/// input, are judged: values beyond the yardstick, or other bits than in the untimed run. A time
/// that the judge's clock contradicts is a finding too.
std::vector<Finding> findings_of_calls(const JudgedKernel& operation, const Case& c,
                                       const TimedRuns& calls, std::string_view call);

/// Whether the candidate's answer is that of the definition with `mistake`; false if the case
/// cannot tell.
bool agrees(const JudgedKernel& operation, const Case& c, const Answer& candidate,
            std::string_view mistake);

}  // namespace lockstep::judging
