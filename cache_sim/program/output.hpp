// What commands say: to standard output what they found, to standard error one sentence where they
// cannot go on. Texts from outside are shown so that no terminal takes orders from them.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "reference/base/result.hpp"

namespace lockstep::program {

class Command;

/// Writes the text, printable(), to standard output.
void print_text(const std::string& text);

template <class... Values>
void print(fmt::format_string<Values...> format, Values&&... values) {
  print_text(fmt::format(format, std::forward<Values>(values)...));
}

/// The option --quiet: neither progress nor what `note` writes.
void add_quiet(Command& command);
bool is_quiet();

/// What stands beside the findings: summaries, digests, hints.
template <class... Values>
void note(fmt::format_string<Values...> format, Values&&... values) {
  if (!is_quiet()) print_text(fmt::format(format, std::forward<Values>(values)...));
}

/// Whether what is written there (STDOUT_FILENO, STDERR_FILENO) can be moved about in and coloured.
bool is_terminal(int stream);

/// Red on a terminal, unless NO_COLOR is set (https://no-color.org).
void print_red(std::string_view text);

/// Refuses an output that names an input, or what another output names: one would be lost. Empty
/// paths are none; a device or a pipe may be written twice.
Result<void> expect_apart(const std::vector<std::string>& read,
                          const std::vector<std::string>& written);

/// Says on standard error why a command ends, and gives its exit status.
int refuse(const Error& error);

/// Before anything else: a standard stream that its caller closed stays unusable, instead of being
/// the next file that is opened.
void hold_closed_streams();

/// The program's exit status: `status`, or where that is 0 and not all of the output could be
/// written, that of the environment.
int end_output(int status);

}  // namespace lockstep::program
