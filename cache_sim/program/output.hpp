// Output of commands: results to standard output, and one sentence to standard error if a command
// cannot go on. Texts from outside are escaped, so that a terminal executes nothing in them.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::program {

class Command;

/// Writes printable(text) to standard output.
void print_text(const std::string& text);

template <class... Values>
void print(fmt::format_string<Values...> format, Values&&... values) {
  print_text(fmt::format(format, std::forward<Values>(values)...));
}

/// Adds the option --quiet, which suppresses progress and the output of `note`.
void add_quiet(Command& command);
bool is_quiet();

/// Prints texts beside the findings: summaries, digests, hints.
template <class... Values>
void note(fmt::format_string<Values...> format, Values&&... values) {
  if (!is_quiet()) print_text(fmt::format(format, std::forward<Values>(values)...));
}

/// Whether the stream (STDOUT_FILENO or STDERR_FILENO) is a terminal with cursor movement and
/// colours.
bool is_terminal(int stream);

/// Prints red on a terminal, unless NO_COLOR is set (https://no-color.org).
void print_red(std::string_view text);

/// An error if an output path names an input, or if two outputs name one file, because one would be
/// lost. Empty paths are skipped. A device or a pipe may be named twice.
Result<void> expect_apart(const std::vector<std::string>& read,
                          const std::vector<std::string>& written);

/// Prints the reason on standard error, and returns the exit status.
int refuse(const Error& error);

/// Keeps standard streams that the caller closed unusable; otherwise the next file to be opened
/// would become a standard stream. Call it before anything else.
void hold_closed_streams();

/// The exit status of the program: `status`; if that is 0 and not all output could be written, the
/// status of an environment error.
int end_output(int status);

}  // namespace lockstep::program
