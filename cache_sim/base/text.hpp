// Makes text from outside (file names, names in files, answers of a child) safe to print.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::cache_sim {

/// The text in a form that is safe on a terminal: UTF-8 with newlines and tabs. Other control
/// characters (C0, DEL, C1), which a terminal would execute, and bytes that are not UTF-8 are
/// written as `\x1b`.
std::string printable(std::string_view text);

}  // namespace lockstep::cache_sim
