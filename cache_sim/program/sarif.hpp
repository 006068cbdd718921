// Findings as SARIF 2.1.0 (OASIS, 2020), which GitHub's code scanning and editors show beside the
// lines of a trace.
#pragma once

#include <string>
#include <vector>

#include "reference/base/finding.hpp"

namespace lockstep::program {

struct SarifResult {
  FindingKind kind;
  std::string text;
  std::string file;       ///< as it was given on the command line
  std::int64_t line = 0;  ///< 0: the whole file
};

std::string sarif_text(const std::vector<SarifResult>& results);

}  // namespace lockstep::program
