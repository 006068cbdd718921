// Findings in formats of programs that show them beside the lines of a file: SARIF 2.1.0 (OASIS,
// 2020) for code scanning and editors, and the `::error` lines of a GitHub Actions log.
#pragma once

#include <string>
#include <vector>

#include "reference/base/finding.hpp"
#include "reference/base/result.hpp"

namespace lockstep::program {

class Command;

struct Annotation {
  FindingKind kind;
  std::string text;
  std::string file;       ///< as given on the command line
  std::int64_t line = 0;  ///< from 1; 0: the whole file
};

/// The outputs of a command for programs that annotate files.
struct AnnotationOptions {
  std::string sarif_path;  ///< empty: no file
  bool github = false;     ///< prints an `::error` line for each finding

  void add_to(Command& command);
  void print(const std::vector<Annotation>& annotations) const;
  Result<void> write(const std::vector<Annotation>& annotations) const;
};

std::string sarif_text(const std::vector<Annotation>& annotations);

/// A line `::error file=F,line=L,title=KIND::TEXT` for each annotation: GitHub's workflow command,
/// with its escapes.
std::string github_text(const std::vector<Annotation>& annotations);

}  // namespace lockstep::program
