// Turns the runs of a case into findings, errors beside the yardstick, and the place of what is
// wrong.
#pragma once

#include "kernels/judge/run.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep::judging {

/// One state or output beside its definition.
struct Measured {
  std::string name;
  Verdict verdict;
  std::string where;  ///< of what is wrong
};

struct Judgement {
  std::vector<Finding> findings;  ///< in the order of their kinds
  std::vector<Measured> measured;
  std::vector<std::string> agrees_with;  ///< ids of mistakes
  std::string stage;
  Answer answer;  ///< of the first run, what it must not write replaced by the truth

  bool wrong() const;  ///< a state or output is beyond the yardstick
};

Judgement judgement_of(const JudgedKernel& operation, const Case& c, const CaseRuns& runs);

/// What timed calls say, of whose results the first wrong ones, on this case's inputs, are judged:
/// numbers beyond the yardstick, or other bits than without a clock; and what the candidate's
/// process said of their time. `call` names one of them.
std::vector<Finding> findings_of_calls(const JudgedKernel& operation, const Case& c,
                                       const TimedRuns& calls, std::string_view call);

/// Whether a definition with a mistake is what the candidate computes; false where it cannot be
/// told.
bool agrees(const JudgedKernel& operation, const Case& c, const Answer& candidate,
            std::string_view mistake);

}  // namespace lockstep::judging
