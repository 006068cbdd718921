// The end of every command's help: its exit statuses, and an example that works in the root of a
// checkout. A test runs each example and compares the statuses with the contract
// (properties/cache_sim/program/help_check.py).
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep::program {

/// An exit status, and its meaning for this command.
struct StatusHelp {
  int status;
  std::string meaning;
};

/// The exit statuses of a command that plays traces.
std::vector<StatusHelp> statuses_of_runs();

/// A command, and the exit status that it has.
struct Example {
  std::string command;
  int status = 0;
};

/// Accepts finite numbers that are at least `least`; the error is a sentence.
CLI::Validator number_from(double least);
/// Accepts whole numbers that are not negative. (CLI11 would read -1 as a large number.)
CLI::Validator whole_number();

void end_help(CLI::App& command, const std::vector<StatusHelp>& statuses, const Example& example);

}  // namespace lockstep::program
