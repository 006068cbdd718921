// The commands of the `lockstep` program. Each function adds a command to the parser; the callback
// of the command writes the exit status to `status`.
#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::program {

void add_replay(CLI::App& app, int& status);
void add_check_log(CLI::App& app, int& status);
void add_judge(CLI::App& app, int& status);
void add_compare(CLI::App& app, int& status);
void add_report(CLI::App& app, int& status);
void add_list(CLI::App& app, int& status);
void add_explore(CLI::App& app, int& status);
void add_shrink(CLI::App& app, int& status);
void add_completion(CLI::App& app, int& status);

}  // namespace lockstep::program
