// The commands of the `lockstep` program. Each function adds a command to the parser; the callback
// of the command writes the exit status to `status`.
#pragma once

#include "reference/base/result.hpp"

namespace lockstep::program {

class Command;

void add_replay(Command& app, int& status);
void add_check_log(Command& app, int& status);
void add_judge(Command& app, int& status);
void add_compare(Command& app, int& status);
void add_report(Command& app, int& status);
void add_list(Command& app, int& status);
void add_explore(Command& app, int& status);
void add_shrink(Command& app, int& status);
void add_completion(Command& app, int& status);

/// Whether this is the program with the judge, and what to say where it is neither this one nor
/// beside it.
bool has_judge();
Error no_judge();

}  // namespace lockstep::program
