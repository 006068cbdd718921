// Writes result files, and gives the date and the commit that these files carry.
#pragma once

#include <string>

#include "reference/base/result.hpp"

namespace lockstep::cache_sim {

/// Today in UTC, or the day of SOURCE_DATE_EPOCH (reproducible-builds.org) where that is set.
std::string today();

/// The commit of the checkout that the program runs in; `unknown` outside the lockstep script.
std::string commit();

/// Writes a temporary file of a unique name beside `path` and renames it, so that no file is ever
/// half-written, and of several writers the last one wins. A symbolic link stays; the file that it
/// leads to is written. A device, a pipe, standard output and standard error are written directly.
/// The error names the path and the reason.
Result<void> write_file(const std::string& path, const std::string& content);

}  // namespace lockstep::cache_sim
