// How the help of every command ends: the exit statuses that the command can have, and an example
// that works in the root of a checkout. A test runs each example and holds each status to the
// contract (properties/cache_sim/program/help_check.py).
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep::program {

/// One exit status, and what it means of this command.
struct StatusHelp {
  int status;
  std::string meaning;
};

/// The statuses of a command that plays traces.
std::vector<StatusHelp> statuses_of_runs();

/// A command, and the status that it ends with.
struct Example {
  std::string command;
  int status = 0;
};

/// Refuses what is no finite number or below `least`, in a sentence.
CLI::Validator number_from(double least);
/// CLI11 would take -1 as a large number.
CLI::Validator whole_number();

void end_help(CLI::App& command, const std::vector<StatusHelp>& statuses, const Example& example);

}  // namespace lockstep::program
