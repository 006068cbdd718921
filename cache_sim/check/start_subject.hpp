// Starts the subjects of a run by name: a policy, `oracle:POLICY` or `exec:COMMAND`, each together
// with its checks.
#pragma once

#include <memory>
#include <string>

#include "cache_sim/check/closed_subject.hpp"
#include "cache_sim/check/outcomes.hpp"
#include "cache_sim/check/run_options.hpp"
#include "cache_sim/model/fidelity.hpp"
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
  Capabilities capabilities;  ///< it is asked operations of these; a child may answer `unsupported`
  std::unique_ptr<LabelState> labels;
  std::unique_ptr<NumberedPools> numbers;  // null at label fidelity
  std::unique_ptr<NumberedBlocks> blocks;  // the same of a policy whose memory is blocks
  RowTeller* rows() const {
    return numbers ? static_cast<RowTeller*>(numbers.get()) : blocks.get();
  }
  std::unique_ptr<Subject> subject;
  std::unique_ptr<Auditor> auditor;       // after the subject, to be destroyed before it
  std::unique_ptr<ClosedSubject> closed;  // only for a child
  SubjectTotals totals;
  Findings findings;
};

/// Starts a subject. The error is bad input (an unknown name, a config field that the policy does
/// not use), the environment (a child that does not start) or, with `finding` set, a wrong answer
/// of a child to its greeting.
Result<std::unique_ptr<SubjectSeat>> start_subject(const std::string& name,
                                                   const RunOptions& options);

}  // namespace lockstep::cache_sim
