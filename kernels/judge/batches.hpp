// The rows of a case in other batches: alone, in another order, beside copies of themselves. The
// bits that a row leaves are to be the same in each (`--batch-invariant`).
#pragma once

#include "kernels/judge/run.hpp"

namespace lockstep::judging {

/// Numbers of a case's rows, in the order in which they stand in a batch.
using RowList = std::vector<std::int64_t>;

/// The number of rows of a case; 0 if its operation has none.
std::int64_t row_count(const Case& c);

/// The same rows in another batch. Pools stay as they are; a row that comes again has copies of its
/// slots, after the pool's last one.
Case with_rows(const Case& c, const RowList& rows);

/// The same memory with every second row as padding, or without keys: what a captured graph may be
/// launched on again. Nothing where a row cannot be taken out so.
std::optional<Case> with_fewer_rows(const Case& c);

/// The results of a case's rows in other batches.
struct BatchFindings {
  std::int64_t batches = 0;  ///< that were compared
  std::vector<Finding> findings;
};

/// Runs the rows of a case that has passed its own runs in other batches, and compares their bits.
/// A difference is reported with the smallest pair of batches that still shows it.
Result<BatchFindings> compare_batches(const Case& c, const CaseRuns& runs,
                                      CandidateProcess& process);

}  // namespace lockstep::judging
