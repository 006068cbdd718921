// Errors of the outside world (files, arguments, child processes) are values: Result<T> is a T or
// an Error with one sentence.
#pragma once

#include <optional>
#include <string>
#include <tl/expected.hpp>
#include <utility>

#include "reference/base/finding.hpp"

namespace lockstep {

struct Error {
  std::string text;                   ///< one sentence, with file, line and field if there are any
  ExitStatus status = kExitBadInput;  ///< exit status of the program
  std::optional<FindingKind> finding{};  ///< set if the failure of a subject is itself a finding
};

template <class T>
using Result = tl::expected<T, Error>;

inline tl::unexpected<Error> fail(std::string text, ExitStatus status = kExitBadInput) {
  return tl::unexpected<Error>(Error{.text = std::move(text), .status = status});
}

/// The error of a subject's failure, which the run reports as a finding of this kind.
inline tl::unexpected<Error> fail_as(FindingKind kind, std::string text) {
  return tl::unexpected<Error>(
      Error{.text = std::move(text), .status = exit_status(kind), .finding = kind});
}

}  // namespace lockstep
