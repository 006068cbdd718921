// The commands of the `lockstep` program. Each adds its words to the parser and leaves the exit
// status where the parser's callback can put it.
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
