// Errors of the outside world (files, arguments, children) are values: Result<T> = T or one clear
// sentence.
#pragma once

#include <optional>
#include <string>
#include <tl/expected.hpp>
#include <utility>

#include "reference/base/finding.hpp"

namespace lockstep {

struct Error {
  std::string text;                      ///< one sentence: file, line and field where they exist
  ExitStatus status = kExitBadInput;     ///< what the program exits with
  std::optional<FindingKind> finding{};  ///< set where the failure of a subject is itself a finding
};

template <class T>
using Result = tl::expected<T, Error>;

inline tl::unexpected<Error> fail(std::string text, ExitStatus status = kExitBadInput) {
  return tl::unexpected<Error>(Error{.text = std::move(text), .status = status});
}

/// A subject's failure, which the run reports as a finding of this kind.
inline tl::unexpected<Error> fail_as(FindingKind kind, std::string text) {
  return tl::unexpected<Error>(
      Error{.text = std::move(text), .status = exit_status(kind), .finding = kind});
}

}  // namespace lockstep
