// What every written result needs: the file itself, the day, and the commit of the program.
#pragma once

#include <string>

#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

/// The day, for `timing`.
std::string today();

/// The commit of the checkout that the program runs in, `unknown` outside the lockstep script.
std::string commit();

/// Writes beside the file and renames, so that nothing is half-written.
Result<void> write_file(const std::string& path, const std::string& content);

}  // namespace lockstep::cache_sim
