// The subjects of a run by their names: a policy, `oracle:POLICY` or `exec:COMMAND`, each with what
// checks it.
#pragma once

#include <memory>
#include <string>

#include "cache_sim/check/closed_subject.hpp"
#include "cache_sim/check/outcomes.hpp"
#include "cache_sim/check/run_options.hpp"
#include "cache_sim/model/label_state.hpp"
#include "reference/base/result.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

/// A subject with its labels, auditor and totals.
struct SubjectSeat {
  std::string name;
  std::size_t rank = 0;
  bool is_oracle = false;
  bool is_child = false;
  Capabilities capabilities;  ///< what it is asked; a child may answer that it does not support it
  std::unique_ptr<LabelState> labels;
  std::unique_ptr<Subject> subject;
  std::unique_ptr<Auditor> auditor;       // after the subject: it must go first
  std::unique_ptr<ClosedSubject> closed;  // of a subject that shows nothing inside
  SubjectTotals totals;
  Findings findings;
};

/// Starts a subject. The error is bad input (an unknown name, a config field that the policy does
/// not use), the environment (a child that does not start) or, with `finding` set, a child's wrong
/// answer to its greeting.
Result<std::unique_ptr<SubjectSeat>> start_subject(const std::string& name,
                                                   const RunOptions& options);

}  // namespace lockstep::cache_sim
