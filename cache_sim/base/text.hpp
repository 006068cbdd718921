// Makes text from outside (file names, names in files, answers of a child) safe to print.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::cache_sim {

/// The text as a terminal may get it: UTF-8 with newlines and tabs. Every byte of another control
/// character (C0, DEL, C1: a terminal takes orders from them) and every byte that is not UTF-8 is
/// written as `\x1b`.
std::string printable(std::string_view text);

}  // namespace lockstep::cache_sim
